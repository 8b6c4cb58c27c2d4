//! Renders conversations with chat templates, for comparison with other programs.
//!
//! `cargo run --release -p hearth-runtime --example render_chat -- MODEL.gguf < cases.jsonl > texts.jsonl`
//!
//! Each line of the input is `{"template": .., "messages": [..], "tools": [..]}`, each line of the output
//! `{"text": ..}` or `{"error": ..}`. The beginning-of-text and end-of-text tokens are those of the model.

use std::io::{BufRead, Write};

use hearth_profiles::gguf::{GgufModel, Metadata, Value};
use hearth_runtime::{ChatMessage, ChatTemplate, ExecError, JsonValue, Tokenizer};
use serde::Deserialize;
use serde_json::json;

#[derive(Deserialize)]
struct Case {
    template: String,
    messages: Vec<ChatMessage>,
    #[serde(default)]
    tools: Vec<JsonValue>,
}

fn render(tokenizer: &Tokenizer, case: Case) -> Result<String, ExecError> {
    let mut metadata = Metadata::default();
    metadata.insert("tokenizer.chat_template".into(), Value::Str(case.template));
    ChatTemplate::new(&metadata, tokenizer)?.render(&case.messages, &case.tools)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args().nth(1).ok_or("usage: render_chat MODEL.gguf < cases.jsonl")?;
    let tokenizer = Tokenizer::new(&GgufModel::open(path)?.metadata)?;
    let mut out = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        let rendered = match render(&tokenizer, serde_json::from_str(&line?)?) {
            Ok(text) => json!({ "text": text }),
            Err(error) => json!({ "error": error.to_string() }),
        };
        writeln!(out, "{rendered}")?;
    }
    Ok(())
}
