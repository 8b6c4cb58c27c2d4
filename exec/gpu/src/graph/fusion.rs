//! Fusion of operations into fewer launches.
//!
//! ML Drift paper, section 3.6 and Figure 4. An operation on single elements folds into the one that makes its first
//! input, if nobody else reads that: biases, the gate's function and its product, caps, residual additions.
//! Alternatively a residual addition and the norm that follows it are one kernel, with the norm before it where there
//! is one. The norms of heads, the rotary embedding and the new order of queries, keys and values are one kernel, which
//! writes keys and values to the cache, so that they need no tensor; and attention can be one kernel that never writes
//! its scores.

use super::{Graph, Node, Norm, Operation};

/// The node that residual additions are fused into.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Residual {
    Alone,
    IntoProduct,
    IntoNorm,
}

/// The kinds of fusion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fusion {
    /// Whether element-wise operations are fused, except residual additions.
    pub pointwise: bool,
    pub residual: Residual,
    /// Whether norms of heads, rotary embedding and layout of queries, keys and values are fused.
    pub rotary_layout: bool,
    pub attention: bool,
}

impl Fusion {
    /// One operation a launch.
    pub const NONE: Fusion =
        Fusion { pointwise: false, residual: Residual::Alone, rotary_layout: false, attention: false };
    /// The fusion that is executed.
    pub const ALL: Fusion =
        Fusion { pointwise: true, residual: Residual::IntoNorm, rotary_layout: true, attention: true };
}

/// Returns the same graph in fewer launches.
pub fn fuse(mut graph: Graph, fusion: Fusion) -> Graph {
    if fusion.pointwise {
        fold(&mut graph, |operation| operation.is_pointwise() && operation != Operation::Add);
    }
    match fusion.residual {
        Residual::Alone => {}
        Residual::IntoProduct => fold(&mut graph, |operation| operation == Operation::Add),
        Residual::IntoNorm => into_norms(&mut graph),
    }
    if fusion.rotary_layout {
        gather(&mut graph, is_layout);
        // Keys and values are written to the cache.
        for tensor in graph.tensors.iter_mut().filter(|tensor| matches!(tensor.name, "k.rope" | "v.t")) {
            tensor.bytes = 0;
        }
    }
    if fusion.attention {
        let is_attention = |operation: Operation| {
            matches!(operation, Operation::Scores | Operation::Cap | Operation::SoftMax | Operation::Mix)
        };
        gather(&mut graph, is_attention);
    }
    graph
}

fn is_layout(operation: Operation) -> bool {
    match operation {
        Operation::Norm(norm) => matches!(norm, Norm::QueryHeads | Norm::KeyHeads),
        Operation::Rotate(_) | Operation::TransposeValues => true,
        _ => false,
    }
}

/// Folds each node of one such operation into the node that makes its first input, at its own place.
fn fold(graph: &mut Graph, folds: impl Fn(Operation) -> bool) {
    let mut at = 0;
    while at < graph.nodes.len() {
        let node = &graph.nodes[at];
        let maker = match node.operations[..] {
            [operation] if folds(operation) => producer_of(graph, at, |maker| {
                // A norm or a softmax has its own way of writing.
                matches!(maker, Operation::Product(_) | Operation::Embed | Operation::Scores)
                    || maker.is_pointwise()
            }),
            _ => None,
        };
        match maker {
            Some(maker) => {
                merge(graph, maker, at);
                at = maker;
            }
            None => at += 1,
        }
    }
}

/// Returns the node that produces the first input of the node at `at`, if `at` is the only reader of it.
fn producer_of(graph: &Graph, at: usize, fits: impl Fn(Operation) -> bool) -> Option<usize> {
    let &input = graph.nodes[at].reads.first()?;
    let maker = graph.nodes[..at].iter().position(|node| node.writes == [input])?;
    let last = *graph.nodes[maker].operations.last()?;
    (fits(last) && graph.readers(input) == 1).then_some(maker)
}

/// Puts the node at `early` into the one at `late`, which reads its results; those that others read stay results.
fn merge(graph: &mut Graph, early: usize, late: usize) {
    let removed = graph.nodes.remove(early);
    let later: Vec<usize> = graph.nodes[late..].iter().flat_map(|node| node.reads.clone()).collect();
    let node = &mut graph.nodes[late - 1];
    let own = removed.writes;
    node.operations.splice(0..0, removed.operations);
    let rest = node.reads.iter().copied().filter(|read| !own.contains(read) && !removed.reads.contains(read));
    let reads: Vec<usize> = removed.reads.iter().copied().chain(rest).collect();
    let kept = own.into_iter().filter(|tensor| later.contains(tensor));
    node.writes = kept.chain(node.writes.iter().copied()).collect();
    node.reads = reads;
}

/// Residual additions, with the norm before them, go into the norm that follows at once.
fn into_norms(graph: &mut Graph) {
    let mut at = 0;
    while at + 1 < graph.nodes.len() {
        let [one, next] = &graph.nodes[at..at + 2] else { break };
        let feeds = one.writes.iter().any(|tensor| next.reads.contains(tensor));
        let fits = match (one.operations.last(), next.operations.first()) {
            (Some(Operation::Norm(Norm::PostAttention | Norm::PostFeedForward)), Some(Operation::Add)) => {
                true
            }
            (Some(Operation::Add), Some(Operation::Norm(_))) => one.operations.len() <= 2,
            _ => false,
        };
        if feeds && fits {
            merge(graph, at, at + 1);
        } else {
            at += 1;
        }
    }
}

/// Merges neighbouring nodes whose operations all belong together.
fn gather(graph: &mut Graph, belongs: impl Fn(Operation) -> bool) {
    let all = |node: &Node| node.operations.iter().all(|&operation| belongs(operation));
    let mut at = 0;
    while at + 1 < graph.nodes.len() {
        if all(&graph.nodes[at]) && all(&graph.nodes[at + 1]) {
            merge(graph, at, at + 1);
        } else {
            at += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use hearth_profiles::model::{Architecture, ModelShape, shipped_document};
    use serde_json::Value;

    use super::super::{Numbers, decoder};
    use super::*;
    use crate::memory::{Record, arena, naive_bytes};

    fn shape(architecture: Architecture) -> ModelShape {
        ModelShape { architecture, ..shipped_document("llama-8b").unwrap().shape() }
    }

    fn numbers(tokens: u64) -> Numbers {
        Numbers { layers: 32, tokens, context: 1280, element_bytes: 2 }
    }

    /// The fusions of the compared planner's graphs: only element-wise operations are folded.
    const PUBLISHED: Fusion =
        Fusion { pointwise: true, residual: Residual::IntoProduct, rotary_layout: false, attention: false };

    #[test]
    fn the_decoder_of_llama_has_the_records_of_another_builder() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/memory_records.json");
        let fixture: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        for tokens in [1, 128, 1024] {
            let graph = fuse(decoder(&shape(Architecture::Llama), numbers(tokens)), PUBLISHED);
            let other =
                fixture[&format!("llama-8b-decoder-s{tokens}")]["records"].as_array().unwrap().clone();
            let own = graph.records();
            assert_eq!(own.len(), other.len());
            for ((tensor, record), other) in own.iter().zip(&other) {
                let number = |key: &str| other[key].as_u64().unwrap();
                let wanted = Record {
                    size: number("size"),
                    first: number("first") as u32,
                    last: number("last") as u32,
                };
                assert_eq!((graph.tensors[*tensor].name, *record), (other["name"].as_str().unwrap(), wanted));
            }
        }
    }

    #[test]
    fn every_architecture_needs_fewer_launches_when_fused() {
        // A layer of Llama: 2 norms, 7 products, 2 rotations, a transposition, 3 of attention, 2 of the gate, 2
        // additions are 19. Fused: 2 norms with the additions before, 7 products, layout, attention are 11.
        // Qwen 2 has 3 biases more, Qwen 3 two norms of heads, Gemma 2 two norms after blocks and a cap.
        for (architecture, ends, plain) in [
            (Architecture::Llama, 2, 19),
            (Architecture::InternLm2, 2, 19),
            (Architecture::Qwen2, 2, 22),
            (Architecture::Qwen3, 2, 21),
            (Architecture::Gemma, 3, 19),
            (Architecture::Gemma2, 3, 22),
        ] {
            let graph = decoder(&shape(architecture), numbers(1));
            assert_eq!(fuse(graph.clone(), Fusion::NONE), graph);
            assert_eq!(graph.launches(), ends + 32 * plain, "{architecture}");
            let fused = fuse(graph.clone(), Fusion::ALL);
            assert_eq!(fused.launches(), 2 + 32 * 11, "{architecture}");
            let count = |graph: &Graph| graph.nodes.iter().map(|node| node.operations.len()).sum::<usize>();
            assert_eq!(count(&graph), count(&fused), "{architecture}: no operation is lost");
        }
    }

    #[test]
    fn fused_graphs_read_only_what_was_written_and_need_less_memory() {
        for &architecture in Architecture::ALL {
            let graph = decoder(&shape(architecture), numbers(1024));
            let fused = fuse(graph.clone(), Fusion::ALL);
            let mut written = std::collections::BTreeSet::new();
            for node in &fused.nodes {
                assert!(node.reads.iter().all(|read| written.contains(read)), "{architecture}: {node:?}");
                for &tensor in &node.writes {
                    assert!(written.insert(tensor), "{architecture}: {node:?}");
                }
            }
            let totals = [&graph, &fused].map(|graph| {
                let records: Vec<Record> = graph.records().into_iter().map(|(_, record)| record).collect();
                (naive_bytes(&records), arena(&records).total)
            });
            println!(
                "{architecture}: {} and {} launches, {totals:?} bytes",
                graph.launches(),
                fused.launches()
            );
            let [(plain_sum, plain), (fused_sum, fused)] = totals;
            assert!(fused < plain && fused_sum < plain_sum, "{architecture}");
            assert!(plain * 20 < plain_sum, "{architecture}: a plan saves more than 95 %");
        }
    }
}
