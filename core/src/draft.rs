//! What does a draft model take of the head, and where does it run?
//!
//! The head holds it whole, with keys and values for the whole context of every sequence and compute buffers of its
//! own, as a process of its own would (prima.cpp paper, appendix A.9). None of it can be taken back. On a GPU that is
//! GPU memory, on the CPU main memory; where both are one, it is taken from both accounts. What is left is for the
//! large model: planner, `lint` and simulator all take the head as it is left.
//!
//! Deviation: a draft on the CPU is loaded, not mapped, so that it does not compete for the page cache.
//!
//! Not here: how long drafting takes, which is simulated with [`crate::compute_cost`].

use std::borrow::Cow;

use hearth_profiles::model::ModelProfile;
use hearth_profiles::{Bytes, Device, Layers};

use crate::cluster::Cluster;
use hearth_schema::plan::Plan;
use hearth_schema::plan::PlannedDraft;
use hearth_schema::plan::PlannedModel;
use hearth_schema::plan::Processor;
use hearth_schema::scenario::KvFormat;

/// A scenario and a plan that do not draft alike.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DraftError {
    /// One speculates and the other does not.
    #[error("the plan has {planned} and the scenario's workload {asked}; plan again from this scenario")]
    OneSided {
        /// What the plan has.
        planned: &'static str,
        /// What the workload has.
        asked: &'static str,
    },
    /// The plan was made for another draft.
    #[error(
        "the plan drafts with `{planned}` and the scenario with `{given}`; plan again from this scenario"
    )]
    OtherModel {
        /// The plan's draft.
        planned: String,
        /// The scenario's.
        given: String,
    },
    /// Token numbers do not mean the same to both models.
    #[error(
        "the draft `{draft}` has a vocabulary of {ours} and `{model}` one of {theirs}; name a draft of the same family"
    )]
    Vocabulary {
        /// The draft.
        draft: String,
        /// Its tokens.
        ours: u32,
        /// The large model.
        model: String,
        /// Its tokens.
        theirs: u32,
    },
    /// The plan's processor cannot compute it.
    #[error(
        "the plan drafts on the GPU of `{device}`, which has none with a known speed; set `processor: cpu` or complete \
         the profile"
    )]
    NoGpu {
        /// The head.
        device: String,
    },
    /// More sequences at once than the plan has caches for.
    #[error(
        "the workload has {asked} sequences at once and the plan caches for {planned}; plan again from this scenario"
    )]
    Sequences {
        /// What the workload asks.
        asked: u32,
        /// What the plan has.
        planned: u32,
    },
}

/// Where and with what the cluster's head drafts.
pub fn planned(cluster: &Cluster) -> Option<PlannedDraft> {
    let draft = cluster.draft.as_ref()?;
    let asked = cluster.workload.speculation.as_ref().and_then(|speculation| speculation.processor);
    let head = cluster.members.get(cluster.head).map(|member| &member.device);
    let need = memory(draft, cluster.context, cluster.kv_cache, cluster.workload.sequences);
    let on_gpu = || head.is_some_and(|head| has_gpu(head) && host(head, need, Processor::Gpu).is_some());
    let usual = || if on_gpu() { Processor::Gpu } else { Processor::Cpu };
    Some(PlannedDraft { model: PlannedModel::of(draft), processor: asked.unwrap_or_else(usual) })
}

/// Checks that a valid plan drafts as the scenario's workload asks, with as many sequences.
pub fn check(plan: &Plan, cluster: &Cluster) -> Result<(), DraftError> {
    let (asked, planned) = (cluster.workload.sequences, plan.sequences);
    if asked > planned {
        return Err(DraftError::Sequences { asked, planned });
    }
    let (planned, draft) = match (&plan.draft, &cluster.draft) {
        (None, None) => return Ok(()),
        (Some(_), None) => {
            return Err(DraftError::OneSided { planned: "a draft model", asked: "no `speculation`" });
        }
        (None, Some(_)) => {
            return Err(DraftError::OneSided { planned: "no draft model", asked: "`speculation`" });
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

/// Checks that a draft's token numbers can be the large model's.
pub fn same_vocabulary(draft: &ModelProfile, model: &ModelProfile) -> Result<(), DraftError> {
    let (ours, theirs) = (draft.shape.vocabulary, model.shape.vocabulary);
    if ours == theirs {
        return Ok(());
    }
    let (draft, model) = (draft.name.clone(), model.name.clone());
    Err(DraftError::Vocabulary { draft, ours, model, theirs })
}

/// The device at a place of the plan as its draft leaves it; none if the draft does not fit.
pub fn beside<'d>(
    plan: &Plan,
    place: usize,
    draft: Option<&ModelProfile>,
    device: &'d Device,
) -> Option<Cow<'d, Device>> {
    match (&plan.draft, draft) {
        (Some(planned), Some(draft)) if place == 0 => {
            let need = memory(draft, plan.context, plan.kv_cache, plan.sequences);
            host(device, need, planned.processor).map(Cow::Owned)
        }
        _ => Some(Cow::Borrowed(device)),
    }
}

/// The cluster as its draft leaves it, for the large model alone. A head that cannot hold the draft has no GPU memory
/// left, or too large buffers.
pub fn left(cluster: &Cluster) -> Cow<'_, Cluster> {
    let Some((draft, planned)) = cluster.draft.as_ref().zip(planned(cluster)) else {
        return Cow::Borrowed(cluster);
    };
    let need = memory(draft, cluster.context, cluster.kv_cache, cluster.workload.sequences);
    let mut cluster = cluster.clone();
    cluster.draft = None;
    let head = cluster.head;
    if let Some(member) = cluster.members.get_mut(head) {
        if let Some(device) = host(&member.device, need, planned.processor) {
            member.device = device;
        } else if let Some(gpu) = &mut member.device.gpu {
            gpu.memory_available.value = Bytes::ZERO;
        }
    }
    Cow::Owned(cluster)
}

/// Weights, and keys and values.
fn memory(draft: &ModelProfile, context: u32, cache: KvFormat, sequences: u32) -> Bytes {
    let element = Bytes(cache.element_bytes());
    let layers = Layers(draft.layers.len() as u32);
    let kept = draft.shape.kv_bytes_per_layer(context, element) * layers * u64::from(sequences);
    draft.total_bytes() + kept
}

fn has_gpu(device: &Device) -> bool {
    device.gpu.as_ref().is_some_and(|gpu| !gpu.matvec.is_empty())
}

/// A device that holds so much for the draft. Main memory that does not suffice shows in the account of the rest.
fn host(device: &Device, need: Bytes, processor: Processor) -> Option<Device> {
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
