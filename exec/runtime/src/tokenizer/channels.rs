//! The channels in which gpt-oss writes: converts its answers to the syntax of other models.
//!
//! An answer consists of messages, `<|start|>ROLE<|channel|>NAME<|message|>TEXT<|end|>`, of which the first has no role.
//! The channel `analysis` has thoughts, `final` has the text for the user, and a message whose header has
//! `to=functions.NAME` calls a tool. Here thoughts become `<think>TEXT</think>`, the text of other channels remains, and
//! the header of a call gets the form in which the chat template writes it. source: OpenAI 2025, "harmony response
//! format"
//!
//! Not here: prompts, which the chat template writes.

use std::collections::BTreeMap;

use crate::chat::{THOUGHT_END, THOUGHT_START};

/// Maximum length of a header in bytes, above which it is text. source: assumed; a role, the name of a tool and a channel
const MAX_HEADER_BYTES: usize = 300;

/// What a token does to messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mark {
    /// The role follows.
    Start,
    /// The name of the channel follows.
    Channel,
    /// The text follows.
    Message,
    End,
    /// Part of a header without a meaning here.
    Ignored,
}

/// Returns the marks of a vocabulary, by token; none if its models do not write in channels. `id` finds a token.
pub(super) fn marks(id: impl Fn(&str) -> Option<u32>) -> BTreeMap<u32, Mark> {
    let required = [
        ("<|start|>", Mark::Start),
        ("<|channel|>", Mark::Channel),
        ("<|message|>", Mark::Message),
        ("<|end|>", Mark::End),
    ];
    let found: BTreeMap<u32, Mark> =
        required.iter().filter_map(|&(text, mark)| Some((id(text)?, mark))).collect();
    if found.len() < required.len() || id("<|return|>").is_none() || id("<|call|>").is_none() {
        return BTreeMap::new();
    }
    found.into_iter().chain(id("<|constrain|>").map(|id| (id, Mark::Ignored))).collect()
}

/// Where an answer is.
#[derive(Debug, Default)]
pub(super) struct Channels {
    /// The header that is being read; `None` in text.
    header: Option<String>,
    has_thoughts: bool,
}

impl Channels {
    /// Adds a mark, and returns the text that it becomes.
    pub(super) fn push_mark(&mut self, mark: Mark) -> String {
        match mark {
            Mark::Start | Mark::End => {
                self.header = (mark == Mark::Start).then(String::new);
                let ends = std::mem::take(&mut self.has_thoughts);
                if ends { format!("{THOUGHT_END}\n\n") } else { String::new() }
            }
            Mark::Channel => {
                // A space, so that it ends the name of a tool.
                self.header.get_or_insert_default().push(' ');
                String::new()
            }
            Mark::Message => {
                let header = self.header.take().unwrap_or_default();
                if let Some((_, rest)) = header.split_once("to=functions.") {
                    let name = rest.split_whitespace().next().unwrap_or_default();
                    return format!("to=functions.{name}<|channel|>commentary json<|message|>");
                }
                self.has_thoughts = header.trim().ends_with("analysis");
                if self.has_thoughts { THOUGHT_START.to_owned() } else { String::new() }
            }
            Mark::Ignored => String::new(),
        }
    }

    /// Adds text, and returns what is text of the answer.
    pub(super) fn push_text(&mut self, text: String) -> String {
        let Some(header) = &mut self.header else { return text };
        header.push_str(&text);
        if header.len() <= MAX_HEADER_BYTES {
            return String::new();
        }
        self.header.take().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Converts an answer in which marks are written as their texts.
    fn converted(answer: &str) -> String {
        let texts = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>"];
        let all = [Mark::Start, Mark::Channel, Mark::Message, Mark::End, Mark::Ignored];
        let (mut channels, mut rest, mut out) = (Channels::default(), answer, String::new());
        while !rest.is_empty() {
            let found = texts.iter().position(|mark| rest.starts_with(mark));
            if let Some(at) = found {
                out += &channels.push_mark(all[at]);
                rest = &rest[texts[at].len()..];
            } else {
                let (c, after) = rest.split_at(rest.chars().next().map_or(0, char::len_utf8));
                out += &channels.push_text(c.to_owned());
                rest = after;
            }
        }
        out
    }

    #[test]
    fn thoughts_text_and_calls_have_the_common_form() {
        let thoughts = "<|channel|>analysis<|message|>Hm.<|end|>";
        assert_eq!(
            converted(&format!("{thoughts}<|start|>assistant<|channel|>final<|message|>Yes")),
            "<think>Hm.</think>\n\nYes"
        );
        let call = "to=functions.look<|channel|>commentary json<|message|>{\"at\": 1}";
        for header in [
            "assistant<|channel|>commentary to=functions.look <|constrain|>json",
            "assistant to=functions.look<|channel|>commentary json",
        ] {
            let answer = format!("{thoughts}<|start|>{header}<|message|>{{\"at\": 1}}");
            assert_eq!(converted(&answer), format!("<think>Hm.</think>\n\n{call}"));
        }
        // Without a mark, and with thoughts that do not end.
        assert_eq!(converted("Just text."), "Just text.");
        assert_eq!(converted("<|channel|>analysis<|message|>Hm"), "<think>Hm");
        let long = "x".repeat(MAX_HEADER_BYTES);
        assert_eq!(converted(&format!("<|channel|>{long}y")), format!(" {long}y"));
    }

    #[test]
    fn only_complete_vocabularies_have_channels() {
        let all = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"];
        let id = |texts: &[&str], text: &str| texts.iter().position(|it| *it == text).map(|at| at as u32);
        assert_eq!(marks(|text| id(&all, text)).len(), 4);
        assert!(marks(|text| id(&all[..5], text)).is_empty());
    }
}
