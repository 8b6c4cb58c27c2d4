//! Entries of the fuzz targets: GGUF headers.
//!
//! An entry gets arbitrary bytes. It calls the parser, and panics if the result violates a property. The fuzz targets
//! (`fuzz/`) and the tests below call the entries; no program contains them.

use std::io::{Error, ErrorKind};
use std::path::Path;

use crate::gguf::{GgufError, GgufHeader, GgufModel, HeaderWriter};
use crate::model::ModelProfile;

/// Returns the maximum memory of an entry for an input of this length, in bytes: fixed reservations for arrays and
/// tensors, a string that may extend into the data, and for each byte of the input the elements of growing vectors (24
/// bytes for a string of 8), of which an entry has several copies.
pub fn allowed_memory(input_bytes: usize) -> usize {
    4 * DATA_BYTES as usize + 100 * input_bytes
}

/// Bytes that a file is longer than its header, so that an input without the data of its tensors can be valid.
const DATA_BYTES: u64 = 1 << 20;

/// Reads a model that consists of one or several files; each `GGUF` in the input begins a file.
///
/// - The tensors of a valid header are in the file, and their sizes follow from their dimensions.
/// - A valid header that is written again, and read, has the same metadata and tensors.
pub fn gguf_header(input: &[u8]) {
    let _ = GgufHeader::from_bytes(input);
    let starts = input.windows(4).enumerate().filter(|(_, word)| word == b"GGUF").map(|(at, _)| at);
    let starts: Vec<usize> = starts.skip(1).chain([input.len()]).collect();
    let files: Vec<&[u8]> =
        starts.iter().scan(0, |start, &end| Some(&input[std::mem::replace(start, end)..end])).collect();
    if let Ok(header) = read(files[0]) {
        check_header(&header, files[0].len() as u64 + DATA_BYTES);
    }
    let read_part = |path: &Path| {
        let number = path.to_str().and_then(|path| path.get(6..11)?.parse::<usize>().ok());
        let part = number.and_then(|number| files.get(number.saturating_sub(1)).copied());
        let missing = || GgufError::Open { path: path.to_owned(), source: Error::from(ErrorKind::NotFound) };
        let part = part.ok_or_else(missing)?;
        let source = read(part).map_err(|source| GgufError::Header { path: path.to_owned(), source })?;
        Ok((source, part.len() as u64 + DATA_BYTES))
    };
    let path = format!("model-00001-of-{:05}.gguf", files.len());
    if let Ok(model) = GgufModel::open_with(path.as_ref(), read_part) {
        assert!(model.tensors.iter().all(|tensor| tensor.file_index < model.file_paths.len()));
        assert_eq!(model.file_paths.len(), model.file_sizes.len());
        let _ = model.shape();
        let _ = ModelProfile::from_gguf(&model);
    }
}

fn read(file: &[u8]) -> Result<GgufHeader, crate::gguf::HeaderError> {
    GgufHeader::read(file, file.len() as u64 + DATA_BYTES)
}

fn check_header(header: &GgufHeader, file_bytes: u64) {
    let mut writer = HeaderWriter::default();
    for (key, value) in header.metadata.iter().filter(|(key, _)| *key != "general.alignment") {
        writer.add_key(key, value.clone()).expect("a key that was read is valid");
    }
    for tensor in &header.tensors {
        assert!(tensor.end_offset() <= file_bytes);
        assert_eq!(tensor.format.row_bytes(tensor.element_count()), Some(tensor.bytes));
        writer
            .add_tensor(&tensor.name, &tensor.dims, tensor.format)
            .expect("a tensor that was read is valid");
    }
    let layout = writer.finish();
    let again = GgufHeader::read(&*layout.header, layout.file_bytes).expect("what was written is valid");
    assert_eq!(again.tensors, layout.tensors);
    // As text, because a number that is not a number does not equal itself.
    let text = |header: &GgufHeader| {
        let keys = header.metadata.iter().filter(|(key, _)| *key != "general.alignment");
        keys.map(|key| format!("{key:?}")).collect::<Vec<_>>()
    };
    assert_eq!(text(&again), text(header));
}

#[cfg(test)]
#[path = "../../fuzz/replay.rs"]
mod replay;

#[test]
fn gguf_header_corpus() {
    replay::replay("gguf_header", allowed_memory, gguf_header);
}
