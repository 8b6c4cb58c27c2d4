//! What is the ring asked to go on from?
//!
//! One prompt or several: texts of the command line, of a file with one a line, a conversation, or a fixed text of so
//! many tokens. Here they become tokens, through the model's chat template where that is wanted.

use std::io;
use std::path::Path;

use hearth_ring::LocalModel;
use hearth_runtime::{ChatTemplate, Message, Tokenizer};
use hearth_workflow::files::{read_at_most, text_of};
use serde::Deserialize;

use crate::cli::ExecuteArgs;
use crate::diagnostics::Failure;

/// The longest file of prompts or messages, in bytes.
/// source: assumed, far beyond the longest context of a model
const LONGEST_TEXT: u64 = 16 << 20;

/// Any text does for a measurement; this one is repeated as often as needed.
const FIXED_TEXT: &str =
    "In the evening the four of them sat around the fire and told each other what they knew. ";

/// What is asked, before there is a model.
pub enum Asked {
    /// Go on from these texts.
    Texts(Vec<String>),
    /// Answer these conversations.
    Conversations(Vec<Vec<Message>>),
    /// So many tokens, for so many sequences.
    Fixed(u32, u32),
}

/// A line of a file of prompts.
#[derive(Deserialize)]
#[serde(untagged)]
enum Line {
    Text(String),
    Named(Named),
}

/// A prompt by its key.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Named {
    prompt: String,
}

impl Asked {
    /// What the command line says, and the files that it names.
    pub fn by(args: &ExecuteArgs) -> Result<Self, Failure> {
        if let Some(path) = &args.messages {
            let standard = path.as_os_str() == "-";
            if standard && args.ring.exit_with_stdin {
                let what = "`--messages -` and `--exit-with-stdin` cannot both have standard input";
                return Err(Failure::unusable(what).hint("give the messages in a file"));
            }
            let text = if standard {
                text_of(io::stdin(), path, LONGEST_TEXT)?
            } else {
                read_at_most(path, LONGEST_TEXT)?
            };
            return Ok(Asked::Conversations(vec![conversation(path, &text)?]));
        }
        if let Some(count) = args.prompt_tokens {
            return Ok(Asked::Fixed(count, args.sequences));
        }
        let mut texts = args.prompt.clone();
        if let Some(path) = &args.prompts {
            let text = read_at_most(path, LONGEST_TEXT)?;
            texts.extend(lines(path, &text)?);
        }
        if !args.chat {
            return Ok(Asked::Texts(texts));
        }
        let said = |role: &str, content: String| Message { role: role.into(), content };
        let system = || args.system.iter().map(|text| said("system", text.clone()));
        let conversation = |text| system().chain([said("user", text)]).collect();
        Ok(Asked::Conversations(texts.into_iter().map(conversation).collect()))
    }

    /// How many sequences that makes.
    pub fn count(&self) -> usize {
        match self {
            Asked::Texts(texts) => texts.len(),
            Asked::Conversations(conversations) => conversations.len(),
            Asked::Fixed(_, sequences) => *sequences as usize,
        }
    }

    /// The tokens of each.
    pub fn tokens(
        &self,
        model: &LocalModel,
        tokenizer: &Tokenizer,
        context: u32,
    ) -> Result<Vec<Vec<u32>>, Failure> {
        match self {
            Asked::Texts(texts) => texts.iter().map(|text| Ok(tokenizer.encode(text, false)?)).collect(),
            Asked::Conversations(conversations) => {
                let template = ChatTemplate::new(&model.weights.model().metadata, tokenizer)?;
                conversations.iter().map(|messages| Ok(template.encode(tokenizer, messages)?)).collect()
            }
            Asked::Fixed(count, _) if *count > context => {
                let what = format!("a prompt of {count} tokens does not fit the plan's context of {context}");
                Err(Failure::unusable(what).hint("ask for fewer tokens, or plan with a larger `context`"))
            }
            Asked::Fixed(count, sequences) => {
                Ok(vec![fixed(tokenizer, *count as usize)?; *sequences as usize])
            }
        }
    }
}

fn fixed(tokenizer: &Tokenizer, count: usize) -> Result<Vec<u32>, Failure> {
    let mut text = FIXED_TEXT.to_string();
    let mut before = 0;
    loop {
        let mut tokens = tokenizer.encode(&text, false)?;
        if tokens.len() >= count {
            tokens.truncate(count);
            return Ok(tokens);
        }
        if tokens.len() <= before {
            return Err(Failure::unusable("the model's tokenizer makes no tokens of plain English")
                .hint("give a text that it knows with --prompt"));
        }
        before = tokens.len();
        text = text.repeat(2);
    }
}

fn conversation(path: &Path, text: &str) -> Result<Vec<Message>, Failure> {
    serde_json::from_str(text).map_err(|error| {
        let (line, column) = (error.line(), error.column());
        let said = error.to_string();
        let place = format!(" at line {line} column {column}");
        let said = said.strip_suffix(&place).unwrap_or(&said);
        Failure::unusable(format!("this is no list of messages: {said}"))
            .at(format!("{}:{line}:{column}", path.display()))
            .hint(r#"write [{"role": "user", "content": "Hello"}]"#)
    })
}

/// A prompt a line; one that begins as JSON does must be a string or have a `prompt`. Empty lines are none.
fn lines(path: &Path, text: &str) -> Result<Vec<String>, Failure> {
    let prompt = |(number, line): (usize, &str)| {
        if !line.starts_with(['"', '{']) {
            return Ok(line.to_owned());
        }
        let read = serde_json::from_str(line).map(|line| match line {
            Line::Text(text) | Line::Named(Named { prompt: text }) => text,
        });
        read.map_err(|_| {
            Failure::unusable("this line begins as JSON does, and is no prompt")
                .at(format!("{}:{}", path.display(), number + 1))
                .hint(r#"write "Once upon" or {"prompt": "Once upon"}, or the text without quotes"#)
        })
    };
    let filled = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let prompts: Vec<String> = filled.map(prompt).collect::<Result<_, _>>()?;
    if prompts.is_empty() {
        let what = "there is no prompt in this file";
        return Err(Failure::unusable(what).at(path.display()).hint("write one on each line"));
    }
    Ok(prompts)
}
