//! The model of this device: its weights, the stage that a plan gives it, and the checks of a plan against both.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use hearth_core::memory::kv_cache_bytes;
use hearth_profiles::model::ModelProfile;
use hearth_profiles::{Bytes, measure};
use hearth_schema::pass::MAX_PASS_TOKENS;
use hearth_schema::plan::Plan;
use hearth_schema::plan::Processor;
use hearth_schema::scenario::ActivationFormat;
use hearth_schema::scenario::KvFormat;

use crate::error::RingError;
use crate::wire::{WorkerFacts, activations};
use hearth_runtime::accelerator::{AcceleratedPlace, Accelerator, Progress};
use hearth_runtime::backend::CacheOptions;
use hearth_runtime::cache::CacheFormat;
use hearth_runtime::cpu::Cpu;
use hearth_runtime::error::ExecError;
use hearth_runtime::head::Head;
use hearth_runtime::memory::MemoryWatch;
use hearth_runtime::pool::{Pool, PoolOptions};
use hearth_runtime::residency::ResidencyBarrier;
use hearth_runtime::stage::Stage;
use hearth_runtime::weights::Weights;

/// A model file on this device.
#[derive(Debug)]
pub struct LocalModel {
    /// Its mapped weights.
    pub weights: Arc<Weights>,
    /// Its shape, sizes and digests.
    pub profile: ModelProfile,
    /// What computes the layers that a plan puts on this device's GPU.
    pub accelerator: Option<Accelerator>,
}

impl LocalModel {
    /// Maps the model at `path` and checks its tensor table.
    pub fn open(path: &Path) -> Result<LocalModel, ExecError> {
        // Memory pressure counts from before the first weight is touched.
        MemoryWatch::shared();
        let weights = Arc::new(Weights::open(path)?);
        let profile = ModelProfile::from_gguf(weights.model())?;
        Ok(LocalModel { weights, profile, accelerator: None })
    }

    /// The same with what computes layers on a GPU.
    #[must_use]
    pub fn with_accelerator(self, accelerator: Option<Accelerator>) -> LocalModel {
        LocalModel { accelerator, ..self }
    }

    /// The largest activations a pass can have, in bytes.
    pub fn max_activation_bytes(&self) -> usize {
        MAX_PASS_TOKENS as usize * self.weights.shape().embedding as usize * size_of::<f32>()
    }

    /// The facts that a worker with this model sends to a head.
    pub fn facts(&self) -> WorkerFacts {
        WorkerFacts {
            model_digest: self.profile.digest.clone(),
            shape_digest: self.profile.shape_digest(),
            ..facts()
        }
    }

    /// Whether a plan was made for this model, and for execution.
    pub fn check(&self, plan: &Plan) -> Result<(), RingError> {
        check_executable(plan)?;
        check_digests(plan, &self.profile.digest, &self.profile.shape_digest(), "this device")
    }

    /// Whether the key-value cache of a place fits into memory; nothing of it could be reclaimed.
    pub(super) fn check_memory(&self, plan: &Plan, place: usize) -> Result<(), RingError> {
        let layers: u32 = plan.windows(place).iter().map(|window| window.len() as u32).sum();
        let cache = kv_cache_bytes(&self.profile.shape, layers, plan.context, plan.kv_cache, plan.sequences);
        let (windows, embedding) = (gpu_windows(plan, place).len(), self.profile.shape.embedding);
        let kept = AcceleratedPlace::kept_bytes(windows, cache_options(plan), embedding);
        let available = measure::memory::available();
        if cache.0.saturating_add(kept) <= available.0 {
            return Ok(());
        }
        let name = &plan.devices[place].name;
        let several = if plan.sequences > 1 { format!(", {} times", plan.sequences) } else { String::new() };
        let beside = match kept {
            0 => String::new(),
            kept => format!(", and {} more for what goes to its GPU,", Bytes(kept)),
        };
        let what = format!(
            "the key-value cache of {layers} layers for a context of {}{several} takes {}{beside} on `{name}`, which \
             has {available}",
            plan.context, cache
        );
        Err(RingError::plan_with_hint(what, "plan with a smaller `context`"))
    }

    /// The layers of a place in the ring, with their cache, and on the head the model's ends.
    /// The computation waits for their weights at `barrier`.
    pub(super) fn stage(
        &self,
        plan: &Plan,
        place: usize,
        pool: &Arc<Pool>,
        barrier: ResidencyBarrier,
        gpu_options: GpuOptions<'_>,
    ) -> Result<(Stage, Option<Head>), RingError> {
        if place == 0 && !self.weights.is_whole() {
            return Err(RingError::plan("a head needs the whole model, and this one was fetched in part"));
        }
        self.check_memory(plan, place)?;
        let cpu = Cpu::new(pool.clone()).with_barrier(barrier);
        let cache = cache_options(plan);
        let head = (place == 0).then(|| Head::new(self.weights.clone(), cpu.clone()));
        let output = place == 0 && plan.output == Processor::Gpu;
        let accelerated = gpu_windows(plan, place);
        let after_layer: Option<fn(&mut [f32])> = match plan.activations {
            ActivationFormat::F16 => Some(activations::round),
            ActivationFormat::F32 => None,
        };
        let stage = if accelerated.is_empty() && !output {
            Stage::on_cpu(self.weights.clone(), &plan.windows(place), cache, cpu)?
        } else {
            let owned = plan.windows(place);
            let (weights, name) = (self.weights.clone(), &plan.devices[place].name);
            let accelerator = self.accelerator.as_ref().ok_or_else(|| {
                let what = format!(
                    "the plan puts layers of `{name}` on a GPU, and this device computes on its processors only"
                );
                RingError::plan_with_hint(what, "plan with `gpu_layers: 0`")
            })?;
            let part = AcceleratedPlace {
                weights,
                owned: owned.clone(),
                accelerated,
                output,
                cache,
                after_layer,
                cpu,
                fallback_to_cpu: gpu_options.fallback_to_cpu,
                progress: gpu_options.progress.clone(),
            };
            let backend = accelerator.backend(part);
            let backend = backend.map_err(|reason| RingError::plan(format!("on `{name}`: {reason}")))?;
            Stage::new(self.weights.clone(), &owned, cache, backend)?
        };
        Ok(match after_layer {
            Some(rounding) => (stage.after_layer(rounding), head),
            None => (stage, head),
        })
    }
}

/// How the layers of a GPU are taken up.
#[derive(Clone, Copy)]
pub(super) struct GpuOptions<'a> {
    /// Whether a failed GPU falls back to the CPU: a run continues with it.
    pub(super) fallback_to_cpu: bool,
    /// Receives how far the upload has come.
    pub(super) progress: &'a Progress,
}

/// The layers of a place that are on its GPU, window by window.
fn gpu_windows(plan: &Plan, place: usize) -> Vec<Range<u32>> {
    let windows = (0..plan.rounds).map(|round| plan.gpu_window(place, round));
    windows.filter(|window| !window.is_empty()).collect()
}

/// The threads that a device computes with; 0 for all cores.
pub(super) fn pool(threads: usize) -> Result<Arc<Pool>, RingError> {
    // Several workers may share this machine; pinned, their threads would all share one processor.
    let mut options = PoolOptions { pin: false, ..PoolOptions::default() };
    if threads > 0 {
        // More threads than processors only wait for each other.
        options.threads = threads.min(options.threads);
    }
    Ok(Arc::new(Pool::new(options).map_err(|source| ExecError::Threads { source })?))
}

/// The caches that a plan asks for.
pub(super) fn cache_options(plan: &Plan) -> CacheOptions {
    let format = match plan.kv_cache {
        KvFormat::F16 => CacheFormat::F16,
        KvFormat::F32 => CacheFormat::F32,
    };
    CacheOptions { context: plan.context, format, sequences: plan.sequences }
}

/// The facts that a worker without a model sends to a head.
pub fn facts() -> WorkerFacts {
    WorkerFacts {
        version: env!("CARGO_PKG_VERSION").into(),
        memory_total: measure::memory::total().0,
        kernel: hearth_runtime::profile::kernel(),
        ..WorkerFacts::default()
    }
}

/// Whether a plan is for execution.
pub fn check_executable(plan: &Plan) -> Result<(), RingError> {
    plan.only_simulated().map_or(Ok(()), |reason| Err(RingError::plan(reason)))
}

/// Whether a model with these digests is the plan's: the same file, or where the plan was made without
/// one, the same shape.
pub fn check_digests(plan: &Plan, digest: &str, shape: &str, name: &str) -> Result<(), RingError> {
    let (expected, found) = match &plan.model.digest {
        Some(expected) => (expected.as_str(), digest),
        None => (plan.model.shape_digest.as_str(), shape),
    };
    if expected == found {
        return Ok(());
    }
    let short = |digest: &str| digest.chars().take(19).collect::<String>();
    Err(RingError::ModelMismatch {
        name: name.into(),
        expected: format!("`{}` ({})", plan.model.name, short(expected)),
        found: short(found),
    })
}
