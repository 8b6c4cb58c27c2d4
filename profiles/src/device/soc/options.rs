//! Options of a SoC: strategy, synchronisation and partitions.
//!
//! The strategies are those of the HeteroLLM paper and of the systems in its comparison (sections 4.1 and 5.2.2).
//! `hearth_core::soc` implements the strategies.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The strategy that determines what the GPU and the NPU compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum SocStrategy {
    /// The fastest of the other strategies for each pass, except strategies that compile graphs at run time.
    #[default]
    Best,
    /// Everything on the GPU.
    GpuOnly,
    /// All matmuls on the NPU, everything else on the GPU; only one processor works at a time.
    NpuOnly,
    /// Every matmul as a whole either on the GPU or on the NPU.
    HeteroLayer,
    /// Every matmul split between GPU and NPU if splitting is faster.
    HeteroTensor,
    /// Matmuls on the NPU, with the prompt padded to the next graph size.
    Padding,
    /// Matmuls on the NPU, with the prompt split into chunks that have the sizes of compiled graphs.
    Pipe,
    /// Matmuls on the NPU, with graphs compiled for the prompt at run time.
    OnlinePrepare,
    /// Matmuls on the NPU, with the prompt in chunks of equal size.
    Chunked,
}

impl SocStrategy {
    /// All strategies except `best`.
    pub const ALL_EXCEPT_BEST: [SocStrategy; 8] = [
        SocStrategy::GpuOnly,
        SocStrategy::NpuOnly,
        SocStrategy::HeteroLayer,
        SocStrategy::HeteroTensor,
        SocStrategy::Padding,
        SocStrategy::Pipe,
        SocStrategy::OnlinePrepare,
        SocStrategy::Chunked,
    ];

    pub fn name(self) -> &'static str {
        match self {
            SocStrategy::Best => "best",
            SocStrategy::GpuOnly => "gpu-only",
            SocStrategy::NpuOnly => "npu-only",
            SocStrategy::HeteroLayer => "hetero-layer",
            SocStrategy::HeteroTensor => "hetero-tensor",
            SocStrategy::Padding => "padding",
            SocStrategy::Pipe => "pipe",
            SocStrategy::OnlinePrepare => "online-prepare",
            SocStrategy::Chunked => "chunked",
        }
    }

    pub fn runs_without_npu(self) -> bool {
        matches!(self, SocStrategy::Best | SocStrategy::GpuOnly)
    }
}

/// Method that synchronises the processors of a SoC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Synchronisation {
    /// Events in shared memory, which are polled after a predicted sleep.
    #[default]
    Fast,
    /// The framework of the GPU: a copy of a buffer and a submission to an empty queue.
    Slow,
}

/// Whether the partitions of matmuls depend on the cost of synchronisation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum PartitionPolicy {
    /// Partitions are optimised for the synchronisation in use.
    #[default]
    Solved,
    /// Partitions are always those of fast synchronisation.
    Fixed,
}

/// The options of a SoC in a scenario.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(
    deny_unknown_fields,
    default,
    expecting = "the options of a SoC, such as `{strategy: hetero-tensor, synchronisation: slow, partitions: fixed}`"
)]
pub struct SocOptions {
    /// Strategy that determines what the GPU and the NPU compute.
    pub strategy: SocStrategy,
    /// Method that synchronises the processors.
    pub synchronisation: Synchronisation,
    /// Whether the partitions of matmuls depend on the cost of synchronisation.
    #[serde(rename = "partitions")]
    pub partition_policy: PartitionPolicy,
    /// Number of tokens in a chunk of the strategy `chunked`; 256 if absent. source: HeteroLLM paper, section 5.2.2,
    /// on MLLM-NPU
    #[serde(rename = "chunk", skip_serializing_if = "Option::is_none")]
    pub chunk_tokens: Option<u32>,
}

/// Default number of tokens in a chunk. source: HeteroLLM paper, section 5.2.2, which states the speed at this length
const DEFAULT_CHUNK: u32 = 256;

impl SocOptions {
    /// Returns the default options, but with the given strategy.
    pub fn with_strategy(strategy: SocStrategy) -> Self {
        Self { strategy, ..Self::default() }
    }

    pub fn chunk_tokens(&self) -> u32 {
        self.chunk_tokens.unwrap_or(DEFAULT_CHUNK)
    }

    pub(super) fn is_default(&self) -> bool {
        *self == Self::default()
    }
}
