//! The constraints on an assignment, and the check for violations.
//!
//! These are Eq. 22-36 of the prima.cpp paper, with its symbols (see GLOSSARY.md). Eq. 27-29 (a device in M1-M3
//! *must* exceed its memory) are not checked: here the memory case follows from the assignment.
//!
//! | constraint | paper |
//! | --- | --- |
//! | shape: one window per device, n <= w, 1 <= W <= L, k = ceil(L/W), the head has layers | 22-24 |
//! | every device has layers (unless devices may be dropped) | 22 |
//! | no partial last round (unless allowed) | 23, Assumption 1 |
//! | weights are not read from a slow disk for every token | Case 4, 30-32 |
//! | each device has a link to the next one; there are no relays if the last round is partial | 3.3 |
//! | GPU layers fit in GPU memory (CUDA) or in the working set (Metal); none without a GPU | 34-36 |

use crate::{Assignment, GpuApi, LatencyModel, LayerCounts};

/// The optional rules of a plan: whether it may leave out devices, and whether its last round may be partial.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PlanRules {
    /// Whether devices other than the head may be dropped, that is, have no layers.
    pub may_drop_devices: bool,
    /// Whether the last round may be partial, that is, have fewer layers than the other rounds.
    pub may_have_partial_round: bool,
}

impl PlanRules {
    /// Returns each rule that is true as `name=true`.
    pub fn to_option_strings(self) -> Vec<String> {
        let rules = [("drop", self.may_drop_devices), ("remainder", self.may_have_partial_round)];
        rules.iter().filter(|(_, is_set)| *is_set).map(|(name, _)| format!("{name}=true")).collect()
    }
}

#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Violation {
    #[error(
        "the plan has {windows} windows and {gpu_entries} numbers of GPU layers, but the ring has {devices} \
         devices"
    )]
    DeviceCountMismatch { devices: usize, windows: usize, gpu_entries: usize },
    #[error("the head is device {head}, but there are {devices} devices, counted from 0")]
    NoSuchHead { head: usize, devices: usize },
    #[error("the head `{device}` has no layers")]
    HeadWithoutLayers { device: String },
    #[error("`{device}` has no layers, but devices must not be dropped")]
    EmptyWindow { device: String },
    #[error("a round covers {layers_per_round} layers, but the model has only {model_layers}")]
    RingExceedsModel { layers_per_round: u64, model_layers: u32 },
    #[error(
        "{rounds} rounds of {layers_per_round} layers do not match the {model_layers} layers of the model, which take \
         {expected} rounds"
    )]
    RoundsDoNotCoverModel { rounds: u32, layers_per_round: u64, model_layers: u32, expected: u32 },
    #[error(
        "the last of {rounds} rounds is partial: with {layers_per_round} layers per round, only {remainder} of the \
         {model_layers} layers remain for it, but all rounds must be whole"
    )]
    PartialLastRound { remainder: u32, rounds: u32, layers_per_round: u64, model_layers: u32 },
    #[error("`{device}` has {gpu_layers} GPU layers in a window of {window_layers} layers")]
    GpuLayersExceedWindow { device: String, gpu_layers: u32, window_layers: u32 },
    #[error("`{device}` has {gpu_layers} GPU layers, but no GPU")]
    NoGpu { device: String, gpu_layers: u32 },
    #[error("the order of the ring is invalid: {problem}")]
    InvalidRingOrder { problem: String },
    #[error("`{from}` has no link to `{to}`, the next device in the ring")]
    MissingLink { from: String, to: String },
    #[error(
        "`{device}` has no layers and only relays messages: all {rounds} rounds must have the same number of layers"
    )]
    RelayInPartialRound { device: String, rounds: u32 },
    #[error("`{device}` has {gpu_layers} GPU layers, but only {max_layers} fit in {memory}")]
    GpuLayersExceedMemory { device: String, gpu_layers: u32, max_layers: i64, memory: &'static str },
    #[error(
        "the {gpu_layers} GPU layers of `{device}` take {needed_bytes} bytes, but its GPU has {available_bytes} bytes \
         for them"
    )]
    GpuBytesExceedMemory { device: String, gpu_layers: u32, needed_bytes: i64, available_bytes: i64 },
    #[error(
        "`{device}` needs {needed_bytes:.0} bytes of memory but has {capacity}, and its disk ({read_rate:.0} B/s) is \
         slower than the threshold ({min_rate:.0} B/s) for reading weights for every token"
    )]
    SlowDiskOverloaded { device: String, needed_bytes: f64, capacity: u64, read_rate: f64, min_rate: f64 },
    #[error(
        "`{device}` has {capacity} bytes of memory, of which buffers and cache take {unreclaimable_bytes:.0}: too \
         little remains to stream weights"
    )]
    OutOfMemory { device: String, unreclaimable_bytes: f64, capacity: u64 },
}

impl Violation {
    /// Returns the hint to the user: what to change in the plan or the scenario.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::NoGpu { .. } => "give the device no GPU layers, or complete `gpu` in its profile",
            Self::GpuLayersExceedMemory { .. } | Self::GpuBytesExceedMemory { .. } => {
                "give its GPU fewer layers, or reduce `context`, because GPU memory also holds the cache"
            }
            Self::SlowDiskOverloaded { .. } => {
                "give the device fewer layers, or lower `planner.slow_disk` if its disk may be read for every token"
            }
            Self::OutOfMemory { .. } => "reduce `context`, or give the device fewer layers or none",
            Self::MissingLink { .. } => "use `--order best`, or add the link to `links.between`",
            Self::PartialLastRound { .. } | Self::RelayInPartialRound { .. } => {
                "use a number of rounds that divides the layers, or let the planner choose it"
            }
            Self::EmptyWindow { .. } => "remove `planner.keep_all`, or give every device a layer",
            Self::HeadWithoutLayers { .. } => "give the head a layer, or set `head: true` on another device",
            Self::RingExceedsModel { .. } | Self::RoundsDoNotCoverModel { .. } => {
                "choose windows whose sum times the rounds is the number of layers"
            }
            _ => "check the given windows, GPU layers and rounds",
        }
    }
}

/// Returns all violations of an assignment; the memory constraints are those of the prima.cpp paper.
pub fn violations(model: &LatencyModel, assignment: &Assignment, rules: PlanRules) -> Vec<Violation> {
    let mut found = ring_violations(model, assignment, rules);
    if shape_violations(model, assignment).is_empty() {
        for check in [gpu_violation, slow_disk_violation] {
            let shares = assignment.layer_counts(model.model_layers()).into_iter().enumerate();
            let check = |(device, share)| check(model, device, device == assignment.head, share);
            found.extend(shares.filter_map(check));
        }
    }
    found
}

/// Returns the violations of an assignment except those of memory constraints: its shape, the rules and the links.
pub fn ring_violations(model: &LatencyModel, assignment: &Assignment, rules: PlanRules) -> Vec<Violation> {
    let mut found = shape_violations(model, assignment);
    if !found.is_empty() {
        // The other checks need a valid shape.
        return found;
    }
    let (model_layers, layers_per_round) = (model.model_layers(), assignment.layers_per_round());
    let (rounds, remainder) = (assignment.rounds, (u64::from(model_layers) % layers_per_round) as u32);
    if remainder > 0 && !rules.may_have_partial_round {
        found.push(Violation::PartialLastRound { remainder, rounds, layers_per_round, model_layers });
    }
    if remainder > 0 {
        let relays = assignment.ring().into_iter().filter(|device| assignment.is_relay(*device));
        let violation = |device| Violation::RelayInPartialRound { device: model.device_name(device), rounds };
        found.extend(relays.map(violation));
    }
    if !rules.may_drop_devices {
        let empty = assignment.window_layers.iter().enumerate().filter(|(_, window)| **window == 0);
        found.extend(empty.map(|(device, _)| Violation::EmptyWindow { device: model.device_name(device) }));
    }
    found
}

/// Returns the violations due to which an assignment has no time per token: missing links, and windows, rounds, a head
/// or a ring order that are invalid.
pub fn shape_violations(model: &LatencyModel, assignment: &Assignment) -> Vec<Violation> {
    let &Assignment { head, rounds, ref window_layers, ref gpu_layers, .. } = assignment;
    let devices = model.device_count();
    if window_layers.len() != devices || gpu_layers.len() != devices {
        let (windows, gpu_entries) = (window_layers.len(), gpu_layers.len());
        return vec![Violation::DeviceCountMismatch { devices, windows, gpu_entries }];
    }
    if head >= devices {
        return vec![Violation::NoSuchHead { head, devices }];
    }
    let mut found = Vec::new();
    if window_layers[head] == 0 {
        found.push(Violation::HeadWithoutLayers { device: model.device_name(head) });
    }
    let (model_layers, layers_per_round) = (model.model_layers(), assignment.layers_per_round());
    if layers_per_round > u64::from(model_layers) {
        found.push(Violation::RingExceedsModel { layers_per_round, model_layers });
    } else if layers_per_round > 0 {
        let expected = u64::from(model_layers).div_ceil(layers_per_round) as u32;
        if rounds != expected {
            found.push(Violation::RoundsDoNotCoverModel { rounds, layers_per_round, model_layers, expected });
        }
    }
    for device in 0..devices {
        let (window_layers, gpu_layers) = (window_layers[device], gpu_layers[device]);
        if gpu_layers > window_layers {
            let device = model.device_name(device);
            found.push(Violation::GpuLayersExceedWindow { device, gpu_layers, window_layers });
        }
    }
    found.extend(order_violation(model, assignment));
    if found.is_empty() {
        found.extend(link_violation(model, assignment));
    }
    found
}

/// Checks that the ring order starts with the head, contains every device with layers, and contains no device twice.
fn order_violation(model: &LatencyModel, assignment: &Assignment) -> Option<Violation> {
    let order = assignment.ring_order.as_ref()?;
    let violation = |problem| Some(Violation::InvalidRingOrder { problem });
    let name = |device: usize| &model.instance().devices[device].name;
    let devices = model.device_count();
    for (position, &device) in order.iter().enumerate() {
        if device >= devices {
            return violation(format!(
                "it names device {device}, but there are {devices} devices, counted from 0"
            ));
        }
        if order[..position].contains(&device) {
            return violation(format!("it names `{}` twice", name(device)));
        }
    }
    if order.first() != Some(&assignment.head) {
        return violation(format!("it does not begin with the head `{}`", name(assignment.head)));
    }
    let is_missing = |device: &usize| assignment.window_layers[*device] > 0 && !order.contains(device);
    let missing = (0..devices).find(is_missing)?;
    violation(format!("it lacks `{}`, which has layers", name(missing)))
}

/// Returns the violation for the first missing link of the ring, in whole rounds or in the partial last round.
fn link_violation(model: &LatencyModel, assignment: &Assignment) -> Option<Violation> {
    let shares = assignment.layer_counts(model.model_layers());
    let seconds = model.communication_seconds(assignment, &shares);
    let ring = assignment.ring();
    let position = ring.iter().position(|device| seconds[*device] == f64::INFINITY)?;
    let from = ring[position];
    let next = ring[(position + 1) % ring.len()];
    // If the link to the next device exists, the link back to the head is missing, in the partial last round.
    let to = if model.hop_times.seconds(from, next) == f64::INFINITY { next } else { assignment.head };
    Some(Violation::MissingLink { from: model.device_name(from), to: model.device_name(to) })
}

/// Checks whether the GPU layers of a device fit in memory, Eq. 34-36 of the prima.cpp paper.
fn gpu_violation(model: &LatencyModel, device: usize, head: bool, share: LayerCounts) -> Option<Violation> {
    let gpu_layers = share.gpu_layers;
    let max_layers = model.device_costs[device].gpu_layers_that_fit(head, &model.sizes, share.windows);
    if i64::from(gpu_layers) <= max_layers {
        return None;
    }
    let (gpu, device) = (model.instance().devices[device].gpu, model.device_name(device));
    let memory = match gpu {
        GpuApi::None => return Some(Violation::NoGpu { device, gpu_layers }),
        GpuApi::Cuda => "its GPU memory",
        GpuApi::Metal => "Metal's working set",
    };
    Some(Violation::GpuLayersExceedMemory { device, gpu_layers, max_layers, memory })
}

/// Checks that a slow disk is not read for every token, Case 4 of the prima.cpp paper.
fn slow_disk_violation(
    model: &LatencyModel,
    device: usize,
    head: bool,
    share: LayerCounts,
) -> Option<Violation> {
    let (terms, costs) = (model.device_latency_terms(device, head, share), &model.device_costs[device]);
    (terms.exceeds_memory && costs.has_slow_disk).then(|| Violation::SlowDiskOverloaded {
        device: model.device_name(device),
        needed_bytes: terms.required_memory_bytes,
        capacity: terms.memory_capacity_bytes,
        read_rate: costs.disk_read_rate,
        min_rate: model.instance().slow_disk_threshold,
    })
}
