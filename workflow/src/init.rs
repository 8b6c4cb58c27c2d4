//! Generates the text of a new scenario document, with comments, from a few choices of the user.
//!
//! Not here: the questions to the user, which the front end asks.

use std::fmt::Write;
use std::path::Path;

use hearth_profiles::parts::{DeviceParts, PartsError};
use hearth_schema::address::split_host_port;
use hearth_schema::hub_model::is_hub_model_name;

use crate::Error;

/// The network that connects the devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Network {
    Wifi,
    /// Ethernet cables of 1 Gbit/s.
    Cable,
}

#[derive(Debug, Clone, PartialEq)]
pub struct NewDevice {
    pub name: String,
    /// Name of a shipped device profile, path of a device document, or `measured`; empty if the device has `parts`.
    pub profile: String,
    /// The parts of the device in the catalogue.
    pub parts: Option<DeviceParts>,
    /// Address of the worker on the device, as `HOST:PORT`.
    pub address: Option<String>,
    /// Whether the profile is a placeholder until the device is measured.
    pub is_placeholder: bool,
}

#[derive(Debug, Clone, PartialEq)]
pub struct NewScenario {
    pub name: String,
    /// Name of a shipped model profile, or path of a model document or of a GGUF file.
    pub model: String,
    /// The devices of the scenario, the head first.
    pub devices: Vec<NewDevice>,
    pub network: Network,
    /// Context length: number of positions in the KV cache.
    pub context: u32,
}

/// Numbers of prompt tokens and of generated tokens. source: assumed, a short question and its answer
const WORKLOAD: [u32; 2] = [32, 64];

impl NewDevice {
    /// Parses the argument of `--device`: `NAME=PROFILE[@HOST:PORT]`. A profile with commas is a list of parts.
    pub fn parse(text: &str) -> Result<Self, Error> {
        let wrong = || {
            Error::invalid(format!("`{text}` is not a device"))
                .with_location("--device")
                .with_hint(
                    "write NAME=PARTS, for example `laptop=laptop-ddr4-3200,16 GiB,nvme-gen3,linux`, or NAME=PROFILE, such as \
                     `laptop=d2`, or with an address `laptop=d2@192.168.1.7:9001`",
                )
        };
        let (name, rest) = text.split_once('=').ok_or_else(wrong)?;
        let with_address = rest.rsplit_once('@').map(|(profile, at)| (profile, Some(at.trim().to_owned())));
        let (profile, address) = with_address.unwrap_or((rest, None));
        let bad_address = address.as_deref().is_some_and(|at| split_host_port(at).is_none());
        if name.trim().is_empty() || profile.trim().is_empty() || bad_address {
            return Err(wrong());
        }
        Self::new(name.trim().to_owned(), profile.trim().to_owned(), address)
    }

    /// Creates a device. A profile with commas is a list of parts.
    pub fn new(name: String, profile: String, address: Option<String>) -> Result<Self, Error> {
        let (profile, parts) = if profile.contains(',') {
            let parts: DeviceParts = profile.parse().map_err(|error: PartsError| {
                Error::invalid(&error).with_location(format!("device `{name}`")).with_hint(error.hint())
            })?;
            (String::new(), Some(parts))
        } else {
            (profile, None)
        };
        Ok(Self { name, profile, parts, address, is_placeholder: false })
    }
}

impl NewScenario {
    /// Returns the text of the scenario document.
    pub fn to_yaml(&self) -> String {
        let names: Vec<&str> = self.devices.iter().map(|device| device.name.as_str()).collect();
        let [prompt, generate] = WORKLOAD;
        // In a shorter context each has at most half of the positions.
        let (prompt, generate) =
            (prompt.min(self.context / 2), generate.min(self.context - self.context / 2));
        let model = if is_gguf_path(&self.model) { "file" } else { "profile" };
        let mut text = format!("# {} on {}.\n", one_line(&self.model), one_line(&names.join(", ")));
        let _ = write!(
            text,
            "#\n# Check it with `hearth lint`, simulate it with `hearth simulate`; docs/reference/scenarios.md has every key.\n\
             schema: scenario/1\n\
             name: {}\n\
             # Seed of all random numbers: the same seed gives the same run.\n\
             seed: 1\n\
             model: {{{model}: {}}}\n\
             # Context length: positions in the KV cache, for prompt and answer together.\n\
             context: {}\n\
             workload: {{prompt: {prompt}, generate: {generate}}}\n\
             # The first device is the head, which receives the prompt and returns the answer.\n\
             devices:\n",
            quoted(&self.name),
            quoted(&self.model),
            self.context
        );
        for device in &self.devices {
            let address = device.address.as_ref();
            let address = address.map_or(String::new(), |at| format!(", address: {}", quoted(at)));
            if device.is_placeholder {
                let _ = writeln!(
                    text,
                    "  # This profile is a placeholder: run `hearth profile --name NAME -o FILE.yaml` on the device, and write FILE.yaml here."
                );
            }
            let described = match &device.parts {
                Some(parts) => parts_yaml(parts),
                None => format!("profile: {}", quoted(&device.profile)),
            };
            let _ = writeln!(text, "  - {{name: {}, {described}{address}}}", quoted(&device.name));
        }
        let [latency, bandwidth] = match self.network {
            Network::Wifi => [
                "5 ms, source: \"prima.cpp paper, Section 4: 3-7 ms over Wi-Fi; the middle\"",
                "465 Mbit/s, source: \"prima.cpp paper, Section 4: 320-610 Mbps; the middle\"",
            ],
            Network::Cable => [
                "0.2 ms, source: \"assumed: a switch and two network stacks\"",
                "1 Gbit/s, source: \"IEEE 802.3ab\"",
            ],
        };
        let _ = write!(
            text,
            "# Between any two devices. `hearth profile --peer HOST:PORT` measures a link.\nlinks:\n  default:\n    \
             latency: {{value: {latency}}}\n    bandwidth: {{value: {bandwidth}}}\n"
        );
        text
    }
}

fn parts_yaml(parts: &DeviceParts) -> String {
    let DeviceParts { cpu, memory, disk, os, gpu } = parts;
    let gpu = gpu.as_ref().map_or_else(String::new, |gpu| format!(", gpu: {gpu}"));
    format!("parts: {{cpu: {cpu}, memory: {memory}, disk: {disk}, os: {os}{gpu}}}")
}

/// Returns whether a model is given by the path of a GGUF file, or by its name on a hub.
pub fn is_gguf_path(model: &str) -> bool {
    is_hub_model_name(model)
        || Path::new(model).extension().is_some_and(|kind| kind.eq_ignore_ascii_case("gguf"))
}

/// Returns a string as a YAML scalar: without quotes if that is unambiguous, otherwise quoted as in JSON.
fn quoted(text: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | '/');
    let keywords = ["true", "false", "null", "yes", "no", "on", "off"];
    let is_keyword = keywords.iter().any(|keyword| text.eq_ignore_ascii_case(keyword));
    if text.starts_with(|c: char| c.is_ascii_alphabetic()) && !is_keyword && text.chars().all(is_plain) {
        return text.to_owned();
    }
    serde_json::Value::from(text).to_string()
}

/// Replaces control characters with spaces, so that a comment stays on one line.
fn one_line(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use hearth_profiles::Document;
    use hearth_schema::Scenario;

    use super::*;

    fn scenario(names: &[&str]) -> NewScenario {
        let device = |name: &&str| NewDevice::parse(&format!("{name}=d2@10.0.0.7:9001")).expect("a device");
        NewScenario {
            name: "first".into(),
            model: "llama-8b".into(),
            devices: names.iter().map(device).collect(),
            network: Network::Wifi,
            context: 1024,
        }
    }

    #[test]
    fn names_round_trip() {
        let odd = ["laptop", "no", "a: b", "#1", "tab\tlet", "\"quoted\"", "3", "line\nbreak", "ümlaut {x}"];
        let text = scenario(&odd).to_yaml();
        let scenario = Scenario::from_yaml(&text).unwrap_or_else(|error| panic!("{error}\n{text}"));
        let names: Vec<&str> = scenario.devices.iter().map(|device| device.name.as_str()).collect();
        assert_eq!(names, odd);
        assert_eq!(scenario.devices[0].address.as_deref(), Some("10.0.0.7:9001"));
        assert!(text.starts_with("# llama-8b on laptop, no,"), "{text}");
    }

    #[test]
    fn every_network_and_the_smallest_context_are_valid() {
        for network in [Network::Wifi, Network::Cable] {
            for context in [2, 3, 40, 4096] {
                let text = NewScenario { network, context, ..scenario(&["laptop"]) }.to_yaml();
                Scenario::from_yaml(&text).unwrap_or_else(|error| panic!("{error}\n{text}"));
            }
        }
        let text = NewScenario { model: "models/a b.GGUF".into(), ..scenario(&["laptop"]) }.to_yaml();
        assert_eq!(Scenario::from_yaml(&text).expect("valid").model.file.as_deref(), Some("models/a b.GGUF"));
        let text = NewScenario { model: "hf:o/r:Q8_0".into(), ..scenario(&["laptop"]) }.to_yaml();
        assert_eq!(Scenario::from_yaml(&text).expect("valid").model.file.as_deref(), Some("hf:o/r:Q8_0"));
    }

    #[test]
    fn wrong_devices_are_rejected() {
        for text in ["laptop", "=d2", "laptop=", "laptop=d2@here", "laptop=d2@10.0.0.7", "laptop=@1:2"] {
            assert!(NewDevice::parse(text).is_err(), "{text}");
        }
    }
}
