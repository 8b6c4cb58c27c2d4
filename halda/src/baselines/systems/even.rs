//! Even slices on every device: dllama, TPI-LLM and AirInfer.
//!
//! dllama (prima.cpp paper, sections 2 and 4.1 and appendix A.8): CPUs only; 4-bit weights, 32 in 18 bytes; the
//! number of devices is a power of two and at most that of key-value heads; uniform slices whatever the devices. The
//! head loads the whole model before it slices it. Two all-gathers per layer in blocks of 8 bit. Its files have the
//! embedding in 32 bit (source: distributed-llama's converter). It processes a prompt token by token (Table 4: four
//! times a token's time to the first token, 1845 over 459 ms). The whole model counts as held during the run: the
//! paper's Table 5 has 55.8 % of the head's memory at 8B, far more than slices alone.
//!
//! TPI-LLM (section 2): 32-bit weights that are streamed through a window of as many blocks as memory holds, loaded
//! ahead of use; two star all-reduces per layer. Assumed: even slices, sums in 32 bit.
//!
//! AirInfer (section 2): 32-bit weights in memory, sums by superposition on one channel; the time of a sum is given
//! and does not depend on the number of devices. Assumed: even slices.
//!
//! Not here: whether the slices fit. A device may be out of memory, as the paper found.

use hearth_core::memory::{PinnedMemory, streamed_blocks};
use hearth_core::tensor::SlicedModel;
use hearth_core::{Cluster, Member};
use hearth_profiles::{Bytes, Format};
use hearth_schema::plan::tensor::{AllReduce, HeadLoads, TensorPlan};
use hearth_schema::plan::{DroppedDevice, Origin, Plan};
use hearth_schema::residency::{Residency, ResidencyOptions};

use super::slices::{PlanHeader, Share, base_tensor_plan, members, plan, row_block};
use super::{SystemError, SystemOptions};
use crate::baselines::proportional::cumulative_rounding;

/// Returns a plan with uniform slices over 2^n devices.
pub(super) fn dllama(cluster: &Cluster, scenario: &Origin) -> Plan {
    let (members, shape) = (members(cluster), &cluster.model.shape);
    let block = row_block(Some(Format::Q4_0));
    let divides = |count: u32| {
        shape.kv_heads.is_multiple_of(count)
            && shape.feed_forward.is_multiple_of(count)
            && (shape.feed_forward / count).is_multiple_of(block)
    };
    let most = (members.len() as u32).min(shape.kv_heads);
    let count =
        (0..32).map(|power| 1 << power).take_while(|count| *count <= most).filter(|count| divides(*count));
    let count = count.last().unwrap_or(1);
    let share = Share {
        kv_heads: shape.kv_heads / count,
        feed_forward: shape.feed_forward / count,
        residency: ResidencyOptions::pinned(Some(Format::Q4_0)),
        on_gpu: false,
    };
    let (used, left_out) = members.split_at(count as usize);
    let reason = format!("slices are even over 2^n devices, and {count} are the most that divide the model");
    let dropped = left_out
        .iter()
        .map(|member| DroppedDevice { name: member.name.clone(), reason: reason.clone() })
        .collect();
    let explanation = vec![
        format!(
            "each of {count} devices has {} key-value heads and {} rows",
            share.kv_heads, share.feed_forward
        ),
        format!("{} all-gathers a token; the head loads the whole model first", 2 * shape.layers.0),
    ];
    let tensor = TensorPlan {
        all_reduce: AllReduce::AllGather,
        air_time: None,
        values: Format::Q8_0,
        head_loads: HeadLoads::Model,
        batch: Some(1),
        embedding_as: Some(Format::F32),
        slices: Vec::new(),
    };
    let shares: Vec<(&Member, Share)> = used.iter().map(|member| (*member, share)).collect();
    let made = PlanHeader { strategy: "dllama", options: Vec::new(), dropped, explanation };
    plan(cluster, scenario, made, &tensor, &shares)
}

/// Returns a plan whose slices are streamed through memory.
pub(super) fn tpi_llm(
    cluster: &Cluster,
    scenario: &Origin,
    options: SystemOptions,
) -> Result<Plan, SystemError> {
    let format = options.weights_as.unwrap_or(Format::F32);
    let window = |blocks| ResidencyOptions {
        weights_as: Some(format),
        blocks: Some(blocks),
        ..ResidencyOptions::of(Residency::Sliding)
    };
    let tensor = base_tensor_plan(AllReduce::Star);
    let made = || PlanHeader {
        strategy: "tpi-llm",
        options: vec![format!("weights_as={format}")],
        dropped: Vec::new(),
        explanation: Vec::new(),
    };
    let mut shares = even_shares(cluster, window(2), format);
    let draft = plan(cluster, scenario, made(), &tensor, &shares);
    let mut explanation = Vec::new();
    let mut place = 0;
    for (member, share) in &mut shares {
        if share.kv_heads == 0 && share.feed_forward == 0 {
            continue;
        }
        let blocks = max_blocks(cluster, &draft, place, member)?;
        share.residency = window(blocks.0);
        explanation
            .push(format!("`{}` has room for {} of {} blocks at once", member.name, blocks.0, blocks.1));
        place += 1;
    }
    Ok(plan(cluster, scenario, PlanHeader { explanation, ..made() }, &tensor, &shares))
}

/// Returns the plan of AirInfer: weight slices in memory, and all-reduces computed over the air.
pub(super) fn airinfer(
    cluster: &Cluster,
    scenario: &Origin,
    options: SystemOptions,
) -> Result<Plan, SystemError> {
    let format = options.weights_as.unwrap_or(Format::F32);
    let air_time = options.air_time.ok_or(SystemError::NoAirTime)?;
    let tensor = TensorPlan { air_time: Some(air_time), ..base_tensor_plan(AllReduce::OverTheAir) };
    let shares = even_shares(cluster, ResidencyOptions::pinned(Some(format)), format);
    let made = PlanHeader {
        strategy: "airinfer",
        options: vec![format!("weights_as={format}"), format!("air_time={air_time}")],
        dropped: Vec::new(),
        explanation: vec![format!("an all-reduce takes {air_time} whatever the number of devices, as given")],
    };
    Ok(plan(cluster, scenario, made, &tensor, &shares))
}

/// Returns even shares, up to whole heads and blocks of rows; devices beyond the number of key-value heads get
/// nothing.
fn even_shares(cluster: &Cluster, residency: ResidencyOptions, format: Format) -> Vec<(&Member, Share)> {
    let (members, shape) = (members(cluster), &cluster.model.shape);
    let used = members.len().min(shape.kv_heads as usize);
    let block = row_block(Some(format)).min(shape.feed_forward);
    let (ones, blocks) = (vec![1; used], shape.feed_forward / block);
    let heads = cumulative_rounding(&ones, shape.kv_heads).unwrap_or_default();
    let mut rows: Vec<u32> =
        cumulative_rounding(&ones, blocks).unwrap_or_default().iter().map(|count| count * block).collect();
    if let Some(last) = rows.last_mut() {
        *last += shape.feed_forward % block;
    }
    let part = |place: usize| {
        let of = |shares: &[u32]| shares.get(place).copied().unwrap_or(0);
        Share { kv_heads: of(&heads), feed_forward: of(&rows), residency, on_gpu: false }
    };
    members.into_iter().enumerate().map(|(place, member)| (member, part(place))).collect()
}

/// Returns how many blocks the memory of a device holds, and how many there are.
fn max_blocks(
    cluster: &Cluster,
    draft: &Plan,
    place: usize,
    member: &Member,
) -> Result<(u32, u32), SystemError> {
    let all = match draft.kind.tensor() {
        Some(tensor) => streamed_blocks(&SlicedModel::new(draft, tensor, place, &cluster.model), place == 0),
        None => Vec::new(),
    };
    let count = all.len() as u32;
    let holds = |blocks: u32| {
        let mut plan = draft.clone();
        plan.devices[place].residency.blocks = Some(blocks);
        let held = PinnedMemory::new(&plan, place, &cluster.model, &member.device, false);
        held.is_some_and(|held| held.excess() == Bytes::ZERO)
    };
    // More blocks never take less.
    let (mut fits, mut beyond) = (1, count + 1);
    while beyond - fits > 1 {
        let middle = u32::midpoint(fits, beyond);
        if holds(middle) { fits = middle } else { beyond = middle }
    }
    if fits < 2 {
        let largest = all.iter().copied().max().unwrap_or_default();
        let fixed = PinnedMemory::new(draft, place, &cluster.model, &member.device, false)
            .map_or(Bytes::ZERO, |held| held.kv_cache + held.buffers);
        let device = member.name.clone();
        return Err(SystemError::NoWindow { device, needed: largest.0, fixed: fixed.0 });
    }
    Ok((fits, count))
}
