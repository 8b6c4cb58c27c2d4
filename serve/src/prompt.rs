//! The prompts of a request, as strings or as token ids, and their tokens.

use std::fmt;

use hearth_runtime::{ExecError, Tokenizer};
use serde::de::value::SeqAccessDeserializer;
use serde::de::{self, Deserialize, Deserializer, SeqAccess, Visitor};

use crate::AppState;
use crate::error::ApiError;
use crate::fields::StringOr;

/// An element of a list of prompts, or of a prompt that is a list of tokens.
#[derive(Debug, PartialEq, Eq)]
pub enum PromptItem {
    Text(String),
    Token(u32),
    Tokens(Vec<u32>),
}

/// A text to complete, or a text whose embedding is wanted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
}

impl<'de> Deserialize<'de> for PromptItem {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ItemVisitor;
        impl<'de> Visitor<'de> for ItemVisitor {
            type Value = PromptItem;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a string, a token id or a list of token ids")
            }

            fn visit_str<E>(self, text: &str) -> Result<PromptItem, E> {
                Ok(PromptItem::Text(text.to_owned()))
            }

            fn visit_u64<E: de::Error>(self, token: u64) -> Result<PromptItem, E> {
                u32::try_from(token).map(PromptItem::Token).map_err(E::custom)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<PromptItem, A::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(seq)).map(PromptItem::Tokens)
            }
        }
        deserializer.deserialize_any(ItemVisitor)
    }
}

/// Returns the prompts in the value of the field `name`, which are at least one and at most `max_prompts`.
pub fn prompts(
    name: &'static str,
    value: Option<StringOr<PromptItem>>,
    max_prompts: usize,
) -> Result<Vec<Prompt>, ApiError> {
    let items = match value {
        None => vec![],
        Some(StringOr::String(text)) => vec![PromptItem::Text(text)],
        Some(StringOr::List(items)) => items,
    };
    let (mut prompts, mut tokens) = (Vec::new(), Vec::new());
    for item in items {
        match item {
            PromptItem::Token(token) => tokens.push(token),
            PromptItem::Text(text) => prompts.push(Prompt::Text(text)),
            PromptItem::Tokens(tokens) => prompts.push(Prompt::Tokens(tokens)),
        }
    }
    if !tokens.is_empty() {
        if !prompts.is_empty() {
            let message = format!("`{name}` has token ids beside other values: send one kind of values");
            return Err(ApiError::invalid(name, message));
        }
        prompts.push(Prompt::Tokens(tokens));
    }
    let message = match prompts.len() {
        0 => format!("`{name}` is missing: send a string or a list of strings"),
        count if count > max_prompts => {
            format!("`{name}` has {count} texts: send at most {max_prompts}")
        }
        _ => return Ok(prompts),
    };
    Err(ApiError::invalid(name, message))
}

impl AppState {
    /// Returns the tokens of a prompt in the field `name`; `encode` encodes a text. Token ids are not changed.
    pub fn prompt_tokens(
        &self,
        name: &'static str,
        prompt: Prompt,
        encode: impl Fn(&Tokenizer, &str) -> Result<Vec<u32>, ExecError>,
    ) -> Result<Vec<u32>, ApiError> {
        let tokens = match prompt {
            Prompt::Text(text) => {
                self.check_length(name, text.len())?;
                encode(&self.tokenizer, &text).map_err(|error| ApiError::invalid(name, error.to_string()))?
            }
            Prompt::Tokens(tokens) => tokens,
        };
        if tokens.is_empty() {
            let message = format!("`{name}` has a text without tokens: send some text");
            return Err(ApiError::invalid(name, message));
        }
        self.check_tokens(name, &tokens)?;
        Ok(tokens)
    }

    /// Rejects a text that cannot fit in the context, before it is tokenized, which takes long for a long text.
    pub fn check_length(&self, name: &'static str, bytes: usize) -> Result<(), ApiError> {
        let (min_tokens, context) = (self.tokenizer.min_tokens(bytes), self.context_length);
        if min_tokens < context as usize {
            return Ok(());
        }
        let message = format!(
            "{bytes} bytes of text have at least {min_tokens} tokens and do not fit in the context of {context} \
             tokens: shorten the text"
        );
        Err(ApiError::context_length_exceeded(name, message))
    }
}
