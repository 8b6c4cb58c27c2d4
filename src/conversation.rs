//! A conversation with a model: its messages, and the tokens of the next prompt.

use std::sync::Arc;

use hearth_profiles::gguf::Metadata;
use hearth_runtime::chat::{THOUGHT_END, THOUGHT_START};
use hearth_runtime::{ChatMessage, ChatTemplate, ExecError, Tokenizer};

pub struct Conversation {
    tokenizer: Arc<Tokenizer>,
    /// `None` if texts are continued instead of answered.
    template: Option<ChatTemplate>,
    system: Option<String>,
    messages: Vec<ChatMessage>,
}

impl Conversation {
    /// Creates a conversation with the chat template in the metadata of a model. Without a template, every text is
    /// continued. Fails if the template cannot be used.
    pub fn with_template(metadata: &Metadata, tokenizer: Arc<Tokenizer>) -> Result<Self, ExecError> {
        let template = ChatTemplate::find(metadata, &tokenizer)?;
        Ok(Self { template, ..Self::without_template(tokenizer) })
    }

    /// Creates a conversation in which every text is continued.
    pub fn without_template(tokenizer: Arc<Tokenizer>) -> Self {
        Self { tokenizer, template: None, system: None, messages: Vec::new() }
    }

    /// Whether texts are answered, and not continued.
    pub fn has_template(&self) -> bool {
        self.template.is_some()
    }

    /// Removes all messages except the system message.
    pub fn clear(&mut self) {
        self.messages.clear();
    }

    /// Starts again with this system message; an empty one is removed.
    pub fn restart_with_system(&mut self, text: &str) {
        self.clear();
        self.system = Some(text.to_owned()).filter(|text| !text.is_empty());
    }

    /// Adds a message of the user, and returns the tokens of the prompt for the answer. If the template refuses the
    /// message, the conversation stays as it was.
    pub fn add_user_message(&mut self, text: &str) -> Result<Vec<u32>, ExecError> {
        let Some(template) = &self.template else { return self.tokenizer.encode(text, false) };
        self.messages.push(ChatMessage::new("user", text));
        let system = self.system.iter().map(|text| ChatMessage::new("system", text));
        let messages: Vec<ChatMessage> = system.chain(self.messages.iter().cloned()).collect();
        let prompt = template.encode(&self.tokenizer, &messages, &[]);
        if prompt.is_err() {
            self.messages.pop();
        }
        prompt
    }

    /// Adds the answer to the last message of the user.
    pub fn add_answer(&mut self, text: &str) {
        if self.has_template() {
            // Templates of the harmony format expect the text without thoughts.
            let has_thoughts = self.tokenizer.has_harmony() && text.starts_with(THOUGHT_START);
            let after = text.split_once(THOUGHT_END).map_or("", |(_, after)| after.trim_start());
            self.messages.push(ChatMessage::new("assistant", if has_thoughts { after } else { text }));
        }
    }

    /// Removes the last message of the user, which has no answer.
    pub fn remove_last_message(&mut self) {
        self.messages.pop();
    }
}
