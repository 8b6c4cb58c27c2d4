//! Messages of a conversation, and the JSON values in them.

use minijinja::Value;
use minijinja::value::ValueKind;
use serde::{Deserialize, Serialize};

/// Keys and values by which templates find the parts of a call or of the description of a tool, and distinguish its types.
/// source: OpenAI's API reference, and the types of JSON Schema
const API_NAMES: [&str; 20] = [
    "arguments",
    "array",
    "boolean",
    "description",
    "enum",
    "function",
    "id",
    "integer",
    "items",
    "name",
    "null",
    "number",
    "object",
    "parameters",
    "properties",
    "required",
    "return",
    "strict",
    "string",
    "type",
];

/// A message of a conversation, with the keys of OpenAI's API.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChatMessage {
    /// The author of the message: `system`, `user`, `assistant`, or another role that the template knows.
    pub role: String,
    /// The text of the message; `None` if there are only calls of tools.
    #[serde(default)]
    pub content: Option<String>,
    /// What the model thought before it answered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// The tools that the model called.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<JsonValue>,
    /// The call to which a message of a tool is the response.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    /// The name of the tool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

/// A JSON value whose objects keep the order of their keys, because templates write them into the prompt.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct JsonValue(pub(super) Value);

impl ChatMessage {
    /// Creates a message that has only text.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: Some(content.into()), ..Self::default() }
    }

    /// Returns the text, which is empty if there is none.
    pub fn text(&self) -> &str {
        self.content.as_deref().unwrap_or_default()
    }

    /// Appends a paragraph to the text.
    pub(super) fn append(&mut self, paragraph: &str) {
        let text = self.text();
        let gap = if text.is_empty() { "" } else { "\n\n" };
        self.content = Some(format!("{text}{gap}{paragraph}"));
    }

    /// Returns the size of the message's text in bytes.
    pub fn text_bytes(&self) -> usize {
        let calls = self.tool_calls.iter().map(JsonValue::text_bytes).sum::<usize>();
        let texts = [&self.content, &self.reasoning_content, &self.tool_call_id, &self.name];
        self.role.len() + calls + texts.into_iter().flatten().map(String::len).sum::<usize>()
    }

    /// Returns the message with `change` applied to all texts except the role.
    pub(super) fn map_texts(&self, change: &impl Fn(&str) -> String) -> ChatMessage {
        let text = |text: &Option<String>| text.as_deref().map(change);
        ChatMessage {
            role: self.role.clone(),
            content: text(&self.content),
            reasoning_content: text(&self.reasoning_content),
            tool_calls: self.tool_calls.iter().map(|call| call.map_texts(change)).collect(),
            tool_call_id: text(&self.tool_call_id),
            name: text(&self.name),
        }
    }

    /// Returns the message as templates see it: a key without a value is missing, except `content`.
    pub(super) fn to_value(&self) -> Value {
        let text = |key, text: &Option<String>| Some((key, Value::from(text.clone()?)));
        let calls: Vec<Value> = self.tool_calls.iter().map(|JsonValue(call)| call.clone()).collect();
        let optional = [
            text("reasoning_content", &self.reasoning_content),
            (!calls.is_empty()).then(|| ("tool_calls", Value::from(calls))),
            text("tool_call_id", &self.tool_call_id),
            text("name", &self.name),
        ];
        let content = self.content.clone().map_or(Value::from(()), Value::from);
        let required = [("role", Value::from(self.role.clone())), ("content", content)];
        Value::from_pairs(required.into_iter().chain(optional.into_iter().flatten()))
    }
}

impl JsonValue {
    /// Returns the call of a tool with its arguments as text of JSON or, otherwise, as an object. Arguments that are not
    /// valid JSON stay text.
    pub(super) fn with_arguments(&self, as_text: bool) -> JsonValue {
        let JsonValue(call) = self;
        let Ok(function) = call.get_attr("function") else { return self.clone() };
        let arguments = JsonValue(function.get_attr("arguments").unwrap_or_default());
        let changed = match arguments.0.as_str() {
            Some(text) if !as_text => serde_json::from_str(text).unwrap_or(arguments),
            None if as_text => JsonValue(serde_json::to_string(&arguments).unwrap_or_default().into()),
            _ => arguments,
        };
        let function = with_key(&function, "arguments", &changed.0);
        JsonValue(with_key(call, "function", &function))
    }

    /// Returns the name and the arguments of the call of a tool; `None` if the value has another form. The arguments are
    /// an object or its text.
    pub fn name_and_arguments(&self) -> Option<(String, JsonValue)> {
        let function = self.0.get_attr("function").ok()?;
        let name = function.get_attr("name").ok()?.as_str()?.to_owned();
        let arguments = function.get_attr("arguments").ok()?;
        matches!(arguments.kind(), ValueKind::String | ValueKind::Map).then_some((name, JsonValue(arguments)))
    }

    /// Returns the size of the value as JSON in bytes.
    pub fn text_bytes(&self) -> usize {
        serde_json::to_string(self).map_or(0, |text| text.len())
    }

    /// Returns the value with `change` applied to all strings except [`API_NAMES`], by which templates find their way.
    pub(super) fn map_texts(&self, change: &impl Fn(&str) -> String) -> JsonValue {
        let JsonValue(value) = self;
        let items = || value.try_iter().into_iter().flatten();
        let text = |text: &str| if API_NAMES.contains(&text) { text.to_owned() } else { change(text) };
        JsonValue(match value.kind() {
            ValueKind::String => Value::from(text(value.as_str().unwrap_or_default())),
            ValueKind::Seq => items().map(|item| JsonValue(item).map_texts(change).0).collect(),
            ValueKind::Map => Value::from_pairs(items().map(|key| {
                let item = JsonValue(value.get_item(&key).unwrap_or_default());
                (text(key.as_str().unwrap_or_default()), item.map_texts(change).0)
            })),
            _ => value.clone(),
        })
    }
}

/// Returns a copy of an object with another value of a key.
fn with_key(object: &Value, key: &str, value: &Value) -> Value {
    let keys = object.try_iter().into_iter().flatten();
    let pairs = keys.map(|name| {
        let is_key = name.as_str() == Some(key);
        let item = if is_key { value.clone() } else { object.get_item(&name).unwrap_or_default() };
        (name, item)
    });
    Value::from_pairs(pairs)
}
