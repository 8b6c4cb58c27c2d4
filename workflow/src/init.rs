//! Writes a first scenario: the text of a commented document from a few answers.
//!
//! Not here: the questions, which the front end asks.

use std::fmt::Write;
use std::path::Path;

use hearth_schema::address::host_and_port;

use crate::Error;

/// How devices are connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Network {
    /// The Wi-Fi of a home.
    Wifi,
    Cable,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewDevice {
    pub name: String,
    /// A shipped device, the path of a document, or `measured`.
    pub profile: String,
    /// The address of its worker.
    pub address: Option<String>,
    /// Whether the profile is a placeholder until the device is measured.
    pub placeholder: bool,
}

/// The content of a first scenario.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewScenario {
    pub name: String,
    /// A shipped model or a path.
    pub model: String,
    /// The head first.
    pub devices: Vec<NewDevice>,
    pub network: Network,
    /// Positions of the key-value cache.
    pub context: u32,
}

/// Tokens of the prompt and generated tokens. source: assumed, a short question and its answer
const WORKLOAD: [u32; 2] = [32, 64];

impl NewDevice {
    /// Reads `NAME=PROFILE[@HOST:PORT]`.
    pub fn parse(text: &str) -> Result<Self, Error> {
        let wrong = || {
            Error::invalid(format!("`{text}` is not a device"))
                .at("--device")
                .hint("write NAME=PROFILE, as `laptop=d2`, or `laptop=d2@192.168.1.7:9001`")
        };
        let (name, rest) = text.split_once('=').ok_or_else(wrong)?;
        let (profile, address) = match rest.rsplit_once('@') {
            Some((profile, address)) => (profile, Some(address)),
            None => (rest, None),
        };
        let address = address.map(|at| at.trim().to_owned());
        let nowhere = address.as_deref().is_some_and(|at| host_and_port(at).is_none());
        if name.trim().is_empty() || profile.trim().is_empty() || nowhere {
            return Err(wrong());
        }
        let (name, profile) = (name.trim().to_owned(), profile.trim().to_owned());
        Ok(Self { name, profile, address, placeholder: false })
    }
}

impl NewScenario {
    /// The text of the document.
    pub fn yaml(&self) -> String {
        let names: Vec<&str> = self.devices.iter().map(|device| device.name.as_str()).collect();
        let [prompt, generate] = WORKLOAD;
        // A shorter context is filled by half.
        let (prompt, generate) =
            (prompt.min(self.context / 2), generate.min(self.context - self.context / 2));
        let model = if is_file(&self.model) { "file" } else { "profile" };
        let mut text = format!("# {} on {}.\n", one_line(&self.model), one_line(&names.join(", ")));
        let _ = write!(
            text,
            "#\n# Check it with `hearth lint`, simulate it with `hearth simulate`; docs/reference/scenarios.md has every key.\n\
             schema: scenario/1\n\
             name: {}\n\
             # Of all random draws: the same seed gives the same run.\n\
             seed: 1\n\
             model: {{{model}: {}}}\n\
             # Positions of the key-value cache: prompt and answer together.\n\
             context: {}\n\
             workload: {{prompt: {prompt}, generate: {generate}}}\n\
             # The first is the head: it takes the prompt and returns the answer.\n\
             devices:\n",
            quoted(&self.name),
            quoted(&self.model),
            self.context
        );
        for device in &self.devices {
            let address = device.address.as_ref();
            let address = address.map_or(String::new(), |at| format!(", address: {}", quoted(at)));
            if device.placeholder {
                let _ = writeln!(
                    text,
                    "  # A placeholder: run `hearth profile --name NAME -o FILE.yaml` on the device, and write FILE.yaml here."
                );
            }
            let (name, profile) = (quoted(&device.name), quoted(&device.profile));
            let _ = writeln!(text, "  - {{name: {name}, profile: {profile}{address}}}");
        }
        text.push_str(links(self.network));
        text
    }
}

fn links(network: Network) -> &'static str {
    match network {
        Network::Wifi => {
            "# Between any two devices. `hearth profile --peer HOST:PORT` measures a link.\n\
             links:\n  \
               default:\n    \
                 latency: {value: 5 ms, source: \"prima.cpp paper, Section 4: 3-7 ms over Wi-Fi; the middle\"}\n    \
                 bandwidth: {value: 465 Mbit/s, source: \"prima.cpp paper, Section 4: 320-610 Mbps; the middle\"}\n"
        }
        Network::Cable => {
            "# Between any two devices. `hearth profile --peer HOST:PORT` measures a link.\n\
             links:\n  \
               default:\n    \
                 latency: {value: 0.2 ms, source: \"assumed: a switch and two network stacks\"}\n    \
                 bandwidth: {value: 1 Gbit/s, source: \"IEEE 802.3ab\"}\n"
        }
    }
}

/// Returns whether a model is named by a GGUF file.
pub fn is_file(model: &str) -> bool {
    Path::new(model).extension().is_some_and(|kind| kind.eq_ignore_ascii_case("gguf"))
}

/// A text as a YAML scalar: plain where that is unambiguous, else quoted as JSON.
fn quoted(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | '/');
    let begins = text.chars().next().is_some_and(|c| c.is_ascii_alphabetic());
    let word = !matches!(
        text.to_ascii_lowercase().as_str(),
        "true" | "false" | "null" | "yes" | "no" | "on" | "off"
    );
    if begins && word && text.chars().all(plain) {
        text.to_owned()
    } else {
        serde_json::Value::from(text).to_string()
    }
}

/// A text on one line, for a comment.
fn one_line(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use hearth_profiles::Document;
    use hearth_schema::Scenario;

    use super::*;

    fn answers(names: &[&str]) -> NewScenario {
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
        let text = answers(&odd).yaml();
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
                let text = NewScenario { network, context, ..answers(&["laptop"]) }.yaml();
                Scenario::from_yaml(&text).unwrap_or_else(|error| panic!("{error}\n{text}"));
            }
        }
        let text = NewScenario { model: "models/a b.GGUF".into(), ..answers(&["laptop"]) }.yaml();
        assert_eq!(Scenario::from_yaml(&text).expect("valid").model.file.as_deref(), Some("models/a b.GGUF"));
    }

    #[test]
    fn wrong_devices_are_refused() {
        for text in ["laptop", "=d2", "laptop=", "laptop=d2@here", "laptop=d2@10.0.0.7", "laptop=@1:2"] {
            assert!(NewDevice::parse(text).is_err(), "{text}");
        }
    }
}
