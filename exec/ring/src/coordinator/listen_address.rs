//! Where do the ring's last devices reach the head?
//!
//! At the host of the head's address in the plan, if it has one. Without a key at 127.0.0.1: nobody may
//! come from elsewhere. With a key, at the address from which the head reaches each worker, which is
//! one that the worker can answer to; if these differ (the head stands in two networks) the head listens
//! at all of its addresses and tells each worker the one on its side.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Where the head listens: a free port at this address.
pub fn listen_at(planned: Option<&str>, sealed: bool, seen_from: &[Option<IpAddr>]) -> String {
    if let Some((host, _)) = planned.and_then(|address| address.rsplit_once(':')) {
        return format!("{host}:0");
    }
    let loopback = IpAddr::V4(Ipv4Addr::LOCALHOST);
    let hosts: Vec<IpAddr> =
        if sealed { seen_from.iter().map(|host| host.unwrap_or(loopback)).collect() } else { vec![] };
    let first = hosts.first().copied().unwrap_or(loopback);
    let host = if hosts.iter().all(|&host| host == first) {
        first
    } else if hosts.iter().any(IpAddr::is_ipv6) {
        IpAddr::V6(Ipv6Addr::UNSPECIFIED)
    } else {
        IpAddr::V4(Ipv4Addr::UNSPECIFIED)
    };
    SocketAddr::new(host, 0).to_string()
}

/// What a worker is told, which sees the head at `seen_from`.
pub fn announced(listening_at: &str, seen_from: Option<IpAddr>) -> String {
    match (listening_at.parse::<SocketAddr>(), seen_from) {
        (Ok(all), Some(host)) if all.ip().is_unspecified() => SocketAddr::new(host, all.port()).to_string(),
        _ => listening_at.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hosts(texts: &[&str]) -> Vec<Option<IpAddr>> {
        texts.iter().map(|text| Some(text.parse().unwrap())).collect()
    }

    #[test]
    fn the_plan_decides_where_the_head_listens() {
        let seen = hosts(&["192.168.1.5"]);
        assert_eq!(listen_at(Some("10.0.0.2:9000"), true, &seen), "10.0.0.2:0");
        assert_eq!(listen_at(Some("[::1]:9000"), false, &[]), "[::1]:0");
    }

    #[test]
    fn without_a_key_or_workers_the_head_listens_on_loopback() {
        assert_eq!(listen_at(None, false, &hosts(&["192.168.1.5"])), "127.0.0.1:0");
        assert_eq!(listen_at(None, true, &[]), "127.0.0.1:0");
        assert_eq!(listen_at(None, true, &[None]), "127.0.0.1:0", "pipes have no address");
    }

    #[test]
    fn with_a_key_each_worker_is_told_the_address_on_its_side() {
        let one = hosts(&["192.168.1.5", "192.168.1.5"]);
        assert_eq!(listen_at(None, true, &one), "192.168.1.5:0");
        assert_eq!(announced("192.168.1.5:4711", one[0]), "192.168.1.5:4711");
        let two = hosts(&["192.168.1.5", "127.0.0.1"]);
        assert_eq!(listen_at(None, true, &two), "0.0.0.0:0");
        assert_eq!(announced("0.0.0.0:4711", two[1]), "127.0.0.1:4711");
        let mixed = hosts(&["192.168.1.5", "fd00::5"]);
        assert_eq!(listen_at(None, true, &mixed), "[::]:0");
        assert_eq!(announced("[::]:4711", mixed[1]), "[fd00::5]:4711");
    }
}
