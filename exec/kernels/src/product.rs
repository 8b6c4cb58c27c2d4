//! Products of rows of weights with rows of activations.
//!
//! `out[token, row] = dot(weights[row], input[token])` for some rows and all tokens. Many tokens are multiplied panel
//! by panel, see [`super::panel`]. A few tokens are taken in tiles of four, whose quantised rows stay in the
//! first-level cache while the weight rows are read; one token is a matvec. The tile of a token has no influence on its
//! bits.
//!
//! Not here: which thread computes which rows, see `hearth_runtime::cpu`.

use std::marker::PhantomData;

use super::activations::Activations;
use super::{InstructionSet, KernelFormat, Set, scalar};

/// A matrix in the mapped file.
#[derive(Debug, Clone, Copy)]
pub struct Matrix<'a> {
    pub format: KernelFormat,
    /// Weights in a row.
    pub length: usize,
    pub rows: usize,
    /// [rows, `row_bytes`]
    pub bytes: &'a [u8],
}

impl<'a> Matrix<'a> {
    pub fn row_bytes(&self) -> usize {
        self.bytes.len().checked_div(self.rows).unwrap_or(0)
    }

    pub fn row(&self, row: usize) -> &'a [u8] {
        &self.bytes[row * self.row_bytes()..][..self.row_bytes()]
    }
}

/// The output of a product, shared by the threads that write different rows of it.
#[derive(Clone, Copy)]
pub struct Output<'a> {
    values: *mut f32, // [tokens, rows]
    rows: usize,
    tokens: usize,
    lifetime: PhantomData<&'a mut [f32]>,
}

// SAFETY: writes go through `set`, whose callers never write one place from two threads.
unsafe impl Send for Output<'_> {}
// SAFETY: as above.
unsafe impl Sync for Output<'_> {}

impl<'a> Output<'a> {
    pub fn new(values: &'a mut [f32], tokens: usize, rows: usize) -> Output<'a> {
        assert_eq!(values.len(), tokens * rows, "an output is [tokens, rows]");
        Output { values: values.as_mut_ptr(), rows, tokens, lifetime: PhantomData }
    }

    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// # Safety
    /// Token and row are inside, and no other thread writes this place at the same time.
    #[inline(always)]
    pub(super) unsafe fn set(&self, token: usize, row: usize, value: f32) {
        debug_assert!(token < self.tokens && row < self.rows);
        // SAFETY: within the slice that `new` was given, by the callers' row ranges, which `rows_product`
        // asserts once for all.
        unsafe { *self.values.add(token * self.rows + row) = value };
    }

    /// Sets consecutive rows, starting at `first`.
    ///
    /// # Safety
    /// No other thread writes these places at the same time.
    #[inline(always)]
    pub(crate) unsafe fn set_rows(&self, token: usize, first: usize, values: &[f32]) {
        assert!(token < self.tokens && first + values.len() <= self.rows);
        // SAFETY: within the slice that `new` was given, which overlaps no borrowed values.
        unsafe {
            let place = self.values.add(token * self.rows + first);
            std::ptr::copy_nonoverlapping(values.as_ptr(), place, values.len());
        }
    }
}

/// Computes rows `first..first + count` of `matrix` times `input`.
///
/// # Safety
/// No other thread writes these rows of `out` meanwhile.
pub unsafe fn rows_product(
    instructions: InstructionSet,
    matrix: Matrix<'_>,
    first: usize,
    count: usize,
    input: &Activations,
    out: Output<'_>,
) {
    assert!(first + count <= matrix.rows && matrix.rows == out.rows, "rows outside the matrix");
    assert!(input.length() == matrix.length && input.tokens() == out.tokens, "the input does not fit");
    let tile = Tile { matrix, first, count, input, out };
    match instructions.set() {
        Set::Scalar => scalar_tile(tile),
        // SAFETY: the caller's promise, and these values exist only where the processor has the instructions.
        Set::Native(native) => unsafe { native.multiply(tile) },
    }
}

/// Some rows of weights, and all tokens.
#[derive(Clone, Copy)]
pub(crate) struct Tile<'a> {
    pub(crate) matrix: Matrix<'a>,
    pub(crate) first: usize,
    pub(crate) count: usize,
    pub(crate) input: &'a Activations,
    pub(crate) out: Output<'a>,
}

/// Walks a tile, for [`Native::multiply`](super::Native): token tiles outside, weight rows inside. `$view` gives a
/// token's row, `$dot::<T>` its dots.
macro_rules! walk {
    ($tile:ident, $view:ident, $dot:path) => {{
        let tokens = $tile.input.tokens();
        let mut token = 0;
        while token + 4 <= tokens {
            let rows = std::array::from_fn(|t| $tile.input.$view(token + t));
            for row in $tile.first..$tile.first + $tile.count {
                let dots: [f32; 4] = $dot($tile.matrix.row(row), &rows);
                for (t, dot) in dots.into_iter().enumerate() {
                    // SAFETY: `rows_product` checked the ranges and passes on its caller's promise.
                    unsafe { $tile.out.set(token + t, row, dot) };
                }
            }
            token += 4;
        }
        for token in token..tokens {
            let rows = [$tile.input.$view(token)];
            for row in $tile.first..$tile.first + $tile.count {
                let [dot]: [f32; 1] = $dot($tile.matrix.row(row), &rows);
                // SAFETY: `rows_product` checked the ranges and passes on its caller's promise.
                unsafe { $tile.out.set(token, row, dot) };
            }
        }
    }};
}

#[allow(unused_imports)] // there are processors without kernels of their own
pub(super) use walk;

fn scalar_tile(tile: Tile<'_>) {
    for token in 0..tile.input.tokens() {
        for row in tile.first..tile.first + tile.count {
            let dot = scalar_dot(tile.matrix.format, tile.matrix.row(row), tile.input, token);
            // SAFETY: `rows_product` checked the ranges and passes on its caller's promise.
            unsafe { tile.out.set(token, row, dot) };
        }
    }
}

/// Returns the oracle's dot product of one stored row and one input row.
pub fn scalar_dot(format: KernelFormat, row: &[u8], input: &Activations, token: usize) -> f32 {
    macro_rules! plain {
        ($dot:ident) => {
            scalar::$dot(row, input.plain_row(token))
        };
    }
    macro_rules! blocks {
        ($block:ident, $view:ident, $dot:ident) => {
            scalar::$dot(row, input.$view(token))
        };
    }
    for_format!(format, plain, blocks)
}

/// A view of each token's input.
///
/// Closures of functions with target features are not inlined into library functions, so that this one and its
/// closures' callers outside of block loops have none.
#[inline(always)]
#[allow(dead_code)] // there are processors without kernels of their own
pub(crate) fn per_token<'a, I, S: ?Sized, const T: usize>(
    input: &'a [I; T],
    of: impl Fn(&'a I) -> &'a S,
) -> [&'a S; T] {
    std::array::from_fn(|t| of(&input[t]))
}
