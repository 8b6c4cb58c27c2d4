//! Assignment of tensors to shared objects.
//!
//! Two strategies of Pisarchyk and Lee (2020), section 4. Plain greedy by size: the largest tensor first, each into the
//! smallest object that is free whenever it needs one, else into a new one. Improved: tensors are taken in stages, and
//! within a stage the one goes next that leaves an object unused for the shortest time.
//!
//! The stages come from positional maxima: the i-th is the largest among the i-th largest tensors that live at an
//! operation, so that whatever is done there is an object at least as large. First come the tensors as large as the
//! first maximum with those between it and the second, then those as large as the second with those below it, and so
//! on.

use super::{Record, largest_first};

/// An assignment of records to objects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Objects {
    /// The object of each record.
    pub ids: Vec<usize>,
    /// Bytes of each object.
    pub sizes: Vec<u64>,
}

impl Objects {
    pub fn total(&self) -> u64 {
        self.sizes.iter().sum()
    }
}

/// A partial assignment.
struct Assignment<'a> {
    records: &'a [Record],
    ids: Vec<usize>,
    sizes: Vec<u64>,
    members: Vec<Vec<usize>>,
}

impl<'a> Assignment<'a> {
    fn new(records: &'a [Record]) -> Assignment<'a> {
        Assignment { records, ids: vec![0; records.len()], sizes: Vec::new(), members: Vec::new() }
    }

    /// Puts a record into an object, or a new one.
    fn put(&mut self, index: usize, object: Option<usize>) {
        let object = object.unwrap_or_else(|| {
            self.sizes.push(0);
            self.members.push(Vec::new());
            self.sizes.len() - 1
        });
        self.sizes[object] = self.sizes[object].max(self.records[index].size);
        self.members[object].push(index);
        self.ids[index] = object;
    }

    /// How long the object is unused beside this record; nothing if it is not free.
    fn distance(&self, object: usize, index: usize) -> Option<u32> {
        let record = &self.records[index];
        let members = || self.members[object].iter().map(|&member| &self.records[member]);
        if members().any(|member| member.conflicts(record)) {
            return None;
        }
        members().map(|member| member.distance(record)).min()
    }

    /// The free object that is unused for the shortest time.
    fn nearest(&self, index: usize) -> Option<(u32, usize)> {
        let free = (0..self.sizes.len()).filter_map(|object| Some((self.distance(object, index)?, object)));
        free.min()
    }

    fn finish(self) -> Objects {
        Objects { ids: self.ids, sizes: self.sizes }
    }
}

pub fn plain(records: &[Record]) -> Objects {
    let mut assignment = Assignment::new(records);
    for index in largest_first(records) {
        let free = (0..assignment.sizes.len()).filter(|&object| assignment.distance(object, index).is_some());
        let smallest = free.min_by_key(|&object| assignment.sizes[object]);
        assignment.put(index, smallest);
    }
    assignment.finish()
}

pub fn improved(records: &[Record]) -> Objects {
    let maxima = positional_maxima(records);
    let mut stages: Vec<(usize, usize)> =
        records.iter().enumerate().map(|(index, record)| (stage(&maxima, record.size), index)).collect();
    stages.sort_unstable();
    let mut assignment = Assignment::new(records);
    for same in stages.chunk_by(|one, other| one.0 == other.0) {
        let mut left: Vec<usize> = same.iter().map(|&(_, index)| index).collect();
        loop {
            let key = |&index: &usize| {
                let nearest = assignment.nearest(index);
                // One that needs a new object comes after those that do not.
                let distance = nearest.map_or(u32::MAX, |(distance, _)| distance);
                (distance, std::cmp::Reverse(records[index].size), index)
            };
            let Some(at) = (0..left.len()).min_by_key(|&at| key(&left[at])) else { break };
            let index = left.swap_remove(at);
            let nearest = assignment.nearest(index).map(|(_, object)| object);
            assignment.put(index, nearest);
        }
    }
    assignment.finish()
}

/// For each i, the largest of the i-th largest tensors of all operations.
fn positional_maxima(records: &[Record]) -> Vec<u64> {
    let mut maxima: Vec<u64> = Vec::new();
    // What lives changes for the worse only where a tensor begins.
    for begin in records.iter().map(|record| record.first) {
        let live = records.iter().filter(|record| record.first <= begin && begin <= record.last);
        let mut sizes: Vec<u64> = live.map(|record| record.size).collect();
        sizes.sort_unstable_by(|one, other| other.cmp(one));
        maxima.resize(maxima.len().max(sizes.len()), 0);
        for (maximum, size) in maxima.iter_mut().zip(sizes) {
            *maximum = size.max(*maximum);
        }
    }
    maxima
}

/// Which maximum a size is as large as, or next below.
fn stage(maxima: &[u64], size: u64) -> usize {
    let at = maxima.partition_point(|&maximum| maximum > size);
    if maxima.get(at) == Some(&size) { at } else { at.saturating_sub(1) }
}
