//! TCP connections: the delays that TCP adds to a message.
//!
//! Messages of one connection are sent one after another and arrive in order. A connection that is new begins with the
//! initial congestion window, and each retransmission timeout without a message halves a larger window, down to the
//! initial one. A message that is longer than the window waits for acknowledgements, and the window grows. Lost segments
//! are sent again, and reduce the window. The formulas are in [`hearth_profiles::link::tcp`]; this module draws the random values.
//!
//! Acknowledgements and retransmissions take no airtime here: an acknowledgement has a few dozen bytes, and
//! one message in fifty needs a retransmission.

use std::collections::VecDeque;

use hearth_profiles::link::tcp::{CongestionWindow, TcpParameters};
use hearth_profiles::{Bytes, BytesPerSecond, Seconds};
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, LogNormal};

use crate::engine::Nanos;
use crate::random::draw_uniform;

/// Maximum number of segments at the end of a message whose delays are drawn; earlier ones hardly arrive last.
/// source: assumed
const MAX_DELAYED_SEGMENTS: u64 = 16;

/// The TCP connection from one device to another.
#[derive(Debug, Clone, Default)]
pub struct TcpConnection {
    /// Numbers of the messages that are not completely sent, in order; the first message is being sent.
    pub send_queue: VecDeque<u64>,
    /// The last time at which a message was submitted or a part of a message was sent.
    pub last_send_time: Option<Nanos>,
    pub last_arrival_time: Nanos,
    /// The congestion window; `None` before the first message.
    window: Option<CongestionWindow>,
}

impl TcpConnection {
    /// Returns the time that a message waits for acknowledgements, and updates the congestion window.
    pub fn window_wait(
        &mut self,
        now: Nanos,
        tcp: &TcpParameters,
        round_trip: Seconds,
        rate: BytesPerSecond,
        bytes: Bytes,
    ) -> Seconds {
        if !tcp.slow_start_after_idle {
            return Seconds(0.0);
        }
        let initial = CongestionWindow::initial(tcp);
        let window = self.window.get_or_insert(initial);
        let idle = if self.send_queue.is_empty() {
            self.last_send_time.map_or(0, |last| now.saturating_sub(last))
        } else {
            0
        };
        let halvings = u32::try_from(idle / tcp.rto.value.to_nanos().max(1)).unwrap_or(u32::MAX);
        if halvings > 0 && window.size > initial.size {
            let halved = window.size.0.checked_shr(halvings).unwrap_or(0);
            window.size = Bytes(halved.max(initial.size.0));
        }
        window.wait(round_trip, rate, bytes)
    }

    /// Reduces the congestion window after a loss.
    pub fn on_loss(&mut self) {
        self.window.iter_mut().for_each(CongestionWindow::on_loss);
    }
}

#[derive(Debug, Clone)]
pub struct DelaySampler {
    median: f64,
    sigma: f64,
    /// Random stream of the one-way delays.
    delay_stream: ChaCha8Rng,
    /// Random stream of the delays that TCP adds.
    tcp_stream: ChaCha8Rng,
}

impl DelaySampler {
    pub fn new(median: Seconds, sigma: f64, delay_stream: ChaCha8Rng, tcp_stream: ChaCha8Rng) -> Self {
        Self { median: median.0, sigma, delay_stream, tcp_stream }
    }

    pub fn sample_one_way_delay(&mut self) -> Seconds {
        log_normal(self.median, self.sigma, &mut self.delay_stream)
    }

    /// Draws the time from the end of the transmission of a message until all its segments have arrived. Each segment
    /// has a delay of its own, and `interval` is the time between two segments.
    pub fn sample_last_arrival(&mut self, segments: u64, interval: Seconds) -> Seconds {
        let last = |latest: Seconds, place: u64| {
            let arrival = self.sample_one_way_delay() - interval * place as f64;
            if arrival > latest { arrival } else { latest }
        };
        (0..segments.min(MAX_DELAYED_SEGMENTS)).fold(Seconds(0.0), last)
    }

    /// Draws a round-trip time, and the time that retransmissions add to a message. The number of draws is constant, so
    /// that a lost segment does not change later draws.
    pub fn sample_retransmission(&mut self, tcp: &TcpParameters, bytes: Bytes) -> (Seconds, Seconds) {
        let mut one_way = || log_normal(self.median, self.sigma, &mut self.tcp_stream);
        let round_trip = one_way() + one_way();
        let draw = draw_uniform(&mut self.tcp_stream);
        (round_trip, tcp.retransmission_time(round_trip, bytes, draw))
    }
}

fn log_normal(median: f64, sigma: f64, stream: &mut ChaCha8Rng) -> Seconds {
    // A document's median and sigma are finite and not negative.
    Seconds(LogNormal::new(median.ln(), sigma).map_or(median, |delays| delays.sample(stream)))
}
