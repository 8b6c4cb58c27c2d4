//! Report section about uncertain memory.

use std::fmt::Write;

use hearth_halda::MemoryRisk;

use crate::gaps::Gaps;
use crate::population::residency_label;
use crate::risk::{COMPARED, DRAWS, RESIDENCIES, RiskResult, UncertainTimes};
use crate::tables::{MarkdownTable, gap_cells};

pub fn risk_section(results: &[RiskResult]) -> String {
    let mut text = format!(
        "## Uncertain memory\n\nIn the same homes the available memory of a device is measured (3 %), inferred (10 %) or \
         assumed (25 %), at random; rates of memory and disks are measured. Each plan is simulated with {DRAWS} draws of \
         these values, the same for all plans. Regret is the mean (or 90th percentile) of its times over the least of the plans \
         compared here, less one; a mean has no end if one of the draws ends out of memory. `--risk average` is the \
         default.\n\n"
    );
    for (place, residency) in RESIDENCIES.into_iter().enumerate() {
        let _ = write!(text, "### Residency `{}`\n\n", residency_label(residency));
        let columns = ["plans", "time as described", "out of memory"];
        let gaps = ["median", "p90", "max", "more than 2x"];
        let with = |prefix: &str| gaps.map(|gap| format!("{prefix} {gap}"));
        let columns: Vec<String> =
            columns.map(String::from).into_iter().chain(with("mean:")).chain(with("p90:")).collect();
        let mut head = vec!["strategy"];
        head.extend(columns.iter().map(String::as_str));
        let mut table = MarkdownTable::new(&head);
        for (strategy, compared) in COMPARED.into_iter().enumerate() {
            table.add_row(&row(results, place, strategy, compared));
        }
        text.push_str(&table.finish());
        let [average, ignore] = [0, 1].map(|strategy| {
            results.iter().map(move |result| result[place][strategy].map(|times| times.mean))
        });
        let pairs: Vec<(f64, f64)> = average.zip(ignore).filter_map(|(one, other)| one.zip(other)).collect();
        let other = pairs.iter().filter(|(one, other)| one != other).count();
        let better = pairs.iter().filter(|(one, other)| one < other).count();
        let _ = write!(
            text,
            "The risk changes the plan of `overlap` in {other} of {} homes; its mean time is less in {better} of them.\n\n",
            pairs.len()
        );
    }
    text
}

fn row(
    results: &[RiskResult],
    place: usize,
    strategy: usize,
    (name, risk): (&str, MemoryRisk),
) -> Vec<String> {
    let regrets = |of: fn(&UncertainTimes) -> f64| {
        let regret = |result: &RiskResult| {
            let least = result[place].iter().flatten().map(of).fold(f64::INFINITY, f64::min);
            Some(of(&result[place][strategy]?) / least - 1.0).filter(|_| least.is_finite())
        };
        Gaps::new(results.iter().filter_map(regret).collect())
    };
    let plans: Vec<UncertainTimes> = results.iter().filter_map(|result| result[place][strategy]).collect();
    let failed: usize = plans.iter().map(|times| times.failed_draw_count).sum();
    let label = match (name, risk) {
        ("overlap", MemoryRisk::Ignore) => "`overlap`, `--risk ignore`".to_owned(),
        _ => format!("`{name}`"),
    };
    let as_described = regrets(|times| times.as_described);
    let mut cells =
        vec![label, plans.len().to_string(), crate::tables::format_gap(as_described.quantile(0.5))];
    cells.push(format!("{:.1} %", 100.0 * failed as f64 / (plans.len() * DRAWS) as f64));
    cells.extend(gap_cells(&regrets(|times| times.mean)));
    cells.extend(gap_cells(&regrets(|times| times.p90)));
    cells
}
