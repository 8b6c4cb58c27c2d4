//! Confidence intervals of the mean time per token of one run.
//!
//! The method is batch means. The times of consecutive tokens are correlated, for example while a page cache fills or a
//! network is slow, so they are not independent samples. The decode steps are divided into batches of equal length,
//! whose means are nearly independent. Student's t distribution gives the interval that contains the mean of an
//! infinite run with a probability of 95 %.
//!
//! Deviation: a run with few tokens uses batches of one step, so that ten tokens also have an interval. This interval
//! is too narrow if the times of consecutive tokens are correlated.

use serde::{Deserialize, Serialize};

use super::token_times::TokenTimes;
use super::{Terms, group_by_pass, millis, step_terms};
use hearth_schema::trace::Trace;

/// Maximum number of batches into which the decode steps of a run are divided.
/// source: Schmeiser, "Batch size effects in the analysis of simulation output", Operations Research 30(3), 1982:
/// more than 30 batches have no advantage, 10 batches have only a small disadvantage
const MAX_BATCHES: usize = 10;

/// The 97.5 % quantiles of Student's t distribution with 1 to 9 degrees of freedom.
/// source: the table of the distribution
const STUDENT_T: [f64; MAX_BATCHES - 1] = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262];

/// Half-widths of the 95 % confidence intervals of the mean times of a run, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ConfidenceIntervals {
    /// The number of batches into which the decode steps are divided.
    #[serde(alias = "stretches")]
    pub batches: usize,
    /// The half-width of the interval of the mean time per output token, in milliseconds.
    #[serde(rename = "tpot")]
    pub tpot_half_width_ms: f64,
    /// The half-width of the interval of the mean of each term of [`Terms::named_terms`], in milliseconds.
    #[serde(rename = "terms")]
    pub term_half_widths_ms: [f64; 7],
}

impl ConfidenceIntervals {
    /// Computes the confidence intervals of a trace; `None` if the trace has fewer than two decode steps.
    pub fn from_trace(trace: &Trace) -> Option<Self> {
        let by_pass = group_by_pass(&trace.records);
        let token_times = TokenTimes::from_records(trace, &by_pass);
        let batches = token_times.decode_steps.len().min(MAX_BATCHES);
        let student_t = *STUDENT_T.get(batches.checked_sub(2)?)?;
        // The time, its terms and the number of tokens of each batch.
        let mut times = vec![(0.0, Terms::default(), 0.0); batches];
        for (index, step) in token_times.decode_steps.iter().enumerate() {
            let (time, terms, tokens) = &mut times[index * batches / token_times.decode_steps.len()];
            *time += millis(step.duration_ns());
            *tokens += f64::from(step.tokens());
            super::add_share(terms, &step_terms(trace, &by_pass, step), 1.0);
        }
        let half = |of: &dyn Fn(&(f64, Terms, f64)) -> f64| {
            let means: Vec<f64> = times.iter().map(|batch| of(batch) / batch.2).collect();
            student_t * sample_standard_deviation(&means) / (batches as f64).sqrt()
        };
        let terms = std::array::from_fn(|index| half(&|batch| batch.1.named_terms()[index].1));
        Some(Self { batches, tpot_half_width_ms: half(&|batch| batch.0), term_half_widths_ms: terms })
    }
}

fn sample_standard_deviation(values: &[f64]) -> f64 {
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    (squares / (values.len() as f64 - 1.0)).sqrt()
}

#[cfg(test)]
mod tests {
    use super::super::tests::{record, trace, with_cpu};
    use super::*;
    use hearth_schema::pass::Pass;
    use hearth_schema::trace::StepKind;

    /// Returns a trace of one device. `tokens` has the CPU and the disk time of each token after the first, in ms.
    fn single_device(tokens: &[(u64, u64)]) -> Trace {
        let mut trace = trace();
        trace.header.devices.truncate(1);
        trace.readings.clear();
        trace.passes = (0..=tokens.len() as u32).map(|pass| Pass::new(pass, pass, 1, true)).collect();
        trace.records = vec![with_cpu(record(0, StepKind::Output, 0, 0, [0, 10]), 10)];
        let mut now = 10;
        for (pass, (cpu, disk)) in (1..).zip(tokens) {
            trace.records.push(with_cpu(record(0, StepKind::Output, pass, 0, [now, now + cpu + disk]), *cpu));
            now += cpu + disk;
        }
        trace
    }

    #[test]
    fn constant_times_have_an_interval_of_zero() {
        let expected =
            ConfidenceIntervals { batches: 10, tpot_half_width_ms: 0.0, term_half_widths_ms: [0.0; 7] };
        assert_eq!(ConfidenceIntervals::from_trace(&single_device(&[(5, 2); 40])), Some(expected));
        assert_eq!(ConfidenceIntervals::from_trace(&single_device(&[(5, 2)])), None);
    }

    #[test]
    fn two_tokens_have_a_wide_interval() {
        // 10 and 14 ms: the deviation is sqrt(2^2 + 2^2) = 2.828, the interval 12.706 * 2.828 / sqrt(2) = 25.412.
        let intervals = ConfidenceIntervals::from_trace(&single_device(&[(10, 0), (10, 4)])).expect("tokens");
        assert!((intervals.tpot_half_width_ms - 25.412).abs() < 1e-9, "{intervals:?}");
        let [cpu, gpu, memory, disk, ..] = intervals.term_half_widths_ms;
        assert_eq!((cpu, gpu, memory), (0.0, 0.0, 0.0));
        assert!((disk - 25.412).abs() < 1e-9, "{intervals:?}");
    }

    #[test]
    fn correlated_times_widen_the_interval() {
        // Half of the run is slow. Independent samples would give 2.02 * 2.02 / sqrt(40) = 0.65 ms.
        let slow: Vec<(u64, u64)> = (0..40).map(|token| (10, if token < 20 { 4 } else { 0 })).collect();
        let intervals = ConfidenceIntervals::from_trace(&single_device(&slow)).expect("tokens");
        // Ten batches, five of 14 and five of 10: 2.262 * sqrt(10 * 4 / 9) / sqrt(10) = 1.508.
        assert!((intervals.tpot_half_width_ms - 1.508).abs() < 1e-3, "{intervals:?}");
    }
}
