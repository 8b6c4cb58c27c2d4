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

/// Maximum size of a model whose page cache is simulated in fine chunks, which show exactly which windows fit.
const MAX_FINE_BYTES: Bytes = Bytes::from_mib(4096);
/// Size of a fine chunk of the simulated page cache: the unit of the kernel's read-ahead advice.
const FINE_CHUNK: Bytes = Bytes(128 << 10);

/// The state of memory at the beginning of a run, and whether pinned weights must fit in memory.
#[derive(Debug, Clone, Copy, Default)]
pub struct MemoryOptions {
    /// Whether memory has the weights that earlier tokens would leave there. Otherwise all weights are on disk.
    pub warm_start: bool,
    /// Whether a device may pin more weights than fit in its memory.
    pub ignore_memory: bool,
}

/// Simulates a plan without run events. If `warm`, the run starts with the weights in memory that earlier tokens would
/// leave there.
pub fn simulate(cluster: &Cluster, plan: &Plan, scenario: &Scenario, warm: bool) -> Result<Trace, Error> {
    let memory = MemoryOptions { warm_start: warm, ignore_memory: false };
    simulate_with_events(cluster, plan, scenario, memory, &ScenarioEvents::default()).map(|run| run.trace)
}

/// Simulates a plan with run events. The limits of the scenario must already be applied to the cluster.
pub fn simulate_with_events(
    cluster: &Cluster,
    plan: &Plan,
    scenario: &Scenario,
    memory: MemoryOptions,
    events: &ScenarioEvents,
) -> Result<SimulationResult, Error> {
    let MemoryOptions { warm_start: starts_warm, ignore_memory: ignore_memory_shortages } = memory;
    let mut options = Options { starts_warm, ignore_memory_shortages, ..Options::default() };
    if cluster.model.total_bytes() <= MAX_FINE_BYTES {
        options.chunk_size = FINE_CHUNK;
    }
    let input = Input { cluster, plan, options: &options };
    let mut run = hearth_sim::simulate_with_events(&input, events).map_err(|error| {
        let short = matches!(error, SimError::Schedule(ScheduleError::BadPass { .. }));
        let error = Error::invalid(error);
        let hint = "the plan was made for a shorter context: make a new plan";
        if short { error.with_hint(hint) } else { error }
    })?;
    run.trace.header.scenario_name.clone_from(&scenario.name);
    Ok(run)
}

/// Returns whether the plan has a single device, and the profile of this device has a SoC.
pub fn runs_on_one_soc(cluster: &Cluster, plan: &Plan) -> bool {
    only_soc(cluster, plan).is_some()
}

/// Returns the metrics of the SoC in a trace; `None` unless [`runs_on_one_soc`].
pub fn soc_metrics(cluster: &Cluster, plan: &Plan, trace: &Trace) -> Option<SocMetrics> {
    let soc = only_soc(cluster, plan)?;
    SocMetrics::from_trace(trace, soc, soc.default_options.strategy)
}

fn only_soc<'c>(cluster: &'c Cluster, plan: &Plan) -> Option<&'c Soc> {
    let [planned] = &plan.devices[..] else { return None };
    cluster.member(&planned.name)?.device.soc.as_ref()
}
