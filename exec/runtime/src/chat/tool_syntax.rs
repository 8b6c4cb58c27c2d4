//! How a model writes calls of tools, found by rendering a call with its chat template.
//!
//! Each family of models has its own syntax, and the template shows it: a conversation in which the assistant called a
//! tool is rendered as the model saw it in training. Almost all write the name of the tool and its arguments as JSON,
//! so that the texts before, between and after these two describe the syntax.
//!
//! A template that does not describe tools, or writes arguments in another way, gets a common syntax instead
//! ([`ToolSyntax::common`]): the tools are described in the system message, and calls are text of messages.

use serde_json::json;

use super::{ChatMessage, ChatTemplate, JsonValue};
use crate::tokenizer::{THOUGHT_END, THOUGHT_START, Tokenizer};

/// The end of the result of a tool in the common syntax.
const RESULT_END: &str = "</tool_response>";
/// The name, the key and the value of the call that is rendered. The values occur in no published template.
const NAME: &str = "hearth_probe";
const ARGUMENTS: [&str; 2] = [r#"{"hearth_key": "hearth_value"}"#, r#"{"hearth_key":"hearth_value"}"#];
/// The beginning of the ids of calls.
const ID: &str = "probeid0";
/// Maximum length of the texts around a call, in bytes, because they become part of grammars.
/// source: assumed; those of published templates have at most 110
const MAX_SYNTAX_BYTES: usize = 1000;

/// The texts of a model around the names and arguments of calls.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools)] // properties of the template
pub struct ToolSyntax {
    /// The text before the name of the first call.
    pub opening: String,
    /// The text between the name and the arguments, a JSON object.
    pub middle: String,
    /// The text between the arguments of a call and the name of the next one; `None` if the model can call only one
    /// tool at a time.
    pub next: Option<String>,
    /// The text after the arguments of the last call.
    pub ending: String,
    /// Whether the template wants arguments as a string of JSON instead of an object.
    pub has_text_arguments: bool,
    /// Whether the template wants an empty text instead of none in a message that has only calls.
    pub has_empty_content: bool,
    /// Whether the template itself describes tools and renders calls.
    pub is_native: bool,
    /// Whether the template knows the role `system`.
    pub knows_system: bool,
}

impl ToolSyntax {
    /// Finds the syntax of a template.
    pub fn of(template: &ChatTemplate, tokenizer: &Tokenizer) -> ToolSyntax {
        let is_described = template
            .render(&[ChatMessage::new("user", "x")], &[tool()])
            .is_ok_and(|text| text.contains(NAME));
        let native = || {
            [(false, false), (false, true), (true, false), (true, true)].into_iter().find_map(
                |(has_text_arguments, has_empty_content)| {
                    Self::from_rendered(template, tokenizer, has_text_arguments, has_empty_content)
                },
            )
        };
        is_described.then(native).flatten().unwrap_or_else(|| {
            let system = [ChatMessage::new("system", "x"), ChatMessage::new("user", "y")];
            ToolSyntax { knows_system: template.render(&system, &[]).is_ok(), ..Self::common() }
        })
    }

    /// The syntax of Hermes 2 Pro, which many models know.
    pub fn common() -> ToolSyntax {
        let opening = "<tool_call>\n{\"name\": \"".to_owned();
        let ending = "}\n</tool_call>".to_owned();
        ToolSyntax {
            next: Some(format!("{ending}\n{opening}")),
            opening,
            middle: "\", \"arguments\": ".to_owned(),
            ending,
            has_text_arguments: false,
            has_empty_content: false,
            is_native: false,
            knows_system: true,
        }
    }

    /// Returns the beginning of the opening that shows that a call follows, and whether it is a mark of its own, as
    /// opposed to the beginning of a JSON object.
    pub fn trigger(&self) -> (&str, bool) {
        let before_json = self.opening.split("{\"").next().unwrap_or_default();
        let mark = before_json.trim_end().trim_end_matches('[').trim_end();
        if mark.is_empty() { (&self.opening, false) } else { (mark, true) }
    }

    fn from_rendered(
        template: &ChatTemplate,
        tokenizer: &Tokenizer,
        has_text_arguments: bool,
        has_empty_content: bool,
    ) -> Option<ToolSyntax> {
        let render = |calls: usize| {
            let mut messages = vec![ChatMessage::new("user", "x")];
            if calls > 0 {
                messages.push(ChatMessage {
                    content: has_empty_content.then(String::new),
                    tool_calls: (0..calls).map(|at| call(at, has_text_arguments)).collect(),
                    ..ChatMessage::new("assistant", "")
                });
                messages.extend((0..calls).map(|at| ChatMessage {
                    tool_call_id: Some(call_id(at)),
                    name: Some(NAME.to_owned()),
                    ..ChatMessage::new("tool", "y")
                }));
            }
            template.render(&messages, &[tool()]).ok()
        };
        let (prompt, one) = (render(0)?, render(1)?);
        // Templates of models that think begin the thoughts after the prompt.
        let prompt = prompt.rsplit_once(THOUGHT_START).map_or(&*prompt, |(before, _)| before);
        let shared = prompt.bytes().zip(one.bytes()).take_while(|(a, b)| a == b).count();
        let mut rest = one.get(shared..)?;
        let (opening, middle) = take_call(&mut rest)?;
        let opening = opening.rsplit(THOUGHT_END).next().unwrap_or_default().trim_start();
        let ends = tokenizer.stop_tokens();
        let end = ends.iter().filter_map(|&end| rest.find(tokenizer.control_text(end)?)).min()?;
        let ending = without_id(&rest[..end]);
        let next = || {
            let two = render(2)?;
            let mut rest = two.get(shared..)?;
            take_call(&mut rest)?;
            let (next, same_middle) = take_call(&mut rest)?;
            (same_middle == middle).then(|| without_id(next)).filter(|next| !next.contains(ID))
        };
        let is_usable = !opening.is_empty()
            && !middle.is_empty()
            && opening.len() + middle.len() + ending.len() <= MAX_SYNTAX_BYTES
            && !ending.contains(ID)
            && !ending.contains(NAME);
        is_usable.then(|| ToolSyntax {
            opening: opening.to_owned(),
            middle: middle.to_owned(),
            next: next(),
            ending: ending.trim_end().to_owned(),
            has_text_arguments,
            has_empty_content,
            is_native: true,
            knows_system: true,
        })
    }

    /// Returns the messages and tools with which the template describes a conversation with `tools`.
    pub fn prepare(
        &self,
        messages: Vec<ChatMessage>,
        tools: Vec<JsonValue>,
    ) -> (Vec<ChatMessage>, Vec<JsonValue>) {
        if self.is_native {
            let messages = messages.into_iter().map(|mut message| {
                if self.has_empty_content && message.content.is_none() {
                    message.content = Some(String::new());
                }
                for call in &mut message.tool_calls {
                    *call = call.with_arguments(self.has_text_arguments);
                }
                message
            });
            return (messages.collect(), tools);
        }
        let mut prepared: Vec<ChatMessage> = Vec::new();
        for message in messages {
            let is_result = message.role == "tool";
            let message = self.as_text(message);
            // Many templates refuse two messages of a user in sequence.
            match prepared.last_mut().filter(|last| last.role == "user" && message.role == "user") {
                Some(last) if is_result || last.text().ends_with(RESULT_END) => last.append(message.text()),
                _ => prepared.push(message),
            }
        }
        if !tools.is_empty() {
            let description = self.description(&tools);
            let role = if self.knows_system { "system" } else { "user" };
            match prepared.iter_mut().find(|message| message.role == role) {
                Some(first) if self.knows_system => first.append(&description),
                Some(first) => first.content = Some(format!("{description}\n\n{}", first.text())),
                None => prepared.insert(0, ChatMessage::new(role, description)),
            }
        }
        (prepared, Vec::new())
    }

    fn description(&self, tools: &[JsonValue]) -> String {
        let lines: Vec<String> = tools.iter().filter_map(|tool| serde_json::to_string(tool).ok()).collect();
        let Self { opening, middle, ending, .. } = self;
        format!(
            "You can call these tools, which are described as JSON:\n{}\n\nTo call a tool, write:\n\
             {opening}NAME{middle}ARGUMENTS{ending}",
            lines.join("\n")
        )
    }

    /// Returns a message as a role and a text that every template knows.
    fn as_text(&self, message: ChatMessage) -> ChatMessage {
        if message.role == "tool" {
            let text = message.content.unwrap_or_default();
            return ChatMessage::new("user", format!("<tool_response>\n{text}\n{RESULT_END}"));
        }
        let Self { opening, middle, ending, .. } = self;
        let call = |call: &JsonValue| {
            let (name, arguments) = call.with_arguments(false).name_and_arguments()?;
            let arguments = serde_json::to_string(&arguments).ok()?;
            Some(format!("{opening}{name}{middle}{arguments}{ending}"))
        };
        let calls = message.tool_calls.iter().filter_map(call);
        let text = message.content.filter(|text| !text.is_empty());
        let content = text.into_iter().chain(calls).collect::<Vec<_>>().join("\n");
        ChatMessage { content: Some(content), tool_calls: Vec::new(), ..message }
    }
}

/// Removes a call from the beginning of `text`, and returns the texts before and after its name.
fn take_call<'a>(text: &mut &'a str) -> Option<(&'a str, &'a str)> {
    let (before, after) = text.split_once(NAME)?;
    let at = |arguments: &&str| after.find(*arguments).map(|at| (at, arguments.len()));
    let (at, len) = ARGUMENTS.iter().filter_map(at).min()?;
    *text = &after[at + len..];
    let middle = &after[..at];
    (!middle.contains(ID)).then_some((before, middle))
}

/// Returns the text after the arguments of a call without the call's id, which the server chooses.
fn without_id(text: &str) -> String {
    let Some(at) = text.find(ID) else { return text.to_owned() };
    let start = text[..at].rfind(", \"").unwrap_or(at);
    let end = text[at..].find('"').map_or(text.len(), |quote| at + quote + 1);
    format!("{}{}", &text[..start], &text[end..])
}

/// Ids of nine letters and digits, which templates of Mistral require.
fn call_id(index: usize) -> String {
    format!("{ID}{index}")
}

fn call(index: usize, has_text_arguments: bool) -> JsonValue {
    let call = json!({
        "id": call_id(index),
        "type": "function",
        "function": {"name": NAME, "arguments": {"hearth_key": "hearth_value"}}
    });
    serde_json::from_value::<JsonValue>(call).unwrap_or_default().with_arguments(has_text_arguments)
}

fn tool() -> JsonValue {
    let tool = json!({
        "type": "function",
        "function": {
            "name": NAME,
            "description": "y",
            "parameters": {
                "type": "object",
                "properties": {"hearth_key": {"type": "string", "description": "z"}},
                "required": ["hearth_key"]
            }
        }
    });
    serde_json::from_value(tool).unwrap_or_default()
}
