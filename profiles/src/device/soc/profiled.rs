//! Profiled products of an NPU.
//!
//! The profiler of the HeteroLLM paper (section 4.3) has two modes: it runs products of many shapes, or it predicts
//! their times by a regression tree that was grown from some of them. Both use a table of shapes and times; `mode` says
//! whether a time is looked up or predicted (`hearth_core::soc::profiled`).

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::units::Seconds;

/// Measured products.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    deny_unknown_fields,
    expecting = "measured products, such as `{mode: table, source: \"measured\", shapes: [{outputs: 4096, inputs: 4096, tokens: 32, time: 0.8 ms}]}`"
)]
pub struct Profiled {
    /// How the table is used.
    pub mode: Mode,
    /// Source of the times.
    pub source: String,
    /// The products, in any order.
    pub shapes: Vec<Shape>,
}

/// How a table of products is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// A product takes the time of the nearest product by work.
    Table,
    /// A regression tree over all products predicts the time.
    Tree,
}

/// Product `[tokens, inputs] x [inputs, outputs]` and its time.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    deny_unknown_fields,
    expecting = "a product, such as `{outputs: 4096, inputs: 4096, tokens: 32, time: 0.8 ms}`"
)]
pub struct Shape {
    /// Columns of the weight matrix.
    pub outputs: u32,
    /// Rows of the weight matrix.
    pub inputs: u32,
    /// Rows of the activations.
    pub tokens: u32,
    /// Time in the faster of the two orders.
    pub time: Seconds,
}
