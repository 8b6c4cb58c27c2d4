//! Random streams: one for each (seed, purpose, subject) of a run.
//!
//! The subject is a sequence, a position, a device or a channel. One more draw in one place changes nothing elsewhere.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// The position of the purpose in a stream's number; the bits below are the subject.
const PURPOSE: u32 = 40;
/// The position of the sequence.
const SEQUENCE: u32 = 44;

/// The purpose of a draw.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// The embedding row that a token needs.
    EmbeddingRow = 1,
    /// Whether a draft is accepted.
    Acceptance = 2,
    /// The memory that a process holds beyond its profile.
    Process = 3,
    Wifi = 4,
    /// The chunk that the random page cache evicts.
    Eviction = 5,
    /// Whether a border of pages lies inside a load.
    PageBorder = 6,
}

/// Returns the stream of a subject; `sequence` is 0 where there are no sequences.
pub fn stream(seed: u64, purpose: Purpose, sequence: u32, entity: u64) -> ChaCha8Rng {
    let mut stream = ChaCha8Rng::seed_from_u64(seed);
    let below = entity & ((1 << PURPOSE) - 1);
    stream.set_stream((purpose as u64) << PURPOSE | u64::from(sequence) << SEQUENCE | below);
    stream
}

/// Draws a number from [0, 1).
pub fn uniform(stream: &mut impl Rng) -> f64 {
    (stream.next_u64() >> 11) as f64 / (1u64 << 53) as f64
}

/// Draws the first number from [0, 1) of a stream.
pub fn draw(seed: u64, purpose: Purpose, sequence: u32, entity: u64) -> f64 {
    uniform(&mut stream(seed, purpose, sequence, entity))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_are_distinct() {
        let purposes = [
            Purpose::EmbeddingRow,
            Purpose::Acceptance,
            Purpose::Process,
            Purpose::Wifi,
            Purpose::Eviction,
            Purpose::PageBorder,
        ];
        let mut first = Vec::new();
        for purpose in purposes {
            for sequence in [0, 1, 15, 16, 300] {
                for entity in [0, 1, 2, 256, 1 << 32] {
                    first.push(stream(1, purpose, sequence, entity).next_u64());
                }
            }
        }
        let all = first.len();
        first.sort_unstable();
        first.dedup();
        assert_eq!(first.len(), all);
    }
}
