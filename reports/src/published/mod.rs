//! Published numbers of other systems, and their comparison with the simulator.
//!
//! A `published/1` document is a grid of rows (a model size, a set of devices, a number of rounds) and systems, with
//! the scenario or the options of each run and the published numbers. Claims are ratios that a text states without a
//! table. No number of a document sets a parameter; the document names the rows to which parameters of the shipped
//! devices were fitted.
//!
//! A row is either a scenario, which is planned and simulated with each system, or a pass of a model through one GPU,
//! which is predicted from two numbers of the GPU ([`speeds`]).
//!
//! Not here: running them (the command line).

pub mod matching;
pub mod page;
pub mod results;
pub mod scores;
pub mod speeds;

use std::collections::{BTreeMap, BTreeSet};

use hearth_profiles::device::SocOptions;
use hearth_profiles::document::{Document, DocumentError};
use hearth_profiles::{Fraction, PerSecond, Seconds};
use hearth_schema::residency::ResidencyOptions;
use hearth_schema::scenario::PlannerOptions;
use hearth_schema::trace::Outcome;
use serde::{Deserialize, Serialize};

use speeds::{Excluded, GpuPeaks, GpuRun};

/// The documents of `published/`, by name.
pub const SHIPPED: [(&str, &str); 7] = [
    ("heterollm", include_str!("../../published/heterollm.yaml")),
    ("ml-drift", include_str!("../../published/ml-drift.yaml")),
    ("prima-fig-10", include_str!("../../published/prima-fig-10.yaml")),
    ("prima-fig-2", include_str!("../../published/prima-fig-2.yaml")),
    ("prima-fig-8", include_str!("../../published/prima-fig-8.yaml")),
    ("prima-table-4", include_str!("../../published/prima-table-4.yaml")),
    ("prima-v1-all-kept", include_str!("../../published/prima-v1-all-kept.yaml")),
];

/// The text of a shipped document.
pub fn shipped(name: &str) -> Option<&'static str> {
    SHIPPED.iter().find(|(known, _)| *known == name).map(|(_, text)| *text)
}

/// Published numbers and how they are reproduced.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Published {
    /// `published/1`.
    pub schema: String,
    /// Short name, also of the report's folder.
    pub name: String,
    pub title: String,
    pub source: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub caveats: Vec<String>,
    /// Rows on which parameters of the shipped devices were fitted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub fitted: Vec<String>,
    /// Whether as many weights as fit are in memory when a run begins.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub warm: bool,
    /// How far a simulated number may be off, as a share of the published one.
    pub tolerance: Fraction,
    pub systems: Vec<System>,
    pub rows: Vec<Row>,
    /// Systems for which the page has a table of memory by device and processor.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub footprint: Vec<String>,
    /// Ratios of two cells that the text states.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub claims: Vec<Claim>,
}

/// A measured system, and the options with which it is simulated.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct System {
    pub name: String,
    /// Why it is simulated with these options.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub about: String,
    /// The planner's options, instead of those of the scenario.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub planner: Option<PlannerOptions>,
    /// The GPU, for rows that are passes through one GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<GpuPeaks>,
    /// The residency policy of its devices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub residency: Option<ResidencyOptions>,
    /// The use of the processors of its SoCs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub soc: Option<SocOptions>,
}

/// One experiment with each system.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    pub label: String,
    /// The path of the scenario, from the folder of this document.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scenario: Option<String>,
    /// A pass through one GPU instead.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub roofline: Option<GpuRun>,
    /// The published numbers by system; a system without a cell is run only where a claim names it.
    #[serde(default)]
    pub cells: BTreeMap<String, Cell>,
}

/// The published numbers of one run.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cell {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tpot: Option<Seconds>,
    /// Time to the first token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttft: Option<Seconds>,
    /// Tokens of the prompt a second, instead of `ttft`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefill: Option<PerSecond>,
    /// Tokens per second after it, instead of `tpot`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decode: Option<PerSecond>,
    /// Numbers that do not fit the row, with the reason; they are left out of all means.
    #[serde(default, alias = "left_out", skip_serializing_if = "Excluded::is_empty")]
    pub excluded: Excluded,
    /// How it ended, if not well.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outcome: Option<Outcome>,
    /// Memory pressure by device.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub pressure: BTreeMap<String, Fraction>,
    /// The tolerance of this cell, if it is not that of the document.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tolerance: Option<Fraction>,
    /// Why the cell is sensitive to a parameter, or why it is known to differ.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remark: Option<String>,
}

/// The quantity by which two cells are compared.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Ratio {
    #[default]
    Tpot,
    Ttft,
    /// Energies until the first token.
    Energy,
}

impl Ratio {
    #[allow(clippy::trivially_copy_pass_by_ref)] // serde's signature
    fn is_tpot(&self) -> bool {
        *self == Ratio::Tpot
    }
}

/// A ratio of the same quantity of two cells, as a text states it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Claim {
    pub text: String,
    #[serde(default, skip_serializing_if = "Ratio::is_tpot")]
    pub ratio: Ratio,
    /// Row and system of the numerator.
    pub of: [String; 2],
    /// Row and system of the denominator.
    pub over: [String; 2],
    /// The smallest ratio that agrees with the text.
    pub from: f64,
    /// The largest ratio that agrees with the text.
    pub to: f64,
}

impl Published {
    /// The cells to run, by index of row and system: those with a published number and those that a claim names.
    pub fn runs(&self) -> BTreeSet<(usize, usize)> {
        let named = self.claims.iter().flat_map(|claim| [&claim.of, &claim.over]);
        self.cells().map(|(place, ..)| place).chain(named.filter_map(|cell| self.place(cell))).collect()
    }

    /// All cells with their place, row and system, row by row.
    fn cells(&self) -> impl Iterator<Item = ((usize, usize), &Row, &System, &Cell)> {
        self.rows.iter().enumerate().flat_map(move |(place, row)| {
            let systems = self.systems.iter().enumerate();
            systems.filter_map(move |(column, system)| {
                Some(((place, column), row, system, row.cells.get(&system.name)?))
            })
        })
    }

    /// The row and the system of a cell, found by name.
    pub fn place(&self, [row, system]: &[String; 2]) -> Option<(usize, usize)> {
        Some((self.rows.iter().position(|entry| entry.label == *row)?, self.system(system)?))
    }

    fn system(&self, name: &str) -> Option<usize> {
        self.systems.iter().position(|system| system.name == name)
    }
}

impl Document for Published {
    const SCHEMA: &'static str = "published/1";

    fn validate(&self) -> Result<(), DocumentError> {
        let refuse = |what: String| Err(DocumentError::invalid(what));
        let plain = |name: &str| {
            let mut letters = name.chars();
            !name.is_empty() && letters.all(|letter| letter.is_ascii_alphanumeric() || letter == '-')
        };
        if !plain(&self.name) {
            return refuse(format!("`name` is `{}`; use letters, digits and `-`", self.name));
        }
        let mut systems = BTreeSet::new();
        if let Some(twice) = self.systems.iter().find(|system| !systems.insert(&system.name)) {
            return refuse(format!("two systems are called `{}`", twice.name));
        }
        self.systems.iter().find_map(speeds::check_system).map_or(Ok(()), refuse)?;
        let mut rows = BTreeSet::new();
        if let Some(twice) = self.rows.iter().find(|row| !rows.insert(&row.label)) {
            return refuse(format!("two rows are called `{}`", twice.label));
        }
        for row in &self.rows {
            if let Some(unknown) = row.cells.keys().find(|name| !systems.contains(name)) {
                return refuse(format!(
                    "row `{}` has a cell of `{unknown}`, which is not a system of this document",
                    row.label
                ));
            }
            let times = row.cells.values().flat_map(|cell| [cell.tpot, cell.ttft]).flatten();
            if times.into_iter().any(|time| time.0 <= 0.0) {
                return refuse(format!("row `{}` has a time that is not positive", row.label));
            }
            speeds::check(row, &self.systems).map_or(Ok(()), refuse)?;
        }
        if let Some(unknown) = self.fitted.iter().find(|label| !rows.contains(label)) {
            return refuse(format!("`fitted` names `{unknown}`, which is not a row of this document"));
        }
        if let Some(unknown) = self.footprint.iter().find(|name| !systems.contains(name)) {
            return refuse(format!("`footprint` names `{unknown}`, which is not a system of this document"));
        }
        for claim in &self.claims {
            if let Some([row, system]) =
                [&claim.of, &claim.over].into_iter().find(|cell| self.place(cell).is_none())
            {
                return refuse(format!(
                    "a claim names [{row}, {system}], which is not a cell of this document"
                ));
            }
            let mut cells = [&claim.of, &claim.over].into_iter().filter_map(|cell| self.place(cell));
            let mismatch = |(row, system): (usize, usize)| {
                let why = speeds::mismatch(&self.rows[row], &self.systems[system])?;
                Some(format!("a claim names row `{}`, which {why}", self.rows[row].label))
            };
            if let Some(what) = cells.find_map(mismatch) {
                return refuse(what);
            }
            if !(claim.from.is_finite() && claim.to.is_finite() && 0.0 < claim.from && claim.from <= claim.to)
            {
                return refuse(format!("the claim \"{}\" needs 0 < from <= to", claim.text));
            }
        }
        if self.runs().is_empty() {
            return refuse("no row has a cell: add a published number".into());
        }
        Ok(())
    }
}
