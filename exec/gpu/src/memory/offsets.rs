//! Assignment of intermediate tensors to offsets in one arena.
//!
//! Greedy by size: tensors are placed in descending order of size. A tensor is placed in the smallest sufficient gap
//! between the tensors that are already placed and whose lifetimes overlap with its lifetime. If no gap is sufficient,
//! the tensor is placed after the last of these tensors.

use super::{TensorUsageRecord, by_descending_size};

/// The offsets of all tensors in an arena, which is one block of memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OffsetsAssignment {
    /// Offset of each tensor in the arena, in bytes.
    pub offsets: Vec<u64>,
    /// Size of the arena in bytes.
    pub total_size: u64,
}

/// Assigns an offset in one arena to each tensor with the strategy "greedy by size" of the module documentation.
pub fn assign_offsets(records: &[TensorUsageRecord]) -> OffsetsAssignment {
    let mut offsets = vec![0; records.len()];
    let mut placed: Vec<usize> = Vec::new();
    let mut total = 0;
    for index in by_descending_size(records) {
        let record = &records[index];
        let mut taken: Vec<(u64, u64)> = placed
            .iter()
            .filter(|&&other| records[other].overlaps(record))
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
    OffsetsAssignment { offsets, total_size: total }
}
