//! The section on concurrent sequences and on speculative decoding.

use hearth_core::metrics::sequences::{SequenceMetrics, SpeculationMetrics};

use crate::comparison::Run;
use crate::document::{Block, Table, Text};
use crate::text::numbers::{FixedPoint, decimal_places_for};

const MAX_LISTED: usize = 32;

const DEFINITIONS: [(&str, &str); 4] = [
    (
        "TTFT of a sequence",
        "From the start of the run, when all sequences are requested, to the first token of the sequence, including the \
         time in which earlier prompts are read.",
    ),
    (
        "Tokens per step",
        "Tokens from a pass with drafts: the accepted drafts and one token of the target model.",
    ),
    (
        "Acceptance",
        "The share of accepted drafts among those that were verified; drafts after the first rejected one are not verified.",
    ),
    ("Drafting, verifying", "The parts of the mean time per token in which the head drafts, and the rest."),
];

/// Returns the blocks of the section; empty for runs of one sequence without drafts.
pub fn section_blocks(runs: &[Run]) -> Vec<Block> {
    let mut blocks: Vec<Block> = runs.iter().filter_map(|run| sequences(run).into_block()).collect();
    let speculation = |run: &Run| Some(Block::Table(speculation(run, run.metrics.speculation.as_ref()?)));
    blocks.extend(runs.iter().filter_map(speculation));
    if !blocks.is_empty() {
        blocks.push(Block::Definitions("Definitions", DEFINITIONS.to_vec()));
    }
    blocks
}

fn milliseconds(value: f64) -> String {
    FixedPoint::new(value, decimal_places_for(value)).to_text()
}

fn sequences(run: &Run) -> Table {
    let all = &run.metrics.sequences;
    let row = |one: &SequenceMetrics| {
        vec![
            Text::from(one.sequence.to_string()),
            Text::from(milliseconds(one.ttft_ms)),
            Text::from_option(one.tpot_ms.map(milliseconds)),
            Text::from(one.decoded_tokens.to_string()),
        ]
    };
    let more = match all.len().saturating_sub(MAX_LISTED) {
        0 => String::new(),
        more => format!(" {more} of them are not listed."),
    };
    let caption = format!("{}: {} sequences at once.{more}", run.heading(), all.len());
    let headings = ["Sequence", "TTFT, ms", "TPOT, ms", "Tokens after the first"];
    Table::new(caption, headings, all.iter().take(MAX_LISTED).map(row))
}

fn speculation(run: &Run, speculation: &SpeculationMetrics) -> Table {
    let rows = [
        ("Steps with drafts", speculation.steps.to_string()),
        ("Tokens per step", FixedPoint::new(speculation.tokens_per_step, 2).to_text()),
        ("Drafted tokens", speculation.drafted.to_string()),
        ("Accepted", speculation.accepted_drafts.to_string()),
        ("Acceptance, %", FixedPoint::new(100.0 * speculation.acceptance, 1).to_text()),
        ("Drafting, ms per token", milliseconds(speculation.draft_ms)),
        ("Verifying, ms per token", milliseconds(speculation.verify_ms)),
    ];
    let caption = format!("{}: speculative decoding.", run.heading());
    Table::new(caption, ["Quantity", "Value"], rows.map(|(name, value)| vec![name.into(), value.into()]))
}
