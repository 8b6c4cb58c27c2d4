//! `hearth simulate`: tell how fast a plan will be, and why.

use std::process::ExitCode;

use hearth_core::Cluster;
use hearth_core::metrics;
use hearth_core::metrics::Metrics;
use hearth_core::schedule::ScheduleError;
use hearth_core::soc::SocNumbers;
use hearth_profiles::Bytes;
use hearth_reports::published::results::Spread;
use hearth_schema::Plan;
use hearth_schema::Scenario;
use hearth_schema::trace::MemoryKind;
use hearth_schema::trace::Outcome;
use hearth_schema::trace::Trace;
use hearth_sim::{Disturbances, Input, Options, Run, SimError};
use serde::Serialize;

use super::{plan, print_json};
use crate::cli::{PlanAndModel, SimulateArgs};
use crate::diagnostics::{ENDED_BADLY, Failure};
use crate::documents::{LoadedScenario, can_write_run, write_run};
use crate::happenings::{self, Told};
use crate::output::{say, tell};
use crate::refinement::Effort;
use crate::replanner::MidRun;
use crate::{limits, progress, soc, uncertainty};

/// The page cache of a model this small is followed in fine chunks: still fast, and the edges where windows
/// just fit are where they are.
const FINE_BELOW: Bytes = Bytes::mib(4096);
/// The unit in which read-ahead is advised.
const FINE_CHUNK: Bytes = Bytes(128 << 10);

/// Said before the numbers of a run with `--ignore-memory`.
const MEMORY_IGNORED: &str =
    "memory ignored: every device holds what the plan gives it, whether it fits or not\n";

/// Planner and simulator differ this much, one over the other, before it is said.
/// source: assumed; over random homes half of all plans are within 1.1 and nine of ten within 1.4
const DISAGREE: f64 = 1.5;

/// More sequences than these are counted, not listed.
const MOST_SEQUENCES: usize = 16;

/// What `--json` gives.
#[derive(Serialize)]
pub struct Output {
    /// The trace's numbers.
    #[serde(flatten)]
    pub metrics: Metrics,
    /// Steps and counters in the trace.
    pub events: usize,
    /// What happened to the ring.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub happenings: Vec<Told>,
    /// How sure the time per token is, if that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub spread: Option<Spread>,
    /// What a phone came to that ran alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub soc: Option<SocNumbers>,
}

impl Output {
    /// The numbers of a trace.
    pub fn of(trace: &Trace) -> Output {
        let events = trace.records.len() + trace.readings.len();
        Output {
            metrics: metrics::compute(trace),
            events,
            happenings: happenings::told(trace),
            spread: None,
            soc: None,
        }
    }
}

/// Runs the verb.
pub fn run(args: &SimulateArgs, json: bool) -> Result<ExitCode, Failure> {
    let PlanAndModel { plan, planning, model } = &args.planned;
    let mut loaded = LoadedScenario::read(&args.scenario)?;
    can_write_run(args.trace.as_ref(), loaded.files().iter().chain(plan).chain(model))?;
    loaded.keep_weights(planning)?;
    if let Some(tokens) = args.tokens {
        loaded.generate(tokens)?;
    }
    let mut cluster = loaded.cluster(model.as_deref())?;
    cluster.seed = args.seed.unwrap_or(cluster.seed);
    let plan = plan::read_or_make(plan.as_deref(), &loaded, &cluster, planning)?;
    if !plan.scenario.digest.is_empty() && plan.scenario.digest != loaded.origin.digest {
        tell!(
            "warning: the plan was made from another scenario, `{}`: what it says of times and of devices left out is about \
             that one",
            plan.scenario.name
        );
    }
    limits::restrict_memory(&loaded.scenario, &mut cluster, &plan, Bytes::ZERO);
    let replanner = MidRun::new(&loaded, planning);
    let disturbances = Disturbances { events: &loaded.scenario.events, replanner: Some(&replanner) };
    let memory = Memory { warm: args.warm, ignored: args.ignore_memory };
    let Run { trace, plans, unreached_events } =
        simulate_in(&cluster, &plan, &loaded.scenario, memory, &disturbances)?;
    if let Some(path) = &args.trace {
        write_run(path, &trace, &plans)?;
    }
    for index in unreached_events {
        tell!("warning: events[{index}] did not come to happen before the run ended");
    }
    let mut output = Output::of(&trace);
    output.soc = soc::numbers(&cluster, &plan, &trace);
    if args.draws > 0 && trace.outcome == Outcome::Ok {
        let line = progress::line();
        line.set_message("drawing the parameters of devices and links");
        let draws = args.draws as usize;
        output.spread =
            Some(uncertainty::spread(&plan, &cluster, &loaded.scenario, memory, &disturbances, draws)?);
        line.finish_and_clear();
    }
    if json {
        print_json(&output)?;
    } else {
        say!("{}", plan::table(&plan));
        if let Some(predicted) = plan.predicted {
            say!(
                "  The planner expected {}, by its own model; the simulator does not use it.\n",
                predicted.tpot
            );
        }
        let ignored = if memory.ignored { MEMORY_IGNORED } else { "" };
        say!("\n{ignored}{}{}\n", table(&output.metrics), happenings::lines(&trace));
        match &output.soc {
            Some(numbers) => say!("{}", soc::lines(numbers)),
            None if !memory.warm && soc::is_alone(&cluster, &plan) => say!("{}\n", soc::COLD),
            None => {}
        }
        if let Some(note) = disagreement(&plan, &output.metrics) {
            say!("{note}\n");
        }
        if let Some(spread) = &output.spread {
            say!("{}\n", spread.in_words());
        }
    }
    Ok(match trace.outcome {
        Outcome::Ok => ExitCode::SUCCESS,
        Outcome::OutOfMemory | Outcome::Killed => ExitCode::from(ENDED_BADLY),
    })
}

/// Runs a plan in the simulator, from disk or with weights in memory already, while nothing else happens.
pub fn simulate(cluster: &Cluster, plan: &Plan, scenario: &Scenario, warm: bool) -> Result<Trace, Failure> {
    let memory = Memory { warm, ignored: false };
    simulate_in(cluster, plan, scenario, memory, &Disturbances::default()).map(|run| run.trace)
}

/// Runs a plan as its scenario has it: within its limits, while its events happen, planning again with this effort.
pub fn as_it_says(
    loaded: &LoadedScenario,
    mut cluster: Cluster,
    plan: &Plan,
    effort: Effort,
) -> Result<Run, Failure> {
    let scenario = &loaded.scenario;
    limits::restrict_memory(scenario, &mut cluster, plan, Bytes::ZERO);
    let replanner = MidRun::with(loaded, scenario.planner.clone(), effort);
    let disturbances = Disturbances { events: &scenario.events, replanner: Some(&replanner) };
    simulate_in(&cluster, plan, scenario, Memory::default(), &disturbances)
}

/// What a run finds of memory.
#[derive(Debug, Clone, Copy, Default)]
pub struct Memory {
    /// Weights are there already, as tokens before would have left them.
    pub warm: bool,
    /// Every memory holds whatever a device pins.
    pub ignored: bool,
}

/// Runs a plan in the simulator, while these things happen.
pub fn simulate_in(
    cluster: &Cluster,
    plan: &Plan,
    scenario: &Scenario,
    memory: Memory,
    disturbances: &Disturbances,
) -> Result<Run, Failure> {
    let chunk = if cluster.model.total_bytes() > FINE_BELOW { Options::default().chunk } else { FINE_CHUNK };
    let options = Options { chunk, warm: memory.warm, ignore_memory: memory.ignored, ..Options::default() };
    let input = Input { cluster, plan, options: &options };
    let mut run = hearth_sim::simulate_in(&input, disturbances).map_err(|error| {
        let short = matches!(error, SimError::Schedule(ScheduleError::BadPass { .. }));
        let refused = Failure::unusable(error);
        if short { refused.hint("the plan was made for a shorter context: plan again") } else { refused }
    })?;
    run.trace.header.scenario.clone_from(&scenario.name);
    Ok(run)
}

/// A number that a run may not have.
fn number(value: Option<f64>) -> String {
    value.map_or("-".to_string(), |value| format!("{value:.1}"))
}

/// What each of several sequences took, and what drafting brought.
fn several(text: &mut String, metrics: &Metrics) {
    use std::fmt::Write;
    for sequence in metrics.sequences.iter().take(MOST_SEQUENCES) {
        let _ = writeln!(
            text,
            "  sequence {}: {} ms a token, {} tokens after the first, which came after {:.1} ms",
            sequence.sequence,
            number(sequence.tpot_ms),
            sequence.tokens,
            sequence.ttft_ms
        );
    }
    if metrics.sequences.len() > MOST_SEQUENCES {
        let _ = writeln!(text, "  and {} more sequences", metrics.sequences.len() - MOST_SEQUENCES);
    }
    if let Some(drafting) = &metrics.speculation {
        let _ = writeln!(
            text,
            "  drafting: {:.2} tokens a step over {} steps, {:.0} % of the drafts looked at accepted; of a token, \
             {:.2} ms drafting and {:.2} ms verifying",
            drafting.tokens_per_step,
            drafting.steps,
            100.0 * drafting.acceptance,
            drafting.draft_ms,
            drafting.verify_ms
        );
    }
}

/// That the planner expected something else, if it did by far.
fn disagreement(plan: &Plan, metrics: &Metrics) -> Option<String> {
    let (expected, simulated) = (plan.predicted?.tpot.as_millis(), metrics.tpot_ms?.mean);
    let factor = (expected / simulated).max(simulated / expected);
    (factor > DISAGREE).then(|| {
        format!(
            "note: the planner expected {expected:.1} ms a token and the simulator says {simulated:.1}, {factor:.1} times \
             as much or as little. The simulator knows page caches, waiting and messages one by one: go by it, and \
             compare with `--residency managed` or `hearth plan --compare`."
        )
    })
}

/// The first line: how it ended, and the times, or why there are none.
fn headline(metrics: &Metrics) -> String {
    let outcome = metrics.outcome.word();
    let ended_badly = metrics.outcome != Outcome::Ok;
    let Some(tpot) = metrics.tpot_ms.as_ref() else {
        if let (true, None) = (ended_badly, metrics.ttft_ms) {
            let why = shortages(metrics);
            let first = why.lines().next().map_or("the run ended before a token was out", str::trim);
            return format!("{outcome}: {first}, so there are no times");
        }
        return format!(
            "{outcome}: one token, so no time between tokens; it came after {} ms",
            number(metrics.ttft_ms)
        );
    };
    format!(
        "{outcome}: {:.1} ms a token (median {:.1}, p95 {:.1}), {} tokens/s, first token after {} ms",
        tpot.mean,
        tpot.p50,
        tpot.p95,
        metrics.tokens_per_s.map_or("-".into(), |rate| format!("{rate:.2}")),
        number(metrics.ttft_ms),
    )
}

/// A run's numbers as a person reads them.
pub fn table(metrics: &Metrics) -> String {
    use std::fmt::Write;
    let mut text = String::new();
    let _ = writeln!(text, "{}", headline(metrics));
    text.push_str(&shortages(metrics));
    let terms: Vec<String> = metrics
        .terms_ms
        .rows()
        .iter()
        .filter(|(_, ms)| *ms >= 0.005)
        .map(|(name, ms)| format!("{} {ms:.2}", name.replace('_', " ")))
        .collect();
    if !terms.is_empty() {
        let _ = writeln!(
            text,
            "  of a token, in ms: {}; hidden disk beside it {:.2}",
            terms.join(", "),
            metrics.terms_ms.hidden_disk
        );
    }
    several(&mut text, metrics);
    text.push_str(&devices(metrics));
    text
}

/// Which devices have too little memory.
fn shortages(metrics: &Metrics) -> String {
    use std::fmt::Write;
    let mut text = String::new();
    for short in &metrics.short_of_memory {
        let memory = match short.memory {
            MemoryKind::Main => "memory",
            MemoryKind::Gpu => "GPU memory",
        };
        let (needed, available) = (Bytes(short.needed_bytes), Bytes(short.available_bytes));
        let _ = writeln!(text, "  {} needs {needed} of {memory} and can have {available}", short.device);
    }
    text
}

/// A row for each device.
fn devices(metrics: &Metrics) -> String {
    use std::fmt::Write;
    let mut text = String::new();
    let _ = writeln!(
        text,
        "  {:<14} {:>10} {:>12} {:>12} {:>14} {:>12} {:>9}",
        "device", "busy ms", "disk wait ms", "hidden ms", "read MB/token", "resident MB", "pressure"
    );
    for device in &metrics.devices {
        if device.trace_lost {
            let _ = writeln!(text, "  {:<14} fell silent; what it wrote down is lost with it", device.name);
            continue;
        }
        let _ = writeln!(
            text,
            "  {:<14} {:>10.2} {:>12.2} {:>12.2} {:>14.2} {:>12.1} {:>8.1}%",
            device.name,
            device.busy_ms,
            device.demand_disk_ms,
            device.hidden_disk_ms,
            device.bytes_read_per_token / 1e6,
            device.resident_bytes as f64 / 1e6,
            device.memory_pressure * 100.0
        );
    }
    text
}
