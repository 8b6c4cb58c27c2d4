//! The random clusters on which the strategies are compared.
//!
//! Devices of a random home ([`crate::devices`]) with a model of the paper's Table 4 that their memory holds or
//! just does not: the ratio of memory to weights is drawn, and other programs take what is more. The head is the
//! first device and never a phone.
//!
//! A small instance is a large one shrunk: the model is cut to few layers, and its vocabulary, all memories and
//! buffers shrink with it. So memory is as short as before, and all plans can be tried.
//!
//! Not here: which strategies plan for them ([`crate::evaluation`]).

use hearth_core::{Cluster, LinkTable, Member};
use hearth_profiles::model::{ModelProfile, shipped, shipped_document};
use hearth_profiles::{Bytes, BytesPerSecond, Layers, Link, Seconds, Sourced};
use hearth_schema::residency::{Residency, ResidencyOptions};
use hearth_schema::scenario::{KvFormat, Links, NamedLink, Workload};

use crate::devices::{KINDS, Kind, device};
use crate::random::Random;

const DEVICES: [u32; 2] = [2, 8];
const SMALL_DEVICES: [u32; 2] = [2, 3];
/// The models of the paper's Table 4, small ones first.
pub const MODELS: [&str; 7] =
    ["llama-8b", "llama-14b", "llama-30b", "llama-45b", "llama-60b", "llama-65b", "llama-70b"];
/// The models from which small instances are cut, and their numbers of layers, all with several valid numbers of
/// rounds.
const SMALL_MODELS: [&str; 5] = ["llama-30b", "llama-45b", "llama-60b", "llama-65b", "llama-70b"];
const SMALL_LAYERS: [u32; 3] = [8, 10, 12];

/// Memory of all devices over the bytes of the model. source: assumed; around the shortage of the paper's
/// testbed, 37 GiB for 40 GiB
const MEMORY_RATIO: [f64; 2] = [0.4, 1.4];
/// The least memory that other programs leave. source: assumed
const LEAST_MEMORY: Bytes = Bytes::mib(1024);
/// The shared memory that a GPU leaves to buffers and the mapping. source: assumed; twice the CPU's buffers
const BESIDE_GPU: Bytes = Bytes::mib(512);
/// Latency one way in seconds, and bandwidth in Mbit/s. source: prima.cpp paper, section 4: 3-7 ms and 320-610 Mbit/s
/// over Wi-Fi; widened to a cable and to a far room
const LATENCY: [f64; 2] = [1e-3, 1e-2];
const BANDWIDTH: [f64; 2] = [100.0, 900.0];
/// Tokens of the key-value cache. source: assumed
const CONTEXTS: [u32; 2] = [512, 1024];

pub fn cluster(seed: u64, number: u64, workload: Workload) -> Result<Cluster, String> {
    drawn(&mut Random::new(seed, number), DEVICES, &MODELS, workload)
}

/// Returns a cluster small enough to try all plans.
pub fn small(seed: u64, number: u64, workload: Workload) -> Result<Cluster, String> {
    // Apart from the streams of the large ones.
    let mut random = Random::new(seed, (1 << 32) + number);
    let layers = *random.pick(&SMALL_LAYERS);
    let large = drawn(&mut random, SMALL_DEVICES, &SMALL_MODELS, workload)?;
    shrunk(large, layers)
}

/// Returns the memory available to layers, divided by the bytes of the model.
pub fn memory_ratio(cluster: &Cluster) -> f64 {
    let main = cluster.members.iter().map(|member| member.device.memory.available.value.as_f64());
    (main.sum::<f64>() + cards(&cluster.members)) / cluster.model.total_bytes().as_f64()
}

/// Sets one residency on every device, or leaves the choice to the planner.
pub fn under(mut cluster: Cluster, residency: Option<Residency>) -> Cluster {
    let residency = residency.map(ResidencyOptions::of);
    cluster.members.iter_mut().for_each(|member| member.residency = residency);
    cluster
}

fn drawn(
    random: &mut Random,
    devices: [u32; 2],
    models: &[&str],
    workload: Workload,
) -> Result<Cluster, String> {
    let count = random.count(devices) as usize;
    let mut members: Vec<Member> = (0..count).map(|place| member(place, random)).collect();
    let model = wanted(&members, models, random)?;
    shorten(&mut members, &model, random.between(MEMORY_RATIO));
    let between = pairs(&members)
        .map(|devices| NamedLink { devices, link: Some(link(random)), unreachable: None })
        .collect();
    let default = link(random);
    Ok(Cluster {
        members,
        head: 0,
        links: LinkTable::new(Links { between, ..Links::constant(default) }),
        model,
        context: *random.pick(&CONTEXTS),
        kv_cache: KvFormat::F16,
        activations: hearth_schema::scenario::ActivationFormat::F32,
        draft: None,
        workload,
        seed: 1,
    })
}

fn member(place: usize, random: &mut Random) -> Member {
    let mut kind = *random.pick(&KINDS);
    if place == 0 && kind == Kind::Android {
        kind = Kind::Linux;
    }
    let name = format!("d{place}");
    let device = device(&name, kind, random);
    Member { name, address: None, device, residency: None }
}

/// Picks a model that exceeds the memory if other programs leave the least, or else the largest model.
fn wanted(members: &[Member], models: &[&str], random: &mut Random) -> Result<ModelProfile, String> {
    let models: Result<Vec<ModelProfile>, _> = models.iter().map(|name| shipped(name)).collect();
    let models = models.map_err(|error| error.to_string())?;
    let least = cards(members) + LEAST_MEMORY.as_f64() * members.len() as f64;
    let largest = models.len() - 1;
    let short = |model: &ModelProfile| MEMORY_RATIO[1] * model.total_bytes().as_f64() >= least;
    let first = models.iter().position(short).unwrap_or(largest);
    Ok(random.pick(&models[first..]).clone())
}

/// Returns the memory of all discrete GPUs.
fn cards(members: &[Member]) -> f64 {
    let own = |member: &Member| {
        let gpu = member.device.gpu.as_ref().filter(|gpu| !gpu.unified_memory);
        gpu.map_or(0.0, |gpu| gpu.memory_available.value.as_f64())
    };
    members.iter().map(own).sum()
}

/// Reduces the available memory, including GPU memory, to `ratio` of the model's bytes.
fn shorten(members: &mut [Member], model: &ModelProfile, ratio: f64) {
    let main: f64 = members.iter().map(|member| member.device.memory.available.value.as_f64()).sum();
    let wanted = (ratio * model.total_bytes().as_f64() - cards(members)).max(0.0);
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

fn link(random: &mut Random) -> Link {
    let drawn = "assumed: drawn from a range that is usual in homes";
    Link {
        latency: Sourced::new(Seconds(random.between(LATENCY)), drawn),
        bandwidth: Sourced::new(BytesPerSecond(random.between(BANDWIDTH) * 1e6 / 8.0), drawn),
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

#[cfg(test)]
mod tests {
    use hearth_profiles::{Device, Document};

    use super::*;
    use crate::evaluation::WORKLOAD;

    #[test]
    fn an_instance_depends_on_its_seed_and_number_only() {
        let drawn = |seed, number| cluster(seed, number, WORKLOAD).unwrap();
        let later = drawn(1, 7);
        let _ = drawn(1, 3);
        assert_eq!(drawn(1, 7), later);
        assert!(drawn(1, 8) != later && drawn(2, 7) != later);
    }

    #[test]
    fn every_drawn_device_is_a_valid_document() {
        for number in 0..50 {
            for cluster in [cluster(1, number, WORKLOAD), small(1, number, WORKLOAD)].map(Result::unwrap) {
                for member in &cluster.members {
                    let read = Device::from_yaml(&member.device.to_yaml());
                    assert!(read.is_ok(), "{number}: {}", read.unwrap_err());
                }
            }
        }
    }

    #[test]
    fn memory_is_mostly_short_and_shrinks_with_the_model() {
        let homes: Vec<f64> =
            (0..50).map(|number| memory_ratio(&cluster(1, number, WORKLOAD).unwrap())).collect();
        assert!(homes.iter().filter(|ratio| **ratio < 1.0).count() > 25, "{homes:?}");
        for number in 0..50 {
            let large = drawn(&mut Random::new(1, number), SMALL_DEVICES, &SMALL_MODELS, WORKLOAD).unwrap();
            let small = shrunk(large.clone(), 10).unwrap();
            // What grows with the width of the model but not with its layers is all that differs.
            let change = memory_ratio(&small) / memory_ratio(&large);
            assert!((0.9..1.1).contains(&change), "{number}: {change}");
        }
    }
}
