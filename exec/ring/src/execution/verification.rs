//! Verification of weights: compares the weights that a device uses with their digests in the plan.
//!
//! The model digest in a plan covers only a part of each tensor, so that it takes milliseconds. The digests of the
//! weights cover all bytes: a device that verifies refuses a plan if a bit of its layers is wrong, instead of computing
//! a wrong text. The head also checks the tensors outside the layers.
//!
//! Not here: the computation of the digests and their cache (`hearth_runtime::weights`).

use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use hearth_runtime::UploadProgressReporter;
use hearth_runtime::weights::digest_cache::DigestCache;
use hearth_runtime::weights::digests::WeightPart;
use hearth_schema::Plan;
use hearth_schema::plan::WeightDigests;

use super::model::LocalModel;
use crate::error::{Result, RingError};

/// Bytes that are hashed between two reports to the head.
/// source: assumed; even a disk with 10 MB/s reads them within the minute that the head waits for a report
const REPORT_BYTES: u64 = 64 << 20;

/// Maximum number of damaged layers that an error lists. source: assumed, a line of text
const MAX_LISTED_LAYERS: usize = 8;

/// Receives the number of bytes that were hashed so far and the number to hash.
pub type OnVerificationProgress = Arc<dyn Fn(u64, u64) + Send + Sync>;

/// How a device verifies its weights.
#[derive(Clone, Default)]
pub struct Verification {
    /// Has the digests of files that were hashed before; `None` hashes them each time.
    pub cache: Option<DigestCache>,
    pub on_progress: Option<OnVerificationProgress>,
}

impl fmt::Debug for Verification {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Verification").field("cache", &self.cache).finish_non_exhaustive()
    }
}

impl LocalModel {
    /// Verifies the weights that a device needs for a plan, if this model has a [`Verification`]. Hashing many
    /// gigabytes takes long, so that the progress is reported like that of an upload, and it stops if the weights are no
    /// longer needed.
    pub(super) fn verify(
        &self,
        plan: &Plan,
        device_index: usize,
        threads: usize,
        progress: &UploadProgressReporter,
    ) -> Result<()> {
        let Some(Verification { cache, on_progress }) = &self.verification else { return Ok(()) };
        let expected = check_has_weight_digests(plan)?;
        let outside = (device_index == 0).then_some(WeightPart::OutsideLayers);
        let layers = plan.windows(device_index).into_iter().flatten().map(WeightPart::Layer);
        let parts: Vec<_> = outside.into_iter().chain(layers).collect();
        let reported = AtomicU64::new(0);
        let on_hash = |done: u64, total: u64| {
            if let Some(on_progress) = on_progress {
                on_progress(done, total);
            }
            if done >= reported.load(Ordering::Relaxed) + REPORT_BYTES || done == total {
                reported.store(done, Ordering::Relaxed);
                return progress.report(done, total);
            }
            true
        };
        let damaged = self.weights.find_damaged_parts(&parts, expected, threads, cache.as_ref(), &on_hash)?;
        if damaged.is_empty() {
            return Ok(());
        }
        let files: BTreeSet<&Path> =
            damaged.iter().flat_map(|&part| self.weights.files_of_part(part)).collect();
        let files: Vec<String> = files.into_iter().map(|file| file.display().to_string()).collect();
        Err(RingError::DamagedWeights { parts: describe(&damaged), files: files.join(", ") })
    }
}

/// Returns the digests of the weights in a plan; an error if it has none.
pub fn check_has_weight_digests(plan: &Plan) -> Result<&WeightDigests> {
    plan.model.weight_digests.as_ref().ok_or_else(|| {
        let what = "the weights cannot be verified, because the plan has no digests of the weights";
        RingError::invalid_plan_with_hint(what, "plan again with `--hash-weights`")
    })
}

/// Describes parts of a model in words, such as `layer 3 and the tensors outside the layers`.
fn describe(parts: &[WeightPart]) -> String {
    let layers: Vec<String> = parts
        .iter()
        .filter_map(|part| match part {
            WeightPart::Layer(layer) => Some(layer.to_string()),
            WeightPart::OutsideLayers => None,
        })
        .collect();
    let count = layers.len();
    let layers = match &layers[..] {
        [] => None,
        [layer] => Some(format!("layer {layer}")),
        several if count <= MAX_LISTED_LAYERS => Some(format!("layers {}", several.join(", "))),
        several => Some(format!("{count} layers (the first is {})", several[0])),
    };
    let outside =
        parts.contains(&WeightPart::OutsideLayers).then(|| "the tensors outside the layers".to_owned());
    layers.into_iter().chain(outside).collect::<Vec<_>>().join(" and ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damaged_parts_are_listed_in_words() {
        let layers = |count: u32| (3..3 + count).map(WeightPart::Layer).collect::<Vec<_>>();
        assert_eq!(describe(&layers(1)), "layer 3");
        assert_eq!(describe(&layers(3)), "layers 3, 4, 5");
        assert_eq!(describe(&layers(40)), "40 layers (the first is 3)");
        let both = [vec![WeightPart::OutsideLayers], layers(1)].concat();
        assert_eq!(describe(&both), "layer 3 and the tensors outside the layers");
    }
}
