//! Layouts of the weights of matrices and convolutions: the position of each weight.
//!
//! ML Drift paper, section 3.1. Weights have the axes O (outputs), H, W, D and I (inputs), and are rearranged to a
//! permutation of (G, S_O, O4, HWD, S_I, I4): G groups of S_O slices of four outputs each. Kernels can use two of
//! these layouts. A third one stores a tensor in four objects:
//!
//! ```text
//! by output     ((((g * S_O + sl) * 4 + o % 4) * HWD + hwd) * S_I + i / 4) * 4 + i % 4
//! interleaved   ((((g * HWD + hwd) * S_I + i / 4) * S_O + sl) * 4 + o % 4) * 4 + i % 4
//! four objects  object o % 4, texel (hwd * S_I + i / 4, g * S_O + sl), lane i % 4
//! ```
//!
//! "By output" is the naive layout: the weights of one output are contiguous, and neighbouring threads read along the
//! inputs. In the interleaved layout, neighbouring threads compute different outputs and read neighbouring texels.
//! Outputs are padded to whole groups, inputs to whole slices.

use super::{SLICE, ShapeError, checked_product};

/// The extents of the weights, and the number of output slices in a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WeightShape {
    outputs: u32,
    /// Number of filter taps: H * W * D.
    taps: u32,
    inputs: u32,
    group_slices: u32,
}

/// The layout of weights in a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum WeightOrder {
    /// The weights of each output are contiguous: (G, S_O, O4, HWD, S_I, I4).
    ByOutput,
    /// Neighbouring texels belong to neighbouring outputs: (G, HWD, S_I, S_O, O4, I4).
    Interleaved,
}

/// The position of a weight that is stored in four 2-D objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct WeightTexel {
    pub object: u32,
    /// Column of the texel.
    pub u: u32,
    /// Row of the texel.
    pub v: u32,
    /// Component of the weight in its texel.
    pub lane: u32,
}

impl WeightShape {
    /// Creates the shape of weights OHWDI, in groups of `group_slices` output slices. Returns an error if an extent
    /// is zero, or if 32 bits cannot index the elements.
    pub fn new(
        outputs: u32,
        [height, width, depth]: [u32; 3],
        inputs: u32,
        group_slices: u32,
    ) -> Result<WeightShape, ShapeError> {
        let axes = || format!("O={outputs} H={height} W={width} D={depth} I={inputs}");
        let taps = checked_product(&[height, width, depth], axes)?;
        let shape = WeightShape { outputs, taps, inputs, group_slices };
        if group_slices == 0 {
            return Err(ShapeError::Empty { shape: format!("{} with groups of zero slices", axes()) });
        }
        let padded = outputs.div_ceil(SLICE).checked_next_multiple_of(group_slices);
        let padded = padded.ok_or_else(|| ShapeError::Large { shape: axes() })?;
        checked_product(&[padded, SLICE, taps, inputs.div_ceil(SLICE), SLICE], axes)?;
        Ok(shape)
    }

    /// Returns G, the number of groups, the last of which is padded.
    pub fn groups(&self) -> u32 {
        self.outputs.div_ceil(SLICE).div_ceil(self.group_slices)
    }

    /// Returns S_I, the number of input slices, the last of which is padded.
    pub fn input_slices(&self) -> u32 {
        self.inputs.div_ceil(SLICE)
    }

    /// Returns the number of elements, including padding.
    pub fn elements(&self) -> u32 {
        self.groups() * self.group_slices * SLICE * self.taps * self.input_slices() * SLICE
    }

    /// Returns the index of the weight of output `o`, filter tap `tap` and input `i` in a buffer.
    pub fn element(&self, order: WeightOrder, o: u32, tap: u32, i: u32) -> u32 {
        let (slices, taps, inputs) = (self.group_slices, self.taps, self.input_slices());
        let (group, slice) = (o / SLICE / slices, o / SLICE % slices);
        let (output, input, lane) = (o % SLICE, i / SLICE, i % SLICE);
        match order {
            WeightOrder::ByOutput => {
                ((((group * slices + slice) * SLICE + output) * taps + tap) * inputs + input) * SLICE + lane
            }
            WeightOrder::Interleaved => {
                ((((group * taps + tap) * inputs + input) * slices + slice) * SLICE + output) * SLICE + lane
            }
        }
    }

    /// Returns the columns and rows of each object if the weights are stored in four objects.
    pub fn four_object_extent(&self) -> [u32; 2] {
        [self.taps * self.input_slices(), self.groups() * self.group_slices]
    }

    /// Returns the position of a weight if the weights are stored in four objects.
    pub fn four_object_texel(&self, o: u32, tap: u32, i: u32) -> WeightTexel {
        let u = tap * self.input_slices() + i / SLICE;
        WeightTexel { object: o % SLICE, u, v: o / SLICE, lane: i % SLICE }
    }

    /// Returns the WGSL index of the texel with input slice `input` of output `output`, both of which are WGSL
    /// expressions, for weights with one tap.
    pub fn texel_wgsl(&self, order: WeightOrder, output: &str, input: &str) -> String {
        let (inputs, rows) = (self.input_slices(), self.group_slices * SLICE);
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
    fn position_in_four_objects() {
        // ML Drift paper, Figure 2: OHWI (5, 2, 1, 7) in four textures of 4 by 2.
        let shape = WeightShape::new(5, [2, 1, 1], 7, 2).unwrap();
        assert_eq!(shape.four_object_extent(), [4, 2]);
        assert_eq!(shape.elements(), 4 * 8 * SLICE);
        // Output 4 is the first of the second slice; tap 1, input 6: column 1 * 2 + 1, lane 2.
        let texel = shape.four_object_texel(4, 1, 6);
        assert_eq!(texel, WeightTexel { object: 0, u: 3, v: 1, lane: 2 });
    }

    #[test]
    fn element_indices_in_a_small_matrix() {
        // Three output slices in groups of two: output 6 is lane 2 of slice 1 in group 0. Nine inputs are 3 slices.
        let shape = WeightShape::new(12, [1, 1, 1], 9, 2).unwrap();
        assert_eq!(shape.element(WeightOrder::ByOutput, 6, 0, 5), (6 * 3 + 1) * 4 + 1);
        assert_eq!(shape.element(WeightOrder::Interleaved, 6, 0, 5), ((2 + 1) * 4 + 2) * 4 + 1);
        assert_eq!(shape.groups(), 2);
    }

    #[test]
    fn shapes_that_32_bits_cannot_index_are_refused() {
        assert!(matches!(WeightShape::new(0, [1; 3], 1, 1), Err(ShapeError::Empty { .. })));
        assert!(matches!(WeightShape::new(1, [1; 3], 1, 0), Err(ShapeError::Empty { .. })));
        assert!(matches!(WeightShape::new(1 << 20, [1; 3], 1 << 14, 1), Err(ShapeError::Large { .. })));
        assert!(matches!(WeightShape::new(u32::MAX, [1; 3], 1, 3), Err(ShapeError::Large { .. })));
    }

    proptest! {
        #[test]
        fn every_weight_has_its_own_position(
            outputs in 1u32..30,
            taps in prop::array::uniform3(1u32..3),
            inputs in 1u32..14,
            group_slices in 1u32..4,
        ) {
            let shape = WeightShape::new(outputs, taps, inputs, group_slices).unwrap();
            let all = taps.iter().product::<u32>();
            for order in [WeightOrder::ByOutput, WeightOrder::Interleaved] {
                let mut seen = BTreeSet::new();
                for o in 0..outputs {
                    for (tap, i) in (0..all).flat_map(|tap| (0..inputs).map(move |i| (tap, i))) {
                        let at = shape.element(order, o, tap, i);
                        prop_assert!(at < shape.elements() && seen.insert(at), "{:?} {}", order, at);
                    }
                }
            }
            let [columns, rows] = shape.four_object_extent();
            let mut seen = BTreeSet::new();
            for o in 0..outputs {
                for (tap, i) in (0..all).flat_map(|tap| (0..inputs).map(move |i| (tap, i))) {
                    let texel = shape.four_object_texel(o, tap, i);
                    prop_assert!(texel.object < 4 && texel.u < columns && texel.v < rows && texel.lane < 4);
                    prop_assert!(seen.insert(texel));
                }
            }
        }
    }
}
