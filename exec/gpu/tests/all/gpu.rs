//! A GPU to test on, and small things that tests share.

use std::sync::{Mutex, MutexGuard, PoisonError};

use hearth_gpu::{Gpu, GpuError, Mask};

/// A GPU for one test, without what the mask takes away; nothing, said aloud, where there is none.
pub fn open(test: &str, mask: Mask) -> Option<Gpu> {
    match Gpu::open(mask) {
        Ok(gpu) => Some(gpu),
        Err(GpuError::NoAdapter) => {
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
pub fn largest_difference(own: &[f32], wanted: &[f32]) -> f32 {
    assert_eq!(own.len(), wanted.len());
    own.iter().zip(wanted).map(|(own, wanted)| (own - wanted).abs()).fold(0.0, f32::max)
}
