//! Layouts of matrices and convolutions: the place of each weight.
//!
//! ML Drift paper, section 3.1. Weights have the axes O (outputs), H, W, D and I (inputs), and are rearranged to a
//! permutation of (G, S_O, O4, HWD, S_I, I4): G groups of S_O slices of four outputs each. Here are two of them, which
//! a kernel can ask for, and one that spreads a tensor over four objects:
//!
//! ```text
//! by output     ((((g * S_O + sl) * 4 + o % 4) * HWD + hwd) * S_I + i / 4) * 4 + i % 4
//! interleaved   ((((g * HWD + hwd) * S_I + i / 4) * S_O + sl) * 4 + o % 4) * 4 + i % 4
//! four objects  object o % 4, texel (hwd * S_I + i / 4, g * S_O + sl), lane i % 4
//! ```
//!
//! By output, the weights of one output lie together: the naive layout, in which one group of threads works along the
//! inputs. Interleaved, neighbouring threads that each work for one output read neighbouring texels. Outputs are padded
//! to whole groups, inputs to whole slices.

use super::{SLICE, ShapeError, product};

/// The axes of weights, and how many slices of outputs make a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WeightShape {
    outputs: u32,
    /// H * W * D.
    taps: u32,
    inputs: u32,
    group_slices: u32,
}

/// An order of weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum WeightOrder {
    /// (G, S_O, O4, HWD, S_I, I4).
    ByOutput,
    /// (G, HWD, S_I, S_O, O4, I4).
    Interleaved,
}

/// The position of a weight: object, texel and lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct WeightTexel {
    pub object: u32,
    /// Column of its texel.
    pub u: u32,
    /// Row of its texel.
    pub v: u32,
    pub lane: u32,
}

impl WeightShape {
    /// Weights in OHWDI order, in groups of `group_slices` slices of outputs.
    pub fn new(
        outputs: u32,
        [height, width, depth]: [u32; 3],
        inputs: u32,
        group_slices: u32,
    ) -> Result<WeightShape, ShapeError> {
        let axes = || format!("O={outputs} H={height} W={width} D={depth} I={inputs}");
        let taps = product(&[height, width, depth], axes)?;
        let shape = WeightShape { outputs, taps, inputs, group_slices };
        if group_slices == 0 {
            return Err(ShapeError::Empty { shape: format!("{} with groups of no slices", axes()) });
        }
        let padded = outputs.div_ceil(SLICE).checked_next_multiple_of(group_slices);
        let padded = padded.ok_or_else(|| ShapeError::Large { shape: axes() })?;
        product(&[padded, SLICE, taps, inputs.div_ceil(SLICE), SLICE], axes)?;
        Ok(shape)
    }

    /// G: groups, the last padded.
    pub fn groups(&self) -> u32 {
        self.outputs.div_ceil(SLICE).div_ceil(self.group_slices)
    }

    /// S_I: slices of inputs, the last padded.
    pub fn input_slices(&self) -> u32 {
        self.inputs.div_ceil(SLICE)
    }

    /// Elements with their padding.
    pub fn elements(&self) -> u32 {
        self.groups() * self.group_slices * SLICE * self.taps * self.input_slices() * SLICE
    }

    /// The element of a weight in a 1-D object.
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

    /// Columns and rows of each of four objects.
    pub fn four_objects(&self) -> [u32; 2] {
        [self.taps * self.input_slices(), self.groups() * self.group_slices]
    }

    /// The object, texel and lane of a weight if the matrix is stored in four objects.
    pub fn four_object_texel(&self, o: u32, tap: u32, i: u32) -> WeightTexel {
        let u = tap * self.input_slices() + i / SLICE;
        WeightTexel { object: o % SLICE, u, v: o / SLICE, lane: i % SLICE }
    }

    /// The texel of four inputs `input` of an output as WGSL, both of them expressions; one tap.
    pub fn wgsl(&self, order: WeightOrder, output: &str, input: &str) -> String {
        let (inputs, rows) = (self.input_slices(), self.group_slices * SLICE);
        match order {
            // Groups of outputs one after another are outputs one after another.
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
    fn a_tensor_over_four_objects() {
        // ML Drift paper, Figure 2: OHWI (5, 2, 1, 7) in four textures of 4 by 2.
        let shape = WeightShape::new(5, [2, 1, 1], 7, 2).unwrap();
        assert_eq!(shape.four_objects(), [4, 2]);
        assert_eq!(shape.elements(), 4 * 8 * SLICE);
        // Output 4 is the first of the second slice; tap 1, input 6: column 1 * 2 + 1, lane 2.
        let texel = shape.four_object_texel(4, 1, 6);
        assert_eq!(texel, WeightTexel { object: 0, u: 3, v: 1, lane: 2 });
    }

    #[test]
    fn elements_that_can_be_counted_by_hand() {
        // Three slices in groups of two; output 6 is lane 2 of slice 1, group 0; inputs of 9 are 3 slices.
        let shape = WeightShape::new(12, [1, 1, 1], 9, 2).unwrap();
        assert_eq!(shape.element(WeightOrder::ByOutput, 6, 0, 5), (6 * 3 + 1) * 4 + 1);
        assert_eq!(shape.element(WeightOrder::Interleaved, 6, 0, 5), ((2 + 1) * 4 + 2) * 4 + 1);
        assert_eq!(shape.groups(), 2);
    }

    #[test]
    fn what_cannot_be_addressed_is_refused() {
        assert!(matches!(WeightShape::new(0, [1; 3], 1, 1), Err(ShapeError::Empty { .. })));
        assert!(matches!(WeightShape::new(1, [1; 3], 1, 0), Err(ShapeError::Empty { .. })));
        assert!(matches!(WeightShape::new(1 << 20, [1; 3], 1 << 14, 1), Err(ShapeError::Large { .. })));
        assert!(matches!(WeightShape::new(u32::MAX, [1; 3], 1, 3), Err(ShapeError::Large { .. })));
    }

    proptest! {
        #[test]
        fn every_weight_has_a_place_of_its_own(
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
            let [columns, rows] = shape.four_objects();
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
