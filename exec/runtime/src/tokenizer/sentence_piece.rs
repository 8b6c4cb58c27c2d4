//! `SentencePiece` in its BPE mode.
//!
//! Spaces become `▁`, the text is cut into characters, and again and again the neighbours whose join is the
//! piece with the highest score are joined (the leftmost of equals), until no join is a piece. What is no
//! piece is written as byte tokens. Source: Kudo and Richardson 2018, BPE mode; a text at its beginning, or
//! after a special token, gets a space in front where the model was trained so.
//!
//! Deviation: llama.cpp also joins pieces to a control token where their joins are pieces; here none is, so that text
//! of a user cannot end a turn.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BinaryHeap};

use hearth_profiles::gguf::Metadata;

use super::{CONVERT, invalid};
use crate::error::ExecError;

const SPACE: char = '\u{2581}';

#[derive(Debug)]
pub(super) struct SentencePiece {
    ids: BTreeMap<String, u32>,
    scores: Vec<f32>,
    byte_tokens: [Option<u32>; 256],
    unknown: Option<u32>,
    add_space: bool,
}

/// Two neighbours whose join is a piece.
struct Join {
    score: f32,
    left: usize,
    right: usize,
    /// Bytes of both when it was found; it is stale if they have changed.
    length: usize,
}

impl PartialEq for Join {
    fn eq(&self, other: &Join) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}
impl Eq for Join {}
impl PartialOrd for Join {
    fn partial_cmp(&self, other: &Join) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Join {
    fn cmp(&self, other: &Join) -> Ordering {
        self.score.total_cmp(&other.score).then_with(|| other.left.cmp(&self.left))
    }
}

/// A run of the text; joined into its left neighbour it has length zero.
#[derive(Clone, Copy)]
struct Symbol {
    start: usize,
    length: usize,
    before: Option<usize>,
    after: Option<usize>,
}

impl SentencePiece {
    /// Encoding only returns tokens for which `is_piece` holds: merges must not produce a control token.
    pub(super) fn new(
        metadata: &Metadata,
        texts: &[String],
        is_piece: impl Fn(usize) -> bool,
    ) -> Result<SentencePiece, ExecError> {
        let scores = metadata.get_f32_array("tokenizer.ggml.scores")?;
        let scores = scores.ok_or_else(|| invalid("key `tokenizer.ggml.scores` is missing", CONVERT))?;
        if scores.len() != texts.len() {
            return Err(invalid("`tokenizer.ggml.scores` is not as long as the token list", CONVERT));
        }
        let mut ids = BTreeMap::new();
        for (text, id) in texts.iter().zip(0u32..).filter(|&(_, id)| is_piece(id as usize)) {
            ids.entry(text.clone()).or_insert(id);
        }
        let byte_tokens = std::array::from_fn(|byte| ids.get(&format!("<0x{byte:02X}>")).copied());
        let unknown = metadata.get_u32("tokenizer.ggml.unknown_token_id")?;
        if unknown.is_none_or(|id| id as usize >= texts.len()) && byte_tokens.contains(&None) {
            return Err(invalid("there are neither byte tokens nor an unknown token", CONVERT));
        }
        let add_space = metadata.get_bool("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
        Ok(SentencePiece { ids, scores: scores.to_vec(), byte_tokens, unknown, add_space })
    }

    pub(super) fn adds_space(&self) -> bool {
        self.add_space
    }

    /// `begins`: the text is at the beginning or follows a special token.
    #[allow(clippy::unnecessary_wraps)] // as its sibling for BPE
    pub(super) fn encode(&self, text: &str, begins: bool, ids: &mut Vec<u32>) -> Result<(), ExecError> {
        let mut marked = String::with_capacity(text.len() + 3);
        if begins && self.add_space {
            marked.push(SPACE);
        }
        marked.extend(text.chars().map(|c| if c == ' ' { SPACE } else { c }));
        let symbols = self.join_all(&marked);
        let mut at = (!symbols.is_empty()).then_some(0);
        while let Some(index) = at {
            let symbol = symbols[index];
            let piece = &marked[symbol.start..symbol.start + symbol.length];
            match self.ids.get(piece) {
                Some(&id) => ids.push(id),
                None => {
                    ids.extend(piece.bytes().filter_map(|b| self.byte_tokens[b as usize].or(self.unknown)));
                }
            }
            at = symbol.after;
        }
        Ok(())
    }

    fn join_all(&self, text: &str) -> Vec<Symbol> {
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
        let mut joins = BinaryHeap::new();
        for right in 1..symbols.len() {
            joins.extend(self.join(text, &symbols, right - 1, right));
        }
        while let Some(Join { left, right, length, .. }) = joins.pop() {
            let (first, second) = (symbols[left], symbols[right]);
            if first.length == 0 || second.length == 0 || first.length + second.length != length {
                continue;
            }
            symbols[left] = Symbol { length, after: second.after, ..first };
            symbols[right].length = 0;
            if let Some(after) = second.after {
                symbols[after].before = Some(left);
                joins.extend(self.join(text, &symbols, left, after));
            }
            if let Some(before) = first.before {
                joins.extend(self.join(text, &symbols, before, left));
            }
        }
        symbols
    }

    fn join(&self, text: &str, symbols: &[Symbol], left: usize, right: usize) -> Option<Join> {
        let (start, length) = (symbols[left].start, symbols[left].length + symbols[right].length);
        let id = *self.ids.get(&text[start..start + length])?;
        Some(Join { score: self.scores[id as usize], left, right, length })
    }
}

/// The bytes that a token stands for.
pub(super) fn token_bytes(text: &str, is_byte: bool) -> Vec<u8> {
    let hexadecimal = text.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    match hexadecimal.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
        Some(byte) if is_byte => vec![byte],
        _ => text.replace(SPACE, " ").into_bytes(),
    }
}
