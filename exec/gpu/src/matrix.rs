//! Upload of a file's matrix into GPU memory.
//!
//! Raw bytes are uploaded in chunks and a kernel rearranges them ([`crate::kernels::packing`]), so that the file's
//! weights exist on the GPU once, in the layout that products read. A matrix that is larger than a binding may be is
//! several parts, each of some rows.

use std::ops::Range;

use hearth_kernels::Matrix;

use crate::conversion::Source;
use crate::device::{Gpu, Launch, Params, Tensor};
use crate::error::GpuError;
use crate::kernels::packing::{self, Packed};
use crate::kernels::product::{Product, Stage, Tiling};
use crate::kernels::{Variant, quantise};
use crate::virtual_tensor::Storage;

/// Raw bytes that are uploaded at once.
/// source: assumed, a few transfers per matrix and little memory beside the weights
const CHUNK_BYTES: usize = 16 << 20;

#[derive(Debug, Clone)]
pub struct GpuMatrix {
    pub packed: Packed,
    pub length: u32,
    pub rows: u32,
    /// The parts, in the order of their rows.
    pub parts: Vec<MatrixPart>,
    pub tiling: Tiling,
}

#[derive(Debug, Clone)]
pub struct MatrixPart {
    /// The number of rows before this part.
    pub first_row: u32,
    pub rows: u32,
    pub texels: Tensor,
    /// The scales, if the format stores them apart.
    pub scales: Option<Tensor>,
}

impl GpuMatrix {
    /// Uploads a matrix as it is.
    pub fn upload(gpu: &Gpu, matrix: Matrix<'_>, tiling: Tiling) -> Result<GpuMatrix, GpuError> {
        GpuMatrix::converted(gpu, matrix, None, tiling, &mut |_| ())
    }

    /// Uploads a matrix, converted if `to` is given; `report` gets the number of the file's bytes after each chunk.
    pub fn converted(
        gpu: &Gpu,
        matrix: Matrix<'_>,
        to: Option<Packed>,
        tiling: Tiling,
        report: &mut dyn FnMut(u64),
    ) -> Result<GpuMatrix, GpuError> {
        let source = Source::new(matrix, to)?;
        let packed = source.packed;
        if !matrix.rows.is_multiple_of(4) {
            let what = "the number of rows of a matrix";
            return Err(GpuError::Dimension { what, found: matrix.rows, need: "a multiple of 4" });
        }
        let (length, rows) = (matrix.length as u32, matrix.rows as u32);
        let group = tiling.slices * 4;
        let row_texels = u64::from(packed.texels(length)) * 16;
        let max = gpu.capabilities().binding_bytes.min(gpu.capabilities().buffer_bytes) / row_texels.max(1);
        let max = (max / u64::from(group) * u64::from(group)).min(u64::from(u32::MAX / group * group)) as u32;
        if max == 0 {
            return Err(GpuError::OutOfMemory {
                what: format!("{group} rows of {row_texels} bytes each in one buffer"),
            });
        }
        let mut made = GpuMatrix { packed, length, rows, parts: Vec::new(), tiling };
        let mut first_row = 0;
        while first_row < rows {
            let own = max.min(rows - first_row);
            let part = made.part(gpu, &source, first_row..first_row + own, report)?;
            made.parts.push(part);
            first_row += own;
        }
        Ok(made)
    }

    /// Bytes in GPU memory.
    pub fn bytes(&self) -> u64 {
        let of = |part: &MatrixPart| part.texels.bytes() + part.scales.as_ref().map_or(0, Tensor::bytes);
        self.parts.iter().map(of).sum()
    }

    fn part(
        &self,
        gpu: &Gpu,
        source: &Source<'_>,
        of: Range<u32>,
        report: &mut dyn FnMut(u64),
    ) -> Result<MatrixPart, GpuError> {
        let (first_row, rows) = (of.start, of.end - of.start);
        let (packed, length, order) = (self.packed, self.length, self.tiling.order);
        let slices = self.tiling.slices;
        let row_bytes = source.row_bytes();
        let product = Product { rows, ..self.product_shape() };
        let shape = product.shape()?;
        let texels = gpu.zeros("weights", u64::from(shape.elements()) * 4)?;
        let words = packed.scale_words(length);
        let padded = u64::from(rows.next_multiple_of(slices * 4));
        let scales = match words {
            0 => None,
            words => Some(gpu.zeros("scales of weights", padded * u64::from(words) * 4)?),
        };
        let max = usize::try_from(gpu.capabilities().binding_bytes).unwrap_or(usize::MAX).saturating_sub(16);
        let chunk = (CHUNK_BYTES.min(max) / row_bytes.max(1)).clamp(1, rows as usize);
        // A word beyond the end is read and thrown away.
        let raw = gpu.zeros("weights on their way", (chunk * row_bytes + 4) as u64)?;
        let params = gpu.params()?;
        let groups = |count: u32| packing::groups(chunk as u64 * u64::from(count));
        let texels_text = packing::texels_kernel(packed, length, row_bytes as u32, &shape, order);
        let name = "rearrange weights";
        let mut launches =
            vec![gpu.launch(name, &texels_text, &[&params, &raw, &texels], groups(packed.texels(length)))?];
        if let Some(scales) = &scales {
            let text = packing::scales_kernel(packed, length, row_bytes as u32, slices, order);
            launches.push(gpu.launch("gather scales", &text, &[&params, &raw, scales], groups(words))?);
        }
        let mut of_rows = Vec::new();
        for start in (0..rows as usize).step_by(chunk) {
            let end = (start + chunk).min(rows as usize);
            let bytes = source.rows(first_row as usize + start..first_row as usize + end, &mut of_rows)?;
            gpu.write(&raw, &bytes[..])?;
            gpu.write(&params, &[Params { offset: start as u32, end: end as u32, ..Params::pass(0, 0) }])?;
            gpu.submit(&launches)?;
            gpu.wait("a copy of weights")?;
            report((end - start) as u64 * source.stored_row_bytes());
        }
        let scales = if of_rows.is_empty() {
            scales
        } else {
            // Threads of the last group read scales of rows that there are not.
            of_rows.resize(padded as usize, 0.0);
            Some(gpu.upload("scales of rows", &of_rows)?)
        };
        Ok(MatrixPart { first_row, rows, texels, scales })
    }

    /// Returns the launches of a product with `input` [tokens, length], rounding included, and the tensor they write.
    /// With `integers` that has the integers of each block, [tokens, blocks, rows].
    pub fn product_launches(
        &self,
        gpu: &Gpu,
        input: &[f32],
        stage: Stage,
        integers: bool,
    ) -> Result<(Vec<Launch>, Tensor), GpuError> {
        let (length, numbers) = (self.length, input.len() as u64);
        let tokens = input.len() as u32 / length;
        let (params, x) = (gpu.params()?, gpu.upload("inputs", input)?);
        gpu.write(&params, &[Params::pass(tokens, 0)])?;
        let scaled = self.packed.inputs();
        let blocks = scaled.filter(|_| integers).map_or(1, |scaled| length / scaled.block(length));
        let out = gpu.zeros("results", u64::from(self.rows) * u64::from(tokens) * u64::from(blocks) * 4)?;
        let mut launches = Vec::new();
        let mut inputs = vec![x];
        if let Some(scaled) = scaled.filter(|_| stage == Stage::Prefill) {
            let scales = numbers / u64::from(scaled.block(length)) * 4;
            let [codes, scales, sums] = [
                gpu.zeros("codes", numbers)?,
                gpu.zeros("scales", scales)?,
                gpu.zeros("sums", numbers / 16 * 4)?,
            ];
            let text = quantise::kernel(length, scaled, Storage::Linear);
            let tensors = [&params, &inputs[0], &codes, &scales, &sums];
            launches.push(gpu.launch("round", &text, &tensors, quantise::groups(length, scaled, tokens))?);
            inputs = vec![codes, scales, sums];
        }
        for part in &self.parts {
            let (rows, first_row) = (part.rows, part.first_row);
            let variant = Variant::of(gpu.capabilities());
            let product = Product { rows, first_row, stage, variant, integers, ..self.product_shape() };
            let mut tensors = vec![&params, &part.texels];
            tensors.extend(&part.scales);
            tensors.extend(&inputs);
            tensors.push(&out);
            launches.push(gpu.launch("product", &product.kernel()?, &tensors, product.groups(tokens))?);
        }
        Ok((launches, out))
    }

    /// Returns a product of one token with this matrix, without bias or activation.
    pub fn product_shape(&self) -> Product {
        Product {
            packed: self.packed,
            length: self.length,
            rows: self.rows,
            first_row: 0,
            all_rows: self.rows,
            stage: Stage::Decode,
            tiling: self.tiling,
            variant: Variant { packed_dot: false, lanes: None, half: false },
            storage: Storage::Linear,
            bias: false,
            activation: None,
            multiplies: false,
            integers: false,
        }
    }
}
