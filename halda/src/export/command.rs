//! A command line for one device, and the layers that the device computes with it.

use std::borrow::Cow;
use std::ops::Range;

use hearth_schema::plan::{Processor, Role};
use serde::Serialize;

use super::RingDevice;

/// A command to start on a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DeviceCommand {
    /// The name of the device.
    pub device: String,
    pub role: Role,
    /// The layers that the device computes, in the order of the model.
    pub layers: Vec<LayerRange>,
    /// The program and its arguments.
    pub arguments: Vec<String>,
    /// The program and its arguments as a line for a POSIX shell.
    pub command: String,
}

/// Adjacent layers on one processor, counted from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct LayerRange {
    pub processor: Processor,
    pub first: u32,
    pub last: u32,
}

impl LayerRange {
    /// Returns the range of some layers; `None` if there are none.
    pub(super) fn new(processor: Processor, layers: Range<u32>) -> Option<Self> {
        (!layers.is_empty()).then(|| Self { processor, first: layers.start, last: layers.end - 1 })
    }
}

impl DeviceCommand {
    pub(super) fn new(device: &RingDevice, layers: Vec<LayerRange>, arguments: Arguments) -> Self {
        let Arguments(arguments) = arguments;
        let quoted: Vec<_> = arguments.iter().map(|argument| quote(argument)).collect();
        Self {
            device: device.planned.name.clone(),
            role: device.planned.role,
            layers,
            command: quoted.join(" "),
            arguments,
        }
    }

    /// Returns the layers as text, such as `layers 0-15 on the CPU, 16-31 on the GPU`.
    pub fn layers_text(&self) -> String {
        let range = |range: &LayerRange| {
            let processor = match range.processor {
                Processor::Cpu => "CPU",
                Processor::Gpu => "GPU",
            };
            let (first, last) = (range.first, range.last);
            let numbers = if first == last { first.to_string() } else { format!("{first}-{last}") };
            format!("{numbers} on the {processor}")
        };
        let ranges: Vec<String> = self.layers.iter().map(range).collect();
        if ranges.is_empty() { "no layers".to_owned() } else { format!("layers {}", ranges.join(", ")) }
    }
}

/// The program and the arguments of a command while it is put together.
#[derive(Debug)]
pub(super) struct Arguments(Vec<String>);

impl Arguments {
    pub fn new(program: &str) -> Self {
        Self(vec![program.to_owned()])
    }

    /// Appends an argument without a value.
    pub fn switch(&mut self, name: &str) -> &mut Self {
        self.0.push(name.to_owned());
        self
    }

    /// Appends an argument and its value.
    pub fn option(&mut self, name: &str, value: &(impl ToString + ?Sized)) -> &mut Self {
        self.0.extend([name.to_owned(), value.to_string()]);
        self
    }
}

/// Quotes an argument for a POSIX shell if it has characters that a shell may interpret.
fn quote(argument: &str) -> Cow<'_, str> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "_-./:,+@%".contains(c);
    if !argument.is_empty() && argument.chars().all(is_plain) {
        return Cow::Borrowed(argument);
    }
    Cow::Owned(format!("'{}'", argument.replace('\'', r"'\''")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_quoted_for_a_shell() {
        for plain in ["-ngl", "31", "models/a-b_c.gguf", "192.168.1.7:9001,laptop.local:50052"] {
            assert_eq!(quote(plain), plain);
        }
        assert_eq!(quote(""), "''");
        assert_eq!(quote(r"^output\.weight$=CPU"), r"'^output\.weight$=CPU'");
        assert_eq!(quote("my model's.gguf; rm x"), r"'my model'\''s.gguf; rm x'");
        assert_eq!(quote("~/a"), "'~/a'");
    }
}
