//! The catalogue of parts: graphics cards, CPUs by their memory, disks and operating systems.
//!
//! Data sheets state peaks, and how much of them a run reaches is a property of a class of parts: a few coefficients,
//! which were fitted to measured runs of whole models or are assumed (`profiles/parts/efficiency.yaml`).
//! [`DeviceParts`] names the parts of a device, and its profile follows from them ([`DeviceParts::to_profile`]). Each
//! value says how it was derived, and its spread is the uncertainty of the class.
//!
//! Not here: profiles that were measured ([`crate::measure`]) or published ([`crate::device::shipped_devices`]).

mod assembly;
mod recognition;
mod search;
mod text;

use std::sync::LazyLock;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::device::{GpuKind, Os};
use crate::{Bytes, BytesPerSecond, FlopsPerSecond, Fraction, Seconds, Sourced};

pub use recognition::RecognisedParts;
pub use search::{PartKind, PartSummary, UnknownPart};
pub use text::PartsError;

/// The parts of a device, named as in the catalogue.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    deny_unknown_fields,
    expecting = "parts, such as `{cpu: ddr4-3200-dual, memory: 16 GiB, disk: nvme-gen3, os: linux, gpu: rtx-3060-12gb}`"
)]
pub struct DeviceParts {
    /// The CPU with its memory, such as `ddr4-3200-dual` or `apple-m1`.
    pub cpu: String,
    /// The installed memory.
    pub memory: Bytes,
    /// The disk with the model, such as `nvme-gen3`.
    pub disk: String,
    /// The operating system: `linux`, `windows`, `macos` or `android`.
    pub os: String,
    /// The graphics card, such as `rtx-3060-12gb`. On macOS the GPU of an Apple chip is used without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<String>,
}

/// A graphics card, by its data sheet.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GpuPart {
    pub id: String,
    pub name: String,
    pub memory: Bytes,
    /// Peak bandwidth of the memory.
    pub bandwidth: BytesPerSecond,
    /// Peak of 32-bit arithmetic.
    pub fp32: FlopsPerSecond,
}

/// A CPU with its memory, by its data sheet or by the standard of the memory.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CpuPart {
    pub id: String,
    pub name: String,
    /// Number of cores that a run uses; of unequal cores, the fast ones.
    pub cores: u32,
    /// Peak bandwidth of the memory.
    pub bandwidth: BytesPerSecond,
    /// Peak of 32-bit arithmetic of the GPU of an Apple chip.
    pub gpu_fp32: Option<FlopsPerSecond>,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskPart {
    pub id: String,
    pub name: String,
    /// Rate of reading large blocks.
    pub sequential: BytesPerSecond,
    /// Rate of reading blocks of 4 KiB at random.
    pub random: BytesPerSecond,
    pub latency: Seconds,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SystemPart {
    pub id: String,
    pub name: String,
    pub os: Os,
    /// Memory that other programs and the system hold.
    pub used_memory: Sourced<Bytes>,
    /// Memory of other programs that can be swapped out.
    pub swap: Option<Sourced<Bytes>>,
    /// Memory of a graphics card that the desktop and the driver hold.
    pub gpu_reserved: Sourced<Bytes>,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct GpuFamily {
    #[serde(rename = "name")]
    _name: String,
    kind: GpuKind,
    /// Name of the efficiency class.
    class: String,
    /// Peak of products of matrices in 8-bit integers (in 16-bit numbers if these are faster), as a multiple of that of
    /// 32-bit arithmetic.
    int8: f64,
    source: String,
    gpus: Vec<GpuPart>,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CpuFamily {
    #[serde(rename = "name")]
    _name: String,
    class: String,
    source: String,
    cpus: Vec<CpuPart>,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DiskFamily {
    #[serde(rename = "name")]
    _name: String,
    source: String,
    disks: Vec<DiskPart>,
}

/// What programs reach of the peaks of a class of GPUs.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GpuEfficiency {
    /// Share of the peak bandwidth at which weights are read.
    pub bandwidth_share: Sourced<Fraction>,
    /// Fixed time of a layer: launches of its kernels, and small operations.
    pub layer_time: Sourced<Seconds>,
    /// Share of the peak of 8-bit integer products of matrices that products of quantised matrices reach.
    pub matmul_share: Sourced<Fraction>,
}

/// What programs reach of the peaks of a class of CPUs.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CpuEfficiency {
    /// Share of the peak bandwidth at which all cores together read weights.
    pub bandwidth_share: Sourced<Fraction>,
    /// Rate at which one core processes 4-bit weights in its cache.
    pub core_rate: Sourced<BytesPerSecond>,
    /// Arithmetic of one core in products of matrices.
    pub core_matmul: Sourced<FlopsPerSecond>,
}

/// All parts that are shipped with the program.
#[derive(Debug)]
pub struct Catalogue {
    gpus: Vec<GpuFamily>,
    cpus: Vec<CpuFamily>,
    disks: Vec<DiskFamily>,
    systems: Vec<SystemPart>,
    efficiency: Efficiency,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Efficiency {
    #[serde(rename = "schema")]
    _schema: String,
    gpus: std::collections::BTreeMap<String, GpuEfficiency>,
    cpus: std::collections::BTreeMap<String, CpuEfficiency>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Families<F> {
    #[serde(rename = "schema")]
    _schema: String,
    families: Vec<F>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Systems {
    #[serde(rename = "schema")]
    _schema: String,
    systems: Vec<SystemPart>,
}

static SHIPPED: LazyLock<Catalogue> = LazyLock::new(|| {
    fn read<T: for<'de> Deserialize<'de>>(text: &str) -> T {
        serde_yaml::from_str(text).expect("shipped documents are valid: a test reads them all")
    }
    Catalogue {
        gpus: read::<Families<_>>(include_str!("../../parts/gpus.yaml")).families,
        cpus: read::<Families<_>>(include_str!("../../parts/cpus.yaml")).families,
        disks: read::<Families<_>>(include_str!("../../parts/disks.yaml")).families,
        systems: read::<Systems>(include_str!("../../parts/systems.yaml")).systems,
        efficiency: read(include_str!("../../parts/efficiency.yaml")),
    }
});

impl Catalogue {
    /// Returns whether a CPU is one of a desktop, in which any graphics card fits.
    pub fn has_card_slot(&self, cpu: &str) -> bool {
        self.cpu_in_family(cpu).is_ok_and(|(family, _)| family.class == "desktop")
    }

    pub fn shipped() -> &'static Self {
        &SHIPPED
    }

    pub(crate) fn gpu_in_family(&self, id: &str) -> Result<(&GpuFamily, &GpuPart), UnknownPart> {
        in_family(&self.gpus, |family| &family.gpus, |part| part.id == id)
            .ok_or_else(|| self.unknown(PartKind::Gpu, id))
    }

    pub(crate) fn cpu_in_family(&self, id: &str) -> Result<(&CpuFamily, &CpuPart), UnknownPart> {
        in_family(&self.cpus, |family| &family.cpus, |part| part.id == id)
            .ok_or_else(|| self.unknown(PartKind::Cpu, id))
    }

    pub(crate) fn disk_in_family(&self, id: &str) -> Result<(&DiskFamily, &DiskPart), UnknownPart> {
        in_family(&self.disks, |family| &family.disks, |part| part.id == id)
            .ok_or_else(|| self.unknown(PartKind::Disk, id))
    }

    pub fn system(&self, id: &str) -> Result<&SystemPart, UnknownPart> {
        self.systems.iter().find(|part| part.id == id).ok_or_else(|| self.unknown(PartKind::System, id))
    }

    pub(crate) fn gpu_efficiency(&self, class: &str) -> &GpuEfficiency {
        self.efficiency.gpus.get(class).expect("each class has coefficients: a test checks them all")
    }

    pub(crate) fn cpu_efficiency(&self, class: &str) -> &CpuEfficiency {
        self.efficiency.cpus.get(class).expect("each class has coefficients: a test checks them all")
    }
}

/// Returns the first part that matches, with its family.
fn in_family<'c, F, P>(
    families: &'c [F],
    parts: impl Fn(&'c F) -> &'c [P],
    matches: impl Fn(&P) -> bool,
) -> Option<(&'c F, &'c P)> {
    families.iter().find_map(|family| Some((family, parts(family).iter().find(|part| matches(part))?)))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::DeviceProfile;
    use crate::document::Document;

    #[test]
    fn catalogue_has_parts_with_sources_and_unique_names() {
        let all = Catalogue::shipped().summaries();
        assert!(all.len() >= 150, "{} parts", all.len());
        let ids: BTreeSet<&str> = all.iter().map(|part| part.id.as_str()).collect();
        assert_eq!(ids.len(), all.len(), "each id names one part");
        for part in &all {
            assert!(part.source.len() > 10, "{}", part.id);
            // Ids are written in lists that are separated by commas.
            assert!(!part.id.contains([',', ' ']) && part.id.parse::<Bytes>().is_err(), "{}", part.id);
        }
    }

    /// Returns the profile of the parts, after writing and reading it again.
    fn profile(text: &str) -> DeviceProfile {
        let parts: DeviceParts = text.parse().expect("parts");
        let profile = parts.to_profile("it").expect("known parts");
        let read = DeviceProfile::from_yaml(&profile.to_yaml()).expect("a valid document");
        assert_eq!(read.to_yaml(), profile.to_yaml(), "{text}");
        profile
    }

    #[test]
    fn every_part_makes_a_valid_profile() {
        for part in Catalogue::shipped().summaries() {
            let id = part.id.as_str();
            profile(&match part.kind {
                PartKind::Gpu => format!("{id}, ddr4-3200-dual, 16 GiB, nvme-gen3, linux"),
                PartKind::Cpu if id.starts_with("apple") => format!("{id}, 16 GiB, apple-ssd, macos"),
                PartKind::Cpu => format!("{id}, 8 GiB, nvme-gen3, linux"),
                PartKind::System if id == "macos" => "apple-m1, 8 GiB, apple-ssd, macos".to_owned(),
                PartKind::System if id == "android" => "snapdragon-865, 8 GiB, ufs-3.1, android".to_owned(),
                PartKind::Disk => format!("ddr4-3200-dual, 16 GiB, {id}, windows"),
                PartKind::System => format!("ddr4-3200-dual, 16 GiB, nvme-gen3, {id}"),
            });
        }
    }

    #[test]
    fn impossible_devices_are_refused() {
        let error = |text: &str| {
            let parts: DeviceParts = text.parse().expect("known parts");
            parts.to_profile("it").expect_err("impossible").to_string()
        };
        for text in [
            "rtx-3060-12gb, apple-m1, 16 GiB, apple-ssd, macos",
            "ddr4-3200-dual, 16 GiB, nvme-gen3, macos",
            "apple-m1, 16 GiB, apple-ssd, windows",
            "ddr4-3200-dual, 16 GiB, nvme-gen3, android",
        ] {
            assert!(error(text).starts_with("these parts do not exist together"), "{text}");
        }
        assert!(error("ddr4-3200-dual, 0 B, nvme-gen3, linux").contains("memory"));
        assert!(error("ddr4-3200-dual, 4096 TiB, nvme-gen3, linux").contains("check its unit"));
    }

    #[test]
    fn small_memories_are_not_more_uncertain_than_assumed_ones() {
        for memory in ["1 GiB", "2 GiB", "4 GiB", "8 GiB"] {
            let memory = profile(&format!("raspberry-pi-4, {memory}, sd-uhs-1, linux")).memory;
            assert!(memory.available_memory.relative_uncertainty() <= 0.251, "{memory:?}");
            assert!(memory.obtainable_bytes() <= memory.total_memory.value, "{memory:?}");
        }
    }

    #[test]
    fn values_follow_from_data_sheets_and_classes() {
        let desktop = profile("rtx-2080-ti, ddr4-3200-dual, 16 GiB, nvme-gen3, linux");
        let gpu = desktop.gpu.expect("a GPU");
        // 0.90 of 616 GB/s, with the uncertainty of an inferred share.
        assert_eq!(gpu.read_bandwidth.value.to_string(), "554 GB/s");
        assert!((gpu.read_bandwidth.relative_uncertainty() - 0.1).abs() < 1e-3);
        // 0.75 of 51.2 GB/s; other programs hold 5 of 16 GiB.
        assert_eq!(desktop.cpu.read_bandwidth.value.to_string(), "38.4 GB/s");
        assert_eq!(desktop.memory.available_memory.value.to_string(), "11.0 GiB");
        // Eight cores of a laptop are slower than its memory.
        let laptop = profile("laptop-lpddr5x-8533, 32 GiB, nvme-gen4, windows");
        assert_eq!(laptop.cpu.read_bandwidth.value.to_string(), "32.0 GB/s");
        // A Mac uses its GPU, which may have two thirds of the memory.
        let mac = profile("apple-m4-pro, 24 GiB, apple-ssd, macos");
        let gpu = mac.gpu.expect("a GPU");
        assert!(gpu.unified_memory && gpu.memory_available.value < mac.memory.total_memory.value);
        assert!(profile("apple-m1, 8 GiB, apple-ssd, linux").gpu.is_none());
    }
}
