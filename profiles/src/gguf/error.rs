//! Errors of GGUF files.
//!
//! A [`HeaderError`] is about one header, and a [`GgufError`] is about the files of a model. Every message says what is
//! wrong, where, and how a user who downloaded the model can fix the problem.

use std::path::PathBuf;

/// The reason why the header of a file is invalid.
#[derive(Debug, thiserror::Error)]
pub enum HeaderError {
    #[error("cannot read the header at byte {offset}: {source}", offset = group_digits(*.offset))]
    Io { offset: u64, source: std::io::Error },
    #[error(
        "this is not a GGUF file: it starts with `{found}` instead of `GGUF`; \
         convert the model to GGUF, or check that the download is not a web page",
        found = .found.escape_ascii()
    )]
    Magic { found: [u8; 4] },
    /// A big-endian file, which GGUF version 3 allows.
    #[error("this GGUF file is big-endian, which is not supported: convert it to little-endian")]
    BigEndian,
    #[error("GGUF version {version} is not supported: convert the model to version 2 or 3")]
    Version { version: u32 },
    #[error(
        "the file ends inside {what}: {needed} more bytes are needed at byte {offset}, but only {remaining} remain; \
         the file is truncated or damaged: download it again",
        needed = group_digits(*.needed), offset = group_digits(*.offset), remaining = group_digits(*.remaining)
    )]
    Truncated { what: String, offset: u64, needed: u64, remaining: u64 },
    /// A count or length that is larger than in every real model.
    #[error(
        "{what} at byte {offset} is {found}, above the limit of {limit}: the header is damaged; download the file again",
        offset = group_digits(*.offset), found = group_digits(*.found), limit = group_digits(*.limit)
    )]
    TooLarge { what: String, offset: u64, found: u64, limit: u64 },
    /// A count or length with which the header would be larger than in every real model.
    #[error(
        "{what} at byte {offset} would make the header {header_bytes} bytes long, above the limit of {limit} bytes: \
         the header is damaged; download the file again",
        offset = group_digits(*.offset), header_bytes = group_digits(*.header_bytes), limit = group_digits(*.limit)
    )]
    HeaderTooLarge { what: String, offset: u64, header_bytes: u64, limit: u64 },
    #[error("{what} at byte {offset} is not UTF-8: the header is damaged; download the file again", offset = group_digits(*.offset))]
    NotUtf8 { what: String, offset: u64 },
    #[error("key `{key}` has value type {type_number}, which GGUF does not define; download the file again")]
    UnknownValueType { key: String, type_number: u32 },
    #[error("key `{key}` has arrays with more than {limit} nested levels; download the file again")]
    TooDeep { key: String, limit: u32 },
    #[error("key `{key}` has a boolean with the value {found}, not 0 or 1; download the file again")]
    Boolean { key: String, found: u8 },
    #[error("key `{key}` appears twice; write the file again with one value of the key")]
    DuplicateKey { key: String },
    #[error("tensor `{tensor}` appears twice; write the file again with the tensor only once")]
    DuplicateTensor { tensor: String },
    #[error(
        "tensor `{tensor}` has type number {type_number}, which is not supported: \
         quantise the model to one of {known}",
        known = crate::Format::names()
    )]
    UnknownTensorType { tensor: String, type_number: u32 },
    /// A tensor with no dimensions, with too many dimensions, or with a dimension of zero.
    #[error(
        "tensor `{tensor}` {problem}: the header is damaged; download the file again",
        problem = dimensions_problem(.dims, *.limit)
    )]
    Dimensions { tensor: String, dims: Vec<u64>, limit: u32 },
    /// The number of weights or bytes of a tensor does not fit in 64 bits.
    #[error("tensor `{tensor}` with dimensions {dims:?} is too large to address; download the file again")]
    Overflow { tensor: String, dims: Vec<u64> },
    #[error(
        "tensor `{tensor}` has rows of {row} weights, which cannot be divided into {format} blocks of \
         {block}; convert the model again, or choose a format with smaller blocks"
    )]
    PartialBlock { tensor: String, row: u64, format: crate::Format, block: u64 },
    /// `general.alignment` is not a power of two in the accepted range.
    #[error(
        "`general.alignment` is {found}, but must be a power of two from {min} to {max}; convert the model again"
    )]
    Alignment { found: String, min: u64, max: u64 },
    #[error("tensor `{tensor}` starts at data offset {offset}, which is not a multiple of the alignment {alignment}: \
         the file is damaged; download or convert it again",
        offset = group_digits(*.offset))]
    Misaligned { tensor: String, offset: u64, alignment: u64 },
    /// A tensor that ends after the end of the file. `end` is `u64::MAX` if it exceeds 64 bits.
    #[error(
        "tensor `{tensor}` ends at byte {end}, past the end of the file ({file_bytes} bytes): \
         the download is truncated; download it again",
        end = group_digits(*.end), file_bytes = group_digits(*.file_bytes)
    )]
    PastEnd { tensor: String, end: u64, file_bytes: u64 },
    #[error(
        "tensor `{second}` starts at byte {start}, inside `{first}`, which ends at byte {end}: \
         the header is damaged; download the file again",
        start = group_digits(*.start), end = group_digits(*.end)
    )]
    Overlap { first: String, second: String, start: u64, end: u64 },
}

/// The reason why a GGUF model cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum GgufError {
    /// A file cannot be opened, or its size cannot be read.
    #[error("cannot open `{path}`: {source}", path = .path.display())]
    Open { path: PathBuf, source: std::io::Error },
    #[error("cannot read `{path}`: {source}", path = .path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("`{path}`: {source}", path = .path.display())]
    Header { path: PathBuf, source: HeaderError },
    /// A file of a split model whose name does not follow the convention. `number` counts from 1.
    #[error(
        "`{path}` is file {number} of {count} of a split model, but its name does not end in `{expected}`: \
         give all files of the model their original names",
        path = .path.display()
    )]
    SplitName { path: PathBuf, number: u32, count: u32, expected: String },
    /// Files whose keys `split.no`, `split.count` or `split.tensors.count` contradict each other.
    #[error("`{path}`: {what}: download all files of the model again from one source", path = .path.display())]
    Split { path: PathBuf, what: String },
    #[error("key `{key}` is missing; convert the model again with a current converter")]
    MissingKey { key: String },
    #[error("key `{key}` has type {found}, not {expected}; convert the model again with a current converter")]
    WrongType { key: String, expected: &'static str, found: String },
    #[error("tensor `{tensor}` is missing from the file; convert or download the model again")]
    MissingTensor { tensor: String },
    #[error("architecture `{found}` is not supported; use a model of one of {known}")]
    Architecture { found: String, known: String },
    /// Metadata that are contradictory or do not match the tensors.
    #[error("{what}; convert the model again with a current converter")]
    Shape { what: String },
}

fn dimensions_problem(dims: &[u64], limit: u32) -> String {
    if dims.is_empty() || dims.len() > limit as usize {
        format!("does not have 1 to {limit} dimensions")
    } else {
        format!("has dimensions {dims:?}, but none may be 0")
    }
}

/// Returns a number as text, with its digits in groups of three: `812 344 832`.
pub(crate) fn group_digits(number: u64) -> String {
    let digits = number.to_string();
    let groups: Vec<_> = digits.as_bytes().rchunks(3).rev().map(String::from_utf8_lossy).collect();
    groups.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_positions_are_grouped() {
        assert_eq!(group_digits(0), "0");
        assert_eq!(group_digits(999), "999");
        assert_eq!(group_digits(812_344_832), "812 344 832");
    }
}
