//! Graphs of passes: the operations of a pass in order, and the tensors that the operations read and write.
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

use hearth_profiles::model::architecture::QueryKeyNorm;

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

/// One of the norms of a model. Each norm has separate weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Norm {
    Attention,
    QueryHeads,
    KeyHeads,
    /// The norm of all query heads of a token together (OLMo 2).
    QueryRow,
    KeyRow,
    /// The norm of the output of attention (Gemma 2).
    PostAttention,
    FeedForward,
    /// The norm of the output of the feed-forward block (Gemma 2).
    PostFeedForward,
    /// The norm between the last layer and the output matrix.
    Output,
}

impl Norm {
    /// Returns the norm of the queries and that of the keys.
    pub(crate) fn of_queries_and_keys(norm: QueryKeyNorm) -> [Norm; 2] {
        match norm {
            QueryKeyNorm::Heads => [Norm::QueryHeads, Norm::KeyHeads],
            QueryKeyNorm::Rows => [Norm::QueryRow, Norm::KeyRow],
        }
    }
}

/// One operation of the forward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Operation {
    /// Looks up the rows of the tokens in the input embedding.
    Embed,
    /// Multiplies the embeddings of the tokens by a constant.
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
    /// Multiplies the result of the up projection by the gate, element by element.
    Multiply,
    /// Adds the output of a block to the hidden states: the residual addition.
    Add,
    /// An operation of an image model, which has only a name. Image models are planned but never executed.
    Image(&'static str),
}

impl Operation {
    /// Whether the operation transforms its first input element by element.
    fn is_pointwise(self) -> bool {
        use Operation::{Activate, Add, Bias, Multiply, Scale, SoftCap};
        matches!(self, Scale | Bias(_) | SoftCap | Activate | Multiply | Add)
    }
}

/// An intermediate tensor of a graph.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GraphTensor {
    pub name: &'static str,
    /// Size of the tensor in bytes, with the channels padded to a multiple of four.
    pub bytes: u64,
}

/// A node of a graph: the operations of one kernel launch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    pub operations: Vec<Operation>,
    /// Indices of the tensors that the node reads. An element-wise operation transforms the first of these tensors.
    pub inputs: Vec<usize>,
    pub outputs: Vec<usize>,
}

/// The graph of a pass: the nodes in the order in which they run, and the tensors that they read and write.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Graph {
    pub tensors: Vec<GraphTensor>,
    pub nodes: Vec<Node>,
}

impl Graph {
    /// Adds a node with one operation and one output tensor `name` of `bytes` bytes. Returns the index of this tensor.
    pub fn add_node(&mut self, op: Operation, inputs: &[usize], name: &'static str, bytes: u64) -> usize {
        let result = self.tensors.len();
        self.tensors.push(GraphTensor { name, bytes });
        self.nodes.push(Node { operations: vec![op], inputs: inputs.to_vec(), outputs: vec![result] });
        result
    }

    pub fn launch_count(&self) -> usize {
        self.nodes.len()
    }

    /// Returns the index of each tensor that a node writes, and the usage record of each of these tensors.
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

    fn reader_count(&self, tensor: usize) -> usize {
        self.nodes.iter().filter(|node| node.inputs.contains(&tensor)).count()
    }
}
