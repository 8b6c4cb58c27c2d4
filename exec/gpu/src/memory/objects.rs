//! Assignment of intermediate tensors to GPU objects that several tensors share.
//!
//! Two strategies of Pisarchyk and Lee (2020), section 4:
//!
//! - Greedy by size: tensors are assigned by descending size, each to the smallest object that is free during its
//!   lifetime, or else to a new object.
//! - Greedy by size, improved: tensors are assigned in stages. Within a stage, the next tensor is the one that leaves
//!   a free object idle for the fewest operations.
//!
//! The stages are defined by the positional maxima. The i-th positional maximum is the maximum, over all operations,
//! of the i-th largest tensor that is live at the operation; every plan has i objects of at least this size. Stage i
//! has the tensors that are as large as the i-th maximum, or smaller than the i-th and larger than the next maximum.

use super::{TensorUsageRecord, by_descending_size};

/// An assignment of tensors to GPU objects. Tensors with disjoint lifetimes can share an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectsAssignment {
    /// For each tensor, the index of its object in [`Self::object_sizes`].
    pub object_ids: Vec<usize>,
    /// Size of each object in bytes.
    pub object_sizes: Vec<u64>,
}

impl ObjectsAssignment {
    /// Returns the total size of all objects in bytes.
    pub fn total_size(&self) -> u64 {
        self.object_sizes.iter().sum()
    }
}

/// An assignment of tensors to objects while it is built, tensor by tensor.
struct Assignment<'a> {
    records: &'a [TensorUsageRecord],
    plan: ObjectsAssignment,
    /// The indices of the tensors that are assigned to each object.
    members: Vec<Vec<usize>>,
}

impl<'a> Assignment<'a> {
    fn new(records: &'a [TensorUsageRecord]) -> Assignment<'a> {
        let plan = ObjectsAssignment { object_ids: vec![0; records.len()], object_sizes: Vec::new() };
        Assignment { records, plan, members: Vec::new() }
    }

    /// Assigns tensor `index` to an object, or to a new object if `object` is `None`.
    fn assign(&mut self, index: usize, object: Option<usize>) {
        let object = object.unwrap_or_else(|| {
            self.plan.object_sizes.push(0);
            self.members.push(Vec::new());
            self.members.len() - 1
        });
        let size = &mut self.plan.object_sizes[object];
        *size = self.records[index].size.max(*size);
        self.members[object].push(index);
        self.plan.object_ids[index] = object;
    }

    /// Returns the number of operations between the lifetime of tensor `index` and the nearest lifetime of a tensor in
    /// an object; `None` if the object is not free during the lifetime of the tensor.
    fn distance(&self, object: usize, index: usize) -> Option<u32> {
        let record = &self.records[index];
        let members = || self.members[object].iter().map(|&member| &self.records[member]);
        if members().any(|member| member.overlaps(record)) {
            return None;
        }
        members().map(|member| member.distance(record)).min()
    }

    /// Returns the smallest distance of tensor `index` to a free object, and the index of this object.
    fn nearest(&self, index: usize) -> Option<(u32, usize)> {
        let objects = 0..self.members.len();
        objects.filter_map(|object| Some((self.distance(object, index)?, object))).min()
    }
}

/// Assigns tensors to objects in descending order of size, each to the smallest free object or a new object.
pub fn greedy_by_size(records: &[TensorUsageRecord]) -> ObjectsAssignment {
    let mut assignment = Assignment::new(records);
    for index in by_descending_size(records) {
        let objects = 0..assignment.members.len();
        let free = objects.filter(|&object| assignment.distance(object, index).is_some());
        let smallest = free.min_by_key(|&object| assignment.plan.object_sizes[object]);
        assignment.assign(index, smallest);
    }
    assignment.plan
}

/// Assigns tensors to objects in stages of descending size, within a stage by the smallest distance to a free object.
pub fn greedy_by_size_improved(records: &[TensorUsageRecord]) -> ObjectsAssignment {
    let maxima = positional_maxima(records);
    let mut stages: Vec<(usize, usize)> =
        records.iter().enumerate().map(|(index, record)| (stage(&maxima, record.size), index)).collect();
    stages.sort_unstable();
    let mut assignment = Assignment::new(records);
    for same in stages.chunk_by(|one, other| one.0 == other.0) {
        let mut remaining: Vec<usize> = same.iter().map(|&(_, index)| index).collect();
        while let Some(at) = (0..remaining.len()).min_by_key(|&at| {
            let index = remaining[at];
            // Tensors that need a new object come last.
            let distance = assignment.nearest(index).map_or(u32::MAX, |(distance, _)| distance);
            (distance, std::cmp::Reverse(records[index].size), index)
        }) {
            let index = remaining.swap_remove(at);
            let nearest = assignment.nearest(index).map(|(_, object)| object);
            assignment.assign(index, nearest);
        }
    }
    assignment.plan
}

/// Returns the positional maxima of the tensor sizes in descending order, as defined in the module documentation.
fn positional_maxima(records: &[TensorUsageRecord]) -> Vec<u64> {
    let mut maxima: Vec<u64> = Vec::new();
    // The live tensors only grow at an operation that writes a tensor.
    for begin in records.iter().map(|record| record.first_operation) {
        let live = records.iter().filter(|record| record.is_live(begin));
        let mut sizes: Vec<u64> = live.map(|record| record.size).collect();
        sizes.sort_unstable_by(|one, other| other.cmp(one));
        maxima.resize(maxima.len().max(sizes.len()), 0);
        for (maximum, size) in maxima.iter_mut().zip(sizes) {
            *maximum = size.max(*maximum);
        }
    }
    maxima
}

/// Returns the stage of a tensor of `size` bytes: the index of the first positional maximum that equals `size`, or else
/// of the last positional maximum that is larger.
fn stage(maxima: &[u64], size: u64) -> usize {
    let at = maxima.partition_point(|&maximum| maximum > size);
    if maxima.get(at) == Some(&size) { at } else { at.saturating_sub(1) }
}
