//! `hearth whatif`: ranks variants of a scenario by the time per token that they save.

use std::fmt::Write;

use hearth_profiles::Seconds;
use hearth_workflow::evaluation::Evaluation;
use hearth_workflow::parallel_jobs;
use hearth_workflow::whatif::{Prices, RankedVariant, VariantKind, VariantRanking, rank_variants};
use serde::Serialize;

use super::print_result;
use crate::cli::WhatifArgs;
use crate::diagnostics::{EXIT_INCOMPLETE, ExitCode, Failure};
use crate::machine::read_scenario_with_overrides;
use crate::output::{escape_line, short_speed};
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
    let prices: Prices = args.price.iter().cloned().collect();
    let progress = TerminalProgress::new();
    let ranking = rank_variants(&loaded, &model, &prices, parallel_jobs::thread_count(args.jobs), &progress)?;
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

/// The share of the time per token below which a change has no effect. source: assumed, below the error of a prediction
const NEGLIGIBLE: f64 = 0.01;

/// The title of a group of changes, and which changes belong to it.
type Group = (&'static str, fn(VariantKind) -> bool);
/// The groups of changes in the text, by what they cost.
const GROUPS: [Group; 3] = [
    ("changes of devices and network", |kind| {
        !matches!(kind, VariantKind::Quantisation | VariantKind::Model)
    }),
    ("other weight formats; smaller ones cost quality", |kind| kind == VariantKind::Quantisation),
    ("other models, by the size of a dense model of about the same quality", |kind| {
        kind == VariantKind::Model
    }),
];

fn table(base: &Evaluation, ranked: &[RankedVariant]) -> String {
    let mut text = String::new();
    let _ = match (base.tokens_per_s, base.tpot_ms) {
        (Some(speed), Some(time)) => writeln!(
            text,
            "unchanged: {} tokens/s, {} per token, with {}",
            short_speed(speed),
            Seconds(time / 1e3),
            plan(base)
        ),
        _ => writeln!(text, "unchanged: {}", base.outcome),
    };
    let width = ranked.iter().map(|it| it.description.chars().count()).max().unwrap_or(0);
    for (title, belongs) in GROUPS {
        let group: Vec<&RankedVariant> = ranked.iter().filter(|variant| belongs(variant.kind)).collect();
        if group.is_empty() {
            continue;
        }
        let _ = writeln!(
            text,
            "\n{title}\n  {:>9} {:>9}  {:<width$}  layers (GPU)",
            "saves", "tokens/s", "change"
        );
        let (idle, effective): (Vec<_>, Vec<_>) =
            group.into_iter().partition(|variant| has_no_effect(base, variant));
        for variant in effective {
            text.push_str(&row(variant, width));
        }
        if !idle.is_empty() {
            let names: Vec<_> = idle.iter().map(|variant| escape_line(&variant.description)).collect();
            let _ = writeln!(text, "  no effect: {}", names.join("; "));
        }
    }
    text
}

/// Returns whether a change changes the time per token by too little to matter.
fn has_no_effect(base: &Evaluation, variant: &RankedVariant) -> bool {
    base.tpot_ms.zip(variant.saved_ms).is_some_and(|(time, saved)| saved.abs() < NEGLIGIBLE * time)
}

fn row(variant: &RankedVariant, width: usize) -> String {
    let RankedVariant { description, saved_ms, price, perplexity_increase, evaluation, .. } = variant;
    let saved = saved_ms.map_or("-".to_owned(), |saved| {
        let sign = if saved < 0.0 { "-" } else { "" };
        format!("{sign}{}", Seconds(saved.abs() / 1e3))
    });
    let speed = evaluation.tokens_per_s.map_or("-".to_owned(), short_speed);
    let result = if evaluation.tpot_ms.is_some() { plan(evaluation) } else { evaluation.outcome.clone() };
    let quality = perplexity_increase.map_or_else(String::new, |increase| {
        format!("; perplexity {:+.1} % (of Llama 3 8B)", increase * 100.0)
    });
    let price = match (price, variant.saved_for_price()) {
        (Some(price), Some(saved)) => format!("; costs {price}, saves {saved:.2} ms per unit of money"),
        _ => String::new(),
    };
    format!("  {saved:>9} {speed:>9}  {:<width$}  {result}{quality}{price}\n", escape_line(description))
}

/// Returns the windows and the rounds of the plan of an evaluation.
fn plan(evaluation: &Evaluation) -> String {
    let rounds = evaluation.rounds.filter(|rounds| *rounds > 1);
    let rounds = rounds.map_or_else(String::new, |rounds| format!(", {rounds} rounds"));
    escape_line(evaluation.windows.as_deref().unwrap_or_default()).into_owned() + &rounds
}
