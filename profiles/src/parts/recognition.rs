//! Recognises the parts of a measured device: by their names where the catalogue has them, otherwise by their speed.

use super::{Catalogue, CpuPart, DeviceParts, DiskPart};
use crate::Bytes;
use crate::device::{DeviceProfile, Os};

/// Usual sizes of memory, in GiB. Systems report a little less than what is installed.
const MEMORY_SIZES: [u64; 15] = [2, 3, 4, 6, 8, 12, 16, 18, 24, 32, 36, 48, 64, 96, 128];

/// The logarithm of the ratio of two sizes of memory up to which a graphics card is recognised: drivers report less
/// than what is installed, and desktops take some. source: assumed
const MAX_MEMORY_DISTANCE: f64 = 0.25;

/// The parts of a device, and how its CPU was recognised.
#[derive(Debug, Clone, PartialEq)]
pub struct RecognisedParts {
    pub parts: DeviceParts,
    /// Whether the name of the CPU is in the catalogue. Otherwise its part is that with the most similar speed.
    pub is_cpu_named: bool,
}

impl Catalogue {
    /// Returns the parts of the catalogue that describe a device best.
    pub fn recognise(&self, device: &DeviceProfile) -> RecognisedParts {
        let named = self.cpu_by_name(&device.cpu.name);
        let cpu = named.unwrap_or_else(|| self.cpu_by_speed(device));
        let gpu = device.gpu.as_ref().filter(|gpu| !gpu.unified_memory);
        let sequential = device.disk.sequential_bandwidth.value.0;
        let is_usual = |disk: &&DiskPart| match device.os {
            Os::Macos => disk.id.starts_with("apple"),
            Os::Android => !disk.id.starts_with("apple"),
            Os::Linux | Os::Windows => !["apple", "ufs"].iter().any(|start| disk.id.starts_with(start)),
        };
        let disks = self.disks.iter().flat_map(|family| &family.disks).filter(is_usual);
        let disk = disks.min_by(|one, other| {
            let distance = |rate: f64| (rate / sequential).ln().abs();
            distance(one.sequential.0).total_cmp(&distance(other.sequential.0))
        });
        let os = self.systems.iter().find(|system| system.os == device.os);
        RecognisedParts {
            parts: DeviceParts {
                cpu: cpu.id.clone(),
                memory: installed(device.memory.total_memory.value),
                disk: disk.map(|disk| disk.id.clone()).unwrap_or_default(),
                os: os.map(|system| system.id.clone()).unwrap_or_default(),
                gpu: gpu.and_then(|gpu| self.gpu_by_name(&gpu.name, gpu.memory_available.value)),
            },
            is_cpu_named: named.is_some(),
        }
    }

    /// Returns the graphics card whose name a driver reports; of several sizes the nearest one.
    fn gpu_by_name(&self, name: &str, memory: Bytes) -> Option<String> {
        let found = words(name);
        let of_card = |card: &str| {
            // `GeForce RTX 3060 12 GB`: drivers do not report the size.
            let mut words = words(card);
            if words.last().is_some_and(|word| word == "gb") {
                words.truncate(words.len() - 2);
            }
            words
        };
        let cards = self.gpus.iter().flat_map(|family| &family.gpus);
        let named = cards.filter(|card| {
            let own = of_card(&card.name);
            let distance = (card.memory.as_f64() / memory.as_f64().max(1.0)).ln().abs();
            distance < MAX_MEMORY_DISTANCE && found.windows(own.len()).any(|window| window == own)
        });
        let best = named
            .min_by_key(|card| (usize::MAX - of_card(&card.name).len(), card.memory.0.abs_diff(memory.0)));
        best.map(|card| card.id.clone())
    }

    /// Returns the CPU whose model name the catalogue has: `Apple M4 Pro`, not `desktop with two channels of
    /// DDR4-3200`.
    fn cpu_by_name(&self, name: &str) -> Option<&CpuPart> {
        let found = words(name);
        let cpus = self.cpus.iter().flat_map(|family| &family.cpus);
        // `Apple M4 Max with 40 GPU cores`, `Snapdragon 865 (LPDDR5-5500)`; `desktop with two channels of DDR4-3200` is
        // no model.
        let model = |cpu: &CpuPart| {
            let end = cpu.name.find(" with ").or(cpu.name.find(" (")).unwrap_or(cpu.name.len());
            words(&cpu.name[..end])
        };
        let is_model = |words: &[String]| {
            words.iter().any(|word| word.contains(|c: char| c.is_ascii_digit())) || words.len() > 1
        };
        let named = cpus.filter(|cpu| {
            let own = model(cpu);
            is_model(&own) && found.windows(own.len()).any(|window| window == own)
        });
        named.max_by_key(|cpu| model(cpu).len())
    }

    /// Returns the desktop or, on Android, the phone that reads weights at the most similar rate.
    fn cpu_by_speed(&self, device: &DeviceProfile) -> &CpuPart {
        let class = match device.os {
            Os::Android => "phone",
            Os::Macos => "apple",
            Os::Linux | Os::Windows => "desktop",
        };
        let rate = |cpu: &CpuPart| {
            let class = self.cpu_efficiency(class);
            let by_cores = class.core_rate.value.0 * f64::from(cpu.cores);
            (cpu.bandwidth.0 * class.bandwidth_share.value.0).min(by_cores)
        };
        let measured = device.cpu.read_bandwidth.value.0;
        let cpus = self.cpus.iter().filter(|family| family.class == class).flat_map(|family| &family.cpus);
        let distance = |cpu: &&CpuPart| (rate(cpu) / measured).ln().abs();
        cpus.min_by(|one, other| distance(one).total_cmp(&distance(other))).expect("every class has CPUs")
    }
}

/// Returns the words of a name in lower case, without `(R)` and `(TM)`.
fn words(name: &str) -> Vec<String> {
    let words = name.split(|c: char| !c.is_alphanumeric()).filter(|word| !word.is_empty());
    words.map(str::to_lowercase).filter(|word| word != "r" && word != "tm").collect()
}

/// Returns the usual size of memory that is not smaller than what a system reports.
fn installed(reported: Bytes) -> Bytes {
    let sizes = MEMORY_SIZES.iter().map(|size| Bytes::from_mib(size << 10));
    sizes.into_iter().find(|size| *size >= reported).unwrap_or(reported)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::shipped_profile;

    #[test]
    fn catalogue_devices_are_recognised() {
        for text in [
            "rtx-3060-12gb, ddr4-3200-dual, 32 GiB, nvme-gen3, windows",
            "rtx-3060-laptop, ddr5-5600-dual, 16 GiB, nvme-gen4, linux",
            "rx-7900-xt, ddr4-3200-quad, 64 GiB, sata-ssd, linux",
            "apple-m4-pro, 24 GiB, apple-ssd, macos",
            "snapdragon-8-gen-2, 12 GiB, ufs-4.0, android",
            "raspberry-pi-5, 8 GiB, sd-uhs-1, linux",
        ] {
            let parts: DeviceParts = text.parse().unwrap();
            let found = Catalogue::shipped().recognise(&parts.to_profile("a").unwrap());
            assert_eq!(found.parts.gpu, parts.gpu);
            assert_eq!((&found.parts.disk, &found.parts.os), (&parts.disk, &parts.os), "{text}");
            assert_eq!(found.parts.memory, parts.memory);
            assert_eq!(found.is_cpu_named, !text.contains("ddr"), "{text}");
            if found.is_cpu_named {
                assert_eq!(found.parts.cpu, parts.cpu);
            }
        }
    }

    #[test]
    fn names_of_drivers_are_recognised() {
        let catalogue = Catalogue::shipped();
        let gpu = |name: &str, gib: u64| catalogue.gpu_by_name(name, Bytes::from_mib(gib << 10));
        assert_eq!(gpu("NVIDIA GeForce RTX 3060", 12).as_deref(), Some("rtx-3060-12gb"));
        assert_eq!(gpu("NVIDIA GeForce RTX 3060", 8).as_deref(), Some("rtx-3060-8gb"));
        assert_eq!(gpu("NVIDIA GeForce RTX 3060 Laptop GPU", 6).as_deref(), Some("rtx-3060-laptop"));
        assert_eq!(gpu("NVIDIA GeForce RTX 3060 Ti", 8).as_deref(), Some("rtx-3060-ti"));
        assert_eq!(gpu("AMD Radeon RX 7900 XT (RADV NAVI31)", 20).as_deref(), Some("rx-7900-xt"));
        assert_eq!(gpu("Intel(R) Arc(TM) A770 Graphics", 16).as_deref(), Some("arc-a770-16gb"));
        assert_eq!(gpu("NVIDIA RTX A1000", 8), None);
        assert_eq!(gpu("NVIDIA L40", 48), None);
        let cpu = |name: &str| catalogue.cpu_by_name(name).map(|cpu| cpu.id.as_str());
        assert_eq!(cpu("Apple M1"), Some("apple-m1"));
        assert!(cpu("Apple M4 Max").is_some_and(|id| id.starts_with("apple-m4-max")));
        assert!(cpu("Intel(R) N100").is_some_and(|id| id.starts_with("intel-n100")));
        assert_eq!(cpu("12th Gen Intel(R) Core(TM) i7-1270P"), None);
        assert_eq!(cpu("AMD Ryzen 5 7600X3D 6-Core Processor"), None);
    }

    #[test]
    fn measured_devices_are_recognised_by_name_and_speed() {
        let found = Catalogue::shipped().recognise(&shipped_profile("d3").unwrap());
        assert_eq!(found.parts.gpu.as_deref(), Some("rtx-2080-ti"));
        assert!(!found.is_cpu_named && found.parts.cpu.starts_with("ddr"), "{found:?}");
        assert_eq!(found.parts.disk, "nvme-gen3");
        let found = Catalogue::shipped().recognise(&shipped_profile("d1").unwrap());
        assert_eq!((found.parts.cpu.as_str(), found.is_cpu_named), ("apple-m1", true), "{found:?}");
    }
}
