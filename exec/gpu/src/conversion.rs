//! Conversion of the weights of a model file to the formats of ML Drift, which have one scale per row.
//!
//! ML Drift paper, section 4.2: q8 has eight bits and one scale per channel for all weights; 8/4/4 has eight
//! bits in attention, and four in the embedding and the feed-forward block. GGUF files do not have these formats, so
//! each row is dequantised, quantised again and uploaded. `scale = max |w| / m`,
//! `quant = round_ties_even(w * (m / max |w|))`, where the largest quant m is 127 or 7.
//!
//! One scale per row is coarser than one scale per block, as in GGUF files, and changes the output of a model;
//! docs/studies/ml-drift measures by how much. Weights are converted to them only on request.
//!
//! Weights in formats without a GPU kernel, such as `Q5_K`, are converted to f16, which takes two to eight times the
//! GPU memory and keeps 11 bits of each weight.

use std::borrow::Cow;
use std::ops::Range;

use half::f16;
use hearth_kernels::{Matrix, dequantise};

use crate::error::GpuError;
use crate::graph;
use crate::kernels::packing::PackedFormat;

/// The conversion of weights when they are uploaded to the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WeightConversion {
    /// No conversion: weights keep the format of the model file.
    #[default]
    None,
    /// Eight bits in all matrices (q8).
    Q8,
    /// Eight bits in attention, and four bits in the feed-forward block and the output matrix (8/4/4).
    Mixed,
}

impl WeightConversion {
    /// Returns the format to which a matrix of a layer is converted; `None` if the matrix is not converted.
    pub fn layer_format(self, matrix: graph::LayerMatrix) -> Option<PackedFormat> {
        use graph::LayerMatrix::{Down, Gate, Up};
        match (self, matrix) {
            (WeightConversion::None, _) => None,
            (WeightConversion::Mixed, Gate | Up | Down) => Some(PackedFormat::Row4),
            _ => Some(PackedFormat::Row8),
        }
    }

    /// Returns the format to which the output matrix is converted; `None` if the matrix is not converted.
    pub fn output_format(self) -> Option<PackedFormat> {
        self.layer_format(graph::LayerMatrix::Down)
    }
}

/// Returns the size in bytes of a row of `matrix` when it is uploaded for the format `packed`.
pub(crate) fn uploaded_row_bytes(matrix: Matrix<'_>, packed: PackedFormat) -> usize {
    if packed.stores(matrix.format) {
        matrix.row_bytes()
    } else {
        packed.texels_per_row(matrix.row_length as u32) as usize * 16
    }
}

/// Returns the bytes of the rows `rows` of `matrix` to upload for the format `packed`. If the file does not have them
/// in this format, converts the rows, and if `packed` has one scale per row, appends the scales to `scales`.
pub(crate) fn converted_rows<'a>(
    matrix: Matrix<'a>,
    packed: PackedFormat,
    rows: Range<usize>,
    scales: &mut Vec<f32>,
) -> Result<Cow<'a, [u8]>, GpuError> {
    let bytes = matrix.row_bytes();
    if packed.stores(matrix.format) {
        return Ok(Cow::Borrowed(&matrix.bytes[rows.start * bytes..rows.end * bytes]));
    }
    let mut values = vec![0.0; matrix.row_length];
    let mut all = Vec::with_capacity(rows.len() * uploaded_row_bytes(matrix, packed));
    for row in rows {
        dequantise(matrix.format, matrix.row(row), &mut values).map_err(|error| GpuError::Failed {
            what: "the conversion of weights".into(),
            why: error.to_string(),
        })?;
        if packed.has_row_scales() {
            scales.push(quantise_row(packed, &values, &mut all));
        } else {
            all.extend(values.iter().flat_map(|&value| f16::from_f32(value).to_le_bytes()));
        }
    }
    Ok(Cow::Owned(all))
}

/// Quantises a row of weights to `packed`: appends the quants to `out`, in the order in which texels store them, and
/// returns the scale of the row. The scale is NaN if a weight is not finite.
pub fn quantise_row(packed: PackedFormat, row: &[f32], out: &mut Vec<u8>) -> f32 {
    let larger = |max: f32, size: f32| if size > max || size.is_nan() { size } else { max };
    let largest = row.iter().map(|weight| weight.abs()).fold(0.0, larger);
    let max = if packed == PackedFormat::Row4 { 7.0 } else { 127.0 };
    // Below this limit the inverse is not finite.
    let inverse = if largest > max / f32::MAX { max / largest } else { 0.0 };
    let quant = |weight: f32| (weight * inverse).round_ties_even() as i8;
    if packed == PackedFormat::Row4 {
        for unit in row.chunks_exact(32) {
            let nibble = |weight: f32| (quant(weight) + 8) as u8;
            out.extend((0..16).map(|at| nibble(unit[at]) | (nibble(unit[at + 16]) << 4)));
        }
    } else {
        out.extend(row.iter().map(|&weight| quant(weight) as u8));
    }
    if largest.is_finite() { largest / max } else { f32::NAN }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quants_and_scales_of_a_small_row() {
        let mut row = [0.0f32; 32];
        (row[0], row[1], row[17], row[31]) = (3.5, -7.0, 1.0, 0.4);
        let mut eight = Vec::new();
        let scale = quantise_row(PackedFormat::Row8, &row, &mut eight);
        // One quant is 7 / 127: 3.5 is 63.5 quants, a tie, which is rounded to the even quant.
        assert_eq!((scale, eight.len()), (7.0 / 127.0, 32));
        assert_eq!([eight[0], eight[1], eight[17], eight[31]].map(|quant| quant as i8), [64, -127, 18, 7]);
        let mut four = Vec::new();
        // One quant is 7 / 7: 3.5 is a tie, rounded to 4. Byte j has weights j and j + 16, with an offset of 8.
        assert_eq!(quantise_row(PackedFormat::Row4, &row, &mut four), 1.0);
        assert_eq!(four.len(), 16);
        assert_eq!([four[0], four[1], four[15]], [0x8c, 0x91, 0x88]);
    }

    #[test]
    fn non_finite_rows_get_the_scale_nan_and_zeros_remain_zeros() {
        for value in [f32::NAN, f32::INFINITY] {
            let mut row = [1.0; 32];
            row[7] = value;
            assert!(quantise_row(PackedFormat::Row8, &row, &mut Vec::new()).is_nan(), "{value}");
        }
        let mut quants = Vec::new();
        assert_eq!(quantise_row(PackedFormat::Row8, &[0.0; 32], &mut quants), 0.0);
        assert!(quants.iter().all(|&quant| quant == 0));
    }

    #[test]
    fn mixed_has_eight_bits_in_attention_and_four_elsewhere() {
        use graph::LayerMatrix::{Down, Gate, Query, Value};
        let mixed = |matrix| WeightConversion::Mixed.layer_format(matrix);
        assert_eq!([Query, Value].map(mixed), [Some(PackedFormat::Row8); 2]);
        assert_eq!([Gate, Down].map(mixed), [Some(PackedFormat::Row4); 2]);
        assert_eq!(WeightConversion::Mixed.output_format(), Some(PackedFormat::Row4));
        assert_eq!(WeightConversion::Q8.layer_format(Down), Some(PackedFormat::Row8));
        assert_eq!(WeightConversion::None.layer_format(Down), None);
        assert_eq!(WeightConversion::None.output_format(), None);
    }
}
