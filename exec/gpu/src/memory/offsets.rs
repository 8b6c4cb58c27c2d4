//! Assignment of tensors to offsets in one arena.
//!
//! Greedy by size: the largest tensor first; each goes into the smallest gap that it fits into, among the tensors that
//! conflict with it and have their place already, else behind the last of them.

use super::{Record, largest_first};

/// The offsets of all tensors in one block of memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Arena {
    /// The offset of each record, in bytes.
    pub offsets: Vec<u64>,
    pub total: u64,
}

pub fn arena(records: &[Record]) -> Arena {
    let mut offsets = vec![0; records.len()];
    let mut placed: Vec<usize> = Vec::new();
    let mut total = 0;
    for index in largest_first(records) {
        let record = &records[index];
        let mut taken: Vec<(u64, u64)> = placed
            .iter()
            .filter(|&&other| records[other].conflicts(record))
            .map(|&other| (offsets[other], offsets[other] + records[other].size))
            .collect();
        taken.sort_unstable();
        let (mut end, mut best) = (0u64, None::<(u64, u64)>);
        for (from, to) in taken {
            let gap = from.saturating_sub(end);
            if from > end && gap >= record.size && best.is_none_or(|(smallest, _)| gap < smallest) {
                best = Some((gap, end));
            }
            end = end.max(to);
        }
        offsets[index] = best.map_or(end, |(_, offset)| offset);
        total = total.max(offsets[index] + record.size);
        placed.push(index);
    }
    Arena { offsets, total }
}
