//! Writes a report on a pair of synthetic traces: `cargo run -p hearth-reports --example sample_report DIR`.

use std::error::Error;
use std::fs;
use std::path::PathBuf;

use hearth_reports::Report;

#[path = "../tests/it/sample.rs"]
mod sample;

fn main() -> Result<(), Box<dyn Error>> {
    let folder = PathBuf::from(std::env::args().nth(1).unwrap_or_else(|| "out/sample-report".into()));
    let report = Report::new(sample::pair(21))?;
    fs::create_dir_all(&folder)?;
    for (name, contents) in report.render_files() {
        println!("{:>8} bytes  {}", contents.len(), folder.join(&name).display());
        fs::write(folder.join(name), contents)?;
    }
    Ok(())
}
