//! Prints the measured profile of this machine: `cargo run --release -p hearth-ring --example profile -- [MODEL]`.

use std::error::Error;

use hearth_profiles::Document;
use hearth_ring::probe::{ProbeEffort, measure_links};
use hearth_runtime::profile::{ProfileOptions, profile};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let options = ProfileOptions {
        name: "this-machine".into(),
        model: arguments.iter().find(|argument| !argument.starts_with("--")).map(Into::into),
        quick: !arguments.iter().any(|argument| argument == "--full"),
        ..ProfileOptions::default()
    };
    let device = profile(
        &options,
        || Ok(measure_links(&[], None, ProbeEffort::of(options.quick))?),
        |step| eprintln!("{step}"),
    )?;
    print!("{}", device.to_yaml());
    Ok(())
}
