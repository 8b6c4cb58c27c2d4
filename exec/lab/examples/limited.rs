//! Runs any command inside a device's memory and disk limits and reports what it used.
//!
//!     cargo run --release -p hearth-lab --example limited -- --memory-mib 547 --disk-mbps 200 \
//!         --file MODEL.gguf -- COMMAND ARGUMENT...
//!
//! Each `--file` is dropped from memory first. `--hog-mib N --hog-after S --hog-for S` lets another process of
//! the same group take and hold N MiB for a while. What was used is printed as JSON on standard error.

#[cfg(target_os = "linux")]
fn main() -> std::process::ExitCode {
    run().unwrap_or_else(|error| {
        eprintln!("error: {error}");
        1.into()
    })
}

#[cfg(target_os = "linux")]
fn run() -> Result<std::process::ExitCode, Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if hearth_lab::MemoryHog::run_if_asked(&arguments) {
        return Ok(0.into());
    }
    let (limited, command) = options(&arguments)?;
    let [program, rest @ ..] = command else { return Err("give a command after `--`".into()) };
    let usage = limited.run(program.as_ref(), rest, false)?;
    eprintln!("{}", serde_json::to_string(&usage)?);
    match usage.status {
        None => Err(format!("it did not end within {:.0} s; give `--deadline`", usage.seconds).into()),
        Some(status) => Ok((status.code().unwrap_or(1) as u8).into()),
    }
}

#[cfg(target_os = "linux")]
fn options(
    arguments: &[String],
) -> Result<(hearth_lab::LimitedCommand, &[String]), Box<dyn std::error::Error>> {
    use std::time::Duration;

    use hearth_lab::{DeviceLimits, LimitedCommand, MemoryHog};
    use hearth_profiles::{Bytes, BytesPerSecond};

    let end = arguments.iter().position(|word| word == "--").ok_or("give `-- COMMAND ARGUMENT...`")?;
    let mut limited = LimitedCommand {
        limits: DeviceLimits::default(),
        files: Vec::new(),
        hog: None,
        deadline: Duration::from_mins(30),
    };
    let program = std::env::current_exe()?;
    let mut hog =
        MemoryHog { program, memory: Bytes::ZERO, after: Duration::ZERO, hold: Duration::from_secs(1 << 30) };
    for pair in arguments[..end].chunks(2) {
        let [name, value] = pair else { return Err(format!("`{}` needs a value", pair[0]).into()) };
        let number = || {
            let number = value.parse::<f64>().ok().filter(|number| (0.0..1e9).contains(number));
            number.ok_or_else(|| format!("`{name} {value}`: give a number that is not negative"))
        };
        let mib = || Ok::<_, String>(Bytes((number()? * f64::from(1 << 20)) as u64));
        let time = || Ok::<_, String>(Duration::from_secs_f64(number()?));
        match name.as_str() {
            "--memory-mib" => limited.limits.memory = Some(mib()?),
            "--disk-mbps" => limited.limits.disk_read = Some(BytesPerSecond(number()? * 1e6)),
            "--file" => limited.files.push(value.into()),
            "--deadline" => limited.deadline = time()?,
            "--hog-mib" => hog.memory = mib()?,
            "--hog-after" => hog.after = time()?,
            "--hog-for" => hog.hold = time()?,
            _ => return Err(format!("`{name}` is not an option; see the top of this example").into()),
        }
    }
    limited.hog = (hog.memory > Bytes::ZERO).then_some(hog);
    Ok((limited, &arguments[end + 1..]))
}

#[cfg(not(target_os = "linux"))]
fn main() {
    eprintln!("limits need Linux control groups");
}
