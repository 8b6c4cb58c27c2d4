//! Where do the weights lie, and which bytes belong to which layer?
//!
//! The files of a model are mapped, never read: a page comes from disk when a kernel first touches it, or
//! earlier if a prefetcher asks for it by [`Extent`]. [`Weights::open`] checks every tensor that the forward
//! pass will use (present, of a type there is a kernel for, of the dimensions that the metadata imply, inside
//! its file) and that no tensor of a layer would be left out; after that, using them cannot fail.
//!
//! Not here: when to fetch and drop pages. The ring decides that with the extents.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

use hearth_profiles::gguf::{GgufModel, TensorInfo};
use hearth_profiles::model::{Architecture, ModelShape};
use hearth_schema::schedule::Part;
use memmap2::Mmap;

use crate::error::ExecError;
use crate::fetched::is_partial;
use crate::kernels::Supported;
use crate::kernels::product::Matrix;
use crate::llama::Hyperparameters;

/// A run of bytes in one of a model's files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Extent {
    /// Which file.
    pub part: usize,
    /// First byte.
    pub offset: u64,
    /// Number of bytes.
    pub length: u64,
}

/// A checked tensor in the mapping.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tensor {
    format: Supported,
    length: usize,
    rows: usize,
    extent: Extent,
}

/// The tensors of one layer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LayerTensors {
    pub(crate) attention_norm: Tensor,
    pub(crate) query: Tensor,
    pub(crate) key: Tensor,
    pub(crate) value: Tensor,
    pub(crate) attention_output: Tensor,
    pub(crate) feed_forward_norm: Tensor,
    pub(crate) gate: Tensor,
    pub(crate) up: Tensor,
    pub(crate) down: Tensor,
}

/// A model whose files are mapped and whose tensor table is checked.
#[derive(Debug)]
pub struct Weights {
    model: GgufModel,
    shape: ModelShape,
    hyperparameters: Hyperparameters,
    maps: Vec<Mmap>,
    files: Vec<File>,
    layers: Vec<LayerTensors>,
    embedding: Tensor,
    output_norm: Tensor,
    output: Tensor,
    /// The only layers that are here, where a part of the model was fetched.
    held: Option<BTreeSet<u32>>,
}

impl Weights {
    /// Maps the model at `path`; of a split model, any part.
    pub fn open(path: impl AsRef<Path>) -> Result<Weights, ExecError> {
        let model = GgufModel::open(path)?;
        match model.parts.iter().find(|part| is_partial(part)) {
            Some(part) => Err(ExecError::Partial { path: part.clone() }),
            None => Weights::of(model, None),
        }
    }

    /// Maps a model of which these layers were fetched. Nothing else of it can be used.
    pub(crate) fn open_fetched(path: &Path, layers: BTreeSet<u32>) -> Result<Weights, ExecError> {
        Weights::of(GgufModel::open(path)?, Some(layers))
    }

    /// Whether these layers are here.
    pub(crate) fn holds(&self, mut layers: Range<u32>) -> bool {
        self.held.as_ref().is_none_or(|held| layers.all(|layer| held.contains(&layer)))
    }

    /// Whether the whole model is here.
    pub(crate) fn is_whole(&self) -> bool {
        self.held.is_none()
    }

    fn of(model: GgufModel, held: Option<BTreeSet<u32>>) -> Result<Weights, ExecError> {
        let shape = model.shape()?;
        if shape.architecture != Architecture::Llama {
            return Err(ExecError::Architecture { found: shape.architecture.to_string() });
        }
        let mapped = model.parts.iter().map(|part| map(part)).collect::<Result<Vec<_>, _>>()?;
        let (maps, files): (Vec<_>, Vec<_>) = mapped.into_iter().unzip();
        let table = Table::new(&model, &maps);
        let (wide, vocabulary) = (u64::from(shape.embedding), u64::from(shape.vocabulary));
        let layers = (0..shape.layers.0).map(|layer| table.layer(layer, &shape)).collect::<Result<_, _>>()?;
        let embedding = table.matrix("token_embd.weight", wide, vocabulary)?;
        let output = match table.find("output.weight") {
            Some(_) => table.matrix("output.weight", wide, vocabulary)?,
            None => embedding,
        };
        let output_norm = table.vector("output_norm.weight", wide)?;
        table.nothing_is_left_out(shape.layers.0)?;
        let hyperparameters =
            Hyperparameters::read(&model.metadata, &shape, table.rope_factors(&shape)?.as_deref())?;
        Ok(Weights {
            model,
            shape,
            hyperparameters,
            maps,
            files,
            layers,
            embedding,
            output_norm,
            output,
            held,
        })
    }

    /// The header.
    pub fn model(&self) -> &GgufModel {
        &self.model
    }

    /// Layers, widths and heads.
    pub fn shape(&self) -> &ModelShape {
        &self.shape
    }

    /// The numbers of the forward pass that are not dimensions.
    pub fn hyperparameters(&self) -> &Hyperparameters {
        &self.hyperparameters
    }

    /// The files, in the order that [`Extent::part`] counts them.
    pub fn parts(&self) -> &[PathBuf] {
        &self.model.parts
    }

    /// Bytes of one layer, neighbours merged. A layer the model does not have has none.
    pub fn layer_extents(&self, layer: u32) -> Vec<Extent> {
        self.layers.get(layer as usize).map(|layer| merged(layer.all())).unwrap_or_default()
    }

    /// Bytes of several layers, neighbours merged.
    pub fn layers_extents(&self, layers: Range<u32>) -> Vec<Extent> {
        merged(layers.filter_map(|layer| self.layers.get(layer as usize)).flat_map(LayerTensors::all))
    }

    /// Bytes of the input embedding; a token reads one row of it.
    pub fn embedding_extents(&self) -> Vec<Extent> {
        merged([self.embedding])
    }

    /// The embedding rows of tokens, unless the table is the output matrix as well.
    pub fn embedding_rows<'a>(&'a self, tokens: &'a [u32]) -> impl Iterator<Item = Extent> + 'a {
        let table = self.embedding.extent;
        let row = table.length / self.embedding.rows.max(1) as u64;
        let own = tokens.iter().filter(move |_| table != self.output.extent);
        own.map(move |&token| Extent { offset: table.offset + u64::from(token) * row, length: row, ..table })
    }

    /// Bytes of what turns hidden rows into logits; those of the embedding if the two are tied.
    pub fn head_extents(&self) -> Vec<Extent> {
        merged([self.output_norm, self.output])
    }

    /// Bytes of what a schedule reads as one, neighbours merged.
    pub fn part_extents(&self, part: &Part) -> Vec<Extent> {
        match part {
            Part::Layers(layers) => self.layers_extents(layers.clone()),
            Part::Output => self.head_extents(),
        }
    }

    /// Matrices of a part, in the order in which they are used.
    pub fn matrices_of(&self, part: &Part) -> Vec<Extent> {
        let extents = |layer: &LayerTensors| layer.matrices().map(|tensor| tensor.extent);
        match part {
            Part::Layers(layers) => {
                layers.clone().filter_map(|layer| self.layers.get(layer as usize)).flat_map(extents).collect()
            }
            Part::Output => vec![self.output.extent],
        }
    }

    /// The small rest of a part: norms.
    pub fn vectors_of(&self, part: &Part) -> Vec<Extent> {
        let extents = |layer: &LayerTensors| [layer.attention_norm.extent, layer.feed_forward_norm.extent];
        match part {
            Part::Layers(layers) => {
                layers.clone().filter_map(|layer| self.layers.get(layer as usize)).flat_map(extents).collect()
            }
            Part::Output => vec![self.output_norm.extent],
        }
    }

    /// How many bytes a part has.
    pub fn part_bytes(&self, part: &Part) -> u64 {
        self.part_extents(part).iter().map(|extent| extent.length).sum()
    }

    /// The mapped bytes of an extent, for advice to the system and for checksums. `None` if it does not lie
    /// within its file.
    pub fn bytes(&self, extent: Extent) -> Option<&[u8]> {
        let start = usize::try_from(extent.offset).ok()?;
        let end = start.checked_add(usize::try_from(extent.length).ok()?)?;
        self.maps.get(extent.part)?.get(start..end)
    }

    /// The file of an extent.
    pub fn file(&self, extent: Extent) -> Option<&File> {
        self.files.get(extent.part)
    }

    /// The files, in the order that [`Extent::part`] counts them.
    pub fn files(&self) -> &[File] {
        &self.files
    }

    /// The mapped files.
    pub fn mappings(&self) -> impl Iterator<Item = &[u8]> {
        self.maps.iter().map(|map| &map[..])
    }

    pub(crate) fn layer(&self, layer: u32) -> &LayerTensors {
        &self.layers[layer as usize]
    }

    pub(crate) fn embedding_matrix(&self) -> Matrix<'_> {
        self.matrix(self.embedding)
    }

    pub(crate) fn output_matrix(&self) -> Matrix<'_> {
        self.matrix(self.output)
    }

    pub(crate) fn output_norm(&self) -> &[f32] {
        self.vector(self.output_norm)
    }

    pub(crate) fn matrix(&self, tensor: Tensor) -> Matrix<'_> {
        let bytes = self.bytes(tensor.extent).expect("the tensor table was checked");
        Matrix { format: tensor.format, length: tensor.length, rows: tensor.rows, bytes }
    }

    pub(crate) fn vector(&self, tensor: Tensor) -> &[f32] {
        bytemuck::cast_slice(self.bytes(tensor.extent).expect("the tensor table was checked"))
    }
}

impl LayerTensors {
    /// In the order of use.
    fn matrices(&self) -> [Tensor; 7] {
        [self.query, self.key, self.value, self.attention_output, self.gate, self.up, self.down]
    }

    fn all(&self) -> impl Iterator<Item = Tensor> {
        self.matrices().into_iter().chain([self.attention_norm, self.feed_forward_norm])
    }
}

fn map(path: &Path) -> Result<(Mmap, File), ExecError> {
    let failed = |source| ExecError::Map { path: path.to_owned(), source };
    let file = File::open(path).map_err(failed)?;
    // SAFETY: the file is mapped read-only and its bytes are only ever read as numbers, for which any value
    // is valid. Nobody may shorten a model file while it is in use; no check can rule that out, and the
    // system then ends the process rather than giving it wrong bytes.
    let mapped = unsafe { Mmap::map(&file) }.map_err(failed)?;
    Ok((mapped, file))
}

/// Sorted extents, joined where one ends at or within the next file alignment of another.
fn merged(tensors: impl IntoIterator<Item = Tensor>) -> Vec<Extent> {
    let mut extents: Vec<Extent> = tensors.into_iter().map(|tensor| tensor.extent).collect();
    extents.sort_unstable();
    let mut joined: Vec<Extent> = Vec::new();
    for extent in extents {
        match joined.last_mut() {
            // Tensors are padded to the file's alignment; the padding belongs to nobody.
            Some(last)
                if last.part == extent.part
                    && extent.offset.saturating_sub(last.offset + last.length) < 64 =>
            {
                last.length = last.length.max(extent.offset + extent.length - last.offset);
            }
            _ => joined.push(extent),
        }
    }
    joined
}

/// The tensors of the file by name, while they are being checked.
struct Table<'a> {
    by_name: BTreeMap<&'a str, &'a TensorInfo>,
    maps: &'a [Mmap],
}

const LAYER_TENSORS: [&str; 9] = [
    "attn_norm.weight",
    "attn_q.weight",
    "attn_k.weight",
    "attn_v.weight",
    "attn_output.weight",
    "ffn_norm.weight",
    "ffn_gate.weight",
    "ffn_up.weight",
    "ffn_down.weight",
];

impl<'a> Table<'a> {
    fn new(model: &'a GgufModel, maps: &'a [Mmap]) -> Table<'a> {
        let by_name = model.tensors.iter().map(|tensor| (tensor.name.as_str(), tensor)).collect();
        Table { by_name, maps }
    }

    fn find(&self, name: &str) -> Option<&'a TensorInfo> {
        self.by_name.get(name).copied()
    }

    fn layer(&self, layer: u32, shape: &ModelShape) -> Result<LayerTensors, ExecError> {
        let name = |at: usize| format!("blk.{layer}.{}", LAYER_TENSORS[at]);
        let (wide, inner) = (u64::from(shape.embedding), u64::from(shape.feed_forward));
        let (query, key, value) = (shape.query_width(), shape.key_width(), shape.value_width());
        let mixed = u64::from(shape.heads) * u64::from(shape.value_length);
        Ok(LayerTensors {
            attention_norm: self.vector(&name(0), wide)?,
            query: self.matrix(&name(1), wide, query)?,
            key: self.matrix(&name(2), wide, key)?,
            value: self.matrix(&name(3), wide, value)?,
            attention_output: self.matrix(&name(4), mixed, wide)?,
            feed_forward_norm: self.vector(&name(5), wide)?,
            gate: self.matrix(&name(6), wide, inner)?,
            up: self.matrix(&name(7), wide, inner)?,
            down: self.matrix(&name(8), inner, wide)?,
        })
    }

    fn matrix(&self, name: &str, length: u64, rows: u64) -> Result<Tensor, ExecError> {
        self.checked(name, &[length, rows])
    }

    fn vector(&self, name: &str, length: u64) -> Result<Tensor, ExecError> {
        let tensor = self.checked(name, &[length])?;
        if tensor.format != Supported::F32 {
            return Err(ExecError::NotF32 { tensor: name.into(), format: tensor.format.format() });
        }
        let offset = tensor.extent.offset;
        if !offset.is_multiple_of(4) {
            let problem = "not a multiple of 4";
            return Err(ExecError::Place { tensor: name.into(), offset, problem });
        }
        Ok(tensor)
    }

    fn checked(&self, name: &str, dims: &[u64]) -> Result<Tensor, ExecError> {
        let missing = || ExecError::MissingTensor { tensor: name.into() };
        let info = self.find(name).ok_or_else(missing)?;
        let unknown = || ExecError::Format { tensor: name.into(), format: info.format };
        let format = Supported::of(info.format).ok_or_else(unknown)?;
        let [length, rows @ ..] = dims else { unreachable!("a tensor has a row length") };
        let rows: u64 = rows.iter().product();
        let bytes = format.format().row_bytes(*length).and_then(|row| row.0.checked_mul(rows));
        if info.dims != dims || bytes != Some(info.bytes.0) {
            let (found, expected) = (info.dims.clone(), dims.to_vec());
            return Err(ExecError::Dimensions { tensor: name.into(), found, expected });
        }
        let extent = Extent { part: info.part, offset: info.offset, length: info.bytes.0 };
        let end = extent.offset.checked_add(extent.length);
        let file = self.maps.get(extent.part).map_or(0, |map| map.len() as u64);
        if end.is_none_or(|end| end > file) {
            let problem = "beyond the end of its file";
            return Err(ExecError::Place { tensor: name.into(), offset: extent.offset, problem });
        }
        Ok(Tensor { format, length: *length as usize, rows: rows as usize, extent })
    }

    /// Factors of the rotary frequencies (Llama 3.1), if the file has them.
    fn rope_factors(&self, shape: &ModelShape) -> Result<Option<Vec<f32>>, ExecError> {
        let name = "rope_freqs.weight";
        let Some(info) = self.find(name) else { return Ok(None) };
        let longest = u64::from(shape.key_length / 2);
        // One factor a pair; pairs that are not rotated have none.
        let length = info.dims.first().copied().filter(|&pairs| pairs <= longest).unwrap_or(longest);
        let extent = self.vector(name, length)?.extent;
        let bytes = &self.maps[extent.part][extent.offset as usize..][..extent.length as usize];
        Ok(Some(bytemuck::cast_slice(bytes).to_vec()))
    }

    fn nothing_is_left_out(&self, layers: u32) -> Result<(), ExecError> {
        for name in self.by_name.keys() {
            let Some((layer, rest)) = name.strip_prefix("blk.").and_then(|name| name.split_once('.')) else {
                continue;
            };
            let known = layer.parse::<u32>().is_ok_and(|layer| layer < layers);
            if !known || !LAYER_TENSORS.contains(&rest) {
                return Err(ExecError::UnexpectedTensor { tensor: (*name).into() });
            }
        }
        Ok(())
    }
}
