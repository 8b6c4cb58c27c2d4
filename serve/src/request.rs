//! Request bodies of OpenAI's completion endpoints, parsed and validated.
//!
//! A request with a field that is unknown or not supported is rejected, and the error names the field. Known fields that
//! do not change the result, such as `user` and `metadata`, are ignored.

use std::collections::BTreeMap;

use hearth_runtime::{ChatMessage, JsonValue, SamplerOptions};
use serde::Deserialize;
use serde_json::Value;

use crate::constraint::{Constraint, TextFormat};
use crate::error::{ApiError, excerpt};
use crate::fields::{Fields, StringOr};
use crate::prompt::{Prompt, PromptItem, prompts};
use crate::tools::{ToolChoice, ToolFields};

/// Maximum number of stop strings in a request. source: assumed; OpenAI's API allows 4
const MAX_STOP_STRINGS: usize = 16;
const MAX_STOP_BYTES: usize = 1024;
/// Maximum number of prompts in a completion request, and of answers to them. source: assumed
const MAX_PROMPTS: usize = 64;
/// Maximum number of log-probabilities for each token. source: OpenAI's API reference
const MAX_LOGPROBS: u32 = 20;
/// Fields that do not change the result.
const IGNORED_FIELDS: [&str; 8] = [
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "cache_prompt",
    "return_progress",
];

/// The body of `POST /v1/chat/completions`, with `messages`, and of `POST /v1/completions`, with `prompt`.
#[derive(Debug)]
pub struct CompletionRequest {
    messages: Option<Vec<MessageField>>,
    prompt: Option<StringOr<PromptItem>>,
    pub model: Option<String>,
    /// `max_completion_tokens`, or its older name `max_tokens`.
    max_tokens: Option<u32>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    /// The number of most probable tokens to sample from (top-k), which OpenAI's API does not have.
    top_k: Option<usize>,
    min_p: Option<f32>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    /// `repeat_penalty` (llama.cpp) or `repetition_penalty` (vLLM).
    repeat_penalty: Option<f32>,
    logit_bias: BTreeMap<u32, f32>,
    seed: Option<i64>,
    stop: Option<StringOr<String>>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    n: Option<u32>,
    logprobs: Option<LogprobsField>,
    top_logprobs: Option<u32>,
    text_format: TextFormat,
    tools: ToolFields,
}

/// `logprobs` is a boolean for chats and a number for text completions.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(untagged)]
enum LogprobsField {
    Enabled(bool),
    Count(u32),
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
    reasoning_content: Option<String>,
    tool_calls: Option<Vec<JsonValue>>,
    tool_call_id: Option<String>,
    name: Option<String>,
}

#[derive(Debug, Deserialize)]
struct Part {
    #[serde(rename = "type")]
    kind: String,
    text: Option<String>,
}

/// The validated parameters of a generation.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerationParams {
    /// Maximum number of generated tokens; `None` generates until the context is full.
    pub max_tokens: Option<u32>,
    pub sampler: SamplerOptions,
    /// What is added to the logits of tokens.
    pub logit_bias: BTreeMap<u32, f32>,
    /// Number of answers to each prompt.
    pub choices: u32,
    pub stop_strings: Vec<String>,
    /// Whether the response is streamed.
    pub stream: bool,
    /// Whether a streamed response ends with the token usage.
    pub include_usage: bool,
    /// The number of most probable tokens of which log-probabilities are returned; `None` returns none at all.
    pub logprobs: Option<u32>,
    pub constraint: Constraint,
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
        let tool_calls = self.tool_calls.unwrap_or_default();
        let content = match self.content {
            None => tool_calls.is_empty().then(String::new),
            Some(StringOr::String(text)) => Some(text),
            Some(StringOr::List(parts)) => Some(parts.into_iter().map(text).collect::<Result<_, _>>()?),
        };
        if let Some(call) = tool_calls.iter().find(|call| call.name_and_arguments().is_none()) {
            let call = serde_json::to_string(call).unwrap_or_default();
            let message = format!(
                "`messages` has the call `{}`: send `function` with `name` and `arguments`, a string of JSON",
                excerpt(&call)
            );
            return Err(ApiError::invalid("messages", message));
        }
        let Self { role, reasoning_content, tool_call_id, name, .. } = self;
        Ok(ChatMessage { role, content, reasoning_content, tool_calls, tool_call_id, name })
    }
}

impl CompletionRequest {
    pub fn from_json(bytes: &[u8]) -> Result<Self, ApiError> {
        let mut fields = Fields::from_json(bytes)?;
        let max_tokens = fields.take("max_tokens")?;
        let repetition_penalty = fields.take("repetition_penalty")?;
        let request = Self {
            messages: fields.take("messages")?,
            prompt: fields.take("prompt")?,
            model: fields.take("model")?,
            max_tokens: fields.take("max_completion_tokens")?.or(max_tokens),
            temperature: fields.take("temperature")?,
            top_p: fields.take("top_p")?,
            top_k: fields.take("top_k")?,
            min_p: fields.take("min_p")?,
            presence_penalty: fields.take("presence_penalty")?,
            frequency_penalty: fields.take("frequency_penalty")?,
            repeat_penalty: fields.take("repeat_penalty")?.or(repetition_penalty),
            logit_bias: take_logit_bias(&mut fields)?,
            seed: fields.take("seed")?,
            stop: fields.take("stop")?,
            stream: fields.take("stream")?,
            stream_options: fields.take("stream_options")?,
            n: fields.take("n")?,
            logprobs: fields.take("logprobs")?,
            top_logprobs: fields.take("top_logprobs")?,
            text_format: TextFormat::take(&mut fields)?,
            tools: ToolFields::take(&mut fields)?,
        };
        reject_unsupported(&mut fields)?;
        fields.reject_others(&IGNORED_FIELDS)?;
        Ok(request)
    }

    /// Removes and returns the messages of a chat.
    pub fn take_messages(&mut self) -> Result<Vec<ChatMessage>, ApiError> {
        let missing = || ApiError::invalid("messages", "`messages` is missing: send a list of messages");
        self.messages.take().ok_or_else(missing)?.into_iter().map(MessageField::message).collect()
    }

    /// Removes and returns the descriptions of the tools of a chat.
    pub fn take_tool_descriptions(&mut self) -> Vec<JsonValue> {
        std::mem::take(&mut self.tools.descriptions)
    }

    /// Removes and returns the prompts of a text completion.
    pub fn take_prompts(&mut self) -> Result<Vec<Prompt>, ApiError> {
        prompts("prompt", self.prompt.take(), MAX_PROMPTS)
    }

    /// Validates the fields and returns the generation parameters. A request without a seed gets `default_seed`.
    pub fn to_generation_params(&self, default_seed: u64) -> Result<GenerationParams, ApiError> {
        let default = SamplerOptions::default();
        // OpenAI's default temperature is 1.
        let sampler = SamplerOptions {
            temperature: self.temperature.unwrap_or(1.0),
            top_k: self.top_k.unwrap_or(default.top_k),
            top_p: self.top_p.unwrap_or(default.top_p),
            min_p: self.min_p.unwrap_or(default.min_p),
            presence_penalty: self.presence_penalty.unwrap_or(default.presence_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(default.frequency_penalty),
            repeat_penalty: self.repeat_penalty.unwrap_or(default.repeat_penalty),
            seed: self.seed.map_or(default_seed, i64::cast_unsigned),
        };
        let max_tokens = self.max_tokens;
        let choices = self.n.unwrap_or(1);
        if !(1..=MAX_PROMPTS as u32).contains(&choices) {
            return Err(ApiError::invalid("n", format!("`n` is {choices}: it must be 1 to {MAX_PROMPTS}")));
        }
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
        let logprobs = match (self.logprobs, self.top_logprobs) {
            (Some(LogprobsField::Enabled(true)), top) => Some(top.unwrap_or(0)),
            (Some(LogprobsField::Count(count)), None) => Some(count),
            (None | Some(LogprobsField::Enabled(false)), None | Some(0)) => None,
            _ => {
                let message = "`top_logprobs` needs `logprobs`: set `logprobs` to true";
                return Err(ApiError::invalid("top_logprobs", message));
            }
        };
        if let Some(count) = logprobs.filter(|&count| count > MAX_LOGPROBS) {
            let message = format!(
                "{count} log-probabilities for each token are too many: ask for at most {MAX_LOGPROBS}"
            );
            let name = if self.top_logprobs.is_some() { "top_logprobs" } else { "logprobs" };
            return Err(ApiError::invalid(name, message));
        }
        let ToolFields { tools, choice, is_parallel, .. } = &self.tools;
        if matches!(self.text_format, TextFormat::Grammar(_))
            && !tools.is_empty()
            && *choice != ToolChoice::None
        {
            let message = "`grammar` and `tools` exclude each other: send one, or `tool_choice` \"none\"";
            return Err(ApiError::invalid("grammar", message));
        }
        let constraint = Constraint {
            text: self.text_format.clone(),
            tools: tools.clone(),
            choice: choice.clone(),
            is_parallel: *is_parallel,
        };
        let logit_bias = self.logit_bias.clone();
        Ok(GenerationParams {
            max_tokens,
            sampler,
            logit_bias,
            choices,
            stop_strings,
            stream,
            include_usage,
            logprobs,
            constraint,
        })
    }
}

/// Removes `logit_bias`, an object with token ids as keys.
fn take_logit_bias(fields: &mut Fields<'_>) -> Result<BTreeMap<u32, f32>, ApiError> {
    let biases: BTreeMap<u32, f32> = fields.take("logit_bias")?.unwrap_or_default();
    match biases.values().find(|bias| !(-100.0..=100.0).contains(*bias)) {
        None => Ok(biases),
        Some(bias) => {
            let message = format!("`logit_bias` has the bias {bias}: it must be -100 to 100");
            Err(ApiError::invalid("logit_bias", message))
        }
    }
}

/// Removes the known fields that are not supported. Fails if one of them would change the result.
fn reject_unsupported(fields: &mut Fields<'_>) -> Result<(), ApiError> {
    let no_effect: [(&'static str, &[&str]); 7] = [
        ("best_of", &["1"]),
        ("functions", &["[]"]),
        ("function_call", &[r#""none""#, r#""auto""#]),
        ("modalities", &[r#"["text"]"#]),
        ("echo", &["false"]),
        ("suffix", &[r#""""#]),
        ("ignore_eos", &["false"]),
    ];
    for (name, accepted) in no_effect {
        let value: Option<Value> = fields.take(name)?;
        if value.is_some_and(|value| !accepted.contains(&&*value.to_string())) {
            return Err(ApiError::invalid(name, format!("`{name}` is not supported: leave it out")));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn chat(more: &Value) -> CompletionRequest {
        try_chat(more).expect("a chat")
    }

    fn try_chat(more: &Value) -> Result<CompletionRequest, ApiError> {
        let mut request = json!({"model": "m", "messages": [{"role": "user", "content": "Hello"}]});
        let all = request.as_object_mut().expect("an object");
        all.extend(more.as_object().expect("an object").clone());
        CompletionRequest::from_json(request.to_string().as_bytes())
    }

    #[test]
    fn fields_without_effect_are_accepted() {
        let params = |more: Value| chat(&more).to_generation_params(7).expect("valid");
        let GenerationParams { max_tokens, sampler, stream, .. } = params(json!({
            "user": "me", "n": 1, "logprobs": false, "tools": [], "tool_choice": "auto", "presence_penalty": 0,
            "response_format": {"type": "text"}, "unknown": null
        }));
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
    fn sampling_fields_are_honoured() {
        let request = chat(&json!({
            "n": 3, "min_p": 0.05, "presence_penalty": 0.5, "frequency_penalty": -1, "repetition_penalty": 1.2,
            "logit_bias": {"50256": -100}
        }));
        let GenerationParams { choices, sampler, logit_bias, .. } =
            request.to_generation_params(0).expect("valid");
        assert_eq!((choices, logit_bias), (3, [(50256, -100.0)].into()));
        assert_eq!((sampler.min_p, sampler.repeat_penalty), (0.05, 1.2));
        assert_eq!((sampler.presence_penalty, sampler.frequency_penalty), (0.5, -1.0));
    }

    #[test]
    fn tools_and_formats_are_honoured() {
        let tool = json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}});
        let named = json!({"type": "function", "function": {"name": "f"}});
        let request = chat(&json!({
            "tools": [tool], "tool_choice": named, "parallel_tool_calls": false, "logprobs": true, "top_logprobs": 3,
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array"}}}
        }));
        let GenerationParams { logprobs, constraint, .. } = request.to_generation_params(0).expect("valid");
        assert_eq!((logprobs, constraint.is_parallel), (Some(3), false));
        assert_eq!(constraint.choice, ToolChoice::Named("f".into()));
        assert_eq!(constraint.text, TextFormat::Json(json!({"type": "array"})));
        let none = chat(&json!({"tools": [tool], "tool_choice": "none"}));
        assert!(none.tools.descriptions.is_empty());
        assert!(!none.to_generation_params(0).expect("valid").constraint.can_call());
    }

    #[test]
    fn messages_of_tools_are_kept() {
        let call = json!({"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}});
        let messages = json!([
            {"role": "assistant", "content": null, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "7"}
        ]);
        let messages = chat(&json!({"messages": messages})).take_messages().expect("messages");
        assert_eq!((messages[0].content.as_deref(), messages[0].tool_calls.len()), (None, 1));
        assert_eq!(messages[1].tool_call_id.as_deref(), Some("1"));
    }

    #[test]
    fn malformed_calls_are_rejected() {
        for call in [
            json!({}),
            json!({"function": {"name": "f"}}),
            json!({"function": {"name": 1, "arguments": "{}"}}),
        ] {
            let messages = json!([{"role": "assistant", "content": null, "tool_calls": [call]}]);
            let refused = chat(&json!({"messages": messages})).take_messages().expect_err("refused");
            assert_eq!(refused.param.as_deref(), Some("messages"));
        }
    }

    #[test]
    fn unsupported_fields_are_rejected_by_name() {
        let unsupported = [
            json!({"logprobs": "yes"}),
            json!({"response_format": {"type": "xml"}}),
            json!({"response_format": {"type": "json_schema"}}),
            json!({"response_format": "json"}),
            json!({"tools": [{"type": "function"}]}),
            json!({"tools": [{"type": "web_search"}]}),
            json!({"tools": [{"type": "function", "function": {"name": "a b"}}]}),
            json!({"tools": [{"type": "function", "function": {"name": "a", "parameters": 7}}]}),
            json!({"tool_choice": "required"}),
            json!({"tool_choice": "some"}),
            json!({"tool_choice": {"type": "function", "function": {"name": "f"}}}),
            json!({"functions": [{"name": "f"}]}),
            json!({"best_of": 2}),
            json!({"mirostat": 2}),
            json!({"repeat_penalty": "1.1"}),
            json!({"temperature": "hot"}),
            json!({"messages": 7}),
            json!({"logit_bias": {"50256": -101}}),
            json!({"logit_bias": {"word": 1}}),
        ];
        for more in unsupported {
            let key = more.as_object().and_then(|all| all.keys().next().cloned()).expect("a key");
            let refused = try_chat(&more).expect_err("refused");
            assert!(refused.param.as_deref() == Some(&key) && refused.message.contains(&key), "{refused:?}");
        }
        for (more, name) in [
            (json!({"n": 0}), "n"),
            (json!({"n": 65}), "n"),
            (json!({"top_logprobs": 2}), "top_logprobs"),
            (json!({"logprobs": true, "top_logprobs": 21}), "top_logprobs"),
            (json!({"logprobs": 21}), "logprobs"),
        ] {
            let refused = chat(&more).to_generation_params(0).expect_err("refused");
            assert_eq!(refused.param.as_deref(), Some(name));
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
            let request = json!({"prompt": prompt}).to_string();
            CompletionRequest::from_json(request.as_bytes()).expect("a request").take_prompts()
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
                .all(|request| CompletionRequest::from_json(request.to_string().as_bytes()).is_err())
        );
        assert!(prompts(&json!([1, "a"])).is_err() && prompts(&json!([[1], 2])).is_err());
        assert!(prompts(&json!([])).is_err() && prompts(&json!(vec!["a"; 65])).is_err());
    }
}
