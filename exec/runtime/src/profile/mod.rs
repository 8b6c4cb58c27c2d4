//! Profiles this machine: measures its speed with the kernels of this runtime.
//!
//! [`profile`] runs the measurements of `hearth_profiles::measure` with the kernels and threads of this runtime. It
//! adds values that depend on the runtime: the fixed costs of a layer, a token and a network hop, and the size of
//! buffers. It returns a `device/1` document. It runs only microbenchmarks, not the model.
//!
//! ```no_run
//! use hearth_profiles::Document;
//! use hearth_profiles::measure::MeasurementOptions;
//! use hearth_runtime::profile::{ProfileOptions, profile};
//!
//! # use hearth_runtime::profile::{LinkError, MeasuredLinks, ProfileError};
//! # fn example(measure_links: fn() -> Result<MeasuredLinks, LinkError>) -> Result<(), ProfileError> {
//! let measurement = MeasurementOptions::quick();
//! let options = ProfileOptions { name: "laptop".into(), measurement, ..ProfileOptions::default() };
//! let device = profile(&options, measure_links, &mut |step| eprintln!("{step}"))?;
//! println!("{}", device.to_yaml());
//! # Ok(())
//! # }
//! ```

mod kernels;
mod machine_speed;
mod overhead;

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hearth_profiles::device::{Cpu as CpuProfile, DeviceProfile, Os};
use hearth_profiles::gguf::{GgufError, GgufModel};
use hearth_profiles::link::PeerLink;
use hearth_profiles::measure::{
    self, ComputeRates, DiskTarget, MeasurementError, MeasurementOptions, Samples, WeightBuffer, processor,
};
use hearth_profiles::model::{ModelProfile, shipped_document};
use hearth_profiles::{Bytes, Document, DocumentError, Format, Seconds, Sourced};

pub use kernels::CpuKernels;
pub use machine_speed::measure_matvec_speed;

use hearth_schema::pass::MAX_PASS_TOKENS;

use crate::cpu::buffer_bytes;
use crate::synth::SynthError;
use crate::{Cpu, ExecError, ThreadPool, ThreadPoolOptions, Weights};

#[derive(Debug, Clone, Default, PartialEq)]
pub struct ProfileOptions {
    pub name: String,
    /// The model file that will run on this machine: only its weight formats and the disk that stores it are measured.
    /// If `None`, all formats and the disk of the current folder are measured.
    pub model: Option<PathBuf>,
    /// Number of compute threads; 0 means one for each core that the process may use.
    pub threads: usize,
    /// The number and duration of samples; the default measurement takes a minute or more.
    pub measurement: MeasurementOptions,
    /// Maximum number of tokens in a pass, which determines the size of buffers; 0 means 64.
    pub max_pass_tokens: u32,
}

#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    #[error(transparent)]
    Measure(#[from] MeasurementError),
    #[error(transparent)]
    Model(#[from] GgufError),
    #[error(transparent)]
    Compute(#[from] ExecError),
    #[error(transparent)]
    Synth(#[from] SynthError),
    #[error(transparent)]
    Link(LinkError),
    #[error("cannot create `{path}`: {source}; set `TMPDIR` to a writable folder", path = .path.display())]
    Folder { path: PathBuf, source: io::Error },
    #[error("the measured device profile is not valid: {0}")]
    Document(#[from] DocumentError),
}

pub type LinkError = Box<dyn std::error::Error + Send + Sync>;

#[derive(Debug)]
pub struct MeasuredLinks {
    /// Times to send the hidden state of a token between two compute threads over loopback, in seconds.
    pub loopback_hop_times: Samples,
    /// The loopback link, followed by the links to other devices.
    pub peer_links: Vec<PeerLink>,
}

/// Measures this machine. `measure_links` measures its network links. `progress` receives the name of each step before
/// the step begins.
pub fn profile(
    options: &ProfileOptions,
    measure_links: impl FnOnce() -> Result<MeasuredLinks, LinkError>,
    progress: &mut dyn FnMut(&str),
) -> Result<DeviceProfile, ProfileError> {
    let measurement = options.measurement;
    let model = options.model.as_ref().map(GgufModel::open).transpose()?;
    let model = model.as_ref().map(ModelProfile::from_gguf).transpose()?;
    // Memory is measured before anything is allocated.
    let memory = measure::memory::measure_memory();

    let mut pool = ThreadPoolOptions::default();
    if options.threads > 0 {
        pool.threads = options.threads;
    }
    let threads = pool.threads;
    let pool = ThreadPool::new(pool).map_err(|source| ExecError::Threads { source })?;
    let cpu = Cpu::new(Arc::new(pool));

    progress("links");
    let links = measure_links().map_err(ProfileError::Link)?;
    let folder = || DiskTarget::Folder(PathBuf::from("."));
    let target = options.model.clone().map_or_else(folder, DiskTarget::File);
    let disk = measure::disk::measure_disk(&target, threads, &measurement, progress)?;

    progress("memory");
    let buffer = WeightBuffer::new(measurement.buffer_size)?;
    let read_bandwidth = measure::memory_bandwidth::measure_read_bandwidth(&buffer, threads, &measurement)?;
    let formats = model.as_ref().map(formats).unwrap_or_default();
    let packed = options.model.as_deref().map_or(Ok(false), uses_packed)?;
    let mut kernels = CpuKernels::new(cpu.clone()).with_packed_weights(packed);
    let rates =
        measure::compute::measure_compute_rates(&mut kernels, &formats, &buffer, &measurement, progress)?;
    drop(buffer);
    progress("fixed costs");
    let overheads = overhead::measure_overheads(&cpu, &rates, packed, &measurement)?;

    let ComputeRates {
        matvec,
        matvec_streamed,
        matmul_streamed,
        matmul_medium,
        matmul,
        attention_rate,
        activation_bandwidth,
        kv_copy,
    } = rates;
    let device = DeviceProfile {
        schema: DeviceProfile::SCHEMA.to_owned(),
        name: options.name.clone(),
        description: about(&cpu),
        os: operating_system(),
        cpu: CpuProfile {
            name: processor::cpu_name(),
            cores: threads as u32,
            matvec,
            matvec_streamed,
            matmul_streamed,
            matmul_medium,
            matmul,
            read_bandwidth,
            attention_rate: Some(attention_rate),
            activation_bandwidth: Some(activation_bandwidth),
            layer_overhead: Some(overheads.per_layer),
            window_overhead: Some(links.window_overhead()),
            token_overhead: Some(overheads.per_token),
            kv_copy,
            compute_buffer: compute_buffer(model.as_ref(), threads, options.max_pass_tokens),
            quota: None,
        },
        memory,
        disk,
        gpu: None,
        soc: None,
        peer_links: links.peer_links,
    };
    device.validate()?;
    Ok(device)
}

impl MeasuredLinks {
    /// Returns the time of a network hop minus the latency of the link: the time to wake a compute thread and to encode
    /// the message.
    fn window_overhead(&self) -> Sourced<Seconds> {
        let link = self.peer_links[0].latency.value.0;
        self.loopback_hop_times.sourced_median(
            |hop| Seconds((hop - link).max(1e-7)),
            "16 KiB from one compute thread to another over loopback, less the latency of loopback",
        )
    }
}

fn formats(model: &ModelProfile) -> Vec<Format> {
    let groups = model.layers.iter().chain([&model.input_embedding, &model.output_head]);
    let formats = groups.flat_map(|group| group.totals_by_format().map(|(format, _)| format));
    formats.collect::<BTreeSet<Format>>().into_iter().collect()
}

/// The default of [`ProfileOptions::max_pass_tokens`], in tokens.
const PASS_TOKENS: u32 = 64;

/// Memory for thread stacks and sockets of a process in a ring. An idle process, the KV cache, buffers and page tables
/// are not included.
/// source: measured in the lab, 0.0 to 0.6 MB over 17 workers in nine scenarios
const PROCESS_BYTES: Bytes = Bytes(300 << 10);

/// Returns the memory that a run needs in addition to weights and KV cache.
fn compute_buffer(model: Option<&ModelProfile>, threads: usize, tokens: u32) -> Sourced<Bytes> {
    let tokens = if tokens == 0 { PASS_TOKENS } else { tokens.min(MAX_PASS_TOKENS) };
    let (name, shape) = model.map_or_else(
        || {
            let document = shipped_document("llama-8b").expect("llama-8b is shipped");
            (document.name.clone(), document.to_shape())
        },
        |model| (model.name.clone(), model.shape.clone()),
    );
    let bytes = Bytes(buffer_bytes(&shape, tokens, threads)) + PROCESS_BYTES;
    let source = format!(
        "computed: the buffers of a pass of {tokens} tokens through `{name}`, and {PROCESS_BYTES} for stacks and sockets"
    );
    Sourced::new(bytes, source)
}

fn operating_system() -> Os {
    match std::env::consts::OS {
        "macos" | "ios" => Os::Macos,
        "android" => Os::Android,
        "windows" => Os::Windows,
        _ => Os::Linux,
    }
}

/// Whether this machine uses packed weights for the model at `path`, which hearth may be unable to run.
fn uses_packed(path: &Path) -> Result<bool, ExecError> {
    Weights::open(path).map_or(Ok(false), |mut weights| weights.use_packed())
}

fn about(cpu: &Cpu) -> String {
    let (kernels, version) = (cpu.instruction_set.name(), env!("CARGO_PKG_VERSION"));
    let mut about = format!("{}, {kernels} kernels, hearth {version}", os_and_kernel());
    if let Some(quota) = processor::cpu_quota_description() {
        about += ", under ";
        about += &quota;
    }
    if measure::memory::has_mglru() {
        about += ", reclaims pages by generations (MGLRU), which is not validated";
    }
    about
}

/// Returns the name of the operating system and its kernel release, for example `linux 6.8.0`.
pub fn os_and_kernel() -> String {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    format!("{} {}", std::env::consts::OS, release.trim()).trim().to_string()
}
