//! Support for the tests: opening the GPU, test data, and error measures.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hearth_gpu::{CapabilityMask, Gpu, GpuError};

/// Opens the GPU without the capabilities that `mask` disables. If this machine has no GPU, prints that the current
/// test is skipped and returns `None`.
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

/// Waits until no other test holds the returned guard, so that only one test runs. Software drivers use all
/// CPU cores, so parallel tests would not be faster but would need more memory.
pub fn lock_gpu() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Opens the GPU for a test. No other test runs while the test holds the returned guard.
pub fn open_and_lock(mask: CapabilityMask) -> Option<(MutexGuard<'static, ()>, Arc<Gpu>)> {
    let guard = lock_gpu();
    Some((guard, open(mask)?))
}

/// Returns pseudo-random numbers from -1 to 1. Equal seeds give equal numbers.
pub fn random_numbers(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12345);
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

pub fn max_difference(own: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(own.len(), expected.len());
    own.iter().zip(expected).map(|(own, expected)| (own - expected).abs()).fold(0.0, f32::max)
}

/// Returns the largest absolute difference between two vectors, divided by the largest expected magnitude.
pub fn relative_difference(own: &[f32], expected: &[f32]) -> f32 {
    max_difference(own, expected) / max_difference(expected, &vec![0.0; expected.len()])
}
