//! The latency model of the prima.cpp paper: the time per token of an assignment, and its terms.
//!
//! prima.cpp paper, appendix A.3, Eq. 11-19 with its ambiguities resolved (see below). Symbols are in GLOSSARY.md and
//! [`LayerCounts`] (l, lgpu and win); `[head]` is 1 for the head device, else 0.
//!
//! ```text
//! T_comp = (l - lgpu) Fc + lgpu Fg + [head] Fo
//! T_mem  = (l - lgpu)(t_kv_cpu + b'/T_cpu) + lgpu (t_kv_gpu + b'/T_gpu)
//!        + win (t_ram_vram + t_vram_ram)(1 - UMA) + [head](b_i/V + b_o)/T_cpu
//! T_comm = win t_comm                       or the sum of the hops to the next devices, see hop_times
//! need   = (l - lgpu) b' + [head](b_i/V + b_o) + c_cpu          not Metal
//!        = l b' + [head](b_i/V + b_o) + c_cpu + c_gpu           Metal
//! over   = need > cap
//! T_disk = max(need - cap, [head] b_i/V)/s_disk                                      not Metal
//!        = max(over ? l b + [head](b_i/V + b_o) : 0, [head] b_i/V)/s_disk            Metal
//! T      = sum over devices of T_comp + T_mem + T_disk + T_comm
//! ```
//!
//! Resolved ambiguities: need = cap fits in memory. The minimum `b_i/V` of the disk term applies to the head only
//! (the paper's Eq. 20 counts it once, its Eq. 12-19 for every device). A device without layers has no costs.
//!
//! A reported T always comes from [`LatencyModel::evaluate`] or [`LatencyModel::evaluate_steady_state`] for the
//! reported assignment, and not from a sum inside a planner.
//!
//! Not here: the overlap of disk reads with computation, which makes the number of rounds matter ([`steady_state`]).

pub mod coefficients;
pub mod constraints;
pub mod gpu_split;
pub(crate) mod hop_times;
pub mod steady_state;

use hearth_schema::residency::ResidencyOptions;
use serde::Serialize;

use crate::problem::assignment::{Assignment, LayerCounts};
use crate::problem::instance::{Device, Instance};
use crate::problem::validation::InstanceError;
use coefficients::{DeviceCosts, MemoryCase, ModelSizes};
use constraints::{Violation, shape_violations};
use hop_times::HopTimes;

/// The quantiles of the available memory over which a model averages: the middles of five equally likely ranges of a
/// normal distribution, in standard deviations.
pub(crate) const MEMORY_QUANTILES: [f64; 5] = [-1.2816, -0.5244, 0.0, 0.5244, 1.2816];

/// A validated instance with the coefficients of its devices; the input of every planner.
#[derive(Debug, Clone)]
pub struct LatencyModel<'i> {
    instance: &'i Instance,
    pub(crate) sizes: ModelSizes,
    pub(crate) device_costs: Vec<DeviceCosts>,
    pub(crate) hop_times: HopTimes,
    /// Whether the steady-state model averages the times of reading from disk over the uncertain memory of the devices.
    pub(crate) averages_memory: bool,
}

/// The time per token of an assignment, and its terms.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LatencyBreakdown {
    /// T: the seconds per token.
    #[serde(rename = "seconds")]
    pub seconds_per_token: f64,
    /// The terms of each device, in the instance's order.
    pub devices: Vec<DeviceTerms>,
    /// The device with the slowest disk, and the seconds that a token waits for this disk; `None` if a token waits for
    /// no disk. The disk term of the device includes these seconds.
    #[serde(rename = "waits")]
    pub slowest_disk_and_wait_seconds: Option<(usize, f64)>,
}

/// The terms of one device in the time per token, in seconds, and its memory in bytes.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct DeviceTerms {
    #[serde(rename = "share")]
    pub layer_counts: LayerCounts,
    /// `T_comp` of the prima.cpp paper: the seconds of arithmetic per token.
    #[serde(rename = "compute")]
    pub compute_seconds: f64,
    /// `T_mem` of the prima.cpp paper: the seconds per token of memory traffic of weights, cache and hidden state.
    #[serde(rename = "memory")]
    pub memory_seconds: f64,
    /// `T_disk` of the prima.cpp paper: the seconds per token of reading weights that did not stay in memory.
    #[serde(rename = "disk")]
    pub disk_seconds: f64,
    /// `T_comm` of the prima.cpp paper: the seconds per token of sending the hidden state to the next device.
    #[serde(rename = "communication")]
    pub communication_seconds: f64,
    /// The bytes of memory that the layers, buffers and, on the head, the output head need.
    #[serde(rename = "need")]
    pub required_memory_bytes: f64,
    /// The bytes of memory that the device has for layers, buffers and the output head (cap).
    #[serde(rename = "capacity")]
    pub memory_capacity_bytes: u64,
    /// Whether the required memory exceeds the capacity, so weights are read from disk for every token.
    #[serde(rename = "over")]
    pub exceeds_memory: bool,
    #[serde(rename = "case")]
    pub memory_case: MemoryCase,
}

impl DeviceTerms {
    /// Returns the seconds that the device adds to a token: the sum of its terms.
    pub fn seconds(&self) -> f64 {
        self.compute_seconds + self.memory_seconds + self.disk_seconds + self.communication_seconds
    }
}

impl<'i> LatencyModel<'i> {
    /// Validates an instance and computes the coefficients of its devices. Fails if the instance is invalid.
    pub fn new(instance: &'i Instance) -> Result<Self, InstanceError> {
        instance.validate()?;
        let sizes = ModelSizes::new(instance);
        let hop_times = HopTimes::new(instance);
        let device_costs = (0..instance.devices.len())
            .map(|index| DeviceCosts::new(instance, index, &sizes, &hop_times))
            .collect::<Result<_, _>>()?;
        Ok(Self { instance, sizes, device_costs, hop_times, averages_memory: false })
    }

    pub fn instance(&self) -> &'i Instance {
        self.instance
    }

    pub fn model_layers(&self) -> u32 {
        self.sizes.model_layers
    }

    pub fn device_count(&self) -> usize {
        self.device_costs.len()
    }

    pub(crate) fn device_name(&self, device: usize) -> String {
        self.instance.devices[device].name.clone()
    }

    /// Evaluates the time per token by the prima.cpp paper's objective, even if a memory constraint is violated. Fails
    /// if the assignment has [shape violations](shape_violations).
    pub fn evaluate(&self, assignment: &Assignment) -> Result<LatencyBreakdown, Violation> {
        shape_violations(self, assignment).into_iter().next().map_or(Ok(()), Err)?;
        let shares = assignment.layer_counts(self.sizes.model_layers);
        let hops = self.communication_seconds(assignment, &shares);
        let terms = |(device, (share, communication))| DeviceTerms {
            communication_seconds: communication,
            ..self.device_latency_terms(device, device == assignment.head, share)
        };
        let devices: Vec<DeviceTerms> = shares.into_iter().zip(hops).enumerate().map(terms).collect();
        let seconds_per_token = devices.iter().map(DeviceTerms::seconds).sum();
        Ok(LatencyBreakdown { seconds_per_token, devices, slowest_disk_and_wait_seconds: None })
    }

    /// Returns the seconds per token (T) with the prima.cpp paper's objective; infinite if [`Self::evaluate`] fails.
    pub fn seconds_per_token(&self, assignment: &Assignment) -> f64 {
        self.evaluate(assignment).map_or(f64::INFINITY, |breakdown| breakdown.seconds_per_token)
    }

    /// Returns the seconds per token (T) in the steady state; infinite if [`Self::evaluate_steady_state`] fails.
    pub fn steady_state_seconds(&self, assignment: &Assignment, residencies: &[ResidencyOptions]) -> f64 {
        self.evaluate_steady_state(assignment, residencies)
            .map_or(f64::INFINITY, |breakdown| breakdown.seconds_per_token)
    }

    /// Returns for each device the seconds per token of its hops (`T_comm`); infinite if a link is missing. A partial
    /// last round skips devices that have no layers in it, except relays.
    pub(crate) fn communication_seconds(&self, assignment: &Assignment, shares: &[LayerCounts]) -> Vec<f64> {
        let mut seconds = vec![0.0; shares.len()];
        let ring = assignment.ring();
        let layers_per_round = assignment.layers_per_round().max(1);
        let whole_rounds = (u64::from(self.sizes.model_layers) / layers_per_round) as u32;
        let partial = !u64::from(self.sizes.model_layers).is_multiple_of(layers_per_round);
        let is_visited = |device: &usize| {
            partial && (shares[*device].windows > whole_rounds || assignment.is_relay(*device))
        };
        let visited: Vec<usize> = ring.iter().copied().filter(is_visited).collect();
        let next = |ring: &[usize], position: usize| ring[(position + 1) % ring.len()];
        let mut partial_position = 0;
        for (position, &device) in ring.iter().enumerate() {
            let hop = self.hop_times.seconds(device, next(&ring, position));
            if visited.get(partial_position) == Some(&device) {
                let last_hop = self.hop_times.seconds(device, next(&visited, partial_position));
                partial_position += 1;
                seconds[device] = if hop == last_hop {
                    f64::from(whole_rounds + 1) * hop
                } else {
                    f64::from(whole_rounds) * hop + last_hop
                };
            } else {
                seconds[device] = f64::from(whole_rounds) * hop;
            }
        }
        seconds
    }

    /// Returns how many of these layers take main memory: with Metal, those on the GPU too.
    pub(crate) fn layers_in_main_memory(&self, device: usize, counts: LayerCounts) -> u32 {
        counts.layers - if self.device_costs[device].uses_metal { 0 } else { counts.gpu_layers }
    }

    /// Reduces the memory of a device, as the prima.cpp paper counts it, so that at most `layers` layers fit.
    pub(crate) fn limit_layers_in_main_memory(&mut self, device: usize, is_head: bool, layers: u32) {
        let needed = self.device_costs[device].required_memory_bytes(is_head, &self.sizes, i64::from(layers));
        let capacity = &mut self.device_costs[device].memory_capacity_bytes;
        *capacity = needed.min(*capacity);
    }

    /// Returns this model with the mean times of the steady state over the uncertain memory of its devices; `None` if
    /// the memory of no device is uncertain.
    #[must_use]
    pub fn with_uncertain_memory(&self) -> Option<Self> {
        let is_uncertain = |device: &Device| device.runtime.memory_uncertainty > 0.0;
        self.instance.devices.iter().any(is_uncertain).then(|| Self { averages_memory: true, ..self.clone() })
    }

    /// Returns this model with a fraction less memory for weights on a device.
    pub(crate) fn with_less_memory(&self, device: usize, fraction: f64) -> Self {
        let mut model = self.clone();
        let capacity = &mut model.device_costs[device].steady_state_capacity_bytes;
        *capacity -= (*capacity as f64 * fraction) as i64;
        model
    }

    /// Returns the terms of a device with these layer counts. Hop times are estimated if they depend on the receiver.
    pub fn device_latency_terms(&self, device: usize, is_head: bool, counts: LayerCounts) -> DeviceTerms {
        self.terms_with_hop(device, is_head, counts, self.device_costs[device].hop_seconds)
    }

    pub(crate) fn terms_with_hop(
        &self,
        device: usize,
        is_head: bool,
        counts: LayerCounts,
        hop_seconds: f64,
    ) -> DeviceTerms {
        let costs = &self.device_costs[device];
        let model = &self.sizes;
        let memory_capacity_bytes = costs.memory_capacity_bytes as u64;
        if counts.layers == 0 {
            return DeviceTerms { layer_counts: counts, memory_capacity_bytes, ..DeviceTerms::default() };
        }
        let gpu = f64::from(counts.gpu_layers);
        let cpu = f64::from(counts.layers - counts.gpu_layers);
        let [gpu_and_cpu, windows] = [counts.layers, counts.windows].map(f64::from);
        let (output, head_memory) =
            if is_head { (costs.output_compute_seconds, costs.head_memory_seconds) } else { (0.0, 0.0) };

        let layers = i64::from(self.layers_in_main_memory(device, counts));
        let exceeds_memory = layers > costs.layers_that_fit(is_head, model);
        let output_bytes = if is_head { model.output_head_bytes } else { 0 };
        let whole = layers * model.layer_resident_bytes + output_bytes + costs.buffer_bytes;
        let reloads = exceeds_memory && !costs.has_slow_disk;
        let memory_case = if reloads { costs.memory_case_if_exceeded } else { MemoryCase::NoReload };
        let row = model.head_device_row_bytes(is_head);
        let read = match (costs.uses_metal, exceeds_memory) {
            (true, true) => gpu_and_cpu * model.layer_weight_bytes + model.head_device_bytes(is_head),
            (true, false) => row,
            (false, _) => ((whole - costs.memory_capacity_bytes) as f64 + row).max(row),
        };
        DeviceTerms {
            layer_counts: counts,
            compute_seconds: cpu * costs.cpu_compute_seconds + gpu * costs.gpu_compute_seconds + output,
            memory_seconds: cpu * costs.cpu_memory_seconds
                + gpu * costs.gpu_memory_seconds
                + windows * costs.window_copy_seconds
                + head_memory,
            disk_seconds: read / costs.disk_read_rate,
            communication_seconds: windows * hop_seconds,
            required_memory_bytes: whole as f64 + row,
            memory_capacity_bytes,
            exceeds_memory,
            memory_case,
        }
    }
}
