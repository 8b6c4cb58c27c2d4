//! Systems with slices in proportion to speed, within memory: Hepti and Galaxy.
//!
//! Hepti (prima.cpp paper, section 2) slices by capability, in three ways for different memory budgets. They are
//! interpreted as one rule: each key-value head, then each block of feed-forward rows, is assigned to the device with
//! free memory that would finish it first. If all devices have ample memory, the slices are in proportion to speed;
//! if all have little memory, in proportion to memory. The slices of a block are computed in parallel, and the
//! slowest determines the time. So this rule gives the fastest block for these units. It uses CPUs and star
//! all-reduces.
//!
//! Galaxy "prioritizes compute power first, then memory, to maximize speed and avoid OOM": slices are in proportion
//! to speed, and what exceeds the memory of a device is assigned to the others, again in proportion to speed. It uses
//! CPUs or GPUs, and ring all-reduces.
//!
//! Both keep 32-bit weights in memory (Table 2). The memory budget of a device is the memory that a run can obtain.
//!
//! Not here: the cost of all-reduces. A device that slows down every all-reduce still gets its slice.

use hearth_core::compute_cost::ComputeCost;
use hearth_core::memory::kv_cache_bytes;
use hearth_core::tensor::SlicedModel;
use hearth_core::{Cluster, Member};
use hearth_profiles::device::Device;
use hearth_profiles::model::TensorGroup;
use hearth_profiles::{Bytes, Format};
use hearth_schema::pass::Pass;
use hearth_schema::plan::tensor::AllReduce;
use hearth_schema::plan::{Plan, ScenarioRecord};
use hearth_schema::residency::ResidencyOptions;

use super::slices::{PlanHeader, SliceShare, base_tensor_plan, members, plan, row_block};
use super::{SystemError, SystemOptions};
use crate::baselines::proportional_shares::{cumulative_rounding, distribute_within_capacity, speed_weights};

/// A rule that distributes units: (seconds per unit of each device, capacity of each device in units, number of
/// units) -> units of each device.
type Rule = fn(&[f64], &[u32], u32) -> Vec<u32>;

/// Returns the plan of Hepti: slices by speed within memory budgets.
pub(super) fn hepti(
    cluster: &Cluster,
    scenario: &ScenarioRecord,
    options: SystemOptions,
) -> Result<Plan, SystemError> {
    by_speed("hepti", cluster, scenario, options, AllReduce::Star, earliest_finish, |_| false)
}

/// Returns the plan of Galaxy: slices by speed, then by memory.
pub(super) fn galaxy(
    cluster: &Cluster,
    scenario: &ScenarioRecord,
    options: SystemOptions,
) -> Result<Plan, SystemError> {
    let on_gpu = |device: &Device| {
        device.gpu.as_ref().is_some_and(|gpu| !gpu.unified_memory && !gpu.matvec.is_empty())
    };
    by_speed("galaxy", cluster, scenario, options, AllReduce::Ring, in_proportion, on_gpu)
}

/// Returns a plan whose slices are distributed by `rule`, first key-value heads, then blocks of feed-forward rows.
fn by_speed(
    system: &'static str,
    cluster: &Cluster,
    scenario: &ScenarioRecord,
    options: SystemOptions,
    all_reduce: AllReduce,
    rule: Rule,
    on_gpu: fn(&Device) -> bool,
) -> Result<Plan, SystemError> {
    let format = options.weights_as.unwrap_or(Format::F32);
    let (members, shape) = (members(cluster), &cluster.model.shape);
    let costs: Vec<Costs> = members
        .iter()
        .enumerate()
        .map(|(place, member)| Costs::new(cluster, member, place == 0, on_gpu(&member.device), format))
        .collect();
    let block = row_block(Some(format)).min(shape.feed_forward);
    let blocks = shape.feed_forward / block;
    let check_complete = |held: &[u32], whole: u32, unit| {
        let held: u64 = held.iter().map(|units| u64::from(*units)).sum();
        let (format, whole) = (format.to_string(), u64::from(whole));
        if held < whole {
            Err(SystemError::OutOfMemory { system, format, held, whole, unit })
        } else {
            Ok(())
        }
    };
    let times: Vec<f64> = costs.iter().map(|cost| cost.head_time).collect();
    let capacity: Vec<u32> = costs.iter().map(|cost| units(cost.capacity, cost.head_bytes)).collect();
    let heads = rule(&times, &capacity, shape.kv_heads);
    check_complete(&heads, shape.kv_heads, "key-value heads")?;
    let times: Vec<f64> = costs.iter().map(|cost| cost.row_time).collect();
    let capacity: Vec<u32> = costs
        .iter()
        .zip(&heads)
        .map(|(cost, heads)| {
            let left = cost.capacity.saturating_sub(cost.head_bytes * u64::from(*heads));
            // One block less, because the last device also gets the remaining rows of an incomplete block.
            units(left, cost.row_bytes * u64::from(block)).saturating_sub(1)
        })
        .collect();
    let rows = rule(&times, &capacity, blocks);
    check_complete(&rows, blocks, "blocks of feed-forward rows")?;
    let last = rows.iter().rposition(|count| *count > 0);
    let residency = ResidencyOptions::pinned(Some(format));
    let shares: Vec<(&Member, SliceShare)> = members
        .iter()
        .enumerate()
        .map(|(place, member)| {
            let rest = if Some(place) == last { shape.feed_forward % block } else { 0 };
            let (kv_heads, feed_forward) = (heads[place], rows[place] * block + rest);
            (*member, SliceShare { kv_heads, feed_forward, residency, on_gpu: on_gpu(&member.device) })
        })
        .collect();
    if shares[0].1.kv_heads == 0 && shares[0].1.feed_forward == 0 {
        let why = "its share rounds to zero".to_owned();
        return Err(SystemError::UnsupportedHead { system, head: members[0].name.clone(), why });
    }
    let tensor = base_tensor_plan(all_reduce);
    let options = vec![format!("weights_as={format}")];
    let explanation = vec!["slices are in proportion to device speed, within device memory".into()];
    let header = PlanHeader { strategy: system, options, dropped: Vec::new(), explanation };
    Ok(plan(cluster, scenario, header, &tensor, &shares))
}

/// The cost of slices on one device, summed over all layers.
struct Costs {
    /// The seconds per key-value head.
    head_time: f64,
    /// The seconds per feed-forward row.
    row_time: f64,
    /// The bytes per key-value head, including its cache.
    head_bytes: Bytes,
    /// The bytes per feed-forward row.
    row_bytes: Bytes,
    /// The memory available for slices.
    capacity: Bytes,
}

impl Costs {
    fn new(cluster: &Cluster, member: &Member, head: bool, on_gpu: bool, format: Format) -> Self {
        let (model, device) = (&cluster.model, &member.device);
        let whole = SlicedModel::whole(model, Some(format));
        let element = Bytes(cluster.kv_cache.element_bytes());
        let work = match device.gpu.as_ref().filter(|_| on_gpu) {
            Some(gpu) => ComputeCost::for_gpu(gpu, &whole.attention, element),
            None => ComputeCost::for_cpu(&device.cpu, &whole.attention, element),
        };
        let pass = Pass::new(0, cluster.workload.prompt, 1, true);
        let layers = 0..model.shape.layers.0;
        let attention: f64 = layers.map(|layer| work.layer_time(layer, pass).0).sum();
        let feed_forward: f64 = whole.feed_forward.iter().map(|group| work.matmul_time(group, 1).0).sum();
        let (heads, rows) = (u64::from(model.shape.kv_heads), u64::from(model.shape.feed_forward));
        let cache = kv_cache_bytes(&model.shape, model.shape.layers.0, cluster.context, cluster.kv_cache, 1);
        let each = |bytes: Bytes, count: u64| Bytes(bytes.0.div_ceil(count.max(1)));
        Self {
            head_time: attention / heads.max(1) as f64,
            row_time: feed_forward / rows.max(1) as f64,
            head_bytes: each(whole.attention.layers_bytes() + cache, heads),
            row_bytes: each(whole.feed_forward.iter().map(TensorGroup::bytes).sum(), rows),
            capacity: capacity(cluster, member, head, on_gpu, &whole),
        }
    }
}

/// Returns the memory available for slices: without buffers, norms, and the embedding and output head on the head.
fn capacity(cluster: &Cluster, member: &Member, head: bool, on_gpu: bool, whole: &SlicedModel) -> Bytes {
    let device = &member.device;
    let norms =
        Bytes(4 * 2 * u64::from(cluster.model.shape.embedding) * u64::from(cluster.model.shape.layers.0));
    let ends = if !head {
        Bytes::ZERO
    } else if cluster.model.shape.tied_embeddings {
        whole.attention.output_bytes()
    } else {
        whole.attention.output_bytes() + whole.attention.input_bytes()
    };
    match device.gpu.as_ref().filter(|_| on_gpu) {
        Some(gpu) => gpu.memory_available.value.saturating_sub(gpu.compute_buffer.value + norms),
        None => {
            device.memory.obtainable_bytes().saturating_sub(device.cpu.compute_buffer.value + norms + ends)
        }
    }
}

/// Returns the number of units of `each` bytes that fit in the capacity.
fn units(capacity: Bytes, each: Bytes) -> u32 {
    (capacity.0 / each.0.max(1)).min(u64::from(u32::MAX)) as u32
}

/// Assigns each unit to the device with free capacity that would finish it first.
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

/// Distributes units in proportion to speed. Units above the capacity of a device are assigned to the others.
fn in_proportion(times: &[f64], capacity: &[u32], count: u32) -> Vec<u32> {
    let speeds = speed_weights(times);
    let proportional = cumulative_rounding(&speeds, count).unwrap_or_else(|| vec![0; times.len()]);
    let mut units: Vec<u32> =
        proportional.iter().zip(capacity).map(|(units, capacity)| *units.min(capacity)).collect();
    let left = count - units.iter().sum::<u32>();
    let more: Vec<u32> = capacity.iter().zip(&units).map(|(capacity, units)| capacity - units).collect();
    for (units, more) in units.iter_mut().zip(distribute_within_capacity(&speeds, &more, left)) {
        *units += more;
    }
    units
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_go_to_the_device_that_finishes_first() {
        // Speeds are 1:2:4. After 7 units all devices finish at 4 s.
        assert_eq!(earliest_finish(&[4.0, 2.0, 1.0], &[9, 9, 9], 7), [1, 2, 4]);
        // The fastest device holds two; its other two go to the devices that finish them first.
        assert_eq!(earliest_finish(&[4.0, 2.0, 1.0], &[9, 9, 2], 7), [2, 3, 2]);
        assert_eq!(earliest_finish(&[4.0, 2.0, 1.0], &[1, 1, 2], 7), [1, 1, 2], "three are not assigned");
    }

    #[test]
    fn excess_over_memory_goes_to_other_devices() {
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
