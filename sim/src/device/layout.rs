//! File layout: the position of each part of a device's weights in the model file.
//!
//! A device maps the whole file and touches its own parts: the windows of layers that its CPU computes. With Metal it
//! also touches the windows of its GPU. The head device also touches the embedding and the output matrix. The order of
//! the parts is that of model converters: embedding, layers, output. Positions matter because a page fault also reads
//! some MiB before and after the touched page, which may belong to layers of other devices.
//!
//! Deviation: a chunk in which one layer ends and the next begins belongs only to the first layer.
//!
//! Not here: layers copied to GPU memory, which are never read again.

use std::ops::Range;

use hearth_core::schedule::ModelPart;
use hearth_profiles::Bytes;
use hearth_profiles::model::ModelProfile;
use hearth_schema::Plan;

use crate::page_cache::Chunk;

#[derive(Debug)]
pub struct WeightLayout {
    /// The chunks of each layer of the model; `None` if this device does not read the layer through the mapping.
    layers: Vec<Option<Range<Chunk>>>,
    embedding: Range<Chunk>,
    /// The chunks of the output matrix; empty except on the head device.
    pub output_chunks: Range<Chunk>,
    /// Number of chunks of the model file.
    pub chunk_count: Chunk,
}

impl WeightLayout {
    /// Creates the layout for the device with this index in the plan. With `gpu_maps` its GPU also reads mapped
    /// weights.
    pub fn new(plan: &Plan, index: usize, model: &ModelProfile, chunk_size: Bytes, gpu_maps: bool) -> Self {
        let mut owned = vec![false; model.layers.len()];
        for round in 0..plan.rounds {
            let (window, gpu) = (plan.window(index, round), plan.gpu_window(index, round));
            let from = if gpu_maps { window.start } else { gpu.end.max(window.start) };
            for layer in from..window.end {
                owned[layer as usize] = true;
            }
        }
        let mut offset = 0;
        let mut next = |bytes: Bytes| {
            let start = offset;
            offset += bytes.0;
            start.div_ceil(chunk_size.0) as Chunk..offset.div_ceil(chunk_size.0) as Chunk
        };
        let embedding = next(model.input_embedding_bytes());
        let layers = (0..model.layers.len() as u32)
            .map(|layer| Some(next(model.layer_bytes(layer))).filter(|_| owned[layer as usize]))
            .collect();
        let tied = model.shape.has_tied_embeddings;
        let output = if tied { embedding.clone() } else { next(model.output_head_bytes()) };
        let chunk_count = offset.div_ceil(chunk_size.0) as Chunk;
        let (embedding, output) = if index == 0 { (embedding, output) } else { (0..0, 0..0) };
        Self { layers, embedding, output_chunks: output, chunk_count }
    }

    /// Returns the chunk that contains an embedding row, as a range; empty except on the head device.
    pub fn embedding_row_chunks(&self, row: u64, row_bytes: Bytes, chunk_size: Bytes) -> Range<Chunk> {
        let at = self.embedding.start + (row * row_bytes.0 / chunk_size.0) as Chunk;
        at.min(self.embedding.end)..(at + 1).min(self.embedding.end)
    }

    /// Returns all chunks that this device reads through the mapping, in file order, including the embedding of the
    /// head.
    pub fn own_chunks(&self) -> impl Iterator<Item = Chunk> {
        let mut own: Vec<Range<Chunk>> = self.layers.iter().flatten().cloned().collect();
        own.extend([self.output_chunks.clone(), self.embedding.clone()]);
        own.sort_unstable_by_key(|range| range.start);
        let mut from = 0;
        own.into_iter().flat_map(move |range| {
            // A tied output matrix has the chunks of the embedding, which count once.
            let start = range.start.max(from);
            from = from.max(range.end);
            start..range.end
        })
    }

    /// Returns the chunks of one layer; empty if this device does not read the layer through the mapping.
    pub fn layer_chunks(&self, layer: u32) -> Range<Chunk> {
        self.layers.get(layer as usize).cloned().flatten().unwrap_or(0..0)
    }

    /// Returns the chunks of a part of the model: of consecutive layers, or of the output matrix.
    pub fn part_chunks(&self, part: &ModelPart) -> Range<Chunk> {
        match part {
            ModelPart::Output => self.output_chunks.clone(),
            ModelPart::Layers(layers) => {
                let mut own =
                    layers.clone().map(|layer| self.layer_chunks(layer)).filter(|chunks| !chunks.is_empty());
                let first = own.next().unwrap_or(0..0);
                let end = own.next_back().map_or(first.end, |last| last.end);
                first.start..end
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use hearth_profiles::model::shipped_profile;
    use hearth_schema::plan::{PlannedDevice, PlannedModel, PlannerRecord, Role, ScenarioRecord};

    use super::*;

    #[test]
    fn layout_follows_file_order() {
        let model = shipped_profile("llama-8b").expect("shipped");
        let scenario = ScenarioRecord { name: "test".into(), digest: String::new() };
        let planner = PlannerRecord { strategy: "manual".into(), options: vec![] };
        let head = PlannedDevice { gpu_layers: 2, ..PlannedDevice::new("a", Role::Head, 10) };
        let plan = Plan {
            rounds: 2,
            context_length: 1024,
            devices: vec![head, PlannedDevice::new("b", Role::Worker, 6)],
            ..Plan::empty(scenario, PlannedModel::from_profile(&model), planner)
        };
        let chunk = Bytes::from_mib(2);
        let layout = WeightLayout::new(&plan, 0, &model, chunk, false);
        // The CPU of the head computes layers 2..10 and 18..26.
        assert!(layout.layer_chunks(0).is_empty() && layout.layer_chunks(10).is_empty());
        let before = model.input_embedding_bytes().0 + model.layer_bytes(0).0 + model.layer_bytes(1).0;
        assert_eq!(u64::from(layout.layer_chunks(2).start), before.div_ceil(chunk.0));
        let metal = WeightLayout::new(&plan, 0, &model, chunk, true);
        assert!(!metal.layer_chunks(0).is_empty(), "Metal maps its layers");
        let (third, fourth) = (layout.layer_chunks(3), layout.layer_chunks(4));
        assert_eq!(third.end, fourth.start, "every chunk belongs to one layer");
        let part = |layers| layout.part_chunks(&ModelPart::Layers(layers));
        assert_eq!(part(0..10), part(2..10));
        assert_eq!(u64::from(layout.chunk_count), model.total_bytes().0.div_ceil(chunk.0));
        assert_eq!(layout.output_chunks.end, layout.chunk_count);
        let own: Vec<Chunk> = layout.own_chunks().collect();
        assert!(own.is_sorted() && own.windows(2).all(|pair| pair[0] != pair[1]), "each once");
        // A row of 4096 weights in the middle of 128256 rows.
        let row = layout.embedding_row_chunks(64128, model.embedding_row_bytes(), chunk);
        assert_eq!(u64::from(row.start), model.input_embedding_bytes().0 / 2 / chunk.0);
        let worker = WeightLayout::new(&plan, 1, &model, chunk, false);
        assert!(worker.embedding_row_chunks(5, model.embedding_row_bytes(), chunk).is_empty());
    }
}
