//! Measures a GPU's rates for a device document.
//!
//! Products of one and of several tokens with the kernels that a run uses, format by format; reading its memory; copies
//! within it, to it and from it; and what a pass through a window costs beside its work: submitting, waiting, and a
//! short copy each way. Every number is a median of samples and says so.
//!
//! Products of a token and reads are bound by memory, so what they read must not be in a cache, nor be what hardware
//! compresses: they go over more bytes than caches have, which are no zeros, and several of them are waited for at
//! once.
//!
//! Not here: how much memory a run may use, which no interface reports; the caller provides it.

use std::cell::RefCell;

use hearth_kernels::{KernelFormat, Matrix};
use hearth_profiles::device::{Gpu as Profile, GpuKind, Transfer};
use hearth_profiles::measure::Effort;
use hearth_profiles::measure::sampling::{duration, rate};
use hearth_profiles::{Bytes, BytesPerSecond, FlopsPerSecond, Format, Seconds, Sourced};

use crate::device::{Gpu, Launch, Params};
use crate::error::GpuError;
use crate::kernels::packing::Packed;
use crate::kernels::product::{Stage, Tiling};
use crate::kernels::reorder;
use crate::matrix::GpuMatrix;
use crate::virtual_tensor::{Shape, Storage};

/// Inputs and rows of the products that are timed.
/// source: assumed, the shape of a model of some billion weights
const SIDE: usize = 4096;
/// Tokens of a batch.
/// source: assumed, a part of a prompt
const BATCH: u32 = 64;
/// Bytes that are copied at once.
/// source: assumed, far more than a latency
const LONG: u64 = 64 << 20;
/// The measurement uses at most this fraction (1 / SHARE) of the memory that a run may use. source: assumed, to leave
/// room for other programs
const SHARE: u64 = 4;
/// Bytes of the matrices that products of a token go over in turn.
/// source: assumed, twice the 128 MiB of the largest cache of a graphics card
const SPREAD: u64 = 256 << 20;
/// Products of a batch that are waited for at once; on a software driver one.
/// source: assumed, so that waiting counts little
const BATCHES: usize = 4;
/// Reads of the whole buffer that are waited for at once.
/// source: assumed, as above
const READS: usize = 4;
/// Threads of a group that reads, and what each of them reads, in texels of 16 bytes.
/// source: assumed; 64 KiB a group, so that a buffer of a gigabyte has four million threads
const READERS: u64 = 256;
const TEXELS_OF_A_READER: u64 = 16;
/// Bytes of a copy that is all latency.
/// source: assumed
const SHORT: u64 = 256;

/// Keeps an error from inside a sampling closure.
#[derive(Default)]
struct Failed(RefCell<Option<GpuError>>);

impl Failed {
    fn keep<T>(&self, result: Result<T, GpuError>) -> Option<T> {
        result.map_err(|error| *self.0.borrow_mut() = Some(error)).ok()
    }

    fn result(self) -> Result<(), GpuError> {
        self.0.into_inner().map_or(Ok(()), Err)
    }
}

/// Measures the GPU for these formats, or for all that there are kernels of if none of them has one.
/// `memory` is what a run may use of its memory, `buffers` what it needs beside weights and cache.
pub fn measure(
    gpu: &Gpu,
    tiling: Tiling,
    formats: &[Format],
    memory: Sourced<Bytes>,
    buffers: Sourced<Bytes>,
    effort: &Effort,
) -> Result<Profile, GpuError> {
    let all: Vec<KernelFormat> = Packed::ALL.into_iter().filter_map(Packed::stored).collect();
    let mut wanted: Vec<KernelFormat> =
        all.iter().copied().filter(|stored| formats.contains(&stored.format())).collect();
    if wanted.is_empty() {
        wanted = all;
    }
    let [mut matvec, mut matmul] = [Vec::new(), Vec::new()];
    let max = (memory.value.0 / SHARE).min(effort.buffer.0);
    for stored in wanted {
        let weights = random(gpu, stored, tiling, max.min(SPREAD))?;
        let format = stored.format();
        matvec.push((format, product(gpu, &weights, 1, effort)?));
        let batches = if gpu.facts().is_software() { 1 } else { BATCHES };
        matmul.push((format, product(gpu, &weights[..batches.min(weights.len())], BATCH, effort)?));
    }
    let facts = gpu.facts();
    let long = LONG.min(gpu.capabilities().binding_bytes / 2);
    let read = max.min(gpu.capabilities().binding_bytes).min(gpu.capabilities().buffer_bytes);
    Ok(Profile {
        kind: kind(&facts.interface)?,
        name: facts.name.clone(),
        unified_memory: matches!(facts.kind, "integrated" | "software"),
        matvec: matvec.into_iter().collect(),
        matmul: matmul.into_iter().collect(),
        read_bandwidth: reading(gpu, read, effort)?,
        memory_available: memory,
        kv_copy: transfer(long, "a copy within the GPU's memory", |bytes| copying(gpu, bytes), effort)?,
        upload: transfer(long, "a copy to the GPU", |bytes| uploading(gpu, bytes), effort)?,
        download: transfer(long, "a copy from the GPU", |bytes| downloading(gpu, bytes), effort)?,
        compute_buffer: buffers,
        window_overhead: Some(window(gpu, effort)?),
    })
}

/// Returns a device document's name of an interface.
fn kind(interface: &str) -> Result<GpuKind, GpuError> {
    match interface.to_ascii_lowercase().as_str() {
        "vulkan" => Ok(GpuKind::Vulkan),
        "metal" => Ok(GpuKind::Metal),
        "dx12" => Ok(GpuKind::Dx12),
        other => Err(GpuError::Refused {
            what: "to be described".into(),
            why: format!("a device document has no word for a GPU that is reached through {other}"),
        }),
    }
}

/// Returns the bytes of a square matrix of arbitrary weights: no scale among them is infinite.
pub fn arbitrary_weights(format: KernelFormat, side: usize) -> Vec<u8> {
    let bytes = side * format.row_bytes(side).unwrap_or(0);
    (0..bytes).map(|at| (at.wrapping_mul(2_654_435_761) >> 9) as u8 & 0x3f).collect()
}

/// Equal matrices of arbitrary weights, of `spread` bytes together; at least one.
fn random(gpu: &Gpu, format: KernelFormat, tiling: Tiling, spread: u64) -> Result<Vec<GpuMatrix>, GpuError> {
    let bytes = arbitrary_weights(format, SIDE);
    let count = spread.div_ceil(bytes.len().max(1) as u64).max(1);
    let matrix = Matrix { format, length: SIDE, rows: SIDE, bytes: &bytes };
    (0..count).map(|_| GpuMatrix::upload(gpu, matrix, tiling)).collect()
}

/// Returns the launches of a product of `tokens` tokens, rounding of inputs included.
pub fn product_launches(gpu: &Gpu, weights: &GpuMatrix, tokens: u32) -> Result<Vec<Launch>, GpuError> {
    let stage = if tokens == 1 { Stage::Decode } else { Stage::Prefill };
    let input: Vec<f32> = (0..weights.length * tokens).map(|at| (at % 17) as f32 - 8.0).collect();
    Ok(weights.product_launches(gpu, &input, stage, false)?.0)
}

/// A product with each of these matrices.
fn product(
    gpu: &Gpu,
    weights: &[GpuMatrix],
    tokens: u32,
    effort: &Effort,
) -> Result<Sourced<FlopsPerSecond>, GpuError> {
    let mut launches = Vec::new();
    for weights in weights {
        launches.extend(product_launches(gpu, weights, tokens)?);
    }
    let one = |weights: &GpuMatrix| f64::from(weights.rows) * f64::from(weights.length);
    let work = 2.0 * weights.iter().map(one).sum::<f64>() * f64::from(tokens);
    let failed = Failed::default();
    let rates = rate(effort, || {
        failed.keep(gpu.submit(&launches).and_then(|()| gpu.wait("a product")));
        work
    });
    failed.result()?;
    let what = format!(
        "{} times {SIDE} by {SIDE} weights times {tokens} tokens on {}",
        weights.len(),
        gpu.facts().name
    );
    Ok(rates.sourced(FlopsPerSecond, &what))
}

/// Measures the read bandwidth with a kernel whose threads read a whole buffer. They sum up what they read, so that the
/// compiler keeps the reads, and never write the sum.
fn reading(gpu: &Gpu, bytes: u64, effort: &Effort) -> Result<Sourced<BytesPerSecond>, GpuError> {
    let of_group = READERS * TEXELS_OF_A_READER * 16;
    // Groups in one direction.
    let groups = (bytes / of_group).clamp(1, 65_535) as u32;
    let bytes = u64::from(groups) * of_group;
    let raw = gpu.zeros("a buffer to read", bytes)?;
    let (params, out) = (gpu.params()?, gpu.zeros("what was read", 16)?);
    gpu.write(&params, &[Params::pass(1, 0)])?;
    let bound = [&params, &raw, &out];
    let fill = gpu.launch("fill", &walk("read_write", FILLING), &bound, [groups, 1, 1])?;
    let read = gpu.launch("read", &walk("read", READING), &bound, [groups, 1, 1])?;
    gpu.submit([&fill])?;
    gpu.wait("filling a buffer")?;
    let failed = Failed::default();
    let rates = rate(effort, || {
        let all = std::iter::repeat_n(&read, READS);
        failed.keep(gpu.submit(all).and_then(|()| gpu.wait("reading")));
        (bytes * READS as u64) as f64
    });
    failed.result()?;
    Ok(rates.sourced(BytesPerSecond, &format!("reading {} of its memory", Bytes(bytes))))
}

/// Numbers without a pattern, which no hardware compresses.
/// source: Jarzynski and Olano 2020, the hash PCG
const FILLING: &str = "\
        var word = vec4<u32>(4u * at, 4u * at + 1u, 4u * at + 2u, 4u * at + 3u) * 747796405u + 2891336453u;
        word = ((word >> ((word >> vec4<u32>(28u)) + 4u)) ^ word) * 277803737u;
        raw[at] = (word >> vec4<u32>(22u)) ^ word;
        all = raw[at];
";

const READING: &str = "        all ^= raw[at];\n";

/// A kernel that goes over a buffer once. Neighbouring threads have neighbouring texels.
fn walk(access: &str, body: &str) -> String {
    format!(
        "{}@group(0) @binding(1) var<storage, {access}> raw: array<vec4<u32>>;\n\
         @group(0) @binding(2) var<storage, read_write> out: array<u32>;\n\
         @compute @workgroup_size({READERS})\n\
         fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {{\n    \
         var all = vec4<u32>(params.tokens);\n    \
         for (var i = 0u; i < {TEXELS_OF_A_READER}u; i++) {{\n        \
         let at = (group.x * {TEXELS_OF_A_READER}u + i) * {READERS}u + lane;\n{body}    }}\n    \
         // As good as never.\n    \
         if (all.x == 0x9e3779b9u && all.y == all.z && all.z == all.w) {{ out[0] = all.x; }}\n}}\n",
        Params::WGSL,
    )
}

fn uploading(gpu: &Gpu, bytes: u64) -> Result<impl Fn() -> Result<(), GpuError>, GpuError> {
    let values: Vec<u8> = (0..bytes).map(|at| (at.wrapping_mul(2_654_435_761) >> 11) as u8).collect();
    let tensor = gpu.zeros("a copy", bytes)?;
    Ok(move || {
        gpu.write(&tensor, &values)?;
        gpu.submit([])?;
        gpu.wait("a copy to the GPU")
    })
}

fn downloading(gpu: &Gpu, bytes: u64) -> Result<impl Fn() -> Result<(), GpuError>, GpuError> {
    let (tensor, count) = (gpu.zeros("a copy", bytes)?, bytes as usize);
    Ok(move || gpu.read::<u8>(&tensor, count).map(drop))
}

fn copying(gpu: &Gpu, bytes: u64) -> Result<impl Fn() -> Result<(), GpuError>, GpuError> {
    let launch = copy(gpu, bytes)?;
    Ok(move || {
        gpu.submit([&launch])?;
        gpu.wait("a copy")
    })
}

/// A launch that copies `bytes` bytes within the GPU's memory.
fn copy(gpu: &Gpu, bytes: u64) -> Result<Launch, GpuError> {
    let shape = Shape::bhwc(1, 1, (bytes / 256).max(1) as u32, 64)?;
    let [from, to] = [gpu.zeros("a copy", bytes.max(256))?, gpu.zeros("a copy", bytes.max(256))?];
    let params = gpu.params()?;
    let text = reorder::kernel(&shape, Storage::Linear, Storage::Linear);
    gpu.launch("copy", &text, &[&params, &from, &to], reorder::groups(&shape))
}

/// A long copy gives the rate; a short one the latency.
fn transfer<C: Fn() -> Result<(), GpuError>>(
    long: u64,
    what: &str,
    copy_of: impl Fn(u64) -> Result<C, GpuError>,
    effort: &Effort,
) -> Result<Transfer, GpuError> {
    let (failed, copy, short) = (Failed::default(), copy_of(long)?, copy_of(SHORT)?);
    let rates = rate(effort, || {
        failed.keep(copy());
        long as f64
    });
    let times = duration(effort, || {
        failed.keep(short());
    });
    failed.result()?;
    let bandwidth = rates.sourced(BytesPerSecond, &format!("{what}, {}", Bytes(long)));
    Ok(Transfer { latency: times.sourced(Seconds, &format!("{what}, {}", Bytes(SHORT))), bandwidth })
}

/// A pass through a window that computes almost nothing.
fn window(gpu: &Gpu, effort: &Effort) -> Result<Sourced<Seconds>, GpuError> {
    let (launch, tensor) = (copy(gpu, 256)?, gpu.zeros("a row", 256)?);
    let failed = Failed::default();
    let times = duration(effort, || {
        let pass = || {
            gpu.write(&tensor, &[0u8; 256])?;
            gpu.submit([&launch])?;
            gpu.read::<u8>(&tensor, 256).map(drop)
        };
        failed.keep(pass());
    });
    failed.result()?;
    Ok(times.sourced(Seconds, "a short copy up, one launch, and a short copy down"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_is_called_what_it_is_reached_through() {
        assert_eq!(kind("vulkan").unwrap(), GpuKind::Vulkan);
        assert_eq!((kind("metal").unwrap(), kind("Dx12").unwrap()), (GpuKind::Metal, GpuKind::Dx12));
        assert!(kind("webgpu").unwrap_err().to_string().contains("webgpu"));
    }

    #[test]
    fn a_buffer_of_a_gigabyte_is_read_by_more_threads_than_a_gpu_has_at_once() {
        let groups = (1 << 30) / (READERS * TEXELS_OF_A_READER * 16);
        // source: the largest graphics cards have about 300 000 threads in flight.
        assert!(groups < 65_536 && groups * READERS > 1_000_000, "{groups} groups");
    }
}
