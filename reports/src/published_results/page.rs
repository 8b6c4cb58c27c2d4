//! Report on the comparison of simulated with published numbers.
//!
//! The report has a table of times per token with published and simulated values in each cell, then times to first
//! token, memory pressure, claims, uncertainty and plans. Values outside their tolerance are in brackets. Remarks and
//! caveats are copied from the document.

use std::fmt::Write;

use hearth_schema::trace::Outcome;
use serde::Serialize;

use super::results::{CellResult, CellResults, SimulatedRun};
use super::scores::{ClaimResult, PublishedScores, TimeComparison, simulated_pressure};
use super::speeds::SpeedScores;
use super::{ClaimQuantity, InferredValue, PublishedResults, ResultCell, System};
use crate::charts::drawing::CssClass;
use crate::charts::parity::{self, ParityPoint};
use crate::document::{Block, Document, NO_VALUE, RowStyle, Table, Text, to_json};
use crate::text::numbers;

/// Returns the name and the contents of each file of the report: HTML, Markdown, figures and JSON. `without` has the
/// results without each of the document's inferred values.
pub fn render_files(
    published: &PublishedResults,
    results: &CellResults,
    without: &[CellResults],
) -> Vec<(String, Vec<u8>)> {
    let scores = PublishedScores::from_results(published, results);
    let mut files = document(published, results, &scores, without).render_files();
    let runs = results.iter().map(|(&(row, system), result)| JsonRun {
        row: &published.rows[row].label,
        system: &published.systems[system].name,
        result,
    });
    let document = Json { name: &published.name, scores: &scores, runs: runs.collect() };
    files.push(("comparison.json".to_owned(), to_json(&document)));
    files
}

/// Returns the summary of a comparison with published numbers as text for a terminal.
pub fn summary_text(published: &PublishedResults, results: &CellResults) -> String {
    let scores = PublishedScores::from_results(published, results);
    let mut text = format!("{}: {}\n", published.name, summary(published, &scores).to_plain_text());
    for ClaimResult { text: claim, ratio_range: [from, to], simulated_ratio: ratio, .. } in
        scores.claims.iter().filter(|claim| !claim.holds)
    {
        let ratio = ratio.map_or("no simulated ratio".into(), |ratio| format!("simulated {ratio:.2}"));
        let _ = writeln!(text, "  does not hold: {claim} ({ratio}, the text allows {from} to {to})");
    }
    if let Some(speeds) = &scores.speed_scores {
        text += &speeds.summary_text();
    }
    text
}

/// The relative change of a simulated time from which a cell is listed. source: assumed
const CHANGED: f64 = 0.1;

#[derive(Serialize)]
struct Json<'a> {
    name: &'a str,
    scores: &'a PublishedScores,
    runs: Vec<JsonRun<'a>>,
}

#[derive(Serialize)]
struct JsonRun<'a> {
    row: &'a str,
    system: &'a str,
    result: &'a CellResult,
}

fn document(
    published: &PublishedResults,
    results: &CellResults,
    scores: &PublishedScores,
    without: &[CellResults],
) -> Document {
    let source = Text::from(format!("{} ({}).", published.title, published.source));
    let mut opening_blocks = vec![Block::Paragraph(source), Block::Paragraph(summary(published, scores))];
    opening_blocks.extend(published.caveats.iter().map(|caveat| Block::Note(caveat.as_str().into())));
    let title = Text::from(format!("Simulated and published: {}", published.name));
    let mut document = Document { title, opening_blocks, sections: Vec::new() };
    let tpot = times(published, &scores.tpot_comparisons, "Time per output token in ms");
    let tpot = tpot.into_iter().chain(parity(published, &scores.tpot_comparisons));
    document.push_section("Time per token", "tpot", tpot);
    let ttft = times(published, &scores.ttft_comparisons, "Time to the first token in ms");
    document.push_section("Time to the first token", "ttft", ttft);
    document.push_section("Without each inferred value", "inferred", inferred(published, scores, without));
    document.push_section("Speeds", "speeds", scores.speed_scores.iter().flat_map(SpeedScores::to_blocks));
    document.push_section("Memory pressure", "pressure", pressure(published, results));
    document.push_section("Memory by device and processor", "footprint", footprint(published, results));
    document.push_section("Claims", "claims", claims(published, scores));
    document.push_section("Remarks", "remarks", remarks(published));
    document.push_section("Uncertainty", "uncertainty", spreads(published, results));
    document.push_section("Plans", "plans", plans(published, results));
    document
}

fn summary(published: &PublishedResults, scores: &PublishedScores) -> Text {
    let mut sentences = Vec::new();
    if let Some(median) = scores.median_tpot_error {
        sentences.push(errors_in_words("Times per token", median, &scores.tpot_comparisons));
        if let Some(held_out) =
            scores.median_held_out_tpot_error.filter(|_| !published.fitted_rows.is_empty())
        {
            sentences.push(format!(
                "Without the rows to which parameters were fitted, the median is {}.",
                percent(held_out)
            ));
        }
    }
    if let Some(median) = scores.median_ttft_error {
        sentences.push(errors_in_words("Times to the first token", median, &scores.ttft_comparisons));
    }
    let list = |what: &str, found: &[String]| match found {
        [] => format!("{what}: none."),
        some => format!("{what}: {}.", some.join("; ")),
    };
    if published.systems.len() > 1 && scores.median_tpot_error.is_some() {
        sentences.push(list("Pairs of systems in the wrong order", &scores.misordered_pairs));
    }
    let rank = |(name, rank): &(String, f64)| format!("{name} {rank:.2}");
    if !scores.rank_correlations.is_empty() {
        let ranks: Vec<String> = scores.rank_correlations.iter().map(rank).collect();
        sentences.push(format!("Rank correlation of the rows: {}.", ranks.join(", ")));
    }
    sentences.push(list("Runs whose outcome differs from the published one", &scores.outcome_mismatches));
    if let Some(difference) = scores.median_pressure_difference {
        sentences.push(format!("Memory pressure: median difference {:.1} points.", difference * 100.0));
    }
    if !scores.claims.is_empty() {
        let hold = scores.claims.iter().filter(|claim| claim.holds).count();
        let ties = scores.claims.iter().filter(|claim| claim.holds && claim.is_tie).count();
        let ties = if ties > 0 { format!(", {ties} of them as ties") } else { String::new() };
        sentences.push(format!("{hold} of {} claims hold{ties}.", scores.claims.len()));
    }
    sentences.join(" ").into()
}

fn errors_in_words(what: &str, median: f64, errors: &[TimeComparison]) -> String {
    let counted = || errors.iter().filter(|error| !error.is_excluded);
    let (cells, outside) = (counted().count(), counted().filter(|error| !error.is_within_tolerance).count());
    format!("{what}: median error {}, {outside} of {cells} cells outside their tolerance.", percent(median))
}

fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

fn times(published: &PublishedResults, errors: &[TimeComparison], what: &str) -> Option<Block> {
    let used = |name: &str| errors.iter().any(|error| error.system == name);
    let systems: Vec<&str> =
        published.systems.iter().map(|system| system.name.as_str()).filter(|name| used(name)).collect();
    if systems.is_empty() {
        return None;
    }
    let rows = published.rows.iter().map(|row| {
        let mut cells = vec![Text::from(format!("{}{}", row.label, published.status(&row.label)))];
        for name in &systems {
            let error = errors.iter().find(|error| error.row == row.label && error.system == *name);
            cells.push(error.map_or_else(|| missing(row.cells_by_system.get(*name)), time).into());
        }
        cells
    });
    let caption = format!(
        "{what}: published, simulated, error. Values in brackets are outside their tolerance, {:.0} % unless a cell has \
         its own. Values of the devices were fitted to the rows marked so; nobody had looked at the rows marked as blind \
         when the simulator last changed; all others were looked at.",
        published.tolerance.0 * 100.0
    );
    let headings = std::iter::once("Row").chain(systems.iter().copied());
    Some(Block::Table(Table::new(caption, headings, rows).with_only_text_columns()))
}

/// Formats a time in milliseconds for a table.
fn format_ms(value: f64) -> String {
    numbers::format_decimal(value, u32::from(value < 100.0))
}

fn missing(cell: Option<&ResultCell>) -> String {
    match cell.and_then(|cell| cell.outcome) {
        Some(Outcome::Ok) | None => NO_VALUE.to_owned(),
        Some(ended) => ended.label().to_owned(),
    }
}

fn time(error: &TimeComparison) -> String {
    let Some((simulated, off)) = error.simulated_ms.zip(error.relative_error) else {
        return format!("{}, none", format_ms(error.published_ms));
    };
    let text = format!("{}, {}, {:+.0} %", format_ms(error.published_ms), format_ms(simulated), off * 100.0);
    if error.is_within_tolerance { text } else { format!("[{text}]") }
}

/// Draws a parity plot: the simulated against the published time of every cell, with a colour for each system.
fn parity(published: &PublishedResults, errors: &[TimeComparison]) -> Option<Block> {
    let point = |error: &TimeComparison| {
        let system = published.systems.iter().position(|system| system.name == error.system)?;
        Some(ParityPoint {
            group: error.system.clone(),
            class: CssClass::for_series(system),
            name: format!("{}, {}", error.row, error.system),
            reference_value: error.published_ms,
            predicted_value: error.simulated_ms?,
            measured_range: None,
        })
    };
    let points: Vec<ParityPoint> = errors.iter().filter_map(point).collect();
    let drawing = parity::draw_parity_plot("parity", "Simulated and published times", "ms", &points)?;
    let caption = "Each dot is a simulated time over the published one. Both axes are logarithmic.";
    Some(Block::Figure(drawing, caption.into()))
}

/// Returns a table with a row for each inferred value: the errors without it, and the cells whose time it changes.
fn inferred(
    published: &PublishedResults,
    scores: &PublishedScores,
    without: &[CellResults],
) -> Option<Block> {
    let row = |(value, results): (&InferredValue, &CellResults)| {
        let others = PublishedScores::from_results(published, results);
        let cells = scores.tpot_comparisons.iter().zip(&others.tpot_comparisons);
        let changed = cells.clone().filter_map(|(with, without)| {
            let text = format!("{} {}", with.row, with.system);
            match (with.simulated_ms, without.simulated_ms) {
                (Some(with), Some(without)) if (without / with - 1.0).abs() >= CHANGED => {
                    Some(format!("{text} {} to {}", format_ms(with), format_ms(without)))
                }
                (Some(_), None) => Some(format!("{text} does not run")),
                _ => None,
            }
        });
        let outside = others.tpot_comparisons.iter().filter(|time| !time.is_within_tolerance).count();
        let values = value.values_without.iter().map(|(path, value)| format!("{path}: {value}"));
        [
            value.name.clone(),
            format!("{} ({})", values.collect::<Vec<_>>().join(", "), value.source),
            others.median_tpot_error.map_or_else(|| NO_VALUE.to_owned(), percent),
            outside.to_string(),
            others.median_ttft_error.map_or_else(|| NO_VALUE.to_owned(), percent),
            changed.collect::<Vec<_>>().join("; "),
        ]
        .map(Text::from)
        .to_vec()
    };
    let caption = format!(
        "The times per token if one inferred value is replaced by what it would be without the published numbers: \
         median error, cells outside their tolerance, median error of the times to the first token, and the cells whose \
         simulated time per token (in ms) changes by {:.0} % or more. With all values the median error is {}.",
        CHANGED * 100.0,
        scores.median_tpot_error.map_or_else(|| NO_VALUE.to_owned(), percent)
    );
    let headings =
        ["Inferred value", "Without the fit", "Median error", "Outside", "First token", "Cells that change"];
    let rows = published.inferred_values.iter().zip(without).map(row);
    Table::new(caption, headings, rows).with_only_text_columns().into_text_block()
}

fn pressure(published: &PublishedResults, results: &CellResults) -> Option<Block> {
    let mut rows = Vec::new();
    for (index, row, system, cell) in published.cells() {
        let mut style = RowStyle::Group;
        for (device, share) in &cell.memory_pressure {
            let simulated = simulated_pressure(results, index, device).map(percent);
            let cells = [row.label.clone(), system.name.clone(), device.clone(), percent(share.0)];
            let cells = cells.map(Text::from).into_iter().chain([Text::from_option(simulated)]);
            rows.push((style, cells.collect()));
            style = RowStyle::Plain;
        }
    }
    let headings = ["Row", "System", "Device", "Published", "Simulated"];
    let caption = "Memory that cannot be reclaimed, as a share of the device's memory.";
    Table::with_row_styles(caption, headings, rows).into_text_block()
}

/// Returns a table for each of the document's `footprint_systems`: memory by processor, with a row for each run.
fn footprint(published: &PublishedResults, results: &CellResults) -> Vec<Block> {
    let mut blocks = Vec::new();
    for (column, system) in published.systems.iter().enumerate() {
        if !published.footprint_systems.contains(&system.name) {
            continue;
        }
        let of_system = results.iter().filter(|((_, of), _)| *of == column);
        let runs = of_system.filter_map(|(&(row, _), result)| Some((row, result.simulated_run()?)));
        let runs: Vec<(&str, &SimulatedRun)> =
            runs.map(|(row, run)| (published.rows[row].label.as_str(), run)).collect();
        let mut processors: Vec<&str> =
            runs.iter().flat_map(|(_, run)| &run.memory_footprints).map(|it| it.processor.as_str()).collect();
        processors.sort_unstable();
        processors.dedup();
        let cell = |run: &SimulatedRun, processor: &str| {
            let found = run.memory_footprints.iter().find(|it| it.processor == processor);
            Text::from_option(found.filter(|it| it.required_bytes > 0).map(|it| {
                let gib = |bytes: u64| numbers::format_decimal(bytes as f64 / f64::from(1 << 30), 1);
                let over = if it.required_bytes > it.available_bytes { " (over)" } else { "" };
                format!("{} of {}{over}", gib(it.required_bytes), gib(it.available_bytes))
            }))
        };
        let rows = runs.iter().map(|(label, run)| {
            let cells = processors.iter().map(|processor| cell(run, processor));
            std::iter::once(Text::from(*label)).chain(cells).collect()
        });
        let caption = format!(
            "{}: weights, KV cache and buffers in GiB, of the available memory. Over: the rest is read from disk for every token, or does not fit.",
            system.name
        );
        let headings = std::iter::once("Row").chain(processors.iter().copied());
        blocks.push(Block::Table(Table::new(caption, headings, rows).with_only_text_columns()));
    }
    blocks
}

fn claims(published: &PublishedResults, scores: &PublishedScores) -> Option<Block> {
    let row = |claim: &ClaimResult| {
        let ratio = claim.simulated_ratio.map_or("none".to_owned(), |ratio| format!("{ratio:.2}"));
        let range = format!("{} to {}", claim.ratio_range[0], claim.ratio_range[1]);
        let holds = match (claim.holds, claim.is_tie) {
            (true, true) => "yes, a tie",
            (true, false) => "yes",
            (false, _) => "no",
        };
        [claim.text.clone(), range, ratio, holds.to_owned()].map(Text::from).to_vec()
    };
    let headings = ["Claim", "Range of the text", "Simulated", "Holds"];
    let mixed = published.claims.iter().any(|claim| claim.quantity != ClaimQuantity::Tpot);
    let caption =
        if mixed { "Ratios of the quantity that each claim names." } else { "Ratios of times per token." };
    Table::new(caption, headings, scores.claims.iter().map(row)).into_text_block()
}

fn remarks(published: &PublishedResults) -> Vec<Block> {
    let systems = published.systems.iter().filter(|system| !system.rationale.is_empty());
    let about = |system: &System| {
        Text::default().append_name(&system.name).append_words(format!(": {}", system.rationale))
    };
    let cells = published.rows.iter().flat_map(|row| row.cells_by_system.iter().map(move |cell| (row, cell)));
    let remarks = cells.filter_map(|(row, (name, cell))| {
        Some(Text::from(format!("{}, {name}: {}", row.label, cell.remark.as_ref()?)))
    });
    systems.map(about).chain(remarks).map(Block::Paragraph).collect()
}

fn spreads(published: &PublishedResults, results: &CellResults) -> Option<Block> {
    let row = |(&(row, system), result): (&(usize, usize), &CellResult)| {
        let run = result.simulated_run()?;
        let spread = run.prediction_interval.as_ref()?;
        let cells = [
            published.rows[row].label.clone(),
            published.systems[system].name.clone(),
            run.tpot_ms.map_or_else(String::new, format_ms),
            spread.interval_text(),
            spread.sensitivities_text(),
        ];
        Some(cells.map(Text::from).to_vec())
    };
    let headings = ["Row", "System", "ms per token", "80 % of the draws", "Most sensitive to"];
    let caption = "Every parameter of the devices and links is drawn from a distribution around its value, as wide as the \
                   uncertainty of its source. The last column changes one parameter at a time by its own uncertainty; out \
                   of memory: the run then runs out of memory.";
    Table::new(caption, headings, results.iter().filter_map(row)).into_text_block()
}

fn plans(published: &PublishedResults, results: &CellResults) -> Option<Block> {
    let row = |(&(row, system), result): (&(usize, usize), &CellResult)| {
        let (plan, note) = match result {
            CellResult::Ran(run) => (run.plan_summary.clone(), run.unvalidated_parts.join("; ")),
            CellResult::Failed { reason } => ("none".to_owned(), reason.clone()),
        };
        let tpot = result.claim_quantity(ClaimQuantity::Tpot);
        let time = tpot.map_or_else(|| NO_VALUE.to_owned(), format_ms);
        let cells =
            [published.rows[row].label.clone(), published.systems[system].name.clone(), time, plan, note];
        cells.map(Text::from).to_vec()
    };
    let headings = ["Row", "System", "ms per token", "Layers (on the GPU)", "Not validated"];
    Table::new("The simulated plans.", headings, results.iter().map(row)).into_text_block()
}
