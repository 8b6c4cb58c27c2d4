//! Rotary position embedding (RoPE): the rotation angle of each pair of dimensions at a position.
//!
//! Pair i of d rotated dimensions is rotated by `position * base^(-2i / d)`, with the base of the model file. The file
//! can also modify this angle:
//!
//! - factors, one for each pair, by which the angle is divided (Llama 3.1, `rope_freqs.weight`; Phi 3 has others for
//!   long contexts);
//! - linear scaling by f: all angles are divided by f (Chen et al. 2023);
//! - YaRN with the factor f (Peng et al. 2023): pairs with many rotations in the trained context keep their angle,
//!   the angle of pairs with few rotations is divided by f, and pairs in between are interpolated by a ramp. Cosine
//!   and sine are multiplied by `1 + 0.1 ln f`.
//!
//! Which dimensions are a pair depends on how the converter stored the rows of q and k ([`PairLayout`]).
//!
//! Layers may have different rotary embeddings: a layer with a sliding window its own base without scaling, and a layer
//! without rotary embedding the frequency 0 for all pairs.
//!
//! Not here: the rotation itself. That is `hearth_kernels::elementwise`.

use hearth_profiles::gguf::Metadata;
use hearth_profiles::model::{ModelShape, PairLayout};

use crate::error::ExecError;

#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    pub pair_layout: PairLayout,
    /// The rotation angle of each pair of dimensions per position, in radians, `[rotated dimensions / 2]`.
    pub frequencies: Vec<f64>,
    /// The factor of cosines and sines: YaRN's factor (1 without YaRN) times the metadata value `scaling.attn_factor`.
    pub magnitude: f64,
}

/// Number of rotations in the trained context above which YaRN keeps the angle of a pair.
/// source: Peng et al. 2023, section 3.4
const BETA_FAST: f32 = 32.0;
/// Number of rotations in the trained context below which YaRN divides the angle of a pair by the scaling factor.
/// source: Peng et al. 2023, section 3.4
const BETA_SLOW: f32 = 1.0;
/// The constant 0.1 in YaRN's factor for cosines and sines: `1 + 0.1 ln f`, where f is the scaling factor.
/// source: Peng et al. 2023, section 3.5
const MAGNITUDE_SLOPE: f64 = 0.1;

/// The scaling of the rotation angles for a context longer than in training.
struct Scaling {
    factor: f64,
    /// The two pair indices between which YaRN interpolates: angles up to the first index are unchanged, and angles
    /// from the second index on are divided by `factor`. `None` without YaRN: all angles are divided by `factor`.
    ramp: Option<[f64; 2]>,
}

impl Rope {
    /// Reads the rotary embedding from the metadata of a model file. `factors` are divisors, one for each frequency.
    pub(crate) fn read(
        metadata: &Metadata,
        shape: &ModelShape,
        factors: Option<&[f32]>,
    ) -> Result<Rope, ExecError> {
        let key = |name: &str| format!("{}.rope.{name}", shape.architecture);
        let base_key = key("freq_base");
        let base = f64::from(Rope::base(metadata, shape)?);
        let dimensions = rotated_dimensions(metadata, shape, "dimension_count", shape.key_length)?;
        let scaling = scaling(metadata, shape, base, dimensions)?;
        let factor = |pair: u32| factors.map_or(1.0, |all| f64::from(all[pair as usize]));
        let frequency =
            |pair: u32| scaling.angle_factor(pair) * plain_frequency(base, pair, dimensions) / factor(pair);
        let frequencies: Vec<f64> = (0..dimensions / 2).map(frequency).collect();
        if frequencies.iter().any(|frequency| !frequency.is_finite()) {
            let hint = "it gives frequencies that are not finite; convert the model again";
            return Err(ExecError::Metadata { key: base_key, found: base.to_string(), hint });
        }
        let attention = read_positive(metadata, &key("scaling.attn_factor"), 1.0)?;
        let magnitude = scaling.magnitude() * f64::from(attention);
        Ok(Rope { pair_layout: shape.architecture.spec().pair_layout, frequencies, magnitude })
    }

    /// Reads the base of the frequencies.
    pub(crate) fn base(metadata: &Metadata, shape: &ModelShape) -> Result<f32, ExecError> {
        read_positive(metadata, &format!("{}.rope.freq_base", shape.architecture), 10_000.0)
    }

    /// Returns this rotary embedding with the frequencies of `base` for `pairs` pairs, without factors and scaling.
    pub(crate) fn with_base(&self, base: f32, pairs: u32) -> Rope {
        let frequencies = (0..pairs).map(|pair| plain_frequency(base.into(), pair, 2 * pairs)).collect();
        Rope { pair_layout: self.pair_layout, frequencies, magnitude: 1.0 }
    }

    /// Returns a rotary embedding with the frequency 0, which changes nothing.
    pub(crate) fn without_rotation(&self) -> Rope {
        let frequencies = vec![0.0; self.frequencies.len()];
        Rope { pair_layout: self.pair_layout, frequencies, magnitude: 1.0 }
    }

    /// Writes the cosine and sine of each pair's angle at `position`, times the magnitude, into `out`, `[pairs]`.
    pub fn write_cosines_and_sines(&self, position: u32, out: &mut [[f32; 2]]) {
        for (pair, frequency) in out.iter_mut().zip(&self.frequencies) {
            let angle = f64::from(position) * frequency;
            *pair = [libm::cos(angle), libm::sin(angle)].map(|part| (part * self.magnitude) as f32);
        }
    }
}

/// Returns the rotation angle of a pair of dimensions per position, without scaling and factors.
fn plain_frequency(base: f64, pair: u32, dimensions: u32) -> f64 {
    // libm gives the same bits on every platform; the functions of the system do not.
    libm::pow(base, -2.0 * f64::from(pair) / f64::from(dimensions))
}

/// Reads the number of rotated dimensions of heads of length `key_length` from the key `rope.NAME`.
pub(crate) fn rotated_dimensions(
    metadata: &Metadata,
    shape: &ModelShape,
    name: &str,
    key_length: u32,
) -> Result<u32, ExecError> {
    let key = format!("{}.rope.{name}", shape.architecture);
    let dimensions = metadata.get_u32(&key)?.unwrap_or(key_length);
    if dimensions == 0 || dimensions % 2 == 1 || dimensions > key_length {
        let hint = "it must be an even number from 2 to the key length; convert the model again";
        return Err(ExecError::Metadata { key, found: dimensions.to_string(), hint });
    }
    Ok(dimensions)
}

impl Scaling {
    fn angle_factor(&self, pair: u32) -> f64 {
        let Some([low, high]) = self.ramp else { return 1.0 / self.factor };
        // source: ggml's guard against a ramp of zero width
        let ramp = (f64::from(pair) - low) / (high - low).max(0.001);
        let kept = 1.0 - ramp.clamp(0.0, 1.0);
        kept + (1.0 - kept) / self.factor
    }

    fn magnitude(&self) -> f64 {
        self.ramp.map_or(1.0, |_| 1.0 + MAGNITUDE_SLOPE * libm::log(self.factor))
    }
}

fn scaling(
    metadata: &Metadata,
    shape: &ModelShape,
    base: f64,
    dimensions: u32,
) -> Result<Scaling, ExecError> {
    let key = |name: &str| format!("{}.rope.{name}", shape.architecture);
    let type_key = key("scaling.type");
    let (factor_key, old_key) = (key("scaling.factor"), key("scale_linear"));
    let (factor, used) = match metadata.get_f32(&factor_key)? {
        Some(factor) => (factor, &factor_key),
        None => (metadata.get_f32(&old_key)?.unwrap_or(1.0), &old_key),
    };
    match metadata.get_str(&type_key)? {
        Some("none") => Ok(Scaling { factor: 1.0, ramp: None }),
        None | Some("linear" | "longrope") => {
            check_positive(used, factor)?;
            Ok(Scaling { factor: f64::from(factor), ramp: None })
        }
        Some("yarn") => {
            check_yarn(metadata, shape, base, used, factor)?;
            let trained = metadata.get_u32(&key("scaling.original_context_length"))?;
            let trained = f64::from(trained.unwrap_or(shape.context_length).max(1));
            let bound = |name, default| read_positive(metadata, &key(name), default).map(f64::from);
            // The pair that has this number of rotations in the trained context.
            let pair = |rotations: f64| {
                f64::from(dimensions) * libm::log(trained / (rotations * std::f64::consts::TAU))
                    / (2.0 * libm::log(base))
            };
            let fast = pair(bound("scaling.yarn_beta_fast", BETA_FAST)?);
            let slow = pair(bound("scaling.yarn_beta_slow", BETA_SLOW)?);
            let (low, high) = (fast.floor().max(0.0), slow.ceil().min(f64::from(dimensions) - 1.0));
            Ok(Scaling { factor: f64::from(factor), ramp: Some([low, high]) })
        }
        Some(other) => {
            let hint = "the supported scaling types are none, linear, longrope and yarn; use a model with one of them";
            Err(ExecError::Metadata { key: type_key, found: format!("`{other}`"), hint })
        }
    }
}

/// Fails if a YaRN parameter is not valid, or if it differs from Peng et al. 2023.
fn check_yarn(
    metadata: &Metadata,
    shape: &ModelShape,
    base: f64,
    factor_key: &str,
    factor: f32,
) -> Result<(), ExecError> {
    let key = |name: &str| format!("{}.rope.{name}", shape.architecture);
    let rejected = |key: String, found: String, hint| Err(ExecError::Metadata { key, found, hint });
    check_positive(factor_key, factor)?;
    if factor < 1.0 {
        let hint = "YaRN extends a context by a factor of at least 1; convert the model again";
        return rejected(factor_key.to_owned(), factor.to_string(), hint);
    }
    if base <= 1.0 {
        let hint = "YaRN needs a frequency base above 1; convert the model again";
        return rejected(key("freq_base"), base.to_string(), hint);
    }
    // source: llama.cpp's defaults, which correspond to the formulas of the paper
    let parts = [("yarn_ext_factor", 1.0), ("yarn_attn_factor", 1.0), ("yarn_log_multiplier", 0.0)];
    for (name, plain) in parts {
        let key = key(&format!("scaling.{name}"));
        if let Some(found) = metadata.get_f32(&key)?.filter(|found| *found != plain) {
            let hint = "with YaRN, only the default of this key is supported; use another model";
            return rejected(key, found.to_string(), hint);
        }
    }
    Ok(())
}

/// Reads the value of the metadata key `key`, which must be positive and finite; returns `default` if it is missing.
pub(crate) fn read_positive(metadata: &Metadata, key: &str, default: f32) -> Result<f32, ExecError> {
    let value = metadata.get_f32(key)?.unwrap_or(default);
    check_positive(key, value).map(|()| value)
}

/// Fails if the value of the metadata key `key` is not positive and finite.
pub(crate) fn check_positive(key: &str, value: f32) -> Result<(), ExecError> {
    if value.is_finite() && value > 0.0 {
        return Ok(());
    }
    let hint = "it must be positive and finite; convert the model again";
    Err(ExecError::Metadata { key: key.into(), found: value.to_string(), hint })
}

#[cfg(test)]
pub(crate) mod tests {
    use hearth_profiles::gguf::Value;
    use hearth_profiles::model::Architecture;

    use super::*;

    pub(crate) fn shape() -> ModelShape {
        ModelShape {
            architecture: Architecture::Llama,
            layers: hearth_profiles::Layers(1),
            embedding_length: 8,
            feed_forward_length: 8,
            heads: 2,
            kv_heads: 1,
            key_length: 4,
            value_length: 4,
            values_are_keys: false,
            hybrid: None,
            shared_kv: None,
            experts: None,
            per_layer_input_length: 0,
            vocab_size: 10,
            has_tied_embeddings: true,
            context_length: 16,
        }
    }

    pub(crate) fn metadata_with(architecture: &str, keys: &[(&str, Value)]) -> Metadata {
        let mut metadata = Metadata::default();
        for (key, value) in keys {
            metadata.insert(format!("{architecture}.{key}"), value.clone());
        }
        metadata
    }

    fn text(name: &str) -> Value {
        Value::Str(name.into())
    }

    fn read(keys: &[(&str, Value)], factors: Option<&[f32]>) -> Result<Rope, ExecError> {
        Rope::read(&metadata_with("llama", keys), &shape(), factors)
    }

    #[test]
    fn frequencies_fall_with_the_pair_and_are_scaled() {
        let keys = [
            ("rope.freq_base", Value::F32(100.0)),
            ("rope.scaling.type", text("linear")),
            ("rope.scaling.factor", Value::F32(2.0)),
        ];
        let rope = read(&keys, Some(&[1.0, 4.0])).unwrap();
        // 100^0 / 2 / 1 and 100^(-2/4) / 2 / 4.
        assert_eq!(rope.frequencies, [0.5, 0.1 / 8.0]);
        let mut angles = [[0.0; 2]; 2];
        rope.write_cosines_and_sines(0, &mut angles);
        assert_eq!(angles, [[1.0, 0.0]; 2]);
        rope.write_cosines_and_sines(3, &mut angles);
        assert_eq!(angles[0], [1.5f64.cos() as f32, 1.5f64.sin() as f32]);
    }

    #[test]
    fn yarn_keeps_high_frequencies_and_divides_low_ones() {
        let keys = [
            ("rope.freq_base", Value::F32(10.0)),
            ("rope.scaling.type", text("yarn")),
            ("rope.scaling.factor", Value::F32(4.0)),
            ("rope.scaling.original_context_length", Value::U32(100)),
            ("rope.scaling.yarn_beta_fast", Value::F32(16.0)),
            ("rope.scaling.yarn_beta_slow", Value::F32(4.0)),
        ];
        let rope = read(&keys, None).unwrap();
        // 4 ln(100 / (16 tau)) / (2 ln 10) = -0.004, so low is 0; 4 ln(100 / (4 tau)) / (2 ln 10) = 1.2, so high is
        // 2: pair 0 is kept, and pair 1 is half kept and half divided by four: 0.5 + 0.5 / 4 = 0.625.
        assert_eq!(rope.frequencies, [1.0, libm::pow(10.0, -0.5) * 0.625]);
        assert_eq!(rope.magnitude, 1.0 + 0.1 * libm::log(4.0));
    }

    #[test]
    fn unsupported_scaling_is_rejected() {
        let error = read(&[("rope.scaling.type", text("dynamic"))], None).unwrap_err();
        let expected = "metadata key `llama.rope.scaling.type` is `dynamic`: \
                        the supported scaling types are none, linear, longrope and yarn; use a model with one of them";
        assert_eq!(error.to_string(), expected);
        assert!(read(&[("rope.dimension_count", Value::U32(3))], None).is_err());
        let yarn =
            |name, value| read(&[("rope.scaling.type", text("yarn")), (name, Value::F32(value))], None);
        for (name, value) in [
            ("rope.freq_base", 1.0),
            ("rope.scaling.factor", 0.5),
            ("rope.scaling.yarn_ext_factor", 0.0),
            ("rope.scaling.yarn_attn_factor", 0.5),
            ("rope.scaling.yarn_log_multiplier", 0.1),
        ] {
            let error = yarn(name, value).unwrap_err().to_string();
            assert!(error.contains(&format!("key `llama.{name}`")), "{error}");
        }
        assert!(yarn("rope.scaling.factor", 0.0).is_err());
    }
}
