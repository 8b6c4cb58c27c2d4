//! Reads GGUF headers of untrusted files with bounded memory.
//!
//! A file of GGUF version 2 or 3 has a magic number, the version, the numbers of tensors and of keys, the keys, the
//! tensor infos, padding to the alignment, and the data of the tensors. The header is read once, from front to back.
//! Every number is checked before it is used: against a limit above every real model, against the number of bytes
//! that remain in the file, and against overflow. Memory grows with the bytes that were read (at most
//! [`MAX_HEADER_BYTES`]), never with a count in the file.
//!
//! Not here: split models (`gguf::split`), and the meaning of keys (`model::gguf_shape`).

use std::collections::BTreeSet;
use std::io::{ErrorKind, Read};

use super::error::HeaderError;
use super::value::{Array, Metadata, Value, each_type};
use crate::{Bytes, Format};

/// Maximum size of a header in bytes. A vocabulary of 256 k tokens with merges takes about 20 MB.
pub const MAX_HEADER_BYTES: u64 = 256 << 20;
/// Maximum number of tensors in a model. The largest mixture-of-experts models have a few thousand.
pub const MAX_TENSORS: u64 = 1 << 18;
/// Maximum number of keys in a file.
pub const MAX_KEYS: u64 = 1 << 16;
/// Maximum length of a key in bytes, as the GGUF specification says.
pub const MAX_KEY_BYTES: u64 = (1 << 16) - 1;
/// Maximum length of a tensor name in bytes, as the GGUF specification says.
pub const MAX_TENSOR_NAME_BYTES: u64 = 64;
/// Maximum length of a string value in bytes. Chat templates take some hundred kB.
pub const MAX_STRING_BYTES: u64 = 16 << 20;
/// Maximum nesting depth of arrays.
pub const MAX_NESTING: u32 = 4;
/// Maximum number of dimensions of a tensor (`GGML_MAX_DIMS`).
pub const MAX_DIMENSIONS: u32 = 4;
/// Minimum and maximum of `general.alignment`, in bytes.
pub const ALIGNMENT_RANGE: (u64, u64) = (8, 1 << 20);
/// Alignment of files without `general.alignment`, in bytes.
pub const DEFAULT_ALIGNMENT: u64 = 32;

/// Maximum number of elements for which memory is reserved before they are read.
const MAX_RESERVED_ELEMENTS: u64 = 4096;
/// Minimum size of a key with its value in bytes: length of the key, value type, a value of one byte.
const MIN_KEY_BYTES: u64 = 8 + 4 + 1;
/// Minimum size of a tensor info in bytes: length of the name, number of dimensions, one dimension, type, offset.
const MIN_TENSOR_BYTES: u64 = 8 + 4 + 8 + 4 + 8;

/// Name, dimensions, format and offset of a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Name, for example `blk.3.ffn_up.weight`.
    pub name: String,
    /// Dimensions in ggml's order: `dims[0]` is the length of a row.
    pub dims: Vec<u64>,
    pub format: Format,
    /// Index of the file that contains the tensor.
    pub part: usize,
    /// Offset of the first byte of the tensor from the start of its file.
    pub offset: u64,
    pub bytes: Bytes,
}

impl TensorInfo {
    pub fn elements(&self) -> u64 {
        // Checked against overflow when the header was read.
        self.dims.iter().product()
    }

    /// Returns the number of rows; a row has `dims[0]` weights.
    pub fn rows(&self) -> u64 {
        self.dims[1..].iter().product()
    }

    /// Returns the offset of the end of the tensor from the start of the file.
    pub fn end(&self) -> u64 {
        self.offset + self.bytes.0
    }
}

/// The validated header of one file.
#[derive(Debug, Clone, PartialEq)]
pub struct Header {
    /// GGUF version, 2 or 3.
    pub version: u32,
    pub metadata: Metadata,
    /// The tensors in file order; their `part` is 0.
    pub tensors: Vec<TensorInfo>,
    /// Alignment in bytes: the offset of every tensor is a multiple of it.
    pub alignment: u64,
    /// Offset of the tensor data, after the header and its padding.
    pub data_start: u64,
}

impl Header {
    /// Reads the header from the start of a file of `file_bytes` bytes. Wrap a file in a `BufReader`, because the
    /// reads are small.
    pub fn read(reader: impl Read, file_bytes: u64) -> Result<Header, HeaderError> {
        let mut source = HeaderReader { reader, offset: 0, file_bytes };
        let version = source.preamble()?;
        let tensor_count = source.count("the number of tensors", MAX_TENSORS)?;
        let key_count = source.count("the number of keys", MAX_KEYS)?;
        source.require("the tensor infos", tensor_count, MIN_TENSOR_BYTES)?;
        source.require("the keys", key_count, MIN_KEY_BYTES)?;
        let metadata = source.metadata(key_count)?;
        let alignment = alignment(&metadata)?;
        let tensors = source.tensor_infos(tensor_count)?;
        // The header is at most 256 MiB long: no overflow.
        let data_start = source.offset.next_multiple_of(alignment);
        let mut header = Header { version, metadata, tensors, alignment, data_start };
        header.resolve_offsets(file_bytes)?;
        Ok(header)
    }

    /// Reads the header of a file in memory.
    pub fn from_bytes(file: &[u8]) -> Result<Header, HeaderError> {
        Self::read(file, file.len() as u64)
    }

    /// Converts offsets in the data section to offsets in the file and checks them.
    fn resolve_offsets(&mut self, file_bytes: u64) -> Result<(), HeaderError> {
        for tensor in &mut self.tensors {
            if !tensor.offset.is_multiple_of(self.alignment) {
                return Err(HeaderError::Misaligned {
                    tensor: tensor.name.clone(),
                    offset: tensor.offset,
                    alignment: self.alignment,
                });
            }
            let start = self.data_start.checked_add(tensor.offset);
            let end = start.and_then(|start| start.checked_add(tensor.bytes.0)).unwrap_or(u64::MAX);
            if end > file_bytes || end == u64::MAX {
                return Err(HeaderError::PastEnd { tensor: tensor.name.clone(), end, file_bytes });
            }
            tensor.offset += self.data_start;
        }
        let mut by_start: Vec<&TensorInfo> = self.tensors.iter().collect();
        by_start.sort_by_key(|tensor| tensor.offset);
        for pair in by_start.windows(2) {
            if pair[1].offset < pair[0].end() {
                return Err(HeaderError::Overlap {
                    first: pair[0].name.clone(),
                    second: pair[1].name.clone(),
                    start: pair[1].offset,
                    end: pair[0].end(),
                });
            }
        }
        Ok(())
    }
}

fn alignment(metadata: &Metadata) -> Result<u64, HeaderError> {
    let (min, max) = ALIGNMENT_RANGE;
    let wrong = |found: String| HeaderError::Alignment { found, min, max };
    let found =
        metadata.get_u64("general.alignment").map_err(|error| wrong(format!("unreadable ({error})")))?;
    let alignment = found.unwrap_or(DEFAULT_ALIGNMENT);
    if !alignment.is_power_of_two() || alignment < min || alignment > max {
        return Err(wrong(alignment.to_string()));
    }
    Ok(alignment)
}

/// A reader with its position and the size of the file.
struct HeaderReader<R> {
    reader: R,
    /// Number of bytes read so far.
    offset: u64,
    file_bytes: u64,
}

impl<R: Read> HeaderReader<R> {
    /// Fails if the rest of the file is too short for `count` items of at least `min_bytes` bytes each.
    fn require(&self, what: &str, count: u64, min_bytes: u64) -> Result<(), HeaderError> {
        let needed = count.saturating_mul(min_bytes);
        let remaining = self.file_bytes.saturating_sub(self.offset);
        if needed > remaining {
            return Err(HeaderError::Truncated {
                what: what.to_owned(),
                offset: self.offset,
                needed,
                remaining,
            });
        }
        let end = self.offset.saturating_add(needed);
        if end > MAX_HEADER_BYTES {
            let what = format!("the end of the header, as {what} announces it,");
            return Err(HeaderError::TooLarge {
                what,
                offset: self.offset,
                found: end,
                limit: MAX_HEADER_BYTES,
            });
        }
        Ok(())
    }

    fn fill(&mut self, what: &str, buffer: &mut [u8]) -> Result<(), HeaderError> {
        let needed = buffer.len() as u64;
        self.require(what, needed, 1)?;
        let offset = self.offset;
        self.reader.read_exact(buffer).map_err(|source| {
            if source.kind() == ErrorKind::UnexpectedEof {
                // The file was truncated while it was read.
                HeaderError::Truncated { what: what.to_owned(), offset, needed, remaining: 0 }
            } else {
                HeaderError::Io { offset, source }
            }
        })?;
        self.offset += needed;
        Ok(())
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], HeaderError> {
        let mut buffer = [0; N];
        self.fill(what, &mut buffer)?;
        Ok(buffer)
    }

    fn u32(&mut self, what: &str) -> Result<u32, HeaderError> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    fn u64(&mut self, what: &str) -> Result<u64, HeaderError> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    /// Reads a count or length of at most `limit`.
    fn count(&mut self, what: &str, limit: u64) -> Result<u64, HeaderError> {
        let offset = self.offset;
        let found = self.u64(what)?;
        if found > limit {
            return Err(HeaderError::TooLarge { what: what.to_owned(), offset, found, limit });
        }
        Ok(found)
    }

    fn string_bytes(&mut self, what: &str, limit: u64) -> Result<Vec<u8>, HeaderError> {
        let length = self.count(&format!("the length of {what}"), limit)?;
        self.require(what, length, 1)?;
        let mut bytes = vec![0; length as usize];
        self.fill(what, &mut bytes)?;
        Ok(bytes)
    }

    /// Reads a key or a name. It must be UTF-8, because it is compared with known names.
    fn name(&mut self, what: &str, limit: u64) -> Result<String, HeaderError> {
        let offset = self.offset;
        let bytes = self.string_bytes(what, limit)?;
        String::from_utf8(bytes).map_err(|_| HeaderError::NotUtf8 { what: what.to_owned(), offset })
    }

    /// Reads the magic number and the version, and returns the version.
    fn preamble(&mut self) -> Result<u32, HeaderError> {
        let found = self.array::<4>("the magic number")?;
        if found != *b"GGUF" {
            return Err(HeaderError::Magic { found });
        }
        let version = self.u32("the version")?;
        match version {
            2 | 3 => Ok(version),
            // A version in big-endian byte order.
            swapped if swapped.trailing_zeros() >= 16 && swapped != 0 => Err(HeaderError::BigEndian),
            _ => Err(HeaderError::Version { version }),
        }
    }

    fn metadata(&mut self, count: u64) -> Result<Metadata, HeaderError> {
        let mut metadata = Metadata::default();
        for index in 0..count {
            let key = self.name(&format!("key {index}"), MAX_KEY_BYTES)?;
            let value = self.value(&key)?;
            if metadata.get(&key).is_some() {
                return Err(HeaderError::DuplicateKey { key });
            }
            metadata.insert(key, value);
        }
        Ok(metadata)
    }

    fn elements<T: Element>(&mut self, key: &str, depth: u32) -> Result<Vec<T>, HeaderError> {
        let count = self.u64("the length of an array")?;
        self.require(&format!("the array `{key}`"), count, T::MIN_BYTES)?;
        let mut items = Vec::with_capacity(count.min(MAX_RESERVED_ELEMENTS) as usize);
        for _ in 0..count {
            items.push(T::read(self, key, depth)?);
        }
        Ok(items)
    }

    fn tensor_infos(&mut self, count: u64) -> Result<Vec<TensorInfo>, HeaderError> {
        let mut names = BTreeSet::new();
        let mut tensors = Vec::with_capacity(count.min(MAX_RESERVED_ELEMENTS) as usize);
        for index in 0..count {
            let tensor = self.tensor_info(index)?;
            if !names.insert(tensor.name.clone()) {
                return Err(HeaderError::DuplicateTensor { tensor: tensor.name });
            }
            tensors.push(tensor);
        }
        Ok(tensors)
    }

    /// Reads a tensor info. Its offset is relative to the start of the data section.
    fn tensor_info(&mut self, index: u64) -> Result<TensorInfo, HeaderError> {
        let name = self.name(&format!("the name of tensor {index}"), MAX_TENSOR_NAME_BYTES)?;
        let dimensions = self.u32("a number of dimensions")?;
        if dimensions == 0 || dimensions > MAX_DIMENSIONS {
            let dims = vec![0; dimensions.min(MAX_DIMENSIONS + 1) as usize];
            return Err(HeaderError::Dimensions { tensor: name, dims, limit: MAX_DIMENSIONS });
        }
        let mut dims = Vec::with_capacity(dimensions as usize);
        for _ in 0..dimensions {
            dims.push(self.u64("a dimension")?);
        }
        if dims.contains(&0) {
            return Err(HeaderError::Dimensions { tensor: name, dims, limit: MAX_DIMENSIONS });
        }
        let type_number = self.u32("a tensor type")?;
        let offset = self.u64("a tensor offset")?;
        let Some(format) = Format::from_ggml(type_number) else {
            return Err(HeaderError::UnknownTensorType { tensor: name, type_number });
        };
        let bytes = tensor_bytes(&name, &dims, format)?;
        Ok(TensorInfo { name, dims, format, part: 0, offset, bytes })
    }
}

/// A type of metadata values and array elements.
trait Element: Sized {
    /// Minimum size of an encoded value, in bytes.
    const MIN_BYTES: u64;

    /// Reads a value of the key `key` inside `depth` nested arrays.
    fn read<R: Read>(source: &mut HeaderReader<R>, key: &str, depth: u32) -> Result<Self, HeaderError>;
}

macro_rules! number_elements {
    ($($type:ty)+) => {$(
        impl Element for $type {
            const MIN_BYTES: u64 = size_of::<$type>() as u64;

            fn read<R: Read>(source: &mut HeaderReader<R>, _: &str, _: u32) -> Result<Self, HeaderError> {
                Ok(Self::from_le_bytes(source.array("a value")?))
            }
        }
    )+};
}
number_elements! { u8 i8 u16 i16 u32 i32 u64 i64 f32 f64 }

impl Element for bool {
    const MIN_BYTES: u64 = 1;

    fn read<R: Read>(source: &mut HeaderReader<R>, key: &str, depth: u32) -> Result<Self, HeaderError> {
        match u8::read(source, key, depth)? {
            0 => Ok(false),
            1 => Ok(true),
            found => Err(HeaderError::Boolean { key: key.to_owned(), found }),
        }
    }
}

impl Element for String {
    // The length of an empty string.
    const MIN_BYTES: u64 = 8;

    // Some converters write tokens that are not UTF-8; losing those characters is better than refusing the model.
    fn read<R: Read>(source: &mut HeaderReader<R>, key: &str, _: u32) -> Result<Self, HeaderError> {
        let bytes = source.string_bytes(&format!("a string of key `{key}`"), MAX_STRING_BYTES)?;
        Ok(String::from_utf8(bytes)
            .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned()))
    }
}

macro_rules! read_by_type {
    ($($name:ident($type:ty) = $number:literal, $text:literal;)+) => {
        impl Element for Array {
            // Element type and length.
            const MIN_BYTES: u64 = 4 + 8;

            fn read<R: Read>(
                source: &mut HeaderReader<R>,
                key: &str,
                depth: u32,
            ) -> Result<Self, HeaderError> {
                if depth == MAX_NESTING {
                    return Err(HeaderError::TooDeep { key: key.to_owned(), limit: MAX_NESTING });
                }
                match source.u32("an element type")? {
                    $($number => source.elements(key, depth + 1).map(Array::$name),)+
                    type_number => Err(HeaderError::UnknownValueType { key: key.to_owned(), type_number }),
                }
            }
        }

        impl<R: Read> HeaderReader<R> {
            fn value(&mut self, key: &str) -> Result<Value, HeaderError> {
                match self.u32("a value type")? {
                    $($number => Element::read(self, key, 0).map(Value::$name),)+
                    type_number => Err(HeaderError::UnknownValueType { key: key.to_owned(), type_number }),
                }
            }
        }
    };
}
each_type!(read_by_type);

/// Returns the size of a tensor with these dimensions. `dims` must not be empty.
pub(super) fn tensor_bytes(name: &str, dims: &[u64], format: Format) -> Result<Bytes, HeaderError> {
    let overflow = || HeaderError::Overflow { tensor: name.to_owned(), dims: dims.to_vec() };
    if !dims[0].is_multiple_of(format.block_len()) {
        return Err(HeaderError::PartialBlock {
            tensor: name.to_owned(),
            row: dims[0],
            format,
            block: format.block_len(),
        });
    }
    let elements =
        dims.iter().try_fold(1u64, |product, &dim| product.checked_mul(dim)).ok_or_else(overflow)?;
    format.row_bytes(elements).ok_or_else(overflow)
}
