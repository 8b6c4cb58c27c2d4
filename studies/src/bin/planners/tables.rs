//! Report about random clusters: a page of Markdown tables, a chart, and a CSV file with all values.

use std::fmt::Write;

use crate::clusters::MODEL_NAMES;
use crate::curves::{Panel, render_svg};
use crate::evaluation::{
    CHUNK_SIZE, PlanEvaluation, REFERENCE_STRATEGY, SMALL_WORKLOAD, WORKLOAD, strategy_names,
};
use crate::gaps::{Gaps, optimality_gap};
use crate::population::{
    InstanceResult, LONG_RUN_CLUSTER_COUNT, LONG_RUN_TOKENS, RESIDENCIES, residency_label,
};
use crate::regret::ExhaustiveSearchResult;

pub struct MarkdownTable {
    text: String,
}

impl MarkdownTable {
    /// Creates a table in which all columns except the first are right-aligned numbers.
    pub fn new(columns: &[&str]) -> Self {
        Self::with_text_columns(1, columns)
    }

    /// Creates a table in which all columns except the first `text_columns` are right-aligned numbers.
    pub fn with_text_columns(text_columns: usize, columns: &[&str]) -> Self {
        let (text, numbers) = (" --- |".repeat(text_columns), " ---: |".repeat(columns.len() - text_columns));
        Self { text: format!("| {} |\n|{text}{numbers}\n", columns.join(" | ")) }
    }

    pub fn add_row(&mut self, cells: &[String]) {
        let _ = writeln!(self.text, "| {} |", cells.join(" | "));
    }

    /// Returns the text of the table, followed by an empty line.
    pub fn finish(self) -> String {
        self.text + "\n"
    }
}

pub fn markdown_page(
    command: &str,
    instances: &[InstanceResult],
    small: &[ExhaustiveSearchResult],
) -> String {
    let mut text = String::from("# Quality of the plans of each strategy\n\n");
    let _ = write!(
        text,
        "Written by\n\n    {command}\n\nwhich gives the same bytes on every machine. {} random homes of 2 to 8 \
         devices, each with a model of the paper's Table 4 ({}); memory is 0.4 to 1.4 times the model where \
         enough of it can be taken away, with a median of {:.2}. The \
         ranges and their sources are in `studies/src/bin/planners/devices.rs` and `clusters.rs`, all numbers in \
         `data.csv`.\n\n![Cumulative distributions of the gaps](gaps.svg)\n\n",
        instances.len(),
        MODEL_NAMES.join(", "),
        Gaps::new(instances.iter().map(|instance| instance.cluster_properties.memory_ratio).collect())
            .quantile(0.5)
    );
    text.push_str(
        "The first device is the head, devices may be dropped, every round is complete. A gap is a time \
         over the best one, less one; quantiles are over the instances in which the strategy has a plan. `refused`: \
         the strategy has no plan, or one that breaks a constraint. Residency `chosen` leaves it to the planner how \
         each device keeps its weights.\n\n",
    );
    text += &objective(instances);
    for (place, residency) in RESIDENCIES.into_iter().enumerate() {
        let _ = write!(text, "## In the simulator, residency `{}`\n\n", residency_label(residency));
        text += &simulator(instances, place);
    }
    text + &steady_state(instances) + &regrets(small)
}

fn objective(instances: &[InstanceResult]) -> String {
    let mut text = format!(
        "## Under the paper's objective\n\nThe time of a token by the paper's latency model, against the optimum \
         that `{REFERENCE_STRATEGY}` finds with device selection. Plans are those made for residency `os`.\n\n"
    );
    let solvable: Vec<_> =
        instances.iter().filter(|instance| instance.optimal_objective_seconds().is_some()).collect();
    let mut table =
        MarkdownTable::new(&["strategy", "optimal", "refused", "median gap", "p90", "max", "more than 2x"]);
    for (place, strategy) in strategy_names().enumerate() {
        let gaps = solvable.iter().filter_map(|instance| instance.objective_gap(place));
        let gaps = Gaps::new(gaps.collect());
        let (optimal, refused) = (share(gaps.zero_count(), solvable.len()), solvable.len() - gaps.count());
        let mut row = vec![format!("`{strategy}`"), optimal, refused.to_string()];
        row.extend(gap_cells(&gaps));
        table.add_row(&row);
    }
    text.push_str(&table.finish());
    let better = solvable.iter().filter(|instance| instance.prefers_multiple_rounds).count();
    let _ = write!(
        text,
        "Instances with a plan: {} of {}. Those in which some number of rounds k > 1 beats k = 1 under this \
         objective: {better}. It cannot be otherwise: (w, n, k) and (k w, k n, 1) give every device the same \
         layers and memory, and one round has fewer hops.\n\n",
        solvable.len(),
        instances.len()
    );
    text
}

fn simulator(instances: &[InstanceResult], residency: usize) -> String {
    let counts = ["strategy", "within 1 % of the best", "refused", "out of memory"];
    let gaps = ["median gap", "p90", "max", "more than 2x"];
    let others = ["more than one round", "expectation off by, median", "p90"];
    let mut table = MarkdownTable::new(&[&counts[..], &gaps, &others].concat());
    let solvable: Vec<&InstanceResult> =
        instances.iter().filter(|instance| instance.fastest_tpot_seconds(residency).is_some()).collect();
    for (place, strategy) in strategy_names().enumerate() {
        let gaps = solvable.iter().filter_map(|instance| instance.simulated_gap(residency, place));
        let gaps = Gaps::new(gaps.collect());
        let results = solvable.iter().map(|instance| &instance.plan_evaluations[residency][place]);
        let scores: Vec<&PlanEvaluation> = results.flatten().collect();
        let off = |score: &&PlanEvaluation| {
            Some((score.strategy_objective_seconds / score.simulated_tpot_seconds? - 1.0).abs())
        };
        let off = Gaps::new(scores.iter().filter_map(off).collect());
        let mut row = vec![format!("`{strategy}`"), share(gaps.near_optimal_count(), solvable.len())];
        let refused = solvable.len() - gaps.count();
        row.extend([refused, gaps.out_of_memory_count()].map(|count| count.to_string()));
        row.extend(gap_cells(&gaps));
        row.push(share(scores.iter().filter(|score| score.rounds > 1).count(), scores.len()));
        row.extend([off.quantile(0.5), off.quantile(0.9)].map(format_gap));
        table.add_row(&row);
    }
    format!(
        "Against the fastest plan of any strategy for the same instance and residency. An instance counts if \
         one of them runs: {} of {}. A strategy's expectation is its plan's time by the objective that it \
         minimises: the steady state for `overlap`, the paper's for the others.\n\n{}",
        solvable.len(),
        instances.len(),
        table.finish()
    )
}

fn steady_state(instances: &[InstanceResult]) -> String {
    let text = format!(
        "### Effect of the number of simulated tokens\n\nA plan is simulated for {} tokens, the first of which is not counted, \
         in chunks of {}; weights are on disk at the start. The plans of `{REFERENCE_STRATEGY}` for the first \
         {LONG_RUN_CLUSTER_COUNT} instances were simulated for {LONG_RUN_TOKENS} tokens too:\n\n",
        WORKLOAD.generated_tokens, CHUNK_SIZE
    );
    let mut table = MarkdownTable::new(&["residency", "plans", "median difference", "largest"]);
    for (place, residency) in RESIDENCIES.iter().enumerate() {
        let differences = instances.iter().filter_map(|instance| instance.long_run_tpot_differences[place]);
        let gaps = Gaps::new(differences.collect());
        let [median, max] = [0.5, 1.0].map(|share| format_gap(gaps.quantile(share)));
        table.add_row(&[format!("`{}`", residency_label(*residency)), gaps.count().to_string(), median, max]);
    }
    text + &table.finish()
}

fn regrets(small: &[ExhaustiveSearchResult]) -> String {
    let count = small.len() / RESIDENCIES.len();
    let plans: usize = small.iter().map(|searched| searched.plan_count).sum();
    let mut text = format!(
        "## Regret on small instances\n\n{count} instances of 2 or 3 devices: models of the paper's Table 4 cut to \
         8, 10 or 12 layers, with vocabulary, memories and buffers cut in proportion. All plans are simulated for \
         {} tokens, {plans} plans in all, and a strategy's regret is its simulated time over the fastest of them \
         and of the strategies' own, which may choose stream buffers, less one.\n\n",
        SMALL_WORKLOAD.generated_tokens
    );
    for residency in RESIDENCIES {
        let of = small.iter().filter(|searched| searched.residency == residency);
        let of: Vec<&ExhaustiveSearchResult> =
            of.filter(|searched| searched.fastest_tpot_and_rounds.is_some()).collect();
        let rounds = of.iter().filter_map(|searched| Some(searched.fastest_tpot_and_rounds?.1));
        let several = rounds.filter(|&rounds| rounds > 1);
        let _ = write!(
            text,
            "### Residency `{}`\n\nInstances with a plan that runs: {} of {count}. The fastest plan of \
             all has more than one round in {} of them.\n\n",
            residency_label(residency),
            of.len(),
            several.count()
        );
        let columns = ["strategy", "refused", "out of memory", "median regret", "p90", "max", "more than 2x"];
        let mut table = MarkdownTable::new(&columns);
        for (place, strategy) in strategy_names().enumerate() {
            let one = |searched: &&ExhaustiveSearchResult| {
                let score = searched.plan_evaluations[place].as_ref().ok()?;
                Some(optimality_gap(score.simulated_tpot_seconds, searched.fastest_tpot_and_rounds?.0))
            };
            let gaps = Gaps::new(of.iter().filter_map(one).collect());
            let mut row = vec![format!("`{strategy}`")];
            row.extend([of.len() - gaps.count(), gaps.out_of_memory_count()].map(|count| count.to_string()));
            row.extend(gap_cells(&gaps));
            table.add_row(&row);
        }
        text.push_str(&table.finish());
    }
    text
}

/// Returns table cells with the median, ninth decile and maximum of the gaps, and the share of gaps above 100 %.
pub fn gap_cells(gaps: &Gaps) -> [String; 4] {
    let [median, p90, max] = [0.5, 0.9, 1.0].map(|share| format_gap(gaps.quantile(share)));
    [median, p90, max, share(gaps.more_than_double_count(), gaps.count())]
}

pub fn gaps_svg(instances: &[InstanceResult]) -> String {
    let panel = |title: String, gap: &dyn Fn(&InstanceResult, usize) -> Option<f64>, count: usize| {
        let of = |(place, strategy)| {
            let gaps = instances.iter().filter_map(|instance| gap(instance, place)).collect();
            (strategy, Gaps::new(gaps), count)
        };
        Panel { title, curves: strategy_names().enumerate().map(of).collect() }
    };
    let solvable = instances.iter().filter(|instance| instance.optimal_objective_seconds().is_some()).count();
    let mut panels = vec![panel("The paper's objective".into(), &InstanceResult::objective_gap, solvable)];
    for (at, residency) in RESIDENCIES.iter().enumerate() {
        let running = instances.iter().filter(|instance| instance.fastest_tpot_seconds(at).is_some()).count();
        let gap = |instance: &InstanceResult, place| instance.simulated_gap(at, place);
        panels.push(panel(format!("Simulator, residency {}", residency_label(*residency)), &gap, running));
    }
    render_svg(&panels)
}

/// Returns the scores of all plans as CSV text, with a row for each strategy, cluster and residency policy.
pub fn evaluations_csv(instances: &[InstanceResult], small: &[ExhaustiveSearchResult]) -> String {
    let mut text = String::from(
        "part,instance,model,devices,memory_ratio,residency,strategy,rounds,used_devices,predicted_s,\
         simulated_s,best_predicted_s,best_simulated_s\n",
    );
    for instance in instances {
        for (place, residency) in RESIDENCIES.iter().enumerate() {
            let head = instance.cluster_properties.csv_cells("homes", &residency_label(*residency));
            let best = [instance.optimal_objective_seconds(), instance.fastest_tpot_seconds(place)];
            rows(&mut text, &head, &instance.plan_evaluations[place], best);
        }
    }
    for searched in small {
        let head = searched.cluster_properties.csv_cells("small", &residency_label(searched.residency));
        let best = [None, searched.fastest_tpot_and_rounds.map(|(seconds, _)| seconds)];
        rows(&mut text, &head, &searched.plan_evaluations, best);
    }
    text
}

fn rows(text: &mut String, head: &str, scores: &[Result<PlanEvaluation, String>], best: [Option<f64>; 2]) {
    let [predicted, simulated] = best.map(seconds);
    for (strategy, score) in strategy_names().zip(scores) {
        let _ = match score {
            Ok(score) => writeln!(
                text,
                "{head},{strategy},{},{},{},{},{predicted},{simulated}",
                score.rounds,
                score.device_count,
                seconds(Some(score.paper_objective_seconds)),
                seconds(score.simulated_tpot_seconds)
            ),
            Err(_) => writeln!(text, "{head},{strategy},refused,,,,{predicted},{simulated}"),
        };
    }
}

fn seconds(value: Option<f64>) -> String {
    value.map_or(String::new(), |value| format!("{value:.6}"))
}

/// Formats a gap, given as a fraction, in percent, or as the ratio of the times if that is at least 11.
pub fn format_gap(value: f64) -> String {
    match value {
        _ if value.is_nan() => "-".into(),
        _ if value.is_infinite() => "no end".into(),
        // Equal times may differ in their last bits, which must not print as -0.0.
        _ if value.abs() < 5e-5 => "0.0 %".into(),
        _ if value < 10.0 => format!("{:.1} %", value * 100.0),
        _ => format!("{:.0}x", value + 1.0),
    }
}

pub fn format_ratio(value: f64) -> String {
    if value.is_finite() { format!("{value:.2}") } else { "-".into() }
}

fn share(part: usize, whole: usize) -> String {
    if whole == 0 { "-".into() } else { format!("{:.0} %", 100.0 * part as f64 / whole as f64) }
}
