//! The random numbers of a seed.
//!
//! Each instance draws from a stream of its own, so that instance 17 is the same whatever the number of
//! instances and of threads. Only additions and products turn random bits into numbers: they are exact on every
//! machine, which powers and logarithms are not.
//!
//! Not here: what is drawn ([`crate::devices`], [`crate::clusters`]).

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

pub struct Random(ChaCha8Rng);

impl Random {
    pub fn new(seed: u64, instance: u64) -> Self {
        let mut generator = ChaCha8Rng::seed_from_u64(seed);
        generator.set_stream(instance);
        Self(generator)
    }

    /// In [0, 1), uniform.
    fn share(&mut self) -> f64 {
        (self.0.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Between two numbers, uniform.
    pub fn between(&mut self, [from, to]: [f64; 2]) -> f64 {
        from + (to - from) * self.share()
    }

    /// Between two numbers, smaller ones more often: half of all lie in the first quarter.
    pub fn skewed(&mut self, [from, to]: [f64; 2]) -> f64 {
        let share = self.share();
        from + (to - from) * share * share
    }

    /// One of several, equally likely.
    pub fn pick<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[(self.share() * items.len() as f64) as usize]
    }

    /// A whole number between two, both included.
    pub fn count(&mut self, [from, to]: [u32; 2]) -> u32 {
        from + (self.share() * f64::from(to - from + 1)) as u32
    }
}
