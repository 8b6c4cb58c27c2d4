//! Conversion of a file's weights to the formats of ML Drift, with one scale per row.
//!
//! ML Drift paper, section 4.2: q8 has eight bits and a scale for each channel everywhere; 8/4/4 has eight in attention
//! and four in the embedding and the feed-forward block. No file has these formats: each row is dequantised, rounded
//! and uploaded: `scale = max |w| / max`, `code = nearest even(w * (max / max |w|))`, with 127 and 7 for the largest
//! codes.
//!
//! One scale a row is coarser than the scales of a file's blocks and changes the output of a model;
//! docs/studies/ml-drift measures by how much. Weights are converted only on request.

use std::borrow::Cow;
use std::ops::Range;

use hearth_kernels::{Matrix, dequantise};

use crate::error::GpuError;
use crate::graph;
use crate::kernels::packing::Packed;

/// The conversion of weights on upload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Conversion {
    /// No conversion.
    #[default]
    None,
    /// Eight bits everywhere.
    Q8,
    /// Eight bits in attention, four in the feed-forward block and the output matrix.
    Mixed,
}

impl Conversion {
    /// Returns the format that a matrix of a layer is converted to, if it is.
    pub fn of_layer(self, matrix: graph::Matrix) -> Option<Packed> {
        use graph::Matrix::{Down, Gate, Up};
        match (self, matrix) {
            (Conversion::None, _) => None,
            (Conversion::Mixed, Gate | Up | Down) => Some(Packed::Row4),
            _ => Some(Packed::Row8),
        }
    }

    /// Returns the format that the output matrix is converted to, if it is.
    pub fn of_output(self) -> Option<Packed> {
        match self {
            Conversion::None => None,
            Conversion::Q8 => Some(Packed::Row8),
            Conversion::Mixed => Some(Packed::Row4),
        }
    }
}

/// A matrix of a file to be uploaded to the GPU.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Source<'a> {
    matrix: Matrix<'a>,
    /// The format on the GPU.
    pub(crate) packed: Packed,
}

impl<'a> Source<'a> {
    /// Returns a matrix to upload, converted if `to` is given.
    pub(crate) fn new(matrix: Matrix<'a>, to: Option<Packed>) -> Result<Source<'a>, GpuError> {
        let packed = match to {
            None => Packed::of(matrix.format, matrix.length)?,
            Some(packed) => packed.for_rows(matrix.length)?,
        };
        Ok(Source { matrix, packed })
    }

    /// The bytes of a row after conversion.
    pub(crate) fn row_bytes(&self) -> usize {
        if self.packed.is_by_row() {
            self.packed.texels(self.matrix.length as u32) as usize * 16
        } else {
            self.matrix.row_bytes()
        }
    }

    /// Bytes of a row in the file.
    pub(crate) fn stored_row_bytes(&self) -> u64 {
        self.matrix.row_bytes() as u64
    }

    /// Returns some rows as uploaded; scales of rows are added to `scales`, for formats that have them.
    pub(crate) fn rows(&self, rows: Range<usize>, scales: &mut Vec<f32>) -> Result<Cow<'a, [u8]>, GpuError> {
        let bytes = self.matrix.row_bytes();
        if !self.packed.is_by_row() {
            return Ok(Cow::Borrowed(&self.matrix.bytes[rows.start * bytes..rows.end * bytes]));
        }
        let mut values = vec![0.0; self.matrix.length];
        let mut all = Vec::with_capacity(rows.len() * self.row_bytes());
        for row in rows {
            dequantise(self.matrix.format, self.matrix.row(row), &mut values)
                .map_err(|error| GpuError::Refused { what: "weights".into(), why: error.to_string() })?;
            scales.push(round_row(self.packed, &values, &mut all));
        }
        Ok(Cow::Owned(all))
    }
}

/// Adds the codes of a row to `out`, in the order of texels, and gives its scale. A row with a weight that is no number
/// has a scale that is none.
pub fn round_row(packed: Packed, row: &[f32], out: &mut Vec<u8>) -> f32 {
    let larger =
        |max: f32, weight: &f32| if weight.abs() > max || weight.is_nan() { weight.abs() } else { max };
    let largest = row.iter().fold(0.0, larger);
    let max = if packed == Packed::Row4 { 7.0 } else { 127.0 };
    // Below it the inverse is not finite.
    let inverse = if largest > max / f32::MAX { max / largest } else { 0.0 };
    let code = |weight: f32| (weight * inverse).round_ties_even() as i8;
    if packed == Packed::Row4 {
        for unit in row.chunks_exact(32) {
            let nibble = |weight: f32| (code(weight) + 8) as u8;
            out.extend((0..16).map(|at| nibble(unit[at]) | (nibble(unit[at + 16]) << 4)));
        }
    } else {
        out.extend(row.iter().map(|&weight| code(weight) as u8));
    }
    if largest.is_finite() { largest / max } else { f32::NAN }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_and_scales_that_can_be_worked_out_by_hand() {
        let mut row = [0.0f32; 32];
        (row[0], row[1], row[17], row[31]) = (3.5, -7.0, 1.0, 0.4);
        let mut eight = Vec::new();
        let scale = round_row(Packed::Row8, &row, &mut eight);
        // 7 / 127 a code: 3.5 is 63.5, a tie, and goes to the even one.
        assert_eq!((scale, eight.len()), (7.0 / 127.0, 32));
        assert_eq!([eight[0], eight[1], eight[17], eight[31]].map(|code| code as i8), [64, -127, 18, 7]);
        let mut four = Vec::new();
        // 7 / 7 a code: 3.5 is a tie, 4. Byte j has weights j and j + 16, both 8 higher: c and 8.
        assert_eq!(round_row(Packed::Row4, &row, &mut four), 1.0);
        assert_eq!(four.len(), 16);
        assert_eq!([four[0], four[1], four[15]], [0x8c, 0x91, 0x88]);
    }

    #[test]
    fn what_is_no_number_is_seen_in_the_scale_and_zeros_stay_zeros() {
        for wrong in [f32::NAN, f32::INFINITY] {
            let mut row = [1.0; 32];
            row[7] = wrong;
            assert!(round_row(Packed::Row8, &row, &mut Vec::new()).is_nan(), "{wrong}");
        }
        let mut codes = Vec::new();
        assert_eq!(round_row(Packed::Row8, &[0.0; 32], &mut codes), 0.0);
        assert!(codes.iter().all(|&code| code == 0));
    }

    #[test]
    fn attention_has_eight_bits_and_the_rest_four() {
        use graph::Matrix::{Down, Gate, Query, Value};
        assert_eq!([Query, Value].map(|matrix| Conversion::Mixed.of_layer(matrix)), [Some(Packed::Row8); 2]);
        assert_eq!([Gate, Down].map(|matrix| Conversion::Mixed.of_layer(matrix)), [Some(Packed::Row4); 2]);
        assert_eq!(Conversion::Mixed.of_output(), Some(Packed::Row4));
        assert_eq!(Conversion::Q8.of_layer(Down), Some(Packed::Row8));
        assert_eq!((Conversion::None.of_layer(Down), Conversion::None.of_output()), (None, None));
    }
}
