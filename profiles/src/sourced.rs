//! Quantities with a source: a citation, a measurement, or the word `assumed`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::units::Fraction;

/// A quantity and its source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    deny_unknown_fields,
    expecting = "a value and where it comes from, as `{value: 5 ms, source: \"measured\"}`"
)]
pub struct Sourced<T> {
    /// The quantity, with its unit.
    pub value: T,
    /// A citation, how it was measured, or `assumed` and why.
    pub source: String,
    /// Half the distance between the quartiles of the repeats, as a share of the median.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spread: Option<Fraction>,
}

impl<T> Sourced<T> {
    /// A quantity without a known spread.
    pub fn new(value: T, source: impl Into<String>) -> Self {
        Self { value, source: source.into(), spread: None }
    }

    /// Derives another quantity, with the same source and spread.
    pub fn map<U>(&self, derive: impl FnOnce(&T) -> U) -> Sourced<U> {
        Sourced { value: derive(&self.value), source: self.source.clone(), spread: self.spread }
    }
}
