//! What happens to packets on a path after their transmission: losses, delay, and the order of arrival.

use hearth_profiles::link::impairments::{Impairments, Jitter, PacketLoss};
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};

use super::Nanos;

/// The delays and losses of the packets in one direction between two hosts.
#[derive(Debug)]
pub struct PathState {
    latency: Nanos,
    jitter: Jitter,
    loss: Option<PacketLoss>,
    reordering: f64,
    rng: ChaCha8Rng,
    /// The logarithm of the last random factor of the latency, as a multiple of its standard deviation.
    last_deviation: f64,
    /// Whether packets are being lost in a row.
    is_in_burst: bool,
    last_arrival: Nanos,
}

impl PathState {
    pub fn new(latency: Nanos, jitter: Jitter, impairments: &Impairments, rng: ChaCha8Rng) -> Self {
        Self {
            latency,
            jitter,
            loss: impairments.loss.filter(|loss| loss.rate.0 > 0.0),
            reordering: impairments.reordering.map_or(0.0, |fraction| fraction.0),
            rng,
            last_deviation: 0.0,
            is_in_burst: false,
            last_arrival: 0,
        }
    }

    /// Returns when a packet arrives whose transmission ended at `end`; `None` if the packet is lost.
    pub fn arrival(&mut self, end: Nanos) -> Option<Nanos> {
        let delay = self.delay();
        self.arrival_after(end, delay)
    }

    /// Returns when a packet arrives, like [`Self::arrival`], for a delay that several packets share.
    pub fn arrival_after(&mut self, end: Nanos, delay: Nanos) -> Option<Nanos> {
        if self.is_lost() {
            return None;
        }
        if self.reordering > 0.0 && self.rng.random_bool(self.reordering) {
            return Some(end + delay / 2);
        }
        self.last_arrival = self.last_arrival.max(end + delay);
        Some(self.last_arrival)
    }

    /// Draws a delay.
    pub fn delay(&mut self) -> Nanos {
        let Jitter { sigma, correlation } = self.jitter;
        if sigma == 0.0 {
            return self.latency;
        }
        let new: f64 = StandardNormal.sample(&mut self.rng);
        self.last_deviation = correlation * self.last_deviation + (1.0 - correlation.powi(2)).sqrt() * new;
        (self.latency as f64 * (sigma * self.last_deviation).exp()) as Nanos
    }

    /// Draws whether a packet is lost, from a Markov chain of two states: in a burst of losses, or not. The mean
    /// length of a burst is `burst` packets, and the fraction of lost packets is `rate`.
    /// source: Gilbert, "Capacity of a burst-noise channel", 1960, with losses in every packet of a burst
    fn is_lost(&mut self) -> bool {
        let Some(PacketLoss { rate, burst }) = self.loss else { return false };
        let end = 1.0 / burst;
        let begin = (rate.0 * end / (1.0 - rate.0)).min(1.0);
        self.is_in_burst = self.rng.random_bool(if self.is_in_burst { 1.0 - end } else { begin });
        self.is_in_burst
    }
}

#[cfg(test)]
mod tests {
    use hearth_profiles::Fraction;
    use rand::SeedableRng;

    use super::*;

    const STEADY: Jitter = Jitter { sigma: 0.0, correlation: 0.0 };
    const PACKETS: u64 = 200_000;

    fn path(jitter: Jitter, impairments: &Impairments) -> PathState {
        PathState::new(1_000_000, jitter, impairments, ChaCha8Rng::seed_from_u64(1))
    }

    #[test]
    fn losses_have_the_rate_and_the_length() {
        for burst in [1.0, 4.0] {
            let loss = Some(PacketLoss { rate: Fraction(0.05), burst });
            let mut path = path(STEADY, &Impairments { loss, ..Impairments::default() });
            let lost: Vec<bool> = (0..PACKETS).map(|at| path.arrival(at).is_none()).collect();
            let count = lost.iter().filter(|lost| **lost).count() as f64;
            let bursts = lost.windows(2).filter(|pair| !pair[0] && pair[1]).count() as f64;
            assert!((count / PACKETS as f64 / 0.05 - 1.0).abs() < 0.1, "{count}");
            // Independent losses also follow each other, with the probability of a loss.
            let expected = if burst > 1.0 { burst } else { 1.0 / 0.95 };
            assert!((count / bursts / expected - 1.0).abs() < 0.1, "{}", count / bursts);
        }
    }

    #[test]
    fn jitter_has_the_deviation_and_keeps_the_order() {
        let mut path = path(Jitter { sigma: 0.3, correlation: 0.5 }, &Impairments::default());
        let logs: Vec<f64> = (0..PACKETS).map(|_| (path.delay() as f64 / 1e6).ln()).collect();
        let square = |logs: &[f64]| logs.iter().map(|log| log * log).sum::<f64>() / logs.len() as f64;
        assert!((square(&logs).sqrt() / 0.3 - 1.0).abs() < 0.05);
        let next: f64 = logs.windows(2).map(|pair| pair[0] * pair[1]).sum::<f64>() / PACKETS as f64;
        assert!((next / square(&logs) - 0.5).abs() < 0.05);
        let arrivals: Vec<Nanos> = (0..1000).filter_map(|at| path.arrival(at * 1000)).collect();
        assert!(arrivals.is_sorted());
    }

    #[test]
    fn reordered_packets_overtake() {
        let reordering = Some(Fraction(0.1));
        let mut path = path(STEADY, &Impairments { reordering, ..Impairments::default() });
        let early =
            (0..PACKETS).filter(|at| path.arrival(at * 10).is_some_and(|then| then < at * 10 + 1_000_000));
        assert!((early.count() as f64 / PACKETS as f64 / 0.1 - 1.0).abs() < 0.1);
    }
}
