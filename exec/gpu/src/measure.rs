//! Measurement of the speeds of a GPU for a device document.
//!
//! These are measured: matmuls with one token and with a batch, for each weight format; the read bandwidth of
//! GPU memory; copies within GPU memory, to GPU memory and from GPU memory; and the overhead of a window: submission,
//! wait, and a short copy in each direction. Every value is a median of samples, and its `source` text describes them.
//!
//! Memory bandwidth limits the reads, and the matmuls with one token. To avoid effects of caches and hardware
//! compression, they read more bytes than a cache holds, and no zeros. Several launches are submitted together.
//!
//! Not here: the amount of memory that a run may use. No graphics API reports this amount, so the caller provides it.

use hearth_kernels::{Layout, Matrix};
use hearth_profiles::device::{Gpu as Profile, GpuKind, TransferCost};
use hearth_profiles::measure::MeasurementOptions;
use hearth_profiles::measure::sampling::{Samples, measure_duration, measure_rate};
use hearth_profiles::{Bytes, BytesPerSecond, FlopsPerSecond, Format, Seconds, Sourced};

use crate::device::{Gpu, KernelParams, Launch};
use crate::error::GpuError;
use crate::kernels::matmul::{Phase, Tiling};
use crate::kernels::packing::PackedFormat;
use crate::kernels::reorder;
use crate::matrix::GpuMatrix;
use crate::virtual_tensor::{Shape, Storage};

/// Rows and columns of the weight matrix of the timed matmuls.
/// source: assumed, the shape of a model with a few billion weights
const MATRIX_SIDE: usize = 4096;
/// Number of tokens in the batch of the timed matmuls. source: assumed, a part of a prompt
const BATCH_TOKENS: u32 = 64;
/// Size in bytes of the copies whose bandwidth is measured.
/// source: assumed, so that the transfer takes far longer than the latency
const LONG_COPY_BYTES: u64 = 64 << 20;
/// Ratio of the memory that a run may use to the maximum memory that the measurement uses. source: assumed, to leave
/// memory for other programs
const MEMORY_DIVISOR: u64 = 4;
/// Total size in bytes of the matrices that the matmuls with one token read one after another.
/// source: assumed, twice the 128 MiB of the largest cache of a graphics card
const MATRICES_BYTES: u64 = 256 << 20;
/// Number of matmuls with a batch in one submission. On a software driver, a submission has one matmul.
/// source: assumed, so that the overhead of waiting is small
const BATCHES_PER_SUBMISSION: usize = 4;
/// Number of times that one submission reads the whole buffer. source: assumed, as for [`BATCHES_PER_SUBMISSION`]
const READS_PER_SUBMISSION: usize = 4;
/// Number of threads in a workgroup of the read kernel.
/// source: assumed; with TEXELS_PER_THREAD a workgroup reads 64 KiB, so four million threads read a gigabyte
const READ_THREADS: u64 = 256;
/// Number of texels (16 bytes each) that each thread of the read kernel reads.
const TEXELS_PER_THREAD: u64 = 16;
/// Size in bytes of the copies whose latency is measured. source: assumed
const SHORT_COPY_BYTES: u64 = 256;

/// Measures the rate of calls that do `work` units of work each, in units per second. Returns the last error of a
/// call, if there is one.
fn rate(
    options: &MeasurementOptions,
    work: f64,
    call: impl Fn() -> Result<(), GpuError>,
) -> Result<Samples, GpuError> {
    let mut result = Ok(());
    let samples = measure_rate(options, || {
        call().unwrap_or_else(|error| result = Err(error));
        work
    });
    result.map(|()| samples)
}

/// Measures the duration of one call of `call`. Returns the last error of a call, if there is one.
fn duration(
    options: &MeasurementOptions,
    call: impl Fn() -> Result<(), GpuError>,
) -> Result<Samples, GpuError> {
    let mut result = Ok(());
    let samples = measure_duration(options, || call().unwrap_or_else(|error| result = Err(error)));
    result.map(|()| samples)
}

/// Measures the speeds of `gpu` for the weight formats `formats`, or for all supported formats if none of `formats` is
/// supported. `memory` is the GPU memory that a run may use, and `buffers` the part of this memory that a run needs in
/// addition to weights and KV cache.
pub fn measure_gpu(
    gpu: &Gpu,
    tiling: Tiling,
    formats: &[Format],
    memory: Sourced<Bytes>,
    buffers: Sourced<Bytes>,
    options: &MeasurementOptions,
) -> Result<Profile, GpuError> {
    let all = PackedFormat::FILE_FORMATS.map(|(_, stored)| stored);
    let mut wanted = all.to_vec();
    wanted.retain(|format| formats.contains(format));
    if wanted.is_empty() {
        wanted = all.to_vec();
    }
    let [mut matvec, mut matmul] = [Vec::new(), Vec::new()];
    let max = (memory.value.0 / MEMORY_DIVISOR).min(options.buffer_size.0);
    for format in wanted {
        let matrices = random_matrices(gpu, format, tiling, max.min(MATRICES_BYTES))?;
        matvec.push((format, matmul_speed(gpu, &matrices, 1, options)?));
        let batches = if gpu.info().is_software() { 1 } else { BATCHES_PER_SUBMISSION };
        let matrices = &matrices[..batches.min(matrices.len())];
        matmul.push((format, matmul_speed(gpu, matrices, BATCH_TOKENS, options)?));
    }
    let info = gpu.info();
    let long = LONG_COPY_BYTES.min(gpu.capabilities().max_binding_bytes / 2);
    let read = max.min(gpu.capabilities().max_binding_bytes).min(gpu.capabilities().max_buffer_bytes);
    Ok(Profile {
        kind: gpu_kind(&info.api)?,
        name: info.name.clone(),
        unified_memory: matches!(info.kind, "integrated" | "software"),
        matvec: matvec.into_iter().collect(),
        matmul: matmul.into_iter().collect(),
        read_bandwidth: read_bandwidth(gpu, read, options)?,
        memory_available: memory,
        kv_copy: transfer(long, "a copy within the GPU's memory", |bytes| copier(gpu, bytes), options)?,
        upload: transfer(long, "a copy to the GPU", |bytes| uploader(gpu, bytes), options)?,
        download: transfer(long, "a copy from the GPU", |bytes| downloader(gpu, bytes), options)?,
        compute_buffer: buffers,
        window_overhead: Some(window_overhead(gpu, options)?),
        // Measured products of matrices include the launches of their kernels.
        layer_overhead: None,
    })
}

/// Returns the kind of a GPU in a device document, given the name of the graphics API.
fn gpu_kind(api: &str) -> Result<GpuKind, GpuError> {
    match api.to_ascii_lowercase().as_str() {
        "vulkan" => Ok(GpuKind::Vulkan),
        "metal" => Ok(GpuKind::Metal),
        "dx12" => Ok(GpuKind::Dx12),
        other => Err(GpuError::UnknownApi { api: other.to_owned() }),
    }
}

/// Returns the bytes of a matrix of `side` by `side` pseudo-random weights, with finite scales.
pub fn random_weights(format: Format, side: usize) -> Vec<u8> {
    let bytes = side * format.row_bytes(side as u64).map_or(0, |row| row.0 as usize);
    (0..bytes).map(|at| (at.wrapping_mul(2_654_435_761) >> 9) as u8 & 0x3f).collect()
}

/// Uploads copies of one matrix of pseudo-random weights, as many as have at least `size` bytes together.
fn random_matrices(gpu: &Gpu, format: Format, tiling: Tiling, size: u64) -> Result<Vec<GpuMatrix>, GpuError> {
    let bytes = random_weights(format, MATRIX_SIDE);
    let count = size.div_ceil(bytes.len().max(1) as u64).max(1);
    let matrix =
        Matrix { format, row_length: MATRIX_SIDE, rows: MATRIX_SIDE, layout: Layout::Rows, bytes: &bytes };
    (0..count).map(|_| GpuMatrix::upload(gpu, matrix, tiling)).collect()
}

/// Returns the launches of a matmul of `weights` with `tokens` tokens, including the quantisation of the inputs.
pub fn matmul_launches(gpu: &Gpu, weights: &GpuMatrix, tokens: u32) -> Result<Vec<Launch>, GpuError> {
    let phase = if tokens == 1 { Phase::Decode } else { Phase::Prefill };
    let input: Vec<f32> = (0..weights.row_length * tokens).map(|at| (at % 17) as f32 - 8.0).collect();
    Ok(weights.matmul_launches(gpu, &input, phase, false)?.0)
}

/// Measures the speed of matmuls with `tokens` tokens. A submission has one matmul with each of `matrices`.
fn matmul_speed(
    gpu: &Gpu,
    matrices: &[GpuMatrix],
    tokens: u32,
    options: &MeasurementOptions,
) -> Result<Sourced<FlopsPerSecond>, GpuError> {
    let mut launches = Vec::new();
    for weights in matrices {
        launches.extend(matmul_launches(gpu, weights, tokens)?);
    }
    let weight_count = |matrix: &GpuMatrix| f64::from(matrix.rows) * f64::from(matrix.row_length);
    let work = 2.0 * matrices.iter().map(weight_count).sum::<f64>() * f64::from(tokens);
    let rates = rate(options, work, || {
        gpu.submit(&launches)?;
        gpu.wait("a matmul")
    })?;
    let what = format!(
        "{} products of {MATRIX_SIDE} by {MATRIX_SIDE} weights with {tokens} tokens on {}",
        matrices.len(),
        gpu.info().name
    );
    Ok(rates.sourced_median(FlopsPerSecond, &what))
}

/// Measures the read bandwidth of GPU memory with a kernel whose threads read a whole buffer. The threads XOR all
/// values, so that the compiler keeps the reads, and practically never write the result.
fn read_bandwidth(
    gpu: &Gpu,
    bytes: u64,
    options: &MeasurementOptions,
) -> Result<Sourced<BytesPerSecond>, GpuError> {
    let workgroup_bytes = READ_THREADS * TEXELS_PER_THREAD * 16;
    // WebGPU allows at most 65 535 workgroups in one direction.
    let workgroups = (bytes / workgroup_bytes).clamp(1, 65_535) as u32;
    let bytes = u64::from(workgroups) * workgroup_bytes;
    let raw = gpu.allocate("a buffer to read", bytes)?;
    let (params, out) = (gpu.create_params_buffer()?, gpu.allocate("the result of the read kernel", 16)?);
    gpu.write(&params, &[KernelParams::for_pass(1, 0)])?;
    let bound = [&params, &raw, &out];
    let fill =
        gpu.prepare_launch("fill", &buffer_kernel("read_write", FILL_BODY), &bound, [workgroups, 1, 1])?;
    let read = gpu.prepare_launch("read", &buffer_kernel("read", READ_BODY), &bound, [workgroups, 1, 1])?;
    gpu.submit([&fill])?;
    gpu.wait("filling a buffer")?;
    let rates = rate(options, (bytes * READS_PER_SUBMISSION as u64) as f64, || {
        gpu.submit(std::iter::repeat_n(&read, READS_PER_SUBMISSION))?;
        gpu.wait("reading a buffer")
    })?;
    Ok(rates.sourced_median(BytesPerSecond, &format!("reading {} of its memory", Bytes(bytes))))
}

/// The WGSL loop body that fills a buffer with pseudo-random values, which the hardware cannot compress.
/// source: Jarzynski and Olano 2020, the PCG hash
const FILL_BODY: &str = "\
        var word = vec4<u32>(4u * at, 4u * at + 1u, 4u * at + 2u, 4u * at + 3u) * 747796405u + 2891336453u;
        word = ((word >> ((word >> vec4<u32>(28u)) + 4u)) ^ word) * 277803737u;
        raw[at] = (word >> vec4<u32>(22u)) ^ word;
        all = raw[at];
";

const READ_BODY: &str = "        all ^= raw[at];\n";

/// Generates a kernel that runs the WGSL code `body` for each texel. Neighbouring threads access neighbouring texels.
fn buffer_kernel(access: &str, body: &str) -> String {
    format!(
        "{}@group(0) @binding(1) var<storage, {access}> raw: array<vec4<u32>>;\n\
         @group(0) @binding(2) var<storage, read_write> out: array<u32>;\n\
         @compute @workgroup_size({READ_THREADS})\n\
         fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {{\n    \
         var all = vec4<u32>(params.tokens);\n    \
         for (var i = 0u; i < {TEXELS_PER_THREAD}u; i++) {{\n        \
         let at = (group.x * {TEXELS_PER_THREAD}u + i) * {READ_THREADS}u + lane;\n{body}    }}\n    \
         // Practically never true.\n    \
         if (all.x == 0x9e3779b9u && all.y == all.z && all.z == all.w) {{ out[0] = all.x; }}\n}}\n",
        KernelParams::WGSL_DECLARATION,
    )
}

fn uploader(gpu: &Gpu, bytes: u64) -> Result<impl Fn() -> Result<(), GpuError>, GpuError> {
    let values: Vec<u8> = (0..bytes).map(|at| (at.wrapping_mul(2_654_435_761) >> 11) as u8).collect();
    let tensor = gpu.allocate("a copy", bytes)?;
    Ok(move || {
        gpu.write(&tensor, &values)?;
        gpu.submit([])?;
        gpu.wait("a copy to the GPU")
    })
}

fn downloader(gpu: &Gpu, bytes: u64) -> Result<impl Fn() -> Result<(), GpuError>, GpuError> {
    let (tensor, count) = (gpu.allocate("a copy", bytes)?, bytes as usize);
    Ok(move || gpu.read::<u8>(&tensor, count).map(drop))
}

fn copier(gpu: &Gpu, bytes: u64) -> Result<impl Fn() -> Result<(), GpuError>, GpuError> {
    let launch = copy_launch(gpu, bytes)?;
    Ok(move || {
        gpu.submit([&launch])?;
        gpu.wait("a copy within GPU memory")
    })
}

/// Returns a launch that copies `bytes` bytes, but at least 256, within GPU memory.
fn copy_launch(gpu: &Gpu, bytes: u64) -> Result<Launch, GpuError> {
    let shape = Shape::new(1, 1, (bytes / 256).max(1) as u32, 64)?;
    let [from, to] = [gpu.allocate("a copy", bytes.max(256))?, gpu.allocate("a copy", bytes.max(256))?];
    let params = gpu.create_params_buffer()?;
    let text = reorder::wgsl_source(&shape, Storage::Linear, Storage::Linear);
    gpu.prepare_launch("copy", &text, &[&params, &from, &to], reorder::workgroup_count(&shape))
}

/// Measures the bandwidth of copies of `long` bytes and the latency of short copies. `copier` returns a closure that
/// copies a given number of bytes. `what` describes the copies in the `source` texts.
fn transfer<C: Fn() -> Result<(), GpuError>>(
    long: u64,
    what: &str,
    copier: impl Fn(u64) -> Result<C, GpuError>,
    options: &MeasurementOptions,
) -> Result<TransferCost, GpuError> {
    let (copy, short) = (copier(long)?, copier(SHORT_COPY_BYTES)?);
    let rates = rate(options, long as f64, copy)?;
    let times = duration(options, short)?;
    Ok(TransferCost {
        latency: times.sourced_median(Seconds, &format!("{what}, {}", Bytes(SHORT_COPY_BYTES))),
        bandwidth: rates.sourced_median(BytesPerSecond, &format!("{what}, {}", Bytes(long))),
    })
}

/// Measures the overhead of a window: a pass with a short upload, one small launch and a short download.
fn window_overhead(gpu: &Gpu, options: &MeasurementOptions) -> Result<Sourced<Seconds>, GpuError> {
    let (launch, tensor) = (copy_launch(gpu, 256)?, gpu.allocate("a row", 256)?);
    let times = duration(options, || {
        gpu.write(&tensor, &[0u8; 256])?;
        gpu.submit([&launch])?;
        gpu.read::<u8>(&tensor, 256).map(drop)
    })?;
    Ok(times.sourced_median(Seconds, "a short copy up, one launch, and a short copy down"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kind_of_a_gpu_is_its_api() {
        assert_eq!(gpu_kind("vulkan").unwrap(), GpuKind::Vulkan);
        assert_eq!((gpu_kind("metal").unwrap(), gpu_kind("Dx12").unwrap()), (GpuKind::Metal, GpuKind::Dx12));
        assert!(gpu_kind("webgpu").unwrap_err().to_string().contains("webgpu"));
    }

    #[test]
    fn gigabyte_is_read_by_more_threads_than_a_gpu_runs_at_once() {
        let workgroups = (1 << 30) / (READ_THREADS * TEXELS_PER_THREAD * 16);
        // source: the largest graphics cards have about 300 000 threads in flight.
        assert!(workgroups < 65_536 && workgroups * READ_THREADS > 1_000_000, "{workgroups} workgroups");
    }
}
