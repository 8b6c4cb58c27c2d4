//! The graph of a pass: its operations in order, and the tensors that they read and write.
//!
//! A graph is a list of nodes over tensors that are written once; each node is one kernel launch. [`decoder_graph()`]
//! builds the unfused graph of an architecture, with one operation per node; [`fusion`] merges nodes so that there
//! are fewer launches. A graph also gives the tensor usage records from which [`crate::memory`] plans memory.
//!
//! Not here: the kernels, which are in `crate::kernels`.

pub mod decoder;
pub mod diffusion;
pub mod fusion;

pub use decoder::{PassSize, decoder_graph};
pub use fusion::{FusionOptions, ResidualFusion, fuse};

use crate::memory::TensorUsageRecord;

/// One of the weight matrices of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum LayerMatrix {
    Query,
    Key,
    Value,
    AttentionOutput,
    Gate,
    Up,
    Down,
}

impl LayerMatrix {
    /// All matrices of a layer, in the order of `hearth_runtime::LayerWeights`.
    pub const ALL: [LayerMatrix; 7] = {
        use LayerMatrix::{AttentionOutput, Down, Gate, Key, Query, Up, Value};
        [Query, Key, Value, AttentionOutput, Gate, Up, Down]
    };
}

/// The norms of a model, each of which has its own weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Norm {
    Attention,
    QueryHeads,
    KeyHeads,
    /// The norm of the output of attention (Gemma 2).
    PostAttention,
    FeedForward,
    /// The norm of the output of the feed-forward block (Gemma 2).
    PostFeedForward,
    /// The norm after the last layer.
    Output,
}

/// One operation of the forward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Operation {
    /// Looks up the rows of the input embedding.
    Embed,
    /// Multiplies the embeddings by a constant.
    Scale,
    Norm(Norm),
    /// Multiplies rows by a weight matrix.
    Matmul(LayerMatrix),
    Bias(LayerMatrix),
    /// Applies the rotary embedding and writes the rows in the layout that attention reads.
    Rope,
    /// Writes the values in the layout that attention reads.
    TransposeValues,
    /// Multiplies queries by keys.
    Scores,
    SoftCap,
    Softmax,
    /// Multiplies the attention probabilities by the values.
    WeightedValues,
    /// Applies the activation function of the gate.
    Activate,
    /// Multiplies by the gate, elementwise.
    Multiply,
    /// Adds the residual.
    Add,
    /// An operation of an image model, by name. It is only planned, never executed.
    Image(&'static str),
}

impl Operation {
    /// Whether the operation is element-wise in its first input.
    fn is_pointwise(self) -> bool {
        use Operation::{Activate, Add, Bias, Multiply, Scale, SoftCap};
        matches!(self, Scale | Bias(_) | SoftCap | Activate | Multiply | Add)
    }
}

/// An intermediate tensor of a graph.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GraphTensor {
    pub name: &'static str,
    /// Size in bytes, with the channels padded to a multiple of four.
    pub bytes: u64,
}

/// One kernel launch: operations that are computed together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    pub operations: Vec<Operation>,
    /// Indices of the tensors that the node reads; the first is what an element-wise operation transforms.
    pub inputs: Vec<usize>,
    pub outputs: Vec<usize>,
}

/// The nodes of a pass in the order in which they run, and their tensors.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Graph {
    pub tensors: Vec<GraphTensor>,
    pub nodes: Vec<Node>,
}

impl Graph {
    /// Adds a node with one operation and one output tensor of `bytes` bytes. Returns the index of that tensor.
    pub fn add_node(&mut self, op: Operation, inputs: &[usize], name: &'static str, bytes: u64) -> usize {
        let result = self.tensors.len();
        self.tensors.push(GraphTensor { name, bytes });
        self.nodes.push(Node { operations: vec![op], inputs: inputs.to_vec(), outputs: vec![result] });
        result
    }

    pub fn launch_count(&self) -> usize {
        self.nodes.len()
    }

    /// Returns the index of each tensor that a node writes, and the size and lifetime of these tensors.
    pub fn usage_records(&self) -> (Vec<usize>, Vec<TensorUsageRecord>) {
        let (mut tensors, mut records) = (Vec::new(), Vec::new());
        for (first, node) in self.nodes.iter().enumerate() {
            for &tensor in &node.outputs {
                let last = self.nodes.iter().rposition(|node| node.inputs.contains(&tensor));
                tensors.push(tensor);
                records.push(TensorUsageRecord {
                    size: self.tensors[tensor].bytes,
                    first_operation: first as u32,
                    last_operation: last.unwrap_or(first).max(first) as u32,
                });
            }
        }
        (tensors, records)
    }

    fn readers(&self, tensor: usize) -> usize {
        self.nodes.iter().filter(|node| node.inputs.contains(&tensor)).count()
    }
}
