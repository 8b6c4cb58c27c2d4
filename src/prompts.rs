//! Prompts of `hearth execute`, and their tokens.
//!
//! A prompt is text from the command line, a line of a file, a conversation, or a fixed text with a given number of
//! tokens, which may be that of a recorded request.

use std::io;
use std::path::Path;
use std::time::Duration;

use hearth_ring::{LocalModel, SequenceArrival};
use hearth_runtime::{ChatMessage, ChatTemplate, JsonValue, Tokenizer};
use hearth_schema::request_trace::{Arrival, check_context};
use hearth_workflow::documents::read_requests;
use hearth_workflow::files::{read_text_at_most, read_text_from};
use serde::Deserialize;

use crate::cli::ExecuteArgs;
use crate::diagnostics::Failure;

/// Maximum size of a file with text, prompts or messages, in bytes.
/// source: assumed, far beyond the longest context of a model
pub const MAX_FILE_LEN: u64 = 16 << 20;

/// Text of the prompt of `--prompt-tokens`, repeated until it has the given number of tokens.
const FIXED_TEXT: &str =
    "In the evening the four of them sat around the fire and told each other what they knew. ";

pub enum Prompts {
    Texts(Vec<String>),
    /// Conversations, and the descriptions of the tools that the model may call.
    Conversations(Vec<Vec<ChatMessage>>, Vec<JsonValue>),
    /// The first `tokens` tokens of the repeated [`FIXED_TEXT`], as the prompt of each of `sequences` sequences.
    Fixed {
        tokens: u32,
        sequences: u32,
    },
    /// Recorded requests, of which at most `sequences` are computed at the same time. The prompt of each one begins at
    /// another token of the repeated [`FIXED_TEXT`], so that no two prompts begin alike.
    Recorded {
        requests: Vec<Arrival>,
        sequences: u32,
    },
}

/// A JSON line in a file with prompts: a string, or an object with the key `prompt`.
#[derive(Deserialize)]
#[serde(untagged, deny_unknown_fields)]
enum Line {
    Text(String),
    Named { prompt: String },
}

impl Prompts {
    /// Reads the prompts from the flags of `hearth execute` and from the files that the flags name.
    pub fn from_args(args: &ExecuteArgs) -> Result<Self, Failure> {
        if let Some(path) = &args.messages {
            let standard = path.as_os_str() == "-";
            if standard && args.ring.device.exit_on_stdin_eof {
                let what = "`--messages -` and `--exit-with-stdin` cannot both use standard input";
                return Err(Failure::invalid(what)
                    .with_hint("write the messages to a file, and name the file with `--messages`"));
            }
            let text = if standard {
                read_text_from(io::stdin(), path, MAX_FILE_LEN)?
            } else {
                read_text_at_most(path, MAX_FILE_LEN)?
            };
            let MessagesFile { messages, tools } = parse_messages(path, &text)?;
            return Ok(Prompts::Conversations(vec![messages], tools));
        }
        if let Some(path) = &args.arrivals {
            let requests = read_requests(path, None)?;
            return Ok(Prompts::Recorded { requests, sequences: args.sequences });
        }
        if let Some(count) = args.prompt_tokens {
            return Ok(Prompts::Fixed { tokens: count, sequences: args.sequences });
        }
        let mut texts = args.prompt.clone();
        if let Some(path) = &args.prompts_file {
            let text = read_text_at_most(path, MAX_FILE_LEN)?;
            texts.extend(parse_lines(path, &text)?);
        }
        if !args.chat {
            return Ok(Prompts::Texts(texts));
        }
        let system = || args.system.iter().map(|text| ChatMessage::new("system", text));
        let conversation = |text| system().chain([ChatMessage::new("user", text)]).collect();
        Ok(Prompts::Conversations(texts.into_iter().map(conversation).collect(), Vec::new()))
    }

    /// Returns the arrivals of the sequences; none if all start at once.
    pub fn arrivals(&self) -> Vec<SequenceArrival> {
        let Prompts::Recorded { requests, .. } = self else { return Vec::new() };
        let arrival = |request: &Arrival| SequenceArrival {
            after: Duration::from_nanos(request.at_ns),
            max_new_tokens: request.generated_tokens,
        };
        requests.iter().map(arrival).collect()
    }

    /// Returns the number of sequences that are computed at the same time.
    pub fn concurrent(&self) -> usize {
        if let Prompts::Recorded { sequences, .. } = self { *sequences as usize } else { self.count() }
    }

    pub fn count(&self) -> usize {
        match self {
            Prompts::Recorded { requests, .. } => requests.len(),
            Prompts::Texts(texts) => texts.len(),
            Prompts::Conversations(conversations, _) => conversations.len(),
            Prompts::Fixed { sequences, .. } => *sequences as usize,
        }
    }

    pub fn encode(
        &self,
        model: &LocalModel,
        tokenizer: &Tokenizer,
        context: u32,
    ) -> Result<Vec<Vec<u32>>, Failure> {
        match self {
            Prompts::Texts(texts) => texts.iter().map(|text| Ok(tokenizer.encode(text, false)?)).collect(),
            Prompts::Conversations(conversations, tools) => {
                let template = ChatTemplate::new(&model.weights.model().metadata, tokenizer)?;
                conversations
                    .iter()
                    .map(|messages| Ok(template.encode(tokenizer, messages, tools)?))
                    .collect()
            }
            Prompts::Fixed { tokens: count, .. } if *count > context => {
                let what =
                    format!("a prompt of {count} tokens exceeds the plan's context of {context} tokens");
                Err(Failure::invalid(what).with_hint("use a shorter prompt, or plan with a larger `context`"))
            }
            Prompts::Recorded { requests, .. } => {
                check_context(requests, context).map_err(|what| {
                    Failure::invalid(what).with_hint("plan with a larger `context`, or remove the request")
                })?;
                let longest = requests.iter().map(|request| request.prompt_tokens).max().unwrap_or(0);
                let text = fixed_prompt(tokenizer, longest.min(context) as usize)?;
                let prompt = |(number, request): (usize, &Arrival)| {
                    let from = number % text.len().max(1);
                    text.iter().cycle().skip(from).take(request.prompt_tokens as usize).copied().collect()
                };
                Ok(requests.iter().enumerate().map(prompt).collect())
            }
            Prompts::Fixed { tokens: count, sequences } => {
                Ok(vec![fixed_prompt(tokenizer, *count as usize)?; *sequences as usize])
            }
        }
    }
}

/// Returns the first `count` tokens of the repeated [`FIXED_TEXT`].
fn fixed_prompt(tokenizer: &Tokenizer, count: usize) -> Result<Vec<u32>, Failure> {
    let mut text = FIXED_TEXT.to_string();
    let mut previous_len = 0;
    loop {
        let mut tokens = tokenizer.encode(&text, false)?;
        if tokens.len() >= count {
            tokens.truncate(count);
            return Ok(tokens);
        }
        if tokens.len() <= previous_len {
            return Err(Failure::invalid("the tokenizer of the model has no tokens for English text")
                .with_hint("give text with `--prompt` instead of `--prompt-tokens`"));
        }
        previous_len = tokens.len();
        text = text.repeat(2);
    }
}

/// The content of a file with messages: a list of messages, or an object with messages and tools.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct MessagesFile {
    messages: Vec<ChatMessage>,
    #[serde(default)]
    tools: Vec<JsonValue>,
}

fn parse_messages(path: &Path, text: &str) -> Result<MessagesFile, Failure> {
    let parsed = if text.trim_start().starts_with('{') {
        serde_json::from_str(text)
    } else {
        serde_json::from_str(text).map(|messages| MessagesFile { messages, tools: Vec::new() })
    };
    parsed.map_err(|error| {
        let (line, column) = (error.line(), error.column());
        let reason = error.to_string();
        let place = format!(" at line {line} column {column}");
        let reason = reason.strip_suffix(&place).unwrap_or(&reason);
        Failure::invalid(format!("this is not a JSON list of messages: {reason}"))
            .with_location(format!("{}:{line}:{column}", path.display()))
            .with_hint(
                r#"write [{"role": "user", "content": "Hello"}], or an object with this list as `messages` and with `tools`"#,
            )
    })
}

/// Parses one prompt from each line of `text`, and skips empty lines. A line that begins with a quote or a brace must
/// be a JSON string, or an object with the key `prompt`.
fn parse_lines(path: &Path, text: &str) -> Result<Vec<String>, Failure> {
    let prompt = |(number, line): (usize, &str)| {
        if !line.starts_with(['"', '{']) {
            return Ok(line.to_owned());
        }
        let read = serde_json::from_str(line).map(|line| match line {
            Line::Text(text) | Line::Named { prompt: text } => text,
        });
        read.map_err(|_| {
            let what =
                "this line begins like JSON, but is not a JSON string or an object with the key `prompt`";
            Failure::invalid(what)
                .with_location(format!("{}:{}", path.display(), number + 1))
                .with_hint(r#"write "Once upon" or {"prompt": "Once upon"}, or the text without quotes"#)
        })
    };
    let non_empty = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let prompts: Vec<String> = non_empty.map(prompt).collect::<Result<_, _>>()?;
    if prompts.is_empty() {
        let what = "the file has no prompts";
        return Err(Failure::invalid(what)
            .with_location(path.display())
            .with_hint("write one prompt on each line"));
    }
    Ok(prompts)
}
