//! Conversion of a solution to a plan document.
//!
//! The devices of the document are in ring order from the head. A relay ([`crate::solvers::relays`]) has a window of 0.

mod reasons;

use hearth_core::Cluster;
use hearth_core::memory::{MemoryBudget, draft};
use hearth_profiles::Seconds;
use hearth_profiles::document::{Document, DocumentError};
use hearth_schema::plan::{
    DroppedDevice, Plan, PlanKind, PlanPrediction, PlannedDevice, PlannedModel, PlannerRecord,
    PredictedTerms, Processor, Role, ScenarioRecord,
};

use crate::solvers::overlap::best_residencies;
use crate::{
    Assignment, Device, DeviceExplanation, DeviceTerms, DropReason, Explanation, LatencyModel, Solution,
    Violation,
};
use reasons::{drop_reason_text, explanation_sentences};

/// Why a solution or an assignment cannot be converted to a plan document.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum PlanError {
    #[error("the solution has {solved} devices, one of which is not in the cluster: `{name}`")]
    OtherCluster { name: String, solved: usize },
    #[error("the plan is not valid: {0}")]
    Invalid(#[from] DocumentError),
    #[error(transparent)]
    Violation(#[from] Violation),
}

/// Converts a solution to a plan document. The solved instance must be [`crate::Instance::from_cluster`] of `cluster`.
/// Fails if the cluster lacks a device of the solution, or the plan is not valid.
pub fn plan_from_solution(
    solution: &Solution,
    cluster: &Cluster,
    scenario: &ScenarioRecord,
) -> Result<Plan, PlanError> {
    let Solution { assignment, breakdown, residencies, .. } = solution;
    let explained = &solution.explanation.devices;
    let (mut devices, mut dropped) = (Vec::new(), Vec::new());
    for index in assignment.ring_then_unused_devices() {
        let name = explained[index].name.clone();
        let Some(member) = cluster.member(&name) else {
            return Err(PlanError::OtherCluster { name, solved: explained.len() });
        };
        let is_relay = assignment.is_relay(index);
        if let Some(reason) = drop_reason_text(&explained[index]).filter(|_| !is_relay) {
            dropped.push(DroppedDevice { name, reason });
            continue;
        }
        devices.push(PlannedDevice {
            name,
            address: member.address.clone(),
            role: match index {
                _ if is_relay => Role::Relay,
                _ if index == assignment.head => Role::Head,
                _ => Role::Worker,
            },
            window: assignment.window_layers[index],
            gpu_layers: assignment.gpu_layers[index],
            residency: residencies[index],
            predicted_terms: Some(predicted(&breakdown.devices[index])),
        });
    }
    let planner =
        PlannerRecord { strategy: solution.strategy.to_owned(), options: solution.strategy_options.clone() };
    let mut plan = Plan {
        rounds: assignment.rounds,
        draft_model: draft::planned_draft(cluster),
        devices,
        dropped_devices: dropped,
        prediction: Some(PlanPrediction { tpot: Seconds(solution.seconds_per_token()) }),
        explanation: explanation_sentences(solution),
        ..empty_plan(cluster, scenario, planner)
    };
    plan.output_processor = output_processor(&plan, cluster);
    plan.validate()?;
    Ok(plan)
}

/// Returns a plan document with one round and no devices, to which a planner adds its devices.
pub fn empty_plan(cluster: &Cluster, scenario: &ScenarioRecord, planner: PlannerRecord) -> Plan {
    Plan {
        schema: Plan::SCHEMA.to_owned(),
        scenario: scenario.clone(),
        model: PlannedModel::from_profile(&cluster.model),
        planner,
        kind: PlanKind::Ring,
        rounds: 1,
        context_length: cluster.context_length,
        kv_cache_format: cluster.kv_cache_format,
        activation_format: cluster.activation_format,
        output_processor: Processor::Cpu,
        sequences: cluster.workload.sequences,
        cache_tokens: None,
        draft_model: None,
        devices: Vec::new(),
        dropped_devices: Vec::new(),
        prediction: None,
        explanation: Vec::new(),
    }
}

/// Converts an assignment to a plan document without an explanation, for a search that scores many plans. Fails if the
/// assignment violates a constraint, or the plan is not valid.
pub fn plan_from_assignment(
    model: &LatencyModel,
    assignment: &Assignment,
    cluster: &Cluster,
    scenario: &ScenarioRecord,
) -> Result<Plan, PlanError> {
    let explained = |(device, window): (&Device, &u32)| DeviceExplanation {
        name: device.name.clone(),
        drop_reason: (*window == 0).then_some(DropReason::NoLayerLeft),
        ..DeviceExplanation::default()
    };
    let devices = model.instance().devices.iter().zip(&assignment.window_layers).map(explained).collect();
    let residencies = best_residencies(model, assignment).unwrap_or_default();
    let breakdown = model.evaluate_steady_state(assignment, &residencies)?;
    let explanation = Explanation { devices, ..Explanation::default() };
    let (assignment, strategy_options) = (assignment.clone(), Vec::new());
    let solution =
        Solution { strategy: "refine", strategy_options, assignment, residencies, breakdown, explanation };
    let mut draft = plan_from_solution(&solution, cluster, scenario)?;
    // The sentences would explain a search that was not run.
    draft.explanation.clear();
    Ok(draft)
}

/// Returns the processor that computes the output head: the GPU of the head device if all layers of that device are on
/// the GPU and the output head fits beside them, because llama.cpp offloads the output head like a further layer.
/// Deviation: in the prima.cpp paper the output head is always on the CPU (appendix A.3), which contradicts the paper's
/// 15 and 20 ms per token for 8B and 14B.
fn output_processor(plan: &Plan, cluster: &Cluster) -> Processor {
    let on_gpu = Plan { output_processor: Processor::Gpu, ..plan.clone() };
    let head = plan.devices.first().filter(|head| head.window > 0 && head.gpu_layers == head.window);
    let device = head.and_then(|head| cluster.member(&head.name)).map(|member| &member.device);
    let left =
        device.and_then(|device| draft::device_without_draft(plan, 0, cluster.draft_model.as_ref(), device));
    let fits = left.is_some_and(|device| {
        let needed = MemoryBudget::new(&on_gpu, 0, &cluster.model, &device).needed_gpu_memory;
        device.gpu.as_ref().is_some_and(|gpu| needed <= gpu.memory_available.value)
    });
    if fits { Processor::Gpu } else { Processor::Cpu }
}

fn predicted(terms: &DeviceTerms) -> PredictedTerms {
    PredictedTerms {
        compute: Seconds(terms.compute_seconds),
        memory: Seconds(terms.memory_seconds),
        disk: Seconds(terms.disk_seconds),
        communication: Seconds(terms.communication_seconds),
    }
}
