//! Findings about rates and sizes of devices and links that are far outside the usual range.
//!
//! A wrong unit can change a value by a factor of a thousand. Each quantity has a range that includes all products on
//! the market. Values outside the range are reported.
//!
//! Not here: values that are refused when a document is read, such as zero.

use hearth_core::Cluster;
use hearth_profiles::device::Device;
use hearth_profiles::{Bytes, BytesPerSecond, Link, Seconds};
use hearth_schema::Scenario;

use super::Finding;

/// The range of disk rates in bytes/s. source: a floppy disk reads 60 kB/s; a drive on PCI Express 6 x4 is specified
/// with 28 GB/s
const DISK_RATES: [f64; 2] = [5e4, 4e10];
/// The range of main memory bandwidth in bytes/s. source: a Raspberry Pi 1 reads about 0.3 GB/s; a server with 12
/// channels of DDR5 0.6 TB/s
const MEMORY_RATES: [f64; 2] = [1e8, 2e12];
/// The range of GPU memory bandwidth in bytes/s. source: as for main memory, and 8 TB/s of HBM3E
const GPU_MEMORY_RATES: [f64; 2] = [1e8, 2e13];
/// The range of link bandwidth in bytes/s. source: a modem has 56 kbit/s; the fastest Ethernet on the market 800
/// Gbit/s
const LINK_RATES: [f64; 2] = [7e3, 1e11];
/// The range of memory sizes in bytes. source: assumed; a process needs more than the minimum, and no home computer
/// has more than the maximum
const MEMORY_SIZES: [u64; 2] = [16 << 20, 8 << 40];

/// Checks the rates and sizes of devices and links.
pub(super) fn findings(scenario: &Scenario, cluster: &Cluster, found: &mut Vec<Finding>) {
    for (entry, member) in scenario.devices.iter().zip(&cluster.members) {
        device(&entry.name, &member.device, found);
    }
    link("scenario links.default", &scenario.links.default, found);
    for (index, named) in scenario.links.between.iter().enumerate() {
        if let Some(own) = &named.link {
            link(&format!("scenario links.between[{index}]"), own, found);
        }
    }
}

fn device(name: &str, device: &Device, found: &mut Vec<Finding>) {
    let disk = &device.disk;
    let optional = [
        ("disk.fault", &disk.fault),
        ("disk.populate", &disk.populate),
        ("disk.turnover", &disk.turnover),
        ("disk.limit", &disk.limit),
    ];
    rate(name, "disk.sequential", disk.sequential.value, DISK_RATES, found);
    for (key, own) in optional {
        if let Some(own) = own {
            rate(name, key, own.value, DISK_RATES, found);
        }
    }
    rate(name, "cpu.read_bandwidth", device.cpu.read_bandwidth.value, MEMORY_RATES, found);
    if let Some(gpu) = &device.gpu {
        rate(name, "gpu.read_bandwidth", gpu.read_bandwidth.value, GPU_MEMORY_RATES, found);
        bytes(name, "gpu.memory_available", gpu.memory_available.value, found);
    }
    bytes(name, "memory.available", device.memory.available.value, found);
}

fn rate(name: &str, key: &str, value: BytesPerSecond, range: [f64; 2], found: &mut Vec<Finding>) {
    if !(range[0]..=range[1]).contains(&value.0) {
        found.push(implausible(format!("device `{name}` {key}"), &value.to_string()));
    }
}

fn bytes(name: &str, key: &str, value: Bytes, found: &mut Vec<Finding>) {
    if !(MEMORY_SIZES[0]..=MEMORY_SIZES[1]).contains(&value.0) {
        found.push(implausible(format!("device `{name}` {key}"), &value.to_string()));
    }
}

/// The minimum latency of a link. source: assumed, the time of light for 30 m
const MIN_LATENCY: Seconds = Seconds(1e-7);

fn link(place: &str, link: &Link, found: &mut Vec<Finding>) {
    let (latency, bandwidth) = (link.latency.value, link.bandwidth.value);
    if !(LINK_RATES[0]..=LINK_RATES[1]).contains(&bandwidth.0) {
        found.push(implausible(format!("{place}.bandwidth"), &bandwidth.to_string()));
    }
    if latency < MIN_LATENCY && latency.0 > 0.0 {
        found.push(implausible(format!("{place}.latency"), &latency.to_string()));
    }
}

fn implausible(place: String, value: &str) -> Finding {
    let what = format!("{value} is outside the range of real hardware, but times are computed from it");
    Finding::warning("absurd-number", place, what, "check the value and its unit")
}
