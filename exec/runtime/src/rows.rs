//! A buffer whose rows are written by several threads at the same time.
//!
//! A job of the thread pool borrows a buffer as [`SharedRows`], and each thread writes the rows of its chunks. The
//! callers of [`SharedRows::row`] guarantee that chunks do not overlap.

use std::marker::PhantomData;

/// A buffer of rows, `[rows, length]`, of which each row is written by one thread at a time.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SharedRows<'a, T> {
    first: *mut T,
    rows: usize,
    length: usize,
    lifetime: PhantomData<&'a mut [T]>,
}

// SAFETY: rows are accessed only through `row`, whose callers use each row on one thread at a time.
unsafe impl<T: Send> Send for SharedRows<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for SharedRows<'_, T> {}

impl<'a, T> SharedRows<'a, T> {
    /// Wraps `values` as rows of `length` elements.
    pub(crate) fn new(values: &'a mut [T], length: usize) -> SharedRows<'a, T> {
        assert!(length > 0 && values.len().is_multiple_of(length), "a buffer must be whole rows");
        let rows = values.len() / length;
        SharedRows { first: values.as_mut_ptr(), rows, length, lifetime: PhantomData }
    }

    /// Returns the row with the index `row` for writing.
    ///
    /// # Safety
    /// The caller ensures that no other reference to this row exists.
    #[allow(clippy::mut_from_ref)] // the point of the type: rows are disjoint, see above
    pub(crate) unsafe fn row(&self, row: usize) -> &mut [T] {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        // SAFETY: inside the slice given to `new`, and not aliased by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.first.add(row * self.length), self.length) }
    }
}
