//! Profiling gives a valid device document on any machine.
//!
//! The measurements take only milliseconds, so their values are checked to be plausible but not accurate.

use std::time::Duration;

use hearth_profiles::measure::MeasurementOptions;
use hearth_profiles::{DeviceProfile, Document, Format};
use hearth_ring::probe::{LOOPBACK_PEER_NAME, ProbeOptions, measure_links};
use hearth_runtime::profile::{ProfileError, ProfileOptions, profile};
use hearth_runtime::synth::{SynthOptions, synthesise};

const PROBE: ProbeOptions = ProbeOptions {
    latency_probes: 2,
    max_bandwidth_probes: 1,
    bandwidth_time_limit: Duration::from_millis(50),
};

fn measured(options: &ProfileOptions, peers: &[String]) -> Result<DeviceProfile, ProfileError> {
    let options = ProfileOptions { measurement: MeasurementOptions::minimal(), ..options.clone() };
    profile(&options, || Ok(measure_links(peers, None, PROBE)?), &mut |_| ())
}

/// Collects every number of a document, with its key path and its source.
fn numbers(value: &serde_yaml::Value, path: &str, found: &mut Vec<(String, String, String)>) {
    match value {
        serde_yaml::Value::Sequence(items) => {
            for item in items {
                numbers(item, path, found);
            }
        }
        serde_yaml::Value::Mapping(map) => {
            if let Some(number) = map.get("value").and_then(|value| value.as_str()) {
                let source = map.get("source").and_then(|source| source.as_str()).unwrap_or_default();
                found.push((path.to_owned(), number.to_owned(), source.to_owned()));
            }
            for (key, value) in map {
                numbers(value, &format!("{path}.{}", key.as_str().unwrap_or("?")), found);
            }
        }
        _ => (),
    }
}

#[test]
fn profile_is_a_valid_document_with_a_source_for_every_number() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    synthesise(&SynthOptions::from_preset("tiny").unwrap(), &path, &mut |_, _| ()).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    let options =
        ProfileOptions { name: "here".into(), model: Some(path.clone()), threads: 2, ..Default::default() };
    let device = measured(&options, &[]).unwrap();

    assert_eq!(device.name, "here");
    assert_eq!(device.cpu.cores, 2);
    assert_eq!(device.peer_links[0].peer, LOOPBACK_PEER_NAME);
    let formats: Vec<Format> = device.cpu.matvec.iter().map(|(format, _)| format).collect();
    assert_eq!(formats, [Format::F32, Format::Q4K, Format::Q6K], "those of the model and no others");
    let text = device.to_yaml();
    assert_eq!(DeviceProfile::from_yaml(&text).unwrap(), device);
    let mut found = Vec::new();
    numbers(&serde_yaml::from_str(&text).unwrap(), "device", &mut found);
    assert!(found.len() > 20, "{found:?}");
    for (path, number, source) in found {
        assert!(!source.is_empty(), "{path} has no source");
        // An idle machine has no swap, a cache write may take no time beyond its bytes, and loopback loses nothing.
        let may_be_zero = path.contains("swap")
            || [".kv_copy.latency", ".loss", ".jitter"].iter().any(|zero| path.ends_with(zero));
        assert!(may_be_zero || !number.starts_with("0 "), "{path} is {number}");
    }

    assert_eq!(std::fs::read(&path).unwrap(), bytes, "the model is only read");
    let left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().collect();
    assert_eq!(left.len(), 1, "nothing is left beside it: {left:?}");
}

#[test]
fn model_or_peer_that_cannot_be_profiled_is_named() {
    let options = ProfileOptions { model: Some("nowhere/model.gguf".into()), ..Default::default() };
    let error = measured(&options, &[]).unwrap_err();
    assert!(error.to_string().contains("nowhere/model.gguf"), "{error}");
    let options = ProfileOptions { name: "here".into(), ..Default::default() };
    let error = measured(&options, &["127.0.0.1:1".into()]).unwrap_err();
    assert!(error.to_string().contains("cannot reach worker `127.0.0.1:1`"), "{error}");
}
