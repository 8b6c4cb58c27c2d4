//! Random clusters for the comparison of strategies.
//!
//! A cluster has random home devices ([`crate::devices`]) and a model of the prima.cpp paper's Table 4. The ratio of
//! available memory to weights is random; other programs are assumed to use the rest of the memory. The first device is
//! the head and never a phone.
//!
//! A small instance is a cluster whose model is cut to 8 to 12 layers, so that all plans can be simulated. The
//! vocabulary and all memory and buffer sizes are reduced in proportion, so that the ratio of memory to weights stays
//! the same.
//!
//! Not here: the strategies ([`crate::evaluation`]).

use hearth_core::{Cluster, LinkTable, Member};
use hearth_profiles::model::{ModelProfile, shipped_document, shipped_profile};
use hearth_profiles::{Bytes, BytesPerSecond, Layers, Link, Seconds, Sourced};
use hearth_schema::residency::{Residency, ResidencyOptions};
use hearth_schema::scenario::{KvFormat, Links, PairLink, Workload};
use hearth_studies::StudyError;

use crate::devices::{DEVICE_KINDS, DeviceKind, random_device};
use crate::evaluation::{SMALL_WORKLOAD, WORKLOAD};
use crate::random::InstanceRng;

const DEVICES: [u32; 2] = [2, 8];
const SMALL_DEVICES: [u32; 2] = [2, 3];
/// The models of the prima.cpp paper's Table 4, in ascending order of size.
pub const MODEL_NAMES: [&str; 7] =
    ["llama-8b", "llama-14b", "llama-30b", "llama-45b", "llama-60b", "llama-65b", "llama-70b"];
/// The numbers of model layers of small instances, each of which allows several numbers of rounds.
const SMALL_LAYERS: [u32; 3] = [8, 10, 12];

/// Range of the ratio of the available memory of all devices to the size of the model. source: assumed; the prima.cpp
/// paper's testbed has 37 GiB of memory for models of up to 40 GiB
const MEMORY_RATIO: [f64; 2] = [0.4, 1.4];
/// Minimum available memory of a device. source: assumed
const MIN_MEMORY: Bytes = Bytes::from_mib(1024);
/// Unified memory that a GPU cannot use, for buffers and mapped files. source: assumed; twice the CPU's buffers
const RESERVED_BESIDE_GPU: Bytes = Bytes::from_mib(512);
/// Range of the one-way latency of a link, in seconds. source: prima.cpp paper, section 4 (3-7 ms over Wi-Fi), extended
/// to cables and distant rooms
const LATENCY: [f64; 2] = [1e-3, 1e-2];
/// Range of the bandwidth of a link, in Mbit/s. source: prima.cpp paper, section 4 (320-610 Mbit/s over Wi-Fi),
/// extended to cables and distant rooms
const BANDWIDTH: [f64; 2] = [100.0, 900.0];
/// The context lengths, in tokens. source: assumed
const CONTEXTS: [u32; 2] = [512, 1024];

pub fn generate_cluster(seed: u64, number: u64) -> Result<Cluster, StudyError> {
    random_cluster(&mut InstanceRng::new(seed, number), DEVICES, &MODEL_NAMES, WORKLOAD)
}

pub fn generate_small_cluster(seed: u64, number: u64) -> Result<Cluster, StudyError> {
    // These random streams differ from those of the large clusters.
    let mut random = InstanceRng::new(seed, (1 << 32) + number);
    let layers = *random.pick(&SMALL_LAYERS);
    let large = random_cluster(&mut random, SMALL_DEVICES, &MODEL_NAMES[2..], SMALL_WORKLOAD)?;
    shrunk(large, layers)
}

/// The properties of a cluster that the reports show.
pub struct ClusterProperties {
    number: usize,
    model: String,
    devices: usize,
    pub memory_ratio: f64,
}

impl ClusterProperties {
    pub fn new(number: usize, cluster: &Cluster) -> ClusterProperties {
        let (model, devices) = (cluster.model.name.clone(), cluster.members.len());
        ClusterProperties { number, model, devices, memory_ratio: memory_ratio(cluster) }
    }

    /// Returns the first cells of each CSV row: part of the study, number of the cluster, model, number of devices,
    /// memory ratio and residency. `part` is `homes` for random clusters, `small` for small instances.
    pub fn csv_cells(&self, part: &str, residency: &str) -> String {
        let ClusterProperties { number, model, devices, memory_ratio } = self;
        format!("{part},{number},{model},{devices},{memory_ratio:.4},{residency}")
    }
}

/// Returns the ratio of the memory available for layers to the size of the model.
fn memory_ratio(cluster: &Cluster) -> f64 {
    let members = &cluster.members;
    (main_memory(members) + discrete_gpu_memory(members)) / cluster.model.total_bytes().as_f64()
}

fn main_memory(members: &[Member]) -> f64 {
    members.iter().map(|member| member.device.memory.available_memory.value.as_f64()).sum()
}

/// Sets the residency policy of all devices; with `None` the planner chooses the policy of each device.
pub fn with_residency(mut cluster: Cluster, residency: Option<Residency>) -> Cluster {
    let residency = residency.map(ResidencyOptions::with_policy);
    cluster.members.iter_mut().for_each(|member| member.residency = residency);
    cluster
}

fn random_cluster(
    random: &mut InstanceRng,
    devices: [u32; 2],
    models: &[&str],
    workload: Workload,
) -> Result<Cluster, StudyError> {
    let count = random.uniform_integer(devices) as usize;
    let mut members: Vec<Member> = (0..count).map(|index| random_member(index, random)).collect();
    let model = pick_model(&members, models, random)?;
    limit_memory(&mut members, &model, random.uniform(MEMORY_RATIO));
    let named = |devices| PairLink { devices, link: Some(random_link(random)), unreachable_directions: None };
    let between = pairs(&members).map(named).collect();
    let default = random_link(random);
    Ok(Cluster {
        members,
        head: 0,
        links: LinkTable::new(Links { pair_links: between, ..Links::uniform(default) }),
        model,
        context_length: *random.pick(&CONTEXTS),
        kv_cache_format: KvFormat::F16,
        activation_format: hearth_schema::scenario::ActivationFormat::F32,
        draft_model: None,
        routes: None,
        recorded_arrivals: None,
        workload,
        seed: 1,
    })
}

fn random_member(index: usize, random: &mut InstanceRng) -> Member {
    let mut kind = *random.pick(&DEVICE_KINDS);
    if index == 0 && kind == DeviceKind::Android {
        kind = DeviceKind::Linux;
    }
    let name = format!("d{index}");
    let device = random_device(&name, kind, random);
    Member { name, address: None, device, residency: None }
}

/// Picks a random model that is large enough for the devices: the ratio of their minimum memory to the model size does
/// not exceed [`MEMORY_RATIO`]. If no model is large enough, returns the largest model.
fn pick_model(
    members: &[Member],
    models: &[&str],
    random: &mut InstanceRng,
) -> Result<ModelProfile, StudyError> {
    let models = models.iter().map(|name| shipped_profile(name)).collect::<Result<Vec<ModelProfile>, _>>()?;
    let min_memory = discrete_gpu_memory(members) + MIN_MEMORY.as_f64() * members.len() as f64;
    let largest = models.len() - 1;
    let is_large_enough = |model: &ModelProfile| MEMORY_RATIO[1] * model.total_bytes().as_f64() >= min_memory;
    let first = models.iter().position(is_large_enough).unwrap_or(largest);
    Ok(random.pick(&models[first..]).clone())
}

fn discrete_gpu_memory(members: &[Member]) -> f64 {
    let own = |member: &Member| {
        let gpu = member.device.gpu.as_ref().filter(|gpu| !gpu.unified_memory);
        gpu.map_or(0.0, |gpu| gpu.memory_available.value.as_f64())
    };
    members.iter().map(own).sum()
}

/// Reduces the main memory so that all memory, including that of discrete GPUs, is `ratio` times the model size.
fn limit_memory(members: &mut [Member], model: &ModelProfile, ratio: f64) {
    let main = main_memory(members);
    let wanted = (ratio * model.total_bytes().as_f64() - discrete_gpu_memory(members)).max(0.0);
    let share = (wanted / main).min(1.0);
    for member in members {
        let memory = &mut member.device.memory;
        let reduced = Bytes((memory.available_memory.value.as_f64() * share) as u64).max(MIN_MEMORY);
        memory.available_memory.value = reduced.min(memory.available_memory.value);
        let max_shared = memory.available_memory.value.saturating_sub(RESERVED_BESIDE_GPU);
        // A GPU that shares this memory cannot use the memory of other programs either.
        if let Some(gpu) = member.device.gpu.as_mut().filter(|gpu| gpu.unified_memory) {
            gpu.memory_available.value = gpu.memory_available.value.min(max_shared);
        }
    }
}

fn pairs(members: &[Member]) -> impl Iterator<Item = [String; 2]> {
    let later = |first: usize| members[first + 1..].iter().map(move |other| (first, other));
    (0..members.len()).flat_map(later).map(|(first, other)| [members[first].name.clone(), other.name.clone()])
}

fn random_link(random: &mut InstanceRng) -> Link {
    let source = "assumed: drawn from a range that is usual in homes";
    Link::constant(
        Sourced::new(Seconds(random.uniform(LATENCY)), source),
        Sourced::new(BytesPerSecond(random.uniform(BANDWIDTH) * 1e6 / 8.0), source),
    )
}

/// Cuts the model of a cluster to `layers` layers, and reduces all memory and buffer sizes in proportion.
fn shrunk(mut cluster: Cluster, layers: u32) -> Result<Cluster, StudyError> {
    let mut document = shipped_document(&cluster.model.name)?;
    let share = f64::from(layers) / f64::from(document.layers.0);
    document.layers = Layers(layers);
    document.name = format!("{} cut to {layers} layers", document.name);
    document.vocab_size = (f64::from(document.vocab_size) * share) as u32;
    cluster.model = document.to_profile()?;
    let shrink = |bytes: &mut Sourced<Bytes>| bytes.value = Bytes((bytes.value.as_f64() * share) as u64);
    for member in &mut cluster.members {
        let device = &mut member.device;
        shrink(&mut device.cpu.compute_buffer);
        shrink(&mut device.memory.total_memory);
        shrink(&mut device.memory.available_memory);
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
    use hearth_profiles::{DeviceProfile, Document};

    use super::*;

    #[test]
    fn instance_depends_only_on_its_seed_and_number() {
        let drawn = |seed, number| generate_cluster(seed, number).unwrap();
        let later = drawn(1, 7);
        let _ = drawn(1, 3);
        assert_eq!(drawn(1, 7), later);
        assert!(drawn(1, 8) != later && drawn(2, 7) != later);
    }

    #[test]
    fn every_random_device_is_a_valid_document() {
        for number in 0..50 {
            let clusters =
                [generate_cluster(1, number), generate_small_cluster(1, number)].map(Result::unwrap);
            for member in clusters.iter().flat_map(|cluster| &cluster.members) {
                let read = DeviceProfile::from_yaml(&member.device.to_yaml());
                assert!(read.is_ok(), "{number}: {}", read.unwrap_err());
            }
        }
    }

    #[test]
    fn memory_is_mostly_short_and_shrinks_with_the_model() {
        let ratios: Vec<f64> =
            (0..50).map(|number| memory_ratio(&generate_cluster(1, number).unwrap())).collect();
        assert!(ratios.iter().filter(|ratio| **ratio < 1.0).count() > 25, "{ratios:?}");
        for number in 0..50 {
            let mut random = InstanceRng::new(1, number);
            let large = random_cluster(&mut random, SMALL_DEVICES, &MODEL_NAMES[2..], WORKLOAD).unwrap();
            let small = shrunk(large.clone(), 10).unwrap();
            // They only differ by tensors whose size depends on the width of the model but not on its layers.
            let change = memory_ratio(&small) / memory_ratio(&large);
            assert!((0.9..1.1).contains(&change), "{number}: {change}");
        }
    }
}
