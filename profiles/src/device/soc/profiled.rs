//! How long did products take that were run on an NPU?
//!
//! The profiler of the HeteroLLM paper (section 4.3) works in two modes: it runs products of many shapes, or it
//! predicts their times by a regression tree that was grown from some of them. Both fill a profile with the same thing,
//! a table of shapes and times; `mode` says whether a time is looked up in it or predicted from it.
//!
//! Not here: looking up and growing trees (`hearth_core::soc::profiled`).

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::units::Seconds;

/// Measured products.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    deny_unknown_fields,
    expecting = "measured products, as `{mode: table, source: \"measured\", shapes: [{outputs: 4096, inputs: 4096, tokens: 32, time: 0.8 ms}]}`"
)]
pub struct Profiled {
    /// How the table is used.
    pub mode: Mode,
    /// Where it comes from.
    pub source: String,
    /// The products, in any order.
    pub shapes: Vec<Shape>,
}

/// How a table is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// A product takes what it took, or what the nearest one took by the work.
    Table,
    /// A regression tree over all of them predicts.
    Tree,
}

/// A product `[tokens, inputs] x [inputs, outputs]` and its time.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    deny_unknown_fields,
    expecting = "a product, as `{outputs: 4096, inputs: 4096, tokens: 32, time: 0.8 ms}`"
)]
pub struct Shape {
    /// Columns of the weights' matrix.
    pub outputs: u32,
    /// Its rows.
    pub inputs: u32,
    /// Rows of the activations.
    pub tokens: u32,
    /// In the faster of the two orders.
    pub time: Seconds,
}
