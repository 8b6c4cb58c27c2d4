//! Findings about a plan as a whole. Findings about a single device of a plan are in `devices`.

use hearth_core::Cluster;
use hearth_core::memory::{MemoryBudget, draft};
use hearth_profiles::{Bytes, BytesPerSecond, Document, Seconds};
use hearth_schema::Plan;
use hearth_schema::plan::{PlannedDevice, Role, ScenarioRecord};

use super::devices::DeviceCheck;
use super::{Finding, pinned, speed};
use crate::problem::SLOW_DISK_THRESHOLD;

/// The fraction of the time per token above which hops take too long. source: assumed
const MAX_HOP_SHARE: f64 = 0.5;

/// Checks a plan for a scenario. The scenario's memory limits must already be applied to `cluster`. Disks slower than
/// `slow_disk` (by default [`SLOW_DISK_THRESHOLD`]) should not be read for every token.
pub fn check_plan(
    plan: &Plan,
    scenario: &ScenarioRecord,
    cluster: &Cluster,
    slow_disk: Option<BytesPerSecond>,
) -> Vec<Finding> {
    if let Err(error) = plan.validate() {
        let fix = "correct the plan, or plan again from this scenario";
        return vec![Finding::error("plan-invalid", "plan", error.message(), fix)];
    }
    let mut found = origin(plan, scenario, cluster);
    if found.iter().any(|finding| matches!(finding.code, "other-model" | "unknown-device" | "other-draft")) {
        return found;
    }
    if plan.simulation_only_reason().is_some() {
        found.extend(pinned::findings(plan, cluster));
        return found;
    }
    let cluster = &match cluster_beside_draft(plan, cluster) {
        Ok(cluster) => cluster,
        Err(finding) => {
            found.push(finding);
            return found;
        }
    };
    let check = |index: usize| {
        let planned = &plan.devices[index];
        let member = cluster.member(&planned.name)?;
        let budget = MemoryBudget::new(plan, index, &cluster.model, &member.device);
        let model = &cluster.model;
        Some(DeviceCheck { plan, device_index: index, planned_device: planned, member, model, budget })
    };
    let checks: Vec<DeviceCheck> = (0..plan.devices.len()).filter_map(check).collect();
    for check in &checks {
        found.extend(check.findings(slow_disk.unwrap_or(SLOW_DISK_THRESHOLD)));
    }
    experts(&checks, cluster, &mut found);
    rounds(plan, &checks, cluster, &mut found);
    addresses(plan, &mut found);
    found.extend(speed::findings(plan, cluster, slow_disk));
    found.extend(speed::slow_first_token(plan, cluster));
    found
}

/// Returns the cluster without the memory that the draft model takes on the head; a finding if its GPU memory is too
/// small.
fn cluster_beside_draft(plan: &Plan, cluster: &Cluster) -> Result<Cluster, Finding> {
    let mut left = cluster.clone();
    left.draft_model = None;
    let name = &plan.devices[0].name;
    for member in left.members.iter_mut().filter(|member| member.name == *name) {
        let Some(device) = draft::device_without_draft(plan, 0, cluster.draft_model.as_ref(), &member.device)
        else {
            let what = format!("the GPU of `{name}` cannot hold the draft model with its cache and buffers");
            let fix = "set `workload.speculation.processor: cpu`, or lower `context`";
            return Err(Finding::error("draft-memory", "plan draft", what, fix));
        };
        member.device = device.into_owned();
    }
    Ok(left)
}

fn origin(plan: &Plan, scenario: &ScenarioRecord, cluster: &Cluster) -> Vec<Finding> {
    let again = "plan again from this scenario";
    let mut found = Vec::new();
    let (planned, model) = (&plan.model, &cluster.model);
    if !planned.matches(model) {
        let what =
            format!("the plan is for `{}`, but the scenario's model is `{}`", planned.name, model.name);
        found.push(Finding::error("other-model", "plan model", what, again));
    }
    for (index, device) in plan.devices.iter().enumerate() {
        if cluster.member(&device.name).is_none() {
            let what = format!("the scenario has no device `{}`", device.name);
            let location = format!("plan devices[{index}] `{}`", device.name);
            found.push(Finding::error("unknown-device", location, what, again));
        }
    }
    if let Err(error) = draft::check_planned_draft(plan, cluster) {
        found.push(Finding::error("other-draft", "plan draft", error.to_string(), again));
    }
    if plan.scenario.digest != scenario.digest {
        let what = format!(
            "the plan was made from `{}` ({}), but this scenario is `{}` ({})",
            plan.scenario.name, plan.scenario.digest, scenario.name, scenario.digest
        );
        found.push(Finding::warning("other-scenario", "plan scenario", what, again));
    }
    if (plan.context_length, plan.kv_cache_format) != (cluster.context_length, cluster.kv_cache_format) {
        let formats = [plan.kv_cache_format, cluster.kv_cache_format]
            .map(|format| format!("{format:?}").to_lowercase());
        let what = format!(
            "the plan has a context of {} tokens and an {} KV cache, but the scenario has a context of {} \
             tokens and an {} KV cache",
            plan.context_length, formats[0], cluster.context_length, formats[1]
        );
        found.push(Finding::warning("other-context", "plan context", what, again));
    }
    found
}

fn rounds(plan: &Plan, checks: &[DeviceCheck], cluster: &Cluster, found: &mut Vec<Finding>) {
    if checks.iter().any(|check| !check.budget.fits) {
        // The plan cannot run, so advice about speed is useless.
        return;
    }
    let names = |checks: &mut dyn Iterator<Item = &DeviceCheck>| {
        checks.map(|check| format!("`{}`", check.planned_device.name)).collect::<Vec<_>>().join(", ")
    };
    let working = plan.devices.iter().filter(|device| device.window > 0).count();
    let round_hops = hops_of_round(plan, cluster);
    let over = || checks.iter().filter(|check| check.budget.reloads_weights());
    let prefetches = |check: &&DeviceCheck| check.planned_device.residency.prefetches();
    if plan.rounds > 1 && over().next().is_none() {
        let more = round_hops * f64::from(plan.rounds - 1);
        let what = format!(
            "all weights fit in memory, so {} rounds have no benefit: their additional hops take {more} per \
             token",
            plan.rounds
        );
        found.push(Finding::warning("rounds-without-reading", "plan rounds", what, "plan with `--rounds 1`"));
    }
    // These strategies have compared different numbers of rounds.
    let compared = matches!(plan.planner.strategy.as_str(), "overlap" | "refine");
    if !compared && plan.rounds == 1 && working > 1 && plan.model.layers as usize >= 2 * working {
        let reading = names(&mut over().filter(prefetches));
        if !reading.is_empty() {
            let what = format!(
                "the weights of {reading} exceed memory, and with one round little of their disk reading overlaps with computation"
            );
            let fix = "compare with more rounds, such as `--rounds 2`";
            found.push(Finding::warning("one-round-over-memory", "plan rounds", what, fix));
        }
    }
    let (layers, ring) = (plan.model.layers, plan.layers_per_round());
    if !layers.is_multiple_of(ring) {
        let last = plan.rounds - 1;
        let idle = |check: &&DeviceCheck| {
            check.planned_device.window > 0 && plan.window(check.device_index, last).is_empty()
        };
        let idle = names(&mut checks.iter().filter(idle));
        let idle = if idle.is_empty() { "none".to_owned() } else { idle };
        let what = format!(
            "the last of {} rounds has only {} of {ring} layers; devices without layers in it: {idle}",
            plan.rounds,
            layers % ring
        );
        let fix = "to avoid it, choose windows whose sum divides the number of layers";
        found.push(Finding::note("partial-last-round", "plan rounds", what, fix));
    }
    let hops = round_hops * f64::from(plan.rounds);
    if let Some(predicted) = plan.prediction.filter(|predicted| hops.0 > MAX_HOP_SHARE * predicted.tpot.0) {
        let what = format!("hops take {hops} of the expected {} per token", predicted.tpot);
        let fix = "use fewer devices or rounds, or faster links";
        found.push(Finding::warning("hops-dominate", "plan devices", what, fix));
    }
}

/// Reports devices of a mixture that read experts from disk, because their number depends on the text, and those that
/// read nearly everything for every token.
fn experts(checks: &[DeviceCheck], cluster: &Cluster, found: &mut Vec<Finding>) {
    let Some(shape) = cluster.model.shape.experts else { return };
    for check in checks.iter().filter(|check| check.budget.reloads_weights()) {
        let (name, index) = (&check.planned_device.name, check.device_index);
        let cache = check.budget.max_resident_weights();
        let location = format!("plan devices[{index}] `{name}`");
        let layers = (0..check.plan.rounds).flat_map(|round| {
            let (window, gpu) = (check.plan.window(index, round), check.plan.gpu_window(index, round));
            gpu.end..window.end
        });
        let of_experts: Bytes = layers.map(|layer| cluster.model.layers[layer as usize].expert_bytes()).sum();
        let others = check.budget.weights.saturating_sub(of_experts);
        let of_token = Bytes(of_experts.0 / u64::from(shape.count.max(1)) * u64::from(shape.used));
        let fix = "give the device fewer layers or more memory, or use a smaller weight format";
        if cache < others {
            let what = format!(
                "the weights of `{name}` that every token uses, {others}, exceed its memory for weights, {cache}: a part of \
                 them is read from disk for every token, and most experts are"
            );
            found.push(Finding::warning("shared-weights-exceed-memory", location, what, fix));
        } else if cache < others + of_token {
            let left = cache.saturating_sub(others);
            let what = format!(
                "`{name}` has {left} of memory for experts, but a token uses {of_token} of them: some are read again for \
                 every token"
            );
            found.push(Finding::warning("token-experts-exceed-memory", location, what, fix));
        } else {
            let what = format!(
                "the experts of `{name}` exceed its memory: how many a token reads from disk depends on the text, and \
                 is predicted from the routes of one recorded model"
            );
            let fix =
                "record the routes of your own texts and simulate with `--routes FILE`, or use more memory";
            found.push(Finding::warning("experts-exceed-memory", location, what, fix));
        }
    }
}

fn hops_of_round(plan: &Plan, cluster: &Cluster) -> Seconds {
    let activation = plan.activation_format.bytes_per_token(&cluster.model.shape);
    let devices = &plan.devices;
    let hop = |(position, device): (usize, &PlannedDevice)| {
        let next = &devices[(position + 1) % devices.len()];
        let link = cluster.links.link_between(&device.name, &next.name);
        link.map_or(Seconds(0.0), |link| link.message_time(activation))
    };
    if devices.len() == 1 { Seconds(0.0) } else { devices.iter().enumerate().map(hop).sum() }
}

fn addresses(plan: &Plan, found: &mut Vec<Finding>) {
    if plan.devices.iter().all(|device| device.address.is_none()) {
        return;
    }
    for (index, device) in plan.devices.iter().enumerate() {
        if device.role != Role::Head && device.address.is_none() {
            let name = &device.name;
            let fix = "set `address` of the device to the host and port on which its worker listens";
            let what = format!("`{name}` has no address, so `hearth execute` cannot reach it");
            let location = format!("plan devices[{index}] `{name}`.address");
            found.push(Finding::note("no-address", location, what, fix));
        }
    }
}
