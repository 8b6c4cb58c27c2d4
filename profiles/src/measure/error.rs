//! What can go wrong while a machine is measured, said so that a person can mend it.

use std::io;
use std::path::PathBuf;

use crate::units::Bytes;

/// Why a number cannot be measured.
#[derive(Debug, thiserror::Error)]
pub enum MeasureError {
    /// The system refused something about a file.
    #[error("cannot {verb} `{path}`: {source}", path = .path.display())]
    File {
        /// What was tried.
        verb: &'static str,
        /// On which file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Memory for a measurement cannot be had.
    #[error("cannot get {bytes} of memory to measure with: {source}; close other programs")]
    Memory {
        /// How much was asked for.
        bytes: Bytes,
        /// What the system said.
        source: io::Error,
    },
    /// A rate came out as nothing, or as no number.
    #[error("measuring {what} gave no usable number; measure again on a quieter machine")]
    Unusable {
        /// The number.
        what: String,
    },
}

impl MeasureError {
    /// For `map_err` on calls about a file.
    pub(super) fn file(verb: &'static str, path: &std::path::Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| MeasureError::File { verb, path, source }
    }
}
