//! Reader of GGUF headers, with limits.
//!
//! GGUF version 2 and 3: magic, version, number of tensors and of keys, the keys, the tensor infos, padding to the
//! alignment, then the tensors' bytes. The header is read once, front to back, from any reader. The file is not
//! trusted: a number in it is checked before it is used, against a limit above every real model, against the bytes left
//! in the file, and against overflow. Memory grows with the bytes really read (at most [`HEADER_LIMIT`]), never with a
//! count.
//!
//! Not here: split models (`gguf::split`), and the meaning of keys (`gguf::shape`).

use std::collections::BTreeSet;
use std::io::{ErrorKind, Read};

use super::error::HeaderError;
use super::value::{Array, Metadata, Value, each_type};
use crate::{Bytes, Format};

/// The most bytes of a header. Vocabularies of 256 k tokens with merges take about 20 MB.
pub const HEADER_LIMIT: u64 = 256 << 20;
/// The most tensors of a file; the largest mixture-of-experts models have a few thousand.
pub const TENSOR_LIMIT: u64 = 1 << 18;
/// The most keys of a file.
pub const KEY_LIMIT: u64 = 1 << 16;
/// The most bytes of a key, by the format.
pub const KEY_BYTES_LIMIT: u64 = (1 << 16) - 1;
/// The most bytes of a tensor name, by the format.
pub const NAME_BYTES_LIMIT: u64 = 64;
/// The most bytes of a string value; chat templates take some hundred kB.
pub const STRING_BYTES_LIMIT: u64 = 16 << 20;
/// The deepest nesting of arrays.
pub const NESTING_LIMIT: u32 = 4;
/// The most dimensions of a tensor (`GGML_MAX_DIMS`).
pub const DIMENSIONS_LIMIT: u32 = 4;
/// The range of `general.alignment`.
pub const ALIGNMENT_RANGE: (u64, u64) = (8, 1 << 20);
/// The alignment without `general.alignment`.
pub const DEFAULT_ALIGNMENT: u64 = 32;

/// The most elements for which memory is reserved before they have been read.
const TRUSTED_COUNT: u64 = 4096;
/// Bytes of the shortest key with its value: length, value type, one byte.
const MIN_KEY_BYTES: u64 = 8 + 4 + 1;
/// Bytes of the shortest tensor info: name length, number of dimensions, one dimension, type, offset.
const MIN_TENSOR_BYTES: u64 = 8 + 4 + 8 + 4 + 8;

/// The position and format of a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// For example `blk.3.ffn_up.weight`.
    pub name: String,
    /// Dimensions in ggml's order: `dims[0]` is the length of a row.
    pub dims: Vec<u64>,
    pub format: Format,
    /// The index of the file that contains it.
    pub part: usize,
    /// The first byte, counted from the start of that file.
    pub offset: u64,
    pub bytes: Bytes,
}

impl TensorInfo {
    pub fn elements(&self) -> u64 {
        // Checked against overflow when the header was read.
        self.dims.iter().product()
    }

    /// The number of rows of `dims[0]` weights.
    pub fn rows(&self) -> u64 {
        self.dims[1..].iter().product()
    }

    /// The byte after the last one.
    pub fn end(&self) -> u64 {
        self.offset + self.bytes.0
    }
}

/// The header of one file, checked.
#[derive(Debug, Clone, PartialEq)]
pub struct Header {
    /// 2 or 3.
    pub version: u32,
    pub metadata: Metadata,
    /// The tensors in file order; their `part` is 0.
    pub tensors: Vec<TensorInfo>,
    /// Every tensor's offset is a multiple of this.
    pub alignment: u64,
    /// The first byte of the tensor data, after the header and its padding.
    pub data_start: u64,
}

impl Header {
    /// Reads the header of a file of `file_bytes` bytes from its start. Wrap a file in a `BufReader`: the reads are
    /// small.
    pub fn read(reader: impl Read, file_bytes: u64) -> Result<Header, HeaderError> {
        let mut source = Source { reader, at: 0, file_bytes };
        let version = source.preamble()?;
        let tensor_count = source.count("the number of tensors", TENSOR_LIMIT)?;
        let key_count = source.count("the number of keys", KEY_LIMIT)?;
        source.require("the tensor infos", tensor_count, MIN_TENSOR_BYTES)?;
        source.require("the keys", key_count, MIN_KEY_BYTES)?;
        let metadata = source.metadata(key_count)?;
        let alignment = alignment(&metadata)?;
        let tensors = source.tensor_infos(tensor_count)?;
        // The header is at most 256 MiB long: no overflow.
        let data_start = source.at.next_multiple_of(alignment);
        let mut header = Header { version, metadata, tensors, alignment, data_start };
        header.place(file_bytes)?;
        Ok(header)
    }

    /// Reads the header of a file in memory.
    pub fn from_bytes(file: &[u8]) -> Result<Header, HeaderError> {
        Self::read(file, file.len() as u64)
    }

    /// Turns offsets in the data section into offsets in the file and checks them.
    fn place(&mut self, file_bytes: u64) -> Result<(), HeaderError> {
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
    let (least, most) = ALIGNMENT_RANGE;
    let wrong = |found: String| HeaderError::Alignment { found, least, most };
    let found =
        metadata.get_u64("general.alignment").map_err(|error| wrong(format!("unreadable ({error})")))?;
    let alignment = found.unwrap_or(DEFAULT_ALIGNMENT);
    if !alignment.is_power_of_two() || alignment < least || alignment > most {
        return Err(wrong(alignment.to_string()));
    }
    Ok(alignment)
}

/// A reader that knows its position and the size of the file.
struct Source<R> {
    reader: R,
    /// Bytes read so far.
    at: u64,
    file_bytes: u64,
}

impl<R: Read> Source<R> {
    /// Fails unless `count` items of at least `least` bytes each can still follow.
    fn require(&self, what: &str, count: u64, least: u64) -> Result<(), HeaderError> {
        let need = count.saturating_mul(least);
        let left = self.file_bytes.saturating_sub(self.at);
        if need > left {
            return Err(HeaderError::Truncated { what: what.to_owned(), at: self.at, need, left });
        }
        let end = self.at.saturating_add(need);
        if end > HEADER_LIMIT {
            let what = format!("the end of the header, as {what} announces it,");
            return Err(HeaderError::TooLarge { what, at: self.at, found: end, limit: HEADER_LIMIT });
        }
        Ok(())
    }

    fn fill(&mut self, what: &str, buffer: &mut [u8]) -> Result<(), HeaderError> {
        let need = buffer.len() as u64;
        self.require(what, need, 1)?;
        let at = self.at;
        self.reader.read_exact(buffer).map_err(|source| {
            if source.kind() == ErrorKind::UnexpectedEof {
                // The file is shorter than its size said: it shrank while it was read.
                HeaderError::Truncated { what: what.to_owned(), at, need, left: 0 }
            } else {
                HeaderError::Io { at, source }
            }
        })?;
        self.at += need;
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
        let at = self.at;
        let found = self.u64(what)?;
        if found > limit {
            return Err(HeaderError::TooLarge { what: what.to_owned(), at, found, limit });
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

    /// Reads a key or a name, which must be UTF-8, because it is compared with known names.
    fn name(&mut self, what: &str, limit: u64) -> Result<String, HeaderError> {
        let at = self.at;
        let bytes = self.string_bytes(what, limit)?;
        String::from_utf8(bytes).map_err(|_| HeaderError::NotUtf8 { what: what.to_owned(), at })
    }

    /// Reads magic and version; returns the version.
    fn preamble(&mut self) -> Result<u32, HeaderError> {
        let found = self.array::<4>("the magic number")?;
        if found != *b"GGUF" {
            return Err(HeaderError::Magic { found });
        }
        let version = self.u32("the version")?;
        match version {
            2 | 3 => Ok(version),
            // A small number in the other byte order.
            swapped if swapped.trailing_zeros() >= 16 && swapped != 0 => Err(HeaderError::BigEndian),
            _ => Err(HeaderError::Version { version }),
        }
    }

    fn metadata(&mut self, count: u64) -> Result<Metadata, HeaderError> {
        let mut metadata = Metadata::default();
        for index in 0..count {
            let key = self.name(&format!("key {index}"), KEY_BYTES_LIMIT)?;
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
        let mut items = Vec::with_capacity(count.min(TRUSTED_COUNT) as usize);
        for _ in 0..count {
            items.push(T::read(self, key, depth)?);
        }
        Ok(items)
    }

    fn tensor_infos(&mut self, count: u64) -> Result<Vec<TensorInfo>, HeaderError> {
        let mut names = BTreeSet::new();
        let mut tensors = Vec::with_capacity(count.min(TRUSTED_COUNT) as usize);
        for index in 0..count {
            let tensor = self.tensor_info(index)?;
            if !names.insert(tensor.name.clone()) {
                return Err(HeaderError::DuplicateTensor { tensor: tensor.name });
            }
            tensors.push(tensor);
        }
        Ok(tensors)
    }

    /// Reads a tensor info; its offset still counts from the start of the data section.
    fn tensor_info(&mut self, index: u64) -> Result<TensorInfo, HeaderError> {
        let name = self.name(&format!("the name of tensor {index}"), NAME_BYTES_LIMIT)?;
        let dimensions = self.u32("a number of dimensions")?;
        if dimensions == 0 || dimensions > DIMENSIONS_LIMIT {
            let dims = vec![0; dimensions.min(DIMENSIONS_LIMIT + 1) as usize];
            return Err(HeaderError::Dimensions { tensor: name, dims, limit: DIMENSIONS_LIMIT });
        }
        let mut dims = Vec::with_capacity(dimensions as usize);
        for _ in 0..dimensions {
            dims.push(self.u64("a dimension")?);
        }
        if dims.contains(&0) {
            return Err(HeaderError::Dimensions { tensor: name, dims, limit: DIMENSIONS_LIMIT });
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

/// A value, or an element of an array.
trait Element: Sized {
    const MIN_BYTES: u64;

    /// Reads one inside so many arrays.
    fn read<R: Read>(source: &mut Source<R>, key: &str, depth: u32) -> Result<Self, HeaderError>;
}

macro_rules! number_elements {
    ($($type:ty)+) => {$(
        impl Element for $type {
            const MIN_BYTES: u64 = size_of::<$type>() as u64;

            fn read<R: Read>(source: &mut Source<R>, _: &str, _: u32) -> Result<Self, HeaderError> {
                Ok(Self::from_le_bytes(source.array("a value")?))
            }
        }
    )+};
}
number_elements! { u8 i8 u16 i16 u32 i32 u64 i64 f32 f64 }

impl Element for bool {
    const MIN_BYTES: u64 = 1;

    fn read<R: Read>(source: &mut Source<R>, key: &str, depth: u32) -> Result<Self, HeaderError> {
        match u8::read(source, key, depth)? {
            0 => Ok(false),
            1 => Ok(true),
            found => Err(HeaderError::Boolean { key: key.to_owned(), found }),
        }
    }
}

impl Element for String {
    /// An empty one has a length.
    const MIN_BYTES: u64 = 8;

    /// Some converters write tokens that are not UTF-8; losing those characters is better than refusing the model.
    fn read<R: Read>(source: &mut Source<R>, key: &str, _: u32) -> Result<Self, HeaderError> {
        let bytes = source.string_bytes(&format!("a string of key `{key}`"), STRING_BYTES_LIMIT)?;
        Ok(String::from_utf8(bytes)
            .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned()))
    }
}

macro_rules! read_by_type {
    ($($name:ident($type:ty) = $number:literal, $text:literal;)+) => {
        impl Element for Array {
            /// Its element type and its length.
            const MIN_BYTES: u64 = 4 + 8;

            fn read<R: Read>(source: &mut Source<R>, key: &str, depth: u32) -> Result<Self, HeaderError> {
                if depth == NESTING_LIMIT {
                    return Err(HeaderError::TooDeep { key: key.to_owned(), limit: NESTING_LIMIT });
                }
                match source.u32("an element type")? {
                    $($number => source.elements(key, depth + 1).map(Array::$name),)+
                    type_number => Err(HeaderError::UnknownValueType { key: key.to_owned(), type_number }),
                }
            }
        }

        impl<R: Read> Source<R> {
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

/// Bytes of a tensor of these dimensions, of which there is at least one.
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
