//! The accelerator of this machine's GPU, and its measurement.
//!
//! A build without the feature `gpu` has none. Tuned kernels are kept in a file of the user's cache folder; without
//! one, the default tiling is used.

use hearth_profiles::Device;
use hearth_profiles::device::Gpu as GpuProfile;
use hearth_runtime::Accelerator;

use crate::cli::{GpuWeights, ProfileArgs};
use crate::diagnostics::Failure;

/// The accelerator for a model's layers.
#[cfg(not(feature = "gpu"))]
pub fn accelerator(_: GpuWeights) -> Option<Accelerator> {
    None
}

/// The accelerator for a model's layers. A GPU is opened only when a plan needs one.
#[cfg(feature = "gpu")]
#[allow(clippy::unnecessary_wraps)] // the other build has none
pub fn accelerator(weights: GpuWeights) -> Option<Accelerator> {
    use hearth_gpu::Conversion;
    use hearth_gpu::layers::Upload;

    let conversion = match weights {
        GpuWeights::AsStored => Conversion::None,
        GpuWeights::Q8 => Conversion::Q8,
        GpuWeights::Mixed => Conversion::Mixed,
    };
    let notes = std::sync::Arc::new(|note: &str| tracing::info!("{note}"));
    let upload = move |gpu: &hearth_gpu::Gpu| {
        let facts = gpu.facts();
        if facts.is_software() {
            tracing::warn!(
                "the plan gives layers to a GPU, and `{}` is a software driver: the processor computes them, far \
                 slower than by itself; plan with a profile of this machine",
                facts.name
            );
        }
        Upload { tiling: tuned_kernels::choices().get(gpu).unwrap_or(Tiling::USUAL), conversion }
    };
    Some(hearth_gpu::accelerator(hearth_gpu::CapabilityMask::default(), upload, notes))
}

#[cfg(feature = "gpu")]
pub use hearth_gpu::kernels::product::Tiling;

#[cfg(feature = "gpu")]
pub mod tuned_kernels {
    use std::path::PathBuf;

    use hearth_gpu::tuning::Choices;

    /// The path of the file, if there is a cache folder.
    pub fn path() -> Option<PathBuf> {
        let folder =
            |name: &str| std::env::var_os(name).filter(|folder| !folder.is_empty()).map(PathBuf::from);
        let cache = folder("XDG_CACHE_HOME").or_else(|| Some(folder("HOME")?.join(".cache")))?;
        Some(cache.join("hearth").join("gpu-kernels"))
    }

    /// The tuned kernels so far, `None` without a readable file.
    pub fn choices() -> Choices {
        let text = path().and_then(|path| std::fs::read_to_string(path).ok());
        Choices::of_text(&text.unwrap_or_default())
    }
}

/// Measures the GPU for `hearth profile`.
#[cfg(not(feature = "gpu"))]
pub fn measure(args: &ProfileArgs, _: &Device) -> Result<Option<GpuProfile>, Failure> {
    match args.gpu {
        crate::cli::MeasureGpu::Always => Err(Failure::unusable(
            "this build computes on processors only: it was made without the feature `gpu`",
        )),
        _ => Ok(None),
    }
}

/// Measures the GPU for `hearth profile`.
#[cfg(feature = "gpu")]
pub fn measure(args: &ProfileArgs, device: &Device) -> Result<Option<GpuProfile>, Failure> {
    use hearth_gpu::{CapabilityMask, Gpu, adapters, layers};
    use hearth_profiles::measure::Effort;
    use hearth_profiles::{Bytes, Format, Sourced};

    use crate::cli::MeasureGpu;

    let found = adapters().into_iter().next();
    let is_requested = match (args.gpu, &found) {
        (MeasureGpu::Never, _) | (MeasureGpu::Auto, None) => false,
        (MeasureGpu::Auto, Some(facts)) => !facts.is_software(),
        (MeasureGpu::Always, _) => true,
    };
    let Some(facts) = found.filter(|_| is_requested) else {
        return match args.gpu {
            MeasureGpu::Always => Err(Failure::unusable(hearth_gpu::GpuError::NoAdapter)),
            _ => Ok(None),
        };
    };
    let shares_memory = matches!(facts.kind, "integrated" | "software");
    let memory = match args.gpu_memory {
        Some(memory) => Sourced::new(memory, "given with --gpu-memory"),
        None if shares_memory => device.memory.available.clone(),
        // Without an explicit request a device is profiled without its GPU.
        None if args.gpu == MeasureGpu::Auto => {
            tracing::info!("`{}` is not measured: set its usable memory with --gpu-memory", facts.name);
            return Ok(None);
        }
        None => {
            return Err(Failure::unusable(format!(
                "no interface reports the memory size of `{}`",
                facts.name
            ))
            .hint("set the usable memory with --gpu-memory"));
        }
    };
    let gpu = Gpu::open(CapabilityMask::default()).map_err(Failure::running)?;
    let tiling = tuned_kernels::choices().get(&gpu).unwrap_or(Tiling::USUAL);
    let model = args.model.as_deref().map(hearth_workflow::read_model_profile).transpose()?;
    let formats: Vec<Format> = model.as_ref().map_or_else(Vec::new, |model| {
        let groups = model.layers.iter().chain([&model.output]);
        groups.flat_map(|group| group.by_format().map(|(format, _)| format)).collect()
    });
    let buffers = match &model {
        Some(model) => Sourced::new(
            Bytes(layers::buffer_bytes(&model.shape)),
            format!("planned for a part of a prompt of {}", model.name),
        ),
        None => Sourced::new(Bytes::mib(64), "assumed: a part of a prompt of a model of 8 billion weights"),
    };
    let effort = if args.quick { Effort::quick() } else { Effort::full() };
    hearth_gpu::measure::measure(&gpu, tiling, &formats, memory, buffers, &effort)
        .map(Some)
        .map_err(Failure::running)
}
