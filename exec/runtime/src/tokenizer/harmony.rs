//! The response format of gpt-oss, "harmony": converts its answers to the syntax of other models.
//!
//! An answer consists of messages, `<|start|>ROLE<|channel|>NAME<|message|>TEXT<|end|>`; the role of the first one is
//! part of the prompt. The channel `analysis` has thoughts, `final` has the text for the user, and a message whose header
//! has `to=functions.NAME` calls a tool. Here thoughts become `<think>TEXT</think>`, the text of other channels remains,
//! and the header of a call gets the form in which the chat template writes it. source: OpenAI 2025, "OpenAI harmony
//! response format"
//!
//! Not here: prompts, which the chat template writes.

use std::collections::BTreeMap;

use super::{THOUGHT_END, THOUGHT_START};

/// Maximum length of a header in bytes, above which it is text. source: assumed; a role, the name of a tool and a channel
const MAX_HEADER_BYTES: usize = 300;

/// What a token between the texts of messages does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HarmonyToken {
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

/// Returns the tokens of the format in a vocabulary; none if its models do not write in it. `id` finds a control token.
pub(super) fn tokens(id: impl Fn(&str) -> Option<u32>) -> BTreeMap<u32, HarmonyToken> {
    let required = [
        ("<|start|>", HarmonyToken::Start),
        ("<|channel|>", HarmonyToken::Channel),
        ("<|message|>", HarmonyToken::Message),
        ("<|end|>", HarmonyToken::End),
    ];
    let found: BTreeMap<u32, HarmonyToken> =
        required.iter().filter_map(|&(text, token)| Some((id(text)?, token))).collect();
    if found.len() < required.len() || id("<|return|>").is_none() || id("<|call|>").is_none() {
        return BTreeMap::new();
    }
    found.into_iter().chain(id("<|constrain|>").map(|id| (id, HarmonyToken::Ignored))).collect()
}

#[derive(Debug, Default)]
struct Header {
    role: String,
    /// What follows the role: the name of the channel first.
    channel: Option<String>,
}

/// Where an answer is.
#[derive(Debug, Default)]
pub(super) struct HarmonyParser {
    /// The header that is being read; `None` in text.
    header: Option<Header>,
    /// Whether thoughts have begun and not ended. More thoughts may follow the end of a message with thoughts.
    is_in_thoughts: bool,
    has_text: bool,
}

impl HarmonyParser {
    /// Adds a token of the format, and returns the text that it becomes.
    pub(super) fn push_token(&mut self, token: HarmonyToken) -> String {
        match token {
            HarmonyToken::Start => self.header = Some(Header::default()),
            HarmonyToken::End => self.header = None,
            HarmonyToken::Channel => self.header.get_or_insert_default().channel = Some(String::new()),
            HarmonyToken::Ignored => {}
            HarmonyToken::Message => {
                let header = self.header.take().unwrap_or_default();
                return self.begin_message(&header);
            }
        }
        String::new()
    }

    fn begin_message(&mut self, Header { role, channel }: &Header) -> String {
        let channel = channel.as_deref().unwrap_or_default();
        let is_analysis = channel.split_whitespace().next() == Some("analysis");
        let was_in_thoughts = std::mem::replace(&mut self.is_in_thoughts, is_analysis);
        let recipient = [role, channel].into_iter().find_map(|part| part.split_once("to=functions."));
        let end = if was_in_thoughts && !is_analysis { format!("{THOUGHT_END}\n\n") } else { String::new() };
        match recipient {
            Some((_, rest)) if !is_analysis => {
                let name = rest.split_whitespace().next().unwrap_or_default();
                format!("{end}to=functions.{name}<|channel|>commentary json<|message|>")
            }
            _ if is_analysis => if was_in_thoughts { "\n\n" } else { THOUGHT_START }.to_owned(),
            _ => {
                let is_next = std::mem::replace(&mut self.has_text, true);
                if is_next { format!("{end}\n\n") } else { end }
            }
        }
    }

    /// Adds text, and returns what is text of the answer.
    pub(super) fn push_text(&mut self, text: String) -> String {
        let Some(header) = &mut self.header else { return text };
        let Header { role, channel } = header;
        channel.as_mut().unwrap_or(role).push_str(&text);
        if role.len() + channel.as_ref().map_or(0, String::len) <= MAX_HEADER_BYTES {
            return String::new();
        }
        let header = self.header.take().unwrap_or_default();
        header.role + header.channel.as_deref().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Converts an answer in which the tokens are written as their texts.
    fn converted(answer: &str) -> String {
        let texts = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>"];
        let all = [
            HarmonyToken::Start,
            HarmonyToken::Channel,
            HarmonyToken::Message,
            HarmonyToken::End,
            HarmonyToken::Ignored,
        ];
        let (mut parser, mut rest, mut out) = (HarmonyParser::default(), answer, String::new());
        while !rest.is_empty() {
            let found = texts.iter().position(|text| rest.starts_with(text));
            if let Some(at) = found {
                out += &parser.push_token(all[at]);
                rest = &rest[texts[at].len()..];
            } else {
                let (c, after) = rest.split_at(rest.chars().next().map_or(0, char::len_utf8));
                out += &parser.push_text(c.to_owned());
                rest = after;
            }
        }
        out
    }

    #[test]
    fn thoughts_text_and_calls_have_the_common_form() {
        let thoughts = "<|channel|>analysis<|message|>Hm.<|end|>";
        let last = "<|start|>assistant<|channel|>final<|message|>Yes";
        assert_eq!(converted(&format!("{thoughts}{last}")), "<think>Hm.</think>\n\nYes");
        let more = "<|start|>assistant<|channel|>analysis to=python code<|message|>1<|end|>";
        assert_eq!(converted(&format!("{thoughts}{more}{last}")), "<think>Hm.\n\n1</think>\n\nYes");
        let preamble = "<|channel|>commentary<|message|>I look.<|end|>";
        assert_eq!(converted(&format!("{preamble}{last}")), "I look.\n\nYes");
        let call = "to=functions.look<|channel|>commentary json<|message|>{\"at\": 1}";
        for header in [
            "assistant<|channel|>commentary to=functions.look <|constrain|>json",
            "assistant to=functions.look<|channel|>commentary json",
        ] {
            let answer = format!("{thoughts}<|start|>{header}<|message|>{{\"at\": 1}}");
            assert_eq!(converted(&answer), format!("<think>Hm.</think>\n\n{call}"));
        }
        // Without the tokens, and with thoughts that do not end.
        assert_eq!(converted("Just text."), "Just text.");
        assert_eq!(converted("<|channel|>analysis<|message|>Hm"), "<think>Hm");
        let long = "x".repeat(MAX_HEADER_BYTES);
        assert_eq!(converted(&format!("<|channel|>{long}y")), format!("{long}y"));
    }

    #[test]
    fn only_complete_vocabularies_have_the_format() {
        let all = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"];
        let id = |texts: &[&str], text: &str| texts.iter().position(|it| *it == text).map(|at| at as u32);
        assert_eq!(tokens(|text| id(&all, text)).len(), 4);
        assert!(tokens(|text| id(&all[..5], text)).is_empty());
    }
}
