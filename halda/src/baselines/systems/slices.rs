//! Construction of tensor-parallel plans from the slices of the devices.
//!
//! Feed-forward rows are distributed in blocks of the weight format. The last device also gets the remaining rows.

use hearth_core::{Cluster, Member};
use hearth_profiles::Format;
use hearth_schema::plan::tensor_parallel::{AllReduce, HeadWeights, Slice, TensorParallelPlan};
use hearth_schema::plan::{
    DroppedDevice, Plan, PlanKind, PlannedDevice, PlannerRecord, Role, ScenarioRecord,
};
use hearth_schema::residency::ResidencyOptions;

use crate::plan_document::empty_plan;
use crate::problem::assignment::ring_order;

/// The slice of a device in every layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct SliceShare {
    pub kv_heads: u32,
    pub feed_forward_rows: u32,
    pub residency: ResidencyOptions,
    pub is_on_gpu: bool,
}

impl SliceShare {
    pub(super) fn is_empty(&self) -> bool {
        self.kv_heads == 0 && self.feed_forward_rows == 0
    }
}

/// Returns a tensor-parallel plan without slices, in which all-reduces are in f32 and the head loads only its slice.
pub(super) fn base_tensor_plan(all_reduce: AllReduce) -> TensorParallelPlan {
    TensorParallelPlan {
        all_reduce,
        all_reduce_time: None,
        partial_result_format: Format::F32,
        head_weights: HeadWeights::Slice,
        max_batch_tokens: None,
        embedding_format: None,
        slices: Vec::new(),
    }
}

pub(super) fn members(cluster: &Cluster) -> Vec<&Member> {
    ring_order(cluster.head, cluster.members.len()).map(|index| &cluster.members[index]).collect()
}

/// Builds a plan from the slices of the devices, the head first. Devices with an empty slice are dropped.
pub(super) fn plan(
    cluster: &Cluster,
    scenario: &ScenarioRecord,
    planner: PlannerRecord,
    tensor: &TensorParallelPlan,
    shares: &[(&Member, SliceShare)],
) -> Plan {
    let layers = cluster.model.shape.layers.0;
    let (mut devices, mut slices, mut dropped) = (Vec::new(), Vec::new(), Vec::new());
    for &(member, share) in shares {
        let name = member.name.clone();
        if share.is_empty() {
            dropped.push(DroppedDevice { name, reason: "its slice rounds to zero".into() });
            continue;
        }
        let (kv_heads, feed_forward) = (share.kv_heads, share.feed_forward_rows);
        slices.push(Slice { device: name.clone(), kv_heads, feed_forward_rows: feed_forward });
        devices.push(PlannedDevice {
            name,
            address: member.address.clone(),
            role: if devices.is_empty() { Role::Head } else { Role::Worker },
            window: layers,
            gpu_layers: if share.is_on_gpu { layers } else { 0 },
            residency: share.residency,
            predicted_terms: None,
        });
    }
    let kind = PlanKind::Tensor(TensorParallelPlan { slices, ..tensor.clone() });
    Plan { kind, devices, dropped_devices: dropped, ..empty_plan(cluster, scenario, planner) }
}
