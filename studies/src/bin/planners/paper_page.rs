//! Page about the testbeds: compares the plans of all strategies with the results of the prima.cpp paper.
//!
//! The page has Table 4, the device sets of Fig. 8 and the ratios of Fig. 10. The published results are only compared
//! with our results, never used to compute them.
//!
//! Not here: our results ([`crate::paper`]) and the published results ([`crate::published`]).

use std::fmt::Write;

use crate::evaluation::PlanEvaluation;
use crate::paper::{ScenarioResults, StrategyOutcomes, TestbedResults};
use crate::population::{RESIDENCIES, residency_label};
use crate::published::{RANGE_TOLERANCE, TABLE_4, Table4Row, heuristic_slowdown_range, is_within_tolerance};
use crate::tables::{MarkdownTable, format_ratio};

/// The strategies that are compared with the planner of the prima.cpp paper.
const PLANNERS: [&str; 3] = ["exact", "halda", "overlap"];
/// The scores of a plan: by the prima.cpp paper's objective, and by the simulator with each residency policy.
const SCORES: [&str; 4] = ["objective", "simulated, os", "simulated, managed", "simulated, chosen"];

pub fn markdown_page(command: &str, testbeds: &TestbedResults) -> String {
    let mut text = format!(
        "# Plans of the strategies for the testbeds of the prima.cpp paper\n\nWritten by\n\n    {command}\n\n\
         from `scenarios/paper/*.yaml`, the same bytes on every machine. All times are milliseconds per output \
         token. `objective` is the paper's latency model, `simulated` the simulator with the residency that is \
         named; `os` reads ahead and lets the system evict, as \
         prima.cpp does; `chosen` leaves it to the planner.\n\n"
    );
    text += &table_4(&testbeds.table_4);
    text += &fig_8_page(&testbeds.fig_8);
    text + &fig_10_page(&testbeds.fig_10)
}

fn table_4(scenarios: &[ScenarioResults]) -> String {
    let mut text = String::from(
        "## Table 4: seven sizes on D1 to D4\n\nWindows by device, GPU layers in brackets. `paper` is the system that \
         plans as the strategy does. Some numbers of d1 to d4 are inferred from rows 8B, 30B and 70B of this table, \
         see their profiles.\n\n",
    );
    let mut table = score_table(&["size and strategy", "plan"], &["paper", "paper's system"]);
    for (scenario, published) in scenarios.iter().zip(&TABLE_4) {
        for result in &scenario.results {
            let mut row = plan_row(size_and_strategy(scenario, result), result);
            let published = published.published_tpot_ms(result.strategy);
            row.push(published.map_or("-".into(), |(_, ms)| format!("{ms:.0}")));
            row.push(published.map_or("-".into(), |(system, _)| system.into()));
            table.add_row(&row);
        }
    }
    text.push_str(&table.finish());
    let without_prefetch =
        |row: &Table4Row| format!("{} {:.0} ms", row.model_size.to_uppercase(), row.without_prefetch_ms);
    let times = TABLE_4.each_ref().map(without_prefetch).join(", ");
    text + &format!("The paper's prima.cpp without prefetching: {times}.\n\n")
}

fn fig_8_page(scenarios: &[ScenarioResults]) -> String {
    let mut text = String::from(
        "## Fig. 8: 70B on sets of one to six devices\n\nEvery device of a set has a layer, except in the last \
         row. The paper's text (appendix A.7): {D2, D3, D5} is the fastest, adding D5 to {D2, D3} about halves \
         the time, and all six are slower than three. Its text names no other set.\n\n",
    );
    for strategy in planners(scenarios) {
        let mut table = score_table(&["devices", "plan"], &[]);
        for scenario in scenarios {
            let Some(result) = strategy_result(scenario, strategy) else { continue };
            table.add_row(&plan_row(set(scenario), result));
        }
        let _ = write!(text, "### `{strategy}`\n\n{}", table.finish());
        text.push_str(&fig_8_statements(scenarios, strategy));
    }
    text
}

/// Returns a table that checks the prima.cpp paper's three statements about Fig. 8, with a column for each score.
fn fig_8_statements(scenarios: &[ScenarioResults], strategy: &str) -> String {
    let time = |devices: &str, score: usize| {
        let scenario = scenarios.iter().find(|scenario| set(scenario) == devices)?;
        times(strategy_result(scenario, strategy)?)[score]
    };
    let mut table = MarkdownTable::new(&["statement", SCORES[0], SCORES[1], SCORES[2], SCORES[3]]);
    let fastest = |score: usize| {
        let timed = scenarios.iter().filter(|scenario| scenario.keep_all_devices).filter_map(|scenario| {
            Some((set(scenario), times(strategy_result(scenario, strategy)?)[score]?))
        });
        timed.min_by(|one, other| one.1.total_cmp(&other.1)).map_or("-".into(), |(set, _)| set)
    };
    let quotient = |from: &str, to: &str, score: usize| {
        let times = time(from, score).zip(time(to, score));
        times.map_or("-".into(), |(from, to)| format_ratio(from / to))
    };
    let pair = |score| quotient("{D2, D3}", "{D2, D3, D5}", score);
    let six = |score| quotient("{D1, D2, D3, D4, D5, D6}", "{D2, D3, D5}", score);
    let statements: [(&str, &dyn Fn(usize) -> String); 3] = [
        ("fastest set (paper: {D2, D3, D5})", &fastest),
        ("{D2, D3} over {D2, D3, D5} (paper: about 2)", &pair),
        ("all six over {D2, D3, D5} (paper: more than 1)", &six),
    ];
    for (statement, cell) in statements {
        let cells = (0..SCORES.len()).map(cell);
        table.add_row(&std::iter::once(statement.to_owned()).chain(cells).collect::<Vec<_>>());
    }
    table.finish()
}

fn fig_10_page(scenarios: &[ScenarioResults]) -> String {
    let mut text = String::from(
        "## Fig. 10: heuristics against Halda\n\nA Mac Mini, a PC with a GTX 1080 Ti, a laptop with an RTX 3060 and a \
         Redmi phone; the paper gives their memory and says that it suffices, everything else of them is assumed. \
         Nothing is fitted. `mem` stands for MemSched, `perf` for PerfSched.\n\n",
    );
    let mut table = score_table(&["size and strategy", "plan"], &[]);
    for scenario in scenarios {
        for result in &scenario.results {
            table.add_row(&plan_row(size_and_strategy(scenario, result), result));
        }
    }
    text.push_str(&table.finish());
    let _ = write!(
        text,
        "Ratios: how many times longer a token takes. `yes`: within {:.0} % of the published range. `overlap` plans \
         for the steady state that reading ahead reaches, not for the paper's objective.\n\n",
        100.0 * RANGE_TOLERANCE
    );
    let mut table = score_table(&["ratio", "size", "paper"], &[]);
    for (heuristic, system) in [("mem", "MemSched"), ("perf", "PerfSched")] {
        for reference in planners(scenarios) {
            for scenario in scenarios {
                let range @ [from, to] = heuristic_slowdown_range(heuristic, &scenario.model_size);
                let published = if from == to { format_ratio(from) } else { format!("{from}-{to}") };
                let (Some(slow), Some(fast)) =
                    (strategy_result(scenario, heuristic), strategy_result(scenario, reference))
                else {
                    continue;
                };
                let ratio = format!("{system} `{heuristic}` / `{reference}`");
                let mut row = vec![ratio, scenario.model_size.to_uppercase(), published];
                row.extend(times(slow).into_iter().zip(times(fast)).map(|(slow, fast)| {
                    let Some((slow, fast)) = slow.zip(fast) else { return "-".into() };
                    let judged = if is_within_tolerance(slow / fast, range) { "yes" } else { "no" };
                    format!("{} {judged}", format_ratio(slow / fast))
                }));
                table.add_row(&row);
            }
        }
    }
    text + &table.finish()
}

/// Creates a table with the columns `first`, [`SCORES`] and `last`. The first two columns are left-aligned.
fn score_table(first: &[&str], last: &[&str]) -> MarkdownTable {
    MarkdownTable::with_text_columns(2, &[first, &SCORES, last].concat())
}

fn size_and_strategy(scenario: &ScenarioResults, result: &StrategyOutcomes) -> String {
    format!("{} `{}`", scenario.model_size.to_uppercase(), result.strategy)
}

fn plan_row(name: String, result: &StrategyOutcomes) -> Vec<String> {
    [name, plan(result)].into_iter().chain(cells(result)).collect()
}

fn planners(scenarios: &[ScenarioResults]) -> Vec<&'static str> {
    let known = |name: &&str| scenarios.first().is_some_and(|first| strategy_result(first, name).is_some());
    PLANNERS.into_iter().filter(known).collect()
}

fn strategy_result<'a>(scenario: &'a ScenarioResults, strategy: &str) -> Option<&'a StrategyOutcomes> {
    scenario.results.iter().find(|result| result.strategy == strategy)
}

/// Returns the devices of a scenario in the notation of the prima.cpp paper: `{D2, D3}`.
fn set(scenario: &ScenarioResults) -> String {
    let mut names: Vec<String> = scenario.devices.iter().map(|name| name.to_uppercase()).collect();
    names.sort();
    let chosen = if scenario.keep_all_devices { "" } else { ", some may be dropped" };
    format!("{{{}}}{chosen}", names.join(", "))
}

/// Returns the summary of a strategy's plan, or one summary for each residency policy if the plans differ.
fn plan(result: &StrategyOutcomes) -> String {
    let outcomes = result.outcomes.iter().map(Result::as_ref);
    let plans: Vec<&str> = outcomes.map(|it| it.map_or("no plan", |(plan, _)| plan.as_str())).collect();
    if plans.windows(2).all(|pair| pair[0] == pair[1]) {
        return plans.first().copied().unwrap_or("no plan").to_owned();
    }
    let named =
        RESIDENCIES.iter().zip(plans).map(|(policy, plan)| format!("{}: {plan}", residency_label(*policy)));
    named.collect::<Vec<_>>().join("; ")
}

fn score(result: &StrategyOutcomes, residency: usize) -> Option<&PlanEvaluation> {
    result.outcomes.get(residency)?.as_ref().ok().map(|(_, score)| score)
}

/// Returns the times per token of a strategy's plans in seconds, in the order of [`SCORES`].
fn times(result: &StrategyOutcomes) -> [Option<f64>; SCORES.len()] {
    std::array::from_fn(|at| match at {
        0 => score(result, 0).map(|score| score.paper_objective_seconds),
        _ => score(result, at - 1)?.simulated_tpot_seconds,
    })
}

fn cells(result: &StrategyOutcomes) -> [String; SCORES.len()] {
    let times = times(result);
    std::array::from_fn(|at| match (times[at], at) {
        (None, 1..) if score(result, at - 1).is_some() => "out of memory".to_owned(),
        (time, _) => milliseconds(time),
    })
}

fn milliseconds(seconds: Option<f64>) -> String {
    seconds.map_or("-".into(), |seconds| {
        let ms = seconds * 1e3;
        if ms < 100.0 { format!("{ms:.1}") } else { format!("{ms:.0}") }
    })
}
