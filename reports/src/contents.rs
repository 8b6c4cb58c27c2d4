//! Which sections does a report have, and in which order?
//!
//! What a reader asks first comes first: how fast and why (summary), how good the prediction is, which
//! device does what, what happened meanwhile, what a token looks like, how even the tokens are, how the time follows
//! rounds and model, and where it all comes from.
//!
//! Not here: what a section looks like ([`crate::page`], [`crate::markdown`]).

use hearth_profiles::device::PageCachePolicy;
use hearth_schema::Trace;
use hearth_schema::trace::Origin;
use hearth_schema::trace::Outcome;

use crate::comparison::{Comparison, Run};
use crate::document::{Block, Document, Figure, Section, Table, Text, Weight};
use crate::lines::Lines;
use crate::published::beside;
use crate::svg::Drawing;
use crate::tokens::{self, Token};
use crate::{against, charts, drafting, escape, gantt, happenings, parity, summary, tables, terms};

/// Runs whose longest and shortest token differ by more than this are drawn in scales of their own.
const SAME_SCALE: u64 = 4;

/// The whole report.
pub fn of(comparison: &Comparison, traces: &[Trace], sweeps: &[Lines]) -> Document {
    let runs: Vec<(&Run, &Trace)> = comparison.runs.iter().zip(traces).collect();
    let leading = &comparison.runs[comparison.leading()];
    let mut opening = vec![Block::Paragraph(summary::of(comparison))];
    opening.extend(comparison.notes.iter().map(|note| Block::Note(Text::from(note.clone()))));
    let sections = [
        times(comparison),
        beside::section(comparison),
        drafting::section(comparison.runs.iter()),
        happenings::section(&runs),
        devices(&runs),
        one_token(&runs),
        every_token(&runs),
        memory(&runs),
        against(&runs, sweeps),
    ];
    let mut sections: Vec<Section> =
        sections.into_iter().filter(|section| !section.blocks.is_empty()).collect();
    sections.push(provenance(&runs));
    Document {
        title: Text::default().name(&leading.model).words(" on ").name(&leading.scenario),
        opening,
        sections,
    }
}

fn figure(drawing: Drawing, name: impl Into<String>, caption: &str) -> Block {
    Block::Figure(Figure { name: name.into(), drawing, caption: Text::from(caption) })
}

fn times(comparison: &Comparison) -> Section {
    let mut blocks = Vec::new();
    let all: Vec<&Run> = comparison.runs.iter().collect();
    if let Some(drawing) = charts::breakdown(&all) {
        let caption = "The terms of the mean token's time. Hidden disk time is not part of it.";
        blocks.push(figure(drawing, "breakdown", caption));
    }
    blocks.extend(comparison.pairs.iter().map(|pair| Block::Table(tables::pair(comparison, pair))));
    let single = comparison.single();
    if !single.is_empty() {
        blocks.push(Block::Table(tables::side_by_side(comparison, &single)));
    }
    if let Some(drawing) = parity::draw(&parity::dots(comparison)) {
        let caption =
            "Upwards what was predicted, across what was measured or published, both in equal ratios.";
        blocks.push(figure(drawing, "parity", caption));
    }
    let meanings = terms::SUMMED.iter().chain([&terms::HIDDEN]).map(|term| (term.label, term.meaning));
    let more = [
        ("TPOT", "Time per output token, of the tokens after the first."),
        ("TTFT", "Time to the first token, from when the prompt entered the ring."),
        (
            "\u{b1}",
            "Half the interval that holds the mean of an endless run in 95 of 100 cases, by the means of up to ten \
             stretches of the run. It says how sure the mean is, not how sure the prediction.",
        ),
    ];
    blocks.push(Block::Meanings("What the terms mean", meanings.chain(more).collect()));
    let title = if comparison.pairs.is_empty() { "Time per token" } else { "Predicted and measured" };
    Section { title: title.into(), anchor: "times", blocks }
}

fn devices(runs: &[(&Run, &Trace)]) -> Section {
    let mut blocks = Vec::new();
    let most = runs.iter().map(|(run, _)| charts::longest(run)).fold(0.0, f64::max);
    for (run, trace) in runs {
        if run.metrics.devices.is_empty() {
            continue;
        }
        if let Some(drawing) = charts::devices(run, trace, most) {
            let caption = "Computing and waiting for the disk make the ring wait; reading ahead does not.";
            blocks.push(figure(drawing, format!("devices-{}", run.label), caption));
        }
        blocks.push(Block::Table(tables::devices(run)));
    }
    if !blocks.is_empty() {
        blocks.push(Block::Meanings("What the columns mean", DEVICE_MEANINGS.to_vec()));
    }
    Section { title: "Devices".into(), anchor: "devices", blocks }
}

const DEVICE_MEANINGS: [(&str, &str); 4] = [
    ("Busy", "Time of each token in which the device computed, disk waits included."),
    ("Demand disk", "The part of it that was waiting for the device's own disk."),
    ("Hidden disk", "Reading ahead while the device computed nothing."),
    (
        "Memory pressure",
        "Key-value cache and buffers, which cannot be dropped, over the memory the device has.",
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
        let span = if longest / SAME_SCALE <= shortest { longest } else { token.duration() };
        let caption = format!(
            "Pass {}, the token of median duration. Empty is waiting. Disk waits of a step lie between its \
             pages; they are drawn at its start.",
            token.pass
        );
        blocks.push(figure(gantt::draw(run, trace, *token, span), format!("gantt-{}", run.label), &caption));
    }
    Section { title: "One token".into(), anchor: "token", blocks }
}

fn every_token(runs: &[(&Run, &Trace)]) -> Section {
    let mut blocks = Vec::new();
    if let Some(drawing) = charts::every_token(runs) {
        blocks.push(figure(drawing, "tokens", "The tokens after the first, in order."));
    }
    if let Some(drawing) = charts::spread(runs) {
        blocks.push(figure(
            drawing,
            "spread",
            "The lines across are the median, the 95th percentile and all tokens.",
        ));
    }
    Section { title: "Every token".into(), anchor: "tokens", blocks }
}

fn memory(runs: &[(&Run, &Trace)]) -> Section {
    let mut blocks = Vec::new();
    for (run, trace) in runs {
        if let Some(drawing) = charts::residency(run, trace) {
            let caption = "Bytes of weights in memory over the run, on one scale for all devices.";
            blocks.push(figure(drawing, format!("residency-{}", run.label), caption));
        }
        if let Some(drawing) = charts::pressure(run, trace) {
            let caption =
                "What cannot be taken back, of the memory each device has: the whole height is all of it.";
            blocks.push(figure(drawing, format!("pressure-{}", run.label), caption));
        }
    }
    Section { title: "Weights in memory".into(), anchor: "memory", blocks }
}

fn against(runs: &[(&Run, &Trace)], sweeps: &[Lines]) -> Section {
    let own = [("rounds", against::rounds(runs)), ("sizes", against::sizes(runs))];
    let own =
        own.into_iter().filter_map(|(name, lines)| Some((name.to_owned(), lines?, "From the runs above.")));
    let caption =
        "From the table of a sweep. A cross stands where a point has no time: no plan, or no memory.";
    let tables = sweeps.iter().enumerate();
    let tables = tables.map(|(index, lines)| (format!("sweep-{}", index + 1), lines.clone(), caption));
    let blocks = own.chain(tables);
    let blocks =
        blocks.filter_map(|(name, lines, caption)| Some(figure(lines.drawing(&name)?, name, caption)));
    Section { title: "What it depends on".into(), anchor: "against", blocks: blocks.collect() }
}

fn provenance(runs: &[(&Run, &Trace)]) -> Section {
    let mut blocks = Vec::new();
    let mut head = vec![String::new()];
    head.extend(runs.iter().map(|(run, _)| run.heading()));
    let row = |label: &str, value: &dyn Fn(&Run, &Trace) -> Text| {
        let mut cells = vec![Text::from(label)];
        cells.extend(runs.iter().map(|(run, trace)| value(run, trace)));
        (Weight::Plain, cells)
    };
    let rows = vec![
        row("Scenario", &|run, _| Text::default().name(&run.scenario)),
        row("Model", &|run, _| Text::default().name(&run.model)),
        row("Plan", &|run, _| Text::default().code(&run.plan)),
        row("Seed", &|run, _| Text::from(run.metrics.seed.to_string())),
        row("Version", &|_, trace| Text::default().name(escape::name(&trace.header.version))),
        row("Outcome", &|run, _| Text::from(outcome(run))),
        row("Tokens after the first", &|run, _| Text::from(run.tokens.to_string())),
        row("Steps recorded", &|_, trace| Text::from(trace.records.len().to_string())),
    ];
    blocks.push(Block::Table(Table { caption: Text::from("The runs."), head, rows, wordy: true }));
    blocks.extend(
        runs.iter()
            .filter(|(_, trace)| !trace.header.devices.is_empty())
            .map(|(run, trace)| Block::Table(device_origins(run, trace))),
    );
    blocks.push(Block::Paragraph(rebuild(runs)));
    Section { title: "Provenance".into(), anchor: "provenance", blocks }
}

fn outcome(run: &Run) -> &'static str {
    match run.metrics.outcome {
        Outcome::Ok => "finished",
        ended => ended.word(),
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
    let rows = trace
        .header
        .devices
        .iter()
        .map(|device| {
            let cells = vec![
                Text::default().name(escape::name(&device.name)),
                digest(&device.profile, "not recorded"),
                given(&device.kernel, "not recorded"),
                Text::from(device.policy.map_or("\u{2013}", PageCachePolicy::name)),
                given(&device.unvalidated, "\u{2013}"),
            ];
            (Weight::Plain, cells)
        })
        .collect();
    Table {
        caption: Text::from(format!("{}: the devices' profiles and systems.", run.heading())),
        head: ["Device", "Profile", "System", "Page cache", "Unvalidated"].map(String::from).to_vec(),
        rows,
        wordy: true,
    }
}

fn rebuild(runs: &[(&Run, &Trace)]) -> Text {
    let files: Vec<String> = runs.iter().map(|(run, _)| format!("{}.trace", run.label)).collect();
    let mut text = Text::from(format!(
        "This report holds nothing that is not in its {}. hearth {} made it; the same version makes the same \
         bytes from the same traces: ",
        if runs.len() == 1 { "trace" } else { "traces" },
        env!("CARGO_PKG_VERSION")
    ))
    .code(format!("hearth report {} -o report/", files.join(" ")))
    .words(". ");
    if let Some((run, _)) = runs.iter().find(|(run, _)| run.origin == Origin::Simulated) {
        text = text
            .words("A simulated trace can be made again from its scenario and plan: ")
            .code(format!(
                "hearth simulate SCENARIO --plan PLAN --seed {} --trace {}.trace",
                run.metrics.seed, run.label
            ))
            .words(". ");
    }
    if runs.iter().any(|(run, _)| run.origin == Origin::Measured) {
        text = text.words("A measured trace cannot be made again, only measured again; keep the file. ");
    }
    text
}
