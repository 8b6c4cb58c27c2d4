//! Configuration of page caches: builds the page cache of a device from its profile.
//!
//! The device profile names the policy (`memory.page_cache`) and may set the parameters of the policy
//! (`memory.reclaim`); the constants of this module are the defaults. The memory budget for weights includes the memory
//! that other programs can give up (`Memory::obtainable_bytes`). If the system compresses that memory in RAM, its
//! compressed size is subtracted.

use hearth_profiles::device::{DeviceProfile, Os, PageCachePolicy};
use hearth_profiles::{Bytes, Fraction, Seconds, Sourced};

use super::{
    MacosCache, MacosMetalCache, MgLruCache, PageCache, PaperPageCache, RandomCache, TwoListCache, ZramConfig,
};

/// Compressed size of memory as a fraction of the original size, as reported for zram with lz4 and for macOS.
/// source: assumed
const COMPRESSED: Fraction = Fraction(1.0 / 3.0);
/// Chunks of anonymous memory compressed per evicted chunk of file pages: vm.swappiness 100 reclaims both equally.
/// source: assumed, the default of Android with zram
const SWAPPED_PER_EVICTION: Fraction = Fraction(1.0);
/// Fraction of the total memory that file pages keep on macOS under memory pressure.
/// source: assumed
const FILE_FLOOR: Fraction = Fraction(0.15);
/// Page-cache size below which Android kills even the foreground process: 18432 pages, the first of the usual
/// `minfree` values.
/// source: drivers/staging/android/lowmemorykiller.c
const KILL_BELOW: Bytes = Bytes::from_mib(72);
/// Idle time after which weights that Metal has wired are unwired.
/// source: assumed, about a second
const UNWIRE_AFTER: Seconds = Seconds(1.0);

/// The parameters from which the page cache of a device is built.
#[derive(Debug, Clone, Copy)]
pub struct PageCacheConfig<'a> {
    pub device: &'a DeviceProfile,
    pub device_id: usize,
    pub seed: u64,
    pub memory_budget: Bytes,
    pub file_chunks: u32,
    pub chunk_size: Bytes,
}

impl PageCacheConfig<'_> {
    /// Creates an empty page cache with the policy of the device profile.
    pub fn build_page_cache(&self) -> Box<dyn PageCache> {
        let (chunks, memory, capacity) =
            (self.file_chunks, &self.device.memory, self.initial_capacity_chunks());
        let two_list =
            || TwoListCache::new(chunks, capacity).with_inactive_ratio_for_size(self.memory_budget.0 >> 30);
        let reclaim = memory.reclaim_parameters.clone().unwrap_or_default();
        match memory.page_cache {
            PageCachePolicy::PaperLinear => Box::new(PaperPageCache::new(chunks, capacity)),
            PageCachePolicy::TwoList => Box::new(two_list()),
            PageCachePolicy::MgLru => Box::new(MgLruCache::new(chunks, capacity)),
            PageCachePolicy::Random => {
                Box::new(RandomCache::new(chunks, capacity, self.seed, self.device_id as u64))
            }
            PageCachePolicy::Macos => {
                let floor = or_default(reclaim.min_file_page_fraction, FILE_FLOOR);
                let floor = fraction_of(memory.total_memory.value, floor);
                Box::new(MacosCache::new(chunks, capacity, self.chunks(floor)))
            }
            PageCachePolicy::MacosMetal => {
                let ordinary = self.capacity(self.memory_budget).min(capacity);
                Box::new(MacosMetalCache::new(chunks, capacity, ordinary))
            }
            PageCachePolicy::Android => {
                let rate = or_default(reclaim.swapped_fraction_per_eviction, SWAPPED_PER_EVICTION);
                let zram = ZramConfig {
                    swappable_chunks: self.chunks(self.swappable()),
                    swapped_per_eviction_permille: per_mille(rate),
                    compressed_permille: per_mille(or_default(reclaim.compressed_fraction, COMPRESSED)),
                    kill_threshold_chunks: self.chunks(or_default(reclaim.kill_threshold, KILL_BELOW)),
                };
                Box::new(two_list().with_zram(zram))
            }
        }
    }

    /// Returns the capacity in chunks at the start of a run, before other programs give up memory under pressure.
    pub fn initial_capacity_chunks(&self) -> u32 {
        let memory = &self.device.memory;
        self.capacity(match memory.page_cache {
            PageCachePolicy::Macos => {
                let reclaim = memory.reclaim_parameters.clone().unwrap_or_default();
                let compressed = or_default(reclaim.compressed_fraction, COMPRESSED);
                self.memory_budget.saturating_sub(fraction_of(self.swappable(), compressed))
            }
            PageCachePolicy::MacosMetal => self.wired(),
            PageCachePolicy::Android => self.memory_budget.saturating_sub(self.swappable()),
            _ => self.memory_budget,
        })
    }

    fn swappable(&self) -> Bytes {
        self.device.memory.obtainable_bytes().saturating_sub(self.device.memory.available_memory.value)
    }

    /// Returns how much memory Metal may wire: the recommended working set less unreclaimable memory.
    fn wired(&self) -> Bytes {
        let unreclaimable = self.device.memory.obtainable_bytes().saturating_sub(self.memory_budget);
        let limit = self.device.gpu.as_ref().map_or(self.memory_budget, |gpu| gpu.memory_available.value);
        limit.saturating_sub(unreclaimable)
    }

    fn chunks(&self, bytes: Bytes) -> u32 {
        (bytes.0 / self.chunk_size.0.max(1)).min(u64::from(u32::MAX)) as u32
    }

    /// Converts memory to a capacity in chunks, at least 2: a faulting page is read together with the pages around it.
    fn capacity(&self, memory: Bytes) -> u32 {
        self.chunks(memory).max(2)
    }
}

/// Returns the idle time after which Metal unwires the weights of a device; `None` if it never does.
pub fn unwire_idle_time(device: &DeviceProfile) -> Option<Seconds> {
    let reclaim = device.memory.reclaim_parameters.clone().unwrap_or_default();
    let metal = device.memory.page_cache == PageCachePolicy::MacosMetal;
    (metal && !reclaim.keeps_weights_wired).then(|| or_default(reclaim.unwire_timeout, UNWIRE_AFTER))
}

/// Describes the parts of a device's page-cache model that are not validated on a machine; `None` if all are validated.
pub fn describe_unvalidated_parts(device: &DeviceProfile) -> Option<String> {
    let assumed = |what: &str| Some(format!("{what}, not validated on a machine"));
    match (device.memory.page_cache, device.os) {
        (PageCachePolicy::TwoList, Os::Linux) => None,
        (PageCachePolicy::TwoList, Os::Macos) => {
            Some("page cache of macOS, simulated as classic Linux".into())
        }
        (PageCachePolicy::TwoList, Os::Windows) => {
            Some("page cache of Windows, simulated as classic Linux".into())
        }
        (PageCachePolicy::TwoList, Os::Android) => {
            Some("page cache of Android, simulated as classic Linux".into())
        }
        (PageCachePolicy::PaperLinear, _) => {
            Some("page cache by the formula of the prima.cpp paper, which no kernel follows".into())
        }
        (PageCachePolicy::Random, _) => Some("page cache with random eviction, which no kernel has".into()),
        (PageCachePolicy::MgLru, _) => assumed("page cache with generations (MGLRU)"),
        (PageCachePolicy::Macos, _) => assumed("page cache of macOS"),
        (PageCachePolicy::MacosMetal, _) => assumed("weights wired by Metal"),
        (PageCachePolicy::Android, _) => assumed("page cache, zram and low memory killer of Android"),
    }
}

fn or_default<T>(given: Option<Sourced<T>>, default: T) -> T {
    given.map_or(default, |given| given.value)
}

fn fraction_of(bytes: Bytes, fraction: Fraction) -> Bytes {
    Bytes((bytes.as_f64() * fraction.0) as u64)
}

fn per_mille(fraction: Fraction) -> u32 {
    (fraction.0 * 1000.0).round().clamp(0.0, 1e9) as u32
}
