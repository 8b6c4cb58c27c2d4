//! Repeats measurements and computes the median and the spread of the samples.
//!
//! A result is the median of several samples. The spread is half the interquartile range divided by the median. Each
//! sample repeats the work until the resolution of the clock, the time slices of the scheduler and the burst of a
//! throttle no longer matter. With a CPU quota, a sample spans several quota periods, because within a period a process
//! runs at full speed or not at all.

use std::io;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use super::{MeasurementError, cgroup};
use crate::document_values::Sourced;
use crate::units::{Bytes, Fraction, RoundForDisplay, Seconds};

/// Returns the time in seconds of a monotonic clock, which begins at the first call of this function.
#[allow(clippy::disallowed_methods)] // the only clock of the measurements
pub fn monotonic_seconds() -> f64 {
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    START.elapsed().as_secs_f64()
}

/// Returns the CPU time of the calling thread, or an error if the system does not report it.
pub fn thread_cpu_time() -> io::Result<Duration> {
    #[cfg(unix)]
    {
        use rustix::time::{ClockId, DynamicClockId, clock_gettime_dynamic};
        let time = clock_gettime_dynamic(DynamicClockId::Known(ClockId::ThreadCPUTime))?;
        Ok(Duration::new(time.tv_sec as u64, time.tv_nsec as u32))
    }
    #[cfg(not(unix))]
    Err(io::ErrorKind::Unsupported.into())
}

/// Minimum number of quota periods that a sample spans, if this process has a CPU quota.
const QUOTA_PERIODS: f64 = 4.0;

/// The limits of measurements in time, memory and disk space.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MeasurementOptions {
    /// Maximum number of samples for each result.
    pub sample_count: usize,
    /// Number of rounds, in each of which all compute rates are sampled.
    pub sampling_rounds: usize,
    /// Minimum time of a sample of arithmetic or of memory reads.
    pub sample_time: Seconds,
    /// Minimum time of a sample of disk reads.
    pub disk_sample_time: Seconds,
    /// Maximum time to measure one result. A slow machine may take only one sample in this time.
    pub time_limit: Seconds,
    /// Size of the buffer that replaces a model's weights. The buffer is smaller if not enough memory is available.
    pub buffer_size: Bytes,
    /// Maximum size of a scratch file, and of the part of a model file that is read at a time.
    pub max_file_size: Bytes,
}

impl Default for MeasurementOptions {
    fn default() -> Self {
        Self::full()
    }
}

impl MeasurementOptions {
    /// Returns the options of a quick measurement: about fifteen seconds for a whole device.
    pub fn quick() -> MeasurementOptions {
        MeasurementOptions {
            sample_count: 5,
            sampling_rounds: 8,
            sample_time: Seconds(0.02),
            disk_sample_time: Seconds(0.2),
            time_limit: Seconds(1.5),
            buffer_size: Bytes::from_mib(512),
            max_file_size: Bytes::from_mib(256),
        }
    }

    /// Returns the options of a full measurement: about a minute for a whole device.
    pub fn full() -> MeasurementOptions {
        MeasurementOptions {
            sample_count: 9,
            sampling_rounds: 3,
            sample_time: Seconds(0.1),
            disk_sample_time: Seconds(0.5),
            time_limit: Seconds(6.0),
            buffer_size: Bytes::from_mib(1024),
            max_file_size: Bytes::from_mib(512),
        }
    }

    /// Returns options for tests: a few milliseconds for each result. The results are meaningless.
    pub fn minimal() -> MeasurementOptions {
        MeasurementOptions {
            sample_count: 2,
            sampling_rounds: 2,
            sample_time: Seconds(1e-4),
            disk_sample_time: Seconds(1e-4),
            time_limit: Seconds(0.05),
            buffer_size: Bytes::from_mib(4),
            max_file_size: Bytes::from_mib(4),
        }
    }

    /// Returns options with fewer and longer samples if this process has a CPU quota, otherwise the same options.
    pub(super) fn under_quota(self) -> MeasurementOptions {
        let Some(quota) = cgroup::cpu_quota() else { return self };
        MeasurementOptions {
            // Each sample spans several periods, so fewer samples are needed.
            sample_count: self.sample_count.min(3),
            sample_time: Seconds(self.sample_time.0.max(quota.period.0 * QUOTA_PERIODS)),
            time_limit: Seconds(self.time_limit.0 * 2.0),
            ..self
        }
    }
}

/// The samples of one measured quantity.
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

    /// Returns a quantile of the samples (0.5 is the median), linearly interpolated; NaN if there are no samples.
    pub fn quantile(&self, share: f64) -> f64 {
        let Some(last) = self.sorted.len().checked_sub(1) else { return f64::NAN };
        let at = share * last as f64;
        let (low, high) = (self.sorted[at.floor() as usize], self.sorted[at.ceil() as usize]);
        low + (high - low) * at.fract()
    }

    pub fn median(&self) -> f64 {
        self.quantile(0.5)
    }

    /// Returns half the interquartile range divided by the median, or `None` for fewer than two samples.
    pub fn spread(&self) -> Option<Fraction> {
        let spread = (self.quantile(0.75) - self.quantile(0.25)) / 2.0 / self.median();
        (self.sorted.len() > 1 && spread.is_finite()).then_some(Fraction(spread))
    }

    pub fn count(&self) -> usize {
        self.sorted.len()
    }

    /// Returns the median as a quantity with a source that describes the measurement. `what` names what was measured.
    pub fn sourced_median<T: RoundForDisplay>(
        &self,
        quantity: impl FnOnce(f64) -> T,
        what: &str,
    ) -> Sourced<T> {
        let count = self.count();
        let plural = if count == 1 { "" } else { "s" };
        Sourced {
            value: quantity(self.median()).rounded(),
            source: format!("measured: median of {count} sample{plural} of {what}"),
            spread: self.spread().map(|spread| Fraction((spread.0 * 1e3).round() / 1e3).rounded()),
        }
    }

    /// Returns the result of [`Self::sourced_median`], or an error if the median is not positive and finite.
    pub(super) fn sourced_positive_median<T: RoundForDisplay>(
        &self,
        quantity: impl FnOnce(f64) -> T,
        what: &str,
    ) -> Result<Sourced<T>, MeasurementError> {
        if !self.median().is_finite() || self.median() <= 0.0 {
            return Err(MeasurementError::Unusable { what: what.into() });
        }
        Ok(self.sourced_median(quantity, what))
    }
}

/// Calls `call` repeatedly, and measures its work per second. `call` returns the amount of work that it did.
pub fn measure_rate(options: &MeasurementOptions, mut call: impl FnMut() -> f64) -> Samples {
    let options = options.under_quota();
    let start = monotonic_seconds();
    call(); // warms up caches, faults in buffers and wakes threads
    let mut rates = Vec::with_capacity(options.sample_count);
    while rates.len() < options.sample_count
        && (rates.is_empty() || monotonic_seconds() - start < options.time_limit.0)
    {
        let (begun, mut work) = (monotonic_seconds(), 0.0);
        let elapsed = loop {
            work += call();
            let elapsed = monotonic_seconds() - begun;
            if elapsed >= options.sample_time.0 {
                break elapsed;
            }
        };
        rates.push(work / elapsed);
    }
    Samples::new(rates)
}

/// Calls `call` repeatedly, and measures its duration in seconds.
pub fn measure_duration(options: &MeasurementOptions, mut call: impl FnMut()) -> Samples {
    let rates = measure_rate(options, || {
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
        let sourced = samples.sourced_median(Seconds, "five sleeps");
        assert_eq!(sourced.source, "measured: median of 5 samples of five sleeps");
        assert_eq!(sourced.spread, Some("33.3 %".parse().unwrap()));
        assert_eq!(Samples::new(vec![1.0]).spread(), None, "one sample has no spread");
    }

    #[test]
    fn rate_is_work_over_time() {
        let options = MeasurementOptions {
            sample_count: 3,
            sample_time: Seconds(0.002),
            ..MeasurementOptions::minimal()
        };
        let sleep = || std::thread::sleep(Duration::from_millis(1));
        let rates = measure_rate(&options, || {
            sleep();
            10.0
        });
        assert_eq!(rates.count(), 3);
        assert!(rates.median() <= 10_000.0, "a sleep of a millisecond allows at most ten per millisecond");
        assert!(measure_duration(&options, sleep).median() >= 0.001);
    }

    #[test]
    fn sampling_stops_at_its_limit() {
        let options = MeasurementOptions {
            sample_count: 100,
            time_limit: Seconds(0.02),
            ..MeasurementOptions::minimal()
        };
        let slow = measure_rate(&options, || {
            std::thread::sleep(Duration::from_millis(15));
            1.0
        });
        assert!(slow.count() < 10, "{}", slow.count());
    }
}
