//! Memory planning for intermediate tensors: tensors with disjoint lifetimes share memory.
//!
//! ML Drift paper, section 3.5; the strategies are those of Pisarchyk and Lee, "Efficient Memory Management for Deep
//! Neural Net Inference" (2020). The operations of a graph run one after another, so a tensor needs memory from the
//! operation that writes it to the last operation that reads it, both included. Tensors whose lifetimes overlap need
//! different memory; other tensors can share it. Either tensors get offsets in one arena ([`offsets`]), or they share
//! objects, each as large as its largest tensor ([`objects`]).
//!
//! Not here: the graphs whose tensors are planned (`crate::graph`).

pub mod objects;
pub mod offsets;

pub use objects::{ObjectsAssignment, greedy_by_size, greedy_by_size_improved};
pub use offsets::{OffsetsAssignment, assign_offsets};

/// The size and the lifetime of an intermediate tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorUsageRecord {
    /// Size of the tensor in bytes.
    pub size: u64,
    /// Index of the operation that writes the tensor.
    pub first_operation: u32,
    /// Index of the last operation that reads the tensor.
    pub last_operation: u32,
}

impl TensorUsageRecord {
    /// Whether the lifetimes of two tensors overlap. Such tensors cannot share memory.
    pub fn overlaps(&self, other: &TensorUsageRecord) -> bool {
        self.first_operation.max(other.first_operation) <= self.last_operation.min(other.last_operation)
    }

    fn is_live(&self, operation: u32) -> bool {
        self.first_operation <= operation && operation <= self.last_operation
    }

    /// Returns the distance, in operations, between the lifetimes of two tensors. The lifetimes must not overlap.
    fn distance(&self, other: &TensorUsageRecord) -> u32 {
        self.first_operation.max(other.first_operation) - self.last_operation.min(other.last_operation)
    }
}

/// Returns the total size in bytes of all tensors, if no tensors share memory.
pub fn naive_bytes(records: &[TensorUsageRecord]) -> u64 {
    records.iter().map(|record| record.size).sum()
}

/// Returns the maximum total size in bytes of tensors that are live at the same time, a lower bound of every plan.
pub fn max_live_bytes(records: &[TensorUsageRecord]) -> u64 {
    let live = |at: u32| records.iter().filter(|record| record.is_live(at)).map(|record| record.size).sum();
    records.iter().map(|record| live(record.first_operation)).max().unwrap_or(0)
}

/// Returns the indices of the records in descending order of size. Records of equal size keep their order.
fn by_descending_size(records: &[TensorUsageRecord]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..records.len()).collect();
    order.sort_by_key(|&index| std::cmp::Reverse(records[index].size));
    order
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;

    fn record(&(size, first_operation, last_operation): &(u64, u32, u32)) -> TensorUsageRecord {
        TensorUsageRecord { size, first_operation, last_operation }
    }

    fn records(list: &[(u64, u32, u32)]) -> Vec<TensorUsageRecord> {
        list.iter().map(record).collect()
    }

    #[test]
    fn plans_of_short_chains() {
        let short = records(&[(16, 0, 1), (8, 1, 2), (64, 2, 3), (32, 3, 4), (8, 4, 5)]);
        let starts = [(32, 0, 1), (32, 1, 4), (8, 2, 5), (16, 3, 5), (8, 4, 5)];
        let ends = [(64, 5, 7), (8, 6, 8), (8, 7, 8), (16, 8, 9)];
        let long = records(&[&starts[..], &ends].concat());
        assert_eq!(greedy_by_size(&short).object_sizes, [64, 32, 8]);
        let (offsets, total_size) = (vec![0, 64, 0, 64, 0], 96);
        assert_eq!(assign_offsets(&short), OffsetsAssignment { offsets, total_size });
        let (offsets, total_size) = (vec![0, 32, 80, 64, 88, 0, 64, 72, 0], 96);
        assert_eq!(assign_offsets(&long), OffsetsAssignment { offsets, total_size });
        let (object_ids, object_sizes) = (vec![0, 1, 0, 1, 0], vec![64, 32]);
        assert_eq!(greedy_by_size_improved(&short), ObjectsAssignment { object_ids, object_sizes });
        let (object_ids, object_sizes) = (vec![1, 0, 2, 1, 3, 0, 1, 2, 0], vec![64, 32, 8, 8]);
        assert_eq!(greedy_by_size_improved(&long), ObjectsAssignment { object_ids, object_sizes });
    }

    #[test]
    fn empty_graph_needs_no_memory() {
        let objects = [greedy_by_size(&[]), greedy_by_size_improved(&[])].map(|objects| objects.total_size());
        assert_eq!((assign_offsets(&[]).total_size, objects), (0, [0, 0]));
        assert_eq!((naive_bytes(&[]), max_live_bytes(&[])), (0, 0));
    }

    /// Returns, as JSON, usage records of several graphs and the memory totals that a reference planner computed.
    pub(crate) fn reference_plans() -> Value {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/memory_records.json");
        serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
    }

    pub(crate) fn usage_record(json: &Value) -> TensorUsageRecord {
        let number = |key: &str| json[key].as_u64().unwrap();
        record(&(number("size"), number("first") as u32, number("last") as u32))
    }

    #[test]
    fn totals_equal_those_of_the_reference_planner() {
        for (name, graph) in reference_plans().as_object().unwrap() {
            let records: Vec<_> = graph["records"].as_array().unwrap().iter().map(usage_record).collect();
            let [plain, improved] =
                [greedy_by_size(&records), greedy_by_size_improved(&records)].map(|plan| plan.total_size());
            for (key, total) in [
                ("naive_bytes", naive_bytes(&records)),
                ("max_live_bytes", max_live_bytes(&records)),
                ("offsets_total", assign_offsets(&records).total_size),
                ("plain_objects_total", plain),
                ("improved_objects_total", improved),
            ] {
                assert_eq!(total, graph[key].as_u64().unwrap(), "{name}: {key}");
            }
            assert!(improved <= plain, "{name}");
        }
    }

    #[test]
    fn planned_memory_of_1024_tokens_is_a_fiftieth_of_the_sum() {
        let llama = &reference_plans()["llama-8b-decoder-s1024"];
        let mib = |key: &str| llama[key].as_u64().unwrap() as f64 / f64::from(1 << 20);
        assert_eq!((mib("offsets_total"), mib("naive_bytes").round()), (170.0, 8968.0));
    }

    proptest! {
        #[test]
        fn tensors_with_overlapping_lifetimes_share_no_byte(
            list in prop::collection::vec((1u64..100, 0u32..30, 0u32..8), 0..40),
        ) {
            let list: Vec<_> = list.into_iter().map(|(size, first, more)| (size, first, first + more)).collect();
            let records = records(&list);
            let (arena, live) = (assign_offsets(&records), max_live_bytes(&records));
            let (plain, improved) = (greedy_by_size(&records), greedy_by_size_improved(&records));
            for (at, one) in records.iter().enumerate() {
                prop_assert!(arena.offsets[at] + one.size <= arena.total_size);
                for objects in [&plain, &improved] {
                    prop_assert!(one.size <= objects.object_sizes[objects.object_ids[at]]);
                }
                for (other_at, other) in records.iter().enumerate().take(at) {
                    if !one.overlaps(other) {
                        continue;
                    }
                    let (low, high) = (arena.offsets[at], arena.offsets[other_at]);
                    prop_assert!(low + one.size <= high || high + other.size <= low);
                    prop_assert!(plain.object_ids[at] != plain.object_ids[other_at]);
                    prop_assert!(improved.object_ids[at] != improved.object_ids[other_at]);
                }
            }
            for total in [arena.total_size, plain.total_size(), improved.total_size()] {
                prop_assert!(live <= total && total <= naive_bytes(&records));
            }
        }
    }
}
