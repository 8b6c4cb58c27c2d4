//! Interleaved weights: sixteen rows, word by word.
//!
//! A *word* is four adjacent bytes of a block. In a group of sixteen rows, [block, word, row], each word is next to the
//! same word of the fifteen other rows. So a register has a word of every row, and one instruction multiplies four weights
//! of every row by the same four activations: dot products need no horizontal sums, and the integer scales of rows are
//! lanes too. Memory is read in one sequence of rising addresses.
//!
//! A group consists of units of 1, 2 or 4 blocks. The bytes of a block that are not words, its f16 scale in most formats,
//! are its *rest*: a unit has as many blocks as there are rests in a word. It begins with the rests of its blocks, [row,
//! block, rest]. The words of each block follow, in the order in which kernels first use them
//! (`UnpackBytes::interleaved_place`). Fewer blocks at the end of the rows are a unit too. A group has exactly the bytes
//! of its rows, in another order, and so has a matrix.
//!
//! Not here: unpacking of words ([`super::panel`]), and files with interleaved weights (`hearth_runtime`).

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;

use std::borrow::Cow;

use hearth_profiles::Format;

use super::matmul::{Layout, MatmulTask, Matrix};
use super::panel::PANEL_ROWS;
use super::panel::unpack::UnpackBytes;
use super::{InstructionSet, blocks, matmul};

/// Number of rows that are interleaved.
pub const GROUP_ROWS: usize = PANEL_ROWS;

/// Returns the number of bytes of a block that are not words.
const fn rest_bytes<B: UnpackBytes<N>, const N: usize>() -> usize {
    size_of::<B>() - B::STORED_BYTES
}

/// Returns the number of blocks whose rests make a word.
const fn unit_blocks<B: UnpackBytes<N>, const N: usize>() -> usize {
    if rest_bytes::<B, N>() == 0 { 1 } else { 4 / rest_bytes::<B, N>() }
}

/// Calls `copy` for each piece of row `row` of a group with its place in the row, its place in the group, and its length.
fn pieces<B: UnpackBytes<N>, const N: usize>(
    row: usize,
    row_bytes: usize,
    mut copy: impl FnMut(usize, usize, usize),
) {
    let rest = rest_bytes::<B, N>();
    // Either before the words or after them.
    let first_of_rest = if B::FIRST_STORED == 0 { B::STORED_BYTES } else { 0 };
    let mut place = 0;
    for unit in (0..row_bytes).step_by(unit_blocks::<B, N>() * size_of::<B>()) {
        let blocks = (unit..row_bytes).step_by(size_of::<B>()).take(unit_blocks::<B, N>());
        let rests = rest * blocks.len();
        for (at, block) in blocks.clone().enumerate() {
            copy(block + first_of_rest, place + row * rests + at * rest, rest);
        }
        place += GROUP_ROWS * rests;
        for block in blocks {
            for word in 0..B::STORED_BYTES / 4 {
                let place = place + 4 * (GROUP_ROWS * B::interleaved_place(word) + row);
                copy(block + B::FIRST_STORED + 4 * word, place, 4);
            }
            place += GROUP_ROWS * B::STORED_BYTES;
        }
    }
}

/// Evaluates `$with!(block type)` for a format that can be interleaved, and `$otherwise` for another one.
macro_rules! for_words {
    ($format:expr, $with:ident, $otherwise:expr) => {{
        macro_rules! plain {
            ($dot:ident) => {
                $otherwise
            };
        }
        macro_rules! blocks {
            ($block:ident, row32, $dot:ident) => {
                if <blocks::$block as UnpackBytes<32>>::STORED_BYTES > 0 {
                    $with!(blocks::$block, 32)
                } else {
                    $otherwise
                }
            };
            ($block:ident, row256, $dot:ident) => {
                if <blocks::$block as UnpackBytes<256>>::STORED_BYTES > 0 {
                    $with!(blocks::$block, 256)
                } else {
                    $otherwise
                }
            };
        }
        for_format!($format, plain, blocks)
    }};
}

/// Whether a matrix can be interleaved: its rows are whole groups, of a format that can be unpacked word by word.
pub fn can_interleave(format: Format, rows: usize) -> bool {
    macro_rules! with {
        ($block:ty, $length:literal) => {
            true
        };
    }
    rows.is_multiple_of(GROUP_ROWS) && for_words!(format, with, false)
}

/// Whether interleaved weights are multiplied faster than others with these instructions.
pub fn is_fast(instructions: InstructionSet) -> bool {
    #[cfg(target_arch = "x86_64")]
    return matches!(instructions.0, Some(crate::x86_64::NativeKernels::Avx512(_)));
    #[cfg(not(target_arch = "x86_64"))]
    return {
        let _ = instructions;
        false
    };
}

/// Interleaves the bytes of whole groups of rows of `row_bytes` bytes each.
///
/// # Panics
/// If the format cannot be interleaved, if `rows` is not whole groups of rows, or if `out` has another length.
pub fn interleave(format: Format, row_bytes: usize, rows: &[u8], out: &mut [u8]) {
    let group = GROUP_ROWS * row_bytes;
    assert!(
        rows.len() == out.len() && rows.len().is_multiple_of(group),
        "not groups of rows of {row_bytes} bytes"
    );
    macro_rules! with {
        ($block:ty, $length:literal) => {
            for (rows, out) in rows.chunks_exact(group).zip(out.chunks_exact_mut(group)) {
                for (row, bytes) in rows.chunks_exact(row_bytes).enumerate() {
                    pieces::<$block, $length>(row, row_bytes, |in_row, in_group, count| {
                        out[in_group..][..count].copy_from_slice(&bytes[in_row..][..count]);
                    });
                }
            }
        };
    }
    for_words!(format, with, panic!("{format} cannot be interleaved"));
}

/// Copies row `row` of an interleaved group to `out`.
///
/// # Panics
/// If the format cannot be interleaved, or if the group does not have sixteen rows of the length of `out`.
pub fn copy_row(format: Format, group: &[u8], row: usize, out: &mut [u8]) {
    assert!(
        group.len() == GROUP_ROWS * out.len() && row < GROUP_ROWS,
        "not sixteen rows of {} bytes",
        out.len()
    );
    macro_rules! with {
        ($block:ty, $length:literal) => {
            pieces::<$block, $length>(row, out.len(), |in_row, in_group, count| {
                out[in_row..][..count].copy_from_slice(&group[in_group..][..count]);
            })
        };
    }
    for_words!(format, with, panic!("{format} cannot be interleaved"));
}

/// Returns the bytes of a matrix in the order of [`Layout::Rows`].
pub fn rows_in_order(matrix: Matrix<'_>) -> Cow<'_, [u8]> {
    if matrix.layout == Layout::Rows {
        return matrix.bytes.into();
    }
    let row_bytes = matrix.row_bytes();
    let mut rows = vec![0; matrix.bytes.len()];
    let groups =
        rows.chunks_exact_mut(GROUP_ROWS * row_bytes).zip(matrix.bytes.chunks_exact(GROUP_ROWS * row_bytes));
    for (rows, group) in groups {
        for (row, bytes) in rows.chunks_exact_mut(row_bytes).enumerate() {
            copy_row(matrix.format, group, row, bytes);
        }
    }
    rows.into()
}

/// Minimum number of tokens for which interleaved weights are unpacked into panels.
///
/// source: measured, see docs/studies/kernels/interleaved.md
#[cfg(target_arch = "x86_64")]
const PANEL_TOKENS: usize = 64;

/// Computes a part of a matmul with interleaved weights. The rows of the part must be whole groups.
pub(crate) fn multiply(instructions: InstructionSet, task: MatmulTask<'_, '_>) {
    let rows = task.out.rows();
    assert!(
        rows.start.is_multiple_of(GROUP_ROWS) && rows.end.is_multiple_of(GROUP_ROWS),
        "not groups of rows"
    );
    #[cfg(target_arch = "x86_64")]
    if let Some(crate::x86_64::NativeKernels::Avx512(avx512)) = instructions.0 {
        if task.input.tokens() < PANEL_TOKENS {
            avx512::multiply(avx512, task);
        } else {
            super::panel::avx512::matmul(avx512, task);
        }
        return;
    }
    multiply_rows(instructions, task);
}

/// Computes a part of a matmul after copying each group of rows in the order of the file.
fn multiply_rows(instructions: InstructionSet, task: MatmulTask<'_, '_>) {
    let MatmulTask { matrix, input, out } = task;
    for first in out.rows().step_by(GROUP_ROWS) {
        let rows = rows_in_order(matrix.slice(first, GROUP_ROWS));
        let matrix = Matrix { rows: GROUP_ROWS, layout: Layout::Rows, bytes: &rows, ..matrix };
        let out = &mut out.rows_as_first(first, GROUP_ROWS);
        matmul::multiply(instructions, MatmulTask { matrix, input, out });
    }
}
