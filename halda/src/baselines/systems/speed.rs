//! Systems with slices in proportion to speed, within memory: Hepti and Galaxy.
//!
//! Hepti (prima.cpp paper, section 2) slices by capability, in three ways for different memory budgets. These are
//! interpreted as one rule: each key-value head, then each block of feed-forward rows, is assigned to the device with
//! free memory that would finish it first. The slices of a block are computed in parallel, so this rule gives the
//! fastest block for these units. Hepti uses CPUs and star all-reduces.
//!
//! Galaxy "prioritizes compute power first, then memory, to maximize speed and avoid OOM": slices are in proportion to
//! speed, and what exceeds the memory of a device is assigned to the other devices, again in proportion to speed.
//! Galaxy uses CPUs or GPUs, and ring all-reduces.
//!
//! Both keep 32-bit weights in memory (Table 2). The memory budget of a device is the memory that a run can obtain.
//!
//! Not here: the cost of all-reduces. A device that slows down every all-reduce still gets its slice.

use hearth_core::compute_cost::ComputeCost;
use hearth_core::memory::kv_cache_bytes;
use hearth_core::tensor::SlicedModel;
use hearth_core::{Cluster, Member};
use hearth_profiles::device::DeviceProfile;
use hearth_profiles::model::TensorGroup;
use hearth_profiles::{Bytes, Format};
use hearth_schema::pass::Pass;
use hearth_schema::plan::tensor_parallel::AllReduce;
use hearth_schema::plan::{Plan, PlannerRecord, ScenarioRecord};
use hearth_schema::residency::ResidencyOptions;

use super::slices::{SliceShare, base_tensor_plan, members, plan};
use super::{SystemPlanError, SystemPlanOptions};
use crate::baselines::proportional_shares::{
    distribute_remaining, proportional_within_capacity, speed_weights,
};

/// A function that distributes units (heads or blocks of rows) over devices. It maps (seconds per unit of each device,
/// capacity of each device in units, number of units) to the number of units of each device.
type Rule = fn(&[f64], &[u32], u32) -> Vec<u32>;

/// A system that distributes first the key-value heads and then the blocks of feed-forward rows by a [`Rule`].
pub(super) struct SpeedSystem {
    name: &'static str,
    all_reduce: AllReduce,
    rule: Rule,
    on_gpu: fn(&DeviceProfile) -> bool,
}

pub(super) const HEPTI: SpeedSystem =
    SpeedSystem { name: "hepti", all_reduce: AllReduce::Star, rule: earliest_finish, on_gpu: |_| false };

pub(super) const GALAXY: SpeedSystem = SpeedSystem {
    name: "galaxy",
    all_reduce: AllReduce::Ring,
    rule: in_proportion,
    on_gpu: |device| device.gpu.as_ref().is_some_and(|gpu| !gpu.unified_memory && !gpu.matvec.is_empty()),
};

pub(super) fn plan_by_speed(
    system: &SpeedSystem,
    cluster: &Cluster,
    scenario: &ScenarioRecord,
    options: SystemPlanOptions,
) -> Result<Plan, SystemPlanError> {
    let SpeedSystem { name: system, all_reduce, rule, on_gpu } = *system;
    let format = options.weight_format.unwrap_or(Format::F32);
    let (members, shape) = (members(cluster), &cluster.model.shape);
    let cost = |(index, member): (usize, &&Member)| {
        Costs::new(cluster, member, index == 0, on_gpu(&member.device), format)
    };
    let costs: Vec<Costs> = members.iter().enumerate().map(cost).collect();
    let block = (format.block_len() as u32).min(shape.feed_forward_length);
    let blocks = shape.feed_forward_length / block;
    let distribute = |times: &[f64], capacity: &[u32], whole: u32, unit| {
        let units = rule(times, capacity, whole);
        let held: u64 = units.iter().map(|units| u64::from(*units)).sum();
        let (format, whole) = (format.to_string(), u64::from(whole));
        if held < whole {
            return Err(SystemPlanError::OutOfMemory { system, format, fitting: held, total: whole, unit });
        }
        Ok(units)
    };
    let times: Vec<f64> = costs.iter().map(|cost| cost.head_time).collect();
    let capacity: Vec<u32> = costs.iter().map(|cost| units(cost.capacity, cost.head_bytes)).collect();
    let heads = distribute(&times, &capacity, shape.kv_heads, "key-value heads")?;
    let times: Vec<f64> = costs.iter().map(|cost| cost.row_time).collect();
    let free_blocks = |(cost, heads): (&Costs, &u32)| {
        let left = cost.capacity.saturating_sub(cost.head_bytes * u64::from(*heads));
        // One block less, because the last device also gets the remaining rows of an incomplete block.
        units(left, cost.row_bytes * u64::from(block)).saturating_sub(1)
    };
    let capacity: Vec<u32> = costs.iter().zip(&heads).map(free_blocks).collect();
    let rows = distribute(&times, &capacity, blocks, "blocks of feed-forward rows")?;
    let last = rows.iter().rposition(|count| *count > 0);
    let residency = ResidencyOptions::pinned(Some(format));
    let share = |index: usize| {
        let rest = if Some(index) == last { shape.feed_forward_length % block } else { 0 };
        let (kv_heads, feed_forward_rows) = (heads[index], rows[index] * block + rest);
        let is_on_gpu = on_gpu(&members[index].device);
        (members[index], SliceShare { kv_heads, feed_forward_rows, residency, is_on_gpu })
    };
    let shares: Vec<(&Member, SliceShare)> = (0..members.len()).map(share).collect();
    if shares[0].1.is_empty() {
        let why = "its slice rounds to zero";
        return Err(SystemPlanError::UnsupportedHead { system, head: members[0].name.clone(), why });
    }
    let planner =
        PlannerRecord { strategy: system.to_owned(), options: vec![format!("weights_as={format}")] };
    let explanation = vec!["slices are in proportion to device speed, within device memory".into()];
    Ok(Plan { explanation, ..plan(cluster, scenario, planner, &base_tensor_plan(all_reduce), &shares) })
}

/// The seconds and bytes of a key-value head (with its cache) and of a feed-forward row, each summed over all layers.
struct Costs {
    head_time: f64,
    row_time: f64,
    head_bytes: Bytes,
    row_bytes: Bytes,
    capacity: Bytes,
}

impl Costs {
    fn new(cluster: &Cluster, member: &Member, head: bool, on_gpu: bool, format: Format) -> Self {
        let (model, device) = (&cluster.model, &member.device);
        let whole = SlicedModel::with_single_slice(model, Some(format));
        let element = cluster.kv_cache_format.format();
        let work = match device.gpu.as_ref().filter(|_| on_gpu) {
            Some(gpu) => ComputeCost::for_gpu(gpu, &whole.attention, element),
            None => ComputeCost::for_cpu(&device.cpu, &whole.attention, element),
        };
        let pass = Pass::new(0, cluster.workload.prompt_tokens, 1, true);
        let (shape, layers) = (&model.shape, model.shape.layers.0);
        let attention: f64 = (0..layers).map(|layer| work.layer_time(layer, &[pass]).0).sum();
        let feed_forward: f64 = whole.feed_forward.iter().map(|group| work.matmul_time(group, 1).0).sum();
        let (heads, rows) = (u64::from(shape.kv_heads), u64::from(shape.feed_forward_length));
        let cache = kv_cache_bytes(shape, 0..layers, cluster.context_length, cluster.kv_cache_format, 1);
        let each = |bytes: Bytes, count: u64| Bytes(bytes.0.div_ceil(count.max(1)));
        Self {
            head_time: attention / heads.max(1) as f64,
            row_time: feed_forward / rows.max(1) as f64,
            head_bytes: each(whole.attention.all_layers_bytes() + cache, heads),
            row_bytes: each(whole.feed_forward.iter().map(TensorGroup::bytes).sum(), rows),
            capacity: capacity(cluster, member, head, on_gpu, &whole),
        }
    }
}

/// Returns the memory of a device for slices: without buffers and norms, and on a head with CPU layers also without the
/// embedding and the output.
fn capacity(cluster: &Cluster, member: &Member, head: bool, on_gpu: bool, whole: &SlicedModel) -> Bytes {
    let device = &member.device;
    let shape = &cluster.model.shape;
    let norms = Bytes(4 * 2 * u64::from(shape.embedding_length) * u64::from(shape.layers.0));
    let ends = if !head {
        Bytes::ZERO
    } else if shape.has_tied_embeddings {
        whole.attention.output_head_bytes()
    } else {
        whole.attention.output_head_bytes() + whole.attention.input_embedding_bytes()
    };
    match device.gpu.as_ref().filter(|_| on_gpu) {
        Some(gpu) => gpu.memory_available.value.saturating_sub(gpu.compute_buffer.value + norms),
        None => {
            device.memory.obtainable_bytes().saturating_sub(device.cpu.compute_buffer.value + norms + ends)
        }
    }
}

fn units(capacity: Bytes, each: Bytes) -> u32 {
    (capacity.0 / each.0.max(1)).min(u64::from(u32::MAX)) as u32
}

/// Distributes units over devices: each unit goes to the device with free capacity that would finish the unit first.
fn earliest_finish(times: &[f64], capacity: &[u32], count: u32) -> Vec<u32> {
    let mut units = vec![0u32; times.len()];
    for _ in 0..count {
        let finish = |device: &usize| f64::from(units[*device] + 1) * times[*device];
        let next = (0..times.len())
            .filter(|device| units[*device] < capacity[*device])
            .min_by(|one, other| finish(one).total_cmp(&finish(other)));
        let Some(next) = next else { break };
        units[next] += 1;
    }
    units
}

/// Distributes units over devices in proportion to speed. Units above the capacity of a device go to other devices.
fn in_proportion(times: &[f64], capacity: &[u32], count: u32) -> Vec<u32> {
    let speeds = speed_weights(times);
    let mut units = proportional_within_capacity(&speeds, capacity, count);
    let free: Vec<u32> = capacity.iter().zip(&units).map(|(capacity, units)| capacity - units).collect();
    distribute_remaining(&mut units, &speeds, &free, count);
    units
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_go_to_fast_devices_within_memory() {
        // Speeds are 1:2:4. After 7 units all devices finish at 4 s.
        assert_eq!(earliest_finish(&[4.0, 2.0, 1.0], &[9, 9, 9], 7), [1, 2, 4]);
        // The fastest device has memory for two; its other two go to the devices that finish them first.
        assert_eq!(earliest_finish(&[4.0, 2.0, 1.0], &[9, 9, 2], 7), [2, 3, 2]);
        assert_eq!(earliest_finish(&[4.0, 2.0, 1.0], &[1, 1, 2], 7), [1, 1, 2], "three are not assigned");
        // In proportion to speed, what exceeds the memory of a device also goes to other devices.
        assert_eq!(in_proportion(&[4.0, 2.0, 1.0], &[9, 9, 9], 7), [1, 2, 4]);
        assert_eq!(in_proportion(&[4.0, 2.0, 1.0], &[9, 9, 2], 7).iter().sum::<u32>(), 7);
        assert_eq!(in_proportion(&[4.0, 2.0, 1.0], &[1, 1, 2], 7), [1, 1, 2]);
    }

    #[test]
    fn greedy_distribution_is_optimal() {
        let (times, capacity) = ([3.0, 5.0, 2.0], [4, 9, 5]);
        let slowest = |units: &[u32]| {
            units.iter().zip(times).map(|(units, time)| f64::from(*units) * time).fold(0.0, f64::max)
        };
        let best = (0..=4u32)
            .flat_map(|one| (0..=9u32).map(move |two| [one, two, 11u32.saturating_sub(one + two)]))
            .filter(|units| {
                units.iter().sum::<u32>() == 11 && units.iter().zip(capacity).all(|(a, b)| *a <= b)
            })
            .map(|units| slowest(&units))
            .fold(f64::INFINITY, f64::min);
        assert_eq!(slowest(&earliest_finish(&times, &capacity, 11)), best);
    }
}
