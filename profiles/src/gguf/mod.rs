//! GGUF model files: reading and writing of headers, without the weights.
//!
//! [`GgufModel::open`] reads the header of a file, or the headers of all files of a split model, and returns the
//! metadata and the position of every tensor. Every value in a header is checked before use (`gguf::read`).

mod error;
mod read;
mod reader;
mod split;
mod value;
mod write;

use std::path::PathBuf;

pub use error::{GgufError, HeaderError};
pub use read::{GgufHeader, TensorInfo, layer_of_tensor};
pub use split::split_suffix;
pub use value::{Array, Metadata, Value};
pub use write::{FileLayout, HeaderWriter};

use crate::Bytes;

/// The sizes of a file of a model and of its header, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileSize {
    /// Size of the header with padding, which is the offset of the tensor data in the file.
    pub data_start: u64,
    pub file_bytes: u64,
}

/// The headers of all files of a model: metadata and tensors.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GgufModel {
    /// The metadata of the first file.
    pub metadata: Metadata,
    /// The tensors of all files, in file order.
    pub tensors: Vec<TensorInfo>,
    /// The files of the model, in the order of `split.no`. [`TensorInfo::file_index`] is an index into this list.
    pub file_paths: Vec<PathBuf>,
    /// The sizes of the files, in the order of `file_paths`.
    pub file_sizes: Vec<FileSize>,
}

impl GgufModel {
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.iter().find(|tensor| tensor.name == name)
    }

    /// Returns the total size of all files of the model.
    pub fn file_bytes(&self) -> Bytes {
        Bytes(self.file_sizes.iter().map(|size| size.file_bytes).sum())
    }
}
