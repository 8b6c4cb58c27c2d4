//! `hearth execute`: runs a plan on real devices.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use hearth_core::metrics::sequences::SequenceMetrics;
use hearth_core::metrics::token_times::TokenTimes;
use hearth_ring::{
    FailedRequest, GenerationRequest, GenerationResult, Key, LocalModel, RingError, SequenceRequest,
    Transport,
};
use hearth_runtime::{
    IncrementalDetokenizer, LogitStatistics, LogitSummary, ReplayedRoutes, RouteOptions, RouteRecorder,
    Sampler, Tokenizer,
};
use hearth_schema::Plan;
use hearth_workflow::documents::{check_run_outputs, read_routes, write_run_outputs};
use hearth_workflow::files::{check_outputs, write};
use serde::Serialize;
use tokio::sync::mpsc;

use super::print_json;
use crate::cli::ExecuteArgs;
use crate::diagnostics::{ExitCode, Failure};
use crate::interruption::{EXIT_INTERRUPTED, termination_signal};
use crate::machine::verification;
use crate::output::run::{RunSummary, format_table};
use crate::output::{escape, run_events, say};
use crate::prompts;
use crate::ring::{
    PROMPT_START_LINE, RingBuilder, TransportTask, exit_on_stdin_eof, open_plan_and_model, run_over_transport,
};

/// The result of `hearth execute`, as `--json` prints it.
#[derive(Serialize)]
struct Output {
    /// The ids of the generated tokens of the first sequence.
    token_ids: Vec<u32>,
    text: String,
    sequences: Vec<Sequence>,
    /// `None` if no token was generated.
    logits: Option<Logits>,
    #[serde(flatten)]
    run: RunSummary,
}

/// The logits from which the tokens were sampled. Entropies are in nats, at temperature 1.
#[derive(Serialize)]
struct Logits {
    max_abs: f32,
    mean_entropy: f64,
    /// The entropy of equal logits.
    max_entropy: f64,
    /// Whether the text may be meaningless, for example because of damaged weights.
    suspicious: bool,
}

impl From<LogitSummary> for Logits {
    fn from(summary: LogitSummary) -> Self {
        let LogitSummary { max_abs, mean_entropy, max_entropy, .. } = summary;
        Self { max_abs, mean_entropy, max_entropy, suspicious: summary.suspicion().is_some() }
    }
}

#[derive(Serialize)]
struct Sequence {
    token_ids: Vec<u32>,
    text: String,
    #[serde(flatten)]
    times: Option<SequenceMetrics>,
}

pub fn run(args: &ExecuteArgs, json: bool) -> Result<ExitCode, Failure> {
    let ring = &args.ring;
    let files = [
        &args.prompts_file,
        &args.messages,
        &args.arrivals,
        &ring.draft_model,
        &ring.device.key,
        &ring.scenario,
        &args.routes,
    ];
    let inputs = files.into_iter().chain([&args.source.model]).flatten().chain([&args.source.plan]);
    let inputs: Vec<&PathBuf> = inputs.collect();
    check_run_outputs(args.trace.as_ref(), inputs.iter().copied())?;
    check_outputs(args.record_routes.iter(), inputs.into_iter().chain(&args.trace))?;
    let key = Key::from_file_or_env(ring.device.key.as_deref())?;
    let inputs = prompts::Prompts::from_args(args)?;
    let sequences = u32::try_from(inputs.concurrent()).unwrap_or(u32::MAX);
    let (plan, model, path) = open_plan_and_model(&args.source, sequences, ring.device.gpu_weights)?;
    for (flag, file) in [("--record-routes", &args.record_routes), ("--routes", &args.routes)] {
        if file.is_some() {
            check_route_flag(flag, &plan, &model, sequences)?;
        }
    }
    let model = model.with_verification(verification(&ring.device));
    if ring.device.exit_on_stdin_eof {
        exit_on_stdin_eof();
    }
    let tokenizer = Arc::new(Tokenizer::new(&model.weights.model().metadata)?);
    let prompts = inputs.encode(&model, &tokenizer, plan.context_length)?;
    let prompt_tokens = prompts.first().map_or(0, |prompt| prompt.len() as u32);
    let recorded = args.routes.as_deref().map(|path| read_routes(path, &model.profile)).transpose()?;
    let routes = RouteOptions {
        recorder: args.record_routes.as_ref().map(|_| RouteRecorder::default()),
        replayed: recorded.map(|recorded| ReplayedRoutes { recorded, prompt_tokens }),
    };
    let model = Arc::new(model.with_route_options(Arc::new(routes)));
    let builder = RingBuilder::new(ring, (plan, sequences), (model.clone(), &path))?;
    let statistics = Arc::new(Mutex::new(LogitStatistics::default()));
    let request = GenerationRequest {
        arrivals: inputs.arrivals(),
        ..request(args, &builder, prompts, &tokenizer, &statistics)?
    };
    request.check(&builder.plan)?;
    let is_streamed = inputs.count() == 1 && args.arrivals.is_none();
    let print = !json && is_streamed;
    let run = Run { builder, request, tokenizer: tokenizer.clone(), print, mark: args.print_token_lines };
    let (generated, error) = match run_over_transport(key, &ring.device, run)? {
        Ok(generated) => (Some(generated), None),
        Err(FailedRequest { error, partial_result }) => (partial_result.map(|result| *result), Some(error)),
    };
    let routes = args.record_routes.as_ref().zip(model.route_recording(prompt_tokens));
    let recorded = routes.map_or(Ok(()), |(path, routes)| write(path, routes.to_string().as_bytes()));
    // Keeps the error for later, so that the output is shown even if the trace cannot be written.
    let written = generated.as_ref().zip(args.trace.as_ref());
    let written =
        written.map_or(Ok(()), |(output, path)| write_run_outputs(path, &output.trace, &output.later_plans));
    let has_tokens = |generated: &GenerationResult| !generated.tokens_by_sequence.iter().all(Vec::is_empty);
    if error.is_some() && !json && generated.as_ref().is_some_and(has_tokens) {
        // The streamed tokens do not end with a newline.
        say!("\n");
    }
    // Only the tokens of a single sequence that did not have to arrive were streamed.
    let must_show = error.is_none() || json || !is_streamed;
    if let Some(generated) = generated.as_ref().filter(|_| must_show) {
        let logits = statistics.lock().unwrap_or_else(PoisonError::into_inner).summary();
        show(generated, &tokenizer, logits, (json, is_streamed))?;
        if let Some(suspicion) = logits.filter(|_| !json).and_then(|logits| logits.suspicion()) {
            let hint = if ring.device.verify_weights {
                "the weights are those of the plan, so its model may be damaged or have random weights"
            } else {
                "the weights may be damaged, check them with `--verify`"
            };
            tracing::warn!("the text may be meaningless, because {suspicion}; {hint}");
        }
    }
    written?;
    recorded?;
    let Some(error) = error else { return Ok(ExitCode::SUCCESS) };
    let failure = Failure::from(error);
    Err(match &generated {
        Some(generated) => failure.with_location(progress(args, generated)),
        None => failure,
    })
}

/// Fails if the routes of a run cannot be recorded or replayed, as `flag` demands.
fn check_route_flag(flag: &str, plan: &Plan, model: &LocalModel, sequences: u32) -> Result<(), Failure> {
    let what = if model.profile.shape.experts.is_none() {
        format!("`{}` is not a mixture of experts, so it has no routes", model.profile.name)
    } else if plan.devices.len() > 1 {
        "one device must have all layers: leave out `--plan`, or plan for one device".into()
    } else if plan.draft_model.is_some() {
        "rejected tokens of a draft model use experts too: leave out `--draft-model`".into()
    } else if sequences > 1 {
        "routes are those of one prompt: run several prompts one after the other".into()
    } else {
        return Ok(());
    };
    Err(Failure::invalid(what).with_location(flag))
}

fn request(
    args: &ExecuteArgs,
    builder: &RingBuilder,
    prompts: Vec<Vec<u32>>,
    tokenizer: &Tokenizer,
    statistics: &Arc<Mutex<LogitStatistics>>,
) -> Result<GenerationRequest, Failure> {
    let options = args.sampling.options(0.0);
    let sampler = Sampler::new(options)?;
    let sequence = |(prompt, number)| {
        let (mut sampler, statistics) = (sampler.for_sequence(number), statistics.clone());
        let sample = move |logits: &[f32]| {
            statistics.lock().unwrap_or_else(PoisonError::into_inner).record(logits);
            sampler.sample(logits)
        };
        SequenceRequest { prompt, sampler: Box::new(sample) }
    };
    Ok(GenerationRequest {
        sequences: prompts.into_iter().zip(0..).map(sequence).collect(),
        arrivals: Vec::new(),
        max_new_tokens: args.tokens,
        micro_batch: builder.micro_batch,
        draft_tokens: builder.draft_tokens,
        stop_tokens: if args.ignore_eos { Vec::new() } else { tokenizer.stop_tokens() },
        scenario: builder.plan.scenario.name.clone(),
        seed: options.seed,
    })
}

fn progress(args: &ExecuteArgs, generated: &GenerationResult) -> String {
    let trace =
        args.trace.as_ref().map_or(String::new(), |path| format!("; the trace is {}", path.display()));
    let tokens: usize = generated.tokens_by_sequence.iter().map(Vec::len).sum();
    if args.arrivals.is_some() {
        return format!("after token {tokens}{trace}");
    }
    let requested = args.tokens as usize * generated.tokens_by_sequence.len().max(1);
    format!("after token {tokens} of {requested}{trace}")
}

fn show(
    generated: &GenerationResult,
    tokenizer: &Tokenizer,
    logits: Option<LogitSummary>,
    (json, is_streamed): (bool, bool),
) -> Result<(), Failure> {
    let mut run = RunSummary::from_trace(&generated.trace);
    let texts = generated.tokens_by_sequence.iter().map(|tokens| tokenizer.decode(tokens));
    if json {
        let times = std::mem::take(&mut run.metrics.sequences).into_iter();
        let mut times: BTreeMap<u32, _> = times.map(|times| (times.sequence, times)).collect();
        let sequence = |((token_ids, text), number): ((&Vec<u32>, String), u32)| Sequence {
            token_ids: token_ids.clone(),
            text,
            times: times.remove(&number),
        };
        let sequences: Vec<_> =
            generated.tokens_by_sequence.iter().zip(texts).zip(0..).map(sequence).collect();
        let (token_ids, text) =
            sequences.first().map(|first| (first.token_ids.clone(), first.text.clone())).unwrap_or_default();
        return print_json(&Output { token_ids, text, sequences, logits: logits.map(Logits::from), run });
    }
    if !is_streamed {
        for (number, text) in texts.enumerate() {
            say!("[{number}] {text}\n");
        }
    }
    let outputs = TokenTimes::from_trace(&generated.trace);
    let count: usize = generated.tokens_by_sequence.iter().map(Vec::len).sum();
    let prompts = outputs.prompt_tokens();
    let plural = if prompts == 1 { "" } else { "s" };
    say!(
        "\n\n{prompts} prompt token{plural}, {count} generated tokens\n{}{}\n",
        format_table(&run.metrics),
        run_events::format_events(&generated.trace)
    );
    Ok(())
}

struct Run {
    builder: RingBuilder,
    request: GenerationRequest,
    tokenizer: Arc<Tokenizer>,
    /// Whether to print the text of each token as soon as it is generated.
    print: bool,
    /// Whether to print a line for each token, which `hearth lab` reads.
    mark: bool,
}

impl TransportTask for Run {
    type Output = Result<GenerationResult, FailedRequest>;

    async fn run<T: Transport>(self, transport: T) -> Self::Output {
        let Run { builder, request, tokenizer, print, mark } = self;
        let interrupted = || async {
            termination_signal().await;
            Err(RingError::Interrupted)
        };
        let mut ring = tokio::select! {
            ring = builder.connect(&transport) => ring,
            interrupted = interrupted() => interrupted,
        }?;
        let (token_tx, mut token_rx) = mpsc::unbounded_channel();
        // Prints in a separate thread, so that a slow terminal does not delay the ring.
        let printer = tokio::task::spawn_blocking(move || {
            let mut stream = IncrementalDetokenizer::default();
            let mut out = io::stdout();
            while let Some(token) = token_rx.blocking_recv() {
                if mark {
                    let _ = writeln!(out, "token {token}").and_then(|()| out.flush());
                }
                if print {
                    let _ =
                        write!(out, "{}", escape(&stream.push(&tokenizer, token))).and_then(|()| out.flush());
                }
            }
            if print {
                let _ = write!(out, "{}", escape(&stream.finish()));
            }
        });
        if mark {
            // The lab measures the times of its events from this line on.
            let mut out = io::stdout();
            let _ = writeln!(out, "{PROMPT_START_LINE}").and_then(|()| out.flush());
        }
        let cancel_handle = ring.cancel_handle();
        let watch = tokio::spawn(async move {
            termination_signal().await;
            cancel_handle.cancel();
            // After a second signal the process exits without waiting for the traces of the workers.
            termination_signal().await;
            EXIT_INTERRUPTED.exit();
        });
        let generated = ring.generate(request, move |_, token| {
            let _ = token_tx.send(token);
        });
        let generated = generated.await;
        watch.abort();
        let _ = printer.await;
        ring.close().await;
        generated
    }
}
