//! Options of a SoC: strategy, synchronisation and partitions.
//!
//! The strategies are those of the HeteroLLM paper and of the systems it is compared with (sections 4.1 and 5.2.2);
//! `hearth_core::soc` implements them.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A strategy, which determines what each processor computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum SocStrategy {
    /// The fastest other strategy for each pass; strategies that compile graphs at run time are excluded.
    #[default]
    Best,
    /// Everything on the GPU.
    GpuOnly,
    /// All matmuls on the NPU, everything else on the GPU; only one of them works at a time.
    NpuOnly,
    /// Every matmul as a whole on the GPU or on the NPU.
    HeteroLayer,
    /// Every matmul split between GPU and NPU if that is faster.
    HeteroTensor,
    /// Matmuls on the NPU, with the prompt padded to the next graph size.
    Padding,
    /// Matmuls on the NPU, with the prompt split into several graph sizes.
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

/// How the processors of a SoC synchronise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Synchronisation {
    /// Through events in shared memory, which are polled after a predicted sleep.
    #[default]
    Fast,
    /// Through the framework of the GPU: a copy and a submission to an empty queue.
    Slow,
}

/// Whether partitions depend on the cost of synchronisation.
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
    /// What each processor computes.
    pub strategy: SocStrategy,
    /// How processors synchronise.
    pub synchronisation: Synchronisation,
    /// Whether partitions depend on the cost of synchronisation.
    #[serde(rename = "partitions")]
    pub partition_policy: PartitionPolicy,
    /// Number of tokens in a chunk of the strategy `chunked`; 256 if absent. source: HeteroLLM paper, section 5.2.2,
    /// on MLLM-NPU
    #[serde(rename = "chunk", skip_serializing_if = "Option::is_none")]
    pub chunk_tokens: Option<u32>,
}

/// Default number of tokens in a chunk. source: HeteroLLM paper, section 5.2.2, the length for which it states the
/// speed
const DEFAULT_CHUNK: u32 = 256;

impl SocOptions {
    /// Returns the default options with this strategy.
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
