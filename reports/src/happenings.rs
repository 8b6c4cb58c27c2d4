//! What happened during a run, and what did it cost?
//!
//! A table of what a trace says has happened, with the time of a token before, meanwhile and after; another of the
//! memory pressure of the devices from which others took memory; a sentence for what a departure cost; and places of
//! happenings for drawings.
//!
//! Not here: the numbers ([`hearth_schema::happenings`]).

use hearth_core::metrics::around::Around;
use hearth_core::metrics::around::Phases;
use hearth_core::metrics::around::around;
use hearth_schema::Trace;
use hearth_schema::happenings::Happening;
use hearth_schema::happenings::Sort;

use crate::comparison::Run;
use crate::document::{Block, Section, Table, Text, Weight};
use crate::escape;
use crate::rounding;

/// What a table shows where there is no token.
const NOTHING: &str = "\u{2013}";

/// The section of all runs in which something happened.
pub fn section(runs: &[(&Run, &Trace)]) -> Section {
    let mut blocks = Vec::new();
    for (run, trace) in runs.iter().filter(|(_, trace)| !trace.happenings.is_empty()) {
        let told: Vec<(&Happening, Around)> =
            trace.happenings.iter().map(|happening| (happening, around(trace, happening))).collect();
        blocks.push(Block::Table(times(run, &told)));
        blocks.extend(pressure(run, &told).map(Block::Table));
        blocks.extend(departures(trace, &told).map(Block::Paragraph));
    }
    if !blocks.is_empty() {
        blocks.push(Block::Meanings("What the columns mean", MEANINGS.to_vec()));
    }
    Section { title: "What happened".into(), anchor: "events", blocks }
}

const MEANINGS: [(&str, &str); 3] = [
    ("Before", "Tokens that were out before it began."),
    ("Meanwhile", "Tokens of which a part lay within it."),
    ("After", "Tokens begun after it ended."),
];

fn times(run: &Run, told: &[(&Happening, Around)]) -> Table {
    let rows = told
        .iter()
        .map(|(happening, around)| {
            let time = |nanos: u64| Text::from(rounding::milliseconds(nanos as f64 * 1e-6));
            let cell = |value: Option<f64>| Text::from(value.map_or(NOTHING.into(), rounding::milliseconds));
            let Phases { before, beside, after } = around.tpot_ms;
            let cells = vec![
                name(happening),
                time(happening.start),
                happening.end.map_or_else(|| Text::from("the end"), time),
                cell(before),
                cell(beside),
                cell(after),
                cell(around.longest_ms.beside),
            ];
            (Weight::Plain, cells)
        })
        .collect();
    Table {
        caption: Text::from(format!(
            "{}: what happened, and the mean time of a token around it.",
            run.heading()
        )),
        head: ["", "From", "To", "Before", "Meanwhile", "After", "Longest meanwhile"]
            .map(String::from)
            .to_vec(),
        rows,
        wordy: false,
    }
}

/// A happening in words.
fn name(happening: &Happening) -> Text {
    let mut text = Text::default();
    if let Some(device) = &happening.device {
        text = text.name(escape::name(device)).words(": ");
    }
    text = text.words(happening.sort.phrase());
    if happening.what.is_empty() {
        text
    } else {
        text.words(" (").name(escape::phrase(&happening.what)).words(")")
    }
}

/// The same without marks, for a drawing or a time line.
pub fn plain(happening: &Happening) -> String {
    name(happening).plain()
}

fn pressure(run: &Run, told: &[(&Happening, Around)]) -> Option<Table> {
    let rows: Vec<(Weight, Vec<Text>)> = told
        .iter()
        .filter(|(happening, _)| happening.sort == Sort::Memory)
        .map(|(happening, around)| {
            let cell = |value: Option<f64>| Text::from(value.map_or(NOTHING.into(), rounding::percent));
            let Phases { before, beside, after } = around.pressure;
            (Weight::Plain, vec![name(happening), cell(before), cell(beside), cell(after)])
        })
        .collect();
    (!rows.is_empty()).then(|| Table {
        caption: Text::from(format!("{}: the highest memory pressure of the device.", run.heading())),
        head: ["", "Before", "Meanwhile", "After"].map(String::from).to_vec(),
        rows,
        wordy: false,
    })
}

/// What it cost that a device was missed: how long nobody noticed, how long the new ring took to its first token.
fn departures(trace: &Trace, told: &[(&Happening, Around)]) -> Option<Text> {
    let mut text = Text::default();
    for (silent, _) in told.iter().filter(|(happening, _)| happening.sort == Sort::Silent) {
        let Some(noticed) = silent.end else { continue };
        let again = trace.happenings.iter().find(|it| it.sort == Sort::Replanned && it.start == noticed);
        let device = silent.device.as_deref().unwrap_or("the ring");
        let millis = |from: u64, to: u64| rounding::milliseconds(to.saturating_sub(from) as f64 * 1e-6);
        text = text
            .name(escape::name(device))
            .words(format!(" was missed {} after it fell silent", millis(silent.start, noticed)));
        text = match again.and_then(|it| it.end) {
            Some(back) => text.words(format!(
                "; the first token of the new ring was out {} later, {} after the silence began. ",
                millis(noticed, back),
                millis(silent.start, back)
            )),
            None => text.words("; no token came after that. "),
        };
    }
    (!text.0.is_empty()).then_some(text)
}

/// The moments at which something began or ended, in nanoseconds.
pub fn moments(trace: &Trace) -> Vec<u64> {
    let mut moments: Vec<u64> = trace
        .happenings
        .iter()
        .flat_map(|happening| [Some(happening.start), happening.end])
        .flatten()
        .collect();
    moments.sort_unstable();
    moments.dedup();
    moments
}
