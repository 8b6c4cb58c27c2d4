//! Tokenizers of synthetic models.
//!
//! There are two kinds, and both can encode all byte strings: the `SentencePiece` tokenizer of Llama (`<unk>`, `<s>`,
//! `</s>`, 256 byte tokens, ASCII, letter n-grams) and the byte-level BPE tokenizer of GPT-2 (256 bytes, letter n-grams
//! with their merges, `<|bos|>` and `<|eos|>` at the end). N-grams of letters, in the order of letter frequency in
//! English, fill a vocabulary of any size.

use std::collections::BTreeSet;

use hearth_profiles::gguf::{Array, Value};
use hearth_profiles::model::Architecture;

use super::SynthError;
use crate::tokenizer::token_type::{BYTE, CONTROL, NORMAL, UNKNOWN};
use crate::tokenizer::visible_char;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TokenizerKind {
    /// The `SentencePiece` tokenizer of Llama.
    #[default]
    Spm,
    /// Byte-level BPE of GPT-2, with the pre-tokenizer of Qwen 2 for Qwen models and of Llama 3 for other models.
    Bpe,
}

const MIN_VOCABULARY: u32 = 400;

/// The letters in the order of their frequency in English.
const LETTERS: &str = "etaoinshrdlcumwfgypbvkjxqz";
/// The character that represents a space in `SentencePiece`.
const SPACE: char = '\u{2581}';

impl TokenizerKind {
    /// Returns the kind of tokenizer that published models of `architecture` have; for Llama, the kind of Llama 1 and
    /// 2.
    pub fn for_architecture(architecture: Architecture) -> TokenizerKind {
        if architecture.spec().has_bpe_tokenizer { TokenizerKind::Bpe } else { TokenizerKind::Spm }
    }

    /// Returns the GGUF metadata of a tokenizer with `vocabulary` tokens.
    pub(super) fn metadata_keys(
        self,
        vocabulary: u32,
        architecture: Architecture,
    ) -> Result<Vec<(&'static str, Value)>, SynthError> {
        let keys = match self {
            _ if vocabulary < MIN_VOCABULARY => None,
            TokenizerKind::Spm => spm(vocabulary as usize),
            TokenizerKind::Bpe => bpe(vocabulary as usize, architecture),
        };
        keys.ok_or(SynthError::Vocabulary { found: vocabulary, min: MIN_VOCABULARY })
    }
}

/// Returns all strings of two, then three, then four letters, in the order of [`LETTERS`].
fn ngrams() -> impl Iterator<Item = String> {
    let letters: Vec<char> = LETTERS.chars().collect();
    (2..=4u32).flat_map(move |length| {
        let letters = letters.clone();
        (0..letters.len().pow(length)).map(move |number| {
            let letter = |digit| letters[number / letters.len().pow(digit) % letters.len()];
            (0..length).rev().map(letter).collect()
        })
    })
}

/// Returns the metadata of a `SentencePiece` tokenizer of `vocabulary` tokens; `None` if there are too few n-grams.
fn spm(vocabulary: usize) -> Option<Vec<(&'static str, Value)>> {
    let mut tokens = vec!["<unk>".to_owned(), "<s>".to_owned(), "</s>".to_owned()];
    let mut types = vec![UNKNOWN, CONTROL, CONTROL];
    tokens.extend((0..=255u8).map(|byte| format!("<0x{byte:02X}>")));
    types.extend([BYTE; 256]);
    let special = tokens.len();
    let ascii = (33..127u8).map(|byte| char::from(byte).to_string());
    let words = ('a'..='z').map(|letter| format!("{SPACE}{letter}"));
    tokens.extend([SPACE.to_string()].into_iter().chain(ascii).chain(words));
    let mut seen: BTreeSet<String> = tokens[special..].iter().cloned().collect();
    for ngram in ngrams() {
        if tokens.len() >= vocabulary {
            break;
        }
        for token in [format!("{SPACE}{ngram}"), ngram].into_iter().rev() {
            if seen.insert(token.clone()) {
                tokens.push(token);
            }
        }
    }
    tokens.truncate(vocabulary);
    if tokens.len() < vocabulary {
        return None;
    }
    types.resize(vocabulary, NORMAL);
    // Scores decrease with the id, so that earlier tokens are merged first.
    let scores = (0..vocabulary).map(|at| -(at.saturating_sub(special) as f32)).map(|score| score + 0.0);
    Some(vec![
        ("tokenizer.ggml.model", Value::Str("llama".into())),
        ("tokenizer.ggml.pre", Value::Str("default".into())),
        ("tokenizer.ggml.scores", Value::Array(Array::F32(scores.collect()))),
        ("tokenizer.ggml.tokens", Value::Array(Array::Str(tokens))),
        ("tokenizer.ggml.token_type", Value::Array(Array::I32(types))),
        ("tokenizer.ggml.bos_token_id", Value::U32(1)),
        ("tokenizer.ggml.eos_token_id", Value::U32(2)),
        ("tokenizer.ggml.unknown_token_id", Value::U32(0)),
        ("tokenizer.ggml.add_bos_token", Value::Bool(true)),
        ("tokenizer.ggml.add_eos_token", Value::Bool(false)),
    ])
}

/// Returns the metadata of a byte-level BPE tokenizer of `vocabulary` tokens; `None` if there are too few n-grams.
fn bpe(vocabulary: usize, architecture: Architecture) -> Option<Vec<(&'static str, Value)>> {
    let mut tokens: Vec<String> = (0..=255).map(|byte| visible_char(byte).to_string()).collect();
    let space = tokens[32].clone();
    let mut seen: BTreeSet<String> = tokens.iter().cloned().collect();
    let mut merges = Vec::new();
    let normal = vocabulary - 2;
    let mut add = |left: &str, right: &str, tokens: &mut Vec<String>| {
        let token = format!("{left}{right}");
        let both = seen.contains(left) && seen.contains(right);
        if both && tokens.len() < normal && seen.insert(token.clone()) {
            tokens.push(token);
            merges.push(format!("{left} {right}"));
        }
    };
    for letter in LETTERS.chars() {
        add(&space, &letter.to_string(), &mut tokens);
    }
    for ngram in ngrams() {
        if tokens.len() >= normal {
            break;
        }
        let (left, right) = ngram.split_at(ngram.len() - 1);
        add(left, right, &mut tokens);
        add(&format!("{space}{left}"), right, &mut tokens);
    }
    if tokens.len() < normal {
        return None;
    }
    tokens.extend(["<|bos|>".to_owned(), "<|eos|>".to_owned()]);
    let qwen = TokenizerKind::for_architecture(architecture) == TokenizerKind::Bpe;
    let pre = if qwen { "qwen2" } else { "llama-bpe" };
    let mut types = vec![NORMAL; normal];
    types.extend([CONTROL, CONTROL]);
    Some(vec![
        ("tokenizer.ggml.model", Value::Str("gpt2".into())),
        ("tokenizer.ggml.pre", Value::Str(pre.into())),
        ("tokenizer.ggml.tokens", Value::Array(Array::Str(tokens))),
        ("tokenizer.ggml.merges", Value::Array(Array::Str(merges))),
        ("tokenizer.ggml.token_type", Value::Array(Array::I32(types))),
        ("tokenizer.ggml.bos_token_id", Value::U32(vocabulary as u32 - 2)),
        ("tokenizer.ggml.eos_token_id", Value::U32(vocabulary as u32 - 1)),
        ("tokenizer.ggml.add_bos_token", Value::Bool(!qwen)),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(tokenizer: TokenizerKind, vocabulary: u32) -> Vec<String> {
        let keys = tokenizer.metadata_keys(vocabulary, Architecture::Llama).unwrap();
        let found = keys.into_iter().find(|(key, _)| *key == "tokenizer.ggml.tokens");
        let Some((_, Value::Array(Array::Str(tokens)))) = found else { panic!("no tokens") };
        tokens
    }

    #[test]
    fn a_vocabulary_has_the_requested_size_and_no_duplicates() {
        for tokenizer in [TokenizerKind::Spm, TokenizerKind::Bpe] {
            for size in [400, 4096, 128_256] {
                let list = tokens(tokenizer, size);
                assert_eq!(list.len(), size as usize);
                assert_eq!(list.iter().collect::<BTreeSet<_>>().len(), size as usize, "{tokenizer:?} {size}");
            }
            for size in [399, 2_000_000] {
                let keys = tokenizer.metadata_keys(size, Architecture::Llama);
                assert!(matches!(keys, Err(SynthError::Vocabulary { .. })), "{tokenizer:?} {size}");
            }
        }
    }

    #[test]
    fn frequent_letters_come_first() {
        let list = tokens(TokenizerKind::Spm, 4096);
        // 259 specials, the space, 94 ASCII characters, 26 words of one letter.
        let wanted = ["<unk>", "<0xFF>", "\u{2581}", "ee", "\u{2581}ee"];
        assert_eq!([0, 258, 259, 380, 381].map(|id| list[id].as_str()), wanted);
        let list = tokens(TokenizerKind::Bpe, 4096);
        assert_eq!([65, 256, 282, 4095].map(|id| list[id].as_str()), ["A", "\u{120}e", "ee", "<|eos|>"]);
    }
}
