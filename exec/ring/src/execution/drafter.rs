//! The draft model on the head, for speculative decoding.
//!
//! The head holds the draft model whole: all its layers with a cache for each sequence, and both of its ends. It reads
//! the tokens of a sequence that it has not seen, and proposes the likeliest next ones. The large model decides which
//! of them stand ([`super::sampling`]), so a bad draft costs time and changes no text.
//!
//! Not here: when it drafts (`hearth_core::schedule`), and how many tokens (`hearth_core::schedule::Generation`).

use std::ops::Range;
use std::sync::Arc;

use hearth_core::schedule::ModelPart;
use hearth_schema::pass::MAX_PASS_TOKENS;
use hearth_schema::plan::Plan;
use hearth_schema::plan::PlannedDevice;
use hearth_schema::plan::PlannedDraft;
use hearth_schema::plan::PlannedModel;
use hearth_schema::plan::Processor;

use super::model::{LocalModel, cache_options};
use crate::error::RingError;
use hearth_runtime::backend::CacheOptions;
use hearth_runtime::cost::ComputeCost;
use hearth_runtime::cpu::Cpu;
use hearth_runtime::head::Head;
use hearth_runtime::pool::Pool;
use hearth_runtime::sampler::greedy;
use hearth_runtime::stage::Stage;

/// What of a model's metadata makes token numbers mean what they do.
const VOCABULARY_KEYS: [&str; 4] =
    ["tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.ggml.tokens", "tokenizer.ggml.merges"];

/// A draft model on the head.
pub struct Drafter {
    stage: Stage,
    head: Head,
    layers: Range<u32>,
    /// Bytes of weights that one pass over it touches.
    pub weight_bytes: u64,
    /// The tokens of each sequence whose keys and values are cached.
    read: Vec<Vec<u32>>,
    cost: ComputeCost,
    passes: u32,
}

impl Drafter {
    /// This model as the draft of a plan's head, computed by `pool`.
    pub fn for_plan(draft: &LocalModel, plan: &Plan, pool: &Arc<Pool>) -> Result<Self, RingError> {
        let layers = draft.profile.shape.layers.0;
        let whole = Plan { rounds: 1, devices: vec![plan.devices[0].clone()], ..plan.clone() };
        let whole = Plan { model: PlannedModel { layers, ..plan.model.clone() }, ..whole };
        let head = PlannedDevice { window: layers, ..plan.devices[0].clone() };
        draft.check_memory(&Plan { devices: vec![head], ..whole }, 0)?;
        Self::new(draft, cache_options(plan), Cpu::new(pool.clone()))
    }

    /// Creates a drafter with caches configured by `cache`, computed on `cpu`.
    fn new(model: &LocalModel, cache: CacheOptions, cpu: Cpu) -> Result<Self, RingError> {
        let weights = model.weights.clone();
        let layers = 0..weights.shape().layers.0;
        let parts = [ModelPart::Layers(layers.clone()), ModelPart::Output];
        Ok(Self {
            stage: Stage::on_cpu(weights.clone(), std::slice::from_ref(&layers), cache, cpu.clone())?,
            weight_bytes: parts.iter().map(|part| weights.part_bytes(part)).sum(),
            head: Head::new(weights, cpu),
            layers,
            read: vec![Vec::new(); cache.sequences as usize],
            cost: ComputeCost::default(),
            passes: 0,
        })
    }

    /// Forgets all sequences.
    pub fn forget(&mut self) {
        self.stage.truncate(0);
        self.read.iter_mut().for_each(Vec::clear);
    }

    /// Computes those tokens of a sequence that are not in the cache yet; `tokens` begins at position 0.
    pub fn read(&mut self, sequence: u32, tokens: &[u32]) -> Result<(), RingError> {
        self.read_up_to(sequence, tokens, tokens.len()).map(drop)
    }

    /// The `count` tokens that it expects after these, all of the sequence so far and at least one.
    pub fn draft(&mut self, sequence: u32, tokens: &[u32], count: u32) -> Result<Vec<u32>, RingError> {
        let mut drafts = Vec::new();
        let mut hidden = self.read_up_to(sequence, tokens, tokens.len().saturating_sub(1))?;
        loop {
            let logits = self.head.logits_of_last(&hidden)?;
            self.cost += self.head.last_cost();
            drafts.push(greedy(&logits));
            if drafts.len() >= count as usize {
                return Ok(drafts);
            }
            hidden = self.pass(sequence, &drafts[drafts.len() - 1..])?;
        }
    }

    /// Takes the cost since the last call, and how often the weights were read.
    pub fn take_cost(&mut self) -> (ComputeCost, u32) {
        (std::mem::take(&mut self.cost), std::mem::take(&mut self.passes))
    }

    /// Reads on from where the cache and `tokens` part, from position `most` at the latest. The last hidden rows.
    fn read_up_to(&mut self, sequence: u32, tokens: &[u32], most: usize) -> Result<Vec<f32>, RingError> {
        let read = self.read.get_mut(sequence as usize);
        let read = read.ok_or(hearth_runtime::ExecError::Sequence { sequence })?;
        let same = read.iter().zip(tokens).take_while(|(one, other)| one == other).count().min(most);
        read.truncate(same);
        self.stage.roll_back(sequence, same as u32);
        let mut hidden = Vec::new();
        for batch in tokens[same..].chunks(MAX_PASS_TOKENS as usize) {
            hidden = self.pass(sequence, batch)?;
        }
        Ok(hidden)
    }

    fn pass(&mut self, sequence: u32, tokens: &[u32]) -> Result<Vec<f32>, RingError> {
        let read = self.read.get_mut(sequence as usize);
        let read = read.ok_or(hearth_runtime::ExecError::Sequence { sequence })?;
        let positions: Vec<u32> = (read.len() as u32..).take(tokens.len()).collect();
        let mut hidden = self.head.embed(tokens)?;
        self.cost += self.stage.forward_of(sequence, self.layers.clone(), &mut hidden, &positions)?;
        self.passes += 1;
        read.extend_from_slice(tokens);
        Ok(hidden)
    }
}

/// A plan's head drafts with this model, on its CPU.
pub fn with_draft(mut plan: Plan, model: &LocalModel, draft: &LocalModel) -> Result<Plan, RingError> {
    same_vocabulary(model, draft)?;
    plan.draft = Some(PlannedDraft { model: PlannedModel::of(&draft.profile), processor: Processor::Cpu });
    Ok(plan)
}

/// Whether a head with this draft, or none, can do what the plan says.
pub fn check(plan: &Plan, model: &LocalModel, draft: Option<&LocalModel>) -> Result<(), RingError> {
    let refuse = |what: String, hint: &str| Err(RingError::plan_with_hint(what, hint));
    let (planned, draft) = match (&plan.draft, draft) {
        (None, _) => return Ok(()),
        (Some(planned), None) => {
            let what = format!("the plan drafts with `{}`", planned.model.name);
            return refuse(what, "give its file with --draft-model");
        }
        (Some(planned), Some(draft)) => (planned, draft),
    };
    if planned.processor == Processor::Gpu {
        let head = &plan.devices[0].name;
        let what = format!("the plan drafts on the GPU of `{head}`, and this build drafts on CPUs only");
        return refuse(what, "plan with `processor: cpu` in `workload.speculation`");
    }
    if planned.model.shape_digest != draft.profile.shape_digest() {
        let what = format!(
            "the plan drafts with `{}`, and `{}` is another model",
            planned.model.name, draft.profile.name
        );
        return refuse(what, "give --draft-model the plan's, or plan again");
    }
    same_vocabulary(model, draft)
}

/// Token numbers of a draft must be the large model's.
fn same_vocabulary(model: &LocalModel, draft: &LocalModel) -> Result<(), RingError> {
    let [large, small] = [model, draft].map(|model| &model.weights.model().metadata);
    let tokens = [model, draft].map(|model| model.weights.shape().vocabulary);
    let other = VOCABULARY_KEYS.iter().find(|key| large.get(key) != small.get(key));
    let reason = match other {
        _ if tokens[0] != tokens[1] => format!("{} tokens, and the model has {}", tokens[1], tokens[0]),
        Some(key) => format!("another `{key}` in its file"),
        None => return Ok(()),
    };
    let (draft, model) = (&draft.profile.name, &model.profile.name);
    Err(RingError::plan_with_hint(
        format!("`{draft}` cannot draft for `{model}`: it has {reason}"),
        "give a draft of the same family, with the same tokenizer",
    ))
}
