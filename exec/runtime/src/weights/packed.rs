//! Packed weights: a file beside the model with its matrices in an order that some processors multiply faster.
//!
//! Sixteen rows of a matrix are interleaved (`hearth_kernels::interleaved`). A matrix keeps its size, and its rows are
//! read as before: mapped, reclaimed by the system, prefetched and evicted by their extents. Embeddings, norms, biases
//! and matrices that cannot be interleaved are read from the model file.
//!
//! The file has a magic number, the length of the index, the index as JSON, its SHA-256 digest, and the matrices, each
//! aligned to a cache line. The index names the digest of the model, which covers headers, sizes and the first bytes of
//! each tensor, and a file that is older than the model is not used. All bytes are compared by `--verify` and `hearth pack
//! --check`.
//!
//! Not here: who packs weights and when (`hearth pack`).

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use hearth_kernels::interleaved::{self, GROUP_ROWS, can_interleave};
use hearth_kernels::{InstructionSet, Layout, Matrix};
use hearth_profiles::gguf::{GgufError, TensorInfo};
use hearth_profiles::model::ModelProfile;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::digests::{CHUNK_BYTES, read_exact_at};
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
    /// Writes the packed weights of this model to `path`. `on_progress` receives the bytes written so far, and all. Fails
    /// if no matrix can be packed.
    ///
    /// # Panics
    /// If packed weights are used.
    pub fn pack(&self, path: &Path, on_progress: &mut dyn FnMut(u64, u64)) -> Result<PackedSize, ExecError> {
        assert!(!self.uses_packed(), "the weights of the model are packed, not packed ones");
        let (matrices, other_bytes) = self.packable();
        if matrices.is_empty() {
            return Err(ExecError::NothingToPack { path: self.model.file_paths[0].clone() });
        }
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

    /// Whether all packed matrices that are used have the weights of the model files. `on_progress` receives the bytes
    /// compared so far, and all.
    pub fn check_packed(&self, on_progress: &mut dyn FnMut(u64, u64)) -> Result<bool, ExecError> {
        let files: Vec<&File> = self.files().collect();
        let total = self.packed.keys().map(|source| source.length).sum();
        let mut done = 0;
        for (&source, &tensor) in &self.packed {
            let is_equal = PackedPart { source, tensor }.is_equal(&files, &mut |bytes| {
                done += bytes;
                on_progress(done, total);
                true
            });
            let path = || self.files[tensor.extent.file_index].path().to_owned();
            if is_equal.map_err(|source| GgufError::Read { path: path(), source })? != Some(true) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Uses the packed weights beside the model, if there are any and this processor multiplies them faster. Returns
    /// whether they are used. Fails if they do not belong to this model or are damaged.
    pub fn use_packed(&mut self) -> Result<bool, ExecError> {
        let path = packed_path(&self.model.file_paths[0]);
        if !is_useful() || self.fetched_layers.is_some() || !path.exists() {
            return Ok(false);
        }
        self.use_packed_file(&path)?;
        Ok(self.uses_packed())
    }

    /// Uses the packed weights in the file `path`, on any processor. Fails as [`Self::use_packed`] does.
    ///
    /// # Panics
    /// If packed weights are used already.
    pub fn use_packed_file(&mut self, path: &Path) -> Result<(), ExecError> {
        assert!(!self.uses_packed(), "packed weights are used already");
        let file = MappedFile::open(path)?;
        let refused = |what| ExecError::Packed { path: path.to_owned(), what };
        let index = read_index(file.mapping()).map_err(refused)?;
        if index.model != ModelProfile::from_gguf(&self.model)?.digest {
            return Err(refused("are those of another model, or of an earlier version of it"));
        }
        if file.modified() < self.files.iter().filter_map(MappedFile::modified).max() {
            return Err(refused("are older than the model"));
        }
        let (packable, _) = self.packable();
        let (file_index, count) = (self.files.len(), index.matrices.len());
        let mut packed = BTreeMap::new();
        for PackedMatrix { file_index: source_file, source_offset, bytes, offset } in index.matrices {
            let source = Extent { file_index: source_file, offset: source_offset, length: bytes };
            let is_inside = offset.checked_add(bytes).is_some_and(|end| end <= file.mapping().len() as u64);
            let tensor = packable.get(&source).filter(|_| is_inside && offset.is_multiple_of(ALIGNMENT));
            let tensor = *tensor.ok_or_else(|| refused("are incomplete or damaged"))?;
            let extent = Extent { file_index, offset, length: bytes };
            packed.insert(source, Tensor { layout: Layout::Interleaved, extent, ..tensor });
        }
        if packed.len() != packable.len() || count != packable.len() {
            return Err(refused("are incomplete or damaged"));
        }
        let replace = |tensor: Tensor| packed.get(&tensor.extent).copied().unwrap_or(tensor);
        self.layers = self.layers.drain(..).map(|layer| layer.map_matrices(replace)).collect();
        self.output.matrix = replace(self.output.matrix);
        self.packed = packed;
        self.files.push(file);
        Ok(())
    }

    /// Returns the matrices that can be packed by their extents in the model files, and the bytes of the others.
    fn packable(&self) -> (BTreeMap<Extent, Tensor>, u64) {
        let expert_count = self.shape.experts.map_or(1, |experts| experts.count as usize);
        let of_layers = self.layers.iter().flat_map(|layer| layer.matrices_with_parts(expert_count));
        let (mut packable, mut other_bytes) = (BTreeMap::new(), 0);
        for (tensor, parts) in of_layers.chain([(self.output.matrix, 1)]) {
            let part_rows = tensor.rows / parts.max(1);
            if part_rows * parts == tensor.rows && part_rows > 0 && can_interleave(tensor.format, part_rows) {
                packable.insert(tensor.extent, tensor);
            } else {
                other_bytes += tensor.extent.length;
            }
        }
        (packable, other_bytes)
    }

    /// Returns the packed matrices that are parts of a tensor of the model.
    pub(super) fn packed_parts(&self, tensor: &TensorInfo) -> impl Iterator<Item = PackedPart> {
        let at = |offset| Extent { file_index: tensor.file_index, offset, length: 0 };
        let parts = self.packed.range(at(tensor.offset)..at(tensor.end_offset()));
        parts.map(|(&source, &tensor)| PackedPart { source, tensor })
    }
}

/// A matrix in a packed file, and its extent in the model files.
#[derive(Debug, Clone, Copy)]
pub(super) struct PackedPart {
    pub(super) source: Extent,
    pub(super) tensor: Tensor,
}

impl PackedPart {
    /// Whether the packed matrix has the weights of the model. After each chunk, `on_chunk` receives its length, and
    /// returns whether to continue; if not, the result is `None`.
    pub(super) fn is_equal(
        &self,
        files: &[&File],
        on_chunk: &mut dyn FnMut(u64) -> bool,
    ) -> io::Result<Option<bool>> {
        let PackedPart { source, tensor: Tensor { format, row_length, rows, layout, extent } } = *self;
        let group = source.length as usize / (rows / GROUP_ROWS);
        let chunk = (CHUNK_BYTES / group).max(1) * group;
        let (mut stored, mut packed) = (vec![0; chunk], vec![0; chunk]);
        for at in (0..source.length).step_by(chunk) {
            let length = chunk.min((source.length - at) as usize);
            read_exact_at(files[source.file_index], &mut stored[..length], source.offset + at)?;
            read_exact_at(files[extent.file_index], &mut packed[..length], extent.offset + at)?;
            let rows = length / group * GROUP_ROWS;
            let matrix = Matrix { format, row_length, rows, layout, bytes: &packed[..length] };
            if *interleaved::rows_in_order(matrix) != stored[..length] {
                return Ok(Some(false));
            }
            if !on_chunk(length as u64) {
                return Ok(None);
            }
        }
        Ok(Some(true))
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
