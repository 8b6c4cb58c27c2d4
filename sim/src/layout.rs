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
}

impl Layout {
    /// The share of the device at a place of the plan.
    pub fn new(plan: &Plan, place: usize, model: &ModelProfile, chunk: Bytes) -> Self {
        let mut layout = Self { layers: vec![None; model.layers.len()], output: 0..0, chunks: 0 };
        for round in 0..plan.rounds {
            let (window, gpu) = (plan.window(place, round), plan.gpu_window(place, round));
            let mut offset = u64::from(layout.chunks) * chunk.0;
            for layer in gpu.end.max(window.start)..window.end {
                let end = offset + model.layer_bytes(layer).0;
                layout.layers[layer as usize] = Some(chunks(offset, end, chunk));
                offset = end;
            }
            layout.chunks = offset.div_ceil(chunk.0) as Chunk;
        }
        if place == 0 {
            let (start, bytes) = (u64::from(layout.chunks) * chunk.0, model.output_bytes().0);
            layout.output = chunks(start, start + bytes, chunk);
            layout.chunks = layout.output.end;
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
                let mut own =
                    layers.clone().map(|layer| self.layer(layer)).filter(|chunks| !chunks.is_empty());
                let first = own.next().unwrap_or(0..0);
                let end = own.next_back().map_or(first.end, |last| last.end);
                first.start..end
            }
        }
    }

    /// How many chunks the share has.
    pub fn chunks(&self) -> Chunk {
        self.chunks
    }
}

fn chunks(start: u64, end: u64, chunk: Bytes) -> Range<Chunk> {
    (start / chunk.0) as Chunk..end.div_ceil(chunk.0) as Chunk
}

#[cfg(test)]
mod tests {
    use hearth_profiles::model::shipped;
    use hearth_schema::plan::{Origin, PlannedDevice, PlannedModel, PlannerRecord, Role};
    use hearth_schema::scenario::{KvFormat, Residency};

    use super::*;

    #[test]
    fn windows_begin_with_chunks_of_their_own_and_layers_do_not() {
        let model = shipped("llama-8b").expect("shipped");
        let device = |name: &str, role, window, gpu_layers| PlannedDevice {
            name: name.into(),
            address: None,
            role,
            window,
            gpu_layers,
            residency: Residency::Os,
            prefetch_budget: None,
            predicted: None,
        };
        let plan = Plan {
            schema: "plan/1".into(),
            scenario: Origin { name: "test".into(), digest: String::new() },
            model: PlannedModel {
                name: "llama-8b".into(),
                digest: None,
                shape_digest: model.shape_digest(),
                layers: 32,
            },
            planner: PlannerRecord { strategy: "manual".into(), options: vec![] },
            rounds: 2,
            context: 1024,
            kv_cache: KvFormat::F16,
            devices: vec![device("a", Role::Head, 10, 2), device("b", Role::Worker, 6, 0)],
            dropped: vec![],
            predicted: None,
            explanation: vec![],
        };
        let chunk = Bytes::mib(2);
        let layout = Layout::new(&plan, 0, &model, chunk);
        // Layers 2..10 and 18..26 are the head's CPU's.
        assert!(layout.layer(0).is_empty() && layout.layer(10).is_empty());
        assert_eq!(layout.layer(2).start, 0);
        let (third, fourth) = (layout.layer(3), layout.layer(4));
        assert!(third.end == fourth.start || third.end == fourth.start + 1, "no gap inside a window");
        let first: u64 = (2..10).map(|layer| model.layer_bytes(layer).0).sum();
        assert_eq!(u64::from(layout.layer(18).start), first.div_ceil(chunk.0));
        assert_eq!(layout.part(&Part::Layers(2..10)), 0..layout.layer(18).start);
        assert_eq!(layout.part(&Part::Layers(0..10)), layout.part(&Part::Layers(2..10)));
        assert_eq!(layout.output().end, layout.chunks());
    }
}
