//! Random home devices, and the ranges of their parameters.
//!
//! Most parameters are drawn from a range with a stated source. The others, such as buffers, copies and the share of
//! the peak bandwidth that a run reaches, are those of the shipped devices d1 to d6.
//!
//! Other programs release no memory to a run, except on Android. So the latency model and the simulator assume the same
//! available memory, and gaps between plans are not caused by different capacities.
//!
//! Not here: the number of devices in a cluster, and the reduction of their memory ([`crate::clusters`]).

use hearth_profiles::device::{Cpu, Disk, Gpu, GpuKind, Memory, Os, PageCachePolicy, TransferCost};
use hearth_profiles::{
    Bytes, BytesPerSecond, DeviceProfile, Document, FlopsPerSecond, Format, FormatMap, Seconds, Sourced,
};

use crate::random::InstanceRng;

const MIB: f64 = 1024.0 * 1024.0;
const GIB: f64 = 1024.0 * MIB;

const DRAWN: &str = "set: drawn from a range that is usual in homes";
const AS_SHIPPED: &str = "set: as in the shipped devices d1 to d6";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceKind {
    /// A desktop or laptop with an NVIDIA card.
    LinuxCuda,
    /// A desktop or laptop without an NVIDIA card.
    Linux,
    /// An Apple computer with a GPU in use.
    MacMetal,
    /// An Apple computer without a GPU in use.
    Mac,
    /// A phone or tablet.
    Android,
}

/// The kinds of devices; a frequent kind occurs several times. source: assumed
pub const DEVICE_KINDS: [DeviceKind; 10] = {
    use DeviceKind::{Android, Linux, LinuxCuda, Mac, MacMetal};
    [LinuxCuda, LinuxCuda, LinuxCuda, Linux, Linux, MacMetal, MacMetal, Mac, Android, Android]
};

/// Graphics cards: name, memory in GiB and peak bandwidth in GB/s. source: NVIDIA's specifications
const CARDS: [(&str, f64, f64); 8] = [
    ("GTX 1650", 4.0, 128.0),
    ("RTX 3050", 8.0, 224.0),
    ("RTX 2060", 6.0, 336.0),
    ("RTX 3060", 12.0, 360.0),
    ("RTX 4060", 8.0, 272.0),
    ("RTX 3070", 8.0, 448.0),
    ("GTX 1080 Ti", 11.0, 484.0),
    ("RTX 2080 Ti", 11.0, 616.0),
];

/// Share of a card's peak bandwidth that a run reaches. source: the shipped devices d2 and d3
const CARD_SHARE: f64 = 0.85;
/// Apple chips: name and peak bandwidth in GB/s. source: Apple's specifications of M1, M2, M4, M1 Pro
const APPLE: [(&str, f64); 4] = [("M1", 68.25), ("M2", 100.0), ("M4", 120.0), ("M1 Pro", 200.0)];
/// Share of an Apple chip's peak bandwidth that its CPU reaches. source: the shipped device d1 (47.2 of 68.3 GB/s)
const APPLE_SHARE: f64 = 0.69;
/// Share of the memory that Metal recommends as the working set. source: `recommendedMaxWorkingSetSize` that llama.cpp
/// prints on machines with 8 and 16 GB: 5461 and 10923 MiB
const METAL_SHARE: f64 = 2.0 / 3.0;

struct Ranges {
    /// Memory sizes in GiB. source: devices on the market
    memory: &'static [f64],
    /// Range of the share of the memory that is available to a run. source: prima.cpp paper, Table 3: 0.24 to 0.85
    available: [f64; 2],
    /// Range of the memory bandwidth in GB/s. source: assumed; from two channels of DDR4-2133 at half their peak
    /// bandwidth to two channels of DDR5-5600 at 80 %; phones: from the bandwidth of d4 and d5 to three times as much
    read: [f64; 2],
    /// Range of the CPU speed with Q4_K in GFLOP/s. source: assumed; 4 old cores with AVX2 to 16 new cores
    speed: [f64; 2],
    /// Range of the sequential read rate in GB/s. source: assumed; SATA to NVMe on PCI Express 3; phones: eMMC to UFS 4
    disk: [f64; 2],
}

const LINUX: Ranges = Ranges {
    memory: &[8.0, 8.0, 16.0, 16.0, 32.0],
    available: [0.3, 0.8],
    read: [17.0, 72.0],
    speed: [100.0, 800.0],
    disk: [0.4, 3.5],
};
const MAC: Ranges = Ranges {
    memory: &[8.0, 8.0, 16.0, 24.0],
    available: [0.25, 0.8],
    read: [0.0, 0.0],
    speed: [150.0, 700.0],
    disk: [0.5, 3.0],
};
const ANDROID: Ranges = Ranges {
    memory: &[6.0, 8.0, 12.0, 16.0],
    available: [0.2, 0.6],
    read: [6.0, 24.0],
    speed: [30.0, 120.0],
    disk: [0.3, 2.0],
};

/// Range of the read rate of a hard disk in GB/s. source: assumed; the inner and outer tracks at 7200 rpm
const HARD_DISK: [f64; 2] = [0.08, 0.2];
/// Percentage of the Linux devices that have a hard disk. source: assumed
const HARD_DISK_PERCENT: u32 = 12;
/// Range of the ratio of the random to the sequential read rate of a Mac's disk. source: assumed
const RANDOM_SHARE: [f64; 2] = [0.3, 1.0];
/// Range of the free swap space on Android in GiB. source: assumed; a quarter of 4 to 12 GiB of memory
const SWAP_GIB: [f64; 2] = [1.0, 3.0];
/// Share of other programs' memory that can be swapped out on Android. source: the shipped devices
const SWAPPABLE_SHARE: f64 = 0.78;

pub fn random_device(name: &str, kind: DeviceKind, random: &mut InstanceRng) -> DeviceProfile {
    let (os, ranges) = match kind {
        DeviceKind::Linux | DeviceKind::LinuxCuda => (Os::Linux, &LINUX),
        DeviceKind::Mac | DeviceKind::MacMetal => (Os::Macos, &MAC),
        DeviceKind::Android => (Os::Android, &ANDROID),
    };
    let total = *random.pick(ranges.memory);
    let available = total * random.uniform(ranges.available);
    let (chip, apple) = *random.pick(&APPLE);
    let read = if os == Os::Macos { apple * APPLE_SHARE } else { random.skewed_low(ranges.read) };
    let speed = random.skewed_low(ranges.speed);
    let gpu = match kind {
        DeviceKind::LinuxCuda => Some(card(random)),
        DeviceKind::MacMetal => Some(metal(chip, apple, speed, total)),
        _ => None,
    };
    let disk = disk(os, ranges, random);
    let swap = random.uniform(SWAP_GIB);
    let android = os == Os::Android;
    DeviceProfile {
        schema: DeviceProfile::SCHEMA.into(),
        name: name.into(),
        description: String::new(),
        os,
        cpu: Cpu {
            name: if os == Os::Macos { format!("Apple {chip}") } else { "drawn".into() },
            cores: 8,
            matvec: speeds(speed),
            matvec_streamed: FormatMap::default(),
            matmul_streamed: FormatMap::default(),
            matmul_medium: FormatMap::default(),
            matmul: FormatMap::default(),
            read_bandwidth: rate(read),
            attention_rate: None,
            activation_bandwidth: None,
            layer_overhead: None,
            window_overhead: None,
            token_overhead: None,
            kv_copy: copy(0.0, read),
            compute_buffer: Sourced::new(Bytes::from_mib(256), AS_SHIPPED),
            quota: None,
        },
        memory: Memory {
            total_memory: bytes(total * GIB),
            available_memory: bytes(available * GIB),
            can_swap: android.then(|| bytes(SWAPPABLE_SHARE * (total - available) * GIB)),
            swap_available: android.then(|| bytes(swap * GIB)),
            page_cache: if os == Os::Macos { PageCachePolicy::PaperLinear } else { PageCachePolicy::TwoList },
            reclaim_parameters: None,
        },
        disk,
        gpu,
        soc: None,
        peer_links: vec![],
    }
}

fn card(random: &mut InstanceRng) -> Gpu {
    let (name, memory, peak) = *random.pick(&CARDS);
    // source: assumed; the desktop uses the rest of the card's memory
    let free = random.uniform([0.85, 1.0]);
    let read = peak * CARD_SHARE;
    // source: assumed; arithmetic of a card is many times what decoding needs, as in d2 and d3
    let speed = read * 100.0;
    // source: d2 and d3; PCI Express 3.0 x16
    let transfer = copy(1e-5, 12.0);
    Gpu {
        kind: GpuKind::Cuda,
        unified_memory: false,
        upload: transfer.clone(),
        download: transfer,
        compute_buffer: Sourced::new(Bytes(730_000_000), AS_SHIPPED),
        ..unified_gpu(name.into(), speed, read, memory * free * GIB)
    }
}

fn metal(chip: &str, peak: f64, cpu_speed: f64, total: f64) -> Gpu {
    // source: assumed; several times the CPU's
    let speed = cpu_speed * 5.0;
    unified_gpu(format!("Apple {chip}"), speed, peak * CARD_SHARE, total * METAL_SHARE * GIB)
}

fn unified_gpu(name: String, speed: f64, read: f64, memory: f64) -> Gpu {
    Gpu {
        kind: GpuKind::Metal,
        name,
        unified_memory: true,
        matvec: speeds(speed),
        matmul: FormatMap::default(),
        read_bandwidth: rate(read),
        memory_available: bytes(memory),
        kv_copy: copy(0.0, read),
        upload: copy(0.0, read),
        download: copy(0.0, read),
        compute_buffer: Sourced::new(Bytes::from_mib(256), AS_SHIPPED),
        window_overhead: None,
        layer_overhead: None,
    }
}

fn disk(os: Os, ranges: &Ranges, random: &mut InstanceRng) -> Disk {
    let hard = random.uniform_integer([1, 100]) <= HARD_DISK_PERCENT && os == Os::Linux;
    let sequential = if hard { random.uniform(HARD_DISK) } else { random.uniform(ranges.disk) };
    let random = random.uniform(RANDOM_SHARE) * sequential;
    Disk {
        sequential_bandwidth: rate(sequential),
        fault_bandwidth: None,
        random_bandwidth: (os == Os::Macos).then(|| rate(random)),
        populate_bandwidth: None,
        page_cache_throughput: None,
        latency: Some(Sourced::new(Seconds(1e-4), AS_SHIPPED)),
        piece_latency: None,
        bandwidth_limit: None,
        read_ahead_window: (os != Os::Macos).then(|| Sourced::new(Bytes(128 << 10), AS_SHIPPED)),
    }
}

/// Returns the speed by format from the speed with Q4_K in GFLOP/s. source: the proportions of the shipped devices
fn speeds(q4_k: f64) -> FormatMap<Sourced<FlopsPerSecond>> {
    let speed = |share: f64| Sourced::new(FlopsPerSecond(q4_k * share * 1e9), DRAWN);
    [(Format::Q4K, speed(1.0)), (Format::Q6K, speed(0.69)), (Format::F32, speed(0.14))].into_iter().collect()
}

fn rate(gigabytes: f64) -> Sourced<BytesPerSecond> {
    Sourced::new(BytesPerSecond(gigabytes * 1e9), DRAWN)
}

fn copy(latency: f64, gigabytes: f64) -> TransferCost {
    TransferCost { latency: Sourced::new(Seconds(latency), AS_SHIPPED), bandwidth: rate(gigabytes) }
}

fn bytes(value: f64) -> Sourced<Bytes> {
    Sourced::new(Bytes(value as u64), DRAWN)
}
