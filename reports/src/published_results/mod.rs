//! Published numbers of other systems, and their comparison with the simulator.
//!
//! A `published/1` document is a table with a row for each experiment (a model size, a set of devices, a number of
//! rounds) and a column for each system. A row is either a scenario, which is planned and simulated for each system, or
//! inference on one GPU, which is predicted from the peak rates of the GPU ([`speeds`]). Claims are ratios of two
//! cells that the text of a publication states. The published numbers set no parameter of the simulation; the
//! document names the rows to which parameters of the shipped device profiles were fitted.
//!
//! Not here: simulating the experiments (`hearth_workflow::reproduction`).

pub mod matching;
pub mod page;
pub mod results;
pub mod scores;
pub mod speeds;

use std::collections::{BTreeMap, BTreeSet};

use hearth_profiles::device::SocOptions;
use hearth_profiles::document::{Document, DocumentError};
use hearth_profiles::{Fraction, PerSecond, Seconds};
use hearth_schema::model::ModelRef;
use hearth_schema::residency::ResidencyOptions;
use hearth_schema::scenario::PlannerOptions;
use hearth_schema::trace::Outcome;
use hearth_schema::workload::Workload;
use serde::{Deserialize, Serialize};

use speeds::{ExclusionReasons, GpuPeakRates, GpuRun};

/// Names and texts of the documents in `reports/published/`.
pub const SHIPPED_DOCUMENTS: [(&str, &str); 10] = [
    ("heterollm", include_str!("../../published/heterollm.yaml")),
    ("measured-machines", include_str!("../../published/measured-machines.yaml")),
    ("ml-drift", include_str!("../../published/ml-drift.yaml")),
    ("prima-fig-10", include_str!("../../published/prima-fig-10.yaml")),
    ("prima-fig-2", include_str!("../../published/prima-fig-2.yaml")),
    ("prima-fig-8", include_str!("../../published/prima-fig-8.yaml")),
    ("prima-table-4", include_str!("../../published/prima-table-4.yaml")),
    ("prima-table-7", include_str!("../../published/prima-table-7.yaml")),
    ("prima-table-9", include_str!("../../published/prima-table-9.yaml")),
    ("prima-v1-all-kept", include_str!("../../published/prima-v1-all-kept.yaml")),
];

pub fn shipped_yaml(name: &str) -> Option<&'static str> {
    SHIPPED_DOCUMENTS.iter().find(|(known, _)| *known == name).map(|(_, text)| *text)
}

/// A document of published numbers, and of how to reproduce them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PublishedResults {
    /// Schema of the document: `published/1`.
    pub schema: String,
    /// Short name of the document, also used for the folder of its report.
    pub name: String,
    pub title: String,
    pub source: String,
    #[serde(default)]
    pub caveats: Vec<String>,
    /// Labels of the rows to which parameters of the shipped device profiles were fitted.
    #[serde(rename = "fitted", default)]
    pub fitted_rows: Vec<String>,
    /// Whether a simulated run begins with as many weights in memory as fit.
    #[serde(rename = "warm", default)]
    pub starts_warm: bool,
    /// Maximum accepted relative error of a simulated number.
    pub tolerance: Fraction,
    /// The workload of all rows, instead of those of their scenarios.
    pub workload: Option<Workload>,
    /// The KV cache capacity of all rows in tokens, instead of those of their scenarios.
    #[serde(rename = "context")]
    pub context_length: Option<u32>,
    /// Labels of the rows that nobody had looked at when the simulator last changed.
    #[serde(rename = "blind", default)]
    pub blind_rows: Vec<String>,
    /// The values that were fitted to the published numbers, or chosen by the text.
    #[serde(rename = "inferred", default)]
    pub inferred_values: Vec<InferredValue>,
    pub systems: Vec<System>,
    pub rows: Vec<ResultRow>,
    /// Names of the systems for which the report has a table of memory by device and processor.
    #[serde(rename = "footprint", default)]
    pub footprint_systems: Vec<String>,
    /// Ratios of two cells that the text of the publication states.
    #[serde(default)]
    pub claims: Vec<Claim>,
}

/// A value that was fitted to published numbers or chosen by the text of a publication, and the value that it would have
/// otherwise. The report shows how the simulated times depend on it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InferredValue {
    pub name: String,
    /// The values without the fit, by field. Fields are named as for `hearth sweep --vary`. Those of devices that a
    /// scenario does not have are ignored.
    #[serde(rename = "without")]
    pub values_without: BTreeMap<String, String>,
    /// The source of the values without the fit.
    pub source: String,
}

/// A system whose results were published, and the options with which it is simulated.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct System {
    pub name: String,
    /// The reason why the system is simulated with these options.
    #[serde(rename = "about", default)]
    pub rationale: String,
    /// Planner options that replace the planner options of the scenario.
    pub planner: Option<PlannerOptions>,
    /// The name of the device that is the head, instead of the scenario's.
    pub head: Option<String>,
    /// The peak rates of the GPU, for rows with the key `roofline`.
    pub gpu: Option<GpuPeakRates>,
    pub residency: Option<ResidencyOptions>,
    /// The strategy and synchronisation of devices whose GPU and NPU compute together (SoCs).
    pub soc: Option<SocOptions>,
}

/// An experiment that was run with one or more systems.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResultRow {
    pub label: String,
    /// The path of the scenario, relative to the folder of the `published/1` document.
    pub scenario: Option<String>,
    /// The model, instead of the scenario's. Paths are relative to the folder of the scenario.
    pub model: Option<ModelRef>,
    /// A run on one GPU, for a row without a scenario.
    #[serde(rename = "roofline")]
    pub gpu_run: Option<GpuRun>,
    /// The published numbers by system. A system without a cell is simulated only if a claim names it.
    #[serde(rename = "cells", default)]
    pub cells_by_system: BTreeMap<String, ResultCell>,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResultCell {
    pub tpot: Option<Seconds>,
    pub ttft: Option<Seconds>,
    /// Prompt tokens per second, instead of `ttft`.
    #[serde(rename = "prefill")]
    pub prefill_speed: Option<PerSecond>,
    /// Generated tokens per second, instead of `tpot`.
    #[serde(rename = "decode")]
    pub decode_speed: Option<PerSecond>,
    /// The reasons why numbers of this cell are excluded from all means and medians.
    #[serde(rename = "excluded", default, alias = "left_out")]
    pub exclusion_reasons: ExclusionReasons,
    /// How the published run failed; absent if it completed.
    pub outcome: Option<Outcome>,
    /// The published memory pressure of each device, as a share of its memory.
    #[serde(rename = "pressure", default)]
    pub memory_pressure: BTreeMap<String, Fraction>,
    /// Maximum accepted relative error for this cell; absent to use the document's tolerance.
    pub tolerance: Option<Fraction>,
    /// The reason why the simulated number is sensitive to a parameter, or differs from the published number.
    pub remark: Option<String>,
}

/// The quantity whose ratio a claim states.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ClaimQuantity {
    #[default]
    Tpot,
    Ttft,
    /// The energy until the first token.
    Energy,
}

/// A ratio that the text of a publication states: one quantity in one cell, divided by the same quantity in another.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Claim {
    pub text: String,
    #[serde(rename = "ratio", default)]
    pub quantity: ClaimQuantity,
    /// Row label and system name of the cell in the numerator.
    #[serde(rename = "of")]
    pub numerator_cell: [String; 2],
    /// Row label and system name of the cell in the denominator.
    #[serde(rename = "over")]
    pub denominator_cell: [String; 2],
    #[serde(rename = "from")]
    pub min_ratio: f64,
    #[serde(rename = "to")]
    pub max_ratio: f64,
}

impl PublishedResults {
    /// Returns the cells to simulate, as indices of row and system: the cells with published numbers, and the cells
    /// that a claim names.
    pub fn cells_to_simulate(&self) -> BTreeSet<(usize, usize)> {
        let named = self.claims.iter().flat_map(|claim| [&claim.numerator_cell, &claim.denominator_cell]);
        self.cells().map(|(index, ..)| index).chain(named.filter_map(|cell| self.cell_index(cell))).collect()
    }

    /// Returns all cells row by row, each with its indices of row and system, its row and its system.
    fn cells(&self) -> impl Iterator<Item = ((usize, usize), &ResultRow, &System, &ResultCell)> {
        self.rows.iter().enumerate().flat_map(move |(row_index, row)| {
            let systems = self.systems.iter().enumerate();
            systems.filter_map(move |(column, system)| {
                Some(((row_index, column), row, system, row.cells_by_system.get(&system.name)?))
            })
        })
    }

    /// Returns whether a cell is simulated with the scenario of its row as it is in its file, but for the planner, the
    /// residency and the SoC options of the system.
    pub fn keeps_scenario(&self, row: &ResultRow, system: &System) -> bool {
        let replaced = self.workload.is_some() || self.context_length.is_some();
        !replaced && row.model.is_none() && system.head.is_none()
    }

    /// Returns how far a row was known when the simulator last changed, as text after its label.
    pub fn status(&self, label: &str) -> &'static str {
        let contains = |labels: &[String]| labels.iter().any(|other| other == label);
        match (contains(&self.fitted_rows), contains(&self.blind_rows)) {
            (true, _) => " (fitted)",
            (_, true) => " (blind)",
            _ => "",
        }
    }

    /// Returns the indices of the row and the system that have these names.
    pub fn cell_index(&self, [row, system]: &[String; 2]) -> Option<(usize, usize)> {
        let row = self.rows.iter().position(|entry| entry.label == *row)?;
        Some((row, self.systems.iter().position(|entry| entry.name == *system)?))
    }
}

impl Document for PublishedResults {
    const SCHEMA: &'static str = "published/1";

    fn validate(&self) -> Result<(), DocumentError> {
        let refuse = |what: String| Err(DocumentError::invalid_document(what));
        let is_allowed = |letter: char| letter.is_ascii_alphanumeric() || letter == '-';
        if self.name.is_empty() || !self.name.chars().all(is_allowed) {
            return refuse(format!("`name` is `{}`; use letters, digits and `-`", self.name));
        }
        let mut systems = BTreeSet::new();
        if let Some(twice) = self.systems.iter().find(|system| !systems.insert(&system.name)) {
            return refuse(format!("two systems are called `{}`; give them different names", twice.name));
        }
        self.systems.iter().find_map(speeds::check_system).map_or(Ok(()), refuse)?;
        let mut rows = BTreeSet::new();
        if let Some(twice) = self.rows.iter().find(|row| !rows.insert(&row.label)) {
            return refuse(format!("two rows are called `{}`; give them different labels", twice.label));
        }
        for row in &self.rows {
            if let Some(unknown) = row.cells_by_system.keys().find(|name| !systems.contains(name)) {
                return refuse(format!(
                    "row `{}` has a cell of `{unknown}`, which is not in `systems`; add the system",
                    row.label
                ));
            }
            let times = row.cells_by_system.values().flat_map(|cell| [cell.tpot, cell.ttft]).flatten();
            if times.into_iter().any(|time| time.0 <= 0.0) {
                return refuse(format!("row `{}` has a `tpot` or `ttft` that is not positive", row.label));
            }
            speeds::check_row(row, &self.systems).map_or(Ok(()), refuse)?;
        }
        for (key, labels) in [("fitted", &self.fitted_rows), ("blind", &self.blind_rows)] {
            if let Some(unknown) = labels.iter().find(|label| !rows.contains(label)) {
                return refuse(format!("`{key}` names `{unknown}`, which is not the label of a row"));
            }
        }
        if let Some(both) = self.blind_rows.iter().find(|label| self.fitted_rows.contains(label)) {
            return refuse(format!("row `{both}` is both in `fitted` and in `blind`"));
        }
        if let Some(empty) = self.inferred_values.iter().find(|value| value.values_without.is_empty()) {
            return refuse(format!("the inferred value `{}` has no values in `without`", empty.name));
        }
        if let Some(unknown) = self.footprint_systems.iter().find(|name| !systems.contains(name)) {
            return refuse(format!("`footprint` names `{unknown}`, which is not in `systems`"));
        }
        for claim in &self.claims {
            let cells = [&claim.numerator_cell, &claim.denominator_cell];
            if let Some([row, system]) = cells.into_iter().find(|cell| self.cell_index(cell).is_none()) {
                return refuse(format!(
                    "a claim names [{row}, {system}]; use the label of a row and the name of a system"
                ));
            }
            for (row, system) in cells.into_iter().filter_map(|cell| self.cell_index(cell)) {
                let row = &self.rows[row];
                if let Some(why) = speeds::mismatch_reason(row, &self.systems[system]) {
                    return refuse(format!("a claim names row `{}`, which {why}", row.label));
                }
            }
            let (min, max) = (claim.min_ratio, claim.max_ratio);
            if !(min.is_finite() && max.is_finite() && 0.0 < min && min <= max) {
                return refuse(format!("the claim \"{}\" must have 0 < `from` <= `to`", claim.text));
            }
        }
        if self.cells_to_simulate().is_empty() {
            return refuse("no row has a cell: add a published number".into());
        }
        Ok(())
    }
}
