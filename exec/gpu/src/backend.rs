//! How does a place in the ring compute with a GPU and processors?
//!
//! Layers that the plan puts on the GPU run there, the others on the processors. Activations go up once and come down once
//! for each window. A GPU can go away in mid-run, and its caches with it: so the rows that went up are kept, and if it does,
//! the processors compute its layers from them again and go on. Such a run is slower, and ends with its tokens.
//!
//! A window comes in the same ranges of layers pass after pass, as a schedule asks for them.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use hearth_exec::clock::{thread_cpu_nanos, wall_nanos};
use hearth_exec::residency::Gate;
use hearth_exec::{AcceleratedPlace, Accelerator, Backend, ComputeCost, Cpu, CpuLayers};

use crate::device::{Gpu, Mask};
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
    Accelerator::new(move |place| {
        let gpu = Arc::new(Gpu::open(mask)?);
        let upload = upload(&gpu);
        Ok(Box::new(Accelerated::new(gpu, upload, place, notes.clone())?))
    })
}

/// The rows that went up for a run of layers.
#[derive(Debug, Default)]
struct Kept {
    end: u32,
    /// [positions, embedding]
    rows: Vec<f32>,
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
    /// By sequence and first layer of a run.
    kept: BTreeMap<(u32, u32), Kept>,
    notes: Notes,
}

impl Accelerated {
    /// Uploads the layers of a place.
    pub fn new(
        gpu: Arc<Gpu>,
        upload: Upload,
        place: AcceleratedPlace,
        notes: Notes,
    ) -> Result<Accelerated, GpuError> {
        let on_gpu: BTreeSet<u32> = place.accelerated.iter().cloned().flatten().collect();
        let (weights, cache) = (place.weights.clone(), place.cache);
        let layers = on_gpu.iter().copied();
        let gpu = GpuLayers::new(gpu, weights.clone(), layers, place.output, cache, upload)?;
        let others = place.owned.iter().cloned().flatten().filter(|layer| !on_gpu.contains(layer));
        let others = CpuLayers::new(weights, others, cache, place.cpu.clone());
        let (gpu, instead, kept) = (Some(gpu), None, BTreeMap::new());
        Ok(Accelerated { place, on_gpu, gpu, others, instead, kept, notes })
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
        let kept = self.kept.entry((sequence, layers.start)).or_default();
        kept.end = layers.end;
        kept.rows.truncate(before);
        if let Some(gpu) = &mut self.gpu {
            // The rows are needed as they went up if the pass fails in the middle.
            let sent = hidden.to_vec();
            let (wall, cpu) = (wall_nanos(), thread_cpu_nanos());
            match gpu.forward(sequence, layers.clone(), hidden, first) {
                Ok(()) => {
                    kept.rows.extend_from_slice(&sent);
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
        let AcceleratedPlace { weights, cache, cpu, .. } = &self.place;
        // Nobody reads these layers ahead: they are mapped, and come when they are touched.
        let cpu = Cpu { gate: Gate::open(), ..cpu.clone() };
        let mut instead = CpuLayers::new(weights.clone(), self.on_gpu.iter().copied(), *cache, cpu);
        for ((sequence, start), kept) in std::mem::take(&mut self.kept) {
            let mut rows = kept.rows;
            if !rows.is_empty() {
                instead.forward(sequence, start..kept.end, &mut rows, 0);
            }
        }
        self.instead = Some(instead);
    }
}

impl Backend for Accelerated {
    fn name(&self) -> &'static str {
        if self.is_on_gpu() { "gpu" } else { "gpu lost" }
    }

    fn forward(&mut self, sequence: u32, layers: Range<u32>, hidden: &mut [f32], first: u32) -> ComputeCost {
        let mut cost = ComputeCost::default();
        let mut start = layers.start;
        while start < layers.end {
            let on_gpu = self.on_gpu.contains(&start);
            let mut run = start..layers.end;
            run.end = run.clone().find(|layer| self.on_gpu.contains(layer) != on_gpu).unwrap_or(layers.end);
            start = run.end;
            cost += if on_gpu {
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
        let kept: u64 = self.kept.values().map(|kept| size_of_val(&kept.rows[..]) as u64).sum();
        gpu + kept + self.others.cache_bytes() + self.instead.as_ref().map_or(0, Backend::cache_bytes)
    }
}
