//! The draft model on the head device: its processor and its memory.
//!
//! The head device stores the whole draft model, a KV cache for the whole context of every sequence, and
//! separate compute buffers, as a separate process would (prima.cpp paper, appendix A.9). None of this memory can be
//! reclaimed. A draft model on the GPU uses GPU memory, a draft model on the CPU main memory; if both are the same
//! memory, it counts in both. The target model is planned for a device profile from which this memory is subtracted.
//!
//! Deviation: a draft model on the CPU is loaded, not mapped, so that it does not compete for the page cache.

use std::borrow::Cow;

use hearth_profiles::model::ModelProfile;
use hearth_profiles::{Bytes, DeviceProfile};
use hearth_schema::plan::{Plan, PlannedDraftModel, PlannedModel, Processor};
use hearth_schema::scenario::KvFormat;

use super::kv_cache_bytes;
use crate::cluster::Cluster;

/// Why a plan's draft model or number of sequences does not suit the scenario, the device or the target model.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DraftError {
    #[error(
        "the plan has {planned}, but the scenario's workload has {requested}; plan again from this scenario"
    )]
    OnlyOneHasDraft { planned: &'static str, requested: &'static str },
    #[error(
        "the draft model of the plan is `{planned}`, but the draft model of the scenario is `{given}`; plan again from \
         this scenario"
    )]
    DifferentModel { planned: String, given: String },
    #[error(
        "the draft model `{draft}` has a vocabulary of {draft_tokens} tokens, but the model `{model}` has one of \
         {model_tokens}; name a draft model of the same family"
    )]
    VocabularyMismatch { draft: String, draft_tokens: u32, model: String, model_tokens: u32 },
    #[error(
        "rejected drafts cannot be removed from the recurrent state of `{model}`; run without a draft model, or use \
         models without recurrent layers"
    )]
    Recurrent { model: String },
    #[error(
        "the plan runs the draft model on the GPU of `{device}`, but the profile of this device has no GPU with a \
         known speed; set `workload.speculation.processor: cpu`, or complete the profile"
    )]
    NoGpu { device: String },
    #[error(
        "the workload has {requested} concurrent sequences, but the plan has KV caches for {planned}; plan \
         again from this scenario"
    )]
    TooFewCaches { requested: u32, planned: u32 },
}

/// Returns the draft model for a plan of this cluster; `None` without speculative decoding. The draft model runs on the
/// processor that the workload names, else on the head's GPU if its memory suffices, else on the CPU.
pub fn planned_draft(cluster: &Cluster) -> Option<PlannedDraftModel> {
    let draft = cluster.draft_model.as_ref()?;
    let requested = cluster.workload.speculation.as_ref().and_then(|speculation| speculation.processor);
    let head = cluster.members.get(cluster.head).map(|member| &member.device);
    let need =
        draft_bytes(draft, cluster.context_length, cluster.kv_cache_format, cluster.workload.sequences);
    let on_gpu =
        || head.is_some_and(|head| has_gpu(head) && without_memory(head, need, Processor::Gpu).is_some());
    let default = || if on_gpu() { Processor::Gpu } else { Processor::Cpu };
    let processor = requested.unwrap_or_else(default);
    Some(PlannedDraftModel { model: PlannedModel::from_profile(draft), processor })
}

/// Checks that a valid plan has the draft model of the scenario, and KV caches for all its sequences.
pub fn check_planned_draft(plan: &Plan, cluster: &Cluster) -> Result<(), DraftError> {
    let (requested, planned) = (cluster.workload.sequences, plan.sequences);
    if requested > planned {
        return Err(DraftError::TooFewCaches { requested, planned });
    }
    let one_sided = |planned, requested| Err(DraftError::OnlyOneHasDraft { planned, requested });
    let (planned, draft) = match (&plan.draft_model, &cluster.draft_model) {
        (None, None) => return Ok(()),
        (Some(_), None) => return one_sided("a draft model", "no `speculation`"),
        (None, Some(_)) => return one_sided("no draft model", "`speculation`"),
        (Some(planned), Some(draft)) => (planned, draft),
    };
    if planned.model.shape_digest != draft.shape_digest() || planned.model.layers != draft.shape.layers.0 {
        let (planned, given) = (planned.model.name.clone(), draft.name.clone());
        return Err(DraftError::DifferentModel { planned, given });
    }
    check_models(draft, &cluster.model)?;
    let device = plan.devices[0].name.clone();
    let head = cluster.member(&device);
    if planned.processor == Processor::Gpu && !head.is_some_and(|head| has_gpu(&head.device)) {
        return Err(DraftError::NoGpu { device });
    }
    Ok(())
}

/// Checks that rejected drafts can be removed from the caches of the draft model and of the target model.
fn check_caches(draft: &ModelProfile, model: &ModelProfile) -> Result<(), DraftError> {
    match [draft, model].into_iter().find(|model| model.shape.is_recurrent()) {
        Some(ModelProfile { name, .. }) => Err(DraftError::Recurrent { model: name.clone() }),
        None => Ok(()),
    }
}

/// Maximum difference of the sizes of two vocabularies with the same tokens, which are padded to different lengths or
/// have a few added tokens. source: Qwen2.5 has 151936 and 152064 rows for the same 151665 tokens; llama.cpp accepts
/// the same difference
const MAX_PADDING_TOKENS: u32 = 128;

/// Checks that the draft model suits the target model: its caches and the size of its vocabulary,
/// which may differ by padding or a few added tokens.
pub fn check_models(draft: &ModelProfile, model: &ModelProfile) -> Result<(), DraftError> {
    check_caches(draft, model)?;
    let (draft_tokens, model_tokens) = (draft.shape.vocab_size, model.shape.vocab_size);
    if draft_tokens.abs_diff(model_tokens) <= MAX_PADDING_TOKENS {
        return Ok(());
    }
    let (draft, model) = (draft.name.clone(), model.name.clone());
    Err(DraftError::VocabularyMismatch { draft, draft_tokens, model, model_tokens })
}

/// Returns the profile of a device of the plan, minus the memory of its draft model; `None` if the model does not fit.
pub fn device_without_draft<'d>(
    plan: &Plan,
    index: usize,
    draft: Option<&ModelProfile>,
    device: &'d DeviceProfile,
) -> Option<Cow<'d, DeviceProfile>> {
    match (&plan.draft_model, draft) {
        (Some(planned), Some(draft)) if index == 0 => {
            let need = draft_bytes(draft, plan.context_length, plan.kv_cache_format, plan.sequences);
            without_memory(device, need, planned.processor).map(Cow::Owned)
        }
        _ => Some(Cow::Borrowed(device)),
    }
}

/// Returns the cluster without its draft model, with the memory of the draft model subtracted on the head. If the draft
/// model does not fit, the returned head has no free GPU memory, or its compute buffers exceed its main memory.
pub fn cluster_without_draft(cluster: &Cluster) -> Cow<'_, Cluster> {
    let Some((draft, planned)) = cluster.draft_model.as_ref().zip(planned_draft(cluster)) else {
        return Cow::Borrowed(cluster);
    };
    let need =
        draft_bytes(draft, cluster.context_length, cluster.kv_cache_format, cluster.workload.sequences);
    let mut cluster = Cluster { draft_model: None, ..cluster.clone() };
    if let Some(member) = cluster.members.get_mut(cluster.head) {
        if let Some(device) = without_memory(&member.device, need, planned.processor) {
            member.device = device;
        } else if let Some(gpu) = &mut member.device.gpu {
            gpu.memory_available.value = Bytes::ZERO;
        }
    }
    Cow::Owned(cluster)
}

fn draft_bytes(draft: &ModelProfile, context: u32, format: KvFormat, sequences: u32) -> Bytes {
    let layers = 0..draft.shape.layers.0;
    draft.total_bytes() + kv_cache_bytes(&draft.shape, layers, context, format, sequences)
}

fn has_gpu(device: &DeviceProfile) -> bool {
    device.gpu.as_ref().is_some_and(|gpu| !gpu.matvec.is_empty())
}

/// Returns the device with `need` bytes subtracted for its draft model; `None` if they do not fit in GPU memory. Too
/// little main memory is detected later, by the memory budget of the target model.
fn without_memory(device: &DeviceProfile, need: Bytes, processor: Processor) -> Option<DeviceProfile> {
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
