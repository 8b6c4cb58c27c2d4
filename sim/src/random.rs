//! Random streams: one for each purpose, sequence and index of a run.
//!
//! The index is a token position, device, chunk, channel or wire. A further draw from one stream does not change the others.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// Bit offset of the purpose in a stream's number; the lower bits are the index.
const PURPOSE_SHIFT: u32 = 40;
/// Bit offset of the sequence in a stream's number.
const SEQUENCE_SHIFT: u32 = 44;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamPurpose {
    EmbeddingRow = 1,
    /// Whether a draft is accepted.
    Acceptance = 2,
    /// How much memory a device's process needs in addition to the memory that the device profile states.
    ProcessMemory = 3,
    Wifi = 4,
    /// Which chunk the random page cache evicts.
    Eviction = 5,
    /// Whether a page boundary lies inside a load instruction.
    PageBoundary = 6,
    /// Delays of a wire with jitter or TCP.
    Wire = 7,
}

/// Returns the random stream of an index in a sequence; `sequence` is 0 for purposes that do not depend on a sequence.
pub fn stream(seed: u64, purpose: StreamPurpose, sequence: u32, index: u64) -> ChaCha8Rng {
    let mut stream = ChaCha8Rng::seed_from_u64(seed);
    let below = index & ((1 << PURPOSE_SHIFT) - 1);
    stream.set_stream((purpose as u64) << PURPOSE_SHIFT | u64::from(sequence) << SEQUENCE_SHIFT | below);
    stream
}

/// Draws a uniformly distributed number from [0, 1).
pub fn draw_uniform(stream: &mut impl Rng) -> f64 {
    (stream.next_u64() >> 11) as f64 / (1u64 << 53) as f64
}

/// Draws the first number of the random stream that [`stream`] returns, uniformly distributed in [0, 1).
pub fn draw(seed: u64, purpose: StreamPurpose, sequence: u32, index: u64) -> f64 {
    draw_uniform(&mut stream(seed, purpose, sequence, index))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_are_distinct() {
        use StreamPurpose::{Acceptance, EmbeddingRow, Eviction, PageBoundary, ProcessMemory, Wifi, Wire};
        let mut first = Vec::new();
        for purpose in [EmbeddingRow, Acceptance, ProcessMemory, Wifi, Eviction, PageBoundary, Wire] {
            for sequence in [0, 1, 15, 16, 300] {
                for index in [0, 1, 2, 256, 1 << 32] {
                    first.push(stream(1, purpose, sequence, index).next_u64());
                }
            }
        }
        let all = first.len();
        first.sort_unstable();
        first.dedup();
        assert_eq!(first.len(), all);
    }
}
