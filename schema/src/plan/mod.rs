//! Plan: the layers of each device and the rounds around the ring, in a `plan/1` document.
//!
//! A plan is immutable: planning again writes a new file. Simulator and executor run the same plan and make no
//! planning decisions of their own.
//!
//! In a plan of the kind `ring`, the default, each device has a window: a number of layers. In each round a device
//! computes as many layers as its window has, namely those that follow the layers of its predecessor, until the layers
//! run out. The last round may be partial (prima.cpp paper, section 3.1 and Eq. 3 with the remainder kept). In a plan
//! of the kind `tensor` every device works on every layer, in one round ([`tensor_parallel`]). Plans of the kind
//! `tensor`, and rings with pinned weights, can only be simulated.
//!
//! Not here: how a plan is found (`hearth_halda`), and the steps of a plan (`hearth_core::schedule`).

pub mod tensor_parallel;
mod weight_digests;

use std::collections::BTreeSet;
use std::ops::Range;

use hearth_profiles::Seconds;
use hearth_profiles::document::{Document, DocumentError};
use hearth_profiles::model::{DigestMatch, ModelProfile};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::pass::is_default;
use crate::residency::{Residency, ResidencyOptions};
use crate::workload::{default_number, is_default_number, validate_sequences};

pub use crate::model::{ActivationFormat, KvFormat, Processor};
pub use tensor_parallel::TensorParallelPlan;
pub use weight_digests::WeightDigests;

/// A plan document.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// The type and version of the document: `plan/1`.
    pub schema: String,
    /// The scenario from which the plan was made.
    pub scenario: ScenarioRecord,
    pub model: PlannedModel,
    pub planner: PlannerRecord,
    /// The kind of parallelism; `ring` if absent.
    #[serde(default, skip_serializing_if = "PlanKind::is_ring", with = "serde_yaml::with::singleton_map")]
    #[schemars(with = "PlanKind")]
    pub kind: PlanKind,
    /// The number of rounds around the ring for one token, including a partial last round.
    pub rounds: u32,
    /// Capacity of the KV cache of each sequence, in tokens.
    #[serde(rename = "context")]
    pub context_length: u32,
    #[serde(rename = "kv_cache")]
    pub kv_cache_format: KvFormat,
    #[serde(rename = "activations", default, skip_serializing_if = "is_default")]
    pub activation_format: ActivationFormat,
    /// The processor of the output matrix on the head. `gpu` is possible only if all layers of the head are on the GPU.
    #[serde(rename = "output", default, skip_serializing_if = "is_default")]
    pub output_processor: Processor,
    /// The maximum number of concurrent sequences, each with a KV cache for the whole context.
    #[serde(default = "default_number::<1>", skip_serializing_if = "is_default_number::<1>")]
    pub sequences: u32,
    /// The number of tokens for which the KV caches of all sequences together have room; by default, for the whole
    /// context of each sequence. With fewer, sequences of a server share the room.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_tokens: Option<u64>,
    /// The draft model on the head, for speculative decoding.
    #[serde(rename = "draft", default, skip_serializing_if = "Option::is_none")]
    pub draft_model: Option<PlannedDraftModel>,
    /// The devices in ring order, the head first.
    pub devices: Vec<PlannedDevice>,
    /// The devices that the plan does not use, and why.
    #[serde(rename = "dropped", default, skip_serializing_if = "Vec::is_empty")]
    pub dropped_devices: Vec<DroppedDevice>,
    #[serde(rename = "predicted", default, skip_serializing_if = "Option::is_none")]
    pub prediction: Option<PlanPrediction>,
    /// Sentences that explain why the planner chose this plan.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub explanation: Vec<String>,
}

/// The kind of parallelism of a plan, with its parameters.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum PlanKind {
    /// Each layer is on one device, and activations go around the ring.
    #[default]
    Ring,
    /// Each layer is sliced over all devices.
    Tensor(TensorParallelPlan),
}

impl PlanKind {
    pub fn is_ring(&self) -> bool {
        matches!(self, PlanKind::Ring)
    }

    /// Returns the parameters of a tensor-parallel plan; `None` for a ring.
    pub fn tensor_plan(&self) -> Option<&TensorParallelPlan> {
        match self {
            PlanKind::Ring => None,
            PlanKind::Tensor(tensor) => Some(tensor),
        }
    }

    /// Returns the kind without its parameters.
    pub fn parallelism(&self) -> Parallelism {
        if self.is_ring() { Parallelism::Ring } else { Parallelism::Tensor }
    }
}

/// The kind of parallelism of a plan, without the parameters of the kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Parallelism {
    /// Each layer is on one device.
    #[default]
    Ring,
    /// Each layer is sliced over all devices.
    Tensor,
}

impl Parallelism {
    #[allow(clippy::trivially_copy_pass_by_ref)] // serde's signature
    pub fn is_ring(&self) -> bool {
        *self == Parallelism::Ring
    }
}

/// The name and digest of the scenario of a plan.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ScenarioRecord {
    pub name: String,
    /// The digest of the scenario's text.
    pub digest: String,
}

/// The model of a plan.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PlannedModel {
    pub name: String,
    /// The digest of the model file (header, size and samples), if the plan was made from a file.
    #[serde(rename = "digest", default, skip_serializing_if = "Option::is_none")]
    pub file_digest: Option<String>,
    /// The digest of the model's shape and formats. A plan without a file digest can run any model of this shape.
    pub shape_digest: String,
    /// The number of decoder layers of the model (L in the prima.cpp paper).
    pub layers: u32,
    /// The digests of the weights, with which each device can check its part of the model file (`--verify`). `hearth
    /// plan --hash-weights` stores them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight_digests: Option<WeightDigests>,
}

/// The draft model of a plan.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PlannedDraftModel {
    pub model: PlannedModel,
    pub processor: Processor,
}

/// The strategy that made a plan, and its options.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PlannerRecord {
    pub strategy: String,
    /// The options of the strategy, as `name=value`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub options: Vec<String>,
}

/// The role of a device in the ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Computes embedding and output, samples tokens, and computes its window.
    Head,
    /// Computes its window.
    Worker,
    /// Forwards messages and has no layers.
    Relay,
}

/// A device of the plan and its part of the model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PlannedDevice {
    /// The name of the device in the scenario.
    pub name: String,
    /// The address (`HOST:PORT`) of the device's worker, from the scenario or from `hearth lab`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    pub role: Role,
    /// The number of layers of the device in one round: its window (w_m in the prima.cpp paper).
    pub window: u32,
    /// The number of layers at the start of the window that are on the GPU (n_m in the prima.cpp paper).
    pub gpu_layers: u32,
    #[serde(default)]
    pub residency: ResidencyOptions,
    /// The time that the device needs for one token, divided into terms, as the planner predicts it.
    #[serde(rename = "predicted", default, skip_serializing_if = "Option::is_none")]
    pub predicted_terms: Option<PredictedTerms>,
}

/// A device that the plan does not use.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DroppedDevice {
    pub name: String,
    pub reason: String,
}

/// The terms of the latency model for one device and one token (prima.cpp paper, Eq. 11).
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PredictedTerms {
    /// Time of arithmetic operations.
    pub compute: Seconds,
    /// Time to write keys and values, to copy data to and from the GPU, and to read weights from memory.
    pub memory: Seconds,
    /// Time to read evicted weights from disk.
    pub disk: Seconds,
    /// Time to send activations to the next device.
    pub communication: Seconds,
}

/// The prediction of the planner's latency model for the plan.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PlanPrediction {
    /// Time per output token.
    pub tpot: Seconds,
}

impl PlannedDevice {
    /// Creates a device that computes its window on the CPU, with the default residency.
    pub fn new(name: impl Into<String>, role: Role, window: u32) -> Self {
        let (name, residency) = (name.into(), ResidencyOptions::default());
        Self { name, address: None, role, window, gpu_layers: 0, residency, predicted_terms: None }
    }
}

impl PlannedModel {
    /// Creates the entry of a model in a plan. A model without a file has only a shape digest.
    pub fn from_profile(model: &ModelProfile) -> Self {
        let shape_digest = model.shape_digest();
        Self {
            name: model.name.clone(),
            file_digest: (model.digest != shape_digest).then(|| model.digest.clone()),
            shape_digest,
            layers: model.shape.layers.0,
            weight_digests: None,
        }
    }

    /// Returns whether a plan for this model can be used for `model`: its file or its shape is the same.
    pub fn matches(&self, model: &ModelProfile) -> bool {
        let is_same = |digest: &String| model.match_digest(digest) != DigestMatch::Different;
        self.layers == model.shape.layers.0
            && (self.shape_digest == model.shape_digest() || self.file_digest.as_ref().is_some_and(is_same))
    }
}

impl Plan {
    /// Creates a ring plan with one round, one sequence, context 0 and no devices, which the caller then fills in.
    pub fn empty(scenario: ScenarioRecord, model: PlannedModel, planner: PlannerRecord) -> Self {
        Self {
            schema: Self::SCHEMA.into(),
            scenario,
            model,
            planner,
            kind: PlanKind::Ring,
            rounds: 1,
            context_length: 0,
            kv_cache_format: KvFormat::default(),
            activation_format: ActivationFormat::default(),
            output_processor: Processor::default(),
            sequences: 1,
            cache_tokens: None,
            draft_model: None,
            devices: Vec::new(),
            dropped_devices: Vec::new(),
            prediction: None,
            explanation: Vec::new(),
        }
    }

    /// Returns the number of tokens for which the KV caches of all sequences together have room.
    pub fn total_cache_tokens(&self) -> u64 {
        self.cache_tokens.unwrap_or_else(|| u64::from(self.context_length) * u64::from(self.sequences))
    }

    /// Returns the number of layers in one full round around the ring: W of the prima.cpp paper.
    pub fn layers_per_round(&self) -> u32 {
        if !self.kind.is_ring() {
            return self.model.layers;
        }
        self.devices.iter().map(|device| device.window).sum()
    }

    /// Returns the range of layers that a device computes in a round; devices, rounds and layers are counted from 0.
    /// The range may be empty. In a `tensor` plan the range of round 0 has all layers.
    pub fn window(&self, device: usize, round: u32) -> Range<u32> {
        if !self.kind.is_ring() {
            return 0..if round == 0 { self.model.layers } else { 0 };
        }
        let before: u32 = self.devices[..device].iter().map(|device| device.window).sum();
        let start = (round * self.layers_per_round() + before).min(self.model.layers);
        start..(start + self.devices[device].window).min(self.model.layers)
    }

    /// Returns the layers of [`Plan::window`] that are on the GPU, which are the first layers of the window.
    pub fn gpu_window(&self, device: usize, round: u32) -> Range<u32> {
        let window = self.window(device, round);
        window.start..(window.start + self.devices[device].gpu_layers).min(window.end)
    }

    /// Returns the non-empty windows of a device, in the order of rounds.
    pub fn windows(&self, device: usize) -> Vec<Range<u32>> {
        (0..self.rounds).map(|round| self.window(device, round)).filter(|window| !window.is_empty()).collect()
    }

    /// Returns the digest of the plan's YAML text.
    pub fn digest(&self) -> String {
        crate::digest::digest_text(&self.to_yaml())
    }

    /// Returns the reason why the plan can be simulated but not executed; `None` if it can be executed.
    pub fn simulation_only_reason(&self) -> Option<String> {
        let why = if self.kind.is_ring() {
            let device = self.devices.iter().find(|device| device.residency.uses_anonymous_memory())?;
            format!("device `{}` has `{}` residency", device.name, device.residency.policy)
        } else {
            "it slices every layer over all devices (`kind: tensor`)".to_owned()
        };
        let strategy = &self.planner.strategy;
        Some(format!(
            "a plan of `{strategy}` can only be simulated, because {why}; plan with another strategy, such \
             as `--strategy overlap`"
        ))
    }

    /// Returns the index of the device named `name`; `None` if the plan has no such device.
    pub fn device_index(&self, name: &str) -> Option<usize> {
        self.devices.iter().position(|device| device.name == name)
    }
}

impl Document for Plan {
    const SCHEMA: &'static str = "plan/1";

    fn validate(&self) -> Result<(), DocumentError> {
        let reject = |what: String| Err(DocumentError::invalid_document(what));
        if self.devices.is_empty() {
            return reject("`devices` is empty: a plan needs at least the head device".into());
        }
        if self.devices.len() > MAX_DEVICES || self.model.layers > MAX_LAYERS {
            return reject(format!(
                "the plan has {} devices and {} layers: it may have at most {MAX_DEVICES} devices and \
                 {MAX_LAYERS} layers",
                self.devices.len(),
                self.model.layers
            ));
        }
        if !self.kind.is_ring() && self.activation_format != ActivationFormat::default() {
            return reject(
                "`activations: f16` is only for rings: remove it and set `kind.tensor.values`".into(),
            );
        }
        if let Some(digests) = &self.model.weight_digests {
            digests.validate(self.model.layers)?;
        }
        let mut names = BTreeSet::new();
        for (index, device) in self.devices.iter().enumerate() {
            let name = &device.name;
            if name.is_empty() {
                return reject(format!("devices[{index}]: `name` is empty: give the device a name"));
            }
            if !names.insert(name) {
                return reject(format!("devices[{index}]: the name `{name}` is used twice: rename a device"));
            }
            let place = format!("devices[{index}] `{name}`");
            if (device.role == Role::Head) != (index == 0) {
                let rule =
                    if index == 0 { "the first device must have" } else { "only the first device can have" };
                return reject(format!("{place}: {rule} `role: head`"));
            }
            if (device.role == Role::Relay) != (device.window == 0) && device.role != Role::Head {
                let rule = if device.role == Role::Relay {
                    "relay must have `window: 0`"
                } else {
                    "worker needs at least one layer"
                };
                return reject(format!("{place}: `window` is {}, but a {rule}", device.window));
            }
            device.residency.validate(&format!("{place}: `residency`"))?;
            let (window, gpu, layers) = (device.window, device.gpu_layers, self.model.layers);
            if gpu > 0 && !self.kv_cache_format.is_supported_on_gpus() {
                let format = self.kv_cache_format.format();
                let rule = "set `kv_cache: f16`, or `gpu_layers: 0`";
                return reject(format!("{place}: GPU layers cannot have a KV cache in {format}: {rule}"));
            }
            if gpu > window {
                let rule = format!("more than the `window` of {window}: lower `gpu_layers`");
                return reject(format!("{place}: `gpu_layers` is {gpu}, {rule}"));
            }
            if window > layers {
                let rule = format!("more than the model's {layers} layers: lower `window`");
                return reject(format!("{place}: `window` is {window}, {rule}"));
            }
        }
        let head = &self.devices[0];
        if self.output_processor == Processor::Gpu && (head.window == 0 || head.gpu_layers < head.window) {
            return reject(format!(
                "`output: gpu` needs all layers of the head device on its GPU, but the GPU of `{}` has {} of {} layers: \
                 raise `gpu_layers` of this device, or set `output: cpu`",
                head.name, head.gpu_layers, head.window
            ));
        }
        match &self.kind {
            PlanKind::Ring => self.validate_cover(),
            PlanKind::Tensor(tensor) => {
                tensor.validate(self)?;
                self.validate_context()
            }
        }
    }
}

/// Maximum number of devices in a plan: more than in any home, and so few that products of counts do not overflow.
const MAX_DEVICES: usize = 1024;
/// Maximum number of layers of a model, an order of magnitude more than the deepest model has.
const MAX_LAYERS: u32 = 10_000;

impl Plan {
    fn validate_cover(&self) -> Result<(), DocumentError> {
        let reject = |what: String| Err(DocumentError::invalid_document(what));
        let (layers, ring, rounds) = (self.model.layers, self.layers_per_round(), self.rounds);
        if layers == 0 || ring == 0 {
            return reject("no device has a layer: raise the `window` of a device".into());
        }
        let needed = layers.div_ceil(ring);
        if rounds != needed {
            let covered = (u64::from(rounds) * u64::from(ring)).min(u64::from(layers));
            return reject(format!(
                "the windows add up to {ring} layers per round, so {rounds} rounds cover {covered} of the model's \
                 {layers} layers: set `rounds: {needed}` or change the windows"
            ));
        }
        let mut devices = self.devices.iter().enumerate();
        let idle = devices.find(|(index, it)| it.window > 0 && self.window(*index, 0).is_empty());
        if let Some((index, PlannedDevice { name, .. })) = idle {
            return reject(format!(
                "devices[{index}] `{name}` gets no layer, because the windows before it cover all {layers} \
                 layers: make them smaller, or remove the device"
            ));
        }
        let sliding = self.devices.iter().find(|device| device.residency.policy == Residency::Sliding);
        if let Some(PlannedDevice { name, .. }) = sliding {
            return reject(format!(
                "device `{name}`: `residency: sliding` is for `kind: tensor`; in a ring use another residency"
            ));
        }
        self.validate_context()
    }

    fn validate_context(&self) -> Result<(), DocumentError> {
        let reject = |what: &str| Err(DocumentError::invalid_document(what));
        if self.context_length == 0 {
            return reject("`context` is 0: it must be at least the prompt length");
        }
        if self.model.layers == 0 {
            return reject("`model.layers` is 0: give the number of layers of the model");
        }
        validate_sequences("sequences", self.sequences, self.context_length)?;
        let whole = u64::from(self.context_length) * u64::from(self.sequences);
        let Some(tokens) = self.cache_tokens else { return Ok(()) };
        if tokens < u64::from(self.context_length) || tokens > whole {
            return reject(
                "`cache_tokens` must be at least `context`, and at most `context` times `sequences`",
            );
        }
        let has_own_caches =
            self.draft_model.is_some() || self.devices.iter().any(|device| device.gpu_layers > 0);
        if tokens < whole && has_own_caches {
            return reject(
                "`cache_tokens` is less than `context` times `sequences`, but a draft model and layers on a GPU \
                 need caches for all: leave it out",
            );
        }
        Ok(())
    }
}
