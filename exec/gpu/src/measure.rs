//! How fast is this GPU, in the terms of a device document?
//!
//! Products of one and of several tokens with the kernels that a run uses, format by format; reading its memory; copies within
//! it, to it and from it; and what a pass through a window costs beside its work: submitting, waiting, and a short copy each
//! way. Every number is a median of samples and says so.
//!
//! Not here: how much memory a run may use, which no interface tells. The caller knows, or asks the person.

use std::cell::RefCell;

use hearth_exec::kernels::{Matrix, Supported};
use hearth_profiles::device::{Gpu as Profile, GpuKind, Transfer};
use hearth_profiles::measure::Effort;
use hearth_profiles::measure::sampling::{duration, rate};
use hearth_profiles::{Bytes, BytesPerSecond, FlopsPerSecond, Format, Seconds, Sourced};

use crate::device::{Binding, Gpu, Launch, Params};
use crate::error::GpuError;
use crate::kernels::packing::Packed;
use crate::kernels::product::{Product, Stage, Tiling};
use crate::kernels::{Variant, quantise, reorder};
use crate::matrix::GpuMatrix;
use crate::virtual_tensor::{Shape, Storage};

/// Inputs and rows of the products that are timed.
/// source: assumed, the shape of a model of some billion weights
const SIDE: usize = 4096;
/// Tokens of a batch.
/// source: assumed, a part of a prompt
const BATCH: u32 = 64;
/// Bytes that are read or copied at once.
/// source: assumed, far more than a cache
const LONG: u64 = 64 << 20;
/// Bytes of a copy that is all latency.
/// source: assumed
const SHORT: u64 = 256;

/// A failure in the middle of sampling, which has no way out of its own.
#[derive(Default)]
struct Failed(RefCell<Option<GpuError>>);

impl Failed {
    fn keep<T>(&self, result: Result<T, GpuError>) -> Option<T> {
        result.map_err(|error| *self.0.borrow_mut() = Some(error)).ok()
    }

    fn told(self) -> Result<(), GpuError> {
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
    let all: Vec<Supported> = Packed::ALL.into_iter().filter_map(Packed::stored).collect();
    let mut wanted: Vec<Supported> =
        all.iter().copied().filter(|stored| formats.contains(&stored.format())).collect();
    if wanted.is_empty() {
        wanted = all;
    }
    let [mut matvec, mut matmul] = [Vec::new(), Vec::new()];
    for stored in wanted {
        let weights = random(gpu, stored, tiling)?;
        let format = stored.format();
        matvec.push((format, product(gpu, &weights, 1, effort)?));
        matmul.push((format, product(gpu, &weights, BATCH, effort)?));
    }
    let facts = gpu.facts();
    let long = LONG.min(gpu.capabilities().binding_bytes / 2);
    Ok(Profile {
        kind: if facts.interface.eq_ignore_ascii_case("metal") { GpuKind::Metal } else { GpuKind::Vulkan },
        name: facts.name.clone(),
        unified_memory: matches!(facts.kind, "integrated" | "software"),
        matvec: matvec.into_iter().collect(),
        matmul: matmul.into_iter().collect(),
        read_bandwidth: reading(gpu, long, effort)?,
        memory_available: memory,
        kv_copy: transfer(
            long,
            "a copy within the GPU's memory",
            [&copying(gpu, long)?, &copying(gpu, SHORT)?],
            effort,
        )?,
        upload: transfer(
            long,
            "a copy to the GPU",
            [&uploading(gpu, long)?, &uploading(gpu, SHORT)?],
            effort,
        )?,
        download: transfer(
            long,
            "a copy from the GPU",
            [&downloading(gpu, long)?, &downloading(gpu, SHORT)?],
            effort,
        )?,
        compute_buffer: buffers,
        window_overhead: Some(window(gpu, effort)?),
    })
}

/// A matrix of any bytes.
fn random(gpu: &Gpu, format: Supported, tiling: Tiling) -> Result<GpuMatrix, GpuError> {
    let row = format.row_bytes(SIDE).unwrap_or(0);
    let bytes: Vec<u8> =
        (0..SIDE * row).map(|at| (at.wrapping_mul(2_654_435_761) >> 9) as u8 & 0x3f).collect();
    GpuMatrix::upload(gpu, Matrix { format, length: SIDE, rows: SIDE, bytes: &bytes }, tiling)
}

/// The launches of a product of so many tokens, with the rounding of its inputs where that is a kernel of its own.
pub fn product_launches(gpu: &Gpu, weights: &GpuMatrix, tokens: u32) -> Result<Vec<Launch>, GpuError> {
    let stage = if tokens == 1 { Stage::Decode } else { Stage::Prefill };
    let length = weights.length;
    let input: Vec<f32> = (0..length * tokens).map(|at| (at % 17) as f32 - 8.0).collect();
    let (params, x) = (gpu.params()?, gpu.upload("inputs", &input)?);
    gpu.write(&params, &[Params::pass(tokens, 0)])?;
    let numbers = u64::from(length) * u64::from(tokens);
    let out = gpu.zeros("results", u64::from(weights.rows) * u64::from(tokens) * 4)?;
    let rounded = [numbers, (numbers / 32) * 4, (numbers / 16) * 4];
    let [codes, scales, sums] =
        [gpu.zeros("codes", rounded[0])?, gpu.zeros("scales", rounded[1])?, gpu.zeros("sums", rounded[2])?];
    let mut launches = Vec::new();
    let apart = weights.packed.inputs().filter(|_| stage == Stage::Prefill);
    if let Some(scaled) = apart {
        let text = quantise::kernel(length, scaled, Storage::Linear);
        let bound = [&params, &x, &codes, &scales, &sums].map(Binding::Buffer);
        launches.push(gpu.launch("round", &text, &bound, quantise::groups(length, scaled, tokens))?);
    }
    for part in &weights.parts {
        let product = Product {
            stage,
            rows: part.rows,
            first_row: part.first_row,
            variant: Variant::of(gpu.capabilities()),
            ..weights.product_shape()
        };
        let mut bound = vec![&params, &part.texels];
        bound.extend(&part.scales);
        bound.extend(if apart.is_some() { vec![&codes, &scales, &sums] } else { vec![&x] });
        bound.push(&out);
        let bound: Vec<Binding<'_>> = bound.into_iter().map(Binding::Buffer).collect();
        launches.push(gpu.launch("product", &product.kernel()?, &bound, product.groups(tokens))?);
    }
    Ok(launches)
}

fn product(
    gpu: &Gpu,
    weights: &GpuMatrix,
    tokens: u32,
    effort: &Effort,
) -> Result<Sourced<FlopsPerSecond>, GpuError> {
    // Several at once, so that waiting counts little.
    let launches = product_launches(gpu, weights, tokens)?;
    let repeats = if tokens == 1 { 8 } else { 1 };
    let work =
        2.0 * f64::from(weights.rows) * f64::from(weights.length) * f64::from(tokens) * f64::from(repeats);
    let failed = Failed::default();
    let rates = rate(effort, || {
        let all = (0..repeats).flat_map(|_| &launches);
        failed.keep(gpu.submit(all).and_then(|()| gpu.wait("a product")));
        work
    });
    failed.told()?;
    let what = format!("{SIDE} by {SIDE} weights times {tokens} tokens on {}", gpu.facts().name);
    Ok(rates.sourced(FlopsPerSecond, &what))
}

/// Threads that read all of a buffer, and one number of each so that they have to.
fn reading(gpu: &Gpu, bytes: u64, effort: &Effort) -> Result<Sourced<BytesPerSecond>, GpuError> {
    let (texels, groups) = (bytes / 16, 256u32);
    let each = texels / u64::from(groups * 64);
    let text = format!(
        "{}@group(0) @binding(1) var<storage, read> raw: array<vec4<u32>>;\n\
         @group(0) @binding(2) var<storage, read_write> out: array<u32>;\n\
         @compute @workgroup_size(64)\n\
         fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {{\n    \
         _ = params.tokens;\n    let own = group.x * 64u + lane;\n    var all = vec4<u32>(0u);\n    \
         for (var i = 0u; i < {each}u; i++) {{ all ^= raw[i * {}u + own]; }}\n    \
         out[own] = all.x ^ all.y ^ all.z ^ all.w;\n}}\n",
        Params::WGSL,
        groups * 64,
    );
    let (params, raw) = (gpu.params()?, gpu.zeros("a buffer to read", bytes)?);
    let out = gpu.zeros("what was read", u64::from(groups) * 64 * 4)?;
    let bound = [&params, &raw, &out].map(Binding::Buffer);
    let launch = gpu.launch("read", &text, &bound, [groups, 1, 1])?;
    let failed = Failed::default();
    let rates = rate(effort, || {
        failed.keep(gpu.submit([&launch]).and_then(|()| gpu.wait("reading")));
        (each * u64::from(groups) * 64 * 16) as f64
    });
    failed.told()?;
    Ok(rates.sourced(BytesPerSecond, &format!("reading {} of its memory", Bytes(bytes))))
}

fn uploading(gpu: &Gpu, bytes: u64) -> Result<impl Fn() -> Result<(), GpuError>, GpuError> {
    let (tensor, values) = (gpu.zeros("a copy", bytes)?, vec![0u8; bytes as usize]);
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

/// A launch that copies so many bytes within the GPU's memory.
fn copy(gpu: &Gpu, bytes: u64) -> Result<Launch, GpuError> {
    let shape = Shape::bhwc(1, 1, (bytes / 256).max(1) as u32, 64)?;
    let [from, to] = [gpu.zeros("a copy", bytes.max(256))?, gpu.zeros("a copy", bytes.max(256))?];
    let params = gpu.params()?;
    let text = reorder::kernel(&shape, Storage::Linear, Storage::Linear);
    gpu.launch("copy", &text, &[&params, &from, &to].map(Binding::Buffer), reorder::groups(&shape))
}

/// A long copy gives the rate; a short one the latency.
fn transfer(
    long: u64,
    what: &str,
    copies: [&dyn Fn() -> Result<(), GpuError>; 2],
    effort: &Effort,
) -> Result<Transfer, GpuError> {
    let (failed, [copy, short]) = (Failed::default(), copies);
    let rates = rate(effort, || {
        failed.keep(copy());
        long as f64
    });
    let times = duration(effort, || {
        failed.keep(short());
    });
    failed.told()?;
    let bandwidth = rates.sourced(BytesPerSecond, &format!("{what}, {}", Bytes(long)));
    Ok(Transfer { latency: times.sourced(Seconds, &format!("{what}, {}", Bytes(SHORT))), bandwidth })
}

/// A pass through a window that computes next to nothing.
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
    failed.told()?;
    Ok(times.sourced(Seconds, "a short copy up, one launch, and a short copy down"))
}
