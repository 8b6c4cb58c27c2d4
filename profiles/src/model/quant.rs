//! In which format does a quantised model store each of its tensors?
//!
//! A model is `pure` (every matrix in one format) or mixed by a rule. The rule here is llama.cpp's `Q4_K_M`: `Q4_K`,
//! but `Q6_K` for the output head (the embedding, if it is the head), and for `attn_v` and `ffn_down` in about half
//! of the layers: the first and last eighth and every third between. Vectors are always F32. Where a row is not a
//! whole number of 256-weight blocks, llama.cpp falls back to a format with blocks of 32, and so does the rule.
//!
//! Deviation: llama.cpp stores the other `attn_v` of the 80-layer model with 8 queries a key (Llama 2 and 3 70B) as
//! `Q5_K`; that is 42 MB of 42.5 GB.

use std::fmt;
use std::str::FromStr;

use super::layout::{TensorKind, TensorSpec};
use super::shape::ModelShape;
use crate::format::Format;

/// How the formats of a model's tensors are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quant {
    /// Every matrix in one format.
    Pure(Format),
    /// llama.cpp's `Q4_K_M`.
    Q4KM,
}

/// A tensor whose rows do not fit the blocks of its format.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "rows of `{tensor}` have {row} weights, not a multiple of the {block} of a {format} block: \
     choose a format with smaller blocks"
)]
pub struct BlockError {
    /// The tensor.
    pub tensor: String,
    /// Weights in a row.
    pub row: u64,
    /// Its format.
    pub format: Format,
    /// Weights in a block.
    pub block: u64,
}

impl Quant {
    /// The format of one tensor of a model of this shape.
    pub fn format(self, tensor: &TensorSpec, shape: &ModelShape) -> Result<Format, BlockError> {
        if tensor.dims.len() == 1 {
            return Ok(Format::F32);
        }
        let row = tensor.dims[0];
        let format = match self {
            Quant::Pure(format) => format,
            Quant::Q4KM => with_whole_blocks(q4_k_m(tensor, shape), row),
        };
        if row.is_multiple_of(format.block_len()) {
            return Ok(format);
        }
        Err(BlockError { tensor: tensor.name.clone(), row, format, block: format.block_len() })
    }
}

fn q4_k_m(tensor: &TensorSpec, shape: &ModelShape) -> Format {
    let head =
        tensor.name == "output.weight" || (shape.tied_embeddings && tensor.kind == TensorKind::Embedding);
    let sensitive = tensor.name.ends_with(".attn_v.weight") || tensor.name.ends_with(".ffn_down.weight");
    let more = tensor.layer.is_some_and(|layer| sensitive && use_more_bits(layer, shape.layers.0));
    if head || more { Format::Q6K } else { Format::Q4K }
}

/// llama.cpp's rule of the same name: the outer eighths and every third layer between them.
fn use_more_bits(layer: u32, layers: u32) -> bool {
    let eighth = layers / 8;
    layer < eighth || layer >= 7 * layers / 8 || (layer - eighth) % 3 == 2
}

fn with_whole_blocks(format: Format, row: u64) -> Format {
    if row.is_multiple_of(format.block_len()) {
        return format;
    }
    let smaller = if format == Format::Q6K { Format::Q8_0 } else { Format::Q5_0 };
    if row.is_multiple_of(smaller.block_len()) { smaller } else { Format::F16 }
}

impl fmt::Display for Quant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Quant::Pure(format) => f.pad(format.name()),
            Quant::Q4KM => f.pad("q4_k_m"),
        }
    }
}

/// A name of neither a format nor a mixing rule.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a quantisation: use `q4_k_m` or one of {known}", known = known_formats())]
pub struct UnknownQuant(pub String);

fn known_formats() -> String {
    Format::ALL.iter().map(|format| format.name()).collect::<Vec<_>>().join(", ")
}

impl FromStr for Quant {
    type Err = UnknownQuant;
    fn from_str(text: &str) -> Result<Self, UnknownQuant> {
        if text.eq_ignore_ascii_case("q4_k_m") {
            return Ok(Quant::Q4KM);
        }
        text.parse().map(Quant::Pure).map_err(|_| UnknownQuant(text.to_owned()))
    }
}

/// The name of `general.file_type` (llama.cpp, `enum llama_ftype`), lower case.
pub(crate) fn file_type_name(number: u32) -> Option<&'static str> {
    Some(match number {
        0 => "f32",
        1 => "f16",
        2 => "q4_0",
        3 => "q4_1",
        7 => "q8_0",
        8 => "q5_0",
        9 => "q5_1",
        10 => "q2_k",
        11 => "q3_k_s",
        12 => "q3_k_m",
        13 => "q3_k_l",
        14 => "q4_k_s",
        15 => "q4_k_m",
        16 => "q5_k_s",
        17 => "q5_k_m",
        18 => "q6_k",
        24 => "iq1_s",
        25 => "iq4_nl",
        30 => "iq4_xs",
        32 => "bf16",
        _ => return None,
    })
}

impl Quant {
    /// Its number as `general.file_type`, where llama.cpp has one: there is none for pure `q5_k` and the like, and
    /// the mixed type with the same base is the nearest.
    pub fn file_type(self) -> Option<u32> {
        let name = match self {
            Quant::Q4KM => "q4_k_m",
            Quant::Pure(Format::Q4K) => "q4_k_s",
            Quant::Pure(Format::Q5K) => "q5_k_s",
            Quant::Pure(Format::Q3K) => "q3_k_s",
            Quant::Pure(format) => format.name(),
        };
        (0..64).find(|&number| file_type_name(number) == Some(name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::layout::tensors;
    use crate::model::shape::tests::llama_8b;

    #[test]
    fn half_of_the_layers_get_more_bits() {
        let more: Vec<u32> = (0..32).filter(|&layer| use_more_bits(layer, 32)).collect();
        // 0..4, then 6, 9, .. 27, then 28..32.
        assert_eq!(more, [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]);
    }

    #[test]
    fn q4_k_m_spends_six_bits_where_it_matters() {
        let shape = llama_8b();
        let list = tensors(&shape);
        let format = |name: &str| {
            let tensor = list.iter().find(|tensor| tensor.name == name).unwrap();
            Quant::Q4KM.format(tensor, &shape).unwrap()
        };
        assert_eq!(format("token_embd.weight"), Format::Q4K);
        assert_eq!(format("output.weight"), Format::Q6K);
        assert_eq!(format("output_norm.weight"), Format::F32);
        assert_eq!(format("blk.3.attn_v.weight"), Format::Q6K);
        assert_eq!(format("blk.4.attn_v.weight"), Format::Q4K);
        assert_eq!(format("blk.31.ffn_down.weight"), Format::Q6K);
        assert_eq!(format("blk.31.ffn_up.weight"), Format::Q4K);
    }

    #[test]
    fn odd_rows_fall_back_or_are_refused() {
        let shape = ModelShape { embedding: 896, ..llama_8b() };
        let list = tensors(&shape);
        // 896 = 3.5 * 256 = 28 * 32.
        assert_eq!(Quant::Q4KM.format(&list[0], &shape), Ok(Format::Q5_0));
        let error = Quant::Pure(Format::Q4K).format(&list[0], &shape).unwrap_err();
        assert_eq!(
            error.to_string(),
            "rows of `token_embd.weight` have 896 weights, not a multiple of the 256 of a q4_k block: \
             choose a format with smaller blocks"
        );
    }

    #[test]
    fn names_read_back() {
        for quant in Format::ALL.iter().map(|&format| Quant::Pure(format)).chain([Quant::Q4KM]) {
            assert_eq!(quant.to_string().parse(), Ok(quant));
        }
        assert_eq!(Quant::Q4KM.file_type(), Some(15));
        assert_eq!(Quant::Pure(Format::Q8_0).file_type(), Some(7));
        assert!("q4".parse::<Quant>().is_err());
    }
}
