//! Measures the decoding speed with less memory than weights, by residency policy, and compares it with llama.cpp.
//!
//!     cargo build --release && cargo run --release -p hearth-lab --example residency_table -- \
//!         --model out/1b.gguf --peer python3 --repeats 5
//!
//! Needs Linux and root. All programs run with the same limits: throttled disk reads, and memory for a share of the
//! model file (with `--devices 3`, of the weights of each device) plus 64 MiB. `--peer` is a Python interpreter with
//! llama-cpp-python; without `--peer`, only hearth is measured. With `--routes`, hearth's tokens use the experts of a
//! recording. Standard error has the results of every run.
//!
//! The time of a token is the median over the tokens after the first three, then over the repeats; bytes are means
//! over the same tokens. The column "must be" is the number of bytes that any policy has to read for a token: the
//! weights that it uses, plus the unreclaimable memory (and a managed device's stream buffer), less the memory limit.

#[cfg(target_os = "linux")]
mod table {
    use std::collections::BTreeMap;
    use std::error::Error;
    use std::fs::{self, File};
    use std::io::BufReader;
    use std::path::{Path, PathBuf};
    use std::process::Command;
    use std::time::Duration;

    use hearth_core::schedule::ModelPart;
    use hearth_lab::{CommandRunner, DeviceLimits, ModelCopies};
    use hearth_profiles::measure::Samples;
    use hearth_profiles::{Bytes, BytesPerSecond};
    use hearth_runtime::{Weights, clock::monotonic_nanos};
    use hearth_schema::Trace;
    use hearth_schema::trace::{Counter, CounterReading, StepKind, TracedDevice};

    type Failure = Box<dyn Error>;

    /// The names of the compared residency policies, and their options in a scenario.
    const RESIDENCIES: [(&str, &str); 4] = [
        ("os", "{policy: os, prefetch: false}"),
        ("os, ahead", "{policy: os, prefetch: true}"),
        ("windowed", "{policy: windowed, prefetch: true}"),
        (MANAGED, "{policy: managed, stream_buffer: 8 MiB}"),
    ];
    const MANAGED: &str = "managed";
    const STREAM_BUFFER: u64 = 8 << 20;
    const PEER: &str = "llama.cpp";
    /// Memory for the process in addition to the weights, in bytes.
    const PROCESS_BYTES: u64 = 64 << 20;
    const PROMPT: u32 = 16;
    /// Number of tokens after the first token that are ignored, because the page cache has not settled yet.
    const SETTLING: usize = 2;

    struct Options {
        model: PathBuf,
        peer: Option<PathBuf>,
        hearth: PathBuf,
        shares: Vec<f64>,
        only: Vec<String>,
        repeats: u32,
        tokens: u32,
        devices: u32,
        disk: BytesPerSecond,
        routes: Option<PathBuf>,
    }

    /// The result of a run, per token: bytes read, measured seconds, predicted seconds, and the bytes that any policy
    /// must read (`min_bytes`); `unreclaimable` is the sum of the devices' unreclaimable bytes.
    #[derive(Clone, Copy)]
    struct Run {
        seconds: f64,
        bytes: f64,
        unreclaimable: f64,
        min_bytes: f64,
        predicted: f64,
    }

    pub fn main() -> Result<(), Failure> {
        let options = options()?;
        let scratch = options.model.parent().map(Path::to_path_buf).unwrap_or_default();
        let weights = Weights::open(&options.model)?;
        let layers = weights.shape().layers.0;
        let parts = [ModelPart::Layers(0..layers), ModelPart::Output];
        let extents = parts.map(|part| weights.part_extents(&part)).concat();
        let touched: u64 = extents.iter().map(|extent| extent.length).sum();
        let parts = weights.model().file_paths.iter().filter_map(|part| fs::metadata(part).ok());
        let file: u64 = parts.map(|part| part.len()).sum();
        // The peer reads its own copy, because page cache is charged to the first process that reads a file.
        let copy = |_| ModelCopies::create(&scratch, &weights.model().file_paths, &[PEER.into()]);
        let copies = options.peer.as_ref().map(copy).transpose()?;
        println!(
            "| memory | policy | s/token | of repeats | predicted | MB/token | must be | unreclaimable MiB | speed |"
        );
        println!("| --- | --- | --- | --- | --- | --- | --- | --- | --- |");
        for &share in &options.shares {
            let limit = (file as f64 * share) as u64 + PROCESS_BYTES;
            let mut rows: Vec<_> = names(&options).map(|name| (name, Vec::new())).collect();
            for repeat in 0..options.repeats {
                for (name, runs) in &mut rows {
                    let run = match (&copies, *name) {
                        (Some(copies), PEER) => {
                            copies.fill_memory()?;
                            peer(&options, copies.first_file(0), touched, limit)
                        }
                        _ => hearth(&options, &weights, name, (share, limit)),
                    };
                    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
                    let load = load.split(' ').next().unwrap_or("-");
                    match run {
                        Ok(run) => {
                            runs.push(run);
                            let Run { seconds, bytes, unreclaimable, .. } = run;
                            eprintln!(
                                "{share} {name} {repeat}: {seconds:.3} s, {bytes:.0} bytes, {unreclaimable:.0} bytes unreclaimable, \
                                 load {load}"
                            );
                        }
                        Err(error) => eprintln!("{share} {name} {repeat}: failed: {error}"),
                    }
                }
            }
            // Without a successful run there is no row.
            rows.retain(|(_, runs)| !runs.is_empty());
            print(share, &rows);
        }
        Ok(())
    }

    fn names(options: &Options) -> impl Iterator<Item = &'static str> {
        let peer = options.peer.iter().map(|_| PEER);
        let own = RESIDENCIES.iter().map(|(name, _)| *name);
        peer.chain(own).filter(|name| options.only.is_empty() || options.only.iter().any(|only| only == name))
    }

    fn print(share: f64, rows: &[(&str, Vec<Run>)]) {
        let median =
            |runs: &[Run], value: fn(&Run) -> f64| Samples::new(runs.iter().map(value).collect()).median();
        let peer = rows.iter().find(|(name, _)| *name == PEER);
        let peer = peer.map(|(_, runs)| median(runs, |run| run.seconds));
        for (name, runs) in rows {
            let time = median(runs, |run| run.seconds);
            let min = runs.iter().map(|run| run.seconds).fold(f64::INFINITY, f64::min);
            let max = runs.iter().map(|run| run.seconds).fold(0.0, f64::max);
            let (bytes, min_bytes) = (median(runs, |run| run.bytes), median(runs, |run| run.min_bytes));
            let unreclaimable = median(runs, |run| run.unreclaimable);
            let predicted = median(runs, |run| run.predicted);
            let ratio = if min_bytes > 0.0 { format!("{:.2}x", bytes / min_bytes) } else { "-".into() };
            let predicted = if predicted.is_nan() { "-".into() } else { format!("{predicted:.3}") };
            let speed = peer.map_or("-".into(), |peer| format!("{:.2}x", peer / time));
            println!(
                "| {:.0} % | {name} | {time:.3} | {min:.3} to {max:.3} | {predicted} | {:.0} | {:.0} ({ratio}) | \
                 {:.1} | {speed} |",
                share * 100.0,
                bytes * 1e-6,
                min_bytes * 1e-6,
                unreclaimable / f64::from(1 << 20),
            );
        }
    }

    /// Returns the median seconds and the mean bytes of `tokens` without the first [`SETTLING`] tokens.
    fn settled(tokens: &[(f64, f64)]) -> Result<Run, Failure> {
        let tokens = tokens.get(SETTLING..).filter(|tokens| !tokens.is_empty());
        let tokens = tokens.ok_or("too few tokens: increase `--tokens`")?;
        let bytes = tokens.iter().map(|token| token.1).sum::<f64>() / tokens.len() as f64;
        let seconds = Samples::new(tokens.iter().map(|token| token.0).collect()).median();
        Ok(Run { seconds, bytes, unreclaimable: f64::NAN, min_bytes: f64::NAN, predicted: f64::NAN })
    }

    fn peer(options: &Options, model: &Path, touched: u64, limit: u64) -> Result<Run, Failure> {
        let limits = DeviceLimits { memory: Some(Bytes(limit)), disk_read: Some(options.disk), cpus: None };
        let deadline = Duration::from_mins(20);
        let limited =
            CommandRunner { limits, cold_files: vec![model.into()], memory_hog: None, timeout: deadline };
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/peers/llama_cpp_decode.py");
        let words = [
            script.display().to_string(),
            model.display().to_string(),
            format!("--prompt={PROMPT}"),
            format!("--tokens={}", options.tokens),
        ];
        let python = options.peer.as_deref().ok_or("add `--peer`")?;
        let usage = limited.run(python, &words, true)?;
        if !usage.status.is_some_and(|status| status.success()) || usage.oom_kills > 0 {
            let status = usage.status.map_or("no exit status".into(), |status| status.to_string());
            return Err(format!("llama.cpp failed: {status}, {} OOM kills", usage.oom_kills).into());
        }
        let result: serde_json::Value = serde_json::from_str(&usage.stdout)?;
        let tokens = result["tokens"].as_array().ok_or("llama.cpp printed no tokens")?;
        let number = |token: &serde_json::Value, name: &str| token[name].as_f64().unwrap_or(f64::NAN);
        let tokens = tokens.iter().map(|token| (number(token, "s"), number(token, "bytes")));
        let run = settled(&tokens.collect::<Vec<_>>())?;
        let unreclaimable = usage.peak_unreclaimable_bytes as f64;
        let min_bytes = (touched as f64 - limit as f64 + unreclaimable).max(0.0);
        Ok(Run { unreclaimable, min_bytes, ..run })
    }

    fn hearth(
        options: &Options,
        weights: &Weights,
        name: &str,
        (share, limit): (f64, u64),
    ) -> Result<Run, Failure> {
        let residency = RESIDENCIES.iter().find(|row| row.0 == name).map_or("{}", |row| row.1);
        let folder = std::env::temp_dir().join(format!("hearth-residency-{}", std::process::id()));
        // With several devices, each has memory for a share of its own weights.
        let memory = match options.devices {
            1 => format!("memory: {} KiB", limit / 1024),
            _ => format!("memory_share: {} %", share * 100.0),
        };
        // The head also has the output matrix, so remaining layers go to the last devices.
        let (layers, count) = (weights.shape().layers.0, options.devices);
        let window = |index: u32| layers / count + u32::from(index >= count - layers % count);
        let windows: Vec<u32> = (0..count).map(window).collect();
        let text = scenario(options, residency, &memory, &windows);
        let run = run_lab(options, &text, &folder).map(|(run, devices)| {
            let mut first = 0;
            let min_bytes = windows.iter().zip(devices).map(|(&window, (limit, unreclaimable))| {
                let layers = ModelPart::Layers(first..first + window);
                let ends = if first == 0 { weights.part_bytes(&ModelPart::Output) } else { 0 };
                first += window;
                let missing = (weights.part_bytes(&layers) + ends + unreclaimable).saturating_sub(limit);
                missing + if missing > 0 && name == MANAGED { STREAM_BUFFER } else { 0 }
            });
            Run { min_bytes: min_bytes.sum::<u64>() as f64, ..run }
        });
        let _ = fs::remove_dir_all(&folder);
        run
    }

    fn scenario(options: &Options, residency: &str, memory: &str, windows: &[u32]) -> String {
        let (count, rate) = (options.devices, options.disk.0 * 1e-6);
        let windows: Vec<String> = windows.iter().map(u32::to_string).collect();
        let device = |index: u32| {
            format!(
                "- {{name: d{index}, profile: measured, limits: {{{memory}, disk_read: {rate} MB/s, threads: 2}}}}\n"
            )
        };
        format!(
            "# How fast are devices with less memory than weights?\nschema: scenario/1\nname: residency\n\
             seed: 1\nmodel: {{file: model.gguf}}\ncontext: 256\n\
             workload: {{prompt: {PROMPT}, generate: {}}}\ndevices:\n{}links:\n  default:\n    \
             latency: {{value: 50 us, source: unused}}\n    bandwidth: {{value: 2 GB/s, source: unused}}\n\
             planner: {{strategy: manual, windows: [{}]}}\nresidency: {residency}\n",
            options.tokens + 1,
            (0..count).map(device).collect::<String>(),
            windows.join(", ")
        )
    }

    /// Runs the lab on a scenario. Returns the run, and the memory limit and the unreclaimable bytes of each device.
    fn run_lab(options: &Options, text: &str, folder: &Path) -> Result<(Run, Vec<(u64, u64)>), Failure> {
        fs::create_dir_all(folder)?;
        let scenario = folder.join("scenario.yaml");
        fs::write(&scenario, text)?;
        let started = monotonic_nanos();
        let mut command = Command::new(&options.hearth);
        command.arg("lab").arg(&scenario).arg("--model").arg(&options.model);
        if let Some(routes) = &options.routes {
            command.arg("--routes").arg(routes);
        }
        let output = command.arg("--report").arg(folder).arg("--json").output()?;
        let messages = String::from_utf8_lossy(&output.stderr);
        if !output.status.success() {
            let lines = messages.lines().filter(|line| !line.trim().is_empty());
            return Err(lines.take(2).collect::<Vec<_>>().join(" ").into());
        }
        for warning in messages.lines().filter(|line| line.starts_with("warning")) {
            eprintln!("{warning}");
        }
        eprintln!("lab: {:.0} s", (monotonic_nanos() - started) as f64 * 1e-9);
        let open = |name: &str| File::open(folder.join(name)).map(BufReader::new);
        let predicted = Trace::read(&mut open("predicted.trace")?)?;
        let measured = Trace::read(&mut open("measured.trace")?)?;
        let numbers = |(index, device): (u16, &TracedDevice)| {
            let own = |it: &&CounterReading| it.counter == Counter::Unreclaimable && it.device_index == index;
            let max = measured.readings.iter().filter(own).map(|reading| reading.value).max();
            (device.total_memory_bytes, max.unwrap_or(0))
        };
        let devices: Vec<(u64, u64)> = (0..).zip(&measured.header.devices).map(numbers).collect();
        let unreclaimable = devices.iter().map(|(_, bytes)| bytes).sum::<u64>() as f64;
        let predicted = settled(&tokens(&predicted))?.seconds;
        Ok((Run { unreclaimable, predicted, ..settled(&tokens(&measured))? }, devices))
    }

    /// Returns the seconds and the read bytes of each token after the first token of a trace.
    fn tokens(trace: &Trace) -> Vec<(f64, f64)> {
        let outputs = trace.records.iter().filter(|record| record.kind == StepKind::Output);
        let ends: Vec<u64> = outputs.map(|record| record.end_ns).collect();
        // For each device, the last reading of a pass counts: there may be several.
        let mut read: BTreeMap<u32, BTreeMap<u16, u64>> = BTreeMap::new();
        for reading in trace.readings.iter().filter(|reading| reading.counter == Counter::BytesRead) {
            read.entry(reading.pass_index).or_default().insert(reading.device_index, reading.value);
        }
        let read: Vec<u64> = read.into_values().map(|devices| devices.into_values().sum()).collect();
        let step = |pair: &[u64]| pair[1].saturating_sub(pair[0]) as f64;
        let seconds = ends.windows(2).map(|pair| step(pair) * 1e-9);
        seconds.zip(read.windows(2).map(step)).collect()
    }

    fn options() -> Result<Options, Failure> {
        let own = std::env::current_exe()?;
        let beside = own.parent().and_then(Path::parent).ok_or("no parent folder")?.join("hearth");
        let mut options = Options {
            model: "out/1b.gguf".into(),
            peer: None,
            hearth: beside,
            shares: vec![0.9, 0.75, 0.5, 0.35],
            only: Vec::new(),
            repeats: 5,
            tokens: 12,
            devices: 1,
            disk: BytesPerSecond(200e6),
            routes: None,
        };
        let mut words = std::env::args().skip(1);
        while let Some(name) = words.next() {
            let value = words.next().ok_or_else(|| format!("`{name}` needs a value"))?;
            match name.as_str() {
                "--model" => options.model = value.into(),
                "--peer" => options.peer = Some(value.into()),
                "--hearth" => options.hearth = value.into(),
                "--shares" => {
                    let shares: Result<Vec<f64>, _> = value.split(',').map(str::parse).collect();
                    options.shares = shares?.into_iter().map(|percent| percent / 100.0).collect();
                }
                "--only" => options.only = value.split(';').map(|name| name.trim().into()).collect(),
                "--repeats" => options.repeats = value.parse()?,
                "--devices" => options.devices = value.parse::<u32>()?.clamp(1, 16),
                "--tokens" => options.tokens = value.parse()?,
                "--disk-mbps" => options.disk = BytesPerSecond(value.parse::<f64>()? * 1e6),
                "--routes" => options.routes = Some(value.into()),
                _ => {
                    let hint = "the options are listed at the top of this example";
                    return Err(format!("`{name}` is not an option; {hint}").into());
                }
            }
        }
        if !options.hearth.exists() {
            let program = options.hearth.display();
            return Err(format!("{program} is missing: run `cargo build --release`").into());
        }
        Ok(options)
    }
}

#[cfg(target_os = "linux")]
fn main() -> std::process::ExitCode {
    if let Err(error) = table::main() {
        eprintln!("error: {error}");
        return 1.into();
    }
    0.into()
}

#[cfg(not(target_os = "linux"))]
fn main() {
    eprintln!("limits need Linux control groups");
}
