//! The grammar of an answer that is restricted: to a JSON Schema, to a client's grammar, or to valid calls of tools.
//!
//! The grammar has the Lark syntax of llguidance. A model that may call tools writes free text until the mark with which
//! a call begins; from there on, only the syntax of the model, the names of the tools, and arguments that are valid under
//! their schemas can follow. Thoughts before the answer are not restricted.

use std::fmt::Write as _;

use hearth_runtime::tokenizer::Fragment;
use hearth_runtime::{Tokenizer, ToolSyntax};
use serde_json::{Value, json};

use crate::chat::{THOUGHT_END, THOUGHT_START, Thinking};
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

    /// Returns the grammar of the answer; `None` if it is not restricted.
    pub fn grammar(&self, syntax: &ToolSyntax, tokenizer: &Tokenizer, thinking: Thinking) -> Option<String> {
        if let TextFormat::Grammar(grammar) = &self.text {
            return Some(grammar.clone());
        }
        let text = match &self.text {
            TextFormat::Json(schema) => Some(format!("%json {}", with_options(schema.clone(), false))),
            _ => None,
        };
        let mut rules = String::new();
        let body = if self.can_call() {
            let terms = |text: &str| terms(tokenizer, text);
            let must_call = !matches!(self.choice, ToolChoice::Auto);
            let (trigger, is_mark) = syntax.trigger();
            let opening = terms(&syntax.opening);
            let call_or_text = match (&text, tokenizer.split_control_tokens(trigger).first()) {
                _ if must_call => format!("{opening} calls"),
                (Some(text), _) => format!("{text} | {opening} calls"),
                (None, Some(Fragment::Token(_))) => format!("FREE? | FREE? {opening} calls"),
                (None, _) => {
                    let rest = terms(&syntax.opening[trigger.len()..]);
                    let trigger = regex(trigger);
                    if is_mark {
                        let _ = write!(
                            rules,
                            "\nbefore[lazy]: /(.|\\n)*{trigger}/\nUNMARKED: /(.|\\n)*/ & ~/(.|\\n)*{trigger}(.|\\n)*/"
                        );
                        format!("UNMARKED | before {rest} calls")
                    } else {
                        let first = regex(&syntax.opening.chars().take(1).collect::<String>());
                        let _ = write!(rules, "\nOTHER: /([^{first}](.|\\n)*)?/");
                        format!("OTHER | {opening} calls")
                    }
                }
            };
            let next = syntax.next.as_ref().filter(|_| self.is_parallel);
            let next = next
                .map(|next| format!(" ({} call){{0,{}}}", terms(next), MAX_CALLS - 1))
                .unwrap_or_default();
            let _ = write!(rules, "\ncalls: call{next} {}", terms(&syntax.ending));
            let middle = terms(&syntax.middle);
            let calls: Vec<String> = self
                .callable()
                .enumerate()
                .map(|(at, tool)| {
                    let _ =
                        write!(rules, "\ncall_{at}: {} {middle} %json {}", terms(&tool.name), tool.schema());
                    format!("call_{at}")
                })
                .collect();
            let _ = write!(rules, "\ncall: {}", calls.join(" | "));
            call_or_text
        } else {
            text?
        };
        let thoughts = "thoughts SPACE?";
        let start = match thinking {
            Thinking::Never => "body".to_owned(),
            Thinking::Possible => format!("({} {thoughts})? body", terms(tokenizer, THOUGHT_START)),
            Thinking::Begun => format!("{thoughts} body"),
        };
        if thinking != Thinking::Never {
            let end = match tokenizer.split_control_tokens(THOUGHT_END)[..] {
                [Fragment::Text(text)] => format!("thoughts[lazy]: /(.|\\n)*{}/", regex(text)),
                _ => format!("thoughts: FREE? {}", terms(tokenizer, THOUGHT_END)),
            };
            let _ = write!(rules, "\n{end}\nSPACE: /\\s+/");
        }
        Some(format!("start: {start}\nbody: {body}{rules}\nFREE: /(.|\\n)+/\n"))
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

/// Returns the terms of a rule that match exactly `text`.
fn terms(tokenizer: &Tokenizer, text: &str) -> String {
    let term = |fragment: Fragment| match fragment {
        // The escapes of Lark's strings are those of JSON.
        Fragment::Text(text) => Value::from(text).to_string(),
        Fragment::Token(id) => format!("<[{id}]>"),
    };
    tokenizer.split_control_tokens(text).into_iter().map(term).collect::<Vec<_>>().join(" ")
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
    use hearth_runtime::{GrammarCompiler, Sampler, SamplerOptions};

    use super::*;
    use crate::answer::{Answer, AnswerParser};

    /// A tokenizer of byte tokens (0 to 255), the control token `[CALLS]` (256), and the end (257).
    fn tokenizer() -> Tokenizer {
        let bytes = (0..256).map(|byte| format!("<0x{byte:02X}>"));
        let tokens: Vec<String> = bytes.chain(["[CALLS]".to_owned(), "</s>".to_owned()]).collect();
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

    /// Generates an answer by a sampler that prefers to write `wanted`, where the grammar allows it, and then the end.
    fn answer(
        constraint: &Constraint,
        syntax: ToolSyntax,
        thinking: Thinking,
        wanted: &str,
    ) -> Option<Answer> {
        let tokenizer = tokenizer();
        let syntax = Arc::new(syntax);
        let grammar = constraint.grammar(&syntax, &tokenizer, thinking).expect("a grammar");
        let compiler = GrammarCompiler::new(&tokenizer, 258).expect("a compiler");
        let matcher = compiler.compile(&grammar).unwrap_or_else(|error| panic!("{error}\n{grammar}"));
        let failure = matcher.failure();
        let mut sampler = Sampler::new(SamplerOptions::default()).expect("a sampler").with_grammar(matcher);
        let tokens = tokenizer.split_control_tokens(wanted).into_iter().flat_map(|part| match part {
            Fragment::Token(id) => vec![id],
            Fragment::Text(text) => text.bytes().map(u32::from).collect(),
        });
        let mut wanted = tokens.peekable();
        let mut parser = AnswerParser::new(thinking, Some(syntax), 0);
        let mut answer = Answer::default();
        for _ in 0..1000 {
            let mut logits = vec![0.0; 258];
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
            for part in parser.push(&tokenizer.text_of(token)) {
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
        assert!(answer(&constraint, without_mark(), Thinking::Never, "Text {}").is_some());
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
    fn json_follows_thoughts() {
        let constraint =
            Constraint { text: TextFormat::Json(json!({"enum": ["yes", "no"]})), ..Constraint::default() };
        let found =
            answer(&constraint, ToolSyntax::common(), Thinking::Possible, "<think>so</think>\n\"no\"");
        assert_eq!(found.expect("JSON").text, "\"no\"");
        let direct = answer(&constraint, ToolSyntax::common(), Thinking::Never, "\"yes\"");
        assert_eq!(direct.expect("JSON").text, "\"yes\"");
        let both = Constraint { tools: vec![tool("time")], ..constraint };
        let call = "<tool_call>\n{\"name\": \"time\", \"arguments\": {\"city\": \"Rome\"}}\n</tool_call>";
        for text in ["\"no\"", call] {
            assert!(answer(&both, ToolSyntax::common(), Thinking::Never, text).is_some(), "{text}");
        }
    }
}
