//! Special tokens, which are recognised by their text before tokenization.
//!
//! As in llama.cpp, a text is split at the longest special token first, then the remaining parts at the next longest,
//! and so on. Only tokens that occur in the text are tried. A sorted list finds these tokens in one pass over the text,
//! so tokenization is fast even if a vocabulary has very many special tokens.
//!
//! Not here: which tokens are control tokens. [`super::Tokenizer::new`] decides that.

use std::collections::{BTreeMap, BTreeSet};

use super::token_type;

/// A token that is recognised by its text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SpecialToken {
    pub(super) text: String,
    pub(super) id: u32,
    /// Whether the token is user-defined, that is, recognised in all text, unlike control tokens.
    pub(super) is_user_defined: bool,
}

#[derive(Debug)]
pub(super) struct SpecialTokens {
    /// The special tokens, longest text first.
    all: Vec<SpecialToken>,
    /// The indices of the tokens in `all`, sorted by text.
    sorted: Vec<usize>,
    /// The indices of the tokens in `all`, by id.
    by_id: BTreeMap<u32, usize>,
    /// The first characters of all control tokens.
    first: BTreeSet<char>,
}

impl SpecialTokens {
    pub(super) fn new(texts: &[String], kind_of: impl Fn(usize) -> i32) -> SpecialTokens {
        let mut all: Vec<SpecialToken> = Vec::new();
        for (at, text) in texts.iter().enumerate().filter(|(_, text)| !text.is_empty()) {
            let is_user_defined = match kind_of(at) {
                token_type::USER_DEFINED => true,
                token_type::CONTROL | token_type::UNKNOWN => false,
                _ => continue,
            };
            all.push(SpecialToken { text: text.clone(), id: at as u32, is_user_defined });
        }
        all.sort_by(|a, b| b.text.len().cmp(&a.text.len()).then_with(|| a.text.cmp(&b.text)));
        let mut sorted: Vec<usize> = (0..all.len()).collect();
        sorted.sort_by(|&a, &b| all[a].text.cmp(&all[b].text));
        let control = all.iter().filter(|special| !special.is_user_defined);
        let first = control.filter_map(|special| special.text.chars().next()).collect();
        let by_id = all.iter().enumerate().map(|(at, special)| (special.id, at)).collect();
        SpecialTokens { all, sorted, by_id, first }
    }

    pub(super) fn text_of(&self, id: u32) -> Option<&str> {
        self.by_id.get(&id).map(|&at| self.all[at].text.as_str())
    }

    /// Returns whether a control token begins with the character `c`.
    pub(super) fn is_control_start(&self, c: char) -> bool {
        self.first.contains(&c)
    }

    pub(super) fn contains_control(&self, text: &str) -> bool {
        self.occurring(text).into_iter().any(|at| !self.all[at].is_user_defined)
    }

    /// Returns whether `text` begins with a control token.
    pub(super) fn starts_with_control(&self, text: &str) -> bool {
        self.matches_at_start(text.as_bytes()).iter().any(|&at| !self.all[at].is_user_defined)
    }

    /// Returns whether a control token begins with `text`.
    pub(super) fn is_control_prefix(&self, text: &str) -> bool {
        self.control().any(|control| control.starts_with(text))
    }

    /// Returns whether `text` is part of a control token, or begins with the end of a control token.
    pub(super) fn completes_control(&self, text: &str) -> bool {
        let ends =
            |control: &str| control.char_indices().skip(1).any(|(at, _)| text.starts_with(&control[at..]));
        !text.is_empty() && self.control().any(|control| control.contains(text) || ends(control))
    }

    fn control(&self) -> impl Iterator<Item = &str> {
        self.all.iter().filter(|special| !special.is_user_defined).map(|special| special.text.as_str())
    }

    /// Returns the indices in `all` of the tokens whose text is a prefix of `bytes`.
    fn matches_at_start(&self, bytes: &[u8]) -> Vec<usize> {
        let (mut range, mut found) = (self.sorted.as_slice(), Vec::new());
        let text = |&at: &usize| self.all[at].text.as_bytes();
        for (depth, &byte) in bytes.iter().enumerate() {
            // Shorter texts are sorted first, so tokens that match are at the front.
            let from = range.partition_point(|at| text(at).get(depth).is_none_or(|&other| other < byte));
            let to = range.partition_point(|at| text(at).get(depth).is_none_or(|&other| other <= byte));
            range = &range[from..to];
            found.extend(range.iter().take_while(|at| text(at).len() == depth + 1));
            if range.is_empty() {
                break;
            }
        }
        found
    }

    /// Returns the indices in `all` of the tokens that occur in `text`, longest first.
    fn occurring(&self, text: &str) -> BTreeSet<usize> {
        text.char_indices().flat_map(|(at, _)| self.matches_at_start(&text.as_bytes()[at..])).collect()
    }

    /// Splits `text` at all special tokens for which `wanted` returns true.
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
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fragment<'a> {
    Text(&'a str),
    Token(u32),
}

impl<'a> Fragment<'a> {
    pub(super) fn is_empty(&self) -> bool {
        matches!(self, Fragment::Text(""))
    }

    fn split(self, special: &str, id: u32) -> Vec<Fragment<'a>> {
        let Fragment::Text(text) = self else { return vec![self] };
        text.split(special).flat_map(|part| [Fragment::Token(id), Fragment::Text(part)]).skip(1).collect()
    }
}
