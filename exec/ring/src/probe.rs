//! Link measurements: the latency and bandwidth to a peer, and the cost of a hop of the ring.
//!
//! A worker ([`crate::Worker`]) replies to a probe with a short frame, after it has read the whole probe. Half the
//! time of a short exchange is the one-way latency. The additional time of a long probe (at most [`MAX_PROBE_BYTES`])
//! gives the bandwidth. Exchanges are separated by pauses, like tokens, because a link that was just used is faster.
//!
//! A hop of the ring exceeds this latency: activations also pass between compute threads and network tasks.
//! [`measure_hop`] sends activations around a ring of two devices on this machine, as a run does, but computes nothing.

use std::sync::Arc;
use std::time::Duration;

use hearth_profiles::link::PeerLink;
use hearth_profiles::measure::Samples;
use hearth_profiles::{Bytes, BytesPerSecond, Fraction, Seconds, Sourced};
use hearth_schema::pass::Pass;
use tokio::sync::{Semaphore, mpsc};

use crate::error::{Result, RingError, protocol_error};
use crate::security::{EncryptedTransport, Key};
use crate::wire::{
    ActivationCounts, ActivationsHeader, ByteStream, ConnectionPurpose, DataConnector, DataLinkEvent,
    DataLinkEventSink, Frame, FrameHeader, Listener, MAX_DOCUMENT_PAYLOAD_BYTES, Message, PreparedEpoch,
    ReceiveBudget, ReceivedActivations, TcpTransport, Transport, WorkerInfo, bind, open_connection,
    read_hello, receive_activations, send_welcome, with_timeout,
};
use hearth_runtime::clock::monotonic_nanos;
use hearth_runtime::profile::MeasuredLinks;

pub const MAX_PROBE_BYTES: usize = MAX_DOCUMENT_PAYLOAD_BYTES;
/// Size in bytes of the first long probe, whose time determines the size of the later long probes.
const TRIAL_BYTES: usize = 64 << 10;
/// Size in bytes of the activations of one token of an 8B model: 4096 values in f16.
const ACTIVATION_BYTES: usize = 8 << 10;
/// How many times as many exchanges measure the losses on a link that has losses.
const LOSS_FACTOR: usize = 5;
const PAUSE: Duration = Duration::from_millis(2);
const REPLY_DEADLINE: Duration = Duration::from_secs(10);
/// The time for which the replying device waits for the next probe.
const PROBE_DEADLINE: Duration = Duration::from_secs(10);

/// The options of a link measurement: the number of exchanges and their time limit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ProbeOptions {
    pub latency_probes: usize,
    /// Maximum number of exchanges with a long probe, which measure the bandwidth.
    pub max_bandwidth_probes: usize,
    /// The time limit for all exchanges with a long probe. At least one exchange is always made.
    pub bandwidth_time_limit: Duration,
}

impl ProbeOptions {
    /// Returns the options of a quick measurement if `quick` is set; otherwise of a full one, which takes two seconds.
    pub fn new(quick: bool) -> ProbeOptions {
        let (latency_probes, max_bandwidth_probes, seconds) = if quick { (50, 5, 1) } else { (300, 15, 5) };
        let bandwidth_time_limit = Duration::from_secs(seconds);
        ProbeOptions { latency_probes, max_bandwidth_probes, bandwidth_time_limit }
    }

    /// Returns the options of a quick measurement, which takes a quarter of a second on a fast link.
    pub fn quick() -> ProbeOptions {
        ProbeOptions::new(true)
    }
}

/// The name of the peer in the measurements of the link from this machine to itself.
pub const LOOPBACK_PEER_NAME: &str = "loopback";

/// Measures the link from this machine to itself and the links to workers, which are encrypted if there is a key.
pub fn measure_links(addresses: &[String], key: Option<&Key>, probes: ProbeOptions) -> Result<MeasuredLinks> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.map_err(RingError::ThreadStart)?;
    runtime.block_on(async {
        let own = measure_link_to_self(&TcpTransport, "127.0.0.1:0", probes).await?;
        let hop = measure_hop(&TcpTransport, "127.0.0.1:0", probes).await?;
        let mut peers = vec![PeerLink { peer: LOOPBACK_PEER_NAME.to_owned(), ..own }];
        for address in addresses {
            peers.push(match key {
                Some(key) => {
                    let transport = EncryptedTransport::new(TcpTransport, key.clone());
                    measure_link(&transport, address, probes).await?
                }
                None => measure_link(&TcpTransport, address, probes).await?,
            });
        }
        Ok(MeasuredLinks { loopback_hop_times: hop, peer_links: peers })
    })
}

/// Measures the latency and bandwidth of the link to a worker that listens on `address`.
pub async fn measure_link<T: Transport>(
    transport: &T,
    address: &str,
    probes: ProbeOptions,
) -> Result<PeerLink> {
    let (mut stream, _) = open_connection(transport, address, address, 0, ConnectionPurpose::Probe).await?;
    let mut times = Vec::with_capacity(probes.latency_probes);
    for nonce in 0..probes.latency_probes.max(1) as u64 {
        tokio::time::sleep(PAUSE).await;
        times.push(exchange(&mut stream, address, nonce, 0).await?);
    }
    let short = Samples::new(times);
    let beyond = |all: f64| (all - short.median()).max(1e-9);
    let (activations, loss) = measure_losses(transport, &mut stream, address, probes).await?;
    let trial = beyond(exchange(&mut stream, address, 0, TRIAL_BYTES).await?);
    // About four probes of this size fit the time limit.
    let affordable = TRIAL_BYTES as f64 / trial * probes.bandwidth_time_limit.as_secs_f64() / 4.0;
    let bytes = (affordable as usize).clamp(TRIAL_BYTES, MAX_PROBE_BYTES);
    let begun = monotonic_nanos();
    let time_limit = probes.bandwidth_time_limit.as_nanos() as u64;
    let mut rates = Vec::with_capacity(probes.max_bandwidth_probes);
    while rates.is_empty()
        || rates.len() < probes.max_bandwidth_probes && monotonic_nanos() - begun < time_limit
    {
        rates.push(bytes as f64 / beyond(exchange(&mut stream, address, 1, bytes).await?));
    }
    // Random losses and full queues reduce the congestion window, so that a long message can be slower than the link.
    let short_rate = ACTIVATION_BYTES as f64 / beyond(activations.median());
    // On a fast link, the time of the activations themselves is lost in the variation of the exchanges.
    let variation = short.quantile(0.75) - short.quantile(0.25);
    let is_measurable = activations.median() - short.median() > variation;
    let (bytes, rates) = if is_measurable && short_rate > Samples::new(rates.clone()).median() {
        (ACTIVATION_BYTES, vec![short_rate])
    } else {
        (bytes, rates)
    };
    let long = format!("a message of {}, less a short exchange", Bytes(bytes as u64));
    Ok(PeerLink {
        peer: address.to_owned(),
        latency: short
            .sourced_median(|round| Seconds(round / 2.0), "half the exchange of two short messages"),
        bandwidth: Samples::new(rates).sourced_median(BytesPerSecond, &long),
        jitter: Some(jitter(&short)),
        loss,
    })
}

/// Returns the standard deviation of the logarithm of the one-way latency. Both directions are assumed to vary equally
/// and independently, so that the round trip varies less by the square root of two.
fn jitter(round_trips: &Samples) -> Sourced<f64> {
    // Outliers, such as retransmissions, are no jitter: from the quantiles of one standard deviation.
    let [low, high] = [0.159, 0.841].map(|quantile| round_trips.quantile(quantile).ln());
    let sigma = (high - low) / 2.0 * std::f64::consts::SQRT_2;
    Sourced::new(sigma, "measured: the central 68 % of the short exchanges")
}

/// Measures the seconds of exchanges of messages as long as the activations of a token, and the fraction of their TCP
/// segments that are sent again. No queue overflows with such messages. The fraction is `None` if the transport does not
/// know it.
async fn measure_losses<T: Transport>(
    transport: &T,
    stream: &mut T::Stream,
    address: &str,
    probes: ProbeOptions,
) -> Result<(Samples, Option<Sourced<Fraction>>)> {
    let before = transport.tcp_statistics(stream);
    let mut count = probes.latency_probes;
    let mut times = Vec::new();
    let (before, statistics) = loop {
        while times.len() < count {
            times.push(exchange(stream, address, 2, ACTIVATION_BYTES).await?);
        }
        let Some((before, now)) = before.zip(transport.tcp_statistics(stream)) else {
            return Ok((Samples::new(times), None));
        };
        let has_losses = now.retransmitted_segments > before.retransmitted_segments;
        if !has_losses || count > probes.latency_probes {
            break (before, now);
        }
        // Rare losses need more segments.
        count *= LOSS_FACTOR;
    };
    let sent = statistics.sent_segments.saturating_sub(before.sent_segments);
    let again = statistics.retransmitted_segments.saturating_sub(before.retransmitted_segments);
    let rate = Fraction(again as f64 / sent.max(1) as f64);
    let loss = Sourced::new(rate, format!("measured: {again} of {sent} segments were sent again"));
    Ok((Samples::new(times), Some(loss)))
}

/// Sends a ping with a payload of `bytes` bytes. Returns the seconds until the pong arrives.
async fn exchange(stream: &mut impl ByteStream, peer: &str, nonce: u64, bytes: usize) -> Result<f64> {
    let ping = Frame { message: Message::Ping { nonce }, payload: vec![0x1c; bytes] };
    let begun = monotonic_nanos();
    let reply = async {
        ping.write(stream).await?;
        Frame::read(stream, 0).await
    };
    let reply = with_timeout(REPLY_DEADLINE, "the reply to a probe", reply).await??;
    match reply.map(|frame| frame.message) {
        Some(Message::Pong { nonce: own, .. }) if own == nonce => {
            Ok((monotonic_nanos() - begun) as f64 * 1e-9)
        }
        _ => Err(protocol_error(peer, "its reply to a probe is not the expected pong")),
    }
}

/// Measures the latency and bandwidth of the link from this machine to itself. This process also replies to the probes.
pub async fn measure_link_to_self<T: Transport>(
    transport: &T,
    address: &str,
    probes: ProbeOptions,
) -> Result<PeerLink> {
    measure_link_between(transport, transport, address, probes).await
}

/// Measures the latency and bandwidth of the link between two ends in this process. The end `far` listens on `address`
/// and replies to the probes of the end `near`.
pub async fn measure_link_between<T: Transport>(
    near: &T,
    far: &T,
    address: &str,
    probes: ProbeOptions,
) -> Result<PeerLink> {
    let mut listener = bind(far, address).await?;
    let address = listener.address();
    let replier = tokio::spawn(async move {
        if let Ok(mut stream) = listener.accept().await {
            // After an error the connection ends, which the measurement reports.
            if read_hello(&mut stream).await.is_ok() {
                let _ = answer_probes(stream).await;
            }
        }
    });
    let measured = measure_link(near, &address, probes).await;
    replier.abort();
    measured
}

/// Measures the seconds that the activations of one token take from one compute thread to another on this machine.
pub async fn measure_hop(transport: &impl Transport, address: &str, probes: ProbeOptions) -> Result<Samples> {
    let (near, far) = (bind(transport, address).await?, bind(transport, address).await?);
    let (near_address, far_address) = (near.address(), far.address());
    let (near_inbox, mut near_events) = mpsc::unbounded_channel();
    let (far_inbox, mut far_events) = mpsc::unbounded_channel();
    let (near_inbox, far_inbox) = (sink_into(near_inbox), sink_into(far_inbox));
    let counters = &Arc::default();
    let connector =
        |device_index, sink| DataConnector { transport, session: 0, epoch: 0, device_index, sink, counters };
    let receivers = [accept_one(near, near_inbox.clone()), accept_one(far, far_inbox.clone())];
    let to_far = connector(0, &near_inbox).connect(1, "hop", &far_address).await?;
    let to_near = connector(1, &far_inbox).connect(0, "hop", &near_address).await?;
    let echo = tokio::task::spawn_blocking(move || {
        while let Some(ReceivedActivations { header, activations, .. }) = far_events.blocking_recv() {
            let frame = Frame { message: Message::Activations(header), payload: activations };
            if to_near.send(frame).is_err() {
                return;
            }
        }
    });
    let times = tokio::task::spawn_blocking(move || {
        let mut times = Vec::with_capacity(probes.latency_probes);
        for index in 0..probes.latency_probes.max(1) as u32 {
            std::thread::sleep(PAUSE);
            let batch = Pass::new(index, index, 1, true).into();
            let header = ActivationsHeader { epoch: 0, batch, round: 0, is_f16: false };
            let frame = Frame { message: Message::Activations(header), payload: vec![0; ACTIVATION_BYTES] };
            let begun = monotonic_nanos();
            let back = to_far.send(frame).ok().and_then(|()| near_events.blocking_recv());
            if back.is_none() {
                break;
            }
            times.push((monotonic_nanos() - begun) as f64 * 0.5e-9);
        }
        times
    });
    let limit = REPLY_DEADLINE + PAUSE * probes.latency_probes as u32;
    let times = with_timeout(limit, "measuring a hop", times).await;
    receivers.iter().for_each(tokio::task::JoinHandle::abort);
    echo.abort();
    let times = times?.unwrap_or_default();
    if times.is_empty() {
        Err(protocol_error("this machine", "the activations of a measured hop were lost"))
    } else {
        Ok(Samples::new(times))
    }
}

fn sink_into(inbox: mpsc::UnboundedSender<ReceivedActivations>) -> DataLinkEventSink {
    Arc::new(move |event| match event {
        DataLinkEvent::Activations(received) => inbox.send(received).is_ok(),
        DataLinkEvent::LinkBroken(_) => false,
    })
}

fn accept_one(mut listener: impl Listener, sink: DataLinkEventSink) -> tokio::task::JoinHandle<()> {
    tokio::spawn(async move {
        let Ok(mut stream) = listener.accept().await else { return };
        if read_hello(&mut stream).await.is_ok()
            && send_welcome(&mut stream, WorkerInfo::default()).await.is_ok()
        {
            let (budget, counters) = (ReceiveBudget::new(1, ACTIVATION_BYTES), Arc::default());
            let connections = Arc::new(Semaphore::new(0));
            let prepared = PreparedEpoch { session: 0, epoch: 0, sink, budget, counters, connections };
            receive_activations(stream, 0, ACTIVATION_BYTES, &prepared).await;
        }
    })
}

/// Replies to every ping of a link measurement with a pong without payload, whatever the size of the ping's payload.
pub(super) async fn answer_probes(mut stream: impl ByteStream) -> Result<()> {
    send_welcome(&mut stream, WorkerInfo::default()).await?;
    loop {
        let read = async {
            let Some(frame) = FrameHeader::read(&mut stream, MAX_PROBE_BYTES).await? else { return Ok(None) };
            frame.discard_payload(&mut stream).await.map(Some)
        };
        let message = with_timeout(PROBE_DEADLINE, "waiting for a probe", read).await??;
        let Some(Message::Ping { nonce }) = message else { return Ok(()) };
        let pong = Frame::from(Message::Pong {
            nonce,
            clock_ns: monotonic_nanos(),
            counts: ActivationCounts::default(),
        });
        with_timeout(PROBE_DEADLINE, "replying to a probe", pong.write(&mut stream)).await??;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::MemoryTransport;

    const BRIEF: ProbeOptions = ProbeOptions {
        latency_probes: 3,
        max_bandwidth_probes: 2,
        bandwidth_time_limit: Duration::from_millis(200),
    };

    async fn is_measured(transport: impl Transport, address: &str) {
        let link = measure_link_to_self(&transport, address, BRIEF).await.unwrap();
        assert!(link.latency.value.0 > 0.0 && link.latency.value.0 < 1.0, "{link:?}");
        assert!(link.bandwidth.value.0 > 0.0 && link.bandwidth.value.0.is_finite(), "{link:?}");
        let hop = measure_hop(&transport, address, BRIEF).await.unwrap();
        assert!(hop.median() > 0.0 && hop.count() == 3, "{hop:?}");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn links_of_tcp_and_memory_are_measured() {
        is_measured(TcpTransport, "127.0.0.1:0").await;
        is_measured(MemoryTransport::default(), "localhost:0").await;
    }

    #[tokio::test]
    async fn unreachable_peer_is_named() {
        let error = measure_link(&TcpTransport, "127.0.0.1:1", BRIEF).await.unwrap_err();
        assert!(error.to_string().contains("127.0.0.1:1"), "{error}");
    }
}
