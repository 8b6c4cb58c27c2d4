//! Adaptation of a simulated ring: the devices measure themselves by their trace, and
//! [`hearth_core::adaptation`] decides when the ring changes its plan, as in a ring that serves requests.
//!
//! Deviation: finding and predicting a plan takes no time; measurements of unused devices do not become outdated. A run
//! is one request, so the ring is never idle.

use std::collections::BTreeMap;
use std::sync::Arc;

use hearth_core::adaptation::{self, Adaptation};
use hearth_core::recovery;
use hearth_profiles::{Bytes, Seconds};
use hearth_schema::Plan;
use hearth_schema::pass::Batch;
use hearth_schema::trace::{Counter, StepKind, StepRecord};

use super::Simulation;
use crate::engine::Nanos;
use crate::error::SimError;
use crate::input::{Input, ScenarioEvents};
use crate::trace::counter_reading;

/// The interval at which devices report their steps. source: `hearth_ring`, the scheduler's report interval
const REPORT_INTERVAL: Seconds = Seconds(2.0);

/// The number of passes that may be in flight at a report. source: assumed, more than any ring has
const MAX_PASSES_IN_FLIGHT: u32 = 1024;

/// The adaptation of a ring, and what its devices have not reported yet.
#[derive(Debug)]
pub struct SimulatedAdaptation {
    pub reducer: Adaptation,
    /// The batches since the last report, by the index of their first pass.
    batches: BTreeMap<u32, Batch>,
    reported_at: Nanos,
    /// The number of trace records at the last report.
    reported_records: usize,
}

impl SimulatedAdaptation {
    pub fn new(input: &Input, events: &ScenarioEvents) -> Option<Self> {
        events.adapts.then(|| Self {
            reducer: Adaptation::new(Arc::new(input.cluster.clone())),
            batches: BTreeMap::new(),
            reported_at: 0,
            reported_records: 0,
        })
    }

    pub fn begin_batch(&mut self, batch: &Batch) {
        self.batches.insert(batch.index(), batch.clone());
    }
}

impl Simulation<'_> {
    /// Lets the devices report if it is time, and changes the plan if that has paid for itself. Called after each batch
    /// with tokens.
    pub fn adapt(&mut self) -> Result<(), SimError> {
        let now = self.engine.now();
        let Some(adaptation) = &self.adaptation else { return Ok(()) };
        if now >= adaptation.reported_at + REPORT_INTERVAL.to_nanos() {
            self.report_devices(now)?;
        }
        let cached = |index| u64::from(self.generation.cached_tokens(index));
        let cached_tokens = match &self.requests {
            Some(requests) => requests.active_slots().map(cached).sum(),
            None => (0..self.input.cluster.workload.sequences).map(cached).sum(),
        };
        let in_flight = self.batch_limits.in_flight as usize;
        let Some(adaptation) = &mut self.adaptation else { return Ok(()) };
        let steps = adaptation.reducer.react(adaptation::Event::BatchCompleted { cached_tokens, in_flight });
        if steps.contains(&adaptation::Step::Replan) && self.recovery.is_ring_running() {
            self.react(recovery::Event::ConditionsChanged)?;
        }
        Ok(())
    }

    fn report_devices(&mut self, now: Nanos) -> Result<(), SimError> {
        let Some(mut adaptation) = self.adaptation.take() else { return Ok(()) };
        let new = self.trace.records.get(adaptation.reported_records..).unwrap_or_default();
        let mut must_evaluate = false;
        for &id in &self.ring.order {
            let own = |record: &&StepRecord| {
                usize::from(record.device_index) == id && record.kind == StepKind::Compute
            };
            let records: Vec<_> = new.iter().filter(own).cloned().collect();
            let name = self.device_name(id);
            let memory = &self.input.cluster.members[self.ring.member_indices[id]].device.memory;
            let taken = self.timeline.background_load(name, Bytes::ZERO).allocated_bytes;
            let left = memory.available_memory.value.saturating_sub(Bytes(taken as u64));
            let readings = [counter_reading(id, Counter::Available, 0, now, left.0)];
            let measurement = adaptation.reducer.measure(name, &adaptation.batches, (&records, &readings));
            let device = name.to_owned();
            let steps = adaptation.reducer.react(adaptation::Event::Measured { device, measurement });
            must_evaluate |= steps.contains(&adaptation::Step::Evaluate);
        }
        (adaptation.reported_at, adaptation.reported_records) = (now, self.trace.records.len());
        let oldest = self.generation.next_pass_index().saturating_sub(MAX_PASSES_IN_FLIGHT);
        adaptation.batches = adaptation.batches.split_off(&oldest);
        if must_evaluate {
            let mut failed = None;
            let fits = |plan: &Plan| match self.misfit(plan) {
                Ok(misfit) => misfit.is_none(),
                Err(error) => {
                    failed = Some(error);
                    false
                }
            };
            let evaluate = |replanner| adaptation.reducer.evaluate(&self.recovery, replanner, fits);
            let evaluation = self.scenario_events.replanner.and_then(evaluate);
            if let Some(error) = failed {
                return Err(error);
            }
            adaptation.reducer.react(adaptation::Event::Evaluated(evaluation));
        }
        self.adaptation = Some(adaptation);
        Ok(())
    }
}
