//! The backend of a stage that computes some of its layers on a GPU and the other layers on the CPU.
//!
//! The plan decides which layers the GPU computes. Activations are uploaded and downloaded once per window. A GPU can
//! be lost during a run together with its caches. Therefore the hidden states at the start of each window of GPU layers
//! are saved: if the GPU is lost, the CPU recomputes the GPU layers from these rows and continues with the same tokens.
//!
//! Rows are saved only at the start of a window. If `BackendOptions::rounding` rounds rows between two layers, layers
//! run one at a time, and the CPU repeats the rounding when it recomputes. The memory of the saved rows is allocated
//! at the start of a run and counts as cache memory.
//!
//! Every pass must run all layers of a window, starting with the first, in the same ranges of layers as other passes.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use hearth_runtime::clock::{monotonic_nanos, thread_cpu_nanos};
use hearth_runtime::residency::ResidencyBarrier;
use hearth_runtime::token_inputs::for_each_pass;
use hearth_runtime::{Backend, BackendFactory, BackendOptions, Cpu, CpuBackend, CriticalPathCost};
use hearth_schema::pass::Pass;

use crate::device::{CapabilityMask, Gpu, Reservation};
use crate::error::GpuError;
use crate::layers::{GpuLayers, UploadOptions};

/// A function that receives warnings for the user, such as that the GPU was lost.
pub type WarningSink = Arc<dyn Fn(&str) + Send + Sync>;

/// Returns a factory of backends for the GPU of this machine. The GPU is opened when a backend is created for a plan
/// with GPU layers. `upload` chooses the conversion of the weights and the tiling of the matmul kernels.
pub fn backend_factory(
    mask: CapabilityMask,
    upload: impl Fn(&Gpu) -> UploadOptions + Send + Sync + 'static,
    warnings: WarningSink,
) -> BackendFactory {
    let open = move || Gpu::open(mask).map(Arc::new);
    BackendFactory::new(move |options| {
        Ok(Box::new(GpuBackend::open(open, &upload, options, warnings.clone())?))
    })
}

/// The saved hidden states [positions, embedding]. The key is the sequence and the first layer of a window of GPU layers.
type SavedRows = BTreeMap<(u32, u32), Vec<f32>>;

fn saved_rows_bytes(saved_rows: &SavedRows) -> u64 {
    saved_rows.values().map(|rows| (rows.capacity() * size_of::<f32>()) as u64).sum()
}

/// A backend that computes the GPU layers of a plan on the GPU and the other layers on the CPU.
pub struct GpuBackend {
    options: BackendOptions,
    /// The layers that the plan assigns to the GPU.
    on_gpu: BTreeSet<u32>,
    /// The layers in GPU memory; `None` if no GPU could be opened or after the GPU was lost.
    gpu: Option<GpuLayers>,
    cpu_layers: CpuBackend,
    /// The backend that computes the GPU layers on the CPU if there is no GPU.
    fallback: Option<CpuBackend>,
    saved_rows: SavedRows,
    /// Reserved memory for the KV caches of the CPU layers and the saved rows, if GPU and CPU share memory.
    _reservation: Option<Reservation>,
    warnings: WarningSink,
}

impl GpuBackend {
    /// Opens a GPU and uploads the GPU layers. If this fails and `options.fallback_to_cpu` is set, as in a run that has
    /// already started, the CPU computes all layers instead.
    pub fn open(
        open: impl Fn() -> Result<Arc<Gpu>, GpuError>,
        upload: impl Fn(&Gpu) -> UploadOptions,
        options: BackendOptions,
        warnings: WarningSink,
    ) -> Result<GpuBackend, GpuError> {
        let opened = open().and_then(|gpu| {
            let upload = upload(&gpu);
            GpuBackend::new(gpu, upload, options.clone(), warnings.clone())
        });
        opened.or_else(|error| {
            if !options.fallback_to_cpu {
                return Err(error);
            }
            let mut backend = GpuBackend::without_gpu(options, warnings);
            backend.fall_back(&error);
            Ok(backend)
        })
    }

    /// Creates a backend: uploads the GPU layers and compiles their kernels.
    pub fn new(
        gpu: Arc<Gpu>,
        upload: UploadOptions,
        options: BackendOptions,
        warnings: WarningSink,
    ) -> Result<GpuBackend, GpuError> {
        let base = GpuBackend::without_gpu(options, warnings);
        let options = &base.options;
        let saved_rows = reserve_rows(options)?;
        let reserved = base.cpu_layers.kv_cache_bytes() + saved_rows_bytes(&saved_rows);
        let reservation =
            gpu.reserve_shared("the KV caches of the CPU layers and the saved hidden states", reserved)?;
        let gpu = Some(GpuLayers::new(gpu, options, upload)?);
        let mut backend = GpuBackend { gpu, saved_rows, _reservation: reservation, ..base };
        backend.prepare()?;
        Ok(backend)
    }

    /// Returns a backend with the CPU layers of the plan only, without a GPU and without a fallback.
    fn without_gpu(options: BackendOptions, warnings: WarningSink) -> GpuBackend {
        let on_gpu: BTreeSet<u32> = options.gpu_layers.iter().cloned().flatten().collect();
        let on_cpu = options.owned_layers.iter().cloned().flatten().filter(|layer| !on_gpu.contains(layer));
        let cpu_layers =
            CpuBackend::new(options.weights.clone(), on_cpu, options.kv_cache_options, options.cpu.clone());
        let (gpu, fallback, saved_rows) = (None, None, SavedRows::new());
        GpuBackend { options, on_gpu, gpu, cpu_layers, fallback, saved_rows, _reservation: None, warnings }
    }

    /// Compiles all kernels of a pass, so that the first token need not wait and device errors are found early.
    fn prepare(&mut self) -> Result<(), GpuError> {
        let Some(gpu) = &mut self.gpu else { return Ok(()) };
        if self.options.rounding.is_some() {
            return self.on_gpu.iter().try_for_each(|&layer| gpu.compile_kernels(layer..layer + 1));
        }
        let windows = self.options.owned_layers.iter().cloned();
        let ranges = windows.flat_map(|window| split_by_processor(&self.on_gpu, window));
        let mut gpu_ranges = ranges.filter(|range| self.on_gpu.contains(&range.start));
        gpu_ranges.try_for_each(|range| gpu.compile_kernels(range))
    }

    /// Runs layers that the plan assigns to the GPU: on the GPU, or on the CPU if the GPU is lost.
    fn run_gpu_layers(&mut self, layers: Range<u32>, hidden: &mut [f32], pass: Pass) -> CriticalPathCost {
        let (sequence, first) = (pass.sequence_index, pass.first_position);
        if let Some(gpu) = &mut self.gpu {
            // If the pass fails, the CPU needs the rows as they were before it.
            let uploaded = hidden.to_vec();
            let before = first as usize * self.options.weights.shape().embedding_length as usize;
            let mut saved_rows = self.saved_rows.get_mut(&(sequence, layers.start));
            if let Some(saved_rows) = &mut saved_rows {
                saved_rows.truncate(before);
            }
            let (result, cost) = measured(|| gpu.forward(sequence, layers.clone(), hidden, first));
            let Err(error) = result else {
                if let Some(saved_rows) = saved_rows {
                    saved_rows.extend_from_slice(&uploaded);
                }
                return cost;
            };
            hidden.copy_from_slice(&uploaded);
            self.fall_back(&error);
        }
        match &mut self.fallback {
            Some(fallback) => fallback.forward(layers, hidden, &[pass]),
            None => CriticalPathCost::default(),
        }
    }

    /// Stops using the GPU and recomputes the caches of the GPU layers on the CPU, from the saved rows.
    fn fall_back(&mut self, error: &GpuError) {
        (self.warnings)(&format!("{error}; the CPU computes the GPU layers from now on"));
        self.gpu = None;
        let BackendOptions { weights, kv_cache_options: cache, cpu, gpu_layers, rounding, .. } =
            &self.options;
        // These layers are not prefetched: they are mapped, and page faults read them.
        let cpu = Cpu { barrier: ResidencyBarrier::always_open(), ..cpu.clone() };
        let mut fallback = CpuBackend::new(weights.clone(), self.on_gpu.iter().copied(), *cache, cpu);
        for ((sequence, start), mut rows) in std::mem::take(&mut self.saved_rows) {
            let window = gpu_layers.iter().find(|window| window.start == start);
            let Some(window) = window.filter(|_| !rows.is_empty()) else { continue };
            let tokens = rows.len() / weights.shape().embedding_length as usize;
            let pass = Pass { sequence_index: sequence, ..Pass::new(0, 0, tokens as u32, false) };
            for layer in window.clone() {
                fallback.forward(layer..layer + 1, &mut rows, &[pass]);
                if let Some(rounding) = rounding {
                    rounding(&mut rows);
                }
            }
        }
        self.fallback = Some(fallback);
    }
}

/// Calls `work` and returns its result and its cost: the wall time, and the CPU time of this thread.
fn measured<T>(work: impl FnOnce() -> T) -> (T, CriticalPathCost) {
    let (wall, cpu) = (monotonic_nanos(), thread_cpu_nanos());
    let result = work();
    let (wall_ns, cpu_ns) = (monotonic_nanos().saturating_sub(wall), thread_cpu_nanos().saturating_sub(cpu));
    (result, CriticalPathCost { wall_ns, cpu_ns, queue_ns: 0, all_threads_cpu_ns: cpu_ns })
}

/// Splits a range of layers into consecutive ranges, each completely on the GPU or completely on the CPU.
fn split_by_processor(on_gpu: &BTreeSet<u32>, layers: Range<u32>) -> Vec<Range<u32>> {
    let mut all: Vec<Range<u32>> = Vec::new();
    for layer in layers {
        match all.last_mut() {
            Some(last) if on_gpu.contains(&last.start) == on_gpu.contains(&layer) => last.end = layer + 1,
            _ => all.push(layer..layer + 1),
        }
    }
    all
}

/// Allocates memory for the saved rows of all positions, for each sequence and each window of GPU layers.
fn reserve_rows(options: &BackendOptions) -> Result<SavedRows, GpuError> {
    let (context, embedding) =
        (options.kv_cache_options.context as usize, options.weights.shape().embedding_length as usize);
    let mut all = SavedRows::new();
    for sequence in 0..options.kv_cache_options.sequences.max(1) {
        for window in &options.gpu_layers {
            let mut rows = Vec::new();
            let reserved = context.checked_mul(embedding).map(|elements| rows.try_reserve_exact(elements));
            if !matches!(reserved, Some(Ok(()))) {
                let what = format!("the saved hidden states of {context} positions in main memory");
                return Err(GpuError::OutOfMemory { what });
            }
            all.insert((sequence, window.start), rows);
        }
    }
    Ok(all)
}

impl Backend for GpuBackend {
    fn name(&self) -> &'static str {
        if self.has_gpu() { "gpu" } else { "gpu lost" }
    }

    fn has_gpu(&self) -> bool {
        self.gpu.is_some()
    }

    fn forward(&mut self, layers: Range<u32>, hidden: &mut [f32], passes: &[Pass]) -> CriticalPathCost {
        let mut cost = CriticalPathCost::default();
        let weights = Arc::clone(&self.options.weights);
        for run in split_by_processor(&self.on_gpu, layers) {
            if self.on_gpu.contains(&run.start) {
                for_each_pass(weights.shape(), hidden, passes, |pass, hidden| {
                    cost += self.run_gpu_layers(run.clone(), hidden, pass);
                });
            } else {
                cost += self.cpu_layers.forward(run, hidden, passes);
            }
        }
        cost
    }

    fn logits(&mut self, hidden: &[f32]) -> Option<(Vec<f32>, CriticalPathCost)> {
        let gpu = self.gpu.as_mut()?;
        let (result, cost) = measured(|| gpu.logits(hidden));
        match result? {
            Ok(logits) => Some((logits, cost)),
            Err(error) => {
                self.fall_back(&error);
                None
            }
        }
    }

    fn kv_cache_bytes(&self) -> u64 {
        let gpu = self.gpu.as_ref().map_or(0, |gpu| gpu.weight_and_cache_bytes()[1]);
        gpu + saved_rows_bytes(&self.saved_rows)
            + self.cpu_layers.kv_cache_bytes()
            + self.fallback.as_ref().map_or(0, Backend::kv_cache_bytes)
    }
}
