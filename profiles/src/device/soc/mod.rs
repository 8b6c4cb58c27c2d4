//! What can a system on a chip do that computes with a GPU and an NPU over one memory?
//!
//! The key `soc` of a `device/1` document: the numbers that the model of `hearth_core::soc` takes (HeteroLLM paper,
//! sections 3 and 4), each with its source. A phone is not one number: its NPU is fast or slow by the shape and the order of
//! a product, its GPU is neither, and waiting for one another costs them.
//!
//! Not here: how long anything takes, which follows from these numbers and a model's shape; and the way a scenario wants
//! the processors used ([`options`]), of which a document may have a usual one.

mod check;
pub mod options;
pub mod profiled;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use options::{SocOptions, Strategy, Synchronisation, Upkeep};
pub use profiled::{Mode, Profiled, Shape};

use crate::sourced::Sourced;
use crate::units::{BytesPerSecond, FlopsPerSecond, Seconds, Watts};

/// A system on a chip.
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
    /// The memory that all processors share.
    pub bus: Bus,
    /// What it costs that GPU and NPU wait for one another.
    pub synchronisation: SyncCosts,
    /// The graphs that the NPU computes by, which are made for a number of tokens each.
    pub graphs: Graphs,
    /// Power while a prompt is read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power: Option<SocPower>,
    /// How the processors are used unless a scenario says otherwise.
    #[serde(default, skip_serializing_if = "SocOptions::is_usual")]
    pub usual: SocOptions,
}

/// The GPU of a SoC.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    deny_unknown_fields,
    expecting = "the keys of a SoC's GPU: `name`, `matmul`, `weight_bits`, `submission`"
)]
pub struct SocGpu {
    /// Name as the vendor gives it.
    pub name: String,
    /// Products of matrices, as achieved: `F_g`.
    pub matmul: Sourced<FlopsPerSecond>,
    /// The vendor's peak at 16 bit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peak: Option<Sourced<FlopsPerSecond>>,
    /// Bits that it reads of a weight of a model of about four bits.
    pub weight_bits: Sourced<f64>,
    /// Submitting a kernel to a queue that is not empty: `t_async`.
    pub submission: Sourced<Seconds>,
}

/// The NPU of a SoC: an array that holds a tile of one matrix while rows of the other stream through it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    deny_unknown_fields,
    expecting = "the keys of a SoC's NPU: `name`, `matmul`, `order_penalty`, `tile`, `weight_bits`"
)]
pub struct SocNpu {
    /// Name as the vendor gives it.
    pub name: String,
    /// Products of matrices in which loading the array costs nothing: `F0`.
    pub matmul: Sourced<FlopsPerSecond>,
    /// The vendor's peak at 16 bit, or half of that of 8-bit integers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peak: Option<Sourced<FlopsPerSecond>>,
    /// What loading the array costs beside a stream: lambda in `1 + lambda N / M`, for `M` streamed rows of `N` numbers.
    pub order_penalty: Sourced<f64>,
    /// Rows and columns of the array; every dimension is padded to a multiple of it.
    pub tile: Sourced<u32>,
    /// Bits that it reads of a weight when a prompt is read.
    pub weight_bits: Sourced<f64>,
    /// Measured times of products instead of the formula.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profiled: Option<Profiled>,
}

/// The shared memory.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "the bandwidths of a bus: `peak`, `one` and `together`")]
pub struct Bus {
    /// What the memory could give.
    pub peak: Sourced<BytesPerSecond>,
    /// What one processor gets of it when it is alone: `B_g`.
    pub one: Sourced<BytesPerSecond>,
    /// What GPU and NPU get of it at the same time: `B_soc`.
    pub together: Sourced<BytesPerSecond>,
}

/// What an event costs at which one processor waits for another.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    deny_unknown_fields,
    expecting = "the costs of synchronisation: `fast`, `copy`, `submission` and `sleep`"
)]
pub struct SyncCosts {
    /// An event over shared memory, polled after a predicted sleep: `t_fast`.
    pub fast: Sourced<Seconds>,
    /// Copying a buffer to the GPU through its framework, however small: `t_copy`.
    pub copy: Sourced<Seconds>,
    /// Submitting a kernel to a queue that has run empty: `t_submit`.
    pub submission: Sourced<Seconds>,
    /// The shortest sleep of a thread: whatever is predicted to be longer is slept through in these steps.
    pub sleep: Sourced<Seconds>,
}

/// Graphs of the NPU.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    deny_unknown_fields,
    expecting = "the graphs of an NPU: `sizes` in tokens, `preparation`, `prepared_for` and `each_token`"
)]
pub struct Graphs {
    /// For how many tokens graphs are kept ready, ascending.
    pub sizes: Sourced<Vec<u32>>,
    /// Making a layer's graphs at run time for so many tokens as `prepared_for` says.
    pub preparation: Sourced<Seconds>,
    /// The number of tokens of `preparation`.
    pub prepared_for: Sourced<u32>,
    /// What each further token adds.
    pub each_token: Sourced<Seconds>,
}

/// Power of the whole SoC while a prompt is read, by what computes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "the powers of a SoC: `gpu`, `layers` and `tensors`")]
pub struct SocPower {
    /// The GPU alone.
    pub gpu: Sourced<Watts>,
    /// Products on the NPU, the rest on the GPU.
    pub layers: Sourced<Watts>,
    /// Products on both at once.
    pub tensors: Sourced<Watts>,
}

impl SyncCosts {
    /// What an event costs.
    pub fn event(&self, synchronisation: Synchronisation) -> Seconds {
        match synchronisation {
            Synchronisation::Fast => self.fast.value,
            Synchronisation::Slow => self.copy.value + self.submission.value,
        }
    }
}

impl SocPower {
    /// Power under a strategy. Deviation: the paper gives it for three systems; whatever computes products on the NPU
    /// and the rest on the GPU is taken to need as much as the layer-level one.
    pub fn of(&self, strategy: Strategy) -> Watts {
        match strategy {
            Strategy::GpuOnly => self.gpu.value,
            Strategy::HeteroTensor | Strategy::Best => self.tensors.value,
            _ => self.layers.value,
        }
    }
}
