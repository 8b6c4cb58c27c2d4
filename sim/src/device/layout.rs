//! File layout: the position of each part of a device's weights in the model file.
//!
//! A device maps the whole file and touches its own parts: the windows of layers that its CPU computes. With Metal it
//! also touches the windows of its GPU. The head device also touches the embedding and the output matrix. The order of
//! the parts is that of model converters: embedding, layers, output. Positions matter because a page fault also reads
//! some MiB before and after the touched page, which may belong to layers of other devices.
//!
//! Deviation: a chunk in which one layer ends and the next begins belongs only to the first layer. Experts are at the
//! end of the file, and their [`EXPERT_MATRICES`] matrices have the same size. A chunk with parts of two experts belongs
//! to the first, so a matrix smaller than a chunk may have none.
//!
//! Not here: layers copied to GPU memory, which are never read again.

use std::ops::Range;

use hearth_core::expert_cache::ExpertId;
use hearth_core::schedule::ModelPart;
use hearth_profiles::Bytes;
use hearth_profiles::model::ModelProfile;
use hearth_schema::Plan;

use crate::page_cache::Chunk;

/// Number of matrices of an expert. In the file, a layer has the first matrices of all experts, then the second ones,
/// and so on: a page fault at one also reads those of other experts.
/// source: the usual gate, up and down projections
const EXPERT_MATRICES: u64 = 3;

#[derive(Debug)]
pub struct WeightLayout {
    /// The chunks of each layer of the model, without experts; `None` if this device does not read the layer through
    /// the mapping.
    layers: Vec<Option<Range<Chunk>>>,
    experts: ExpertLayout,
    embedding: Range<Chunk>,
    /// The chunks of the output matrix; empty except on the head device.
    pub output_chunks: Range<Chunk>,
    /// Number of chunks of the model file.
    pub chunk_count: Chunk,
}

/// The positions of the experts in the file.
#[derive(Debug, Clone, Default)]
pub struct ExpertLayout {
    /// The offset of the first expert of each layer and the size of one expert, in bytes; a size of 0 if the layer has
    /// no experts or this device does not read it.
    pub(super) layers: Vec<(u64, u64)>,
    pub(super) count: u32,
    pub(super) chunk_bytes: u64,
    /// The first chunk of an expert; the number of chunks of the file if there is none.
    pub first_chunk: Chunk,
}

impl ExpertLayout {
    /// Returns the size of one expert of each layer, in bytes.
    pub fn expert_bytes(&self) -> Vec<u64> {
        self.layers.iter().map(|(_, bytes)| *bytes).collect()
    }

    /// Returns the chunks of each matrix of an expert.
    pub fn chunks(&self, (layer, expert): ExpertId) -> impl Iterator<Item = Range<Chunk>> + use<> {
        let (offset, bytes) = self.layers.get(layer as usize).copied().unwrap_or_default();
        let (count, chunk_bytes, matrix) = (u64::from(self.count), self.chunk_bytes, bytes / EXPERT_MATRICES);
        let chunk = move |offset: u64| offset.div_ceil(chunk_bytes) as Chunk;
        (0..EXPERT_MATRICES).map(move |index| {
            let begin = offset + (index * count + u64::from(expert)) * matrix;
            chunk(begin)..chunk(begin + matrix)
        })
    }

    /// Returns the chunks of all experts of a layer.
    pub fn layer_chunks(&self, layer: u32) -> Range<Chunk> {
        let (offset, bytes) = self.layers.get(layer as usize).copied().unwrap_or_default();
        let chunk = |offset: u64| offset.div_ceil(self.chunk_bytes) as Chunk;
        chunk(offset)..chunk(offset + u64::from(self.count) * bytes)
    }
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
        let of_experts = |layer: u32| model.layers[layer as usize].expert_bytes();
        let layers = (0..model.layers.len() as u32)
            .map(|layer| {
                let bytes = model.layer_bytes(layer).saturating_sub(of_experts(layer));
                Some(next(bytes)).filter(|_| owned[layer as usize])
            })
            .collect();
        let tied = model.shape.has_tied_embeddings;
        let output = if tied { embedding.clone() } else { next(model.output_head_bytes()) };
        let chunk = |offset: u64| offset.div_ceil(chunk_size.0) as Chunk;
        let first_chunk = chunk(offset);
        let count = model.shape.experts.map_or(1, |experts| experts.count);
        let of_layer = |(layer, owned): (u32, &bool)| {
            let (begin, bytes) = (offset, of_experts(layer).0);
            offset += bytes;
            (begin, if *owned { bytes / u64::from(count) } else { 0 })
        };
        let layers_of_experts = (0..).zip(&owned).map(of_layer).collect();
        let experts =
            ExpertLayout { layers: layers_of_experts, count, chunk_bytes: chunk_size.0, first_chunk };
        let chunk_count = chunk(offset);
        let (embedding, output) = if index == 0 { (embedding, output) } else { (0..0, 0..0) };
        Self { layers, experts, embedding, output_chunks: output, chunk_count }
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
        own.extend((0..self.layers.len() as u32).map(|layer| self.experts.layer_chunks(layer)));
        own.sort_unstable_by_key(|range| range.start);
        let mut from = 0;
        own.into_iter().flat_map(move |range| {
            // A tied output matrix has the chunks of the embedding, which count once.
            let start = range.start.max(from);
            from = from.max(range.end);
            start..range.end
        })
    }

    pub fn experts(&self) -> &ExpertLayout {
        &self.experts
    }

    /// Returns the chunks of one layer, without those of experts; empty if this device does not read the layer through the mapping.
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
    fn experts_of_own_layers_are_at_the_end_of_the_file() {
        let model = shipped_profile("qwen3-30b-a3b").expect("shipped");
        let scenario = ScenarioRecord { name: "test".into(), digest: String::new() };
        let planner = PlannerRecord { strategy: "manual".into(), options: vec![] };
        let plan = Plan {
            rounds: 1,
            context_length: 1024,
            devices: vec![PlannedDevice::new("a", Role::Head, 40), PlannedDevice::new("b", Role::Worker, 8)],
            ..Plan::empty(scenario, PlannedModel::from_profile(&model), planner)
        };
        let chunk = Bytes::from_mib(1);
        let [head, worker] = [0, 1].map(|index| WeightLayout::new(&plan, index, &model, chunk, false));
        let experts = head.experts();
        let bytes = model.layers[0].expert_bytes().0 / 128;
        assert_eq!(experts.expert_bytes()[0], bytes);
        assert_eq!(experts.expert_bytes()[40..], [0; 8], "layers of the other device");
        assert_eq!(worker.experts().expert_bytes()[..40], [0; 40]);
        // The experts of a layer follow each other, and all chunks together have the size of the file.
        let chunks = |id| experts.chunks(id).collect::<Vec<_>>();
        assert_eq!(chunks((0, 0))[0].start, experts.first_chunk);
        let (one, next) = (chunks((3, 4)), chunks((3, 5)));
        assert_eq!([0, 1, 2].map(|matrix| one[matrix].end), [0, 1, 2].map(|matrix| next[matrix].start));
        assert_eq!(
            chunks((3, 127))[0].end,
            chunks((3, 0))[1].start,
            "matrices of the same kind follow each other"
        );
        assert_eq!(u64::from(head.chunk_count), model.total_bytes().0.div_ceil(chunk.0));
        assert!(head.layer_chunks(39).end <= experts.first_chunk);
        let all = experts.layer_chunks(1);
        assert_eq!(all, chunks((1, 0))[0].start..chunks((1, 127))[2].end);
        assert_eq!(worker.experts().layer_chunks(47).end, worker.chunk_count);
        let own = head.own_chunks().collect::<Vec<_>>();
        assert!(own.contains(&all.start) && !own.contains(&worker.experts().layer_chunks(47).start));
    }

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
