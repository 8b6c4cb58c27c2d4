//! The tools of a request: `tools`, `tool_choice` and `parallel_tool_calls` of OpenAI's API.

use hearth_runtime::JsonValue;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;

use crate::error::{ApiError, excerpt};
use crate::fields::Fields;

/// Maximum number of tools, and maximum length of their names. source: OpenAI's API reference
const MAX_TOOLS: usize = 128;
const MAX_NAME_LEN: usize = 64;

/// A function that the model may call.
#[derive(Debug, Clone, PartialEq)]
pub struct Tool {
    pub name: String,
    /// The JSON Schema of the arguments.
    pub parameters: Value,
    /// Whether a schema that is not supported is an error.
    pub is_strict: bool,
}

/// Which tools the model must or may call.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum ToolChoice {
    None,
    #[default]
    Auto,
    Required,
    /// The tool with this name.
    Named(String),
}

/// The tools of a request.
#[derive(Debug, Default)]
pub struct ToolFields {
    pub tools: Vec<Tool>,
    /// The tools as templates describe them.
    pub descriptions: Vec<JsonValue>,
    pub choice: ToolChoice,
    pub is_parallel: bool,
}

#[derive(Debug, Deserialize)]
struct ToolField {
    #[serde(rename = "type")]
    kind: String,
    function: Option<FunctionField>,
}

#[derive(Debug, Deserialize)]
struct FunctionField {
    name: String,
    parameters: Option<Value>,
    strict: Option<bool>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum ChoiceField {
    Mode(String),
    Named { function: NameField },
    Other(IgnoredAny),
}

#[derive(Debug, Deserialize)]
struct NameField {
    name: String,
}

impl ToolFields {
    /// Removes the fields from a request and checks them.
    pub fn take(fields: &mut Fields<'_>) -> Result<ToolFields, ApiError> {
        let descriptions: Vec<JsonValue> = fields.get("tools")?.unwrap_or_default();
        let all: Vec<ToolField> = fields.take("tools")?.unwrap_or_default();
        if all.len() > MAX_TOOLS {
            let message = format!("`tools` has {} tools: send at most {MAX_TOOLS}", all.len());
            return Err(ApiError::invalid("tools", message));
        }
        let tools = all.into_iter().map(Tool::new).collect::<Result<Vec<_>, _>>()?;
        let mut names: Vec<&str> = tools.iter().map(|tool| tool.name.as_str()).collect();
        names.sort_unstable();
        if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            let message =
                format!("`tools` has two tools with the name `{}`: use different names", excerpt(pair[0]));
            return Err(ApiError::invalid("tools", message));
        }
        let choice = match fields.take("tool_choice")? {
            None => ToolChoice::Auto,
            Some(ChoiceField::Mode(mode)) if mode == "auto" => ToolChoice::Auto,
            Some(ChoiceField::Mode(mode)) if mode == "none" => ToolChoice::None,
            Some(ChoiceField::Mode(mode)) if mode == "required" => ToolChoice::Required,
            Some(ChoiceField::Named { function: NameField { name } }) => ToolChoice::Named(name),
            Some(ChoiceField::Mode(_) | ChoiceField::Other(_)) => {
                let message = "`tool_choice` is not valid: send \"none\", \"auto\", \"required\", or \
                               {\"type\": \"function\", \"function\": {\"name\": ..}}";
                return Err(ApiError::invalid("tool_choice", message));
            }
        };
        let is_known = match &choice {
            ToolChoice::None | ToolChoice::Auto => true,
            ToolChoice::Required => !tools.is_empty(),
            ToolChoice::Named(name) => tools.iter().any(|tool| tool.name == *name),
        };
        if !is_known {
            let message = "`tool_choice` requires a tool that is not in `tools`: send the tool, or \"auto\"";
            return Err(ApiError::invalid("tool_choice", message));
        }
        let is_parallel = fields.take("parallel_tool_calls")?.unwrap_or(true);
        let descriptions = if choice == ToolChoice::None { Vec::new() } else { descriptions };
        Ok(ToolFields { tools, descriptions, choice, is_parallel })
    }
}

impl Tool {
    fn new(field: ToolField) -> Result<Tool, ApiError> {
        let ToolField { kind, function } = field;
        let Some(FunctionField { name, parameters, strict }) = function.filter(|_| kind == "function") else {
            let message = format!(
                "`tools` has a tool of type `{}`, which is not supported: send only functions",
                excerpt(&kind)
            );
            return Err(ApiError::invalid("tools", message));
        };
        let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
        if name.is_empty() || name.len() > MAX_NAME_LEN || !name.chars().all(is_name) {
            let message = format!(
                "`tools` has a tool with the name `{}`: use 1 to {MAX_NAME_LEN} letters, digits, `_`, `-` and `.`",
                excerpt(&name)
            );
            return Err(ApiError::invalid("tools", message));
        }
        let parameters =
            parameters.unwrap_or_else(|| serde_json::json!({"type": "object", "properties": {}}));
        if !parameters.is_object() {
            let message = format!(
                "`tools` has the tool `{name}`, whose `parameters` is not a JSON Schema: send an object"
            );
            return Err(ApiError::invalid("tools", message));
        }
        Ok(Tool { name, parameters, is_strict: strict.unwrap_or(false) })
    }
}
