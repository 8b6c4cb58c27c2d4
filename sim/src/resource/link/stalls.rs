//! Stalls of a channel: periods in which the channel transmits nothing.
//!
//! The stalls of each kind begin as a Poisson process and have uniformly distributed durations; a simulation may add
//! further stalls. A stall interrupts a transmission, which resumes afterwards.
//!
//! Stalls are drawn for time windows of ten seconds, each from a separate part of the channel's random stream. So the
//! times of stalls do not depend on the messages, and are the same for all plans. A Poisson process is memoryless, so
//! it can be restarted at every window.

use hearth_profiles::Seconds;
use hearth_profiles::link::wifi::{MAX_STALL_DURATION, Stall};
use rand_chacha::ChaCha8Rng;

use crate::engine::Nanos;
use crate::random::draw_uniform;

/// Length of a time window in nanoseconds. No stall is longer, so a stall ends in the next window at the latest.
const WINDOW: Nanos = (MAX_STALL_DURATION.0 * 1e9) as Nanos;
/// Number of random 32-bit words for each time window. A stall takes four words, so 16 kinds with a hundred stalls per
/// second each take 64,000 words on average; a channel that stalls at most half of the time takes far fewer.
const WORDS: u128 = 1 << 20;

/// Maximum duration of an added stall in nanoseconds: one day.
/// source: assumed, so that a run does not wait forever for the end of the stall
const MAX_ADDED_STALL: Nanos = 86_400_000_000_000;

type Span = (Nanos, Nanos);

#[derive(Debug, Clone)]
pub struct Stalls {
    kinds: Vec<Stall>,
    stream: ChaCha8Rng,
    added: Vec<Span>,
    /// The index of the window whose stalls are in `spans`.
    window: Option<u64>,
    /// The stalls that overlap this window, sorted and merged.
    spans: Vec<Span>,
}

impl Stalls {
    pub fn new(kinds: Vec<Stall>, stream: ChaCha8Rng) -> Self {
        Self { kinds, stream, added: Vec::new(), window: None, spans: Vec::new() }
    }

    /// Adds a stall from `from` until `until`, which is limited to one day.
    pub fn add_stall(&mut self, from: Nanos, until: Nanos) {
        self.added.push((from, until.min(from.saturating_add(MAX_ADDED_STALL))));
        self.window = None;
    }

    /// Returns the end of a transmission that starts at `at` and takes `time` nanoseconds without stalls.
    pub fn transmission_end(&mut self, at: Nanos, time: Nanos) -> Nanos {
        let (mut at, mut remaining) = (self.stall_end(at), time);
        loop {
            let stall_start = self.next_stall(at);
            // At the maximum time there is no next window.
            if remaining <= stall_start - at || stall_start == at {
                return at.saturating_add(remaining);
            }
            remaining -= stall_start - at;
            at = self.stall_end(stall_start);
        }
    }

    /// Returns for how many nanoseconds between `from` and `until` the channel is not stalled.
    pub fn unstalled_time(&mut self, from: Nanos, until: Nanos) -> Nanos {
        let (mut at, mut sum) = (self.stall_end(from), 0);
        while at < until {
            let stall_start = self.next_stall(at).min(until);
            if stall_start == at {
                break;
            }
            sum += stall_start - at;
            at = self.stall_end(stall_start);
        }
        sum
    }

    /// Returns the end of the stall at the time `at`, or `at` if the channel is not stalled then.
    fn stall_end(&mut self, at: Nanos) -> Nanos {
        let mut at = at;
        while let Some(&(_, end)) = self.spans_at(at).iter().find(|&&(start, end)| start <= at && at < end) {
            at = end;
        }
        at
    }

    /// Returns the start of the next stall in the time window of `at`; if there is none, the start of the next window.
    fn next_stall(&mut self, at: Nanos) -> Nanos {
        let edge = (at / WINDOW + 1).saturating_mul(WINDOW);
        let starts = self.spans_at(at).iter().map(|&(start, _)| start);
        starts.filter(|&start| start > at).min().unwrap_or(edge).min(edge)
    }

    fn spans_at(&mut self, at: Nanos) -> &[Span] {
        let window = at / WINDOW;
        if self.window != Some(window) {
            let mut spans = self.added.clone();
            if let Some(before) = window.checked_sub(1) {
                self.draw(before, &mut spans);
            }
            self.draw(window, &mut spans);
            let (first, last) = (window * WINDOW, (window + 1).saturating_mul(WINDOW));
            spans.retain(|&(start, end)| start < last && end > first);
            spans.sort_unstable();
            self.spans = merged(spans);
            self.window = Some(window);
        }
        &self.spans
    }

    fn draw(&mut self, window: u64, spans: &mut Vec<Span>) {
        if self.kinds.is_empty() {
            return;
        }
        self.stream.set_word_pos(u128::from(window) * WORDS);
        let stream = &mut self.stream;
        for kind in &self.kinds {
            let mut at = Seconds(0.0);
            loop {
                // An exponentially distributed gap; `draw_uniform` never returns 1.
                at += Seconds(-(1.0 - draw_uniform(stream)).ln() / kind.rate.0);
                if at >= MAX_STALL_DURATION {
                    break;
                }
                let start = (window * WINDOW).saturating_add(at.to_nanos());
                let length =
                    kind.min_duration + (kind.max_duration - kind.min_duration) * draw_uniform(stream);
                spans.push((start, start.saturating_add(length.to_nanos())));
            }
        }
    }
}

fn merged(sorted: Vec<Span>) -> Vec<Span> {
    let mut spans: Vec<Span> = Vec::with_capacity(sorted.len());
    for (start, end) in sorted {
        match spans.last_mut() {
            Some((_, last)) if *last >= start => *last = (*last).max(end),
            _ => spans.push((start, end)),
        }
    }
    spans
}

#[cfg(test)]
mod tests {
    use hearth_profiles::PerSecond;
    use hearth_profiles::link::wifi::{StallPreset, Stalls as Document};
    use proptest::prelude::*;
    use rand_chacha::rand_core::SeedableRng;

    use super::*;

    const MILLI: Nanos = 1_000_000;

    fn stalls(kinds: Vec<Stall>) -> Stalls {
        Stalls::new(kinds, ChaCha8Rng::seed_from_u64(1))
    }

    #[test]
    fn transmission_resumes_after_stall() {
        let mut stalls = stalls(vec![]);
        stalls.add_stall(10 * MILLI, 30 * MILLI);
        stalls.add_stall(20 * MILLI, 50 * MILLI);
        stalls.add_stall(60 * MILLI, 61 * MILLI);
        assert_eq!(stalls.transmission_end(0, 5 * MILLI), 5 * MILLI);
        assert_eq!(stalls.transmission_end(8 * MILLI, 2 * MILLI), 10 * MILLI);
        assert_eq!(stalls.transmission_end(8 * MILLI, 5 * MILLI), 53 * MILLI);
        assert_eq!(stalls.transmission_end(25 * MILLI, 0), 50 * MILLI);
        assert_eq!(stalls.transmission_end(25 * MILLI, 15 * MILLI), 66 * MILLI);
        assert_eq!(stalls.unstalled_time(0, 70 * MILLI), 29 * MILLI);
    }

    #[test]
    fn stall_rate_is_independent_of_queries() {
        let mut stalls = stalls(Document::Preset(StallPreset::Awdl).stall_kinds());
        let (second, hour) = (1000 * MILLI, 3600 * 1000 * MILLI);
        let mut stalled_in = |at: Nanos| second - stalls.unstalled_time(at, at + second);
        let stalled: Nanos = (0..3600).map(|count| stalled_in(count * second)).sum();
        // On average 0.15 stalls per second of 80 ms each and 0.03 per second of 190 ms each, less their overlaps.
        let share = stalled as f64 / hour as f64;
        assert!((share / 0.0177 - 1.0).abs() < 0.1, "{share}");
        // Queries in another order give the same stalls.
        assert_eq!(stalls.unstalled_time(0, hour), hour - stalled);
        assert_eq!(
            stalls.clone().unstalled_time(7 * 1000 * MILLI, 9999 * MILLI),
            stalls.unstalled_time(7 * 1000 * MILLI, 9999 * MILLI)
        );
    }

    proptest! {
        #[test]
        fn end_matches_transmission_time(
            rate in 0.1f64..100.0,
            from in 0.0f64..0.004,
            more in 0.0f64..0.002,
            at in 0u64..30_000_000_000,
            time in 0u64..3_000_000_000,
        ) {
            let (min_duration, max_duration) = (Seconds(from), Seconds(from + more));
            let kind = Stall { rate: PerSecond(rate), min_duration, max_duration, source: String::new() };
            let mut stalls = stalls(vec![kind]);
            let end = stalls.transmission_end(at, time);
            prop_assert!(end >= at + time);
            prop_assert_eq!(stalls.unstalled_time(at, end), time);
        }
    }
}
