//! The tokenizer: converts text to tokens, and tokens to text.
//!
//! A tokenizer is built from the metadata of the model file. There are two kinds: BPE (`gpt2` or `gemma4` in model
//! files, module `bpe`) and `SentencePiece` (`llama` in model files, module `sentence_piece`). Control
//! tokens in text are recognised only if the caller requests it, so that the text of a user cannot end a turn.
//! User-defined tokens are always recognised, before the text is split.
//!
//! Decoding gives bytes. [`IncrementalDetokenizer`] buffers bytes that are not yet valid UTF-8, so that a character
//! that consists of several tokens is returned as a whole.
//!
//! Not here: chat templates ([`crate::chat`]).

mod bpe;
mod harmony;
mod pre_tokenizer;
mod sentence_piece;
mod special;

use std::collections::{BTreeMap, BTreeSet};

use hearth_profiles::gguf::{GgufError, Metadata};

use crate::error::ExecError;
use bpe::Bpe;
pub(crate) use bpe::visible_char;
use harmony::{HarmonyParser, HarmonyToken};
use pre_tokenizer::{BosPolicy, Symbols};
use sentence_piece::SentencePiece;
use special::SpecialTokens;

pub use special::Fragment;

#[derive(Debug)]
pub struct Tokenizer {
    kind: Kind,
    /// The text of each token as bytes, indexed by token id; empty for control tokens, which are not output.
    tokens: Vec<Vec<u8>>,
    /// The length of the longest token in the vocabulary, in bytes.
    longest: usize,
    /// The tokens that are recognised by their text before the other text is tokenized.
    special: SpecialTokens,
    bos: Option<u32>,
    eos: Option<u32>,
    /// The ids of the tokens that end a turn or the text.
    ends: BTreeSet<u32>,
    /// The tokens between the messages of an answer, if the model writes in the harmony format.
    harmony: BTreeMap<u32, HarmonyToken>,
    add_bos: bool,
    add_eos: bool,
}

#[derive(Debug)]
enum Kind {
    Bpe(Box<Bpe>),
    SentencePiece(Box<SentencePiece>),
}

/// The character that is inserted into the text of a user where a control token could begin. It is a Unicode
/// noncharacter, so it does not occur in valid text.
pub(crate) const ESCAPE: char = '\u{fdd0}';

/// The control tokens that end a turn or the text in the supported model families. Not all model files declare them as
/// control tokens.
const END_TOKENS: &[&str] = &[
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<\u{ff5c}end\u{2581}of\u{2581}sentence\u{ff5c}>",
];

/// The control tokens that begin a turn or the text, or name a role, in the supported model families. `<s>` is not
/// among them: where it begins the text, it is the BOS token, and in Gemma it is a tag of HTML.
const START_TOKENS: &[&str] = &[
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|constrain|>",
    "<bos>",
    "<start_of_turn>",
    "<|im_start|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "[INST]",
    "[/INST]",
    "<\u{ff5c}begin\u{2581}of\u{2581}sentence\u{ff5c}>",
    "<\u{ff5c}User\u{ff5c}>",
    "<\u{ff5c}Assistant\u{ff5c}>",
];

/// The beginning and the end of the thoughts of a model.
pub const THOUGHT_START: &str = "<think>";
pub const THOUGHT_END: &str = "</think>";

/// The character that stands for a space in the vocabularies of `SentencePiece`.
const SPACE: &str = "\u{2581}";

/// The types of tokens, as values of the metadata key `tokenizer.ggml.token_type`.
pub(crate) mod token_type {
    pub(crate) const NORMAL: i32 = 1;
    pub(crate) const UNKNOWN: i32 = 2;
    pub(crate) const CONTROL: i32 = 3;
    pub(crate) const USER_DEFINED: i32 = 4;
    pub(crate) const BYTE: i32 = 6;
}

fn invalid(what: impl Into<String>, hint: &'static str) -> ExecError {
    ExecError::Tokenizer { what: what.into(), hint }
}

const CONVERT: &str = "convert the model again with a current converter";

/// Returns the value of a metadata key that every model file must have.
fn required<T>(key: &str, get: impl FnOnce(&str) -> Result<Option<T>, GgufError>) -> Result<T, ExecError> {
    get(key)?.ok_or_else(|| invalid(format!("metadata key `{key}` is missing"), CONVERT))
}

impl Tokenizer {
    /// Reads the tokenizer from the metadata of a model file.
    pub fn new(metadata: &Metadata) -> Result<Tokenizer, ExecError> {
        let model = required("tokenizer.ggml.model", |key| metadata.get_str(key))?;
        let texts = required("tokenizer.ggml.tokens", |key| metadata.get_str_array(key))?;
        let types = metadata.get_i32_array("tokenizer.ggml.token_type")?;
        if types.is_some_and(|types| types.len() != texts.len()) {
            let what = "`tokenizer.ggml.token_type` and `tokenizer.ggml.tokens` have different lengths";
            return Err(invalid(what, CONVERT));
        }
        let id = |name: &str| id(metadata, name, texts.len());
        let bos = id("bos")?;
        let ends = ["eos", "eot", "eom"].into_iter().map(id).collect::<Result<Vec<_>, _>>()?;
        let named: BTreeSet<usize> = ends.iter().flatten().chain(&bos).map(|&id| id as usize).collect();
        // Some files declare their turn tokens as user-defined. A user who writes one must not end the turn.
        let kind_of = |at: usize| {
            let found = types.map_or(token_type::NORMAL, |types| types[at]);
            let control = named.contains(&at) || is_turn(&texts[at], found);
            if control { token_type::CONTROL } else { found }
        };
        let is_piece = |at| kind_of(at) != token_type::CONTROL;
        let (kind, bos_policy) = match model {
            "gpt2" | "gemma4" => {
                let bpe = Bpe::new(metadata, model, texts, is_piece)?;
                let bos = bpe.pre_tokenizer.bos;
                (Kind::Bpe(Box::new(bpe)), bos)
            }
            "llama" => {
                let pieces = SentencePiece::new(metadata, texts, is_piece)?;
                (Kind::SentencePiece(Box::new(pieces)), BosPolicy::Added)
            }
            other => {
                let hint =
                    "use a model whose tokenizer is `gpt2` or `gemma4` (BPE) or `llama` (SentencePiece)";
                return Err(invalid(format!("tokenizer model `{other}` is not supported"), hint));
            }
        };
        let token = |(at, text): (usize, &String)| match (kind_of(at), &kind) {
            (token_type::CONTROL, _) => Vec::new(),
            (token_type::USER_DEFINED, _) => text.as_bytes().to_vec(),
            (_, Kind::Bpe(bpe)) if bpe.pre_tokenizer.symbols == Symbols::Bytes => bpe::token_bytes(text),
            (found, _) => sentence_piece::token_bytes(text, found == token_type::BYTE),
        };
        let tokens = texts.iter().enumerate().map(token).collect();
        let special = SpecialTokens::new(texts, kind_of);
        let is_eog =
            |&at: &usize| kind_of(at) == token_type::CONTROL && END_TOKENS.contains(&texts[at].as_str());
        let by_text = (0..texts.len()).filter(is_eog).map(|at| at as u32);
        let control_token = |text: &str| {
            let mut ids = 0..texts.len();
            ids.find(|&at| texts[at].as_str() == text && kind_of(at) == token_type::CONTROL)
                .map(|at| at as u32)
        };
        let harmony = harmony::tokens(control_token);
        // In the harmony format, `<|end|>` ends a message, and others may follow.
        let ends_answer = |id: &u32| harmony.get(id) != Some(&HarmonyToken::End);
        let add_bos = match (bos_policy, metadata.get_bool("tokenizer.ggml.add_bos_token")?) {
            (BosPolicy::Required, _) | (BosPolicy::Added, None) => true,
            (BosPolicy::Omitted, None) => false,
            (_, Some(add_bos)) => add_bos,
        };
        if add_bos && bos.is_none() {
            let what = "prompts must begin with a BOS token, but metadata key `tokenizer.ggml.bos_token_id` is missing";
            return Err(invalid(what, CONVERT));
        }
        Ok(Tokenizer {
            add_bos,
            add_eos: metadata.get_bool("tokenizer.ggml.add_eos_token")?.unwrap_or(false),
            eos: ends[0],
            ends: ends.into_iter().flatten().chain(by_text).filter(ends_answer).collect(),
            kind,
            tokens,
            harmony,
            longest: texts.iter().map(String::len).fold(char::MAX.len_utf8(), usize::max),
            special,
            bos,
        })
    }

    /// Returns a lower bound of the number of tokens of a text with this length in bytes, without encoding the text.
    pub fn min_tokens(&self, bytes: usize) -> usize {
        bytes.div_ceil(self.longest)
    }

    /// Returns the id of the token that marks the beginning of text (BOS), if the model has one.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// Returns the id of the token that marks the end of text (EOS), if the model has one.
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }

    /// Returns whether a token ends a turn or the text (end of generation).
    pub fn is_eog(&self, token: u32) -> bool {
        self.ends.contains(&token)
    }

    /// Returns whether the model writes its answers in the harmony format, which [`IncrementalDetokenizer`] converts.
    pub fn has_harmony(&self) -> bool {
        !self.harmony.is_empty()
    }

    /// Returns whether a token is one of those between the messages of an answer in the harmony format.
    pub fn is_harmony_token(&self, token: u32) -> bool {
        self.harmony.contains_key(&token)
    }

    /// Returns the tokens that end a turn or the text.
    pub fn stop_tokens(&self) -> Vec<u32> {
        self.ends.iter().copied().collect()
    }

    /// Encodes a complete text, with BOS and EOS if the model adds them. With `parse_special`, control tokens in the
    /// text are recognised; otherwise they are ordinary text.
    pub fn encode(&self, text: &str, parse_special: bool) -> Result<Vec<u32>, ExecError> {
        let bos = self.bos.filter(|_| self.add_bos);
        let eos = self.eos.filter(|_| self.add_eos);
        let ids = self.encode_without_bos(text, parse_special)?;
        Ok(bos.into_iter().chain(ids).chain(eos).collect())
    }

    /// Encodes a text of a user, as a document of its own, with BOS and EOS if the model requires them. A text that
    /// begins with BOS or ends with EOS gets no second one. Other control tokens in it are not recognised.
    pub fn encode_document(&self, text: &str) -> Result<Vec<u32>, ExecError> {
        let added = |id: Option<u32>, is_added| id.filter(|_| is_added).and_then(|id| self.control_text(id));
        let text = added(self.bos, self.add_bos).and_then(|bos| text.strip_prefix(bos)).unwrap_or(text);
        let text = added(self.eos, self.add_eos).and_then(|eos| text.strip_suffix(eos)).unwrap_or(text);
        self.encode(text, false)
    }

    /// Encodes a text as [`Self::encode`], without BOS and EOS.
    pub fn encode_without_bos(&self, text: &str, parse_special: bool) -> Result<Vec<u32>, ExecError> {
        let mut ids = Vec::new();
        let fragments = self.special.partition(text, |special| parse_special || special.is_user_defined);
        self.encode_fragments(fragments, &mut ids)?;
        Ok(ids)
    }

    /// Encodes the output of a chat template, in which the text of users is escaped ([`Self::escape_control_tokens`]).
    /// Control tokens of one character are ordinary text, because no escape character can be inserted into them.
    pub(crate) fn encode_template(&self, text: &str) -> Result<Vec<u32>, ExecError> {
        let can_escape = |text: &str| text.chars().nth(1).is_some();
        let fragments =
            self.special.partition(text, |special| !special.is_user_defined && can_escape(&special.text));
        let mut ids = Vec::new();
        let bos = |fragment: &Fragment| matches!(fragment, Fragment::Token(id) if Some(*id) == self.bos);
        if self.add_bos && !fragments.iter().find(|part| !part.is_empty()).is_some_and(bos) {
            ids.extend(self.bos);
        }
        for fragment in fragments {
            match fragment {
                Fragment::Token(id) => ids.push(id),
                Fragment::Text(text) => {
                    let text = text.replace(ESCAPE, "");
                    let parts = self.special.partition(&text, |special| special.is_user_defined);
                    self.encode_fragments(parts, &mut ids)?;
                }
            }
        }
        Ok(ids)
    }

    /// Returns `text` with escape characters, so that no control token is recognised in it, whatever surrounds it.
    ///
    /// An escape character follows every character with which a control token begins, and precedes the text if the text
    /// could complete a control token. The strings `known`, for which the template searches, get no escape character
    /// after their first character, unless a control token begins there.
    pub(crate) fn escape_control_tokens(&self, text: &str, known: &[String]) -> String {
        let text = text.replace(ESCAPE, "");
        let trimmed = text.trim_start();
        let front = self.special.completes_control(trimmed.trim_end()).then_some(text.len() - trimmed.len());
        let mut escaped = String::with_capacity(text.len());
        for (at, c) in text.char_indices() {
            if front == Some(at) {
                escaped.push(ESCAPE);
            }
            escaped.push(c);
            let rest = &text[at..];
            let is_known = |known: &String| rest.starts_with(known.as_str());
            if self.special.is_control_start(c)
                && (self.special.starts_with_control(rest) || !known.iter().any(is_known))
            {
                escaped.push(ESCAPE);
            }
        }
        escaped
    }

    /// Returns the suffixes of `text` whose first character is that of a control token. Suffixes that start with a
    /// control token, or with which a control token starts, are omitted.
    pub(crate) fn unescaped_suffixes(&self, text: &str) -> Vec<String> {
        let special = &self.special;
        let begins = text.char_indices().filter(|&(_, c)| special.is_control_start(c));
        let is_safe = |part: &&str| !special.starts_with_control(part) && !special.is_control_prefix(part);
        begins.map(|(at, _)| &text[at..]).filter(is_safe).map(str::to_owned).collect()
    }

    /// Returns whether `role` contains a control token, or is part of a control token that ends a turn, such as `end`
    /// in `<|end|>`.
    pub(crate) fn imitates_control_token(&self, role: &str) -> bool {
        let role = role.trim();
        let is_in = |end: &&str| !role.is_empty() && end.contains(role);
        self.special.contains_control(role) || END_TOKENS.iter().any(is_in)
    }

    /// Returns the text of a token, also that of a control token. Invalid UTF-8 is replaced by U+FFFD.
    pub fn text_of(&self, id: u32) -> String {
        let text = || String::from_utf8_lossy(self.token_bytes(id)).into_owned();
        self.special.text_of(id).map_or_else(text, str::to_owned)
    }

    /// Returns the text of a control token; `None` for other tokens.
    pub fn control_text(&self, id: u32) -> Option<&str> {
        self.special.text_of(id).filter(|_| self.token_bytes(id).is_empty())
    }

    /// Splits a text at control tokens.
    pub fn split_control_tokens<'a>(&self, text: &'a str) -> Vec<Fragment<'a>> {
        let fragments = self.special.partition(text, |special| !special.is_user_defined);
        fragments.into_iter().filter(|fragment| !fragment.is_empty()).collect()
    }

    fn encode_fragments(&self, fragments: Vec<Fragment<'_>>, ids: &mut Vec<u32>) -> Result<(), ExecError> {
        // The beginning of the text counts as after a special token.
        let mut after_special = true;
        for fragment in fragments {
            match fragment {
                Fragment::Token(id) => {
                    ids.push(id);
                    after_special = true;
                }
                Fragment::Text("") => {}
                Fragment::Text(text) => {
                    match &self.kind {
                        Kind::Bpe(bpe) => bpe.encode(text, ids)?,
                        Kind::SentencePiece(pieces) => pieces.encode(text, after_special, ids),
                    }
                    after_special = false;
                }
            }
        }
        Ok(())
    }

    /// Returns the text of a token as bytes; empty for control tokens and unknown ids.
    pub fn token_bytes(&self, token: u32) -> &[u8] {
        self.tokens.get(token as usize).map_or(&[], |bytes| bytes)
    }

    /// Decodes the tokens of a complete text. Invalid UTF-8 is replaced by U+FFFD.
    pub fn decode(&self, tokens: &[u32]) -> String {
        let bytes: Vec<u8> = tokens.iter().flat_map(|&token| self.token_bytes(token)).copied().collect();
        let text = String::from_utf8_lossy(&bytes);
        let adds_space = matches!(&self.kind, Kind::SentencePiece(pieces) if pieces.add_space);
        text.strip_prefix(' ').filter(|_| adds_space).unwrap_or(&text).to_owned()
    }
}

/// Returns whether a token with the text `text` and the type `kind` ([`token_type`]) begins or ends a turn.
fn is_turn(text: &str, kind: i32) -> bool {
    END_TOKENS.contains(&text) || (kind != token_type::NORMAL && START_TOKENS.contains(&text))
}

/// Reads the id of the special token `name`, for example `bos`, of a vocabulary with `count` tokens.
fn id(metadata: &Metadata, name: &str, count: usize) -> Result<Option<u32>, ExecError> {
    let key = format!("tokenizer.ggml.{name}_token_id");
    let Some(id) = metadata.get_u32(&key)? else { return Ok(None) };
    if id as usize >= count {
        return Err(invalid(format!("metadata key `{key}` is {id}, but there are {count} tokens"), CONVERT));
    }
    Ok(Some(id))
}

/// Converts generated tokens to text, one token at a time. The thoughts of a model that writes in the harmony format
/// become text between `<think>` and `</think>`.
#[derive(Debug, Default)]
pub struct IncrementalDetokenizer {
    /// Bytes that are not yet valid UTF-8.
    pending: Vec<u8>,
    harmony: HarmonyParser,
}

impl IncrementalDetokenizer {
    /// Adds a token and returns the characters that are complete now.
    pub fn push(&mut self, tokenizer: &Tokenizer, token: u32) -> String {
        if let Some(&token) = tokenizer.harmony.get(&token) {
            let incomplete = std::mem::take(&mut self.pending);
            let before = self.harmony.push_text(String::from_utf8_lossy(&incomplete).into_owned());
            return before + &self.harmony.push_token(token);
        }
        self.pending.extend_from_slice(tokenizer.token_bytes(token));
        let last_invalid: &[u8] = self.pending.utf8_chunks().last().map_or(&[], |chunk| chunk.invalid());
        // Without an error length, more bytes may complete the last character.
        let is_incomplete = std::str::from_utf8(last_invalid).is_err_and(|error| error.error_len().is_none());
        let complete = self.pending.len() - if is_incomplete { last_invalid.len() } else { 0 };
        let text = String::from_utf8_lossy(&self.pending[..complete]).into_owned();
        self.pending.drain(..complete);
        self.harmony.push_text(text)
    }

    /// Ends the text. Returns U+FFFD if the last character is incomplete, and otherwise an empty string.
    pub fn finish(self) -> String {
        String::from_utf8_lossy(&self.pending).into_owned()
    }
}

#[cfg(test)]
pub(crate) mod tests;
