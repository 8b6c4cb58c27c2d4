//! Links of a cluster: connections between pairs of devices, and rejected Wi-Fi descriptions.

use hearth_core::LinkTable;
use hearth_core::cluster::Connection;
use hearth_profiles::link::wifi_path::Endpoint;
use hearth_profiles::{Bytes, Document, Seconds};
use hearth_schema::Scenario;

const WIFI: &str = "  wifi:
    channels:
      - name: 5 GHz
        bandwidth: {value: 800 Mbit/s, source: test}
        stations: [mac, laptop, phone]
        rates: {phone: {value: 400 Mbit/s, source: test}}
      - name: 2.4 GHz
        bandwidth: {value: 100 Mbit/s, source: test}
        stalls: awdl
        stations: [tablet]
";

fn text(wifi: &str) -> String {
    let names = ["mac", "laptop", "phone", "tablet", "desktop", "server"];
    let devices = names.map(|name| format!("{{name: {name}, profile: d1}}")).join(", ");
    format!(
        "schema: scenario/1
name: t
seed: 1
model: {{profile: llama-8b}}
context: 64
workload: {{prompt: 8, generate: 4}}
devices: [{devices}]
links:
  default: {{latency: {{value: 0.2 ms, source: t}}, bandwidth: {{value: 1 Gbit/s, source: t}}}}
  between:
    - {{devices: [mac, laptop], link: {{latency: {{value: 0.1 ms, source: t}}, bandwidth: {{value: 1 GB/s, source: t}}}}}}
    - {{devices: [phone, desktop], unreachable: forward}}
{wifi}"
    )
}

fn table(wifi: &str) -> LinkTable {
    LinkTable::new(Scenario::from_yaml(&text(wifi)).expect("a sound scenario").links)
}

#[test]
fn stations_use_wifi_and_other_devices_use_wires() {
    let table = table(WIFI);
    let path = |from, to| match table.connection(from, to) {
        Some(Connection::Wireless(path)) => Some(path),
        _ => None,
    };
    // A dedicated cable, and two wired devices.
    assert!(path("mac", "laptop").is_none() && path("desktop", "server").is_none());
    assert_eq!(table.link_between("laptop", "mac").expect("a cable").bandwidth.value.0, 1e9);
    assert_eq!(table.link_between("server", "desktop").as_deref(), Some(table.default_link()));
    // Uplink at 100 MB/s, downlink at 50 MB/s, on the same channel.
    let slow = path("mac", "phone").expect("Wi-Fi");
    assert!(slow.shares_channel());
    assert!((slow.rate().0 / (1e6 / (1.0 / 100.0 + 1.0 / 50.0)) - 1.0).abs() < 1e-12);
    assert_eq!(slow.burst_bytes(), Bytes(270_000));
    // To a wired device, to another channel, and to an unreachable device.
    let wired = path("mac", "desktop").expect("Wi-Fi");
    assert!(matches!(wired.receiver, Endpoint::Wire(_)));
    assert_eq!((wired.wire_latency(), wired.message_overhead()), (Seconds(0.2e-3), Seconds(0.2e-3)));
    assert!(!path("mac", "tablet").expect("Wi-Fi").shares_channel());
    assert!(table.connection("phone", "desktop").is_none() && path("desktop", "phone").is_some());
    // The link for planners has the mean time of a single message.
    for (from, to) in [("mac", "phone"), ("mac", "desktop"), ("server", "tablet"), ("tablet", "laptop")] {
        let (path, link) = (path(from, to).expect("Wi-Fi"), table.link_between(from, to).expect("a link"));
        for bytes in [8192, 16_384, 32_768, 65_536].map(Bytes) {
            let (mean, found) = (path.mean_message_time(bytes, false), link.message_time(bytes));
            assert!((found.0 / mean.0 - 1.0).abs() < 1e-3, "{from} to {to}, {bytes}: {found} and {mean}");
        }
    }
}

#[test]
fn without_wifi_all_links_are_constant() {
    let table = table("");
    assert!(table.wifi().is_none());
    assert_eq!(table.link_between("phone", "tablet").as_deref(), Some(table.default_link()));
    assert_eq!(table.link_between("phone", "desktop"), None);
    assert_eq!(table.link_between("desktop", "phone").as_deref(), Some(table.default_link()));
}

#[test]
fn wifi_errors_name_the_mistake() {
    let one = "  wifi:\n    channels:\n      - {name: w, bandwidth: {value: 800 Mbit/s, source: t}, stations: [mac]";
    let with = |more: &str| format!("{one}, {more}}}\n");
    let delay = |median: &str, sigma: &str| {
        let [median, sigma] = [median, sigma].map(|value| format!("{{value: {value}, source: t}}"));
        with(&format!("delay: {{median: {median}, sigma: {sigma}}}"))
    };
    let tcp = |key: &str, value: &str| format!("{WIFI}    tcp: {{{key}: {{value: {value}, source: t}}}}\n");
    for (wifi, part) in [
        ("  wifi: {channels: []}\n".to_string(), "0 channels"),
        (WIFI.replace("tablet", "nobody"), "`nobody`, which is not a device of this scenario"),
        (WIFI.replace("[tablet]", "[phone]"), "`phone` is listed as a station twice"),
        (WIFI.replace("[tablet]", "[]"), "has no `stations`"),
        (WIFI.replace("2.4 GHz", "5 GHz"), "two channels are called `5 GHz`"),
        (WIFI.replace("{phone: ", "{tablet: "), "`rates` names `tablet`"),
        (WIFI.replace("100 Mbit/s", "1 kbit/s"), "choose from 1 Mbit/s"),
        (WIFI.replace("100 Mbit/s", "100 MB"), "`MB` is not a unit of a rate"),
        (WIFI.replace("awdl", "sometimes"), "`clean`, `awdl`, or a list of stalls"),
        (with("stalls: [{rate: 9 /s, from: 80 ms, to: 80 ms, source: t}]"), "take 72 % of the time"),
        (with("stalls: [{rate: 0 /s, from: 1 ms, to: 2 ms, source: t}]"), "`rate` of a stall is 0"),
        (with("stalls: [{rate: 1 /s, from: 2 ms, to: 1 ms, source: t}]"), "give the shorter duration first"),
        (delay("1 min", "0.5"), "`delay.median` is"),
        (delay("1 ms", ".nan"), "`delay.sigma` is NaN"),
        (with("burst: {value: 0 s, source: t}"), "`burst` is"),
        (with("frequency: 5"), "unknown field `frequency`"),
        (tcp("loss", "50 %"), "tcp: `loss` is 50 %"),
        (tcp("rto", "0 s"), "tcp: `rto` is"),
        (tcp("initial_window", "1 B"), "tcp: `initial_window` is"),
    ] {
        let error = Scenario::from_yaml(&text(&wifi)).expect_err(part);
        assert!(error.to_string().contains(part), "{part}: {error}");
        assert!(error.location().is_some(), "{error}");
    }
    // Wired devices need a valid default link.
    let slow = text(WIFI).replace("1 Gbit/s", "1 kbit/s");
    let error = Scenario::from_yaml(&slow).expect_err("the bandwidth is too small").to_string();
    assert!(error.contains("use `links.default`, whose `bandwidth` is 125 B/s"), "{error}");
}

#[test]
fn link_without_bandwidth_is_rejected() {
    for (from, to, part) in [
        ("1 Gbit/s", "0 B/s", "links.default: `bandwidth` is 0 B/s, but must be at least 1 kbit/s"),
        ("0.2 ms", "1e12 s", "links.default: `latency` is"),
        ("1 GB/s", "1 B/s", "links.between [mac, laptop]: `bandwidth` is 1.00 B/s"),
    ] {
        let error = Scenario::from_yaml(&text("").replace(from, to)).expect_err(part).to_string();
        assert!(error.contains(part), "{error}");
    }
}
