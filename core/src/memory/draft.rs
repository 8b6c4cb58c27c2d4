//! The draft model on the head: where it runs, and what it leaves of the head's memory.
//!
//! The head holds the draft whole, with keys and values for the whole context of every sequence and compute buffers of
//! its own, as a separate process would (prima.cpp paper, appendix A.9). None of it can be taken back. On a GPU it
//! takes GPU memory, on the CPU main memory; where both are one memory, it counts in both. The rest is the large
//! model's: planner, `lint` and simulator use the head as its draft leaves it.
//!
//! Deviation: a draft on the CPU is loaded, not mapped, so that it does not compete for the page cache.
//!
//! Not here: how long drafting takes, which is simulated with [`crate::compute_cost`].

use std::borrow::Cow;

use hearth_profiles::model::ModelProfile;
use hearth_profiles::{Bytes, Device};
use hearth_schema::plan::{Plan, PlannedDraft, PlannedModel, Processor};
use hearth_schema::scenario::KvFormat;

use super::kv_cache_bytes;
use crate::cluster::Cluster;

/// Why a scenario cannot be run with a plan: they do not draft alike.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DraftError {
    /// Only one of them has a draft model.
    #[error("the plan has {planned} and the scenario's workload {requested}; plan again from this scenario")]
    OneSided { planned: &'static str, requested: &'static str },
    /// The plan was made for another draft.
    #[error(
        "the plan drafts with `{planned}` and the scenario with `{given}`; plan again from this scenario"
    )]
    OtherModel { planned: String, given: String },
    /// The models have different vocabularies.
    #[error(
        "the draft `{draft}` has a vocabulary of {draft_tokens} and `{model}` one of {model_tokens}; name a draft of the same family"
    )]
    Vocabulary { draft: String, draft_tokens: u32, model: String, model_tokens: u32 },
    /// The head has no GPU of known speed for it.
    #[error(
        "the plan drafts on the GPU of `{device}`, which has none with a known speed; set `processor: cpu` or complete \
         the profile"
    )]
    NoGpu { device: String },
    /// The workload has more sequences at once than the plan has caches for.
    #[error(
        "the workload has {requested} sequences at once and the plan caches for {planned}; plan again from this scenario"
    )]
    Sequences { requested: u32, planned: u32 },
}

/// The draft model of a plan for this cluster, on the processor that the workload names, else on a GPU that holds it.
pub fn planned(cluster: &Cluster) -> Option<PlannedDraft> {
    let draft = cluster.draft.as_ref()?;
    let requested = cluster.workload.speculation.as_ref().and_then(|speculation| speculation.processor);
    let head = cluster.members.get(cluster.head).map(|member| &member.device);
    let need = draft_bytes(draft, cluster.context, cluster.kv_cache, cluster.workload.sequences);
    let on_gpu = || head.is_some_and(|head| has_gpu(head) && less(head, need, Processor::Gpu).is_some());
    let usual = || if on_gpu() { Processor::Gpu } else { Processor::Cpu };
    Some(PlannedDraft { model: PlannedModel::of(draft), processor: requested.unwrap_or_else(usual) })
}

/// Checks that a valid plan drafts as the scenario's workload does, and has caches for its sequences.
pub fn check(plan: &Plan, cluster: &Cluster) -> Result<(), DraftError> {
    let (requested, planned) = (cluster.workload.sequences, plan.sequences);
    if requested > planned {
        return Err(DraftError::Sequences { requested, planned });
    }
    let (planned, draft) = match (&plan.draft, &cluster.draft) {
        (None, None) => return Ok(()),
        (Some(_), None) => {
            return Err(DraftError::OneSided { planned: "a draft model", requested: "no `speculation`" });
        }
        (None, Some(_)) => {
            return Err(DraftError::OneSided { planned: "no draft model", requested: "`speculation`" });
        }
        (Some(planned), Some(draft)) => (planned, draft),
    };
    if planned.model.shape_digest != draft.shape_digest() || planned.model.layers != draft.shape.layers.0 {
        let (planned, given) = (planned.model.name.clone(), draft.name.clone());
        return Err(DraftError::OtherModel { planned, given });
    }
    same_vocabulary(draft, &cluster.model)?;
    let device = plan.devices[0].name.clone();
    let head = cluster.member(&device);
    if planned.processor == Processor::Gpu && !head.is_some_and(|head| has_gpu(&head.device)) {
        return Err(DraftError::NoGpu { device });
    }
    Ok(())
}

/// Checks that a draft and the large model have vocabularies of one size.
pub fn same_vocabulary(draft: &ModelProfile, model: &ModelProfile) -> Result<(), DraftError> {
    let (draft_tokens, model_tokens) = (draft.shape.vocabulary, model.shape.vocabulary);
    if draft_tokens == model_tokens {
        return Ok(());
    }
    let (draft, model) = (draft.name.clone(), model.name.clone());
    Err(DraftError::Vocabulary { draft, draft_tokens, model, model_tokens })
}

/// Returns the device at a place of the plan without the memory of its draft model; `None` if the draft does not fit.
pub fn device_without_draft<'d>(
    plan: &Plan,
    place: usize,
    draft: Option<&ModelProfile>,
    device: &'d Device,
) -> Option<Cow<'d, Device>> {
    match (&plan.draft, draft) {
        (Some(planned), Some(draft)) if place == 0 => {
            let need = draft_bytes(draft, plan.context, plan.kv_cache, plan.sequences);
            less(device, need, planned.processor).map(Cow::Owned)
        }
        _ => Some(Cow::Borrowed(device)),
    }
}

/// The cluster as its draft leaves it, for the large model alone. A head that cannot hold the draft has no GPU memory
/// left, or too large buffers.
pub fn cluster_beside(cluster: &Cluster) -> Cow<'_, Cluster> {
    let Some((draft, planned)) = cluster.draft.as_ref().zip(planned(cluster)) else {
        return Cow::Borrowed(cluster);
    };
    let need = draft_bytes(draft, cluster.context, cluster.kv_cache, cluster.workload.sequences);
    let mut cluster = cluster.clone();
    cluster.draft = None;
    let head = cluster.head;
    if let Some(member) = cluster.members.get_mut(head) {
        if let Some(device) = less(&member.device, need, planned.processor) {
            member.device = device;
        } else if let Some(gpu) = &mut member.device.gpu {
            gpu.memory_available.value = Bytes::ZERO;
        }
    }
    Cow::Owned(cluster)
}

/// The draft's weights, keys and values.
fn draft_bytes(draft: &ModelProfile, context: u32, format: KvFormat, sequences: u32) -> Bytes {
    let layers = draft.layers.len() as u32;
    draft.total_bytes() + kv_cache_bytes(&draft.shape, layers, context, format, sequences)
}

fn has_gpu(device: &Device) -> bool {
    device.gpu.as_ref().is_some_and(|gpu| !gpu.matvec.is_empty())
}

/// The device less what its draft needs; `None` if its GPU cannot hold that. Main memory that does not suffice shows in
/// the account of the large model.
fn less(device: &Device, need: Bytes, processor: Processor) -> Option<Device> {
    let mut device = device.clone();
    let own = device.cpu.compute_buffer.value;
    match (processor, &mut device.gpu) {
        (Processor::Cpu, _) => device.cpu.compute_buffer.value += own + need,
        (Processor::Gpu, None) => return None,
        (Processor::Gpu, Some(gpu)) => {
            let need = need + gpu.compute_buffer.value;
            if need > gpu.memory_available.value {
                return None;
            }
            gpu.memory_available.value -= need;
            if gpu.unified_memory {
                device.cpu.compute_buffer.value += need;
            }
        }
    }
    Some(device)
}
