//! Commands of prima.cpp: one for each device of the ring, in the order of ranks.
//!
//! The windows and GPU layers of a plan are w_m and n_m of the prima.cpp paper, whose ring a plan describes. The paper
//! states what the program does, but not its flags: `--world` (devices), `--rank` (position in the ring), `--master`
//! (address of the head), `--next` (address of the next device), `-lw` (windows), `-ngl` (GPU layers) and `--prefetch`.
//! Their use here was not checked in its sources. What is not known about a flag is among the notes.
//! source: prima.cpp paper, sections 3 and 4, appendix A.3

use core::net::IpAddr;

use hearth_profiles::device::GpuKind;
use hearth_schema::plan::Processor;
use hearth_schema::residency::Residency;
use hearth_schema::scenario::{ActivationFormat, KvFormat};

use super::command::{Arguments, DeviceCommand};
use super::{Engine, ExportedPlan, Ring, RingDevice, names};

pub(super) fn export(ring: &Ring) -> ExportedPlan {
    let mut exported = ExportedPlan::new(Engine::PrimaCpp);
    for rank in 0..ring.devices.len() {
        add_rank(&mut exported, ring, rank);
    }
    add_notes(&mut exported, ring);
    add_limits_of_plan(&mut exported, ring);
    add_limits_of_residency(&mut exported, ring);
    exported
}

fn add_rank(exported: &mut ExportedPlan, ring: &Ring, rank: usize) {
    let (plan, device, world) = (ring.plan, &ring.devices[rank], ring.devices.len());
    let mut arguments = Arguments::new("llama-cli");
    arguments.option("-m", &exported.file(ring.files.model, "MODEL.gguf", "the path of the model file"));
    arguments.option("-c", &plan.context_length);
    if plan.kv_cache_format != KvFormat::default() {
        let format = plan.kv_cache_format.format();
        arguments.option("-ctk", &format).option("-ctv", &format);
    }
    arguments.option("-t", &device.threads);
    if world > 1 {
        let next = &ring.devices[(rank + 1) % world];
        let [master, next] =
            [ring.head(), next].map(|it| exported.host(it, it.address.map(|(host, _)| host)));
        let windows: Vec<String> = plan.devices.iter().map(|device| device.window.to_string()).collect();
        arguments.option("--world", &world).option("--rank", &rank);
        arguments.option("--master", &master).option("--next", &next).option("-lw", &windows.join(","));
    }
    arguments.option("-ngl", &device.planned.gpu_layers);
    if world > 1 && !device.layers.is_empty() && device.planned.residency.prefetches() {
        arguments.switch("--prefetch");
    }
    exported.commands.push(DeviceCommand::new(device, device.layers.clone(), arguments));
}

fn add_notes(exported: &mut ExportedPlan, ring: &Ring) {
    let notes = &mut exported.notes;
    notes.push(
        "The paper of prima.cpp does not describe its flags, and the commands were not tried: compare them with \
         `llama-cli --help` of prima.cpp."
            .to_owned(),
    );
    if ring.devices.len() == 1 {
        notes.push("On one device, prima.cpp is the same as llama.cpp (paper, section 4.1).".to_owned());
        return;
    }
    notes.push("Every device reads its own copy of the model file, at the path in its command.".to_owned());
    notes.push("All ranks have `-lw`. The paper does not say whether only the head needs it.".to_owned());
    if ring.devices.iter().any(|device| device.address.is_some()) {
        notes.push(
            "`--master` and `--next` have no ports: prima.cpp uses ports of its own, not those of hearth's workers."
                .to_owned(),
        );
    }
    let is_name = |device: &&RingDevice| {
        device.address.is_some_and(|(host, _)| host.trim_matches(['[', ']']).parse::<IpAddr>().is_err())
    };
    let named = names(ring.devices.iter().filter(is_name));
    if !named.is_empty() {
        notes
            .push(format!("It is not known whether prima.cpp resolves host names, such as that of {named}."));
    }
    if ring.plan.rounds > 1 && ring.plan.devices.iter().any(|device| device.gpu_layers > 0) {
        notes.push(
            "`-ngl` is the number of GPU layers in one window (n_m of the paper). It is not known whether the flag \
             counts those of one window or of all rounds."
                .to_owned(),
        );
    }
}

fn add_limits_of_plan(exported: &mut ExportedPlan, ring: &Ring) {
    let (plan, limits) = (ring.plan, &mut exported.not_expressed);
    let last_round = plan.model.layers % plan.layers_per_round().max(1);
    if last_round > 0 {
        let (rounds, all) = (plan.rounds, plan.layers_per_round());
        limits.push(format!(
            "The last of {rounds} rounds has {last_round} of {all} layers. In the paper, all rounds are whole (Eq. 23)."
        ));
    }
    if plan.output_processor == Processor::Gpu {
        limits.push(format!(
            "`output: gpu`: in the paper, the output matrix is on the CPU of the head, `{}` (appendix A.3).",
            ring.head().name()
        ));
    }
    let relays = names(ring.relays());
    if !relays.is_empty() {
        limits.push(format!(
            "{relays} only forwards messages. The paper has such devices (section 3.3), but does not say how `-lw` \
             names them: here their window is 0."
        ));
    }
    let is_unsupported = |device: &&RingDevice| {
        let kind = device.gpu().map(|gpu| gpu.kind);
        device.planned.gpu_layers > 0 && matches!(kind, Some(GpuKind::Vulkan | GpuKind::Dx12))
    };
    let unsupported = names(ring.devices.iter().filter(is_unsupported));
    if !unsupported.is_empty() {
        limits.push(format!("The GPU of {unsupported}: prima.cpp has only CUDA and Metal (section 3.2)."));
    }
    if plan.activation_format == ActivationFormat::F16 {
        limits.push("`activations: f16`: prima.cpp sends activations as f32 (appendix A.3).".to_owned());
    }
    if plan.sequences > 1 {
        limits.push(format!("{} sequences at the same time: the paper has one.", plan.sequences));
    }
    if plan.draft_model.is_some() {
        limits.push(
            "The draft model: the paper runs one on the head (appendix A.9), but does not give its flags."
                .to_owned(),
        );
    }
}

fn add_limits_of_residency(exported: &mut ExportedPlan, ring: &Ring) {
    let limits = &mut exported.not_expressed;
    let of = |policy: Residency| {
        names(ring.devices.iter().filter(|it| !it.layers.is_empty() && it.planned.residency.policy == policy))
    };
    let managed = of(Residency::Managed);
    if !managed.is_empty() {
        let experts = if ring.cluster.model.shape.experts.is_some() { ", nor whole experts" } else { "" };
        limits.push(format!(
            "Residency `managed` of {managed}: the model file is mapped, the operating system decides which weights \
             stay in memory, and `--prefetch` requests the next window. No set of weights is kept{experts}."
        ));
    }
    let windowed = of(Residency::Windowed);
    if !windowed.is_empty() {
        limits.push(format!(
            "Residency `windowed` of {windowed}: `--prefetch` requests the next window, but no thread reads its pages."
        ));
    }
    let pinned = of(Residency::Pinned);
    if !pinned.is_empty() {
        limits.push(format!(
            "Residency `pinned` of {pinned}: the model file is mapped, not copied into memory."
        ));
    }
    let in_chunks = |device: &&RingDevice| {
        let residency = &device.planned.residency;
        let is_requested = residency.policy == Residency::Os && residency.prefetches();
        is_requested && !residency.prefetch_in_one_call && device.exceeds_memory()
    };
    let in_chunks = names(ring.devices.iter().filter(in_chunks));
    if !in_chunks.is_empty() {
        limits.push(format!(
            "Residency `os` of {in_chunks}: hearth requests all of the next window. prima.cpp requests it in one \
             call, of which the kernel reads only one read-ahead window."
        ));
    }
    let with_options = |device: &&RingDevice| {
        let residency = &device.planned.residency;
        residency.prefetch_budget.is_some() || residency.evict_after_use
    };
    let with_options = names(ring.devices.iter().filter(with_options));
    if !with_options.is_empty() {
        limits
            .push(format!("`prefetch_budget` and `release` of {with_options}: prima.cpp has no such flags."));
    }
}
