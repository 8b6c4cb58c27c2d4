//! Shipped device profiles: the documents of `profiles/devices/`, which are compiled into the program.
//!
//! The shipped devices are the six devices of the prima.cpp paper's testbed (its Table 3) and the five SoCs of the
//! HeteroLLM paper's Table 1; the HeteroLLM paper has measurements of one of the SoCs. Values that a paper does not
//! state are inferred (those of the testbed from Table 4) or assumed, as the source of each value says.

use super::DeviceProfile;
use crate::document::Document;
use crate::shipped::{UnknownDocument, shipped};

shipped!(
    "device" in "devices":
    "d1", "d2", "d3", "d4", "d5", "d6",
    "snapdragon-8-gen-3", "dimensity-9300", "apple-a18", "nvidia-orin", "tesla-fsd",
);

pub fn shipped_profile(name: &str) -> Result<DeviceProfile, UnknownDocument> {
    let device = DeviceProfile::from_yaml(shipped_yaml(name)?);
    Ok(device.expect("shipped documents are valid: a test reads them all"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{GpuKind, Os};
    use crate::units::{Bytes, BytesPerSecond};

    /// Checks that every map with a `value` has a `source` of a known kind, and counts the values.
    fn assert_sourced(value: &serde_yaml::Value, place: &str, count: &mut usize) {
        let Some(map) = value.as_mapping() else { return };
        if map.contains_key("value") {
            *count += 1;
            let source = map.get("source").and_then(|source| source.as_str()).unwrap_or_default();
            let known = ["prima.cpp paper", "HeteroLLM paper", "inferred: ", "assumed: "];
            let said = known.iter().any(|start| source.starts_with(start) && source.len() > start.len());
            assert!(said, "{place}: `{source}`");
        }
        for (key, value) in map {
            assert_sourced(value, &format!("{place}.{}", key.as_str().unwrap_or("?")), count);
        }
    }

    #[test]
    fn shipped_devices_are_valid_and_sourced() {
        for name in shipped_names() {
            let device = shipped_profile(name).unwrap();
            assert_eq!(device.name, name);
            let mut count = 0;
            assert_sourced(&serde_yaml::from_str(shipped_yaml(name).unwrap()).unwrap(), name, &mut count);
            assert!(count >= 12, "{name} has {count} numbers");
            assert_eq!(DeviceProfile::from_yaml(&device.to_yaml()).unwrap(), device);
        }
        let error = shipped_profile("d7").unwrap_err().to_string();
        assert_eq!(
            error,
            "no device `d7` is shipped: use one of d1, d2, d3, d4, d5, d6, snapdragon-8-gen-3, dimensity-9300, apple-a18, nvidia-orin, tesla-fsd"
        );
    }

    #[test]
    fn testbed_matches_the_paper() {
        // Table 3: available RAM 2.4, 4.1, 9.7, 1.9 GiB; video memory 8 and 11 GiB; 37 GiB in total.
        let devices = ["d1", "d2", "d3", "d4"].map(|name| shipped_profile(name).unwrap());
        let ram: Bytes = devices.iter().map(|device| device.memory.available_memory.value).sum();
        let gpus = devices.iter().filter_map(|device| device.gpu.as_ref());
        let video: Bytes = gpus.map(|gpu| gpu.memory_available.value).sum();
        assert_eq!((ram + video).to_string(), "37.1 GiB");
        assert_eq!(devices.each_ref().map(|device| device.cpu.cores), [8, 8, 16, 8]);
        assert_eq!(devices[3].os, Os::Android, "HarmonyOS reclaims memory as Android does");
        assert!(devices.iter().flat_map(|device| &device.gpu).all(|gpu| gpu.kind == GpuKind::Cuda));
        assert_eq!(shipped_profile("d1").unwrap().disk_read_rate(), BytesPerSecond(0.72e9));
    }
}
