//! How is a plan bettered by what the simulator says of it?
//!
//! The planner's local search and the simulator know nothing of each other; here they meet. The search starts from
//! the default strategy's plan (from windows by hand, if there are any) and asks the simulator about each plan it
//! comes to, for a number of seconds or of plans. Ctrl-C ends it and keeps the best so far.
//!
//! Not here: the search (`hearth_halda::refine`) and the score ([`crate::judge`]).

#![allow(clippy::disallowed_methods)] // the search is bounded by the clock of whoever waits for it

use std::time::{Duration, Instant};

use hearth_core::Cluster;
use hearth_halda::refine::{DraftError, Ended, Progress, Refined};
use hearth_halda::selection::Options;
use hearth_halda::{Assignment, LatencyModel, Refine, Rules, Search, build, named, refine, solve};
use hearth_profiles::Seconds;
use hearth_schema::Plan;
use hearth_schema::scenario::PlannerOptions;

use crate::cli::Planning;
use crate::commands::plan::{DEFAULT_STRATEGY, refused};
use crate::diagnostics::Failure;
use crate::documents::LoadedScenario;
use crate::interruption::Stoppable;
use crate::judge::Judged;
use crate::progress;

/// The strategy's name.
pub const NAME: &str = "refine";

/// How long a search may take.
#[derive(Debug, Clone, Copy)]
pub struct Effort {
    /// By the clock.
    pub seconds: u64,
    /// Plans that are simulated at most, the start included.
    pub evaluations: Option<u64>,
}

impl Effort {
    /// What the command line says.
    pub fn of(planning: &Planning) -> Effort {
        Effort { seconds: planning.refine_seconds, evaluations: planning.refine_evaluations }
    }
}

/// Plans, and betters the plan.
pub fn plan(
    loaded: &LoadedScenario,
    cluster: &Cluster,
    options: &PlannerOptions,
    effort: Effort,
) -> Result<Plan, Failure> {
    let first = if options.windows.is_some() { "manual" } else { DEFAULT_STRATEGY };
    let instance = build::instance(cluster, options.slow_disk);
    let model = LatencyModel::new(&instance).map_err(Failure::unusable)?;
    // An instance begins with the cluster's head.
    let chosen = Options { head: Some(0), ..Options::from(options) };
    let strategy = named(first, &chosen).map_err(Failure::unusable)?;
    let start = solve(strategy.as_ref(), &model).map_err(refused)?;
    let rules = Rules { may_drop: !options.keep_all, may_leave_remainder: true };
    let search =
        Search { rules, same_rounds: options.rounds.is_some(), most_evaluations: effort.evaluations };
    let found = search_with(loaded, cluster, &model, &start.assignment, search, effort.seconds)?;
    let strategy = Refine { assignment: found.assignment.clone(), start: first.to_owned(), rules };
    let solution = solve(&strategy, &model).map_err(refused)?;
    let mut plan = hearth_halda::plan(&solution, cluster, &loaded.origin).map_err(Failure::running)?;
    plan.explanation.insert(0, sentence(&found, first));
    Ok(plan)
}

/// Searches while a person sees how far it is.
fn search_with(
    loaded: &LoadedScenario,
    cluster: &Cluster,
    model: &LatencyModel,
    start: &Assignment,
    search: Search,
    seconds: u64,
) -> Result<Refined, Failure> {
    let begin = Instant::now();
    let bar = progress::seconds("simulating the first plan", seconds);
    let _until_the_end = Stoppable::begin();
    let mut wrong = None;
    let score = |assignment: &Assignment| {
        let draft = refine::draft(model, assignment, cluster, &loaded.origin).map_err(not_written);
        let judged = draft.and_then(|plan| Judged::of(&plan, cluster, &loaded.scenario));
        judged.map_err(|failure| wrong.get_or_insert(failure).code).ok()?.tpot_ms
    };
    let go_on = |Progress { evaluations, best }: Progress| {
        bar.set_position(begin.elapsed().as_secs());
        let best = best.map_or("none runs yet".to_owned(), |ms| format!("best {}", milliseconds(ms)));
        bar.set_message(format!("{evaluations} plans simulated, {best}"));
        // The start is simulated in any case: its time is part of the answer.
        evaluations == 0 || (begin.elapsed() < Duration::from_secs(seconds) && !Stoppable::asked())
    };
    let found = refine(model, start, search, score, go_on);
    bar.finish_and_clear();
    match wrong.filter(|_| found.to.is_none()) {
        // Not one plan could be simulated, so something is wrong with what was given.
        Some(failure) => Err(failure),
        None => Ok(found),
    }
}

fn not_written(error: DraftError) -> Failure {
    Failure::running(error)
}

/// What the search has gained.
fn sentence(found: &Refined, first: &str) -> String {
    let time = |ms: Option<f64>| ms.map_or("out of memory".to_owned(), milliseconds);
    let (from, to, evaluations) = (time(found.from), time(found.to), found.evaluations);
    let plans = if evaluations == 1 { "evaluation" } else { "evaluations" };
    let ended = match found.ended {
        Ended::NoBetterNeighbour => "no neighbour is better",
        Ended::Evaluations => "the evaluations were used up",
        Ended::Stopped => "stopped before every neighbour was tried",
    };
    format!(
        "The simulator: from {from} a token (the plan of `{first}`) to {to} in {evaluations} {plans}; {ended}."
    )
}

fn milliseconds(ms: f64) -> String {
    Seconds(ms / 1e3).to_string()
}
