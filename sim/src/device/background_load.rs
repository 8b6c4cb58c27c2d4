//! Background load: the effect of other programs and of a slower clock on a device.
//!
//! The load is computed from all active events: threads and memory are added; the remaining fractions of the clock
//! rate, the GPU and the disk are multiplied. So the order of events does not matter, and their end needs no undo.
//!
//! With compressed swap (zram) other programs occupy memory at the start, which the system swaps out at a given rate.
//! If the compression ratio is r, swapping out s bytes frees s (1 - 1/r) bytes.
//!
//! Not here: when events begin and end (`crate::ring::timeline`).

use hearth_core::memory::MIN_WEIGHT_CACHE;
use hearth_profiles::Bytes;
use hearth_schema::events::Change;

/// The load on a device from other programs, and its clock rate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BackgroundLoad {
    /// Threads of other programs that are runnable all the time.
    pub co_runners: f64,
    /// Clock rate of CPU and GPU as a fraction of the full clock rate.
    pub clock_rate_fraction: f64,
    /// Fraction of the GPU's time that other programs leave available; a slower clock does not reduce this fraction.
    pub available_gpu_fraction: f64,
    /// Fraction of the disk bandwidth that other programs leave available.
    pub available_disk_fraction: f64,
    /// Bytes that other programs have allocated since the run began.
    pub allocated_bytes: f64,
    /// Bytes occupied by other programs that the run can use only once they have been swapped out.
    withheld_bytes: f64,
    /// Bytes of other programs' memory that compressed swap has freed since the run began.
    freed_bytes: f64,
}

impl BackgroundLoad {
    /// Creates the load before any event. Other programs occupy `withheld` bytes, which can be swapped out.
    pub fn initial(withheld: Bytes) -> Self {
        Self {
            co_runners: 0.0,
            clock_rate_fraction: 1.0,
            available_gpu_fraction: 1.0,
            available_disk_fraction: 1.0,
            allocated_bytes: 0.0,
            withheld_bytes: withheld.as_f64(),
            freed_bytes: 0.0,
        }
    }

    /// Adds the load of an event; `progress` is the fraction of its ramp that is complete, from 0 to 1.
    #[must_use]
    pub fn with_event(mut self, change: &Change, progress: f64) -> Self {
        match change {
            Change::Load(load) => {
                self.co_runners += f64::from(load.threads);
                self.available_gpu_fraction *= load.available_gpu_fraction.map_or(1.0, |left| left.0);
            }
            Change::Memory(memory) => self.allocated_bytes += memory.size.as_f64() * progress,
            Change::Swap(swap) => {
                self.freed_bytes += self.withheld_bytes * progress * (1.0 - 1.0 / swap.compression_ratio);
            }
            Change::Slow(left) => self.clock_rate_fraction *= left.0,
            Change::DiskLoad(share) => self.available_disk_fraction *= 1.0 - share.0,
            Change::Leaves | Change::Returns(_) | Change::Stalls => {}
        }
        self
    }

    /// Returns how much of the `planned` memory the load leaves; `None` if it is less than [`MIN_WEIGHT_CACHE`].
    pub fn memory_budget(&self, planned: Bytes) -> Option<Bytes> {
        // At the start the system has swapped out at least enough memory for the device to begin.
        let withheld = self.withheld_bytes.min((planned.as_f64() - MIN_WEIGHT_CACHE.as_f64()).max(0.0));
        let bytes = planned.as_f64() - withheld + self.freed_bytes.min(withheld) - self.allocated_bytes;
        (bytes >= MIN_WEIGHT_CACHE.as_f64()).then_some(Bytes(bytes as u64))
    }
}

#[cfg(test)]
mod tests {
    use hearth_profiles::{BytesPerSecond, Fraction};
    use hearth_schema::events::{CompressedSwap, MemoryLoad, ProcessorLoad};

    use super::*;

    #[test]
    fn background_load_combines_events() {
        let taken = |mib| Change::Memory(MemoryLoad { size: Bytes::from_mib(mib), ramp_time: None });
        let load = Change::Load(ProcessorLoad { threads: 3, available_gpu_fraction: Some(Fraction(0.5)) });
        let found = BackgroundLoad::initial(Bytes(0))
            .with_event(&load, 1.0)
            .with_event(&load, 1.0)
            .with_event(&Change::Slow(Fraction(0.5)), 1.0)
            .with_event(&Change::DiskLoad(Fraction(0.75)), 1.0)
            .with_event(&taken(100), 1.0)
            .with_event(&taken(200), 0.5);
        let fractions =
            (found.available_gpu_fraction, found.clock_rate_fraction, found.available_disk_fraction);
        assert_eq!((found.co_runners, fractions), (6.0, (0.25, 0.5, 0.25)));
        assert_eq!(found.memory_budget(Bytes::from_mib(300)), Some(Bytes::from_mib(100)));
        assert_eq!(found.memory_budget(Bytes::from_mib(210)), None, "10 MiB are too little");
    }

    #[test]
    fn swapping_frees_uncompressed_share() {
        let swap =
            Change::Swap(CompressedSwap { swap_out_rate: BytesPerSecond(1e8), compression_ratio: 4.0 });
        let quiet = BackgroundLoad::initial(Bytes::from_mib(400));
        assert_eq!(quiet.memory_budget(Bytes::from_mib(1000)), Some(Bytes::from_mib(600)));
        // 200 MiB are swapped out, and occupy 50 MiB when compressed.
        let swapped = |progress| quiet.with_event(&swap, progress).memory_budget(Bytes::from_mib(1000));
        assert_eq!(swapped(0.5), Some(Bytes::from_mib(750)));
        assert_eq!(swapped(1.0), Some(Bytes::from_mib(900)));
        assert_eq!(quiet.memory_budget(Bytes::from_mib(100)), Some(MIN_WEIGHT_CACHE));
    }
}
