//! Slicing: the weights of each layer that a device holds in a tensor-parallel plan.
//!
//! A layer's matrices are its attention's (queries, keys, values, output) and its feed-forward block's (gate, up,
//! down). A device has the share of the first that it has of the key-value heads, and of the second that it has of
//! the rows. Bytes are divided by cumulative shares, so those of all devices sum to the layer's, to the byte. Norms
//! are small, and every device has them.
//!
//! A model profile sums a layer's tensors by format and does not separate them; the bytes of a format are split
//! between attention and feed-forward block as their weights are. In one format, as in systems that convert, this is
//! exact.
//!
//! [`SlicedModel`] is the model as one device sees it, from which [`crate::compute_cost`] computes the time of its
//! part.
//!
//! Not here: the memory of a slice ([`crate::memory`]).

use hearth_profiles::model::{ModelProfile, ModelShape, TensorGroup};
use hearth_profiles::{Bytes, Flops, Format};

use crate::conversion::{converted, is_matrix};
use hearth_schema::plan::Plan;
use hearth_schema::plan::tensor::{Slice, TensorPlan};

/// A model as one device of a tensor-parallel plan sees it.
#[derive(Debug, Clone, PartialEq)]
pub struct SlicedModel {
    /// Its heads, and as layers the attention blocks; embedding and output matrix whole, in the head's formats.
    pub attention: ModelProfile,
    /// The feed-forward blocks.
    pub feed_forward: Vec<TensorGroup>,
}

/// A part of a whole that is shared out in order: from which share to which.
#[derive(Debug, Clone, Copy)]
struct Part {
    before: u64,
    own: u64,
    whole: u64,
}

impl SlicedModel {
    /// The part of the device at a place of a tensor-parallel plan whose slices cover the model.
    pub fn new(plan: &Plan, tensor: &TensorPlan, place: usize, model: &ModelProfile) -> Self {
        let format = plan.devices[place].residency.format_on(plan.devices[place].gpu_layers > 0);
        let part = |of: fn(&Slice) -> u32, whole: u32| Part {
            before: tensor.slices[..place].iter().map(|slice| u64::from(of(slice))).sum(),
            own: u64::from(of(&tensor.slices[place])),
            whole: u64::from(whole).max(1),
        };
        let shape = &model.shape;
        let heads = part(|slice| slice.kv_heads, shape.kv_heads);
        let rows = part(|slice| slice.feed_forward, shape.feed_forward);
        Self::of(model, heads, rows, format, tensor.embedding_as.or(format))
    }

    /// The whole model in another format.
    pub fn whole(model: &ModelProfile, format: Option<Format>) -> Self {
        let all = Part { before: 0, own: 1, whole: 1 };
        Self::of(model, all, all, format, format)
    }

    fn of(
        model: &ModelProfile,
        heads: Part,
        rows: Part,
        format: Option<Format>,
        embedding: Option<Format>,
    ) -> Self {
        let shape = &model.shape;
        let (mut attention, mut feed_forward) = (Vec::new(), Vec::new());
        for layer in &model.layers {
            let (first, second) = blocks(&converted(layer, format), shape);
            attention.push(sliced(&first, heads));
            feed_forward.push(sliced(&second, rows));
        }
        let share = |count: u32| (u64::from(count) * heads.own / heads.whole) as u32;
        let shape =
            ModelShape { heads: share(shape.heads), kv_heads: share(shape.kv_heads), ..shape.clone() };
        let attention = ModelProfile {
            shape,
            layers: attention,
            input: converted(&model.input, embedding),
            output: converted(&model.output, format),
            ..model.clone()
        };
        Self { attention, feed_forward }
    }

    /// Bytes of all layer weights of a device.
    pub fn layers_bytes(&self) -> Bytes {
        self.attention.layers_bytes() + self.feed_forward.iter().map(TensorGroup::bytes).sum::<Bytes>()
    }

    /// A layer's weights of a block: 0 attention, 1 feed-forward.
    pub fn block_bytes(&self, block: usize) -> Bytes {
        let layer = block / 2;
        if block.is_multiple_of(2) {
            self.attention.layers[layer].bytes()
        } else {
            self.feed_forward[layer].bytes()
        }
    }
}

/// A layer's attention and feed-forward block.
fn blocks(layer: &TensorGroup, shape: &ModelShape) -> (TensorGroup, TensorGroup) {
    let (embedding, attended) =
        (u64::from(shape.embedding), u64::from(shape.heads) * u64::from(shape.value_length));
    let attention = embedding * (shape.query_width() + shape.key_width() + shape.value_width() + attended);
    let whole = attention + 3 * embedding * u64::from(shape.feed_forward);
    let first = Part { before: 0, own: attention, whole };
    let second = Part { before: attention, own: whole - attention, whole };
    let halves = [Part { before: 0, own: 1, whole: 2 }, Part { before: 1, own: 1, whole: 2 }];
    let (mut one, mut other) = (TensorGroup::default(), TensorGroup::default());
    for (format, share) in layer.by_format() {
        let parts = if is_matrix(layer, format) { [first, second] } else { halves };
        one.add(format, parts[0].of(share.bytes), parts[0].of_work(share.flops));
        other.add(format, parts[1].of(share.bytes), parts[1].of_work(share.flops));
    }
    (one, other)
}

/// A device's part of a block: of its matrices by the share, of its norms all.
fn sliced(block: &TensorGroup, part: Part) -> TensorGroup {
    let mut slice = TensorGroup::default();
    for (format, share) in block.by_format() {
        if is_matrix(block, format) {
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
