//! Weight formats: the GGUF tensor types, with the number of weights and of bytes in a block.
//!
//! The type numbers and block sizes are those of GGUF (ggml.h, `enum ggml_type`, and the block structs of
//! ggml-common.h). The kernels decode the blocks.

use std::fmt;
use std::str::FromStr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::units::Bytes;

macro_rules! formats {
    ($(#[doc = $doc:literal] $name:ident = $id:literal, $text:literal, $len:literal, $bytes:literal;)+) => {
        /// A weight format: a GGUF tensor type.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
        pub enum Format {
            $(#[doc = $doc] #[serde(rename = $text)] $name,)+
        }

        impl Format {
            pub const ALL: &'static [Format] = &[$(Format::$name,)+];

            /// Returns the format with this ggml type number, or `None` if the number is unknown.
            pub fn from_ggml_id(id: u32) -> Option<Format> {
                match id {
                    $($id => Some(Format::$name),)+
                    _ => None,
                }
            }

            /// Returns the ggml type number that identifies the format in GGUF files.
            pub fn ggml_id(self) -> u32 {
                match self { $(Format::$name => $id,)+ }
            }

            /// Returns the name of the format in YAML documents, such as `q4_k`.
            pub fn name(self) -> &'static str {
                match self { $(Format::$name => $text,)+ }
            }

            /// Returns the number of weights in a block of this format.
            pub fn block_len(self) -> u64 {
                match self { $(Format::$name => $len,)+ }
            }

            /// Returns the size of a block of this format, in bytes.
            pub fn block_bytes(self) -> u64 {
                match self { $(Format::$name => $bytes,)+ }
            }
        }
    };
}

formats! {
    /// 32-bit floating-point numbers (IEEE 754 single precision).
    F32 = 0, "f32", 1, 4;
    /// 16-bit floating-point numbers (IEEE 754 half precision).
    F16 = 1, "f16", 1, 2;
    /// 4-bit weights in blocks of 32 with an f16 scale.
    Q4_0 = 2, "q4_0", 32, 18;
    /// 4-bit weights in blocks of 32 with an f16 scale and minimum.
    Q4_1 = 3, "q4_1", 32, 20;
    /// 5-bit weights in blocks of 32 with an f16 scale.
    Q5_0 = 6, "q5_0", 32, 22;
    /// 5-bit weights in blocks of 32 with an f16 scale and minimum.
    Q5_1 = 7, "q5_1", 32, 24;
    /// 8-bit weights in blocks of 32 with an f16 scale.
    Q8_0 = 8, "q8_0", 32, 34;
    /// 2-bit K-quant in blocks of 256: 16 sub-blocks of 16 weights with 4-bit scales and minima.
    Q2K = 10, "q2_k", 256, 84;
    /// 3-bit K-quant in blocks of 256: 16 sub-blocks of 16 weights with 6-bit scales.
    Q3K = 11, "q3_k", 256, 110;
    /// 4-bit K-quant in blocks of 256: 8 sub-blocks of 32 weights with 6-bit scales and minima.
    Q4K = 12, "q4_k", 256, 144;
    /// 5-bit K-quant in blocks of 256: 8 sub-blocks of 32 weights with 6-bit scales and minima.
    Q5K = 13, "q5_k", 256, 176;
    /// 6-bit K-quant in blocks of 256: 16 sub-blocks of 16 weights with 8-bit scales.
    Q6K = 14, "q6_k", 256, 210;
    /// 2.06-bit weights in blocks of 256: signs, and indices into a codebook of magnitudes.
    Iq2Xxs = 16, "iq2_xxs", 256, 66;
    /// 2.31-bit weights in blocks of 256: signs, and indices into a codebook of magnitudes.
    Iq2Xs = 17, "iq2_xs", 256, 74;
    /// 3.06-bit weights in blocks of 256: signs, and indices into a codebook of magnitudes.
    Iq3Xxs = 18, "iq3_xxs", 256, 98;
    /// 1.56-bit weights in blocks of 256, stored as indices into a codebook.
    Iq1S = 19, "iq1_s", 256, 50;
    /// 4-bit weights in blocks of 32, quantised to 16 unevenly spaced levels.
    Iq4Nl = 20, "iq4_nl", 32, 18;
    /// 3.44-bit weights in blocks of 256: signs, and indices into a codebook of magnitudes.
    Iq3S = 21, "iq3_s", 256, 110;
    /// 2.56-bit weights in blocks of 256: signs, and indices into a codebook of magnitudes.
    Iq2S = 22, "iq2_s", 256, 82;
    /// 4-bit weights in blocks of 256, quantised to 16 unevenly spaced levels.
    Iq4Xs = 23, "iq4_xs", 256, 136;
    /// 1.75-bit weights in blocks of 256, stored as indices into the codebook of IQ1_S.
    Iq1M = 29, "iq1_m", 256, 56;
    /// bfloat16: the upper 16 bits of a 32-bit floating-point number.
    Bf16 = 30, "bf16", 1, 2;
    /// 4-bit floating-point numbers in blocks of 32 with a power of two as scale.
    Mxfp4 = 39, "mxfp4", 32, 17;
}

impl Format {
    /// Returns the size of a row of `len` weights; `None` on overflow or if the row is not a whole number of blocks.
    pub fn row_bytes(self, len: u64) -> Option<Bytes> {
        let blocks = len.is_multiple_of(self.block_len()).then(|| len / self.block_len())?;
        blocks.checked_mul(self.block_bytes()).map(Bytes)
    }

    pub fn bits_per_weight(self) -> f64 {
        8.0 * self.block_bytes() as f64 / self.block_len() as f64
    }

    /// Returns the names of all formats, separated by commas, for error messages.
    pub(crate) fn names() -> String {
        Self::ALL.iter().map(|format| format.name()).collect::<Vec<_>>().join(", ")
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a weight format: use one of {known}", known = Format::names())]
pub struct UnknownFormat(pub String);

impl FromStr for Format {
    type Err = UnknownFormat;
    fn from_str(text: &str) -> Result<Self, UnknownFormat> {
        let wanted = text.to_ascii_lowercase();
        Self::ALL.iter().copied().find(|f| f.name() == wanted).ok_or_else(|| UnknownFormat(text.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_and_names_are_unique() {
        for &format in Format::ALL {
            assert_eq!(Format::from_ggml_id(format.ggml_id()), Some(format));
            assert_eq!(format.name().parse(), Ok(format));
        }
        assert_eq!(Format::from_ggml_id(4), None, "Q4_2 was removed from the format");
    }

    #[test]
    fn ids_are_those_of_ggml() {
        // source: `enum ggml_type` of ggml.h
        let found =
            [16, 17, 18, 19, 20, 21, 22, 23, 29, 39].map(|id| Format::from_ggml_id(id).unwrap().name());
        let names =
            ["iq2_xxs", "iq2_xs", "iq3_xxs", "iq1_s", "iq4_nl", "iq3_s", "iq2_s", "iq4_xs", "iq1_m", "mxfp4"];
        assert_eq!(found, names);
    }

    #[test]
    fn row_bytes_needs_whole_blocks() {
        // 2048 weights of Q4_K: 8 blocks of 144 bytes.
        assert_eq!(Format::Q4K.row_bytes(2048), Some(Bytes(1152)));
        assert_eq!(Format::Q4K.row_bytes(2000), None);
        assert_eq!(Format::F32.row_bytes(u64::MAX), None);
        assert_eq!(Format::Q4K.bits_per_weight(), 4.5);
    }
}
