//! The backend of a stage whose layers are shared between a GPU and the processors.
//!
//! Layers that the plan puts on the GPU run there, the others on the processors. Activations go up once and come down once
//! for each window. A GPU can go away in mid-run, and its caches with it: so the rows that entered a window are kept, and if
//! it does, the processors compute its layers from them again and go on. Such a run is slower, and ends with its tokens.
//!
//! Rows are kept once a window, also where layers are asked for one at a time: what is done to them between two layers
//! is known here. Their memory is taken at the beginning, and counts as the caches' does.
//!
//! A window is entered by its first layer, and comes in the same ranges of layers pass after pass, as a schedule asks for
//! them.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use hearth_runtime::clock::{thread_cpu_nanos, wall_nanos};
use hearth_runtime::residency::ResidencyBarrier;
use hearth_runtime::{AcceleratedPlace, Accelerator, Backend, ComputeCost, Cpu, CpuLayers};

use crate::device::{Gpu, Lease, Mask};
use crate::error::GpuError;
use crate::layers::{GpuLayers, Upload};

/// Told what a person should know: that a GPU is gone.
pub type Notes = Arc<dyn Fn(&str) + Send + Sync>;

/// Makes backends that use this machine's GPU, as long as there is one: it is opened when a plan first needs it.
/// `upload` says how layers are put there, and how its kernels share their work.
pub fn accelerator(
    mask: Mask,
    upload: impl Fn(&Gpu) -> Upload + Send + Sync + 'static,
    notes: Notes,
) -> Accelerator {
    let open = move || Gpu::open(mask).map(Arc::new);
    Accelerator::new(move |place| Ok(Box::new(Accelerated::opened(open, &upload, place, notes.clone())?)))
}

/// The rows that entered each window, [positions, embedding], by sequence and first layer.
type Kept = BTreeMap<(u32, u32), Vec<f32>>;

fn bytes_of(kept: &Kept) -> u64 {
    kept.values().map(|rows| (rows.capacity() * size_of::<f32>()) as u64).sum()
}

/// A GPU and the processors.
pub struct Accelerated {
    place: AcceleratedPlace,
    on_gpu: BTreeSet<u32>,
    gpu: Option<GpuLayers>,
    /// Computes the layers that are not on the GPU.
    others: CpuLayers,
    /// Computes those that were, if the GPU is gone.
    instead: Option<CpuLayers>,
    kept: Kept,
    /// What of the GPU's memory is that of all the others.
    _aside: Option<Lease>,
    notes: Notes,
}

impl Accelerated {
    /// Opens a GPU and uploads the layers of a place. If that fails where a run goes on, as a lost GPU's may, processors
    /// compute them; a run that has not begun is told why it cannot.
    pub fn opened(
        open: impl Fn() -> Result<Arc<Gpu>, GpuError>,
        upload: impl Fn(&Gpu) -> Upload,
        place: AcceleratedPlace,
        notes: Notes,
    ) -> Result<Accelerated, GpuError> {
        let made = open().and_then(|gpu| {
            let upload = upload(&gpu);
            Accelerated::new(gpu, upload, place.clone(), notes.clone())
        });
        match made {
            Err(error) if place.fallback_to_cpu => Ok(Accelerated::without_gpu(place, notes, &error)),
            made => made,
        }
    }

    /// All layers of a place on the processors, because of an error.
    fn without_gpu(place: AcceleratedPlace, notes: Notes, error: &GpuError) -> Accelerated {
        let (on_gpu, others) = parts(&place);
        let mut own = Accelerated {
            place,
            on_gpu,
            gpu: None,
            others,
            instead: None,
            kept: Kept::new(),
            _aside: None,
            notes,
        };
        own.give_up(error);
        own
    }

    /// Uploads the layers of a place.
    pub fn new(
        gpu: Arc<Gpu>,
        upload: Upload,
        place: AcceleratedPlace,
        notes: Notes,
    ) -> Result<Accelerated, GpuError> {
        let (on_gpu, others) = parts(&place);
        let kept = room_for_rows(&place)?;
        let aside = others.cache_bytes() + bytes_of(&kept);
        let aside = gpu.set_aside("caches and rows of the processors, whose memory it shares", aside)?;
        let (weights, cache) = (place.weights.clone(), place.cache);
        let layers = on_gpu.iter().copied();
        let gpu = GpuLayers::telling(gpu, weights, layers, place.output, cache, upload, &place.progress)?;
        let gpu = Some(gpu);
        let mut own = Accelerated { place, on_gpu, gpu, others, instead: None, kept, _aside: aside, notes };
        own.prepare()?;
        Ok(own)
    }

    /// Makes all launches that a pass will ask for, so that the first token waits for no compiler, and what a device
    /// refuses is told before a run begins.
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

    /// A run of layers that are on the GPU, or were.
    fn run(&mut self, sequence: u32, layers: Range<u32>, hidden: &mut [f32], first: u32) -> ComputeCost {
        if let Some(instead) = &mut self.instead {
            return instead.forward(sequence, layers, hidden, first);
        }
        let before = first as usize * self.embedding();
        let mut kept = self.kept.get_mut(&(sequence, layers.start));
        if let Some(kept) = &mut kept {
            kept.truncate(before);
        }
        if let Some(gpu) = &mut self.gpu {
            // The rows are needed as they went up if the pass fails in the middle.
            let sent = hidden.to_vec();
            let (wall, cpu) = (wall_nanos(), thread_cpu_nanos());
            match gpu.forward(sequence, layers.clone(), hidden, first) {
                Ok(()) => {
                    if let Some(kept) = kept {
                        kept.extend_from_slice(&sent);
                    }
                    let cpu_ns = thread_cpu_nanos().saturating_sub(cpu);
                    let wall_ns = wall_nanos().saturating_sub(wall);
                    return ComputeCost { wall_ns, cpu_ns, queue_ns: 0, all_cpu_ns: cpu_ns };
                }
                Err(error) => {
                    hidden.copy_from_slice(&sent);
                    self.give_up(&error);
                }
            }
        }
        match &mut self.instead {
            Some(instead) => instead.forward(sequence, layers, hidden, first),
            None => ComputeCost::default(),
        }
    }

    /// Computes the caches of the GPU's layers again from the rows that went up.
    fn give_up(&mut self, error: &GpuError) {
        (self.notes)(&format!("{error}; its layers are computed on the processors"));
        self.gpu = None;
        let AcceleratedPlace { weights, cache, cpu, accelerated, after_layer, .. } = &self.place;
        // Nobody reads these layers ahead: they are mapped, and come when they are touched.
        let cpu = Cpu { barrier: ResidencyBarrier::open(), ..cpu.clone() };
        let mut instead = CpuLayers::new(weights.clone(), self.on_gpu.iter().copied(), *cache, cpu);
        for ((sequence, start), mut rows) in std::mem::take(&mut self.kept) {
            let window = accelerated.iter().find(|window| window.start == start);
            let Some(window) = window.filter(|_| !rows.is_empty()) else { continue };
            for layer in window.clone() {
                instead.forward(sequence, layer..layer + 1, &mut rows, 0);
                if let Some(rounding) = after_layer {
                    rounding(&mut rows);
                }
            }
        }
        self.instead = Some(instead);
    }
}

/// Layers as far as they are all on the GPU, or all not.
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
    let others = place.owned.iter().cloned().flatten().filter(|layer| !on_gpu.contains(layer));
    let others = CpuLayers::new(place.weights.clone(), others, place.cache, place.cpu.clone());
    (on_gpu, others)
}

/// Room for the rows of all positions, for each sequence and window.
fn room_for_rows(place: &AcceleratedPlace) -> Result<Kept, GpuError> {
    let (context, embedding) = (place.cache.context as usize, place.weights.shape().embedding as usize);
    let mut all = Kept::new();
    for sequence in 0..place.cache.sequences.max(1) {
        for window in &place.accelerated {
            let mut rows = Vec::new();
            let room = context.checked_mul(embedding).map(|numbers| rows.try_reserve_exact(numbers));
            if !matches!(room, Some(Ok(()))) {
                let what = format!("the rows of {context} positions, which are kept beside it");
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
                self.others.forward(sequence, run, hidden, first)
            };
        }
        cost
    }

    fn logits(&mut self, hidden: &[f32]) -> Option<(Vec<f32>, ComputeCost)> {
        let (wall, cpu) = (wall_nanos(), thread_cpu_nanos());
        match self.gpu.as_mut()?.logits(hidden)? {
            Ok(logits) => {
                let cpu_ns = thread_cpu_nanos().saturating_sub(cpu);
                let wall_ns = wall_nanos().saturating_sub(wall);
                Some((logits, ComputeCost { wall_ns, cpu_ns, queue_ns: 0, all_cpu_ns: cpu_ns }))
            }
            Err(error) => {
                self.give_up(&error);
                None
            }
        }
    }

    fn cache_bytes(&self) -> u64 {
        let gpu = self.gpu.as_ref().map_or(0, |gpu| gpu.bytes()[1]);
        gpu + bytes_of(&self.kept)
            + self.others.cache_bytes()
            + self.instead.as_ref().map_or(0, Backend::cache_bytes)
    }
}
