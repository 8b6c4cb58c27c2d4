//! Generation of a response: decodes the tokens from the ring into text.
//!
//! Text is returned as soon as further tokens cannot change it. Bytes of an incomplete UTF-8 character, and text that
//! may be the beginning of a stop string, are buffered. A generation ends at an end-of-generation token, before a stop
//! string, or at its maximum number of tokens.

use std::collections::BTreeSet;
use std::sync::{Arc, OnceLock};

use axum::http::StatusCode;
use hearth_ring::ResponseEvent;
use hearth_runtime::{IncrementalDetokenizer, Tokenizer};
use serde::Serialize;
use tokio::sync::mpsc;

use crate::answer::{AnswerParser, Part, take_until};
use crate::error::ApiError;
use crate::logprobs::TokenLogprobs;
use crate::metrics::{ActiveRequest, Usage};

/// The reason why a generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum FinishReason {
    /// The model generated an end-of-generation token or a stop string.
    Stop,
    /// The maximum number of tokens was generated.
    Length,
    /// The model called tools.
    #[serde(rename = "tool_calls")]
    ToolCalls,
}

#[derive(Debug, Clone, PartialEq)]
pub enum Chunk {
    /// Parts of the answer, and the log-probabilities of the tokens since the last chunk, if they are wanted.
    Parts(Vec<Part>, Vec<TokenLogprobs>),
    End(FinishReason),
    Failed(ApiError),
}

/// The number of tokens of a prompt, and the number that the usage reports: the prompt of several answers counts once.
#[derive(Debug, Clone, Copy)]
pub struct PromptTokens {
    pub count: u32,
    pub reported: u32,
}

/// How the tokens of a generation become an answer.
pub struct AnswerFormat {
    /// Finds thoughts and calls; `None` if the answer is only text.
    pub parser: Option<AnswerParser>,
    /// The control tokens that are part of the text.
    pub visible: Arc<BTreeSet<u32>>,
    /// The text ends before the first of these strings.
    pub stop_strings: Vec<String>,
    /// The log-probabilities of each token, if they are wanted. They are sent before the token.
    pub logprobs: Option<mpsc::UnboundedReceiver<TokenLogprobs>>,
    /// Gets the reason why a grammar ended the text early.
    pub grammar_failure: Option<Arc<OnceLock<String>>>,
}

/// The running generation of the text for one prompt. Dropping a generation cancels its request to the ring.
pub struct Generation {
    events: mpsc::UnboundedReceiver<ResponseEvent>,
    tokenizer: Arc<Tokenizer>,
    text: IncrementalDetokenizer,
    stop: StopMatcher,
    format: AnswerFormat,
    logprobs: Vec<TokenLogprobs>,
    prompt_tokens: u32,
    /// The numbers of tokens to report, so far.
    pub usage: Usage,
    active: ActiveRequest,
    /// The reason why the generation ended; `None` while tokens are generated.
    reason: Option<FinishReason>,
    is_done: bool,
}

impl Generation {
    /// Creates a generation.
    pub fn new(
        events: mpsc::UnboundedReceiver<ResponseEvent>,
        tokenizer: Arc<Tokenizer>,
        prompt: PromptTokens,
        mut format: AnswerFormat,
        active: ActiveRequest,
    ) -> Self {
        let stops = std::mem::take(&mut format.stop_strings);
        Self {
            events,
            tokenizer,
            text: IncrementalDetokenizer::default(),
            stop: StopMatcher { stops, buffered: String::new() },
            format,
            logprobs: Vec::new(),
            prompt_tokens: prompt.count,
            usage: Usage { prompt_tokens: prompt.reported, ..Usage::default() },
            active,
            reason: None,
            is_done: false,
        }
    }

    /// Returns the next chunk of the response, or `None` after the last chunk. Records the time to first token and the
    /// final token usage in the metrics.
    pub async fn next_chunk(&mut self) -> Option<Chunk> {
        loop {
            if self.is_done {
                self.active.finish();
                self.active.record_usage(self.usage);
                return None;
            }
            if let Some(reason) = self.reason {
                self.is_done = true;
                return Some(Chunk::End(reason));
            }
            let text = match self.events.recv().await {
                // The number of cached tokens is not reported: it would reveal the prompts of other users.
                Some(ResponseEvent::Started { .. }) => {
                    self.active.record_running(self.prompt_tokens);
                    continue;
                }
                Some(ResponseEvent::Token(token)) => self.decode(token),
                Some(ResponseEvent::Failed(message)) => {
                    return Some(self.fail(ApiError::ring_failed(message)));
                }
                None => {
                    self.reason = Some(FinishReason::Length);
                    std::mem::take(&mut self.text).finish()
                }
            };
            let parts = self.parts(text);
            if let Some(why) = self.format.grammar_failure.as_ref().and_then(|failure| failure.get()) {
                let message = format!("the answer cannot follow its grammar: {why}; use a simpler one");
                let error = ApiError::new(StatusCode::UNPROCESSABLE_ENTITY, "grammar_failed", message);
                return Some(self.fail(error));
            }
            if !parts.is_empty() || (self.reason.is_some() && !self.logprobs.is_empty()) {
                self.active.observe_ttft();
                return Some(Chunk::Parts(parts, std::mem::take(&mut self.logprobs)));
            }
        }
    }

    fn fail(&mut self, error: ApiError) -> Chunk {
        self.is_done = true;
        self.active.finish();
        Chunk::Failed(error)
    }

    /// Returns the parts of the answer that are known after `text`; all if the generation has ended. The text of the
    /// answer, but not thoughts and calls, ends before the first stop string.
    fn parts(&mut self, text: String) -> Vec<Part> {
        let has_ended = self.reason.is_some();
        let found = match &mut self.format.parser {
            None => vec![Part::Text(text)],
            Some(parser) => {
                let mut found = parser.push(&text);
                if has_ended {
                    found.extend(parser.finish());
                }
                found
            }
        };
        let mut parts = Vec::new();
        for part in found {
            let Part::Text(text) = part else {
                parts.push(Part::Text(std::mem::take(&mut self.stop.buffered)));
                parts.push(part);
                continue;
            };
            let (text, stopped) = self.stop.push(&text);
            parts.push(Part::Text(text));
            if stopped {
                self.reason = Some(FinishReason::Stop);
                break;
            }
        }
        if has_ended {
            parts.push(Part::Text(std::mem::take(&mut self.stop.buffered)));
            let has_calls = self.format.parser.as_ref().is_some_and(AnswerParser::has_calls);
            if self.reason == Some(FinishReason::Stop) && has_calls {
                self.reason = Some(FinishReason::ToolCalls);
            }
        }
        parts.retain(|part| !part.is_empty());
        parts
    }

    fn decode(&mut self, token: u32) -> String {
        self.usage.generated_tokens += 1;
        self.active.record_token();
        let logprobs = self.format.logprobs.as_mut().and_then(|logprobs| logprobs.try_recv().ok());
        if self.tokenizer.is_eog(token) {
            self.reason = Some(FinishReason::Stop);
            return std::mem::take(&mut self.text).finish();
        }
        self.logprobs.extend(logprobs);
        let control = self.tokenizer.control_text(token).filter(|_| self.format.visible.contains(&token));
        match control {
            Some(control) => std::mem::take(&mut self.text).finish() + control,
            None => self.text.push(&self.tokenizer, token),
        }
    }
}

/// A matcher that finds stop strings in text that arrives in parts.
struct StopMatcher {
    stops: Vec<String>,
    /// Text that may be the beginning of a stop string.
    buffered: String,
}

impl StopMatcher {
    /// Adds text. Returns the text that cannot belong to a stop string, and whether a stop string was found.
    fn push(&mut self, text: &str) -> (String, bool) {
        self.buffered += text;
        let stops: Vec<&str> = self.stops.iter().map(String::as_str).collect();
        let (text, found) = take_until(&mut self.buffered, &stops);
        (text, found.is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn possible_stop_strings_are_buffered() {
        let check = |case: &str, stops: &[&str], texts: &[&str], expected: &[&str], is_stopped: bool| {
            let stops = stops.iter().map(ToString::to_string).collect();
            let mut matcher = StopMatcher { stops, buffered: String::new() };
            let mut out = Vec::new();
            let stopped = texts.iter().any(|text| {
                let (text, stopped) = matcher.push(text);
                out.push(text);
                stopped
            });
            if !stopped {
                out.push(matcher.buffered);
            }
            let expected = expected.iter().map(ToString::to_string).collect();
            assert_eq!((out, stopped), (expected, is_stopped), "{case}");
        };
        check("no match", &["END"], &["a", "bE", "N", "x"], &["a", "b", "", "ENx", ""], false);
        check("match in two parts", &["END"], &["aE", "ND of it"], &["a", ""], true);
        check("character of two bytes", &["é!"], &["caf", "é", "!"], &["caf", "", ""], true);
        check("repeated beginning", &["aab"], &["aaa", "b"], &["a", ""], true);
        check("the first match ends the text", &["x", "yz"], &["wyz x"], &["w"], true);
        check("no stop string", &[], &["all", "of it"], &["all", "of it", ""], false);
        check("a partial match is released at the end", &["END"], &["THE EN"], &["THE ", "EN"], false);
    }
}
