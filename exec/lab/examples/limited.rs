//! Runs a command within the memory and disk limits of a device and reports its resource usage.
//!
//!     cargo run --release -p hearth-lab --example limited -- --memory-mib 547 --disk-mbps 200 \
//!         --file MODEL.gguf -- COMMAND ARGUMENT...
//!
//! Each `--file` is first dropped from the page cache. With `--hog-mib N --hog-after A --hog-for B`, another process in
//! the same control group allocates N MiB after A seconds and frees them B seconds later. Prints the usage as JSON.

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
    if hearth_lab::MemoryHog::run_if_requested(&arguments) {
        return Ok(0.into());
    }
    let (limited, command) = options(&arguments)?;
    let [program, rest @ ..] = command else { return Err("add the command after `--`".into()) };
    let usage = limited.run(program.as_ref(), rest, false)?;
    eprintln!("{}", serde_json::to_string(&usage)?);
    let seconds = usage.duration_seconds;
    match usage.status {
        None => Err(format!("the command was killed after {seconds:.0} s; increase `--deadline`").into()),
        Some(status) => Ok((status.code().unwrap_or(1) as u8).into()),
    }
}

#[cfg(target_os = "linux")]
fn options(
    arguments: &[String],
) -> Result<(hearth_lab::CommandRunner, &[String]), Box<dyn std::error::Error>> {
    use std::time::Duration;

    use hearth_lab::{CommandRunner, DeviceLimits, MemoryHog};
    use hearth_profiles::{Bytes, BytesPerSecond};

    let end = arguments.iter().position(|word| word == "--").ok_or("add `-- COMMAND ARGUMENT...`")?;
    let (limits, files, deadline) = (DeviceLimits::default(), Vec::new(), Duration::from_mins(30));
    let mut limited = CommandRunner { limits, cold_files: files, memory_hog: None, timeout: deadline };
    let (program, duration) = (std::env::current_exe()?, Duration::from_secs(1 << 30));
    let mut hog = MemoryHog { program, memory: Bytes::ZERO, delay: Duration::ZERO, duration };
    for pair in arguments[..end].chunks(2) {
        let [name, value] = pair else { return Err(format!("`{}` needs a value", pair[0]).into()) };
        let number = || {
            let number = value.parse::<f64>().ok().filter(|number| (0.0..1e9).contains(number));
            number.ok_or_else(|| format!("`{name} {value}`: the value must be a number from 0 to 1e9"))
        };
        let mib = || Ok::<_, String>(Bytes((number()? * f64::from(1 << 20)) as u64));
        let time = || Ok::<_, String>(Duration::from_secs_f64(number()?));
        match name.as_str() {
            "--memory-mib" => limited.limits.memory = Some(mib()?),
            "--disk-mbps" => limited.limits.disk_read = Some(BytesPerSecond(number()? * 1e6)),
            "--file" => limited.cold_files.push(value.into()),
            "--deadline" => limited.timeout = time()?,
            "--hog-mib" => hog.memory = mib()?,
            "--hog-after" => hog.delay = time()?,
            "--hog-for" => hog.duration = time()?,
            _ => {
                let what = format!("`{name}` is not an option");
                return Err(format!("{what}; the options are listed at the top of this example").into());
            }
        }
    }
    limited.memory_hog = (hog.memory > Bytes::ZERO).then_some(hog);
    Ok((limited, &arguments[end + 1..]))
}

#[cfg(not(target_os = "linux"))]
fn main() {
    eprintln!("limits need Linux control groups");
}
