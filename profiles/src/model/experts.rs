//! Mixtures of experts: feed-forward blocks of which a token uses a part.
//!
//! A router chooses a few experts for each token, so a device must have all experts in memory but reads only those
//! that are chosen. Planners and simulator count all bytes of a layer for memory, and [`Experts::share_read`] of the
//! experts' bytes for the time of a pass.

use super::shape::{ModelShape, ModelShapeError, check_ranges};

/// The largest width of all experts of a layer together, so that the bytes of a model cannot overflow.
const MAX_WIDTH: u64 = 1 << 24;

/// The experts of the feed-forward blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Experts {
    /// Number of experts of a layer.
    pub count: u32,
    /// Number of experts that the router chooses for a token.
    pub used: u32,
    /// Width of one expert, in elements.
    pub feed_forward_length: u32,
    /// Width of the block that every token uses besides its experts, in elements; 0 if there is none.
    pub shared_feed_forward_length: u32,
    /// Number of layers at the beginning of the model that have a dense block instead of experts.
    pub dense_layers: u32,
}

impl Experts {
    pub(super) fn check(&self, shape: &ModelShape) -> Result<(), ModelShapeError> {
        check_ranges(&[
            ("experts.count", self.count, 1 << 12),
            ("experts.used", self.used, self.count),
            ("experts.feed_forward", self.feed_forward_length, 1 << 20),
            ("experts.shared_feed_forward", self.shared_feed_forward_length.max(1), 1 << 20),
            ("experts.dense_layers", self.dense_layers.max(1), shape.layers.0),
        ])?;
        let width = u64::from(self.count) * u64::from(self.feed_forward_length);
        if width > MAX_WIDTH {
            let what = format!(
                "{} experts of {} elements are {width} together: they may be at most {MAX_WIDTH}",
                self.count, self.feed_forward_length
            );
            return Err(ModelShapeError { field: "experts.count", what });
        }
        Ok(())
    }

    /// Returns the share of the experts' bytes that a pass of `tokens` tokens reads: the expected number of different
    /// experts, divided by their number.
    ///
    /// Deviation: every token chooses at random, independently of the other tokens. Real routers prefer some experts
    /// and repeat themselves, so that batches read less.
    pub fn share_read(&self, tokens: u32) -> f64 {
        1.0 - (1.0 - self.share_used()).powf(f64::from(tokens))
    }

    /// Returns the share of the experts that one token uses.
    pub fn share_used(&self) -> f64 {
        f64::from(self.used) / f64::from(self.count.max(1))
    }
}

/// Returns whether a tensor has the matrices of all experts of a layer, one expert after the other. Their biases are
/// small and stay in memory, as those of other matrices.
pub(super) fn is_of_experts(tensor: &str) -> bool {
    tensor.ends_with("_exps.weight")
}

/// Returns whether a tensor is the matrix of a router, which is never quantised.
pub(super) fn is_router(tensor: &str) -> bool {
    tensor.ends_with("ffn_gate_inp.weight")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_of_experts_cannot_overflow() {
        let shape = crate::model::shape::tests::llama_8b();
        let experts = Experts {
            count: 1 << 12,
            used: 2,
            feed_forward_length: 1 << 20,
            shared_feed_forward_length: 0,
            dense_layers: 0,
        };
        let error = experts.check(&shape).unwrap_err();
        assert!(error.what.contains("4294967296 together"), "{error}");
        let largest = ModelShape {
            layers: crate::Layers(1 << 12),
            embedding_length: 1 << 18,
            experts: Some(Experts { feed_forward_length: 1 << 12, ..experts }),
            ..shape
        };
        let f32 = crate::model::Quant::Pure(crate::Format::F32);
        assert!(crate::model::ModelProfile::from_shape("largest", largest, f32).is_ok());
    }

    #[test]
    fn batches_read_more_experts() {
        let experts = Experts {
            count: 128,
            used: 8,
            feed_forward_length: 768,
            shared_feed_forward_length: 0,
            dense_layers: 0,
        };
        assert!((experts.share_read(1) - 1.0 / 16.0).abs() < 1e-12);
        // Two tokens: 1/16 + 15/16 of 1/16.
        assert!((experts.share_read(2) - 31.0 / 256.0).abs() < 1e-12);
        assert!(experts.share_read(512) > 0.999_999);
        assert_eq!(Experts { used: 128, ..experts }.share_read(1), 1.0);
    }
}
