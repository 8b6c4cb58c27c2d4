//! Slicing: the part of each layer's weights that a device stores in a tensor-parallel plan.
//!
//! A device stores a share of the attention matrices equal to its share of the key-value heads, a share of the
//! feed-forward matrices equal to its share of the rows, and all norms, which are small. Bytes are divided by
//! cumulative shares, so the bytes of all devices sum exactly to the bytes of the layer.
//!
//! A model profile only has the bytes of a layer by format. The bytes of a format are divided between attention and
//! feed-forward block in proportion to their numbers of weights. This is exact if all matrices have the same format,
//! as in systems that convert weights.
//!
//! Not here: the memory of a slice ([`crate::memory`]), and its time ([`crate::compute_cost`]).

use hearth_profiles::model::{ModelProfile, ModelShape, TensorGroup};
use hearth_profiles::{Bytes, Flops, Format};

use crate::weight_conversion::{converted_group, is_matrix_format};
use hearth_schema::plan::Plan;
use hearth_schema::plan::tensor_parallel::{Slice, TensorParallelPlan};

/// The part of a model on one device of a tensor-parallel plan.
#[derive(Debug, Clone, PartialEq)]
pub struct SlicedModel {
    /// A model whose layers are the slices of the attention blocks. Its embedding and output matrix are not sliced.
    pub attention: ModelProfile,
    /// The slice of the feed-forward block of each layer.
    pub feed_forward: Vec<TensorGroup>,
}

/// A device's part of a quantity that is divided into `whole` shares: `own` shares after `before` shares of the devices
/// before it.
#[derive(Debug, Clone, Copy)]
struct Part {
    before: u64,
    own: u64,
    whole: u64,
}

impl SlicedModel {
    /// Creates the slices of the device with index `index` in a tensor-parallel plan whose slices cover the model.
    pub fn new(plan: &Plan, tensor: &TensorParallelPlan, index: usize, model: &ModelProfile) -> Self {
        let format = plan.devices[index].residency.weight_format(plan.devices[index].gpu_layers > 0);
        let part = |of: fn(&Slice) -> u32, whole: u32| Part {
            before: tensor.slices[..index].iter().map(|slice| u64::from(of(slice))).sum(),
            own: u64::from(of(&tensor.slices[index])),
            whole: u64::from(whole).max(1),
        };
        let shape = &model.shape;
        let heads = part(|slice| slice.kv_heads, shape.kv_heads);
        let rows = part(|slice| slice.feed_forward_rows, shape.feed_forward_length);
        Self::of(model, heads, rows, [format, tensor.embedding_format.or(format)])
    }

    /// Creates a single slice with the whole model, converted to `format`.
    pub fn with_single_slice(model: &ModelProfile, format: Option<Format>) -> Self {
        let all = Part { before: 0, own: 1, whole: 1 };
        Self::of(model, all, all, [format, format])
    }

    fn of(model: &ModelProfile, heads: Part, rows: Part, [format, input]: [Option<Format>; 2]) -> Self {
        let shape = &model.shape;
        let (mut attention, mut feed_forward) = (Vec::new(), Vec::new());
        for layer in &model.layers {
            let (first, second) = blocks(&converted_group(layer, format), shape);
            attention.push(sliced(&first, heads));
            feed_forward.push(sliced(&second, rows));
        }
        let part = |count: u32| (u64::from(count) * heads.own / heads.whole) as u32;
        let shape = ModelShape { heads: part(shape.heads), kv_heads: part(shape.kv_heads), ..shape.clone() };
        let attention = ModelProfile {
            shape,
            layers: attention,
            input_embedding: converted_group(&model.input_embedding, input),
            output_head: converted_group(&model.output_head, format),
            ..model.clone()
        };
        Self { attention, feed_forward }
    }

    pub fn layers_bytes(&self) -> Bytes {
        self.attention.all_layers_bytes() + self.feed_forward.iter().map(TensorGroup::bytes).sum::<Bytes>()
    }

    /// Returns the bytes of the device's slice of a block. Block `2 l` is the attention block of layer `l`, block
    /// `2 l + 1` the feed-forward block of this layer.
    pub fn block_bytes(&self, block: usize) -> Bytes {
        let layers = if block.is_multiple_of(2) { &self.attention.layers } else { &self.feed_forward };
        layers[block / 2].bytes()
    }
}

/// Divides a layer into its attention and its feed-forward block.
fn blocks(layer: &TensorGroup, shape: &ModelShape) -> (TensorGroup, TensorGroup) {
    let (embedding, own) = (u64::from(shape.embedding_length), shape.attention());
    let attention =
        embedding * (own.query_width() + own.key_width() + own.value_width() + own.output_width());
    let whole = attention + 3 * embedding * u64::from(shape.feed_forward_length);
    let first = Part { before: 0, own: attention, whole };
    let second = Part { before: attention, own: whole - attention, whole };
    let halves = [Part { before: 0, own: 1, whole: 2 }, Part { before: 1, own: 1, whole: 2 }];
    let (mut one, mut other) = (TensorGroup::default(), TensorGroup::default());
    for (format, share) in layer.totals_by_format() {
        let parts = if is_matrix_format(layer, format) { [first, second] } else { halves };
        one.add(format, parts[0].of(share.bytes), parts[0].of_work(share.flops));
        other.add(format, parts[1].of(share.bytes), parts[1].of_work(share.flops));
    }
    (one, other)
}

/// Returns a device's slice of a block: its share of the matrices, and all norms.
fn sliced(block: &TensorGroup, part: Part) -> TensorGroup {
    let mut slice = TensorGroup::default();
    for (format, share) in block.totals_by_format() {
        if is_matrix_format(block, format) {
            slice.add(format, part.of(share.bytes), part.of_work(share.flops));
        } else {
            slice.add(format, share.bytes, share.flops);
        }
    }
    slice
}

impl Part {
    fn of(self, bytes: Bytes) -> Bytes {
        let up_to = |share: u64| u128::from(bytes.0) * u128::from(share) / u128::from(self.whole);
        Bytes((up_to(self.before + self.own) - up_to(self.before)) as u64)
    }

    fn of_work(self, work: Flops) -> Flops {
        work * (self.own as f64 / self.whole as f64)
    }
}
