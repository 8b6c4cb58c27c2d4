//! Unfused graphs of the decoders of all model architectures.
//!
//! The equations are those of `hearth_runtime::hyperparameters`, with one operation per node.

use hearth_profiles::model::{ArchitectureSpec, ModelShape};

use super::{Graph, LayerMatrix, Norm, Operation};
use crate::virtual_tensor::SLICE_SIZE;

/// The dimensions of a pass that determine the sizes of the intermediate tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PassSize {
    pub layers: u32,
    pub tokens: u64,
    /// Number of positions in the cache that attention reads.
    pub context_length: u64,
    /// Size in bytes of one element of an intermediate tensor.
    pub element_bytes: u64,
}

struct Builder<'a> {
    graph: Graph,
    shape: &'a ModelShape,
    size: PassSize,
}

/// Returns the unfused graph of a decoder, from the input embedding to the output norm, which only the last token has.
pub fn decoder_graph(shape: &ModelShape, size: PassSize) -> Graph {
    let mut builder = Builder { graph: Graph::default(), shape, size };
    let wide = u64::from(shape.embedding_length);
    let bytes = builder.rows(wide);
    let mut hidden = builder.graph.add_node(Operation::Embed, &[], "embed", bytes);
    let spec = shape.architecture.spec();
    if spec.scales_embeddings || spec.has_scale_factors {
        hidden = builder.graph.add_node(Operation::Scale, &[hidden], "embed", bytes);
    }
    for _ in 0..size.layers {
        hidden = builder.attention(hidden);
        hidden = builder.feed_forward(hidden);
    }
    let last = padded(wide) * size.element_bytes;
    builder.graph.add_node(Operation::Norm(Norm::Output), &[hidden], "norm", last);
    builder.graph
}

fn padded(channels: u64) -> u64 {
    channels.next_multiple_of(u64::from(SLICE_SIZE))
}

impl Builder<'_> {
    /// Returns the size in bytes of a tensor [tokens, channels], with padded channels.
    fn rows(&self, channels: u64) -> u64 {
        self.size.tokens * padded(channels) * self.size.element_bytes
    }

    fn spec(&self) -> &'static ArchitectureSpec {
        self.shape.architecture.spec()
    }

    fn attention(&mut self, hidden: usize) -> usize {
        let shape = self.shape.attention();
        let wide = self.rows(u64::from(self.shape.embedding_length));
        let widths =
            [shape.query_width(), shape.key_width(), shape.value_width()].map(|width| self.rows(width));
        let x = self.block_input(hidden, Norm::Attention);
        let projections = [(LayerMatrix::Query, "q"), (LayerMatrix::Key, "k"), (LayerMatrix::Value, "v")];
        let mut results = projections.map(|(matrix, name)| {
            self.graph.add_node(Operation::Matmul(matrix), &[x], name, widths[matrix as usize])
        });
        if self.spec().has_projection_biases {
            results = projections.map(|(matrix, name)| {
                let at = matrix as usize;
                self.graph.add_node(Operation::Bias(matrix), &[results[at]], name, widths[at])
            });
        }
        let [mut q, mut k, mut v] = results;
        if let Some(norm) = self.spec().query_key_norm {
            let [query, key] = Norm::of_queries_and_keys(norm);
            q = self.graph.add_node(Operation::Norm(query), &[q], "q", widths[0]);
            k = self.graph.add_node(Operation::Norm(key), &[k], "k", widths[1]);
        }
        q = self.graph.add_node(Operation::Rope, &[q], "q.rope", widths[0]);
        k = self.graph.add_node(Operation::Rope, &[k], "k.rope", widths[1]);
        v = self.graph.add_node(Operation::TransposeValues, &[v], "v.t", widths[2]);
        let scores = self.rows(self.size.context_length) * u64::from(shape.heads);
        let mut s = self.graph.add_node(Operation::Scores, &[q, k], "qk", scores);
        if self.spec().soft_caps.is_some_and(|caps| caps.default_attention.is_some()) {
            s = self.graph.add_node(Operation::SoftCap, &[s], "qk", scores);
        }
        let p = self.graph.add_node(Operation::Softmax, &[s], "softmax", scores);
        let mixed = self.rows(shape.output_width());
        let m = self.graph.add_node(Operation::WeightedValues, &[p, v], "pv", mixed);
        let o = self.graph.add_node(Operation::Matmul(LayerMatrix::AttentionOutput), &[m], "o", wide);
        self.add(o, hidden, Norm::PostAttention, "o+add")
    }

    fn feed_forward(&mut self, hidden: usize) -> usize {
        let (wide, inner) =
            (u64::from(self.shape.embedding_length), u64::from(self.shape.feed_forward_length));
        let (wide, inner) = (self.rows(wide), self.rows(inner));
        let x = self.block_input(hidden, Norm::FeedForward);
        let graph = &mut self.graph;
        let gate = graph.add_node(Operation::Matmul(LayerMatrix::Gate), &[x], "gate", inner);
        let gate = graph.add_node(Operation::Activate, &[gate], "gate", inner);
        let up = graph.add_node(Operation::Matmul(LayerMatrix::Up), &[x], "up", inner);
        let up = graph.add_node(Operation::Multiply, &[up, gate], "up*silu", inner);
        let down = graph.add_node(Operation::Matmul(LayerMatrix::Down), &[up], "down", wide);
        self.add(down, hidden, Norm::PostFeedForward, "down+add")
    }

    /// Adds the norm before a block, if the architecture has one. Returns the input of the block.
    fn block_input(&mut self, hidden: usize, norm: Norm) -> usize {
        if !self.spec().has_pre_norms {
            return hidden;
        }
        let bytes = self.rows(u64::from(self.shape.embedding_length));
        self.graph.add_node(Operation::Norm(norm), &[hidden], "rmsnorm", bytes)
    }

    /// Adds the residual addition of a block, preceded in some architectures by a norm of the output of the block.
    fn add(&mut self, mut output: usize, hidden: usize, norm: Norm, name: &'static str) -> usize {
        let bytes = self.rows(u64::from(self.shape.embedding_length));
        if self.spec().has_post_norms {
            output = self.graph.add_node(Operation::Norm(norm), &[output], "post norm", bytes);
        }
        self.graph.add_node(Operation::Add, &[output, hidden], name, bytes)
    }
}
