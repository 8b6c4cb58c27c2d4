//! Applies a scenario's limits to its devices.
//!
//! A disk limit is a throttle on the device, a limit of its processor a quota. A memory limit replaces its memory, and
//! planners know it. A limit given as a share leaves that share of the weights that a plan gives the device, beside
//! everything else that its process holds, so that it can only be applied to a plan that exists: planners see the
//! device's own memory then. The lab sets the same limits on real processes, so that they mean the same in `simulate`
//! and `lab`. `threads` and `affinity` are for measuring and running; their effect is in the measured profile of the
//! device. What a process holds beside its cache, buffers and weights is subtracted from a limit.

use hearth_core::Cluster;
use hearth_core::memory::{DeviceMemory, draft, process_bytes};
use hearth_profiles::device::{Memory, Quota, quota};
use hearth_profiles::{Bytes, Sourced};
use hearth_schema::Plan;
use hearth_schema::scenario::{Limits, Scenario};

/// Applies the limits of disk and processor. The devices are in the scenario's order.
pub fn throttle(scenario: &Scenario, cluster: &mut Cluster) {
    let set = "set: the scenario's limit";
    for (entry, member) in scenario.devices.iter().zip(&mut cluster.members) {
        let Some(limits) = &entry.limits else { continue };
        if let Some(rate) = limits.disk_read {
            member.device.disk.limit = Some(Sourced::new(rate, set));
        }
        if let Some(cores) = limits.cpu {
            let period = Sourced::new(quota::PERIOD, "set: the lab's");
            member.device.cpu.quota = Some(Quota { cores: Sourced::new(cores, set), period });
        }
    }
}

/// Applies the absolute memory limits, which planners know. The devices are in the scenario's order.
pub fn bound_memory(scenario: &Scenario, cluster: &mut Cluster) {
    for (index, entry) in scenario.devices.iter().enumerate() {
        if let Some(limit) = entry.limits.as_ref().and_then(|limits| limits.memory) {
            let process = process_bytes(&cluster.model.shape, index == cluster.head, Bytes::ZERO);
            set_memory(&mut cluster.members[index].device.memory, limit, process);
        }
    }
}

/// The memory that the limits leave the device at an index of the plan, if they limit it.
pub fn memory(limits: &Limits, cluster: &Cluster, plan: &Plan, place: usize) -> Option<Bytes> {
    limits.memory.or_else(|| {
        let share = limits.memory_share?.0;
        let device = &cluster.member(&plan.devices[place].name)?.device;
        let device = draft::device_without_draft(plan, place, cluster.draft.as_ref(), device)?;
        let memory = DeviceMemory::new(plan, place, &cluster.model, &device, true);
        let process = process_bytes(&cluster.model.shape, place == 0, Bytes::ZERO);
        Some(Bytes((memory.weights.as_f64() * share) as u64) + memory.without_weights + process)
    })
}

/// Applies all memory limits to the plan's devices, less `idle`, what an idle process holds.
pub fn restrict_memory(scenario: &Scenario, cluster: &mut Cluster, plan: &Plan, idle: Bytes) {
    for place in 0..plan.devices.len() {
        let entry = scenario.devices.iter().position(|entry| entry.name == plan.devices[place].name);
        let Some(index) = entry else { continue };
        let limits = scenario.devices[index].limits.clone().unwrap_or_default();
        let Some(limit) = memory(&limits, cluster, plan, place) else { continue };
        let process = process_bytes(&cluster.model.shape, place == 0, idle);
        set_memory(&mut cluster.members[index].device.memory, limit, process);
    }
}

/// Replaces a device's memory by a limit, less what its process holds of it.
fn set_memory(memory: &mut Memory, limit: Bytes, process: Bytes) {
    memory.total = Sourced::new(limit, "set: the scenario's limit");
    memory.available =
        Sourced::new(limit.saturating_sub(process), "set: the scenario's limit less what a process holds");
    // Inside the limit, other programs' memory cannot be gained by swapping it out.
    (memory.can_swap, memory.swap_available) = (None, None);
}
