//! Tests that reproduce figures 3, 4 and 5 of the prima.cpp paper, with one chunk per layer.
//!
//! The tests make the page-cache calls of a helper thread and a reader. Layers are numbered from 1 as in the figures.

use super::{Access, Chunk, FetchResult, PageCache, PaperPageCache, TwoListCache};

const LAYERS: u32 = 8;

struct Device<C> {
    cache: C,
    loads: Vec<u32>,
    faults: Vec<u32>,
}

impl<C: PageCache> Device<C> {
    fn new(cache: C) -> Self {
        Self { cache, loads: Vec::new(), faults: Vec::new() }
    }

    fn prefetch(&mut self, layers: impl IntoIterator<Item = u32>) {
        for layer in layers {
            if self.cache.prefetch_now(layer - 1) == FetchResult::Started {
                self.cache.on_arrival(layer - 1);
                self.loads.push(layer);
            }
        }
    }

    fn compute(&mut self, layers: impl IntoIterator<Item = u32>) {
        for layer in layers {
            if self.cache.access(layer - 1) == Access::Absent {
                self.faults.push(layer);
                self.prefetch([layer]);
                assert!(self.cache.resume(layer - 1), "no other chunk is read meanwhile");
            }
        }
    }

    fn resident_layers(&self) -> Vec<u32> {
        (1..=LAYERS).filter(|layer| self.cache.contains(*layer as Chunk - 1)).collect()
    }
}

#[test]
fn figure_3_every_layer_is_loaded_twice() {
    // Six layers, memory for three, one round, prefetch.
    let mut device = Device::new(TwoListCache::new(LAYERS, 3));
    device.prefetch(1..=6);
    assert_eq!(device.resident_layers(), [4, 5, 6], "the first three were released by the last three");
    device.compute(1..=6);
    assert_eq!(device.loads, [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6]);
    assert_eq!(device.faults, [1, 2, 3, 4, 5, 6], "prefetching had no effect");
    // The next token does the same.
    device.prefetch(1..=6);
    device.compute(1..=6);
    assert_eq!(device.loads.len(), 24);
}

#[test]
fn figure_3_contradicts_the_formula() {
    // Reload = need - capacity: three of six layers per token, with the same steps.
    let mut device = Device::new(PaperPageCache::new(LAYERS, 3));
    device.compute(1..=6);
    let first = device.loads.len();
    device.compute(1..=6);
    assert_eq!(device.loads.len() - first, 3);
}

#[test]
fn figure_4_fast_disk() {
    // A window of two layers (this device's are 1, 2 and then 5, 6), memory for two layers.
    let mut device = Device::new(TwoListCache::new(LAYERS, 2));
    device.prefetch([1, 2]);
    device.compute([1, 2]);
    device.prefetch([5, 6]);
    assert_eq!(device.resident_layers(), [5, 6], "the used layers were replaced");
    device.compute([5, 6]);
    device.prefetch([1, 2]);
    device.compute([1, 2]);
    assert!(device.faults.is_empty(), "disk latency is fully overlapped");
    assert_eq!(device.loads, [1, 2, 5, 6, 1, 2]);
}

#[test]
fn figure_5_slow_disk() {
    let mut device = Device::new(TwoListCache::new(LAYERS, 2));
    device.prefetch([1]);
    device.compute([1, 2]);
    assert_eq!(device.faults, [2], "step 3: the computation waits for the second layer");
    device.prefetch([5]);
    assert_eq!(device.resident_layers(), [2, 5], "step 4: the oldest layer was released");
    device.compute([5, 6]);
    assert_eq!(device.faults, [2, 6], "step 6: again the second of the window");
    assert_eq!(device.loads, [1, 2, 5, 6], "but nothing was loaded twice");
}
