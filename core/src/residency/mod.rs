//! Managed residency: keeps a set of weight pieces in memory and streams the others.
//!
//! [`ManagedResidency`] is the state machine that the simulator and the executor both interpret. [`Share`] ranks the
//! pieces of a device, [`KeptBudget`] says how many bytes of them are kept as memory comes and goes, and the
//! functions here how many bytes fit at all.

mod kept_budget;
mod managed;
mod share;

use hearth_schema::residency::ResidencyOptions;

pub use kept_budget::KeptBudget;
pub use managed::{Event, ManagedResidency, PartRequest, PieceId, ReadOrigin, ReadOutcome, Step};
pub use share::Share;

/// The bytes of a share that can be kept where page cache has `room` before the share is touched.
///
/// That is the room less the kernel's memory for the share, a margin, and the stream buffer, unless all of the share is
/// kept and nothing streams. Measured: with less than 1 MiB left below the limit of a memory control group a
/// kept set is lost, with more nothing is.
pub fn kept_bytes(room: u64, share: u64, processors: u32, options: &ResidencyOptions) -> u64 {
    let most = options.max_kept(share);
    let left = left(room, share, processors);
    let buffer = stream_bytes(room, share, processors, options);
    if left.min(most) >= share { share } else { left.saturating_sub(buffer).min(most) }
}

/// The size of the stream buffer: the options', but at most half of the rest. A buffer that does not fit would be
/// evicted before it is used.
pub fn stream_bytes(room: u64, share: u64, processors: u32, options: &ResidencyOptions) -> u64 {
    options.buffer().0.min(left(room, share, processors) / 2)
}

/// Whether a share stays in a page cache of `room` bytes: the kernel's own memory and the margin must fit as well.
pub fn fits(room: u64, share: u64, processors: u32) -> bool {
    share <= left(room, share, processors)
}

/// The part of the room for weights.
fn left(room: u64, share: u64, processors: u32) -> u64 {
    room.saturating_sub(kernel_bytes(share) + margin(processors))
}

/// The kernel's memory for a share whose pages have all been touched: an entry of the page table for each page, and a
/// node of the page cache's tree for every 64. It stays when a page is evicted.
/// source: computed, 8 bytes for 4096 and 576 for 262144; 0.32 % to 0.43 % were measured
pub fn kernel_bytes(share: u64) -> u64 {
    share / 4096 * 8 + share / (64 * 4096) * 576
}

/// The bytes left free below a limit: the measured minimum, and a stock of charges a processor
/// (`MEMCG_CHARGE_BATCH` of mm/memcontrol.c, 64 pages).
fn margin(processors: u32) -> u64 {
    (1 << 20) + u64::from(processors) * (256 << 10)
}

#[cfg(test)]
mod tests {
    use hearth_profiles::Bytes;
    use hearth_schema::residency::Residency;

    use super::*;

    #[test]
    fn what_is_kept_leaves_room_for_the_buffer_and_the_kernel() {
        let (options, share) = (ResidencyOptions::of(Residency::Managed), 200 << 20);
        // Page tables and tree nodes of the share, and 1 MiB with another for four processors.
        assert_eq!(kept_bytes(128 << 20, share, 4, &options), ((128 - 8 - 2) << 20) - 870_400);
        let large = ResidencyOptions { stream_buffer: Some(Bytes(1 << 40)), ..options };
        let left = kept_bytes(128 << 20, share, 4, &options) + (8 << 20);
        assert_eq!(stream_bytes(128 << 20, share, 4, &large), left / 2, "a buffer that does not fit shrinks");
        assert_eq!(kept_bytes(128 << 20, share, 4, &large), left - left / 2);
        assert_eq!(kept_bytes(2 << 20, share, 4, &options), 0);
        assert_eq!(kept_bytes(1 << 30, share, 4, &options), share);
        assert_eq!(kept_bytes(share + (3 << 20), share, 4, &options), share, "all of it needs no buffer");
        assert_eq!(kept_bytes(share, share, 4, &options), share - ((8 + 2) << 20) - 870_400);
        let less = ResidencyOptions { kept: Some(Bytes::mib(64)), ..options };
        assert_eq!(kept_bytes(128 << 20, share, 4, &less), 64 << 20);
        assert_eq!(kept_bytes(32 << 20, share, 4, &less), kept_bytes(32 << 20, share, 4, &options));
    }
}
