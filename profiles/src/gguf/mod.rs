//! GGUF model files: headers, without the weights.
//!
//! [`GgufModel::open`] reads the header of a file, or of all parts of a split model, and says where every tensor lies.
//! Everything in a file is checked before it is used (`gguf::read`).

mod error;
mod read;
mod split;
mod value;
mod write;

use std::path::{Path, PathBuf};

pub use error::{GgufError, HeaderError};
pub use read::{
    ALIGNMENT_RANGE, DEFAULT_ALIGNMENT, DIMENSIONS_LIMIT, HEADER_LIMIT, Header, KEY_BYTES_LIMIT, KEY_LIMIT,
    NAME_BYTES_LIMIT, NESTING_LIMIT, STRING_BYTES_LIMIT, TENSOR_LIMIT, TensorInfo,
};
pub use split::part_suffix;
pub use value::{Array, Metadata, Value};
pub use write::{FileLayout, HeaderWriter};

use crate::Bytes;

/// The sizes of one file of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartSize {
    /// Bytes of the header and its padding; the tensor data begins here.
    pub data_start: u64,
    pub file_bytes: u64,
}

/// The header of a model: metadata and tensors.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GgufModel {
    /// The keys of the first part.
    pub metadata: Metadata,
    /// The tensors of all parts, in file order.
    pub tensors: Vec<TensorInfo>,
    /// The files, in order; [`TensorInfo::part`] is an index into them.
    pub parts: Vec<PathBuf>,
    /// The sizes of each file, in the same order.
    pub sizes: Vec<PartSize>,
}

impl GgufModel {
    /// Reads the header at `path`. If that file is one part of a split model, all parts are read.
    pub fn open(path: impl AsRef<Path>) -> Result<GgufModel, GgufError> {
        split::open(path.as_ref())
    }

    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.iter().find(|tensor| tensor.name == name)
    }

    /// The size of all parts together.
    pub fn file_bytes(&self) -> Bytes {
        Bytes(self.sizes.iter().map(|size| size.file_bytes).sum())
    }
}
