//! The planner of exo: pinned layers in proportion to total memory.
//!
//! prima.cpp paper, sections 2 and 4.1 and appendix A.8. The memory of a device is that of its discrete GPU if it has
//! one, else its RAM. Cumulative rounding gives 9, 10 and 13 of 32 layers to devices with 8, 8 and 11 GiB. Each
//! device computes on its GPU if it has one. exo does not run on Android without root.
//!
//! The backends use different weight formats. On macOS, MLX computes with the 4-bit weights of the model. On Linux,
//! Tinygrad loads 16-bit weights into main memory and converts them to 32 bit on the GPU.
//!
//! Deviation: exo has the output head on the last device. Here it is on the CPU of the head.

use hearth_core::{Cluster, Member};
use hearth_profiles::Format;
use hearth_profiles::device::{DeviceProfile, Os};
use hearth_schema::plan::{DroppedDevice, Plan, PlannedDevice, PlannerRecord, Role, ScenarioRecord};
use hearth_schema::residency::ResidencyOptions;

use super::SystemPlanError;
use super::slices::members;
use crate::baselines::proportional_shares::{cumulative_rounding, ensure_head_layer};
use crate::{empty_plan, exo_memory_by_device};

pub(super) fn plan(cluster: &Cluster, scenario: &ScenarioRecord) -> Result<Plan, SystemPlanError> {
    let members = members(cluster);
    let supported = |member: &Member| member.device.os != Os::Android;
    let why = "it needs root on Android";
    if !members.iter().any(|member| supported(member)) {
        return Err(SystemPlanError::NoUsableDevice { system: "exo", why });
    }
    if !supported(members[0]) {
        let head = members[0].name.clone();
        return Err(SystemPlanError::UnsupportedHead { system: "exo", head, why });
    }
    let size = |(member, total): (&&Member, u64)| if supported(member) { total } else { 0 };
    let sizes: Vec<u64> = members.iter().zip(exo_memory_by_device(cluster)).map(size).collect();
    let layers = cluster.model.shape.layers.0;
    let no_memory = SystemPlanError::NoUsableDevice { system: "exo", why: "none has memory" };
    let mut windows = cumulative_rounding(&sizes, layers).ok_or(no_memory)?;
    ensure_head_layer(&mut windows);
    let (mut devices, mut dropped, mut explanation) = (Vec::new(), Vec::new(), Vec::new());
    for ((member, window), size) in members.iter().zip(windows).zip(sizes) {
        let name = member.name.clone();
        if window == 0 {
            let reason = if supported(member) { "its share of the layers rounds to zero" } else { why };
            dropped.push(DroppedDevice { name, reason: reason.into() });
            continue;
        }
        let (residency, on_gpu) = backend(&member.device);
        let size = hearth_profiles::Bytes(size);
        explanation.push(format!("`{name}` has {window} layers for {size} of memory"));
        devices.push(PlannedDevice {
            name,
            address: member.address.clone(),
            role: if devices.is_empty() { Role::Head } else { Role::Worker },
            window,
            gpu_layers: if on_gpu { window } else { 0 },
            residency,
            predicted_terms: None,
        });
    }
    let planner = PlannerRecord { strategy: "exo".into(), options: vec!["memory=total".into()] };
    Ok(Plan { devices, dropped_devices: dropped, explanation, ..empty_plan(cluster, scenario, planner) })
}

/// Returns the residency policy of a device under exo, and whether the device computes on its GPU.
fn backend(device: &DeviceProfile) -> (ResidencyOptions, bool) {
    let usable = device.gpu.as_ref().is_some_and(|gpu| !gpu.matvec.is_empty());
    match device.os {
        Os::Macos => (ResidencyOptions::pinned(None), usable),
        Os::Linux | Os::Windows | Os::Android => {
            let half = ResidencyOptions::pinned(Some(Format::F16));
            let decoded = Some(Format::F32).filter(|_| usable);
            (ResidencyOptions { gpu_conversion_format: decoded, ..half }, usable)
        }
    }
}
