//! What does a layer of the llama architecture compute?
//!
//! With h a hidden row and x = RMSNorm(h):
//!
//! ```text
//! q, k, v = W_q x, W_k x, W_v x;  rotate each head of q and k by the token's position
//! h += W_o attention(q, K, V)           K, V: this and all earlier positions
//! x = RMSNorm(h);  h += W_down (silu(W_gate x) * W_up x)
//! ```
//!
//! and after the last layer logits = `W_output` RMSNorm(h). Source: Touvron et al. 2023 and the GGUF
//! specification for the keys. Rotation is NORM style: dimensions 2i and 2i + 1 turn by
//! `position * scale * base^(-2i / d) / factor_i`.
//!
//! Here: the numbers of that pass. The pass itself is written twice, plainly in [`crate::oracle`] and for
//! speed in [`crate::cpu`].

use hearth_profiles::gguf::{GgufError, Metadata};
use hearth_profiles::model::ModelShape;

use crate::error::ExecError;

/// What the forward pass needs besides dimensions and weights.
#[derive(Debug, Clone, PartialEq)]
pub struct Hyperparameters {
    /// Added to the mean square in RMSNorm.
    pub epsilon: f32,
    /// Leading dimensions of a head that are rotated; even.
    pub rope_dimensions: u32,
    /// Angle a position of each rotated pair, in radians. [`rope_dimensions` / 2]
    pub frequencies: Vec<f64>,
}

impl Hyperparameters {
    /// From the metadata; `factors` divide the frequencies.
    pub(crate) fn read(
        metadata: &Metadata,
        shape: &ModelShape,
        factors: Option<&[f32]>,
    ) -> Result<Hyperparameters, ExecError> {
        let key = |name: &str| format!("{}.{name}", shape.architecture);
        let epsilon_key = key("attention.layer_norm_rms_epsilon");
        let epsilon = metadata.get_f32(&epsilon_key)?;
        let epsilon = epsilon.ok_or_else(|| GgufError::MissingKey { key: epsilon_key.clone() })?;
        positive(&epsilon_key, epsilon)?;
        let base_key = key("rope.freq_base");
        let base = metadata.get_f32(&base_key)?.unwrap_or(10_000.0);
        positive(&base_key, base)?;
        let dimensions_key = key("rope.dimension_count");
        let dimensions = metadata.get_u32(&dimensions_key)?.unwrap_or(shape.key_length);
        if dimensions == 0 || dimensions % 2 == 1 || dimensions > shape.key_length {
            let hint = "it must be even and at most the key length";
            return Err(ExecError::Metadata { key: dimensions_key, found: dimensions.to_string(), hint });
        }
        let scale = rope_scale(metadata, &key)?;
        let pairs = dimensions / 2;
        let factor = |pair: u32| {
            factors.and_then(|all| all.get(pair as usize)).map_or(1.0, |&factor| f64::from(factor))
        };
        // libm's functions are the same code on every platform; the system's are not.
        let frequency = |pair: u32| {
            let exponent = -2.0 * f64::from(pair) / f64::from(dimensions);
            scale * libm::pow(f64::from(base), exponent) / factor(pair)
        };
        let frequencies: Vec<f64> = (0..pairs).map(frequency).collect();
        if frequencies.iter().any(|frequency| !frequency.is_finite()) {
            let (found, hint) = ("zero or not a number in places".into(), "fetch the model again");
            return Err(ExecError::Metadata { key: "rope_freqs.weight".into(), found, hint });
        }
        Ok(Hyperparameters { epsilon, rope_dimensions: dimensions, frequencies })
    }

    /// Cosine and sine of every pair's angle at `position`, into `turns` [`rope_dimensions` / 2].
    pub(crate) fn turns(&self, position: u32, turns: &mut [[f32; 2]]) {
        for (turn, frequency) in turns.iter_mut().zip(&self.frequencies) {
            let angle = f64::from(position) * frequency;
            *turn = [libm::cos(angle) as f32, libm::sin(angle) as f32];
        }
    }
}

/// The factor on positions: 1, or that of linear scaling.
fn rope_scale(metadata: &Metadata, key: &impl Fn(&str) -> String) -> Result<f64, ExecError> {
    let type_key = key("rope.scaling.type");
    let factor_key = key("rope.scaling.factor");
    match metadata.get_str(&type_key)? {
        None | Some("linear") => {
            let (old_key, mut used) = (key("rope.scale_linear"), &factor_key);
            let mut factor = metadata.get_f32(&factor_key)?;
            if factor.is_none() {
                (factor, used) = (metadata.get_f32(&old_key)?, &old_key);
            }
            let Some(factor) = factor else { return Ok(1.0) };
            positive(used, factor)?;
            Ok(1.0 / f64::from(factor))
        }
        Some("none") => Ok(1.0),
        Some(other) => Err(ExecError::Metadata {
            key: type_key,
            found: format!("`{other}`"),
            hint: "only none and linear scaling can be executed; use a model without it",
        }),
    }
}

fn positive(key: &str, value: f32) -> Result<(), ExecError> {
    if value.is_finite() && value > 0.0 {
        return Ok(());
    }
    Err(ExecError::Metadata {
        key: key.into(),
        found: value.to_string(),
        hint: "it must be positive; convert the model again",
    })
}

#[cfg(test)]
mod tests {
    use hearth_profiles::gguf::Value;
    use hearth_profiles::model::Architecture;
    use hearth_profiles::units::Layers;

    use super::*;

    fn shape() -> ModelShape {
        ModelShape {
            architecture: Architecture::Llama,
            layers: Layers(1),
            embedding: 8,
            feed_forward: 8,
            heads: 2,
            kv_heads: 1,
            key_length: 4,
            value_length: 4,
            vocabulary: 10,
            tied_embeddings: true,
            context_length: 16,
        }
    }

    fn metadata(keys: &[(&str, Value)]) -> Metadata {
        let mut metadata = Metadata::default();
        for (key, value) in keys {
            metadata.insert(format!("llama.{key}"), value.clone());
        }
        metadata
    }

    fn epsilon() -> (&'static str, Value) {
        ("attention.layer_norm_rms_epsilon", Value::F32(1e-5))
    }

    #[test]
    fn frequencies_fall_with_the_pair_and_are_scaled() {
        let keys = metadata(&[
            epsilon(),
            ("rope.freq_base", Value::F32(100.0)),
            ("rope.scaling.type", Value::Str("linear".into())),
            ("rope.scaling.factor", Value::F32(2.0)),
        ]);
        let numbers = Hyperparameters::read(&keys, &shape(), Some(&[1.0, 4.0])).unwrap();
        // 100^0 / 2 / 1 and 100^(-2/4) / 2 / 4.
        assert_eq!(numbers.frequencies, [0.5, 0.1 / 8.0]);
        let mut turns = [[0.0; 2]; 2];
        numbers.turns(0, &mut turns);
        assert_eq!(turns, [[1.0, 0.0]; 2]);
        numbers.turns(3, &mut turns);
        assert_eq!(turns[0], [1.5f64.cos() as f32, 1.5f64.sin() as f32]);
    }

    #[test]
    fn what_cannot_be_executed_is_named() {
        let yarn = metadata(&[epsilon(), ("rope.scaling.type", Value::Str("yarn".into()))]);
        assert_eq!(
            Hyperparameters::read(&yarn, &shape(), None).unwrap_err().to_string(),
            "key `llama.rope.scaling.type` is `yarn`: \
             only none and linear scaling can be executed; use a model without it"
        );
        let odd = metadata(&[epsilon(), ("rope.dimension_count", Value::U32(3))]);
        assert!(Hyperparameters::read(&odd, &shape(), None).is_err());
        assert!(Hyperparameters::read(&metadata(&[]), &shape(), None).is_err());
        assert!(Hyperparameters::read(&metadata(&[epsilon()]), &shape(), Some(&[0.0, 1.0])).is_err());
    }
}
