//! Where does a number come from?
//!
//! No constant ships without its source: a citation, a measurement of ours, or the word `assumed`.
//! A measured number also carries the spread of its repeats.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::units::Fraction;

/// A quantity and where it comes from.
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
    /// A quantity whose repeats are not known.
    pub fn new(value: T, source: impl Into<String>) -> Self {
        Self { value, source: source.into(), spread: None }
    }

    /// The same source and spread for a quantity derived from this one.
    pub fn map<U>(&self, derive: impl FnOnce(&T) -> U) -> Sourced<U> {
        Sourced { value: derive(&self.value), source: self.source.clone(), spread: self.spread }
    }
}
