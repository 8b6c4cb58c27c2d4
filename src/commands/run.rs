//! `hearth run`: answers texts with a model on this machine.

use std::io::{self, IsTerminal};
use std::path::Path;
use std::sync::Arc;

use hearth_ring::{Request, ResponseEvent, ServeOptions, Transport};
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
use crate::output::{escape, say, say_stderr};
use crate::repl::{self, Entry, LineReader};
use crate::ring::{RingBuilder, TransportTask, plan_for_this_device, run_on_this_device};

/// Maximum size of a text from standard input, in bytes. source: assumed, far beyond the longest context of a model
const MAX_TEXT_BYTES: u64 = 16 << 20;

/// The default sampling temperature. source: the default of llama.cpp
const DEFAULT_TEMPERATURE: f32 = 0.8;

pub fn run(args: &RunArgs, json: bool) -> Result<ExitCode, Failure> {
    let sampling = args.sampling.options(DEFAULT_TEMPERATURE);
    // Wrong options are an error before the model is read.
    Sampler::new(sampling)?;
    let stdin = io::stdin();
    let text = match &args.text {
        Some(text) => Some(text.clone()),
        None if stdin.is_terminal() => None,
        None => Some(read_text_from(stdin, Path::new("standard input"), MAX_TEXT_BYTES)?),
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
            return Err(located_invalid(what, args).with_hint("write what the model shall do into the text"));
        }
    }
    let plan = plan_for_this_device(&model, &args.single_device, 1)?;
    let vocab_size = model.weights.shape().vocab_size;
    let stop_tokens = (0..vocab_size).filter(|&token| tokenizer.is_eog(token)).collect();
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
    let front_end = FrontEnd { conversation, generator, text, json };
    run_on_this_device(RunTask { builder, front_end, request_rx, stop_tokens })?
}

fn located_invalid(what: &str, args: &RunArgs) -> Failure {
    Failure::invalid(what).with_location(args.model.display())
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
            () = termination_signal() => return Ok(EXIT_INTERRUPTED),
        };
        let options = ServeOptions {
            micro_batch: builder.micro_batch,
            draft_tokens: builder.draft_tokens,
            stop_tokens,
            on_trace_lines: None,
        };
        // The front end ends the ring by dropping its side of the channel.
        let front_end = tokio::spawn(front_end.run());
        let (_, ended) = ring.serve(options, request_rx).await;
        ring.close().await;
        let exit_code = front_end.await.map_err(Failure::failed)?;
        ended?;
        exit_code
    }
}

/// Takes texts from the user, and shows the answers.
struct FrontEnd {
    conversation: Conversation,
    generator: Generator,
    /// The only text; `None` starts a chat in the terminal.
    text: Option<String>,
    json: bool,
}

impl FrontEnd {
    async fn run(mut self) -> Result<ExitCode, Failure> {
        let Some(text) = self.text.take() else { return self.chat().await };
        let prompt = self.conversation.ask(&text)?;
        let answer = self.generator.generate(prompt, !self.json).await?;
        if self.json {
            print_json(&answer)?;
        } else {
            say!("\n");
            say_stderr!("{}", answer.statistics());
        }
        Ok(answer.exit_code())
    }

    async fn chat(mut self) -> Result<ExitCode, Failure> {
        let mut terminal = Terminal::open()?;
        if !self.conversation.has_template() {
            say_stderr!("The model has no chat template, or `--complete` is set: each text is continued.");
        }
        say_stderr!("/help lists the commands; Ctrl-D ends the chat.");
        loop {
            match terminal.read().await? {
                Entry::Text(text) => self.answer(&text).await?,
                Entry::Clear => self.conversation.clear(),
                Entry::System(_) if !self.conversation.has_template() => {
                    say_stderr!("There is no chat template, so there is no system message.");
                }
                Entry::System(text) => self.conversation.restart_with_system(&text),
                Entry::Help => say!("{}\n", repl::HELP),
                Entry::UnknownCommand(command) => say_stderr!("There is no command {command}: see /help."),
                Entry::Empty => {}
                Entry::Exit => return Ok(ExitCode::SUCCESS),
            }
        }
    }

    /// Answers a text of a chat. If the template refuses it or the context is full, the chat goes on without it.
    async fn answer(&mut self, text: &str) -> Result<(), Failure> {
        let prompt = match self.conversation.ask(text) {
            Ok(prompt) => prompt,
            Err(error) => {
                say_stderr!("{}", Failure::from(error).to_string().trim_end());
                return Ok(());
            }
        };
        if let Err(full) = self.generator.room_for(&prompt) {
            self.conversation.withdraw();
            say_stderr!("{}", full.with_hint("forget the conversation with /clear").to_string().trim_end());
            return Ok(());
        }
        let answer = self.generator.generate(prompt, true).await?;
        say!("\n");
        say_stderr!("{}\n", answer.statistics());
        self.conversation.record_answer(&answer.text);
        Ok(())
    }
}

/// The terminal during a chat.
struct Terminal {
    /// `None` only while a line is being read.
    reader: Option<LineReader>,
    /// The attributes of the terminal before the chat, which a signal restores.
    attributes: Option<Termios>,
}

impl Terminal {
    fn open() -> Result<Terminal, Failure> {
        let reader = LineReader::new().map_err(Failure::failed)?;
        Ok(Terminal { reader: Some(reader), attributes: tcgetattr(io::stdin()).ok() })
    }

    /// Reads one entry. SIGTERM and SIGHUP end the program; Ctrl-C is not a signal while a line is being read.
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
            () = termination_signal() => {
                if let Some(attributes) = &self.attributes {
                    let _ = tcsetattr(io::stdin(), OptionalActions::Now, attributes);
                }
                EXIT_INTERRUPTED.exit()
            }
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        if let Some(reader) = &mut self.reader {
            reader.save_history();
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
    fn room_for(&self, prompt: &[u32]) -> Result<u32, Failure> {
        let prompt_tokens = u32::try_from(prompt.len()).unwrap_or(u32::MAX);
        let left = self.context_length.checked_sub(prompt_tokens).filter(|&left| left > 0);
        let limited = left.map(|left| left.min(self.max_new_tokens));
        limited.filter(|_| !prompt.is_empty()).ok_or_else(|| {
            let context = self.context_length;
            let what = if prompt.is_empty() {
                "the text has no tokens".to_owned()
            } else {
                format!(
                    "the text has {prompt_tokens} tokens, which leaves no room in the context of {context}"
                )
            };
            Failure::invalid(what).with_hint("shorten the text, or set a longer `--context`")
        })
    }

    /// Generates the answer to a prompt, and prints its text if `print` is set. Ctrl-C ends the answer.
    async fn generate(&mut self, prompt: Vec<u32>, print: bool) -> Result<Answer, Failure> {
        let max_new_tokens = self.room_for(&prompt)?;
        let mut sampler = Sampler::new(self.sampling)?.for_sequence(self.count);
        self.count += 1;
        let (response_tx, mut response_rx) = mpsc::unbounded_channel();
        let mut answer = Answer { prompt_tokens: prompt.len(), ..Answer::default() };
        let sampler = Box::new(move |logits: &[f32]| sampler.sample(logits));
        // If the ring has failed, the channel of the response is closed without an event.
        let _ = self.request_tx.send(Request { prompt, max_new_tokens, sampler, response_tx });
        let start = Instant::now();
        // The prompt gives the first token, and each pass one more.
        let mut passes = 0;
        let mut detokenizer = IncrementalDetokenizer::default();
        let interrupted = termination_signal();
        tokio::pin!(interrupted);
        loop {
            let event = tokio::select! {
                event = response_rx.recv() => event,
                () = &mut interrupted => {
                    answer.finish_reason = FinishReason::Interrupted;
                    None
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
                None => break,
            }
        }
        answer.add_text(&detokenizer.finish(), print)?;
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
    Interrupted,
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
    /// The time to the first token; `None` if no token was generated.
    ttft_ms: Option<f64>,
    /// The number of tokens after the first one, divided by their time; `None` if there is only one.
    tokens_per_s: Option<f64>,
}

impl Answer {
    fn add_text(&mut self, text: &str, print: bool) -> Result<(), Failure> {
        self.text.push_str(text);
        if print {
            say!("{}", escape(text));
        }
        Ok(())
    }

    fn exit_code(&self) -> ExitCode {
        if self.finish_reason == FinishReason::Interrupted { EXIT_INTERRUPTED } else { ExitCode::SUCCESS }
    }

    /// Returns the numbers of tokens, the speed, and why the answer ended if the model did not end it.
    fn statistics(&self) -> String {
        let Answer { prompt_tokens, token_ids, .. } = self;
        let first = self.ttft_ms.map_or(String::new(), |ms| format!("; first after {:.2} s", ms / 1e3));
        let speed = self.tokens_per_s.map_or(String::new(), |speed| format!(", then {speed:.1} tokens/s"));
        let end = match self.finish_reason {
            FinishReason::Stop if token_ids.is_empty() => "; the model ended the text at once",
            FinishReason::Stop => "",
            FinishReason::Length => "; stopped at the maximum number of tokens",
            FinishReason::Interrupted => "; interrupted",
        };
        format!("[{prompt_tokens} prompt tokens, {} generated{first}{speed}{end}]", token_ids.len())
    }
}
