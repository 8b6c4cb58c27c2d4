//! `hearth simulate`: predicts the speed of a plan.

use hearth_profiles::Bytes;
use hearth_schema::Plan;
use hearth_schema::trace::Outcome;
use hearth_sim::{ScenarioEvents, SimulationResult};
use hearth_workflow::documents::{check_run_outputs, read_routes, write_run_outputs};
use hearth_workflow::simulation::{MemoryOptions, runs_on_one_soc, simulate_with_events, soc_metrics};
use hearth_workflow::verdict::Verdict;
use hearth_workflow::{Progress, ScenarioReplanner, limits, planning, uncertainty};

use super::print_json;
use crate::cli::{PlanSource, SimulateArgs};
use crate::diagnostics::{EXIT_INCOMPLETE, ExitCode, Failure};
use crate::machine::read_scenario;
use crate::output::run::{self, RunSummary};
use crate::output::{plan, run_events, say, soc, verdict};
use crate::progress::{self, TerminalProgress};

/// The note that is printed before the results of a simulation with `--ignore-memory`.
const MEMORY_IGNORED: &str =
    "memory ignored: every device has all its weights in memory, even if they do not fit\n";

/// Number of draws without `--draws`. source: assumed, known to a few percent
const DEFAULT_DRAWS: u32 = 32;
/// Number of steps of a run up to which its uncertainty is estimated without `--draws`. source: assumed, a second
const MAX_STEPS_FOR_DRAWS: usize = 20_000;

pub fn run(args: &SimulateArgs, json: bool) -> Result<ExitCode, Failure> {
    let PlanSource { plan, planning: flags } = &args.source;
    let mut loaded = read_scenario(&args.scenario)?;
    check_run_outputs(
        args.trace.as_ref(),
        loaded.input_paths().iter().chain(plan).chain(&flags.model).chain(&args.routes),
    )?;
    flags.overrides().apply(&mut loaded)?;
    if let Some(tokens) = args.tokens {
        loaded.set_generated_tokens(tokens)?;
    }
    let mut cluster = loaded.resolve_cluster(flags.model.as_deref())?;
    cluster.seed = args.seed.unwrap_or(cluster.seed);
    cluster.routes = args.routes.as_deref().map(|path| read_routes(path, &cluster.model)).transpose()?;
    let plan = {
        let progress = TerminalProgress::new();
        progress.report("planning", 0, 0);
        planning::read_or_make_plan(plan.as_deref(), &loaded, &cluster, flags.budget(&progress))?
    };
    if !plan.scenario.digest.is_empty() && plan.scenario.digest != loaded.record.digest {
        tracing::warn!(
            "the plan was made from a different scenario, `{}`: its predicted times and dropped devices belong \
             to that scenario",
            plan.scenario.name
        );
    }
    let described = cluster.clone();
    limits::apply_memory_limits(&loaded.scenario, &mut cluster, &plan, Bytes::ZERO);
    let replanner = ScenarioReplanner::new(&loaded);
    let events =
        ScenarioEvents { events: &loaded.scenario.events, replanner: Some(&replanner), adapts: args.adapt };
    let memory = MemoryOptions { warm_start: args.warm, ignore_memory: args.ignore_memory };
    let SimulationResult { trace, new_plans: plans, unreached_event_indices: unreached_events } =
        progress::during("simulating", || {
            simulate_with_events(&cluster, &plan, &loaded.scenario, memory, &events)
        })?;
    if let Some(path) = &args.trace {
        write_run_outputs(path, &trace, &plans)?;
    }
    for index in unreached_events {
        tracing::warn!("events[{index}] did not happen before the run ended");
    }
    let mut output = RunSummary::from_trace(&trace);
    output.soc_metrics = soc_metrics(&cluster, &plan, &trace);
    let run = (&trace, &output.metrics);
    output.verdict = Some(progress::during("comparing with single devices", || {
        Verdict::new(&loaded, [&described, &cluster], &plan, run, memory)
    }));
    let default_draws = if trace.records.len() <= MAX_STEPS_FOR_DRAWS { DEFAULT_DRAWS } else { 0 };
    let draws = args.draws.unwrap_or(default_draws) as usize;
    if draws > 0 && trace.outcome == Outcome::Ok {
        let (estimate, progress) = (uncertainty::estimate_prediction_interval, TerminalProgress::new());
        output.prediction_interval =
            estimate(&plan, &cluster, &loaded.scenario, memory, &events, draws, &progress)?;
    }
    if json {
        print_json(&output)?;
    } else {
        let is_cold_soc = !memory.warm_start && runs_on_one_soc(&cluster, &plan);
        let ignored = if memory.ignore_memory { MEMORY_IGNORED } else { "" };
        show(&plan, &output, ignored, &run_events::format_events(&trace), is_cold_soc)?;
    }
    Ok(match trace.outcome {
        Outcome::Ok => ExitCode::SUCCESS,
        Outcome::OutOfMemory | Outcome::Killed => ExitCode(EXIT_INCOMPLETE),
    })
}

fn show(plan: &Plan, output: &RunSummary, ignored: &str, events: &str, is_cold: bool) -> Result<(), Failure> {
    if let Some(found) = &output.verdict {
        say!(
            "{}\n",
            verdict::format_verdict(
                found,
                output.prediction_interval.as_ref(),
                "not estimated; add `--draws 32`"
            )
        );
    }
    say!("{}", plan::format_table(plan, output.verdict.is_none()));
    say!("\n{ignored}{}{events}\n", run::format_table(&output.metrics));
    match &output.soc_metrics {
        Some(numbers) => say!("{}", soc::format_metrics(numbers)),
        None if is_cold => say!("{}\n", soc::COLD_START_NOTE),
        None => {}
    }
    if let Some(note) = plan::planner_disagreement(plan, &output.metrics) {
        say!("{note}\n");
    }
    Ok(())
}
