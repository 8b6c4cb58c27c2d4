//! The draft model on the head, for speculative decoding.
//!
//! The head has the whole draft model: all layers with a KV cache for each sequence, the embedding and the output
//! layer. The draft model reads the new tokens of a sequence, and proposes next tokens by greedy decoding. The target
//! model decides which drafts are accepted ([`super::sampling`]), so bad drafts cost time but do not change the text.
//!
//! Not here: when tokens are drafted (`hearth_core::schedule`), and how many (`hearth_core::schedule::Generation`).

use std::ops::Range;
use std::sync::Arc;

use hearth_core::memory::draft::check_models;
use hearth_core::schedule::ModelPart;
use hearth_profiles::gguf::{Array, Value};
use hearth_schema::pass::MAX_PASS_TOKENS;
use hearth_schema::plan::{Plan, PlannedDevice, PlannedDraftModel, PlannedModel, Processor};

use super::model::{LocalModel, cache_options};
use crate::error::{Result, RingError};
use hearth_runtime::sampler::greedy_token;
use hearth_runtime::{Cpu, CriticalPathCost, ExecError, InputOutputLayers, Stage, ThreadPool};

/// The metadata keys of a model file that define the meaning of token IDs, apart from the texts of the tokens.
const TOKENIZER_KEYS: [&str; 3] = ["tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.ggml.merges"];
/// The metadata key of the texts of the tokens.
const TOKENS_KEY: &str = "tokenizer.ggml.tokens";

/// The draft model on the head, with the cached tokens of each sequence.
pub struct Drafter {
    stage: Stage,
    input_output: InputOutputLayers,
    layers: Range<u32>,
    /// Number of the tokens that the draft model and the target model share. The larger vocabulary has padding
    /// or added tokens after them.
    shared_tokens: u32,
    /// Bytes of the weights that a pass of the draft model reads: all layers and the output layer.
    pub weight_bytes: u64,
    cached: Vec<Vec<u32>>,
    /// The compute cost of the passes since the last [`Drafter::take_cost`].
    cost: CriticalPathCost,
    passes: u32,
}

impl Drafter {
    /// Creates a drafter for a plan. The drafter computes all layers of `draft` on the threads of `pool`, and proposes
    /// only tokens below `target_tokens`, the size of the target model's vocabulary.
    pub fn for_plan(
        draft: &LocalModel,
        target_tokens: u32,
        plan: &Plan,
        pool: &Arc<ThreadPool>,
    ) -> Result<Self> {
        let layers = draft.profile.shape.layers.0;
        let shared_tokens = draft.profile.shape.vocab_size.min(target_tokens);
        let model = PlannedModel { layers, weight_digests: None, ..plan.model.clone() };
        let head = PlannedDevice { window: layers, ..plan.devices[0].clone() };
        draft.check_memory(&Plan { rounds: 1, model, devices: vec![head], ..plan.clone() }, 0)?;
        let (cache, cpu) = (cache_options(plan), Cpu::new(pool.clone()));
        let weights = draft.weights.clone();
        let layers = 0..weights.shape().layers.0;
        let parts = [ModelPart::Layers(layers.clone()), ModelPart::Output];
        Ok(Self {
            stage: Stage::on_cpu(weights.clone(), std::slice::from_ref(&layers), cache, cpu.clone())?,
            weight_bytes: parts.iter().map(|part| weights.part_bytes(part)).sum(),
            input_output: InputOutputLayers::new(weights, cpu),
            layers,
            shared_tokens,
            cached: vec![Vec::new(); cache.sequences as usize],
            cost: CriticalPathCost::default(),
            passes: 0,
        })
    }

    pub fn clear(&mut self) {
        self.stage.truncate_kv_caches(0);
        self.cached.iter_mut().for_each(Vec::clear);
    }

    /// Runs the draft model over all `tokens` of a sequence that are not in the KV cache yet.
    pub fn prefill(&mut self, sequence: u32, tokens: &[u32]) -> Result<()> {
        self.extend_cache(sequence, tokens, tokens.len()).map(drop)
    }

    /// Drafts the next `count` tokens greedily. `tokens` has all tokens of the sequence so far, at least one token.
    pub fn draft(&mut self, sequence: u32, tokens: &[u32], count: u32) -> Result<Vec<u32>> {
        let mut drafts = Vec::new();
        let mut hidden = self.extend_cache(sequence, tokens, tokens.len().saturating_sub(1))?;
        loop {
            let logits = self.input_output.logits_of_last_row(&hidden)?;
            self.cost += self.input_output.last_logits_cost();
            drafts.push(greedy_token(&logits[..self.shared_tokens as usize]));
            if drafts.len() >= count as usize {
                return Ok(drafts);
            }
            hidden = self.pass(sequence, &drafts[drafts.len() - 1..])?;
        }
    }

    /// Returns the compute cost and the number of passes of the draft model since the last call of this method.
    pub fn take_cost(&mut self) -> (CriticalPathCost, u32) {
        (std::mem::take(&mut self.cost), std::mem::take(&mut self.passes))
    }

    /// Keeps the cached tokens that are a prefix of `tokens`, at most `max_kept`, and computes the other tokens.
    /// Returns the hidden states of the last pass, `[tokens, embedding]`.
    fn extend_cache(&mut self, sequence: u32, tokens: &[u32], max_kept: usize) -> Result<Vec<f32>> {
        let cached = self.cached.get_mut(sequence as usize).ok_or(ExecError::Sequence { sequence })?;
        let same = cached.iter().zip(tokens).take_while(|(one, other)| one == other).count().min(max_kept);
        cached.truncate(same);
        self.stage.roll_back(sequence, same as u32);
        let mut hidden = Vec::new();
        for batch in tokens[same..].chunks(MAX_PASS_TOKENS as usize) {
            hidden = self.pass(sequence, batch)?;
        }
        Ok(hidden)
    }

    fn pass(&mut self, sequence: u32, tokens: &[u32]) -> Result<Vec<f32>> {
        let cached = self.cached.get_mut(sequence as usize).ok_or(ExecError::Sequence { sequence })?;
        let first = cached.len() as u32;
        // The draft model does not know tokens that only the target model has. Another token in their place only makes
        // worse drafts.
        let known: Vec<u32> = tokens.iter().map(|&token| token.min(self.shared_tokens - 1)).collect();
        let mut hidden = self.input_output.embed(&known)?;
        self.cost += self.stage.forward(sequence, self.layers.clone(), &mut hidden, first)?;
        self.passes += 1;
        cached.extend_from_slice(tokens);
        Ok(hidden)
    }
}

/// Adds a draft model on the head's CPU to a plan. Fails if draft and target model have different vocabularies.
pub fn plan_with_draft_model(mut plan: Plan, model: &LocalModel, draft: &LocalModel) -> Result<Plan> {
    check_vocabulary(model, draft)?;
    plan.draft_model = Some(PlannedDraftModel {
        model: PlannedModel::from_profile(&draft.profile),
        processor: Processor::Cpu,
    });
    Ok(plan)
}

/// Checks that the head has the draft model of the plan, if the plan has one.
pub fn check_draft_model(plan: &Plan, model: &LocalModel, draft: Option<&LocalModel>) -> Result<()> {
    let refuse = |what: String, hint: &str| Err(RingError::invalid_plan_with_hint(what, hint));
    let Some(planned) = &plan.draft_model else { return Ok(()) };
    let Some(draft) = draft else {
        let what = format!("the plan drafts with `{}`, but no draft model was given", planned.model.name);
        return refuse(what, "give the file of the draft model with `--draft-model`");
    };
    if planned.processor == Processor::Gpu {
        let head = &plan.devices[0].name;
        let what = format!("the plan drafts on the GPU of `{head}`, but this build drafts only on CPUs");
        return refuse(what, "plan with `processor: cpu` in `workload.speculation`");
    }
    if planned.model.shape_digest != draft.profile.shape_digest() {
        let (planned, draft) = (&planned.model.name, &draft.profile.name);
        let what = format!("the plan drafts with `{planned}`, but `{draft}` is a different model");
        return refuse(what, "give the draft model of the plan with `--draft-model`, or plan again");
    }
    check_vocabulary(model, draft)
}

fn check_vocabulary(model: &LocalModel, draft: &LocalModel) -> Result<()> {
    check_models(&draft.profile, &model.profile)
        .map_err(|error| RingError::invalid_plan_with_hint(error.to_string(), "omit `--draft-model`"))?;
    let [large, small] = [model, draft].map(|model| &model.weights.model().metadata);
    let different_key = TOKENIZER_KEYS.into_iter().find(|key| large.get(key) != small.get(key));
    let reason = match (different_key, first_different_token(large.get(TOKENS_KEY), small.get(TOKENS_KEY))) {
        (Some(key), _) => format!("a different value of `{key}` in its file"),
        (None, Some(token)) => format!("a different text of token {token}"),
        (None, None) => return Ok(()),
    };
    let (draft, model) = (&draft.profile.name, &model.profile.name);
    Err(RingError::invalid_plan_with_hint(
        format!("`{draft}` cannot draft for `{model}`: it has {reason}"),
        "give a draft model of the same family, with the same tokenizer",
    ))
}

/// Returns the first token whose text differs in two lists of texts. Tokens that only one list has, padding or
/// added tokens, are not compared.
fn first_different_token(one: Option<&Value>, other: Option<&Value>) -> Option<usize> {
    match (one, other) {
        (Some(Value::Array(Array::Str(one))), Some(Value::Array(Array::Str(other)))) => {
            one.iter().zip(other).position(|(one, other)| one != other)
        }
        _ => (one != other).then_some(0),
    }
}
