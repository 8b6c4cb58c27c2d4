//! The sections of a report on traces, in reading order.

mod events;
mod published;
mod scaling;
mod sequences;
mod summary;
pub mod tables;

use hearth_core::metrics::token_times::{DecodeStep, TokenTimes};
use hearth_profiles::device::PageCachePolicy;
use hearth_schema::Trace;
use hearth_schema::trace::{Origin, Outcome, TracedDevice};

use crate::charts::drawing::Drawing;
use crate::charts::lines::LineChart;
use crate::charts::{bars, gantt, memory as memory_charts, parity, tokens as token_charts};
use crate::comparison::{Comparison, Run, terms};
use crate::document::{Block, Document, NO_VALUE, Table, Text};
use crate::text::escape;

/// Maximum ratio of the token durations of two runs whose Gantt charts have a common time scale.
const MAX_SCALE_RATIO: u64 = 4;

pub fn build_document(comparison: &Comparison, traces: &[Trace], sweeps: &[LineChart]) -> Document {
    let runs: Vec<(&Run, &Trace)> = comparison.runs.iter().zip(traces).collect();
    let main = &comparison.runs[comparison.main_run_index()];
    let mut opening_blocks = vec![Block::Paragraph(summary::summarise(comparison))];
    opening_blocks.extend(comparison.notes.iter().map(|note| Block::Note(Text::from(note.clone()))));
    let title = Text::default().append_name(&main.model).append_words(" on ").append_name(&main.scenario);
    let mut document = Document { title, opening_blocks, sections: Vec::new() };
    let times_title =
        if comparison.run_comparisons.is_empty() { "Time per token" } else { "Predicted and measured" };
    document.push_section(times_title, "times", times(comparison));
    document.push_section("Published numbers", "published", published::section_blocks(comparison));
    document.push_section("Sequences and drafts", "sequences", sequences::section_blocks(&comparison.runs));
    document.push_section("Events", "events", events::section_blocks(&runs));
    document.push_section("Devices", "devices", devices(&runs));
    document.push_section("A single token", "token", single_token(&runs));
    document.push_section("All tokens", "tokens", all_tokens(&runs));
    document.push_section("Memory", "memory", memory(&runs));
    document.push_section("Scaling", "scaling", scaling(&runs, sweeps));
    document.push_section("Provenance", "provenance", provenance(&runs));
    document
}

fn figure(drawing: Option<Drawing>, caption: &str) -> Option<Block> {
    Some(Block::Figure(drawing?, caption.into()))
}

fn times(comparison: &Comparison) -> Vec<Block> {
    let all: Vec<&Run> = comparison.runs.iter().collect();
    let caption = "The terms of the mean time per token. Hidden disk time is not part of it.";
    let mut blocks = Vec::from_iter(figure(bars::draw_tpot_breakdown(&all), caption));
    let pairs = comparison.run_comparisons.iter();
    blocks.extend(pairs.map(|pair| Block::Table(tables::run_comparison_table(comparison, pair))));
    let unpaired = comparison.unpaired_run_indices();
    if !unpaired.is_empty() {
        blocks.push(Block::Table(tables::side_by_side_table(comparison, &unpaired)));
    }
    let points = parity::comparison_points(comparison);
    let parity = parity::draw_parity_plot("parity", "Predicted and reference times", "ms", &points);
    let caption =
        "Each dot is a predicted time over the measured or published one. Both axes are logarithmic.";
    blocks.extend(figure(parity, caption));
    let meanings =
        terms::SUMMED_TERMS.iter().chain([&terms::HIDDEN_DISK_TIME]).map(|term| (term.label, term.meaning));
    let more = [
        ("TPOT", "Time per output token after the first."),
        ("TTFT", "Time to first token, from the moment the prompt enters the ring."),
        (
            "\u{b1}",
            "Half the width of the 95 % confidence interval of the mean, estimated from the means of up to ten parts of \
             the run. It describes the mean, not the prediction.",
        ),
    ];
    blocks.push(Block::Definitions("Definitions", meanings.chain(more).collect()));
    blocks
}

fn devices(runs: &[(&Run, &Trace)]) -> Vec<Block> {
    let mut blocks = Vec::new();
    let max = runs.iter().map(|(run, _)| bars::max_device_bar_ms(run)).fold(0.0, f64::max);
    for (run, trace) in runs {
        if run.metrics.devices.is_empty() {
            continue;
        }
        let caption = "The ring waits for computing and for disk reads, but not for reading ahead.";
        blocks.extend(figure(bars::draw_device_work(run, trace, max), caption));
        blocks.push(Block::Table(tables::device_table(run)));
    }
    if !blocks.is_empty() {
        blocks.push(Block::Definitions("Definitions", DEVICE_DEFINITIONS.to_vec()));
    }
    blocks
}

const DEVICE_DEFINITIONS: [(&str, &str); 4] = [
    ("Busy", "Time per token in which the device computes, including waits for its disk."),
    ("Demand disk", "The part of the busy time in which the device waits for its own disk."),
    ("Hidden disk", "Reading ahead while the device computes nothing."),
    (
        "Memory pressure",
        "Memory that cannot be reclaimed (KV cache and buffers), as a share of the device's memory.",
    ),
];

fn single_token(runs: &[(&Run, &Trace)]) -> Vec<Block> {
    let medians: Vec<(&Run, &Trace, DecodeStep)> = runs
        .iter()
        .filter_map(|(run, trace)| Some((*run, *trace, median(&TokenTimes::from_trace(trace).decode_steps)?)))
        .filter(|(_, _, token)| token.duration_ns() > 0)
        .collect();
    let durations = || medians.iter().map(|(_, _, token)| token.duration_ns());
    let (longest, shortest) = (durations().max().unwrap_or(0), durations().min().unwrap_or(0));
    let chart = |(run, trace, token): &(&Run, &Trace, DecodeStep)| {
        let span = if longest / MAX_SCALE_RATIO <= shortest { longest } else { token.duration_ns() };
        let caption = format!(
            "Pass {}, the token of median duration. Empty space is waiting. The disk waits of a step are \
             spread over its pages, but are drawn together at its start.",
            token.batch
        );
        Block::Figure(gantt::draw_gantt(run, trace, *token, span), caption.into())
    };
    medians.iter().map(chart).collect()
}

/// Returns the token of median duration (nearest rank); among equal durations, the earliest. A step with
/// accepted draft tokens counts as one token.
fn median(tokens: &[DecodeStep]) -> Option<DecodeStep> {
    let mut sorted = tokens.to_vec();
    sorted.sort_by_key(DecodeStep::duration_ns);
    sorted.get(sorted.len().div_ceil(2).checked_sub(1)?).copied()
}

fn all_tokens(runs: &[(&Run, &Trace)]) -> Vec<Block> {
    let charts = [
        (token_charts::draw_time_series(runs), "The tokens after the first, in order."),
        (
            token_charts::draw_time_distribution(runs),
            "The share of the tokens that took at most a time. The horizontal lines are the median, the 95th percentile and all tokens.",
        ),
    ];
    charts.into_iter().filter_map(|(drawing, caption)| figure(drawing, caption)).collect()
}

fn memory(runs: &[(&Run, &Trace)]) -> Vec<Block> {
    let mut blocks = Vec::new();
    for (run, trace) in runs {
        let caption = "Weights in memory over the run, with the same scale for all devices.";
        blocks.extend(figure(memory_charts::draw_residency(run, trace), caption));
        let caption = "Memory that cannot be reclaimed, as a share of the device's memory: the full height is all of it.";
        blocks.extend(figure(memory_charts::draw_memory_pressure(run, trace), caption));
    }
    blocks
}

fn scaling(runs: &[(&Run, &Trace)], sweeps: &[LineChart]) -> Vec<Block> {
    let own = [("rounds", scaling::tpot_by_rounds(runs)), ("sizes", scaling::tpot_by_model_size(runs))];
    let own = own.into_iter().map(|(id, chart)| figure(chart?.to_drawing(id), "The runs of this report."));
    let caption = "From a sweep. A cross marks a point without a time: it has no plan or runs out of memory.";
    let sweeps = sweeps.iter().zip(1..);
    let sweeps = sweeps.map(|(chart, number)| figure(chart.to_drawing(&format!("sweep-{number}")), caption));
    own.chain(sweeps).flatten().collect()
}

fn provenance(runs: &[(&Run, &Trace)]) -> Vec<Block> {
    let headings = [String::new()].into_iter().chain(runs.iter().map(|(run, _)| run.heading()));
    let row = |label: &str, value: &dyn Fn(&Run, &Trace) -> Text| {
        let mut cells = vec![Text::from(label)];
        cells.extend(runs.iter().map(|(run, trace)| value(run, trace)));
        cells
    };
    let rows = vec![
        row("Scenario", &|run, _| Text::default().append_name(&run.scenario)),
        row("Model", &|run, _| Text::default().append_name(&run.model)),
        row("Plan", &|run, _| Text::default().append_code(&run.plan_digest)),
        row("Seed", &|run, _| Text::from(run.metrics.seed.to_string())),
        row("Version", &|_, trace| {
            Text::default().append_name(escape::sanitize_name(&trace.header.program_version))
        }),
        row("Outcome", &|run, _| Text::from(outcome(run))),
        row("Tokens after the first", &|run, _| Text::from(run.decoded_tokens.to_string())),
        row("Recorded steps", &|_, trace| Text::from(trace.records.len().to_string())),
    ];
    let mut blocks =
        vec![Block::Table(Table::new("The runs of this report.", headings, rows).with_only_text_columns())];
    blocks.extend(runs.iter().filter_map(|(run, trace)| device_origins(run, trace).into_block()));
    blocks.push(Block::Paragraph(rebuild(runs)));
    blocks
}

fn outcome(run: &Run) -> &'static str {
    match run.metrics.outcome {
        Outcome::Ok => "finished",
        ended => ended.label(),
    }
}

fn device_origins(run: &Run, trace: &Trace) -> Table {
    let sentence = |value: &Option<String>, otherwise: &str| match value {
        Some(value) => Text::default().append_name(escape::sanitize_sentence(value)),
        None => Text::from(otherwise),
    };
    let digest = |value: &Option<String>| match value {
        Some(value) => Text::default().append_code(escape::sanitize_name(value)),
        None => Text::from("not recorded"),
    };
    let row = |device: &TracedDevice| {
        vec![
            Text::default().append_name(escape::sanitize_name(&device.name)),
            digest(&device.profile_digest),
            sentence(&device.os_and_kernel, "not recorded"),
            Text::from_option(device.page_cache_policy.map(PageCachePolicy::name)),
            sentence(&device.unvalidated_parts, NO_VALUE),
        ]
    };
    let caption = format!("{}: profiles and operating systems of the devices.", run.heading());
    let headings = ["Device", "Profile", "Operating system", "Page cache", "Not validated"];
    Table::new(caption, headings, trace.header.devices.iter().map(row)).with_only_text_columns()
}

fn rebuild(runs: &[(&Run, &Trace)]) -> Text {
    let files: Vec<String> = runs.iter().map(|(run, _)| format!("{}.trace", run.label)).collect();
    let mut text = Text::from(format!(
        "All numbers of this report are computed from its {}. hearth {} made it; the same version makes the same \
         bytes from the same traces: ",
        if runs.len() == 1 { "trace" } else { "traces" },
        env!("CARGO_PKG_VERSION")
    ))
    .append_code(format!("hearth report {} -o report/", files.join(" ")))
    .append_words(". ");
    if let Some((run, _)) = runs.iter().find(|(run, _)| run.origin == Origin::Simulated) {
        text = text
            .append_words("A simulated trace can be reproduced from its scenario and plan: ")
            .append_code(format!(
                "hearth simulate SCENARIO --plan PLAN --seed {} --trace {}.trace",
                run.metrics.seed, run.label
            ))
            .append_words(". ");
    }
    if runs.iter().any(|(run, _)| run.origin == Origin::Measured) {
        text = text.append_words("A measured trace cannot be reproduced exactly; keep the file. ");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(batch: u32, end_ns: u64) -> DecodeStep {
        let (sequence, start_ns, accepted_drafts, drafted, was_interrupted) = (0, 0, 0, 0, false);
        DecodeStep { batch, sequence, start_ns, end_ns, accepted_drafts, drafted, was_interrupted }
    }

    #[test]
    fn median_is_the_nearest_rank() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[token(1, 9), token(2, 3), token(3, 5)]).map(|token| token.batch), Some(3));
        // Of two tokens the shorter one is the median, as in the metrics.
        assert_eq!(median(&[token(1, 9), token(2, 3)]).map(|token| token.batch), Some(2));
    }
}
