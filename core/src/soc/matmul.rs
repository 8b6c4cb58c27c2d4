//! The matrix multiplications of a layer.
//!
//! Each multiplies the activations X of S tokens by a weight matrix W with i rows and o columns:
//! `Y[S, o] = X[S, i] W[i, o]`. A layer has seven: the projections of queries, keys, values and the attention output,
//! and the three matrices of the feed-forward block. Matmuls that read the same activations are a group: they can share
//! one synchronisation.

use hearth_profiles::model::{ModelProfile, ModelShape};

/// Mean number of bits per weight below which a model is treated as W4A16 (weights of 4 bits, activations of 16 bits).
/// Q4_K_M has 4.9 bits per weight, Q5_K 5.5.
const FOUR_BIT_LIMIT: f64 = 5.5;

/// The shape of a matmul with a weight matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Matmul {
    /// Width of the input activations, i: the rows of the weight matrix.
    pub inputs: u64,
    /// Width of the output, o: the columns of the weight matrix.
    pub outputs: u64,
}

impl Matmul {
    pub fn weight_count(self) -> f64 {
        self.inputs as f64 * self.outputs as f64
    }

    /// Returns this matmul with a different number of outputs.
    #[must_use]
    pub fn with_outputs(self, outputs: u64) -> Self {
        Self { outputs, ..self }
    }
}

/// Returns the matmul groups of a layer in the order of execution: Q, K and V; attention output; gate and up; down.
pub fn matmul_groups(shape: &ModelShape) -> [Vec<Matmul>; 4] {
    let (width, inner) = (u64::from(shape.embedding_length), u64::from(shape.feed_forward_length));
    let matmul = |inputs, outputs| Matmul { inputs, outputs };
    let attention = shape.attention();
    let qkv = [attention.query_width(), attention.key_width(), attention.value_width()];
    [
        qkv.map(|outputs| matmul(width, outputs)).to_vec(),
        vec![matmul(attention.output_width(), width)],
        vec![matmul(width, inner); 2],
        vec![matmul(inner, width)],
    ]
}

pub fn layer_weight_count(shape: &ModelShape) -> f64 {
    matmul_groups(shape).iter().flatten().map(|matmul| matmul.weight_count()).sum()
}

pub fn output_matmul(shape: &ModelShape) -> Matmul {
    Matmul { inputs: u64::from(shape.embedding_length), outputs: u64::from(shape.vocab_size) }
}

/// Returns the number of bits that the GPU reads per weight: `w4a16_bits` for a model of about four bits per weight.
/// Deviation: wider weights, which the HeteroLLM paper does not have, are read at their own width.
pub fn bits_per_weight(model: &ModelProfile, w4a16_bits: f64) -> f64 {
    let weights = layer_weight_count(&model.shape) * f64::from(model.shape.layers.0);
    let own = model.all_layers_bytes().as_f64() * 8.0 / weights.max(1.0);
    if own < FOUR_BIT_LIMIT { w4a16_bits } else { own }
}

#[cfg(test)]
mod tests {
    use hearth_profiles::model::shipped_profile;

    use super::*;

    #[test]
    fn llama_8b_has_seven_matmuls_of_218_million_weights() {
        let shape = shipped_profile("llama-8b").unwrap().shape;
        // 2 * 4096^2 + 2 * 4096 * 1024 + 3 * 4096 * 14336.
        assert_eq!(layer_weight_count(&shape), 218_103_808.0);
        assert_eq!(matmul_groups(&shape).map(|group| group.len()), [3, 1, 2, 1]);
    }

    #[test]
    fn w4a16_bits_apply_to_weights_of_about_four_bits() {
        let model = shipped_profile("llama-8b").unwrap();
        assert_eq!(bits_per_weight(&model, 4.0), 4.0);
        let wide = ModelProfile::from_shape("wide", model.shape.clone(), "f16".parse().unwrap()).unwrap();
        assert!((bits_per_weight(&wide, 4.0) - 16.0).abs() < 0.1);
    }
}
