//! The rings of which the simulation's speed is measured.
//!
//! Llama 70B, or a model of its layers in another number, on the shipped devices d1 to d4 and copies of them. Without
//! GPUs every byte goes through a page cache: the worst case, in which most chunks are read from disk again for every
//! token.

use hearth_core::cluster::{Cluster, LinkTable, Member};
use hearth_profiles::device::shipped as shipped_device;
use hearth_profiles::model::{ModelProfile, shipped};
use hearth_profiles::{Bytes, BytesPerSecond, Layers, Link, Seconds, Sourced};
use hearth_schema::Trace;
use hearth_schema::plan::Plan;
use hearth_schema::residency::ResidencyOptions;
use hearth_schema::scenario::{KvFormat, Links, Workload};
use hearth_sim::{Input, Options, SimError, simulate};
use hearth_studies::manual_plan;

/// The simulated configuration.
#[derive(Debug, Clone)]
pub struct Ring {
    cluster: Cluster,
    pub plan: Plan,
}

#[derive(Debug, Clone, Copy)]
pub struct Size<'w> {
    /// Layers of each device's window, in ring order; as many devices.
    pub windows: &'w [u32],
    pub layers: u32,
    pub tokens: u32,
    pub residency: ResidencyOptions,
    /// Which part of its weights a device has page cache for; its own memory if absent.
    pub held: Option<f64>,
}

/// Keys and values of a layer of Llama 70B for the context here: 1024 tokens of twice 8 heads of 128 half floats.
const KV_BYTES: u64 = 1024 * 2 * 8 * 128 * 2;

impl Ring {
    /// A ring without GPUs.
    pub fn new(size: Size) -> Result<Ring, Box<dyn std::error::Error>> {
        let devices = ["d3", "d2", "d1", "d4"].into_iter().cycle().take(size.windows.len());
        let mut members = Vec::new();
        for (place, name) in devices.enumerate() {
            let mut device = shipped_device(name)?;
            device.gpu = None;
            let name = format!("{name}-{place}");
            members.push(Member { name, address: None, device, residency: Some(size.residency) });
        }
        let default = Link {
            latency: Sourced::new(Seconds(0.005), "assumed"),
            bandwidth: Sourced::new(BytesPerSecond(58e6), "assumed"),
        };
        let mut cluster = Cluster {
            members,
            head: 0,
            links: LinkTable::new(Links::constant(default)),
            model: model(size.layers)?,
            context: 1024,
            kv_cache: KvFormat::F16,
            activations: hearth_schema::scenario::ActivationFormat::F32,
            draft: None,
            workload: Workload::plain(32, size.tokens),
            seed: 1,
        };
        let rounds = size.layers.div_ceil(size.windows.iter().sum());
        let plan = manual_plan(&cluster, rounds, size.windows, &vec![0; size.windows.len()]);
        if let Some(held) = size.held {
            cluster.members = alike(&cluster, &plan, held)?;
        }
        Ok(Ring { cluster, plan })
    }

    /// The ring of `scenarios/paper/llama-70b-on-d1-d4.yaml`, with the plan that `hearth plan` makes for it.
    pub fn with_gpus(tokens: u32) -> Result<Ring, Box<dyn std::error::Error>> {
        let residency = ResidencyOptions::default();
        let mut ring = Ring::new(Size { windows: &[51, 17, 12], layers: 80, tokens, residency, held: None })?;
        for (member, name) in ring.cluster.members.iter_mut().zip(["d3", "d2", "d1"]) {
            member.device = shipped_device(name)?;
        }
        for (device, layers) in ring.plan.devices.iter_mut().zip([21, 15, 0]) {
            device.gpu_layers = layers;
        }
        Ok(ring)
    }

    pub fn run(&self) -> Result<Trace, SimError> {
        let options = Options { warm: true, ..Options::default() };
        simulate(&Input { cluster: &self.cluster, plan: &self.plan, options: &options })
    }
}

/// Copies of d3, each with page cache for the same part of its weights: so rings of any size do the same work a layer.
fn alike(cluster: &Cluster, plan: &Plan, held: f64) -> Result<Vec<Member>, Box<dyn std::error::Error>> {
    let mut members = cluster.members.clone();
    for (place, member) in members.iter_mut().enumerate() {
        let mut device = shipped_device("d3")?;
        (device.gpu, device.memory.can_swap) = (None, None);
        let layers: Vec<u32> = plan.windows(place).into_iter().flatten().collect();
        let ends = if place == 0 { cluster.model.output_bytes() } else { Bytes::ZERO };
        let weights: Bytes =
            layers.iter().map(|&layer| cluster.model.layer_bytes(layer)).sum::<Bytes>() + ends;
        let buffers = device.cpu.compute_buffer.value + Bytes(KV_BYTES) * layers.len() as u64;
        let memory = Bytes((weights.as_f64() * held) as u64) + buffers;
        device.memory.total.value = memory;
        device.memory.available.value = memory;
        member.device = device;
    }
    Ok(members)
}

/// Llama 70B with `layers` layers.
fn model(layers: u32) -> Result<ModelProfile, Box<dyn std::error::Error>> {
    let whole = shipped("llama-70b")?;
    if layers == whole.shape.layers.0 {
        return Ok(whole);
    }
    let mut shape = whole.shape.clone();
    shape.layers = Layers(layers);
    Ok(ModelProfile::from_shape("llama-70b-cut", shape, whole.quant.parse()?)?)
}
