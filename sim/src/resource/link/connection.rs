//! TCP connections: the delays that TCP adds to a message.
//!
//! Messages of one connection are sent one after another and arrive in order. A connection that is new, or has been
//! idle for a retransmission timeout, begins with the initial congestion window; a message that is longer than the
//! window waits for acknowledgements. A lost segment is sent again after a round trip if enough segments of the same
//! message follow, otherwise after the timeout. The formulas are in [`hearth_profiles::link::wifi_path`]; this module
//! draws the random values.
//!
//! Acknowledgements and retransmissions take no airtime here: an acknowledgement has a few dozen bytes, and
//! one message in fifty needs a retransmission.

use std::collections::VecDeque;

use hearth_profiles::link::wifi::{MSS, TcpParameters, WifiChannel};
use hearth_profiles::link::wifi_path::{retransmission_probabilities, slow_start_wait};
use hearth_profiles::{Bytes, BytesPerSecond, Seconds};
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, LogNormal};

use crate::engine::Nanos;
use crate::random::draw_uniform;

/// The TCP connection from one device to another.
#[derive(Debug, Clone, Default)]
pub struct TcpConnection {
    /// Numbers of the messages that are not completely sent, in order; the first message is being sent.
    pub send_queue: VecDeque<u64>,
    /// The last time at which a message was submitted or a part of a message was sent.
    pub last_send_time: Option<Nanos>,
    pub last_arrival_time: Nanos,
}

impl TcpConnection {
    /// Whether the next message begins with the initial congestion window.
    pub fn needs_slow_start(&self, now: Nanos, tcp: &TcpParameters) -> bool {
        let idle = |last: Nanos| now.saturating_sub(last) > tcp.rto.value.to_nanos();
        self.send_queue.is_empty() && self.last_send_time.is_none_or(idle)
    }
}

#[derive(Debug, Clone)]
pub struct DelaySampler {
    median: f64,
    sigma: f64,
    /// Random stream of the one-way delays, with one draw for each message.
    delay_stream: ChaCha8Rng,
    /// Random stream of the delays that TCP adds.
    tcp_stream: ChaCha8Rng,
}

impl DelaySampler {
    pub fn new(channel: &WifiChannel, delay_stream: ChaCha8Rng, tcp_stream: ChaCha8Rng) -> Self {
        let (median, sigma) = (channel.delay.median.value.0, channel.delay.sigma.value);
        Self { median, sigma, delay_stream, tcp_stream }
    }

    pub fn sample_one_way_delay(&mut self) -> Seconds {
        log_normal(self.median, self.sigma, &mut self.delay_stream)
    }

    /// Draws the time that TCP adds to a message; `slow_start` is true if the message begins with the initial
    /// congestion window. The number of draws is constant, so that a lost segment does not change later draws.
    pub fn sample_tcp_delay(
        &mut self,
        tcp: &TcpParameters,
        rate: BytesPerSecond,
        bytes: Bytes,
        slow_start: bool,
    ) -> Seconds {
        let mut one_way = || log_normal(self.median, self.sigma, &mut self.tcp_stream);
        let round_trip = one_way() + one_way();
        let draw = draw_uniform(&mut self.tcp_stream);
        let wait = if slow_start && tcp.slow_start_after_idle {
            slow_start_wait(round_trip, tcp, rate, bytes)
        } else {
            Seconds(0.0)
        };
        let segments = bytes.0.div_ceil(MSS.0).max(1);
        let [by_timer, by_report] = retransmission_probabilities(tcp.loss_rate.value.0, segments);
        let retransmission = if draw < by_timer {
            tcp.rto.value
        } else if draw < by_timer + by_report {
            round_trip
        } else {
            Seconds(0.0)
        };
        wait + retransmission
    }
}

fn log_normal(median: f64, sigma: f64, stream: &mut ChaCha8Rng) -> Seconds {
    // A document's median and sigma are finite and not negative.
    Seconds(LogNormal::new(median.ln(), sigma).map_or(median, |delays| delays.sample(stream)))
}
