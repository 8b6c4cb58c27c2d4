//! Uncertain memory: compares plans that count with their mean time over the memory that the devices may have, and plans
//! for the memory that the devices are described with.
//!
//! The available memory of each device of a random cluster was measured, inferred or assumed, at random; rates of memory
//! and disks were measured. The uncertainty of a value follows from that. Each plan is simulated with the same random
//! draws of these values. The regret of a strategy is its mean time (or the 90th percentile of its times) over the least
//! of all compared plans, minus one.

use hearth_core::Cluster;
use hearth_halda::registry::StrategyOptions;
use hearth_halda::{Instance, LatencyModel, MemoryRisk};
use hearth_profiles::DeviceProfile;
use hearth_schema::Plan;
use hearth_schema::residency::Residency;
use hearth_studies::StudyError;
use hearth_workflow::uncertainty::draw_clusters;

use crate::clusters::{generate_cluster, with_residency};
use crate::evaluation::{CHUNK_SIZE, make_plan, simulate_tpot_seconds};
use crate::population::PLAN_RULES;
use crate::random::InstanceRng;

/// The compared strategies, with their treatment of risk.
pub const COMPARED: [(&str, MemoryRisk); 4] = [
    ("overlap", MemoryRisk::Average),
    ("overlap", MemoryRisk::Ignore),
    ("exact", MemoryRisk::Ignore),
    ("halda", MemoryRisk::Ignore),
];
/// The compared residency policies; with `None` the planner chooses the policy of each device.
pub const RESIDENCIES: [Option<Residency>; 2] = [Some(Residency::Os), None];
/// The number of draws for each cluster.
pub const DRAWS: usize = 20;
const MEMORY_SOURCES: [&str; 3] = ["measured", "inferred: as in similar homes", "assumed"];
/// Number of the first random stream for the sources, which differs from those of the clusters.
const FIRST_STREAM: u64 = 2 << 32;

/// The simulated times of a plan, in seconds.
#[derive(Debug, Clone, Copy)]
pub struct UncertainTimes {
    /// The time with the values of the profiles; infinite if the run ends out of memory.
    pub as_described: f64,
    /// The mean over all draws; infinite if a run ends out of memory.
    pub mean: f64,
    /// The 90th percentile of the draws.
    pub p90: f64,
    /// The number of draws whose run ends out of memory.
    pub failed_draw_count: usize,
}

/// For each of [`RESIDENCIES`], the times of the plan of each of [`COMPARED`]; `None` without a plan.
pub type RiskResult = Vec<Vec<Option<UncertainTimes>>>;

pub fn evaluate_risk(seed: u64, number: usize) -> Result<RiskResult, StudyError> {
    let mut described = generate_cluster(seed, number as u64)?;
    let mut random = InstanceRng::new(seed, FIRST_STREAM + number as u64);
    for member in &mut described.members {
        let source = *random.pick(&MEMORY_SOURCES);
        let DeviceProfile { memory, cpu, gpu, disk, .. } = &mut member.device;
        for bytes in [Some(&mut memory.available_memory), memory.can_swap.as_mut()].into_iter().flatten() {
            source.clone_into(&mut bytes.source);
        }
        let gpu_rate = gpu.as_mut().map(|gpu| &mut gpu.read_bandwidth);
        let rates = [Some(&mut cpu.read_bandwidth), gpu_rate, Some(&mut disk.sequential_bandwidth)];
        for rate in rates.into_iter().flatten() {
            MEMORY_SOURCES[0].clone_into(&mut rate.source);
        }
    }
    described.seed = number as u64;
    RESIDENCIES.into_iter().map(|residency| compare(&with_residency(described.clone(), residency))).collect()
}

fn compare(cluster: &Cluster) -> Result<Vec<Option<UncertainTimes>>, StudyError> {
    let problem = Instance::from_cluster(cluster, None);
    let model = LatencyModel::new(&problem)?;
    let drawn = draw_clusters(cluster, DRAWS).map_err(|error| error.to_string())?;
    let mut known: Vec<(Plan, UncertainTimes)> = Vec::new();
    let mut all = Vec::new();
    for (strategy, memory_risk) in COMPARED {
        let options =
            StrategyOptions { rules: PLAN_RULES, head: Some(0), memory_risk, ..StrategyOptions::default() };
        let Ok((_, plan)) = make_plan(cluster, &model, strategy, &options)? else {
            all.push(None);
            continue;
        };
        let same =
            known.iter().find(|(other, _)| other.rounds == plan.rounds && other.devices == plan.devices);
        let times = match same {
            Some((_, times)) => *times,
            None => simulate(cluster, &drawn, &plan)?,
        };
        known.push((plan, times));
        all.push(Some(times));
    }
    Ok(all)
}

fn simulate(cluster: &Cluster, drawn: &[Cluster], plan: &Plan) -> Result<UncertainTimes, StudyError> {
    let seconds = |cluster| -> Result<f64, StudyError> {
        Ok(simulate_tpot_seconds(cluster, plan, CHUNK_SIZE)?.unwrap_or(f64::INFINITY))
    };
    let mut times = drawn.iter().map(seconds).collect::<Result<Vec<f64>, StudyError>>()?;
    times.sort_by(f64::total_cmp);
    Ok(UncertainTimes {
        as_described: seconds(cluster)?,
        mean: times.iter().sum::<f64>() / times.len() as f64,
        p90: times[times.len() * 9 / 10 - 1],
        failed_draw_count: times.iter().filter(|seconds| seconds.is_infinite()).count(),
    })
}
