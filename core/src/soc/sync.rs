//! The cost of synchronising GPU and NPU.
//!
//! HeteroLLM paper, sections 3.1 and 4.2. Slow: a buffer is copied through the GPU's framework, and the GPU's queue,
//! which has run empty, accepts a kernel again. Fast: the buffers are shared; a thread sleeps for the predicted time
//! of the kernel, in steps of the shortest sleep, and polls a flag for the rest, so an event costs only seeing the
//! flag and handing on. A product cut between both has two events, which is 14 per layer; with products whole, those
//! that read the same activations share a pair, which is 8.
//!
//! The dominating processor is waited for: the NPU while a prompt is read, so that the next kernel is submitted late;
//! the GPU in decoding, whose queue keeps the order. The fitted cost of a fast event holds both.

use hearth_profiles::Seconds;
use hearth_profiles::device::Soc;
use hearth_profiles::device::soc::{Synchronisation, Upkeep};

use hearth_profiles::device::SocOptions;

/// Events of a product that is cut, and of a group that is computed on the NPU: one before and one after.
pub const EVENTS: u32 = 2;

/// The costs of an event: when partitions were solved, and when they run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sync {
    /// The cost in seconds that partitions are chosen with.
    pub planned: f64,
    /// The actual cost in seconds.
    pub real: f64,
}

impl Sync {
    /// The costs under these options.
    pub fn new(soc: &Soc, options: SocOptions) -> Self {
        let real = soc.synchronisation.event(options.synchronisation).0;
        let planned = match options.partitions {
            Upkeep::Solved => real,
            Upkeep::Fixed => soc.synchronisation.event(Synchronisation::Fast).0,
        };
        Self { planned, real }
    }

    /// The cost of a pair of events when it runs.
    pub fn pair(&self) -> f64 {
        f64::from(EVENTS) * self.real
    }
}

/// How a thread spends the time until a kernel is done.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Wait {
    /// Asleep, for whole steps.
    pub slept: Seconds,
    /// Watching the flag.
    pub polled: Seconds,
}

impl Wait {
    /// Until a kernel that is predicted to take so long, with sleeps of at least `step`. A sleep that would end later
    /// than the kernel is not begun.
    pub fn until(kernel: Seconds, step: Seconds) -> Self {
        let steps = if step.0 > 0.0 { (kernel.0 / step.0).floor() } else { 0.0 };
        let slept = (steps * step.0).min(kernel.0);
        Self { slept: Seconds(slept), polled: Seconds(kernel.0 - slept) }
    }

    /// The delay of sleeping without polling: the rest of the step in which the kernel ends.
    pub fn overslept(kernel: Seconds, step: Seconds) -> Seconds {
        let steps = if step.0 > 0.0 { (kernel.0 / step.0).ceil() } else { 0.0 };
        Seconds((steps * step.0 - kernel.0).max(0.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shorter_than_a_sleep_is_polled() {
        let step = Seconds(90e-6);
        let short = Wait::until(Seconds(60e-6), step);
        assert_eq!((short.slept.0, short.polled.0), (0.0, 60e-6));
        // 1000 us are eleven sleeps of 90 us and 10 us of polling; a twelfth sleep would end 80 us late.
        let long = Wait::until(Seconds(1e-3), step);
        assert!((long.slept.0 - 990e-6).abs() < 1e-12 && (long.polled.0 - 10e-6).abs() < 1e-12);
        assert!((Wait::overslept(Seconds(1e-3), step).0 - 80e-6).abs() < 1e-12);
        assert_eq!(Wait::until(Seconds(1e-3), Seconds(0.0)).polled, Seconds(1e-3));
    }
}
