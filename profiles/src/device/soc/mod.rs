//! Systems on a chip whose GPU and NPU compute together over one memory.
//!
//! The key `soc` of a `device/1` document: the parameters of the model of `hearth_core::soc` (HeteroLLM paper, sections
//! 3 and 4), each with its source. The NPU's speed depends on the shape and the order of a product, the GPU's does not,
//! and synchronising them takes time. A scenario's options for the processors are in [`options`].

mod check;
pub mod options;
pub mod profiled;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use options::{SocOptions, Strategy, Synchronisation, Upkeep};
pub use profiled::{Mode, Profiled, Shape};

use crate::units::{BytesPerSecond, FlopsPerSecond, Seconds, Watts};
use crate::values::Sourced;

/// System on a chip.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    deny_unknown_fields,
    expecting = "the keys of a SoC: `gpu`, `npu`, `bus`, `synchronisation` and others"
)]
pub struct Soc {
    /// The GPU, whose speed does not depend on shapes.
    pub gpu: SocGpu,
    /// The NPU, if it computes in FP16.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub npu: Option<SocNpu>,
    /// Memory shared by all processors.
    pub bus: Bus,
    /// Costs of synchronising GPU and NPU.
    pub synchronisation: SyncCosts,
    /// Graphs of the NPU, each compiled for a number of tokens.
    pub graphs: Graphs,
    /// Power during prefill.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power: Option<SocPower>,
    /// Default options, which a scenario may replace.
    #[serde(default, skip_serializing_if = "SocOptions::is_usual")]
    pub usual: SocOptions,
}

/// GPU of a SoC.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    deny_unknown_fields,
    expecting = "the keys of a SoC's GPU: `name`, `matmul`, `weight_bits`, `submission`"
)]
pub struct SocGpu {
    /// Name given by the vendor.
    pub name: String,
    /// Achieved rate of matrix products: `F_g`.
    pub matmul: Sourced<FlopsPerSecond>,
    /// Vendor's peak at 16 bit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peak: Option<Sourced<FlopsPerSecond>>,
    /// Bits read of each weight of a model of about four bits.
    pub weight_bits: Sourced<f64>,
    /// Submitting a kernel to a queue that is not empty: `t_async`.
    pub submission: Sourced<Seconds>,
}

/// NPU of a SoC: an array that holds a tile of one matrix while rows of the other stream through it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    deny_unknown_fields,
    expecting = "the keys of a SoC's NPU: `name`, `matmul`, `order_penalty`, `tile`, `weight_bits`"
)]
pub struct SocNpu {
    /// Name given by the vendor.
    pub name: String,
    /// Rate of matrix products in which loading the array costs nothing: `F0`.
    pub matmul: Sourced<FlopsPerSecond>,
    /// Vendor's peak at 16 bit, or half of that of 8-bit integers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peak: Option<Sourced<FlopsPerSecond>>,
    /// Cost of loading the array relative to a stream: lambda in `1 + lambda N / M`, for `M` streamed rows of `N`
    /// numbers.
    pub order_penalty: Sourced<f64>,
    /// Rows and columns of the array; every dimension is padded to a multiple of it.
    pub tile: Sourced<u32>,
    /// Bits read of each weight in prefill.
    pub weight_bits: Sourced<f64>,
    /// Measured times of products instead of the formula.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profiled: Option<Profiled>,
}

/// Shared memory.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "the bandwidths of a bus: `peak`, `one` and `together`")]
pub struct Bus {
    /// Peak bandwidth.
    pub peak: Sourced<BytesPerSecond>,
    /// Bandwidth of one processor alone: `B_g`.
    pub one: Sourced<BytesPerSecond>,
    /// Bandwidth of GPU and NPU together: `B_soc`.
    pub together: Sourced<BytesPerSecond>,
}

/// Costs of synchronisation between processors.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    deny_unknown_fields,
    expecting = "the costs of synchronisation: `fast`, `copy`, `submission` and `sleep`"
)]
pub struct SyncCosts {
    /// Event over shared memory, polled after a predicted sleep: `t_fast`.
    pub fast: Sourced<Seconds>,
    /// Copying a buffer to the GPU through its framework, of any size: `t_copy`.
    pub copy: Sourced<Seconds>,
    /// Submitting a kernel to a queue that has run empty: `t_submit`.
    pub submission: Sourced<Seconds>,
    /// Shortest sleep of a thread; longer predicted waits are slept through in these steps.
    pub sleep: Sourced<Seconds>,
}

/// Graphs of the NPU.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    deny_unknown_fields,
    expecting = "the graphs of an NPU: `sizes` in tokens, `preparation`, `prepared_for` and `each_token`"
)]
pub struct Graphs {
    /// Numbers of tokens with ready graphs, ascending.
    pub sizes: Sourced<Vec<u32>>,
    /// Time to compile a layer's graphs at run time for `prepared_for` tokens.
    pub preparation: Sourced<Seconds>,
    /// Number of tokens of `preparation`.
    pub prepared_for: Sourced<u32>,
    /// Additional time for each further token.
    pub each_token: Sourced<Seconds>,
}

/// Power of the whole SoC during prefill, by the processors in use.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "the powers of a SoC: `gpu`, `layers` and `tensors`")]
pub struct SocPower {
    /// GPU alone.
    pub gpu: Sourced<Watts>,
    /// Products on the NPU, the rest on the GPU.
    pub layers: Sourced<Watts>,
    /// Products on both at once.
    pub tensors: Sourced<Watts>,
}

impl SyncCosts {
    pub fn event(&self, synchronisation: Synchronisation) -> Seconds {
        match synchronisation {
            Synchronisation::Fast => self.fast.value,
            Synchronisation::Slow => self.copy.value + self.submission.value,
        }
    }
}

impl SocPower {
    /// Power under a strategy. Deviation: the paper gives it for three systems; strategies with products on the NPU and
    /// the rest on the GPU are assumed to need as much as the layer-level one.
    pub fn of(&self, strategy: Strategy) -> Watts {
        match strategy {
            Strategy::GpuOnly => self.gpu.value,
            Strategy::HeteroTensor | Strategy::Best => self.tensors.value,
            _ => self.layers.value,
        }
    }
}
