//! Validation of instances: every value must be finite and within the range that the planners rely on.
//!
//! Byte counts must be at most 2^50, and L at most 512 (the largest model today has 126 layers). This keeps memory
//! arithmetic within `i64`, so that memory constraints are checked on integers without rounding. The upper bound of
//! the time per token must be finite, so that no planner computes an infinity or NaN.

use hearth_profiles::device::Os;

use crate::problem::instance::{Device, GpuApi, Instance, Model, ValuesByFormat};

/// The maximum of each byte count in an instance: 1 PiB.
pub const MAX_BYTE_COUNT: u64 = hearth_profiles::device::MAX_MEMORY_BYTES.0;

pub const MAX_MODEL_LAYERS: u32 = 512;

/// Why an instance is invalid. `place` names the instance, the model, the device or the hop with the invalid value.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum InstanceError {
    #[error("instance `{instance}` has no devices: give at least the head")]
    NoDevices { instance: String },
    #[error("`{field}` of {place} {problem}")]
    Field { field: String, place: String, problem: String },
    #[error("{0}")]
    Residency(String),
    #[error("`t_comm_between` has {found} {what}, but there are {devices} devices")]
    HopCount { what: String, found: usize, devices: usize },
    #[error(
        "a token on {place} would take infinite time: the speeds of the device are too low for the model"
    )]
    InfiniteTokenTime { place: String },
}

type Checked = Result<(), InstanceError>;

impl Instance {
    /// Checks that all values are in the ranges that the planners rely on. The error names the first invalid value.
    pub fn validate(&self) -> Result<(), InstanceError> {
        if self.devices.is_empty() {
            return Err(InstanceError::NoDevices { instance: self.name.clone() });
        }
        Checker { place: &|| format!("instance `{}`", self.name) }
            .not_negative("s_threshold", self.slow_disk_threshold)?;
        self.model.validate()?;
        for (index, device) in self.devices.iter().enumerate() {
            device.validate(index, &self.model)?;
        }
        self.pair_hop_seconds.as_ref().map_or(Ok(()), |hops| self.validate_hops(hops))
    }

    fn validate_hops(&self, hops: &[Vec<Option<f64>>]) -> Checked {
        let devices = self.devices.len();
        if hops.len() != devices {
            let what = "rows".to_owned();
            return Err(InstanceError::HopCount { what, found: hops.len(), devices });
        }
        for (from, row) in hops.iter().enumerate() {
            let sender = &self.devices[from];
            if row.len() != devices {
                let what = format!("entries in the row of {}", sender.label(from));
                return Err(InstanceError::HopCount { what, found: row.len(), devices });
            }
            for (to, seconds) in row.iter().enumerate().filter(|(to, _)| *to != from) {
                let Some(seconds) = seconds else { continue };
                let checked = Checker {
                    place: &|| format!("the hop from {} to `{}`", sender.label(from), self.devices[to].name),
                };
                checked.not_negative("t_comm_between", *seconds)?;
            }
        }
        Ok(())
    }
}

impl Model {
    fn validate(&self) -> Checked {
        let checked = Checker { place: &|| format!("the model `{}`", self.name) };
        checked.positive("L", f64::from(self.model_layers))?;
        checked.at_most("L", u64::from(self.model_layers), u64::from(MAX_MODEL_LAYERS))?;
        checked.positive("V", self.vocab_size as f64)?;
        checked.positive("b", self.layer_weight_bytes as f64)?;
        checked.bytes("b", self.layer_weight_bytes)?;
        for bytes in &self.weight_bytes_by_layer {
            checked.bytes("layer_bytes", *bytes)?;
        }
        let (given, layers) = (self.weight_bytes_by_layer.len(), self.model_layers);
        if given > 0 && given as u64 != u64::from(layers) {
            let problem = format!("has {given} entries for {layers} layers: give one per layer, or none");
            return checked.refuse("layer_bytes", problem);
        }
        checked.bytes("b_i", self.input_embedding_bytes)?;
        checked.bytes("b_o", self.output_head_bytes)?;
        checked.bytes("n_kv", self.layer_resident_bytes().unwrap_or(u64::MAX))?;
        checked.work("f_layer", &self.layer_flops)?;
        checked.work("f_out", &self.output_flops)
    }
}

impl Device {
    pub(crate) fn label(&self, index: usize) -> String {
        format!("devices[{index}] `{}`", self.name)
    }

    fn validate(&self, index: usize, model: &Model) -> Checked {
        let checked = Checker { place: &|| self.label(index) };
        if self.gpu != GpuApi::None && (self.gpu == GpuApi::Metal) != (self.os == Os::Macos) {
            let problem = if self.gpu == GpuApi::Metal {
                "is Metal, which only macOS has: change `gpu` or `os`"
            } else {
                "is CUDA, which macOS does not have: change `gpu` or `os`"
            };
            return checked.refuse("gpu", problem.to_owned());
        }
        checked.positive("T_cpu", self.cpu_memory_rate)?;
        checked.positive("s_disk", self.disk_read_rate)?;
        if self.gpu != GpuApi::None {
            checked.positive("T_gpu", self.gpu_memory_rate)?;
            checked.speed("s_gpu", &self.gpu_speed, &model.layer_flops)?;
        }
        // A planner may choose any device as the head, so its CPU needs the speeds for the output head too.
        checked.speed("s_cpu", &self.cpu_speed, &model.layer_flops)?;
        checked.speed("s_cpu", &self.cpu_speed, &model.output_flops)?;
        for (field, value) in [
            ("t_kv_cpu", self.cpu_cache_write_seconds),
            ("t_kv_gpu", self.gpu_cache_write_seconds),
            ("t_ram_vram", self.gpu_upload_seconds),
            ("t_vram_ram", self.gpu_download_seconds),
            ("t_comm", self.hop_seconds),
        ] {
            checked.not_negative(field, value)?;
        }
        for (field, value) in [
            ("d_avail", self.ram_available),
            ("d_metal", self.metal_available),
            ("d_cuda", self.cuda_available),
            ("d_can_swap", self.swappable_bytes),
            ("d_swap_avail", self.swap_available),
            ("c_cpu", self.cpu_buffer_bytes),
            ("c_gpu", self.gpu_buffer_bytes),
        ] {
            checked.bytes(field, value)?;
        }
        checked.not_negative("runtime.token_overhead", self.runtime.token_overhead_seconds)?;
        if let Some(experts) = &self.runtime.experts {
            checked.positive("runtime.experts.read_around", experts.read_around)?;
            checked.positive("runtime.experts.layer_bytes", experts.layer_bytes as f64)?;
            checked.not_negative("runtime.experts.latency_seconds", experts.latency_seconds)?;
            for (key, share) in [
                ("runtime.experts.weight_share", experts.weight_share),
                ("runtime.experts.used_share", experts.used_share),
            ] {
                if !(0.0..=1.0).contains(&share) {
                    return checked.refuse(key, format!("{share} is not a share from 0 to 1"));
                }
            }
        }
        if let Some(reads) = &self.runtime.read_rates {
            checked.positive("runtime.reads.fault", reads.fault_read_rate)?;
            checked.positive("runtime.reads.ahead", reads.read_ahead_rate)?;
            checked.positive("runtime.reads.stream", reads.stream_read_rate)?;
        }
        self.validate_work(&checked, model)?;
        if self.runtime.allowed_residencies.is_empty() {
            let problem = "is empty: name at least one residency, such as `os`".to_owned();
            return checked.refuse("runtime.residencies", problem);
        }
        for residency in &self.runtime.allowed_residencies {
            let checked = residency.validate(&self.label(index));
            checked.map_err(|error| InstanceError::Residency(error.to_string()))?;
        }
        Ok(())
    }

    fn validate_work(&self, checked: &Checker, model: &Model) -> Checked {
        let Some(work) = &self.runtime.compute_times else { return Ok(()) };
        for (field, seconds) in [
            ("runtime.work.output", work.cpu_output_seconds),
            ("runtime.work.cpu_window", work.cpu_window_overhead_seconds),
            ("runtime.work.gpu_window", work.gpu_window_overhead_seconds),
        ] {
            checked.not_negative(field, seconds)?;
        }
        let gpu_layers = if self.gpu == GpuApi::None { 0 } else { model.model_layers };
        for (field, times, layers) in [
            ("runtime.work.cpu_layers", &work.cpu_layer_seconds, model.model_layers),
            ("runtime.work.gpu_layers", &work.gpu_layer_seconds, gpu_layers),
        ] {
            let count = times.len();
            if count as u64 != u64::from(layers) {
                let problem = format!("has {count} times for {layers} layers: give one per layer");
                return checked.refuse(field, problem);
            }
            times.iter().try_for_each(|seconds| checked.not_negative(field, *seconds))?;
        }
        Ok(())
    }
}

struct Checker<'a> {
    /// Formats the instance, model, device or hop whose values are checked; called only if a check fails.
    place: &'a dyn Fn() -> String,
}

impl Checker<'_> {
    fn refuse(&self, field: &str, problem: String) -> Checked {
        Err(InstanceError::Field { field: field.to_owned(), place: (self.place)(), problem })
    }

    fn number(&self, field: &str, value: f64, is_valid: bool, requirement: &str) -> Checked {
        if value.is_finite() && is_valid {
            return Ok(());
        }
        let requirement = if value.is_finite() { requirement } else { "be a finite number" };
        self.refuse(field, format!("is {value}: it must {requirement}"))
    }

    fn positive(&self, field: &str, value: f64) -> Checked {
        self.number(field, value, value > 0.0, "be above zero")
    }

    fn not_negative(&self, field: &str, value: f64) -> Checked {
        self.number(field, value, value >= 0.0, "not be negative")
    }

    fn at_most(&self, field: &str, value: u64, limit: u64) -> Checked {
        if value <= limit { Ok(()) } else { self.refuse(field, format!("must be at most {limit}")) }
    }

    fn bytes(&self, field: &str, value: u64) -> Checked {
        self.at_most(field, value, MAX_BYTE_COUNT)
    }

    fn work(&self, field: &str, work: &ValuesByFormat) -> Checked {
        work.iter().try_for_each(|(format, flops)| self.not_negative(&format!("{field}.{format}"), *flops))
    }

    /// Checks that each weight format with work has a speed above zero. Speeds of other formats are ignored.
    fn speed(&self, field: &str, speeds: &ValuesByFormat, work: &ValuesByFormat) -> Checked {
        for format in work.iter().filter(|(_, flops)| **flops > 0.0).map(|(format, _)| format) {
            let Some(speed) = speeds.get(format) else {
                let why = "which the model uses: measure or estimate it";
                return self.refuse(field, format!("has no speed for `{format}`, {why}"));
            };
            self.positive(&format!("{field}.{format}"), *speed)?;
        }
        Ok(())
    }
}
