//! Link measurements: the latency and bandwidth to a peer, and the cost of a hop of the ring.
//!
//! A worker answers probes ([`crate::Worker`]): it reads a whole frame and sends a short one back. Half the time of a
//! short exchange is the one-way latency; what a frame of [`LONG`] bytes takes beyond that is the bandwidth in its
//! direction. Exchanges are a little apart, as tokens are: a link that has just been used answers faster than an idle
//! one.
//!
//! A hop is more: the activations pass from a compute thread to a task, through the link, to another task and another
//! compute thread. [`hop`] sends them around a ring of two on this machine in the way that a run does, with nothing
//! computed.

use std::sync::Arc;
use std::time::Duration;

use hearth_profiles::link::PeerLink;
use hearth_profiles::measure::Samples;
use hearth_profiles::{Bytes, BytesPerSecond, Seconds};
use hearth_schema::pass::Pass;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::mpsc;

use crate::error::{RingError, protocol_error};
use crate::security::EncryptedTransport;
use crate::security::Key;
use crate::wire::with_deadline;
use crate::wire::{DataConnector, DataEvent, DataSink, ReceivedActivations, receive_activations};
use crate::wire::{Frame, MAX_DOCUMENT_PAYLOAD, Message, Purpose, WorkerFacts};
use crate::wire::{Listener, TcpTransport, Transport};
use crate::wire::{open_connection, read_hello, send_welcome};
use hearth_runtime::clock::wall_nanos;
use hearth_runtime::profile::Links;

/// The long message, in bytes.
pub const LONG: usize = MAX_DOCUMENT_PAYLOAD;

/// A first message, to see how long a long one may be.
const TRIAL: usize = 64 << 10;

/// Activations of one token of a model of 8B: 4096 numbers.
const ACTIVATIONS: usize = 16 << 10;

/// The pause between two exchanges.
const PAUSE: Duration = Duration::from_millis(2);

/// The time limit for a peer's answer.
const ANSWER_DEADLINE: Duration = Duration::from_secs(10);
/// The time limit between two exchanges on the answering side.
const PROBE_DEADLINE: Duration = Duration::from_secs(10);

/// The maximum cost of a link measurement.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ProbeEffort {
    /// Short exchanges.
    pub short: usize,
    /// Long ones.
    pub long: usize,
    /// Long ones stop after this, once there is one.
    pub limit: Duration,
}

impl ProbeEffort {
    /// Returns [`ProbeEffort::quick`] or [`ProbeEffort::full`].
    pub fn of(quick: bool) -> ProbeEffort {
        if quick { ProbeEffort::quick() } else { ProbeEffort::full() }
    }

    /// The quick effort: a quarter of a second on a fast link.
    pub fn quick() -> ProbeEffort {
        ProbeEffort { short: 50, long: 5, limit: Duration::from_secs(1) }
    }

    /// The full effort: two seconds on a fast link.
    pub fn full() -> ProbeEffort {
        ProbeEffort { short: 300, long: 15, limit: Duration::from_secs(5) }
    }
}

/// The peer's name of the link from this machine to itself.
pub const LOOPBACK: &str = "loopback";

/// Measures the link of this machine to itself, and those to workers at `addresses`, which have `key`.
pub fn links(addresses: &[String], key: Option<&Key>, effort: ProbeEffort) -> Result<Links, RingError> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.map_err(RingError::Threads)?;
    runtime.block_on(async {
        let own = link_to_self(&TcpTransport, "127.0.0.1:0", effort).await?;
        let hop = hop(&TcpTransport, "127.0.0.1:0", effort).await?;
        let mut peers = vec![PeerLink { peer: LOOPBACK.to_owned(), ..own }];
        for address in addresses {
            peers.push(match key {
                Some(key) => {
                    link(&EncryptedTransport::new(TcpTransport, key.clone()), address, effort).await?
                }
                None => link(&TcpTransport, address, effort).await?,
            });
        }
        Ok(Links { hop, peers })
    })
}

/// Measures the link to a worker that listens at `address`.
pub async fn link<T: Transport>(
    transport: &T,
    address: &str,
    effort: ProbeEffort,
) -> Result<PeerLink, RingError> {
    let (mut stream, _) = open_connection(transport, address, address, 0, Purpose::Probe).await?;
    let mut times = Vec::with_capacity(effort.short);
    for nonce in 0..effort.short.max(1) as u64 {
        tokio::time::sleep(PAUSE).await;
        times.push(exchange(&mut stream, address, nonce, 0).await?);
    }
    let short = Samples::new(times);
    let beyond = |all: f64| (all - short.median()).max(1e-9);
    let trial = beyond(exchange(&mut stream, address, 0, TRIAL).await?);
    // Long enough for a rate, short enough for the limit.
    let affordable = TRIAL as f64 / trial * effort.limit.as_secs_f64() / 4.0;
    let bytes = (affordable as usize).clamp(TRIAL, LONG);
    let begun = wall_nanos();
    let mut rates = Vec::with_capacity(effort.long);
    while rates.is_empty()
        || rates.len() < effort.long && wall_nanos() - begun < effort.limit.as_nanos() as u64
    {
        rates.push(bytes as f64 / beyond(exchange(&mut stream, address, 1, bytes).await?));
    }
    let long = format!("a message of {}, less a short exchange", Bytes(bytes as u64));
    Ok(PeerLink {
        peer: address.to_owned(),
        latency: short.sourced(|round| Seconds(round / 2.0), "half the exchange of two short messages"),
        bandwidth: Samples::new(rates).sourced(BytesPerSecond, &long),
    })
}

/// Seconds from sending a ping with a payload of `bytes` to its answer.
async fn exchange<S>(stream: &mut S, peer: &str, nonce: u64, bytes: usize) -> Result<f64, RingError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let ping = Frame { message: Message::Ping { nonce }, payload: vec![0x1c; bytes] };
    let begun = wall_nanos();
    let answer = async {
        ping.write(stream).await?;
        Frame::read(stream, 0).await
    };
    let answer = with_deadline(ANSWER_DEADLINE, "the answer to a probe", answer).await??;
    match answer.map(|frame| frame.message) {
        Some(Message::Pong { nonce: own, .. }) if own == nonce => Ok((wall_nanos() - begun) as f64 * 1e-9),
        _ => Err(protocol_error(peer, "it does not answer a probe with its pong")),
    }
}

/// Measures the link of this machine to itself, against an answerer of its own.
pub async fn link_to_self<T: Transport>(
    transport: &T,
    address: &str,
    effort: ProbeEffort,
) -> Result<PeerLink, RingError> {
    let mut listener = listen(transport, address).await?;
    let here = listener.address();
    let answerer = tokio::spawn(async move {
        if let Ok(mut stream) = listener.accept().await {
            // The asker sees what goes wrong here as a connection that ends.
            if read_hello(&mut stream).await.is_ok() {
                let _ = answer_probes(stream).await;
            }
        }
    });
    let measured = link(transport, &here, effort).await;
    answerer.abort();
    measured
}

async fn listen<T: Transport>(transport: &T, address: &str) -> Result<T::Listener, RingError> {
    let cannot = |error: std::io::Error| RingError::CannotListen {
        address: address.into(),
        reason: error.to_string(),
    };
    transport.bind(address).await.map_err(cannot)
}

/// Seconds that one token's activations take from one compute thread to the next, on this machine.
pub async fn hop<T: Transport>(
    transport: &T,
    address: &str,
    effort: ProbeEffort,
) -> Result<Samples, RingError> {
    let (near, far) = (listen(transport, address).await?, listen(transport, address).await?);
    let (near_address, far_address) = (near.address(), far.address());
    let (near_inbox, mut near_events) = mpsc::unbounded_channel();
    let (far_inbox, mut far_events) = mpsc::unbounded_channel();
    let (near_inbox, far_inbox) = (into(near_inbox), into(far_inbox));
    let sending = |place, sink| DataConnector { transport, session: 0, epoch: 0, place, sink };
    let receivers = [accept_one(near, near_inbox.clone()), accept_one(far, far_inbox.clone())];
    let to_far = sending(0, &near_inbox).connect(1, "hop", &far_address).await?;
    let to_near = sending(1, &far_inbox).connect(0, "hop", &near_address).await?;
    let echo = tokio::task::spawn_blocking(move || {
        while let Some(ReceivedActivations { pass, round, activations, .. }) = far_events.blocking_recv() {
            let frame = Frame { message: Message::activations(0, pass, round, false), payload: activations };
            if to_near.send(frame).is_err() {
                return;
            }
        }
    });
    let times = tokio::task::spawn_blocking(move || {
        let mut times = Vec::with_capacity(effort.short);
        for index in 0..effort.short.max(1) as u32 {
            std::thread::sleep(PAUSE);
            let pass = Pass::plain(index, index, 1, true);
            let message = Message::activations(0, pass, 0, false);
            let frame = Frame { message, payload: vec![0; ACTIVATIONS] };
            let begun = wall_nanos();
            let back = to_far.send(frame).ok().and_then(|()| near_events.blocking_recv());
            if back.is_none() {
                break;
            }
            times.push((wall_nanos() - begun) as f64 * 0.5e-9);
        }
        times
    });
    let patience = ANSWER_DEADLINE + PAUSE * effort.short as u32;
    let times = with_deadline(patience, "activations around this machine", times).await;
    receivers.iter().for_each(tokio::task::JoinHandle::abort);
    echo.abort();
    let times = times?.unwrap_or_default();
    if times.is_empty() {
        Err(protocol_error("this machine", "activations did not come back"))
    } else {
        Ok(Samples::new(times))
    }
}

/// Takes the activations that arrive.
fn into(inbox: mpsc::UnboundedSender<ReceivedActivations>) -> DataSink {
    Arc::new(move |event| match event {
        DataEvent::Activations(arrival) => inbox.send(arrival).is_ok(),
        DataEvent::LinkBroken(_) => false,
    })
}

/// Accepts one connection for activations and hands on what arrives.
fn accept_one<L>(mut listener: L, sink: DataSink) -> tokio::task::JoinHandle<()>
where
    L: Listener,
    L::Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    tokio::spawn(async move {
        let Ok(mut stream) = listener.accept().await else { return };
        if read_hello(&mut stream).await.is_ok()
            && send_welcome(&mut stream, WorkerFacts::default()).await.is_ok()
        {
            receive_activations(stream, (0, 0), ACTIVATIONS, &sink).await;
        }
    })
}

/// Answers a link measurement: every ping, however long, with a short pong.
pub(super) async fn answer_probes<S>(mut stream: S) -> Result<(), RingError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    send_welcome(&mut stream, WorkerFacts::default()).await?;
    loop {
        let frame = with_deadline(PROBE_DEADLINE, "a probe", Frame::read(&mut stream, MAX_DOCUMENT_PAYLOAD))
            .await??;
        match frame.map(|frame| frame.message) {
            Some(Message::Ping { nonce }) => {
                let pong = Frame::from(Message::Pong { nonce, clock: wall_nanos() });
                with_deadline(PROBE_DEADLINE, "answering a probe", pong.write(&mut stream)).await??;
            }
            _ => return Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::MemoryTransport;

    const BRIEF: ProbeEffort = ProbeEffort { short: 3, long: 2, limit: Duration::from_millis(200) };

    async fn is_measured(transport: impl Transport, address: &str) {
        let link = link_to_self(&transport, address, BRIEF).await.unwrap();
        assert!(link.latency.value.0 > 0.0 && link.latency.value.0 < 1.0, "{link:?}");
        assert!(link.bandwidth.value.0 > 0.0 && link.bandwidth.value.0.is_finite(), "{link:?}");
        let hop = hop(&transport, address, BRIEF).await.unwrap();
        assert!(hop.median() > 0.0 && hop.count() == 3, "{hop:?}");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn tcp_link_is_measured() {
        is_measured(TcpTransport, "127.0.0.1:0").await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn memory_link_is_measured() {
        is_measured(MemoryTransport::default(), "self:0").await;
    }

    #[tokio::test]
    async fn unreachable_peer_is_named() {
        let error = link(&TcpTransport, "127.0.0.1:1", BRIEF).await.unwrap_err();
        assert!(error.to_string().contains("127.0.0.1:1"), "{error}");
    }
}
