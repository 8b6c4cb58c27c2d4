//! The parts of an answer: thoughts, text and calls of tools, found in the text of a model as it arrives.
//!
//! A model that thinks writes its thoughts between `<think>` and `</think>`. Calls of tools have the syntax of the
//! model ([`ToolSyntax`]) and are the end of an answer. Text that may be the beginning of a mark is buffered.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use hearth_runtime::ToolSyntax;
use hearth_runtime::chat::{THOUGHT_END, THOUGHT_START};
use serde_json::{Value, json};

use crate::chat::Thinking;

/// A part of an answer. A call begins with [`Part::Call`], and its arguments follow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Part {
    Text(String),
    Reasoning(String),
    Call {
        id: String,
        name: String,
    },
    /// Text of JSON.
    Arguments(String),
}

impl Part {
    /// Whether the part is a text or thoughts without characters.
    pub fn is_empty(&self) -> bool {
        matches!(self, Part::Text(text) | Part::Reasoning(text) if text.is_empty())
    }
}

/// What an answer can consist of.
#[derive(Debug, Clone)]
pub struct AnswerSyntax {
    pub thinking: Thinking,
    /// The syntax of calls; `None` if no tool can be called.
    pub tools: Option<Arc<ToolSyntax>>,
    /// Whether calls can follow text; otherwise they are all that there is.
    pub can_follow_text: bool,
}

/// Splits the text of a model into the parts of an answer.
#[derive(Debug)]
pub struct AnswerParser {
    state: State,
    /// Text whose meaning is not yet known.
    buffer: String,
    syntax: Option<Arc<ToolSyntax>>,
    /// Whether calls can follow text; otherwise they are all that there is.
    can_follow_text: bool,
    /// The number of calls so far.
    calls: u32,
    /// Distinguishes the ids of calls of different answers.
    id_seed: (u64, u32),
}

#[derive(Debug)]
enum State {
    /// The thoughts may begin.
    Start,
    /// White space before the thoughts is omitted.
    ThoughtsStart,
    Thoughts,
    /// White space after the thoughts is omitted.
    ThoughtsEnd,
    /// The first call may begin, if calls cannot follow text.
    TextStart,
    Text,
    CallName,
    Arguments(ObjectEnd),
    AfterCall,
}

impl AnswerParser {
    /// Creates a parser for the answer with the number `id_seed`, of a request and of an answer to it.
    pub fn new(format: &AnswerSyntax, id_seed: (u64, u32)) -> Self {
        let AnswerSyntax { thinking, tools: syntax, can_follow_text } = format.clone();
        let state = match thinking {
            Thinking::Never => State::TextStart,
            Thinking::Possible => State::Start,
            Thinking::Begun => State::ThoughtsStart,
        };
        Self { state, buffer: String::new(), syntax, can_follow_text, calls: 0, id_seed }
    }

    /// Whether the answer has calls of tools.
    pub fn has_calls(&self) -> bool {
        self.calls > 0
    }

    /// Adds text, and returns the parts that are known now.
    pub fn push(&mut self, text: &str) -> Vec<Part> {
        self.buffer += text;
        let mut parts = Vec::new();
        while self.step(&mut parts) {}
        parts.retain(|part| !part.is_empty());
        parts
    }

    /// Ends the text, and returns the part that was buffered.
    pub fn finish(&mut self) -> Option<Part> {
        let rest = std::mem::take(&mut self.buffer);
        let part = match self.state {
            State::Start | State::TextStart | State::Text => Part::Text(rest),
            State::Thoughts => Part::Reasoning(rest),
            State::ThoughtsStart
            | State::ThoughtsEnd
            | State::CallName
            | State::Arguments(_)
            | State::AfterCall => return None,
        };
        (!part.is_empty()).then_some(part)
    }

    /// Interprets the beginning of the buffer. Returns whether the rest can be interpreted too.
    fn step(&mut self, parts: &mut Vec<Part>) -> bool {
        match &mut self.state {
            State::Start => {
                let start = self.buffer.trim_start();
                if let Some(thoughts) = start.strip_prefix(THOUGHT_START) {
                    self.buffer = thoughts.to_owned();
                    self.state = State::ThoughtsStart;
                } else if THOUGHT_START.starts_with(start) {
                    return false;
                } else {
                    self.state = State::TextStart;
                }
                true
            }
            State::Thoughts => {
                let (thoughts, found) = take_until(&mut self.buffer, &[THOUGHT_END]);
                parts.push(Part::Reasoning(thoughts));
                if found.is_some() {
                    self.state = State::ThoughtsEnd;
                }
                found.is_some()
            }
            State::ThoughtsStart | State::ThoughtsEnd => {
                let is_start = matches!(self.state, State::ThoughtsStart);
                self.buffer = self.buffer.trim_start().to_owned();
                let has_text = !self.buffer.is_empty();
                if has_text {
                    self.state = if is_start { State::Thoughts } else { State::TextStart };
                }
                has_text
            }
            State::TextStart => {
                let Some(syntax) = self.syntax.as_ref().filter(|_| !self.can_follow_text) else {
                    self.state = State::Text;
                    return true;
                };
                if let Some(rest) = self.buffer.strip_prefix(&syntax.opening) {
                    self.buffer = rest.to_owned();
                    self.state = State::CallName;
                } else if syntax.opening.starts_with(&self.buffer) {
                    return false;
                } else {
                    self.state = State::Text;
                }
                true
            }
            State::Text => {
                let Some(syntax) = self.syntax.as_ref().filter(|_| self.can_follow_text) else {
                    parts.push(Part::Text(std::mem::take(&mut self.buffer)));
                    return false;
                };
                let (text, found) = take_until(&mut self.buffer, &[&syntax.opening]);
                parts.push(Part::Text(text));
                if found.is_some() {
                    self.state = State::CallName;
                }
                found.is_some()
            }
            State::CallName => {
                let Some(syntax) = &self.syntax else { return false };
                let Some((name, rest)) = self.buffer.split_once(&syntax.middle) else { return false };
                let (name, rest) = (name.to_owned(), rest.to_owned());
                parts.push(Part::Call { id: call_id(self.id_seed, self.calls), name });
                self.buffer = rest;
                self.calls += 1;
                self.state = State::Arguments(ObjectEnd::default());
                true
            }
            State::Arguments(end) => {
                let at = self.buffer.char_indices().find(|&(_, c)| end.push(c)).map(|(at, _)| at + 1);
                let rest = self.buffer.split_off(at.unwrap_or(self.buffer.len()));
                let arguments = std::mem::replace(&mut self.buffer, rest);
                if !arguments.is_empty() {
                    parts.push(Part::Arguments(arguments));
                }
                if at.is_some() {
                    self.state = State::AfterCall;
                }
                at.is_some()
            }
            State::AfterCall => {
                let next = self.syntax.as_ref().and_then(|syntax| syntax.next.as_deref());
                let Some(rest) = next.and_then(|next| self.buffer.strip_prefix(next)) else { return false };
                self.buffer = rest.to_owned();
                self.state = State::CallName;
                true
            }
        }
    }
}

/// Removes from `buffer` the text before the first of the marks, and the mark. Returns the text and the index of the
/// mark. Without a mark, text that may be the beginning of one stays in the buffer.
pub fn take_until(buffer: &mut String, marks: &[&str]) -> (String, Option<usize>) {
    let found = marks.iter().enumerate().filter_map(|(index, mark)| Some((buffer.find(mark)?, index))).min();
    if let Some((at, index)) = found {
        let rest = buffer.split_off(at + marks[index].len());
        buffer.truncate(at);
        return (std::mem::replace(buffer, rest), Some(index));
    }
    let partial_match = |mark: &&str| {
        let ends = mark.char_indices().map(|(at, _)| at).skip(1);
        ends.filter(|&at| buffer.ends_with(&mark[..at])).max().unwrap_or(0)
    };
    let kept = marks.iter().map(partial_match).max().unwrap_or(0);
    let rest = buffer.split_off(buffer.len() - kept);
    (std::mem::replace(buffer, rest), None)
}

/// Finds the end of a JSON object.
#[derive(Debug, Default)]
struct ObjectEnd {
    depth: u32,
    is_in_string: bool,
    is_escaped: bool,
}

impl ObjectEnd {
    /// Adds a character. Returns whether the object is complete.
    fn push(&mut self, c: char) -> bool {
        if self.is_in_string {
            let is_escape = c == '\\' && !self.is_escaped;
            self.is_in_string = self.is_escaped || c != '"';
            self.is_escaped = is_escape;
            return false;
        }
        match c {
            '"' => self.is_in_string = true,
            '{' | '[' => self.depth += 1,
            '}' | ']' => self.depth = self.depth.saturating_sub(1),
            _ => return false,
        }
        matches!(c, '}' | ']') && self.depth == 0
    }
}

/// Returns the id of a call: nine letters and digits, because templates of Mistral accept no others.
fn call_id(seed: (u64, u32), index: u32) -> String {
    let mut hasher = DefaultHasher::new();
    (seed, index).hash(&mut hasher);
    let mut left = hasher.finish();
    let digit = |_| {
        let digit = char::from_digit((left % 36) as u32, 36);
        left /= 36;
        digit
    };
    (0..9).filter_map(digit).collect()
}

/// A call of a tool in a complete answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    id: String,
    name: String,
    arguments: String,
}

/// A complete answer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Answer {
    pub text: String,
    reasoning: String,
    calls: Vec<Call>,
}

impl Answer {
    pub fn add(&mut self, part: Part) {
        match part {
            Part::Text(text) => self.text += &text,
            Part::Reasoning(text) => self.reasoning += &text,
            Part::Call { id, name } => self.calls.push(Call { id, name, arguments: String::new() }),
            Part::Arguments(text) => {
                if let Some(call) = self.calls.last_mut() {
                    call.arguments += &text;
                }
            }
        }
    }

    /// Returns the message of a chat completion.
    pub fn message(&self) -> Value {
        // An answer that only calls tools has no content.
        let text = (!self.text.trim().is_empty() || self.calls.is_empty()).then_some(&self.text);
        let mut message = json!({"role": "assistant", "content": text, "refusal": null});
        if !self.reasoning.is_empty() {
            message["reasoning_content"] = self.reasoning.trim_end().into();
        }
        if !self.calls.is_empty() {
            let call = |Call { id, name, arguments }: &Call| {
                let function = json!({"name": name, "arguments": arguments});
                json!({"id": id, "type": "function", "function": function})
            };
            message["tool_calls"] = self.calls.iter().map(call).collect();
        }
        message
    }
}

/// Counts the calls in a stream, whose chunks refer to a call by its index.
#[derive(Debug, Default)]
pub struct DeltaWriter {
    calls: usize,
}

impl DeltaWriter {
    /// Returns the `delta` of a streamed chunk.
    pub fn delta(&mut self, part: &Part) -> Value {
        match part {
            Part::Text(text) => json!({ "content": text }),
            Part::Reasoning(text) => json!({ "reasoning_content": text }),
            Part::Call { id, name } => {
                self.calls += 1;
                let function = json!({"name": name, "arguments": ""});
                json!({"tool_calls": [{"index": self.calls - 1, "id": id, "type": "function", "function": function}]})
            }
            Part::Arguments(text) => {
                let index = self.calls.saturating_sub(1);
                json!({"tool_calls": [{"index": index, "function": {"arguments": text}}]})
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parses a text in pieces of `len` characters, and returns the merged answer.
    fn parse(thinking: Thinking, text: &str, len: usize) -> Answer {
        let tools = Some(Arc::new(ToolSyntax::common()));
        let mut parser = AnswerParser::new(&AnswerSyntax { thinking, tools, can_follow_text: true }, (7, 0));
        let mut answer = Answer::default();
        let characters: Vec<char> = text.chars().collect();
        for piece in characters.chunks(len) {
            for part in parser.push(&piece.iter().collect::<String>()) {
                answer.add(part);
            }
        }
        if let Some(part) = parser.finish() {
            answer.add(part);
        }
        answer
    }

    #[test]
    fn parts_are_found_however_the_text_is_cut() {
        let calls = "<tool_call>\n{\"name\": \"first\", \"arguments\": {\"a\": \"}\\\"{\", \"b\": [1, {}]}}\n</tool_call>\n\
            <tool_call>\n{\"name\": \"second\", \"arguments\": {}}\n</tool_call>";
        for len in [1, 2, 3, 7, 50, 1000] {
            let answer =
                parse(Thinking::Possible, &format!("<think>\nWhy <b>?\n</think>\n\nI look.\n{calls}"), len);
            assert_eq!((&*answer.text, &*answer.reasoning), ("I look.\n", "Why <b>?\n"), "{len}");
            let called: Vec<_> =
                answer.calls.iter().map(|call| (call.name.as_str(), call.arguments.as_str())).collect();
            let first = r#"{"a": "}\"{", "b": [1, {}]}"#;
            assert_eq!(called, [("first", first), ("second", "{}")], "{len}");
            assert!(answer.calls.iter().all(|call| call.id.len() == 9));
            assert!(answer.calls[0].id != answer.calls[1].id);
        }
    }

    #[test]
    fn texts_without_marks_are_not_changed() {
        for (thinking, text, expected) in [
            (Thinking::Possible, " <thinking> is text", (" <thinking> is text", "")),
            (Thinking::Never, "<think>a</think>b<tool", ("<think>a</think>b<tool", "")),
            (Thinking::Begun, "a</think>\n\nb", ("b", "a")),
            (Thinking::Begun, "unfinished </thi", ("", "unfinished </thi")),
            (Thinking::Possible, "<thi", ("<thi", "")),
            (Thinking::Never, "<tool_call>\n{\"name\": \"f", ("", "")),
        ] {
            for len in [1, 100] {
                let answer = parse(thinking, text, len);
                assert_eq!((&*answer.text, &*answer.reasoning), expected, "{text} {len}");
            }
        }
    }

    #[test]
    fn messages_and_deltas_have_the_form_of_the_api() {
        let call = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 1}}\n</tool_call>";
        let message = parse(Thinking::Never, call, 5).message();
        assert_eq!(message["content"], Value::Null);
        let function = json!({"name": "f", "arguments": "{\"x\": 1}"});
        assert_eq!(message["tool_calls"][0]["function"], function);
        assert_eq!(parse(Thinking::Never, "", 1).message()["content"], "");
        let mut deltas = DeltaWriter::default();
        let start = Part::Call { id: "1".into(), name: "f".into() };
        deltas.delta(&start);
        assert_eq!(deltas.delta(&start)["tool_calls"][0]["index"], 1);
        let arguments = deltas.delta(&Part::Arguments("{".into()));
        assert_eq!(arguments["tool_calls"][0], json!({"index": 1, "function": {"arguments": "{"}}));
    }

    #[test]
    fn calls_without_a_mark_are_found_only_at_the_start() {
        let tools = ToolSyntax { opening: "{\"name\": \"".into(), ..ToolSyntax::common() };
        let format =
            AnswerSyntax { thinking: Thinking::Never, tools: Some(Arc::new(tools)), can_follow_text: false };
        for (text, calls) in
            [("Here: {\"name\": \"Bob\"}", 0), ("{\"name\": \"f\", \"arguments\": {}}", 1), ("{\"na", 0)]
        {
            for len in [1, 100] {
                let mut parser = AnswerParser::new(&format, (0, 0));
                let mut answer = Answer::default();
                for piece in text.as_bytes().chunks(len) {
                    parser
                        .push(str::from_utf8(piece).expect("ASCII"))
                        .into_iter()
                        .for_each(|part| answer.add(part));
                }
                if let Some(part) = parser.finish() {
                    answer.add(part);
                }
                assert_eq!((answer.calls.len(), answer.text == text), (calls, calls == 0), "{text}");
            }
        }
    }
}
