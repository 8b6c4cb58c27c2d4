//! Creates the variants of a scenario, each with one change ([`VariantKind`]).
//!
//! The planner of the scenario makes a new plan for each variant, so the saved time includes the effect of the new
//! plan. Saved times do not add up: two variants that each save a second may together save only one second. The effect
//! of a quantisation on the quality of the output is not considered.
//!
//! Not here: the evaluation of a variant ([`crate::evaluation`]).

use std::collections::BTreeSet;

use hearth_profiles::device::{Gpu, Os, nearest_format_rate};
use hearth_profiles::document::Document;
use hearth_profiles::model::{ModelDocument, ModelProfile, Quant};
use hearth_profiles::parts::{Catalogue, DeviceParts};
use hearth_profiles::{Bytes, BytesPerSecond, DeviceProfile, Format, Fraction, Link, Seconds, Sourced};
use hearth_schema::Scenario;
use hearth_schema::scenario::{Links, PairLink};
use serde::Serialize;

use crate::advice::{catalogue, dense_equivalent};

/// Sequential read rate of a fast SSD in a computer. source: typical of drives with four lanes of PCI Express 4.0,
/// whose raw rate is 7.9 GB/s (PCI-SIG, 16 GT/s a lane)
const FAST_DISK: BytesPerSecond = BytesPerSecond(7.0e9);
/// Sequential read rate of a fast phone's storage. source: JEDEC JESD220F (UFS 4.0), 4.64 GB/s raw; vendors state 4.2
/// GB/s
const FAST_FLASH: BytesPerSecond = BytesPerSecond(4.2e9);
/// Minimum speed-up of a disk for which a variant is created. source: assumed, two drives of one kind differ by less
const MIN_SPEEDUP: f64 = 1.2;

/// Bandwidth of a Gigabit Ethernet cable. source: IEEE 802.3ab
const CABLE_BANDWIDTH: BytesPerSecond = BytesPerSecond(125e6);
/// Latency between two programs over a cable. source: assumed: a switch and two network stacks
const CABLE_LATENCY: Seconds = Seconds(0.2e-3);

/// The graphics cards that are tried in a desktop. source: assumed, usual ones of each size of memory
const CARDS: [&str; 5] = ["rtx-3060-12gb", "rtx-4060-ti-16gb", "rtx-3090", "rtx-4090", "rtx-5090"];

/// The sizes of other models that are tried, as multiples of the size of a dense model of the same quality.
/// source: assumed
const MIN_DENSE: f64 = 0.3;
const MAX_DENSE: f64 = 0.75;
const MIN_MIXTURE: f64 = 0.1;
const MAX_MIXTURES: usize = 2;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum VariantKind {
    /// A device is removed. If this device was the head, the first remaining device becomes the head.
    #[serde(rename = "without")]
    RemovedDevice,
    /// A device has twice the memory; the added memory is available. Memory limits and shared GPU memory are doubled,
    /// too.
    Memory,
    /// A device has a faster disk without a throttle. The rate of page replacement in the kernel (`turnover`) does not
    /// change.
    Disk,
    /// Cables of 1 Gbit/s replace all links.
    #[serde(rename = "wired")]
    Cables,
    /// A graphics card of the catalogue replaces that of a desktop, or is added to one.
    Gpu,
    #[serde(rename = "quant")]
    Quantisation,
    /// A smaller model, or a mixture of experts, of which a token uses a part.
    Model,
}

/// A scenario with one change.
#[derive(Debug, Clone)]
pub struct Variant {
    pub kind: VariantKind,
    /// Name of the changed device; `None` if the links or the model change.
    pub device: Option<String>,
    pub description: String,
    /// What the user must buy, as in [`Prices`](super::Prices): the word and the number of units.
    pub purchase: Option<(String, f64)>,
    /// Increase of the perplexity by the weight format; `None` if it is not published.
    pub perplexity_increase: Option<f64>,
    pub scenario: Scenario,
    /// The device profiles, in the order of the scenario.
    pub devices: Vec<DeviceProfile>,
    /// The profile of the model, or the reason why the model cannot have the new quantisation.
    pub model: Result<ModelProfile, String>,
}

/// Returns all variants. Besides the usual graphics cards, those in `cards` are tried.
pub fn all_variants(
    scenario: &Scenario,
    devices: &[DeviceProfile],
    model: &ModelProfile,
    cards: &[&str],
) -> Vec<Variant> {
    let base = Base { scenario, devices, model };
    let cards: BTreeSet<&str> = CARDS.iter().chain(cards).copied().collect();
    let indices = 0..devices.len();
    let removed = indices.clone().filter(|_| devices.len() > 1).map(|at| base.without(at));
    let memory = indices.clone().map(|at| base.memory(at));
    let disks = indices.clone().filter_map(|at| base.disk(at));
    let cards = indices.flat_map(|at| base.graphics_cards(at, &cards));
    let devices = removed.chain(memory).chain(disks).chain(cards).chain(base.wired());
    devices.chain(base.quants()).chain(base.models()).collect()
}

/// The unchanged scenario with its device profiles and its model.
struct Base<'b> {
    scenario: &'b Scenario,
    devices: &'b [DeviceProfile],
    model: &'b ModelProfile,
}

impl Base<'_> {
    /// Creates a variant that is still equal to the scenario; the caller makes the change that `what` describes.
    fn variant(&self, kind: VariantKind, device: Option<usize>, what: String) -> Variant {
        Variant {
            kind,
            device: device.map(|at| self.scenario.devices[at].name.clone()),
            description: what,
            purchase: None,
            perplexity_increase: None,
            scenario: self.scenario.clone(),
            devices: self.devices.to_vec(),
            model: Ok(self.model.clone()),
        }
    }

    fn without(&self, at: usize) -> Variant {
        let name = &self.scenario.devices[at].name;
        let was_head = self.scenario.head_index() == at;
        let mut what = format!("without {name}");
        let mut variant = self.variant(VariantKind::RemovedDevice, Some(at), String::new());
        let scenario = &mut variant.scenario;
        scenario.devices.remove(at);
        variant.devices.remove(at);
        if was_head {
            scenario.devices[0].is_head = true;
            what = format!("{what}, {} as head", scenario.devices[0].name);
        }
        scenario.links.pair_links.retain(|named| !named.devices.contains(name));
        scenario.events.retain(|event| event.device.as_ref() != Some(name));
        if let Some(wifi) = &mut scenario.links.wifi {
            for channel in &mut wifi.channels {
                channel.stations.retain(|station| station != name);
                channel.station_rates.remove(name);
            }
            wifi.channels.retain(|channel| !channel.stations.is_empty());
            if wifi.channels.is_empty() {
                scenario.links.wifi = None;
            }
        }
        variant.description = what;
        variant
    }

    fn memory(&self, at: usize) -> Variant {
        let (entry, device) = (&self.scenario.devices[at], &self.devices[at]);
        let limits = entry.limits.as_ref();
        let (limit, share) = (limits.and_then(|it| it.memory), limits.and_then(|it| it.memory_share));
        let now = limit.unwrap_or(device.memory.total_memory.value);
        let what = match share {
            Some(share) => {
                let (now, then) = (100.0 * share.0, 200.0 * share.0);
                format!("{}: memory for {then:.0} % of its weights instead of {now:.0} %", entry.name)
            }
            None => format!("{}: {} of memory instead of {now}", entry.name, now * 2),
        };
        let mut variant = self.variant(VariantKind::Memory, Some(at), what);
        if let Some(limits) = &mut variant.scenario.devices[at].limits {
            limits.memory = limit.map(|limit| limit * 2);
            limits.memory_share = share.map(|share| Fraction(share.0 * 2.0));
        }
        let device = &mut variant.devices[at];
        let more = device.memory.total_memory.value;
        // The memory of Macs and phones is soldered, and a limit costs nothing.
        let is_sold = matches!(device.os, Os::Linux | Os::Windows) && limit.or(share.map(|_| now)).is_none();
        let size = more.as_f64() / Bytes::from_mib(1024).as_f64();
        variant.purchase = is_sold.then(|| ("memory".to_owned(), size));
        set(&mut device.memory.total_memory, |total| total * 2);
        set(&mut device.memory.available_memory, |available| available + more);
        if let Some(gpu) = device.gpu.as_mut().filter(|gpu| gpu.unified_memory) {
            // With Metal, a GPU can use a fixed fraction of the installed memory.
            set(&mut gpu.memory_available, |available: Bytes| available * 2);
        }
        variant
    }

    fn disk(&self, at: usize) -> Option<Variant> {
        let (entry, device) = (&self.scenario.devices[at], &self.devices[at]);
        let throttle = entry.limits.as_ref().and_then(|limits| limits.disk_read_rate);
        let throttle = throttle.or(device.disk.bandwidth_limit.as_ref().map(|limit| limit.value));
        let own = device.disk.sequential_bandwidth.value;
        let (fast, kind) = match device.os {
            Os::Android => (FAST_FLASH, "UFS 4.0"),
            Os::Linux | Os::Windows | Os::Macos => (FAST_DISK, "an SSD on PCI Express 4.0"),
        };
        let now = throttle.filter(|limit| *limit < own).unwrap_or(own);
        if fast.0 < MIN_SPEEDUP * now.0 {
            return None;
        }
        // Without the throttle, the disk may be faster than that.
        let then = BytesPerSecond(fast.0.max(own.0));
        let what = format!("{}: {kind}, {then} instead of {now}", entry.name);
        let mut variant = self.variant(VariantKind::Disk, Some(at), what);
        if let Some(limits) = &mut variant.scenario.devices[at].limits {
            limits.disk_read_rate = None;
        }
        variant.purchase = Some(("disk".to_owned(), 1.0));
        let disk = &mut variant.devices[at].disk;
        disk.bandwidth_limit = None;
        let factor = then.0 / own.0;
        let rates = [&mut disk.fault_bandwidth, &mut disk.random_bandwidth, &mut disk.populate_bandwidth]
            .into_iter()
            .flatten();
        for rate in rates.chain([&mut disk.sequential_bandwidth]) {
            set(rate, |rate| BytesPerSecond(rate.0 * factor));
        }
        Some(variant)
    }

    /// Creates the variant with cables; `None` if no link is slower than a cable.
    fn wired(&self) -> Option<Variant> {
        let links = &self.scenario.links;
        let slower =
            |link: &Link| link.bandwidth.value < CABLE_BANDWIDTH || link.latency.value > CABLE_LATENCY;
        let has_wifi = links.wifi.is_some();
        let pairs = links.pair_links.iter().filter_map(|named| named.link.as_ref());
        if self.devices.len() < 2
            || !(has_wifi || slower(&links.default_link) || pairs.into_iter().any(slower))
        {
            return None;
        }
        let instead = if has_wifi { "Wi-Fi" } else { "the present links" };
        let what = format!("cables of 1 Gbit/s instead of {instead}");
        let mut variant = self.variant(VariantKind::Cables, None, what);
        let cable = Link::constant(
            Sourced::new(CABLE_LATENCY, "assumed: a switch and two network stacks"),
            Sourced::new(CABLE_BANDWIDTH, "IEEE 802.3ab"),
        );
        // Pairs that are marked as unreachable remain so with cables.
        let kept = links.pair_links.iter().filter(|named| named.unreachable_directions.is_some());
        let between = kept.map(|named| PairLink { link: None, ..named.clone() }).collect();
        variant.scenario.links = Links { pair_links: between, ..Links::uniform(cable) };
        variant.purchase = Some(("cable".to_owned(), self.devices.len() as f64));
        Some(variant)
    }

    /// Creates variants of a desktop of the catalogue with larger or faster graphics cards.
    fn graphics_cards(&self, at: usize, cards: &BTreeSet<&str>) -> Vec<Variant> {
        let entry = &self.scenario.devices[at];
        let catalogue = Catalogue::shipped();
        let Some(parts) = entry.parts.as_ref().filter(|parts| catalogue.has_card_slot(&parts.cpu)) else {
            return Vec::new();
        };
        let now = self.devices[at].gpu.as_ref();
        let variant = |card: &&str| {
            let parts = DeviceParts { gpu: Some((*card).to_owned()), ..parts.clone() };
            let device = parts.to_profile(&entry.name).ok()?;
            if now.zip(device.gpu.as_ref()).is_some_and(|(now, then)| !is_better(then, now)) {
                return None;
            }
            let instead = now.map_or_else(String::new, |now| format!(" instead of {}", now.name));
            let name = device.gpu.as_ref().map_or("", |gpu| &gpu.name);
            let what = format!("{}: {name}{instead}", entry.name);
            let mut variant = self.variant(VariantKind::Gpu, Some(at), what);
            variant.purchase = Some(((*card).to_owned(), 1.0));
            variant.scenario.devices[at].parts = Some(parts);
            variant.devices[at].gpu = device.gpu;
            Some(variant)
        };
        cards.iter().filter_map(variant).collect()
    }

    /// Creates variants with other models of the catalogue: the newest dense model of about half the size, and the
    /// newest mixtures that are not larger and of which a token uses at most half as much. hearth can run all of them.
    fn models(&self) -> Vec<Variant> {
        if self.scenario.workload.speculation.is_some() {
            return Vec::new();
        }
        let (own, active) = (dense_equivalent(self.model), self.model.active_parameters as f64);
        let mut found: Vec<(ModelDocument, ModelProfile)> = catalogue()
            .filter_map(|document| document.to_profile().ok().map(|model| (document, model)))
            .collect();
        found.retain(|(_, model)| model.shape.check_runnable().is_ok());
        found.retain(|(_, model)| {
            let size = dense_equivalent(model);
            if model.shape.experts.is_some() {
                (MIN_MIXTURE * own..=own).contains(&size) && model.active_parameters as f64 <= 0.5 * active
            } else {
                (MIN_DENSE * own..=MAX_DENSE * own).contains(&size)
            }
        });
        // The newest, and of these the largest.
        found.sort_by(|(one, size), (other, other_size)| {
            (&other.released, other_size.parameters).cmp(&(&one.released, size.parameters))
        });
        let is_mixture = |model: &ModelProfile| model.shape.experts.is_some();
        let dense = found.iter().filter(|(_, model)| !is_mixture(model)).take(1);
        let mixtures = found.iter().filter(|(_, model)| is_mixture(model)).take(MAX_MIXTURES);
        let variant = |(_, model): &(ModelDocument, ModelProfile)| {
            let what = format!(
                "{} in {}, like a dense model of {:.0} B instead of {:.0} B",
                model.name,
                model.quant,
                dense_equivalent(model) / 1e9,
                own / 1e9
            );
            let context = self.scenario.context_length.min(model.shape.context_length);
            let mut variant =
                Variant { model: Ok(model.clone()), ..self.variant(VariantKind::Model, None, what) };
            variant.scenario.context_length = context;
            variant
        };
        dense.chain(mixtures).map(variant).collect()
    }

    fn quants(&self) -> Vec<Variant> {
        let now = (self.model.total_bytes(), self.model.quant.as_str());
        let is_mixture = self.model.shape.experts.is_some();
        let others = Quant::MIXED_QUANTS.iter().filter(|quant| {
            // No perplexity of `iq1_s_m` is published; it is too high for most uses.
            let is_usual = **quant != Quant::Iq1SM && (is_mixture || **quant != Quant::Mxfp4Moe);
            quant.name() != now.1 && is_usual
        });
        let variant = |quant: &Quant| {
            let made = ModelProfile::from_shape(&self.model.name, self.model.shape.clone(), *quant);
            let size = |made: &ModelProfile| format!(", {} instead of {}", made.total_bytes(), now.0);
            let what = format!("weights as {}{}", quant.name(), made.as_ref().map_or(String::new(), size));
            let model = made.map_err(|error| error.to_string());
            let perplexity_increase = quant.perplexity_increase();
            Variant { perplexity_increase, model, ..self.variant(VariantKind::Quantisation, None, what) }
        };
        others.map(variant).collect()
    }
}

/// Returns whether a graphics card has at least the memory of another one, and is larger or faster.
fn is_better(card: &Gpu, other: &Gpu) -> bool {
    let memory = |gpu: &Gpu| gpu.memory_available.value;
    let rates = |gpu: &Gpu| {
        [gpu.read_bandwidth.value.0, nearest_format_rate(&gpu.matmul, Format::Q4K).map_or(0.0, |rate| rate.0)]
    };
    let is_faster = rates(card).iter().zip(rates(other)).any(|(one, other)| *one > 1.02 * other);
    memory(card) >= memory(other) && (memory(card) > memory(other) || is_faster)
}

/// Changes a value that has a source, and sets the source to `set: what if`.
fn set<T: Copy>(sourced: &mut Sourced<T>, change: impl FnOnce(T) -> T) {
    *sourced = Sourced::new(change(sourced.value), "set: what if");
}

impl Variant {
    /// Returns the first validation error in the documents of the variant; `None` if all are valid.
    pub fn validation_error(&self) -> Option<String> {
        let devices = self.devices.iter().map(Document::validate);
        let mut all = devices.chain([self.scenario.validate()]);
        all.find_map(Result::err).map(|error| error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use hearth_profiles::device::shipped_profile;
    use hearth_profiles::model;

    use super::*;

    const SCENARIO: &str = "\
schema: scenario/1
name: three
model: {profile: llama-8b}
context: 512
workload: {prompt: 8, generate: 4}
devices:
  - {name: laptop, profile: d2, head: true}
  - {name: mac, profile: d1}
  - {name: tablet, profile: d1, limits: {memory_share: 45 %}}
  - {name: phone, profile: d4, limits: {memory: 3 GiB, disk_read: 100 MB/s}}
links:
  default: {latency: {value: 5 ms, source: a}, bandwidth: {value: 100 Mbit/s, source: a}}
  between:
    - {devices: [laptop, phone], unreachable: both}
events:
  - {at: 1 s, device: mac, load: 2 threads}
";

    fn variants() -> Vec<Variant> {
        let scenario = Scenario::from_yaml(SCENARIO).expect("a valid scenario");
        let devices: Vec<DeviceProfile> =
            scenario.devices.iter().map(|entry| shipped_profile(&entry.profile).expect("a device")).collect();
        all_variants(&scenario, &devices, &model::shipped_profile("llama-8b").expect("a model"), &[])
    }

    fn find(kind: VariantKind, device: &str) -> Variant {
        let found =
            variants().into_iter().find(|it| it.kind == kind && it.device.as_deref().unwrap_or("") == device);
        found.expect("the variant is there")
    }

    #[test]
    fn every_variant_is_valid() {
        let variants = variants();
        for variant in &variants {
            assert_eq!(variant.validation_error(), None, "{}", variant.description);
        }
        let count = |kind| variants.iter().filter(|variant| variant.kind == kind).count();
        for (kind, expected) in [
            (VariantKind::RemovedDevice, 4),
            (VariantKind::Memory, 4),
            (VariantKind::Disk, 4),
            (VariantKind::Cables, 1),
            (VariantKind::Gpu, 0),
            (VariantKind::Model, 3),
            // Not `q4_k_m`, which the model has, `mxfp4_moe` and `iq1_s_m`.
            (VariantKind::Quantisation, Quant::MIXED_QUANTS.len() - 3),
        ] {
            assert_eq!(count(kind), expected, "{kind:?}");
        }
    }

    #[test]
    fn desktops_of_parts_get_larger_cards() {
        let parts: DeviceParts = "rtx-3090, ddr4-3200-dual, 32 GiB, nvme-gen3, linux".parse().expect("parts");
        let mut scenario = Scenario::from_yaml(SCENARIO).expect("a valid scenario");
        let mut devices: Vec<DeviceProfile> =
            scenario.devices.iter().map(|entry| shipped_profile(&entry.profile).expect("a device")).collect();
        devices[0] = parts.to_profile("laptop").expect("a device");
        (scenario.devices[0].profile, scenario.devices[0].parts) = (String::new(), Some(parts));
        let all =
            all_variants(&scenario, &devices, &model::shipped_profile("llama-8b").expect("a model"), &[]);
        let cards: Vec<&Variant> = all.iter().filter(|variant| variant.kind == VariantKind::Gpu).collect();
        assert_eq!(cards.len(), 2);
        assert!(
            cards[0].description.ends_with("RTX 4090 instead of GeForce RTX 3090"),
            "{}",
            cards[0].description
        );
        assert_eq!(cards[1].purchase, Some(("rtx-5090".into(), 1.0)));
    }

    #[test]
    fn removing_a_device_removes_its_links_and_events() {
        let Variant { scenario, description, .. } = find(VariantKind::RemovedDevice, "laptop");
        assert_eq!((scenario.head_index(), scenario.devices.len()), (0, 3));
        assert!(scenario.links.pair_links.is_empty() && description.contains("mac as head"), "{description}");
        assert!(find(VariantKind::RemovedDevice, "mac").scenario.events.is_empty());
        assert_eq!(find(VariantKind::Cables, "").scenario.links.pair_links.len(), 1);
    }

    #[test]
    fn memory_and_disk_grow_with_their_limits() {
        let phone = find(VariantKind::Memory, "phone");
        let limit = phone.scenario.devices[3].limits.as_ref().and_then(|it| it.memory);
        assert_eq!(limit, Some(Bytes::from_mib(6144)));
        let Variant { scenario, description, .. } = find(VariantKind::Memory, "tablet");
        assert!(description.ends_with("memory for 90 % of its weights instead of 45 %"), "{description}");
        let share = scenario.devices[2].limits.as_ref().and_then(|it| it.memory_share);
        assert_eq!(share, Some(Fraction(0.9)));
        let then = find(VariantKind::Memory, "mac").devices.swap_remove(1).memory;
        let now = shipped_profile("d1").expect("a device").memory;
        let total = now.total_memory.value;
        assert_eq!(then.total_memory.value, total * 2);
        assert_eq!(then.available_memory.value, now.available_memory.value + total);
        let phone = find(VariantKind::Disk, "phone");
        assert_eq!(phone.scenario.devices[3].limits.as_ref().and_then(|it| it.disk_read_rate), None);
        let sequential = phone.devices[3].disk.sequential_bandwidth.value;
        assert!((sequential.0 / FAST_FLASH.0 - 1.0).abs() < 1e-9, "{sequential}");
    }
}
