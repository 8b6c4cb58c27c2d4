//! `hearth execute`: run a plan on real devices.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hearth_exec::ring::{
    Asked, Delayed, Emulated, Generated, Key, LocalModel, Medium, Network, OnFetch, Renewal, Request, Ring,
    RingError, RingOptions, Sealed, Tcp, Unfinished, discovery, for_sequences, with_draft,
};
use hearth_exec::{Sampler, SamplerOptions, TextStream, Tokenizer};
use hearth_profiles::{Bytes, Document};
use hearth_schema::metrics::sequences::SequenceMetrics;
use hearth_schema::replan::{NoPlan, Replanner};
use hearth_schema::scenario::Workload;
use hearth_schema::schedule::MAX_PASS_TOKENS;
use hearth_schema::{Cluster, Plan};
use serde::Serialize;
use tokio::sync::mpsc;

use super::{print_json, simulate};
use crate::cli::ExecuteArgs;
use crate::diagnostics::Failure;
use crate::documents::{LoadedScenario, in_a_folder, open_model, read_plan, write, write_trace};
use crate::emulation;
use crate::happenings;
use crate::interruption::INTERRUPTED;
use crate::output::{say, tell};
use crate::prompts;
use crate::refinement::Effort;
use crate::replanner::MidRun;

/// What a head that marks its tokens prints when the ring is up and the prompt enters it.
pub const BEGINS: &str = "begins";

/// Tokens drafted at a time, if nothing says how many.
/// source: assumed; appendix A.9 of the prima.cpp paper drafts a few at a time
const DRAFT_TOKENS: u32 = 4;

/// What `--json` gives.
#[derive(Serialize)]
struct Output {
    /// Of the first sequence, which may be the only one.
    token_ids: Vec<u32>,
    text: String,
    sequences: Vec<Sequence>,
    #[serde(flatten)]
    run: simulate::Output,
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
    args.trace.as_deref().map_or(Ok(()), in_a_folder)?;
    let key = Key::given(args.key.as_deref())?;
    let asked = prompts::Asked::by(args)?;
    let plan = read_plan(&args.plan)?;
    let model = Arc::new(open_model(&args.model)?);
    if args.exit_with_stdin {
        super::worker::end_with_stdin();
    }
    let tokenizer = Arc::new(Tokenizer::new(&model.weights.model().metadata)?);
    let prompts = asked.tokens(&model, &tokenizer)?;
    let scenario = args.scenario.as_deref().map(LoadedScenario::read).transpose()?;
    let mut plan = for_sequences(plan, u32::try_from(prompts.len()).unwrap_or(u32::MAX));
    let draft = args.draft_model.as_deref().map(open_model).transpose()?.map(Arc::new);
    if let (Some(draft), None) = (&draft, &plan.draft) {
        plan = with_draft(plan, &model, draft)?;
    }
    let request = request(args, scenario.as_ref(), &plan, (prompts, &model, &tokenizer))?;
    request.generation(&plan)?;
    let options = RingOptions {
        threads: args.threads.unwrap_or(0),
        pass_deadline: Duration::from_secs(args.deadline),
        draft,
        renewal: renewal(args, scenario)?,
        on_fetch: Some(told_of_fetching()),
        ..RingOptions::default()
    };
    let runtime = tokio::runtime::Runtime::new().map_err(Failure::running)?;
    let run = Run {
        plan,
        model,
        options,
        request,
        tokenizer: tokenizer.clone(),
        print: !json && asked.count() == 1,
        mark: args.mark_tokens,
        discover: args.discover.map(Duration::from_secs),
    };
    let ended = runtime.block_on(async {
        match key {
            Some(key) => run.delayed(Sealed::new(Tcp, key), args).await,
            None => run.delayed(Tcp, args).await,
        }
    });
    // After an interruption the head's node may still be in a step; the process does not wait for it.
    runtime.shutdown_background();
    let (generated, error) = match ended {
        Ok(generated) => (Some(generated), None),
        Err(Unfinished { error, so_far }) => (so_far.map(|generated| *generated), Some(error)),
    };
    if let Some(generated) = &generated {
        write_run(args, generated)?;
    }
    if error.is_some() && !json {
        // What was generated so far stands on a line of its own.
        say!("\n");
    }
    // Of several sequences nothing was said while they ran.
    let is_to_be_told = |generated: &Generated| error.is_none() || json || generated.sequences.len() > 1;
    if let Some(generated) = generated.as_ref().filter(|generated| is_to_be_told(generated)) {
        show(generated, &tokenizer, json)?;
    }
    let Some(error) = error else { return Ok(ExitCode::SUCCESS) };
    let failure = Failure::from(error);
    Err(match &generated {
        Some(generated) => failure.at(reached(args, generated)),
        None => failure,
    })
}

/// What is asked of the ring: the prompts, and what the command line or else the scenario says of how they run.
fn request(
    args: &ExecuteArgs,
    scenario: Option<&LoadedScenario>,
    plan: &Plan,
    (prompts, model, tokenizer): (Vec<Vec<u32>>, &LocalModel, &Tokenizer),
) -> Result<Request, Failure> {
    let (temperature, top_k, top_p, seed) = (args.temperature, args.top_k, args.top_p, args.seed);
    let sampler = Sampler::new(SamplerOptions { temperature, top_k, top_p, seed })?;
    let asked = |(prompt, number)| {
        let mut sampler = sampler.for_sequence(number);
        Asked { prompt, sample: Box::new(move |logits| sampler.sample(logits)) }
    };
    let vocabulary = model.weights.shape().vocabulary;
    let workload = scenario.map(|loaded| &loaded.scenario.workload);
    let drafts = args.draft_tokens.or_else(|| workload.map(Workload::drafts).filter(|&drafts| drafts > 0));
    Ok(Request {
        sequences: prompts.into_iter().zip(0..).map(asked).collect(),
        generate: args.tokens,
        micro_batch: args
            .micro_batch
            .unwrap_or_else(|| workload.map_or(MAX_PASS_TOKENS, |workload| workload.micro_batch)),
        drafts: plan.draft.as_ref().map_or(0, |_| drafts.unwrap_or(DRAFT_TOKENS)),
        stop: (0..vocabulary).filter(|&token| !args.ignore_end && tokenizer.is_end(token)).collect(),
        scenario: plan.scenario.name.clone(),
        seed,
    })
}

/// Says when another tenth of what a worker fetches is there.
fn told_of_fetching() -> OnFetch {
    let told: Mutex<BTreeMap<String, u64>> = Mutex::default();
    Arc::new(move |name, done, total| {
        let tenth = done.saturating_mul(10) / total.max(1);
        let mut told = told.lock().unwrap_or_else(PoisonError::into_inner);
        if told.insert(name.to_owned(), tenth) != Some(tenth) {
            tell!("{name} has fetched {} of {}", Bytes(done), Bytes(total));
        }
    })
}

/// What a head does when a device is gone.
fn renewal(args: &ExecuteArgs, scenario: Option<LoadedScenario>) -> Result<Renewal, Failure> {
    let Some(loaded) = scenario else {
        return Ok(if args.give_up { Renewal::Never } else { Renewal::Spread });
    };
    let cluster = Arc::new(loaded.cluster(Some(&args.model))?);
    Ok(Renewal::Planner { cluster, replanner: Arc::new(Again(loaded)) })
}

/// The planner of a scenario, for as long as a ring runs.
#[derive(Debug)]
struct Again(LoadedScenario);

impl Replanner for Again {
    fn replan(&self, there: &Cluster) -> Result<Plan, NoPlan> {
        let options = self.0.scenario.planner.clone();
        MidRun::with(&self.0, options, Effort { seconds: 0, evaluations: None }).replan(there)
    }
}

/// Writes the trace, and the plans that followed the first beside it.
fn write_run(args: &ExecuteArgs, generated: &Generated) -> Result<(), Failure> {
    let Some(path) = &args.trace else { return Ok(()) };
    write_trace(path, &generated.trace)?;
    for (number, plan) in generated.plans.iter().enumerate() {
        let path = path.with_extension(format!("plan-{}.yaml", number + 1));
        write(&path, plan.to_yaml().as_bytes())?;
    }
    Ok(())
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
    let mut run = simulate::Output::of(&generated.trace);
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
    say!("\n\n{}{}\n", simulate::table(&run.metrics), happenings::lines(&generated.trace));
    Ok(())
}

/// A request and where it runs.
struct Run {
    plan: Plan,
    model: Arc<LocalModel>,
    options: RingOptions,
    request: Request,
    tokenizer: Arc<Tokenizer>,
    print: bool,
    mark: bool,
    /// How long workers without an address are looked for, if they are.
    discover: Option<Duration>,
}

impl Run {
    /// Over a network whose links are slower, if they are to be.
    async fn delayed(self, network: impl Network, args: &ExecuteArgs) -> Result<Generated, Unfinished> {
        let (generated, way) = match (&args.emulate_links, args.link_delay) {
            (Some(file), _) => {
                let network = Emulated::new(network, emulation::ways(file));
                (self.generate(&network).await, emulation::longest(file))
            }
            (None, Some(delay)) => (self.generate(&Delayed::new(network, delay)).await, delay),
            (None, None) => return self.generate(&network).await,
        };
        // The goodbye is still on its way when it has been written.
        tokio::time::sleep(2 * way).await;
        generated
    }

    async fn generate(self, network: &impl Network) -> Result<Generated, Unfinished> {
        let Run { plan, model, options, request, tokenizer, print, mark, discover } = self;
        let interrupted = || async {
            stopped().await;
            Err(RingError::Interrupted)
        };
        let mut ring = tokio::select! {
            ring = connected(network, plan, discover, model, options) => ring,
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

/// Brings the ring up, and finds its workers before if they are to be looked for.
async fn connected<N: Network>(
    network: &N,
    mut plan: Plan,
    discover: Option<Duration>,
    model: Arc<LocalModel>,
    options: RingOptions,
) -> Result<Ring<N>, RingError> {
    if let Some(limit) = discover {
        let unknown = plan.devices.iter().skip(1).filter(|device| device.address.is_none());
        let names: BTreeSet<String> = unknown.map(|device| device.name.clone()).collect();
        if !names.is_empty() {
            let found = discovery::find(network, &names, limit, Medium::default()).await?;
            for (name, address) in &found {
                tell!("found {name} at {address}");
            }
            for device in plan.devices.iter_mut().skip(1) {
                device.address = device.address.take().or_else(|| found.get(&device.name).cloned());
            }
        }
    }
    Ring::connect(network, plan, model, options).await
}

/// Waits until a person or the system wants this process to end.
async fn stopped() {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        if let Ok(mut terminated) = signal(SignalKind::terminate()) {
            tokio::select! {
                _ = tokio::signal::ctrl_c() => {}
                _ = terminated.recv() => {}
            }
            return;
        }
    }
    let _ = tokio::signal::ctrl_c().await;
}
