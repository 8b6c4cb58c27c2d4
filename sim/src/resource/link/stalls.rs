//! Stalls of a channel: times in which it transmits nothing.
//!
//! Each kind of stall begins as a Poisson process and lasts a uniform time; a simulation may add stalls of its own. A
//! transmission continues where it was when the stall is over.
//!
//! Stalls are drawn for windows of ten seconds, each from its own part of the channel's random stream. So they come at
//! the same instants whatever is sent, two plans meet the same ones, and an idle hour draws nothing. A Poisson process
//! has no memory: restarting it at every window changes nothing.

use hearth_profiles::Seconds;
use hearth_profiles::link::wifi::{MAX_STALL, Stall};
use rand_chacha::ChaCha8Rng;

use crate::engine::Nanos;
use crate::random::uniform;

/// The length of a window: no stall reaches beyond the next one.
const WINDOW: Nanos = (MAX_STALL.0 * 1e9) as Nanos;
/// Random words reserved for a window: two numbers of two words for each of a hundred stalls a second of 16 kinds are
/// 64,000 on average, and far fewer for a channel that stalls for at most half of the time.
const WORDS: u128 = 1 << 20;

/// The longest added stall, a day. source: assumed, so that a run that waits for it ends
const MAX_ADDED_STALL: Nanos = 86_400_000_000_000;

/// Start and end.
type Span = (Nanos, Nanos);

/// The stalls of one channel.
#[derive(Debug, Clone)]
pub struct Stalls {
    kinds: Vec<Stall>,
    stream: ChaCha8Rng,
    /// Added by the simulation.
    added: Vec<Span>,
    /// The window that `spans` covers.
    window: Option<u64>,
    /// The stalls that overlap the window, in order and without overlaps.
    spans: Vec<Span>,
}

impl Stalls {
    pub fn new(kinds: Vec<Stall>, stream: ChaCha8Rng) -> Self {
        Self { kinds, stream, added: Vec::new(), window: None, spans: Vec::new() }
    }

    /// Adds a stall.
    pub fn add(&mut self, from: Nanos, until: Nanos) {
        self.added.push((from, until.min(from.saturating_add(MAX_ADDED_STALL))));
        self.window = None;
    }

    /// Returns when a transmission of `time` nanoseconds that begins at `at` ends.
    pub fn end(&mut self, at: Nanos, time: Nanos) -> Nanos {
        let (mut at, mut left) = (self.stall_end(at), time);
        loop {
            let pause = self.next_stall(at);
            // At the end of time there is no next window.
            if left <= pause - at || pause == at {
                return at.saturating_add(left);
            }
            left -= pause - at;
            at = self.stall_end(pause);
        }
    }

    /// Returns the transmission time between two instants.
    pub fn transmission_time(&mut self, from: Nanos, until: Nanos) -> Nanos {
        let (mut at, mut sum) = (self.stall_end(from), 0);
        while at < until {
            let pause = self.next_stall(at).min(until);
            if pause == at {
                break;
            }
            sum += pause - at;
            at = self.stall_end(pause);
        }
        sum
    }

    /// The end of the current stall, or the instant itself.
    fn stall_end(&mut self, at: Nanos) -> Nanos {
        let mut at = at;
        while let Some(&(_, end)) = self.spans_at(at).iter().find(|&&(start, end)| start <= at && at < end) {
            at = end;
        }
        at
    }

    /// The beginning of the next stall, or of the next window, where the search continues.
    fn next_stall(&mut self, at: Nanos) -> Nanos {
        let edge = (at / WINDOW + 1).saturating_mul(WINDOW);
        let starts = self.spans_at(at).iter().map(|&(start, _)| start);
        starts.filter(|&start| start > at).min().unwrap_or(edge).min(edge)
    }

    /// The stalls that touch the window of an instant.
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
                // An exponential gap; the share is never 1.
                at += Seconds(-(1.0 - uniform(stream)).ln() / kind.rate.0);
                if at >= MAX_STALL {
                    break;
                }
                let start = (window * WINDOW).saturating_add(at.to_nanos());
                let length = kind.from + (kind.to - kind.from) * uniform(stream);
                spans.push((start, start.saturating_add(length.to_nanos())));
            }
        }
    }
}

/// Joins overlapping spans.
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
    use hearth_profiles::link::wifi::{Preset, Stalls as Document};
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
        stalls.add(10 * MILLI, 30 * MILLI);
        stalls.add(20 * MILLI, 50 * MILLI);
        stalls.add(60 * MILLI, 61 * MILLI);
        assert_eq!(stalls.end(0, 5 * MILLI), 5 * MILLI);
        assert_eq!(stalls.end(8 * MILLI, 2 * MILLI), 10 * MILLI);
        assert_eq!(stalls.end(8 * MILLI, 5 * MILLI), 53 * MILLI);
        assert_eq!(stalls.end(25 * MILLI, 0), 50 * MILLI);
        assert_eq!(stalls.end(25 * MILLI, 15 * MILLI), 66 * MILLI);
        assert_eq!(stalls.transmission_time(0, 70 * MILLI), 29 * MILLI);
    }

    #[test]
    fn stall_rate_is_independent_of_queries() {
        let mut stalls = stalls(Document::Preset(Preset::Awdl).kinds());
        let (hour, mut still) = (3600 * 1000 * MILLI, 0);
        for second in 0..3600 {
            still +=
                1000 * MILLI - stalls.transmission_time(second * 1000 * MILLI, (second + 1) * 1000 * MILLI);
        }
        // 0.15 /s of 80 ms and 0.03 /s of 190 ms, less what overlaps.
        let share = still as f64 / hour as f64;
        assert!((share / 0.0177 - 1.0).abs() < 0.1, "{share}");
        // Queries backwards and all at once give the same.
        assert_eq!(stalls.transmission_time(0, hour), hour - still);
        assert_eq!(
            stalls.clone().transmission_time(7 * 1000 * MILLI, 9999 * MILLI),
            stalls.transmission_time(7 * 1000 * MILLI, 9999 * MILLI)
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
            let (rate, from, to) = (PerSecond(rate), Seconds(from), Seconds(from + more));
            let kind = Stall { rate, from, to, source: String::new() };
            let mut stalls = stalls(vec![kind]);
            let end = stalls.end(at, time);
            prop_assert!(end >= at + time);
            prop_assert_eq!(stalls.transmission_time(at, end), time);
        }
    }
}
