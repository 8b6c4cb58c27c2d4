//! Systems with even slices on all devices: dllama, TPI-LLM and AirInfer.
//!
//! dllama (prima.cpp paper, sections 2 and 4.1 and appendix A.8) uses only CPUs, and 4-bit weights (32 weights in 18
//! bytes). The number of devices is a power of two and at most the number of key-value heads. Each layer has two
//! all-gathers in 8-bit blocks. Model files have the embedding in 32 bit (source: distributed-llama's converter). A
//! prompt is processed token by token: in Table 4 the time to the first token is four times the time per token, 1845
//! and 459 ms. The head loads the whole model before it makes the slices, and is assumed to keep the model in memory
//! during the run: in the paper's Table 5 the 8B model takes 55.8 % of the head's memory, far more than a slice.
//!
//! TPI-LLM (section 2) streams 32-bit weights through a sliding window of as many blocks as fit in memory, and loads
//! them before they are used. Each layer has two star all-reduces. Assumed: even slices, all-reduces in 32 bit.
//!
//! AirInfer (section 2) keeps 32-bit weights in memory. It computes all-reduces by superposition on one channel. The
//! time of an all-reduce is an option and does not depend on the number of devices. Assumed: even slices.

use hearth_core::memory::{PinnedMemory, streamed_block_sizes};
use hearth_core::tensor::SlicedModel;
use hearth_core::{Cluster, Member};
use hearth_profiles::{Bytes, Format};
use hearth_schema::plan::tensor_parallel::{AllReduce, HeadWeights, TensorParallelPlan};
use hearth_schema::plan::{DroppedDevice, Plan, PlannerRecord, ScenarioRecord};
use hearth_schema::residency::{Residency, ResidencyOptions};

use super::slices::{SliceShare, base_tensor_plan, members, plan};
use super::{PlanResult, SystemPlanError, SystemPlanOptions};
use crate::baselines::proportional_shares::cumulative_rounding;

pub(super) fn dllama(cluster: &Cluster, scenario: &ScenarioRecord) -> Plan {
    let (members, shape) = (members(cluster), &cluster.model.shape);
    let block = Format::Q4_0.block_len() as u32;
    let divides = |count: u32| {
        shape.kv_heads.is_multiple_of(count)
            && shape.feed_forward_length.is_multiple_of(count)
            && (shape.feed_forward_length / count).is_multiple_of(block)
    };
    let most = (members.len() as u32).min(shape.kv_heads);
    let count =
        (0..32).map(|power| 1 << power).take_while(|count| *count <= most).filter(|count| divides(*count));
    let count = count.last().unwrap_or(1);
    let share = SliceShare {
        kv_heads: shape.kv_heads / count,
        feed_forward_rows: shape.feed_forward_length / count,
        residency: ResidencyOptions::pinned(Some(Format::Q4_0)),
        is_on_gpu: false,
    };
    let (used, left_out) = members.split_at(count as usize);
    let reason = format!("the model divides evenly over 2^n devices only, here at most {count}");
    let dropped_device =
        |member: &&Member| DroppedDevice { name: member.name.clone(), reason: reason.clone() };
    let explanation = vec![
        format!(
            "each of {count} devices has {} key-value heads and {} feed-forward rows",
            share.kv_heads, share.feed_forward_rows
        ),
        format!("{} all-gathers per token; the head loads the whole model first", 2 * shape.layers.0),
    ];
    let tensor = TensorParallelPlan {
        partial_result_format: Format::Q8_0,
        head_weights: HeadWeights::Model,
        max_batch_tokens: Some(1),
        embedding_format: Some(Format::F32),
        ..base_tensor_plan(AllReduce::AllGather)
    };
    let shares: Vec<(&Member, SliceShare)> = used.iter().map(|member| (*member, share)).collect();
    let planner = PlannerRecord { strategy: "dllama".into(), options: Vec::new() };
    let dropped = left_out.iter().map(dropped_device).collect();
    Plan { dropped_devices: dropped, explanation, ..plan(cluster, scenario, planner, &tensor, &shares) }
}

pub(super) fn tpi_llm(
    cluster: &Cluster,
    scenario: &ScenarioRecord,
    options: SystemPlanOptions,
) -> PlanResult {
    let format = options.weight_format.unwrap_or(Format::F32);
    let window = |blocks| ResidencyOptions {
        conversion_format: Some(format),
        resident_blocks: Some(blocks),
        ..ResidencyOptions::with_policy(Residency::Sliding)
    };
    let tensor = base_tensor_plan(AllReduce::Star);
    let planner = PlannerRecord { strategy: "tpi-llm".into(), options: vec![format!("weights_as={format}")] };
    let mut shares = even_shares(cluster, window(2), format);
    let draft = plan(cluster, scenario, planner.clone(), &tensor, &shares);
    let mut explanation = Vec::new();
    let used = shares.iter_mut().filter(|(_, share)| !share.is_empty());
    for (index, (member, share)) in used.enumerate() {
        let (blocks, all) = max_blocks(cluster, &draft, index, member)?;
        share.residency = window(blocks);
        explanation.push(format!("`{}` holds {blocks} of {all} blocks in memory at once", member.name));
    }
    Ok(Plan { explanation, ..plan(cluster, scenario, planner, &tensor, &shares) })
}

pub(super) fn airinfer(
    cluster: &Cluster,
    scenario: &ScenarioRecord,
    options: SystemPlanOptions,
) -> PlanResult {
    let format = options.weight_format.unwrap_or(Format::F32);
    let air_time = options.all_reduce_time.ok_or(SystemPlanError::MissingAllReduceTime)?;
    let tensor =
        TensorParallelPlan { all_reduce_time: Some(air_time), ..base_tensor_plan(AllReduce::OverTheAir) };
    let shares = even_shares(cluster, ResidencyOptions::pinned(Some(format)), format);
    let options = vec![format!("weights_as={format}"), format!("air_time={air_time}")];
    let planner = PlannerRecord { strategy: "airinfer".into(), options };
    let explanation = vec![format!("an all-reduce takes {air_time} for any number of devices")];
    Ok(Plan { explanation, ..plan(cluster, scenario, planner, &tensor, &shares) })
}

/// Returns slices of whole key-value heads and of whole blocks of rows, as even as possible. If there are more devices
/// than heads, the last devices have empty slices.
fn even_shares(cluster: &Cluster, residency: ResidencyOptions, format: Format) -> Vec<(&Member, SliceShare)> {
    let (members, shape) = (members(cluster), &cluster.model.shape);
    let used = members.len().min(shape.kv_heads as usize);
    let block = (format.block_len() as u32).min(shape.feed_forward_length);
    let (ones, blocks) = (vec![1; used], shape.feed_forward_length / block);
    let heads = cumulative_rounding(&ones, shape.kv_heads).unwrap_or_default();
    let mut rows: Vec<u32> =
        cumulative_rounding(&ones, blocks).unwrap_or_default().iter().map(|count| count * block).collect();
    if let Some(last) = rows.last_mut() {
        *last += shape.feed_forward_length % block;
    }
    let part = |index: usize| {
        let of = |shares: &[u32]| shares.get(index).copied().unwrap_or(0);
        SliceShare { kv_heads: of(&heads), feed_forward_rows: of(&rows), residency, is_on_gpu: false }
    };
    members.into_iter().enumerate().map(|(index, member)| (member, part(index))).collect()
}

/// Returns how many blocks fit in a device's memory at the same time (an error if fewer than two), and how many exist.
fn max_blocks(
    cluster: &Cluster,
    draft: &Plan,
    index: usize,
    member: &Member,
) -> Result<(u32, u32), SystemPlanError> {
    let all = match draft.kind.tensor_plan() {
        Some(tensor) => {
            streamed_block_sizes(&SlicedModel::new(draft, tensor, index, &cluster.model), index == 0)
        }
        None => Vec::new(),
    };
    let count = all.len() as u32;
    let holds = |blocks: u32| {
        let mut plan = draft.clone();
        plan.devices[index].residency.resident_blocks = Some(blocks);
        let held = PinnedMemory::new(&plan, index, &cluster.model, &member.device, false);
        held.is_some_and(|held| held.excess_memory() == Bytes::ZERO)
    };
    // More blocks never take less memory, so a binary search finds the maximum.
    let (mut fits, mut beyond) = (1, count + 1);
    while beyond - fits > 1 {
        let middle = u32::midpoint(fits, beyond);
        if holds(middle) { fits = middle } else { beyond = middle }
    }
    if fits < 2 {
        let largest = all.iter().copied().max().unwrap_or_default();
        let fixed = PinnedMemory::new(draft, index, &cluster.model, &member.device, false)
            .map_or(Bytes::ZERO, |held| held.kv_cache + held.buffers);
        let device = member.name.clone();
        return Err(SystemPlanError::NoSlidingWindow { device, needed: largest.0, fixed: fixed.0 });
    }
    Ok((fits, count))
}
