//! What may be asked of the API, and what is refused?
//!
//! The shapes are those of OpenAI's API, as its clients send them. What would change the answer and is not done here is
//! refused by name; what would not (`user`, `metadata`, ..) is passed over.
//!
//! Not here: answers.

use hearth_exec::{Message, SamplerOptions};
use serde::Deserialize;
use serde_json::Value;

/// Stop strings of a request.
/// source: assumed; OpenAI's API takes 4
const MOST_STOPS: usize = 16;
/// Bytes of one.
const LONGEST_STOP: usize = 1024;
/// Texts of one request for completions.
const MOST_PROMPTS: usize = 64;

/// Why something is refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    /// HTTP's status code.
    pub status: u16,
    /// What is wrong, and what to do.
    pub message: String,
    /// The key at fault.
    pub param: Option<&'static str>,
    /// A short name for programs.
    pub code: &'static str,
}

impl Refused {
    /// A request that cannot be answered as it is.
    pub fn invalid(param: &'static str, message: impl Into<String>) -> Self {
        Self { status: 400, message: message.into(), param: Some(param), code: "invalid_value" }
    }
}

/// What a request for a chat or a completion has in common.
#[derive(Debug, Deserialize)]
pub struct Common {
    /// Which model.
    #[serde(default)]
    pub model: Option<String>,
    /// At most so many tokens.
    #[serde(default)]
    max_tokens: Option<u32>,
    /// The same, by its newer name.
    #[serde(default)]
    max_completion_tokens: Option<u32>,
    #[serde(default)]
    temperature: Option<f32>,
    #[serde(default)]
    top_p: Option<f32>,
    /// Not of OpenAI's API, and usual elsewhere.
    #[serde(default)]
    top_k: Option<usize>,
    #[serde(default)]
    seed: Option<i64>,
    #[serde(default)]
    stop: Option<OneOrMore>,
    /// Whether the answer comes in pieces.
    #[serde(default)]
    pub stream: Option<bool>,
    #[serde(default)]
    stream_options: Option<StreamOptions>,
    #[serde(default)]
    n: Option<u32>,
    #[serde(default)]
    presence_penalty: Option<f32>,
    #[serde(default)]
    frequency_penalty: Option<f32>,
    #[serde(default)]
    logit_bias: Option<Value>,
    #[serde(default)]
    logprobs: Option<Value>,
    #[serde(default)]
    response_format: Option<Value>,
    #[serde(default)]
    tools: Option<Vec<Value>>,
    #[serde(default)]
    functions: Option<Vec<Value>>,
    #[serde(default)]
    echo: Option<bool>,
    #[serde(default)]
    suffix: Option<String>,
    #[serde(default)]
    best_of: Option<u32>,
}

#[derive(Debug, Deserialize)]
struct StreamOptions {
    #[serde(default)]
    include_usage: bool,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum OneOrMore {
    One(String),
    More(Vec<String>),
}

/// A request for a chat.
#[derive(Debug, Deserialize)]
pub struct Chat {
    messages: Vec<Said>,
    /// The rest.
    #[serde(flatten)]
    pub common: Common,
}

/// What somebody said.
#[derive(Debug, Deserialize)]
struct Said {
    role: String,
    #[serde(default)]
    content: Option<Content>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Content {
    Text(String),
    Parts(Vec<Part>),
}

#[derive(Debug, Deserialize)]
struct Part {
    #[serde(rename = "type")]
    sort: String,
    #[serde(default)]
    text: Option<String>,
}

/// A request for completions.
#[derive(Debug, Deserialize)]
pub struct Complete {
    prompt: Option<Prompts>,
    /// The rest.
    #[serde(flatten)]
    pub common: Common,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Prompts {
    Text(String),
    Texts(Vec<String>),
    Tokens(Vec<u32>),
    Several(Vec<Vec<u32>>),
}

/// A text to go on from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Prompt {
    /// In letters.
    Text(String),
    /// In tokens.
    Tokens(Vec<u32>),
}

/// How an answer is made, checked.
#[derive(Debug, Clone, PartialEq)]
pub struct How {
    /// At most so many tokens; as many as there is room for if absent.
    pub most: Option<u32>,
    /// How tokens are chosen.
    pub sampler: SamplerOptions,
    /// Before which texts it ends.
    pub stops: Vec<String>,
    /// Whether it comes in pieces.
    pub stream: bool,
    /// Whether the last piece says what it took.
    pub include_usage: bool,
}

impl Chat {
    /// The conversation.
    pub fn messages(&self) -> Result<Vec<Message>, Refused> {
        self.messages.iter().map(Said::message).collect()
    }
}

impl Said {
    fn message(&self) -> Result<Message, Refused> {
        let content = match &self.content {
            None => String::new(),
            Some(Content::Text(text)) => text.clone(),
            Some(Content::Parts(parts)) => {
                let text = |part: &Part| match (&*part.sort, &part.text) {
                    ("text", Some(text)) => Ok(text.clone()),
                    (sort, _) => Err(Refused::invalid(
                        "messages",
                        format!("a part of type `{}` cannot be read: this model reads text", shortened(sort)),
                    )),
                };
                parts.iter().map(text).collect::<Result<_, _>>()?
            }
        };
        Ok(Message { role: self.role.clone(), content })
    }
}

impl Complete {
    /// The texts to go on from.
    pub fn prompts(&self) -> Result<Vec<Prompt>, Refused> {
        let prompts: Vec<Prompt> = match &self.prompt {
            None => vec![],
            Some(Prompts::Text(text)) => vec![Prompt::Text(text.clone())],
            Some(Prompts::Texts(texts)) => texts.iter().cloned().map(Prompt::Text).collect(),
            Some(Prompts::Tokens(tokens)) => vec![Prompt::Tokens(tokens.clone())],
            Some(Prompts::Several(several)) => several.iter().cloned().map(Prompt::Tokens).collect(),
        };
        match prompts.len() {
            0 => Err(Refused::invalid("prompt", "there is no prompt: give a text, or a list of texts")),
            1..=MOST_PROMPTS => Ok(prompts),
            count => Err(Refused::invalid(
                "prompt",
                format!("{count} prompts at once: give at most {MOST_PROMPTS}"),
            )),
        }
    }
}

impl Common {
    /// Checks it. `seed` is taken where none is given.
    pub fn how(&self, seed: u64) -> Result<How, Refused> {
        self.only_what_is_done()?;
        let usual = SamplerOptions::default();
        // As OpenAI's API has it, an answer is drawn unless `temperature` is 0.
        let sampler = SamplerOptions {
            temperature: self.temperature.unwrap_or(1.0),
            top_k: self.top_k.unwrap_or(usual.top_k),
            top_p: self.top_p.unwrap_or(usual.top_p),
            seed: self.seed.map_or(seed, i64::cast_unsigned),
        };
        let most = self.max_completion_tokens.or(self.max_tokens);
        if most == Some(0) {
            return Err(Refused::invalid("max_tokens", "no token is wanted: give 1 or more"));
        }
        let stops = match &self.stop {
            None => vec![],
            Some(OneOrMore::One(stop)) => vec![stop.clone()],
            Some(OneOrMore::More(stops)) => stops.clone(),
        };
        if stops.len() > MOST_STOPS || stops.iter().any(|stop| stop.is_empty() || stop.len() > LONGEST_STOP) {
            let what = format!("give at most {MOST_STOPS} texts, each of 1 to {LONGEST_STOP} bytes");
            return Err(Refused::invalid("stop", what));
        }
        let include_usage = self.stream_options.as_ref().is_some_and(|options| options.include_usage);
        Ok(How { most, sampler, stops, stream: self.stream.unwrap_or(false), include_usage })
    }

    fn only_what_is_done(&self) -> Result<(), Refused> {
        let asks = |value: &Option<Value>| {
            value.as_ref().is_some_and(|value| {
                let is_empty = value.as_object().is_some_and(serde_json::Map::is_empty);
                !(value.is_null() || *value == Value::Bool(false) || is_empty)
            })
        };
        let is_text = |format: &Value| format.get("type").and_then(Value::as_str) == Some("text");
        let penalised = |penalty: Option<f32>| penalty.is_some_and(|penalty| penalty != 0.0);
        let not_done = [
            ("n", self.n.is_some_and(|count| count != 1)),
            ("best_of", self.best_of.is_some_and(|count| count != 1)),
            ("presence_penalty", penalised(self.presence_penalty)),
            ("frequency_penalty", penalised(self.frequency_penalty)),
            ("logit_bias", asks(&self.logit_bias)),
            ("logprobs", asks(&self.logprobs)),
            ("response_format", self.response_format.as_ref().is_some_and(|format| !is_text(format))),
            ("tools", self.tools.as_ref().is_some_and(|tools| !tools.is_empty())),
            ("functions", self.functions.as_ref().is_some_and(|functions| !functions.is_empty())),
            ("echo", self.echo == Some(true)),
            ("suffix", self.suffix.as_ref().is_some_and(|suffix| !suffix.is_empty())),
        ];
        match not_done.into_iter().find(|(_, asked)| *asked) {
            Some((key, _)) => Err(Refused::invalid(key, format!("`{key}` is not done here: leave it out"))),
            None => Ok(()),
        }
    }
}

/// Of a text that somebody sent, as much as an error needs.
pub fn shortened(text: &str) -> String {
    text.chars().take(60).map(|letter| if letter.is_control() { '?' } else { letter }).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn chat(more: &Value) -> Chat {
        let mut request = json!({"model": "m", "messages": [{"role": "user", "content": "Hello"}]});
        let all = request.as_object_mut().expect("an object");
        all.extend(more.as_object().expect("an object").clone());
        serde_json::from_value(request).expect("a chat")
    }

    #[test]
    fn a_client_may_send_what_changes_nothing() {
        let how = chat(&json!({"user": "me", "n": 1, "logprobs": false, "tools": [], "presence_penalty": 0}))
            .common
            .how(7)
            .expect("fine");
        assert_eq!((how.most, how.sampler.temperature, how.sampler.seed, how.stream), (None, 1.0, 7, false));
        let how =
            chat(&json!({"max_tokens": 5, "seed": -1, "stop": ["a", "b"], "temperature": 0, "stream": true,
            "stream_options": {"include_usage": true}}))
            .common
            .how(7)
            .expect("fine");
        assert_eq!((how.most, how.sampler.seed, how.stops.len()), (Some(5), u64::MAX, 2));
        assert!(how.stream && how.include_usage);
    }

    #[test]
    fn what_is_not_done_is_refused_by_name() {
        let not_done = [
            json!({"n": 2}),
            json!({"presence_penalty": 0.5}),
            json!({"logit_bias": {"50256": -100}}),
            json!({"logprobs": true}),
            json!({"response_format": {"type": "json_object"}}),
            json!({"tools": [{"type": "function"}]}),
        ];
        for more in not_done {
            let key = more.as_object().and_then(|all| all.keys().next().cloned()).expect("a key");
            let refused = chat(&more).common.how(0).expect_err("refused");
            assert!(refused.param == Some(&*key) && refused.message.contains(&key), "{refused:?}");
        }
        for more in [json!({"stop": ""}), json!({"stop": vec!["x"; 17]}), json!({"max_tokens": 0})] {
            assert!(chat(&more).common.how(0).is_err());
        }
    }

    #[test]
    fn parts_of_text_are_one_text_and_pictures_are_refused() {
        let said =
            |content: &Value| chat(&json!({"messages": [{"role": "user", "content": content}]})).messages();
        let text =
            said(&json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])).expect("text");
        assert_eq!(text[0].content, "ab");
        let refused = said(&json!([{"type": "image_url", "image_url": {"url": "x"}}])).expect_err("refused");
        assert!(refused.message.contains("image_url"), "{refused:?}");
    }

    #[test]
    fn prompts_are_texts_or_tokens() {
        let prompts = |prompt: &Value| {
            serde_json::from_value::<Complete>(json!({"prompt": prompt})).expect("a request").prompts()
        };
        assert_eq!(prompts(&json!("a")), Ok(vec![Prompt::Text("a".into())]));
        assert_eq!(prompts(&json!(["a", "b"])).map(|all| all.len()), Ok(2));
        assert_eq!(prompts(&json!([1, 2])), Ok(vec![Prompt::Tokens(vec![1, 2])]));
        assert_eq!(prompts(&json!([[1], [2]])).map(|all| all.len()), Ok(2));
        assert!(prompts(&json!([])).is_err() && prompts(&json!(vec!["a"; 65])).is_err());
    }
}
