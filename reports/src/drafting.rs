//! How did each of several sequences do, and what did drafting bring?
//!
//! Nothing for runs of one sequence without drafts, which the other tables describe.
//!
//! Not here: how these numbers are computed (`hearth_core::metrics::sequences`).

use hearth_core::metrics::sequences::SpeculationMetrics;

use crate::comparison::Run;
use crate::document::{Block, Section, Table, Text, Weight};
use crate::rounding::{Fixed, digits_for};

/// More sequences than these are not listed one by one.
const MOST_LISTED: usize = 32;

/// What the rows of the tables mean.
const MEANINGS: [(&str, &str); 4] = [
    (
        "TTFT of a sequence",
        "From the run's begin, when all sequences are asked for, to its first token: waiting for the prompts before \
         it is included.",
    ),
    ("Tokens a step", "What a pass with drafts gave: those accepted, and one token of the large model."),
    (
        "Acceptance",
        "The share of drafts accepted, of those that were looked at: after the first rejected one nothing is.",
    ),
    (
        "Drafting, verifying",
        "Of the mean time per token, in which the head drafted for the pass, and the rest.",
    ),
];

/// The section of these runs; without blocks if there is nothing to say.
pub fn section<'r>(runs: impl Iterator<Item = &'r Run> + Clone) -> Section {
    let mut blocks: Vec<Block> = runs.clone().filter_map(sequences).map(Block::Table).collect();
    blocks.extend(runs.filter_map(|run| Some(Block::Table(drafts(run, run.metrics.speculation.as_ref()?)))));
    if !blocks.is_empty() {
        blocks.push(Block::Meanings("What the rows mean", MEANINGS.to_vec()));
    }
    Section { title: "Sequences and drafts".into(), anchor: "sequences", blocks }
}

fn milliseconds(value: f64) -> Text {
    Text::from(Fixed::new(value, digits_for(value)).text())
}

fn sequences(run: &Run) -> Option<Table> {
    let all = &run.metrics.sequences;
    let row = |one: &hearth_core::metrics::sequences::SequenceMetrics| {
        let cells = vec![
            Text::from(one.sequence.to_string()),
            milliseconds(one.ttft_ms),
            one.tpot_ms.map_or_else(|| Text::from("\u{2013}"), milliseconds),
            Text::from(one.tokens.to_string()),
        ];
        (Weight::Plain, cells)
    };
    let more = match all.len().saturating_sub(MOST_LISTED) {
        0 => String::new(),
        more => format!(" {more} more are not listed."),
    };
    (!all.is_empty()).then(|| Table {
        caption: Text::from(format!("{}: {} sequences at once.{more}", run.heading(), all.len())),
        head: ["Sequence", "TTFT, ms", "TPOT, ms", "Tokens after the first"].map(String::from).to_vec(),
        rows: all.iter().take(MOST_LISTED).map(row).collect(),
        wordy: false,
    })
}

fn drafts(run: &Run, drafting: &SpeculationMetrics) -> Table {
    let SpeculationMetrics { steps, tokens_per_step, drafted, accepted, acceptance, draft_ms, verify_ms } =
        *drafting;
    let rows = [
        ("Steps with drafts", Text::from(steps.to_string())),
        ("Tokens a step", Text::from(Fixed::new(tokens_per_step, 2).text())),
        ("Drafted tokens", Text::from(drafted.to_string())),
        ("Accepted", Text::from(accepted.to_string())),
        ("Acceptance, %", Text::from(Fixed::new(100.0 * acceptance, 1).text())),
        ("Drafting, ms a token", milliseconds(draft_ms)),
        ("Verifying, ms a token", milliseconds(verify_ms)),
    ];
    Table {
        caption: Text::from(format!("{}: what drafting brought.", run.heading())),
        head: ["", "Value"].map(String::from).to_vec(),
        rows: rows.into_iter().map(|(name, value)| (Weight::Plain, vec![Text::from(name), value])).collect(),
        wordy: false,
    }
}
