//! `hearth plan`: assigns the layers of a model to devices.

use std::fmt::Write;

use hearth_core::Cluster;
use hearth_halda::export::{Engine, ExportedPlan, ModelFiles, export};
use hearth_profiles::Document;
use hearth_schema::Plan;
use hearth_schema::trace::Outcome;
use hearth_workflow::LoadedScenario;
use hearth_workflow::comparison::{StrategyResult, compare_strategies};
use hearth_workflow::files::{check_outputs, write};
use hearth_workflow::planning;
use hearth_workflow::score::{PlanScore, SCORE_TOKENS};
use hearth_workflow::verdict::Verdict;
use serde::Serialize;

use super::{print_json, print_result};
use crate::cli::PlanArgs;
use crate::diagnostics::{ExitCode, Failure};
use crate::machine::{hash_weights, read_scenario};
use crate::output::export::format_export;
use crate::output::plan::{DeviceSummary, PlanSummary, format_table};
use crate::output::verdict::format_verdict;
use crate::output::{say, say_stderr};
use crate::progress::TerminalProgress;

/// Where the uncertainty of a plan is estimated.
const UNCERTAINTY: &str = "`hearth simulate` estimates how much";

/// A plan and the verdict on it as `--json` prints them.
#[derive(Serialize)]
struct Output {
    #[serde(flatten)]
    plan: PlanSummary,
    /// `None` if the plan cannot be simulated.
    verdict: Option<Verdict>,
}

/// A row of the comparison of strategies (`--compare`) as `--json` prints it.
#[derive(Serialize)]
struct Row {
    /// The name of the strategy, if there is no plan. A plan already contains the name.
    #[serde(skip_serializing_if = "Option::is_none")]
    strategy: Option<&'static str>,
    #[serde(flatten)]
    plan: Option<PlanSummary>,
    simulated: Option<PlanScore>,
    /// Whether no other plan of the comparison is faster in the simulation.
    best: bool,
    /// The reason why there is no plan, or why the plan was not simulated.
    refused: Option<String>,
}

pub fn run(args: &PlanArgs, json: bool) -> Result<ExitCode, Failure> {
    let mut loaded = read_scenario(&args.scenario)?;
    check_outputs(&args.output, loaded.input_paths().iter().chain(&args.planning.model))?;
    args.planning.overrides().apply(&mut loaded)?;
    let cluster = loaded.resolve_cluster(args.planning.model.as_deref())?;
    let progress = TerminalProgress::new();
    let budget = args.planning.budget(&progress);
    if args.compare {
        let results = compare_strategies(&loaded, &cluster, budget);
        drop(progress);
        let row = |result: &StrategyResult| Row {
            strategy: result.plan.is_none().then_some(result.strategy),
            plan: result.plan.as_ref().map(PlanSummary::from_plan),
            simulated: result.score,
            best: result.is_best,
            refused: result.failure_reason.clone(),
        };
        let rows: Vec<Row> = results.iter().map(row).collect();
        return print_result(json, &rows, |_| comparison_table(&results));
    }
    let mut plan = planning::read_or_make_plan(args.plan.as_deref(), &loaded, &cluster, budget)?;
    drop(progress);
    if args.hash_weights {
        let model = args.planning.model_file(&loaded)?;
        let no_file = || {
            Failure::invalid(
                "`--hash-weights` needs a model file, but the scenario names only a kind of model",
            )
            .with_location(args.scenario.display())
            .with_hint("give the model file with `--model GGUF`")
        };
        plan.model.weight_digests = Some(hash_weights(&model.ok_or_else(no_file)?)?);
    }
    match &args.output {
        Some(path) => write(path, plan.to_yaml().as_bytes())?,
        None if args.export.is_some() => {}
        None if !json => say!("{}", plan.to_yaml()),
        None => {}
    }
    if let Some(engine) = args.export {
        let exported = export_plan(engine, &plan, &loaded, &cluster, args)?;
        return print_result(json, &exported, |exported| format_export(&plan.scenario.name, exported));
    }
    let verdict = Verdict::of_plan(&loaded, &cluster, &plan);
    if json {
        print_json(&Output { plan: PlanSummary::from_plan(&plan), verdict })?;
        return Ok(ExitCode::SUCCESS);
    }
    let verdict =
        verdict.map_or_else(String::new, |verdict| format_verdict(&verdict, None, UNCERTAINTY) + "\n");
    let text = format!("{verdict}{}", format_table(&plan, verdict.is_empty()));
    if args.output.is_some() {
        say!("{text}");
    } else {
        say_stderr!("{}", text.trim_end());
    }
    Ok(ExitCode::SUCCESS)
}

fn export_plan(
    engine: Engine,
    plan: &Plan,
    loaded: &LoadedScenario,
    cluster: &Cluster,
    args: &PlanArgs,
) -> Result<ExportedPlan, Failure> {
    let model = args.planning.model_file(loaded)?;
    let draft_model = loaded.draft_model_file()?;
    let [model, draft_model] = [&model, &draft_model].map(|path| Some(path.as_ref()?.to_string_lossy()));
    let files = ModelFiles { model: model.as_deref(), draft_model: draft_model.as_deref() };
    export(engine, plan, &loaded.scenario, cluster, files).map_err(Failure::invalid)
}

fn comparison_table(rows: &[StrategyResult]) -> String {
    let mut text = format!(
        "ms per token; simulated: the mean after the first of {SCORE_TOKENS} generated tokens; * fastest\n"
    );
    text.push_str("  strategy           expected     simulated rounds  windows (GPU layers)\n");
    for row in rows {
        let mark = if row.is_best { '*' } else { ' ' };
        let Some(plan) = row.plan.as_ref().map(PlanSummary::from_plan) else {
            let reason = row.failure_reason.as_deref().unwrap_or_default();
            let _ = writeln!(text, "{mark} {:<13} refused: {reason}", row.strategy);
            continue;
        };
        let predicted = plan.prediction.tpot_ms.map_or("-".into(), |ms| format!("{ms:.1}"));
        let simulated = row.score.map_or("-".into(), simulated);
        let windows: Vec<String> = plan.devices.iter().map(DeviceSummary::window_label).collect();
        let _ = writeln!(
            text,
            "{mark} {:<13} {predicted:>13} {simulated:>13} {:>6}  {}",
            row.strategy,
            plan.rounds,
            windows.join(", ")
        );
        if let Some(reason) = &row.failure_reason {
            let _ = writeln!(text, "  {:<13} not simulated: {reason}", "");
        }
    }
    text
}

fn simulated(score: PlanScore) -> String {
    match (score.outcome, score.tpot_ms) {
        (Outcome::Ok, Some(ms)) => format!("{ms:.1}"),
        (Outcome::Ok, None) => "-".into(),
        (ended, _) => ended.label().into(),
    }
}
