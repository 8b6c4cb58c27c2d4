//! Profiles this machine: measures what it can do with this runtime.
//!
//! [`profile`] gives the measuring code of `hearth_profiles::measure` the executor's kernels and pool, adds
//! what only the executor can tell (the fixed cost of a layer, a token and a hop, its buffers), and puts a
//! `device/1` document together. Only micro-workloads: nothing of a later run is run here.
//!
//! ```no_run
//! use hearth_profiles::Document;
//! use hearth_runtime::profile::{Links, ProfileOptions, profile};
//!
//! let options = ProfileOptions { name: "laptop".into(), quick: true, ..ProfileOptions::default() };
//! # fn measure_links() -> Result<Links, hearth_runtime::profile::LinkError> { unimplemented!() }
//! let device = profile(&options, measure_links, |step| eprintln!("{step}"))?;
//! println!("{}", device.to_yaml());
//! # Ok::<(), hearth_runtime::profile::ProfileError>(())
//! ```

mod kernels;
mod overhead;
mod pace;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use hearth_profiles::device::{Cpu as CpuProfile, Device, Os};
use hearth_profiles::gguf::{GgufError, GgufModel};
use hearth_profiles::link::PeerLink;
use hearth_profiles::measure::{
    self, Buffer, ComputeRates, DiskTarget, Effort, MeasureError, Samples, processor,
};
use hearth_profiles::model::{ModelProfile, shipped_document};
use hearth_profiles::{Bytes, Document, DocumentError, Format, Seconds, Sourced};

pub use kernels::CpuKernels;
pub use pace::pace;

use hearth_schema::pass::MAX_PASS_TOKENS;

use crate::cpu::{Cpu, buffer_bytes};
use crate::error::ExecError;
use crate::pool::{Pool, PoolOptions};
use crate::synth::SynthError;

/// Options of a measurement.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ProfileOptions {
    pub name: String,
    /// The model that is to run here: its formats are measured, and the disk that holds it. Without one, every
    /// format and the disk of the current folder are.
    pub model: Option<PathBuf>,
    /// Threads that compute; 0 takes every core.
    pub threads: usize,
    /// Whether to measure for about fifteen seconds with a model instead of a minute or more.
    pub quick: bool,
    /// Tokens of the largest pass, for which buffers are counted; 0 for 64.
    pub pass_tokens: u32,
}

/// An error of profiling a machine.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    #[error(transparent)]
    Measure(#[from] MeasureError),
    #[error(transparent)]
    Model(#[from] GgufError),
    #[error(transparent)]
    Compute(#[from] ExecError),
    #[error(transparent)]
    Synth(#[from] SynthError),
    #[error(transparent)]
    Link(LinkError),
    #[error("cannot create `{path}`: {source}; set TMPDIR to a folder that can be written", path = .path.display())]
    Folder { path: PathBuf, source: io::Error },
    #[error("what was measured makes no valid device: {0}")]
    Document(#[from] DocumentError),
}

/// An error of measuring a link.
pub type LinkError = Box<dyn std::error::Error + Send + Sync>;

/// The links of a machine, that to itself first, and what a hop costs.
#[derive(Debug)]
pub struct Links {
    /// The time from one compute thread to another over the loopback link, in seconds.
    pub hop: Samples,
    pub peers: Vec<PeerLink>,
}

/// Measures this machine. `links` measures its links, and `progress` receives each step before it begins.
pub fn profile(
    options: &ProfileOptions,
    links: impl FnOnce() -> Result<Links, LinkError>,
    mut progress: impl FnMut(&str),
) -> Result<Device, ProfileError> {
    let effort = if options.quick { Effort::quick() } else { Effort::full() };
    with_effort(options, effort, links, &mut progress)
}

/// The same as [`profile`] with the given effort.
pub fn with_effort(
    options: &ProfileOptions,
    effort: Effort,
    links: impl FnOnce() -> Result<Links, LinkError>,
    progress: &mut dyn FnMut(&str),
) -> Result<Device, ProfileError> {
    let model = options.model.as_ref().map(GgufModel::open).transpose()?;
    let model = model.as_ref().map(ModelProfile::from_gguf).transpose()?;
    // Before anything is allocated.
    let memory = measure::memory::memory();

    let mut pool = PoolOptions::default();
    if options.threads > 0 {
        pool.threads = options.threads;
    }
    let threads = pool.threads;
    let pool = Pool::new(pool).map_err(|source| ExecError::Threads { source })?;
    let cpu = Cpu::new(Arc::new(pool));

    progress("links");
    let links = links().map_err(ProfileError::Link)?;
    let folder = || DiskTarget::Folder(PathBuf::from("."));
    let target = options.model.clone().map_or_else(folder, DiskTarget::File);
    let disk = measure::disk::disk(&target, threads, &effort, progress)?;

    progress("memory");
    let buffer = Buffer::new(effort.buffer)?;
    let read_bandwidth = measure::memory_bandwidth::read_bandwidth(&buffer, threads, &effort)?;
    let formats = model.as_ref().map(formats).unwrap_or_default();
    let mut kernels = CpuKernels::new(cpu.clone());
    let rates = measure::compute::compute(&mut kernels, &formats, &buffer, &effort, progress)?;
    drop(buffer);
    progress("fixed costs");
    let overheads = overhead::measure(&cpu, &rates, &effort)?;

    let about = about(&cpu);
    let ComputeRates { matvec, matvec_streamed, matmul, attention, kv_copy } = rates;
    let device = Device {
        schema: Device::SCHEMA.to_owned(),
        name: options.name.clone(),
        about,
        os: operating_system(),
        cpu: CpuProfile {
            name: processor::name(),
            cores: threads as u32,
            matvec,
            matvec_streamed,
            matmul,
            read_bandwidth,
            attention: Some(attention),
            layer_overhead: Some(overheads.layer),
            window_overhead: Some(links.window_overhead()),
            token_overhead: Some(overheads.token),
            kv_copy,
            compute_buffer: compute_buffer(model.as_ref(), threads, options.pass_tokens),
            quota: None,
        },
        memory,
        disk,
        gpu: None,
        soc: None,
        peers: links.peers,
    };
    device.validate()?;
    Ok(device)
}

impl Links {
    /// The overhead of a hop beyond the link: waking a compute thread, framing. Links are measured without it.
    fn window_overhead(&self) -> Sourced<Seconds> {
        let link = self.peers[0].latency.value.0;
        self.hop.sourced(
            |hop| Seconds((hop - link).max(1e-7)),
            "16 KiB from one compute thread to another over loopback, less the latency of loopback",
        )
    }
}

/// The formats of a model's matrices.
fn formats(model: &ModelProfile) -> Vec<Format> {
    let groups = model.layers.iter().chain([&model.input, &model.output]);
    let mut formats: Vec<Format> =
        groups.flat_map(|group| group.by_format().map(|(format, _)| format)).collect();
    formats.sort_unstable();
    formats.dedup();
    formats
}

/// Tokens of a pass for which buffers are counted by default. A longer prompt needs more while it is read.
const PASS_TOKENS: u32 = 64;

/// Memory that a device in a ring uses beyond an idle program, without cache, buffers and page tables: stacks and
/// sockets.
/// source: measured in the lab, 0.0 to 0.6 MB over 17 workers of nine scenarios of one round
const PROCESS: Bytes = Bytes(300 << 10);

/// Memory of a run without weights and cache.
fn compute_buffer(model: Option<&ModelProfile>, threads: usize, tokens: u32) -> Sourced<Bytes> {
    let tokens = if tokens == 0 { PASS_TOKENS } else { tokens.min(MAX_PASS_TOKENS) };
    let (name, shape) = model.map_or_else(
        || {
            let document = shipped_document("llama-8b").expect("llama-8b is shipped");
            (document.name.clone(), document.shape())
        },
        |model| (model.name.clone(), model.shape.clone()),
    );
    let bytes = Bytes(buffer_bytes(&shape, tokens, threads)) + PROCESS;
    let source = format!(
        "computed: the buffers of a pass of {tokens} tokens through `{name}`, and {PROCESS} for stacks and sockets"
    );
    Sourced::new(bytes, source)
}

fn operating_system() -> Os {
    match std::env::consts::OS {
        "macos" | "ios" => Os::Macos,
        "android" => Os::Android,
        _ => Os::Linux,
    }
}

fn about(cpu: &Cpu) -> String {
    let mut about =
        format!("{}, {} kernels, hearth {}", kernel(), cpu.instructions.name(), env!("CARGO_PKG_VERSION"));
    if let Some(quota) = processor::quota() {
        about.push_str(", under ");
        about.push_str(&quota);
    }
    if measure::memory::has_mglru() {
        about += ", reclaims pages by generations (MGLRU): unvalidated";
    }
    about
}

/// Returns the name of the system and the release of its kernel.
pub fn kernel() -> String {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    format!("{} {}", std::env::consts::OS, release.trim()).trim().to_string()
}
