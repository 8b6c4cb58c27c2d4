//! Random numbers that are the same on every machine.
//!
//! Each instance has its own random stream, so that, for example, instance 17 does not depend on the number of
//! instances and threads. Random bits are converted to numbers only with additions and multiplications, whose results
//! are the same on every machine, unlike those of powers and logarithms.
//!
//! Not here: the random devices and clusters ([`crate::devices`], [`crate::clusters`]).

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

pub struct InstanceRng(ChaCha8Rng);

impl InstanceRng {
    pub fn new(seed: u64, instance: u64) -> Self {
        let mut generator = ChaCha8Rng::seed_from_u64(seed);
        generator.set_stream(instance);
        Self(generator)
    }

    /// Returns a uniform number in [0, 1).
    fn unit(&mut self) -> f64 {
        (self.0.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }

    pub fn uniform(&mut self, [from, to]: [f64; 2]) -> f64 {
        from + (to - from) * self.unit()
    }

    /// Returns a random number in a range; half of these numbers are in the lowest quarter of the range.
    pub fn skewed_low(&mut self, [from, to]: [f64; 2]) -> f64 {
        let unit = self.unit();
        from + (to - from) * unit * unit
    }

    pub fn pick<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[(self.unit() * items.len() as f64) as usize]
    }

    /// Returns a uniform integer between two integers, both included.
    pub fn uniform_integer(&mut self, [from, to]: [u32; 2]) -> u32 {
        from + (self.unit() * f64::from(to - from + 1)) as u32
    }
}
