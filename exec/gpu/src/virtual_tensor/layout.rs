//! Layouts of activation tensors: the position of each texel in a GPU object.
//!
//! ML Drift paper, section 3.1 and Table 1, with S = ceil(C / 4) slices:
//!
//! ```text
//! 1-D buffer, DSHWBC4     (((d * S + s) * H + y) * W + x) * B + b
//! 2-D texture, HSWBDC4    ((x * B + b) * D + d,  y * S + s)
//! 3-D texture, DSHWBC4    (x * B + b,  y,  d * S + s)
//! 1-D buffer, BHWDSC4     (((b * H + y) * W + x) * D + d) * S + s
//! ```
//!
//! The last layout is the naive one, in which the channels of a position are contiguous, as on a CPU. Uploads and
//! downloads use it, and the other layouts are compared with it. Channels are padded with zeros to whole slices.

use super::{SLICE, ShapeError, checked_product};

/// The extents of a logical tensor along its axes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    batch: u32,
    height: u32,
    width: u32,
    depth: u32,
    channels: u32,
}

/// The logical coordinates of a texel: a slice of four channels at one position.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Texel {
    pub b: u32,
    pub y: u32,
    pub x: u32,
    pub d: u32,
    /// Index of the slice of channels.
    pub s: u32,
}

/// A kind of GPU object and the order of the texels in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Storage {
    /// 1-D buffer, DSHWBC4.
    Buffer,
    /// 1-D buffer, BHWDSC4: the naive layout.
    Linear,
    /// 2-D texture, HSWBDC4.
    Texture2d,
    /// 3-D texture, DSHWBC4.
    Texture3d,
}

impl Shape {
    /// Creates a shape. Returns an error if an extent is zero, or if 32 bits cannot index the texels.
    pub fn new(batch: u32, height: u32, width: u32, depth: u32, channels: u32) -> Result<Shape, ShapeError> {
        let shape = Shape { batch, height, width, depth, channels };
        let axes = || format!("B={batch} H={height} W={width} D={depth} C={channels}");
        checked_product(&[batch, height, width, depth, channels.div_ceil(SLICE)], axes)?;
        Ok(shape)
    }

    /// Creates a shape of depth 1 with the axes BHWC.
    pub fn bhwc(batch: u32, height: u32, width: u32, channels: u32) -> Result<Shape, ShapeError> {
        Shape::new(batch, height, width, 1, channels)
    }

    /// Returns the extents in the order B, H, W, D.
    pub fn extents(&self) -> [u32; 4] {
        [self.batch, self.height, self.width, self.depth]
    }

    pub fn channels(&self) -> u32 {
        self.channels
    }

    /// Returns the number of slices of four channels, the last of which is padded.
    pub fn slices(&self) -> u32 {
        self.channels.div_ceil(SLICE)
    }

    pub fn texels(&self) -> u32 {
        self.batch * self.height * self.width * self.depth * self.slices()
    }

    /// Returns the texel that contains an element, and the component of the element in it.
    pub fn texel_of(&self, b: u32, y: u32, x: u32, d: u32, c: u32) -> (Texel, u32) {
        (Texel { b, y, x, d, s: c / SLICE }, c % SLICE)
    }

    /// Iterates over all texels in no particular order.
    pub fn all_texels(&self) -> impl Iterator<Item = Texel> + use<> {
        let Shape { batch, height, width, depth, .. } = *self;
        let slices = self.slices();
        (0..self.texels()).map(move |at| {
            let (at, s) = (at / slices, at % slices);
            let (at, d) = (at / depth, at % depth);
            let (at, x) = (at / width, at % width);
            Texel { b: at / height % batch, y: at % height, x, d, s }
        })
    }
}

impl Storage {
    pub const ALL: [Storage; 4] = [Storage::Buffer, Storage::Linear, Storage::Texture2d, Storage::Texture3d];

    /// Returns the width, height and depth, in texels, of the object that stores a tensor.
    pub fn object_extent(self, shape: &Shape) -> [u32; 3] {
        let Shape { batch, height, width, depth, .. } = *shape;
        match self {
            Storage::Buffer | Storage::Linear => [shape.texels(), 1, 1],
            Storage::Texture2d => [width * batch * depth, height * shape.slices(), 1],
            Storage::Texture3d => [width * batch, height, depth * shape.slices()],
        }
    }

    /// Returns the position of a texel in the object: the index in a buffer, or the coordinates in a texture.
    pub fn position(self, shape: &Shape, at: Texel) -> [u32; 3] {
        let (Shape { batch, height, width, depth, .. }, slices) = (*shape, shape.slices());
        let Texel { b, y, x, d, s } = at;
        match self {
            Storage::Buffer => [(((d * slices + s) * height + y) * width + x) * batch + b, 0, 0],
            Storage::Linear => [(((b * height + y) * width + x) * depth + d) * slices + s, 0, 0],
            Storage::Texture2d => [(x * batch + b) * depth + d, y * slices + s, 0],
            Storage::Texture3d => [x * batch + b, y, d * slices + s],
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    /// Returns the positions of an element's texel in a buffer, a 2-D and a 3-D texture, and its component.
    fn positions(shape: Shape, b: u32, y: u32, x: u32, c: u32) -> (u32, [u32; 2], [u32; 3], u32) {
        let (texel, lane) = shape.texel_of(b, y, x, 0, c);
        let [at, ..] = Storage::Buffer.position(&shape, texel);
        let [u, v, _] = Storage::Texture2d.position(&shape, texel);
        (at, [u, v], Storage::Texture3d.position(&shape, texel), lane)
    }

    #[test]
    fn positions_in_small_tensors() {
        // Two slices: ((1 * 2 + 1) * 3 + 2) * 1 + 0 = 11; row 1 * 2 + 1 = 3.
        let shape = Shape::bhwc(1, 2, 3, 5).unwrap();
        assert_eq!(positions(shape, 0, 1, 2, 4), (11, [2, 3], [2, 1, 1], 0));
        // Three slices: ((2 * 3 + 2) * 4 + 3) * 2 + 1 = 71; column 3 * 2 + 1 = 7, row 2 * 3 + 2 = 8.
        let shape = Shape::bhwc(2, 3, 4, 9).unwrap();
        assert_eq!(positions(shape, 1, 2, 3, 8), (71, [7, 8], [7, 2, 2], 0));
        // ML Drift paper, Figure 1: a texture of 3 by 4 is 2 * 2 rows of 3, a buffer has 12 texels.
        let shape = Shape::bhwc(1, 2, 3, 5).unwrap();
        assert_eq!(Storage::Buffer.object_extent(&shape), [12, 1, 1]);
        assert_eq!(Storage::Texture2d.object_extent(&shape), [3, 4, 1]);
        assert_eq!(Storage::Texture3d.object_extent(&shape), [3, 2, 2]);
    }

    #[test]
    fn shapes_that_32_bits_cannot_index_are_refused() {
        assert!(matches!(Shape::new(1, 0, 1, 1, 4), Err(ShapeError::Empty { .. })));
        assert!(matches!(Shape::new(1, 1, 1, 1, 0), Err(ShapeError::Empty { .. })));
        let error = Shape::new(1 << 16, 1 << 16, 1, 1, 8).unwrap_err();
        assert!(error.to_string().contains("split it"), "{error}");
    }

    proptest! {
        #[test]
        fn every_texel_has_its_own_position_in_the_object(
            batch in 1u32..4, height in 1u32..5, width in 1u32..5, depth in 1u32..4, channels in 1u32..14,
        ) {
            let shape = Shape::new(batch, height, width, depth, channels).unwrap();
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
