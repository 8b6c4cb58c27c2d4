//! Event queue and clock of a simulation.
//!
//! The queue is a binary heap of entries with a time, a sequence number and an event. Sequence numbers break ties:
//! events of the same instant are handled in the order in which they were scheduled, so two runs with the same input
//! write identical traces. The event type is a parameter of the queue.
//!
//! The completion time of a shared resource changes whenever a job starts or ends, so its pending event must be
//! replaced. The resource uses a [`Timer`]: setting a timer increments its generation, which makes its entry in the
//! heap stale. Stale entries are dropped when they reach the top of the heap.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

/// An instant of simulated time, in nanoseconds since the start of the run.
pub type Nanos = u64;

/// Maximum simulated time in nanoseconds: about three years, far below the largest value of the clock.
pub const MAX_SIM_TIME: Nanos = 100_000_000_000_000_000;

/// The event queue and the clock of a simulation; `E` is the type of the events.
#[derive(Debug)]
pub struct Engine<E> {
    now: Nanos,
    sequence: u64,
    heap: BinaryHeap<Entry<E>>,
    /// Current generation of each timer; a heap entry with an older generation is stale.
    generations: Vec<u32>,
}

/// The handle of a timer, which has at most one pending event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timer(u32);

/// Timer number of the heap entries that belong to no timer; such an entry is never stale.
const NO_TIMER: u32 = u32::MAX;

#[derive(Debug)]
struct Entry<E> {
    at: Nanos,
    sequence: u64,
    timer: u32,
    generation: u32,
    event: E,
}

impl<E> Engine<E> {
    pub fn new() -> Self {
        Self { now: 0, sequence: 0, heap: BinaryHeap::new(), generations: Vec::new() }
    }

    /// Returns the current simulated time, which is the time of the last handled event.
    pub fn now(&self) -> Nanos {
        self.now
    }

    /// Creates a timer that is not set.
    pub fn new_timer(&mut self) -> Timer {
        let number = u32::try_from(self.generations.len()).ok().filter(|&it| it != NO_TIMER);
        self.generations.push(0);
        Timer(number.expect("fewer timers than u32 can count"))
    }

    /// Schedules an event at the time `at`, or now if `at` is in the past. The event cannot be cancelled.
    #[inline]
    pub fn schedule_at(&mut self, at: Nanos, event: E) {
        self.push(at, NO_TIMER, 0, event);
    }

    /// Schedules an event after a delay. The event cannot be cancelled.
    #[inline]
    pub fn schedule_after(&mut self, delay: Nanos, event: E) {
        self.push(self.now.saturating_add(delay), NO_TIMER, 0, event);
    }

    /// Schedules a timer's event at the time `at`, and cancels the pending event of the timer.
    pub fn set_timer(&mut self, timer: Timer, at: Nanos, event: E) {
        let generation = &mut self.generations[timer.0 as usize];
        *generation = generation.wrapping_add(1);
        let generation = *generation;
        self.push(at, timer.0, generation, event);
    }

    /// Drops all pending events, but keeps the clock and the timers.
    pub fn clear_events(&mut self) {
        self.heap.clear();
    }

    /// Advances the clock to the next event and returns that event; `None` if no event is pending.
    #[inline]
    pub fn next_event(&mut self) -> Option<E> {
        while let Some(entry) = self.heap.pop() {
            let stale = entry.timer != NO_TIMER && self.generations[entry.timer as usize] != entry.generation;
            if !stale {
                self.now = entry.at;
                return Some(entry.event);
            }
        }
        None
    }

    #[inline]
    fn push(&mut self, at: Nanos, timer: u32, generation: u32, event: E) {
        let at = at.max(self.now);
        self.sequence += 1;
        self.heap.push(Entry { at, sequence: self.sequence, timer, generation, event });
    }
}

impl<E> Default for Engine<E> {
    fn default() -> Self {
        Self::new()
    }
}

impl<E> Ord for Entry<E> {
    /// Compares in reverse order of time, because [`BinaryHeap`] pops its greatest entry first.
    #[inline]
    fn cmp(&self, other: &Self) -> Ordering {
        (other.at, other.sequence).cmp(&(self.at, self.sequence))
    }
}

impl<E> PartialOrd for Entry<E> {
    #[inline]
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> PartialEq for Entry<E> {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.sequence) == (other.at, other.sequence)
    }
}

impl<E> Eq for Entry<E> {}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn drain(mut engine: Engine<u32>) -> Vec<(Nanos, u32)> {
        std::iter::from_fn(|| engine.next_event().map(|event| (engine.now(), event))).collect()
    }

    #[test]
    fn setting_timer_again_cancels_pending_event() {
        let mut engine = Engine::new();
        let (first, second) = (engine.new_timer(), engine.new_timer());
        engine.set_timer(first, 10, 1);
        engine.set_timer(second, 20, 2);
        engine.set_timer(first, 30, 3);
        assert_eq!(drain(engine), [(20, 2), (30, 3)]);
    }

    #[test]
    fn past_instant_means_now() {
        let mut engine = Engine::new();
        engine.schedule_at(10, 1);
        assert_eq!(engine.next_event(), Some(1));
        engine.schedule_at(4, 2);
        assert_eq!(drain(engine), [(10, 2)]);
    }

    proptest! {
        /// Events are handled in the order of time, and simultaneous events in the order of scheduling.
        #[test]
        fn time_never_goes_back(times in prop::collection::vec(0u64..50, 0..60)) {
            let mut engine = Engine::new();
            for (at, event) in times.iter().zip(0u32..) {
                let schedule = if event % 2 == 0 { Engine::schedule_at } else { Engine::schedule_after };
                schedule(&mut engine, *at, event);
            }
            let mut expected: Vec<_> = times.iter().copied().zip(0u32..).collect();
            expected.sort_unstable();
            prop_assert_eq!(drain(engine), expected);
        }
    }
}
