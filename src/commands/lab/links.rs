//! The links of a lab, and what the simulator is told of them.
//!
//! They are the machine's loopback, measured; or those of the scenario, emulated in the transport (`links.emulated`). The
//! cost of the emulation and of the loopback is measured and added to the links of the simulator.
//!
//! Not here: how a message is delayed (`hearth_ring::Emulated`).

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use hearth_core::LinkTable;
use hearth_core::cluster::Connection;
use hearth_profiles::link::path::Endpoint;
use hearth_profiles::link::wifi::Wifi;
use hearth_profiles::link::{PeerLink, path};
use hearth_profiles::{BytesPerSecond, Link, Seconds, Sourced};
use hearth_ring::probe::{self, ProbeEffort};
use hearth_ring::{self as ring, EmulatedPath, EmulatedTransport};
use hearth_schema::Plan;
use hearth_schema::Scenario;
use hearth_schema::scenario::Links;
use hearth_workflow::files::write_in;

use crate::diagnostics::Failure;
use crate::emulation::EmulatedLinks;

/// The latency of the way that measures what emulating costs.
/// source: assumed, as a cable's
const PROBED: Seconds = Seconds(1e-3);
/// Where a link to this process itself is measured: any port.
const PLACE: &str = "127.0.0.1:0";
/// The longest way: later signs of life would be missed.
/// source: as of `--link-delay`
const LONGEST: Seconds = Seconds(0.5);

/// Whether the lab can emulate a scenario's links.
pub fn check(links: &Links) -> Result<(), String> {
    if !links.emulated {
        return Ok(());
    }
    let own = links.between.iter().filter_map(|named| named.link.as_ref());
    if let Some(link) = own.chain([&links.default]).find(|link| link.latency.value > LONGEST) {
        return Err(format!("emulates links of at most {LONGEST}, and one takes {}", link.latency.value));
    }
    let Some(air) = &links.wifi else { return Ok(()) };
    if air.tcp.idle_restart || air.tcp.loss.value.0 > 0.0 {
        return Err(
            "emulates air without what TCP adds: say `tcp: {idle_restart: false, loss: {value: 0 %, source: \
                    \"set\"}}`"
                .into(),
        );
    }
    if air.channels.len() > 1 {
        return Err("emulates one channel, and the scenario has several".into());
    }
    match air.channels.first() {
        Some(channel) if !channel.stalls.kinds().is_empty() => {
            Err("emulates no stalls of a channel: leave `stalls` out".into())
        }
        Some(channel) if channel.delay.median.value > LONGEST => {
            Err(format!("emulates delays of at most {LONGEST}"))
        }
        _ => Ok(()),
    }
}

/// What it takes from one device to another.
fn way(
    table: &LinkTable,
    scenario: &Scenario,
    pair: [&str; 2],
    medium: &Path,
) -> Result<EmulatedPath, Failure> {
    let index = |name: &str| scenario.devices.iter().position(|entry| entry.name == name).unwrap_or(0) as u64;
    let (seed, stream) = (scenario.seed, index(pair[0]) << 10 | index(pair[1]));
    match table.connection(pair[0], pair[1]) {
        // The plan does not send there; only signs of life do.
        None => Ok(EmulatedPath { seed, stream, ..EmulatedPath::of(table.default_link().latency.value) }),
        Some(Connection::Link(link)) => Ok(EmulatedPath {
            bandwidth: Some(link.bandwidth.value),
            seed,
            stream,
            ..EmulatedPath::of(link.latency.value)
        }),
        Some(Connection::Wireless(air)) => {
            over_air(&air, medium).map(|way| EmulatedPath { seed, stream, ..way }).ok_or_else(|| {
                let what = format!(
                    "the lab emulates air between its stations, and {} and {} are not both on it",
                    pair[0], pair[1]
                );
                Failure::unusable(what)
                    .hint("put both into `stations`, or give the pair a link in `links.between`")
            })
        }
    }
}

/// A message between two stations is on the air twice.
fn over_air(air: &path::WirelessPath, medium: &Path) -> Option<EmulatedPath> {
    let (Endpoint::Station { channel, .. }, Endpoint::Station { .. }) = (&air.sender, &air.receiver) else {
        return None;
    };
    let delay = &channel.delay;
    Some(EmulatedPath {
        sigma: delay.sigma.value,
        overhead: channel.overhead.value * 2.0,
        bandwidth: Some(air.rate()),
        medium: Some(medium.to_path_buf()),
        ..EmulatedPath::of(delay.median.value)
    })
}

/// The name of a device's file.
pub fn file_name(device: &str) -> String {
    format!("{device}.links.json")
}

/// Writes a file of ways for each device of a plan whose workers have their addresses.
pub fn write(folder: &Path, scenario: &Scenario, plan: &Plan) -> Result<(), Failure> {
    let table = LinkTable::new(scenario.links.clone());
    let medium = folder.join("air.lock");
    write_in(folder, "air.lock", b"")?;
    let name = |place: usize| plan.devices[place % plan.devices.len()].name.as_str();
    for place in 0..plan.devices.len() {
        // The head's address is not known before; and who is connected to the head is sent signs of life only.
        let other = if place == 0 { name(1) } else { name(0) };
        let mut peers = BTreeMap::new();
        for (to, device) in plan.devices.iter().enumerate().filter(|(to, _)| *to != place) {
            if let Some(address) = &device.address {
                peers.insert(address.clone(), way(&table, scenario, [name(place), name(to)], &medium)?);
            }
        }
        let others = way(&table, scenario, [name(place), other], &medium)?;
        let text = EmulatedLinks { others, peers }.to_json()?;
        write_in(folder, file_name(name(place)), text.as_bytes())?;
    }
    Ok(())
}

/// What the simulator is told: the loopback, or the scenario's links with what emulating them costs. Measured within this
/// process: a worker that was measured would keep the memory that this takes.
pub fn measured(links: &Links) -> Result<Links, Failure> {
    let runtime = tokio::runtime::Runtime::new().map_err(Failure::running)?;
    let effort = ProbeEffort::quick();
    if !links.emulated {
        let link = runtime.block_on(probe::link_to_self(&ring::TcpTransport, PLACE, effort))?;
        let default = Link { latency: link.latency, bandwidth: link.bandwidth };
        return Ok(Links::constant(default));
    }
    let network = EmulatedTransport::new(ring::TcpTransport, Arc::new(|_| Ok(EmulatedPath::of(PROBED))));
    let probed = runtime.block_on(probe::link_to_self(&network, PLACE, effort))?;
    Ok(with_cost(links, &probed))
}

/// The links with what a way of [`PROBED`] takes beyond that.
fn with_cost(links: &Links, probed: &PeerLink) -> Links {
    let cost = Seconds((probed.latency.value.0 - PROBED.0).max(0.0));
    let shifted = |latency: &Sourced<Seconds>| {
        let source = format!("set: the scenario's, and {cost} that emulating it takes, measured");
        Sourced::new(latency.value + cost, source)
    };
    let slowed = |bandwidth: &Sourced<BytesPerSecond>| {
        let both = 1.0 / (1.0 / bandwidth.value.0 + 1.0 / probed.bandwidth.value.0);
        Sourced::new(
            BytesPerSecond(both),
            "set: the scenario's, one after the other with the measured loopback",
        )
    };
    let link = |link: &Link| Link { latency: shifted(&link.latency), bandwidth: slowed(&link.bandwidth) };
    let mut found = links.clone();
    found.default = link(&found.default);
    for named in &mut found.between {
        named.link = named.link.as_ref().map(link);
    }
    for channel in found.wifi.iter_mut().flat_map(|air: &mut Wifi| &mut air.channels) {
        channel.delay.median = shifted(&channel.delay.median);
    }
    found
}

#[cfg(test)]
mod tests {
    use hearth_profiles::link::wifi::Tcp;

    use super::*;

    fn links(yaml: &str) -> Links {
        serde_yaml::from_str(yaml).expect("links")
    }

    const WIRE: &str = "emulated: true
default: {latency: {value: 5 ms, source: t}, bandwidth: {value: 100 MB/s, source: t}}
";

    #[test]
    fn what_emulating_costs_belongs_to_the_link() {
        let measured = |value| Sourced::new(value, "measured");
        let probed = PeerLink {
            peer: "self".into(),
            latency: measured(Seconds(1.2e-3)),
            bandwidth: Sourced::new(BytesPerSecond(1e9), "measured"),
        };
        let found = with_cost(&links(WIRE), &probed);
        assert!((found.default.latency.value.0 - 5.2e-3).abs() < 1e-9);
        // 1 / (1/100 + 1/1000) MB/s.
        assert!((found.default.bandwidth.value.0 / 90.909e6 - 1.0).abs() < 1e-4);
    }

    #[test]
    fn what_cannot_be_emulated_is_refused() {
        assert_eq!(check(&links(WIRE)), Ok(()));
        let far = WIRE.replace("5 ms", "600 ms");
        assert!(check(&links(&far)).is_err_and(|why| why.contains("500 ms")));
        let air = |rest: &str| {
            links(&format!(
                "{WIRE}wifi:
  channels: [{{name: c, bandwidth: {{value: 400 Mbit/s, source: t}}, stations: [a, b]{rest}}}]
  tcp: {{idle_restart: false, loss: {{value: 0 %, source: t}}}}
"
            ))
        };
        assert_eq!(check(&air("")), Ok(()));
        assert!(check(&air(", stalls: awdl")).is_err_and(|why| why.contains("stalls")));
        let restarting =
            Links { wifi: air("").wifi.map(|wifi| Wifi { tcp: Tcp::default(), ..wifi }), ..links(WIRE) };
        assert!(check(&restarting).is_err_and(|why| why.contains("idle_restart")));
    }

    #[test]
    fn each_device_is_told_the_way_to_each_other() {
        let scenario: Scenario = serde_yaml::from_str(
            "{schema: scenario/1, name: n, model: {profile: tiny}, context: 64, workload: {prompt: 1, generate: 1},
devices: [{name: a, profile: d1}, {name: b, profile: d1}, {name: c, profile: d1}],
links: {emulated: true, default: {latency: {value: 5 ms, source: t}, bandwidth: {value: 1 MB/s, source: t}},
  between: [{devices: [b, c], link: {latency: {value: 9 ms, source: t}, bandwidth: {value: 2 MB/s, source: t}}}]}}",
        )
        .expect("a scenario");
        let table = LinkTable::new(scenario.links.clone());
        let way = |pair| way(&table, &scenario, pair, Path::new("air")).expect("a way");
        let (near, far) = (way(["a", "b"]), way(["c", "b"]));
        assert_eq!((near.latency, near.bandwidth), (Seconds(0.005), Some(BytesPerSecond(1e6))));
        assert_eq!((far.latency, far.bandwidth), (Seconds(0.009), Some(BytesPerSecond(2e6))));
        assert_ne!((near.seed, near.stream), (way(["b", "a"]).seed, way(["b", "a"]).stream));
    }
}
