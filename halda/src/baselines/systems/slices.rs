//! The parts of tensor-parallel plans.
//!
//! In such a plan every device works on every layer, in one round. Feed-forward rows are distributed in blocks of the
//! weights' format, because the down projection is cut along its rows; the last device gets the remainder.

use hearth_core::{Cluster, Member};
use hearth_profiles::Format;
use hearth_schema::plan::tensor::{AllReduce, HeadLoads, Slice, TensorPlan};
use hearth_schema::plan::{DroppedDevice, Origin, Plan, PlanKind, PlannedDevice, PlannerRecord, Role};
use hearth_schema::residency::ResidencyOptions;

use crate::plan_document::empty_plan;
use crate::problem::assignment::ring_order;

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Share {
    pub kv_heads: u32,
    pub feed_forward: u32,
    pub residency: ResidencyOptions,
    pub on_gpu: bool,
}

/// Returns a plan without slices that sums in 32 bit and whose head loads only its own slice, as most systems do.
pub(super) fn base_tensor_plan(all_reduce: AllReduce) -> TensorPlan {
    TensorPlan {
        all_reduce,
        air_time: None,
        values: Format::F32,
        head_loads: HeadLoads::Slice,
        batch: None,
        embedding_as: None,
        slices: Vec::new(),
    }
}

/// Returns the members in ring order, the head first.
pub(super) fn members(cluster: &Cluster) -> Vec<&Member> {
    ring_order(cluster.head, cluster.members.len()).map(|index| &cluster.members[index]).collect()
}

/// Returns the rows of one block of a format; those of K-quants where the weights keep their format.
pub(super) fn row_block(format: Option<Format>) -> u32 {
    format.unwrap_or(Format::Q4K).block_len() as u32
}

pub(super) struct PlanHeader {
    pub strategy: &'static str,
    pub options: Vec<String>,
    pub dropped: Vec<DroppedDevice>,
    pub explanation: Vec<String>,
}

/// Assembles a plan from shares, the head's first. Devices with an empty share are dropped.
pub(super) fn plan(
    cluster: &Cluster,
    scenario: &Origin,
    made: PlanHeader,
    tensor: &TensorPlan,
    shares: &[(&Member, Share)],
) -> Plan {
    let layers = cluster.model.shape.layers.0;
    let (mut devices, mut slices, mut dropped) = (Vec::new(), Vec::new(), made.dropped);
    for &(member, share) in shares {
        let name = member.name.clone();
        if share.kv_heads == 0 && share.feed_forward == 0 {
            dropped.push(DroppedDevice { name, reason: "its share rounds to nothing".into() });
            continue;
        }
        let (kv_heads, feed_forward) = (share.kv_heads, share.feed_forward);
        slices.push(Slice { device: name.clone(), kv_heads, feed_forward });
        devices.push(PlannedDevice {
            name,
            address: member.address.clone(),
            role: if devices.is_empty() { Role::Head } else { Role::Worker },
            window: layers,
            gpu_layers: if share.on_gpu { layers } else { 0 },
            residency: share.residency,
            predicted: None,
        });
    }
    let planner = PlannerRecord { strategy: made.strategy.to_owned(), options: made.options };
    let kind = PlanKind::Tensor(TensorPlan { slices, ..tensor.clone() });
    Plan { kind, devices, dropped, explanation: made.explanation, ..empty_plan(cluster, scenario, planner) }
}
