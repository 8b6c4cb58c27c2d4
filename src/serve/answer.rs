//! How do the tokens that a guest is told become the text of an answer?
//!
//! Letter by letter as far as it is certain: bytes of a character that is not complete, and text that may turn out to be
//! the beginning of a stop string, are held back. An answer ends with a token that ends texts, before a stop string, or
//! when all tokens wanted are out.
//!
//! Not here: how it is sent.

use std::sync::Arc;

use hearth_exec::ring::Said;
use hearth_exec::{TextStream, Tokenizer};
use serde::Serialize;
use tokio::sync::mpsc;

/// Why an answer is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Finish {
    /// The model ended it, or a stop string did.
    Stop,
    /// All tokens wanted are out.
    Length,
}

/// What comes of an answer next.
#[derive(Debug, Clone, PartialEq)]
pub enum Piece {
    /// More text.
    Text(String),
    /// No more.
    End(Finish),
    /// The ring gave up.
    Failed(String),
}

/// Tokens that an answer took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Of the prompt.
    pub prompt: u32,
    /// Of these, those that had been computed before.
    pub held: u32,
    /// Of the answer.
    pub generated: u32,
}

/// An answer while it comes. Dropped, it is given up.
pub struct Answer {
    said: mpsc::UnboundedReceiver<Said>,
    tokenizer: Arc<Tokenizer>,
    text: TextStream,
    stops: Stops,
    usage: Usage,
    /// What is told after the text at hand.
    over: Option<Finish>,
    is_told: bool,
}

impl Answer {
    /// To a prompt of so many tokens.
    pub fn new(
        said: mpsc::UnboundedReceiver<Said>,
        tokenizer: Arc<Tokenizer>,
        prompt: u32,
        stops: Vec<String>,
    ) -> Self {
        Self {
            said,
            tokenizer,
            text: TextStream::default(),
            stops: Stops::new(stops),
            usage: Usage { prompt, ..Usage::default() },
            over: None,
            is_told: false,
        }
    }

    /// What it took so far.
    pub fn usage(&self) -> Usage {
        self.usage
    }

    /// What comes next; nothing after its end.
    pub async fn next(&mut self) -> Option<Piece> {
        loop {
            if self.is_told {
                return None;
            }
            if let Some(finish) = self.over {
                self.is_told = true;
                return Some(Piece::End(finish));
            }
            let text = match self.said.recv().await {
                Some(Said::Begun { held }) => {
                    self.usage.held = held;
                    continue;
                }
                Some(Said::Token(token)) => self.token(token),
                Some(Said::Failed(why)) => {
                    self.is_told = true;
                    return Some(Piece::Failed(why));
                }
                None => {
                    self.over = Some(Finish::Length);
                    self.rest()
                }
            };
            if !text.is_empty() {
                return Some(Piece::Text(text));
            }
        }
    }

    fn token(&mut self, token: u32) -> String {
        self.usage.generated += 1;
        if self.tokenizer.is_end(token) {
            self.over = Some(Finish::Stop);
            return self.rest();
        }
        let text = self.text.push(&self.tokenizer, token);
        let (text, stopped) = self.stops.push(&text);
        if stopped {
            self.over = Some(Finish::Stop);
        }
        text
    }

    /// What was held back, when no more comes.
    fn rest(&mut self) -> String {
        let last = std::mem::take(&mut self.text).finish();
        let (mut text, stopped) = self.stops.push(&last);
        if stopped {
            self.over = Some(Finish::Stop);
        } else {
            text += &self.stops.finish();
        }
        text
    }
}

/// Strings before which a text ends.
struct Stops {
    stops: Vec<String>,
    held: String,
}

impl Stops {
    fn new(stops: Vec<String>) -> Self {
        Self { stops, held: String::new() }
    }

    /// Takes more text: what is certain now, and whether a stop string has come.
    fn push(&mut self, text: &str) -> (String, bool) {
        self.held += text;
        if let Some(at) = self.stops.iter().filter_map(|stop| self.held.find(stop.as_str())).min() {
            self.held.truncate(at);
            return (std::mem::take(&mut self.held), true);
        }
        let begun = |stop: &String| {
            let ends = stop.char_indices().map(|(at, _)| at).skip(1);
            ends.filter(|&at| self.held.ends_with(&stop[..at])).max().unwrap_or(0)
        };
        let kept = self.stops.iter().map(begun).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - kept);
        (std::mem::replace(&mut self.held, rest), false)
    }

    /// What was held back.
    fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(stops: &[&str], texts: &[&str]) -> (Vec<String>, bool) {
        let mut scan = Stops::new(stops.iter().map(ToString::to_string).collect());
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
    fn text_that_may_be_a_stop_string_is_held_back() {
        let strings = |texts: &[&str]| texts.iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(pieces(&["END"], &["a", "bE", "N", "x"]), (strings(&["a", "b", "", "ENx", ""]), false));
        assert_eq!(pieces(&["END"], &["aE", "ND of it"]), (strings(&["a", ""]), true));
        assert_eq!(pieces(&["é!"], &["caf", "é", "!"]), (strings(&["caf", "", ""]), true));
        assert_eq!(pieces(&["aab"], &["aaa", "b"]), (strings(&["a", ""]), true));
        assert_eq!(pieces(&["x", "yz"], &["wyz x"]), (strings(&["w"]), true), "whichever comes first");
        assert_eq!(pieces(&[], &["all", "of it"]), (strings(&["all", "of it", ""]), false));
        assert_eq!(pieces(&["END"], &["THE EN"]), (strings(&["THE ", "EN"]), false), "it was none");
    }
}
