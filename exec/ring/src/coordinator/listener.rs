//! The head's listener: accepts activations, and serves layers to workers that have no model file.
//!
//! The head listens on the host of its address in the plan, if it has one. Otherwise, without a key, it listens on
//! 127.0.0.1; with a key, on the local IP address of its connections to the workers. If these local addresses differ,
//! it listens on all addresses of this machine, and each worker receives the address in its own network.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinHandle;

use super::layer_server;
use crate::error::Result;
use crate::execution::LocalModel;
use crate::wire::{
    AcceptedConnection, AcceptedConnections, ByteStream, ConnectionKind, ConnectionPurpose, Listener,
    PreparedEpoch, SharedPreparedEpoch, Transport, accept_activations, bind, read_hello,
    replace_prepared_epoch, send_refusal,
};

const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

pub(super) struct HeadListener {
    pub(super) address: String,
    prepared_epoch: SharedPreparedEpoch,
    task: JoinHandle<()>,
}

impl HeadListener {
    /// Listens on an address that the workers can reach. `planned` is the head's address in the plan; `local_ips` are
    /// the local IP addresses of the head's connections to workers.
    pub(super) async fn start<T: Transport>(
        transport: &T,
        planned: Option<&str>,
        local_ips: &[Option<IpAddr>],
        model: Arc<LocalModel>,
    ) -> Result<Self> {
        let listener = bind(transport, &listen_address(planned, transport.is_private(), local_ips)).await?;
        let (address, prepared_epoch) = (listener.address(), SharedPreparedEpoch::default());
        let task = tokio::spawn(accept(listener, prepared_epoch.clone(), model));
        Ok(Self { address, prepared_epoch, task })
    }

    /// Accepts only activations of this epoch from now on.
    pub(super) fn accept_epoch(&self, prepared: PreparedEpoch) {
        replace_prepared_epoch(&self.prepared_epoch, Some(prepared));
    }
}

impl Drop for HeadListener {
    fn drop(&mut self) {
        replace_prepared_epoch(&self.prepared_epoch, None);
        self.task.abort();
    }
}

async fn accept(mut listener: impl Listener, prepared_epoch: SharedPreparedEpoch, model: Arc<LocalModel>) {
    let mut accepted = AcceptedConnections::default();
    loop {
        let Ok(stream) = listener.accept().await else {
            accepted.make_room();
            tokio::time::sleep(ACCEPT_PAUSE).await;
            continue;
        };
        let (prepared_epoch, model) = (prepared_epoch.clone(), model.clone());
        accepted.spawn(move |connection| serve_connection(stream, prepared_epoch, model, connection));
    }
}

async fn serve_connection(
    mut stream: impl ByteStream,
    prepared_epoch: SharedPreparedEpoch,
    model: Arc<LocalModel>,
    connection: AcceptedConnection,
) {
    let Ok((session, purpose)) = read_hello(&mut stream).await else { return };
    let own = prepared_epoch.borrow().as_ref().map(|open| open.session);
    // Errors are reported to the head by the sink, or by the worker that fetches.
    match purpose {
        ConnectionPurpose::Data { from, epoch } => {
            let limit = model.max_activation_bytes();
            let prepared = &prepared_epoch;
            let _ = accept_activations(stream, prepared, session, (from, epoch), limit, &connection).await;
        }
        ConnectionPurpose::Fetch if own == Some(session) => {
            connection.set_kind(ConnectionKind::Session);
            let _ = layer_server::serve(stream, model).await;
        }
        _ => {
            let reason = "this device is a head, and serves only the workers of its session".into();
            drop(send_refusal(&mut stream, reason).await);
        }
    }
}

/// Returns the address to listen on: any free port of the planned host, or of an address that all workers can reach.
fn listen_address(planned: Option<&str>, is_private: bool, local_ips: &[Option<IpAddr>]) -> String {
    if let Some((host, _)) = planned.and_then(|address| address.rsplit_once(':')) {
        return format!("{host}:0");
    }
    let loopback = IpAddr::V4(Ipv4Addr::LOCALHOST);
    let hosts: Vec<IpAddr> =
        if is_private { local_ips.iter().map(|host| host.unwrap_or(loopback)).collect() } else { vec![] };
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

/// Returns the head's address for a worker: `listening_at`, with the host `local_ip` if the head listens on all
/// addresses. `local_ip` is the local IP address of the head's connection to this worker.
pub(super) fn address_for_worker(listening_at: &str, local_ip: Option<IpAddr>) -> String {
    match (listening_at.parse::<SocketAddr>(), local_ip) {
        (Ok(all), Some(host)) if all.ip().is_unspecified() => SocketAddr::new(host, all.port()).to_string(),
        _ => listening_at.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Cases: planned address, whether there is a key, local addresses of connections, and expected listen address.
    #[test]
    fn head_listens_where_workers_can_reach_it() {
        let cases: [(Option<&str>, bool, &[&str], &str); 7] = [
            (Some("10.0.0.2:9000"), true, &["192.168.1.5"], "10.0.0.2:0"),
            (Some("[::1]:9000"), false, &[], "[::1]:0"),
            (None, false, &["192.168.1.5"], "127.0.0.1:0"),
            (None, true, &[], "127.0.0.1:0"),
            (None, true, &["192.168.1.5", "192.168.1.5"], "192.168.1.5:0"),
            (None, true, &["192.168.1.5", "127.0.0.1"], "0.0.0.0:0"),
            (None, true, &["192.168.1.5", "fd00::5"], "[::]:0"),
        ];
        for (planned, is_private, hosts, expected) in cases {
            let hosts: Vec<_> = hosts.iter().map(|text| Some(text.parse().unwrap())).collect();
            assert_eq!(listen_address(planned, is_private, &hosts), expected, "{planned:?}, {hosts:?}");
        }
        assert_eq!(listen_address(None, true, &[None]), "127.0.0.1:0", "pipes have no address");
    }

    #[test]
    fn each_worker_receives_the_address_in_its_own_network() {
        for (listening_at, seen_from, expected) in [
            ("192.168.1.5:4711", "192.168.1.5", "192.168.1.5:4711"),
            ("0.0.0.0:4711", "127.0.0.1", "127.0.0.1:4711"),
            ("[::]:4711", "fd00::5", "[fd00::5]:4711"),
        ] {
            assert_eq!(address_for_worker(listening_at, Some(seen_from.parse().unwrap())), expected);
        }
    }
}
