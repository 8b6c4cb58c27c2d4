//! TCP: the time that a connection adds to a message.
//!
//! A connection that is new, or has been idle, begins with a small congestion window. A message that is longer than the
//! window waits for acknowledgements, one round trip for each doubling of the window. A lost segment is sent again
//! after about a round trip if later segments of the message are acknowledged (RACK), after two round trips if it is the
//! last of several (tail loss probe), and after the retransmission timeout if it is the only one.
//! source: RFC 5681, section 3.1 and 4.1; RFC 8985, the default of Linux and Windows

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::document_values::Sourced;
use crate::units::{Bytes, BytesPerSecond, Fraction, Seconds};

/// Maximum payload of a TCP segment: 1500 bytes of an Ethernet frame minus the headers of IP and TCP with timestamps.
/// source: RFC 9293, RFC 7323
pub const MSS: Bytes = Bytes(1448);

/// Parameters of TCP connections.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default, expecting = "the parameters of TCP, such as `{idle_restart: true}`")]
pub struct TcpParameters {
    /// Whether a connection restarts with the initial window after it was idle for a retransmission timeout (RFC
    /// 5681, section 4.1; `net.ipv4.tcp_slow_start_after_idle`). A message longer than the window then waits for
    /// acknowledgements, one round trip for each doubling of the window.
    #[serde(rename = "idle_restart")]
    pub slow_start_after_idle: bool,
    /// Initial congestion window: bytes sent before the first acknowledgement.
    pub initial_window: Sourced<Bytes>,
    /// Fraction of segments that are lost; on a Wi-Fi channel, in spite of its own retransmissions.
    #[serde(rename = "loss")]
    pub loss_rate: Sourced<Fraction>,
    /// Retransmission timeout.
    pub rto: Sourced<Seconds>,
}

impl Default for TcpParameters {
    fn default() -> Self {
        Self {
            slow_start_after_idle: true,
            initial_window: Sourced::new(MSS * 10, "RFC 6928: ten segments"),
            loss_rate: Sourced::new(Fraction(0.001), "assumed: one segment in a thousand"),
            rto: Sourced::new(Seconds(0.2), "TCP_RTO_MIN in include/net/tcp.h; RFC 6298 would have a second"),
        }
    }
}

/// Returns the number of segments of a message.
pub fn segment_count(bytes: Bytes) -> u64 {
    bytes.0.div_ceil(MSS.0).max(1)
}

impl TcpParameters {
    /// Returns an error that names the value that is out of range.
    pub fn validate(&self) -> Result<(), String> {
        let (window, loss, rto) = (self.initial_window.value, self.loss_rate.value.0, self.rto.value);
        if window < MSS {
            return Err(format!("`initial_window` is {window}: give at least one segment of {} B", MSS.0));
        }
        // With more losses a connection hardly transmits anything.
        if loss > 0.1 {
            return Err(format!("`loss` is {:.0} %: choose at most 10 %", loss * 100.0));
        }
        // source: TCP_RTO_MAX in include/net/tcp.h is two minutes
        if !(1e-3..=120.0).contains(&rto.0) {
            return Err(format!("`rto` is {rto}: choose from 1 ms to 120 s"));
        }
        Ok(())
    }

    /// Returns the mean rate of a long message at most: each loss reduces the congestion window.
    /// source: Mathis, Semke, Mahdavi, Ott, "The macroscopic behavior of the TCP congestion avoidance algorithm", 1997,
    /// equation 3; CUBIC is as fast at the bandwidths and round trips of homes (RFC 9438, section 4.3)
    fn loss_limited_rate(&self, round_trip: Seconds) -> BytesPerSecond {
        let window = MSS.as_f64() * (1.5 / self.loss_rate.value.0).sqrt();
        BytesPerSecond(window / round_trip.0)
    }

    /// Returns the time to send a message over a link of `bandwidth`, without waiting for acknowledgements. What does not
    /// fit in the initial window is limited by losses.
    pub fn sending_time(&self, round_trip: Seconds, bandwidth: BytesPerSecond, bytes: Bytes) -> Seconds {
        let first = bytes.0.min(self.initial_window.value.0);
        let limited = self.loss_limited_rate(round_trip).0.min(bandwidth.0);
        Bytes(first) / bandwidth + Bytes(bytes.0 - first) / BytesPerSecond(limited)
    }

    /// Returns the mean time that retransmissions add to a message.
    pub fn mean_retransmission_time(&self, round_trip: Seconds, bytes: Bytes) -> Seconds {
        self.retransmissions(round_trip, bytes)
            .into_iter()
            .map(|(probability, time)| time * probability)
            .sum()
    }

    /// Returns the time that retransmissions add to a message for a uniformly distributed `draw` from 0 to 1.
    pub fn retransmission_time(&self, round_trip: Seconds, bytes: Bytes, draw: f64) -> Seconds {
        let mut below = 0.0;
        let possible = self.retransmissions(round_trip, bytes).into_iter();
        let drawn = possible.map(|(probability, time)| {
            below += probability;
            (below, time)
        });
        drawn.into_iter().find(|(below, _)| draw < *below).map_or(Seconds(0.0), |(_, time)| time)
    }

    /// Returns the probabilities and the times of the retransmissions that a message can need. Several losses in a
    /// message take as long as the worst of them.
    fn retransmissions(&self, round_trip: Seconds, bytes: Bytes) -> [(f64, Seconds); 2] {
        let loss = self.loss_rate.value.0;
        let segments = segment_count(bytes);
        if segments == 1 {
            return [(loss, self.rto.value), (0.0, Seconds(0.0))];
        }
        let none_before_last = (1.0 - loss).powi(i32::try_from(segments - 1).unwrap_or(i32::MAX));
        [(loss, round_trip * 2.0), ((1.0 - loss) * (1.0 - none_before_last), round_trip)]
    }
}

/// The congestion window of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CongestionWindow {
    /// Bytes that are sent before they are acknowledged.
    pub size: Bytes,
    /// The size up to which the window doubles in a round trip.
    pub threshold: Bytes,
}

/// Factor of the congestion window after a loss. source: RFC 9438 (CUBIC), section 4.6
const LOSS_FACTOR: f64 = 0.7;
/// Segments by which the window grows in a round trip above the threshold. source: RFC 9438, section 4.3, for
/// `LOSS_FACTOR`
const SEGMENTS_PER_ROUND_TRIP: f64 = 0.53;
/// Minimum congestion window after a loss, in segments. source: RFC 9438, section 4.6
const MIN_SEGMENTS: u64 = 2;

impl CongestionWindow {
    /// Returns the window of a new connection, which has had no losses.
    pub fn initial(tcp: &TcpParameters) -> Self {
        Self { size: tcp.initial_window.value, threshold: Bytes(u64::MAX) }
    }

    /// Returns the time that a connection waits for acknowledgements while it sends a message. Each round trip in which
    /// the window is full doubles it, or above the threshold increases it by half a segment, and the connection sends for
    /// window / `rate` of the round trip.
    pub fn wait(&mut self, round_trip: Seconds, rate: BytesPerSecond, bytes: Bytes) -> Seconds {
        let (mut sent, mut waited) = (0u64, Seconds(0.0));
        loop {
            sent = sent.saturating_add(self.size.0);
            let idle = round_trip - self.size / rate;
            if sent >= bytes.0 || idle.0 <= 0.0 {
                return waited;
            }
            waited += idle;
            let step = (MSS.as_f64() * SEGMENTS_PER_ROUND_TRIP) as u64;
            self.size = if self.size < self.threshold {
                Bytes(self.size.0.saturating_mul(2).min(self.threshold.0))
            } else {
                Bytes(self.size.0.saturating_add(step))
            };
        }
    }

    /// Reduces the window after a loss.
    pub fn on_loss(&mut self) {
        let reduced = Bytes((self.size.as_f64() * LOSS_FACTOR) as u64);
        self.size = if reduced < MSS * MIN_SEGMENTS { MSS * MIN_SEGMENTS } else { reduced };
        self.threshold = self.size;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_start_doubles_the_window_each_round_trip() {
        let wait = |bytes| {
            let mut window = CongestionWindow { size: Bytes(10_000), threshold: Bytes(u64::MAX) };
            (window.wait(Seconds(0.1), BytesPerSecond(1e6), Bytes(bytes)).0, window.size.0)
        };
        assert_eq!(wait(10_000), (0.0, 10_000));
        // 10 + 20 kB: a round trip less the 10 ms of sending.
        let (waited, window) = wait(30_000);
        assert!((waited - 0.09).abs() < 1e-9 && window == 20_000);
        // A window of 160 kB fills the path of 100 kB.
        let (waited, window) = wait(1 << 30);
        assert!((waited - (0.09 + 0.08 + 0.06 + 0.02)).abs() < 1e-9 && window == 160_000);
    }

    #[test]
    fn losses_reduce_the_window() {
        let mut window = CongestionWindow::initial(&TcpParameters::default());
        window.on_loss();
        window.on_loss();
        assert_eq!(window.size, Bytes(7095), "0.49 of ten segments");
        // Six segments now wait for a round trip, until the window has grown by half a segment three times.
        let mut wait = || window.wait(Seconds(0.01), BytesPerSecond(1e9), MSS * 6).0 > 0.0;
        assert_eq!([wait(), wait(), wait(), wait()], [true, true, true, false]);
        (0..20).for_each(|_| window.on_loss());
        assert_eq!(window.size, MSS * 2);
    }

    #[test]
    fn losses_limit_the_rate_of_long_messages() {
        let (rate, trip) = (BytesPerSecond(12.5e6), Seconds(0.006));
        let time = |loss, bytes| {
            let loss_rate = Sourced::new(Fraction(loss), "test");
            TcpParameters { loss_rate, ..TcpParameters::default() }.sending_time(trip, rate, bytes).0
        };
        assert_eq!(time(0.01, MSS * 10), (MSS * 10 / rate).0);
        assert_eq!(time(0.0, Bytes(1_000_000)), 0.08);
        // 1448 B / 6 ms * sqrt(150) = 2.956 MB/s.
        assert!((time(0.01, MSS * 10 + Bytes(2_956_000)) - 1.0 - (MSS * 10 / rate).0).abs() < 1e-3);
    }

    #[test]
    fn drawn_retransmissions_have_the_mean() {
        let lossy =
            TcpParameters { loss_rate: Sourced::new(Fraction(0.02), "test"), ..TcpParameters::default() };
        let trip = Seconds(0.01);
        for bytes in [Bytes(100), MSS * 3, MSS * 50] {
            let draws = 10_000;
            let drawn = |draw| lossy.retransmission_time(trip, bytes, f64::from(draw) / f64::from(draws)).0;
            let mean = (0..draws).map(drawn).sum::<f64>() / f64::from(draws);
            assert!((mean / lossy.mean_retransmission_time(trip, bytes).0 - 1.0).abs() < 0.02, "{bytes}");
        }
        // A single segment waits for the timeout; the last of three for two round trips, the others for one.
        assert_eq!(lossy.retransmission_time(trip, Bytes(1), 0.0), Seconds(0.2));
        assert_eq!(lossy.retransmission_time(trip, MSS * 3, 0.0), Seconds(0.02));
        assert_eq!(lossy.retransmission_time(trip, MSS * 3, 0.03), Seconds(0.01));
        assert_eq!(lossy.retransmission_time(trip, MSS * 3, 0.99), Seconds(0.0));
    }
}
