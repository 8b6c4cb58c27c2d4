//! Errors of measuring a machine.

use std::io;
use std::path::PathBuf;

use crate::units::Bytes;

/// Why a number cannot be measured.
#[derive(Debug, thiserror::Error)]
pub enum MeasureError {
    /// A file operation failed.
    #[error("cannot {verb} `{path}`: {source}", path = .path.display())]
    File { verb: &'static str, path: PathBuf, source: io::Error },
    /// Memory for a measurement could not be allocated.
    #[error("cannot get {bytes} of memory to measure with: {source}; close other programs")]
    Memory { bytes: Bytes, source: io::Error },
    /// A rate was zero or not finite.
    #[error("measuring {what} gave no usable number; measure again on a quieter machine")]
    Unusable { what: String },
}

impl MeasureError {
    /// For `map_err` on file operations.
    pub(super) fn file(verb: &'static str, path: &std::path::Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| MeasureError::File { verb, path, source }
    }
}
