//! Options of a SoC: strategy, synchronisation and partitions.
//!
//! The strategies are those of the HeteroLLM paper and of the systems it is compared with (sections 4.1 and 5.2.2);
//! `hearth_core::soc` implements them.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Strategy: which processor computes what.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Strategy {
    /// The fastest of the others for each pass, except those that compile graphs at run time.
    #[default]
    Best,
    /// Everything on the GPU.
    GpuOnly,
    /// Every product on the NPU, one after another; the rest on the GPU.
    NpuOnly,
    /// Every product wholly on the GPU or on the NPU.
    HeteroLayer,
    /// Every product split between both where that is faster.
    HeteroTensor,
    /// Products on the NPU, the prompt padded to the next graph.
    Padding,
    /// Products on the NPU, the prompt split into several graphs.
    Pipe,
    /// Products on the NPU, with graphs compiled for this prompt at run time.
    OnlinePrepare,
    /// Products on the NPU, the prompt in chunks of one size.
    Chunked,
}

impl Strategy {
    /// All strategies except `best`.
    pub const ALL: [Strategy; 8] = [
        Strategy::GpuOnly,
        Strategy::NpuOnly,
        Strategy::HeteroLayer,
        Strategy::HeteroTensor,
        Strategy::Padding,
        Strategy::Pipe,
        Strategy::OnlinePrepare,
        Strategy::Chunked,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Strategy::Best => "best",
            Strategy::GpuOnly => "gpu-only",
            Strategy::NpuOnly => "npu-only",
            Strategy::HeteroLayer => "hetero-layer",
            Strategy::HeteroTensor => "hetero-tensor",
            Strategy::Padding => "padding",
            Strategy::Pipe => "pipe",
            Strategy::OnlinePrepare => "online-prepare",
            Strategy::Chunked => "chunked",
        }
    }

    pub fn needs_no_npu(self) -> bool {
        matches!(self, Strategy::Best | Strategy::GpuOnly)
    }
}

/// Synchronisation between processors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Synchronisation {
    /// Through shared memory, polled after a predicted sleep.
    #[default]
    Fast,
    /// Through the GPU's framework: a copy, and a submission to an empty queue.
    Slow,
}

/// Whether partitions depend on the cost of synchronisation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Upkeep {
    /// Solved for the synchronisation in use.
    #[default]
    Solved,
    /// Always the partitions of fast synchronisation.
    Fixed,
}

/// Options of a SoC in a scenario.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(
    deny_unknown_fields,
    default,
    expecting = "how a SoC is used, such as `{strategy: hetero-tensor, synchronisation: slow, partitions: fixed}`"
)]
pub struct SocOptions {
    /// Which processor computes what.
    pub strategy: Strategy,
    /// How processors synchronise.
    pub synchronisation: Synchronisation,
    /// Whether partitions depend on the cost of synchronisation.
    pub partitions: Upkeep,
    /// `chunked`: tokens of a chunk; 256 if absent. source: HeteroLLM paper, section 5.2.2, on MLLM-NPU
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chunk: Option<u32>,
}

/// The default length of a chunk. source: HeteroLLM paper, section 5.2.2, the length whose speed it names
const USUAL_CHUNK: u32 = 256;

impl SocOptions {
    /// The default options with this strategy.
    pub fn of(strategy: Strategy) -> Self {
        Self { strategy, ..Self::default() }
    }

    pub fn chunk(&self) -> u32 {
        self.chunk.unwrap_or(USUAL_CHUNK)
    }

    pub(super) fn is_usual(&self) -> bool {
        *self == Self::default()
    }
}
