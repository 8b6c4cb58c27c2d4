//! Findings about implausible rates and sizes of devices and links.
//!
//! Each quantity has a range that includes all products on the market, so that wrong units are found.

use std::fmt::Display;

use hearth_core::Cluster;
use hearth_profiles::device::DeviceProfile;
use hearth_profiles::{Bytes, BytesPerSecond, Link, Seconds};
use hearth_schema::Scenario;

use super::Finding;

/// The plausible disk read rates. source: a floppy disk reads 60 kB/s; a drive on PCI Express 6 x4 has up to 28 GB/s
const DISK_RATES: [BytesPerSecond; 2] = [BytesPerSecond(5e4), BytesPerSecond(4e10)];
/// The plausible RAM bandwidths. source: a Raspberry Pi 1 reads about 0.3 GB/s; 12 channels of DDR5 read 0.6 TB/s
const MEMORY_RATES: [BytesPerSecond; 2] = [BytesPerSecond(1e8), BytesPerSecond(2e12)];
/// The plausible GPU memory bandwidths. source: the minimum as for RAM; HBM3E reads 8 TB/s
const GPU_MEMORY_RATES: [BytesPerSecond; 2] = [BytesPerSecond(1e8), BytesPerSecond(2e13)];
/// The plausible link bandwidths. source: a modem has 56 kbit/s; the fastest Ethernet on the market has 800 Gbit/s
const LINK_RATES: [BytesPerSecond; 2] = [BytesPerSecond(7e3), BytesPerSecond(1e11)];
/// The plausible memory sizes of a device. source: assumed
const MEMORY_SIZES: [Bytes; 2] = [Bytes(16 << 20), Bytes(8 << 40)];

pub(super) fn findings(scenario: &Scenario, cluster: &Cluster, found: &mut Vec<Finding>) {
    for (entry, member) in scenario.devices.iter().zip(&cluster.members) {
        device(&entry.name, &member.device, found);
    }
    link("scenario links.default", &scenario.links.default_link, found);
    for (index, named) in scenario.links.pair_links.iter().enumerate() {
        if let Some(own) = &named.link {
            link(&format!("scenario links.between[{index}]"), own, found);
        }
    }
}

fn device(name: &str, device: &DeviceProfile, found: &mut Vec<Finding>) {
    let location = |key: &str| format!("device `{name}` {key}");
    let disk = &device.disk;
    for (key, own) in [
        ("disk.sequential", Some(&disk.sequential_bandwidth)),
        ("disk.fault", disk.fault_bandwidth.as_ref()),
        ("disk.populate", disk.populate_bandwidth.as_ref()),
        ("disk.turnover", disk.page_cache_throughput.as_ref()),
        ("disk.limit", disk.bandwidth_limit.as_ref()),
    ] {
        if let Some(own) = own {
            check_range(&location(key), own.value, DISK_RATES, found);
        }
    }
    check_range(&location("cpu.read_bandwidth"), device.cpu.read_bandwidth.value, MEMORY_RATES, found);
    if let Some(gpu) = &device.gpu {
        check_range(&location("gpu.read_bandwidth"), gpu.read_bandwidth.value, GPU_MEMORY_RATES, found);
        check_range(&location("gpu.memory_available"), gpu.memory_available.value, MEMORY_SIZES, found);
    }
    check_range(&location("memory.available"), device.memory.available_memory.value, MEMORY_SIZES, found);
}

fn check_range<T: PartialOrd + Display + Copy>(
    location: &str,
    value: T,
    range: [T; 2],
    found: &mut Vec<Finding>,
) {
    let [least, most] = range;
    if !(least..=most).contains(&value) {
        let what = format!("{value} is outside the range of real hardware, but times are computed from it");
        found.push(Finding::warning("absurd-number", location, what, "check the value and its unit"));
    }
}

/// The latency below which the latency of a link is implausible. source: assumed, the time of light for 30 m
const MIN_LATENCY: Seconds = Seconds(1e-7);

fn link(location: &str, link: &Link, found: &mut Vec<Finding>) {
    check_range(&format!("{location}.bandwidth"), link.bandwidth.value, LINK_RATES, found);
    if link.latency.value.0 > 0.0 {
        let unlimited = Seconds(f64::INFINITY);
        check_range(&format!("{location}.latency"), link.latency.value, [MIN_LATENCY, unlimited], found);
    }
}
