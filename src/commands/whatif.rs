//! `hearth whatif`: ranks variants of a scenario by the time per token that they save.

use std::fmt::Write;

use hearth_workflow::evaluation::Evaluation;
use hearth_workflow::parallel_jobs;
use hearth_workflow::whatif::{RankedVariant, VariantRanking, rank_variants};
use serde::Serialize;

use super::print_result;
use crate::cli::WhatifArgs;
use crate::diagnostics::{EXIT_INCOMPLETE, ExitCode, Failure};
use crate::machine::read_scenario_with_overrides;
use crate::output::escape_line;
use crate::progress::TerminalProgress;

/// The ranking of the variants of a scenario, as `--json` prints it.
#[derive(Serialize)]
struct Output<'o> {
    scenario: &'o str,
    seed: u64,
    /// The evaluation of the unchanged scenario.
    base: &'o Evaluation,
    /// The variants, sorted by saved time per token; variants without a simulated time are last.
    variants: &'o [RankedVariant],
    /// Whether Ctrl-C stopped the command early.
    stopped: bool,
}

pub fn run(args: &WhatifArgs, json: bool) -> Result<ExitCode, Failure> {
    let loaded = read_scenario_with_overrides(&args.scenario, &args.planning, args.tokens)?;
    let model = loaded.resolve_model_profile(args.planning.model.as_deref())?;
    let progress = TerminalProgress::new();
    let ranking = rank_variants(&loaded, &model, parallel_jobs::thread_count(args.jobs), &progress)?;
    drop(progress);
    let VariantRanking { baseline: Some(base), variants, variant_count } = ranking else {
        tracing::info!("stopped before the unchanged scenario was simulated");
        return Ok(ExitCode(EXIT_INCOMPLETE));
    };
    let stopped = variants.len() < variant_count;
    let (scenario, seed) = (loaded.scenario.name.as_str(), loaded.scenario.seed);
    let output = Output { scenario, seed, base: &base, variants: &variants, stopped };
    print_result(json, &output, |output| table(output.base, output.variants))?;
    if stopped {
        tracing::info!("stopped: {} of {variant_count} variants were simulated", variants.len());
    }
    let any = base.is_ok() || variants.iter().any(|it| it.evaluation.is_ok());
    Ok(if any && !stopped { ExitCode::SUCCESS } else { ExitCode(EXIT_INCOMPLETE) })
}

fn table(base: &Evaluation, ranked: &[RankedVariant]) -> String {
    let mut text = String::new();
    let plan = |evaluation: &Evaluation| {
        let rounds = evaluation.rounds.filter(|rounds| *rounds > 1);
        let rounds = rounds.map_or_else(String::new, |rounds| format!(", {rounds} rounds"));
        escape_line(evaluation.windows.as_deref().unwrap_or_default()).into_owned() + &rounds
    };
    let _ = match base.tpot_ms {
        Some(time) => writeln!(text, "unchanged: {time:.1} ms per token with {}", plan(base)),
        None => writeln!(text, "unchanged: {}", base.outcome),
    };
    let width = ranked.iter().map(|it| it.description.chars().count()).max().unwrap_or(0);
    let _ = writeln!(text, "  {:>10} {:>11}  {:<width$}  plan", "saves, ms", "ms/token", "variant");
    for RankedVariant { description: what, saved_ms, evaluation, .. } in ranked {
        let what = escape_line(what);
        let saved = saved_ms.map_or("-".to_owned(), |saved| format!("{saved:+.1}"));
        let _ = match evaluation.tpot_ms {
            Some(time) => writeln!(text, "  {saved:>10} {time:>11.1}  {what:<width$}  {}", plan(evaluation)),
            None => writeln!(text, "  {saved:>10} {:>11}  {what:<width$}  {}", "-", evaluation.outcome),
        };
    }
    text
}
