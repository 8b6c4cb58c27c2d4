//! The matrix multiplications of a layer.
//!
//! `Y[S, o] = X[S, i] W[i, o]`, seven times: the projections of queries, keys, values and of attention's output, and
//! the three of the feed-forward block. Products that read the same activations can share a wait for them
//! ([`Group`]).

use hearth_profiles::model::{ModelProfile, ModelShape};

/// Below this mean, in bits, a model's weights are taken for W4A16, as the paper runs them: Q4_K_M has 4.9, Q5_K 5.5.
const FOUR_BIT_CLASS: f64 = 5.5;

/// A matrix of weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Matmul {
    /// i, its rows: numbers of an activation.
    pub inputs: u64,
    /// o, its columns: numbers of a result.
    pub outputs: u64,
}

/// Products that read the same activations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// One after another.
    pub matmuls: Vec<Matmul>,
}

impl Matmul {
    /// The number of weights.
    pub fn weights(self) -> f64 {
        self.inputs as f64 * self.outputs as f64
    }

    /// The same multiplication with another number of outputs.
    #[must_use]
    pub fn with_outputs(self, outputs: u64) -> Self {
        Self { outputs, ..self }
    }
}

/// The groups of a layer in the order of computing: queries, keys and values; attention's output; gate and up; down.
pub fn groups(shape: &ModelShape) -> [Group; 4] {
    let (width, inner) = (u64::from(shape.embedding), u64::from(shape.feed_forward));
    let matmul = |inputs, outputs| Matmul { inputs, outputs };
    let group = |matmuls: &[Matmul]| Group { matmuls: matmuls.to_vec() };
    let value = matmul(width, shape.value_width());
    [
        group(&[matmul(width, shape.query_width()), matmul(width, shape.key_width()), value]),
        group(&[matmul(u64::from(shape.heads) * u64::from(shape.value_length), width)]),
        group(&[matmul(width, inner), matmul(width, inner)]),
        group(&[matmul(inner, width)]),
    ]
}

/// Weights of a layer's products.
pub fn layer_weights(shape: &ModelShape) -> f64 {
    groups(shape).iter().flat_map(|group| &group.matmuls).map(|matmul| matmul.weights()).sum()
}

/// The output matrix.
pub fn head(shape: &ModelShape) -> Matmul {
    Matmul { inputs: u64::from(shape.embedding), outputs: u64::from(shape.vocabulary) }
}

/// Bits that the GPU reads of a weight, where it reads `four` of one of about four bits. Deviation: a model with wider
/// weights, which the paper has none of, is read as wide as it is.
pub fn weight_bits(model: &ModelProfile, four: f64) -> f64 {
    let weights = layer_weights(&model.shape) * f64::from(model.shape.layers.0);
    let own = model.layers_bytes().as_f64() * 8.0 / weights.max(1.0);
    if own < FOUR_BIT_CLASS { four } else { own }
}

#[cfg(test)]
mod tests {
    use hearth_profiles::model::shipped;

    use super::*;

    #[test]
    fn llama_8b_has_seven_products_of_218_million_weights() {
        let shape = shipped("llama-8b").unwrap().shape;
        // 2 * 4096^2 + 2 * 4096 * 1024 + 3 * 4096 * 14336.
        assert_eq!(layer_weights(&shape), 218_103_808.0);
        assert_eq!(groups(&shape).iter().map(|group| group.matmuls.len()).collect::<Vec<_>>(), [3, 1, 2, 1]);
    }

    #[test]
    fn weights_of_about_four_bits_are_four_and_wider_ones_are_themselves() {
        let model = shipped("llama-8b").unwrap();
        assert_eq!(weight_bits(&model, 4.0), 4.0);
        let wide = ModelProfile::from_shape("wide", model.shape.clone(), "f16".parse().unwrap()).unwrap();
        assert!((weight_bits(&wide, 4.0) - 16.0).abs() < 0.1);
    }
}
