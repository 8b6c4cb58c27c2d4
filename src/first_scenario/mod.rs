//! What does a person's first scenario say?
//!
//! The answers to a few questions become a document with comments, which is read again before anybody gets it: what is
//! written can be planned with.
//!
//! Not here: asking ([`questions`]), and the file (`commands::init`).

pub mod questions;

use std::fmt::Write;
use std::path::Path;

use hearth_schema::address::host_and_port;

use crate::cli::Network;
use crate::diagnostics::Failure;

/// A device by name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answered {
    /// Its name.
    pub name: String,
    /// A shipped device, the path of a document, or `measured`.
    pub profile: String,
    /// Where its worker listens.
    pub address: Option<String>,
    /// The profile only stands in for it.
    pub stands_in: bool,
}

/// Everything that is asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answers {
    /// The scenario's name.
    pub name: String,
    /// A shipped model or a path.
    pub model: String,
    /// The head first.
    pub devices: Vec<Answered>,
    /// How they are joined.
    pub network: Network,
    /// Tokens that there is room for.
    pub context: u32,
}

/// The tokens of the prompt and those generated. source: assumed, a short question and its answer
const WORKLOAD: [u32; 2] = [32, 64];

impl Answered {
    /// Reads `NAME=PROFILE[@HOST:PORT]`.
    pub fn parse(text: &str) -> Result<Self, Failure> {
        let wrong = || {
            Failure::unusable(format!("`{text}` is no device"))
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
        Ok(Self { name, profile, address, stands_in: false })
    }
}

impl Answers {
    /// The document.
    pub fn yaml(&self) -> String {
        let names: Vec<&str> = self.devices.iter().map(|device| device.name.as_str()).collect();
        let [prompt, generate] = WORKLOAD;
        // A context for less than that is filled by half.
        let (prompt, generate) =
            (prompt.min(self.context / 2), generate.min(self.context - self.context / 2));
        let model = if is_file(&self.model) { "file" } else { "profile" };
        let mut text =
            format!("# How fast is {} on {}?\n", one_line(&self.model), one_line(&names.join(", ")));
        let _ = write!(
            text,
            "#\n# hearth lint and hearth simulate take this file; docs/scenarios.md has every key.\n\
             schema: scenario/1\n\
             name: {}\n\
             # Every random draw follows from it: the same seed, the same run.\n\
             seed: 1\n\
             model: {{{model}: {}}}\n\
             # Tokens that the key-value cache has room for: prompt and answer together.\n\
             context: {}\n\
             workload: {{prompt: {prompt}, generate: {generate}}}\n\
             # The first is the head: it reads the prompt and says the answer.\n\
             devices:\n",
            quoted(&self.name),
            quoted(&self.model),
            self.context
        );
        for device in &self.devices {
            let address = device.address.as_ref();
            let address = address.map_or(String::new(), |at| format!(", address: {}", quoted(at)));
            if device.stands_in {
                let _ = writeln!(
                    text,
                    "  # A stand-in: run `hearth profile --name NAME -o FILE.yaml` there, and write FILE.yaml here."
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

/// Whether a model is a file of weights.
fn is_file(model: &str) -> bool {
    Path::new(model).extension().is_some_and(|kind| kind.eq_ignore_ascii_case("gguf"))
}

/// A text as YAML reads it back: plain where nothing in it can be taken for something else, else as JSON.
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

/// For a comment, which ends with its line.
fn one_line(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use hearth_profiles::Document;
    use hearth_schema::Scenario;

    use super::*;

    fn answers(names: &[&str]) -> Answers {
        let device = |name: &&str| Answered::parse(&format!("{name}=d2@10.0.0.7:9001")).expect("a device");
        Answers {
            name: "first".into(),
            model: "llama-8b".into(),
            devices: names.iter().map(device).collect(),
            network: Network::Wifi,
            context: 1024,
        }
    }

    #[test]
    fn whatever_is_answered_is_read_back() {
        let odd = ["laptop", "no", "a: b", "#1", "tab\tlet", "\"quoted\"", "3", "line\nbreak", "ümlaut {x}"];
        let text = answers(&odd).yaml();
        let scenario = Scenario::from_yaml(&text).unwrap_or_else(|error| panic!("{error}\n{text}"));
        let names: Vec<&str> = scenario.devices.iter().map(|device| device.name.as_str()).collect();
        assert_eq!(names, odd);
        assert_eq!(scenario.devices[0].address.as_deref(), Some("10.0.0.7:9001"));
        assert!(text.starts_with("# How fast is llama-8b on laptop, no,"), "{text}");
    }

    #[test]
    fn every_network_and_the_smallest_context_make_a_scenario() {
        for network in [Network::Wifi, Network::Cable] {
            for context in [2, 3, 40, 4096] {
                let text = Answers { network, context, ..answers(&["laptop"]) }.yaml();
                Scenario::from_yaml(&text).unwrap_or_else(|error| panic!("{error}\n{text}"));
            }
        }
        let text = Answers { model: "models/a b.GGUF".into(), ..answers(&["laptop"]) }.yaml();
        assert_eq!(Scenario::from_yaml(&text).expect("valid").model.file.as_deref(), Some("models/a b.GGUF"));
    }

    #[test]
    fn what_is_no_device_is_refused() {
        for text in ["laptop", "=d2", "laptop=", "laptop=d2@here", "laptop=d2@10.0.0.7", "laptop=@1:2"] {
            assert!(Answered::parse(text).is_err(), "{text}");
        }
    }
}
