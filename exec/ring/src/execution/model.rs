//! The model of this device: its weights, the device's stage in a plan, and checks that a plan fits the device.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use hearth_core::memory::plan_kv_cache_bytes;
use hearth_core::schedule::ModelPart;
use hearth_profiles::model::ModelProfile;
use hearth_profiles::{Bytes, measure};
use hearth_schema::pass::MAX_PASS_TOKENS;
use hearth_schema::plan::{Plan, Processor};
use hearth_schema::route_trace::RouteRecording;
use hearth_schema::scenario::{ActivationFormat, check_kv_sharing};

use super::verification::{Verification, check_has_weight_digests};
use crate::error::{Result, RingError};
use crate::wire::{WorkerInfo, activations};
use hearth_runtime::memory::MemoryWatch;
use hearth_runtime::residency::ResidencyBarrier;
use hearth_runtime::{
    BackendFactory, BackendOptions, Cpu, ExecError, InputOutputLayers, KvCacheOptions, RouteOptions, Stage,
    ThreadPool, ThreadPoolOptions, UploadProgressReporter, Weights,
};

/// A model file on this device.
#[derive(Debug)]
pub struct LocalModel {
    pub weights: Arc<Weights>,
    /// The shape, the sizes and the digests of the model.
    pub profile: ModelProfile,
    /// Creates the backend for layers on this device's GPU; `None` if the device has no GPU.
    pub backend_factory: Option<BackendFactory>,
    /// Compares the weights with the digests in the plan before the first computation; `None` if they are not compared.
    pub verification: Option<Verification>,
    /// What happens with the routes of a mixture's tokens in the layers of this device, other than that the router
    /// determines them.
    pub route_options: Arc<RouteOptions>,
}

impl LocalModel {
    /// Maps the model file `path` into memory and checks the tensor table of the file.
    pub fn open(path: &Path) -> Result<LocalModel, ExecError> {
        // Memory pressure counts from before the first weight is touched.
        MemoryWatch::shared();
        let weights = Arc::new(Weights::open(path)?);
        let profile = ModelProfile::from_gguf(weights.model())?;
        Ok(LocalModel {
            weights,
            profile,
            backend_factory: None,
            verification: None,
            route_options: Arc::default(),
        })
    }

    /// Uses the packed weights beside the model file, see [`Weights::use_packed`].
    pub fn use_packed_weights(&mut self) -> Result<bool, ExecError> {
        Arc::get_mut(&mut self.weights).map_or(Ok(false), Weights::use_packed)
    }

    #[must_use]
    pub fn with_backend_factory(self, backend_factory: Option<BackendFactory>) -> LocalModel {
        LocalModel { backend_factory, ..self }
    }

    #[must_use]
    pub fn with_verification(self, verification: Option<Verification>) -> LocalModel {
        LocalModel { verification, ..self }
    }

    #[must_use]
    pub fn with_route_options(self, route_options: Arc<RouteOptions>) -> LocalModel {
        LocalModel { route_options, ..self }
    }

    /// Returns the recording of a run of one sequence, whose prompt had `prompt_tokens` tokens, in all layers; `None` if
    /// the run was not recorded.
    pub fn route_recording(&self, prompt_tokens: u32) -> Option<RouteRecording> {
        let (weights, shape) = (&self.weights, &self.profile.shape);
        let (recorder, experts) = (self.route_options.recorder.as_ref()?, shape.experts?);
        let layer_bytes = |layer: u32| {
            let (all, expert) =
                (weights.part_bytes(&ModelPart::Layers(layer..layer + 1)), weights.expert_bytes(layer));
            [Bytes(expert), Bytes(all.saturating_sub(expert * u64::from(experts.count)))]
        };
        Some(RouteRecording {
            model: self.profile.name.clone(),
            architecture: shape.architecture.to_string(),
            expert_count: experts.count,
            experts_used: experts.used,
            layer_bytes: (0..shape.layers.0).map(layer_bytes).collect(),
            prompt_tokens,
            uses: recorder.take(),
        })
    }

    /// Returns the maximum size of the activations of a pass, in bytes.
    pub fn max_activation_bytes(&self) -> usize {
        MAX_PASS_TOKENS as usize * self.weights.shape().activation_length() as usize * size_of::<f32>()
    }

    /// Returns the information that a worker with this model sends to a head.
    pub fn worker_info(&self) -> WorkerInfo {
        WorkerInfo {
            model_digest: self.profile.digest.clone(),
            shape_digest: self.profile.shape_digest(),
            ..worker_info_without_model()
        }
    }

    /// Checks that a plan can be executed, that the plan was made for this model, and that the model file is unchanged.
    pub fn check_plan(&self, plan: &Plan) -> Result<()> {
        self.weights.check_unchanged()?;
        check_executable(plan)?;
        check_kv_sharing(&self.profile.shape, plan.activation_format, plan.kv_cache_format)
            .map_err(|error| RingError::invalid_plan(error.to_string()))?;
        if self.verification.is_some() {
            check_has_weight_digests(plan)?;
        }
        check_digests(plan, &self.profile.digest, &self.profile.shape_digest(), "this device")
    }

    /// Checks that the KV cache of a device, which the system cannot reclaim, fits into the available memory, and that
    /// the heads of the model fit its format.
    pub(super) fn check_memory(&self, plan: &Plan, device_index: usize) -> Result<()> {
        self.profile.shape.check_kv_format(plan.kv_cache_format.format()).map_err(|error| {
            RingError::invalid_plan_with_hint(error.to_string(), "plan with `kv_cache: f16`")
        })?;
        let own: Vec<u32> = plan.windows(device_index).into_iter().flatten().collect();
        let layers = own.len();
        let (shape, sequences, context) = (&self.profile.shape, plan.sequences, plan.context_length);
        let cache = plan_kv_cache_bytes(plan, shape, own);
        let gpu_windows = gpu_windows(plan, device_index).len();
        let kept =
            BackendOptions::max_saved_hidden_bytes(gpu_windows, cache_options(plan), shape.embedding_length);
        let available = measure::memory::available_memory();
        if cache.0.saturating_add(kept) <= available.0 {
            return Ok(());
        }
        let name = &plan.devices[device_index].name;
        let several = if sequences > 1 { format!(" and {sequences} sequences") } else { String::new() };
        let beside = match kept {
            0 => String::new(),
            kept => format!(" and copies of GPU inputs take {}", Bytes(kept)),
        };
        let what = format!(
            "the KV cache of {layers} layers for a context of {context}{several} takes {cache}{beside} \
             on `{name}`, which has only {available} available"
        );
        Err(RingError::invalid_plan_with_hint(what, "plan with a smaller `context`"))
    }

    /// Creates the stage of a device: its layers with their KV cache, and on the head also the embedding and the
    /// output layer. Before each computation, the stage waits at `barrier` until the weights are in memory.
    pub(super) fn stage(
        &self,
        plan: &Plan,
        device_index: usize,
        pool: &Arc<ThreadPool>,
        barrier: ResidencyBarrier,
        gpu_options: GpuOptions<'_>,
    ) -> Result<(Stage, Option<InputOutputLayers>)> {
        if device_index == 0 && !self.weights.is_complete() {
            let what = "a head needs the whole model, but only some layers were fetched";
            return Err(RingError::invalid_plan(what));
        }
        self.check_memory(plan, device_index)?;
        let cpu = Cpu::new(pool.clone()).with_barrier(barrier).with_route_options(self.route_options.clone());
        let cache = cache_options(plan);
        let input_output =
            (device_index == 0).then(|| InputOutputLayers::new(self.weights.clone(), cpu.clone()));
        let output_on_gpu = device_index == 0 && plan.output_processor == Processor::Gpu;
        let gpu_layers = gpu_windows(plan, device_index);
        let rounding: Option<fn(&mut [f32])> = match plan.activation_format {
            ActivationFormat::F16 => Some(activations::round_to_f16),
            ActivationFormat::F32 => None,
        };
        let (weights, owned_layers) = (self.weights.clone(), plan.windows(device_index));
        let stage = if gpu_layers.is_empty() && !output_on_gpu {
            Stage::on_cpu(weights, &owned_layers, cache, cpu)?
        } else {
            let name = &plan.devices[device_index].name;
            let backend_factory = self.backend_factory.as_ref().ok_or_else(|| {
                let what =
                    format!("the plan has GPU layers on `{name}`, but this device computes only on its CPU");
                RingError::invalid_plan_with_hint(what, "plan with `gpu_layers: 0`")
            })?;
            let backend = backend_factory.create(BackendOptions {
                weights: weights.clone(),
                owned_layers: owned_layers.clone(),
                gpu_layers,
                output_on_gpu,
                kv_cache_options: cache,
                rounding,
                cpu,
                fallback_to_cpu: gpu_options.fallback_to_cpu,
                progress: gpu_options.progress.clone(),
            });
            let backend =
                backend.map_err(|reason| RingError::invalid_plan(format!("on `{name}`: {reason}")))?;
            Stage::new(weights, &owned_layers, cache, backend)?
        };
        let stage = rounding.into_iter().fold(stage, Stage::with_rounding);
        Ok((stage, input_output))
    }
}

#[derive(Clone, Copy)]
pub(super) struct GpuOptions<'a> {
    /// Whether the CPU computes the GPU layers if the GPU cannot be opened. Otherwise, loading fails.
    pub(super) fallback_to_cpu: bool,
    pub(super) progress: &'a UploadProgressReporter,
}

/// Returns the GPU layers of a device, one range per window.
fn gpu_windows(plan: &Plan, device_index: usize) -> Vec<Range<u32>> {
    let windows = (0..plan.rounds).map(|round| plan.gpu_window(device_index, round));
    windows.filter(|window| !window.is_empty()).collect()
}

/// Creates a thread pool; 0 threads use all cores.
pub(super) fn create_thread_pool(threads: usize) -> Result<Arc<ThreadPool>> {
    // Not pinned: several workers on this machine would pin their threads to the same cores.
    let mut options = ThreadPoolOptions { pin_workers: false, ..ThreadPoolOptions::default() };
    if threads > 0 {
        // More threads than cores only wait for each other.
        options.threads = threads.min(options.threads);
    }
    Ok(Arc::new(ThreadPool::new(options).map_err(|source| ExecError::Threads { source })?))
}

pub(super) fn cache_options(plan: &Plan) -> KvCacheOptions {
    let (context, format, sequences) = (plan.context_length, plan.kv_cache_format, plan.sequences);
    KvCacheOptions { context, format, sequences }
}

/// Returns the information that a worker without a model file sends to a head.
pub fn worker_info_without_model() -> WorkerInfo {
    WorkerInfo {
        program_version: env!("CARGO_PKG_VERSION").into(),
        memory_total_bytes: measure::memory::total_memory().0,
        os_and_kernel: hearth_runtime::profile::os_and_kernel(),
        ..WorkerInfo::default()
    }
}

/// Checks that a plan can be executed, and not only simulated.
pub fn check_executable(plan: &Plan) -> Result<()> {
    plan.simulation_only_reason().map_or(Ok(()), |reason| Err(RingError::invalid_plan(reason)))
}

/// Checks that a device has the model of the plan: the digest of the file must match, or the digest of the shape if the
/// plan was made without a model file. `name` names the device in the error.
pub fn check_digests(plan: &Plan, file_digest: &str, shape_digest: &str, name: &str) -> Result<()> {
    let (expected, found) = match &plan.model.file_digest {
        Some(expected) => (expected, file_digest),
        None => (&plan.model.shape_digest, shape_digest),
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
