//! Prefill and decode times of one model on one SoC.
//!
//! Planner and simulator ask it for the sync intervals of a layer and of the output matrix in a pass, with the
//! strategy of the scenario or the fastest one.
//!
//! A pass with one token, or with drafted tokens, is computed as decoding ([`super::decode`]). Any other pass is
//! prefill ([`super::prefill`]), in chunks no longer than the largest graph. Strategies that differ only in the
//! graphs of prompts decode on the GPU, as the paper's layer-level engine does (section 5.3).

use hearth_profiles::device::soc::{PartitionPolicy, Strategy};
use hearth_profiles::device::{Soc, SocOptions};
use hearth_profiles::model::ModelProfile;
use hearth_profiles::{Bytes, Seconds};

use super::decode::Decode;
use super::gpu::Gpu;
use super::graphs::{GraphSizes, preparation};
use super::interval::{SyncInterval, total};
use super::matmul;
use super::npu::Npu;
use super::prefill::{self, PromptChunk};
use super::solver::Solver;
use super::sync::SyncCost;
use hearth_schema::pass::Pass;

/// The strategies that [`Strategy::Best`] chooses from.
const CANDIDATES: [Strategy; 6] = [
    Strategy::HeteroTensor,
    Strategy::HeteroLayer,
    Strategy::Pipe,
    Strategy::Padding,
    Strategy::NpuOnly,
    Strategy::GpuOnly,
];

/// The timing model of one model on one SoC.
#[derive(Debug, Clone)]
pub struct Chip<'a> {
    soc: &'a Soc,
    model: &'a ModelProfile,
    options: SocOptions,
    kv_element: Bytes,
    gpu: Gpu,
    npu: Option<Npu<'a>>,
    sizes: GraphSizes,
    sync: SyncCost,
}

/// The cost of a forward pass.
#[derive(Debug, Clone, PartialEq)]
pub struct Forward {
    /// The strategy that was used; the fastest one if the scenario requests [`Strategy::Best`].
    pub strategy: Strategy,
    /// The time to build NPU graphs before the pass.
    pub preparation: Seconds,
    /// The sync intervals of one layer; all layers have the same ones.
    pub layer: Vec<SyncInterval>,
    /// The output matrix multiplication.
    pub head: SyncInterval,
}

impl<'a> Chip<'a> {
    /// Uses the default options of the SoC's profile.
    pub fn new(soc: &'a Soc, model: &'a ModelProfile, kv_element: Bytes) -> Self {
        let options = soc.usual;
        Self {
            soc,
            model,
            options,
            kv_element,
            gpu: Gpu::new(soc, matmul::weight_bits(model, soc.gpu.weight_bits.value)),
            npu: soc.npu.as_ref().map(|npu| Npu::new(npu, &soc.bus)),
            sizes: GraphSizes::new(&soc.graphs),
            sync: SyncCost::new(soc, options),
        }
    }

    /// The size of the largest graph, in tokens.
    pub fn largest_graph(&self) -> u64 {
        self.sizes.largest()
    }

    /// Returns the solver that splits matmuls between GPU and NPU, `None` without an NPU.
    pub fn solver(&self) -> Option<Solver<'_>> {
        let npu = self.npu.as_ref()?;
        Some(Solver { gpu: self.gpu, npu, sizes: &self.sizes, sync: self.sync })
    }

    /// Returns the cost of a pass.
    pub fn forward(&self, pass: Pass) -> Forward {
        let strategy = self.options.strategy;
        let mut forward =
            if strategy == Strategy::Best { self.fastest(pass) } else { self.with_strategy(strategy, pass) };
        forward.head = self.head(is_decoded(pass) && is_split(&forward.layer), pass.outputs());
        forward
    }

    /// Returns the time of one layer in a pass. The time to build graphs is divided equally among the layers.
    pub fn layer_time(&self, pass: Pass) -> Seconds {
        let forward = self.forward(pass);
        let layers = f64::from(self.model.shape.layers.0.max(1));
        total(&forward.layer) + forward.preparation / layers
    }

    /// Returns the time to compute the logits of `positions` positions during decoding.
    pub fn output_time(&self, positions: u32) -> Seconds {
        let one = self.forward(Pass::plain(0, 0, 1, true));
        self.head(is_split(&one.layer), positions).time()
    }

    fn fastest(&self, pass: Pass) -> Forward {
        let usable = CANDIDATES.into_iter().filter(|strategy| self.npu.is_some() || strategy.needs_no_npu());
        let all = usable.map(|strategy| self.with_strategy(strategy, pass));
        let fastest = all.min_by(|one, other| total(&one.layer).0.total_cmp(&total(&other.layer).0));
        fastest.unwrap_or_else(|| self.with_strategy(Strategy::GpuOnly, pass))
    }

    fn with_strategy(&self, strategy: Strategy, pass: Pass) -> Forward {
        let layer = if is_decoded(pass) {
            self.decode_layer(strategy, pass)
        } else {
            self.prefill_layer(strategy, pass)
        };
        let online = strategy == Strategy::OnlinePrepare && !is_decoded(pass);
        let tokens = u64::from(pass.tokens);
        let preparation = if online {
            let chunks = self.sizes.chunks(tokens, self.sizes.largest());
            chunks.into_iter().map(|chunk| preparation(&self.soc.graphs, chunk)).sum()
        } else {
            Seconds(0.0)
        };
        Forward { strategy, preparation, layer, head: SyncInterval::default() }
    }

    fn decode_layer(&self, strategy: Strategy, pass: Pass) -> Vec<SyncInterval> {
        let shape = &self.model.shape;
        let seen = shape.kv_bytes_per_layer(pass.first_position.saturating_add(pass.tokens), self.kv_element);
        let decode = self.decode(u64::from(pass.tokens), seen.as_f64());
        match strategy {
            Strategy::HeteroTensor => {
                let (split, on_gpu) = (decode.split(shape), decode.on_gpu(shape));
                // With expensive synchronisation the solved partition uses the GPU alone.
                let is_solved = self.options.partitions == PartitionPolicy::Solved;
                if is_solved && total(&on_gpu).0 < total(&split).0 { on_gpu } else { split }
            }
            Strategy::NpuOnly => decode.on_npu(shape),
            _ => decode.on_gpu(shape),
        }
    }

    fn prefill_layer(&self, strategy: Strategy, pass: Pass) -> Vec<SyncInterval> {
        let shape = &self.model.shape;
        let chunk = u64::from(self.options.chunk()).clamp(1, self.sizes.largest());
        let largest = if strategy == Strategy::Chunked { chunk } else { self.sizes.largest() };
        let mut context = u64::from(pass.first_position);
        let chunks = self.sizes.chunks(u64::from(pass.tokens), largest);
        let layer = |tokens: u64| {
            context += tokens;
            let part = PromptChunk { tokens, context };
            match self.solver() {
                Some(solver) => prefill::intervals(&solver, strategy, shape, part, chunk),
                None => prefill::on_gpu(&self.gpu, shape, part),
            }
        };
        chunks.into_iter().flat_map(layer).collect()
    }

    /// Returns the output matrix multiplication for `positions` positions. If decoding splits the matmuls of the
    /// layers, it splits this one too, without events; after a prompt the GPU computes it. Both follow the paper.
    fn head(&self, split: bool, positions: u32) -> SyncInterval {
        if positions == 0 {
            return SyncInterval::default();
        }
        let (matmul, tokens) = (matmul::head(&self.model.shape), u64::from(positions));
        if split {
            let time = self.decode(tokens, 0.0).split_matmul_time(matmul);
            return SyncInterval { gpu: vec![time], npu: vec![time], ..SyncInterval::default() };
        }
        SyncInterval::queued(vec![self.gpu.streamed(matmul, tokens)])
    }

    fn decode(&self, tokens: u64, cached: f64) -> Decode<'_> {
        Decode { soc: self.soc, gpu: self.gpu, sync: self.sync, tokens, cached }
    }
}

/// Whether a pass is decoding rather than prefill.
fn is_decoded(pass: Pass) -> bool {
    pass.tokens == 1 || pass.drafted > 0
}

/// Whether GPU and NPU share the matmuls of a layer.
fn is_split(layer: &[SyncInterval]) -> bool {
    layer.iter().any(|interval| !interval.npu.is_empty() && !interval.gpu.is_empty())
}
