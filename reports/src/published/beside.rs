//! Which published numbers belong beside these runs?
//!
//! A row of a `published/1` document names a scenario; a run of the scenario of that name (its file's, without the ending)
//! stands beside the row's cells. A trace does not say which system of the document it stands for, so all are shown in
//! a table of their own; the one that is named, or the only one, has its place among the terms too.
//!
//! Not here: running the document's scenarios as it says ([`super::scores`], `hearth reproduce`).

use std::collections::BTreeSet;
use std::path::Path;

use hearth_schema::trace::Outcome;
use serde::{Deserialize, Serialize};

use super::{Published, Row};
use crate::comparison::{Comparison, Run};
use crate::document::{Block, Section, Table, Text, Weight};
use crate::escape;
use crate::rounding::{Fixed, digits_for, percent};

/// What a table shows where there is no number.
const NOTHING: &str = "\u{2013}";

/// A published cell beside a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Printed {
    /// Index of the run.
    pub run: usize,
    /// The document's name.
    pub document: String,
    /// Where it is printed.
    pub source: String,
    /// The row's label.
    pub row: String,
    /// The system's name.
    pub system: String,
    /// Whether the run stands for this system: it was named, or is the only one.
    pub chosen: bool,
    /// Time per output token, in milliseconds.
    pub tpot_ms: Option<f64>,
    /// Time to the first token, in milliseconds.
    pub ttft_ms: Option<f64>,
    /// How it ended, if not well.
    pub outcome: Option<Outcome>,
    /// How far off a simulated time may be, as a share.
    pub tolerance: f64,
    /// Whether parameters of the shipped devices were fitted on this row.
    pub fitted: bool,
}

/// Why published numbers cannot stand beside these runs.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BesideError {
    /// The document has no such system.
    #[error("`{document}` has no system `{system}`; it has {known}")]
    NoSystem {
        /// The document's name.
        document: String,
        /// What was asked for.
        system: String,
        /// What there is.
        known: String,
    },
    /// No row is of a scenario that was run.
    #[error("`{document}` has nothing on scenario `{scenario}`; its rows are of {known}")]
    NoScenario {
        /// The document's name.
        document: String,
        /// The scenario of the first run.
        scenario: String,
        /// The scenarios of its rows.
        known: String,
    },
    /// The rows of these scenarios have no cell of the system.
    #[error(
        "`{document}` prints nothing of `{system}` for these scenarios; leave `--system` out to see the others"
    )]
    NoCell {
        /// The document's name.
        document: String,
        /// The system.
        system: String,
    },
}

/// The cells of a document that belong beside the runs; those of one system if it is named.
pub fn find(published: &Published, system: Option<&str>, runs: &[Run]) -> Result<Vec<Printed>, BesideError> {
    let document = published.name.clone();
    if let Some(system) = system.filter(|name| !published.systems.iter().any(|system| system.name == **name))
    {
        let known = list(published.systems.iter().map(|system| system.name.as_str()));
        return Err(BesideError::NoSystem { document, system: escape::name(system), known });
    }
    let rows = |run: &Run| {
        let name = run.scenario.clone();
        published.rows.iter().filter(move |row| scenario(row) == Some(name.as_str()))
    };
    if !runs.iter().any(|run| rows(run).next().is_some()) {
        let known = list(published.rows.iter().filter_map(scenario));
        let scenario = runs.first().map_or_else(String::new, |run| run.scenario.clone());
        return Err(BesideError::NoScenario { document, scenario, known });
    }
    let mut found = Vec::new();
    for (index, run) in runs.iter().enumerate() {
        for row in rows(run) {
            let named = |name: &&String| system.is_none_or(|system| system == name.as_str());
            let cells: Vec<&String> = row.cells.keys().filter(named).collect();
            for name in &cells {
                found.push(printed(published, row, name, (index, cells.len() == 1)));
            }
        }
    }
    match system {
        Some(system) if found.is_empty() => Err(BesideError::NoCell { document, system: system.to_owned() }),
        _ => Ok(found),
    }
}

fn printed(published: &Published, row: &Row, system: &str, (run, chosen): (usize, bool)) -> Printed {
    let cell = row.cells.get(system).cloned().unwrap_or_default();
    Printed {
        run,
        document: published.name.clone(),
        source: escape::phrase(&published.source),
        row: escape::name(&row.label),
        system: escape::name(system),
        chosen,
        tpot_ms: row.tpot(&cell).map(|time| time.0 * 1e3),
        ttft_ms: row.ttft(&cell).map(|time| time.0 * 1e3),
        outcome: cell.outcome,
        tolerance: cell.tolerance.unwrap_or(published.tolerance).0,
        fitted: published.fitted.contains(&row.label),
    }
}

/// The name of a row's scenario.
fn scenario(row: &Row) -> Option<&str> {
    Path::new(row.scenario.as_deref()?).file_stem()?.to_str()
}

fn list<'n>(names: impl Iterator<Item = &'n str>) -> String {
    let names: BTreeSet<String> = names.map(|name| format!("`{}`", escape::name(name))).collect();
    names.into_iter().collect::<Vec<_>>().join(", ")
}

impl Comparison {
    /// The published cell that a run stands for, if exactly one does.
    pub fn printed(&self, run: usize) -> Option<&Printed> {
        let mut chosen = self.published.iter().filter(|cell| cell.run == run && cell.chosen);
        chosen.next().filter(|_| chosen.next().is_none())
    }
}

/// The section; without blocks if nothing was asked for.
pub fn section(comparison: &Comparison) -> Section {
    let mut blocks = Vec::new();
    for (index, run) in comparison.runs.iter().enumerate() {
        let cells: Vec<&Printed> = comparison.published.iter().filter(|cell| cell.run == index).collect();
        if let Some(first) = cells.first() {
            blocks.push(Block::Table(table(run, first, &cells)));
        }
    }
    if !blocks.is_empty() && !comparison.caveats.is_empty() {
        blocks.push(Block::Folded("What to know of these numbers", comparison.caveats.clone()));
    }
    Section { title: "Published".into(), anchor: "published", blocks }
}

fn table(run: &Run, first: &Printed, cells: &[&Printed]) -> Table {
    let number = |value: Option<f64>| {
        Text::from(value.map_or(NOTHING.into(), |ms| Fixed::new(ms, digits_for(ms).saturating_sub(1)).text()))
    };
    let error =
        |ours: Option<f64>, theirs: Option<f64>| {
            let error = ours.zip(theirs).filter(|(_, theirs)| *theirs > 0.0);
            Text::from(error.map_or(NOTHING.into(), |(ours, theirs)| {
                Fixed::new(100.0 * (ours / theirs - 1.0), 1).signed()
            }))
        };
    let (tpot, ttft) = (run.metrics.tpot_ms.map(|tpot| tpot.mean), run.metrics.ttft_ms);
    let rows = cells
        .iter()
        .map(|cell| {
            let mut name = Text::default().name(&cell.system).words(", ").name(&cell.row);
            if cell.fitted {
                name = name.words(" (fitted)");
            }
            let theirs = match cell.outcome {
                Some(Outcome::Ok) | None => number(cell.tpot_ms),
                Some(ended) => Text::from(ended.word()),
            };
            let cells = vec![
                name,
                theirs,
                number(tpot),
                error(tpot, cell.tpot_ms),
                number(cell.ttft_ms),
                number(ttft),
                error(ttft, cell.ttft_ms),
                Text::from(percent(cell.tolerance)),
            ];
            (Weight::Plain, cells)
        })
        .collect();
    Table {
        caption: Text::from(format!("{} beside ", run.heading())).name(&first.source).words(
            ". The error is that of the run. A fitted row is no test: parameters of the devices come from it.",
        ),
        head: [
            "",
            "TPOT published, ms",
            "this run",
            "Error, %",
            "TTFT published, ms",
            "this run",
            "Error, %",
            "Tolerance",
        ]
        .map(String::from)
        .to_vec(),
        rows,
        wordy: false,
    }
}
