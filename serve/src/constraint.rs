//! The grammar of an answer that is restricted: to a JSON Schema, to a client's grammar, or to valid calls of tools.
//!
//! The grammar has the Lark syntax of llguidance. A model that may call tools writes free text until the mark with which
//! a call begins; from there on, only the syntax of the model, the names of the tools, and arguments that are valid under
//! their schemas can follow. Thoughts before the answer are not restricted.

use hearth_runtime::chat::{THOUGHT_END, THOUGHT_START};
use hearth_runtime::tokenizer::Fragment;
use hearth_runtime::{Tokenizer, ToolSyntax};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::chat::Thinking;
use crate::error::{ApiError, excerpt};
use crate::fields::Fields;
use crate::tools::{Tool, ToolChoice};

/// The separators of JSON, regular expressions. They allow what models write, on one line or several.
/// source: assumed; the indentation of ten levels
const ITEM_SEPARATOR: &str = ",( |\\n[ \\t]{0,20})?";
const KEY_SEPARATOR: &str = ": ?";

/// Maximum number of calls in an answer, so that a model cannot call without end. source: assumed
const MAX_CALLS: usize = 16;

/// What an answer may contain.
#[derive(Debug, Clone, Default, PartialEq)]
pub enum TextFormat {
    #[default]
    Free,
    /// JSON that is valid under a JSON Schema.
    Json(Value),
    /// A text of a grammar in the Lark syntax of llguidance.
    Grammar(String),
}

#[derive(Debug, Deserialize)]
struct ResponseFormat {
    #[serde(rename = "type")]
    kind: String,
    json_schema: Option<NamedSchema>,
    /// A schema for the type `json_object`, as in llama.cpp.
    schema: Option<Value>,
}

#[derive(Debug, Deserialize)]
struct NamedSchema {
    schema: Option<Value>,
}

impl TextFormat {
    /// Removes `response_format` and `grammar` from a request, and checks them.
    pub fn take(fields: &mut Fields<'_>) -> Result<TextFormat, ApiError> {
        let format: Option<ResponseFormat> = fields.take("response_format")?;
        let invalid = |message: String| Err(ApiError::invalid("response_format", message));
        let json = match format {
            None => None,
            Some(ResponseFormat { kind, json_schema, schema }) => match (kind.as_str(), json_schema) {
                ("text", _) => None,
                ("json_object", _) => Some(schema.unwrap_or_else(|| json!({"type": "object"}))),
                ("json_schema", Some(NamedSchema { schema: Some(schema) })) => Some(schema),
                ("json_schema", _) => {
                    return invalid(
                        "`response_format` has no JSON Schema: send `json_schema.schema`".to_owned(),
                    );
                }
                (other, _) => {
                    let kind = excerpt(other);
                    return invalid(format!(
                        "`response_format` of type `{kind}` is not supported: use text, json_object or json_schema"
                    ));
                }
            },
        };
        let grammar: Option<String> = fields.take("grammar")?;
        match (json, grammar) {
            (Some(_), Some(_)) => Err(ApiError::invalid(
                "grammar",
                "`grammar` and `response_format` exclude each other: send one",
            )),
            (_, Some(grammar)) => Ok(TextFormat::Grammar(grammar)),
            (Some(schema), None) => Ok(TextFormat::Json(schema)),
            (None, None) => Ok(TextFormat::Free),
        }
    }
}

/// The restrictions of an answer.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Constraint {
    pub text: TextFormat,
    pub tools: Vec<Tool>,
    pub choice: ToolChoice,
    /// Whether several tools may be called at once.
    pub is_parallel: bool,
}

impl Constraint {
    /// Returns the tools that can be called.
    fn callable(&self) -> impl Iterator<Item = &Tool> {
        self.tools.iter().filter(|tool| match &self.choice {
            ToolChoice::None => false,
            ToolChoice::Auto | ToolChoice::Required => true,
            ToolChoice::Named(name) => tool.name == *name,
        })
    }

    /// Whether the answer may call a tool.
    pub fn can_call(&self) -> bool {
        self.callable().next().is_some()
    }

    /// Returns the name of the request's field that restricts the answer.
    pub fn field(&self) -> &'static str {
        match &self.text {
            TextFormat::Grammar(_) => "grammar",
            TextFormat::Json(_) => "response_format",
            TextFormat::Free => "tools",
        }
    }

    /// Whether a call can follow text in the same answer. If text may begin as a call does, calls are all that there is.
    pub fn can_follow_text(&self, syntax: &ToolSyntax) -> bool {
        syntax.trigger().1 && matches!(self.text, TextFormat::Free)
    }

    /// Returns the grammar of the answer; `None` if it is not restricted.
    pub fn grammar(&self, syntax: &ToolSyntax, tokenizer: &Tokenizer, thinking: Thinking) -> Option<String> {
        let mut rules = Rules { tokenizer, text: String::new() };
        let text = match &self.text {
            TextFormat::Free => None,
            TextFormat::Json(schema) => Some(format!("%json {}", with_options(schema.clone(), false))),
            TextFormat::Grammar(grammar) => Some(format!("%lark {{\n{grammar}\n}}")),
        };
        if tokenizer.has_harmony() && thinking != Thinking::Never {
            self.add_harmony(text, &mut rules);
            return Some(rules.text);
        }
        let body = if self.can_call() { self.text_or_calls(syntax, text, &mut rules) } else { text? };
        let start = match thinking {
            Thinking::Never => "body".to_owned(),
            Thinking::Possible => format!("({} thoughts SPACE?)? body", rules.terms(THOUGHT_START)),
            Thinking::Begun => "thoughts SPACE? body".to_owned(),
        };
        if thinking != Thinking::Never {
            let end = match tokenizer.split_control_tokens(THOUGHT_END)[..] {
                [Fragment::Text(text)] => format!("thoughts[lazy]: /(.|\\n)*{}/", regex(text)),
                _ => format!("thoughts: /(.|\\n)*/ {}", rules.terms(THOUGHT_END)),
            };
            rules.add(&end);
            rules.add("SPACE: /\\s+/");
        }
        Some(format!("start: {start}\nbody: {body}\n{}", rules.text))
    }

    /// Adds the rules of an answer in the harmony format: thoughts, and then `text`, or free text, or a call.
    fn add_harmony(&self, text: Option<String>, rules: &mut Rules<'_>) {
        let thoughts = rules.terms("<|channel|>analysis<|message|>");
        rules.add("start: thoughts* answer");
        rules.add(&format!("thoughts: {thoughts} FREE {}", rules.terms("<|end|><|start|>assistant")));
        rules.add("FREE: /(.|\\n)*/");
        let last = rules.terms("<|channel|>final<|message|>");
        let mut answers = Vec::new();
        if !self.can_call() || matches!(self.choice, ToolChoice::Auto) {
            answers.push(format!("{last} {}", text.unwrap_or_else(|| "FREE".to_owned())));
        }
        for tool in self.callable() {
            let header =
                format!("<|channel|>commentary to=functions.{} <|constrain|>json<|message|>", tool.name);
            answers.push(format!("{} %json {}", rules.terms(&header), tool.schema()));
        }
        let mut names = Vec::new();
        for (at, answer) in answers.iter().enumerate() {
            rules.add(&format!("answer_{at}: {answer}"));
            names.push(format!("answer_{at}"));
        }
        rules.add(&format!("answer: {}", names.join(" | ")));
    }

    /// Returns the rule of an answer that is `text`, or free text, or calls, and adds the rules that it needs.
    fn text_or_calls(&self, syntax: &ToolSyntax, text: Option<String>, rules: &mut Rules<'_>) -> String {
        self.add_calls(syntax, rules);
        let opening = rules.terms(&syntax.opening);
        if !matches!(self.choice, ToolChoice::Auto) {
            return format!("{opening} calls");
        }
        if let Some(text) = text {
            return format!("{text} | {opening} calls");
        }
        let (trigger, is_mark) = syntax.trigger();
        if !is_mark {
            // Text is what does not begin as a call does.
            let first = regex(&syntax.opening.chars().take(1).collect::<String>());
            rules.add(&format!("OTHER: /([^{first}](.|\\n)*)?/"));
            return format!("OTHER | {opening} calls");
        }
        let mark = regex(trigger);
        rules.add(&format!("UNMARKED: /(.|\\n)*/ & ~/(.|\\n)*{mark}(.|\\n)*/"));
        if let Some(Fragment::Token(_)) = rules.tokenizer.split_control_tokens(trigger).first() {
            return format!("UNMARKED | UNMARKED {opening} calls");
        }
        let rest = rules.terms(&syntax.opening[trigger.len()..]);
        rules.add(&format!("before[lazy]: /(.|\\n)*{mark}/"));
        format!("UNMARKED | before {rest} calls")
    }

    /// Adds the rules of calls after the opening of the first one.
    fn add_calls(&self, syntax: &ToolSyntax, rules: &mut Rules<'_>) {
        let next = syntax.next.as_ref().filter(|_| self.is_parallel);
        let next = next.map(|next| format!(" ({} call){{0,{}}}", rules.terms(next), MAX_CALLS - 1));
        rules.add(&format!("calls: call{} {}", next.unwrap_or_default(), rules.terms(&syntax.ending)));
        let middle = rules.terms(&syntax.middle);
        let mut calls = Vec::new();
        for (at, tool) in self.callable().enumerate() {
            rules.add(&format!("call_{at}: {} {middle} %json {}", rules.terms(&tool.name), tool.schema()));
            calls.push(format!("call_{at}"));
        }
        rules.add(&format!("call: {}", calls.join(" | ")));
    }
}

/// The rules of a grammar, in the Lark syntax of llguidance.
struct Rules<'a> {
    tokenizer: &'a Tokenizer,
    text: String,
}

impl Rules<'_> {
    fn add(&mut self, rule: &str) {
        self.text += rule;
        self.text.push('\n');
    }

    /// Returns the terms of a rule that match exactly `text`.
    fn terms(&self, text: &str) -> String {
        let term = |fragment: Fragment| match fragment {
            // The escapes of Lark's strings are those of JSON.
            Fragment::Text(text) => Value::from(text).to_string(),
            Fragment::Token(id) => format!("<[{id}]>"),
        };
        self.tokenizer.split_control_tokens(text).into_iter().map(term).collect::<Vec<_>>().join(" ")
    }
}

impl Tool {
    /// Returns the schema of the arguments. Without `strict`, what llguidance does not support is not checked.
    fn schema(&self) -> Value {
        let mut schema = self.parameters.clone();
        if let Some(fields) = schema.as_object_mut() {
            fields.insert("type".to_owned(), json!("object"));
        }
        with_options(schema, !self.is_strict)
    }
}

/// Returns a JSON Schema with the options of llguidance. White space is limited, so that a model cannot write it without
/// end.
fn with_options(mut schema: Value, is_lenient: bool) -> Value {
    if let Some(fields) = schema.as_object_mut() {
        let options = json!({
            "lenient": is_lenient,
            "whitespace_flexible": false,
            "item_separator": ITEM_SEPARATOR,
            "key_separator": KEY_SEPARATOR
        });
        fields.insert("x-guidance".to_owned(), options);
    }
    schema
}

/// Returns a regular expression that matches exactly `text`.
fn regex(text: &str) -> String {
    let escaped = |c: char| {
        if c.is_alphanumeric() { c.to_string() } else { format!("\\x{{{:X}}}", u32::from(c)) }
    };
    text.chars().map(escaped).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use hearth_profiles::gguf::{Array, Metadata, Value as MetadataValue};
    use hearth_runtime::{GrammarCompiler, IncrementalDetokenizer, Sampler, SamplerOptions};

    use super::*;
    use crate::answer::{Answer, AnswerParser, AnswerSyntax};

    /// A tokenizer of byte tokens (0 to 255), the control token `[CALLS]` (256), the end (257), and more control tokens.
    fn tokenizer(more: &[&str]) -> Tokenizer {
        let bytes = (0..256).map(|byte| format!("<0x{byte:02X}>"));
        let control = ["[CALLS]", "</s>"].iter().chain(more).map(ToString::to_string);
        let tokens: Vec<String> = bytes.chain(control).collect();
        let types = (0..tokens.len()).map(|id| if id < 256 { 6 } else { 3 }).collect();
        let mut metadata = Metadata::default();
        let keys = [
            ("model", MetadataValue::Str("llama".into())),
            ("scores", MetadataValue::Array(Array::F32(vec![0.0; tokens.len()]))),
            ("tokens", MetadataValue::Array(Array::Str(tokens))),
            ("token_type", MetadataValue::Array(Array::I32(types))),
            ("eos_token_id", MetadataValue::U32(257)),
            ("add_bos_token", MetadataValue::Bool(false)),
            ("add_space_prefix", MetadataValue::Bool(false)),
        ];
        for (key, value) in keys {
            metadata.insert(format!("tokenizer.ggml.{key}"), value);
        }
        Tokenizer::new(&metadata).expect("a tokenizer")
    }

    fn tool(name: &str) -> Tool {
        let parameters = json!({
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": false
        });
        Tool { name: name.into(), parameters, is_strict: true }
    }

    /// The control tokens of the harmony format.
    const HARMONY: [&str; 6] =
        ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"];

    fn answer(
        constraint: &Constraint,
        syntax: ToolSyntax,
        thinking: Thinking,
        wanted: &str,
    ) -> Option<Answer> {
        answer_with(&[], constraint, syntax, thinking, wanted)
    }

    /// Generates an answer by a sampler that prefers to write `wanted`, where the grammar allows it, and then the end.
    fn answer_with(
        more_tokens: &[&str],
        constraint: &Constraint,
        syntax: ToolSyntax,
        thinking: Thinking,
        wanted: &str,
    ) -> Option<Answer> {
        let (tokenizer, count) = (tokenizer(more_tokens), 258 + more_tokens.len());
        let mut stream = IncrementalDetokenizer::default();
        let syntax = Arc::new(syntax);
        let grammar = constraint.grammar(&syntax, &tokenizer, thinking).expect("a grammar");
        let compiler = GrammarCompiler::new(&tokenizer, count as u32).expect("a compiler");
        let matcher = compiler.compile(&grammar).unwrap_or_else(|error| panic!("{error}\n{grammar}"));
        let failure = matcher.failure();
        let mut sampler = Sampler::new(SamplerOptions::default()).expect("a sampler").with_grammar(matcher);
        let tokens = tokenizer.split_control_tokens(wanted).into_iter().flat_map(|part| match part {
            Fragment::Token(id) => vec![id],
            Fragment::Text(text) => text.bytes().map(u32::from).collect(),
        });
        let mut wanted = tokens.peekable();
        let can_follow_text = constraint.can_follow_text(&syntax);
        let tools = constraint.can_call().then_some(syntax);
        let mut parser = AnswerParser::new(&AnswerSyntax { thinking, tools, can_follow_text }, (0, 0));
        let mut answer = Answer::default();
        for _ in 0..1000 {
            let mut logits = vec![0.0; count];
            logits[257] = 1.0;
            if let Some(&next) = wanted.peek() {
                logits[next as usize] = 2.0;
            }
            let token = sampler.sample(&logits);
            assert_eq!(failure.get(), None, "{grammar}");
            wanted.next_if_eq(&token);
            if token == 257 {
                if let Some(part) = parser.finish() {
                    answer.add(part);
                }
                return wanted.peek().is_none().then_some(answer);
            }
            let text = if more_tokens.is_empty() {
                tokenizer.text_of(token)
            } else {
                stream.push(&tokenizer, token)
            };
            for part in parser.push(&text) {
                answer.add(part);
            }
        }
        None
    }

    fn with_mark() -> ToolSyntax {
        ToolSyntax {
            opening: "[CALLS]".into(),
            middle: "=>".into(),
            next: Some("[CALLS]".into()),
            ending: String::new(),
            ..ToolSyntax::common()
        }
    }

    fn without_mark() -> ToolSyntax {
        ToolSyntax { opening: "{\"name\": \"".into(), next: None, ending: "}".into(), ..ToolSyntax::common() }
    }

    #[test]
    fn tools_are_called_or_not() {
        let constraint = Constraint {
            tools: vec![tool("weather"), tool("time")],
            is_parallel: true,
            ..Constraint::default()
        };
        let paris = r#"{"city": "Paris"}"#;
        let rome = r#"{"city":"Rome"}"#;
        let common = format!(
            "<tool_call>\n{{\"name\": \"weather\", \"arguments\": {paris}}}\n</tool_call>\n\
             <tool_call>\n{{\"name\": \"time\", \"arguments\": {rome}}}\n</tool_call>"
        );
        let marked = format!("[CALLS]weather=>{paris}[CALLS]time=>{rome}");
        for (syntax, calls) in [(ToolSyntax::common(), &common), (with_mark(), &marked)] {
            for (thinking, before, text) in [
                (Thinking::Never, "", ""),
                (Thinking::Never, "I look. <tool", "I look. <tool"),
                (Thinking::Possible, "<think>hm</think>\n\nI look.", "I look."),
                (Thinking::Begun, "hm</think>", ""),
            ] {
                let found = answer(&constraint, syntax.clone(), thinking, &format!("{before}{calls}"));
                let message = found.unwrap_or_else(|| panic!("{before}{calls}")).message();
                assert_eq!(message["content"].as_str().unwrap_or_default(), text, "{message}");
                let call = |index: usize| &message["tool_calls"][index]["function"];
                assert_eq!(*call(0), json!({"name": "weather", "arguments": paris}));
                assert_eq!(*call(1), json!({"name": "time", "arguments": rome}));
            }
            let plain = answer(&constraint, syntax, Thinking::Never, "Just text.\n").expect("text");
            assert_eq!(plain.message()["content"], "Just text.\n");
        }
        let one = format!("{{\"name\": \"time\", \"arguments\": {rome}}}");
        let message = answer(&constraint, without_mark(), Thinking::Never, &one).expect("a call").message();
        assert_eq!(message["tool_calls"][0]["function"]["arguments"], rome);
        let text = "Here is JSON: {\"name\": \"Bob\"}";
        let found = answer(&constraint, without_mark(), Thinking::Never, text).expect("text");
        assert_eq!(found.message()["content"], text);
        // The characters of a control token are no call.
        assert!(answer(&constraint, with_mark(), Thinking::Never, "Text").is_some());
    }

    #[test]
    fn calls_are_required_and_valid() {
        let one = Constraint {
            tools: vec![tool("weather"), tool("time")],
            choice: ToolChoice::Named("time".into()),
            ..Constraint::default()
        };
        let message = answer(&one, ToolSyntax::common(), Thinking::Never, "").expect("a call").message();
        let function = &message["tool_calls"][0]["function"];
        let arguments: Value =
            serde_json::from_str(function["arguments"].as_str().expect("text")).expect("JSON");
        assert_eq!((&function["name"], arguments["city"].is_string()), (&json!("time"), true));
        // The wanted text is not possible.
        let unknown = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"town\": 1}}\n</tool_call>";
        let required = Constraint { choice: ToolChoice::Required, ..one };
        assert_eq!(answer(&required, ToolSyntax::common(), Thinking::Never, unknown), None);
    }

    #[test]
    fn answers_in_the_harmony_format_have_thoughts_text_and_calls() {
        let syntax = || ToolSyntax {
            opening: "to=functions.".into(),
            middle: "<|channel|>commentary json<|message|>".into(),
            next: None,
            ending: String::new(),
            ..ToolSyntax::common()
        };
        let found = |constraint: &Constraint, wanted: &str| {
            answer_with(&HARMONY, constraint, syntax(), Thinking::Possible, wanted)
        };
        let thoughts = "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant";
        let call = "<|channel|>commentary to=functions.time <|constrain|>json<|message|>{\"city\": \"Rome\"}";
        let last = "<|channel|>final<|message|>Yes";
        let auto = Constraint { tools: vec![tool("weather"), tool("time")], ..Constraint::default() };
        let called = found(&auto, &format!("{thoughts}{call}")).expect("a call").message();
        assert_eq!(called["reasoning_content"], json!("Hm"), "{called}");
        let function = &called["tool_calls"][0]["function"];
        assert_eq!(function["name"], json!("time"), "{called}");
        assert_eq!(function["arguments"], json!("{\"city\": \"Rome\"}"), "{called}");
        assert_eq!(found(&auto, &format!("{thoughts}{last}")).expect("text").text, "Yes");
        let required = Constraint { choice: ToolChoice::Required, ..auto };
        assert!(found(&required, last).is_none() && found(&required, call).is_some());
        let schema = TextFormat::Json(json!({"enum": ["yes", "no"]}));
        let json = Constraint { text: schema, ..Constraint::default() };
        let wanted = format!("{thoughts}<|channel|>final<|message|>\"no\"");
        assert_eq!(found(&json, &wanted).expect("JSON").text, "\"no\"");
    }

    #[test]
    fn json_follows_thoughts() {
        let constraint =
            Constraint { text: TextFormat::Json(json!({"enum": ["yes", "no"]})), ..Constraint::default() };
        let found =
            answer(&constraint, ToolSyntax::common(), Thinking::Possible, "<think>so</think>\n\"no\"");
        assert_eq!(found.expect("JSON").text, "\"no\"");
        let direct = answer(&constraint, ToolSyntax::common(), Thinking::Never, "\"yes\"");
        assert_eq!(direct.expect("JSON").text, "\"yes\"");
        let grammar = Constraint {
            text: TextFormat::Grammar("start: WORD\nWORD: /[a-z]+/".into()),
            ..Constraint::default()
        };
        let found =
            answer(&grammar, ToolSyntax::common(), Thinking::Begun, "so</think>\nyes").expect("a word");
        assert_eq!(found.text, "yes");
        let both = Constraint { tools: vec![tool("time")], ..constraint };
        let call = "<tool_call>\n{\"name\": \"time\", \"arguments\": {\"city\": \"Rome\"}}\n</tool_call>";
        for text in ["\"no\"", call] {
            assert!(answer(&both, ToolSyntax::common(), Thinking::Never, text).is_some(), "{text}");
        }
    }
}
