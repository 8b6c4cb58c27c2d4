//! Generations: the text of a request, decoded from the ring's token events.
//!
//! Text is returned as soon as it is certain. Bytes of an incomplete character, and text that may be the beginning of
//! a stop string, are buffered. A generation ends with an end-of-text token, before a stop string, or at its token
//! limit.

use std::sync::Arc;

use hearth_ring::ResponseEvent;
use hearth_runtime::{TextStream, Tokenizer};
use serde::Serialize;
use tokio::sync::mpsc;

/// Why a generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum FinishReason {
    /// An end-of-text token or a stop string.
    Stop,
    /// The maximum number of tokens.
    Length,
}

#[derive(Debug, Clone, PartialEq)]
pub enum Chunk {
    Text(String),
    End(FinishReason),
    /// The ring failed for this reason.
    Failed(String),
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[expect(clippy::struct_field_names, reason = "the names of the API")]
pub struct Usage {
    pub prompt_tokens: u32,
    /// Tokens of the prompt that were found in the cache.
    pub cached_tokens: u32,
    pub generated_tokens: u32,
}

impl std::iter::Sum for Usage {
    fn sum<I: Iterator<Item = Usage>>(usages: I) -> Usage {
        usages.fold(Usage::default(), |sum, more| Usage {
            prompt_tokens: sum.prompt_tokens + more.prompt_tokens,
            cached_tokens: sum.cached_tokens + more.cached_tokens,
            generated_tokens: sum.generated_tokens + more.generated_tokens,
        })
    }
}

/// A running generation. Dropping it cancels the request.
pub struct Generation {
    events: mpsc::UnboundedReceiver<ResponseEvent>,
    tokenizer: Arc<Tokenizer>,
    text: TextStream,
    stop: StopMatcher,
    usage: Usage,
    /// Why the generation ended, once it has.
    reason: Option<FinishReason>,
    is_done: bool,
}

impl Generation {
    /// Creates a generation for a prompt of `prompt` tokens.
    pub fn new(
        events: mpsc::UnboundedReceiver<ResponseEvent>,
        tokenizer: Arc<Tokenizer>,
        prompt: u32,
        stop: Vec<String>,
    ) -> Self {
        Self {
            events,
            tokenizer,
            text: TextStream::default(),
            stop: StopMatcher::new(stop),
            usage: Usage { prompt_tokens: prompt, ..Usage::default() },
            reason: None,
            is_done: false,
        }
    }

    /// Returns the token counts so far.
    pub fn usage(&self) -> Usage {
        self.usage
    }

    /// Returns the next chunk, and `None` after the end.
    pub async fn next(&mut self) -> Option<Chunk> {
        loop {
            if self.is_done {
                return None;
            }
            if let Some(reason) = self.reason {
                self.is_done = true;
                return Some(Chunk::End(reason));
            }
            let text = match self.events.recv().await {
                Some(ResponseEvent::Started { cached_tokens }) => {
                    self.usage.cached_tokens = cached_tokens;
                    continue;
                }
                Some(ResponseEvent::Token(token)) => self.decode(token),
                Some(ResponseEvent::Failed(message)) => {
                    self.is_done = true;
                    return Some(Chunk::Failed(message));
                }
                None => {
                    self.reason = Some(FinishReason::Length);
                    self.flush()
                }
            };
            if !text.is_empty() {
                return Some(Chunk::Text(text));
            }
        }
    }

    fn decode(&mut self, token: u32) -> String {
        self.usage.generated_tokens += 1;
        if self.tokenizer.is_end(token) {
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

    /// Returns the buffered text when the generation ends.
    fn flush(&mut self) -> String {
        let last = std::mem::take(&mut self.text).finish();
        let (mut text, stopped) = self.stop.push(&last);
        if stopped {
            self.reason = Some(FinishReason::Stop);
        } else {
            text += &self.stop.finish();
        }
        text
    }
}

/// Finds stop strings in text that arrives in parts.
struct StopMatcher {
    stops: Vec<String>,
    /// Text that may be the beginning of a stop string.
    buffered: String,
}

impl StopMatcher {
    fn new(stops: Vec<String>) -> Self {
        Self { stops, buffered: String::new() }
    }

    /// Adds text. Returns the text that is certain, and whether a stop string was found.
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

    /// Returns the buffered text.
    fn finish(&mut self) -> String {
        std::mem::take(&mut self.buffered)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matched(stops: &[&str], texts: &[&str]) -> (Vec<String>, bool) {
        let mut scan = StopMatcher::new(stops.iter().map(ToString::to_string).collect());
        let mut out = Vec::new();
        for text in texts {
            let (text, stopped) = scan.push(text);
            out.push(text);
            if stopped {
                return (out, true);
            }
        }
        out.push(scan.finish());
        (out, false)
    }

    #[test]
    fn possible_stop_strings_are_buffered() {
        let strings = |texts: &[&str]| texts.iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(matched(&["END"], &["a", "bE", "N", "x"]), (strings(&["a", "b", "", "ENx", ""]), false));
        assert_eq!(matched(&["END"], &["aE", "ND of it"]), (strings(&["a", ""]), true));
        assert_eq!(matched(&["é!"], &["caf", "é", "!"]), (strings(&["caf", "", ""]), true));
        assert_eq!(matched(&["aab"], &["aaa", "b"]), (strings(&["a", ""]), true));
        assert_eq!(
            matched(&["x", "yz"], &["wyz x"]),
            (strings(&["w"]), true),
            "the first match ends the text"
        );
        assert_eq!(matched(&[], &["all", "of it"]), (strings(&["all", "of it", ""]), false));
        assert_eq!(
            matched(&["END"], &["THE EN"]),
            (strings(&["THE ", "EN"]), false),
            "a partial match is released at the end"
        );
    }
}
