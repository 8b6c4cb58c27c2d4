//! Generates the random scenarios of `hearth lab --random`.
//!
//! The scenarios vary the number of devices, memory, disk, a slow CPU, links, rounds, residency, batches and sequences.
//! Each scenario has a separate random stream, so it does not depend on the number of scenarios. Windows are also
//! random, because predictions must also be accurate for plans that a planner would avoid.

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use hearth_profiles::Document;
use hearth_schema::Scenario;
use hearth_workflow::Error;
use hearth_workflow::files::{create_folder, write_in_folder};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use crate::cli::GpuWeightFormat;
use crate::diagnostics::Failure;
use crate::machine::open_model;

/// Base of the random stream ids; the number of the scenario is added to this base.
const RNG_STREAM: u64 = 0x4c41_425f_0000_0000;
const DEVICE_NAMES: [&str; 4] = ["a", "b", "c", "d"];
/// Path of the default model, which is also the model of the scenarios in `scenarios/lab`.
const DEFAULT_MODEL: &str = "out/1b.gguf";

/// Writes `count` random scenarios to a folder, and removes earlier random scenarios from the folder.
pub fn write_random_scenarios(
    folder: &Path,
    count: u32,
    seed: u64,
    model: Option<&Path>,
) -> Result<(), Failure> {
    let model = model.map_or_else(|| PathBuf::from(DEFAULT_MODEL), Path::to_path_buf);
    let layers = open_model(&model, GpuWeightFormat::AsStored)?.profile.shape.layers.0;
    let model = fs::canonicalize(&model).map_err(|error| Error::from_io_error(&model, "open", &error))?;
    create_folder(folder)?;
    let old = fs::read_dir(folder).map_err(|error| Error::from_folder_error(folder, "open", &error))?;
    for entry in old.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with("random-") {
            fs::remove_file(entry.path())
                .map_err(|error| Error::from_io_error(&entry.path(), "remove", &error))?;
        }
    }
    for number in 1..=count {
        let text = scenario(seed, number, layers, &model.display().to_string());
        Scenario::from_yaml(&text).map_err(|error| Error::from_document_error(folder, &error))?;
        write_in_folder(folder, format!("random-{seed}-{number:03}.yaml"), text.as_bytes())?;
    }
    Ok(())
}

struct Random(ChaCha8Rng);

impl Random {
    fn new(seed: u64, number: u32) -> Self {
        let mut stream = ChaCha8Rng::seed_from_u64(seed);
        stream.set_stream(RNG_STREAM | u64::from(number));
        Random(stream)
    }

    /// Returns a uniformly distributed number in [0, 1).
    fn unit(&mut self) -> f64 {
        (self.0.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    fn with_probability(&mut self, share: f64) -> bool {
        self.unit() < share
    }

    fn one_of<T: Copy>(&mut self, of: &[T]) -> T {
        of[((self.unit() * of.len() as f64) as usize).min(of.len() - 1)]
    }

    /// Returns a log-uniformly distributed number between `min` and `max`.
    fn between(&mut self, min: f64, max: f64) -> f64 {
        min * (max / min).powf(self.unit())
    }

    /// Splits `whole` into `count` random parts, each of at least 1.
    fn parts(&mut self, whole: u32, count: u32) -> Vec<u32> {
        let mut parts = vec![1; count as usize];
        for _ in count..whole {
            let at = self.one_of(&(0..parts.len()).collect::<Vec<_>>());
            parts[at] += 1;
        }
        parts
    }
}

fn scenario(seed: u64, number: u32, layers: u32, model: &str) -> String {
    let mut random = Random::new(seed, number);
    let devices = random.one_of(&[1u32, 2, 2, 3, 3, 3, 4]).min(layers);
    let fits = |rounds: &u32| layers.is_multiple_of(*rounds) && layers / rounds >= devices;
    let rounds: Vec<u32> = [1, 2, 4].into_iter().filter(fits).collect();
    let rounds = if devices == 1 { 1 } else { random.one_of(&rounds) };
    let windows = random.parts(layers / rounds, devices);
    let policies = [("os", true), ("os", false), ("windowed", true), ("managed", true), ("managed", true)];
    let (policy, prefetch) = random.one_of(&policies);
    let (prompt, batches) = (random.between(8.0, 64.0) as u32, random.with_probability(0.25));
    let tokens = random.between(6.0, 14.0) as u32;
    let sequences = if random.with_probability(0.15) { 2 } else { 1 };
    let memory = random.one_of(&[None, Some(90), Some(75), Some(75), Some(50), Some(50), Some(35)]);
    // Without disk reads a token takes only tens of milliseconds, so more tokens are needed.
    let generate = if memory.is_none() { tokens * 8 } else { tokens };
    let mut text = format!(
        "# Random scenario {number} of seed {seed}.\nschema: scenario/1\nname: random-{seed}-{number:03}\nseed: \
         {number}\nmodel:\n  file: {}\ncontext: 256\nworkload:\n  prompt: {prompt}\n  generate: {generate}\n",
        serde_json::Value::from(model)
    );
    if sequences > 1 {
        let _ = writeln!(text, "  sequences: {sequences}");
    }
    if batches {
        let _ = writeln!(text, "  micro_batch: {}", (prompt / 4).max(1));
    }
    text.push_str("devices:\n");
    let has_weak = random.with_probability(0.25);
    let weak = has_weak.then(|| random.one_of(&(0..devices).collect::<Vec<_>>()));
    // With sequences or batches the devices compute at the same time and share the CPUs.
    let is_concurrent = sequences > 1 || batches;
    for device in 0..devices {
        // A throttle passes the bytes of 0.1 s at once, so a window should take several of these slices to read.
        let disk = (random.between(60.0, 240.0) / 10.0).round() * 10.0;
        let mut limits = format!("disk_read: {disk} MB/s");
        if let Some(memory) = memory {
            let _ = write!(limits, ", memory_share: {memory} %");
        }
        limits += match weak {
            Some(weak) if weak == device => ", threads: 1, affinity: [0], cpu: 0.5",
            _ if is_concurrent => ", threads: 1, cpu: 0.5",
            _ => ", threads: 2",
        };
        let name = DEVICE_NAMES[device as usize];
        let _ = writeln!(text, "  - {{name: {name}, profile: measured, limits: {{{limits}}}}}");
    }
    links(&mut text, &mut random, devices);
    let windows: Vec<String> = windows.iter().map(u32::to_string).collect();
    let _ = writeln!(text, "planner:\n  strategy: manual\n  windows: [{}]", windows.join(", "));
    let _ = writeln!(text, "residency:\n  policy: {policy}");
    if policy != "managed" {
        let _ = writeln!(text, "  prefetch: {prefetch}");
    }
    text
}

fn links(text: &mut String, random: &mut Random, devices: u32) {
    let emulated = devices > 1 && random.with_probability(0.6);
    let (latency, bandwidth) = (random.between(0.5, 10.0), random.between(100.0, 5000.0).round());
    let wifi = emulated && random.with_probability(0.35);
    if !emulated {
        let source = "source: \"assumed: loopback; replaced by a measurement\"";
        let _ = writeln!(
            text,
            "links:\n  default:\n    latency: {{value: 50 us, {source}}}\n    bandwidth: {{value: 2 GB/s, {source}}}"
        );
        return;
    }
    let _ = writeln!(
        text,
        "links:\n  emulation: delays\n  default:\n    latency: {{value: {latency:.1} ms, source: \"set: drawn\"}}\n    \
         bandwidth: {{value: {bandwidth} Mbit/s, source: \"set: drawn\"}}"
    );
    if wifi {
        let names = DEVICE_NAMES[..devices as usize].join(", ");
        let sigma = random.between(0.1, 0.6);
        let _ = writeln!(
            text,
            "  wifi:\n    channels:\n      - {{name: wifi, bandwidth: {{value: {bandwidth} Mbit/s, source: \"set: drawn\"}}, \
             delay: {{median: {{value: {latency:.1} ms, source: \"set: drawn\"}}, sigma: {{value: {sigma:.2}, source: \"set: \
             drawn\"}}}}, stations: [{names}]}}\n    tcp: {{idle_restart: false, loss: {{value: 0 %, source: \"set\"}}}}"
        );
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::super::super::checks;
    use super::*;

    #[test]
    fn random_scenarios_are_valid_and_reproducible() {
        let memory = ["memory_share: 35", "memory_share: 90", "managed", "windowed", "prefetch: false"];
        let others = ["cpu: 0.5", "wifi:", "sequences: 2", "micro_batch", "name: d,"];
        let axes = [memory, others].concat();
        let mut found: BTreeSet<&str> = BTreeSet::new();
        for number in 1..=200 {
            let text = scenario(7, number, 16, "/models/1b.gguf");
            assert_eq!(text, scenario(7, number, 16, "/models/1b.gguf"));
            let drawn = Scenario::from_yaml(&text).unwrap_or_else(|error| panic!("{error}:\n{text}"));
            assert!(checks::check(&drawn, &[0, 1]).is_ok(), "{text}");
            let windows = drawn.planner.windows.expect("drawn windows");
            assert_eq!(windows.len(), drawn.devices.len());
            assert!(16u32.is_multiple_of(windows.iter().sum()));
            found.extend(axes.iter().copied().filter(|word| text.contains(word)));
        }
        assert_eq!(found.len(), axes.len(), "all axes are drawn: {found:?}");
        assert_ne!(scenario(7, 1, 16, "m"), scenario(8, 1, 16, "m").replace('8', "7"));
        assert!(scenario(1, 1, 1, "m").contains("windows: [1]"), "a model of one layer");
    }
}
