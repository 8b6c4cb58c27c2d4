//! Opens split models, which consist of several GGUF files.
//!
//! Every file has the keys `split.no` (number of the file, from 0), `split.count` (number of files) and
//! `split.tensors.count` (number of tensors in all files together). The name of a file has a suffix such as
//! `-00001-of-00003.gguf`, in which numbers count from 1. The first file has the metadata of the model. A model can be
//! opened with the path of any of its files.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};

use super::error::{GgufError, HeaderError};
use super::read::{GgufHeader, MAX_TENSORS};
use super::{FileSize, GgufModel};

const MAX_FILES: u32 = 10_000;

/// The keys about the split in the header of a file.
#[derive(PartialEq)]
struct SplitKeys {
    /// Number of the file, from 0.
    number: u32,
    count: u32,
    /// Number of tensors in all files together.
    tensors: Option<u64>,
}

impl SplitKeys {
    fn of(header: &GgufHeader, path: &Path) -> Result<Self, GgufError> {
        let count = header.metadata.get_u32("split.count")?.unwrap_or(1);
        let number = header.metadata.get_u32("split.no")?.unwrap_or(0);
        let tensors = header.metadata.get_u64("split.tensors.count")?;
        if count == 0 || count > MAX_FILES || number >= count {
            let what = format!("the header says that this is file {} of {count}", u64::from(number) + 1);
            return Err(GgufError::Split { path: path.to_owned(), what });
        }
        Ok(Self { number, count, tensors })
    }
}

impl GgufModel {
    /// Reads the header of the file at `path`, or of all files of the model if the file belongs to a split model.
    pub fn open(path: impl AsRef<Path>) -> Result<GgufModel, GgufError> {
        Self::open_with(path.as_ref(), read_header)
    }

    /// Opens a model with a function that returns the header of a file, and the size of the file.
    pub(crate) fn open_with(
        path: &Path,
        read_header: impl Fn(&Path) -> Result<(GgufHeader, u64), GgufError>,
    ) -> Result<GgufModel, GgufError> {
        let (header, file_bytes) = read_header(path)?;
        let split = SplitKeys::of(&header, path)?;
        if split.count == 1 {
            let GgufHeader { metadata, tensors, data_start, .. } = header;
            let (file_paths, file_sizes) = (vec![path.to_owned()], vec![FileSize { data_start, file_bytes }]);
            return Ok(GgufModel { metadata, tensors, file_paths, file_sizes });
        }
        let parts = file_paths(path, &split)?;
        let mut model = GgufModel::default();
        let mut names = BTreeSet::new();
        for (index, part) in parts.iter().enumerate() {
            let (header, file_bytes) = read_header(part)?;
            let found = SplitKeys::of(&header, part)?;
            if found != (SplitKeys { number: index as u32, ..split }) {
                let (number, count, expected) = (found.number + 1, found.count, index + 1);
                let what =
                    format!("expected file {expected} of {}, found file {number} of {count}", split.count);
                return Err(GgufError::Split { path: part.clone(), what });
            }
            for mut tensor in header.tensors {
                if !names.insert(tensor.name.clone()) {
                    let source = HeaderError::DuplicateTensor { tensor: tensor.name };
                    return Err(GgufError::Header { path: part.clone(), source });
                }
                tensor.file_index = index;
                model.tensors.push(tensor);
            }
            if model.tensors.len() as u64 > MAX_TENSORS {
                let what = format!("the files up to this one have more than {MAX_TENSORS} tensors");
                return Err(GgufError::Split { path: part.clone(), what });
            }
            if index == 0 {
                model.metadata = header.metadata;
            }
            model.file_sizes.push(FileSize { data_start: header.data_start, file_bytes });
        }
        let found = model.tensors.len();
        if let Some(announced) = split.tensors.filter(|&announced| announced != found as u64) {
            let what = format!("`split.tensors.count` is {announced}, but the files have {found} tensors");
            return Err(GgufError::Split { path: path.to_owned(), what });
        }
        model.file_paths = parts;
        Ok(model)
    }
}

fn read_header(path: &Path) -> Result<(GgufHeader, u64), GgufError> {
    let opened = |source| GgufError::Open { path: path.to_owned(), source };
    let file = File::open(path).map_err(opened)?;
    let file_bytes = file.metadata().map_err(opened)?.len();
    let header = GgufHeader::read(BufReader::with_capacity(1 << 18, file), file_bytes)
        .map_err(|source| GgufError::Header { path: path.to_owned(), source })?;
    Ok((header, file_bytes))
}

/// Returns the suffix of the name of file `number` (from 0) of a model that is split into `count` files.
pub fn split_suffix(number: u32, count: u32) -> String {
    format!("-{:05}-of-{count:05}.gguf", number + 1)
}

fn file_paths(path: &Path, split: &SplitKeys) -> Result<Vec<PathBuf>, GgufError> {
    let expected = split_suffix(split.number, split.count);
    let name = path.file_name().and_then(|name| name.to_str());
    let Some(stem) = name.and_then(|name| name.strip_suffix(&expected)) else {
        let (path, number, count) = (path.to_owned(), split.number + 1, split.count);
        return Err(GgufError::SplitName { path, number, count, expected });
    };
    let part = |number| path.with_file_name(format!("{stem}{}", split_suffix(number, split.count)));
    Ok((0..split.count).map(part).collect())
}
