//! Layouts of weight matrices: the position of each weight in a GPU buffer.
//!
//! ML Drift paper, section 3.1, for weights with one filter tap (H = W = D = 1). Weights have the axes O (outputs) and
//! I (inputs), and are rearranged to a permutation of (G, S_O, O4, S_I, I4): G groups of S_O slices of four outputs
//! each. Kernels can use two of these layouts:
//!
//! ```text
//! by output     (((g * S_O + sl) * 4 + o % 4) * S_I + i / 4) * 4 + i % 4
//! interleaved   (((g * S_I + i / 4) * S_O + sl) * 4 + o % 4) * 4 + i % 4
//! ```
//!
//! Here o and i are the indices of output and input, g is the group of output o, and sl its slice in the group. "By
//! output" is the naive layout: the weights of one output are contiguous, and neighbouring threads read along the
//! inputs. In the interleaved layout, neighbouring threads compute different outputs and read neighbouring texels.
//! Outputs are padded to whole groups, inputs to whole slices.

use super::{SLICE_SIZE, ShapeError, checked_product};

/// The shape of a weight matrix, and the number of slices of four outputs in a group of the layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WeightShape {
    outputs: u32,
    inputs: u32,
    group_slices: u32,
}

/// The layout of the weights of a matrix in a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum WeightOrder {
    /// The weights of each output are contiguous: axes (G, S_O, O4, S_I, I4) of the ML Drift paper, section 3.1.
    ByOutput,
    /// Neighbouring texels belong to neighbouring outputs: axes (G, S_I, S_O, O4, I4) of ML Drift, section 3.1.
    Interleaved,
}

impl WeightShape {
    /// Creates the shape of a weight matrix with groups of `group_slices` output slices. Returns an error if an
    /// argument is zero, or if 32-bit indices are too small for the elements.
    pub fn new(outputs: u32, inputs: u32, group_slices: u32) -> Result<WeightShape, ShapeError> {
        // The error names all axes of the paper.
        let axes = || format!("O={outputs} H=1 W=1 D=1 I={inputs}");
        if group_slices == 0 {
            return Err(ShapeError::EmptyAxis { shape: format!("{} with groups of zero slices", axes()) });
        }
        let padded = outputs.div_ceil(SLICE_SIZE).checked_next_multiple_of(group_slices);
        let padded = padded.ok_or_else(|| ShapeError::TooLarge { shape: axes() })?;
        checked_product(&[padded, SLICE_SIZE, inputs.div_ceil(SLICE_SIZE), SLICE_SIZE], axes)?;
        Ok(WeightShape { outputs, inputs, group_slices })
    }

    /// Returns the number of groups of output slices (G). The last group can be padded.
    pub fn group_count(&self) -> u32 {
        self.outputs.div_ceil(SLICE_SIZE).div_ceil(self.group_slices)
    }

    /// Returns the number of input slices (S_I). The last slice can be padded.
    pub fn input_slice_count(&self) -> u32 {
        self.inputs.div_ceil(SLICE_SIZE)
    }

    /// Returns the number of elements in the buffer, including padding.
    pub fn element_count(&self) -> u32 {
        self.group_count() * self.group_slices * SLICE_SIZE * self.input_slice_count() * SLICE_SIZE
    }

    /// Returns the index in the buffer of the weight of output `o` and input `i`.
    pub fn element_index(&self, order: WeightOrder, o: u32, i: u32) -> u32 {
        let (slices, inputs) = (self.group_slices, self.input_slice_count());
        let (group, slice) = (o / SLICE_SIZE / slices, o / SLICE_SIZE % slices);
        let (output, input, lane) = (o % SLICE_SIZE, i / SLICE_SIZE, i % SLICE_SIZE);
        let texel = match order {
            WeightOrder::ByOutput => ((group * slices + slice) * SLICE_SIZE + output) * inputs + input,
            WeightOrder::Interleaved => ((group * inputs + input) * slices + slice) * SLICE_SIZE + output,
        };
        texel * SLICE_SIZE + lane
    }

    /// Returns the WGSL index of the texel of output `output` and input slice `input`, which are WGSL expressions.
    pub fn texel_index_wgsl(&self, order: WeightOrder, output: &str, input: &str) -> String {
        let (inputs, rows) = (self.input_slice_count(), self.group_slices * SLICE_SIZE);
        match order {
            // The layout does not depend on the groups, because outputs are in ascending order.
            WeightOrder::ByOutput => format!("(({output}) * {inputs}u + ({input}))"),
            WeightOrder::Interleaved => {
                format!("((({output}) / {rows}u * {inputs}u + ({input})) * {rows}u + ({output}) % {rows}u)")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn element_indices_in_a_small_matrix() {
        // Three output slices in groups of two: output 6 is lane 2 of slice 1 in group 0. Nine inputs are 3 slices.
        let shape = WeightShape::new(12, 9, 2).unwrap();
        assert_eq!(shape.element_index(WeightOrder::ByOutput, 6, 5), (6 * 3 + 1) * 4 + 1);
        assert_eq!(shape.element_index(WeightOrder::Interleaved, 6, 5), ((2 + 1) * 4 + 2) * 4 + 1);
        assert_eq!(shape.group_count(), 2);
    }

    #[test]
    fn shapes_that_32_bits_cannot_index_are_rejected() {
        assert!(matches!(WeightShape::new(0, 1, 1), Err(ShapeError::EmptyAxis { .. })));
        assert!(matches!(WeightShape::new(1, 1, 0), Err(ShapeError::EmptyAxis { .. })));
        assert!(matches!(WeightShape::new(1 << 20, 1 << 14, 1), Err(ShapeError::TooLarge { .. })));
        assert!(matches!(WeightShape::new(u32::MAX, 1, 3), Err(ShapeError::TooLarge { .. })));
    }

    proptest! {
        #[test]
        fn every_weight_has_its_own_position(
            outputs in 1u32..30, inputs in 1u32..14, group_slices in 1u32..4,
        ) {
            let shape = WeightShape::new(outputs, inputs, group_slices).unwrap();
            for order in [WeightOrder::ByOutput, WeightOrder::Interleaved] {
                let mut seen = BTreeSet::new();
                for (o, i) in (0..outputs).flat_map(|o| (0..inputs).map(move |i| (o, i))) {
                    let at = shape.element_index(order, o, i);
                    prop_assert!(at < shape.element_count() && seen.insert(at), "{:?} {}", order, at);
                }
            }
        }
    }
}
