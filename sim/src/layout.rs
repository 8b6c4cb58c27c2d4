//! Where in a device's part of the file does each layer lie?
//!
//! A device maps the windows that its CPU computes, and the head the output matrix as well. They are laid out
//! one after another in chunks of the page cache; a window begins with a chunk of its own, because other
//! devices' layers lie between two windows, and layers of one window follow each other without a gap.
//!
//! Not here: layers in GPU memory, which are never read again, and the embedding, of which a token needs one
//! row.

use std::ops::Range;

use hearth_profiles::Bytes;
use hearth_profiles::model::ModelProfile;
use hearth_schema::Plan;
use hearth_schema::schedule::Part;

use crate::page_cache::Chunk;

/// Chunks of one device's share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// For each layer of the model, its chunks, if this device's CPU computes it.
    layers: Vec<Option<Range<Chunk>>>,
    output: Range<Chunk>,
    chunks: Chunk,
    bytes: u64,
}

impl Layout {
    /// The share of the device at a place of the plan.
    pub fn new(plan: &Plan, place: usize, model: &ModelProfile, chunk: Bytes) -> Self {
        let mut layout =
            Self { layers: vec![None; model.layers.len()], output: 0..0, chunks: 0, bytes: 0 };
        for round in 0..plan.rounds {
            let (window, gpu) = (plan.window(place, round), plan.gpu_window(place, round));
            let start = u64::from(layout.chunks) * chunk.0;
            let mut offset = start;
            for layer in gpu.end.max(window.start)..window.end {
                let end = offset + model.layer_bytes(layer).0;
                layout.layers[layer as usize] = Some(chunks(offset, end, chunk));
                offset = end;
            }
            layout.chunks = offset.div_ceil(chunk.0) as Chunk;
            layout.bytes += offset - start;
        }
        if place == 0 {
            let (start, bytes) = (u64::from(layout.chunks) * chunk.0, model.output_bytes().0);
            layout.output = chunks(start, start + bytes, chunk);
            layout.chunks = layout.output.end;
            layout.bytes += bytes;
        }
        layout
    }

    /// The chunks of one layer; none if it is not this device's CPU's.
    pub fn layer(&self, layer: u32) -> Range<Chunk> {
        self.layers.get(layer as usize).cloned().flatten().unwrap_or(0..0)
    }

    /// The chunks of the output matrix; none off the head.
    pub fn output(&self) -> Range<Chunk> {
        self.output.clone()
    }

    /// The chunks of a part that is read as one.
    pub fn part(&self, part: &Part) -> Range<Chunk> {
        match part {
            Part::Output => self.output(),
            Part::Layers(layers) => {
                let mut own = layers.clone().map(|layer| self.layer(layer)).filter(|chunks| !chunks.is_empty());
                let first = own.next().unwrap_or(0..0);
                let end = own.last().map_or(first.end, |last| last.end);
                first.start..end
            }
        }
    }

    /// How many chunks the share has.
    pub fn chunks(&self) -> Chunk {
        self.chunks
    }

    /// How many bytes the share has.
    pub fn bytes(&self) -> Bytes {
        Bytes(self.bytes)
    }
}

fn chunks(start: u64, end: u64, chunk: Bytes) -> Range<Chunk> {
    (start / chunk.0) as Chunk..end.div_ceil(chunk.0) as Chunk
}
