//! The GPU of this machine: a factory of GPU backends, and the measurement of the GPU for a device profile.
//!
//! A build without the feature `gpu` has no GPU backend. Tuned kernels are stored in a file in the cache folder of
//! the user; without this file, the default tiling is used.

use hearth_profiles::DeviceProfile;
use hearth_profiles::device::Gpu as GpuProfile;
use hearth_profiles::measure::MeasurementOptions;
use hearth_runtime::BackendFactory;

use crate::cli::{GpuWeightFormat, ProfileArgs};
use crate::diagnostics::Failure;

#[cfg(not(feature = "gpu"))]
pub const NO_GPU_MESSAGE: &str =
    "this build of hearth computes only on CPUs: it was compiled without the feature `gpu`";

/// Returns `None`, because this build has no GPU backend.
#[cfg(not(feature = "gpu"))]
pub fn backend_factory(_: GpuWeightFormat) -> Option<BackendFactory> {
    None
}

/// Returns a factory of GPU backends, which opens the GPU only if a plan has GPU layers.
#[cfg(feature = "gpu")]
#[allow(clippy::unnecessary_wraps)] // the build without a GPU returns `None`
pub fn backend_factory(weights: GpuWeightFormat) -> Option<BackendFactory> {
    use hearth_gpu::WeightConversion;
    use hearth_gpu::layers::UploadOptions;

    let conversion = match weights {
        GpuWeightFormat::AsStored => WeightConversion::None,
        GpuWeightFormat::Q8 => WeightConversion::Q8,
        GpuWeightFormat::Mixed => WeightConversion::Mixed,
    };
    let notes = std::sync::Arc::new(|note: &str| tracing::info!("{note}"));
    let upload = move |gpu: &hearth_gpu::Gpu| {
        let info = gpu.info();
        if info.is_software() {
            tracing::warn!(
                "the plan has GPU layers, but `{}` is a software driver: the CPU computes these layers, more slowly \
                 than without the driver; omit `--gpu-layers`, or make a plan with a profile of this machine",
                info.name
            );
        }
        UploadOptions { tiling: tuned_kernels::load().get(gpu).unwrap_or(Tiling::DEFAULT), conversion }
    };
    Some(hearth_gpu::backend_factory(hearth_gpu::CapabilityMask::default(), upload, notes))
}

#[cfg(feature = "gpu")]
pub use hearth_gpu::kernels::matmul::Tiling;

#[cfg(feature = "gpu")]
pub mod tuned_kernels {
    use std::path::PathBuf;

    use hearth_gpu::tuning::TunedTilings;

    /// Returns the path of the file with the tuned tilings of the GPU kernels; `None` if the user has no cache folder.
    pub fn cache_file_path() -> Option<PathBuf> {
        Some(crate::machine::cache_folder()?.join("gpu-kernels"))
    }

    /// Reads the tuned tilings of the GPU kernels; the result is empty if the file cannot be read.
    pub fn load() -> TunedTilings {
        let text = cache_file_path().and_then(|path| std::fs::read_to_string(path).ok());
        TunedTilings::parse(&text.unwrap_or_default())
    }
}

#[cfg(not(feature = "gpu"))]
pub fn measure(
    args: &ProfileArgs,
    _: &DeviceProfile,
    _: &MeasurementOptions,
) -> Result<Option<GpuProfile>, Failure> {
    if args.gpu == crate::cli::GpuMeasurementMode::Always {
        Err(Failure::invalid(NO_GPU_MESSAGE))
    } else {
        Ok(None)
    }
}

#[cfg(feature = "gpu")]
pub fn measure(
    args: &ProfileArgs,
    device: &DeviceProfile,
    measurement: &MeasurementOptions,
) -> Result<Option<GpuProfile>, Failure> {
    use hearth_gpu::{CapabilityMask, Gpu, enumerate_adapters, layers};
    use hearth_profiles::{Bytes, Format, Sourced};

    use crate::cli::GpuMeasurementMode;

    let facts = match (args.gpu, enumerate_adapters().into_iter().next()) {
        (GpuMeasurementMode::Always, None) => return Err(Failure::invalid(hearth_gpu::GpuError::NoAdapter)),
        (GpuMeasurementMode::Always, Some(facts)) => facts,
        (GpuMeasurementMode::Auto, Some(facts)) if !facts.is_software() => facts,
        _ => return Ok(None),
    };
    let shares_memory = matches!(facts.kind, "integrated" | "software");
    let memory = match args.gpu_memory {
        Some(memory) => Sourced::new(memory, "given with --gpu-memory"),
        None if shares_memory => device.memory.available_memory.clone(),
        // If the GPU was not requested explicitly, the device is profiled without it.
        None if args.gpu == GpuMeasurementMode::Auto => {
            let name = &facts.name;
            tracing::info!("the GPU `{name}` is not measured: set its usable memory with `--gpu-memory`");
            return Ok(None);
        }
        None => {
            let what = format!("the driver does not report the memory size of the GPU `{}`", facts.name);
            return Err(Failure::invalid(what).with_hint("set its usable memory with `--gpu-memory`"));
        }
    };
    let gpu = Gpu::open(CapabilityMask::default()).map_err(Failure::failed)?;
    let tiling = tuned_kernels::load().get(&gpu).unwrap_or(Tiling::DEFAULT);
    let model = args.model.as_deref().map(hearth_workflow::read_model_profile).transpose()?;
    let formats: Vec<Format> = model.as_ref().map_or_else(Vec::new, |model| {
        let groups = model.layers.iter().chain([&model.output_head]);
        groups.flat_map(|group| group.totals_by_format().map(|(format, _)| format)).collect()
    });
    let buffers = match &model {
        Some(model) => Sourced::new(
            Bytes(layers::compute_buffer_bytes(&model.shape)),
            format!("planned for a batch of prompt tokens of {}", model.name),
        ),
        None => Sourced::new(Bytes::from_mib(64), "assumed: a batch of prompt tokens of an 8B model"),
    };
    let measured = hearth_gpu::measure::measure_gpu(&gpu, tiling, &formats, memory, buffers, measurement);
    measured.map(Some).map_err(Failure::failed)
}
