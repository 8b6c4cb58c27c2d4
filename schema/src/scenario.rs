//! Scenario: devices, links, a model, a context, a workload and a seed, in a `scenario/1` document.
//!
//! Not here: the profiles of devices and models (`hearth_profiles`), and a scenario with all references replaced by
//! profiles (`hearth_core::cluster`).

use std::collections::{BTreeMap, BTreeSet};

use hearth_profiles::device::{MAX_MEMORY_BYTES, Quota, SocOptions};
use hearth_profiles::document::{Document, DocumentError, RenamedKey};
use hearth_profiles::link::impairments::Impairments;
use hearth_profiles::link::wifi::Wifi;
use hearth_profiles::parts::DeviceParts;
use hearth_profiles::{Bytes, BytesPerSecond, Format, Fraction, Link, Seconds, Sourced};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::address::split_host_port;
use crate::events::{self, Event};
use crate::pass::is_default;
use crate::residency::ResidencyOptions;

pub use crate::model::{ActivationFormat, KvFormat, ModelRef, check_kv_sharing};
pub use crate::workload::{Speculation, Workload};

/// A scenario document.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "a scenario document, which begins with `schema: scenario/1`")]
pub struct Scenario {
    /// The type and version of the document: `scenario/1`.
    pub schema: String,
    /// Short name of the scenario.
    pub name: String,
    /// The random seed of a run; 1 if absent.
    #[serde(default = "default_seed")]
    pub seed: u64,
    pub model: ModelRef,
    /// Capacity of the KV cache of each sequence, in tokens.
    #[serde(rename = "context")]
    pub context_length: u32,
    #[serde(rename = "kv_cache", default)]
    pub kv_cache_format: KvFormat,
    #[serde(rename = "activations", default, skip_serializing_if = "is_default")]
    pub activation_format: ActivationFormat,
    pub workload: Workload,
    /// The devices. The first device is the head unless another device has `head: true`.
    pub devices: Vec<DeviceEntry>,
    /// The links between the devices; required if there are several devices.
    #[serde(default = "Links::unused", skip_serializing_if = "Links::is_unused")]
    pub links: Links,
    /// Planner options. Command-line flags override them.
    #[serde(default)]
    pub planner: PlannerOptions,
    /// The residency of all devices that have no key `residency`. If this key is absent too, the planner chooses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub residency: Option<ResidencyOptions>,
    /// Events during the run. Planners do not use them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub events: Vec<Event>,
}

fn default_seed() -> u64 {
    1
}

/// A device in a scenario.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "a device, such as `{name: desktop, profile: d3}`")]
pub struct DeviceEntry {
    /// The name of the device, unique in the scenario.
    pub name: String,
    /// The name of a shipped device, such as `d3`, the path of a `device/1` document, or `measured` for a measurement
    /// of this machine within `limits`. Empty if the device has `parts`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub profile: String,
    /// The parts of the device in the catalogue, instead of a profile.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parts: Option<DeviceParts>,
    /// Values that replace those of the profile or the parts, by their keys, such as `memory.available: 9 GiB`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub values: BTreeMap<String, Scalar>,
    /// The address (`HOST:PORT`) of the device's worker.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// Whether the device is the head, which computes embedding and output and samples tokens.
    #[serde(rename = "head", default, skip_serializing_if = "std::ops::Not::not")]
    pub is_head: bool,
    /// The residency of this device; the scenario's key `residency` if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub residency: Option<ResidencyOptions>,
    /// Options for the GPU and NPU of a SoC; the options in the device's profile if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub soc: Option<SocOptions>,
    /// The resource limits of the device in `hearth lab`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<ResourceLimits>,
}

/// Number of parts of a key of a device profile, such as two of `memory.available`. source: assumed, above all keys
const MAX_KEY_PARTS: usize = 8;

/// A value of a device profile: a number, or text such as `9 GiB`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "a number, or text such as `9 GiB`")]
pub enum Scalar {
    Bool(bool),
    Number(serde_json::Number),
    Text(String),
}

impl DeviceEntry {
    /// Returns the name or the parts of the device's profile, as text.
    pub fn profile_label(&self) -> String {
        match &self.parts {
            Some(parts) => parts.to_string(),
            None => self.profile.clone(),
        }
    }

    fn validate(&self) -> Result<(), DocumentError> {
        if self.profile.is_empty() == self.parts.is_none() {
            let what = if self.parts.is_none() {
                "neither `profile` nor `parts`"
            } else {
                "both `profile` and `parts`"
            };
            return Err(DocumentError::invalid_document(format!(
                "device `{}` has {what}; write `profile: d3` for a device document, or `parts: {{cpu: ddr4-3200-dual, \
                 memory: 16 GiB, disk: nvme-gen3, os: linux}}` for parts that `hearth device search` lists",
                self.name
            )));
        }
        if let Some(key) = self.values.keys().find(|key| key.split('.').count() > MAX_KEY_PARTS) {
            let key: String = key.chars().take(40).collect();
            return Err(DocumentError::invalid_document(format!(
                "device `{}`: `{key}..` is not a value of a device; write for example `memory.available: 9 GiB`",
                self.name
            )));
        }
        let is_invalid = |address: &&String| split_host_port(address).is_none_or(|(_, port)| port == 0);
        if let Some(address) = self.address.as_ref().filter(is_invalid) {
            return Err(DocumentError::invalid_document(format!(
                "device `{}`: `{address}` is not the address of a worker; write `address: HOST:PORT`, such as 192.168.1.7:9001",
                self.name
            )));
        }
        self.limits.as_ref().map_or(Ok(()), |limits| limits.validate(&self.name))
    }
}

/// Resource limits of a device in `hearth lab`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "limits, such as `{memory: 2 GiB, threads: 2}`")]
pub struct ResourceLimits {
    /// Memory limit for weights, as a share of the weights that the plan assigns to the device. The other memory of the
    /// process is added to the limit. Planners ignore this limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_share: Option<Fraction>,
    /// Absolute memory limit. Planners consider this limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<Bytes>,
    /// Maximum rate of disk reads.
    #[serde(rename = "disk_read", default, skip_serializing_if = "Option::is_none")]
    pub disk_read_rate: Option<BytesPerSecond>,
    /// The number of computing threads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub threads: Option<u32>,
    /// Maximum CPU time of all threads together, as a number of CPU cores: `0.5` is half of the time of one core.
    #[serde(rename = "cpu", default, skip_serializing_if = "Option::is_none")]
    pub cpu_cores: Option<f64>,
    /// The numbers of the CPUs of this machine on which the device may run (CPU affinity).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub affinity: Option<Vec<u32>>,
}

/// Maximum number of CPUs of a machine.
/// source: the largest `CONFIG_NR_CPUS`, arch/x86/Kconfig
const MAX_CPUS: u32 = 8192;

impl ResourceLimits {
    fn validate(&self, device: &str) -> Result<(), DocumentError> {
        let reject =
            |what: String| Err(DocumentError::invalid_document(format!("device `{device}`: {what}")));
        if self.memory.is_some() && self.memory_share.is_some() {
            return reject("give `limits.memory` or `limits.memory_share`, not both".into());
        }
        let nothing = [
            ("memory", self.memory == Some(Bytes::ZERO)),
            ("memory_share", self.memory_share.is_some_and(|share| share.0 <= 0.0)),
            ("disk_read", self.disk_read_rate.is_some_and(|rate| rate.0 <= 0.0)),
            ("threads", self.threads == Some(0)),
        ];
        if let Some((key, _)) = nothing.into_iter().find(|(_, nothing)| *nothing) {
            return reject(format!("`limits.{key}` is 0, so no run would finish: raise it, or remove it"));
        }
        if let Some(memory) = self.memory.filter(|memory| *memory > MAX_MEMORY_BYTES) {
            return reject(format!(
                "`limits.memory` is {memory}, more than {MAX_MEMORY_BYTES}: check its unit"
            ));
        }
        if let Some(cpu) = self.cpu_cores.filter(|&cpu| !Quota::is_valid_core_count(cpu)) {
            return reject(format!(
                "`limits.cpu` is {cpu}: give a number of CPU cores from 0.01 to 1024, such as `0.5`"
            ));
        }
        let Some(affinity) = &self.affinity else { return Ok(()) };
        let distinct: BTreeSet<u32> = affinity.iter().copied().collect();
        if distinct.is_empty() {
            return reject("`limits.affinity` is empty: name CPUs, such as `[0, 1]`, or remove it".into());
        }
        if distinct.len() < affinity.len() {
            return reject("`limits.affinity` names a CPU twice: name each CPU once".into());
        }
        let Some(last) = distinct.last().filter(|&&last| last >= MAX_CPUS) else { return Ok(()) };
        let highest = MAX_CPUS - 1;
        reject(format!("`limits.affinity` names CPU {last}, but the highest number is {highest}"))
    }
}

/// The links of a cluster.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    deny_unknown_fields,
    expecting = "links, such as `default: {latency: {value: 5 ms, source: \"measured\"}, bandwidth: {value: 400 Mbit/s, source: \"measured\"}}`"
)]
pub struct Links {
    /// The link between any two devices without an entry in `between`.
    #[serde(rename = "default")]
    pub default_link: Link,
    /// Links between two named devices, in both directions.
    #[serde(rename = "between", default, skip_serializing_if = "Vec::is_empty")]
    pub pair_links: Vec<PairLink>,
    /// Wi-Fi channels and their stations. Stations use Wi-Fi to reach all devices to which they have no link in
    /// `between`. Other devices are wired to the access point with the default link.
    #[serde(default, alias = "air", skip_serializing_if = "Option::is_none")]
    pub wifi: Option<Wifi>,
    /// How `hearth lab` emulates these links.
    #[serde(default, skip_serializing_if = "LinkEmulation::is_none")]
    pub emulation: LinkEmulation,
    /// Impairments of the packets on links that are emulated between network namespaces.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub impairments: Option<Impairments>,
    /// Whether hosts in network namespaces have addresses of IPv6 instead of IPv4.
    #[serde(rename = "ipv6", default, skip_serializing_if = "std::ops::Not::not")]
    pub is_ipv6: bool,
}

/// How the lab emulates the links of a scenario.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum LinkEmulation {
    /// Not at all: all links are the loopback interface of this machine.
    #[default]
    None,
    /// Each device delays the messages that it sends.
    Delays,
    /// Each device is a host in a network namespace, and the lab carries the packets between them. Needs root.
    Namespaces,
}

impl LinkEmulation {
    pub fn is_none(&self) -> bool {
        *self == LinkEmulation::None
    }
}

impl Links {
    /// Creates the links of a cluster in which any two devices have the link `default`, without Wi-Fi.
    pub fn uniform(default: Link) -> Self {
        Self {
            default_link: default,
            pair_links: Vec::new(),
            wifi: None,
            emulation: LinkEmulation::None,
            impairments: None,
            is_ipv6: false,
        }
    }

    /// Returns the links of a scenario that has none, because it has a single device.
    fn unused() -> Self {
        let source = "assumed: a single device needs no link";
        Self::uniform(Link::constant(
            Sourced::new(Seconds(0.0), source),
            Sourced::new(BytesPerSecond(1e9), source),
        ))
    }

    fn is_unused(&self) -> bool {
        *self == Self::unused()
    }

    fn validate(&self, devices: &BTreeSet<&str>) -> Result<(), DocumentError> {
        if devices.len() > 1 && self.is_unused() {
            let example = "links: {default: {latency: {value: 5 ms, source: assumed}, bandwidth: {value: 400 Mbit/s, source: assumed}}}";
            let what = format!("several devices need the key `links`, such as `{example}`");
            return Err(DocumentError::invalid_document(what));
        }
        validate_link("links.default", &self.default_link)?;
        for named in &self.pair_links {
            if let Some(name) = named.devices.iter().find(|name| !devices.contains(name.as_str())) {
                let what = format!("links.between names `{name}`, which is not a device of this scenario");
                return Err(DocumentError::invalid_document(what));
            }
            named.validate()?;
        }
        if let Some(impairments) = &self.impairments {
            let invalid = |what| {
                DocumentError::invalid_value("links.impairments", format!("links.impairments: {what}"))
            };
            impairments.validate().map_err(invalid)?;
        }
        let has_packets = self.impairments.is_some() || self.is_ipv6;
        if has_packets && self.emulation != LinkEmulation::Namespaces {
            let what = "`links.impairments` and `links.ipv6` are only for `links.emulation: namespaces`";
            return Err(DocumentError::invalid_document(what));
        }
        self.wifi.as_ref().map_or(Ok(()), |wifi| wifi.validate(devices, &self.default_link))
    }
}

/// Minimum bandwidth of a link. With a lower bandwidth, the duration of a run in nanoseconds could overflow.
/// source: assumed
const MIN_BANDWIDTH: BytesPerSecond = BytesPerSecond(125.0);

/// Maximum latency of a link. With a higher latency, the duration of a run in nanoseconds could overflow.
/// source: assumed
const MAX_LATENCY: Seconds = Seconds(3600.0);

/// Checks that a link is not so slow that times could overflow. `place` is the key of the link in the document.
fn validate_link(place: &str, link: &Link) -> Result<(), DocumentError> {
    let (latency, bandwidth) = (link.latency.value, link.bandwidth.value);
    if bandwidth < MIN_BANDWIDTH {
        let what = format!(
            "{place}: `bandwidth` is {bandwidth}, but must be at least 1 kbit/s; mark devices that cannot communicate as \
             `unreachable` in `links.between`"
        );
        return Err(DocumentError::invalid_value(place, what));
    }
    if latency > MAX_LATENCY {
        let what = format!("{place}: `latency` is {latency}, but must be at most an hour");
        return Err(DocumentError::invalid_value(place, what));
    }
    link.validate().map_err(|what| DocumentError::invalid_value(place, format!("{place}: {what}")))
}

/// The link between two named devices. If a pair has several entries, the first one applies.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[serde(expecting = "a pair and its link, such as `{devices: [one, other], unreachable: both}`")]
pub struct PairLink {
    /// The names of the two devices.
    pub devices: [String; 2],
    /// Latency and bandwidth in every direction that is not `unreachable`; the default link if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link: Option<Link>,
    /// The directions in which the devices cannot send; none if absent.
    #[serde(rename = "unreachable", default, skip_serializing_if = "Option::is_none")]
    pub unreachable_directions: Option<UnreachableDirections>,
}

/// The directions in which a pair of devices cannot send.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum UnreachableDirections {
    /// Neither device can send to the other.
    Both,
    /// The first device cannot connect to the second, for example because of NAT; the second can connect to the first.
    Forward,
}

impl PairLink {
    fn validate(&self) -> Result<(), DocumentError> {
        let [first, second] = &self.devices;
        let place = format!("links.between [{first}, {second}]");
        let reject = |what: &str| Err(DocumentError::invalid_document(format!("{place}{what}")));
        if first == second {
            return reject(" names one device twice");
        }
        if let Some(link) = &self.link {
            validate_link(&place, link)?;
        }
        match (&self.link, self.unreachable_directions) {
            (None, None) => reject(" has no effect: give `link` or `unreachable`"),
            (Some(_), Some(UnreachableDirections::Both)) => {
                reject(": give `link` or `unreachable: both`, not both")
            }
            _ => Ok(()),
        }
    }
}

/// Options of the planner.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "planner options, such as `{strategy: exact, rounds: 2}`")]
pub struct PlannerOptions {
    /// The name of the planning strategy; the default of the command line if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub strategy: Option<String>,
    /// The number of rounds around the ring, for strategies that have this option.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rounds: Option<u32>,
    /// The number of layers in the window of each device, in ring order, for the strategy `manual`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub windows: Option<Vec<u32>>,
    /// The number of GPU layers in the window of each device, in ring order, for the strategy `manual`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_layers: Option<Vec<u32>>,
    /// Whether every device must have at least one layer.
    #[serde(rename = "keep_all", default, skip_serializing_if = "std::ops::Not::not")]
    pub keep_all_devices: bool,
    /// The order of the devices in the ring; the order of the scenario if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub order: Option<RingOrder>,
    /// Whether the strategies `overlap` and `exact` choose the head, instead of using the head of the scenario.
    #[serde(rename = "best_head", default, skip_serializing_if = "std::ops::Not::not")]
    pub choose_best_head: bool,
    /// How the strategy `overlap` treats the uncertainty of the available memory; as `average` if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub risk: Option<MemoryRisk>,
    /// Disk bandwidth below which a device must have all its weights in memory; 0.1 GB/s if absent, as in prima.cpp.
    #[serde(rename = "slow_disk", default, skip_serializing_if = "Option::is_none")]
    pub slow_disk_threshold: Option<BytesPerSecond>,
    /// The format to which the strategies `tpi-llm`, `hepti`, `galaxy` and `airinfer` convert weights; the format of
    /// the original system if absent.
    #[serde(rename = "weights_as", default, skip_serializing_if = "Option::is_none")]
    pub weight_format: Option<Format>,
    /// The time of one all-reduce, for the strategy `airinfer`.
    #[serde(rename = "air_time", default, skip_serializing_if = "Option::is_none")]
    pub all_reduce_time: Option<Seconds>,
}

/// The order of the devices in the ring.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum RingOrder {
    /// The order of the scenario.
    #[default]
    Given,
    /// The best order that the planner finds; the order of the scenario if the strategy cannot change the order.
    Best,
}

/// How a planner treats the uncertainty of the available memory, which follows from its source.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum MemoryRisk {
    /// A plan counts with its mean time over the memory that the devices may have.
    #[default]
    Average,
    /// A plan counts with its time in the memory that the devices are described with.
    Ignore,
}

impl Scenario {
    /// Returns the index of the head in `devices`.
    pub fn head_index(&self) -> usize {
        self.devices.iter().position(|device| device.is_head).unwrap_or(0)
    }
}

impl Document for Scenario {
    const SCHEMA: &'static str = "scenario/1";
    const RENAMED_KEYS: &'static [RenamedKey] = &[RenamedKey { old_key: "links.air", new_key: "links.wifi" }];

    fn validate(&self) -> Result<(), DocumentError> {
        let reject = |what: String| Err(DocumentError::invalid_document(what));
        if self.devices.is_empty() {
            return reject("`devices` is empty: add at least one device".into());
        }
        let mut names = BTreeSet::new();
        for device in &self.devices {
            if device.name.is_empty() {
                return reject("a device has an empty `name`: give it a name".into());
            }
            if !names.insert(device.name.as_str()) {
                return reject(format!("two devices have the name `{}`: rename one of them", device.name));
            }
            device.validate()?;
        }
        if let Some(residency) = &self.residency {
            residency.validate_in_scenario("`residency`")?;
        }
        for device in &self.devices {
            if let Some(residency) = &device.residency {
                residency.validate_in_scenario(&format!("device `{}`: `residency`", device.name))?;
            }
        }
        if self.devices.iter().filter(|device| device.is_head).count() > 1 {
            return reject("more than one device has `head: true`: keep it for one device".into());
        }
        self.links.validate(&names)?;
        events::validate(&self.events, &names)?;
        self.model.validate("model")?;
        self.workload.validate(self.context_length)?;
        if self.workload.speculation.is_some() && self.planner.choose_best_head {
            return reject(
                "`planner.best_head` cannot be combined with `workload.speculation`, because the head stores the draft \
                 model: set `head: true` for a device"
                    .into(),
            );
        }
        Ok(())
    }
}
