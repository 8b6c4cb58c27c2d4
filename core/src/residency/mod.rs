//! Managed residency: keeps a set of weight pieces in memory and streams the others.
//!
//! [`ManagedResidency`] is the state machine that simulator and executor both interpret. [`ExpertResidency`] is the part
//! for experts, of which a token uses a few. The functions here compute how many bytes fit at most.

mod eviction_order;
mod experts;
mod kept_budget;
mod managed;

use hearth_schema::residency::ResidencyOptions;

use eviction_order::EvictionOrder;
pub use experts::{ExpertResidency, in_use_bytes};
use kept_budget::KeptBudget;
pub use managed::{Event, ManagedResidency, PieceId, ReadOrigin, ReadOutcome, Step, WeightPart};

/// Returns how many bytes of a device's weights can be kept in memory: `available` minus the kernel's memory for the
/// weights, a margin and the stream buffer. If all weights can be kept, no buffer is needed. `available` is the page
/// cache in bytes that is free before the weights are read, `weights` the size of all weights of the device in bytes,
/// and `cpus` the number of CPUs.
pub fn kept_bytes(available: u64, weights: u64, cpus: u32, options: &ResidencyOptions) -> u64 {
    let max = options.max_kept_bytes(weights);
    let budget = weight_budget(available, weights, cpus);
    let buffer = stream_buffer_bytes(available, weights, cpus, options);
    if budget.min(max) >= weights { weights } else { budget.saturating_sub(buffer).min(max) }
}

/// Returns the size of the stream buffer in bytes: the configured size, but at most half of the memory for weights.
/// Pieces in a buffer that does not fit would be evicted before their use.
pub fn stream_buffer_bytes(available: u64, weights: u64, cpus: u32, options: &ResidencyOptions) -> u64 {
    options.stream_buffer_bytes().0.min(weight_budget(available, weights, cpus) / 2)
}

/// Whether `weights` bytes of weights, the kernel's memory for these weights and a margin fit in `available` bytes.
pub fn weights_fit(available: u64, weights: u64, cpus: u32) -> bool {
    weights <= weight_budget(available, weights, cpus)
}

/// Returns the part of the available page cache that weights can use, in bytes.
fn weight_budget(available: u64, weights: u64, cpus: u32) -> u64 {
    available.saturating_sub(page_metadata_bytes(weights) + margin(cpus))
}

/// Returns the memory of the kernel, in bytes, for `weights` bytes of weights that have been read completely: a page
/// table entry for each page, and a node of the page cache's tree for every 64 pages. Eviction does not free this
/// memory.
/// source: computed, 8 bytes for each 4096 bytes and 576 for each 262144 bytes; 0.32 % to 0.43 % were measured
pub fn page_metadata_bytes(weights: u64) -> u64 {
    weights / 4096 * 8 + weights / (64 * 4096) * 576
}

/// Returns the bytes that must stay free below a memory limit: 1 MiB, and a batch of charges per CPU
/// (`MEMCG_CHARGE_BATCH` of mm/memcontrol.c, 64 pages).
/// source: measured; with less than 1 MiB free in a memory control group, the kept set is evicted
fn margin(cpus: u32) -> u64 {
    (1 << 20) + u64::from(cpus) * (256 << 10)
}

#[cfg(test)]
mod tests {
    use hearth_profiles::Bytes;
    use hearth_schema::residency::Residency;

    use super::*;

    #[test]
    fn kept_set_leaves_memory_for_the_buffer_and_the_kernel() {
        let (options, share) = (ResidencyOptions::with_policy(Residency::Managed), 200 << 20);
        // 8 MiB buffer, a margin of 1 MiB plus 1 MiB for four CPUs, and 870400 bytes of the kernel.
        assert_eq!(kept_bytes(128 << 20, share, 4, &options), ((128 - 8 - 2) << 20) - 870_400);
        let large = ResidencyOptions { stream_buffer: Some(Bytes(1 << 40)), ..options };
        let budget = kept_bytes(128 << 20, share, 4, &options) + (8 << 20);
        assert_eq!(stream_buffer_bytes(128 << 20, share, 4, &large), budget / 2, "a large buffer shrinks");
        assert_eq!(kept_bytes(128 << 20, share, 4, &large), budget - budget / 2);
        assert_eq!(kept_bytes(2 << 20, share, 4, &options), 0);
        assert_eq!(kept_bytes(1 << 30, share, 4, &options), share);
        assert_eq!(kept_bytes(share + (3 << 20), share, 4, &options), share, "no buffer is needed");
        assert_eq!(kept_bytes(share, share, 4, &options), share - ((8 + 2) << 20) - 870_400);
        let less = ResidencyOptions { kept_set_limit: Some(Bytes::from_mib(64)), ..options };
        assert_eq!(kept_bytes(128 << 20, share, 4, &less), 64 << 20);
        assert_eq!(kept_bytes(32 << 20, share, 4, &less), kept_bytes(32 << 20, share, 4, &options));
    }
}
