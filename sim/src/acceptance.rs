//! Which drafted tokens does the large model accept?
//!
//! Nobody knows without the two models. Each drafted position is accepted with the workload's chance, if all drafts
//! before it were (Leviathan et al., 2023, section 2.3: acceptances as independent draws). The draw belongs to the
//! sequence and the position, and a position is looked at once: after a rejection the token that stands there is the
//! large model's own. So the number of drafts does not disturb the draws.
//!
//! Not here: what acceptance does to the positions (`hearth_schema::schedule::Generation`).

use hearth_schema::scenario::Workload;
use hearth_schema::schedule::Pass;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// Which random stream decides; sequences and positions are added to it.
const ACCEPTANCE: u64 = 1 << 41;
/// Where a stream's number has the sequence; below it is the position.
const SEQUENCE: u32 = 44;

/// Draws for one run.
#[derive(Debug, Clone, Copy)]
pub struct Acceptance {
    seed: u64,
    chance: f64,
}

impl Acceptance {
    /// The draws of a run.
    pub fn new(seed: u64, workload: &Workload) -> Self {
        let chance = workload.speculation.as_ref().map_or(0.0, |speculation| speculation.acceptance.value.0);
        Self { seed, chance }
    }

    /// How many of a pass's drafts stand.
    pub fn of(&self, pass: Pass) -> u32 {
        let stands = |&draft: &u32| {
            share(self.seed, ACCEPTANCE, pass.sequence, pass.first_position + draft) < self.chance
        };
        (1..=pass.drafted).take_while(stands).count() as u32
    }
}

/// A draw from 0 to below 1 that belongs to a purpose, a sequence and a position.
pub fn share(seed: u64, purpose: u64, sequence: u32, position: u32) -> f64 {
    let mut stream = ChaCha8Rng::seed_from_u64(seed);
    stream.set_stream(purpose | u64::from(sequence) << SEQUENCE | u64::from(position));
    (stream.next_u64() >> 11) as f64 / (1u64 << 53) as f64
}
