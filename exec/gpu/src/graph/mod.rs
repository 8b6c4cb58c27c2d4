//! The graph of a pass: its operations in order, and the tensors that they read and write.
//!
//! A graph is a list of nodes, each one launch of a kernel, over tensors that are written once. [`decoder()`] builds
//! the plainest graph of an architecture, one operation a node; [`fusion`] makes fewer launches of it. From a graph
//! come the records that [`crate::memory`] plans with.
//!
//! Not here: what a node computes. Kernels are in `crate::kernels`.

pub mod decoder;
pub mod diffusion;
pub mod fusion;

pub use decoder::{Numbers, decoder};
pub use fusion::{Fusion, Residual, fuse};

use crate::memory::Record;

/// A matrix of a layer, or the one that makes logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Matrix {
    Query,
    Key,
    Value,
    AttentionOutput,
    Gate,
    Up,
    Down,
}

impl Matrix {
    /// All matrices of a layer, in the order of `hearth_runtime::LayerWeights`.
    pub const ALL: [Matrix; 7] = [
        Matrix::Query,
        Matrix::Key,
        Matrix::Value,
        Matrix::AttentionOutput,
        Matrix::Gate,
        Matrix::Up,
        Matrix::Down,
    ];
}

/// A norm, by its weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Norm {
    Attention,
    QueryHeads,
    KeyHeads,
    /// Applied to the output of attention.
    PostAttention,
    FeedForward,
    /// Applied to the output of the feed-forward block.
    PostFeedForward,
    Output,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Side {
    Query,
    Key,
}

/// One operation of the forward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Operation {
    /// Rows of the embedding.
    Embed,
    Scale,
    /// RMSNorm.
    Norm(Norm),
    /// Rounds a product's input to eight bits.
    Quantise,
    Product(Matrix),
    /// Adds a vector to each row.
    Bias(Matrix),
    /// Rotary embedding, and the order of rows in which attention reads them.
    Rotate(Side),
    /// Values in the order in which they are summed.
    TransposeValues,
    /// Queries times keys.
    Scores,
    Cap,
    SoftMax,
    /// Probabilities times values.
    Mix,
    /// The gate's function.
    Activate,
    Multiply,
    /// A residual connection.
    Add,
    /// One of an image model, by name: these are planned and not executed.
    Image(&'static str),
}

impl Operation {
    /// Whether an element of the result needs one element of the first input only.
    fn is_pointwise(self) -> bool {
        matches!(
            self,
            Operation::Scale
                | Operation::Bias(_)
                | Operation::Cap
                | Operation::Activate
                | Operation::Multiply
                | Operation::Add
        )
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor {
    pub name: &'static str,
    /// Bytes, padded to whole slices.
    pub bytes: u64,
}

/// One launch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    pub operations: Vec<Operation>,
    /// Tensors read; of a pointwise operation the first is what it changes.
    pub reads: Vec<usize>,
    pub writes: Vec<usize>,
}

/// Launches in their order.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Graph {
    /// The tensors by number.
    pub tensors: Vec<Tensor>,
    pub nodes: Vec<Node>,
}

impl Graph {
    /// Adds a tensor that a node will write.
    pub fn tensor(&mut self, name: &'static str, bytes: u64) -> usize {
        self.tensors.push(Tensor { name, bytes });
        self.tensors.len() - 1
    }

    /// Adds a node with one result.
    pub fn node(&mut self, operation: Operation, reads: &[usize], name: &'static str, bytes: u64) -> usize {
        let result = self.tensor(name, bytes);
        self.nodes.push(Node { operations: vec![operation], reads: reads.to_vec(), writes: vec![result] });
        result
    }

    pub fn launches(&self) -> usize {
        self.nodes.len()
    }

    /// Returns each tensor that a node writes, with its lifetime.
    pub fn records(&self) -> Vec<(usize, Record)> {
        let mut records = Vec::new();
        for (first, node) in self.nodes.iter().enumerate() {
            for &tensor in &node.writes {
                let last = self.nodes.iter().rposition(|node| node.reads.contains(&tensor));
                let last = last.unwrap_or(first).max(first) as u32;
                let size = self.tensors[tensor].bytes;
                records.push((tensor, Record { size, first: first as u32, last }));
            }
        }
        records
    }

    /// The number of nodes that read a tensor.
    fn readers(&self, tensor: usize) -> usize {
        self.nodes.iter().filter(|node| node.reads.contains(&tensor)).count()
    }
}
