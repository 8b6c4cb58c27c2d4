//! The chat format of a model: how a conversation becomes a prompt, and what an answer may contain.

use std::sync::Arc;

use hearth_runtime::chat::{THOUGHT_END, THOUGHT_START};
use hearth_runtime::{ChatMessage, ChatTemplate, ExecError, JsonValue, Tokenizer, ToolSyntax};

/// Number of tokens at the end of a prompt that may begin the thoughts. source: assumed; `<think>` and a line end
const MAX_THOUGHT_START_TOKENS: usize = 8;

/// Whether an answer begins with thoughts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Thinking {
    Never,
    Possible,
    /// The prompt ends with the beginning of the thoughts.
    Begun,
}

/// The chat template of a model, and what it shows about the model.
#[derive(Debug)]
pub struct ChatFormat {
    template: ChatTemplate,
    pub syntax: Arc<ToolSyntax>,
    can_think: bool,
    knows_developer: bool,
}

impl ChatFormat {
    pub fn new(template: ChatTemplate, tokenizer: &Tokenizer) -> ChatFormat {
        let syntax = Arc::new(ToolSyntax::of(&template, tokenizer));
        let source = template.source();
        let can_think = source.contains(THOUGHT_START) || tokenizer.has_harmony();
        let knows_developer = source.contains("developer");
        ChatFormat { template, syntax, can_think, knows_developer }
    }

    /// Returns the tokens of the prompt, and whether the answer begins with thoughts.
    pub fn encode(
        &self,
        tokenizer: &Tokenizer,
        mut messages: Vec<ChatMessage>,
        tools: Vec<JsonValue>,
    ) -> Result<(Vec<u32>, Thinking), ExecError> {
        // OpenAI's new name of the system message.
        for message in messages.iter_mut().filter(|message| message.role == "developer") {
            if !self.knows_developer {
                "system".clone_into(&mut message.role);
            }
        }
        let (messages, tools) = self.syntax.prepare(messages, tools);
        let tokens = self.template.encode(tokenizer, &messages, &tools)?;
        let is_thought_mark = |text: &str| [THOUGHT_START, THOUGHT_END].contains(&text);
        // What the template wrote after the role of the assistant; the text of the user is before it.
        let after_role = tokens.iter().rev().take(MAX_THOUGHT_START_TOKENS);
        let after_role =
            after_role.take_while(|&&token| tokenizer.control_text(token).is_none_or(is_thought_mark));
        let mut last: Vec<String> = after_role.map(|&token| tokenizer.text_of(token)).collect();
        last.reverse();
        let end = last.concat();
        let has_begun = self.can_think && end.trim_end().ends_with(THOUGHT_START);
        let thinking = match (has_begun, self.can_think) {
            (true, _) => Thinking::Begun,
            // The prompt of a model that shall not think ends with empty thoughts.
            (false, true) if !end.contains(THOUGHT_END) => Thinking::Possible,
            _ => Thinking::Never,
        };
        Ok((tokens, thinking))
    }
}
