//! Special tokens, which are recognised as a whole in a text.
//!
//! As in llama.cpp the longest text comes first: it cuts the text, then the next cuts what is left. Tokens whose text
//! does not occur are skipped, which a sorted list finds in one walk over the text, so that a vocabulary of very
//! many such tokens costs little.
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

/// All of a vocabulary.
#[derive(Debug)]
pub(super) struct SpecialTokens {
    /// Longest first.
    all: Vec<SpecialToken>,
    /// Numbers in `all`, by text.
    sorted: Vec<usize>,
    by_id: BTreeMap<u32, usize>,
    /// Characters with which a control token begins.
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

    pub(super) fn text_of(&self, id: u32) -> Option<&str> {
        self.by_id.get(&id).map(|&at| self.all[at].text.as_str())
    }

    /// Whether a control token begins with `c`.
    pub(super) fn begins_control(&self, c: char) -> bool {
        self.first.contains(&c)
    }

    /// Whether `text` has a control token in it.
    pub(super) fn has_control(&self, text: &str) -> bool {
        self.occurring(text).into_iter().any(|at| !self.all[at].anywhere)
    }

    /// Whether the text of a control token is the beginning of `rest`.
    pub(super) fn control_begins(&self, rest: &str) -> bool {
        let mut begins = false;
        self.beginning(rest.as_bytes(), &mut |at| begins |= !self.all[at].anywhere);
        begins
    }

    /// Whether a control token begins with `text`.
    pub(super) fn begins_with(&self, text: &str) -> bool {
        self.control().any(|control| control.starts_with(text))
    }

    /// Whether `text` lies inside a control token, or begins with the end of one.
    pub(super) fn completes(&self, text: &str) -> bool {
        let ends = |control: &str| {
            let inner = control.char_indices().skip(1).map(|(at, _)| &control[at..]);
            inner.into_iter().any(|end| text.starts_with(end))
        };
        !text.is_empty() && self.control().any(|control| control.contains(text) || ends(control))
    }

    fn control(&self) -> impl Iterator<Item = &str> {
        self.all.iter().filter(|special| !special.anywhere).map(|special| special.text.as_str())
    }

    /// Calls `found` with the number of each token whose text `bytes` begin with.
    fn beginning(&self, bytes: &[u8], found: &mut impl FnMut(usize)) {
        let mut range = self.sorted.as_slice();
        let text = |&at: &usize| self.all[at].text.as_bytes();
        for (depth, &byte) in bytes.iter().enumerate() {
            // Shorter texts come first, and those that were found are at the front.
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

    /// Numbers of the tokens whose text occurs, longest first.
    fn occurring(&self, text: &str) -> BTreeSet<usize> {
        let mut numbers = BTreeSet::new();
        for (at, _) in text.char_indices() {
            self.beginning(&text.as_bytes()[at..], &mut |number| {
                numbers.insert(number);
            });
        }
        numbers
    }

    /// Cuts `text` at the tokens that are wanted.
    pub(super) fn partition<'a>(
        &self,
        text: &'a str,
        wanted: impl Fn(&SpecialToken) -> bool,
    ) -> Vec<Fragment<'a>> {
        let mut fragments = vec![Fragment::Text(text)];
        for at in self.occurring(text) {
            let special = &self.all[at];
            if wanted(special) {
                let cut = |part: Fragment<'a>| part.split(&special.text, special.id);
                fragments = fragments.into_iter().flat_map(cut).collect();
            }
        }
        fragments
    }
}

/// A part of a text while special tokens are looked for.
pub(super) enum Fragment<'a> {
    Text(&'a str),
    Token(u32),
}

impl<'a> Fragment<'a> {
    pub(super) fn is_empty(&self) -> bool {
        matches!(self, Fragment::Text(""))
    }

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
