//! Tests of the search: announcements are not trusted, and the memory of a search is bounded.

use std::net::UdpSocket;
use std::sync::atomic::{AtomicU16, Ordering};

use proptest::prelude::*;

use super::*;
use crate::discovery::Announcement;
use crate::security::{EncryptedTransport, Key};
use crate::wire::{Listener, TcpTransport, WorkerInfo, read_hello, send_welcome};

fn names(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|&name| name.to_owned()).collect()
}

fn service(name: &str, instance: &str, addresses: &[&str]) -> DiscoveredService {
    DiscoveredService {
        instance: instance.into(),
        name: name.into(),
        protocol_version: PROTOCOL_VERSION.to_string(),
        addresses: addresses.iter().map(|address| address.parse().unwrap()).collect(),
    }
}

#[test]
fn missing_workers_are_listed_with_what_was_seen() {
    let mut state = SearchState::new(&names(&["b", "c", "d"]), false);
    let [good, other, bad] = ["10.0.0.2:9", "10.0.0.3:9", "10.0.0.4:0"];
    assert_eq!(state.add(&service("b", "x", &[good])), [good.parse().unwrap()]);
    assert_eq!(state.add(&service("b", "x", &[good])), [], "each address is tried once");
    assert_eq!(state.add(&service("c", "y", &[other, bad])).len(), 1);
    state.add(&service("tab\u{7}let", "z", &[good]));
    state.add(&service("tablet", "z", &[good]));
    state.add(&DiscoveredService { protocol_version: "1".into(), ..service("d", "w", &[good]) });
    state.record_result("b", good.parse().unwrap(), Ok(()));
    state.record_result("c", other.parse().unwrap(), Err("it has a different key".into()));
    assert!(!state.is_complete());
    let text = RingError::from(state.worker_addresses(Duration::from_secs(5)).unwrap_err()).to_string();
    for part in [
        "workers not found within 5 s: `c` (10.0.0.3:9: it has a different key; 10.0.0.4:0: not a valid address",
        "`d` (announced with protocol version 1, but this device has",
        ". Found: `b` at 10.0.0.2:9",
        ". Other announcements: `tablet`, and 1 more",
        "; start the workers with the same `--key`",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn two_workers_with_one_name_are_ambiguous() {
    let mut state = SearchState::new(&names(&["b"]), false);
    state.add(&service("b", "x", &["10.0.0.2:9", "127.0.0.1:9"]));
    state.add(&service("b", "y", &["10.0.0.3:9"]));
    state.record_result("b", "127.0.0.1:9".parse().unwrap(), Ok(()));
    assert_eq!(state.worker_addresses(Duration::ZERO).unwrap()["b"], "127.0.0.1:9");
    state.record_result("b", "10.0.0.2:9".parse().unwrap(), Ok(()));
    assert_eq!(
        state.worker_addresses(Duration::ZERO).unwrap()["b"],
        "10.0.0.2:9",
        "others reach it there too"
    );
    state.record_result("b", "10.0.0.3:9".parse().unwrap(), Ok(()));
    assert!(matches!(state.worker_addresses(Duration::ZERO), Err(DiscoveryError::AmbiguousName { .. })));
}

#[test]
fn without_a_key_only_this_machine_is_tried() {
    let mut state = SearchState::new(&names(&["b"]), true);
    let tried = state.add(&service("b", "x", &["10.0.0.2:9", "127.0.0.1:9", "[fe80::1]:9", "[::1]:9"]));
    assert_eq!(tried, ["127.0.0.1:9".parse().unwrap(), "[::1]:9".parse().unwrap()]);
}

proptest! {
    #[test]
    fn stored_announcements_are_bounded(
        seen in proptest::collection::vec(
            ("[a-c\\PC]{0,3}|.{0,300}", ".{0,20}", any::<[u8; 4]>(), any::<u16>(), 0u8..4),
            0..100,
        ),
        repeats in 1usize..30,
    ) {
        let mut state = SearchState::new(&names(&["a", "b"]), false);
        let mut tried = 0;
        for round in 0..repeats {
            for (name, version, host, port, kind) in &seen {
                let version = if *kind == 0 { version.clone() } else { PROTOCOL_VERSION.to_string() };
                let host = IpAddr::from([host[0], host[1], host[2], host[3].wrapping_add(round as u8)]);
                let addresses = vec![SocketAddr::new(host, *port); usize::from(*kind)];
                let one = DiscoveredService { instance: name.clone(), name: name.clone(), protocol_version: version, addresses };
                tried += state.add(&one).len();
            }
        }
        prop_assert!(tried <= 2 * MAX_ADDRESSES);
        prop_assert!(state.others.len() <= MAX_OTHERS);
        prop_assert!(state.wanted.values().all(|it| it.rejected.len() <= MAX_OTHERS));
        // No connection attempt has ended, so no worker is found. The error has a bounded length.
        let text = state.worker_addresses(Duration::ZERO).unwrap_err().to_string();
        prop_assert!(text.len() < 20_000 && !text.chars().any(char::is_control), "{}", text.len());
    }
}

/// Returns the loopback interface with an mDNS port that no other test or process uses.
fn scope() -> MdnsScope {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let port = 20_000 + (std::process::id() % 20_000) as u16 + NEXT.fetch_add(1, Ordering::SeqCst);
    MdnsScope { port, loopback_only: true }
}

/// Returns whether multicast works on this machine: whether an announcement is received.
fn multicast_works(scope: MdnsScope) -> bool {
    let listening = "127.0.0.1:9".parse().unwrap();
    let Ok(_announcement) = Announcement::start("control", listening, scope) else { return false };
    let Ok(daemon) = Daemon::start(scope) else { return false };
    let Ok(events) = daemon.0.browse(SERVICE_TYPE) else { return false };
    // Eight seconds, or less if other events arrive.
    (0..80).any(|_| matches!(events.recv_timeout(POLL_INTERVAL), Ok(ServiceEvent::ServiceResolved(_))))
}

/// Starts a listener with a key that completes handshakes. Returns its address.
async fn start_listener(phrase: &str) -> SocketAddr {
    let transport = EncryptedTransport::new(TcpTransport, Key::parse(phrase).unwrap());
    let mut listener = transport.bind("127.0.0.1:0").await.unwrap();
    let address = listener.address().parse().unwrap();
    tokio::spawn(async move {
        while let Ok(mut stream) = listener.accept().await {
            tokio::spawn(async move {
                if read_hello(&mut stream).await.is_ok() {
                    let _ = send_welcome(&mut stream, WorkerInfo::default()).await;
                }
            });
        }
    });
    address
}

const OURS: &str = "a phrase for this ring";
const THEIRS: &str = "a phrase of somebody else";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn worker_with_the_key_is_found_among_impostors() {
    let scope = scope();
    if !tokio::task::spawn_blocking(move || multicast_works(scope)).await.unwrap() {
        eprintln!("SKIPPED worker_with_the_key_is_found_among_impostors: multicast does not work here");
        return;
    }
    let (honest, impostor) = (start_listener(OURS).await, start_listener(THEIRS).await);
    let announcements: Vec<Announcement> = tokio::task::spawn_blocking(move || {
        let nobody = "127.0.0.1:1".parse().unwrap();
        let announced =
            [("b", impostor), ("b", nobody), ("b", honest), ("c", honest), ("c", impostor), ("x", honest)];
        announced.iter().map(|(name, at)| Announcement::start(name, *at, scope).unwrap()).collect()
    })
    .await
    .unwrap();
    let flood = std::thread::spawn(move || flood(scope.port));
    let transport = EncryptedTransport::new(TcpTransport, Key::parse(OURS).unwrap());
    let (long, short) = (Duration::from_secs(20), Duration::from_secs(3));
    let found = find_workers(&transport, &names(&["b", "c"]), long, scope).await.unwrap();
    assert_eq!(found, BTreeMap::from([("b".into(), honest.to_string()), ("c".into(), honest.to_string())]));
    let missing = find_workers(&transport, &names(&["c", "d"]), short, scope).await.unwrap_err();
    let missing = missing.to_string();
    assert!(missing.contains("`d` (no worker with this name is announced)"), "{missing}");
    // Without a key, an encrypted port is not accepted as a worker.
    let refused = find_workers(&TcpTransport, &names(&["c"]), short, scope).await.unwrap_err();
    assert!(refused.to_string().contains("`c` (127.0.0.1:"), "{refused}");
    flood.join().unwrap();
    tokio::task::spawn_blocking(move || drop(announcements)).await.unwrap();
}

/// Encodes a DNS name: each label with its length.
fn labels(name: &[&[u8]]) -> Vec<u8> {
    let encode = |label: &&[u8]| [&[label.len() as u8], *label].concat();
    let labels: Vec<u8> = name.iter().flat_map(encode).collect();
    [labels, vec![0]].concat()
}

fn record(name: &[u8], kind: u16, data: &[u8]) -> Vec<u8> {
    // Class IN, with a time to live of an hour.
    let class = [0, 1, 0, 0, 14, 16];
    [name, &kind.to_be_bytes(), &class, &(data.len() as u16).to_be_bytes(), data].concat()
}

/// Builds the packet of an announcement as an attacker would (RFC 1035, sections 3 and 4).
fn forged(number: u32, name: &[u8]) -> Vec<u8> {
    let service: [&[u8]; 3] = [b"_hearth", b"_tcp", b"local"];
    let instance = format!("forged-{number}");
    let own = labels(&[instance.as_bytes(), service[0], service[1], service[2]]);
    let host = labels(&[instance.as_bytes(), b"local"]);
    let port = (number as u16).to_be_bytes();
    let text = [&[(name.len() + 5).min(255) as u8], &b"name="[..], name, b"\x0aprotocol=2"].concat();
    let records = [
        record(&labels(&service), 12, &own),
        record(&own, 33, &[&[0, 0, 0, 0][..], &port, &host].concat()),
        record(&own, 16, &text),
        record(&host, 1, &[127, 0, (number >> 8) as u8, number as u8]),
    ];
    [&[0, 0, 0x84, 0, 0, 0, 0, 4, 0, 0, 0, 0][..], &records.concat()].concat()
}

/// Sends thousands of forged, damaged and huge announcements to the UDP port `port` of this machine.
fn flood(port: u16) {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let mut seed = 1u32;
    for number in 0..6000u32 {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let name: &[u8] = [b"b" as &[u8], b"c", b"\xff\xfe\x07", &[b'n'; 240], b""][number as usize % 5];
        let mut packet = forged(number, name);
        match seed % 4 {
            0 => {
                let at = (seed >> 8) as usize % packet.len();
                packet[at] ^= (seed >> 4) as u8;
            }
            1 => packet.truncate((seed >> 8) as usize % packet.len()),
            2 => packet.resize(9000, (seed >> 8) as u8),
            _ => {}
        }
        let _ = socket.send_to(&packet, ("127.0.0.1", port));
        if number % 100 == 0 {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

#[test]
fn invalid_name_is_not_announced() {
    for name in ["", "a\nb", &"n".repeat(64)] {
        let refused = Announcement::start(name, "127.0.0.1:9".parse().unwrap(), scope()).unwrap_err();
        assert!(refused.hint().contains("--name"), "{refused}");
    }
}

#[test]
fn browsed_hints_are_bounded() {
    let mut state = BTreeMap::new();
    let mut add = |name: &str, addresses: &[&str]| {
        record_hint(&mut state, &service(name, "x", addresses));
        (state.len(), state["b"])
    };
    let best = "10.0.0.2:9".parse().unwrap();
    assert_eq!(add("b", &["127.0.0.1:9", "[2001:db8::1]:9", "10.0.0.2:9", "0.0.0.0:9"]), (1, best));
    for (name, address) in [("b", "10.0.0.3:9"), ("tab\u{7}let", "10.0.0.4:9"), ("nowhere", "10.0.0.4:0")] {
        assert_eq!(add(name, &[address]), (1, best), "{name}");
    }
    for number in 0..1000 {
        add(&format!("n{number}"), &["10.0.0.2:9"]);
    }
    assert_eq!(add("last", &["10.0.0.2:9"]).0, MAX_OTHERS);
}
