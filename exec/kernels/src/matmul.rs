//! Matmul with quantised weights on the CPU: GEMV for one token, GEMM for a batch.
//!
//! `out[token, row] = dot(weights[row], input[token])` for a range of weight rows and all tokens. Large batches are
//! multiplied panel by panel, see [`super::panel`]. Small batches are multiplied in tiles of four tokens, whose
//! quantised activations stay in the L1 cache while the weight rows are read. The result does not depend on the
//! tiling.
//!
//! Not here: the distribution of rows among threads, see `hearth_runtime::cpu`.

use std::marker::PhantomData;

use hearth_profiles::Format;

use super::activations::Activations;
use super::{InstructionSet, blocks, scalar};

/// A weight matrix in a memory-mapped model file.
#[derive(Debug, Clone, Copy)]
pub struct Matrix<'a> {
    pub format: Format,
    /// Number of weights in a row.
    pub row_length: usize,
    pub rows: usize,
    /// The weights as they are stored in the file, [rows, `row_bytes`].
    pub bytes: &'a [u8],
}

impl<'a> Matrix<'a> {
    /// Returns the number of bytes of one row of weights.
    pub fn row_bytes(&self) -> usize {
        self.bytes.len().checked_div(self.rows).unwrap_or(0)
    }

    /// Returns the bytes of the weights of row `row`.
    pub fn row(&self, row: usize) -> &'a [u8] {
        &self.bytes[row * self.row_bytes()..][..self.row_bytes()]
    }
}

/// The output buffer of a matmul. Several threads can write different rows at the same time.
#[derive(Clone, Copy)]
pub struct MatmulOutput<'a> {
    values: *mut f32, // [tokens, rows]
    rows: usize,
    tokens: usize,
    lifetime: PhantomData<&'a mut [f32]>,
}

// SAFETY: all writes use `set` and `set_rows`, whose callers never write the same element from two threads.
unsafe impl Send for MatmulOutput<'_> {}
// SAFETY: as above.
unsafe impl Sync for MatmulOutput<'_> {}

impl<'a> MatmulOutput<'a> {
    /// Wraps the buffer `values`, which receives the output [tokens, rows].
    ///
    /// # Panics
    /// If the length of `values` is not `tokens * rows`.
    pub fn new(values: &'a mut [f32], tokens: usize, rows: usize) -> MatmulOutput<'a> {
        assert_eq!(values.len(), tokens * rows, "an output must be [tokens, rows]");
        MatmulOutput { values: values.as_mut_ptr(), rows, tokens, lifetime: PhantomData }
    }

    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Writes the output of one weight row for one token.
    ///
    /// # Safety
    /// `token` and `row` are in range, and no other thread writes this element at the same time.
    #[inline(always)]
    pub(super) unsafe fn set(&self, token: usize, row: usize, value: f32) {
        debug_assert!(token < self.tokens && row < self.rows);
        // SAFETY: inside the slice given to `new`: `matmul_rows` has checked the ranges of its callers.
        unsafe { *self.values.add(token * self.rows + row) = value };
    }

    /// Writes the output of consecutive weight rows, starting at row `first`, for one token.
    ///
    /// # Safety
    /// No other thread writes these elements at the same time.
    #[inline(always)]
    pub(crate) unsafe fn set_rows(&self, token: usize, first: usize, values: &[f32]) {
        assert!(token < self.tokens && first + values.len() <= self.rows);
        // SAFETY: inside the slice given to `new`, which does not overlap `values`.
        unsafe {
            let target = self.values.add(token * self.rows + first);
            std::ptr::copy_nonoverlapping(values.as_ptr(), target, values.len());
        }
    }
}

/// Computes rows `first..first + count` of the matmul `matrix * input` for all tokens.
///
/// # Panics
/// If the row range, the input or the output does not match the matrix.
///
/// # Safety
/// No other thread writes these rows of `out` at the same time.
pub unsafe fn matmul_rows(
    instructions: InstructionSet,
    matrix: Matrix<'_>,
    first: usize,
    count: usize,
    input: &Activations,
    out: MatmulOutput<'_>,
) {
    assert!(first + count <= matrix.rows && matrix.rows == out.rows, "rows must be inside the matrix");
    assert!(
        input.row_length() == matrix.row_length && input.tokens() == out.tokens,
        "the input must fit the matrix"
    );
    let task = MatmulTask { matrix, first_row: first, row_count: count, input, out };
    match instructions.0 {
        None => matmul_scalar(task),
        // SAFETY: by the caller's contract; a `Native` value exists only if the processor has the instructions.
        Some(native) => unsafe { native.multiply(task) },
    }
}

/// A part of a matmul: the multiplication of a range of weight rows by the activations of all tokens.
#[derive(Clone, Copy)]
pub(crate) struct MatmulTask<'a> {
    pub(crate) matrix: Matrix<'a>,
    pub(crate) first_row: usize,
    pub(crate) row_count: usize,
    pub(crate) input: &'a Activations,
    pub(crate) out: MatmulOutput<'a>,
}

/// Computes a [`MatmulTask`] with dot products: loops over tiles of four tokens, and for each tile over the weight
/// rows. `$view` is the method of [`Activations`] that returns the input of one token, and `$dot` the function that
/// returns the dot products of a weight row with T tokens.
macro_rules! dot_tiles {
    ($task:ident, $view:ident, $dot:path) => {{
        let tokens = $task.input.tokens();
        let mut token = 0;
        while token + 4 <= tokens {
            let rows = std::array::from_fn(|t| $task.input.$view(token + t));
            for row in $task.first_row..$task.first_row + $task.row_count {
                let dots: [f32; 4] = $dot($task.matrix.row(row), &rows);
                for (t, dot) in dots.into_iter().enumerate() {
                    // SAFETY: `matmul_rows` has checked the ranges; the rest is its caller's contract.
                    unsafe { $task.out.set(token + t, row, dot) };
                }
            }
            token += 4;
        }
        for token in token..tokens {
            let rows = [$task.input.$view(token)];
            for row in $task.first_row..$task.first_row + $task.row_count {
                let [dot]: [f32; 1] = $dot($task.matrix.row(row), &rows);
                // SAFETY: `matmul_rows` has checked the ranges; the rest is its caller's contract.
                unsafe { $task.out.set(token, row, dot) };
            }
        }
    }};
}

#[allow(unused_imports)] // some targets have no native kernels
pub(super) use dot_tiles;

fn matmul_scalar(task: MatmulTask<'_>) {
    for token in 0..task.input.tokens() {
        for row in task.first_row..task.first_row + task.row_count {
            let dot = scalar_dot(task.matrix.format, task.matrix.row(row), task.input, token);
            // SAFETY: `matmul_rows` has checked the ranges; the rest is its caller's contract.
            unsafe { task.out.set(token, row, dot) };
        }
    }
}

/// Returns the dot product of one weight row, as stored in the file, and the activations of one token. Uses no SIMD.
pub fn scalar_dot(format: Format, row: &[u8], input: &Activations, token: usize) -> f32 {
    macro_rules! plain {
        ($dot:ident) => {
            scalar::$dot(row, input.plain_row(token))
        };
    }
    macro_rules! blocks {
        ($block:ident, row32, $dot:ident) => {
            scalar::dot32::<blocks::$block>(row, input.row32(token))
        };
        ($block:ident, row256, $dot:ident) => {
            scalar::dot256::<blocks::$block>(row, input.row256(token))
        };
    }
    for_format!(format, plain, blocks)
}

/// Applies `of` to the input of each of T tokens.
///
/// Closures in functions with target features are not inlined into library functions, so this function has no target
/// features and is called only outside the loops over blocks.
#[inline(always)]
#[allow(dead_code)] // some targets have no native kernels
pub(crate) fn per_token<'a, I, S: ?Sized, const T: usize>(
    input: &'a [I; T],
    of: impl Fn(&'a I) -> &'a S,
) -> [&'a S; T] {
    std::array::from_fn(|t| of(&input[t]))
}
