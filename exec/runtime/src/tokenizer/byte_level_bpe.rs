//! The byte-level BPE tokenizer of GPT-2 and its successors.
//!
//! Regular expressions split the text into words ([`super::pre_tokenizer`]), each byte of a word is mapped to a visible
//! character (GPT-2's table), and adjacent symbols are merged in the order of the merge list. The `tokenizers` crate
//! splits and merges.

use std::collections::BTreeSet;

use hearth_profiles::gguf::Metadata;
use tokenizers::models::bpe::BPE;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{
    Model, OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer as _, SplitDelimiterBehavior,
};

use super::pre_tokenizer::PreTokenizer;
use super::{CONVERT, invalid, required};
use crate::error::ExecError;

#[derive(Debug)]
pub(super) struct ByteLevelBpe {
    pub(super) pre_tokenizer: PreTokenizer,
    splits: Vec<Split>,
    to_visible: ByteLevel,
    merges: BPE,
}

impl ByteLevelBpe {
    /// Reads the tokenizer. Tokens for which `is_piece` returns false are not in the vocabulary of the merges, so that
    /// text does not become a control token.
    pub(super) fn new(
        metadata: &Metadata,
        texts: &[String],
        is_piece: impl Fn(usize) -> bool,
    ) -> Result<ByteLevelBpe, ExecError> {
        let name = metadata.get_str("tokenizer.ggml.pre")?.unwrap_or("default");
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
        let short: BTreeSet<&str> =
            pieces().map(|(text, _)| text.as_str()).filter(|text| text.len() <= 2).collect();
        for byte in 0..=255u8 {
            let visible = visible_char(byte).to_string();
            if !short.contains(visible.as_str()) {
                let what = format!("the vocabulary has no token for byte {byte:#04x} (`{visible}`)");
                return Err(invalid(what, CONVERT));
            }
        }
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
            .build()
            .map_err(broken)?;
        let split = |pattern: &&str| {
            let pattern = SplitPattern::Regex((*pattern).to_owned());
            Split::new(pattern, SplitDelimiterBehavior::Isolated, false).map_err(broken)
        };
        let splits = pre_tokenizer.patterns.iter().map(split).collect::<Result<_, _>>()?;
        Ok(ByteLevelBpe { pre_tokenizer, splits, to_visible: ByteLevel::new(false, false, false), merges })
    }

    pub(super) fn encode(&self, text: &str, ids: &mut Vec<u32>) -> Result<(), ExecError> {
        let failed = |error| invalid(format!("the text cannot be tokenized: {error}"), "shorten the text");
        let mut words = PreTokenizedString::from(text);
        for split in &self.splits {
            split.pre_tokenize(&mut words).map_err(failed)?;
        }
        self.to_visible.pre_tokenize(&mut words).map_err(failed)?;
        for (word, ..) in words.get_splits(OffsetReferential::Original, OffsetType::Byte) {
            ids.extend(self.merges.tokenize(word).map_err(failed)?.iter().map(|token| token.id));
        }
        Ok(())
    }
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
