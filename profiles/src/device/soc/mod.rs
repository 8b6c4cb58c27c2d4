//! Systems on a chip (SoCs) whose GPU and NPU share main memory and compute together.
//!
//! The key `soc` of a `device/1` document has the parameters of the model in `hearth_core::soc` (HeteroLLM paper,
//! sections 3 and 4), each with its source. The speed of the NPU depends on the shape and the operand order of a
//! matmul, the speed of the GPU does not, and synchronising GPU and NPU takes time. The options of a scenario are in
//! [`options`].
//!
//! The profiler of the HeteroLLM paper (section 4.3) looks up the time of a matmul in a table of measured matmuls, or
//! predicts the time with a regression tree fitted to the table ([`ProfileMode`]; `hearth_core::soc::profiled`).

mod check;
pub mod options;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use options::{PartitionPolicy, SocOptions, SocStrategy, Synchronisation};

use crate::document_values::Sourced;
use crate::units::{BytesPerSecond, FlopsPerSecond, Seconds, Watts};

/// A system on a chip (SoC).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[serde(expecting = "the keys of a SoC: `gpu`, `npu`, `bus`, `synchronisation` and others")]
pub struct Soc {
    /// The GPU, whose speed does not depend on the shape of a matmul.
    pub gpu: SocGpu,
    /// The NPU, if the SoC has one that can compute in FP16.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub npu: Option<SocNpu>,
    /// Bandwidths of the memory that all processors of the SoC share.
    #[serde(rename = "bus")]
    pub memory_bandwidths: MemoryBandwidths,
    /// Costs of synchronising the GPU and the NPU.
    #[serde(rename = "synchronisation")]
    pub sync_costs: SyncCosts,
    /// Compiled graphs of the NPU, each for a fixed number of tokens.
    pub graphs: NpuGraphs,
    /// Power consumption of the SoC during prefill.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power: Option<SocPower>,
    /// Default options of the SoC, which a scenario may replace.
    #[serde(default, rename = "usual", skip_serializing_if = "SocOptions::is_default")]
    pub default_options: SocOptions,
}

/// The GPU of a SoC.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[serde(expecting = "the keys of a SoC's GPU: `name`, `matmul`, `weight_bits`, `submission`")]
pub struct SocGpu {
    /// Name of the GPU as given by the vendor.
    pub name: String,
    /// Achieved speed of matmuls: `F_g` of the HeteroLLM paper.
    pub matmul: Sourced<FlopsPerSecond>,
    /// Peak speed of the GPU with 16-bit floating-point numbers, as published by the vendor.
    #[serde(rename = "peak", default, skip_serializing_if = "Option::is_none")]
    pub peak_rate: Option<Sourced<FlopsPerSecond>>,
    /// Bits that the GPU reads per weight of a model quantised to about four bits.
    #[serde(rename = "weight_bits")]
    pub bits_per_weight: Sourced<f64>,
    /// Time to submit a kernel to a GPU queue that is not empty: `t_async` of the HeteroLLM paper.
    pub submission: Sourced<Seconds>,
}

/// The NPU of a SoC: a systolic array that stores a tile of one matrix while rows of another stream through the array.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[serde(expecting = "the keys of a SoC's NPU: `name`, `matmul`, `order_penalty`, `tile`, `weight_bits`")]
pub struct SocNpu {
    /// Name of the NPU as given by the vendor.
    pub name: String,
    /// Speed of matmuls without the cost of loading the systolic array: `F0` of the HeteroLLM paper.
    pub matmul: Sourced<FlopsPerSecond>,
    /// Published peak speed of the NPU with 16-bit floating-point numbers, or half its peak speed with 8-bit integers.
    #[serde(rename = "peak", default, skip_serializing_if = "Option::is_none")]
    pub peak_rate: Option<Sourced<FlopsPerSecond>>,
    /// Cost of loading the systolic array relative to the cost of streaming: lambda in the factor `1 + lambda N / M` of
    /// the time of a matmul with `M` streamed rows of width `N`.
    pub order_penalty: Sourced<f64>,
    /// Number of rows (and columns) of the systolic array. Every matmul dimension is padded to a multiple of `tile`.
    #[serde(rename = "tile")]
    pub tile_size: Sourced<u32>,
    /// Bits that the NPU reads per weight in prefill.
    #[serde(rename = "weight_bits")]
    pub bits_per_weight: Sourced<f64>,
    /// Measured times of matmuls, which are used in place of the formula.
    #[serde(rename = "profiled", default, skip_serializing_if = "Option::is_none")]
    pub matmul_profile: Option<MatmulProfile>,
}

/// A table of matmuls with measured times.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    deny_unknown_fields,
    expecting = "measured matmuls, such as `{mode: table, source: \"measured\", shapes: [{outputs: 4096, inputs: 4096, tokens: 32, time: 0.8 ms}]}`"
)]
pub struct MatmulProfile {
    /// Method that derives the time of a matmul from the table.
    pub mode: ProfileMode,
    /// Source of the measured times.
    pub source: String,
    /// The measured matmuls, in any order.
    #[serde(rename = "shapes")]
    pub matmuls: Vec<MeasuredMatmul>,
}

/// Method that derives the time of a matmul from a table of measured matmuls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ProfileMode {
    /// A matmul has the speed of the measured matmul with the most similar dimensions.
    Table,
    /// A regression tree, fitted to all measured matmuls, predicts the time.
    Tree,
}

/// A matmul `[tokens, inputs] x [inputs, outputs]` and its measured time.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[serde(expecting = "a matmul, such as `{outputs: 4096, inputs: 4096, tokens: 32, time: 0.8 ms}`")]
pub struct MeasuredMatmul {
    /// Number of columns of the weight matrix.
    pub outputs: u32,
    /// Number of rows of the weight matrix.
    pub inputs: u32,
    /// Number of rows of the activations.
    pub tokens: u32,
    /// Measured time with the faster of the two operand orders.
    pub time: Seconds,
}

/// Bandwidths of the memory bus that all processors share.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "the bandwidths of a bus: `peak`, `one` and `together`")]
pub struct MemoryBandwidths {
    /// Peak bandwidth of the memory.
    #[serde(rename = "peak")]
    pub peak_bandwidth: Sourced<BytesPerSecond>,
    /// Bandwidth that one processor alone achieves: `B_g` of the HeteroLLM paper.
    #[serde(rename = "one")]
    pub single_processor: Sourced<BytesPerSecond>,
    /// Total bandwidth that GPU and NPU achieve at the same time: `B_soc` of the HeteroLLM paper.
    #[serde(rename = "together")]
    pub both_processors: Sourced<BytesPerSecond>,
}

/// Costs of synchronising the processors of a SoC.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[serde(expecting = "the costs of synchronisation: `fast`, `copy`, `submission` and `sleep`")]
pub struct SyncCosts {
    /// Time of an event in shared memory that a thread polls after a predicted sleep: `t_fast` of the HeteroLLM paper.
    #[serde(rename = "fast")]
    pub fast_event: Sourced<Seconds>,
    /// Time to copy a buffer of any size to the GPU through the GPU framework: `t_copy` of the HeteroLLM paper.
    #[serde(rename = "copy")]
    pub buffer_copy: Sourced<Seconds>,
    /// Time to submit a kernel to an empty GPU queue: `t_submit` of the HeteroLLM paper.
    pub submission: Sourced<Seconds>,
    /// Shortest sleep of a thread. The sleep before polling is a multiple of this time.
    #[serde(rename = "sleep")]
    pub min_sleep: Sourced<Seconds>,
}

/// Compiled graphs of the NPU.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    deny_unknown_fields,
    expecting = "the graphs of an NPU: `sizes` in tokens, `preparation`, `prepared_for` and `each_token`"
)]
pub struct NpuGraphs {
    /// Token counts for which graphs are compiled in advance, in ascending order.
    #[serde(rename = "sizes")]
    pub graph_sizes: Sourced<Vec<u32>>,
    /// Time to compile the graphs of a layer at run time for `prepared_for` tokens.
    #[serde(rename = "preparation")]
    pub preparation_time: Sourced<Seconds>,
    /// Number of tokens to which the time `preparation` applies.
    #[serde(rename = "prepared_for")]
    pub preparation_tokens: Sourced<u32>,
    /// Additional time to compile the graphs of a layer, for each token above `prepared_for`.
    #[serde(rename = "each_token")]
    pub preparation_time_per_token: Sourced<Seconds>,
}

/// Power consumption of the whole SoC during prefill, depending on the processors in use.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "the powers of a SoC: `gpu`, `layers` and `tensors`")]
pub struct SocPower {
    /// Power if only the GPU computes.
    #[serde(rename = "gpu")]
    pub gpu_only_power: Sourced<Watts>,
    /// Power with matmuls on the NPU and everything else on the GPU.
    #[serde(rename = "layers")]
    pub layer_level_power: Sourced<Watts>,
    /// Power with matmuls on GPU and NPU at the same time.
    #[serde(rename = "tensors")]
    pub tensor_level_power: Sourced<Watts>,
}

impl SyncCosts {
    /// Returns the time of one synchronisation between GPU and NPU.
    pub fn synchronisation_time(&self, synchronisation: Synchronisation) -> Seconds {
        match synchronisation {
            Synchronisation::Fast => self.fast_event.value,
            Synchronisation::Slow => self.buffer_copy.value + self.submission.value,
        }
    }
}

impl SocPower {
    /// Returns the power consumption of the SoC with a strategy. Deviation: the HeteroLLM paper states the power of
    /// three systems. All strategies with matmuls on the NPU and everything else on the GPU are assumed to need the
    /// power of its layer-level system.
    pub fn strategy_power(&self, strategy: SocStrategy) -> Watts {
        match strategy {
            SocStrategy::GpuOnly => self.gpu_only_power.value,
            SocStrategy::HeteroTensor | SocStrategy::Best => self.tensor_level_power.value,
            _ => self.layer_level_power.value,
        }
    }
}
