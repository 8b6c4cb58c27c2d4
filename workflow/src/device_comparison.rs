//! Compares the profiles of two devices value by value, for example a measured one with the catalogue of parts.

use std::path::Path;

use hearth_profiles::device::{DeviceProfile, shipped_names, shipped_profile};
use hearth_profiles::parts::{Catalogue, DeviceParts, PartsError};
use hearth_profiles::{Bytes, BytesPerSecond, FlopsPerSecond, Fraction, Seconds};
use serde::Serialize;

use crate::Error;
use crate::documents::read_document;
use crate::quantities::{Quantity, quantities};

/// A value of two profiles.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ValuePair {
    /// The keys of the value in a profile, such as `cpu.read_bandwidth`.
    pub name: String,
    /// The values, rounded, with their units; `None` if a profile does not have the value.
    pub values: [Option<String>; 2],
    /// The sources of the values.
    pub sources: [Option<String>; 2],
    /// The second value divided by the first; `None` if one is missing or the first is 0.
    pub ratio: Option<f64>,
}

/// Returns the device that a text describes: the parts of a device, separated by commas, the name of a shipped device,
/// or the path of a profile.
pub fn device_from_text(text: &str) -> Result<DeviceProfile, Error> {
    let path = Path::new(text);
    if text.contains(',') && !path.exists() {
        let wrong = |error: PartsError| Error::invalid(&error).with_location(text).with_hint(error.hint());
        return text.parse::<DeviceParts>().and_then(|parts| parts.to_profile("parts")).map_err(wrong);
    }
    if let Ok(shipped) = shipped_profile(text) {
        return Ok(shipped);
    }
    if path.exists() {
        return read_document(path);
    }
    let names = shipped_names().collect::<Vec<_>>().join(", ");
    let is_part = Catalogue::shipped().part(text).is_ok();
    let what = if is_part {
        format!("`{text}` is a part, not a device")
    } else {
        format!("there is no device `{text}`")
    };
    Err(Error::invalid(what).with_hint(format!(
        "name parts, such as `ddr4-3200-dual, 16 GiB, nvme-gen3, linux`, the file of a profile, or one of {names}"
    )))
}

/// Returns all values of two profiles that have a unit and a source, in the order of the first one.
pub fn compare_devices(one: &DeviceProfile, other: &DeviceProfile) -> Result<Vec<ValuePair>, Error> {
    let documents = [one, other].map(serde_yaml::to_value);
    let [one, other] = documents.map(|document| document.map_err(Error::failed));
    let (one, other) = (one?, other?);
    let (one, other) = (quantities(&one), quantities(&other));
    let same = |quantity: &Quantity, list: &[Quantity]| list.iter().position(|it| it.keys == quantity.keys);
    let only_in_other = other.iter().filter(|quantity| same(quantity, &one).is_none());
    let mut pairs: Vec<ValuePair> = one
        .iter()
        .map(|quantity| ValuePair::new(Some(quantity), same(quantity, &other).map(|at| &other[at])))
        .collect();
    pairs.extend(only_in_other.map(|quantity| ValuePair::new(None, Some(quantity))));
    Ok(pairs)
}

impl ValuePair {
    fn new(one: Option<&Quantity>, other: Option<&Quantity>) -> Self {
        let both = [one, other];
        let read = both.map(|it| {
            it.map(|it| read(it.text).map_or((None, it.text.to_owned()), |(value, text)| (Some(value), text)))
        });
        let ratio = match &read {
            [Some((Some(one), _)), Some((Some(other), _))] if *one > 0.0 => Some(other / one),
            _ => None,
        };
        Self {
            name: one.or(other).map(Quantity::name).unwrap_or_default(),
            values: read.map(|it| it.map(|(_, text)| text)),
            sources: both.map(|it| it.map(|it| it.source.to_owned())),
            ratio,
        }
    }
}

/// Returns a value in its base unit, and rounded as text.
fn read(text: &str) -> Option<(f64, String)> {
    let bytes = text.parse().map(|bytes: Bytes| (bytes.as_f64(), bytes.to_string()));
    let bandwidth = || text.parse().map(|rate: BytesPerSecond| (rate.0, rate.to_string()));
    let arithmetic = || text.parse().map(|rate: FlopsPerSecond| (rate.0, rate.to_string()));
    let time = || text.parse().map(|time: Seconds| (time.0, time.to_string()));
    let share = || text.parse().map(|share: Fraction| (share.0, format!("{:.0} %", share.0 * 100.0)));
    bytes.or_else(|_| bandwidth()).or_else(|_| arithmetic()).or_else(|_| time()).or_else(|_| share()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_two_devices_are_paired() {
        let card = |text| device_from_text(text).unwrap();
        let (paper, parts) = (card("d3"), card("rtx-2080-ti, ddr4-2666-dual, 16 GiB, nvme-gen3, linux"));
        let pairs = compare_devices(&paper, &parts).unwrap();
        let pair = |name: &str| pairs.iter().find(|pair| pair.name == name).unwrap();
        // 523.6 GB/s in the paper's device; 90 % of 616 GB/s.
        let bandwidth = pair("gpu.read_bandwidth");
        assert!((bandwidth.ratio.unwrap() - 554.4 / 523.6).abs() < 1e-9, "{bandwidth:?}");
        assert_eq!(pair("memory.total").ratio, Some(1.0));
        assert_eq!(pair("cpu.token_overhead").values[1], None);
        assert_eq!(pair("gpu.layer_overhead").values[0], None);
        let error = device_from_text("d33").unwrap_err().to_string();
        assert!(error.contains("there is no device `d33`"), "{error}");
    }
}
