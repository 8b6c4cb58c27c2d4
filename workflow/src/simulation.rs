//! Runs a plan in the simulator with options that depend on the size of the model.

use hearth_core::Cluster;
use hearth_core::schedule::ScheduleError;
use hearth_core::soc::SocMetrics;
use hearth_profiles::Bytes;
use hearth_profiles::device::Soc;
use hearth_schema::trace::Trace;
use hearth_schema::{Plan, Scenario};
use hearth_sim::{Input, Options, ScenarioEvents, SimError, SimulationResult};

use crate::Error;

/// Maximum size of a model whose page cache is simulated in fine chunks. These show exactly which windows
/// fit.
const MAX_FINE_BYTES: Bytes = Bytes::from_mib(4096);
/// Size of a fine chunk of the simulated page cache: the unit of read-ahead advice.
const FINE_CHUNK: Bytes = Bytes(128 << 10);

/// The state of memory at the beginning of a run, and whether pinned weights must fit in it.
#[derive(Debug, Clone, Copy, Default)]
pub struct MemoryOptions {
    /// Whether the run starts with the memory as earlier tokens leave it. Otherwise all weights are on disk.
    pub warm_start: bool,
    /// Whether a device can pin more weights than fit in its memory.
    pub ignore_memory: bool,
}

/// Runs a plan without events. With `warm`, memory is in the state after earlier tokens.
pub fn simulate(cluster: &Cluster, plan: &Plan, scenario: &Scenario, warm: bool) -> Result<Trace, Error> {
    let memory = MemoryOptions { warm_start: warm, ignore_memory: false };
    simulate_with_events(cluster, plan, scenario, memory, &ScenarioEvents::default()).map(|run| run.trace)
}

/// Runs a plan with run events. The devices of the cluster must have the limits of the scenario.
pub fn simulate_with_events(
    cluster: &Cluster,
    plan: &Plan,
    scenario: &Scenario,
    memory: MemoryOptions,
    events: &ScenarioEvents,
) -> Result<SimulationResult, Error> {
    let mut options = Options {
        starts_warm: memory.warm_start,
        ignore_memory_shortages: memory.ignore_memory,
        ..Options::default()
    };
    if cluster.model.total_bytes() <= MAX_FINE_BYTES {
        options.chunk_size = FINE_CHUNK;
    }
    let input = Input { cluster, plan, options: &options };
    let mut run = hearth_sim::simulate_with_events(&input, events).map_err(|error| {
        let short = matches!(error, SimError::Schedule(ScheduleError::BadPass { .. }));
        let refused = Error::invalid(error);
        if short { refused.with_hint("the plan was made for a shorter context: plan again") } else { refused }
    })?;
    run.trace.header.scenario_name.clone_from(&scenario.name);
    Ok(run)
}

/// Returns whether the plan has a single device and this device is a phone with a SoC.
pub fn runs_on_one_soc(cluster: &Cluster, plan: &Plan) -> bool {
    only_soc(cluster, plan).is_some()
}

/// Returns the metrics of the SoC in a trace, if one SoC runs the whole plan.
pub fn soc_metrics(cluster: &Cluster, plan: &Plan, trace: &Trace) -> Option<SocMetrics> {
    let soc = only_soc(cluster, plan)?;
    SocMetrics::from_trace(trace, soc, soc.default_options.strategy)
}

fn only_soc<'c>(cluster: &'c Cluster, plan: &Plan) -> Option<&'c Soc> {
    let [planned] = &plan.devices[..] else { return None };
    cluster.member(&planned.name)?.device.soc.as_ref()
}
