//! Findings about plans of other systems, which pin weights in memory.
//!
//! Plans with memory-mapped weights are checked in `devices`.

use hearth_core::Cluster;
use hearth_core::memory::PinnedMemory;
use hearth_profiles::Bytes;
use hearth_schema::Plan;

use super::Finding;

pub(super) fn findings(plan: &Plan, cluster: &Cluster) -> Vec<Finding> {
    let mut found = Vec::new();
    if let Some(tensor) = plan.kind.tensor_plan()
        && let Err(error) = tensor.validate_coverage(plan, &cluster.model.shape)
    {
        let fix = "correct the slices, or plan again from this scenario";
        return vec![Finding::error("plan-invalid", "plan kind.tensor.slices", error.message(), fix)];
    }
    for (index, planned) in plan.devices.iter().enumerate() {
        let Some(member) = cluster.member(&planned.name) else { continue };
        let Some(held) = PinnedMemory::new(plan, index, &cluster.model, &member.device, false) else {
            continue;
        };
        let (name, at) = (&planned.name, format!("plan devices[{index}] `{}`", planned.name));
        if planned.gpu_layers > 0 && member.device.gpu.as_ref().is_none_or(|gpu| gpu.matvec.is_empty()) {
            let what = format!("`{name}` has GPU layers, but no GPU with a known speed");
            let fix = "set `gpu_layers: 0`, or complete `gpu` in the device's profile";
            found.push(Finding::error("no-gpu", at, what, fix));
            continue;
        }
        found.extend(memory(&held, name, &at));
    }
    if let Some(why) = plan.simulation_only_reason() {
        let fix = "run it with `hearth simulate`";
        found.push(Finding::note("simulated-only", "plan", why, fix));
    }
    found
}

fn memory(held: &PinnedMemory, name: &str, at: &str) -> Vec<Finding> {
    let mut found = Vec::new();
    let (needed, can) = (held.unreclaimable_memory(), held.available_memory + held.free_swap);
    if needed > can {
        let loading = match held.loaded_model {
            Bytes::ZERO => String::new(),
            bytes => format!(", loading the whole model {bytes}"),
        };
        let what = format!(
            "weights take {}{loading}, the KV cache {} and buffers {}: this exceeds the {can} \
             of memory of `{name}`",
            held.weights, held.kv_cache, held.buffers
        );
        let fix = "use a smaller model or more devices";
        found.push(Finding::error("memory-exceeded", at, what, fix));
    } else if held.excess_memory() > Bytes::ZERO {
        let excess = held.excess_memory();
        let what =
            format!("{excess} do not fit in memory of `{name}`: they are swapped and read for every token");
        found.push(Finding::warning("weights-swapped", at, what, "give the device fewer weights"));
    }
    if held.used_gpu_memory > held.available_gpu_memory {
        let (needed, can) = (held.used_gpu_memory, held.available_gpu_memory);
        let what =
            format!("weights, cache and buffers take {needed} of GPU memory on `{name}`, which has {can}");
        found.push(Finding::error("gpu-memory", at, what, "give the device fewer weights"));
    }
    let again: Bytes = held.gpu_upload_per_layer.iter().copied().sum();
    if again > Bytes::ZERO {
        let what = format!(
            "{again} of weights do not fit in GPU memory on `{name}` and are copied to the GPU for every token"
        );
        found.push(Finding::warning("gpu-uploads", at, what, "give the device fewer layers"));
    }
    found
}
