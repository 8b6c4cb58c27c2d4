//! The sections of a report on traces, in reading order.
//!
//! They are: summary, predicted and measured times, published numbers, sequences and drafts, events, devices, a
//! single token, all tokens, memory, scaling with rounds and model size, and provenance.
//!
//! Not here: how a section is printed ([`crate::document`]).

mod events;
mod published;
mod scaling;
mod sequences;
mod summary;
pub mod tables;

use hearth_profiles::device::PageCachePolicy;
use hearth_schema::Trace;
use hearth_schema::trace::{Origin, Outcome, TracedDevice};

use crate::charts::drawing::Drawing;
use crate::charts::lines::LineChart;
use crate::charts::{bars, gantt, memory as memory_charts, parity, tokens as token_charts};
use crate::comparison::{Comparison, Run, terms};
use crate::document::{Block, Document, Figure, NO_VALUE, Section, Table, Text};
use crate::text::escape;
use crate::timeline::tokens::{self, Token};

/// Maximum ratio of the median tokens of two runs that are drawn with a common time scale.
const MAX_SCALE_RATIO: u64 = 4;

pub fn document(comparison: &Comparison, traces: &[Trace], sweeps: &[LineChart]) -> Document {
    let runs: Vec<(&Run, &Trace)> = comparison.runs.iter().zip(traces).collect();
    let main = &comparison.runs[comparison.main_run()];
    let mut opening_blocks = vec![Block::Paragraph(summary::of(comparison))];
    opening_blocks.extend(comparison.notes.iter().map(|note| Block::Note(Text::from(note.clone()))));
    let sections = [
        times(comparison),
        published::section(comparison),
        sequences::section(comparison.runs.iter()),
        events::section(&runs),
        devices(&runs),
        one_token(&runs),
        every_token(&runs),
        memory(&runs),
        dependence(&runs, sweeps),
    ];
    let mut sections: Vec<Section> =
        sections.into_iter().filter(|section| !section.blocks.is_empty()).collect();
    sections.push(provenance(&runs));
    Document {
        title: Text::default().name(&main.model).words(" on ").name(&main.scenario),
        opening_blocks,
        sections,
    }
}

fn figure(drawing: Drawing, name: impl Into<String>, caption: &str) -> Block {
    Block::Figure(Figure { name: name.into(), drawing, caption: Text::from(caption) })
}

fn times(comparison: &Comparison) -> Section {
    let mut blocks = Vec::new();
    let all: Vec<&Run> = comparison.runs.iter().collect();
    if let Some(drawing) = bars::breakdown(&all) {
        let caption = "The terms of the mean time per token. Hidden disk time is not part of it.";
        blocks.push(figure(drawing, "breakdown", caption));
    }
    blocks.extend(comparison.pairs.iter().map(|pair| Block::Table(tables::pair_table(comparison, pair))));
    let unpaired = comparison.unpaired();
    if !unpaired.is_empty() {
        blocks.push(Block::Table(tables::side_by_side(comparison, &unpaired)));
    }
    if let Some(drawing) =
        parity::draw("parity", "Predicted and reference times", "ms", &parity::dots(comparison))
    {
        let caption =
            "Each dot is a predicted time over the measured or published one. Both axes are logarithmic.";
        blocks.push(figure(drawing, "parity", caption));
    }
    let meanings =
        terms::SUMMED_TERMS.iter().chain([&terms::HIDDEN_DISK]).map(|term| (term.label, term.meaning));
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
    let title = if comparison.pairs.is_empty() { "Time per token" } else { "Predicted and measured" };
    Section { title: title.into(), anchor: "times", blocks }
}

fn devices(runs: &[(&Run, &Trace)]) -> Section {
    let mut blocks = Vec::new();
    let max = runs.iter().map(|(run, _)| bars::max_length(run)).fold(0.0, f64::max);
    for (run, trace) in runs {
        if run.metrics.devices.is_empty() {
            continue;
        }
        if let Some(drawing) = bars::devices(run, trace, max) {
            let caption = "The ring waits for computing and for disk reads, but not for reading ahead.";
            blocks.push(figure(drawing, format!("devices-{}", run.label), caption));
        }
        blocks.push(Block::Table(tables::devices(run)));
    }
    if !blocks.is_empty() {
        blocks.push(Block::Definitions("Definitions", DEVICE_DEFINITIONS.to_vec()));
    }
    Section { title: "Devices".into(), anchor: "devices", blocks }
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

fn one_token(runs: &[(&Run, &Trace)]) -> Section {
    let medians: Vec<(&Run, &Trace, Token)> = runs
        .iter()
        .filter_map(|(run, trace)| Some((*run, *trace, tokens::median(&tokens::of(trace))?)))
        .filter(|(_, _, token)| token.duration() > 0)
        .collect();
    let durations = || medians.iter().map(|(_, _, token)| token.duration());
    let (longest, shortest) = (durations().max().unwrap_or(0), durations().min().unwrap_or(0));
    let mut blocks = Vec::new();
    for (run, trace, token) in &medians {
        let span = if longest / MAX_SCALE_RATIO <= shortest { longest } else { token.duration() };
        let caption = format!(
            "Pass {}, the token of median duration. Empty space is waiting. Disk waits of a step, which are between \
             its pages, are drawn at its start.",
            token.pass
        );
        blocks.push(figure(gantt::draw(run, trace, *token, span), format!("gantt-{}", run.label), &caption));
    }
    Section { title: "A single token".into(), anchor: "token", blocks }
}

fn every_token(runs: &[(&Run, &Trace)]) -> Section {
    let mut blocks = Vec::new();
    if let Some(drawing) = token_charts::time_series(runs) {
        blocks.push(figure(drawing, "tokens", "The tokens after the first, in order."));
    }
    if let Some(drawing) = token_charts::distribution(runs) {
        blocks.push(figure(
            drawing,
            "spread",
            "The share of the tokens that took at most a time. The horizontal lines are the median, the 95th percentile and all tokens.",
        ));
    }
    Section { title: "All tokens".into(), anchor: "tokens", blocks }
}

fn memory(runs: &[(&Run, &Trace)]) -> Section {
    let mut blocks = Vec::new();
    for (run, trace) in runs {
        if let Some(drawing) = memory_charts::residency(run, trace) {
            let caption = "Weights in memory over the run, with the same scale for all devices.";
            blocks.push(figure(drawing, format!("residency-{}", run.label), caption));
        }
        if let Some(drawing) = memory_charts::pressure(run, trace) {
            let caption = "Memory that cannot be reclaimed, as a share of the device's memory: the full height is all of it.";
            blocks.push(figure(drawing, format!("pressure-{}", run.label), caption));
        }
    }
    Section { title: "Memory".into(), anchor: "memory", blocks }
}

fn dependence(runs: &[(&Run, &Trace)], sweeps: &[LineChart]) -> Section {
    let own = [("rounds", scaling::rounds(runs)), ("sizes", scaling::model_sizes(runs))];
    let own = own
        .into_iter()
        .filter_map(|(name, lines)| Some((name.to_owned(), lines?, "The runs of this report.")));
    let caption = "From a sweep. A cross marks a point without a time: it has no plan or runs out of memory.";
    let tables = sweeps.iter().enumerate();
    let tables = tables.map(|(index, lines)| (format!("sweep-{}", index + 1), lines.clone(), caption));
    let blocks = own.chain(tables);
    let blocks =
        blocks.filter_map(|(name, lines, caption)| Some(figure(lines.drawing(&name)?, name, caption)));
    Section { title: "Scaling".into(), anchor: "scaling", blocks: blocks.collect() }
}

fn provenance(runs: &[(&Run, &Trace)]) -> Section {
    let headings = [String::new()].into_iter().chain(runs.iter().map(|(run, _)| run.heading()));
    let row = |label: &str, value: &dyn Fn(&Run, &Trace) -> Text| {
        let mut cells = vec![Text::from(label)];
        cells.extend(runs.iter().map(|(run, trace)| value(run, trace)));
        cells
    };
    let rows = vec![
        row("Scenario", &|run, _| Text::default().name(&run.scenario)),
        row("Model", &|run, _| Text::default().name(&run.model)),
        row("Plan", &|run, _| Text::default().code(&run.plan_digest)),
        row("Seed", &|run, _| Text::from(run.metrics.seed.to_string())),
        row("Version", &|_, trace| Text::default().name(escape::name(&trace.header.version))),
        row("Outcome", &|run, _| Text::from(outcome(run))),
        row("Tokens after the first", &|run, _| Text::from(run.decoded_tokens.to_string())),
        row("Recorded steps", &|_, trace| Text::from(trace.records.len().to_string())),
    ];
    let mut blocks = vec![Block::Table(Table::new("The runs of this report.", headings, rows).all_text())];
    blocks.extend(runs.iter().filter_map(|(run, trace)| device_origins(run, trace).block()));
    blocks.push(Block::Paragraph(rebuild(runs)));
    Section { title: "Provenance".into(), anchor: "provenance", blocks }
}

fn outcome(run: &Run) -> &'static str {
    match run.metrics.outcome {
        Outcome::Ok => "finished",
        ended => ended.label(),
    }
}

fn device_origins(run: &Run, trace: &Trace) -> Table {
    let given = |value: &Option<String>, otherwise: &str| match value {
        Some(value) => Text::default().name(escape::phrase(value)),
        None => Text::from(otherwise.to_owned()),
    };
    let digest = |value: &Option<String>, otherwise: &str| match value {
        Some(value) => Text::default().code(escape::name(value)),
        None => Text::from(otherwise.to_owned()),
    };
    let row = |device: &TracedDevice| {
        vec![
            Text::default().name(escape::name(&device.name)),
            digest(&device.profile_digest, "not recorded"),
            given(&device.kernel, "not recorded"),
            Text::from(device.policy.map_or(NO_VALUE, PageCachePolicy::name)),
            given(&device.unvalidated, NO_VALUE),
        ]
    };
    let caption = format!("{}: profiles and operating systems of the devices.", run.heading());
    let headings = ["Device", "Profile", "Operating system", "Page cache", "Not validated"];
    Table::new(caption, headings, trace.header.devices.iter().map(row)).all_text()
}

fn rebuild(runs: &[(&Run, &Trace)]) -> Text {
    let files: Vec<String> = runs.iter().map(|(run, _)| format!("{}.trace", run.label)).collect();
    let mut text = Text::from(format!(
        "All numbers of this report are computed from its {}. hearth {} made it; the same version makes the same \
         bytes from the same traces: ",
        if runs.len() == 1 { "trace" } else { "traces" },
        env!("CARGO_PKG_VERSION")
    ))
    .code(format!("hearth report {} -o report/", files.join(" ")))
    .words(". ");
    if let Some((run, _)) = runs.iter().find(|(run, _)| run.origin == Origin::Simulated) {
        text = text
            .words("A simulated trace can be reproduced from its scenario and plan: ")
            .code(format!(
                "hearth simulate SCENARIO --plan PLAN --seed {} --trace {}.trace",
                run.metrics.seed, run.label
            ))
            .words(". ");
    }
    if runs.iter().any(|(run, _)| run.origin == Origin::Measured) {
        text = text.words("A measured trace cannot be reproduced exactly; keep the file. ");
    }
    text
}
