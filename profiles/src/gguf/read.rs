//! Reads GGUF headers of untrusted files with bounded memory.
//!
//! A file of GGUF version 2 or 3 has a magic number, the version, the numbers of tensors and of keys, the keys, the
//! tensor infos, padding to the alignment, and the data of the tensors. The header is read once, from front to back.
//! The memory use is proportional to the number of bytes read, not to a count in the file (`gguf::reader`).
//!
//! Not here: split models (`gguf::split`), and the meaning of keys (`model::gguf_shape`).

use std::collections::BTreeSet;
use std::io::Read;

use super::error::HeaderError;
use super::reader::HeaderReader;
use super::value::{MAX_RESERVED_ELEMENTS, Metadata, Value};
use crate::{Bytes, Format};

/// Maximum number of tensors in a model. The largest mixture-of-experts models have a few thousand tensors.
pub(super) const MAX_TENSORS: u64 = 1 << 18;
const MAX_KEYS: u64 = 1 << 16;
/// Maximum length of a key in bytes, according to the GGUF specification.
pub(super) const MAX_KEY_BYTES: u64 = (1 << 16) - 1;
/// Maximum length of a tensor name in bytes, according to the GGUF specification.
pub(super) const MAX_TENSOR_NAME_BYTES: u64 = 64;
/// Maximum number of dimensions of a tensor (`GGML_MAX_DIMS`).
pub(super) const MAX_DIMENSIONS: u32 = 4;
/// Minimum and maximum value of `general.alignment`, in bytes.
const ALIGNMENT_RANGE: (u64, u64) = (8, 1 << 20);
/// Alignment of tensors in files without `general.alignment`, in bytes.
pub(super) const DEFAULT_ALIGNMENT: u64 = 32;

/// Minimum size of a key with its value in bytes: length of the key, value type, and a value of one byte.
const MIN_KEY_BYTES: u64 = 8 + 4 + 1;
/// Minimum size of a tensor info in bytes: length of the name, number of dimensions, one dimension, type, offset.
const MIN_TENSOR_BYTES: u64 = 8 + 4 + 8 + 4 + 8;

/// Name, dimensions, format and offset of a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Name of the tensor, for example `blk.3.ffn_up.weight`.
    pub name: String,
    /// Dimensions in the order of ggml: `dims[0]` is the length of a row.
    pub dims: Vec<u64>,
    pub format: Format,
    /// Index of the file that contains the tensor, in [`super::GgufModel::file_paths`].
    pub file_index: usize,
    /// Offset of the first byte of the tensor from the start of its file.
    pub offset: u64,
    pub bytes: Bytes,
}

/// Returns the index N of the layer in the name of a tensor (`blk.N.`), or `None` if the tensor is outside the layers.
pub fn layer_of_tensor(name: &str) -> Option<u32> {
    name.strip_prefix("blk.")?.split_once('.')?.0.parse().ok()
}

impl TensorInfo {
    pub fn element_count(&self) -> u64 {
        // Checked against overflow when the header was read.
        self.dims.iter().product()
    }

    /// Returns the number of rows of the tensor; a row has `dims[0]` weights.
    pub fn row_count(&self) -> u64 {
        self.dims[1..].iter().product()
    }

    /// Returns the offset of the end of the tensor from the start of its file.
    pub fn end_offset(&self) -> u64 {
        self.offset + self.bytes.0
    }
}

/// The validated header of one GGUF file.
#[derive(Debug, Clone, PartialEq)]
pub struct GgufHeader {
    /// GGUF version, 2 or 3.
    pub version: u32,
    pub metadata: Metadata,
    /// The tensors in file order. Their `file_index` is 0, because a header describes one file.
    pub tensors: Vec<TensorInfo>,
    /// Alignment in bytes: the offset of every tensor is a multiple of this number.
    pub alignment: u64,
    /// Offset of the tensor data in the file, after the header and its padding.
    pub data_start: u64,
}

impl GgufHeader {
    /// Reads the header of a file of `file_bytes` bytes. The reads are small, so wrap files in a `BufReader`.
    pub fn read(reader: impl Read, file_bytes: u64) -> Result<GgufHeader, HeaderError> {
        let mut source = HeaderReader { reader, offset: 0, file_bytes };
        let version = source.preamble()?;
        let tensor_count = source.read_count("the number of tensors", MAX_TENSORS)?;
        let key_count = source.read_count("the number of keys", MAX_KEYS)?;
        source.check_remaining("the tensor infos", tensor_count, MIN_TENSOR_BYTES)?;
        source.check_remaining("the keys", key_count, MIN_KEY_BYTES)?;
        let metadata = source.metadata(key_count)?;
        let alignment = alignment(&metadata)?;
        let tensors = source.tensor_infos(tensor_count)?;
        // The header is at most 256 MiB long: no overflow.
        let data_start = source.offset.next_multiple_of(alignment);
        let mut header = GgufHeader { version, metadata, tensors, alignment, data_start };
        header.resolve_offsets(file_bytes)?;
        Ok(header)
    }

    /// Reads the header of a file whose bytes are in memory.
    pub fn from_bytes(file: &[u8]) -> Result<GgufHeader, HeaderError> {
        Self::read(file, file.len() as u64)
    }

    /// Converts the offsets of tensors in the data section to offsets in the file, and checks the offsets.
    fn resolve_offsets(&mut self, file_bytes: u64) -> Result<(), HeaderError> {
        for tensor in &mut self.tensors {
            if !tensor.offset.is_multiple_of(self.alignment) {
                let (tensor, offset) = (tensor.name.clone(), tensor.offset);
                return Err(HeaderError::Misaligned { tensor, offset, alignment: self.alignment });
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
            let (start, end) = (pair[1].offset, pair[0].end_offset());
            if start < end {
                let (first, second) = (pair[0].name.clone(), pair[1].name.clone());
                return Err(HeaderError::Overlap { first, second, start, end });
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

impl<R: Read> HeaderReader<R> {
    /// Reads the magic number and the GGUF version, and returns the version.
    fn preamble(&mut self) -> Result<u32, HeaderError> {
        let found = self.read_array::<4>("the magic number")?;
        if found != *b"GGUF" {
            return Err(HeaderError::Magic { found });
        }
        let version = self.read_u32("the version")?;
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
            let key = self.read_name(&format!("key {index}"), MAX_KEY_BYTES)?;
            let value = Value::read(self, &key)?;
            if !metadata.insert(key.clone(), value) {
                return Err(HeaderError::DuplicateKey { key });
            }
        }
        Ok(metadata)
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

    /// Reads a tensor info. The offset of the tensor is relative to the start of the data section.
    fn tensor_info(&mut self, index: u64) -> Result<TensorInfo, HeaderError> {
        let name = self.read_name(&format!("the name of tensor {index}"), MAX_TENSOR_NAME_BYTES)?;
        let dimensions = self.read_u32("a number of dimensions")?;
        if dimensions == 0 || dimensions > MAX_DIMENSIONS {
            let dims = vec![0; dimensions.min(MAX_DIMENSIONS + 1) as usize];
            return Err(HeaderError::Dimensions { tensor: name, dims, limit: MAX_DIMENSIONS });
        }
        let dims = (0..dimensions).map(|_| self.read_u64("a dimension")).collect::<Result<Vec<_>, _>>()?;
        if dims.contains(&0) {
            return Err(HeaderError::Dimensions { tensor: name, dims, limit: MAX_DIMENSIONS });
        }
        let type_number = self.read_u32("a tensor type")?;
        let offset = self.read_u64("a tensor offset")?;
        let Some(format) = Format::from_ggml_id(type_number) else {
            return Err(HeaderError::UnknownTensorType { tensor: name, type_number });
        };
        let bytes = tensor_bytes(&name, &dims, format)?;
        Ok(TensorInfo { name, dims, format, file_index: 0, offset, bytes })
    }
}

/// Returns the size of a tensor with these dimensions. `dims` must not be empty.
pub(super) fn tensor_bytes(name: &str, dims: &[u64], format: Format) -> Result<Bytes, HeaderError> {
    let overflow = || HeaderError::Overflow { tensor: name.to_owned(), dims: dims.to_vec() };
    if !dims[0].is_multiple_of(format.block_len()) {
        let (tensor, row, block) = (name.to_owned(), dims[0], format.block_len());
        return Err(HeaderError::PartialBlock { tensor, row, format, block });
    }
    let elements =
        dims.iter().try_fold(1u64, |product, &dim| product.checked_mul(dim)).ok_or_else(overflow)?;
    format.row_bytes(elements).ok_or_else(overflow)
}
