//! How are the processors of a SoC to be used?
//!
//! The strategies of the HeteroLLM paper and of what it is compared with (sections 4.1 and 5.2.2), with fast or slow
//! synchronisation, and with partitions that are solved again when synchronisation costs more, or stay as they were.
//!
//! Not here: what each of them does (`hearth_core::soc`).

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Who computes what.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Strategy {
    /// Whichever of the others is fastest, pass by pass; those that make graphs at run time aside.
    #[default]
    Best,
    /// Everything on the GPU.
    GpuOnly,
    /// Every product on the NPU, one after another; the rest on the GPU.
    NpuOnly,
    /// Every product wholly on the GPU or on the NPU.
    HeteroLayer,
    /// Every product cut between both where that is faster.
    HeteroTensor,
    /// Products on the NPU, the prompt padded to the next graph.
    Padding,
    /// Products on the NPU, the prompt cut into several graphs.
    Pipe,
    /// Products on the NPU, with graphs made for this prompt when it comes.
    OnlinePrepare,
    /// Products on the NPU, the prompt in chunks of one size.
    Chunked,
}

impl Strategy {
    /// All that compute on their own.
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

    /// Its name in documents.
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

    /// Whether it runs without an NPU.
    pub fn needs_no_npu(self) -> bool {
        matches!(self, Strategy::Best | Strategy::GpuOnly)
    }
}

/// How one processor learns that another is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Synchronisation {
    /// Over shared memory, polled after a predicted sleep.
    #[default]
    Fast,
    /// Through the GPU's framework: a copy, and a submission to an empty queue.
    Slow,
}

/// Whether partitions follow the cost of synchronisation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Upkeep {
    /// Solved for the synchronisation that is used.
    #[default]
    Solved,
    /// As they are for fast synchronisation, whatever is used.
    Fixed,
}

/// What a scenario says of a SoC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(
    deny_unknown_fields,
    default,
    expecting = "how a SoC is used, as `{strategy: hetero-tensor, synchronisation: slow, partitions: fixed}`"
)]
pub struct SocOptions {
    /// Who computes what.
    pub strategy: Strategy,
    /// How one processor learns that another is done.
    pub synchronisation: Synchronisation,
    /// Whether partitions follow the cost of that.
    pub partitions: Upkeep,
    /// `chunked`: tokens of a chunk; 256 if absent. source: HeteroLLM paper, section 5.2.2, on MLLM-NPU
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chunk: Option<u32>,
}

/// Tokens of a chunk if nobody says. source: HeteroLLM paper, section 5.2.2, the length whose speed it names
const USUAL_CHUNK: u32 = 256;

impl SocOptions {
    /// The usual way of using a SoC with this strategy.
    pub fn of(strategy: Strategy) -> Self {
        Self { strategy, ..Self::default() }
    }

    /// Tokens of a chunk.
    pub fn chunk(&self) -> u32 {
        self.chunk.unwrap_or(USUAL_CHUNK)
    }

    pub(super) fn is_usual(&self) -> bool {
        *self == Self::default()
    }
}
