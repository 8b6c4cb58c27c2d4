//! Generation of a response: decodes the tokens from the ring into text.
//!
//! Text is returned as soon as further tokens cannot change it. Bytes of an incomplete UTF-8 character, and text that
//! may be the beginning of a stop string, are buffered. A generation ends at an end-of-generation token, before a stop
//! string, or at its maximum number of tokens.

use std::sync::Arc;

use hearth_ring::ResponseEvent;
use hearth_runtime::{IncrementalDetokenizer, Tokenizer};
use serde::Serialize;
use tokio::sync::mpsc;

use crate::metrics::{ActiveRequest, Usage};

/// The reason why a generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum FinishReason {
    /// The model generated an end-of-generation token or a stop string.
    Stop,
    /// The maximum number of tokens was generated.
    Length,
}

#[derive(Debug, Clone, PartialEq)]
pub enum Chunk {
    Text(String),
    End(FinishReason),
    /// The ring failed; the value is the error message.
    Failed(String),
}

/// The running generation of the text for one prompt. Dropping a generation cancels its request to the ring.
pub struct Generation {
    events: mpsc::UnboundedReceiver<ResponseEvent>,
    tokenizer: Arc<Tokenizer>,
    text: IncrementalDetokenizer,
    stop: StopMatcher,
    /// The numbers of prompt tokens and of generated tokens so far.
    pub usage: Usage,
    active: ActiveRequest,
    /// The reason why the generation ended; `None` while tokens are generated.
    reason: Option<FinishReason>,
    is_done: bool,
}

impl Generation {
    /// Creates a generation for a prompt of `prompt_tokens` tokens. The text ends before the first stop string.
    pub fn new(
        events: mpsc::UnboundedReceiver<ResponseEvent>,
        tokenizer: Arc<Tokenizer>,
        prompt_tokens: u32,
        stop_strings: Vec<String>,
        active: ActiveRequest,
    ) -> Self {
        Self {
            events,
            tokenizer,
            text: IncrementalDetokenizer::default(),
            stop: StopMatcher { stops: stop_strings, buffered: String::new() },
            usage: Usage { prompt_tokens, ..Usage::default() },
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
                Some(ResponseEvent::Started { .. }) => continue,
                Some(ResponseEvent::Token(token)) => self.decode(token),
                Some(ResponseEvent::Failed(message)) => {
                    self.is_done = true;
                    self.active.finish();
                    return Some(Chunk::Failed(message));
                }
                None => {
                    self.reason = Some(FinishReason::Length);
                    self.flush()
                }
            };
            if !text.is_empty() {
                self.active.observe_ttft();
                return Some(Chunk::Text(text));
            }
        }
    }

    fn decode(&mut self, token: u32) -> String {
        self.usage.generated_tokens += 1;
        if self.tokenizer.is_eog(token) {
            self.reason = Some(FinishReason::Stop);
            return self.flush();
        }
        let text = self.text.push(&self.tokenizer, token);
        let (text, stopped) = self.stop.push(&text);
        if stopped {
            self.reason = Some(FinishReason::Stop);
        }
        text
    }

    /// Returns the buffered text at the end of the generation, up to the first stop string.
    fn flush(&mut self) -> String {
        let last = std::mem::take(&mut self.text).finish();
        let (mut text, stopped) = self.stop.push(&last);
        if stopped {
            self.reason = Some(FinishReason::Stop);
        } else {
            text += &std::mem::take(&mut self.stop.buffered);
        }
        text
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
        if let Some(at) = self.stops.iter().filter_map(|stop| self.buffered.find(stop.as_str())).min() {
            self.buffered.truncate(at);
            return (std::mem::take(&mut self.buffered), true);
        }
        let partial_match = |stop: &String| {
            let ends = stop.char_indices().map(|(at, _)| at).skip(1);
            ends.filter(|&at| self.buffered.ends_with(&stop[..at])).max().unwrap_or(0)
        };
        let kept = self.stops.iter().map(partial_match).max().unwrap_or(0);
        let rest = self.buffered.split_off(self.buffered.len() - kept);
        (std::mem::replace(&mut self.buffered, rest), false)
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
