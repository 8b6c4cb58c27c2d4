//! `hearth execute`: run a plan on real devices.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hearth_exec::ring::{
    Generated, Key, LocalModel, Medium, Network, OnFetch, Renewal, Request, Ring, RingError, RingOptions,
    Sealed, Tcp, Unfinished, discovery,
};
use hearth_exec::{ChatTemplate, Message, Sampler, SamplerOptions, TextStream, Tokenizer};
use hearth_profiles::{Bytes, Document};
use hearth_schema::replan::{NoPlan, Replanner};
use hearth_schema::{Cluster, Plan};
use serde::Serialize;
use tokio::sync::mpsc;

use super::{print_json, simulate};
use crate::cli::ExecuteArgs;
use crate::diagnostics::Failure;
use crate::documents::{LoadedScenario, in_a_folder, open_model, read_plan, write, write_trace};
use crate::happenings;
use crate::interruption::INTERRUPTED;
use crate::output::{say, tell};
use crate::refinement::Effort;
use crate::replanner::MidRun;

/// What `--json` gives.
#[derive(Serialize)]
struct Output {
    token_ids: Vec<u32>,
    text: String,
    #[serde(flatten)]
    run: simulate::Output,
}

/// Runs the verb.
pub fn run(args: &ExecuteArgs, json: bool) -> Result<ExitCode, Failure> {
    args.trace.as_deref().map_or(Ok(()), in_a_folder)?;
    let key = Key::given(args.key.as_deref())?;
    let messages = messages(args)?;
    let plan = read_plan(&args.plan)?;
    let model = Arc::new(open_model(&args.model)?);
    if args.exit_with_stdin {
        super::worker::end_with_stdin();
    }
    let tokenizer = Arc::new(Tokenizer::new(&model.weights.model().metadata)?);
    let prompt = prompt(args, messages.as_deref(), &model, &tokenizer)?;
    let (temperature, top_k, top_p, seed) = (args.temperature, args.top_k, args.top_p, args.seed);
    let mut sampler = Sampler::new(SamplerOptions { temperature, top_k, top_p, seed })?;
    let vocabulary = model.weights.shape().vocabulary;
    let ends = (0..vocabulary).filter(|&token| !args.ignore_end && tokenizer.is_end(token)).collect();
    let request = Request {
        prompt,
        generate: args.tokens,
        sample: Box::new(move |logits| sampler.sample(logits)),
        stop: ends,
        scenario: plan.scenario.name.clone(),
        seed,
    };
    let options = RingOptions {
        threads: args.threads.unwrap_or(0),
        pass_deadline: Duration::from_secs(args.deadline),
        renewal: renewal(args)?,
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
        print: !json,
        mark: args.mark_tokens,
        discover: args.discover.map(Duration::from_secs),
    };
    let ended = runtime.block_on(async {
        match key {
            Some(key) => run.generate(&Sealed::new(Tcp, key)).await,
            None => run.generate(&Tcp).await,
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
    if let (Some(generated), true) = (&generated, error.is_none() || json) {
        show(generated, &tokenizer, json)?;
    }
    let Some(error) = error else { return Ok(ExitCode::SUCCESS) };
    let failure = Failure::from(error);
    Err(match &generated {
        Some(generated) => failure.at(reached(args, generated)),
        None => failure,
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
fn renewal(args: &ExecuteArgs) -> Result<Renewal, Failure> {
    let Some(scenario) = &args.scenario else {
        return Ok(if args.give_up { Renewal::Never } else { Renewal::Spread });
    };
    let loaded = LoadedScenario::read(scenario)?;
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
    format!("after token {} of {}{trace}", generated.tokens.len(), args.tokens)
}

fn show(generated: &Generated, tokenizer: &Tokenizer, json: bool) -> Result<(), Failure> {
    let run = simulate::Output::of(&generated.trace);
    if json {
        let (token_ids, text) = (generated.tokens.clone(), tokenizer.decode(&generated.tokens));
        return print_json(&Output { token_ids, text, run });
    }
    say!("\n\n{}{}\n", simulate::table(&run.metrics), happenings::lines(&generated.trace));
    Ok(())
}

/// Any text does for a measurement; this one is repeated as often as needed.
const FIXED_TEXT: &str =
    "In the evening the four of them sat around the fire and told each other what they knew. ";

/// What goes through the chat template, if anything does.
fn messages(args: &ExecuteArgs) -> Result<Option<Vec<Message>>, Failure> {
    if let Some(path) = &args.messages {
        let standard = path.as_os_str() == "-";
        if standard && args.exit_with_stdin {
            let what = "`--messages -` and `--exit-with-stdin` cannot both have standard input";
            return Err(Failure::unusable(what).hint("give the messages in a file"));
        }
        let text = if standard { io::read_to_string(io::stdin()) } else { std::fs::read_to_string(path) };
        let text = text.map_err(|error| Failure::file(path, "read", &error))?;
        let messages = serde_json::from_str(&text).map_err(|error| {
            let (line, column) = (error.line(), error.column());
            let said = error.to_string();
            let place = format!(" at line {line} column {column}");
            let said = said.strip_suffix(&place).unwrap_or(&said);
            Failure::unusable(format!("this is no list of messages: {said}"))
                .at(format!("{}:{line}:{column}", path.display()))
                .hint(r#"write [{"role": "user", "content": "Hello"}]"#)
        })?;
        return Ok(Some(messages));
    }
    let said = |role: &str, content: &String| Message { role: role.into(), content: content.clone() };
    let system = args.system.iter().map(|text| said("system", text));
    let user = args.prompt.iter().map(|text| said("user", text));
    Ok(args.chat.then(|| system.chain(user).collect()))
}

fn prompt(
    args: &ExecuteArgs,
    messages: Option<&[Message]>,
    model: &LocalModel,
    tokenizer: &Tokenizer,
) -> Result<Vec<u32>, Failure> {
    if let Some(messages) = messages {
        let template = ChatTemplate::new(&model.weights.model().metadata, tokenizer)?;
        return Ok(template.encode(tokenizer, messages)?);
    }
    let Some(count) = args.prompt_tokens else {
        return Ok(tokenizer.encode(args.prompt.as_deref().unwrap_or_default(), false)?);
    };
    let mut text = FIXED_TEXT.to_string();
    loop {
        let mut tokens = tokenizer.encode(&text, false)?;
        if tokens.len() >= count as usize {
            tokens.truncate(count as usize);
            return Ok(tokens);
        }
        text.push_str(FIXED_TEXT);
    }
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
        let stopper = ring.stopper();
        let watch = tokio::spawn(async move {
            stopped().await;
            stopper.stop();
            // Whoever asks twice does not want to wait for the workers' traces.
            stopped().await;
            std::process::exit(INTERRUPTED);
        });
        let generated = ring.generate(request, move |token| {
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
