//! Checks that an entry of a parser uses no more memory than its input justifies.
//!
//! The fuzz targets and the replay in the unit tests of the crates (`replay.rs`) include this file.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// The system allocator, which also counts the bytes that each thread has allocated.
struct CountingAllocator;

thread_local! {
    static CURRENT: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

fn count(bytes: isize) {
    // A thread that ends has no counter any more.
    let _ = CURRENT.try_with(|current| {
        current.set(current.get() + bytes);
        let _ = PEAK.try_with(|peak| peak.set(peak.get().max(current.get())));
    });
}

// SAFETY: every call is passed on unchanged to the system's allocator; the thread-locals need no allocation and have no
// destructor.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller upholds the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller upholds the contract of `alloc_zeroed`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: `at` came from `System` through one of the other functions.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size as isize - layout.size() as isize);
        // SAFETY: `at` came from `System`, and the caller upholds the contract of `realloc`.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Runs `entry`, and panics if the calling thread needed more than `allowed` bytes of memory at a time.
pub fn check(input: &[u8], allowed: usize, entry: fn(&[u8])) {
    let before = CURRENT.get();
    PEAK.set(before);
    entry(input);
    let used = PEAK.get() - before;
    assert!(
        used <= allowed as isize,
        "an input of {} bytes needed {used} bytes of memory, more than {allowed}",
        input.len()
    );
}
