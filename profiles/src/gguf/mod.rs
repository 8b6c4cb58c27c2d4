//! GGUF model files: reading and writing of headers, without the weights.
//!
//! [`GgufModel::open`] reads the header of a file, or the headers of all parts of a split model, and returns the
//! metadata and the position of every tensor. Every value in a header is checked before use (`gguf::read`).

mod error;
mod read;
mod reader;
mod split;
mod value;
mod write;

use std::path::PathBuf;

pub use error::{GgufError, HeaderError};
pub use read::{GgufHeader, TensorInfo};
pub use split::part_suffix;
pub use value::{Array, Metadata, Value};
pub use write::{FileLayout, HeaderWriter};

use crate::Bytes;

/// The sizes of the header and of the whole file for one part of a model, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartSize {
    /// Size of the header with padding, which is the offset of the tensor data in the file.
    pub data_start: u64,
    pub file_bytes: u64,
}

/// The headers of all files of a model: metadata and tensors.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GgufModel {
    /// The metadata of the first part.
    pub metadata: Metadata,
    /// The tensors of all parts, in file order.
    pub tensors: Vec<TensorInfo>,
    /// The files of the model, in the order of part numbers. [`TensorInfo::part_index`] is an index into this list.
    pub part_paths: Vec<PathBuf>,
    /// The sizes of the files, in the order of `part_paths`.
    pub part_sizes: Vec<PartSize>,
}

impl GgufModel {
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.iter().find(|tensor| tensor.name == name)
    }

    /// Returns the total size of all files of the model.
    pub fn file_bytes(&self) -> Bytes {
        Bytes(self.part_sizes.iter().map(|size| size.file_bytes).sum())
    }
}
