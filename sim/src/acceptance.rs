//! Which drafted tokens does the large model accept?
//!
//! Nobody knows without the two models. Each drafted position is accepted with the workload's chance, if all drafts
//! before it were (Leviathan et al., 2023, section 2.3: acceptances as independent draws). The draw belongs to the
//! sequence and the position, and a position is looked at once: after a rejection the token that stands there is the
//! large model's own. So the number of drafts does not disturb the draws.
//!
//! Not here: what acceptance does to the positions (`hearth_core::schedule::Generation`).

use hearth_schema::pass::Pass;
use hearth_schema::scenario::Workload;

use crate::streams::{self, Purpose};

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
            let position = u64::from(pass.first_position + draft);
            streams::draw(self.seed, Purpose::Acceptance, pass.sequence, position) < self.chance
        };
        (1..=pass.drafted).take_while(stands).count() as u32
    }
}
