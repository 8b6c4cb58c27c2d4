//! Special tokens, which are recognised by their text before tokenization.
//!
//! As in llama.cpp, a text is split at the longest special token first, then the remaining parts at the next one, and
//! so on. Only tokens that occur in the text are tried. A sorted list finds them in one pass over the text, so that
//! vocabularies with very many special tokens are fast.
//!
//! Not here: which tokens are control tokens. [`super::Tokenizer::new`] decides that.

use std::collections::{BTreeMap, BTreeSet};

use super::token_type;

/// A token that is recognised by its text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SpecialToken {
    pub(super) text: String,
    pub(super) id: u32,
    /// Whether the token is recognised in any text, including user input.
    pub(super) anywhere: bool,
}

/// All special tokens of a vocabulary.
#[derive(Debug)]
pub(super) struct SpecialTokens {
    /// The tokens, longest text first.
    all: Vec<SpecialToken>,
    /// Indices of `all`, sorted by text.
    sorted: Vec<usize>,
    /// Indices of `all`, by token id.
    by_id: BTreeMap<u32, usize>,
    /// The first characters of all control tokens.
    first: BTreeSet<char>,
}

impl SpecialTokens {
    pub(super) fn new(texts: &[String], kind_of: impl Fn(usize) -> i32) -> SpecialTokens {
        let mut all: Vec<SpecialToken> = Vec::new();
        for (at, text) in texts.iter().enumerate().filter(|(_, text)| !text.is_empty()) {
            let anywhere = match kind_of(at) {
                token_type::USER_DEFINED => true,
                token_type::CONTROL | token_type::UNKNOWN => false,
                _ => continue,
            };
            all.push(SpecialToken { text: text.clone(), id: at as u32, anywhere });
        }
        all.sort_by(|a, b| b.text.len().cmp(&a.text.len()).then_with(|| a.text.cmp(&b.text)));
        let mut sorted: Vec<usize> = (0..all.len()).collect();
        sorted.sort_by(|&a, &b| all[a].text.cmp(&all[b].text));
        let by_id = all.iter().enumerate().map(|(at, special)| (special.id, at)).collect();
        let control = all.iter().filter(|special| !special.anywhere);
        let first = control.filter_map(|special| special.text.chars().next()).collect();
        SpecialTokens { all, sorted, by_id, first }
    }

    /// Returns the text of the special token with this id.
    pub(super) fn text_of(&self, id: u32) -> Option<&str> {
        self.by_id.get(&id).map(|&at| self.all[at].text.as_str())
    }

    /// Whether a control token begins with `c`.
    pub(super) fn begins_control(&self, c: char) -> bool {
        self.first.contains(&c)
    }

    /// Whether `text` contains a control token.
    pub(super) fn has_control(&self, text: &str) -> bool {
        self.occurring(text).into_iter().any(|at| !self.all[at].anywhere)
    }

    /// Whether `rest` begins with a control token.
    pub(super) fn control_begins(&self, rest: &str) -> bool {
        let mut begins = false;
        self.matches_at_start(rest.as_bytes(), &mut |at| begins |= !self.all[at].anywhere);
        begins
    }

    /// Whether a control token begins with `text`.
    pub(super) fn begins_with(&self, text: &str) -> bool {
        self.control().any(|control| control.starts_with(text))
    }

    /// Whether `text` is part of a control token, or begins with the end of one.
    pub(super) fn completes(&self, text: &str) -> bool {
        let ends = |control: &str| {
            let inner = control.char_indices().skip(1).map(|(at, _)| &control[at..]);
            inner.into_iter().any(|end| text.starts_with(end))
        };
        !text.is_empty() && self.control().any(|control| control.contains(text) || ends(control))
    }

    /// Returns the texts of all control tokens.
    fn control(&self) -> impl Iterator<Item = &str> {
        self.all.iter().filter(|special| !special.anywhere).map(|special| special.text.as_str())
    }

    /// Calls `found` with the index of each token with whose text `bytes` begin.
    fn matches_at_start(&self, bytes: &[u8], found: &mut impl FnMut(usize)) {
        let mut range = self.sorted.as_slice();
        let text = |&at: &usize| self.all[at].text.as_bytes();
        for (depth, &byte) in bytes.iter().enumerate() {
            // Shorter texts are sorted first, so tokens that match are at the front.
            let from = range.partition_point(|at| text(at).get(depth).is_none_or(|&other| other < byte));
            let to = range.partition_point(|at| text(at).get(depth).is_none_or(|&other| other <= byte));
            range = &range[from..to];
            for &at in range.iter().take_while(|at| text(at).len() == depth + 1) {
                found(at);
            }
            if range.is_empty() {
                return;
            }
        }
    }

    /// Returns the indices of the tokens that occur in `text`, longest first.
    fn occurring(&self, text: &str) -> BTreeSet<usize> {
        let mut indices = BTreeSet::new();
        for (at, _) in text.char_indices() {
            self.matches_at_start(&text.as_bytes()[at..], &mut |index| {
                indices.insert(index);
            });
        }
        indices
    }

    /// Splits `text` at all tokens for which `wanted` returns true.
    pub(super) fn partition<'a>(
        &self,
        text: &'a str,
        wanted: impl Fn(&SpecialToken) -> bool,
    ) -> Vec<Fragment<'a>> {
        let mut fragments = vec![Fragment::Text(text)];
        for at in self.occurring(text) {
            let special = &self.all[at];
            if wanted(special) {
                let split = |part: Fragment<'a>| part.split(&special.text, special.id);
                fragments = fragments.into_iter().flat_map(split).collect();
            }
        }
        fragments
    }
}

/// A part of a text: a special token, or text between special tokens.
pub(super) enum Fragment<'a> {
    Text(&'a str),
    Token(u32),
}

impl<'a> Fragment<'a> {
    pub(super) fn is_empty(&self) -> bool {
        matches!(self, Fragment::Text(""))
    }

    /// Splits a text at a special token.
    fn split(self, special: &str, id: u32) -> Vec<Fragment<'a>> {
        let Fragment::Text(text) = self else { return vec![self] };
        let mut parts = Vec::new();
        for (index, part) in text.split(special).enumerate() {
            if index > 0 {
                parts.push(Fragment::Token(id));
            }
            parts.push(Fragment::Text(part));
        }
        parts
    }
}
