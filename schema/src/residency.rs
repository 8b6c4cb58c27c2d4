//! Residency: which policy decides the weights of a device that stay in memory.
//!
//! A device reads its share of the weights once per token. If the share is larger than memory, a page cache that evicts
//! the least recently used pages reads all of it again for every token. A scenario chooses a policy for all devices
//! or for each; the plan carries it to simulator and executor, which take the rules from here:
//!
//! - [`Residency::Os`], [`Residency::Windowed`]: the system evicts, advised of what comes next;
//! - [`Residency::Managed`]: the device keeps the pieces that memory has room for and streams the others through a
//!   bounded buffer (`hearth_core::residency`).
//!
//! [`Residency::Pinned`] and [`Residency::Sliding`] are other systems' and are simulated only: they read weights into
//! memory of their own, which the system cannot evict, and may convert them. Only the planners of these systems use
//! them.
//!
//! Not here: how pages are read and evicted.

use hearth_profiles::document::DocumentError;
use hearth_profiles::{Bytes, Format};
use schemars::{JsonSchema, Schema, json_schema};
use serde::de::value::MapAccessDeserializer;
use serde::de::{IntoDeserializer, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::editor::or_text;

/// The policy that decides which weights stay in memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Residency {
    /// The operating system, advised of the next window in chunks it honours.
    #[default]
    Os,
    /// The operating system, with a helper thread that populates the next window within a budget.
    Windowed,
    /// The device: it never evicts the kept set; the rest streams through a buffer, is read ahead and evicted after
    /// use.
    Managed,
    /// No eviction: the weights are copied into memory of the device's own. Simulated only.
    Pinned,
    /// The device: some blocks of layers pass through memory of its own, loaded ahead of their turn as in TPI-LLM.
    /// Simulated only.
    Sliding,
}

impl std::fmt::Display for Residency {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.pad(match self {
            Residency::Os => "os",
            Residency::Windowed => "windowed",
            Residency::Managed => "managed",
            Residency::Pinned => "pinned",
            Residency::Sliding => "sliding",
        })
    }
}

/// How a device keeps its weights. A document may give the policy alone: `residency: managed`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, remote = "Self")]
#[schemars(!remote, transform = or_policy)]
pub struct ResidencyOptions {
    /// The policy.
    #[serde(default)]
    pub policy: Residency,
    /// `os`, `windowed`: whether the next window is read ahead of its turn. `managed` always does.
    #[serde(default = "default_prefetch", skip_serializing_if = "is_yes")]
    pub prefetch: bool,
    /// `os`, `windowed`: at most this much of the next window, from its front; the whole window if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefetch_budget: Option<Bytes>,
    /// `os`: whether the next window is advised in one call, as the paper's implementation does. The kernel cuts
    /// it to one read-ahead window, which shows what that costs.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub one_call: bool,
    /// `os`, `windowed`: whether a window is evicted when it has been computed. `managed` evicts what
    /// it does not keep.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub release: bool,
    /// `managed`: memory that the streamed pieces pass through; [`STREAM_BUFFER`] if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stream_buffer: Option<Bytes>,
    /// `managed`: the kept set is at most this large; absent, as large as memory has room for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kept: Option<Bytes>,
    /// `pinned`, `sliding`: matrices are converted to this format; absent, they stay as they are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weights_as: Option<Format>,
    /// `pinned`: layers on the GPU are converted to this format there, and a copy in `weights_as` stays in main
    /// memory; absent, the GPU alone holds them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_weights_as: Option<Format>,
    /// `sliding`: the number of blocks in memory at once; a layer has two.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blocks: Option<u32>,
}

/// The usual stream buffer: a few pieces under way while others are in use.
/// source: assumed
pub const STREAM_BUFFER: Bytes = Bytes::mib(8);

/// The smallest stream buffer: eight pieces of 64 KiB.
const MIN_STREAM_BUFFER: Bytes = Bytes(512 << 10);

/// More than any device's memory.
const MAX_STREAM_BUFFER: Bytes = Bytes(1 << 40);

/// More blocks than any model has.
const MAX_BLOCKS: u32 = 20_000;

/// The largest piece: short against a buffer, long against a disk's latency.
const MAX_PIECE_BYTES: u64 = 1 << 20;

/// Lets a policy alone stand for the whole.
fn or_policy(map: &mut Schema) {
    or_text(map, &json_schema!({"enum": ["os", "windowed", "managed", "pinned", "sliding"]}));
}

fn default_prefetch() -> bool {
    true
}

#[allow(clippy::trivially_copy_pass_by_ref)] // serde's signature
fn is_yes(value: &bool) -> bool {
    *value
}

impl Serialize for ResidencyOptions {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        ResidencyOptions::serialize(self, serializer)
    }
}

impl<'de> Deserialize<'de> for ResidencyOptions {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct WordOrMap;
        impl<'de> Visitor<'de> for WordOrMap {
            type Value = ResidencyOptions;

            fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
                f.write_str("a policy (`os`, `windowed`, `managed`) or a map such as `{policy: managed}`")
            }

            fn visit_str<E: serde::de::Error>(self, word: &str) -> Result<Self::Value, E> {
                Residency::deserialize(word.into_deserializer()).map(ResidencyOptions::of)
            }

            fn visit_map<M: MapAccess<'de>>(self, map: M) -> Result<Self::Value, M::Error> {
                ResidencyOptions::deserialize(MapAccessDeserializer::new(map))
            }
        }
        deserializer.deserialize_any(WordOrMap)
    }
}

impl Default for ResidencyOptions {
    fn default() -> Self {
        Self::of(Residency::Os)
    }
}

impl ResidencyOptions {
    /// A policy, and everything else as usual.
    pub const fn of(policy: Residency) -> Self {
        Self {
            policy,
            prefetch: true,
            prefetch_budget: None,
            one_call: false,
            release: false,
            stream_buffer: None,
            kept: None,
            weights_as: None,
            gpu_weights_as: None,
            blocks: None,
        }
    }

    /// Weights in memory of the device's own, in another format if one is given.
    pub const fn pinned(weights_as: Option<Format>) -> Self {
        Self { weights_as, ..Self::of(Residency::Pinned) }
    }

    /// The same without reading ahead.
    #[must_use]
    pub const fn without_prefetch(self) -> Self {
        Self { prefetch: false, ..self }
    }

    /// Whether anything is read ahead.
    pub fn prefetches(&self) -> bool {
        match self.policy {
            Residency::Os | Residency::Windowed => self.prefetch && self.prefetch_budget != Some(Bytes::ZERO),
            Residency::Managed => true,
            Residency::Pinned | Residency::Sliding => false,
        }
    }

    /// The bytes that may be read ahead: the prefetch budget, or the stream buffer of a managed device. `None` is the
    /// whole next window, or blocks of layers.
    pub fn budget(&self) -> Option<Bytes> {
        match self.policy {
            Residency::Managed => Some(self.buffer()),
            Residency::Sliding => None,
            _ if !self.prefetches() => Some(Bytes::ZERO),
            _ => self.prefetch_budget,
        }
    }

    /// Whether the weights are copied into memory of the device's own.
    pub fn is_pinned(&self) -> bool {
        matches!(self.policy, Residency::Pinned | Residency::Sliding)
    }

    /// The format that matrices are converted to on one of the processors.
    pub fn format_on(&self, gpu: bool) -> Option<Format> {
        if gpu { self.gpu_weights_as.or(self.weights_as) } else { self.weights_as }
    }

    /// Whether weights are evicted after use.
    pub fn releases(&self) -> bool {
        self.policy == Residency::Managed || self.release
    }

    /// The size of the stream buffer.
    pub fn buffer(&self) -> Bytes {
        self.stream_buffer.unwrap_or(STREAM_BUFFER)
    }

    /// The largest part of a share that the options let stay.
    pub fn max_kept(&self, share: u64) -> u64 {
        self.kept.map_or(share, |kept| kept.0.min(share))
    }

    /// The unit in which weights are kept, streamed and evicted: an eighth of the buffer, so that some pieces
    /// are in flight while others are in use, in whole steps of 64 KiB.
    pub fn piece(&self) -> Bytes {
        Bytes((self.buffer().0 / 8).min(MAX_PIECE_BYTES) >> 16 << 16)
    }

    /// Checks the options of a scenario, which cannot have the policies of other systems.
    pub fn validate_requested(&self, place: &str) -> Result<(), DocumentError> {
        if self.is_pinned() {
            return Err(DocumentError::invalid(format!(
                "{place}: `{}` belongs to the plans of other systems: use `os`, `windowed` or `managed`, or plan with \
                 `--strategy exo` or another of them",
                self.policy
            )));
        }
        self.validate(place)
    }

    /// Checks that options agree. `place` is the key in the document.
    pub fn validate(&self, place: &str) -> Result<(), DocumentError> {
        self.validate_own_memory(place)?;
        let managed = self.policy == Residency::Managed;
        let stray = if managed {
            [("prefetch: false", !self.prefetch), ("prefetch_budget", self.prefetch_budget.is_some())]
        } else {
            [("stream_buffer", self.stream_buffer.is_some()), ("kept", self.kept.is_some())]
        };
        if let Some((name, _)) = stray.into_iter().find(|(_, present)| *present) {
            let (policies, other) = if managed {
                ("`os` and `windowed`", "`managed`")
            } else {
                ("`managed`", "`os` or `windowed`")
            };
            return Err(DocumentError::invalid(format!(
                "{place}: `{name}` is for {policies} and the policy is {other}: remove it or change the policy"
            )));
        }
        if self.one_call && self.policy != Residency::Os {
            return Err(DocumentError::invalid(format!("{place}: `one_call` is for `os`: remove it")));
        }
        if managed && self.release {
            return Err(DocumentError::invalid(format!(
                "{place}: `managed` always evicts weights that it does not keep: remove `release`"
            )));
        }
        if self.buffer() < MIN_STREAM_BUFFER || self.buffer() > MAX_STREAM_BUFFER {
            return Err(DocumentError::invalid(format!(
                "{place}: `stream_buffer` is {}: give {MIN_STREAM_BUFFER}, so that a few pieces can be under way, to \
                 {MAX_STREAM_BUFFER}",
                self.buffer()
            )));
        }
        Ok(())
    }

    /// Checks that keys and policies with memory of their own belong together.
    fn validate_own_memory(&self, place: &str) -> Result<(), DocumentError> {
        let refuse = |what: String| Err(DocumentError::invalid(format!("{place}: {what}")));
        let (pinned, sliding) = (self.policy == Residency::Pinned, self.policy == Residency::Sliding);
        let stray = [
            ("weights_as", self.weights_as.is_some() && !self.is_pinned(), "`pinned` and `sliding`"),
            ("gpu_weights_as", self.gpu_weights_as.is_some() && !pinned, "`pinned`"),
            ("blocks", self.blocks.is_some() && !sliding, "`sliding`"),
            ("prefetch", !self.prefetch && self.is_pinned(), "`os` and `windowed`"),
            ("prefetch_budget", self.prefetch_budget.is_some() && self.is_pinned(), "`os` and `windowed`"),
            ("release", self.release && self.is_pinned(), "`os` and `windowed`"),
        ];
        if let Some((key, _, policies)) = stray.into_iter().find(|(_, present, _)| *present) {
            return refuse(format!(
                "`{key}` is for {policies} and the policy is `{}`: remove it",
                self.policy
            ));
        }
        if sliding && !self.blocks.is_some_and(|blocks| (1..=MAX_BLOCKS).contains(&blocks)) {
            return refuse(format!("`sliding` needs `blocks`, from 1 to {MAX_BLOCKS}"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_alone_stands_for_the_whole() {
        let read = |text: &str| serde_yaml::from_str::<ResidencyOptions>(text);
        assert_eq!(read("managed").unwrap(), ResidencyOptions::of(Residency::Managed));
        assert_eq!(read("{policy: os, release: true}").unwrap().policy, Residency::Os);
        assert_eq!(read("{}").unwrap(), ResidencyOptions::default());
        assert!(read("swap").unwrap_err().to_string().contains("`windowed`"));
        assert!(read("3").unwrap_err().to_string().contains("a policy"));
        assert!(read("{policy: managed, kepd: 1 GiB}").unwrap_err().to_string().contains("kepd"));
        let written = serde_yaml::to_string(&ResidencyOptions::of(Residency::Managed)).unwrap();
        assert_eq!(written, "policy: managed\n");
    }
}
