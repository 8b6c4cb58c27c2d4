//! The section that compares the runs with published numbers of the same scenarios.

use hearth_schema::trace::Outcome;

use crate::comparison::{Comparison, PublishedCell, Run};
use crate::document::{Block, Table, Text};
use crate::text::numbers::{self, FixedPoint, format_percent};

/// Returns the blocks of the section; empty unless published numbers were requested.
pub fn section_blocks(comparison: &Comparison) -> Vec<Block> {
    let mut blocks = Vec::new();
    for (index, run) in comparison.runs.iter().enumerate() {
        let cells: Vec<&PublishedCell> =
            comparison.published_cells.iter().filter(|cell| cell.run_index == index).collect();
        if let Some(first) = cells.first() {
            blocks.push(Block::Table(table(run, first, &cells)));
        }
    }
    if !blocks.is_empty() && !comparison.caveats.is_empty() {
        blocks.push(Block::Details("Caveats", comparison.caveats.clone()));
    }
    blocks
}

fn table(run: &Run, first: &PublishedCell, cells: &[&PublishedCell]) -> Table {
    let number = |value: Option<f64>| Text::from_option(value.map(numbers::format_three_digits));
    let error = |ours: Option<f64>, theirs: Option<f64>| {
        let both = ours.zip(theirs).filter(|(_, theirs)| *theirs > 0.0);
        Text::from_option(
            both.map(|(ours, theirs)| FixedPoint::new(100.0 * (ours / theirs - 1.0), 1).to_signed_text()),
        )
    };
    let (tpot, ttft) = (run.metrics.tpot_ms.map(|tpot| tpot.mean_ms), run.metrics.ttft_ms);
    let row = |cell: &&PublishedCell| {
        let mut name = Text::default().append_name(&cell.system).append_words(", ").append_name(&cell.row);
        if cell.is_fitted {
            name = name.append_words(" (fitted)");
        }
        let theirs = match cell.outcome {
            Some(Outcome::Ok) | None => number(cell.tpot_ms),
            Some(ended) => Text::from(ended.label()),
        };
        vec![
            name,
            theirs,
            number(tpot),
            error(tpot, cell.tpot_ms),
            number(cell.ttft_ms),
            number(ttft),
            error(ttft, cell.ttft_ms),
            Text::from(format_percent(cell.tolerance)),
        ]
    };
    let caption = Text::from(format!("{} compared with ", run.heading())).append_name(&first.source).append_words(
        ". The error is that of the run. Fitted rows are no test of the simulator: parameters of the devices were \
         fitted to them.",
    );
    let headings = [
        "System and row",
        "TPOT published, ms",
        "TPOT of this run, ms",
        "Error, %",
        "TTFT published, ms",
        "TTFT of this run, ms",
        "Error, %",
        "Tolerance",
    ];
    Table::new(caption, headings, cells.iter().map(row))
}
