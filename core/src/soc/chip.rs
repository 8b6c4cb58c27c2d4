//! Prefill and decode times of one model on one SoC.
//!
//! What planner and simulator ask: the stages of a layer and of the head for a pass, under the strategy that was asked
//! for, or the fastest.
//!
//! A pass of one token, or of drafted ones, is decoded ([`super::decode`]); any other is read as a part of a prompt
//! ([`super::prefill`]), in pieces no longer than the largest graph. Strategies about graphs for prompts decode on the
//! GPU, as the paper's layer-level engine does (section 5.3).

use hearth_profiles::device::soc::{Strategy, Upkeep};
use hearth_profiles::device::{Soc, SocOptions};
use hearth_profiles::model::ModelProfile;
use hearth_profiles::{Bytes, Seconds};

use super::decode::Decode;
use super::gpu::Gpu;
use super::graphs::{Sizes, preparation};
use super::matmul;
use super::npu::Npu;
use super::prefill::{self, PromptChunk};
use super::solver::Solver;
use super::stage::{Stage, total};
use super::sync::Sync;
use hearth_schema::pass::Pass;

/// The strategies that `best` chooses among.
const CANDIDATES: [Strategy; 6] = [
    Strategy::HeteroTensor,
    Strategy::HeteroLayer,
    Strategy::Pipe,
    Strategy::Padding,
    Strategy::NpuOnly,
    Strategy::GpuOnly,
];

/// A SoC and a model.
#[derive(Debug, Clone)]
pub struct Chip<'a> {
    soc: &'a Soc,
    model: &'a ModelProfile,
    options: SocOptions,
    kv_element: Bytes,
    gpu: Gpu,
    npu: Option<Npu<'a>>,
    sizes: Sizes,
    sync: Sync,
}

/// A pass through a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Forward {
    /// The strategy; the fastest one if the scenario names none.
    pub strategy: Strategy,
    /// The time to build graphs before the pass.
    pub preparation: Seconds,
    /// The stages of every layer.
    pub layer: Vec<Stage>,
    /// The output matrix.
    pub head: Stage,
}

impl<'a> Chip<'a> {
    /// Used as its document says.
    pub fn new(soc: &'a Soc, model: &'a ModelProfile, kv_element: Bytes) -> Self {
        let options = soc.usual;
        Self {
            soc,
            model,
            options,
            kv_element,
            gpu: Gpu::new(soc, matmul::weight_bits(model, soc.gpu.weight_bits.value)),
            npu: soc.npu.as_ref().map(|npu| Npu::new(npu, &soc.bus)),
            sizes: Sizes::new(&soc.graphs),
            sync: Sync::new(soc, options),
        }
    }

    /// The largest graph, in tokens.
    pub fn largest_graph(&self) -> u64 {
        self.sizes.largest()
    }

    /// Returns the solver that splits matrix products between GPU and NPU, `None` without an NPU.
    pub fn solver(&self) -> Option<Solver<'_>> {
        let npu = self.npu.as_ref()?;
        Some(Solver { gpu: self.gpu, npu, sizes: &self.sizes, sync: self.sync })
    }

    /// The stages of a pass.
    pub fn forward(&self, pass: Pass) -> Forward {
        let strategy = self.options.strategy;
        let mut forward =
            if strategy == Strategy::Best { self.best(pass) } else { self.under(strategy, pass) };
        forward.head = self.head(is_decoded(pass) && is_cut(&forward.layer), pass.outputs());
        forward
    }

    /// The time of a layer for a pass. Making graphs is borne by all layers of the model in equal parts.
    pub fn layer_time(&self, pass: Pass) -> Seconds {
        let forward = self.forward(pass);
        let layers = f64::from(self.model.shape.layers.0.max(1));
        total(&forward.layer) + forward.preparation / layers
    }

    /// The output matrix for `positions`, as while tokens are generated.
    pub fn output_time(&self, positions: u32) -> Seconds {
        let one = self.forward(Pass::plain(0, 0, 1, true));
        self.head(is_cut(&one.layer), positions).time()
    }

    fn best(&self, pass: Pass) -> Forward {
        let found = CANDIDATES.into_iter().filter(|strategy| self.npu.is_some() || strategy.needs_no_npu());
        let all = found.map(|strategy| self.under(strategy, pass));
        let fastest = all.min_by(|one, other| total(&one.layer).0.total_cmp(&total(&other.layer).0));
        fastest.unwrap_or_else(|| self.under(Strategy::GpuOnly, pass))
    }

    fn under(&self, strategy: Strategy, pass: Pass) -> Forward {
        let layer = if is_decoded(pass) { self.decoded(strategy, pass) } else { self.read(strategy, pass) };
        let online = strategy == Strategy::OnlinePrepare && !is_decoded(pass);
        let tokens = u64::from(pass.tokens);
        let preparation = if online {
            let pieces = self.sizes.pieces(tokens, self.sizes.largest());
            pieces.into_iter().map(|piece| preparation(&self.soc.graphs, piece)).sum()
        } else {
            Seconds(0.0)
        };
        Forward { strategy, preparation, layer, head: Stage::default() }
    }

    fn decoded(&self, strategy: Strategy, pass: Pass) -> Vec<Stage> {
        let shape = &self.model.shape;
        let seen = shape.kv_bytes_per_layer(pass.first_position.saturating_add(pass.tokens), self.kv_element);
        let decode = self.decode(u64::from(pass.tokens), seen.as_f64());
        match strategy {
            Strategy::HeteroTensor => {
                let (cut, alone) = (decode.cut(shape), decode.on_gpu(shape));
                // A partition that is solved for dear synchronisation is none.
                let solved = self.options.partitions == Upkeep::Solved;
                if solved && total(&alone).0 < total(&cut).0 { alone } else { cut }
            }
            Strategy::NpuOnly => decode.on_npu(shape),
            _ => decode.on_gpu(shape),
        }
    }

    fn read(&self, strategy: Strategy, pass: Pass) -> Vec<Stage> {
        let shape = &self.model.shape;
        let chunk = u64::from(self.options.chunk()).clamp(1, self.sizes.largest());
        let largest = if strategy == Strategy::Chunked { chunk } else { self.sizes.largest() };
        let mut context = u64::from(pass.first_position);
        let pieces = self.sizes.pieces(u64::from(pass.tokens), largest);
        let layer = |tokens: u64| {
            context += tokens;
            let piece = PromptChunk { tokens, context };
            match self.solver() {
                Some(solver) => prefill::stages(&solver, strategy, shape, piece, chunk),
                None => prefill::on_gpu(&self.gpu, shape, piece),
            }
        };
        pieces.into_iter().flat_map(layer).collect()
    }

    /// The head for `positions`. Where generating cuts the products it cuts the head too, without events; after a
    /// prompt it is the GPU's. Both as published.
    fn head(&self, cut: bool, positions: u32) -> Stage {
        if positions == 0 {
            return Stage::default();
        }
        let (matmul, tokens) = (matmul::head(&self.model.shape), u64::from(positions));
        if cut {
            let time = self.decode(tokens, 0.0).cut_product(matmul);
            return Stage { gpu: vec![time], npu: vec![time], ..Stage::default() };
        }
        Stage::queued(vec![self.gpu.streamed(matmul, tokens)])
    }

    fn decode(&self, tokens: u64, cached: f64) -> Decode<'_> {
        Decode { soc: self.soc, gpu: self.gpu, sync: self.sync, tokens, cached }
    }
}

/// Whether a pass generates rather than reads a prompt.
fn is_decoded(pass: Pass) -> bool {
    pass.tokens == 1 || pass.drafted > 0
}

/// Whether GPU and NPU share the products of a layer.
fn is_cut(layer: &[Stage]) -> bool {
    layer.iter().any(|stage| !stage.npu.is_empty() && !stage.gpu.is_empty())
}
