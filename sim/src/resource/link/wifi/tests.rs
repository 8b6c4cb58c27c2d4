//! Tests of shared Wi-Fi channels: transmission times against closed forms, and fairness.

use hearth_profiles::link::wifi::{Delay, StallPreset, Stalls as Document};
use hearth_profiles::{Fraction, Link, Sourced};
use proptest::prelude::*;

use super::super::properties::{DeliveredMessage, TestMessage, check_invariants, messages, send_all};
use super::*;

const MILLI: Nanos = 1_000_000;
/// Rate of the first channel: 100 MB/s, so a message of a kilobyte takes 10 us.
const RATE: BytesPerSecond = BytesPerSecond(100e6);

fn source<T>(value: T) -> Sourced<T> {
    Sourced::new(value, "test")
}

fn wire() -> Link {
    Link::constant(source(Seconds(0.0002)), source(BytesPerSecond(125e6)))
}

/// Returns two channels: one for devices 0 to 3, one with half the rate for device 4. Other devices use wires.
fn wifi(stalls: StallPreset) -> Wifi {
    let channel = |name: &str, rate: BytesPerSecond| WifiChannel {
        name: name.into(),
        bandwidth: source(rate),
        transmission_overhead: source(Seconds(0.0002)),
        max_burst_duration: source(Seconds(0.0054)),
        delay: Delay::default(),
        stalls: Document::Preset(stalls),
        stations: vec![],
        station_rates: BTreeMap::new(),
    };
    let channels = vec![channel("5 GHz", RATE), channel("2.4 GHz", RATE * 0.5)];
    Wifi { channels, tcp: TcpParameters::default() }
}

/// Returns the channels of [`wifi`] without losses and without restarts of the congestion window.
fn lossless(stalls: StallPreset) -> Wifi {
    let mut wifi = wifi(stalls);
    (wifi.tcp.slow_start_after_idle, wifi.tcp.loss_rate.value) = (false, Fraction(0.0));
    wifi
}

/// Returns the channels of [`wifi`] with almost no delay besides the transmission times.
fn without_delays() -> Wifi {
    let mut wifi = lossless(StallPreset::Clean);
    for channel in &mut wifi.channels {
        channel.delay.median.value = Seconds(1e-6);
    }
    wifi
}

fn path<'a>(wifi: &'a Wifi, wire: &'a Link, (from, to): (usize, usize)) -> Option<WirelessPath<'a>> {
    let station = |index: usize| {
        let channel = &wifi.channels[index];
        Endpoint::Station { index, channel, rate: channel.bandwidth.value }
    };
    let end = |device: usize| match device {
        0..4 => station(0),
        4 => station(1),
        _ => Endpoint::Wire(wire),
    };
    (from < 5 || to < 5).then(|| WirelessPath { sender: end(from), receiver: end(to), tcp: &wifi.tcp })
}

fn link(wifi: &Wifi, seed: u64) -> NetworkLinks {
    let wire = wire();
    let mut link = NetworkLinks::new(WiredLink::from(&wire), Some(wifi), seed);
    for pair in 0..49 {
        let (from, to) = (pair / 7, pair % 7);
        if let Some(path) = path(wifi, &wire, (from, to)).filter(|_| from != to) {
            link.add_wireless_path(from, to, &path);
        }
    }
    link
}

fn duration_ms(delivered: &DeliveredMessage) -> f64 {
    (delivered.times.arrival - delivered.send_time) as f64 * 1e-6
}

/// Returns the mean milliseconds from sending a message until its arrival; it is sent `count` times, one after another.
fn mean(wifi: &Wifi, pair: (usize, usize), bytes: u64, count: usize) -> f64 {
    let sent: Vec<TestMessage> = (0..count).map(|_| (20_000 * MILLI, pair.0, pair.1, bytes)).collect();
    let delivered = send_all(&mut link(wifi, 1), &sent);
    delivered.iter().map(duration_ms).sum::<f64>() / count as f64
}

#[test]
fn ping_percentiles_with_awdl_stalls() {
    let mut link = link(&lossless(StallPreset::Awdl), 1);
    let mut times = Vec::new();
    let (count, mut now) = (200_000, 0);
    let mut there_or_back = |now: Nanos, from: usize, to: usize| {
        link.send(now, from, to, Bytes(64));
        let mut arrives = None;
        while let Some(at) = link.next_event_time() {
            arrives = link.pop_delivery(at).map(|(_, delivery)| delivery.arrival).or(arrives);
        }
        arrives.expect("a ping arrives")
    };
    for _ in 0..count {
        let there = there_or_back(now, 0, 1);
        let back = there_or_back(there, 1, 0);
        times.push((back - now) as f64 * 1e-6);
        // One second later on average, without a regular period.
        now = back + 700 * MILLI + (back * 7919) % (600 * MILLI);
    }
    times.sort_by(f64::total_cmp);
    let rank = |share: f64| times[(share * f64::from(count)) as usize];
    let (p50, p95, p99) = (rank(0.5), rank(0.95), rank(0.99));
    println!("ping over `awdl`, {count} times: p50 {p50:.2} ms, p95 {p95:.2} ms, p99 {p99:.1} ms");
    // The rates and durations of the stalls alone give a p99 of 48 ms; 45 ms were measured.
    for (found, expected, within) in [(p50, 4.06, 0.02), (p95, 7.8, 0.03), (p99, 48.0, 0.05)] {
        assert!((found / expected - 1.0).abs() < within, "{found} ms, expected {expected}");
    }
}

#[test]
fn message_mean_matches_formula() {
    let wire = wire();
    println!("| stalls | from, to | bytes | mean of 100000, ms | formula, ms |");
    for (name, wifi, within) in
        [("clean", wifi(StallPreset::Clean), 0.01), ("awdl", wifi(StallPreset::Awdl), 0.03)]
    {
        for (pair, bytes) in
            [((0, 1), 64), ((0, 1), 32_768), ((0, 5), 32_768), ((6, 4), 200_000), ((0, 4), 3_000_000)]
        {
            // Twenty seconds after the previous message every connection is idle and starts with the initial window.
            let found = mean(&wifi, pair, bytes, 100_000);
            let path = path(&wifi, &wire, pair).expect("a path over Wi-Fi");
            let expected = path.mean_message_time(Bytes(bytes), true).as_millis();
            println!("| {name} | {}, {} | {bytes} | {found:.3} | {expected:.3} |", pair.0, pair.1);
            assert!((found / expected - 1.0).abs() < within, "{pair:?}, {bytes}: {found}, not {expected}");
        }
    }
}

#[test]
fn two_stations_get_half_the_channel() {
    // 54 MB up and down: 200 bursts of 5.4 ms, each with an overhead of 0.2 ms.
    let delivered = send_all(&mut link(&without_delays(), 1), &[(0, 0, 1, 54_000_000)]);
    assert_eq!(delivered[0].times.end, 200 * (5 * MILLI + 6 * MILLI / 10));
    // A message to a device on a wire uses the channel once; the wire of 125 MB/s adds the time of the last burst.
    let delivered = send_all(&mut link(&without_delays(), 1), &[(0, 0, 5, 54_000_000)]);
    assert_eq!(delivered[0].times.end, 100 * (5 * MILLI + 6 * MILLI / 10) + 540_000 * 8);
}

#[test]
fn small_message_interleaves_with_bursts() {
    let mut link = link(&without_delays(), 1);
    // At 10 ms the second burst is being sent to the access point. The small message gets the channel when that burst
    // ends, at 11.2 ms, or when the first burst has reached the receiver; it never waits for the whole long message.
    let delivered = send_all(&mut link, &[(0, 0, 1, 54_000_000), (10 * MILLI, 2, 3, 1000)]);
    assert!(duration_ms(&delivered[1]) < 4.0 * 5.6, "{} ms", duration_ms(&delivered[1]));
    // On the same connection it does wait for the long message.
    let mut link = self::link(&without_delays(), 1);
    let delivered = send_all(&mut link, &[(0, 0, 1, 54_000_000), (10 * MILLI, 0, 1, 1000)]);
    assert!(delivered[1].times.start > delivered[0].times.end - 10 * MILLI);
    assert!(delivered[1].times.arrival > delivered[0].times.arrival);
}

#[test]
fn added_stall_pauses_transmission() {
    let mut link = link(&without_delays(), 1);
    link.send(0, 0, 1, Bytes(100_000));
    // Half a millisecond of the 1.2 ms to the access point has passed.
    link.stall_all_channels(MILLI / 2, 40 * MILLI);
    assert_eq!(link.next_event_time(), Some(40 * MILLI + 7 * MILLI / 10));
    let mut deliveries = Vec::new();
    while let Some(at) = link.next_event_time() {
        deliveries.extend(link.pop_delivery(at));
    }
    assert_eq!(deliveries[0].1.end, 40 * MILLI + 19 * MILLI / 10);
}

#[test]
fn busy_connection_keeps_window() {
    let mut wifi = wifi(StallPreset::Clean);
    wifi.tcp.loss_rate.value = Fraction(0.0);
    let every = |wait: Nanos| {
        let sent: Vec<TestMessage> = (0..2000).map(|_| (wait, 0, 1, 32_768)).collect();
        send_all(&mut link(&wifi, 1), &sent)[1..].iter().map(duration_ms).sum::<f64>() / 1999.0
    };
    let (busy, idle) = (every(100 * MILLI), every(300 * MILLI));
    // The difference is a round trip of 4.306 ms less the time of 14480 bytes at 50 MB/s.
    assert!((idle - busy - 4.016).abs() < 0.15, "{busy} and {idle} ms");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn wifi_link_keeps_invariants(messages in messages(7), seed: u64, awdl: bool) {
        let wifi = wifi(if awdl { StallPreset::Awdl } else { StallPreset::Clean });
        let mut link = link(&wifi, seed);
        let delivered = check_invariants(&mut link, &messages);
        // A second run gives the same deliveries.
        prop_assert_eq!(&send_all(&mut self::link(&wifi, seed), &messages), &delivered);
        let end = delivered.iter().map(|delivered| delivered.times.end).max().unwrap_or(0);
        for channel in 0..2 {
            prop_assert!(link.busy_time(channel) <= end, "two transmissions at once on channel {}", channel);
        }
    }

    /// A channel has one transmission at a time and is never idle while a burst waits.
    #[test]
    fn channel_is_exclusive_and_work_conserving(
        messages in prop::collection::vec((0usize..4, 1usize..4, 0u64..2_000_000), 1..20)
    ) {
        let wifi = without_delays();
        let sent: Vec<TestMessage> =
            messages.iter().map(|&(from, step, bytes)| (0, from, (from + step) % 4, bytes)).collect();
        let mut link = link(&wifi, 1);
        let delivered = send_all(&mut link, &sent);
        let burst_time = |bytes: u64| 200_000 + bytes * 10;
        let bursts = |bytes: u64| {
            (0..bytes.div_ceil(540_000).max(1)).map(move |at| burst_time((bytes - at * 540_000).min(540_000)))
        };
        let expected: u64 = sent.iter().flat_map(|message| bursts(message.3)).sum::<u64>() * 2;
        prop_assert_eq!(link.busy_time(0), expected);
        prop_assert_eq!(delivered.iter().map(|delivered| delivered.times.end).max(), Some(expected));
    }
}
