//! Bytes and floating-point operations of a set of tensors, by weight format.
//!
//! The compute time of a device is the sum over formats q of the operations `f_q` divided by the speed `s_q` (prima.cpp
//! paper). The operations for one token are two per weight of a matrix (multiply and add), four per element of a
//! normalisation (square, add, scale, multiply by the weight), and one per element of a bias.
//!
//! Not here: attention, whose operations depend on the context (`TokenMixer::flops`), and the other
//! elementwise operations (RoPE, activation function, residual), which are less than a thousandth of the operations of
//! the matrices.

use std::collections::BTreeMap;

use super::experts::is_of_experts;
use super::shape::ModelShape;
use super::token_mixer::TokenMixer;
use crate::format::Format;
use crate::gguf::layer_of_tensor;
use crate::units::{Bytes, Flops};

/// Bytes and floating-point operations of all tensors of one format in a group.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct FormatTotals {
    pub bytes: Bytes,
    /// The part of `bytes` that belongs to the experts of a mixture, of which a token uses only some.
    pub expert_bytes: Bytes,
    /// Floating-point operations for one token.
    pub flops: Flops,
}

impl FormatTotals {
    /// Returns the bytes that a computation reads if it uses this share of the experts.
    pub fn bytes_read(&self, share_of_experts: f64) -> f64 {
        self.bytes.as_f64() - self.expert_bytes.as_f64() * (1.0 - share_of_experts)
    }
}

/// Bytes and floating-point operations of a set of tensors, summed by format.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct TensorGroup {
    shares: BTreeMap<Format, FormatTotals>,
}

impl TensorGroup {
    pub fn add(&mut self, format: Format, bytes: Bytes, flops: Flops) {
        self.add_totals(format, FormatTotals { bytes, expert_bytes: Bytes::ZERO, flops });
    }

    pub fn add_totals(&mut self, format: Format, totals: FormatTotals) {
        let share = self.shares.entry(format).or_default();
        share.bytes += totals.bytes;
        share.expert_bytes += totals.expert_bytes;
        share.flops += totals.flops;
    }

    /// Iterates over all formats in the group and their totals, ordered by format.
    pub fn totals_by_format(&self) -> impl Iterator<Item = (Format, FormatTotals)> {
        self.shares.iter().map(|(&format, &share)| (format, share))
    }

    pub fn format_totals(&self, format: Format) -> FormatTotals {
        self.shares.get(&format).copied().unwrap_or_default()
    }

    pub fn bytes(&self) -> Bytes {
        self.shares.values().map(|share| share.bytes).sum()
    }

    pub fn expert_bytes(&self) -> Bytes {
        self.shares.values().map(|share| share.expert_bytes).sum()
    }

    /// Returns the total operations for one token.
    pub fn flops(&self) -> Flops {
        self.shares.values().map(|share| share.flops).sum()
    }

    /// Returns the mean of several groups, with bytes rounded to the nearest integer. The mean of no groups is empty.
    pub fn mean(groups: &[TensorGroup]) -> TensorGroup {
        let mut mean = TensorGroup::default();
        for (format, share) in groups.iter().flat_map(TensorGroup::totals_by_format) {
            mean.add_totals(format, share);
        }
        let count = groups.len().max(1) as u64;
        for share in mean.shares.values_mut() {
            share.bytes = Bytes((share.bytes.0 + count / 2) / count);
            share.expert_bytes = Bytes((share.expert_bytes.0 + count / 2) / count);
            share.flops = share.flops / count as f64;
        }
        mean
    }
}

/// Returns the operations of a tensor for one token, from the tensor's name and number of elements.
pub(crate) fn tensor_flops(name: &str, elements: u64, shape: &ModelShape) -> Flops {
    let used = match shape.experts {
        Some(experts) if is_of_experts(name) => experts.share_used(),
        _ => 1.0,
    };
    let [heads, kv_heads] = match layer_of_tensor(name).map(|layer| shape.mixer(layer)) {
        Some(TokenMixer::Attention(attention)) => [attention.heads, attention.kv_heads],
        Some(TokenMixer::DeltaNet(net)) => [net.value_heads; 2],
        None => [1; 2],
    };
    let each = if name.ends_with("attn_q_norm.weight") || name.ends_with("ssm_norm.weight") {
        4 * u64::from(heads)
    } else if name.ends_with("attn_k_norm.weight") {
        4 * u64::from(kv_heads)
    } else if name.ends_with("norm.weight") {
        4
    } else if matches!(name.rsplit('.').next(), Some("bias" | "ssm_a")) {
        1
    } else {
        2
    };
    Flops((each * elements) as f64 * used)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::shape::tests::llama_8b;

    #[test]
    fn group_mean_by_format() {
        let mut light = TensorGroup::default();
        light.add(Format::Q4K, Bytes(144), Flops(512.0));
        let mut heavy = light.clone();
        heavy.add(Format::Q6K, Bytes(210), Flops(512.0));
        assert_eq!(heavy.bytes(), Bytes(354));
        assert_eq!(heavy.flops(), Flops(1024.0));
        let mean = TensorGroup::mean(&[light, heavy]);
        // 210 / 2 and 144 * 2 / 2.
        let totals = |bytes, flops| FormatTotals {
            bytes: Bytes(bytes),
            expert_bytes: Bytes::ZERO,
            flops: Flops(flops),
        };
        assert_eq!(mean.format_totals(Format::Q6K), totals(105, 256.0));
        assert_eq!(mean.format_totals(Format::Q4K), totals(144, 512.0));
        assert_eq!(mean.format_totals(Format::F16), FormatTotals::default());
    }

    #[test]
    fn norms_cost_four_operations_an_element() {
        let shape = llama_8b();
        assert_eq!(tensor_flops("blk.0.attn_norm.weight", 4096, &shape), Flops(16384.0));
        // 128 weights, used for each of 32 heads.
        assert_eq!(tensor_flops("blk.0.attn_q_norm.weight", 128, &shape), Flops(16384.0));
        assert_eq!(tensor_flops("blk.0.attn_q.bias", 4096, &shape), Flops(4096.0));
        assert_eq!(tensor_flops("blk.0.attn_q.weight", 4096 * 4096, &shape), Flops(33_554_432.0));
    }
}
