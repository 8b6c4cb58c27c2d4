//! Sampling: repeats a measurement until its median is known.
//!
//! A number is the median of several samples; its spread is half the distance between the quartiles over the median.
//! Each sample repeats the work until the clock's resolution, a scheduler's slice or a throttle's burst no longer
//! matters. Under a CPU quota a sample spans several periods: within one, a process runs at full speed or not at all.

use std::time::Instant;

use super::{MeasureError, control_group};
use crate::units::{Bytes, Fraction, Rounded, Seconds};
use crate::values::Sourced;

/// Seconds since a fixed moment.
#[allow(clippy::disallowed_methods)] // measuring is this module's purpose, and this its one clock
pub fn now() -> f64 {
    use std::sync::OnceLock;
    static START: OnceLock<Instant> = OnceLock::new();
    let start = *START.get_or_init(Instant::now);
    Instant::now().duration_since(start).as_secs_f64()
}

/// Periods of a processor quota that a sample spans.
const QUOTA_PERIODS: f64 = 4.0;

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Effort {
    pub samples: usize,
    /// Rounds in which all compute rates are sampled.
    pub rounds: usize,
    /// Least time of a sample of arithmetic or memory.
    pub sample: Seconds,
    /// Least time of a sample of disk reads.
    pub disk_sample: Seconds,
    /// The most time for a number, however slow the machine; it may then have a single sample.
    pub limit: Seconds,
    /// The buffer that stands for a model's weights; smaller if less memory is available.
    pub buffer: Bytes,
    /// Disk space for a scratch file, and the most bytes read of a model file at a time.
    pub file: Bytes,
}

impl Effort {
    /// The quick effort: about fifteen seconds for a whole device.
    pub fn quick() -> Effort {
        Effort {
            samples: 5,
            rounds: 8,
            sample: Seconds(0.02),
            disk_sample: Seconds(0.2),
            limit: Seconds(1.5),
            buffer: Bytes::mib(512),
            file: Bytes::mib(256),
        }
    }

    /// The full effort: about a minute for a whole device.
    pub fn full() -> Effort {
        Effort {
            samples: 9,
            rounds: 3,
            sample: Seconds(0.1),
            disk_sample: Seconds(0.5),
            limit: Seconds(6.0),
            buffer: Bytes::mib(1024),
            file: Bytes::mib(512),
        }
    }

    /// A minimal effort of milliseconds, for tests: the values are meaningless.
    pub fn token() -> Effort {
        Effort {
            samples: 2,
            rounds: 2,
            sample: Seconds(1e-4),
            disk_sample: Seconds(1e-4),
            limit: Seconds(0.05),
            buffer: Bytes::mib(4),
            file: Bytes::mib(4),
        }
    }

    /// Lengthens the samples for this process's CPU quota.
    pub(super) fn under_quota(self) -> Effort {
        match control_group::processor_quota() {
            Some(quota) => {
                let least = Seconds(quota.period.0 * QUOTA_PERIODS);
                let longer = |own: Seconds| Seconds(own.0.max(least.0));
                // Each sample spans several periods already, so fewer are needed.
                let samples = self.samples.min(3);
                Effort { samples, sample: longer(self.sample), limit: Seconds(self.limit.0 * 2.0), ..self }
            }
            None => self,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Default)]
pub struct Samples {
    sorted: Vec<f64>,
}

impl Samples {
    pub fn new(mut values: Vec<f64>) -> Samples {
        values.sort_by(f64::total_cmp);
        Samples { sorted: values }
    }

    pub(super) fn add(&mut self, others: Samples) {
        self.sorted.extend(others.sorted);
        self.sorted.sort_by(f64::total_cmp);
    }

    /// The quantile, interpolated.
    fn quantile(&self, share: f64) -> f64 {
        let Some(last) = self.sorted.len().checked_sub(1) else { return f64::NAN };
        let at = share * last as f64;
        let (low, high) = (self.sorted[at.floor() as usize], self.sorted[at.ceil() as usize]);
        low + (high - low) * at.fract()
    }

    pub fn median(&self) -> f64 {
        self.quantile(0.5)
    }

    pub fn spread(&self) -> Option<Fraction> {
        let spread = (self.quantile(0.75) - self.quantile(0.25)) / 2.0 / self.median();
        (self.sorted.len() > 1 && spread.is_finite()).then_some(Fraction(spread))
    }

    pub fn count(&self) -> usize {
        self.sorted.len()
    }

    /// The median as a quantity, with the description of its measurement.
    pub fn sourced<T: Rounded>(&self, quantity: impl FnOnce(f64) -> T, what: &str) -> Sourced<T> {
        let count = self.count();
        Sourced {
            value: quantity(self.median()).rounded(),
            source: format!("measured: median of {count} samples of {what}"),
            spread: self.spread().map(|spread| Fraction((spread.0 * 1e3).round() / 1e3).rounded()),
        }
    }

    /// The median as a rate, which must be positive and finite.
    pub(super) fn usable<T: Rounded>(
        &self,
        quantity: impl FnOnce(f64) -> T,
        what: &str,
    ) -> Result<Sourced<T>, MeasureError> {
        if self.median().is_finite() && self.median() > 0.0 {
            Ok(self.sourced(quantity, what))
        } else {
            Err(MeasureError::Unusable { what: what.into() })
        }
    }
}

/// Samples the work a second of `call`, which returns the work it did.
pub fn rate(effort: &Effort, mut call: impl FnMut() -> f64) -> Samples {
    let effort = effort.under_quota();
    let start = now();
    call(); // warms caches, faults buffers in, wakes threads
    let mut rates = Vec::with_capacity(effort.samples);
    while rates.len() < effort.samples && (rates.is_empty() || now() - start < effort.limit.0) {
        let (begun, mut work) = (now(), 0.0);
        let elapsed = loop {
            work += call();
            let elapsed = now() - begun;
            if elapsed >= effort.sample.0 {
                break elapsed;
            }
        };
        rates.push(work / elapsed);
    }
    Samples::new(rates)
}

/// Measures the duration of `call`, in seconds.
pub fn duration(effort: &Effort, mut call: impl FnMut()) -> Samples {
    let rates = rate(effort, || {
        call();
        1.0
    });
    Samples::new(rates.sorted.iter().map(|rate| 1.0 / rate).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_and_spread_of_five() {
        let samples = Samples::new(vec![5.0, 1.0, 4.0, 2.0, 3.0]);
        assert_eq!(samples.median(), 3.0);
        // Quartiles 2 and 4: half their distance over the median is 1 / 3.
        assert_eq!(samples.spread(), Some(Fraction(1.0 / 3.0)));
        let sourced = samples.sourced(Seconds, "five sleeps");
        assert_eq!(sourced.source, "measured: median of 5 samples of five sleeps");
        assert_eq!(sourced.spread, Some("33.3 %".parse().unwrap()));
        assert_eq!(Samples::new(vec![1.0]).spread(), None, "one sample has no spread");
    }

    #[test]
    fn rate_is_work_over_time() {
        let effort = Effort { samples: 3, sample: Seconds(0.002), ..Effort::token() };
        let sleep = || std::thread::sleep(std::time::Duration::from_millis(1));
        let rates = rate(&effort, || {
            sleep();
            10.0
        });
        assert_eq!(rates.count(), 3);
        assert!(rates.median() <= 10_000.0, "ten a millisecond is the most that a sleep allows");
        assert!(duration(&effort, sleep).median() >= 0.001);
    }

    #[test]
    fn sampling_stops_at_its_limit() {
        let effort = Effort { samples: 100, limit: Seconds(0.02), ..Effort::token() };
        let slow = rate(&effort, || {
            std::thread::sleep(std::time::Duration::from_millis(15));
            1.0
        });
        assert!(slow.count() < 10, "{}", slow.count());
    }
}
