//! Commands of llama.cpp: `llama-server` on the head, `ggml-rpc-server` on the other devices.
//!
//! With `-ngl N`, the last N of the L + 1 "layers" of a model with L layers leave the CPU of the head; the output
//! matrix counts as the last one. The devices of `--device` take them in that order, each as many as `--tensor-split`
//! says. So layer l is on the CPU of the head if `l < L + 1 - N`, and otherwise on the first device d with
//! `l - (L + 1 - N) < split_1 + .. + split_d`. The order is always: CPU of the head, then the devices.
//!
//! `--rpc` must stand before `--device`: it gives the devices of the servers the names RPC0, RPC1 and so on, one for
//! each value of `-d`.
//! source: llama.cpp, commit 0c1e57098, `load_tensors` in `src/llama-model.cpp`, `common/arg.cpp`,
//! `ggml/src/ggml-rpc/ggml-rpc.cpp`, `tools/rpc/rpc-server.cpp`
//!
//! hearth computes the output matrix on the head, llama.cpp on the last device, unless `-ot` moves it.

use core::net::Ipv4Addr;

use hearth_profiles::device::GpuKind;
use hearth_schema::plan::Processor;
use hearth_schema::residency::Residency;
use hearth_schema::scenario::{ActivationFormat, KvFormat};

use super::command::{Arguments, DeviceCommand, LayerRange};
use super::{Engine, ExportedPlan, Ring, RingDevice, names};

/// Port of a server without an address in plan and scenario.
/// source: the default of `ggml-rpc-server`, tools/rpc/rpc-server.cpp
const DEFAULT_PORT: u16 = 50052;

/// Maximum number of values of `--tensor-split`.
/// source: `llama_max_devices` in src/llama.cpp is 16, and common/arg.cpp requires fewer values
const MAX_SPLIT_VALUES: usize = 15;

/// A device of `--device`: a GPU of the head, or a processor behind a server.
struct OffloadDevice {
    /// The index of the device in the ring.
    index: usize,
    processor: Processor,
    name: String,
    layers: u32,
}

/// The placement of all layers in the order of llama.cpp.
struct Placement {
    /// The number of layers on the CPU of the head, which are the first layers of the model.
    head_cpu_layers: u32,
    offload: Vec<OffloadDevice>,
}

pub(super) fn export(ring: &Ring) -> ExportedPlan {
    let mut exported = ExportedPlan::new(Engine::LlamaCpp);
    let placement = Placement::new(ring);
    let mut servers = Vec::new();
    for (index, device) in ring.devices.iter().enumerate().skip(1) {
        if !device.layers.is_empty() {
            servers.push(add_server(&mut exported, device, placement.layers_of(index)));
        }
    }
    add_head(&mut exported, ring, &placement, &servers);
    add_notes(&mut exported, ring, &placement);
    add_limits_of_placement(&mut exported, ring, &placement);
    add_limits_of_residency(&mut exported, ring);
    add_limits_of_network(&mut exported, ring);
    exported
}

impl Placement {
    fn new(ring: &Ring) -> Self {
        let head = ring.head();
        let mut offload = Vec::new();
        let mut servers = 0..;
        for (index, device) in ring.devices.iter().enumerate() {
            for processor in [Processor::Gpu, Processor::Cpu] {
                let layers = device.layer_count(processor);
                if layers == 0 || (index == 0 && processor == Processor::Cpu) {
                    continue;
                }
                let name = if index == 0 {
                    processor_name(device, processor).to_owned()
                } else {
                    format!("RPC{}", servers.next().unwrap_or(0))
                };
                offload.push(OffloadDevice { index, processor, name, layers });
            }
        }
        Self { head_cpu_layers: head.layer_count(Processor::Cpu), offload }
    }

    /// Returns the layers of a device of the ring, in order.
    fn layers_of(&self, index: usize) -> Vec<LayerRange> {
        let on_cpu = (index == 0).then(|| LayerRange::new(Processor::Cpu, 0..self.head_cpu_layers));
        let mut layers: Vec<LayerRange> = on_cpu.flatten().into_iter().collect();
        let mut start = self.head_cpu_layers;
        for device in &self.offload {
            let range = start..start + device.layers;
            start = range.end;
            layers.extend(LayerRange::new(device.processor, range).filter(|_| device.index == index));
        }
        layers
    }

    /// Returns the number of layers on devices, where the output matrix counts as a layer (`-ngl`).
    fn gpu_layers(&self) -> u32 {
        match self.offload.len() {
            0 => 0,
            _ => 1 + self.offload.iter().map(|device| device.layers).sum::<u32>(),
        }
    }

    /// Returns the values of `--tensor-split`: the layers of each device, where the output matrix counts for the last.
    fn tensor_split(&self) -> String {
        let last = self.offload.len().saturating_sub(1);
        let value =
            |(at, device): (usize, &OffloadDevice)| (device.layers + u32::from(at == last)).to_string();
        self.offload.iter().enumerate().map(value).collect::<Vec<_>>().join(",")
    }

    fn device_names(&self) -> String {
        let names: Vec<&str> = self.offload.iter().map(|device| device.name.as_str()).collect();
        if names.is_empty() { "none".to_owned() } else { names.join(",") }
    }

    /// Whether llama.cpp, without `-ot`, computes the output matrix on the processor of the head that the plan names.
    fn has_planned_output(&self, planned: Processor) -> bool {
        match (planned, self.offload.last()) {
            (Processor::Cpu, last) => last.is_none(),
            (Processor::Gpu, last) => last.is_some_and(|last| last.index == 0),
        }
    }
}

/// Returns the name of a processor in llama.cpp: of the first GPU of its kind, or of the CPU.
/// source: the names of the backends in ggml/include and ggml/src
fn processor_name(device: &RingDevice, processor: Processor) -> &'static str {
    match (processor, device.gpu().map(|gpu| gpu.kind)) {
        (Processor::Cpu, _) | (_, None) => "CPU",
        (_, Some(GpuKind::Cuda)) => "CUDA0",
        (_, Some(GpuKind::Metal)) => "MTL0",
        (_, Some(GpuKind::Vulkan | GpuKind::Dx12)) => "Vulkan0",
    }
}

/// Adds the command of a server, and returns its `HOST:PORT`.
fn add_server(exported: &mut ExportedPlan, device: &RingDevice, layers: Vec<LayerRange>) -> String {
    // Servers and clients support only IPv4.
    let address = device.address.filter(|(host, _)| !host.starts_with('['));
    let host = exported.host(device, address.map(|(host, _)| host));
    let port = address.map_or(DEFAULT_PORT, |(_, port)| port);
    let is_name = address.is_some_and(|(host, _)| host.parse::<Ipv4Addr>().is_err());
    if is_name {
        let name = device.name();
        exported.notes.push(format!(
            "The server of `{name}` listens on all its addresses, because `-H` takes no host names such as `{host}`."
        ));
    }
    let processors: Vec<&str> = [Processor::Gpu, Processor::Cpu]
        .into_iter()
        .filter(|processor| device.layer_count(*processor) > 0)
        .map(|processor| processor_name(device, processor))
        .collect();
    let mut arguments = Arguments::new("ggml-rpc-server");
    arguments.option("-H", if is_name { "0.0.0.0" } else { &host }).option("-p", &port);
    arguments.option("-d", &processors.join(",")).option("-t", &device.threads);
    exported.commands.push(DeviceCommand::new(device, layers, arguments));
    format!("{host}:{port}")
}

fn add_head(exported: &mut ExportedPlan, ring: &Ring, placement: &Placement, servers: &[String]) {
    let (plan, head) = (ring.plan, ring.head());
    let mut arguments = Arguments::new("llama-server");
    arguments.option("-m", &exported.file(ring.files.model, "MODEL.gguf", "the path of the model file"));
    // The context of all sequences together.
    arguments.option("-c", &plan.total_cache_tokens()).option("-np", &plan.sequences);
    if plan.cache_tokens.is_some() {
        arguments.switch("-kvu").option("--kv-unified-per-slot", &plan.context_length);
    }
    let cache_type = (plan.kv_cache_format != KvFormat::default()).then(|| plan.kv_cache_format.format());
    if let Some(format) = cache_type {
        arguments.option("-ctk", &format).option("-ctv", &format);
    }
    arguments.option("-t", &head.threads);
    if !servers.is_empty() {
        arguments.option("--rpc", &servers.join(","));
    }
    arguments.option("--device", &placement.device_names()).option("-ngl", &placement.gpu_layers());
    if placement.offload.len() > 1 {
        arguments.option("--tensor-split", &placement.tensor_split());
    }
    if let Some(moved) = moved_output(ring, placement) {
        arguments.option("-ot", &moved);
    }
    if head.planned.residency.uses_anonymous_memory() {
        arguments.option("--load-mode", "none");
    }
    if let Some(draft) = &plan.draft_model {
        let meaning = "the path of the file of the draft model";
        let file = exported.file(ring.files.draft_model, "DRAFT_MODEL.gguf", meaning);
        arguments.option("-md", &file).option("--spec-type", "draft-simple");
        let tokens = ring.cluster.workload.drafted_tokens();
        if tokens > 0 {
            arguments.option("--spec-draft-n-max", &tokens);
        }
        let on_gpu = draft.processor == Processor::Gpu && head.gpu().is_some();
        let gpu = processor_name(head, Processor::Gpu);
        let (device, layers) = if on_gpu { (gpu, "all") } else { ("none", "0") };
        arguments.option("-devd", device).option("-ngld", layers);
        if let Some(format) = cache_type {
            arguments.option("-ctkd", &format).option("-ctvd", &format);
        }
    }
    exported.commands.push(DeviceCommand::new(head, placement.layers_of(0), arguments));
}

/// Returns the value of `-ot` that moves the output matrix to the processor of the plan, if possible and needed.
fn moved_output(ring: &Ring, placement: &Placement) -> Option<String> {
    let planned = ring.plan.output_processor;
    let is_tied = ring.cluster.model.shape.has_tied_embeddings;
    // The pattern of a tied matrix would also move the input embedding, which belongs on the CPU.
    if placement.has_planned_output(planned) || (is_tied && planned == Processor::Gpu) {
        return None;
    }
    let tensor = if is_tied { "token_embd" } else { "output" };
    // Without `^` it would also find `attn_output.weight`.
    Some(format!(r"^{tensor}\.weight$={}", processor_name(ring.head(), planned)))
}

fn add_notes(exported: &mut ExportedPlan, ring: &Ring, placement: &Placement) {
    let notes = &mut exported.notes;
    notes.push(
        "The flags are those of llama.cpp at commit 0c1e57098 (October 2026). Older releases call the server \
         `rpc-server`, and differ in `--load-mode` and the flags of drafts."
            .to_owned(),
    );
    if ring.workers().next().is_some() {
        notes.push("Start `llama-server` last: it connects to the other devices when it starts.".to_owned());
    }
    let gpus = placement.offload.iter().filter(|device| device.processor == Processor::Gpu);
    let mut kinds: Vec<&str> =
        gpus.map(|gpu| processor_name(&ring.devices[gpu.index], Processor::Gpu)).collect();
    kinds.sort_unstable();
    kinds.dedup();
    if !kinds.is_empty() {
        notes.push(format!(
            "{} stands for the first GPU of a device. `llama-server --list-devices` shows the names on a device.",
            kinds.join(", ")
        ));
    }
    let uses_dx12 = |device: &&RingDevice| device.gpu().is_some_and(|gpu| gpu.kind == GpuKind::Dx12);
    let dx12 = names(ring.devices.iter().filter(|device| device.planned.gpu_layers > 0).filter(uses_dx12));
    if !dx12.is_empty() {
        notes.push(format!("llama.cpp has no DirectX 12: the GPU of {dx12} is used with Vulkan."));
    }
    if ring.cluster.model.shape.architecture.spec().has_draft_layers {
        notes.push(
            "llama.cpp counts the draft layers of a model (multi-token prediction) as layers. If the model file has \
             such layers, add their number to `-ngl` and to the last value of `--tensor-split`."
                .to_owned(),
        );
    }
}

fn add_limits_of_placement(exported: &mut ExportedPlan, ring: &Ring, placement: &Placement) {
    let (plan, limits) = (ring.plan, &mut exported.not_expressed);
    if plan.rounds > 1 {
        let rounds = plan.rounds;
        limits.push(format!(
            "The plan has {rounds} rounds. llama.cpp visits each device once for a token, so each device has as many \
             layers as in the plan, but adjacent ones."
        ));
    }
    let head = ring.head();
    if placement.head_cpu_layers > 0 && head.layer_count(Processor::Gpu) > 0 {
        let name = head.name();
        limits.push(format!(
            "In each window of the plan, the layers on the GPU of `{name}` come before those on its CPU. With \
             llama.cpp, the CPU of `{name}` has the first layers of the model, and its GPU the layers after them."
        ));
    }
    let planned = plan.output_processor;
    if !placement.has_planned_output(planned) && moved_output(ring, placement).is_none() {
        let last = placement.offload.last().map_or(head.name(), |last| ring.devices[last.index].name());
        limits.push(format!(
            "The output matrix is on `{last}`, the last device, instead of the GPU of `{}`: it is also the input \
             embedding of this model, which `-ot` would move, too.",
            head.name()
        ));
    }
    if placement.offload.len() > MAX_SPLIT_VALUES {
        let count = placement.offload.len();
        limits.push(format!(
            "`--tensor-split` takes at most {MAX_SPLIT_VALUES} values, but the plan has layers on {count} processors \
             besides the CPU of `{}`: llama.cpp rejects the command.",
            head.name()
        ));
    }
    let relays = names(ring.relays());
    if !relays.is_empty() {
        limits.push(format!(
            "{relays} only forwards messages. llama.cpp has no relays: the head must reach all devices."
        ));
    }
}

fn add_limits_of_residency(exported: &mut ExportedPlan, ring: &Ring) {
    let head = ring.head();
    let residency = &head.planned.residency;
    let what = match residency.policy {
        Residency::Os if head.exceeds_memory() && residency.prefetches() => {
            Some("the model file is mapped, and the next window is not requested ahead of its use")
        }
        Residency::Windowed => Some("the model file is mapped, and no thread reads windows ahead"),
        Residency::Managed if ring.cluster.model.shape.experts.is_some() => Some(
            "the model file is mapped, and the operating system decides which weights stay in memory; experts are not \
             cached as a whole",
        ),
        Residency::Managed => {
            Some("the model file is mapped, and the operating system decides which weights stay in memory")
        }
        Residency::Pinned | Residency::Sliding if residency.conversion_format.is_some() => {
            Some("the weights are copied into memory, but not converted")
        }
        Residency::Os | Residency::Pinned | Residency::Sliding => None,
    };
    let limits = &mut exported.not_expressed;
    if let Some(what) = what {
        let (name, policy) = (head.name(), residency.policy);
        limits.push(format!("Residency `{policy}` of `{name}`: {what}.{}", memory_text(head)));
    }
    let copied: Vec<&RingDevice> =
        ring.workers().filter(|device| !device.planned.residency.uses_anonymous_memory()).collect();
    if !copied.is_empty() {
        let mut text = format!(
            "Residency of {}: the servers read no model file. The head sends them their weights when it starts, and \
             they keep all of them in allocated memory.",
            names(copied.iter().copied())
        );
        for device in copied {
            text += &memory_text(device);
        }
        limits.push(text);
    }
}

/// Returns a sentence about a device whose weights exceed its memory, otherwise nothing.
fn memory_text(device: &RingDevice) -> String {
    if !device.exceeds_memory() {
        return String::new();
    }
    let (weights, cache) = (device.memory.weights, device.memory.weight_cache);
    format!(" On `{}`, {weights} of weights exceed the {cache} of main memory for them.", device.name())
}

fn add_limits_of_network(exported: &mut ExportedPlan, ring: &Ring) {
    let limits = &mut exported.not_expressed;
    let workers = ring.workers().count();
    if workers == 0 {
        return;
    }
    if workers > 1 {
        limits.push(
            "Activations go from one server to the next through the head, not directly around the ring."
                .to_owned(),
        );
    }
    if ring.plan.activation_format == ActivationFormat::F16 {
        limits.push("`activations: f16`: llama.cpp sends activations as f32.".to_owned());
    }
    let is_v6 = |device: &&RingDevice| device.address.is_some_and(|(host, _)| host.starts_with('['));
    let v6 = names(ring.workers().filter(is_v6));
    if !v6.is_empty() {
        limits.push(format!("The IPv6 address of {v6}: the servers support only IPv4."));
    }
    limits.push(
        "A ring of hearth with a key is encrypted. The servers have neither a key nor encryption: use them only in a \
         network that you trust."
            .to_owned(),
    );
}
