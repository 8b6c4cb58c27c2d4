//! Scenario: devices, links, a model, a context, a workload and a seed, in a `scenario/1` document.
//!
//! Not here: what a device or a model is (`hearth_profiles`), and the numbers that a reference to one stands for
//! (`hearth_core::cluster`).

use std::collections::BTreeSet;

use hearth_profiles::device::{MAX_BYTES, Quota, SocOptions};
use hearth_profiles::document::{Document, DocumentError, RenamedKey};
use hearth_profiles::link::wifi::Wifi;
use hearth_profiles::{Bytes, BytesPerSecond, Format, Fraction, Link, Seconds};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::address::host_and_port;
use crate::events;
use crate::events::Event;
use crate::residency::ResidencyOptions;

pub use crate::model::{ActivationFormat, KvFormat, ModelRef};
pub use crate::workload::{Speculation, Workload};

/// A scenario document.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "a scenario document, which begins with `schema: scenario/1`")]
pub struct Scenario {
    /// `scenario/1`.
    pub schema: String,
    /// Short name.
    pub name: String,
    /// The seed of every random draw; 1 if absent.
    #[serde(default = "default_seed")]
    pub seed: u64,
    pub model: ModelRef,
    /// Tokens the key-value cache is made for.
    pub context: u32,
    /// How keys and values are stored.
    #[serde(default)]
    pub kv_cache: KvFormat,
    /// How activations travel from device to device.
    #[serde(default, skip_serializing_if = "ActivationFormat::is_default")]
    pub activations: ActivationFormat,
    pub workload: Workload,
    /// The devices; the first is the head unless another says `head: true`.
    pub devices: Vec<DeviceEntry>,
    /// The links.
    pub links: Links,
    /// How it is planned, unless the command line says otherwise.
    #[serde(default)]
    pub planner: PlannerOptions,
    /// How each device keeps its weights, unless it says otherwise. If neither does, the planner chooses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub residency: Option<ResidencyOptions>,
    /// What happens while the ring runs. Planners do not know it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub events: Vec<Event>,
}

/// The seed of a scenario without one.
fn default_seed() -> u64 {
    1
}

/// A device in a scenario.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "a device, such as `{name: desktop, profile: d3}`")]
pub struct DeviceEntry {
    /// Its name, unique here.
    pub name: String,
    /// A shipped device, as `d3`, the path of a `device/1` document, or `measured`: this machine,
    /// measured inside the limits below.
    pub profile: String,
    /// The address of its worker.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// Whether it is the head: embeds, outputs and samples.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub head: bool,
    /// How it keeps its weights, if not as the scenario's other devices do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub residency: Option<ResidencyOptions>,
    /// How its GPU and NPU are used, if its profile has a SoC and not as that says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub soc: Option<SocOptions>,
    /// The limits of the device in the lab.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<Limits>,
}

impl DeviceEntry {
    fn validate(&self) -> Result<(), DocumentError> {
        let nowhere = |address: &&String| host_and_port(address).is_none_or(|(_, port)| port == 0);
        if let Some(address) = self.address.as_ref().filter(nowhere) {
            let what = format!(
                "device `{}`: `{address}` is no address to listen at; write `address: HOST:PORT`, as 192.168.1.7:9001",
                self.name
            );
            return Err(DocumentError::invalid(what));
        }
        self.limits.as_ref().map_or(Ok(()), |limits| limits.validate(&self.name))
    }
}

/// The limits of a device in the lab: the share of this machine that it may use.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "limits, such as `{memory: 2 GiB, threads: 2}`")]
pub struct Limits {
    /// Memory for this share of the weights that the plan gives it, and for all else that its process holds.
    /// Planners cannot know it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_share: Option<Fraction>,
    /// Memory outright. Planners know it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<Bytes>,
    /// Disk reads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_read: Option<BytesPerSecond>,
    /// Threads it computes with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub threads: Option<u32>,
    /// Processor time of all its threads together, in processors: `0.5` is half of one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<f64>,
    /// The processors of this machine that it may run on, by number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub affinity: Option<Vec<u32>>,
}

/// More processors than a machine has. source: the largest `CONFIG_NR_CPUS`, arch/x86/Kconfig
const MAX_PROCESSORS: u32 = 8192;

impl Limits {
    fn validate(&self, device: &str) -> Result<(), DocumentError> {
        let refuse = |what: String| Err(DocumentError::invalid(format!("device `{device}`: {what}")));
        if self.memory.is_some() && self.memory_share.is_some() {
            return refuse("give `memory` or `memory_share`, not both".into());
        }
        let nothing = [
            ("memory", self.memory == Some(Bytes::ZERO)),
            ("memory_share", self.memory_share.is_some_and(|share| share.0 <= 0.0)),
            ("disk_read", self.disk_read.is_some_and(|rate| rate.0 <= 0.0)),
            ("threads", self.threads == Some(0)),
        ];
        if let Some((key, _)) = nothing.into_iter().find(|(_, nothing)| *nothing) {
            return refuse(format!("`limits.{key}` is 0: no run would finish; give more, or leave it out"));
        }
        if let Some(memory) = self.memory.filter(|memory| *memory > MAX_BYTES) {
            return refuse(format!("`limits.memory` is {memory}, more than {MAX_BYTES}: check its unit"));
        }
        if let Some(cpu) = self.cpu.filter(|&cpu| !Quota::takes(cpu)) {
            return refuse(format!("`limits.cpu` is {cpu}: give processors, as `0.5`, from 0.01 to 1024"));
        }
        let Some(affinity) = &self.affinity else { return Ok(()) };
        let distinct: BTreeSet<u32> = affinity.iter().copied().collect();
        if distinct.is_empty() || distinct.len() < affinity.len() {
            return refuse("`limits.affinity` is empty or names a processor twice: write `[0, 1]`".into());
        }
        match distinct.last() {
            Some(&last) if last >= MAX_PROCESSORS => refuse(format!(
                "`limits.affinity` names processor {last}; the last can be {}",
                MAX_PROCESSORS - 1
            )),
            _ => Ok(()),
        }
    }
}

/// The links of a cluster.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    deny_unknown_fields,
    expecting = "links, such as `default: {latency: {value: 5 ms, source: \"measured\"}, bandwidth: {value: 400 Mbit/s, source: \"measured\"}}`"
)]
pub struct Links {
    /// The link between any two devices not named below.
    pub default: Link,
    /// Links between two named devices, in both directions.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub between: Vec<NamedLink>,
    /// The Wi-Fi. Devices on a channel use it, unless `between` has a link for them; others are wired with the
    /// default's numbers.
    #[serde(default, alias = "air", skip_serializing_if = "Option::is_none")]
    pub wifi: Option<Wifi>,
    /// Whether the lab makes its connections so slow; else it takes this machine's loopback for all links.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub emulated: bool,
}

impl Links {
    /// The same constant link between any two devices.
    pub fn constant(default: Link) -> Self {
        Self { default, between: Vec::new(), wifi: None, emulated: false }
    }

    fn validate(&self, devices: &BTreeSet<&str>) -> Result<(), DocumentError> {
        validate_link("links.default", &self.default)?;
        for named in &self.between {
            for name in &named.devices {
                if !devices.contains(name.as_str()) {
                    let what = format!("links.between names `{name}`, which is not a device here");
                    return Err(DocumentError::invalid(what));
                }
            }
            named.validate()?;
        }
        self.wifi.as_ref().map_or(Ok(()), |wifi| wifi.validate(devices, &self.default))
    }
}

/// The slowest link and the longest latency. source: assumed; beyond them a run would last longer than a clock of
/// nanoseconds counts
const MIN_BANDWIDTH: BytesPerSecond = BytesPerSecond(125.0);
const MAX_LATENCY: Seconds = Seconds(3600.0);

/// Checks that messages arrive over a link in bounded time.
fn validate_link(place: &str, link: &Link) -> Result<(), DocumentError> {
    let (latency, bandwidth) = (link.latency.value, link.bandwidth.value);
    if bandwidth < MIN_BANDWIDTH {
        let what = format!(
            "{place}: `bandwidth` is {bandwidth}, and a link has at least 1 kbit/s; of two devices that cannot talk \
             say `unreachable` in `links.between`"
        );
        return Err(DocumentError::invalid_at(place, what));
    }
    if latency > MAX_LATENCY {
        return Err(DocumentError::invalid_at(
            place,
            format!("{place}: `latency` is {latency}: choose at most an hour"),
        ));
    }
    Ok(())
}

/// The link between two named devices. The first entry for a pair applies.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    deny_unknown_fields,
    expecting = "a pair and its link, such as `{devices: [one, other], unreachable: both}`"
)]
pub struct NamedLink {
    /// The two devices.
    pub devices: [String; 2],
    /// Its numbers, in every direction that exists; the default link's if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link: Option<Link>,
    /// Which of them cannot send to the other; both can if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unreachable: Option<Unreachable>,
}

/// The directions in which a pair cannot send.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Unreachable {
    /// Both directions.
    Both,
    /// The first device cannot connect to the second, for example because the second is behind NAT; the second can
    /// connect to the first.
    Forward,
}

impl NamedLink {
    fn validate(&self) -> Result<(), DocumentError> {
        let [first, second] = &self.devices;
        let place = format!("links.between [{first}, {second}]");
        if first == second {
            return Err(DocumentError::invalid(format!("{place} names one device twice")));
        }
        if let Some(link) = &self.link {
            validate_link(&place, link)?;
        }
        match (&self.link, self.unreachable) {
            (None, None) => {
                Err(DocumentError::invalid(format!("{place} says nothing: give `link` or `unreachable`")))
            }
            (Some(_), Some(Unreachable::Both)) => {
                Err(DocumentError::invalid(format!("{place}: give `link` or `unreachable: both`, not both")))
            }
            _ => Ok(()),
        }
    }
}

/// Options of the planner.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "planner options, such as `{strategy: exact, rounds: 2}`")]
pub struct PlannerOptions {
    /// Strategy by name; the command line's default if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub strategy: Option<String>,
    /// Rounds, where the strategy takes them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rounds: Option<u32>,
    /// Windows by hand, in ring order.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub windows: Option<Vec<u32>>,
    /// GPU layers by hand, in ring order.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_layers: Option<Vec<u32>>,
    /// Whether every device must get a layer.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub keep_all: bool,
    /// Whose order the ring follows; the scenario's if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub order: Option<RingOrder>,
    /// Whether `overlap` and `exact` choose the head, whichever device the scenario names.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub best_head: bool,
    /// A disk slower than this may never be overloaded; 0.1 GB/s if absent (the public
    /// implementation's default).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slow_disk: Option<BytesPerSecond>,
    /// The format that another system's weights are converted to, if not its own (`tpi-llm`, `hepti`, `galaxy`,
    /// `airinfer`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weights_as: Option<Format>,
    /// `airinfer`: what one all-reduce takes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub air_time: Option<Seconds>,
}

/// The order of the devices in the ring.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum RingOrder {
    /// The order of the scenario.
    #[default]
    Given,
    /// The order that the planner finds best, if the strategy can choose.
    Best,
}

impl Scenario {
    /// The index of the head.
    pub fn head(&self) -> usize {
        self.devices.iter().position(|device| device.head).unwrap_or(0)
    }
}

impl Document for Scenario {
    const SCHEMA: &'static str = "scenario/1";
    const RENAMED_KEYS: &'static [RenamedKey] = &[RenamedKey { old: "links.air", new: "links.wifi" }];

    fn validate(&self) -> Result<(), DocumentError> {
        let refuse = |what: String| Err(DocumentError::invalid(what));
        if self.devices.is_empty() {
            return refuse("`devices` is empty; a scenario needs at least one".into());
        }
        let mut names = BTreeSet::new();
        for device in &self.devices {
            if device.name.is_empty() || !names.insert(device.name.as_str()) {
                return refuse(format!("device name `{}` is empty or used twice", device.name));
            }
            device.validate()?;
        }
        if let Some(residency) = &self.residency {
            residency.validate_requested("`residency`")?;
        }
        for device in &self.devices {
            if let Some(residency) = &device.residency {
                residency.validate_requested(&format!("device `{}`: `residency`", device.name))?;
            }
        }
        if self.devices.iter().filter(|device| device.head).count() > 1 {
            return refuse("more than one device says `head: true`".into());
        }
        self.links.validate(&names)?;
        events::validate(&self.events, &names)?;
        self.model.validate("model")?;
        self.workload.validate(self.context)?;
        if self.workload.speculation.is_some() && self.planner.best_head {
            return refuse(
                "`planner.best_head` cannot be with `workload.speculation`, whose draft the head holds: say \
                            `head: true` of a device"
                    .into(),
            );
        }
        Ok(())
    }
}
