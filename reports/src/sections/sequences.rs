//! The section on concurrent sequences and on speculative decoding.
//!
//! It is empty for runs of one sequence without drafts.
//!
//! Not here: computing the metrics ([`hearth_core::metrics::sequences`]).

use hearth_core::metrics::sequences::{SequenceMetrics, SpeculationMetrics};

use crate::comparison::Run;
use crate::document::{Block, NO_VALUE, Section, Table, Text};
use crate::text::numbers::{FixedPoint, digits_for};

/// Maximum number of sequences that are listed.
const MAX_LISTED: usize = 32;

const DEFINITIONS: [(&str, &str); 4] = [
    (
        "TTFT of a sequence",
        "From the start of the run, when all sequences are requested, to the first token of the sequence, including the \
         time in which earlier prompts are read.",
    ),
    (
        "Tokens per step",
        "Tokens from a pass with drafts: the accepted drafts and one token of the large model.",
    ),
    (
        "Acceptance",
        "The share of accepted drafts among those that were verified; drafts after the first rejected one are not verified.",
    ),
    ("Drafting, verifying", "The parts of the mean time per token in which the head drafts, and the rest."),
];

/// Returns the section on these runs; it has no blocks for runs of one sequence without drafts.
pub fn section<'r>(runs: impl Iterator<Item = &'r Run> + Clone) -> Section {
    let mut blocks: Vec<Block> = runs.clone().filter_map(|run| sequences(run).block()).collect();
    blocks.extend(
        runs.filter_map(|run| Some(Block::Table(speculation(run, run.metrics.speculation.as_ref()?)))),
    );
    if !blocks.is_empty() {
        blocks.push(Block::Definitions("Definitions", DEFINITIONS.to_vec()));
    }
    Section { title: "Sequences and drafts".into(), anchor: "sequences", blocks }
}

fn milliseconds(value: f64) -> Text {
    Text::from(FixedPoint::new(value, digits_for(value)).text())
}

fn sequences(run: &Run) -> Table {
    let all = &run.metrics.sequences;
    let row = |one: &SequenceMetrics| {
        vec![
            Text::from(one.sequence.to_string()),
            milliseconds(one.ttft_ms),
            one.tpot_ms.map_or_else(|| Text::from(NO_VALUE), milliseconds),
            Text::from(one.tokens.to_string()),
        ]
    };
    let more = match all.len().saturating_sub(MAX_LISTED) {
        0 => String::new(),
        more => format!(" {more} more are not listed."),
    };
    let caption = format!("{}: {} sequences at once.{more}", run.heading(), all.len());
    let headings = ["Sequence", "TTFT, ms", "TPOT, ms", "Tokens after the first"];
    Table::new(caption, headings, all.iter().take(MAX_LISTED).map(row))
}

fn speculation(run: &Run, speculation: &SpeculationMetrics) -> Table {
    let SpeculationMetrics { steps, tokens_per_step, drafted, accepted, acceptance, draft_ms, verify_ms } =
        *speculation;
    let rows = [
        ("Steps with drafts", Text::from(steps.to_string())),
        ("Tokens per step", Text::from(FixedPoint::new(tokens_per_step, 2).text())),
        ("Drafted tokens", Text::from(drafted.to_string())),
        ("Accepted", Text::from(accepted.to_string())),
        ("Acceptance, %", Text::from(FixedPoint::new(100.0 * acceptance, 1).text())),
        ("Drafting, ms per token", milliseconds(draft_ms)),
        ("Verifying, ms per token", milliseconds(verify_ms)),
    ];
    let caption = format!("{}: speculative decoding.", run.heading());
    Table::new(caption, ["Quantity", "Value"], rows.map(|(name, value)| vec![Text::from(name), value]))
}
