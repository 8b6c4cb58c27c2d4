//! The questions of `hearth init`.
//!
//! Questions go to standard error, answers come line by line; an empty one takes the default in brackets. A wrong answer is
//! asked for again, up to a limit.

use std::io::BufRead;

use hearth_profiles::{device, model};

use hearth_workflow::init::{Network, NewDevice, is_file};

use crate::diagnostics::Failure;

/// The most wrong answers that are accepted. source: assumed
const MAX_REFUSED: usize = 20;

pub struct Questions<R> {
    answers: R,
    /// Wrong answers so far.
    refused: usize,
}

impl<R: BufRead> Questions<R> {
    pub fn new(answers: R) -> Self {
        Self { answers, refused: 0 }
    }

    /// Asks for the model: a shipped one or a path.
    pub fn model(&mut self) -> Result<String, Failure> {
        let known: Vec<&str> = model::shipped_names().collect();
        crate::output::say_stderr!("Shipped models: {}.", known.join(", "));
        self.ask("Which model, or the path of a GGUF file?", "llama-8b", |answer| {
            let path = is_file(answer) || answer.contains('/');
            (path || known.contains(&answer)).then(|| answer.to_owned()).ok_or("this is not a shipped model")
        })
    }

    /// Asks for devices until an empty name.
    pub fn devices(&mut self) -> Result<Vec<NewDevice>, Failure> {
        let known: Vec<&str> = device::shipped_names().collect();
        crate::output::say_stderr!(
            "Shipped devices: {}; `measured` is this machine. `hearth profile` writes the document of any other.",
            known.join(", ")
        );
        let mut devices: Vec<NewDevice> = Vec::new();
        loop {
            let (question, usual) = match devices.len() {
                0 => ("What is the name of this device?", "this"),
                _ => ("What is the name of the next device? Leave it empty if there are no more.", ""),
            };
            let taken = |answer: &str| devices.iter().any(|device| device.name == answer);
            let name = self.ask(question, usual, |answer| {
                if taken(answer) { Err("this name is taken") } else { Ok(answer.to_owned()) }
            })?;
            if name.is_empty() {
                return Ok(devices);
            }
            let usual = if devices.is_empty() { "measured" } else { "d2" };
            let question = format!("Which profile has `{name}`, or where is its document?");
            let profile = self.ask(&question, usual, |answer| {
                let path = answer.contains('/') || answer.contains('.');
                let fits = path || answer == "measured" || known.contains(&answer);
                fits.then(|| answer.to_owned()).ok_or("this is not a shipped device")
            })?;
            devices.push(NewDevice { name, profile, address: None, placeholder: false });
        }
    }

    /// Asks how the devices are connected.
    pub fn network(&mut self) -> Result<Network, Failure> {
        self.ask("Are they connected by wifi or by cable?", "wifi", |answer| match answer {
            "wifi" => Ok(Network::Wifi),
            "cable" => Ok(Network::Cable),
            _ => Err("answer `wifi` or `cable`"),
        })
    }

    fn ask<T>(
        &mut self,
        question: &str,
        usual: &str,
        read: impl Fn(&str) -> Result<T, &'static str>,
    ) -> Result<T, Failure> {
        loop {
            let brackets = if usual.is_empty() { String::new() } else { format!(" [{usual}]") };
            crate::output::say_stderr!("{question}{brackets}");
            let mut line = String::new();
            let length = self.answers.read_line(&mut line).map_err(|error| {
                Failure::running(format!("cannot read the answer: {error}")).hint("answer by flags instead")
            })?;
            let answer = if line.trim().is_empty() { usual } else { line.trim() };
            match read(answer) {
                Ok(answer) => return Ok(answer),
                Err(why) => {
                    self.refused += 1;
                    if length == 0 || self.refused > MAX_REFUSED {
                        return Err(Failure::unusable(format!("`{answer}`: {why}"))
                            .hint("answer by flags instead, see `hearth init --help`"));
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
    fn wrong_answers_are_asked_for_again() {
        let mut questions =
            Questions::new("llama-9b\nllama-8b\n\nd9\nd3\nlaptop\n\n\nwhat\ncable\n".as_bytes());
        assert_eq!(questions.model().expect("a model"), "llama-8b");
        let devices = questions.devices().expect("devices");
        let told: Vec<(&str, &str)> =
            devices.iter().map(|it| (it.name.as_str(), it.profile.as_str())).collect();
        assert_eq!(told, [("this", "d3"), ("laptop", "d2")]);
        assert_eq!(questions.network().expect("a network"), Network::Cable);
    }

    #[test]
    fn end_of_input_takes_the_defaults() {
        let mut questions = Questions::new("".as_bytes());
        assert_eq!(questions.model().expect("the usual one"), "llama-8b");
        assert_eq!(questions.devices().expect("the usual one").len(), 1);
        let many = "no\n".repeat(1000);
        assert!(Questions::new(many.as_bytes()).network().is_err());
    }
}
