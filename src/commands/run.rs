//! `hearth run`: answers texts with a model on this machine.

use std::io::{self, IsTerminal};
use std::path::Path;
use std::sync::Arc;

use hearth_ring::{Request, ResponseEvent, SequenceOutput, ServeOptions, Transport};
use hearth_runtime::{IncrementalDetokenizer, Sampler, SamplerOptions, Tokenizer};
use hearth_workflow::files::read_text_from;
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcsetattr};
use serde::Serialize;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::print_json;
use crate::cli::RunArgs;
use crate::conversation::Conversation;
use crate::diagnostics::{ExitCode, Failure};
use crate::interruption::{EXIT_INTERRUPTED, termination_signal};
use crate::machine::open_model;
use crate::output::{say, say_stderr};
use crate::prompts::MAX_FILE_LEN;
use crate::repl::{self, Entry, LineReader};
use crate::ring::{RingBuilder, TransportTask, plan_for_this_device, run_on_this_device};

/// The default sampling temperature. source: the default of llama.cpp
const DEFAULT_TEMPERATURE: f32 = 0.8;

pub fn run(args: &RunArgs, json: bool) -> Result<ExitCode, Failure> {
    let sampling = args.sampling.options(DEFAULT_TEMPERATURE);
    let stdin = io::stdin();
    let text = match &args.text {
        Some(text) => Some(text.clone()),
        None if stdin.is_terminal() => None,
        None => Some(read_text_from(stdin, Path::new("standard input"), MAX_FILE_LEN)?),
    };
    if json && text.is_none() {
        return Err(Failure::invalid("`--json` needs a text").with_hint("give the text as the last argument"));
    }
    let model = Arc::new(open_model(&args.model, args.gpu_weights)?);
    let located = |error| Failure::from(error).with_location(args.model.display());
    let metadata = &model.weights.model().metadata;
    let tokenizer = Arc::new(Tokenizer::new(metadata).map_err(located)?);
    let mut conversation = if args.complete {
        Conversation::without_template(tokenizer.clone())
    } else {
        let without =
            |error| located(error).with_hint("use `--complete` to continue a text without the template");
        Conversation::with_template(metadata, tokenizer.clone()).map_err(without)?
    };
    if let Some(system) = &args.system {
        conversation.restart_with_system(system);
        if !conversation.has_template() {
            let what = "the model has no chat template, so it cannot take a system message";
            let failure = Failure::invalid(what).with_location(args.model.display());
            return Err(failure.with_hint("put the instructions into the text"));
        }
    }
    let plan = plan_for_this_device(&model, &args.single_device, 1)?;
    let stop_tokens = tokenizer.stop_tokens();
    let (request_tx, request_rx) = mpsc::unbounded_channel();
    let context_length = plan.context_length;
    let generator = Generator {
        request_tx,
        tokenizer,
        sampling,
        context_length,
        max_new_tokens: args.tokens.unwrap_or(u32::MAX),
        count: 0,
    };
    let builder = RingBuilder::single_device(plan, model, args.threads.unwrap_or(0));
    let keeps_history = !args.no_history;
    let lacks_template = !args.complete && !conversation.has_template();
    let front_end = FrontEnd { conversation, generator, text, lacks_template, keeps_history, json };
    run_on_this_device(RunTask { builder, front_end, request_rx, stop_tokens })?
}

struct RunTask {
    builder: RingBuilder,
    front_end: FrontEnd,
    request_rx: mpsc::UnboundedReceiver<Request>,
    stop_tokens: Vec<u32>,
}

impl TransportTask for RunTask {
    type Output = Result<ExitCode, Failure>;

    async fn run<T: Transport>(self, transport: T) -> Self::Output {
        let RunTask { builder, front_end, request_rx, stop_tokens } = self;
        let mut ring = tokio::select! {
            ring = builder.connect(&transport) => ring?,
            _ = termination_signal() => return Ok(EXIT_INTERRUPTED),
        };
        let options = ServeOptions {
            micro_batch: builder.micro_batch,
            draft_tokens: builder.draft_tokens,
            stop_tokens,
            on_device_report: None,
        };
        let _restored = TerminalAttributes::save();
        let mut front_end = tokio::spawn(front_end.run());
        tokio::select! {
            // A pass in flight after an interrupted answer is abandoned: no other device waits for it.
            exit_code = &mut front_end => exit_code.map_err(Failure::failed)?,
            (_, ended) = ring.serve(options, request_rx) => match ended {
                // The front end has ended and closed the channel of the requests.
                Ok(()) => front_end.await.map_err(Failure::failed)?,
                Err(error) => {
                    front_end.abort();
                    Err(error.into())
                }
            },
        }
    }
}

/// Takes texts from the user, and shows the answers.
struct FrontEnd {
    conversation: Conversation,
    generator: Generator,
    /// The only text; `None` starts a chat in the terminal.
    text: Option<String>,
    /// Whether a text is continued although `--complete` is not set.
    lacks_template: bool,
    keeps_history: bool,
    json: bool,
}

impl FrontEnd {
    async fn run(mut self) -> Result<ExitCode, Failure> {
        let Some(text) = self.text.take() else { return self.chat().await };
        let prompt = self.conversation.add_user_message(&text)?;
        let answer = self.generator.generate(prompt, !self.json).await?;
        if self.json {
            print_json(&answer)?;
        } else {
            say!("\n");
            say_stderr!("{}", answer.statistics());
            if self.lacks_template {
                say_stderr!("The model has no chat template, so the text was continued.");
            }
        }
        Ok(answer.exit_code())
    }

    async fn chat(mut self) -> Result<ExitCode, Failure> {
        let mut terminal = Terminal::open(self.keeps_history)?;
        if !self.conversation.has_template() {
            say_stderr!("The model has no chat template, or `--complete` is set: each text is continued.");
        }
        say_stderr!("/help lists the commands; Ctrl-D ends the chat.");
        loop {
            match terminal.read().await? {
                Entry::Text(text) => {
                    if self.answer(&text).await? == Some(FinishReason::Terminated) {
                        return Ok(EXIT_INTERRUPTED);
                    }
                }
                Entry::Clear => self.conversation.clear(),
                Entry::System(_) if !self.conversation.has_template() => {
                    say_stderr!("There is no chat template, so there is no system message.");
                }
                Entry::System(text) => self.conversation.restart_with_system(&text),
                Entry::Help => say!("{}\n", repl::HELP),
                Entry::UnknownCommand(command) => say_stderr!("There is no command {command}: see /help."),
                Entry::Empty => {}
                Entry::Exit => return Ok(ExitCode::SUCCESS),
                Entry::Signal => return Ok(EXIT_INTERRUPTED),
            }
        }
    }

    /// Answers a text of a chat. Returns why the answer ended; `None` if the template refuses the text or the context
    /// is full, so that the chat goes on without it.
    async fn answer(&mut self, text: &str) -> Result<Option<FinishReason>, Failure> {
        let prompt = match self.conversation.add_user_message(text) {
            Ok(prompt) => prompt,
            Err(error) => {
                say_stderr!("{}", Failure::from(error).to_string().trim_end());
                return Ok(None);
            }
        };
        if let Err(full) = self.generator.max_answer_tokens(&prompt) {
            self.conversation.remove_last_message();
            say_stderr!("{}", full.with_hint("forget the conversation with /clear").to_string().trim_end());
            return Ok(None);
        }
        let answer = self.generator.generate(prompt, true).await?;
        say!("\n");
        say_stderr!("{}\n", answer.statistics());
        if answer.text.is_empty() {
            self.conversation.remove_last_message();
        } else {
            self.conversation.add_answer(&answer.text);
        }
        Ok(Some(answer.finish_reason))
    }
}

/// The attributes of the terminal before a chat, which are restored on drop: the chat may end while a line is being
/// read.
struct TerminalAttributes(Option<Termios>);

impl TerminalAttributes {
    fn save() -> Self {
        Self(tcgetattr(io::stdin()).ok())
    }
}

impl Drop for TerminalAttributes {
    fn drop(&mut self) {
        if let Some(attributes) = &self.0 {
            let _ = tcsetattr(io::stdin(), OptionalActions::Now, attributes);
        }
    }
}

/// The terminal during a chat.
struct Terminal {
    /// `None` only while a line is being read.
    reader: Option<LineReader>,
}

impl Terminal {
    fn open(keeps_history: bool) -> Result<Terminal, Failure> {
        Ok(Terminal { reader: Some(LineReader::new(keeps_history).map_err(Failure::failed)?) })
    }

    /// Reads one entry. SIGTERM and SIGHUP are [`Entry::Signal`]; Ctrl-C is a key while a line is being read.
    async fn read(&mut self) -> Result<Entry, Failure> {
        let mut reader = self.reader.take().expect("one line is read at a time");
        let reading = tokio::task::spawn_blocking(move || {
            let entry = reader.read();
            (reader, entry)
        });
        tokio::select! {
            read = reading => {
                let (reader, entry) = read.map_err(Failure::failed)?;
                self.reader = Some(reader);
                entry.map_err(Failure::failed)
            }
            _ = termination_signal() => Ok(Entry::Signal),
        }
    }
}

/// Generates answers with the ring, and prints them as they come.
struct Generator {
    request_tx: mpsc::UnboundedSender<Request>,
    tokenizer: Arc<Tokenizer>,
    sampling: SamplerOptions,
    context_length: u32,
    max_new_tokens: u32,
    /// The number of answers so far; each has its own random stream.
    count: u32,
}

impl Generator {
    /// Returns the maximum number of tokens of an answer. Fails if the prompt leaves no room for one.
    fn max_answer_tokens(&self, prompt: &[u32]) -> Result<u32, Failure> {
        let prompt_tokens = u32::try_from(prompt.len()).unwrap_or(u32::MAX);
        let left = self.context_length.checked_sub(prompt_tokens).filter(|&left| left > 0);
        let limited = left.map(|left| left.min(self.max_new_tokens));
        limited.filter(|_| !prompt.is_empty()).ok_or_else(|| {
            if prompt.is_empty() {
                return Failure::invalid("the text has no tokens").with_hint("enter a text");
            }
            let context = self.context_length;
            let what = format!(
                "the text has {prompt_tokens} tokens, which leaves no room in the context of {context}"
            );
            Failure::invalid(what).with_hint("shorten the text, or set a longer `--context`")
        })
    }

    /// Generates the answer to a prompt, and prints its text if `print` is set. Ctrl-C ends the answer.
    async fn generate(&mut self, prompt: Vec<u32>, print: bool) -> Result<Answer, Failure> {
        let max_new_tokens = self.max_answer_tokens(&prompt)?;
        let mut sampler = Sampler::new(self.sampling)?.for_sequence(self.count);
        self.count += 1;
        let (response_tx, mut response_rx) = mpsc::unbounded_channel();
        let mut answer = Answer { prompt_tokens: prompt.len(), ..Answer::default() };
        let output = SequenceOutput::Tokens(Box::new(move |logits: &[f32]| sampler.sample(logits)));
        // If the ring has failed, the channel of the response is closed without an event.
        let _ = self.request_tx.send(Request { prompt, max_new_tokens, output, response_tx });
        let start = Instant::now();
        // The prompt gives the first token, and each pass one more.
        let mut passes = 0;
        let mut detokenizer = IncrementalDetokenizer::default();
        let interrupted = termination_signal();
        tokio::pin!(interrupted);
        loop {
            let event = tokio::select! {
                event = response_rx.recv() => event,
                is_ctrl_c = &mut interrupted => {
                    answer.finish_reason =
                        if is_ctrl_c { FinishReason::Interrupted } else { FinishReason::Terminated };
                    break;
                }
            };
            match event {
                Some(ResponseEvent::Started { cached_tokens }) => answer.cached_tokens = cached_tokens,
                Some(ResponseEvent::Token(token)) => {
                    let ms = start.elapsed().as_secs_f64() * 1e3;
                    let first = *answer.ttft_ms.get_or_insert(ms);
                    answer.tokens_per_s = (passes > 0).then(|| f64::from(passes) * 1e3 / (ms - first));
                    passes += 1;
                    if self.tokenizer.is_eog(token) {
                        answer.finish_reason = FinishReason::Stop;
                    } else {
                        answer.token_ids.push(token);
                        answer.add_text(&detokenizer.push(&self.tokenizer, token), print)?;
                    }
                }
                Some(ResponseEvent::Failed(reason)) => return Err(Failure::failed(reason)),
                None => {
                    let is_complete = answer.token_ids.len() == max_new_tokens as usize;
                    if is_complete || answer.finish_reason == FinishReason::Stop {
                        break;
                    }
                    return Err(Failure::failed("the model stopped computing"));
                }
            }
        }
        answer.add_text(&detokenizer.finish(), print)?;
        answer.fills_context = max_new_tokens < self.max_new_tokens;
        Ok(answer)
    }
}

/// Why an answer ended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum FinishReason {
    /// The model ended the text.
    Stop,
    /// The answer has the maximum number of tokens, or the context is full.
    #[default]
    Length,
    /// Ctrl-C stopped the answer.
    Interrupted,
    /// SIGTERM or SIGHUP stopped the program.
    Terminated,
}

/// An answer, as `--json` prints it.
#[derive(Debug, Default, Serialize)]
struct Answer {
    text: String,
    token_ids: Vec<u32>,
    prompt_tokens: usize,
    /// The number of prompt tokens that were in the KV cache already.
    cached_tokens: u32,
    finish_reason: FinishReason,
    /// Whether the context, and not `--tokens`, limits the answer.
    #[serde(skip)]
    fills_context: bool,
    /// The time to the first token; `None` if no token was generated.
    ttft_ms: Option<f64>,
    /// The number of tokens after the first one, divided by their time; `None` if there is only one.
    tokens_per_s: Option<f64>,
}

impl Answer {
    fn add_text(&mut self, text: &str, print: bool) -> Result<(), Failure> {
        self.text.push_str(text);
        if print {
            say!("{text}");
        }
        Ok(())
    }

    fn exit_code(&self) -> ExitCode {
        match self.finish_reason {
            FinishReason::Stop | FinishReason::Length => ExitCode::SUCCESS,
            FinishReason::Interrupted | FinishReason::Terminated => EXIT_INTERRUPTED,
        }
    }

    /// Returns the numbers of tokens, the speed, and why the answer ended if the model did not end it.
    fn statistics(&self) -> String {
        let Answer { prompt_tokens, token_ids, .. } = self;
        let first = self.ttft_ms.map_or(String::new(), |ms| format!("; first after {:.2} s", ms / 1e3));
        let speed = self.tokens_per_s.map_or(String::new(), |speed| format!(", then {speed:.1} tokens/s"));
        let end = match self.finish_reason {
            FinishReason::Stop if token_ids.is_empty() => "; the model ended the text at once",
            FinishReason::Stop => "",
            FinishReason::Length if self.fills_context => "; stopped because the context is full",
            FinishReason::Length => "; stopped at the maximum number of tokens",
            FinishReason::Interrupted | FinishReason::Terminated => "; interrupted",
        };
        let plural = if *prompt_tokens == 1 { "" } else { "s" };
        format!("[{prompt_tokens} prompt token{plural}, {} generated{first}{speed}{end}]", token_ids.len())
    }
}
