//! Prints what this machine can do: `cargo run --release -p hearth-exec --example profile -- [MODEL]`.

use std::error::Error;

use hearth_exec::profile::{ProfileOptions, profile};
use hearth_profiles::Document;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let options = ProfileOptions {
        name: "this-machine".into(),
        model: arguments.iter().find(|argument| !argument.starts_with("--")).map(Into::into),
        quick: !arguments.iter().any(|argument| argument == "--full"),
        ..ProfileOptions::default()
    };
    let device = profile(&options, |step| eprintln!("{step}"))?;
    print!("{}", device.to_yaml());
    Ok(())
}
