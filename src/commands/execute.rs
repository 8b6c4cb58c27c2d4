//! `hearth execute`: runs a plan on real devices.

use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::Arc;

use hearth_core::metrics::sequences::SequenceMetrics;
use hearth_core::metrics::token_times::TokenTimes;
use hearth_ring::{Asked, Generated, Key, Network, Request, RingError, Unfinished};
use hearth_runtime::{Sampler, SamplerOptions, TextStream, Tokenizer};
use hearth_workflow::documents::{can_write_run, read_plan, write_run};
use serde::Serialize;
use tokio::sync::mpsc;

use super::print_json;
use crate::cli::ExecuteArgs;
use crate::diagnostics::Failure;
use crate::gpu;
use crate::interruption::INTERRUPTED;
use crate::machine::open_model;
use crate::output::run::{RunOutput, table};
use crate::output::{run_events, say};
use crate::prompts;
use crate::ring::{BEGINS, LinkEmulation, RingBuilder, TransportTask, stopped, with_transport};

/// What `--json` gives.
#[derive(Serialize)]
struct Output {
    /// Of the first sequence, which may be the only one.
    token_ids: Vec<u32>,
    text: String,
    sequences: Vec<Sequence>,
    #[serde(flatten)]
    run: RunOutput,
}

/// What came out of one sequence.
#[derive(Serialize)]
struct Sequence {
    token_ids: Vec<u32>,
    text: String,
    #[serde(flatten)]
    times: Option<SequenceMetrics>,
}

/// Runs the verb.
pub fn run(args: &ExecuteArgs, json: bool) -> Result<ExitCode, Failure> {
    let (ring, named) = (&args.ring, [&args.prompts, &args.messages]);
    let named = named.into_iter().chain([&ring.draft_model, &ring.key, &ring.scenario]).flatten();
    can_write_run(args.trace.as_ref(), named.chain([&args.plan, &args.model]))?;
    let key = Key::given(args.ring.key.as_deref())?;
    let asked = prompts::Prompts::read(args)?;
    let plan = read_plan(&args.plan)?;
    let accelerator = gpu::accelerator(args.ring.gpu_weights);
    let model = Arc::new(open_model(&args.model)?.accelerated_by(accelerator));
    if args.ring.exit_with_stdin {
        crate::ring::end_with_stdin();
    }
    let tokenizer = Arc::new(Tokenizer::new(&model.weights.model().metadata)?);
    let prompts = asked.tokens(&model, &tokenizer, plan.context)?;
    let sequences = u32::try_from(prompts.len()).unwrap_or(u32::MAX);
    let builder = RingBuilder::new(&args.ring, (plan, sequences), (model, &args.model))?;
    let request = request(args, &builder, prompts, &tokenizer)?;
    request.generation(&builder.plan)?;
    let runtime = tokio::runtime::Runtime::new().map_err(Failure::running)?;
    let run = Run {
        builder,
        request,
        tokenizer: tokenizer.clone(),
        print: !json && asked.count() == 1,
        mark: args.mark_tokens,
    };
    let ended = runtime.block_on(with_transport(
        key,
        LinkEmulation::of(args.ring.link_delay, args.ring.emulate_links.as_deref()),
        run,
    ));
    // After an interruption the head's node may still be in a step; the process does not wait for it.
    runtime.shutdown_background();
    let (generated, error) = match ended {
        Ok(generated) => (Some(generated), None),
        Err(Unfinished { error, so_far }) => (so_far.map(|generated| *generated), Some(error)),
    };
    // What was generated is shown even where its trace cannot be written.
    let written = generated.as_ref().zip(args.trace.as_ref());
    let written = written.map_or(Ok(()), |(made, path)| write_run(path, &made.trace, &made.plans));
    let any = |generated: &Generated| generated.sequences.iter().any(|tokens| !tokens.is_empty());
    if error.is_some() && !json && generated.as_ref().is_some_and(any) {
        // What was generated so far stands on a line of its own.
        say!("\n");
    }
    // Of several sequences nothing was said while they ran.
    let is_to_be_told = |generated: &Generated| error.is_none() || json || generated.sequences.len() > 1;
    if let Some(generated) = generated.as_ref().filter(|generated| is_to_be_told(generated)) {
        show(generated, &tokenizer, json)?;
    }
    written?;
    let Some(error) = error else { return Ok(ExitCode::SUCCESS) };
    let failure = Failure::from(error);
    Err(match &generated {
        Some(generated) => failure.at(reached(args, generated)),
        None => failure,
    })
}

/// What is asked of the ring: the prompts, and how they run.
fn request(
    args: &ExecuteArgs,
    builder: &RingBuilder,
    prompts: Vec<Vec<u32>>,
    tokenizer: &Tokenizer,
) -> Result<Request, Failure> {
    let (temperature, top_k, top_p, seed) = (args.temperature, args.top_k, args.top_p, args.seed);
    let sampler = Sampler::new(SamplerOptions { temperature, top_k, top_p, seed })?;
    let asked = |(prompt, number)| {
        let mut sampler = sampler.for_sequence(number);
        Asked { prompt, sample: Box::new(move |logits| sampler.sample(logits)) }
    };
    let vocabulary = builder.model.weights.shape().vocabulary;
    Ok(Request {
        sequences: prompts.into_iter().zip(0..).map(asked).collect(),
        generate: args.tokens,
        micro_batch: builder.micro_batch,
        drafts: builder.drafts,
        stop: (0..vocabulary).filter(|&token| !args.ignore_end && tokenizer.is_end(token)).collect(),
        scenario: builder.plan.scenario.name.clone(),
        seed,
    })
}

/// How far a run came that ended early.
fn reached(args: &ExecuteArgs, generated: &Generated) -> String {
    let trace =
        args.trace.as_ref().map_or(String::new(), |path| format!("; the trace is {}", path.display()));
    let tokens: usize = generated.sequences.iter().map(Vec::len).sum();
    let wanted = args.tokens as usize * generated.sequences.len().max(1);
    format!("after token {tokens} of {wanted}{trace}")
}

fn show(generated: &Generated, tokenizer: &Tokenizer, json: bool) -> Result<(), Failure> {
    let mut run = RunOutput::of(&generated.trace);
    let texts = generated.sequences.iter().map(|tokens| tokenizer.decode(tokens));
    if json {
        let mut times = std::mem::take(&mut run.metrics.sequences);
        let sequence = |((token_ids, text), number): ((&Vec<u32>, String), u32)| {
            let at = times.iter().position(|times| times.sequence == number);
            Sequence { token_ids: token_ids.clone(), text, times: at.map(|at| times.swap_remove(at)) }
        };
        let sequences: Vec<_> = generated.sequences.iter().zip(texts).zip(0..).map(sequence).collect();
        let (token_ids, text) =
            sequences.first().map(|first| (first.token_ids.clone(), first.text.clone())).unwrap_or_default();
        return print_json(&Output { token_ids, text, sequences, run });
    }
    if generated.sequences.len() > 1 {
        for (number, text) in texts.enumerate() {
            say!("[{number}] {text}\n");
        }
    }
    let outputs = TokenTimes::of(&generated.trace);
    let made: usize = generated.sequences.iter().map(Vec::len).sum();
    let prompts = outputs.prompts(&generated.trace);
    say!(
        "\n\n{prompts} tokens read, {made} generated\n{}{}\n",
        table(&run.metrics),
        run_events::lines(&generated.trace)
    );
    Ok(())
}

/// A request and where it runs.
struct Run {
    builder: RingBuilder,
    request: Request,
    tokenizer: Arc<Tokenizer>,
    print: bool,
    mark: bool,
}

impl TransportTask for Run {
    type Output = Result<Generated, Unfinished>;

    async fn run<N: Network>(self, network: N) -> Self::Output {
        let Run { builder, request, tokenizer, print, mark } = self;
        let interrupted = || async {
            stopped().await;
            Err(RingError::Interrupted)
        };
        let mut ring = tokio::select! {
            ring = builder.connect(&network) => ring,
            interrupted = interrupted() => interrupted,
        }?;
        let (sender, mut tokens) = mpsc::unbounded_channel();
        // Printing beside the ring, so that a slow terminal does not slow the tokens.
        let printer = tokio::task::spawn_blocking(move || {
            let mut stream = TextStream::default();
            let mut out = io::stdout();
            while let Some(token) = tokens.blocking_recv() {
                if mark {
                    let _ = writeln!(out, "token {token}").and_then(|()| out.flush());
                }
                if print {
                    let _ = write!(out, "{}", stream.push(&tokenizer, token)).and_then(|()| out.flush());
                }
            }
            if print {
                let _ = write!(out, "{}", stream.finish());
            }
        });
        if mark {
            // Whoever reads it makes things happen from here on.
            let mut out = io::stdout();
            let _ = writeln!(out, "{BEGINS}").and_then(|()| out.flush());
        }
        let stopper = ring.stopper();
        let watch = tokio::spawn(async move {
            stopped().await;
            stopper.stop();
            // Whoever asks twice does not want to wait for the workers' traces.
            stopped().await;
            std::process::exit(INTERRUPTED);
        });
        let generated = ring.generate(request, move |_, token| {
            let _ = sender.send(token);
        });
        let generated = generated.await;
        watch.abort();
        let _ = printer.await;
        ring.close().await;
        generated
    }
}
