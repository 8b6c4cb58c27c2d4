//! Interactive questions of `hearth init`.
//!
//! Questions are printed to standard error; each answer is a line of standard input. An empty line selects the
//! default in brackets. After an invalid answer the question is repeated, up to a limit.

use std::fmt::Display;
use std::io::BufRead;

use hearth_profiles::parts::DeviceParts;
use hearth_profiles::{device, model};
use hearth_workflow::init::{Network, NewDevice, is_gguf_path};

use crate::diagnostics::Failure;

/// Maximum number of invalid answers to all questions together. source: assumed
const MAX_INVALID_ANSWERS: usize = 20;

pub struct Questionnaire<R> {
    answers: R,
    invalid_answers: usize,
}

impl<R: BufRead> Questionnaire<R> {
    pub fn new(answers: R) -> Self {
        Self { answers, invalid_answers: 0 }
    }

    /// Asks for the model: the name of a model that ships with hearth, or a path.
    pub fn ask_model(&mut self) -> Result<String, Failure> {
        let known: Vec<&str> = model::shipped_names().collect();
        crate::output::say_stderr!("Shipped models: {}.", known.join(", "));
        self.ask("Which model (a shipped model, or the path of a GGUF file)?", "llama-8b", |answer| {
            let is_known = is_gguf_path(answer) || answer.contains('/') || known.contains(&answer);
            is_known.then(|| answer.to_owned()).ok_or("hearth ships no model with this name")
        })
    }

    /// Asks for the names and profiles of devices, until the answer is an empty name.
    pub fn ask_devices(&mut self) -> Result<Vec<NewDevice>, Failure> {
        let known: Vec<&str> = device::shipped_names().collect();
        crate::output::say_stderr!(
            "Devices: `measured` is this machine; any other has parts, such as `rtx-3060-12gb, ddr4-3200-dual, 16 GiB, \
             nvme-gen3, windows` (`hearth device search` finds them), a document from `hearth profile`, or is one of {}.",
            known.join(", ")
        );
        let mut devices: Vec<NewDevice> = Vec::new();
        loop {
            let (question, default) = match devices.len() {
                0 => ("What is the name of this device?", "this"),
                _ => ("What is the name of the next device? An empty name ends the list of devices.", ""),
            };
            let is_used = |answer: &str| devices.iter().any(|device| device.name == answer);
            let name = self.ask(question, default, |answer| {
                if is_used(answer) { Err("this name is already in use") } else { Ok(answer.to_owned()) }
            })?;
            if name.is_empty() {
                return Ok(devices);
            }
            let default = if devices.is_empty() { "measured" } else { "d2" };
            let question = format!("What is `{name}` (its parts, a name, or the path of a document)?");
            let profile = self.ask(&question, default, |answer| {
                let path = !answer.contains(',') && answer.contains(['/', '.']);
                let is_known = path || answer == "measured" || known.contains(&answer);
                let parts = || answer.parse::<DeviceParts>().map(|_| ()).map_err(|error| error.to_string());
                if is_known { Ok(()) } else { parts() }.map(|()| answer.to_owned())
            })?;
            devices.push(NewDevice::new(name, profile, None)?);
        }
    }

    pub fn ask_network(&mut self) -> Result<Network, Failure> {
        self.ask("Are the devices connected by wifi or by cable?", "wifi", |answer| match answer {
            "wifi" => Ok(Network::Wifi),
            "cable" => Ok(Network::Cable),
            _ => Err("answer `wifi` or `cable`"),
        })
    }

    fn ask<T, E: Display>(
        &mut self,
        question: &str,
        default: &str,
        read: impl Fn(&str) -> Result<T, E>,
    ) -> Result<T, Failure> {
        loop {
            let brackets = if default.is_empty() { String::new() } else { format!(" [{default}]") };
            crate::output::say_stderr!("{question}{brackets}");
            let mut line = String::new();
            let length = self.answers.read_line(&mut line).map_err(|error| {
                Failure::failed(format!("cannot read the answer: {error}"))
                    .with_hint("set the values with flags: see `hearth init --help`")
            })?;
            let answer = if line.trim().is_empty() { default } else { line.trim() };
            match read(answer) {
                Ok(answer) => return Ok(answer),
                Err(why) => {
                    self.invalid_answers += 1;
                    if length == 0 || self.invalid_answers > MAX_INVALID_ANSWERS {
                        return Err(Failure::invalid(format!("`{answer}`: {why}"))
                            .with_hint("set the values with flags: see `hearth init --help`"));
                    }
                    crate::output::say_stderr!("`{answer}`: {why}");
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn end_of_input_selects_the_defaults() {
        let mut questionnaire = Questionnaire::new("".as_bytes());
        assert_eq!(questionnaire.ask_model().expect("the default"), "llama-8b");
        assert_eq!(questionnaire.ask_devices().expect("the default").len(), 1);
        let many = "no\n".repeat(1000);
        assert!(Questionnaire::new(many.as_bytes()).ask_network().is_err());
    }
}
