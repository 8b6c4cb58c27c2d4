//! Residency: the policy that decides which weights of a device stay in memory, and its options.
//!
//! A device reads the weights of its layers once per token. If these weights are larger than memory, a page cache that
//! evicts the least recently used pages reads all of them from disk for every token. A scenario sets a policy for all
//! devices or for each device. The plan passes the policy to simulator and executor.
//!
//! [`Residency::Pinned`] and [`Residency::Sliding`] are policies of other systems, used only by their planners:
//! these systems copy weights into anonymous memory, which the operating system cannot drop, and may convert them.
//!
//! Not here: how pages are read and evicted, and which pieces a managed device keeps (`hearth_core::residency`).

use hearth_profiles::document::DocumentError;
use hearth_profiles::{Bytes, Format};
use schemars::{JsonSchema, Schema, json_schema};
use serde::de::IntoDeserializer;
use serde::de::value::Error;
use serde::{Deserialize, Serialize};

use crate::editor::allow_string;
use crate::shorthand::map_or_string;

/// The policy that decides which weights stay in memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Residency {
    /// The operating system evicts pages. The device requests the next window (`madvise`) in chunks that the kernel
    /// reads completely.
    #[default]
    Os,
    /// The operating system evicts pages. A helper thread reads the next window into memory, up to `prefetch_budget`.
    Windowed,
    /// The device itself evicts pieces of weights. It keeps a set of pieces in memory; the other pieces are read
    /// ahead into a buffer and evicted after use.
    Managed,
    /// Nothing is evicted: the weights are copied into anonymous memory. Simulated only.
    Pinned,
    /// The device keeps a sliding window of blocks in anonymous memory and loads the next blocks ahead of their use
    /// (TPI-LLM paper). Simulated only.
    Sliding,
}

impl std::fmt::Display for Residency {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        self.serialize(f)
    }
}

/// A policy by which experts are evicted from a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum EvictionPolicy {
    Lru,
    Lfu,
    LayerLru,
    LayerLfu,
    NextUse,
    Belady,
}

impl EvictionPolicy {
    /// All policies with their names.
    pub const ALL: [(&'static str, EvictionPolicy); 6] = [
        ("lru", Self::Lru),
        ("lfu", Self::Lfu),
        ("layer-lru", Self::LayerLru),
        ("layer-lfu", Self::LayerLfu),
        ("next-use", Self::NextUse),
        ("belady", Self::Belady),
    ];

    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(_, policy)| *policy == self).expect("all policies").0
    }
}

/// The residency policy of a device and its options. A document may give the policy alone: `residency: managed`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, remote = "Self")]
#[schemars(!remote, transform = or_policy)]
pub struct ResidencyOptions {
    #[serde(default)]
    pub policy: Residency,
    /// With `os` or `windowed`: whether the next window is prefetched. `managed` always prefetches.
    #[serde(default = "default_prefetch", skip_serializing_if = "is_yes")]
    pub prefetch: bool,
    /// With `os` or `windowed`: the maximum number of bytes of the next window to prefetch; the whole window if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefetch_budget: Option<Bytes>,
    /// With `os`: whether the next window is requested with one `madvise` call, as in the implementation of the
    /// prima.cpp paper. The kernel then reads only one read-ahead window. Used for comparisons.
    #[serde(rename = "one_call", default, skip_serializing_if = "std::ops::Not::not")]
    pub prefetch_in_one_call: bool,
    /// With `os` or `windowed`: whether a window is evicted after its computation. `managed` always evicts the pieces
    /// that it does not keep.
    #[serde(rename = "release", default, skip_serializing_if = "std::ops::Not::not")]
    pub evict_after_use: bool,
    /// With `managed`: the size of the buffer for streamed pieces of weights; 8 MiB if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stream_buffer: Option<Bytes>,
    /// With `managed`: the maximum size of the weights that stay in memory; the available memory if absent.
    #[serde(rename = "kept", default, skip_serializing_if = "Option::is_none")]
    pub kept_set_limit: Option<Bytes>,
    /// With `managed` and a mixture of experts: which expert is evicted first; `next-use` if absent.
    #[serde(rename = "experts", default, skip_serializing_if = "Option::is_none")]
    pub expert_eviction: Option<EvictionPolicy>,
    /// With `pinned` or `sliding`: the format to which matrices are converted; no conversion if absent.
    #[serde(rename = "weights_as", default, skip_serializing_if = "Option::is_none")]
    pub conversion_format: Option<Format>,
    /// With `pinned`: the format to which layers on the GPU are converted; a copy in the format `weights_as` stays in
    /// main memory. If absent, the layers are stored only in GPU memory.
    #[serde(rename = "gpu_weights_as", default, skip_serializing_if = "Option::is_none")]
    pub gpu_conversion_format: Option<Format>,
    /// With `sliding`: the number of blocks in memory at the same time; a layer has two blocks.
    #[serde(rename = "blocks", default, skip_serializing_if = "Option::is_none")]
    pub resident_blocks: Option<u32>,
}

/// Default size of a managed device's stream buffer: eight pieces, so that some are being read while others are in use.
/// source: assumed
pub const DEFAULT_STREAM_BUFFER: Bytes = Bytes::from_mib(8);

/// Minimum size of the stream buffer of a managed device: eight pieces of 64 KiB.
const MIN_STREAM_BUFFER: Bytes = Bytes(512 << 10);

/// Maximum size of the stream buffer, larger than the memory of any device.
const MAX_STREAM_BUFFER: Bytes = Bytes(1 << 40);

/// Maximum number of blocks in memory under `sliding`, larger than the number of blocks of any model.
const MAX_BLOCKS: u32 = 20_000;

/// Maximum size of a piece of weights: small relative to the stream buffer, and so large that reading a piece takes
/// long relative to the latency of a disk.
const MAX_PIECE_BYTES: u64 = 1 << 20;

/// Extends the JSON Schema of the options such that a policy name may replace the map.
fn or_policy(map: &mut Schema) {
    allow_string(map, &json_schema!({"enum": ["os", "windowed", "managed", "pinned", "sliding"]}));
}

fn default_prefetch() -> bool {
    true
}

#[allow(clippy::trivially_copy_pass_by_ref)] // serde's signature
fn is_yes(value: &bool) -> bool {
    *value
}

map_or_string!(
    ResidencyOptions,
    "a policy (`os`, `windowed`, `managed`) or a map such as `{policy: managed}`"
);

impl Default for ResidencyOptions {
    fn default() -> Self {
        Self::with_policy(Residency::Os)
    }
}

impl ResidencyOptions {
    fn from_text(policy: &str) -> Result<Self, Error> {
        Residency::deserialize(policy.into_deserializer()).map(Self::with_policy)
    }

    /// Creates the default options of a policy.
    pub const fn with_policy(policy: Residency) -> Self {
        Self {
            policy,
            prefetch: true,
            prefetch_budget: None,
            prefetch_in_one_call: false,
            evict_after_use: false,
            stream_buffer: None,
            kept_set_limit: None,
            expert_eviction: None,
            conversion_format: None,
            gpu_conversion_format: None,
            resident_blocks: None,
        }
    }

    /// Creates the options for weights copied into anonymous memory, and converted to `weights_as` if it is given.
    pub const fn pinned(weights_as: Option<Format>) -> Self {
        Self { conversion_format: weights_as, ..Self::with_policy(Residency::Pinned) }
    }

    /// Returns the options without prefetch.
    #[must_use]
    pub const fn without_prefetch(self) -> Self {
        Self { prefetch: false, ..self }
    }

    pub fn prefetches(&self) -> bool {
        match self.policy {
            Residency::Os | Residency::Windowed => self.prefetch && self.prefetch_budget != Some(Bytes::ZERO),
            Residency::Managed => true,
            Residency::Pinned | Residency::Sliding => false,
        }
    }

    /// Returns the maximum number of prefetched bytes: the prefetch budget, or the stream buffer of a managed device.
    /// `None` means the whole next window, or the blocks of a sliding window.
    pub fn max_prefetch(&self) -> Option<Bytes> {
        match self.policy {
            Residency::Managed => Some(self.stream_buffer_bytes()),
            Residency::Sliding => None,
            _ if !self.prefetches() => Some(Bytes::ZERO),
            _ => self.prefetch_budget,
        }
    }

    /// Whether the weights are copied into anonymous memory.
    pub fn uses_anonymous_memory(&self) -> bool {
        matches!(self.policy, Residency::Pinned | Residency::Sliding)
    }

    /// Returns the format to which matrices on the GPU (`on_gpu`) or the CPU are converted; `None` for no conversion.
    pub fn weight_format(&self, on_gpu: bool) -> Option<Format> {
        if on_gpu { self.gpu_conversion_format.or(self.conversion_format) } else { self.conversion_format }
    }

    pub fn evicts_after_use(&self) -> bool {
        self.policy == Residency::Managed || self.evict_after_use
    }

    /// Returns the size of the stream buffer of a managed device: the given size or its default.
    pub fn stream_buffer_bytes(&self) -> Bytes {
        self.stream_buffer.unwrap_or(DEFAULT_STREAM_BUFFER)
    }

    /// Returns how many bytes of weights a device may keep in memory, if it has `weight_bytes` bytes of weights.
    pub fn max_kept_bytes(&self, weight_bytes: u64) -> u64 {
        self.kept_set_limit.map_or(weight_bytes, |kept| kept.0.min(weight_bytes))
    }

    /// Returns the size of a piece, the unit in which weights are kept, streamed and evicted: an eighth of the stream
    /// buffer, so that some pieces are being read while others are in use, but at most 1 MiB; a multiple of 64 KiB.
    pub fn piece_bytes(&self) -> Bytes {
        Bytes((self.stream_buffer_bytes().0 / 8).min(MAX_PIECE_BYTES) >> 16 << 16)
    }

    /// Checks the options in a scenario, in which `pinned` and `sliding` are errors. `place` is the key of the options.
    pub fn validate_in_scenario(&self, place: &str) -> Result<(), DocumentError> {
        if self.uses_anonymous_memory() {
            return Err(DocumentError::invalid_document(format!(
                "{place}: `{}` is only for the strategies of other systems: use `os`, `windowed` or \
                 `managed`, or plan with one of these strategies, such as `--strategy exo`",
                self.policy
            )));
        }
        self.validate(place)
    }

    /// Checks that the options do not contradict each other. `place` is the key of the options in the document.
    pub fn validate(&self, place: &str) -> Result<(), DocumentError> {
        let reject = |what: String| Err(DocumentError::invalid_document(format!("{place}: {what}")));
        let (policy, anonymous) = (self.policy, self.uses_anonymous_memory());
        let [managed, pinned, sliding] =
            [Residency::Managed, Residency::Pinned, Residency::Sliding].map(|other| policy == other);
        let paged = "`os` and `windowed`";
        let misplaced_keys = [
            ("weights_as", self.conversion_format.is_some() && !anonymous, "`pinned` and `sliding`"),
            ("gpu_weights_as", self.gpu_conversion_format.is_some() && !pinned, "`pinned`"),
            ("blocks", self.resident_blocks.is_some() && !sliding, "`sliding`"),
            ("prefetch: false", !self.prefetch && (managed || anonymous), paged),
            ("prefetch_budget", self.prefetch_budget.is_some() && (managed || anonymous), paged),
            ("release", self.evict_after_use && anonymous, paged),
            ("stream_buffer", self.stream_buffer.is_some() && !managed, "`managed`"),
            ("kept", self.kept_set_limit.is_some() && !managed, "`managed`"),
            ("experts", self.expert_eviction.is_some() && !managed, "`managed`"),
        ];
        if let Some((key, _, policies)) = misplaced_keys.into_iter().find(|(_, present, _)| *present) {
            return reject(format!(
                "`{key}` is for {policies}, but the policy is `{policy}`: remove it or change the policy"
            ));
        }
        if sliding && !self.resident_blocks.is_some_and(|blocks| (1..=MAX_BLOCKS).contains(&blocks)) {
            return reject(format!("`sliding` needs `blocks`, from 1 to {MAX_BLOCKS}"));
        }
        if self.prefetch_in_one_call && policy != Residency::Os {
            return reject(format!("`one_call` is for `os`, but the policy is `{policy}`: remove it"));
        }
        if managed && self.evict_after_use {
            return reject("`managed` always evicts weights that it does not keep: remove `release`".into());
        }
        if self.expert_eviction == Some(EvictionPolicy::Belady) {
            return reject("`experts: belady` needs the future, so it is only for `hearth experts`".into());
        }
        let buffer = self.stream_buffer_bytes();
        if !(MIN_STREAM_BUFFER..=MAX_STREAM_BUFFER).contains(&buffer) {
            return reject(format!(
                "`stream_buffer` is {buffer}, but must be {MIN_STREAM_BUFFER} to {MAX_STREAM_BUFFER}"
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policy_name_can_replace_the_map() {
        let read = |text: &str| serde_yaml::from_str::<ResidencyOptions>(text);
        assert_eq!(read("managed").unwrap(), ResidencyOptions::with_policy(Residency::Managed));
        assert_eq!(read("{policy: os, release: true}").unwrap().policy, Residency::Os);
        assert_eq!(read("{}").unwrap(), ResidencyOptions::default());
        assert_eq!(
            read("{policy: managed, experts: lru}").unwrap().expert_eviction,
            Some(EvictionPolicy::Lru)
        );
        let refused = |text: &str| read(text).unwrap().validate("residency").unwrap_err().to_string();
        assert!(refused("{policy: os, experts: lru}").contains("`experts` is for `managed`"));
        assert!(refused("{policy: managed, experts: belady}").contains("needs the future"));
        assert!(read("swap").unwrap_err().to_string().contains("`windowed`"));
        assert!(read("3").unwrap_err().to_string().contains("a policy"));
        assert!(read("{policy: managed, kepd: 1 GiB}").unwrap_err().to_string().contains("kepd"));
        let written = serde_yaml::to_string(&ResidencyOptions::with_policy(Residency::Managed)).unwrap();
        assert_eq!(written, "policy: managed\n");
    }
}
