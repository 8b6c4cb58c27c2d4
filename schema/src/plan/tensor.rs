//! Tensor parallelism: the slices of every layer and the pattern of all-reduce in a plan.
//!
//! Each device holds the same share of every layer (prima.cpp paper, section 2). A layer is two blocks, attention and
//! feed-forward, and after each the devices add their partial results in an all-reduce. A slice is counted in
//! key-value heads, with the query heads that use them, and in rows of the feed-forward matrices (Shoeybi et al.,
//! 2019, Megatron-LM). Every device has the norms; the head has embedding and output matrix.
//!
//! A plan of this kind is simulated only. Its devices all have `window: L`, `rounds: 1`, and keep their weights
//! `pinned` or `sliding` ([`crate::residency`]).
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

/// How partial results are added up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum AllReduce {
    /// Every device sends its partial result to every other, and each adds them up.
    AllGather,
    /// Workers send to the head, which adds up and sends the sum to each.
    Star,
    /// A ring all-reduce: reduce-scatter, then all-gather.
    Ring,
    /// All send at once on one channel and receive the sum; its time is given.
    OverTheAir,
}

/// The weights that the head loads.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum HeadLoads {
    /// Its own slice, as every device does.
    #[default]
    Slice,
    /// The whole model, out of which it cuts all slices.
    Model,
}

/// One device's share of every layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Slice {
    /// The plan's devices in order.
    pub device: String,
    /// Key-value heads, with the query heads that use them.
    pub kv_heads: u32,
    /// Rows of the feed-forward matrices.
    pub feed_forward: u32,
}

/// A tensor-parallel plan's slices and messages.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TensorPlan {
    /// How partial results are added up.
    pub all_reduce: AllReduce,
    /// `over-the-air`: the time of one all-reduce, whatever the number of devices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub air_time: Option<Seconds>,
    /// The format of partial results on the network.
    pub values: Format,
    #[serde(default)]
    pub head_loads: HeadLoads,
    /// The tokens of a prompt that enter at once, for systems with a small limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub batch: Option<u32>,
    /// The format of the embedding on the head; that of its other weights if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub embedding_as: Option<Format>,
    /// The devices' shares, in the order of the plan.
    pub slices: Vec<Slice>,
}

/// Formats of partial results on the network: numbers, or short blocks of them.
const PARTIAL_FORMATS: [Format; 4] = [Format::F32, Format::F16, Format::Bf16, Format::Q8_0];

impl TensorPlan {
    /// Bytes of one device's partial result of a block for `tokens`.
    pub fn partial_bytes(&self, embedding: u32, tokens: u32) -> Bytes {
        let blocks = u64::from(embedding).div_ceil(self.values.block_len());
        Bytes(blocks * self.values.block_bytes()) * u64::from(tokens)
    }

    /// Splits passes that have more tokens than the plan's batch.
    pub fn batched(&self, passes: Vec<Pass>) -> Vec<Pass> {
        let Some(batch) = self.batch else { return passes };
        let mut split: Vec<Pass> = Vec::new();
        for pass in passes {
            let mut done = 0;
            while done < pass.tokens {
                let tokens = (pass.tokens - done).min(batch.max(1));
                split.push(Pass {
                    index: split.len() as u32,
                    first_position: pass.first_position + done,
                    tokens,
                    output: pass.output && done + tokens == pass.tokens,
                    ..pass
                });
                done += tokens;
            }
        }
        split
    }

    /// Checks that slices and messages agree with each other and with the plan.
    pub fn validate(&self, plan: &Plan) -> Result<(), DocumentError> {
        let refuse = |what: String| Err(DocumentError::invalid(what));
        let names = plan.devices.iter().map(|device| &device.name);
        if !self.slices.iter().map(|slice| &slice.device).eq(names) {
            return refuse("kind.tensor.slices: list each of `devices` once, in the same order".into());
        }
        if let Some(slice) = self.slices.iter().find(|slice| slice.kv_heads == 0 && slice.feed_forward == 0) {
            return refuse(format!(
                "kind.tensor.slices: `{}` has neither heads nor rows: give it some, or leave it out of the plan",
                slice.device
            ));
        }
        if !PARTIAL_FORMATS.contains(&self.values) {
            let known = PARTIAL_FORMATS.map(Format::name).join(", ");
            let what =
                format!("kind.tensor.values: `{}` cannot be added up: use one of {known}", self.values);
            return refuse(what);
        }
        if self.batch == Some(0) {
            return refuse("kind.tensor.batch: is 0; at least one token goes through at once".into());
        }
        match (self.all_reduce, self.air_time) {
            (AllReduce::OverTheAir, None) => {
                return refuse(
                    "kind.tensor: `over-the-air` needs `air_time`, the cost of one all-reduce".into(),
                );
            }
            (AllReduce::OverTheAir, Some(time)) if time.0 > MAX_AIR_SECONDS => {
                return refuse(format!("kind.tensor.air_time: {time} is more than an hour"));
            }
            (AllReduce::OverTheAir, Some(_)) | (_, None) => {}
            (_, Some(_)) => {
                return refuse("kind.tensor.air_time: is for `all_reduce: over-the-air`: remove it".into());
            }
        }
        validate_devices(plan)
    }

    /// Refuses slices that are not the whole of a model.
    pub fn validate_cover(&self, plan: &Plan, shape: &ModelShape) -> Result<(), DocumentError> {
        for (what, found, whole) in [
            ("kv_heads", self.total(|slice| slice.kv_heads), shape.kv_heads),
            ("feed_forward", self.total(|slice| slice.feed_forward), shape.feed_forward),
        ] {
            if found != u64::from(whole) {
                return Err(DocumentError::invalid(format!(
                    "kind.tensor.slices: `{what}` add up to {found} and the model has {whole}: change the slices, or \
                     plan again"
                )));
            }
        }
        let last = self.slices.iter().rposition(|slice| slice.feed_forward > 0);
        for (place, slice) in self.slices.iter().enumerate() {
            // Rows of the matrix down are cut; the last device has the rest of a block.
            let block = plan.devices[place].residency.weights_as.map_or(1, Format::block_len);
            if Some(place) != last && !u64::from(slice.feed_forward).is_multiple_of(block) {
                return Err(DocumentError::invalid(format!(
                    "kind.tensor.slices: the {} feed-forward rows of `{}` do not end with a block of {block} weights",
                    slice.feed_forward, slice.device
                )));
            }
        }
        Ok(())
    }

    fn total(&self, of: impl Fn(&Slice) -> u32) -> u64 {
        self.slices.iter().map(|slice| u64::from(of(slice))).sum()
    }
}

/// More than an hour for each all-reduce is a mistake; keeps times far from overflow.
const MAX_AIR_SECONDS: f64 = 3600.0;

fn validate_devices(plan: &Plan) -> Result<(), DocumentError> {
    let layers = plan.model.layers;
    for (index, device) in plan.devices.iter().enumerate() {
        let place = format!("devices[{index}] `{}`", device.name);
        let refuse = |what: String| Err(DocumentError::invalid(format!("{place}: {what}")));
        if device.role == Role::Relay {
            return refuse("a tensor-parallel plan has no relays".into());
        }
        if device.window != layers || (device.gpu_layers != 0 && device.gpu_layers != layers) {
            return refuse(format!(
                "works on every layer: `window: {layers}`, and `gpu_layers` of 0 or {layers}"
            ));
        }
        let policy = device.residency.policy;
        if !matches!(policy, Residency::Pinned | Residency::Sliding) {
            return refuse(format!(
                "`residency` is {policy}; a tensor-parallel device is `pinned` or `sliding`"
            ));
        }
        if policy == Residency::Sliding && device.gpu_layers > 0 {
            return refuse("`sliding` weights are the CPU's: set `gpu_layers: 0`".into());
        }
    }
    if plan.sequences != 1 || plan.draft.is_some() {
        return Err(DocumentError::invalid("a tensor-parallel plan is for one sequence and without a draft"));
    }
    if plan.output != Processor::Cpu {
        return Err(DocumentError::invalid("a tensor-parallel head outputs on its CPU: remove `output`"));
    }
    if plan.rounds != 1 {
        return Err(DocumentError::invalid("a tensor-parallel plan has `rounds: 1`"));
    }
    Ok(())
}
