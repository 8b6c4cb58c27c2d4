//! The `SentencePiece` tokenizer in its BPE mode.
//!
//! Spaces are replaced by `▁`, and the text is split into characters. Then the two adjacent symbols whose concatenation
//! is the piece with the highest score are merged (the leftmost pair if scores are equal), until no concatenation is a
//! piece. A symbol that is not a piece is encoded as byte tokens. Source: Kudo and Richardson 2018, BPE mode. If the
//! model was trained in this way, a space is also added at the beginning of the text and after special tokens.
//!
//! Deviation: llama.cpp also merges symbols to control tokens. Here control tokens are never the result of a merge,
//! so that the text of a user cannot end a turn.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use hearth_profiles::gguf::Metadata;

use super::{CONVERT, SPACE, invalid, required};
use crate::error::ExecError;

#[derive(Debug)]
pub(super) struct SentencePiece {
    ids: BTreeMap<String, u32>,
    scores: Vec<f32>,
    byte_tokens: [Option<u32>; 256],
    unknown: Option<u32>,
    /// Whether a space is added at the beginning of the text and after special tokens.
    pub(super) add_space: bool,
}

/// A candidate merge: two adjacent symbols whose concatenation is a piece. The greatest candidate is merged first.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Merge {
    /// The score of the concatenated piece, as an integer that sorts in the same order.
    score: i32,
    /// The index of the left symbol, reversed so that the leftmost of several candidates with equal scores comes first.
    left: Reverse<usize>,
    right: usize,
    /// The total length of both symbols in bytes. If another merge has changed this length, the candidate is outdated.
    length: usize,
}

/// A part of the text, with links to its neighbours. After a merge into its left neighbour, its length is zero.
#[derive(Clone, Copy)]
struct Symbol {
    start: usize,
    length: usize,
    before: Option<usize>,
    after: Option<usize>,
}

impl SentencePiece {
    /// Reads the tokenizer from the metadata of a model file. [`Self::encode`] returns only tokens for which `is_piece`
    /// returns true, so that merges do not produce control tokens.
    pub(super) fn new(
        metadata: &Metadata,
        texts: &[String],
        is_piece: impl Fn(usize) -> bool,
    ) -> Result<SentencePiece, ExecError> {
        let scores = required("tokenizer.ggml.scores", |key| metadata.get_f32_array(key))?;
        if scores.len() != texts.len() {
            let what = "`tokenizer.ggml.scores` and `tokenizer.ggml.tokens` have different lengths";
            return Err(invalid(what, CONVERT));
        }
        let mut ids = BTreeMap::new();
        for (text, id) in texts.iter().zip(0u32..).filter(|&(_, id)| is_piece(id as usize)) {
            ids.entry(text.clone()).or_insert(id);
        }
        let byte_tokens = std::array::from_fn(|byte| ids.get(&format!("<0x{byte:02X}>")).copied());
        let unknown = metadata.get_u32("tokenizer.ggml.unknown_token_id")?;
        if unknown.is_none_or(|id| id as usize >= texts.len()) && byte_tokens.contains(&None) {
            return Err(invalid("the vocabulary has neither all byte tokens nor an unknown token", CONVERT));
        }
        let add_space = metadata.get_bool("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
        Ok(SentencePiece { ids, scores: scores.to_vec(), byte_tokens, unknown, add_space })
    }

    /// Appends the tokens of `text` to `ids`. `is_start` is true if `text` begins the input or follows a special token.
    pub(super) fn encode(&self, text: &str, is_start: bool, ids: &mut Vec<u32>) {
        let mut marked = String::with_capacity(text.len() + 3);
        if is_start && self.add_space {
            marked.push_str(SPACE);
        }
        marked.push_str(&text.replace(' ', SPACE));
        let symbols = self.merge_all(&marked);
        let mut at = (!symbols.is_empty()).then_some(0);
        while let Some(index) = at {
            let symbol = symbols[index];
            let piece = &marked[symbol.start..symbol.start + symbol.length];
            let byte_tokens = piece.bytes().filter_map(|b| self.byte_tokens[b as usize].or(self.unknown));
            match self.ids.get(piece) {
                Some(&id) => ids.push(id),
                None => ids.extend(byte_tokens),
            }
            at = symbol.after;
        }
    }

    fn merge_all(&self, text: &str) -> Vec<Symbol> {
        let count = text.chars().count();
        let mut symbols: Vec<Symbol> = text
            .char_indices()
            .enumerate()
            .map(|(index, (start, c))| Symbol {
                start,
                length: c.len_utf8(),
                before: index.checked_sub(1),
                after: (index + 1 < count).then_some(index + 1),
            })
            .collect();
        let mut merges = BinaryHeap::new();
        for right in 1..symbols.len() {
            merges.extend(self.candidate(text, &symbols, right - 1, right));
        }
        while let Some(Merge { left: Reverse(left), right, length, .. }) = merges.pop() {
            let (first, second) = (symbols[left], symbols[right]);
            if first.length == 0 || second.length == 0 || first.length + second.length != length {
                continue;
            }
            symbols[left] = Symbol { length, after: second.after, ..first };
            symbols[right].length = 0;
            if let Some(after) = second.after {
                symbols[after].before = Some(left);
                merges.extend(self.candidate(text, &symbols, left, after));
            }
            if let Some(before) = first.before {
                merges.extend(self.candidate(text, &symbols, before, left));
            }
        }
        symbols
    }

    /// Returns the merge of two adjacent symbols if their concatenation is a piece.
    fn candidate(&self, text: &str, symbols: &[Symbol], left: usize, right: usize) -> Option<Merge> {
        let (start, length) = (symbols[left].start, symbols[left].length + symbols[right].length);
        let id = *self.ids.get(&text[start..start + length])?;
        // As in `f32::total_cmp`: the bits of negative numbers are in descending order, so all bits but the sign are
        // inverted.
        let bits = self.scores[id as usize].to_bits().cast_signed();
        let score = bits ^ ((bits >> 31).cast_unsigned() >> 1).cast_signed();
        Some(Merge { score, left: Reverse(left), right, length })
    }
}

/// Returns the bytes of the token with the text `text`; `is_byte` is true for byte tokens such as `<0x0A>`.
pub(super) fn token_bytes(text: &str, is_byte: bool) -> Vec<u8> {
    let hexadecimal = text.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    match hexadecimal.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
        Some(byte) if is_byte => vec![byte],
        _ => text.replace(SPACE, " ").into_bytes(),
    }
}
