//! A GPU to test on, and small things that tests share.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hearth_gpu::{CapabilityMask, Gpu, GpuError};

/// Returns a GPU for the test of this thread, without what the mask takes away; prints that the test is skipped where
/// there is none.
pub fn open(mask: CapabilityMask) -> Option<Arc<Gpu>> {
    match Gpu::open(mask) {
        Ok(gpu) => Some(Arc::new(gpu)),
        Err(GpuError::NoAdapter) => {
            let thread = std::thread::current();
            let test = thread.name().unwrap_or("a test");
            eprintln!("SKIPPED {test}: no Vulkan, Metal or DX12 adapter; install mesa-vulkan-drivers");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// Software drivers use all processors: one test at a time is as fast, and needs less memory.
pub fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The same numbers for the same seed, from -1 to 1.
pub fn numbers(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12345);
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// The largest absolute difference.
pub fn max_difference(own: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(own.len(), expected.len());
    own.iter().zip(expected).map(|(own, expected)| (own - expected).abs()).fold(0.0, f32::max)
}

/// The largest difference as a share of the largest number.
pub fn relative_difference(own: &[f32], expected: &[f32]) -> f32 {
    max_difference(own, expected) / max_difference(expected, &vec![0.0; expected.len()])
}
