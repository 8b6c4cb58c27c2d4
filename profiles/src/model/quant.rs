//! Quantisations: the format of each tensor of a model.
//!
//! A quantisation is pure (all matrices in one format) or one of the quantisation mixes of llama.cpp's quantiser
//! (`llama_tensor_get_type`). A mix stores the output head (with tied embeddings, the input embedding) and a few other
//! matrices with more bits than the base format. `Quant::mixed` defines the mixes.
//!
//! Vectors are always F32. If a row is not a whole number of blocks of 256 weights, llama.cpp and this module use a
//! format with blocks of 32 weights instead. [`Quant::Q2KM`] and [`Quant::Iq1SM`] are called `Q2_K` and `IQ1_S` in
//! llama.cpp; in this module, `q2_k` and `iq1_s` are names of pure quantisations.
//!
//! Deviation: in 80-layer models with 8 queries per key (Llama 2 and 3 70B), llama.cpp stores each `attn_v` that is not
//! `Q6_K` as `Q5_K`, and this module as `Q4_K`; the difference is 42 MB of 42.5 GB.

use std::fmt;
use std::str::FromStr;

use super::experts::{is_of_experts, is_router};
use super::layout::{TensorKind, TensorSpec};
use super::shape::ModelShape;
use super::token_mixer::TokenMixer;
use crate::format::Format;

/// A quantisation, which determines the format of each tensor of a model. The mixes are those of llama.cpp.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quant {
    /// All matrices have the same format.
    Pure(Format),
    Q4KM,
    Q5KM,
    Q3KM,
    /// The mixed quantisation that llama.cpp calls `Q2_K`.
    Q2KM,
    /// The mixed quantisation that llama.cpp calls `IQ1_S`.
    Iq1SM,
    /// Experts in `mxfp4`, and all other matrices in `q8_0`.
    Mxfp4Moe,
}

/// The error for a tensor whose rows are not a whole number of blocks of its format.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "rows of `{tensor}` have {row_len} weights, which cannot be divided into {format} blocks of {block_len}: \
     choose a format with smaller blocks"
)]
pub struct PartialBlockError {
    pub tensor: String,
    pub row_len: u64,
    pub format: Format,
    pub block_len: u64,
}

impl Quant {
    /// All quantisation mixes.
    pub const MIXED_QUANTS: &'static [Quant] =
        &[Quant::Q4KM, Quant::Q5KM, Quant::Q3KM, Quant::Q2KM, Quant::Iq1SM, Quant::Mxfp4Moe];

    pub fn name(self) -> &'static str {
        match self {
            Quant::Pure(format) => format.name(),
            Quant::Q4KM => "q4_k_m",
            Quant::Q5KM => "q5_k_m",
            Quant::Q3KM => "q3_k_m",
            Quant::Q2KM => "q2_k_m",
            Quant::Iq1SM => "iq1_s_m",
            Quant::Mxfp4Moe => "mxfp4_moe",
        }
    }

    /// Returns the format of one tensor of a model with this shape.
    pub fn tensor_format(self, tensor: &TensorSpec, shape: &ModelShape) -> Result<Format, PartialBlockError> {
        // The biases of experts have two dimensions.
        let is_small = matches!(tensor.kind, TensorKind::Convolution | TensorKind::Bias);
        if tensor.dims.len() == 1 || is_small || is_router(&tensor.name) {
            return Ok(Format::F32);
        }
        let row = tensor.dims[0];
        let format = match self {
            Quant::Pure(format) => format,
            mix => with_whole_blocks(mix.mixed(tensor, shape), row),
        };
        if row.is_multiple_of(format.block_len()) {
            return Ok(format);
        }
        let (row_len, block_len) = (row, format.block_len());
        Err(PartialBlockError { tensor: tensor.name.clone(), row_len, format, block_len })
    }

    /// Returns by how much the quantisation increases the perplexity of a model, as a share; `None` if this is not
    /// published. source: llama.cpp, `llama-quantize --help`, for Llama 3 8B, whose perplexity in F16 is 6.233
    /// (`tools/perplexity/README.md`). Larger models lose less.
    pub fn perplexity_increase(self) -> Option<f64> {
        let increase = match self {
            Quant::Pure(Format::F32 | Format::F16 | Format::Bf16) => 0.0,
            Quant::Pure(Format::Q8_0) => 0.0026,
            Quant::Pure(Format::Q6K) => 0.0217,
            Quant::Q5KM => 0.0569,
            Quant::Q4KM => 0.1754,
            Quant::Q3KM => 0.6569,
            Quant::Q2KM => 3.5199,
            Quant::Pure(Format::Q4_0) => 0.4685,
            Quant::Pure(Format::Q4_1) => 0.4511,
            Quant::Pure(Format::Q5_0) => 0.1316,
            Quant::Pure(Format::Q5_1) => 0.1062,
            _ => return None,
        };
        Some(increase / 6.233)
    }

    /// Returns the value of `general.file_type`, or `None` if llama.cpp has no value for the quantisation. Pure
    /// quantisations such as `q5_k` get the value of the quantisation mix with the same base format.
    pub fn file_type(self) -> Option<u32> {
        let name = match self {
            Quant::Pure(Format::Q2K) => "q2_k_m",
            Quant::Pure(Format::Iq1S) => "iq1_s_m",
            Quant::Pure(Format::Mxfp4) => "mxfp4_moe",
            Quant::Pure(Format::Q4K) => "q4_k_s",
            Quant::Pure(Format::Q5K) => "q5_k_s",
            Quant::Pure(Format::Q3K) => "q3_k_s",
            other => other.name(),
        };
        (0..64).find(|&number| file_type_name(number) == Some(name))
    }

    /// Returns the format of a matrix in a quantisation mix of llama.cpp.
    #[allow(clippy::match_same_arms)] // the arms of a mix are together
    fn mixed(self, tensor: &TensorSpec, shape: &ModelShape) -> Format {
        let layers = shape.layers.0;
        let four_queries_share_a_key = match tensor.layer_index.map(|layer| shape.mixer(layer)) {
            Some(TokenMixer::Attention(attention)) => attention.heads >= 4 * attention.kv_heads,
            _ => false,
        };
        let has_eight_experts = shape.experts.is_some_and(|experts| experts.count == 8);
        match (self, role(tensor, shape)) {
            (Quant::Pure(format), _) => format,
            (Quant::Mxfp4Moe, _) if is_of_experts(&tensor.name) => Format::Mxfp4,
            (Quant::Mxfp4Moe, _) => Format::Q8_0,
            (_, Role::Value(_) | Role::Key) if has_eight_experts => Format::Q8_0,
            (Quant::Q4KM | Quant::Q3KM | Quant::Q2KM, Role::AttentionOutput) if has_eight_experts => {
                Format::Q5K
            }
            (Quant::Q4KM | Quant::Q5KM, Role::Value(layer) | Role::Down(layer))
                if use_more_bits(layer, layers) =>
            {
                Format::Q6K
            }
            (Quant::Iq1SM, Role::Head) => Format::Q5K,
            (_, Role::Head) => Format::Q6K,
            (Quant::Q3KM, Role::FusedQkv) => Format::Q4K,
            (Quant::Q4KM, Role::FusedQkv) => Format::Q5K,
            (Quant::Q5KM, Role::FusedQkv) => Format::Q6K,
            (Quant::Q4KM, _) => Format::Q4K,
            (Quant::Q5KM, _) => Format::Q5K,
            (Quant::Q3KM, Role::Value(layer)) if layer < 2 => Format::Q5K,
            (Quant::Q3KM, Role::Down(layer)) if layer < layers / 16 => Format::Q5K,
            (Quant::Q3KM, Role::Value(_) | Role::Down(_) | Role::AttentionOutput) => Format::Q4K,
            (Quant::Q3KM, _) => Format::Q3K,
            (Quant::Q2KM | Quant::Iq1SM, Role::Value(_)) if four_queries_share_a_key => Format::Q4K,
            (Quant::Q2KM, Role::Value(_) | Role::Down(_) | Role::AttentionOutput) => Format::Q3K,
            (Quant::Q2KM, _) => Format::Q2K,
            (Quant::Iq1SM, Role::AttentionOutput) => Format::Iq2Xxs,
            (Quant::Iq1SM, Role::Value(_) | Role::Embedding) => Format::Q2K,
            (Quant::Iq1SM, Role::Down(layer)) if layer < layers / 8 => Format::Q2K,
            (Quant::Iq1SM, _) => Format::Iq1S,
        }
    }
}

/// The role of a tensor in a quantisation mix, with the index of its layer if some mixes depend on the index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    Head,
    Embedding,
    Value(u32),
    Key,
    /// Q, K and V in one tensor.
    FusedQkv,
    Down(u32),
    AttentionOutput,
    Other,
}

fn role(tensor: &TensorSpec, shape: &ModelShape) -> Role {
    let embedding = tensor.kind == TensorKind::Embedding;
    if tensor.name == "output.weight" || (shape.has_tied_embeddings && tensor.name == "token_embd.weight") {
        return Role::Head;
    }
    match tensor.layer_index {
        Some(layer) if tensor.name.ends_with(".attn_v.weight") => Role::Value(layer),
        Some(_) if tensor.name.ends_with(".attn_qkv.weight") => Role::FusedQkv,
        Some(_) if tensor.name.ends_with(".attn_k.weight") => Role::Key,
        Some(layer) if tensor.name.contains(".ffn_down") => Role::Down(layer),
        Some(_) if tensor.name.ends_with(".attn_output.weight") => Role::AttentionOutput,
        _ if embedding => Role::Embedding,
        _ => Role::Other,
    }
}

/// Returns whether llama.cpp's rule `use_more_bits` gives the layer more bits: the first and last eighth of the
/// layers, and every third layer between them.
fn use_more_bits(layer: u32, layers: u32) -> bool {
    let eighth = layers / 8;
    layer < eighth || layer >= 7 * layers / 8 || (layer - eighth) % 3 == 2
}

fn with_whole_blocks(format: Format, row: u64) -> Format {
    if row.is_multiple_of(format.block_len()) {
        return format;
    }
    let smaller = match format {
        Format::Q6K => Format::Q8_0,
        Format::Q5K => Format::Q5_1,
        Format::Q4K => Format::Q5_0,
        _ => Format::Iq4Nl,
    };
    if row.is_multiple_of(smaller.block_len()) { smaller } else { Format::F16 }
}

impl fmt::Display for Quant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a quantisation: use {mixes} or one of {known}",
    mixes = Quant::MIXED_QUANTS.iter().map(|mix| format!("`{mix}`")).collect::<Vec<_>>().join(", "), known = Format::names())]
pub struct UnknownQuant(pub String);

impl FromStr for Quant {
    type Err = UnknownQuant;
    fn from_str(text: &str) -> Result<Self, UnknownQuant> {
        let mixed = Self::MIXED_QUANTS.iter().find(|mix| text.eq_ignore_ascii_case(mix.name()));
        if let Some(&mix) = mixed {
            return Ok(mix);
        }
        text.parse().map(Quant::Pure).map_err(|_| UnknownQuant(text.to_owned()))
    }
}

/// Returns the lower-case name for a value of `general.file_type` (llama.cpp, `enum llama_ftype`). Quantisation mixes
/// have the names of [`Quant::MIXED_QUANTS`].
pub(crate) fn file_type_name(number: u32) -> Option<&'static str> {
    Some(match number {
        0 => "f32",
        1 => "f16",
        2 => "q4_0",
        3 => "q4_1",
        7 => "q8_0",
        8 => "q5_0",
        9 => "q5_1",
        10 => "q2_k_m",
        11 => "q3_k_s",
        12 => "q3_k_m",
        13 => "q3_k_l",
        14 => "q4_k_s",
        15 => "q4_k_m",
        16 => "q5_k_s",
        17 => "q5_k_m",
        18 => "q6_k",
        19 => "iq2_xxs",
        20 => "iq2_xs",
        21 => "q2_k_s",
        22 => "iq3_xs",
        23 => "iq3_xxs",
        24 => "iq1_s_m",
        25 => "iq4_nl",
        26 => "iq3_s",
        27 => "iq3_m",
        28 => "iq2_s",
        29 => "iq2_m",
        30 => "iq4_xs",
        31 => "iq1_m",
        32 => "bf16",
        38 => "mxfp4_moe",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::layout::tensor_specs;
    use crate::model::shape::tests::llama_8b;

    fn format(quant: Quant, name: &str) -> Format {
        let (shape, name) = (llama_8b(), format!("{name}.weight"));
        let tensor = tensor_specs(&shape).into_iter().find(|tensor| tensor.name == name).unwrap();
        quant.tensor_format(&tensor, &shape).unwrap()
    }

    #[test]
    fn use_more_bits_selects_half_of_the_layers() {
        let more: Vec<u32> = (0..32).filter(|&layer| use_more_bits(layer, 32)).collect();
        // 0..4, then 6, 9, .. 27, then 28..32.
        assert_eq!(more, [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]);
    }

    #[test]
    fn mixed_formats_follow_their_table() {
        use Format::{Iq1S, Iq2Xxs, Q2K, Q3K, Q4K, Q5K, Q6K};

        let names = [
            "token_embd",
            "output",
            "blk.1.attn_v",
            "blk.9.attn_v",
            "blk.1.ffn_down",
            "blk.9.ffn_down",
            "blk.9.attn_output",
        ];
        let formats = |quant: Quant| names.map(|name| format(quant, name));
        assert_eq!(formats(Quant::Q5KM), [Q5K, Q6K, Q6K, Q6K, Q6K, Q6K, Q5K]);
        // 32 layers: the first sixteenth is two of them.
        assert_eq!(formats(Quant::Q3KM), [Q3K, Q6K, Q5K, Q4K, Q5K, Q4K, Q4K]);
        // 32 heads share 8 keys.
        assert_eq!(formats(Quant::Q2KM), [Q2K, Q6K, Q4K, Q4K, Q3K, Q3K, Q3K]);
        assert_eq!(formats(Quant::Iq1SM), [Q2K, Q5K, Q4K, Q4K, Q2K, Iq1S, Iq2Xxs]);
        let plain = ModelShape { kv_heads: 32, ..llama_8b() };
        let value = &tensor_specs(&plain)[4];
        assert_eq!(Quant::Q2KM.tensor_format(value, &plain), Ok(Q3K), "{}", value.name);
    }

    #[test]
    fn odd_rows_fall_back_or_fail() {
        let shape = ModelShape { embedding_length: 896, ..llama_8b() };
        let list = tensor_specs(&shape);
        // 896 = 3.5 * 256 = 28 * 32.
        assert_eq!(Quant::Q4KM.tensor_format(&list[0], &shape), Ok(Format::Q5_0));
        let error = Quant::Pure(Format::Q4K).tensor_format(&list[0], &shape).unwrap_err();
        assert_eq!(
            error.to_string(),
            "rows of `token_embd.weight` have 896 weights, which cannot be divided into q4_k blocks of 256: \
             choose a format with smaller blocks"
        );
    }

    #[test]
    fn quant_names_round_trip() {
        let pure = Format::ALL.iter().map(|&format| Quant::Pure(format));
        for quant in pure.chain(Quant::MIXED_QUANTS.iter().copied()) {
            assert_eq!(quant.to_string().parse(), Ok(quant));
            assert!(quant.file_type().is_some(), "{quant}");
        }
        assert_eq!(Quant::Q4KM.file_type(), Some(15));
        assert_eq!(Quant::Pure(Format::Q8_0).file_type(), Some(7));
        assert!("q4".parse::<Quant>().is_err());
    }

    #[test]
    fn file_types_are_those_of_llama_cpp() {
        // source: `enum llama_ftype` of llama.h
        let pure = [
            (Format::Iq2Xxs, 19),
            (Format::Iq2Xs, 20),
            (Format::Iq3Xxs, 23),
            (Format::Iq1S, 24),
            (Format::Iq4Nl, 25),
            (Format::Iq3S, 26),
            (Format::Iq2S, 28),
            (Format::Iq4Xs, 30),
            (Format::Iq1M, 31),
            (Format::Mxfp4, 38),
        ];
        for (format, number) in pure {
            assert_eq!(Quant::Pure(format).file_type(), Some(number), "{format}");
        }
        // Mixes that only files of llama.cpp have.
        let mixes = [21, 22, 27, 29].map(file_type_name);
        assert_eq!(mixes, [Some("q2_k_s"), Some("iq3_xs"), Some("iq3_m"), Some("iq2_m")]);
        assert_eq!(file_type_name(33), None, "removed from llama.cpp");
    }
}
