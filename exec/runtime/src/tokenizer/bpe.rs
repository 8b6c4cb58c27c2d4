//! The BPE tokenizer of GPT-2 and its successors.
//!
//! Regular expressions split the text into words ([`super::pre_tokenizer`]), and adjacent symbols of a word are merged
//! in the order of the merge list. The symbols are bytes, each as a visible character (GPT-2's table), or the characters
//! of the text. The `tokenizers` crate splits and merges.
//!
//! A vocabulary need not have a token for every byte. Only a text that needs a missing one cannot be encoded.
//!
//! Deviation: llama.cpp omits the bytes without a token, so that the model sees another text than the user wrote.

use hearth_profiles::gguf::Metadata;
use tokenizers::models::bpe::BPE;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{
    Model, OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer as _, SplitDelimiterBehavior,
};

use super::pre_tokenizer::{PreTokenizer, Symbols};
use super::{CONVERT, SPACE, invalid, required};
use crate::error::ExecError;

#[derive(Debug)]
pub(super) struct Bpe {
    pub(super) pre_tokenizer: PreTokenizer,
    splits: Vec<Split>,
    to_visible: ByteLevel,
    merges: BPE,
}

impl Bpe {
    /// Reads the tokenizer, whose name in the model file is `model`. Tokens for which `is_piece` returns false are not in
    /// the vocabulary of the merges, so that text does not become a control token.
    pub(super) fn new(
        metadata: &Metadata,
        model: &str,
        texts: &[String],
        is_piece: impl Fn(usize) -> bool,
    ) -> Result<Bpe, ExecError> {
        // Files of Gemma 4 need not name the pre-tokenizer.
        let name = match model {
            "gemma4" => model,
            _ => metadata.get_str("tokenizer.ggml.pre")?.unwrap_or("default"),
        };
        let pre_tokenizer = PreTokenizer::by_name(name).ok_or_else(|| ExecError::PreTokenizer {
            found: name.to_owned(),
            known: PreTokenizer::names(),
        })?;
        let pairs = required("tokenizer.ggml.merges", |key| metadata.get_str_array(key))?;
        let pair = |line: &String| {
            let bad = || invalid(format!("merge `{line}` does not have two tokens"), CONVERT);
            // A token may itself begin with a space, so the separator is not at the first byte.
            let at = line.char_indices().skip(1).find(|&(_, c)| c == ' ').ok_or_else(bad)?.0;
            Ok((line[..at].to_owned(), line[at + 1..].to_owned()))
        };
        let pairs = pairs.iter().map(pair).collect::<Result<Vec<_>, ExecError>>()?;
        let pieces = || texts.iter().zip(0u32..).filter(|&(_, id)| is_piece(id as usize));
        // The `tokenizers` crate panics if the result of a merge is longer than every token.
        let longest = pieces().map(|(text, _)| text.len()).max().unwrap_or(0);
        if let Some((left, right)) = pairs.iter().find(|(left, right)| left.len() + right.len() > longest) {
            return Err(invalid(format!("there is no token for the merge `{left} {right}`"), CONVERT));
        }
        let broken = |error| invalid(format!("the merges do not match the tokens: {error}"), CONVERT);
        let vocabulary = pieces().map(|(text, id)| (text.clone(), id)).collect();
        let merges = BPE::builder()
            .vocab_and_merges::<tokenizers::models::bpe::Vocab>(vocabulary, pairs)
            .ignore_merges(pre_tokenizer.ignore_merges)
            .byte_fallback(pre_tokenizer.symbols == Symbols::Characters)
            .build()
            .map_err(broken)?;
        let split = |pattern: &&str| {
            let pattern = SplitPattern::Regex((*pattern).to_owned());
            Split::new(pattern, SplitDelimiterBehavior::Isolated, false).map_err(broken)
        };
        let splits = pre_tokenizer.patterns.iter().map(split).collect::<Result<_, _>>()?;
        Ok(Bpe { pre_tokenizer, splits, to_visible: ByteLevel::new(false, false, false), merges })
    }

    pub(super) fn encode(&self, text: &str, ids: &mut Vec<u32>) -> Result<(), ExecError> {
        let spaced;
        let text = match self.pre_tokenizer.symbols {
            Symbols::Bytes => text,
            Symbols::Characters => {
                spaced = text.replace(' ', SPACE);
                &spaced
            }
        };
        let mut words = PreTokenizedString::from(text);
        for split in &self.splits {
            split.pre_tokenize(&mut words).map_err(|error| failed(&error))?;
        }
        if self.pre_tokenizer.symbols == Symbols::Bytes {
            self.to_visible.pre_tokenize(&mut words).map_err(|error| failed(&error))?;
        }
        for (word, ..) in words.get_splits(OffsetReferential::Original, OffsetType::Byte) {
            self.encode_word(word, ids)?;
        }
        Ok(())
    }

    fn encode_word(&self, word: &str, ids: &mut Vec<u32>) -> Result<(), ExecError> {
        // No merge has a line end, so the merges do not give the tokens of several line ends.
        if self.pre_tokenizer.symbols == Symbols::Characters
            && word.bytes().all(|byte| byte == b'\n')
            && let Some(id) = self.merges.token_to_id(word)
        {
            ids.push(id);
            return Ok(());
        }
        let tokens = self.merges.tokenize(word).map_err(|error| failed(&error))?;
        // The `tokenizers` crate omits characters that have no token.
        if tokens.last().map_or(0, |token| token.offsets.1) < word.len() {
            let has_token = |text: &str| self.merges.token_to_id(text).is_some();
            let has_bytes = |text: &str| {
                self.pre_tokenizer.symbols == Symbols::Characters
                    && text.bytes().all(|byte| has_token(&format!("<0x{byte:02X}>")))
            };
            let is_missing = |text: &String| !has_token(text) && !has_bytes(text);
            let missing = word.chars().map(String::from).find(is_missing).unwrap_or_default();
            let missing = match (self.pre_tokenizer.symbols, &token_bytes(&missing)[..]) {
                (Symbols::Bytes, [byte]) => format!("the byte {byte:#04x}"),
                _ => format!("`{}`", missing.replace(SPACE, " ").escape_debug()),
            };
            let what = format!("the vocabulary has no token for {missing}");
            return Err(invalid(what, "remove this character from the text, or use another model"));
        }
        ids.extend(tokens.iter().map(|token| token.id));
        Ok(())
    }
}

fn failed(error: &tokenizers::Error) -> ExecError {
    invalid(format!("the text cannot be tokenized: {error}"), "shorten the text")
}

/// Returns the visible character that represents a byte in GPT-2's table: the Latin-1 character of the byte if it is
/// printable, otherwise a character from U+0100 on.
pub(crate) fn visible_char(byte: u8) -> char {
    let itself = |byte: u8| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    if itself(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|&other| !itself(other)).count();
    char::from_u32(256 + before as u32).expect("far below the surrogates")
}

/// Returns the bytes of the token with the text `text`, in which each visible character stands for a byte
/// ([`visible_char`]). A character that is not in GPT-2's table is encoded as UTF-8.
pub(super) fn token_bytes(text: &str) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(text.len());
    for c in text.chars() {
        match c as u32 {
            33..=126 | 161..=172 | 174..=255 => bytes.push(c as u8),
            // The bytes that are not printable, in ascending order: 0 to 32, 127 to 160, and 173.
            code @ 256..=288 => bytes.push((code - 256) as u8),
            code @ 289..=322 => bytes.push((code - 289 + 127) as u8),
            323 => bytes.push(173),
            _ => bytes.extend(c.to_string().as_bytes()),
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_visible_and_comes_back() {
        for byte in 0..=255u8 {
            assert_eq!(token_bytes(&visible_char(byte).to_string()), [byte], "byte {byte}");
        }
        // The well-known characters for space, line feed and soft hyphen.
        assert_eq!((visible_char(b' '), visible_char(b'\n'), visible_char(0xad)), ('Ġ', 'Ċ', 'Ń'));
    }
}
