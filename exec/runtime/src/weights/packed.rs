//! Packed weights: a file beside the model with its matrices in an order that some processors multiply faster.
//!
//! Sixteen rows of a matrix are interleaved (`hearth_kernels::interleaved`). A matrix keeps its size, and its rows are
//! read as before: mapped, reclaimed by the system, prefetched and evicted by their extents. Embeddings, norms, biases
//! and matrices that cannot be interleaved are read from the model file.
//!
//! The file has a magic number, the length of the index, the index as JSON, its SHA-256 digest, and the matrices, each
//! aligned to a cache line. The index names the digest of the model, so that another model's weights are never used.
//!
//! Not here: who packs weights and when (`hearth pack`).

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use hearth_kernels::interleaved::{self, GROUP_ROWS, can_interleave};
use hearth_kernels::{InstructionSet, Layout};
use hearth_profiles::model::ModelProfile;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::mapped_file::MappedFile;
use super::tensors::Tensor;
use super::{Extent, Weights};
use crate::error::ExecError;

/// The last two digits are the version of the order of the weights.
const MAGIC: &[u8; 16] = b"hearth-packed-01";

/// Maximum length of the index; one with 100,000 matrices is shorter.
const MAX_INDEX_BYTES: u64 = 64 << 20;

/// Matrices begin at a multiple of this number: vector registers are loaded faster from one cache line than from two.
const ALIGNMENT: u64 = 64;

#[derive(Debug, Serialize, Deserialize)]
struct Index {
    /// The digest of the model whose weights these are.
    model: String,
    matrices: Vec<PackedMatrix>,
}

/// The place of a matrix, from the beginning of its file.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct PackedMatrix {
    /// In the model, which may have several files.
    file_index: usize,
    source_offset: u64,
    bytes: u64,
    /// In the packed file.
    offset: u64,
}

/// What was packed, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct PackedSize {
    pub matrices: usize,
    pub packed_bytes: u64,
    /// The bytes of matrices that cannot be packed.
    pub other_bytes: u64,
    pub file_bytes: u64,
}

/// Returns the path of the packed weights of the model at `path`, which is its first file.
pub fn packed_path(path: &Path) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(".packed");
    name.into()
}

/// Whether this processor multiplies packed weights faster than those of the model file.
pub fn is_useful() -> bool {
    interleaved::is_fast(InstructionSet::detect())
}

impl Weights {
    /// Writes the packed weights of this model to `path`. `on_progress` receives the bytes written so far, and all.
    pub fn pack(&self, path: &Path, on_progress: &mut dyn FnMut(u64, u64)) -> Result<PackedSize, ExecError> {
        let (matrices, other_bytes) = self.packable();
        let total: u64 = matrices.keys().map(|source| source.length).sum();
        let model = ModelProfile::from_gguf(&self.model)?.digest;
        let header = |offsets: &[u64]| {
            let places = matrices.keys().zip(offsets).map(|(source, &offset)| PackedMatrix {
                file_index: source.file_index,
                source_offset: source.offset,
                bytes: source.length,
                offset,
            });
            let index = Index { model: model.clone(), matrices: places.collect() };
            let json = serde_json::to_vec(&index).expect("an index has no maps with other keys than strings");
            [&MAGIC[..], &(json.len() as u64).to_le_bytes(), &json, &Sha256::digest(&json)].concat()
        };
        // With the longest offsets first, which leaves room for the actual ones.
        let mut end = header(&vec![u64::MAX; matrices.len()]).len() as u64;
        let offsets: Vec<u64> = (matrices.keys())
            .map(|source| {
                let offset = end.next_multiple_of(ALIGNMENT);
                end = offset + source.length;
                offset
            })
            .collect();
        let written = |source| ExecError::WritePacked { path: path.to_owned(), source };
        let mut file = BufWriter::with_capacity(1 << 20, File::create(path).map_err(written)?);
        let header = header(&offsets);
        file.write_all(&header).map_err(written)?;
        let (mut at, mut done, mut group) = (header.len() as u64, 0, Vec::new());
        for ((source, tensor), offset) in matrices.iter().zip(offsets) {
            let padding = vec![0; (offset - at) as usize];
            file.write_all(&padding).map_err(written)?;
            let rows = self.matrix(*tensor);
            group.resize(GROUP_ROWS * rows.row_bytes(), 0);
            for bytes in rows.bytes.chunks_exact(group.len()) {
                interleaved::interleave(rows.format, rows.row_bytes(), bytes, &mut group);
                file.write_all(&group).map_err(written)?;
                done += bytes.len() as u64;
                on_progress(done, total);
            }
            at = offset + source.length;
        }
        file.into_inner()
            .map_err(io::IntoInnerError::into_error)
            .and_then(|file| file.sync_all())
            .map_err(written)?;
        self.check_unchanged()?;
        Ok(PackedSize { matrices: matrices.len(), packed_bytes: total, other_bytes, file_bytes: end })
    }

    /// Whether packed weights are used.
    pub fn uses_packed(&self) -> bool {
        !self.packed.is_empty()
    }

    /// Whether all packed matrices that are used have the weights of the model files.
    pub fn check_packed(&self) -> bool {
        self.is_packed_correctly(|_| true)
    }

    /// Uses the packed weights beside the model, if there are any and this processor multiplies them faster. Returns
    /// whether they are used. Fails if they do not belong to this model or are damaged.
    pub fn use_packed(&mut self) -> Result<bool, ExecError> {
        let path = packed_path(&self.model.file_paths[0]);
        if !is_useful() || self.fetched_layers.is_some() || !path.exists() {
            return Ok(false);
        }
        self.use_packed_file(&path)?;
        Ok(true)
    }

    /// Uses the packed weights in the file `path`.
    pub fn use_packed_file(&mut self, path: &Path) -> Result<(), ExecError> {
        let file = MappedFile::open(path)?;
        let refused = |what| ExecError::Packed { path: path.to_owned(), what };
        let index = read_index(file.mapping()).map_err(refused)?;
        if index.model != ModelProfile::from_gguf(&self.model)?.digest {
            return Err(refused("are those of another model, or of an earlier version of it"));
        }
        let (packable, _) = self.packable();
        let file_index = self.files.len();
        let mut packed = BTreeMap::new();
        for PackedMatrix { file_index: source_file, source_offset, bytes, offset } in index.matrices {
            let source = Extent { file_index: source_file, offset: source_offset, length: bytes };
            let is_inside = offset.checked_add(bytes).is_some_and(|end| end <= file.mapping().len() as u64);
            let tensor = packable.get(&source).filter(|_| is_inside);
            let tensor = *tensor.ok_or_else(|| refused("are incomplete or damaged"))?;
            let extent = Extent { file_index, offset, length: bytes };
            packed.insert(source, Tensor { layout: Layout::Interleaved, extent, ..tensor });
        }
        let replace = |tensor: Tensor, _| packed.get(&tensor.extent).copied().unwrap_or(tensor);
        self.layers = self.layers.drain(..).map(|layer| layer.map_matrices(1, replace)).collect();
        self.output.matrix = replace(self.output.matrix, 1);
        self.packed = packed;
        self.files.push(file);
        Ok(())
    }

    /// Returns the matrices that can be packed by their extents in the model files, and the bytes of the others.
    fn packable(&self) -> (BTreeMap<Extent, Tensor>, u64) {
        let expert_count = self.shape.experts.map_or(1, |experts| experts.count as usize);
        let (packable, other_bytes) = (std::cell::RefCell::new(BTreeMap::new()), std::cell::Cell::new(0));
        let visit = |tensor: Tensor, parts: usize| {
            let part_rows = tensor.rows / parts.max(1);
            if part_rows * parts == tensor.rows && part_rows > 0 && can_interleave(tensor.format, part_rows) {
                packable.borrow_mut().insert(tensor.extent, tensor);
            } else {
                other_bytes.set(other_bytes.get() + tensor.extent.length);
            }
            tensor
        };
        for layer in &self.layers {
            layer.map_matrices(expert_count, visit);
        }
        visit(self.output.matrix, 1);
        (packable.into_inner(), other_bytes.get())
    }

    /// Whether the packed matrices, of those whose extents in the model files `selected` accepts, have the weights of the
    /// model files.
    pub(super) fn is_packed_correctly(&self, selected: impl Fn(Extent) -> bool) -> bool {
        self.packed.iter().filter(|(source, _)| selected(**source)).all(|(source, tensor)| {
            let packed = self.matrix(*tensor);
            let stored = self.mapped_bytes(*source).unwrap_or_default();
            let groups = stored.chunks_exact(GROUP_ROWS * packed.row_bytes()).enumerate();
            stored.len() == packed.bytes.len()
                && groups.into_iter().all(|(group, stored)| {
                    *interleaved::rows_in_order(packed.slice(GROUP_ROWS * group, GROUP_ROWS)) == *stored
                })
        })
    }
}

/// Reads the index of a packed file. The error says what is wrong with the packed weights.
fn read_index(file: &[u8]) -> Result<Index, &'static str> {
    let damaged = "are incomplete or damaged";
    let (magic, rest) = file.split_first_chunk::<16>().ok_or(damaged)?;
    if magic != MAGIC {
        return Err("were written by another version of hearth");
    }
    let (length, rest) = rest.split_first_chunk().ok_or(damaged)?;
    let length = u64::from_le_bytes(*length);
    if length > MAX_INDEX_BYTES || length > rest.len() as u64 {
        return Err(damaged);
    }
    let (json, rest) = rest.split_at(length as usize);
    if rest.first_chunk() != Some(&<[u8; 32]>::from(Sha256::digest(json))) {
        return Err(damaged);
    }
    serde_json::from_slice(json).map_err(|_| damaged)
}
