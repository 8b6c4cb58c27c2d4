//! Draws the scenarios of `--random`.
//!
//! The axes of the scenarios in `scenarios/lab`: devices, memory, disk, a weak processor, links, rounds, residency,
//! batches and sequences. Each scenario has a random stream of its own, by the seed and its number, so that more of
//! them change none. They are written as files, so that each can be run again.
//!
//! Windows are drawn by hand: what a planner avoids is predicted too.

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use hearth_profiles::Document;
use hearth_schema::Scenario;
use hearth_workflow::Error;
use hearth_workflow::files::{make_folder, write_in};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use crate::diagnostics::Failure;
use crate::machine::open_model;

/// The first of the random streams that scenarios are drawn from.
const STREAM: u64 = 0x4c41_425f_0000_0000;
/// The model, where nobody names one: that of `scenarios/lab`.
const MODEL: &str = "out/1b.gguf";

/// Draws scenarios and writes them into a folder, which then has no others.
pub fn write(folder: &Path, count: u32, seed: u64, model: Option<&Path>) -> Result<(), Failure> {
    let model = model.map_or_else(|| PathBuf::from(MODEL), Path::to_path_buf);
    let layers = open_model(&model)?.profile.shape.layers.0;
    let model = fs::canonicalize(&model).map_err(|error| Error::file(&model, "open", &error))?;
    make_folder(folder)?;
    let old = fs::read_dir(folder).map_err(|error| Error::file(folder, "open", &error))?;
    for entry in old.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with("random-") {
            fs::remove_file(entry.path()).map_err(|error| Error::file(&entry.path(), "remove", &error))?;
        }
    }
    for number in 1..=count {
        let text = scenario(seed, number, layers, &model.display().to_string());
        Scenario::from_yaml(&text).map_err(|error| Error::document(folder, &error))?;
        write_in(folder, format!("random-{seed}-{number:03}.yaml"), text.as_bytes())?;
    }
    Ok(())
}

/// Draws from one scenario's stream.
struct Chance(ChaCha8Rng);

impl Chance {
    fn of(seed: u64, number: u32) -> Self {
        let mut stream = ChaCha8Rng::seed_from_u64(seed);
        stream.set_stream(STREAM | u64::from(number));
        Chance(stream)
    }

    /// From 0 to below 1.
    fn share(&mut self) -> f64 {
        (self.0.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    fn is(&mut self, share: f64) -> bool {
        self.share() < share
    }

    fn one_of<T: Copy>(&mut self, of: &[T]) -> T {
        of[((self.share() * of.len() as f64) as usize).min(of.len() - 1)]
    }

    /// Between two values, by equal ratios.
    fn between(&mut self, least: f64, most: f64) -> f64 {
        least * (most / least).powf(self.share())
    }

    /// So many parts, at least one each, of a whole.
    fn parts(&mut self, whole: u32, count: u32) -> Vec<u32> {
        let mut parts = vec![1; count as usize];
        for _ in count..whole {
            let at = self.one_of(&(0..parts.len()).collect::<Vec<_>>());
            parts[at] += 1;
        }
        parts
    }
}

/// The text of one scenario.
fn scenario(seed: u64, number: u32, layers: u32, model: &str) -> String {
    let mut chance = Chance::of(seed, number);
    let devices = chance.one_of(&[1u32, 2, 2, 3, 3, 3, 4]).min(layers);
    let fits = |rounds: &u32| layers.is_multiple_of(*rounds) && layers / rounds >= devices;
    let rounds: Vec<u32> = [1, 2, 4].into_iter().filter(fits).collect();
    let rounds = if devices == 1 { 1 } else { chance.one_of(&rounds) };
    let windows = chance.parts(layers / rounds, devices);
    let (policy, prefetch) = chance.one_of(&[
        ("os", true),
        ("os", false),
        ("windowed", true),
        ("managed", true),
        ("managed", true),
    ]);
    let (prompt, batches) = (chance.between(8.0, 64.0) as u32, chance.is(0.25));
    let tokens = chance.between(6.0, 14.0) as u32;
    let sequences = if chance.is(0.15) { 2 } else { 1 };
    let memory = chance.one_of(&[None, Some(90), Some(75), Some(75), Some(50), Some(50), Some(35)]);
    // Where nothing is read a token takes some tens of ms, and a few of them tell of a moment of the machine only.
    let generate = if memory.is_none() { tokens * 8 } else { tokens };
    let mut text = format!(
        "# What does drawn scenario {number} of seed {seed} take?\nschema: scenario/1\nname: random-{seed}-{number:03}\nseed: \
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
    let weak = if chance.is(0.25) { chance.one_of(&(0..devices).collect::<Vec<_>>()) } else { devices };
    // Where sequences or batches compute at once, the devices share the machine's processors out.
    let together = sequences > 1 || batches;
    for device in 0..devices {
        // A throttle passes the bytes of a tenth of a second at once, so that a visit is off by that much where a few
        // bytes more or less decide how many it takes. It should read for several.
        let disk = (chance.between(60.0, 240.0) / 10.0).round() * 10.0;
        let mut limits = format!("disk_read: {disk} MB/s");
        if let Some(memory) = memory {
            let _ = write!(limits, ", memory_share: {memory} %");
        }
        limits.push_str(if device == weak {
            ", threads: 1, affinity: [0], cpu: 0.5"
        } else if together {
            ", threads: 1, cpu: 0.5"
        } else {
            ", threads: 2"
        });
        let name = ["a", "b", "c", "d"][device as usize % 4];
        let _ = writeln!(text, "  - {{name: {name}, profile: measured, limits: {{{limits}}}}}");
    }
    links(&mut text, &mut chance, devices);
    let windows: Vec<String> = windows.iter().map(u32::to_string).collect();
    let _ = writeln!(text, "planner:\n  strategy: manual\n  windows: [{}]", windows.join(", "));
    let _ = writeln!(text, "residency:\n  policy: {policy}");
    if policy != "managed" {
        let _ = writeln!(text, "  prefetch: {prefetch}");
    }
    text
}

fn links(text: &mut String, chance: &mut Chance, devices: u32) {
    let emulated = devices > 1 && chance.is(0.6);
    let (latency, bandwidth) = (chance.between(0.5, 10.0), chance.between(100.0, 5000.0).round());
    let air = emulated && chance.is(0.35);
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
        "links:\n  emulated: true\n  default:\n    latency: {{value: {latency:.1} ms, source: \"set: drawn\"}}\n    \
         bandwidth: {{value: {bandwidth} Mbit/s, source: \"set: drawn\"}}"
    );
    if air {
        let names = ["a", "b", "c", "d"][..devices.min(4) as usize].join(", ");
        let sigma = chance.between(0.1, 0.6);
        let _ = writeln!(
            text,
            "  wifi:\n    channels:\n      - {{name: air, bandwidth: {{value: {bandwidth} Mbit/s, source: \"set: drawn\"}}, \
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
    fn every_drawn_scenario_can_be_run_and_follows_from_its_seed() {
        let mut seen: BTreeSet<&str> = BTreeSet::new();
        for number in 1..=200 {
            let text = scenario(7, number, 16, "/models/1b.gguf");
            assert_eq!(text, scenario(7, number, 16, "/models/1b.gguf"));
            let drawn = Scenario::from_yaml(&text).unwrap_or_else(|error| panic!("{error}:\n{text}"));
            assert!(checks::check(&drawn, &[0, 1]).is_ok(), "{text}");
            let windows: u32 = drawn.planner.windows.iter().flatten().sum();
            assert!(
                16 % windows == 0
                    && drawn.planner.windows.map(|windows| windows.len()) == Some(drawn.devices.len())
            );
            for word in [
                "memory_share: 35",
                "memory_share: 90",
                "managed",
                "windowed",
                "prefetch: false",
                "cpu: 0.5",
                "wifi:",
                "sequences: 2",
                "micro_batch",
                "name: d,",
            ] {
                if text.contains(word) {
                    seen.insert(word);
                }
            }
        }
        assert_eq!(seen.len(), 10, "all axes are drawn: {seen:?}");
        assert_ne!(scenario(7, 1, 16, "m"), scenario(8, 1, 16, "m").replace('8', "7"));
        assert!(scenario(1, 1, 1, "m").contains("windows: [1]"), "a model of one layer");
    }
}
