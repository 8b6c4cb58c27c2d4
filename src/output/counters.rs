//! Formats the kernel counters of each device in a lab run as a table and as warnings.

use std::fmt::Write;

use hearth_lab::DeviceUsage;
use hearth_profiles::Bytes;

/// Returns a table with a line for each device. Its columns are the bytes read per token, as the disk throttle and the
/// trace count them, and the memory counters.
pub fn format_table(devices: &[DeviceUsage]) -> String {
    let mut text = String::from(
        "device        read/token      by trace   memory limit   unreclaimable     refaulted   oom kills\n",
    );
    let bytes = |number: Option<u64>| number.map_or("-".into(), |number| Bytes(number).to_string());
    let rounded = |number: f64| bytes(Some(number.max(0.0) as u64));
    for device in devices {
        let _ = writeln!(
            text,
            "{:<12}{:>12}{:>14}{:>15}{:>16}{:>14}{:>12}",
            device.name,
            device.throttled_read_bytes_per_token.map_or("-".into(), rounded),
            rounded(device.traced_read_bytes_per_token),
            bytes(device.memory_limit_bytes),
            bytes(device.peak_unreclaimable_bytes),
            bytes(device.refaulted_bytes),
            device.oom_kills.map_or("-".into(), |kills| kills.to_string())
        );
    }
    text
}

/// Returns the reasons why the measurement of a device may be wrong.
pub fn measurement_warnings(device: &DeviceUsage) -> Vec<String> {
    let name = &device.name;
    let mut found = Vec::new();
    if let Some(difference) = device.relative_counter_difference() {
        found.push(format!(
            "the trace of device `{name}` counts {:.0} % {} read bytes than the disk throttle: {} instead of {} \
             per token",
            difference.abs() * 100.0,
            if difference < 0.0 { "fewer" } else { "more" },
            Bytes(device.traced_read_bytes_per_token as u64),
            Bytes(device.throttled_read_bytes_per_token.unwrap_or(0.0) as u64)
        ));
    }
    if device.resident_bytes_before > 0 {
        found.push(format!(
            "device `{name}` did not start with all weights on disk: {} of its copy of the model were in memory; \
             another program may be reading the file",
            Bytes(device.resident_bytes_before)
        ));
    }
    if device.oom_kills.is_some_and(|kills| kills > 0) {
        found.push(format!("device `{name}` ran out of memory: raise its memory limit or lower `context`"));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warnings_and_aligned_columns() {
        let good = DeviceUsage {
            name: "a".into(),
            memory_limit_bytes: Some(190 << 20),
            throttled_read_bytes_per_token: Some(100e6),
            traced_read_bytes_per_token: 101e6,
            oom_kills: Some(0),
            ..DeviceUsage::default()
        };
        assert!(measurement_warnings(&good).is_empty());
        let bad = DeviceUsage {
            traced_read_bytes_per_token: 50e6,
            resident_bytes_before: 1 << 30,
            oom_kills: Some(1),
            ..good.clone()
        };
        assert_eq!(measurement_warnings(&bad).len(), 3);
        assert!(measurement_warnings(&bad)[0].contains("50 % fewer"), "{:?}", measurement_warnings(&bad));
        let text = format_table(&[good, DeviceUsage::default()]);
        let widths: Vec<usize> = text.lines().map(str::len).collect();
        assert!(widths.iter().all(|width| *width == widths[0]), "{text}");
    }
}
