//! Measured times of an NPU's matmuls.
//!
//! The profiler of the HeteroLLM paper (section 4.3) has two modes: it measures matmuls of many shapes, or it
//! predicts their times by a regression tree that was fitted to some of them. Both use a table of shapes and times;
//! `mode` determines whether a time is looked up or predicted (`hearth_core::soc::profiled`).

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::units::Seconds;

/// A table of measured matmuls.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    deny_unknown_fields,
    expecting = "measured matmuls, such as `{mode: table, source: \"measured\", shapes: [{outputs: 4096, inputs: 4096, tokens: 32, time: 0.8 ms}]}`"
)]
pub struct MatmulProfile {
    /// How times are derived from the table.
    pub mode: ProfileMode,
    /// Source of the times.
    pub source: String,
    /// The matmuls, in any order.
    pub shapes: Vec<MeasuredMatmul>,
}

/// How times are derived from a table of measured matmuls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ProfileMode {
    /// A matmul has the rate of the measured matmul with the most similar dimensions.
    Table,
    /// A regression tree, fitted to all measured matmuls, predicts the time.
    Tree,
}

/// A matmul `[tokens, inputs] x [inputs, outputs]` and its measured time.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    deny_unknown_fields,
    expecting = "a matmul, such as `{outputs: 4096, inputs: 4096, tokens: 32, time: 0.8 ms}`"
)]
pub struct MeasuredMatmul {
    /// Number of columns of the weight matrix.
    pub outputs: u32,
    /// Number of rows of the weight matrix.
    pub inputs: u32,
    /// Number of rows of the activations.
    pub tokens: u32,
    /// Time with the faster of the two operand orders.
    pub time: Seconds,
}
