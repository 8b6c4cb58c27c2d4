//! Matmul with quantised weights on the CPU: GEMV for one token, GEMM for a batch.
//!
//! `out[token, row] = dot(weights[row], input[token])` for a range of weight rows and all tokens. Large batches are
//! multiplied panel by panel, see [`super::panel`]. Small batches are multiplied in tiles of up to four tokens, a few
//! weight rows with all tiles before the next rows. The result does not depend on the tiling.
//!
//! Not here: the distribution of rows among threads, see `hearth_runtime::cpu`.

use std::marker::PhantomData;
use std::ops::Range;

use hearth_profiles::Format;

use super::activations::Activations;
use super::{InstructionSet, blocks, interleaved, scalar};

/// The order of the bytes of a weight matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// [rows, `row_bytes`], as in GGUF files.
    Rows,
    /// Groups of sixteen rows, see [`super::interleaved`].
    Interleaved,
}

/// A weight matrix in a memory-mapped model file.
#[derive(Debug, Clone, Copy)]
pub struct Matrix<'a> {
    pub format: Format,
    /// Number of weights in a row.
    pub row_length: usize,
    pub rows: usize,
    pub layout: Layout,
    /// The weights as they are stored in the file.
    pub bytes: &'a [u8],
}

impl<'a> Matrix<'a> {
    /// Returns the number of bytes of one row of weights.
    pub fn row_bytes(&self) -> usize {
        self.bytes.len().checked_div(self.rows).unwrap_or(0)
    }

    /// Returns the number of rows whose bytes are interleaved: parts of the matrix must be multiples of it.
    pub fn rows_together(&self) -> usize {
        match self.layout {
            Layout::Rows => 1,
            Layout::Interleaved => interleaved::GROUP_ROWS,
        }
    }

    /// Returns the bytes of the weights of row `row` of a matrix that is not interleaved.
    pub fn row(&self, row: usize) -> &'a [u8] {
        debug_assert_eq!(self.layout, Layout::Rows, "the bytes of a row are apart");
        &self.bytes[row * self.row_bytes()..][..self.row_bytes()]
    }

    /// Returns the matrix of the rows from `first` on, `count` of them.
    ///
    /// # Panics
    /// If the matrix does not have these rows, or if they are not whole groups of [`Self::rows_together`].
    #[must_use]
    pub fn slice(&self, first: usize, count: usize) -> Matrix<'a> {
        let (row, together) = (self.row_bytes(), self.rows_together());
        assert!(
            first.is_multiple_of(together) && count.is_multiple_of(together),
            "not groups of {together} rows"
        );
        Matrix { rows: count, bytes: &self.bytes[first * row..][..count * row], ..*self }
    }

    /// Returns the bytes of the weights of [`DOT_ROWS`] rows, starting at row `first`. The last row before `end` stands
    /// for the rows after it.
    #[inline(always)]
    pub(crate) fn rows_from(&self, first: usize, end: usize) -> [&'a [u8]; DOT_ROWS] {
        let bytes = self.row_bytes();
        std::array::from_fn(|r| &self.bytes[(first + r).min(end - 1) * bytes..][..bytes])
    }
}

/// The output of a range of weight rows for all tokens, in a buffer that has the output of all rows.
///
/// An output can be divided by rows, so that several threads can write different rows at the same time.
#[derive(Debug)]
pub struct MatmulOutput<'a> {
    values: *mut f32, // [tokens, width]
    /// Number of rows in the buffer.
    width: usize,
    tokens: usize,
    /// The rows to which this output has exclusive access.
    rows: Range<usize>,
    lifetime: PhantomData<&'a mut [f32]>,
}

// SAFETY: an output has exclusive access to its rows, as a `&mut [f32]` has to its values.
unsafe impl Send for MatmulOutput<'_> {}

impl<'a> MatmulOutput<'a> {
    /// Wraps the buffer `values`, which receives the output [tokens, rows].
    ///
    /// # Panics
    /// If the length of `values` is not `tokens * rows`.
    pub fn new(values: &'a mut [f32], tokens: usize, rows: usize) -> MatmulOutput<'a> {
        assert_eq!(Some(values.len()), tokens.checked_mul(rows), "an output must be [tokens, rows]");
        let values = values.as_mut_ptr();
        MatmulOutput { values, width: rows, tokens, rows: 0..rows, lifetime: PhantomData }
    }

    pub fn tokens(&self) -> usize {
        self.tokens
    }

    pub fn rows(&self) -> Range<usize> {
        self.rows.clone()
    }

    /// Removes the first `count` rows from this output and returns them as a separate output.
    ///
    /// # Panics
    /// If there are fewer rows.
    #[must_use]
    pub fn split_off_first(&mut self, count: usize) -> MatmulOutput<'a> {
        assert!(count <= self.rows.len(), "{count} rows of {}", self.rows.len());
        let rows = self.rows.start..self.rows.start + count;
        self.rows.start = rows.end;
        MatmulOutput { rows, ..*self }
    }

    /// Returns the output of `count` rows, starting at row `first`, as that of the rows 0 to `count`.
    pub(crate) fn rows_as_first(&mut self, first: usize, count: usize) -> MatmulOutput<'_> {
        assert!(self.rows.start <= first && first + count <= self.rows.end, "the output has other rows");
        // SAFETY: the values of all rows of the first token are inside the buffer given to `new`.
        let values = unsafe { self.values.add(first) };
        MatmulOutput { values, rows: 0..count, lifetime: PhantomData, ..*self }
    }

    /// Writes the output of consecutive weight rows, starting at row `first`, for one token.
    #[inline(always)]
    pub(crate) fn set_rows(&mut self, token: usize, first: usize, values: &[f32]) {
        let at = first - self.rows.start;
        let [out] = self.tokens_mut(token);
        out[at..][..values.len()].copy_from_slice(values);
    }

    /// Writes the output of consecutive weight rows, starting at row `first`, for one token. Values after the last row
    /// of this output are ignored.
    #[inline(always)]
    pub(crate) fn set_first_rows<const N: usize>(&mut self, token: usize, first: usize, values: &[f32; N]) {
        // A copy of constant length is compiled to a few instructions instead of a call.
        match self.rows.end - first {
            rest if rest < N => self.set_rows(token, first, &values[..rest]),
            _ => self.set_rows(token, first, values),
        }
    }

    /// Returns the output of all rows of this output for each of T tokens, starting at the token `first`.
    #[inline(always)]
    pub(crate) fn tokens_mut<const T: usize>(&mut self, first: usize) -> [&mut [f32]; T] {
        assert!(first + T <= self.tokens, "tokens {first} to {} of {}", first + T, self.tokens);
        std::array::from_fn(|t| {
            // SAFETY: the rows of the token are inside the buffer given to `new`, this output has exclusive access to
            // them, and no other element of the array refers to them.
            unsafe {
                let values = self.values.add((first + t) * self.width + self.rows.start);
                std::slice::from_raw_parts_mut(values, self.rows.len())
            }
        })
    }
}

/// Computes the rows of the matmul `matrix * input` that belong to `out`, for all tokens.
///
/// # Panics
/// If the input or the output does not match the matrix.
pub fn matmul_rows(
    instructions: InstructionSet,
    matrix: Matrix<'_>,
    input: &Activations,
    out: &mut MatmulOutput<'_>,
) {
    assert_eq!(matrix.rows, out.width, "the output must fit the matrix");
    assert!(
        input.row_length() == matrix.row_length && input.tokens() == out.tokens,
        "the input must fit the matrix"
    );
    multiply(instructions, MatmulTask { matrix, input, out });
}

pub(crate) fn multiply(instructions: InstructionSet, task: MatmulTask<'_, '_>) {
    match (task.matrix.layout, instructions.0) {
        (Layout::Interleaved, _) => interleaved::multiply(instructions, task),
        (Layout::Rows, None) => matmul_scalar(task),
        (Layout::Rows, Some(native)) => native.multiply(task),
    }
}

/// A part of a matmul: the multiplication of the weight rows of `out` by the activations of all tokens.
pub(crate) struct MatmulTask<'a, 'b> {
    pub(crate) matrix: Matrix<'a>,
    pub(crate) input: &'a Activations,
    pub(crate) out: &'a mut MatmulOutput<'b>,
}

/// Number of weight rows that are multiplied together by dot products.
pub const DOT_ROWS: usize = 4;

/// Number of tokens that are multiplied by the same weight rows before the next rows are read. Larger batches of
/// quantised weights are multiplied by panels.
pub const DOT_TOKENS: usize = 12;

/// Number of these rows: they stay in the L1 or L2 cache while they are multiplied.
pub(super) const DOT_CHUNK: usize = 4 * DOT_ROWS;

/// Computes a [`MatmulTask`] with dot products: loops over groups of [`DOT_TOKENS`] tokens, for each group over chunks
/// of rows, so that a row is read once from memory, and for each chunk over tiles of four, two and one token. `$view` is
/// the method of [`Activations`] that returns the input of one token, and `$dot` the function that returns the dot
/// products of [`DOT_ROWS`] weight rows with T tokens. `$instructions` is its first argument.
macro_rules! dot_tiles {
    ($task:ident, $view:ident, $dot:path, $instructions:ident) => {{
        use $crate::matmul::{DOT_CHUNK, DOT_ROWS, DOT_TOKENS};
        let $crate::matmul::MatmulTask { matrix, input, out } = $task;
        let (rows, tokens) = (out.rows(), input.tokens());
        for first_token in (0..tokens).step_by(DOT_TOKENS) {
            let mut group = [input.$view(first_token); DOT_TOKENS];
            let group = &mut group[..DOT_TOKENS.min(tokens - first_token)];
            for (t, input_of_token) in group.iter_mut().enumerate().skip(1) {
                *input_of_token = input.$view(first_token + t);
            }
            for chunk in rows.clone().step_by(DOT_CHUNK) {
                let chunk = chunk..rows.end.min(chunk + DOT_CHUNK);
                let mut at = 0;
                $crate::matmul::for_tiles!(4 2 1: group, at, |tile| {
                    let tile = *tile; // a copy stays in registers
                    for first in chunk.clone().step_by(DOT_ROWS) {
                        let dots = $dot($instructions, &matrix.rows_from(first, rows.end), &tile);
                        for (t, dots) in dots.iter().enumerate() {
                            out.set_first_rows(first_token + at + t, first, dots);
                        }
                    }
                });
            }
        }
    }};
}

/// Runs a block for each tile of `$group`: arrays of as many elements as the first `$count`, then as the next.
/// `$at` is the index of the first element of the tile.
macro_rules! for_tiles {
    ($($count:literal)+: $group:ident, $at:ident, |$tile:ident| $body:block) => {$(
        while let Some($tile) = $group[$at..].first_chunk::<$count>() {
            $body
            $at += $count;
        }
    )+};
}

#[allow(unused_imports)] // some targets have no native kernels
pub(super) use {dot_tiles, for_tiles};

fn matmul_scalar(task: MatmulTask<'_, '_>) {
    let MatmulTask { matrix, input, out } = task;
    for token in 0..input.tokens() {
        let rows = out.rows();
        let [out] = out.tokens_mut(token);
        for (row, out) in rows.zip(out) {
            *out = scalar_dot(matrix.format, matrix.row(row), input, token);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_an_output_write_their_own_rows() {
        let mut values = [0.0; 6];
        let mut rest = MatmulOutput::new(&mut values, 2, 3);
        let mut first = rest.split_off_first(1);
        assert_eq!((first.rows(), rest.rows()), (0..1, 1..3));
        first.set_rows(1, 0, &[1.0]);
        rest.set_rows(0, 1, &[2.0, 3.0]);
        let [_, second] = rest.tokens_mut(0);
        second[1] = 4.0;
        assert_eq!(values, [0.0, 2.0, 3.0, 1.0, 0.0, 4.0]);
    }
}
