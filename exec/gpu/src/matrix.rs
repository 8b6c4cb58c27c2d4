//! Weight matrices in GPU memory: upload and matmuls.
//!
//! The raw bytes of the model file are uploaded in chunks, which a kernel rearranges ([`crate::kernels::packing`]). So
//! the GPU stores the weights once, in the layout that the matmul kernels read. A matrix larger than the maximum
//! binding size is split into parts, each with some of the rows.

use std::ops::Range;

use hearth_kernels::interleaved::rows_in_order;
use hearth_kernels::{Layout, Matrix};

use crate::conversion::{converted_rows, uploaded_row_bytes};
use crate::device::{Gpu, GpuBuffer, KernelParams, Launch};
use crate::error::GpuError;
use crate::kernels::matmul::{MatmulKernel, Phase, Tiling};
use crate::kernels::packing::{self, PackedFormat};
use crate::kernels::quantise::{self, Granularity};

/// Maximum number of bytes of weights in one transfer to the GPU.
/// source: assumed, a few transfers per matrix, and little memory in addition to the weights
const CHUNK_BYTES: usize = 16 << 20;

/// A weight matrix in GPU memory.
#[derive(Debug, Clone)]
pub struct GpuMatrix {
    pub packed_format: PackedFormat,
    /// Number of weights in a row, which is the number of inputs of the matmul.
    pub row_length: u32,
    /// Number of rows, which is the number of outputs of the matmul.
    pub rows: u32,
    /// The parts of the matrix, in the order of their rows.
    pub parts: Vec<MatrixPart>,
    pub tiling: Tiling,
}

/// Consecutive rows of a matrix that are small enough for one binding.
#[derive(Debug, Clone)]
pub struct MatrixPart {
    /// Index in the matrix of the first row of this part.
    pub first_row: u32,
    pub rows: u32,
    pub texels: GpuBuffer,
    /// The scales of the weights; `None` if the texels contain the scales.
    pub scales: Option<GpuBuffer>,
}

impl GpuMatrix {
    /// Uploads a matrix without conversion.
    pub fn upload(gpu: &Gpu, matrix: Matrix<'_>, tiling: Tiling) -> Result<GpuMatrix, GpuError> {
        GpuMatrix::upload_converted(gpu, matrix, None, tiling, &mut |_| ())
    }

    /// Uploads a matrix, converted to the format `to` if there is one. Calls `report` after each uploaded chunk with
    /// the size of the chunk in the model file, in bytes.
    pub fn upload_converted(
        gpu: &Gpu,
        matrix: Matrix<'_>,
        to: Option<PackedFormat>,
        tiling: Tiling,
        report: &mut dyn FnMut(u64),
    ) -> Result<GpuMatrix, GpuError> {
        let in_order = rows_in_order(matrix);
        let matrix = Matrix { layout: Layout::Rows, bytes: &in_order, ..matrix };
        let packed = match to {
            None => PackedFormat::from_file_format(matrix.format, matrix.row_length)?,
            Some(packed) => packed.for_row_length(matrix.row_length)?,
        };
        if !matrix.rows.is_multiple_of(4) {
            let what = "the number of rows of a matrix";
            return Err(GpuError::UnsupportedDimension { what, found: matrix.rows, need: "a multiple of 4" });
        }
        let (length, rows) = (matrix.row_length as u32, matrix.rows as u32);
        let group_rows = tiling.slices_per_workgroup * 4;
        let row_bytes = u64::from(packed.texels_per_row(length)) * 16;
        let capabilities = gpu.capabilities();
        let max_bytes = capabilities.max_binding_bytes.min(capabilities.max_buffer_bytes);
        let max_groups = max_bytes / row_bytes.max(1) / u64::from(group_rows);
        let max_groups = max_groups.min(u64::from(u32::MAX / group_rows));
        let max_rows = max_groups as u32 * group_rows;
        if max_rows == 0 {
            return Err(GpuError::SmallBuffers { group_rows, row_bytes, max_bytes });
        }
        let mut uploaded =
            GpuMatrix { packed_format: packed, row_length: length, rows, parts: Vec::new(), tiling };
        let mut first_row = 0;
        while first_row < rows {
            let part_rows = max_rows.min(rows - first_row);
            let part = uploaded.upload_part(gpu, matrix, first_row..first_row + part_rows, report)?;
            uploaded.parts.push(part);
            first_row += part_rows;
        }
        Ok(uploaded)
    }

    /// Returns the bytes of the matrix in GPU memory.
    pub fn memory_bytes(&self) -> u64 {
        let of = |part: &MatrixPart| {
            part.texels.size_bytes() + part.scales.as_ref().map_or(0, GpuBuffer::size_bytes)
        };
        self.parts.iter().map(of).sum()
    }

    fn upload_part(
        &self,
        gpu: &Gpu,
        matrix: Matrix<'_>,
        of: Range<u32>,
        report: &mut dyn FnMut(u64),
    ) -> Result<MatrixPart, GpuError> {
        let (first_row, rows) = (of.start, of.end - of.start);
        let (packed, length, order) = (self.packed_format, self.row_length, self.tiling.weight_order);
        let slices = self.tiling.slices_per_workgroup;
        let row_bytes = uploaded_row_bytes(matrix, packed);
        let shape = self.matmul_kernel(gpu, first_row, rows).packed_weight_shape()?;
        let texels = gpu.allocate("weights", u64::from(shape.element_count()) * 4)?;
        let words = packed.scale_words_per_row(length);
        let padded = u64::from(rows.next_multiple_of(slices * 4));
        let scales = (words > 0).then(|| gpu.allocate("scales of weights", padded * u64::from(words) * 4));
        let mut scales = scales.transpose()?;
        let max =
            usize::try_from(gpu.capabilities().max_binding_bytes).unwrap_or(usize::MAX).saturating_sub(16);
        let chunk = (CHUNK_BYTES.min(max) / row_bytes.max(1)).clamp(1, rows as usize);
        // The kernels may read one word after the last byte, whose value does not matter.
        let raw = gpu.allocate("raw weights", (chunk * row_bytes + 4) as u64)?;
        let params = gpu.create_params_buffer()?;
        let groups = |count: u32| packing::workgroup_count(chunk as u64 * u64::from(count));
        let text = packing::texel_packing_kernel(packed, length, row_bytes as u32, &shape, order);
        let bound = [&params, &raw, &texels];
        let workgroups = groups(packed.texels_per_row(length));
        let mut launches = vec![gpu.prepare_launch("rearrange weights", &text, &bound, workgroups)?];
        if let Some(scales) = &scales {
            let text = packing::scale_packing_kernel(packed, length, row_bytes as u32, slices, order);
            let bound = [&params, &raw, scales];
            launches.push(gpu.prepare_launch("gather scales", &text, &bound, groups(words))?);
        }
        let mut row_scales = Vec::new();
        for start in (0..rows as usize).step_by(chunk) {
            let end = (start + chunk).min(rows as usize);
            let part = first_row as usize + start..first_row as usize + end;
            let bytes = converted_rows(matrix, packed, part, &mut row_scales)?;
            gpu.write(&raw, &bytes[..])?;
            let range =
                KernelParams { offset: start as u32, end: end as u32, ..KernelParams::for_pass(0, 0) };
            gpu.write(&params, &[range])?;
            gpu.submit(&launches)?;
            gpu.wait("a copy of weights")?;
            report(((end - start) * matrix.row_bytes()) as u64);
        }
        if !row_scales.is_empty() {
            // The threads of the last workgroup also read the scales of padding rows.
            row_scales.resize(padded as usize, 0.0);
            scales = Some(gpu.upload("scales of rows", &row_scales)?);
        }
        Ok(MatrixPart { first_row, rows, texels, scales })
    }

    /// Prepares a matmul with `input` [tokens, row_length]. Returns the launches, including the quantisation of the
    /// input, and the output tensor [tokens, rows]. If `writes_integer_sums` is set, the output has the integer sums of
    /// each block, [tokens, blocks, rows].
    pub fn matmul_launches(
        &self,
        gpu: &Gpu,
        input: &[f32],
        phase: Phase,
        writes_integer_sums: bool,
    ) -> Result<(Vec<Launch>, GpuBuffer), GpuError> {
        let (length, elements) = (self.row_length, input.len() as u64);
        let tokens = input.len() as u32 / length;
        let (params, x) = (gpu.create_params_buffer()?, gpu.upload("inputs", input)?);
        gpu.write(&params, &[KernelParams::for_pass(tokens, 0)])?;
        let granularity = self.packed_format.input_granularity();
        let block_length = |granularity: Granularity| granularity.block_length(length);
        let blocks = granularity.filter(|_| writes_integer_sums).map_or(1, |of| length / block_length(of));
        let out =
            gpu.allocate("results", u64::from(self.rows) * u64::from(tokens) * u64::from(blocks) * 4)?;
        let mut launches = Vec::new();
        let mut inputs = vec![x];
        if let Some(granularity) = granularity.filter(|_| phase == Phase::Prefill) {
            let blocks = elements / u64::from(block_length(granularity));
            let (quants, scales) = (gpu.allocate("quants", elements)?, gpu.allocate("scales", blocks * 4)?);
            let sums = gpu.allocate("sums", elements / 16 * 4)?;
            let text = quantise::wgsl_source(length, granularity);
            let tensors = [&params, &inputs[0], &quants, &scales, &sums];
            let workgroups = quantise::workgroup_count(length, granularity, tokens);
            launches.push(gpu.prepare_launch("quantise", &text, &tensors, workgroups)?);
            inputs = vec![quants, scales, sums];
        }
        let kernel = MatmulKernel { phase, writes_integer_sums, ..self.matmul_kernel(gpu, 0, self.rows) };
        let others: Vec<&GpuBuffer> = inputs.iter().chain([&out]).collect();
        let matmuls = self.part_launches(gpu, "matmul", kernel, &params, &others, tokens)?;
        launches.extend(matmuls.into_iter().map(|(_, launch)| launch));
        Ok((launches, out))
    }

    /// Returns the matmul kernel and the launch for each part of the matrix. `kernel` is the kernel for the whole
    /// matrix, and `others` are the bindings of the kernel after the weights and their scales.
    pub(crate) fn part_launches(
        &self,
        gpu: &Gpu,
        name: &str,
        kernel: MatmulKernel,
        params: &GpuBuffer,
        others: &[&GpuBuffer],
        tokens: u32,
    ) -> Result<Vec<(MatmulKernel, Launch)>, GpuError> {
        let launch = |part: &MatrixPart| {
            let kernel = MatmulKernel { first_row: part.first_row, rows: part.rows, ..kernel };
            let own = [params, &part.texels].into_iter().chain(&part.scales);
            let tensors: Vec<&GpuBuffer> = own.chain(others.iter().copied()).collect();
            let launch =
                gpu.prepare_launch(name, &kernel.wgsl_source()?, &tensors, kernel.workgroup_count(tokens))?;
            Ok((kernel, launch))
        };
        self.parts.iter().map(launch).collect()
    }

    /// Returns the decode kernel for some rows of this matrix, without bias, activation function or gate.
    pub fn matmul_kernel(&self, gpu: &Gpu, first_row: u32, rows: u32) -> MatmulKernel {
        MatmulKernel {
            packed_format: self.packed_format,
            row_length: self.row_length,
            rows,
            first_row,
            total_rows: self.rows,
            phase: Phase::Decode,
            tiling: self.tiling,
            capabilities: gpu.capabilities(),
            has_bias: false,
            activation: None,
            multiplies_by_gate: false,
            writes_integer_sums: false,
        }
    }
}
