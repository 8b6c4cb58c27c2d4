//! Fusion of the operations of a graph, so that a pass has fewer kernel launches.
//!
//! ML Drift paper, section 3.6 and Figure 4. There are three kinds of fusion:
//!
//! - An element-wise operation is merged into the node that produces its first input, if no other node reads this
//!   input. Element-wise operations are biases, the activation of the gate, the multiplication by the gate, soft caps
//!   and residual additions. Alternatively, a residual addition is merged with the following norm, and with the
//!   preceding norm if there is one.
//! - The norms of heads, the rotary embedding and the layout change of queries, keys and values become one
//!   kernel, which writes keys and values to the cache, so that they need no tensor.
//! - Attention becomes one kernel, which never writes the attention scores to memory.

use super::{Graph, Node, Norm, Operation};

/// The operation into which residual additions are fused: none, the preceding matmul, or the following norm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResidualFusion {
    Unfused,
    IntoMatmul,
    IntoNorm,
}

/// The kinds of fusion that are enabled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FusionOptions {
    /// Whether element-wise operations are fused, except residual additions.
    pub pointwise: bool,
    pub residual: ResidualFusion,
    /// Whether the norms of heads, the rotary embedding and the layout change of queries, keys and values are fused.
    pub rope_and_layout: bool,
    /// Whether the scores, the soft cap, the softmax and the weighted sum of the values are fused.
    pub attention: bool,
}

impl FusionOptions {
    /// No fusion: one operation per launch.
    pub const NONE: FusionOptions = FusionOptions {
        pointwise: false,
        residual: ResidualFusion::Unfused,
        rope_and_layout: false,
        attention: false,
    };
    /// All kinds of fusion, with residual additions fused into norms: the fusion that the executor uses.
    pub const ALL: FusionOptions = FusionOptions {
        pointwise: true,
        residual: ResidualFusion::IntoNorm,
        rope_and_layout: true,
        attention: true,
    };
}

/// Returns a graph with the same operations as `graph` in fewer launches. `fusion` enables the kinds of fusion.
pub fn fuse(mut graph: Graph, fusion: FusionOptions) -> Graph {
    if fusion.pointwise {
        fuse_into_producers(&mut graph, |operation| operation.is_pointwise() && operation != Operation::Add);
    }
    match fusion.residual {
        ResidualFusion::Unfused => {}
        ResidualFusion::IntoMatmul => {
            fuse_into_producers(&mut graph, |operation| operation == Operation::Add);
        }
        ResidualFusion::IntoNorm => merge_neighbours(&mut graph, is_residual_before_norm),
    }
    if fusion.rope_and_layout {
        merge_neighbours(&mut graph, |one, next| one.is_only(is_layout) && next.is_only(is_layout));
        // Keys and values are written to the cache.
        for tensor in graph.tensors.iter_mut().filter(|tensor| matches!(tensor.name, "k.rope" | "v.t")) {
            tensor.bytes = 0;
        }
    }
    if fusion.attention {
        merge_neighbours(&mut graph, |one, next| one.is_only(is_attention) && next.is_only(is_attention));
    }
    graph
}

impl Node {
    fn is_only(&self, matches: fn(Operation) -> bool) -> bool {
        self.operations.iter().all(|&operation| matches(operation))
    }
}

fn is_layout(operation: Operation) -> bool {
    match operation {
        Operation::Norm(norm) => matches!(norm, Norm::QueryHeads | Norm::KeyHeads),
        Operation::Rope | Operation::TransposeValues => true,
        _ => false,
    }
}

fn is_attention(operation: Operation) -> bool {
    use Operation::{Scores, SoftCap, Softmax, WeightedValues};
    matches!(operation, Scores | SoftCap | Softmax | WeightedValues)
}

/// Merges each node with a single operation that `matches` accepts into the node that produces the first input of the
/// node. The merged node has the position of the later node.
fn fuse_into_producers(graph: &mut Graph, matches: impl Fn(Operation) -> bool) {
    let mut at = 0;
    while at < graph.nodes.len() {
        let node = &graph.nodes[at];
        let producer = match node.operations[..] {
            [operation] if matches(operation) => producer_of(graph, at, |producer| {
                // The kernels of norms and softmax cannot apply another operation before they write.
                matches!(producer, Operation::Matmul(_) | Operation::Embed | Operation::Scores)
                    || producer.is_pointwise()
            }),
            _ => None,
        };
        match producer {
            Some(producer) => {
                merge(graph, producer, at);
                at = producer;
            }
            None => at += 1,
        }
    }
}

/// Returns the index of the node that produces the first input of node `at`. Returns `None` if other nodes read this
/// input too, or if `fits` does not accept the last operation of the producer.
fn producer_of(graph: &Graph, at: usize, fits: impl Fn(Operation) -> bool) -> Option<usize> {
    let &input = graph.nodes[at].inputs.first()?;
    let producer = graph.nodes[..at].iter().position(|node| node.outputs == [input])?;
    let last = *graph.nodes[producer].operations.last()?;
    (fits(last) && graph.reader_count(input) == 1).then_some(producer)
}

/// Merges node `early` into node `late`, which reads the outputs of node `early`. Outputs of node `early` that later
/// nodes read remain outputs of the merged node.
fn merge(graph: &mut Graph, early: usize, late: usize) {
    let removed = graph.nodes.remove(early);
    let later: Vec<usize> = graph.nodes[late..].iter().flat_map(|node| node.inputs.clone()).collect();
    let node = &mut graph.nodes[late - 1];
    let own = removed.outputs;
    node.operations.splice(0..0, removed.operations);
    let rest = node.inputs.iter().copied().filter(|id| !own.contains(id) && !removed.inputs.contains(id));
    let inputs: Vec<usize> = removed.inputs.iter().copied().chain(rest).collect();
    let kept = own.into_iter().filter(|tensor| later.contains(tensor));
    node.outputs = kept.chain(node.outputs.iter().copied()).collect();
    node.inputs = inputs;
}

/// Whether node `one` is fused into node `next`: a residual addition into the norm that reads the sum, or the norm of
/// the output of a block into the residual addition that reads the normalised output.
fn is_residual_before_norm(one: &Node, next: &Node) -> bool {
    let fits = match (one.operations.last(), next.operations.first()) {
        (Some(Operation::Norm(norm)), Some(Operation::Add)) => {
            matches!(norm, Norm::PostAttention | Norm::PostFeedForward)
        }
        (Some(Operation::Add), Some(Operation::Norm(_))) => one.operations.len() <= 2,
        _ => false,
    };
    fits && one.outputs.iter().any(|tensor| next.inputs.contains(tensor))
}

/// Merges each node into the next node if `fits` accepts the pair of nodes.
fn merge_neighbours(graph: &mut Graph, fits: impl Fn(&Node, &Node) -> bool) {
    let mut at = 0;
    while at + 1 < graph.nodes.len() {
        if fits(&graph.nodes[at], &graph.nodes[at + 1]) {
            merge(graph, at, at + 1);
        } else {
            at += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use hearth_profiles::model::{Architecture, ModelShape, shipped_document};

    use super::super::{PassSize, decoder_graph};
    use super::*;
    use crate::memory::tests::{reference_plans, usage_record};
    use crate::memory::{assign_offsets, naive_bytes};

    fn shape(architecture: Architecture) -> ModelShape {
        ModelShape { architecture, ..shipped_document("llama-8b").unwrap().to_shape() }
    }

    fn size(tokens: u64) -> PassSize {
        PassSize { layers: 32, tokens, context_length: 1280, element_bytes: 2 }
    }

    /// The kinds of fusion in the graphs of [`reference_plans`]: only element-wise operations are fused.
    const PUBLISHED: FusionOptions =
        FusionOptions { pointwise: true, residual: ResidualFusion::IntoMatmul, ..FusionOptions::NONE };

    #[test]
    fn llama_decoder_has_the_usage_records_of_the_reference_planner() {
        let plans = reference_plans();
        for tokens in [1, 128, 1024] {
            let graph = fuse(decoder_graph(&shape(Architecture::Llama), size(tokens)), PUBLISHED);
            let expected = plans[&format!("llama-8b-decoder-s{tokens}")]["records"].as_array().unwrap();
            let (tensors, records) = graph.usage_records();
            assert_eq!(records.len(), expected.len());
            for ((tensor, record), expected) in tensors.into_iter().zip(records).zip(expected) {
                let name = expected["name"].as_str().unwrap();
                assert_eq!((graph.tensors[tensor].name, record), (name, usage_record(expected)));
            }
        }
    }

    #[test]
    fn every_architecture_needs_fewer_launches_when_fused() {
        // A layer of Llama has 19 operations: 2 norms, 7 matmuls, 2 rotations, a transposition, 3 operations of
        // attention, 2 of the gate, and 2 additions. Fused, it has 11 launches: 2 norms with the additions before
        // them, 7 matmuls, the layout kernel and attention. Qwen 2 also has 3 biases, Qwen 3 two norms of heads,
        // Gemma 2 two norms after blocks and a soft cap, and Gemma 3 all these norms.
        // OLMo 2 has the norms after blocks instead of before, so that its last addition, not its first norm, has a
        // launch of its own, and two norms of whole rows, which stay launches.
        for (architecture, ends, plain, fused_launches) in [
            (Architecture::Llama, 2, 19, 2 + 32 * 11),
            (Architecture::InternLm2, 2, 19, 2 + 32 * 11),
            (Architecture::Qwen2, 2, 22, 2 + 32 * 11),
            (Architecture::Qwen3, 2, 21, 2 + 32 * 11),
            (Architecture::Gemma, 3, 19, 2 + 32 * 11),
            (Architecture::Gemma2, 3, 22, 2 + 32 * 11),
            (Architecture::Gemma3, 3, 23, 2 + 32 * 11),
            (Architecture::SmolLm3, 2, 19, 2 + 32 * 11),
            (Architecture::Phi3, 2, 19, 2 + 32 * 11),
            (Architecture::Granite, 3, 19, 2 + 32 * 11),
            (Architecture::Olmo2, 2, 21, 1 + 32 * 13),
        ] {
            let graph = decoder_graph(&shape(architecture), size(1));
            assert_eq!(fuse(graph.clone(), FusionOptions::NONE), graph);
            assert_eq!(graph.launch_count(), ends + 32 * plain, "{architecture}");
            let fused = fuse(graph.clone(), FusionOptions::ALL);
            assert_eq!(fused.launch_count(), fused_launches, "{architecture}");
            let count = |graph: &Graph| graph.nodes.iter().map(|node| node.operations.len()).sum::<usize>();
            assert_eq!(count(&graph), count(&fused), "{architecture}: no operation is lost");
        }
    }

    #[test]
    fn fused_graphs_read_only_written_tensors_and_need_less_memory() {
        for architecture in Architecture::all_with_gpu_kernels() {
            let graph = decoder_graph(&shape(architecture), size(1024));
            let fused = fuse(graph.clone(), FusionOptions::ALL);
            let mut written = std::collections::BTreeSet::new();
            for node in &fused.nodes {
                assert!(node.inputs.iter().all(|read| written.contains(read)), "{architecture}: {node:?}");
                for &tensor in &node.outputs {
                    assert!(written.insert(tensor), "{architecture}: {node:?}");
                }
            }
            let totals = [&graph, &fused].map(|graph| {
                let (_, records) = graph.usage_records();
                (naive_bytes(&records), assign_offsets(&records).total_size)
            });
            let launches = [&graph, &fused].map(Graph::launch_count);
            println!("{architecture}: {launches:?} launches, {totals:?} bytes");
            let [(plain_sum, plain), (fused_sum, fused)] = totals;
            assert!(fused < plain && fused_sum < plain_sum, "{architecture}");
            assert!(plain * 20 < plain_sum, "{architecture}: planning must save more than 95 %");
        }
    }
}
