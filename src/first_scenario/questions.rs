//! What is a person asked who wants a first scenario, and what counts as an answer?
//!
//! Questions go to standard error, answers come line by line; an empty one takes what stands in brackets. An answer
//! that cannot be is asked for again, and the end of the input ends the asking.
//!
//! Not here: what becomes of the answers ([`super::Answers`]).

use std::io::BufRead;

use hearth_profiles::{device, model};

use super::{Answered, is_file};
use crate::cli::Network;
use crate::diagnostics::Failure;

/// After so many answers that cannot be, nobody is taken to be there. source: assumed
const PATIENCE: usize = 20;

/// Somebody who answers.
pub struct Questions<R> {
    answers: R,
    /// Answers that could not be.
    refused: usize,
}

impl<R: BufRead> Questions<R> {
    /// Who answers by these lines.
    pub fn to(answers: R) -> Self {
        Self { answers, refused: 0 }
    }

    /// The model; a shipped one or a path.
    pub fn model(&mut self) -> Result<String, Failure> {
        let known: Vec<&str> = model::shipped_names().collect();
        crate::output::tell!("Models that are shipped: {}.", known.join(", "));
        self.ask("Which model, or the path of a GGUF file?", "llama-8b", |answer| {
            let path = is_file(answer) || answer.contains('/');
            (path || known.contains(&answer)).then(|| answer.to_owned()).ok_or("no such model is shipped")
        })
    }

    /// One device after the other.
    pub fn devices(&mut self) -> Result<Vec<Answered>, Failure> {
        let known: Vec<&str> = device::shipped_names().collect();
        crate::output::tell!(
            "Devices that are shipped: {}; `measured` is this machine. `hearth profile` makes a document of any other.",
            known.join(", ")
        );
        let mut devices: Vec<Answered> = Vec::new();
        loop {
            let (question, usual) = match devices.len() {
                0 => ("What is the device called that you type on?", "this"),
                _ => ("And another one? Its name, or nothing if that is all.", ""),
            };
            let taken = |answer: &str| devices.iter().any(|device| device.name == answer);
            let name = self.ask(question, usual, |answer| {
                if taken(answer) { Err("there is one of that name") } else { Ok(answer.to_owned()) }
            })?;
            if name.is_empty() {
                return Ok(devices);
            }
            let usual = if devices.is_empty() { "measured" } else { "d2" };
            let question = format!("What is `{name}` like, or where is its document?");
            let profile = self.ask(&question, usual, |answer| {
                let path = answer.contains('/') || answer.contains('.');
                let fits = path || answer == "measured" || known.contains(&answer);
                fits.then(|| answer.to_owned()).ok_or("no such device is shipped")
            })?;
            devices.push(Answered { name, profile, address: None, stands_in: false });
        }
    }

    /// How they are joined.
    pub fn network(&mut self) -> Result<Network, Failure> {
        self.ask("Are they joined by wifi or by cable?", "wifi", |answer| match answer {
            "wifi" => Ok(Network::Wifi),
            "cable" => Ok(Network::Cable),
            _ => Err("that is neither `wifi` nor `cable`"),
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
            crate::output::tell!("{question}{brackets}");
            let mut line = String::new();
            let length = self.answers.read_line(&mut line).map_err(|error| {
                Failure::running(format!("cannot read the answer: {error}")).hint("answer by flags instead")
            })?;
            let answer = if line.trim().is_empty() { usual } else { line.trim() };
            match read(answer) {
                Ok(answer) => return Ok(answer),
                Err(why) => {
                    self.refused += 1;
                    if length == 0 || self.refused > PATIENCE {
                        return Err(Failure::unusable(format!("`{answer}`: {why}"))
                            .hint("answer by flags instead, see `hearth init --help`"));
                    }
                    crate::output::tell!("`{answer}`: {why}");
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_taken_and_wrong_ones_asked_for_again() {
        let mut questions =
            Questions::to("llama-9b\nllama-8b\n\nd9\nd3\nlaptop\n\n\nwhat\ncable\n".as_bytes());
        assert_eq!(questions.model().expect("a model"), "llama-8b");
        let devices = questions.devices().expect("devices");
        let told: Vec<(&str, &str)> =
            devices.iter().map(|it| (it.name.as_str(), it.profile.as_str())).collect();
        assert_eq!(told, [("this", "d3"), ("laptop", "d2")]);
        assert_eq!(questions.network().expect("a network"), Network::Cable);
    }

    #[test]
    fn the_end_of_the_input_takes_what_is_usual_and_never_asks_for_ever() {
        let mut questions = Questions::to("".as_bytes());
        assert_eq!(questions.model().expect("the usual one"), "llama-8b");
        assert_eq!(questions.devices().expect("the usual one").len(), 1);
        let many = "no\n".repeat(1000);
        assert!(Questions::to(many.as_bytes()).network().is_err());
    }
}
