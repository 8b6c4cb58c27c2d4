//! What did others publish, and how is each of their experiments run here?
//!
//! A `published/1` document: a grid of rows (a model size, a set of devices, a number of rounds) and systems, each
//! with the scenario or the options that stand for it, and the numbers that were printed. Beside the cells stand
//! claims: ratios that a text states without a table. Nothing here is used to set a parameter; which of its rows
//! were, elsewhere, the document says itself.
//!
//! A row is a scenario, which is planned and simulated with each system, or a pass of a model through one GPU, which is
//! predicted by two numbers of each ([`speeds`]).
//!
//! Not here: running them (the command line), how near the simulator comes ([`scores`]), and which cells belong beside a
//! run that was made already ([`beside`]).

pub mod beside;
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

use speeds::{LeftOut, Roofline, TwoNumbers};

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

/// Published numbers and how they are run again.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Published {
    /// `published/1`.
    pub schema: String,
    /// Short name, also of the report's folder.
    pub name: String,
    /// What was measured.
    pub title: String,
    /// Where it is printed.
    pub source: String,
    /// What a reader has to know before comparing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub caveats: Vec<String>,
    /// Rows on which parameters of the shipped devices were fitted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub fitted: Vec<String>,
    /// Whether the weights are in memory when a run begins, as far as they fit.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub warm: bool,
    /// How far a simulated number may be off, as a share of the published one.
    pub tolerance: Fraction,
    /// The columns.
    pub systems: Vec<System>,
    /// The rows.
    pub rows: Vec<Row>,
    /// Systems whose memory is shown by device and processor.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub footprint: Vec<String>,
    /// What the text says of two cells.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub claims: Vec<Claim>,
}

/// A system that was measured, and how a run of ours stands for it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct System {
    /// Its name as printed.
    pub name: String,
    /// Why it is run so.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub about: String,
    /// What it plans with, instead of what the scenario says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub planner: Option<PlannerOptions>,
    /// The GPU that it is, for rows that are passes through one GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<TwoNumbers>,
    /// How its devices keep their weights.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub residency: Option<ResidencyOptions>,
    /// How its SoCs use their processors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub soc: Option<SocOptions>,
}

/// One experiment with each system.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    /// As printed.
    pub label: String,
    /// The path of the scenario, from the folder of this document.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scenario: Option<String>,
    /// A pass through one GPU instead.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub roofline: Option<Roofline>,
    /// What was published of a system; a system without a cell here is run where a claim names it.
    #[serde(default)]
    pub cells: BTreeMap<String, Cell>,
}

/// What was published of one run.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cell {
    /// Time per output token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tpot: Option<Seconds>,
    /// Time to the first token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttft: Option<Seconds>,
    /// Tokens of the prompt a second, instead of `ttft`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefill: Option<PerSecond>,
    /// Tokens a second after it, instead of `tpot`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decode: Option<PerSecond>,
    /// Numbers that look like something else than what the row is about, and count in no mean.
    #[serde(default, skip_serializing_if = "LeftOut::is_empty")]
    pub left_out: LeftOut,
    /// How it ended, if not well.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outcome: Option<Outcome>,
    /// Memory pressure by device.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub pressure: BTreeMap<String, Fraction>,
    /// How far a simulated time may be off, if not as everywhere.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tolerance: Option<Fraction>,
    /// Why a small change of a parameter would change this cell much, or why it is known to be off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remark: Option<String>,
}

/// What two cells are compared by.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Ratio {
    /// Times per output token.
    #[default]
    Tpot,
    /// Times to the first token.
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

/// The time per token of one cell over that of another, as a text states it, or another number of both.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Claim {
    /// In words.
    pub text: String,
    /// Of what it is a ratio.
    #[serde(default, skip_serializing_if = "Ratio::is_tpot")]
    pub ratio: Ratio,
    /// Row and system of the numerator.
    pub of: [String; 2],
    /// Row and system of the denominator.
    pub over: [String; 2],
    /// The least ratio that the text can mean.
    pub from: f64,
    /// The greatest.
    pub to: f64,
}

impl Published {
    /// The cells that are to be run: those with a published number and those that a claim names, by index of row and
    /// system.
    pub fn runs(&self) -> BTreeSet<(usize, usize)> {
        let named = self.claims.iter().flat_map(|claim| [&claim.of, &claim.over]);
        let published = self.rows.iter().enumerate().flat_map(|(row, entry)| {
            entry.cells.keys().filter_map(move |name| Some((row, self.system(name)?)))
        });
        published.chain(named.filter_map(|cell| self.place(cell))).collect()
    }

    /// Row and system of a cell by name.
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
                    "row `{}` has a cell of `{unknown}`, which is no system here",
                    row.label
                ));
            }
            let times = row.cells.values().flat_map(|cell| [cell.tpot, cell.ttft]).flatten();
            if times.into_iter().any(|time| time.0 <= 0.0) {
                return refuse(format!("row `{}` has a time that is not above zero", row.label));
            }
            speeds::check(row, &self.systems).map_or(Ok(()), refuse)?;
        }
        if let Some(unknown) = self.fitted.iter().find(|label| !rows.contains(label)) {
            return refuse(format!("`fitted` names `{unknown}`, which is no row here"));
        }
        if let Some(unknown) = self.footprint.iter().find(|name| !systems.contains(name)) {
            return refuse(format!("`footprint` names `{unknown}`, which is no system here"));
        }
        for claim in &self.claims {
            if let Some([row, system]) =
                [&claim.of, &claim.over].into_iter().find(|cell| self.place(cell).is_none())
            {
                return refuse(format!("a claim names [{row}, {system}], which is no cell here"));
            }
            let mut cells = [&claim.of, &claim.over].into_iter().filter_map(|cell| self.place(cell));
            let unfit = |(row, system): (usize, usize)| {
                let why = speeds::unfit(&self.rows[row], &self.systems[system])?;
                Some(format!("a claim names row `{}`, which {why}", self.rows[row].label))
            };
            if let Some(what) = cells.find_map(unfit) {
                return refuse(what);
            }
            if !(claim.from.is_finite() && claim.to.is_finite() && 0.0 < claim.from && claim.from <= claim.to)
            {
                return refuse(format!("the claim \"{}\" needs 0 < from <= to", claim.text));
            }
        }
        if self.runs().is_empty() {
            return refuse("nothing is published here: no row has a cell".into());
        }
        Ok(())
    }
}
