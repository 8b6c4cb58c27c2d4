//! Simulated rings for the measurement of the simulator's speed.
//!
//! The model is Llama 70B, or the same model with a different number of layers. The devices are the shipped devices d1
//! to d4, repeated in larger rings. Without GPUs all weights are in the page cache; in the worst case most chunks are
//! read from disk again for every token.

use hearth_core::cluster::{Cluster, LinkTable, Member};
use hearth_profiles::device::shipped_profile as shipped_device;
use hearth_profiles::model::{ModelProfile, ModelShape, shipped_profile};
use hearth_profiles::{Bytes, BytesPerSecond, DeviceProfile, Layers, Link, Seconds, Sourced};
use hearth_schema::Trace;
use hearth_schema::plan::Plan;
use hearth_schema::residency::ResidencyOptions;
use hearth_schema::scenario::{KvFormat, Links, Workload};
use hearth_sim::{Input, Options, SimError, simulate};
use hearth_studies::{StudyError, manual_plan};

#[derive(Debug, Clone)]
pub struct SimulatedRing {
    cluster: Cluster,
    pub plan: Plan,
}

/// Bytes of keys and values of a layer of Llama 70B: 1024 tokens, 8 heads of dimension 128 for each, in f16.
const KV_BYTES: u64 = 1024 * 2 * 8 * 128 * 2;

impl SimulatedRing {
    /// Creates a ring with a device for each window, given as a number of layers. `cached_share` is the page cache of
    /// each device as a share of its weights; with `None` the devices have the memory of the shipped devices.
    pub fn new(
        windows: &[u32],
        model_layers: u32,
        generated_tokens: u32,
        residency: ResidencyOptions,
        cached_share: Option<f64>,
    ) -> Result<SimulatedRing, StudyError> {
        let devices = ["d3", "d2", "d1", "d4"].into_iter().cycle().take(windows.len());
        let member = |(place, name)| {
            let device = DeviceProfile { gpu: None, ..shipped_device(name)? };
            let name = format!("{name}-{place}");
            Ok(Member { name, address: None, device, residency: Some(residency) })
        };
        let members = devices.enumerate().map(member).collect::<Result<_, StudyError>>()?;
        let default = Link::constant(
            Sourced::new(Seconds(0.005), "assumed"),
            Sourced::new(BytesPerSecond(58e6), "assumed"),
        );
        let mut cluster = Cluster {
            members,
            head: 0,
            links: LinkTable::new(Links::uniform(default)),
            model: model(model_layers)?,
            context_length: 1024,
            kv_cache_format: KvFormat::F16,
            activation_format: hearth_schema::scenario::ActivationFormat::F32,
            draft_model: None,
            routes: None,
            recorded_arrivals: None,
            workload: Workload::new(32, generated_tokens),
            seed: 1,
        };
        let rounds = model_layers.div_ceil(windows.iter().sum());
        let plan = manual_plan(&cluster, rounds, windows, &vec![0; windows.len()]);
        if let Some(share) = cached_share {
            cluster.members = equal_members(&cluster, &plan, share)?;
        }
        Ok(SimulatedRing { cluster, plan })
    }

    /// Returns the ring of `scenarios/paper/llama-70b-on-d1-d4.yaml`, with the plan that `hearth plan` makes for it.
    pub fn with_gpus(tokens: u32) -> Result<SimulatedRing, StudyError> {
        let mut ring = SimulatedRing::new(&[51, 17, 12], 80, tokens, ResidencyOptions::default(), None)?;
        for (member, name) in ring.cluster.members.iter_mut().zip(["d3", "d2", "d1"]) {
            member.device = shipped_device(name)?;
        }
        for (device, layers) in ring.plan.devices.iter_mut().zip([21, 15, 0]) {
            device.gpu_layers = layers;
        }
        Ok(ring)
    }

    pub fn run(&self) -> Result<Trace, SimError> {
        let options = Options { starts_warm: true, ..Options::default() };
        simulate(&Input { cluster: &self.cluster, plan: &self.plan, options: &options })
    }
}

/// Returns the members of a ring with the device profile d3, each with page cache for the same share of its weights, so
/// that the work per layer does not depend on the size of the ring.
fn equal_members(cluster: &Cluster, plan: &Plan, cached_share: f64) -> Result<Vec<Member>, StudyError> {
    let mut members = cluster.members.clone();
    for (place, member) in members.iter_mut().enumerate() {
        let mut device = shipped_device("d3")?;
        (device.gpu, device.memory.can_swap) = (None, None);
        let layers: Vec<u32> = plan.windows(place).into_iter().flatten().collect();
        let ends = if place == 0 { cluster.model.output_head_bytes() } else { Bytes::ZERO };
        let weights = layers.iter().map(|&layer| cluster.model.layer_bytes(layer)).sum::<Bytes>() + ends;
        let buffers = device.cpu.compute_buffer.value + Bytes(KV_BYTES) * layers.len() as u64;
        let memory = Bytes((weights.as_f64() * cached_share) as u64) + buffers;
        device.memory.total_memory.value = memory;
        device.memory.available_memory.value = memory;
        member.device = device;
    }
    Ok(members)
}

fn model(layers: u32) -> Result<ModelProfile, StudyError> {
    let whole = shipped_profile("llama-70b")?;
    if layers == whole.shape.layers.0 {
        return Ok(whole);
    }
    let shape = ModelShape { layers: Layers(layers), ..whole.shape };
    Ok(ModelProfile::from_shape("llama-70b-cut", shape, whole.quant.parse()?)?)
}
