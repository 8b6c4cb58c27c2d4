//! Request bodies of OpenAI's completion endpoints, parsed and validated.
//!
//! A request with an unsupported field that would change the result is rejected, and the error names the field. Fields
//! that do not change the result, such as `user` and `metadata`, are ignored.

use std::fmt;
use std::marker::PhantomData;

use hearth_runtime::{ChatMessage, SamplerOptions};
use serde::Deserialize;
use serde::de::value::SeqAccessDeserializer;
use serde::de::{self, Deserializer, IgnoredAny, SeqAccess, Visitor};
use serde_json::value::RawValue;

use crate::error::{ApiError, excerpt};

/// Maximum number of stop strings in a request. source: assumed; OpenAI's API allows 4
const MAX_STOP_STRINGS: usize = 16;
const MAX_STOP_BYTES: usize = 1024;
/// Maximum number of prompts in a completion request. source: assumed
const MAX_PROMPTS: usize = 64;

/// The body of `POST /v1/chat/completions`, with `messages`, and of `POST /v1/completions`, with `prompt`. Unknown
/// fields are skipped without storing them.
#[derive(Debug, Deserialize)]
pub struct CompletionRequest {
    messages: Option<Vec<MessageField>>,
    prompt: Option<StringOr<PromptItem>>,
    pub model: Option<String>,
    max_tokens: Option<u32>,
    /// The newer name of `max_tokens`.
    max_completion_tokens: Option<u32>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    /// The number of most probable tokens to sample from (top-k), which OpenAI's API does not have.
    top_k: Option<usize>,
    seed: Option<i64>,
    stop: Option<StringOr<String>>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    n: Option<u32>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    logit_bias: Option<Box<RawValue>>,
    logprobs: Option<Box<RawValue>>,
    response_format: Option<Box<RawValue>>,
    tools: Option<Vec<IgnoredAny>>,
    functions: Option<Vec<IgnoredAny>>,
    echo: Option<bool>,
    suffix: Option<String>,
    best_of: Option<u32>,
}

#[derive(Debug, Deserialize)]
struct StreamOptions {
    #[serde(default)]
    include_usage: bool,
}

#[derive(Debug, Deserialize)]
struct MessageField {
    role: String,
    content: Option<StringOr<Part>>,
}

#[derive(Debug, Deserialize)]
struct Part {
    #[serde(rename = "type")]
    kind: String,
    text: Option<String>,
}

#[derive(Debug, Deserialize)]
struct ResponseFormat {
    #[serde(rename = "type")]
    kind: String,
}

/// An element of a list of prompts, or of a prompt that is a list of tokens.
#[derive(Debug, PartialEq, Eq)]
enum PromptItem {
    Text(String),
    Token(u32),
    Tokens(Vec<u32>),
}

/// A string, or a list of other values. Unlike an untagged enum, it is parsed without storing all values twice.
#[derive(Debug, PartialEq, Eq)]
enum StringOr<T> {
    String(String),
    List(Vec<T>),
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for StringOr<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct StringOrVisitor<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for StringOrVisitor<T> {
            type Value = StringOr<T>;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a string or a list")
            }

            fn visit_str<E>(self, text: &str) -> Result<Self::Value, E> {
                Ok(StringOr::String(text.to_owned()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<Self::Value, A::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(seq)).map(StringOr::List)
            }
        }
        deserializer.deserialize_any(StringOrVisitor(PhantomData))
    }
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

/// The prompt of a text completion.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
}

/// The validated parameters of a generation.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerationParams {
    /// Maximum number of generated tokens; `None` generates until the context is full.
    pub max_tokens: Option<u32>,
    pub sampler: SamplerOptions,
    pub stop_strings: Vec<String>,
    /// Whether the response is streamed.
    pub stream: bool,
    /// Whether a streamed response ends with the token usage.
    pub include_usage: bool,
}

impl MessageField {
    fn message(self) -> Result<ChatMessage, ApiError> {
        let text = |part: Part| match (&*part.kind, part.text) {
            ("text", Some(text)) => Ok(text),
            (kind, _) => {
                let kind = excerpt(kind);
                let message = format!("message content of type `{kind}` is not supported: send only text");
                Err(ApiError::invalid("messages", message))
            }
        };
        let content = match self.content {
            None => String::new(),
            Some(StringOr::String(text)) => text,
            Some(StringOr::List(parts)) => parts.into_iter().map(text).collect::<Result<_, _>>()?,
        };
        Ok(ChatMessage::new(self.role, content))
    }
}

impl CompletionRequest {
    /// Removes and returns the messages of a chat.
    pub fn take_messages(&mut self) -> Result<Vec<ChatMessage>, ApiError> {
        let missing = || ApiError::invalid("messages", "`messages` is missing: send a list of messages");
        self.messages.take().ok_or_else(missing)?.into_iter().map(MessageField::message).collect()
    }

    /// Removes and returns the prompts of a text completion.
    pub fn take_prompts(&mut self) -> Result<Vec<Prompt>, ApiError> {
        let items = match self.prompt.take() {
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
                let message = "`prompt` has token ids beside other values: send one kind of values";
                return Err(ApiError::invalid("prompt", message));
            }
            prompts.push(Prompt::Tokens(tokens));
        }
        match prompts.len() {
            0 => Err(ApiError::invalid("prompt", "`prompt` is missing: send a string or a list of strings")),
            1..=MAX_PROMPTS => Ok(prompts),
            count => {
                let message = format!("the request has {count} prompts: send at most {MAX_PROMPTS}");
                Err(ApiError::invalid("prompt", message))
            }
        }
    }

    /// Validates the fields and returns the generation parameters. A request without a seed gets `default_seed`.
    pub fn to_generation_params(&self, default_seed: u64) -> Result<GenerationParams, ApiError> {
        self.check_supported()?;
        let default = SamplerOptions::default();
        // OpenAI's default temperature is 1.
        let sampler = SamplerOptions {
            temperature: self.temperature.unwrap_or(1.0),
            top_k: self.top_k.unwrap_or(default.top_k),
            top_p: self.top_p.unwrap_or(default.top_p),
            seed: self.seed.map_or(default_seed, i64::cast_unsigned),
        };
        let max_tokens = self.max_completion_tokens.or(self.max_tokens);
        if max_tokens == Some(0) {
            return Err(ApiError::invalid("max_tokens", "`max_tokens` is 0: set it to at least 1"));
        }
        let stop_strings = match &self.stop {
            None => vec![],
            Some(StringOr::String(stop)) => vec![stop.clone()],
            Some(StringOr::List(stops)) => stops.clone(),
        };
        let is_invalid = |text: &String| text.is_empty() || text.len() > MAX_STOP_BYTES;
        if stop_strings.len() > MAX_STOP_STRINGS || stop_strings.iter().any(is_invalid) {
            let message = format!(
                "`stop` is invalid: send at most {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_BYTES} bytes each"
            );
            return Err(ApiError::invalid("stop", message));
        }
        let stream = self.stream.unwrap_or(false);
        let include_usage = self.stream_options.as_ref().is_some_and(|options| options.include_usage);
        Ok(GenerationParams { max_tokens, sampler, stop_strings, stream, include_usage })
    }

    fn check_supported(&self) -> Result<(), ApiError> {
        let is_set = |value: &Option<Box<RawValue>>| {
            value.as_ref().is_some_and(|value| !matches!(value.get(), "null" | "false" | "{}"))
        };
        let is_text = |format: &RawValue| {
            let format: Result<ResponseFormat, _> = serde_json::from_str(format.get());
            format.is_ok_and(|format| format.kind == "text")
        };
        let is_penalty = |penalty: Option<f32>| penalty.is_some_and(|penalty| penalty != 0.0);
        let unsupported = [
            ("n", self.n.is_some_and(|count| count != 1)),
            ("best_of", self.best_of.is_some_and(|count| count != 1)),
            ("presence_penalty", is_penalty(self.presence_penalty)),
            ("frequency_penalty", is_penalty(self.frequency_penalty)),
            ("logit_bias", is_set(&self.logit_bias)),
            ("logprobs", is_set(&self.logprobs)),
            ("response_format", self.response_format.as_deref().is_some_and(|format| !is_text(format))),
            ("tools", self.tools.as_ref().is_some_and(|tools| !tools.is_empty())),
            ("functions", self.functions.as_ref().is_some_and(|functions| !functions.is_empty())),
            ("echo", self.echo == Some(true)),
            ("suffix", self.suffix.as_ref().is_some_and(|suffix| !suffix.is_empty())),
        ];
        let Some((key, _)) = unsupported.into_iter().find(|(_, is_used)| *is_used) else { return Ok(()) };
        Err(ApiError::invalid(key, format!("`{key}` is not supported: leave it out")))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn chat(more: &Value) -> CompletionRequest {
        let mut request = json!({"model": "m", "messages": [{"role": "user", "content": "Hello"}]});
        let all = request.as_object_mut().expect("an object");
        all.extend(more.as_object().expect("an object").clone());
        serde_json::from_str(&request.to_string()).expect("a chat")
    }

    #[test]
    fn fields_without_effect_are_accepted() {
        let params = |more: Value| chat(&more).to_generation_params(7).expect("valid");
        let GenerationParams { max_tokens, sampler, stream, .. } =
            params(json!({"user": "me", "n": 1, "logprobs": false, "tools": [], "presence_penalty": 0}));
        assert_eq!((max_tokens, sampler.temperature, sampler.seed, stream), (None, 1.0, 7, false));
        let usage = json!({"include_usage": true});
        let params = params(json!({
            "max_tokens": 5, "seed": -1, "stop": ["a", "b"], "temperature": 0, "stream": true, "stream_options": usage
        }));
        let counts = (params.max_tokens, params.sampler.seed, params.stop_strings.len());
        assert_eq!(counts, (Some(5), u64::MAX, 2));
        assert!(params.stream && params.include_usage);
    }

    #[test]
    fn unsupported_fields_are_rejected_by_name() {
        let unsupported = [
            json!({"n": 2}),
            json!({"presence_penalty": 0.5}),
            json!({"logit_bias": {"50256": -100}}),
            json!({"logprobs": true}),
            json!({"response_format": {"type": "json_object"}}),
            json!({"tools": [{"type": "function"}]}),
        ];
        for more in unsupported {
            let key = more.as_object().and_then(|all| all.keys().next().cloned()).expect("a key");
            let refused = chat(&more).to_generation_params(0).expect_err("refused");
            assert!(refused.param == Some(&*key) && refused.message.contains(&key), "{refused:?}");
        }
        for more in [json!({"stop": ""}), json!({"stop": vec!["x"; 17]}), json!({"max_tokens": 0})] {
            assert!(chat(&more).to_generation_params(0).is_err());
        }
    }

    #[test]
    fn text_parts_are_joined_and_images_are_rejected() {
        let messages = |content: &Value| {
            chat(&json!({"messages": [{"role": "user", "content": content}]})).take_messages()
        };
        let text =
            messages(&json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])).expect("text");
        assert_eq!(text[0].content.as_deref(), Some("ab"));
        let refused =
            messages(&json!([{"type": "image_url", "image_url": {"url": "x"}}])).expect_err("refused");
        assert!(refused.message.contains("image_url"), "{refused:?}");
    }

    #[test]
    fn prompts_are_strings_or_tokens() {
        let prompts = |prompt: &Value| {
            let request = json!({"prompt": prompt, "unknown": {"a": [1]}}).to_string();
            serde_json::from_str::<CompletionRequest>(&request).expect("a request").take_prompts()
        };
        assert_eq!(prompts(&json!("a")), Ok(vec![Prompt::Text("a".into())]));
        assert_eq!(prompts(&json!(["a", "b"])).map(|all| all.len()), Ok(2));
        assert_eq!(prompts(&json!([1, 2])), Ok(vec![Prompt::Tokens(vec![1, 2])]));
        assert_eq!(prompts(&json!([[1], [2]])).map(|all| all.len()), Ok(2));
        assert_eq!(prompts(&json!([[], [2]])).map(|all| all.len()), Ok(2));
        let invalid = [json!({"prompt": {"a": 1}}), json!({"prompt": [-1]}), json!({"prompt": [[0.5]]})];
        assert!(
            invalid
                .iter()
                .all(|request| serde_json::from_value::<CompletionRequest>(request.clone()).is_err())
        );
        assert!(prompts(&json!([1, "a"])).is_err() && prompts(&json!([[1], 2])).is_err());
        assert!(prompts(&json!([])).is_err() && prompts(&json!(vec!["a"; 65])).is_err());
    }
}
