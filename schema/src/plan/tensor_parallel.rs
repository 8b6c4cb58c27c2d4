//! Tensor parallelism: the slices of a tensor-parallel plan and its all-reduce pattern.
//!
//! Each device has the same share of every layer (prima.cpp paper, section 2). A layer has two blocks, attention and
//! feed-forward. After each block the devices sum their partial results in an all-reduce. The size of a slice is a
//! number of key-value heads, with the query heads that use them, and a number of rows of the feed-forward matrices
//! (Shoeybi et al., 2019, Megatron-LM). Every device has the norms. The head device has embedding and output matrix.
//!
//! A plan of this kind can only be simulated. It has `rounds: 1`. All its devices have all layers in their `window` and
//! the residency `pinned` or `sliding` ([`crate::residency`]).
//!
//! Not here: the bytes of a slice (`hearth_core::tensor::slicing`) and the messages of an all-reduce
//! (`hearth_core::tensor::collective`).

use hearth_profiles::document::DocumentError;
use hearth_profiles::model::ModelShape;
use hearth_profiles::{Bytes, Format, Seconds};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Plan, Processor, Role};
use crate::pass::Pass;
use crate::residency::Residency;

/// The algorithm of an all-reduce.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum AllReduce {
    /// Every device sends its partial result to every other device, and each computes the sum.
    AllGather,
    /// Workers send their partial results to the head device, which computes the sum and sends it to each worker.
    Star,
    /// A ring all-reduce: reduce-scatter, then all-gather.
    Ring,
    /// All devices send at the same time on one radio channel and receive the sum, within the time `air_time`.
    OverTheAir,
}

/// The weights that the head device loads.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum HeadWeights {
    /// Only its own slice, like every other device.
    #[default]
    Slice,
    /// The whole model, from which the head device cuts the slices of all devices.
    Model,
}

/// One device's share of every layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Slice {
    pub device: String,
    /// The number of key-value heads, with the query heads that use them.
    pub kv_heads: u32,
    /// The number of rows of the feed-forward matrices.
    #[serde(rename = "feed_forward")]
    pub feed_forward_rows: u32,
}

/// The slices and the all-reduce of a tensor-parallel plan.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TensorParallelPlan {
    pub all_reduce: AllReduce,
    /// The time of one all-reduce, for `over-the-air` only. It does not depend on the number of devices.
    #[serde(rename = "air_time", default, skip_serializing_if = "Option::is_none")]
    pub all_reduce_time: Option<Seconds>,
    /// The number format of partial results in messages.
    #[serde(rename = "values")]
    pub partial_result_format: Format,
    #[serde(rename = "head_loads", default)]
    pub head_weights: HeadWeights,
    /// Maximum number of prompt tokens in one batch; not limited if absent.
    #[serde(default, rename = "batch", skip_serializing_if = "Option::is_none")]
    pub max_batch_tokens: Option<u32>,
    /// The format of the embedding on the head device; the format of the device's other weights if absent.
    #[serde(rename = "embedding_as", default, skip_serializing_if = "Option::is_none")]
    pub embedding_format: Option<Format>,
    /// The slice of each device, in the order of `devices`.
    pub slices: Vec<Slice>,
}

/// The formats of partial results that can be summed: floating-point numbers, or blocks of 32 8-bit numbers (`q8_0`).
const PARTIAL_FORMATS: [Format; 4] = [Format::F32, Format::F16, Format::Bf16, Format::Q8_0];

impl TensorParallelPlan {
    /// Returns the size of a device's partial result of a block for `tokens` tokens. `embedding_length` is the number
    /// of elements of a hidden state.
    pub fn partial_result_bytes(&self, embedding_length: u32, tokens: u32) -> Bytes {
        let blocks = u64::from(embedding_length).div_ceil(self.partial_result_format.block_len());
        Bytes(blocks * self.partial_result_format.block_bytes()) * u64::from(tokens)
    }

    /// Splits every pass with more tokens than [`TensorParallelPlan::max_batch_tokens`] and renumbers all passes.
    pub fn split_passes(&self, passes: Vec<Pass>) -> Vec<Pass> {
        let Some(batch) = self.max_batch_tokens else { return passes };
        let mut split: Vec<Pass> = Vec::new();
        for pass in passes {
            let mut done = 0;
            while done < pass.tokens {
                let tokens = (pass.tokens - done).min(batch.max(1));
                split.push(Pass {
                    index: split.len() as u32,
                    first_position: pass.first_position + done,
                    tokens,
                    has_output: pass.has_output && done + tokens == pass.tokens,
                    ..pass
                });
                done += tokens;
            }
        }
        split
    }

    /// Checks that the slices and the all-reduce do not contradict each other or the rest of the plan.
    pub fn validate(&self, plan: &Plan) -> Result<(), DocumentError> {
        let reject = |what: String| Err(DocumentError::invalid_document(what));
        let names = plan.devices.iter().map(|device| &device.name);
        if !self.slices.iter().map(|slice| &slice.device).eq(names) {
            return reject("`kind.tensor.slices` must list each of `devices` once, in the same order".into());
        }
        let empty = self.slices.iter().find(|slice| slice.kv_heads == 0 && slice.feed_forward_rows == 0);
        if let Some(Slice { device, .. }) = empty {
            return reject(format!(
                "kind.tensor.slices: `{device}` has neither KV heads nor feed-forward rows: give it heads or rows, \
                 or remove the device"
            ));
        }
        if !PARTIAL_FORMATS.contains(&self.partial_result_format) {
            let (format, known) = (self.partial_result_format, PARTIAL_FORMATS.map(Format::name).join(", "));
            return reject(format!(
                "kind.tensor.values: partial results in `{format}` cannot be added up: use one of {known}"
            ));
        }
        if self.max_batch_tokens == Some(0) {
            return reject("`kind.tensor.batch` is 0, but must be at least 1".into());
        }
        match (self.all_reduce == AllReduce::OverTheAir, self.all_reduce_time) {
            (true, None) => {
                reject("kind.tensor: `over-the-air` needs `air_time`, the time of one all-reduce".into())
            }
            (true, Some(time)) if time.0 > MAX_ALL_REDUCE_SECONDS => reject(format!(
                "`kind.tensor.air_time` is {time}, but must be at most an hour: check its unit"
            )),
            (false, Some(_)) => {
                reject("kind.tensor: `air_time` is only for `all_reduce: over-the-air`: remove it".into())
            }
            _ => validate_devices(plan),
        }
    }

    /// Checks that the slices cover a model with the shape `shape` completely.
    pub fn validate_coverage(&self, plan: &Plan, shape: &ModelShape) -> Result<(), DocumentError> {
        if !shape.has_equal_layers() {
            let what = "the layers of the model have different dimensions, so that they cannot be sliced: use a plan \
                        whose devices compute whole layers";
            return Err(DocumentError::invalid_document(what.to_owned()));
        }
        for (what, found, whole) in [
            ("kv_heads", self.total(|slice| slice.kv_heads), shape.kv_heads),
            ("feed_forward", self.total(|slice| slice.feed_forward_rows), shape.feed_forward_length),
        ] {
            if found != u64::from(whole) {
                return Err(DocumentError::invalid_document(format!(
                    "kind.tensor.slices: `{what}` add up to {found}, but the model has {whole}: change the slices, or \
                     plan again"
                )));
            }
        }
        let last = self.slices.iter().rposition(|slice| slice.feed_forward_rows > 0);
        for (index, slice) in self.slices.iter().enumerate() {
            // The down projection is split along its blocks of weights; the last device has an incomplete last block.
            let block = plan.devices[index].residency.conversion_format.map_or(1, Format::block_len);
            if Some(index) != last && !u64::from(slice.feed_forward_rows).is_multiple_of(block) {
                return Err(DocumentError::invalid_document(format!(
                    "kind.tensor.slices: the {} feed-forward rows of `{}` are not a multiple of the block \
                     length of its weights, {block}: change the slices, or plan again",
                    slice.feed_forward_rows, slice.device
                )));
            }
        }
        Ok(())
    }

    fn total(&self, of: impl Fn(&Slice) -> u32) -> u64 {
        self.slices.iter().map(|slice| u64::from(of(slice))).sum()
    }
}

/// Maximum time of one all-reduce, in seconds. A longer time is a mistake, and sums of times could overflow.
const MAX_ALL_REDUCE_SECONDS: f64 = 3600.0;

fn validate_devices(plan: &Plan) -> Result<(), DocumentError> {
    let reject = |what: &str| Err(DocumentError::invalid_document(what));
    let layers = plan.model.layers;
    for (index, device) in plan.devices.iter().enumerate() {
        let place = format!("devices[{index}] `{}`", device.name);
        let reject = |what: String| Err(DocumentError::invalid_document(format!("{place}: {what}")));
        if device.role == Role::Relay {
            return reject("a tensor-parallel plan cannot have relays: remove this device".into());
        }
        if device.window != layers || (device.gpu_layers != 0 && device.gpu_layers != layers) {
            return reject(format!(
                "a tensor-parallel device works on every layer: set `window: {layers}`, and `gpu_layers` to \
                 0 or {layers}"
            ));
        }
        let policy = device.residency.policy;
        if !matches!(policy, Residency::Pinned | Residency::Sliding) {
            return reject(format!(
                "`residency` is `{policy}`; a tensor-parallel device must be `pinned` or `sliding`"
            ));
        }
        if policy == Residency::Sliding && device.gpu_layers > 0 {
            return reject(
                "a device with `residency: sliding` computes on the CPU: set `gpu_layers: 0`".into(),
            );
        }
    }
    if plan.sequences != 1 {
        return reject("a tensor-parallel plan must have `sequences: 1`");
    }
    if plan.draft_model.is_some() {
        return reject("a tensor-parallel plan cannot have a draft model: remove `draft`");
    }
    if plan.output_processor != Processor::Cpu {
        return reject(
            "a tensor-parallel plan computes the output on the CPU of the head device: remove `output`",
        );
    }
    if plan.rounds != 1 {
        return reject("a tensor-parallel plan must have `rounds: 1`");
    }
    Ok(())
}
