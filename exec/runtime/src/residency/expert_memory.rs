//! The memory of cached experts: which of their matrices are in memory, which have to be read, and the buffers.
//!
//! Each matrix has a buffer of its own. The buffer of an evicted matrix is used for the next one of the same size, so
//! that the system has neither to provide nor to clear memory. This is only bookkeeping, without system calls.
//!
//! Not here: which experts are cached ([`hearth_core::residency::ExpertResidency`]), and who reads them
//! (`super::experts`).

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use hearth_core::expert_cache::ExpertId;
use hearth_profiles::measure::direct::PageBuffer;

/// A matrix of a cached expert.
#[derive(Debug, Clone)]
enum CachedMatrix {
    Requested,
    InMemory(Arc<PageBuffer>),
    /// It cannot be read, so the mapping of the file is used, which reports why.
    Unreadable,
}

/// The matrices of an expert in memory, in the order of [`crate::weights::Weights::expert_extents`].
pub type ExpertMatrices = Vec<Arc<PageBuffer>>;

/// Where the matrices of an expert are.
#[derive(Debug)]
pub(super) enum ExpertPlace {
    /// At least one matrix is still being read.
    Requested,
    InMemory(ExpertMatrices),
    /// In the mapped files.
    Mapped,
}

#[derive(Debug, Default)]
pub(super) struct ExpertMemory {
    cached: BTreeMap<ExpertId, Vec<CachedMatrix>>,
    /// The requested matrices that no thread has begun to read.
    requests: VecDeque<(ExpertId, usize)>,
    /// Unused buffers by their size, which is in the map since its first use.
    spare: BTreeMap<usize, Vec<PageBuffer>>,
    /// The size of all buffers, used or not.
    allocated_bytes: u64,
}

impl ExpertMemory {
    /// Requests those of the `count` matrices of an expert that are not cached, or that could not be read.
    pub(super) fn request(&mut self, id: ExpertId, count: usize) {
        let matrices = self.cached.entry(id).or_insert_with(|| vec![CachedMatrix::Unreadable; count]);
        for (index, matrix) in matrices.iter_mut().enumerate() {
            if matches!(matrix, CachedMatrix::Unreadable) {
                *matrix = CachedMatrix::Requested;
                self.requests.push_back((id, index));
            }
        }
    }

    /// Returns a matrix to read, if any.
    pub(super) fn next_request(&mut self) -> Option<(ExpertId, usize)> {
        self.requests.pop_front()
    }

    pub(super) fn place(&self, id: ExpertId) -> ExpertPlace {
        let Some(matrices) = self.cached.get(&id) else { return ExpertPlace::Mapped };
        let mut in_memory = Vec::with_capacity(matrices.len());
        let mut is_readable = true;
        for matrix in matrices {
            match matrix {
                CachedMatrix::Requested => return ExpertPlace::Requested,
                CachedMatrix::InMemory(bytes) => in_memory.push(bytes.clone()),
                CachedMatrix::Unreadable => is_readable = false,
            }
        }
        if is_readable { ExpertPlace::InMemory(in_memory) } else { ExpertPlace::Mapped }
    }

    /// Takes an unused buffer of `size` bytes. Without one, counts one that the caller allocates.
    pub(super) fn take_buffer(&mut self, size: usize) -> Option<PageBuffer> {
        let spare = self.spare.entry(size).or_default().pop();
        if spare.is_none() {
            self.allocated_bytes += size as u64;
        }
        spare
    }

    /// Returns whether a buffer of `size` bytes must be allocated that `limit` bytes do not allow.
    pub(super) fn is_full(&self, size: usize, limit: u64) -> bool {
        let has_spare = self.spare.get(&size).is_some_and(|buffers| !buffers.is_empty());
        !has_spare && self.allocated_bytes + size as u64 > limit
    }

    /// Returns the size of a buffer to allocate before it is needed, and counts it as allocated. There is none if all
    /// buffers have `limit` bytes, or the unused ones `max_spare`.
    pub(super) fn reserve_spare(&mut self, limit: u64, max_spare: u64) -> Option<usize> {
        let bytes = |(size, buffers): (&usize, &Vec<PageBuffer>)| (*size * buffers.len()) as u64;
        let (&size, _) = self.spare.iter().min_by_key(|entry| bytes(*entry))?;
        let is_wanted = self.spare.iter().map(bytes).sum::<u64>() < max_spare;
        let is_possible = self.allocated_bytes + size as u64 <= limit;
        (is_wanted && is_possible).then(|| {
            self.allocated_bytes += size as u64;
            size
        })
    }

    /// Keeps a buffer for the next matrix of its size.
    pub(super) fn keep_buffer(&mut self, buffer: PageBuffer) {
        self.spare.entry(buffer.size()).or_default().push(buffer);
    }

    /// Counts a buffer of `size` bytes as freed.
    pub(super) fn count_freed(&mut self, size: usize) {
        self.allocated_bytes -= size as u64;
    }

    /// Stores a matrix that has been read, or, with `None`, could not be read.
    pub(super) fn finish_read(&mut self, id: ExpertId, index: usize, bytes: Option<PageBuffer>) {
        let matrix = self.cached.get_mut(&id).and_then(|matrices| matrices.get_mut(index));
        match (matrix.filter(|matrix| matches!(matrix, CachedMatrix::Requested)), bytes) {
            (Some(matrix), Some(bytes)) => *matrix = CachedMatrix::InMemory(Arc::new(bytes)),
            (Some(matrix), None) => *matrix = CachedMatrix::Unreadable,
            // Evicted before it arrived.
            (None, Some(bytes)) => self.keep_buffer(bytes),
            (None, None) => {}
        }
    }

    /// Removes an expert, whose buffers become unused.
    pub(super) fn evict(&mut self, id: ExpertId) {
        self.requests.retain(|(requested, _)| *requested != id);
        for matrix in self.cached.remove(&id).into_iter().flatten() {
            let CachedMatrix::InMemory(bytes) = matrix else { continue };
            let size = bytes.size();
            match Arc::try_unwrap(bytes) {
                Ok(buffer) => self.keep_buffer(buffer),
                // A computation that did not wait for its release still uses it.
                Err(_) => self.count_freed(size),
            }
        }
    }

    /// Removes unused buffers until all of them have at most `limit` bytes, and returns them: to free them takes time.
    pub(super) fn shrink(&mut self, limit: u64) -> Vec<PageBuffer> {
        let mut removed = Vec::new();
        while self.allocated_bytes > limit
            && let Some(mut largest) = self.spare.last_entry()
        {
            match largest.get_mut().pop() {
                Some(buffer) => {
                    self.allocated_bytes -= buffer.size() as u64;
                    removed.push(buffer);
                }
                None => drop(largest.remove()),
            }
        }
        removed
    }

    /// Returns the size of all buffers, used or not.
    pub(super) fn allocated_bytes(&self) -> u64 {
        self.allocated_bytes
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use hearth_profiles::measure::direct::DirectFile;
    use proptest::prelude::*;

    use super::*;

    const MATRICES: usize = 2;
    const BYTES: [usize; MATRICES] = [5000, 9000];

    /// Reads what is requested, as a reading thread does; `fails` says whether a read fails.
    fn read_all(memory: &mut ExpertMemory, file: &DirectFile, mut fails: impl FnMut() -> bool) {
        while let Some((id, index)) = memory.next_request() {
            let size = PageBuffer::size_for_range(BYTES[index]);
            let buffer = memory.take_buffer(size).map_or_else(|| PageBuffer::new(size), Ok);
            let mut buffer = buffer.expect("memory");
            file.read(&(0..BYTES[index] as u64), &mut buffer).expect("bytes");
            if fails() {
                memory.keep_buffer(buffer);
                memory.finish_read(id, index, None);
            } else {
                memory.finish_read(id, index, Some(buffer));
            }
        }
    }

    fn file() -> DirectFile {
        let file: File = tempfile::tempfile_in(".").expect("a file");
        file.set_len(10_000).expect("longer");
        DirectFile::new(&file).expect("opened again")
    }

    #[test]
    fn buffers_are_used_again() {
        let (mut memory, file) = (ExpertMemory::default(), file());
        memory.request((0, 1), MATRICES);
        memory.request((0, 1), MATRICES);
        assert!(matches!(memory.place((0, 1)), ExpertPlace::Requested));
        read_all(&mut memory, &file, || false);
        let ExpertPlace::InMemory(matrices) = memory.place((0, 1)) else { panic!("read") };
        assert_eq!(matrices.iter().map(|matrix| matrix.len()).collect::<Vec<_>>(), BYTES);
        let of_one = memory.allocated_bytes();
        drop(matrices);
        memory.evict((0, 1));
        memory.request((3, 0), MATRICES);
        read_all(&mut memory, &file, || false);
        assert_eq!(memory.allocated_bytes(), of_one);
        assert!(matches!(memory.place((0, 1)), ExpertPlace::Mapped));
        memory.evict((3, 0));
        assert_eq!(memory.shrink(0).len(), MATRICES);
        assert_eq!(memory.allocated_bytes(), 0);
    }

    #[test]
    fn unreadable_and_evicted_matrices_are_handled() {
        let (mut memory, file) = (ExpertMemory::default(), file());
        memory.request((0, 0), MATRICES);
        let mut reads = 0;
        read_all(&mut memory, &file, || std::mem::replace(&mut reads, 1) == 0);
        assert!(matches!(memory.place((0, 0)), ExpertPlace::Mapped));
        memory.request((0, 0), MATRICES);
        read_all(&mut memory, &file, || false);
        assert!(matches!(memory.place((0, 0)), ExpertPlace::InMemory(_)), "tried again");
        // Evicted while one matrix is read, and before the other.
        memory.request((1, 0), MATRICES);
        let (id, index) = memory.next_request().expect("requested");
        let size = PageBuffer::size_for_range(BYTES[index]);
        let buffer = memory.take_buffer(size).map_or_else(|| PageBuffer::new(size), Ok).expect("memory");
        memory.evict((1, 0));
        assert!(memory.next_request().is_none());
        memory.finish_read(id, index, Some(buffer));
        assert!(matches!(memory.place((1, 0)), ExpertPlace::Mapped));
        assert!(memory.take_buffer(size).is_some(), "its buffer is used again");
    }

    proptest! {
        #[test]
        fn every_buffer_is_counted(steps in prop::collection::vec((0u32..3, 0u32..3, 0u8..4), 0..60)) {
            let (mut memory, file) = (ExpertMemory::default(), file());
            for (layer, expert, step) in steps {
                match step {
                    0 => memory.request((layer, expert), MATRICES),
                    1 => memory.evict((layer, expert)),
                    2 => read_all(&mut memory, &file, || layer == 0),
                    _ => drop(memory.shrink(u64::from(expert) * 20_000)),
                }
                let used = memory.cached.values().flatten().filter_map(|matrix| match matrix {
                    CachedMatrix::InMemory(bytes) => Some(bytes.size() as u64),
                    _ => None,
                });
                let spare = memory.spare.values().flatten().map(|buffer| buffer.size() as u64);
                prop_assert_eq!(used.chain(spare).sum::<u64>(), memory.allocated_bytes());
            }
        }
    }
}
