//! Confidence intervals of the mean over the tokens of one run.
//!
//! Batch means: neighbouring tokens resemble each other (a page cache that fills, a network that has a bad minute),
//! so their times are not independent draws. The steps are cut into batches of equal length, whose means hardly
//! depend on each other, and Student's t gives the interval that holds the mean of an endless run in 95 of 100 cases.
//!
//! Deviation: with fewer than two steps a batch there are as many batches as steps, because a run of ten tokens has
//! an interval too; it is too narrow where tokens resemble each other.
//!
//! Not here: how a prediction changes with the parameters of devices and links (`hearth simulate --draws`).

use serde::{Deserialize, Serialize};

use super::token_times::TokenTimes;
use super::{Terms, group, millis, step_terms};
use hearth_schema::trace::Trace;

/// The most batches.
/// source: Schmeiser, "Batch size effects in the analysis of simulation output", Operations Research 30(3), 1982: more
/// than 30 gain nothing, 10 lose little
const MAX_BATCHES: usize = 10;

/// Student's t with 1 to 9 degrees of freedom, of which 2.5 % lie above.
/// source: the table of the distribution
const STUDENT: [f64; MAX_BATCHES - 1] = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262];

/// Half the widths of the intervals around the means of a run, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Intervals {
    /// Stretches that the tokens were cut into.
    #[serde(alias = "stretches")]
    pub batches: usize,
    /// The half-width for the time per token.
    pub tpot: f64,
    /// The half-width for each of its terms, without hidden disk time.
    pub terms: [f64; 7],
}

impl Intervals {
    /// Computes the intervals of a trace, `None` with fewer than two steps after the first.
    pub fn of(trace: &Trace) -> Option<Self> {
        let by_pass = group(&trace.records);
        let token_times = TokenTimes::grouped(trace, &by_pass);
        let batches = token_times.decode_steps.len().min(MAX_BATCHES);
        let student = *STUDENT.get(batches.checked_sub(2)?)?;
        // The mean time per token of each batch, whole and by terms.
        let mut times = vec![(0.0, Terms::default(), 0.0); batches];
        for (place, step) in token_times.decode_steps.iter().enumerate() {
            let (time, terms, tokens) = &mut times[place * batches / token_times.decode_steps.len()];
            *time += millis(step.duration());
            *tokens += f64::from(step.tokens());
            super::add(terms, &step_terms(trace, &by_pass, step), 1);
        }
        let half = |of: &dyn Fn(&(f64, Terms, f64)) -> f64| {
            let means: Vec<f64> = times.iter().map(|batch| of(batch) / batch.2).collect();
            student * deviation(&means) / (batches as f64).sqrt()
        };
        let mut terms = [0.0; 7];
        for (place, term) in terms.iter_mut().enumerate() {
            *term = half(&|batch| batch.1.rows()[place].1);
        }
        Some(Self { batches, tpot: half(&|batch| batch.0), terms })
    }
}

/// The standard deviation of draws, from their own mean.
fn deviation(values: &[f64]) -> f64 {
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    (squares / (values.len() as f64 - 1.0)).sqrt()
}

#[cfg(test)]
mod tests {
    use super::super::tests::{record, trace, with_cpu};
    use super::*;
    use hearth_schema::pass::Pass;
    use hearth_schema::trace::Kind;

    /// One device that computes and waits for its disk; a pair of milliseconds for each token after the first.
    fn alone(tokens: &[(u64, u64)]) -> Trace {
        let mut trace = trace();
        trace.header.devices.truncate(1);
        trace.readings.clear();
        trace.passes = (0..=tokens.len() as u32).map(|pass| Pass::plain(pass, pass, 1, true)).collect();
        trace.records = vec![with_cpu(record(0, Kind::Output, 0, 0, [0, 10]), 10)];
        let mut now = 10;
        for (pass, (cpu, disk)) in (1..).zip(tokens) {
            trace.records.push(with_cpu(record(0, Kind::Output, pass, 0, [now, now + cpu + disk]), *cpu));
            now += cpu + disk;
        }
        trace
    }

    #[test]
    fn a_steady_run_is_sure_of_its_mean() {
        let intervals = Intervals::of(&alone(&[(5, 2); 40])).expect("tokens");
        assert_eq!(intervals, Intervals { batches: 10, tpot: 0.0, terms: [0.0; 7] });
        assert_eq!(Intervals::of(&alone(&[(5, 2)])), None);
    }

    #[test]
    fn two_tokens_leave_a_wide_interval() {
        // 10 and 14 ms: the deviation is sqrt(2^2 + 2^2) = 2.828, the interval 12.706 * 2.828 / sqrt(2) = 25.412.
        let intervals = Intervals::of(&alone(&[(10, 0), (10, 4)])).expect("tokens");
        assert!((intervals.tpot - 25.412).abs() < 1e-9, "{intervals:?}");
        let [cpu, gpu, memory, disk, ..] = intervals.terms;
        assert_eq!((cpu, gpu, memory), (0.0, 0.0, 0.0));
        assert!((disk - 25.412).abs() < 1e-9, "{intervals:?}");
    }

    #[test]
    fn slow_changes_are_not_taken_for_many_draws() {
        // Half of the run is slow: tokens as draws would say 2.02 * 2.02 / sqrt(40) = 0.65 ms.
        let slow: Vec<(u64, u64)> = (0..40).map(|token| (10, if token < 20 { 4 } else { 0 })).collect();
        let intervals = Intervals::of(&alone(&slow)).expect("tokens");
        // Ten batches, five of 14 and five of 10: 2.262 * sqrt(10 * 4 / 9) / sqrt(10) = 1.508.
        assert!((intervals.tpot - 1.508).abs() < 1e-3, "{intervals:?}");
    }
}
