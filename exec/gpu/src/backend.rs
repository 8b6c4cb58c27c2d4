//! The backend of a stage whose layers are shared between a GPU and the processors.
//!
//! Layers that the plan puts on the GPU run there, the others on the processors. Activations are uploaded and
//! downloaded once for each window. A GPU can be lost during a run, and its caches with it: therefore the rows that
//! entered a window are saved, and the processors compute the GPU's layers from them again and continue. Such a run is
//! slower and generates the same tokens.
//!
//! Rows are saved once per window, also where layers run one at a time: the rounding between two layers is known here.
//! The memory of saved rows is allocated at the beginning and counts as that of caches.
//!
//! A window is entered by its first layer and runs in the same ranges of layers in every pass.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use hearth_runtime::clock::{thread_cpu_nanos, wall_nanos};
use hearth_runtime::residency::ResidencyBarrier;
use hearth_runtime::{AcceleratedPlace, Accelerator, Backend, ComputeCost, Cpu, CpuLayers};

use crate::device::{CapabilityMask, Gpu, Reservation};
use crate::error::GpuError;
use crate::layers::{GpuLayers, Upload};

/// Receives warnings for the user: that a GPU is lost.
pub type WarningSink = Arc<dyn Fn(&str) + Send + Sync>;

/// Returns an accelerator whose backends use this machine's GPU, which is opened when a plan first needs it. `upload`
/// chooses the conversion of weights and the tiling of products.
pub fn accelerator(
    mask: CapabilityMask,
    upload: impl Fn(&Gpu) -> Upload + Send + Sync + 'static,
    warnings: WarningSink,
) -> Accelerator {
    let open = move || Gpu::open(mask).map(Arc::new);
    Accelerator::new(move |place| Ok(Box::new(Accelerated::open(open, &upload, place, warnings.clone())?)))
}

/// The rows that entered each window, [positions, embedding], by sequence and first layer.
type SavedRows = BTreeMap<(u32, u32), Vec<f32>>;

fn bytes_of(saved_rows: &SavedRows) -> u64 {
    saved_rows.values().map(|rows| (rows.capacity() * size_of::<f32>()) as u64).sum()
}

/// A backend of a GPU and the processors.
pub struct Accelerated {
    place: AcceleratedPlace,
    on_gpu: BTreeSet<u32>,
    gpu: Option<GpuLayers>,
    cpu_layers: CpuLayers,
    /// Computes the layers of a GPU that was lost.
    fallback: Option<CpuLayers>,
    saved_rows: SavedRows,
    /// The processors' share of memory that the GPU shares with them.
    _reservation: Option<Reservation>,
    warnings: WarningSink,
}

impl Accelerated {
    /// Opens a GPU and uploads the layers of a place. If that fails and the place allows it, as it does for a run that
    /// continues, the processors compute them instead.
    pub fn open(
        open: impl Fn() -> Result<Arc<Gpu>, GpuError>,
        upload: impl Fn(&Gpu) -> Upload,
        place: AcceleratedPlace,
        warnings: WarningSink,
    ) -> Result<Accelerated, GpuError> {
        let made = open().and_then(|gpu| {
            let upload = upload(&gpu);
            Accelerated::new(gpu, upload, place.clone(), warnings.clone())
        });
        match made {
            Err(error) if place.fallback_to_cpu => Ok(Accelerated::without_gpu(place, warnings, &error)),
            made => made,
        }
    }

    /// Returns a backend that computes all layers on the processors because of an error.
    fn without_gpu(place: AcceleratedPlace, warnings: WarningSink, error: &GpuError) -> Accelerated {
        let (on_gpu, cpu_layers) = parts(&place);
        let mut own = Accelerated {
            place,
            on_gpu,
            gpu: None,
            cpu_layers,
            fallback: None,
            saved_rows: SavedRows::new(),
            _reservation: None,
            warnings,
        };
        own.fall_back(error);
        own
    }

    /// Uploads the layers of a place.
    pub fn new(
        gpu: Arc<Gpu>,
        upload: Upload,
        place: AcceleratedPlace,
        warnings: WarningSink,
    ) -> Result<Accelerated, GpuError> {
        let (on_gpu, cpu_layers) = parts(&place);
        let saved_rows = reserve_rows(&place)?;
        let reserved = cpu_layers.cache_bytes() + bytes_of(&saved_rows);
        let reserved =
            gpu.reserve_shared("caches and rows of the processors, whose memory it shares", reserved)?;
        let (weights, cache) = (place.weights.clone(), place.cache);
        let layers = on_gpu.iter().copied();
        let gpu = GpuLayers::new(gpu, weights, layers, place.output, cache, upload, &place.progress)?;
        let gpu = Some(gpu);
        let mut own = Accelerated {
            place,
            on_gpu,
            gpu,
            cpu_layers,
            fallback: None,
            saved_rows,
            _reservation: reserved,
            warnings,
        };
        own.prepare()?;
        Ok(own)
    }

    /// Compiles all kernels that a pass needs, so that the first token waits for no compiler and errors of the device
    /// are found before a run begins.
    fn prepare(&mut self) -> Result<(), GpuError> {
        let asked: Vec<Range<u32>> = match self.place.after_layer {
            Some(_) => self.on_gpu.iter().map(|&layer| layer..layer + 1).collect(),
            None => self.place.owned.iter().flat_map(|window| runs(&self.on_gpu, window.clone())).collect(),
        };
        let Some(gpu) = &mut self.gpu else { return Ok(()) };
        asked.into_iter().filter(|run| self.on_gpu.contains(&run.start)).try_for_each(|run| gpu.prepare(run))
    }

    /// Whether the GPU still computes.
    pub fn is_on_gpu(&self) -> bool {
        self.gpu.is_some()
    }

    fn embedding(&self) -> usize {
        self.place.weights.shape().embedding as usize
    }

    /// Runs layers that are on the GPU, or were.
    fn run(&mut self, sequence: u32, layers: Range<u32>, hidden: &mut [f32], first: u32) -> ComputeCost {
        if let Some(fallback) = &mut self.fallback {
            return fallback.forward(sequence, layers, hidden, first);
        }
        let before = first as usize * self.embedding();
        let mut saved_rows = self.saved_rows.get_mut(&(sequence, layers.start));
        if let Some(saved_rows) = &mut saved_rows {
            saved_rows.truncate(before);
        }
        if let Some(gpu) = &mut self.gpu {
            // The rows are needed as they went up if the pass fails in the middle.
            let uploaded = hidden.to_vec();
            let (result, cost) = measured(|| gpu.forward(sequence, layers.clone(), hidden, first));
            match result {
                Ok(()) => {
                    if let Some(saved_rows) = saved_rows {
                        saved_rows.extend_from_slice(&uploaded);
                    }
                    return cost;
                }
                Err(error) => {
                    hidden.copy_from_slice(&uploaded);
                    self.fall_back(&error);
                }
            }
        }
        match &mut self.fallback {
            Some(fallback) => fallback.forward(sequence, layers, hidden, first),
            None => ComputeCost::default(),
        }
    }

    /// Recomputes the caches of the GPU's layers on the CPU from the rows that were uploaded.
    fn fall_back(&mut self, error: &GpuError) {
        (self.warnings)(&format!("{error}; its layers are computed on the processors"));
        self.gpu = None;
        let AcceleratedPlace { weights, cache, cpu, accelerated, after_layer, .. } = &self.place;
        // Nobody reads these layers ahead: they are mapped, and come when they are touched.
        let cpu = Cpu { barrier: ResidencyBarrier::open(), ..cpu.clone() };
        let mut fallback = CpuLayers::new(weights.clone(), self.on_gpu.iter().copied(), *cache, cpu);
        for ((sequence, start), mut rows) in std::mem::take(&mut self.saved_rows) {
            let window = accelerated.iter().find(|window| window.start == start);
            let Some(window) = window.filter(|_| !rows.is_empty()) else { continue };
            for layer in window.clone() {
                fallback.forward(sequence, layer..layer + 1, &mut rows, 0);
                if let Some(rounding) = after_layer {
                    rounding(&mut rows);
                }
            }
        }
        self.fallback = Some(fallback);
    }
}

/// Runs work of the GPU; returns its result and cost.
fn measured<T>(work: impl FnOnce() -> T) -> (T, ComputeCost) {
    let (wall, cpu) = (wall_nanos(), thread_cpu_nanos());
    let result = work();
    let (wall_ns, cpu_ns) = (wall_nanos().saturating_sub(wall), thread_cpu_nanos().saturating_sub(cpu));
    (result, ComputeCost { wall_ns, cpu_ns, queue_ns: 0, all_cpu_ns: cpu_ns })
}

/// Splits layers into runs that are all on the GPU or all not.
fn runs(on_gpu: &BTreeSet<u32>, layers: Range<u32>) -> Vec<Range<u32>> {
    let mut all: Vec<Range<u32>> = Vec::new();
    for layer in layers {
        match all.last_mut() {
            Some(last) if on_gpu.contains(&last.start) == on_gpu.contains(&layer) => last.end = layer + 1,
            _ => all.push(layer..layer + 1),
        }
    }
    all
}

/// The layers of a place that are on the GPU, and what computes the others.
fn parts(place: &AcceleratedPlace) -> (BTreeSet<u32>, CpuLayers) {
    let on_gpu: BTreeSet<u32> = place.accelerated.iter().cloned().flatten().collect();
    let cpu_layers = place.owned.iter().cloned().flatten().filter(|layer| !on_gpu.contains(layer));
    let cpu_layers = CpuLayers::new(place.weights.clone(), cpu_layers, place.cache, place.cpu.clone());
    (on_gpu, cpu_layers)
}

/// Allocates the rows of all positions, for each sequence and window.
fn reserve_rows(place: &AcceleratedPlace) -> Result<SavedRows, GpuError> {
    let (context, embedding) = (place.cache.context as usize, place.weights.shape().embedding as usize);
    let mut all = SavedRows::new();
    for sequence in 0..place.cache.sequences.max(1) {
        for window in &place.accelerated {
            let mut rows = Vec::new();
            let reserved = context.checked_mul(embedding).map(|numbers| rows.try_reserve_exact(numbers));
            if !matches!(reserved, Some(Ok(()))) {
                let what = format!("the rows of {context} positions, which are saved beside it");
                return Err(GpuError::OutOfMemory { what });
            }
            all.insert((sequence, window.start), rows);
        }
    }
    Ok(all)
}

impl Backend for Accelerated {
    fn name(&self) -> &'static str {
        if self.is_on_gpu() { "gpu" } else { "gpu lost" }
    }

    fn has_gpu(&self) -> bool {
        self.is_on_gpu()
    }

    fn forward(&mut self, sequence: u32, layers: Range<u32>, hidden: &mut [f32], first: u32) -> ComputeCost {
        let mut cost = ComputeCost::default();
        for run in runs(&self.on_gpu, layers) {
            cost += if self.on_gpu.contains(&run.start) {
                self.run(sequence, run, hidden, first)
            } else {
                self.cpu_layers.forward(sequence, run, hidden, first)
            };
        }
        cost
    }

    fn logits(&mut self, hidden: &[f32]) -> Option<(Vec<f32>, ComputeCost)> {
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

    fn cache_bytes(&self) -> u64 {
        let gpu = self.gpu.as_ref().map_or(0, |gpu| gpu.bytes()[1]);
        gpu + bytes_of(&self.saved_rows)
            + self.cpu_layers.cache_bytes()
            + self.fallback.as_ref().map_or(0, Backend::cache_bytes)
    }
}
