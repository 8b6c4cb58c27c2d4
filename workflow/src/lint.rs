//! Checks a scenario and a plan, and lists errors and warnings.
//!
//! Not here: the rules (`hearth_halda::lint`).

use std::path::Path;

use hearth_core::Cluster;
use hearth_halda::lint::{self, Finding};
use hearth_profiles::Bytes;

use crate::documents::read_unchecked_plan;
use crate::{Budget, Error, ErrorKind, LoadedScenario, limits, planning};

/// Returns the findings about a scenario and a plan, the most severe first. Without a plan file, a plan is made with
/// the options of the scenario. `model` is a file that replaces the model of the scenario.
pub fn findings(
    loaded: &LoadedScenario,
    plan: Option<&Path>,
    model: Option<&Path>,
    budget: Budget,
) -> Result<Vec<Finding>, Error> {
    let mut cluster = loaded.cluster_without_memory_limits(model)?;
    let mut found = lint::check_scenario(&loaded.scenario, &cluster);
    limits::apply_absolute_memory_limits(&loaded.scenario, &mut cluster);
    found.extend(plan_findings(plan, loaded, cluster, budget)?);
    found.sort_by_key(|finding| finding.severity);
    Ok(found)
}

fn plan_findings(
    plan: Option<&Path>,
    loaded: &LoadedScenario,
    mut cluster: Cluster,
    budget: Budget,
) -> Result<Vec<Finding>, Error> {
    let plan = match plan {
        Some(path) => match read_unchecked_plan(path)? {
            Ok(plan) => plan,
            Err(error) => {
                let (place, fix) = (path.display().to_string(), "correct the plan, or make a new plan");
                return Ok(vec![Finding::error("plan-invalid", place, error.what(), fix)]);
            }
        },
        None => match planning::read_or_make(None, loaded, &cluster, budget) {
            Ok(plan) => plan,
            Err(error) if error.kind() == ErrorKind::Invalid => {
                let fix = error.hint_text().unwrap_or("try another strategy or a smaller model").to_owned();
                return Ok(vec![Finding::error("no-plan", "scenario", error.what(), fix)]);
            }
            Err(error) => return Err(error),
        },
    };
    limits::apply_memory_limits(&loaded.scenario, &mut cluster, &plan, Bytes::ZERO);
    let slow_disk = loaded.scenario.planner.slow_disk;
    let mut found = lint::check_plan(&plan, &loaded.origin, &cluster, slow_disk);
    found.extend(lint::events_after_end(&loaded.scenario, &plan));
    Ok(found)
}
