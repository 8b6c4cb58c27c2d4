//! Which clusters are the strategies tried on?
//!
//! Devices of a random home ([`crate::devices`]) with a model of the paper's Table 4 that their memory holds or
//! just does not: the ratio of memory to weights is drawn, and other programs take what is more. The head is the
//! first device and never a phone.
//!
//! A small instance is a large one shrunk: the model is cut to few layers, and its vocabulary, all memories and
//! buffers shrink with it. So memory is as short as before, and all plans can be tried.
//!
//! Not here: which strategies plan for them ([`crate::trial`]).

use hearth_profiles::model::{ModelProfile, shipped, shipped_document};
use hearth_profiles::{Bytes, BytesPerSecond, Layers, Link, Seconds, Sourced};
use hearth_schema::residency::ResidencyOptions;
use hearth_schema::scenario::{KvFormat, Links, NamedLink, Workload};
use hearth_schema::{Cluster, LinkTable, Member};

use crate::chance::Chance;
use crate::devices::{KINDS, Kind, device};

/// Devices of a cluster.
const DEVICES: [u32; 2] = [2, 8];
/// Devices of a small one.
const SMALL_DEVICES: [u32; 2] = [2, 3];
/// The models of the paper's Table 4.
pub const MODELS: [&str; 7] =
    ["llama-8b", "llama-14b", "llama-30b", "llama-45b", "llama-60b", "llama-65b", "llama-70b"];
/// Those that small instances are cut from, and to how many layers: all with several valid numbers of rounds.
const SMALL_MODELS: [&str; 5] = ["llama-30b", "llama-45b", "llama-60b", "llama-65b", "llama-70b"];
const SMALL_LAYERS: [u32; 3] = [8, 10, 12];

/// Memory of all devices over the bytes of the model. source: assumed; around the shortage of the paper's
/// testbed, 37 GiB for 40 GiB
const MEMORY_RATIO: [f64; 2] = [0.4, 1.25];
/// What other programs leave at least. source: assumed
const LEAST_MEMORY: Bytes = Bytes::mib(1024);
/// What a GPU that shares memory leaves of it to buffers and the mapping. source: assumed; twice the CPU's buffers
const BESIDE_GPU: Bytes = Bytes::mib(512);
/// One way, in seconds, and in Mbit/s. source: prima.cpp paper, section 4: 3-7 ms and 320-610 Mbit/s over
/// Wi-Fi; widened to a cable and to a far room
const LATENCY: [f64; 2] = [1e-3, 1e-2];
const BANDWIDTH: [f64; 2] = [100.0, 900.0];
/// Tokens of the key-value cache. source: assumed
const CONTEXTS: [u32; 2] = [512, 1024];

/// A cluster with a model.
pub fn cluster(seed: u64, number: u64, workload: Workload) -> Result<Cluster, String> {
    drawn(&mut Chance::new(seed, number), DEVICES, &MODELS, workload)
}

/// A cluster small enough to try all plans.
pub fn small(seed: u64, number: u64, workload: Workload) -> Result<Cluster, String> {
    // Apart from the streams of the large ones.
    let mut chance = Chance::new(seed, (1 << 32) + number);
    let layers = *chance.pick(&SMALL_LAYERS);
    let large = drawn(&mut chance, SMALL_DEVICES, &SMALL_MODELS, workload)?;
    shrunk(large, layers)
}

/// The memory that layers can be in, over the bytes of the model.
pub fn memory_ratio(cluster: &Cluster) -> f64 {
    let own = |member: &Member| {
        let gpu = member.device.gpu.as_ref().filter(|gpu| !gpu.unified_memory);
        member.device.memory.available.value.as_f64()
            + gpu.map_or(0.0, |gpu| gpu.memory_available.value.as_f64())
    };
    cluster.members.iter().map(own).sum::<f64>() / cluster.model.total_bytes().as_f64()
}

/// The cluster with every device under one residency.
pub fn under(mut cluster: Cluster, residency: ResidencyOptions) -> Cluster {
    cluster.members.iter_mut().for_each(|member| member.residency = residency);
    cluster
}

fn drawn(
    chance: &mut Chance,
    devices: [u32; 2],
    models: &[&str],
    workload: Workload,
) -> Result<Cluster, String> {
    let count = chance.count(devices) as usize;
    let name: &&str = chance.pick(models);
    let model = shipped(name).map_err(|error| error.to_string())?;
    let mut members: Vec<Member> = (0..count).map(|place| member(place, chance)).collect();
    shorten(&mut members, &model, chance.between(MEMORY_RATIO));
    let between = pairs(&members).map(|devices| NamedLink { devices, link: link(chance) }).collect();
    let default = link(chance);
    Ok(Cluster {
        members,
        head: 0,
        links: LinkTable::new(Links { default, between }),
        model,
        context: *chance.pick(&CONTEXTS),
        kv_cache: KvFormat::F16,
        workload,
        seed: 1,
    })
}

fn member(place: usize, chance: &mut Chance) -> Member {
    let mut kind = *chance.pick(&KINDS);
    if place == 0 && kind == Kind::Android {
        kind = Kind::Linux;
    }
    let name = format!("d{place}");
    let device = device(&name, kind, chance);
    Member { name, address: None, device, residency: ResidencyOptions::default() }
}

/// Other programs take memory until `ratio` of the model's bytes is left, GPU memory included.
fn shorten(members: &mut [Member], model: &ModelProfile, ratio: f64) {
    let cards: f64 = members
        .iter()
        .filter_map(|member| member.device.gpu.as_ref().filter(|gpu| !gpu.unified_memory))
        .map(|gpu| gpu.memory_available.value.as_f64())
        .sum();
    let main: f64 = members.iter().map(|member| member.device.memory.available.value.as_f64()).sum();
    let wanted = (ratio * model.total_bytes().as_f64() - cards).max(0.0);
    let share = (wanted / main).min(1.0);
    for member in members {
        let memory = &mut member.device.memory;
        let left = Bytes((memory.available.value.as_f64() * share) as u64).max(LEAST_MEMORY);
        memory.available.value = left.min(memory.available.value);
        let left = memory.available.value.saturating_sub(BESIDE_GPU);
        // What other programs hold cannot be wired for the GPU either.
        if let Some(gpu) = member.device.gpu.as_mut().filter(|gpu| gpu.unified_memory) {
            gpu.memory_available.value = gpu.memory_available.value.min(left);
        }
    }
}

fn pairs(members: &[Member]) -> impl Iterator<Item = [String; 2]> {
    let later = |first: usize| members[first + 1..].iter().map(move |other| (first, other));
    (0..members.len()).flat_map(later).map(|(first, other)| [members[first].name.clone(), other.name.clone()])
}

fn link(chance: &mut Chance) -> Link {
    let drawn = "assumed: drawn from a range that is usual in homes";
    Link {
        latency: Sourced::new(Seconds(chance.between(LATENCY)), drawn),
        bandwidth: Sourced::new(BytesPerSecond(chance.between(BANDWIDTH) * 1e6 / 8.0), drawn),
    }
}

fn shrunk(mut cluster: Cluster, layers: u32) -> Result<Cluster, String> {
    let mut document = shipped_document(&cluster.model.name).map_err(|error| error.to_string())?;
    let share = f64::from(layers) / f64::from(document.layers.0);
    document.layers = Layers(layers);
    document.name = format!("{} cut to {layers} layers", document.name);
    document.vocabulary = (f64::from(document.vocabulary) * share) as u32;
    cluster.model = document.profile().map_err(|error| error.to_string())?;
    let shrink = |bytes: &mut Sourced<Bytes>| bytes.value = Bytes((bytes.value.as_f64() * share) as u64);
    for member in &mut cluster.members {
        let device = &mut member.device;
        shrink(&mut device.cpu.compute_buffer);
        shrink(&mut device.memory.total);
        shrink(&mut device.memory.available);
        device.memory.can_swap.iter_mut().for_each(shrink);
        device.memory.swap_available.iter_mut().for_each(shrink);
        if let Some(gpu) = &mut device.gpu {
            shrink(&mut gpu.memory_available);
            shrink(&mut gpu.compute_buffer);
        }
    }
    Ok(cluster)
}
