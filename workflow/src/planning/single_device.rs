//! The plan of a model on one device alone, made without a scenario and without measurements.
//!
//! All layers are on the device. Its memory decides how it keeps the weights: if they fit, the operating system keeps
//! them; if not, `managed` residency keeps as many as fit and streams the others.

use hearth_core::memory::{kv_cache_bytes, process_overhead_bytes};
use hearth_profiles::Bytes;
use hearth_profiles::document::Document;
use hearth_profiles::model::ModelProfile;
use hearth_schema::digest::digest_text;
use hearth_schema::plan::{
    Plan, PlannedDevice, PlannedModel, PlannerRecord, Processor, Role, ScenarioRecord,
};
use hearth_schema::residency::{Residency, ResidencyOptions};
use hearth_schema::scenario::KvFormat;

use crate::Error;

/// The name of the device in the plan.
pub const DEVICE_NAME: &str = "this";

/// Maximum default of [`SingleDeviceOptions::context_length`], in tokens. source: assumed, a long conversation
pub const DEFAULT_CONTEXT_LENGTH: u32 = 4096;

/// What the plan of a single device is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SingleDeviceOptions {
    /// Capacity of the KV cache of each sequence, in tokens. If `None`, it is the context length of the model, at most
    /// [`DEFAULT_CONTEXT_LENGTH`].
    pub context_length: Option<u32>,
    /// The format of the KV cache.
    pub kv_format: KvFormat,
    /// The maximum number of concurrent sequences.
    pub sequences: u32,
    /// The number of layers on the GPU, from the first one; at most all.
    pub gpu_layers: u32,
    /// The memory that the run can use.
    pub available_memory: Bytes,
}

/// Returns the plan of a model that one device runs alone. Fails if its KV cache alone does not fit in memory.
pub fn single_device_plan(model: &ModelProfile, options: &SingleDeviceOptions) -> Result<Plan, Error> {
    let (shape, layers) = (&model.shape, model.shape.layers.0);
    let (sequences, kv_format) = (options.sequences, options.kv_format);
    shape
        .check_kv_format(kv_format.format())
        .map_err(|error| Error::invalid(error).with_hint("use `--kv-cache f16`"))?;
    if options.gpu_layers > 0 && !shape.architecture.spec().has_gpu_kernels {
        let what = format!("a GPU cannot compute layers of {} models", shape.architecture);
        return Err(Error::invalid(what).with_hint("run without `--gpu-layers`"));
    }
    if options.gpu_layers > 0 && !kv_format.is_supported_on_gpus() {
        let what = format!("layers on a GPU cannot have a KV cache in {}", kv_format.format());
        return Err(Error::invalid(what).with_hint("use `--kv-cache f16`, or no `--gpu-layers`"));
    }
    let default = shape.context_length.min(DEFAULT_CONTEXT_LENGTH);
    let context_length = options.context_length.unwrap_or(default);
    let kv_cache = kv_cache_bytes(shape, 0..layers, context_length, kv_format, sequences);
    let unreclaimable = kv_cache.0.saturating_add(process_overhead_bytes(shape, true, Bytes::ZERO).0);
    let available = options.available_memory;
    if unreclaimable > available.0 {
        let tokens = u64::from(context_length) * u64::from(sequences);
        let other = Bytes(unreclaimable - kv_cache.0);
        let what = format!(
            "a KV cache for {tokens} tokens takes {kv_cache} and the process {other}, but only {available} are available"
        );
        return Err(Error::invalid(what).with_hint("set a shorter `--context`"));
    }
    let gpu_layers = options.gpu_layers.min(layers);
    let all_on_gpu = gpu_layers == layers;
    // Uploaded weights are not read from main memory any more.
    let uploaded: Bytes = (0..gpu_layers).map(|layer| model.layer_bytes(layer)).sum();
    let weights = model.total_bytes().saturating_sub(uploaded);
    let fits = unreclaimable.saturating_add(weights.0) <= available.0;
    let policy = if fits { Residency::Os } else { Residency::Managed };
    let device = PlannedDevice {
        gpu_layers,
        residency: ResidencyOptions { policy, ..ResidencyOptions::default() },
        ..PlannedDevice::new(DEVICE_NAME, Role::Head, layers)
    };
    let scenario = ScenarioRecord { name: DEVICE_NAME.to_owned(), digest: digest_text(DEVICE_NAME) };
    let planner = PlannerRecord { strategy: "single".to_owned(), options: Vec::new() };
    let plan = Plan {
        context_length,
        kv_cache_format: kv_format,
        sequences,
        output_processor: if all_on_gpu { Processor::Gpu } else { Processor::Cpu },
        devices: vec![device],
        ..Plan::empty(scenario, PlannedModel::from_profile(model), planner)
    };
    plan.validate().map_err(Error::invalid)?;
    Ok(plan)
}

#[cfg(test)]
mod tests {
    use hearth_profiles::model::shipped_profile;

    use super::*;

    /// Returns options for one sequence on a device with this much memory.
    fn options(available: Bytes) -> SingleDeviceOptions {
        let kv_format = KvFormat::F16;
        SingleDeviceOptions {
            context_length: None,
            kv_format,
            sequences: 1,
            gpu_layers: 0,
            available_memory: available,
        }
    }

    #[test]
    fn memory_decides_the_residency() {
        let model = shipped_profile("llama-8b").expect("a shipped model");
        let policy = |gib: u64| {
            let plan = single_device_plan(&model, &options(Bytes(gib << 30))).expect("a plan");
            plan.devices[0].residency.policy
        };
        // 4.6 GiB of weights, and 0.5 GiB of keys and values of 4096 tokens.
        assert_eq!(policy(6), Residency::Os);
        assert_eq!(policy(4), Residency::Managed);
        let on_gpu = SingleDeviceOptions { gpu_layers: 32, ..options(Bytes(4 << 30)) };
        let plan = single_device_plan(&model, &on_gpu).expect("a plan");
        assert_eq!(plan.devices[0].residency.policy, Residency::Os);
    }

    #[test]
    fn context_and_gpu_layers_are_limited_by_the_model() {
        let model = shipped_profile("llama-8b").expect("a shipped model");
        let many = SingleDeviceOptions { gpu_layers: u32::MAX, ..options(Bytes(1 << 36)) };
        let plan = single_device_plan(&model, &many).expect("a plan");
        assert_eq!((plan.devices[0].gpu_layers, plan.output_processor), (32, Processor::Gpu));
        assert_eq!(plan.context_length, DEFAULT_CONTEXT_LENGTH);
        let small = SingleDeviceOptions { kv_format: KvFormat::Q8_0, ..options(Bytes(1 << 36)) };
        assert!(single_device_plan(&model, &small).is_ok());
        let error =
            single_device_plan(&model, &SingleDeviceOptions { gpu_layers: 1, ..small }).expect_err("a GPU");
        assert!(error.one_line_message().contains("KV cache in q8_0"), "{error:?}");
        let long = SingleDeviceOptions { context_length: Some(1 << 20), ..many };
        let error = single_device_plan(&model, &long).expect_err("128 GiB of keys and values");
        assert!(error.one_line_message().contains("1048576 tokens takes 128 GiB"), "{error:?}");
    }
}
