//! What would be gained by another device, disk, network or model?
//!
//! Each variant is the scenario with one thing changed ([`variants`]). It is planned again by the same planner and
//! simulated as `hearth simulate` does, so that a variant's gain is what a new plan makes of it, not what the old plan
//! would. Variants do not add up: two that save a second each may save nothing more together.
//!
//! Not here: how the answer is printed (`commands::whatif`).

pub mod variants;

use hearth_profiles::Device;
use hearth_profiles::model::ModelProfile;
use hearth_schema::metrics;
use serde::Serialize;

use crate::commands::{plan, simulate};
use crate::diagnostics::Failure;
use crate::documents::LoadedScenario;
use crate::limits;
use crate::refinement::Effort;
use crate::sweep::row::{Planned, Ran, word};

/// What came of a scenario.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Tried {
    /// The plan, if there is one.
    #[serde(flatten)]
    pub plan: Option<Planned>,
    /// The run, if it came to its end.
    #[serde(flatten)]
    pub ran: Option<Ran>,
    /// `ok`, or why there is no plan or no run.
    pub outcome: String,
}

impl Tried {
    /// Nothing, for a reason.
    pub fn refused(why: impl Into<String>) -> Self {
        Self { plan: None, ran: None, outcome: why.into().replace('\n', " ") }
    }

    /// Mean time of a token after the first, of a run that came to its end.
    pub fn tpot_ms(&self) -> Option<f64> {
        self.ran.and_then(|ran| ran.tpot_ms)
    }
}

/// Plans and simulates a scenario with these devices, in its order, and this model.
pub fn attempt(loaded: &LoadedScenario, devices: Vec<Device>, model: ModelProfile, effort: Effort) -> Tried {
    let mut tried = Tried::refused("");
    if let Err(failure) = fill(&mut tried, loaded, (devices, model), effort) {
        tried.outcome = failure.reason();
    }
    tried
}

fn fill(
    tried: &mut Tried,
    loaded: &LoadedScenario,
    (devices, model): (Vec<Device>, ModelProfile),
    effort: Effort,
) -> Result<(), Failure> {
    let scenario = &loaded.scenario;
    let mut cluster = loaded.assemble(devices, model, loaded.draft_profile()?)?;
    limits::bound_memory(scenario, &mut cluster);
    let plan = plan::make(loaded, &cluster, &scenario.planner, effort)?;
    tried.plan = Some(Planned::of(&plan));
    let run = simulate::as_it_says(loaded, cluster, &plan, effort)?;
    let metrics = metrics::compute(&run.trace);
    word(metrics.outcome).clone_into(&mut tried.outcome);
    tried.ran = Ran::of(&metrics);
    Ok(())
}
