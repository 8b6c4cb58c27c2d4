//! Layouts of activation tensors: the position of each texel in a GPU buffer or texture.
//!
//! ML Drift paper, section 3.1 and Table 1, for batch size B, height H, width W, depth D = 1 and C channels, which form
//! S = ceil(C / 4) slices:
//!
//! ```text
//! 1-D buffer, DSHWBC4     ((s * H + y) * W + x) * B + b
//! 2-D texture, HSWBDC4    (x * B + b,  y * S + s)
//! 3-D texture, DSHWBC4    (x * B + b,  y,  s)
//! 1-D buffer, BHWDSC4     ((b * H + y) * W + x) * S + s
//! ```
//!
//! The last layout is the naive layout, in which the channels of a position are contiguous, as on a CPU. Uploads and
//! downloads use the naive layout, and tests compare the other layouts with it. Channels are padded with zeros to whole
//! slices.

use super::{SLICE_SIZE, ShapeError, checked_product};

/// The shape of a logical tensor: the extents along the axes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    batch: u32,
    height: u32,
    width: u32,
    channels: u32,
}

/// The logical coordinates of a texel, which is a slice of four channels at one position of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct TexelCoordinates {
    pub b: u32,
    pub y: u32,
    pub x: u32,
    /// Index of the slice of four channels.
    pub s: u32,
}

/// The storage of a tensor: a buffer or a texture, and the order of the texels in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Storage {
    /// A 1-D buffer with the axes in the order DSHWBC4 of the ML Drift paper, section 3.1.
    Buffer,
    /// A 1-D buffer with the naive layout (BHWDSC4): the channels of a position are contiguous.
    Linear,
    /// A 2-D texture with the axes in the order HSWBDC4 of the ML Drift paper, section 3.1.
    Texture2d,
    /// A 3-D texture with the axes in the order DSHWBC4 of the ML Drift paper, section 3.1.
    Texture3d,
}

impl Shape {
    /// Creates a shape. Returns an error if an extent is zero, or if 32-bit indices are too small for the texels.
    pub fn new(batch: u32, height: u32, width: u32, channels: u32) -> Result<Shape, ShapeError> {
        let axes = || format!("B={batch} H={height} W={width} D=1 C={channels}");
        checked_product(&[batch, height, width, channels.div_ceil(SLICE_SIZE)], axes)?;
        Ok(Shape { batch, height, width, channels })
    }

    /// Returns the extents of batch, height and width.
    pub fn extents(&self) -> [u32; 3] {
        [self.batch, self.height, self.width]
    }

    /// Returns the number of slices of four channels. The last slice can be padded.
    pub fn slice_count(&self) -> u32 {
        self.channels.div_ceil(SLICE_SIZE)
    }

    pub fn texel_count(&self) -> u32 {
        self.batch * self.height * self.width * self.slice_count()
    }

    /// Iterates over the coordinates of all texels in no particular order.
    pub fn all_texels(&self) -> impl Iterator<Item = TexelCoordinates> + use<> {
        let ([batch, height, width], slices) = (self.extents(), self.slice_count());
        (0..self.texel_count()).map(move |at| {
            let (at, s) = (at / slices, at % slices);
            let (at, x) = (at / width, at % width);
            TexelCoordinates { b: at / height % batch, y: at % height, x, s }
        })
    }
}

impl Storage {
    pub const ALL: [Storage; 4] = [Storage::Buffer, Storage::Linear, Storage::Texture2d, Storage::Texture3d];

    /// Returns the width, height and depth, in texels, of the buffer or texture that stores a tensor of `shape`.
    pub fn object_extent(self, shape: &Shape) -> [u32; 3] {
        let ([batch, height, width], slices) = (shape.extents(), shape.slice_count());
        match self {
            Storage::Buffer | Storage::Linear => [shape.texel_count(), 1, 1],
            Storage::Texture2d => [width * batch, height * slices, 1],
            Storage::Texture3d => [width * batch, height, slices],
        }
    }

    /// Returns the position of a texel: the index in a buffer, or the coordinates in a texture.
    pub fn position(self, shape: &Shape, at: TexelCoordinates) -> [u32; 3] {
        let ([batch, height, width], slices) = (shape.extents(), shape.slice_count());
        let TexelCoordinates { b, y, x, s } = at;
        match self {
            Storage::Buffer => [((s * height + y) * width + x) * batch + b, 0, 0],
            Storage::Linear => [((b * height + y) * width + x) * slices + s, 0, 0],
            Storage::Texture2d => [x * batch + b, y * slices + s, 0],
            Storage::Texture3d => [x * batch + b, y, s],
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn positions_in_small_tensors() {
        let positions = |shape: Shape, b, y, x, s| {
            [Storage::Buffer, Storage::Texture2d, Storage::Texture3d]
                .map(|storage| storage.position(&shape, TexelCoordinates { b, y, x, s }))
        };
        // Channel 4 of 5 is in the second of two slices: ((1 * 2 + 1) * 3 + 2) * 1 + 0 = 11; row 1 * 2 + 1 = 3.
        let shape = Shape::new(1, 2, 3, 5).unwrap();
        assert_eq!(positions(shape, 0, 1, 2, 1), [[11, 0, 0], [2, 3, 0], [2, 1, 1]]);
        // ML Drift paper, Figure 1: a texture of 3 by 4 is 2 * 2 rows of 3, a buffer has 12 texels.
        assert_eq!(Storage::Buffer.object_extent(&shape), [12, 1, 1]);
        assert_eq!(Storage::Texture2d.object_extent(&shape), [3, 4, 1]);
        assert_eq!(Storage::Texture3d.object_extent(&shape), [3, 2, 2]);
        // Three slices: ((2 * 3 + 2) * 4 + 3) * 2 + 1 = 71; column 3 * 2 + 1 = 7, row 2 * 3 + 2 = 8.
        let shape = Shape::new(2, 3, 4, 9).unwrap();
        assert_eq!(positions(shape, 1, 2, 3, 2), [[71, 0, 0], [7, 8, 0], [7, 2, 2]]);
    }

    #[test]
    fn shapes_that_32_bits_cannot_index_are_rejected() {
        assert!(matches!(Shape::new(1, 0, 1, 4), Err(ShapeError::EmptyAxis { .. })));
        assert!(matches!(Shape::new(1, 1, 1, 0), Err(ShapeError::EmptyAxis { .. })));
        let error = Shape::new(1 << 16, 1 << 16, 1, 8).unwrap_err();
        assert!(error.to_string().contains("too large for 32-bit indices"), "{error}");
    }

    proptest! {
        #[test]
        fn every_texel_has_its_own_position_in_the_object(
            batch in 1u32..4, height in 1u32..5, width in 1u32..5, channels in 1u32..14,
        ) {
            let shape = Shape::new(batch, height, width, channels).unwrap();
            for storage in Storage::ALL {
                let extent = storage.object_extent(&shape);
                let mut seen = BTreeSet::new();
                for texel in shape.all_texels() {
                    let position = storage.position(&shape, texel);
                    let inside = position.iter().zip(extent).all(|(&at, end)| at < end);
                    prop_assert!(inside, "{storage:?} {position:?}");
                    prop_assert!(seen.insert(position), "{:?} has {:?} twice", storage, position);
                }
                // The object has as many texels as the tensor, so none of them is unused.
                prop_assert_eq!(seen.len() as u32, extent.iter().product::<u32>());
            }
        }
    }
}
