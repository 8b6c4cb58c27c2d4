//! Network links of a lab, emulated for its devices and measured for the simulator.
//!
//! The devices communicate over the loopback interface, or over the links of the scenario, which the transport
//! emulates (`links.emulation: delays`). The overhead of the emulation and of the loopback is measured and added to the
//! simulated links.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use hearth_core::LinkTable;
use hearth_core::cluster::Connection;
use hearth_profiles::link::wifi::Wifi;
use hearth_profiles::link::wifi_path::Endpoint;
use hearth_profiles::link::{PeerLink, wifi_path};
use hearth_profiles::{BytesPerSecond, Link, Seconds, Sourced};
use hearth_ring::probe::{self, ProbeOptions};
use hearth_ring::{EmulatedPath, EmulatedTransport, TcpTransport};
use hearth_schema::scenario::{LinkEmulation, Links};
use hearth_schema::{Plan, Scenario};
use hearth_workflow::files::write_in_folder;

use super::network;
use crate::diagnostics::Failure;
use crate::emulation::EmulatedLinks;

/// Latency of the emulated network path that is used to measure the overhead of the emulation. source: assumed, about
/// that of a cable
const PROBE_LATENCY: Seconds = Seconds(1e-3);
/// Address at which this process measures the link to itself; port 0 selects a free port.
const PROBE_ADDRESS: &str = "127.0.0.1:0";
/// Maximum latency of an emulated link; above it, heartbeats would be late.
/// source: the limit of `--link-delay`
const MAX_LATENCY: Seconds = Seconds(0.5);
/// Name of the lock file that serialises the transmissions on the emulated Wi-Fi channel.
const CHANNEL_LOCK: &str = "wifi-channel.lock";

/// Returns an error if the lab cannot emulate the links of a scenario. The error text continues a sentence that begins
/// with "the lab".
pub fn check(links: &Links) -> Result<(), String> {
    match links.emulation {
        LinkEmulation::None => return Ok(()),
        LinkEmulation::Namespaces => return network::check(links),
        LinkEmulation::Delays => {}
    }
    let own = links.pair_links.iter().filter_map(|named| named.link.as_ref());
    if let Some(link) = own.chain([&links.default_link]).find(|link| link.latency.value > MAX_LATENCY) {
        let latency = link.latency.value;
        return Err(format!("can emulate latencies of at most {MAX_LATENCY}, but a link has {latency}"));
    }
    let Some(wifi) = &links.wifi else { return Ok(()) };
    if wifi.tcp.slow_start_after_idle || wifi.tcp.loss_rate.value.0 > 0.0 {
        return Err(
            "cannot emulate the effects of TCP over Wi-Fi: set `tcp: {idle_restart: false, loss: {value: 0 %, source: \
                    \"set\"}}`"
                .into(),
        );
    }
    if wifi.channels.len() > 1 {
        return Err("can emulate only one Wi-Fi channel, but the scenario has several".into());
    }
    match wifi.channels.first() {
        Some(channel) if !channel.stalls.stall_kinds().is_empty() => {
            Err("cannot emulate stalls of a channel: omit `stalls`".into())
        }
        Some(channel) if channel.delay.median.value > MAX_LATENCY => {
            let delay = channel.delay.median.value;
            Err(format!("can emulate delays of at most {MAX_LATENCY}, but the Wi-Fi channel has {delay}"))
        }
        _ => Ok(()),
    }
}

/// Returns the emulated network path from one device to another. `channel_lock` is the lock file that serialises the
/// transmissions on the Wi-Fi channel.
fn path_between(
    table: &LinkTable,
    scenario: &Scenario,
    [from, to]: [&str; 2],
    channel_lock: &Path,
) -> Result<EmulatedPath, Failure> {
    let index = |name: &str| scenario.devices.iter().position(|entry| entry.name == name).unwrap_or(0) as u64;
    let (seed, rng_stream) = (scenario.seed, index(from) << 10 | index(to));
    let path = match table.connection(from, to) {
        // Unconnected devices exchange only heartbeats.
        None => EmulatedPath::with_latency(table.default_link().latency.value),
        Some(Connection::Link(link)) => EmulatedPath {
            bandwidth: Some(link.bandwidth.value),
            ..EmulatedPath::with_latency(link.latency.value)
        },
        Some(Connection::Wireless(wireless)) => wireless_path(&wireless, channel_lock).ok_or_else(|| {
            Failure::invalid(format!(
                "the lab can emulate Wi-Fi only between stations, but {from} and {to} are not both stations"
            ))
            .with_hint("add both devices to `stations`, or add a link for the pair to `links.between`")
        })?,
    };
    Ok(EmulatedPath { seed, rng_stream, ..path })
}

/// Returns the emulated network path between two Wi-Fi stations, whose messages use the channel twice: to and from the
/// access point. `None` if a device is not a station.
fn wireless_path(wireless: &wifi_path::WirelessPath, channel_lock: &Path) -> Option<EmulatedPath> {
    let (Endpoint::Station { channel, .. }, Endpoint::Station { .. }) =
        (&wireless.sender, &wireless.receiver)
    else {
        return None;
    };
    let delay = &channel.delay;
    Some(EmulatedPath {
        sigma: delay.sigma.value,
        overhead: channel.transmission_overhead.value * 2.0,
        bandwidth: Some(wireless.rate()),
        shared_medium_file: Some(channel_lock.to_path_buf()),
        ..EmulatedPath::with_latency(delay.median.value)
    })
}

/// Returns the links as the key `links` of a scenario has them.
pub fn to_yaml(links: &Links) -> Result<String, Failure> {
    serde_yaml::to_string(links).map_err(Failure::failed)
}

pub fn file_name(device: &str) -> String {
    format!("{device}.links.json")
}

/// Writes a file of emulated network paths for each device of a plan. The workers in the plan must have addresses.
pub fn write(folder: &Path, scenario: &Scenario, plan: &Plan) -> Result<(), Failure> {
    let table = LinkTable::new(scenario.links.clone());
    let channel_lock = folder.join(CHANNEL_LOCK);
    write_in_folder(folder, CHANNEL_LOCK, b"")?;
    let name = |index: usize| plan.devices[index % plan.devices.len()].name.as_str();
    for from in 0..plan.devices.len() {
        // The default path is for the head and for devices that receive only heartbeats.
        let other = if from == 0 { name(1) } else { name(0) };
        let mut paths_by_address = BTreeMap::new();
        for (to, device) in plan.devices.iter().enumerate().filter(|(to, _)| *to != from) {
            if let Some(address) = &device.address {
                let path = path_between(&table, scenario, [name(from), name(to)], &channel_lock)?;
                paths_by_address.insert(address.clone(), path);
            }
        }
        let default_path = path_between(&table, scenario, [name(from), other], &channel_lock)?;
        let links = EmulatedLinks { default_path, paths_by_address };
        let text = serde_json::to_vec_pretty(&links).map_err(Failure::failed)?;
        write_in_folder(folder, file_name(name(from)), &text)?;
    }
    Ok(())
}

/// Measures the links for the simulator: the loopback interface, or the links of the scenario plus the overhead of
/// their emulation. The measurement runs in this process, because it would increase the memory use of a worker.
pub fn measure(links: &Links) -> Result<Links, Failure> {
    let runtime = tokio::runtime::Runtime::new().map_err(Failure::failed)?;
    let options = ProbeOptions::quick();
    if links.emulation.is_none() {
        let probed = runtime.block_on(probe::measure_link_to_self(&TcpTransport, PROBE_ADDRESS, options))?;
        return Ok(Links::uniform(Link::constant(probed.latency, probed.bandwidth)));
    }
    let paths = Arc::new(|_: Option<&str>| Ok(EmulatedPath::with_latency(PROBE_LATENCY)));
    let network = EmulatedTransport::new(TcpTransport, paths);
    let probed = runtime.block_on(probe::measure_link_to_self(&network, PROBE_ADDRESS, options))?;
    Ok(with_overhead(links, &probed))
}

/// Adds the overhead of the emulation to the links: the measured latency of the probed path minus [`PROBE_LATENCY`].
fn with_overhead(links: &Links, probed: &PeerLink) -> Links {
    let overhead = Seconds((probed.latency.value.0 - PROBE_LATENCY.0).max(0.0));
    let shifted = |latency: &Sourced<Seconds>| {
        let source = format!("set: from the scenario, plus {overhead} of measured emulation overhead");
        Sourced::new(latency.value + overhead, source)
    };
    let slowed = |bandwidth: &Sourced<BytesPerSecond>| {
        let both = 1.0 / (1.0 / bandwidth.value.0 + 1.0 / probed.bandwidth.value.0);
        Sourced::new(BytesPerSecond(both), "set: of the scenario, in series with the measured loopback")
    };
    let link = |link: &Link| Link {
        latency: shifted(&link.latency),
        bandwidth: slowed(&link.bandwidth),
        ..link.clone()
    };
    let mut found = links.clone();
    found.default_link = link(&found.default_link);
    for named in &mut found.pair_links {
        named.link = named.link.as_ref().map(link);
    }
    for channel in found.wifi.iter_mut().flat_map(|wifi: &mut Wifi| &mut wifi.channels) {
        channel.delay.median = shifted(&channel.delay.median);
    }
    found
}

#[cfg(test)]
mod tests {
    use hearth_profiles::link::tcp::TcpParameters;

    use super::*;

    fn links(yaml: &str) -> Links {
        serde_yaml::from_str(yaml).expect("links")
    }

    const WIRE: &str = "emulation: delays
default: {latency: {value: 5 ms, source: t}, bandwidth: {value: 100 MB/s, source: t}}
";

    #[test]
    fn overhead_of_emulation_is_added_to_the_link() {
        let measured = |value| Sourced::new(value, "measured");
        let probed = PeerLink {
            peer: "self".into(),
            latency: measured(Seconds(1.2e-3)),
            bandwidth: Sourced::new(BytesPerSecond(1e9), "measured"),
            jitter: None,
            loss: None,
        };
        let found = with_overhead(&links(WIRE), &probed);
        assert!((found.default_link.latency.value.0 - 5.2e-3).abs() < 1e-9);
        // 1 / (1/100 + 1/1000) MB/s.
        assert!((found.default_link.bandwidth.value.0 / 90.909e6 - 1.0).abs() < 1e-4);
    }

    #[test]
    fn unsupported_links_are_rejected() {
        assert_eq!(check(&links(WIRE)), Ok(()));
        let far = WIRE.replace("5 ms", "600 ms");
        assert!(check(&links(&far)).is_err_and(|why| why.contains("500 ms")));
        let wifi = |rest: &str| {
            links(&format!(
                "{WIRE}wifi:
  channels: [{{name: c, bandwidth: {{value: 400 Mbit/s, source: t}}, stations: [a, b]{rest}}}]
  tcp: {{idle_restart: false, loss: {{value: 0 %, source: t}}}}
"
            ))
        };
        assert_eq!(check(&wifi("")), Ok(()));
        assert!(check(&wifi(", stalls: awdl")).is_err_and(|why| why.contains("stalls")));
        let restarting = Links {
            wifi: wifi("").wifi.map(|wifi| Wifi { tcp: TcpParameters::default(), ..wifi }),
            ..links(WIRE)
        };
        assert!(check(&restarting).is_err_and(|why| why.contains("idle_restart")));
    }

    #[test]
    fn each_pair_of_devices_has_its_own_network_path() {
        let scenario: Scenario = serde_yaml::from_str(
            "{schema: scenario/1, name: n, model: {profile: tiny}, context: 64, workload: {prompt: 1, generate: 1},
devices: [{name: a, profile: d1}, {name: b, profile: d1}, {name: c, profile: d1}],
links: {emulation: delays, default: {latency: {value: 5 ms, source: t}, bandwidth: {value: 1 MB/s, source: t}},
  between: [{devices: [b, c], link: {latency: {value: 9 ms, source: t}, bandwidth: {value: 2 MB/s, source: t}}}]}}",
        )
        .expect("a scenario");
        let table = LinkTable::new(scenario.links.clone());
        let path = |pair| path_between(&table, &scenario, pair, Path::new("medium")).expect("a path");
        let (near, far) = (path(["a", "b"]), path(["c", "b"]));
        assert_eq!((near.latency, near.bandwidth), (Seconds(0.005), Some(BytesPerSecond(1e6))));
        assert_eq!((far.latency, far.bandwidth), (Seconds(0.009), Some(BytesPerSecond(2e6))));
        assert_ne!((near.seed, near.rng_stream), (path(["b", "a"]).seed, path(["b", "a"]).rng_stream));
    }
}
