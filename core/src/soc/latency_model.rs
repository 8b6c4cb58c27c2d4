//! Prefill and decode times of one model on one SoC.
//!
//! A pass with one token, or with drafted tokens, is computed as decoding ([`super::decode`]). Any other pass is
//! prefill ([`super::prefill`]), in chunks no longer than the largest graph. Strategies that differ only in the
//! NPU graphs of prompts decode on the GPU, as the layer-level engine of the HeteroLLM paper does (section 5.3).

use hearth_profiles::device::soc::{PartitionPolicy, SocStrategy};
use hearth_profiles::device::{Soc, SocOptions};
use hearth_profiles::model::ModelProfile;
use hearth_profiles::{Format, Seconds};

use super::decode::DecodeLatencyModel;
use super::gpu::GpuLatencyModel;
use super::graphs::{GraphSizes, preparation_time};
use super::interval::{SyncInterval, total_time};
use super::matmul;
use super::npu::NpuLatencyModel;
use super::prefill::{self, PromptChunk};
use super::solver::PartitionSolver;
use super::sync::SyncCost;
use hearth_schema::pass::Pass;

/// The strategies that [`SocStrategy::Best`] chooses from.
const CANDIDATES: [SocStrategy; 6] = [
    SocStrategy::HeteroTensor,
    SocStrategy::HeteroLayer,
    SocStrategy::Pipe,
    SocStrategy::Padding,
    SocStrategy::NpuOnly,
    SocStrategy::GpuOnly,
];

#[derive(Debug, Clone)]
pub struct SocLatencyModel<'a> {
    soc: &'a Soc,
    model: &'a ModelProfile,
    options: SocOptions,
    kv_format: Format,
    gpu: GpuLatencyModel,
    npu: Option<NpuLatencyModel<'a>>,
    sizes: GraphSizes,
    sync: SyncCost,
}

#[derive(Debug, Clone, PartialEq)]
pub struct ForwardCost {
    /// The strategy that was used; the fastest strategy if the scenario requests [`SocStrategy::Best`].
    pub strategy: SocStrategy,
    /// The time to build NPU graphs before the pass.
    pub preparation_time: Seconds,
    /// The sync intervals of one layer; they are the same for all layers.
    pub layer_intervals: Vec<SyncInterval>,
    pub output_interval: SyncInterval,
}

impl<'a> SocLatencyModel<'a> {
    /// Creates the latency model with the default options of the SoC's profile.
    pub fn new(soc: &'a Soc, model: &'a ModelProfile, kv_format: Format) -> Self {
        let options = soc.default_options;
        Self {
            soc,
            model,
            options,
            kv_format,
            gpu: GpuLatencyModel::new(soc, matmul::bits_per_weight(model, soc.gpu.bits_per_weight.value)),
            npu: soc.npu.as_ref().map(|npu| NpuLatencyModel::new(npu, &soc.memory_bandwidths)),
            sizes: GraphSizes::new(&soc.graphs),
            sync: SyncCost::new(soc, options),
        }
    }

    pub fn max_graph_size(&self) -> u64 {
        self.sizes.max_size()
    }

    /// Returns the solver that splits matmuls between GPU and NPU; `None` if the SoC has no NPU.
    pub fn solver(&self) -> Option<PartitionSolver<'_>> {
        let npu = self.npu.as_ref()?;
        Some(PartitionSolver { gpu: self.gpu, npu, graph_sizes: &self.sizes, sync_cost: self.sync })
    }

    pub fn forward_cost(&self, pass: Pass) -> ForwardCost {
        match self.options.strategy {
            SocStrategy::Best => self.fastest(pass),
            strategy => self.with_strategy(strategy, pass),
        }
    }

    /// Returns the time of one layer in a pass. The time to build NPU graphs is divided equally among the layers.
    pub fn layer_time(&self, pass: Pass) -> Seconds {
        let forward = self.forward_cost(pass);
        let layers = f64::from(self.model.shape.layers.0.max(1));
        total_time(&forward.layer_intervals) + forward.preparation_time / layers
    }

    /// Returns the time to compute the logits of `positions` positions during decoding.
    pub fn output_time(&self, positions: u32) -> Seconds {
        let one = self.forward_cost(Pass::new(0, 0, 1, true));
        self.output_interval(is_split(&one.layer_intervals), positions).time()
    }

    fn fastest(&self, pass: Pass) -> ForwardCost {
        let usable =
            CANDIDATES.into_iter().filter(|strategy| self.npu.is_some() || strategy.runs_without_npu());
        let all = usable.map(|strategy| self.with_strategy(strategy, pass));
        let time = |cost: &ForwardCost| total_time(&cost.layer_intervals).0;
        let fastest = all.min_by(|one, other| time(one).total_cmp(&time(other)));
        fastest.unwrap_or_else(|| self.with_strategy(SocStrategy::GpuOnly, pass))
    }

    fn with_strategy(&self, strategy: SocStrategy, pass: Pass) -> ForwardCost {
        let layer_intervals = if is_decoded(pass) {
            self.decode_layer(strategy, pass)
        } else {
            self.prefill_layer(strategy, pass)
        };
        let mut preparation = Seconds(0.0);
        if strategy == SocStrategy::OnlinePrepare && !is_decoded(pass) {
            let chunks = self.sizes.chunk_lengths(u64::from(pass.tokens), self.sizes.max_size());
            preparation = chunks.into_iter().map(|chunk| preparation_time(&self.soc.graphs, chunk)).sum();
        }
        let splits_output = is_decoded(pass) && is_split(&layer_intervals);
        let output_interval = self.output_interval(splits_output, pass.output_count());
        ForwardCost { strategy, preparation_time: preparation, layer_intervals, output_interval }
    }

    fn decode_layer(&self, strategy: SocStrategy, pass: Pass) -> Vec<SyncInterval> {
        let shape = &self.model.shape;
        let seen =
            shape.mixer(0).cache_bytes(pass.first_position.saturating_add(pass.tokens), self.kv_format);
        let decode = self.decode(u64::from(pass.tokens), seen.as_f64());
        match strategy {
            SocStrategy::HeteroTensor => {
                let (split, on_gpu) = (decode.split_intervals(shape), decode.gpu_intervals(shape));
                // With expensive synchronisation the solved partition uses the GPU alone.
                let is_solved = self.options.partition_policy == PartitionPolicy::Solved;
                if is_solved && total_time(&on_gpu).0 < total_time(&split).0 { on_gpu } else { split }
            }
            SocStrategy::NpuOnly => decode.npu_intervals(shape),
            _ => decode.gpu_intervals(shape),
        }
    }

    fn prefill_layer(&self, strategy: SocStrategy, pass: Pass) -> Vec<SyncInterval> {
        let shape = &self.model.shape;
        let chunk = u64::from(self.options.chunk_tokens()).clamp(1, self.sizes.max_size());
        let largest = if strategy == SocStrategy::Chunked { chunk } else { self.sizes.max_size() };
        let mut context = u64::from(pass.first_position);
        let chunks = self.sizes.chunk_lengths(u64::from(pass.tokens), largest);
        let layer = |tokens: u64| {
            context += tokens;
            let part = PromptChunk { tokens, context_length: context };
            match self.solver() {
                Some(solver) => prefill::layer_intervals(&solver, strategy, shape, part, chunk),
                None => prefill::gpu_intervals(&self.gpu, shape, part),
            }
        };
        chunks.into_iter().flat_map(layer).collect()
    }

    /// Returns the sync interval of the output matmul for `positions` positions. If decoding splits the matmuls of the
    /// layers, it also splits the output matmul, without sync events; after a prompt the GPU computes the output
    /// matmul. Both rules follow the HeteroLLM paper.
    fn output_interval(&self, split: bool, positions: u32) -> SyncInterval {
        if positions == 0 {
            return SyncInterval::default();
        }
        let (matmul, tokens) = (matmul::output_matmul(&self.model.shape), u64::from(positions));
        if split {
            let time = self.decode(tokens, 0.0).split_matmul_seconds(matmul);
            return SyncInterval {
                kernel_seconds: vec![time],
                graph_seconds: vec![time],
                ..SyncInterval::default()
            };
        }
        SyncInterval::without_events(vec![self.gpu.decode_matmul_seconds(matmul, tokens)])
    }

    fn decode(&self, tokens: u64, kv_bytes_per_layer: f64) -> DecodeLatencyModel<'_> {
        DecodeLatencyModel { soc: self.soc, gpu: self.gpu, sync_cost: self.sync, tokens, kv_bytes_per_layer }
    }
}

fn is_decoded(pass: Pass) -> bool {
    pass.tokens == 1 || pass.drafted > 0
}

/// Whether GPU and NPU share the matmuls of a layer.
fn is_split(layer: &[SyncInterval]) -> bool {
    layer.iter().any(|interval| !interval.graph_seconds.is_empty() && !interval.kernel_seconds.is_empty())
}
