//! Memory planning: intermediate tensors with disjoint lifetimes share memory.
//!
//! ML Drift paper, section 3.5; the strategies are those of Pisarchyk and Lee, "Efficient Memory Management for Deep
//! Neural Net Inference" (2020). A graph runs its operations one after another, so that a tensor needs memory from the
//! operation that writes it to the last that reads it, both included. Two tensors that need it at the same time
//! conflict; the others may lie in the same place: at offsets of one arena ([`offsets`]), or in objects that are as
//! large as the largest tensor in them ([`objects`]).
//!
//! Not here: which tensors a graph has. That is `crate::graph`.

pub mod objects;
pub mod offsets;

pub use objects::{Objects, improved, plain};
pub use offsets::{Arena, arena};

/// The size and lifetime of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record {
    pub size: u64,
    /// The operation that writes the tensor.
    pub first: u32,
    /// The last operation that reads it.
    pub last: u32,
}

impl Record {
    /// Whether the lifetimes overlap.
    pub fn conflicts(&self, other: &Record) -> bool {
        self.first.max(other.first) <= self.last.min(other.last)
    }

    /// Operations between two that do not conflict.
    fn distance(&self, other: &Record) -> u32 {
        self.first.max(other.first) - self.last.min(other.last)
    }
}

/// Bytes of all tensors, if each has memory of its own.
pub fn naive_bytes(records: &[Record]) -> u64 {
    records.iter().map(|record| record.size).sum()
}

/// The largest sum of what lives at the same time: no plan needs less.
pub fn largest_live_bytes(records: &[Record]) -> u64 {
    let live = |at: u32| {
        let live = records.iter().filter(|record| record.first <= at && at <= record.last);
        live.map(|record| record.size).sum()
    };
    records.iter().map(|record| live(record.first)).max().unwrap_or(0)
}

/// Indices of records, the largest first; of equal ones the earlier.
fn largest_first(records: &[Record]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..records.len()).collect();
    order.sort_by_key(|&index| std::cmp::Reverse(records[index].size));
    order
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;

    fn records(list: &[(u64, u32, u32)]) -> Vec<Record> {
        list.iter().map(|&(size, first, last)| Record { size, first, last }).collect()
    }

    fn short_chain() -> Vec<Record> {
        records(&[(16, 0, 1), (8, 1, 2), (64, 2, 3), (32, 3, 4), (8, 4, 5)])
    }

    fn long_chain() -> Vec<Record> {
        records(&[
            (32, 0, 1),
            (32, 1, 4),
            (8, 2, 5),
            (16, 3, 5),
            (8, 4, 5),
            (64, 5, 7),
            (8, 6, 8),
            (8, 7, 8),
            (16, 8, 9),
        ])
    }

    #[test]
    fn chains_that_can_be_planned_by_hand() {
        let (short, long) = (arena(&short_chain()), arena(&long_chain()));
        assert_eq!((short.offsets, short.total), (vec![0, 64, 0, 64, 0], 96));
        assert_eq!((long.offsets, long.total), (vec![0, 32, 80, 64, 88, 0, 64, 72, 0], 96));
        assert_eq!(plain(&short_chain()).sizes, [64, 32, 8]);
        let (short, long) = (improved(&short_chain()), improved(&long_chain()));
        assert_eq!((short.ids, short.sizes), (vec![0, 1, 0, 1, 0], vec![64, 32]));
        assert_eq!((long.ids, long.sizes), (vec![1, 0, 2, 1, 3, 0, 1, 2, 0], vec![64, 32, 8, 8]));
    }

    #[test]
    fn nothing_needs_nothing() {
        assert_eq!((arena(&[]).total, plain(&[]).total(), improved(&[]).total()), (0, 0, 0));
        assert_eq!((naive_bytes(&[]), largest_live_bytes(&[])), (0, 0));
    }

    /// Graphs of another planner, with its totals.
    fn fixture() -> Value {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/memory_records.json");
        serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
    }

    #[test]
    fn totals_are_those_of_another_planner() {
        let fixture = fixture();
        for (name, graph) in fixture.as_object().unwrap() {
            let number = |value: &Value| value.as_u64().unwrap();
            let of = |record: &Value| Record {
                size: number(&record["size"]),
                first: number(&record["first"]) as u32,
                last: number(&record["last"]) as u32,
            };
            let records: Vec<Record> = graph["records"].as_array().unwrap().iter().map(of).collect();
            assert_eq!(naive_bytes(&records), number(&graph["naive_bytes"]), "{name}");
            assert_eq!(largest_live_bytes(&records), number(&graph["max_live_bytes"]), "{name}");
            assert_eq!(arena(&records).total, number(&graph["offsets_total"]), "{name}");
            assert_eq!(plain(&records).total(), number(&graph["plain_objects_total"]), "{name}");
            let own = improved(&records).total();
            assert_eq!(own, number(&graph["improved_objects_total"]), "{name}");
            assert!(own <= number(&graph["plain_objects_total"]), "{name}");
        }
    }

    #[test]
    fn a_prompt_of_1024_tokens_takes_a_fiftieth() {
        let fixture = fixture();
        let mib = |value: &Value| value.as_u64().unwrap() as f64 / f64::from(1 << 20);
        let llama = &fixture["llama-8b-decoder-s1024"];
        assert_eq!(mib(&llama["offsets_total"]), 170.0);
        assert_eq!(mib(&llama["naive_bytes"]).round(), 8968.0);
        // ML Drift paper, Figure 3.
        for (part, published) in [("text-encoder", 2.0), ("unet", 65.0), ("vae-decoder", 320.0)] {
            let planned = mib(&fixture[&format!("sd14-{part}")]["offsets_total"]);
            assert!((planned - published).abs() < 0.05, "{part}: {planned}");
        }
    }

    proptest! {
        #[test]
        fn no_two_that_conflict_share_a_byte(
            list in prop::collection::vec((1u64..100, 0u32..30, 0u32..8), 0..40),
        ) {
            let list: Vec<_> = list.into_iter().map(|(size, first, more)| (size, first, first + more)).collect();
            let records = records(&list);
            let (arena, live) = (arena(&records), largest_live_bytes(&records));
            let (plain, improved) = (plain(&records), improved(&records));
            for (at, one) in records.iter().enumerate() {
                prop_assert!(arena.offsets[at] + one.size <= arena.total);
                for objects in [&plain, &improved] {
                    prop_assert!(one.size <= objects.sizes[objects.ids[at]]);
                }
                for (other_at, other) in records.iter().enumerate().take(at) {
                    if !one.conflicts(other) {
                        continue;
                    }
                    let (low, high) = (arena.offsets[at], arena.offsets[other_at]);
                    prop_assert!(low + one.size <= high || high + other.size <= low);
                    prop_assert!(plain.ids[at] != plain.ids[other_at]);
                    prop_assert!(improved.ids[at] != improved.ids[other_at]);
                }
            }
            for total in [arena.total, plain.total(), improved.total()] {
                prop_assert!(live <= total && total <= naive_bytes(&records));
            }
        }
    }
}
