//! Time per token and memory pressure before, during and after an event of a trace.

use hearth_schema::run_events::RunEvent;
use hearth_schema::trace::{Counter, Trace};
use serde::{Deserialize, Serialize};

use super::readings_of;
use super::token_times::TokenTimes;

/// The value of a metric before, during and after a run event; `None` for a phase without tokens or readings.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct PhaseValues {
    pub before: Option<f64>,
    #[serde(alias = "beside")]
    pub during: Option<f64>,
    pub after: Option<f64>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct EventImpact {
    /// Mean time per output token after the first, in milliseconds.
    pub tpot_ms: PhaseValues,
    /// Maximum time per output token after the first, in milliseconds.
    #[serde(rename = "max_ms", alias = "longest_ms")]
    pub max_tpot_ms: PhaseValues,
    /// Maximum memory pressure on the device of the event: unreclaimable bytes divided by total memory.
    #[serde(rename = "pressure")]
    pub memory_pressure: PhaseValues,
}

pub fn event_impact(trace: &Trace, run_event: &RunEvent) -> EventImpact {
    let (from, to) = (run_event.start_ns, run_event.end_ns.unwrap_or(u64::MAX));
    let mut phases = [const { Vec::new() }; 3];
    for step in TokenTimes::from_trace(trace).decode_steps {
        let phase = if step.end_ns <= from { 0 } else { 1 + usize::from(step.start_ns >= to) };
        // The tokens of a step share its time.
        phases[phase].extend(std::iter::repeat_n(step.ms_per_token(), step.tokens() as usize));
    }
    let each = |of: &dyn Fn(&[f64]) -> f64| {
        let [before, during, after] =
            [0, 1, 2].map(|phase: usize| Some(of(&phases[phase])).filter(|_| !phases[phase].is_empty()));
        PhaseValues { before, during, after }
    };
    let mean = |times: &[f64]| times.iter().sum::<f64>() / times.len() as f64;
    let max = |times: &[f64]| times.iter().copied().fold(0.0, f64::max);
    EventImpact {
        tpot_ms: each(&mean),
        max_tpot_ms: each(&max),
        memory_pressure: pressure(trace, run_event, from, to),
    }
}

fn pressure(trace: &Trace, run_event: &RunEvent, from: u64, to: u64) -> PhaseValues {
    let mut devices = (0..).zip(&trace.header.devices);
    let device = devices.find(|(_, device)| Some(&device.name) == run_event.device.as_ref());
    let Some((index, device)) = device else { return PhaseValues::default() };
    let total = device.total_memory_bytes.max(1) as f64;
    let highest = |within: &dyn Fn(u64) -> bool| {
        let own = readings_of(trace, index, Counter::Unreclaimable).filter(|reading| within(reading.time_ns));
        own.map(|reading| reading.value as f64 / total).reduce(f64::max)
    };
    PhaseValues {
        before: highest(&|at| at < from),
        during: highest(&|at| (from..=to).contains(&at)),
        after: highest(&|at| at > to),
    }
}

#[cfg(test)]
mod tests {
    use hearth_schema::run_events::RunEventKind;

    use super::super::tests::{MS, reading, record, run_event, trace};
    use super::*;
    use hearth_schema::pass::Pass;
    use hearth_schema::trace::{CounterReading, StepKind};

    /// Returns a trace with an event, in which the head samples a token at each of the times `ends` (in milliseconds).
    /// The head has 1000 bytes of memory, 500 of them unreclaimable from 25 to 60 ms and 100 otherwise.
    fn trace_of_tokens(ends: &[u64], run_event: RunEvent) -> Trace {
        let pass = |index| Pass::new(index, index, 1, true);
        let output = |(pass, &end): (u32, &u64)| record(0, StepKind::Output, pass, 1, [end - 1, end]);
        let unreclaimable = |(pass, end): (u32, &u64)| {
            let value = if (25..=60).contains(end) { 500 } else { 100 };
            CounterReading { time_ns: end * MS, ..reading(0, Counter::Unreclaimable, pass, value) }
        };
        Trace {
            passes: (0..ends.len() as u32).map(pass).collect(),
            records: (0..).zip(ends).map(output).collect(),
            readings: (0..).zip(ends).map(unreclaimable).collect(),
            run_events: vec![run_event],
            ..trace()
        }
    }

    #[test]
    fn tokens_are_assigned_to_phases_by_their_times() {
        let game = run_event(RunEventKind::Load, "head", [25, 60]);
        let game = RunEvent { details: "4 threads".into(), ..game };
        // Tokens of 10 ms before the game, of 20, 20 and 10 ms that overlap it, and of 10 ms after it.
        let trace = trace_of_tokens(&[10, 20, 40, 60, 70, 80], game.clone());
        let impact = event_impact(&trace, &game);
        let [before, during, after] = [10.0, 20.0, 10.0].map(Some);
        assert_eq!(impact.tpot_ms, PhaseValues { before, during, after });
        assert_eq!(impact.max_tpot_ms, PhaseValues { before, during, after });
        let [before, during, after] = [0.1, 0.5, 0.1].map(Some);
        assert_eq!(impact.memory_pressure, PhaseValues { before, during, after });
        let endless = RunEvent { end_ns: None, ..game };
        assert_eq!(event_impact(&trace, &endless).tpot_ms.after, None);
    }
}
