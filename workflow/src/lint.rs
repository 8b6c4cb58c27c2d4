//! Checks a scenario and a plan, and returns errors and warnings as findings.
//!
//! Not here: the lint rules (`hearth_halda::lint`).

use std::path::Path;

use hearth_core::Cluster;
use hearth_halda::lint::{self, Finding};
use hearth_profiles::{Bytes, Document, DocumentError};
use hearth_schema::Plan;

use crate::documents::read_text;
use crate::{Error, ErrorKind, LoadedScenario, SearchBudget, limits, planning};

/// Returns the findings about a scenario and a plan, the most severe first. Without a plan file (`plan`), a plan is
/// made with the options of the scenario. `model` is a file that replaces the model of the scenario.
pub fn findings(
    loaded: &LoadedScenario,
    plan: Option<&Path>,
    model: Option<&Path>,
    budget: SearchBudget,
) -> Result<Vec<Finding>, Error> {
    let mut cluster = loaded.resolve_cluster_without_memory_limits(model)?;
    let mut found = lint::check_scenario(&loaded.scenario, &cluster);
    limits::apply_absolute_memory_limits(&loaded.scenario, &mut cluster);
    match plan_or_finding(plan, loaded, &cluster, budget)? {
        Ok(plan) => {
            limits::apply_memory_limits(&loaded.scenario, &mut cluster, &plan, Bytes::ZERO);
            let slow_disk = loaded.scenario.planner.slow_disk_threshold;
            found.extend(lint::check_plan(&plan, &loaded.record, &cluster, slow_disk));
            found.extend(lint::check_event_times(&loaded.scenario, &plan));
        }
        Err(finding) => found.push(finding),
    }
    found.sort_by_key(|finding| finding.severity);
    Ok(found)
}

/// Reads the plan in the file `plan`, or makes a plan if it is `None`. Returns a finding if the file has invalid
/// values, or if no plan can be made for the scenario.
fn plan_or_finding(
    plan: Option<&Path>,
    loaded: &LoadedScenario,
    cluster: &Cluster,
    budget: SearchBudget,
) -> Result<Result<Plan, Finding>, Error> {
    if let Some(path) = plan {
        return match Plan::from_yaml(&read_text(path)?) {
            Err(error @ DocumentError::Invalid { .. }) => {
                let (location, fix) = (path.display().to_string(), "correct the plan, or make a new plan");
                Ok(Err(Finding::error("plan-invalid", location, error.message(), fix)))
            }
            read => read.map(Ok).map_err(|error| Error::from_document_error(path, &error)),
        };
    }
    match planning::read_or_make_plan(None, loaded, cluster, budget) {
        Err(error) if error.kind() == ErrorKind::Invalid => {
            let fix = error.hint_text().unwrap_or("try a different strategy or a smaller model");
            Ok(Err(Finding::error("no-plan", "scenario", error.one_line_message(), fix)))
        }
        made => made.map(Ok),
    }
}
