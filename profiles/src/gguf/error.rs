//! What can be wrong with a GGUF file, and what can its owner do about it?
//!
//! Two levels. [`HeaderError`] is about the bytes of one header and knows offsets; [`GgufError`] is about files
//! and models and knows paths, parts and keys. Every text says what, where and how to fix it, because it is
//! printed to people who downloaded a model and did not write it.

use std::path::PathBuf;

/// Why the bytes of one file are not a GGUF header that can be trusted.
#[derive(Debug, thiserror::Error)]
pub enum HeaderError {
    /// The operating system failed to deliver bytes that the file should have.
    #[error("reading at byte {at} failed: {source}", at = grouped(*.at))]
    Io {
        /// Where in the file.
        at: u64,
        /// What the system said.
        source: std::io::Error,
    },
    /// The first four bytes are not `GGUF`.
    #[error(
        "this is not a GGUF file: it starts with {found:02x?} instead of \"GGUF\"; \
         convert the model, or check that the download is not a web page"
    )]
    Magic {
        /// The first bytes of the file.
        found: [u8; 4],
    },
    /// A big-endian file (version 3 allows them).
    #[error("this GGUF file is big-endian, which is not supported: convert it to little-endian")]
    BigEndian,
    /// A version other than 2 and 3.
    #[error("GGUF version {version} is not supported: convert the model again to version 3 (2 works too)")]
    Version {
        /// The version found.
        version: u32,
    },
    /// The header ends before what it announces.
    #[error(
        "the file ends inside {what}: {need} more bytes are needed at byte {at} and {left} are left; \
         the file is truncated or damaged: fetch it again",
        need = grouped(*.need), at = grouped(*.at), left = grouped(*.left)
    )]
    Truncated {
        /// What was being read.
        what: String,
        /// Where reading it began.
        at: u64,
        /// Bytes it needs.
        need: u64,
        /// Bytes there are.
        left: u64,
    },
    /// A count or length beyond anything a real model has.
    #[error(
        "{what} at byte {at} is {found}, above the limit of {limit}: the header is damaged; fetch the file again",
        at = grouped(*.at), found = grouped(*.found), limit = grouped(*.limit)
    )]
    TooLarge {
        /// Which count or length.
        what: String,
        /// Where it stands.
        at: u64,
        /// Its value.
        found: u64,
        /// The greatest value accepted.
        limit: u64,
    },
    /// A key or a tensor name is not UTF-8.
    #[error("{what} at byte {at} is not UTF-8: the header is damaged; fetch the file again", at = grouped(*.at))]
    NotUtf8 {
        /// Which name.
        what: String,
        /// Where it starts.
        at: u64,
    },
    /// A metadata value of a type that the format does not have.
    #[error("key `{key}` has value type {type_number}, which GGUF does not define: fetch the file again")]
    UnknownValueType {
        /// The key.
        key: String,
        /// The number found.
        type_number: u32,
    },
    /// Arrays within arrays within arrays.
    #[error("key `{key}` nests arrays deeper than {limit}: no model needs that; fetch the file again")]
    TooDeep {
        /// The key.
        key: String,
        /// The depth accepted.
        limit: u32,
    },
    /// A boolean that is neither 0 nor 1.
    #[error("key `{key}` holds a boolean with value {found}: the header is damaged; fetch the file again")]
    Boolean {
        /// The key.
        key: String,
        /// The byte found.
        found: u8,
    },
    /// The same key twice: readers would disagree about which one counts.
    #[error("key `{key}` appears twice: write the file again with one of them")]
    DuplicateKey {
        /// The key.
        key: String,
    },
    /// The same tensor name twice.
    #[error("tensor `{tensor}` appears twice: write the file again with one of them")]
    DuplicateTensor {
        /// The tensor.
        tensor: String,
    },
    /// A tensor type that this project has no layout for.
    #[error(
        "tensor `{tensor}` has type number {type_number}, which is not known here: \
         quantise the model to one of {known}",
        known = known_formats()
    )]
    UnknownTensorType {
        /// The tensor.
        tensor: String,
        /// Its ggml type number.
        type_number: u32,
    },
    /// No dimensions, too many, or one that is zero.
    #[error("tensor `{tensor}` has dimensions {dims:?}: 1 to {limit}, none of them 0, are accepted")]
    Dimensions {
        /// The tensor.
        tensor: String,
        /// What was found.
        dims: Vec<u64>,
        /// The most dimensions accepted.
        limit: u32,
    },
    /// The number of weights or bytes does not fit in 64 bits.
    #[error("tensor `{tensor}` of dimensions {dims:?} is too large to address: fetch the file again")]
    Overflow {
        /// The tensor.
        tensor: String,
        /// Its dimensions.
        dims: Vec<u64>,
    },
    /// A row that is not a whole number of blocks.
    #[error(
        "tensor `{tensor}` has rows of {row} weights, not a multiple of the {block} of a {format} block; \
         convert the model again, or choose a format of smaller blocks"
    )]
    PartialBlock {
        /// The tensor.
        tensor: String,
        /// Weights in a row.
        row: u64,
        /// Its format.
        format: crate::Format,
        /// Weights in a block.
        block: u64,
    },
    /// `general.alignment` is not a power of two in the accepted range.
    #[error(
        "`general.alignment` is {found}: a power of two from {least} to {most} is accepted; convert the \
         model again"
    )]
    Alignment {
        /// What was found.
        found: String,
        /// The least alignment accepted.
        least: u64,
        /// The greatest alignment accepted.
        most: u64,
    },
    /// A tensor that does not start on the alignment.
    #[error("tensor `{tensor}` starts at data offset {offset}, not a multiple of the alignment {alignment}; the file is \
         damaged: download or convert it again",
        offset = grouped(*.offset))]
    Misaligned {
        /// The tensor.
        tensor: String,
        /// Its offset in the data section.
        offset: u64,
        /// The file's alignment.
        alignment: u64,
    },
    /// A tensor that ends after the file does.
    #[error(
        "tensor `{tensor}` ends at byte {end}, past the end of the file ({file_bytes}): \
         the download is truncated; fetch it again",
        end = grouped(*.end), file_bytes = grouped(*.file_bytes)
    )]
    PastEnd {
        /// The tensor.
        tensor: String,
        /// The byte after its last one; `u64::MAX` if that cannot be written in 64 bits.
        end: u64,
        /// The size of the file.
        file_bytes: u64,
    },
    /// Two tensors that share bytes.
    #[error(
        "tensor `{second}` starts at byte {start}, inside `{first}`, which ends at byte {end}: \
         the header is damaged; fetch the file again",
        start = grouped(*.start), end = grouped(*.end)
    )]
    Overlap {
        /// The tensor that starts first.
        first: String,
        /// The tensor that starts inside it.
        second: String,
        /// Where the second starts.
        start: u64,
        /// Where the first ends.
        end: u64,
    },
}

/// Why a GGUF model cannot be opened or does not describe what it should.
#[derive(Debug, thiserror::Error)]
pub enum GgufError {
    /// A file cannot be opened or measured.
    #[error("cannot open `{path}`: {source}", path = .path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file that was opened cannot be read to the end of what its header announces.
    #[error("cannot read `{path}`: {source}", path = .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The header of one file is not valid.
    #[error("`{path}`: {problem}", path = .path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// What is wrong in it.
        #[source]
        problem: HeaderError,
    },
    /// A file says that it is one of several, and its name does not follow the convention.
    #[error(
        "`{path}` is part {number} of {count}, but its name does not end in `{expected}`: \
         give the parts back their names, so that the others can be found",
        path = .path.display()
    )]
    SplitName {
        /// The file.
        path: PathBuf,
        /// Its number, from 1.
        number: u32,
        /// How many parts there are.
        count: u32,
        /// What the name should end in.
        expected: String,
    },
    /// `split.no`, `split.count` or `split.tensors.count` contradict each other.
    #[error("`{path}`: {what}: fetch all parts again from one source", path = .path.display())]
    Split {
        /// The file.
        path: PathBuf,
        /// The contradiction.
        what: String,
    },
    /// A key that the model must have is not there.
    #[error("key `{key}` is missing: convert the model again with a current converter")]
    MissingKey {
        /// The key.
        key: String,
    },
    /// A key has a value of another type than asked for.
    #[error("key `{key}` is {found}, not {expected}: convert the model again with a current converter")]
    WrongType {
        /// The key.
        key: String,
        /// The type wanted.
        expected: &'static str,
        /// The type found.
        found: String,
    },
    /// A tensor that the model must have is not there.
    #[error("tensor `{tensor}` is missing: the conversion is incomplete; convert or fetch the model again")]
    MissingTensor {
        /// The tensor.
        tensor: String,
    },
    /// An architecture that this project cannot run.
    #[error("architecture `{found}` is not supported: use a model of one of {known}")]
    Architecture {
        /// The name in the file.
        found: String,
        /// The names known.
        known: String,
    },
    /// Metadata that contradicts itself or the tensors.
    #[error("{what}: convert the model again with a current converter")]
    Shape {
        /// The contradiction.
        what: String,
    },
}

fn known_formats() -> String {
    crate::Format::ALL.iter().map(|format| format.name()).collect::<Vec<_>>().join(", ")
}

/// A number in groups of three digits, so that people can compare byte positions: `812 344 832`.
pub(crate) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(' ');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_positions_are_grouped() {
        assert_eq!(grouped(0), "0");
        assert_eq!(grouped(999), "999");
        assert_eq!(grouped(812_344_832), "812 344 832");
    }

    #[test]
    fn a_truncated_download_says_so() {
        let problem = HeaderError::PastEnd {
            tensor: "blk.3.ffn_up.weight".into(),
            end: 812_344_832,
            file_bytes: 638_111_744,
        };
        assert_eq!(
            problem.to_string(),
            "tensor `blk.3.ffn_up.weight` ends at byte 812 344 832, past the end of the file (638 111 744): \
             the download is truncated; fetch it again"
        );
    }
}
