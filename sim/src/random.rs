//! Whose are which random numbers?
//!
//! Every draw of a run comes from a stream that belongs to the run's seed, to a purpose, and to what it is drawn for: a
//! sequence, a position, a device, a channel. So one more draw in one place disturbs nothing elsewhere.
//!
//! Not here: what is drawn.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// Where a stream's number has the purpose; below it is what the stream is for.
const PURPOSE: u32 = 40;
/// Where it has the sequence.
const SEQUENCE: u32 = 44;

/// What is drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Which embedding row a token needs.
    EmbeddingRow = 1,
    /// Whether a draft is accepted.
    Acceptance = 2,
    /// How much a process holds.
    Process = 3,
    /// Stalls, delays and losses of a channel.
    Wifi = 4,
    /// Which chunk a cache evicts that evicts at random.
    Eviction = 5,
    /// Whether a border of pages lies inside a load.
    PageBorder = 6,
}

/// The stream of one thing of a sequence; 0 where there are no sequences.
pub fn stream(seed: u64, purpose: Purpose, sequence: u32, thing: u64) -> ChaCha8Rng {
    let mut stream = ChaCha8Rng::seed_from_u64(seed);
    let below = thing & ((1 << PURPOSE) - 1);
    stream.set_stream((purpose as u64) << PURPOSE | u64::from(sequence) << SEQUENCE | below);
    stream
}

/// The next number from 0 to below 1 of a stream.
pub fn uniform(stream: &mut impl Rng) -> f64 {
    (stream.next_u64() >> 11) as f64 / (1u64 << 53) as f64
}

/// The first number from 0 to below 1 of a stream.
pub fn draw(seed: u64, purpose: Purpose, sequence: u32, thing: u64) -> f64 {
    uniform(&mut stream(seed, purpose, sequence, thing))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_things_share_a_stream() {
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
                for thing in [0, 1, 2, 256, 1 << 32] {
                    first.push(stream(1, purpose, sequence, thing).next_u64());
                }
            }
        }
        let all = first.len();
        first.sort_unstable();
        first.dedup();
        assert_eq!(first.len(), all);
    }
}
