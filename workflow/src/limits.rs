//! Applies the limits of a scenario to its devices.
//!
//! - A disk limit sets the throttle of the disk. A CPU limit sets the quota of the CPU.
//! - A memory limit in bytes replaces the memory of the device, also for planners.
//! - A memory limit as a share (`memory_share`) leaves memory for this share of the weights that the plan assigns to
//!   the device, and for everything else in the process of the device. The limit is computed from a plan, so planners
//!   use the device's own memory.
//! - `threads` and `affinity` apply to measurements and runs. They are not applied here, because the measured profile
//!   of the device contains their effect.
//!
//! The memory of a process besides its KV cache, buffers and weights is subtracted from a memory limit. The lab sets
//! the same limits on real processes, so that a limit means the same in `hearth simulate` and `hearth lab`.

use hearth_core::Cluster;
use hearth_core::memory::{DeviceMemory, draft, process_overhead_bytes};
use hearth_profiles::device::{Memory, Quota, quota};
use hearth_profiles::{Bytes, Sourced};
use hearth_schema::Plan;
use hearth_schema::scenario::{ResourceLimits, Scenario};

/// Applies the disk and CPU limits of a scenario. The members of the cluster must be in the order of the scenario.
pub fn apply_throttles(scenario: &Scenario, cluster: &mut Cluster) {
    let set = "set: the scenario's limit";
    for (entry, member) in scenario.devices.iter().zip(&mut cluster.members) {
        let Some(limits) = &entry.limits else { continue };
        if let Some(rate) = limits.disk_read_rate {
            member.device.disk.bandwidth_limit = Some(Sourced::new(rate, set));
        }
        if let Some(cores) = limits.cpu_cores {
            let period = Sourced::new(quota::EMULATION_QUOTA_PERIOD, "set: the lab's");
            member.device.cpu.quota = Some(Quota { cores: Sourced::new(cores, set), period });
        }
    }
}

/// Applies memory limits in bytes, before planning. The members of the cluster must be in the order of the scenario.
pub fn apply_absolute_memory_limits(scenario: &Scenario, cluster: &mut Cluster) {
    for (index, entry) in scenario.devices.iter().enumerate() {
        if let Some(limit) = entry.limits.as_ref().and_then(|limits| limits.memory) {
            let process = process_overhead_bytes(&cluster.model.shape, index == cluster.head, Bytes::ZERO);
            set_memory(&mut cluster.members[index].device.memory, limit, process);
        }
    }
}

/// Returns the memory limit of the device with the index `index` in a plan; `None` if `limits` does not limit memory.
pub fn memory_limit(limits: &ResourceLimits, cluster: &Cluster, plan: &Plan, index: usize) -> Option<Bytes> {
    limits.memory.or_else(|| {
        let share = limits.memory_share?.0;
        let device = &cluster.member(&plan.devices[index].name)?.device;
        let device = draft::device_without_draft(plan, index, cluster.draft_model.as_ref(), device)?;
        let memory = DeviceMemory::new(plan, index, &cluster.model, &device, true);
        let process = process_overhead_bytes(&cluster.model.shape, index == 0, Bytes::ZERO);
        Some(Bytes((memory.weights.as_f64() * share) as u64) + memory.other_memory + process)
    })
}

/// Applies all memory limits of a scenario to the devices of a plan. `idle` is the memory of an idle process, which is
/// subtracted from each memory limit.
pub fn apply_memory_limits(scenario: &Scenario, cluster: &mut Cluster, plan: &Plan, idle: Bytes) {
    for (index, device) in plan.devices.iter().enumerate() {
        let entry = scenario.devices.iter().position(|entry| entry.name == device.name);
        let Some(member) = entry else { continue };
        let limits = scenario.devices[member].limits.clone().unwrap_or_default();
        let Some(limit) = memory_limit(&limits, cluster, plan, index) else { continue };
        let process = process_overhead_bytes(&cluster.model.shape, index == 0, idle);
        set_memory(&mut cluster.members[member].device.memory, limit, process);
    }
}

/// Sets the total memory of a device to `limit`, and its available memory to `limit` minus `process` bytes.
fn set_memory(memory: &mut Memory, limit: Bytes, process: Bytes) {
    memory.total_memory = Sourced::new(limit, "set: the scenario's limit");
    memory.available_memory =
        Sourced::new(limit.saturating_sub(process), "set: the scenario's limit less what a process holds");
    // Swapping out other programs frees no memory within the limit.
    (memory.can_swap, memory.swap_available) = (None, None);
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use hearth_core::memory::MemoryBudget;

    use super::*;
    use crate::{FileResolver, LoadedScenario, SearchBudget, planning};

    #[test]
    fn memory_share_limits_the_weights_in_memory() {
        let draft = ", speculation: {draft: {profile: 1b}, tokens: 2, acceptance: {value: 50 %, source: t}}";
        check_shares("");
        check_shares(draft);
    }

    fn check_shares(speculation: &str) {
        let text = format!("schema: scenario/1
name: n
model: {{profile: 1b}}
context: 256
workload: {{prompt: 8, generate: 2{speculation}}}
devices: [{{name: a, profile: d2, limits: {{memory_share: 50 %}}}}, {{name: b, profile: d3, limits: {{memory_share: 35 %}}}}]
links: {{default: {{latency: {{value: 1 ms, source: t}}, bandwidth: {{value: 1 GB/s, source: t}}}}}}
planner: {{strategy: manual, windows: [4, 4]}}
");
        let loaded = LoadedScenario::parse(&text, Path::new("n.yaml"), &FileResolver).expect("a scenario");
        let mut cluster = loaded.resolve_cluster(None).expect("a cluster");
        let plan = planning::make_plan(&loaded, &cluster, &loaded.scenario.planner, SearchBudget::NONE)
            .expect("a plan");
        apply_memory_limits(&loaded.scenario, &mut cluster, &plan, Bytes::ZERO);
        for (index, share) in [(0, 0.5), (1, 0.35)] {
            let (device, model) = (&cluster.members[index].device, cluster.draft_model.as_ref());
            let device = draft::device_without_draft(&plan, index, model, device).expect("the draft fits");
            let budget = MemoryBudget::new(&plan, index, &cluster.model, &device);
            assert!(budget.weights > Bytes::from_mib(100), "{}", budget.weights);
            assert!(budget.kv_cache > Bytes::ZERO && budget.buffers > Bytes::ZERO);
            let left = budget.weight_cache.as_f64() / budget.weights.as_f64();
            assert!((left - share).abs() < 1e-6, "{left} of the weights, not {share}");
        }
    }
}
