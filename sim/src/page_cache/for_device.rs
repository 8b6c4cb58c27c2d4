//! The page cache of a device, built from its profile, and what of it is not validated.
//!
//! The profile names the policy (`memory.page_cache`) and may give its numbers (`memory.reclaim`); the constants below
//! are the defaults. The memory budget for weights includes all that other programs can give up
//! (`Memory::obtainable`). Where that is compressed and stays in memory, its compressed size is subtracted.

use hearth_profiles::device::{Device, Os, PageCachePolicy};
use hearth_profiles::{Bytes, Fraction, Seconds, Sourced};

use super::{Android, Macos, MacosMetal, MgLru, PageCache, PaperLinear, Random, TwoList, ZramConfig};

/// The compressed size of memory: three to one, as zram with lz4 and the macOS compressor are said to reach.
/// source: assumed
const COMPRESSED: Fraction = Fraction(1.0 / 3.0);
/// Chunks compressed for each evicted chunk of file pages: both are reclaimed alike with vm.swappiness 100.
/// source: assumed, the default of Android with zram
const SWAPPED_PER_EVICTION: Fraction = Fraction(1.0);
/// The part of all memory that macOS leaves to files in any case.
/// source: assumed
const FILE_FLOOR: Fraction = Fraction(0.15);
/// The page cache below which Android kills even the foreground: 18432 pages, the first of the usual `minfree`.
/// source: drivers/staging/android/lowmemorykiller.c
const KILL_BELOW: Bytes = Bytes::mib(72);
/// The idle time after which Metal's weights are unwired.
/// source: assumed, about a second
const UNWIRE_AFTER: Seconds = Seconds(1.0);

/// A device's share of the weights and its memory.
#[derive(Debug, Clone, Copy)]
pub struct CacheConfig<'a> {
    pub device: &'a Device,
    pub place: usize,
    pub seed: u64,
    pub room: Bytes,
    pub share: u32,
    pub chunk: Bytes,
}

impl CacheConfig<'_> {
    /// Returns the device's page cache, empty.
    pub fn policy(&self) -> Box<dyn PageCache> {
        let (share, memory, capacity) = (self.share, &self.device.memory, self.initial_capacity());
        let two_list = || TwoList::new(share, capacity).with_size(self.room.0 >> 30);
        let reclaim = memory.reclaim.clone().unwrap_or_default();
        match memory.page_cache {
            PageCachePolicy::PaperLinear => Box::new(PaperLinear::new(share, capacity)),
            PageCachePolicy::TwoList => Box::new(two_list()),
            PageCachePolicy::MgLru => Box::new(MgLru::new(share, capacity)),
            PageCachePolicy::Random => Box::new(Random::new(share, capacity, self.seed, self.place as u64)),
            PageCachePolicy::Macos => {
                let floor = share_of(memory.total.value, or_default(reclaim.file_floor.as_ref(), FILE_FLOOR));
                Box::new(Macos::new(share, capacity, self.chunks(floor)))
            }
            PageCachePolicy::MacosMetal => {
                let ordinary = self.capacity(self.room).min(capacity);
                Box::new(MacosMetal::new(share, capacity, ordinary))
            }
            PageCachePolicy::Android => {
                let rate = or_default(reclaim.swapped_per_eviction.as_ref(), SWAPPED_PER_EVICTION);
                let zram = ZramConfig {
                    swappable: self.chunks(self.swappable()),
                    swapped_per_eviction: per_mille(rate),
                    compressed: per_mille(or_default(reclaim.compressed.as_ref(), COMPRESSED)),
                    kill_below: self.chunks(or_default(reclaim.kill_below.as_ref(), KILL_BELOW)),
                };
                Box::new(Android::new(two_list(), zram))
            }
        }
    }

    /// The initial capacity, before pressure makes more room.
    pub fn initial_capacity(&self) -> u32 {
        let memory = &self.device.memory;
        self.capacity(match memory.page_cache {
            PageCachePolicy::Macos => {
                let reclaim = memory.reclaim.as_ref();
                let compressed =
                    or_default(reclaim.and_then(|reclaim| reclaim.compressed.as_ref()), COMPRESSED);
                self.room.saturating_sub(share_of(self.swappable(), compressed))
            }
            PageCachePolicy::MacosMetal => self.wired(),
            PageCachePolicy::Android => self.room.saturating_sub(self.swappable()),
            _ => self.room,
        })
    }

    /// Memory that other programs can give up.
    fn swappable(&self) -> Bytes {
        self.device.memory.obtainable().saturating_sub(self.device.memory.available.value)
    }

    /// What Metal may wire of this share: the recommended working set, less unreclaimable memory.
    fn wired(&self) -> Bytes {
        let unreclaimable = self.device.memory.obtainable().saturating_sub(self.room);
        let limit = self.device.gpu.as_ref().map_or(self.room, |gpu| gpu.memory_available.value);
        limit.saturating_sub(unreclaimable)
    }

    fn chunks(&self, bytes: Bytes) -> u32 {
        (bytes.0 / self.chunk.0.max(1)).min(u64::from(u32::MAX)) as u32
    }

    /// The capacity in chunks: at least a page and what is read around it, or nothing could ever be computed.
    fn capacity(&self, room: Bytes) -> u32 {
        self.chunks(room).max(2)
    }
}

/// The idle time after which the device's weights are unwired; `None` if they never are.
pub fn unwire_after(device: &Device) -> Option<Seconds> {
    let reclaim = device.memory.reclaim.clone().unwrap_or_default();
    let metal = device.memory.page_cache == PageCachePolicy::MacosMetal;
    (metal && !reclaim.keep_alive).then(|| or_default(reclaim.unwire_after.as_ref(), UNWIRE_AFTER))
}

/// Describes what of a device's page cache is not validated against a machine.
pub fn unvalidated(device: &Device) -> Option<String> {
    let assumed = |what: &str| Some(format!("{what}, not checked against a machine"));
    match (device.memory.page_cache, device.os) {
        (PageCachePolicy::TwoList, Os::Linux) => None,
        (PageCachePolicy::TwoList, os) => Some(format!("page cache of {os:?} as classic Linux")),
        (PageCachePolicy::PaperLinear, _) => {
            Some("page cache by the paper's formula, not by a kernel".into())
        }
        (PageCachePolicy::Random, _) => Some("page cache that evicts at random, as no kernel does".into()),
        (PageCachePolicy::MgLru, _) => assumed("page cache with generations (MGLRU)"),
        (PageCachePolicy::Macos, _) => assumed("page cache of macOS"),
        (PageCachePolicy::MacosMetal, _) => assumed("weights wired by Metal"),
        (PageCachePolicy::Android, _) => assumed("page cache, zram and low memory killer of Android"),
    }
}

fn or_default<T: Copy>(given: Option<&Sourced<T>>, default: T) -> T {
    given.map_or(default, |given| given.value)
}

fn share_of(bytes: Bytes, fraction: Fraction) -> Bytes {
    Bytes((bytes.as_f64() * fraction.0) as u64)
}

fn per_mille(fraction: Fraction) -> u32 {
    (fraction.0 * 1000.0).round().clamp(0.0, 1e9) as u32
}
