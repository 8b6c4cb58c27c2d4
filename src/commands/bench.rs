//! `hearth bench`: measures the speed of a model with hearth and with llama.cpp.
//!
//! hearth and llama.cpp run alternately, each run in a separate process, with the same model file and the same number
//! of threads. Ratios are the speed of hearth divided by the speed of llama.cpp.

use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};

use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

use hearth_profiles::measure::Samples;
use hearth_runtime::Weights;
use hearth_runtime::speed::{InferenceSpeed, PrefillSpeed, SpeedOptions, measure};
use hearth_workflow::Error;
use serde::Serialize;

use super::print_json;
use crate::cli::BenchArgs;
use crate::diagnostics::{ExitCode, Failure};
use crate::machine::check_text_support;
use crate::output::say;
use crate::progress;

const LLAMA_CPP_SCRIPT: &str = include_str!("bench/llama_cpp.py");
/// The default value of the flag `--peer`, and the Python interpreter that this value selects.
const DEFAULT_PYTHON: (&str, &str) = ("llama.cpp", "python3");
/// Exit code of [`LLAMA_CPP_SCRIPT`] if the Python package `llama_cpp` is not installed.
const EXIT_MISSING_PACKAGE: i32 = 77;
/// Time between two checks whether a benchmark process has exited. source: assumed, short compared to a run
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Time limit for reading the remaining output of a benchmark process that has exited. source: assumed, long compared
/// to reading a pipe
const OUTPUT_TIMEOUT: Duration = Duration::from_secs(2);

/// The benchmark results for one number of threads, as `--json` prints them.
#[derive(Debug, Serialize)]
struct Comparison {
    model: String,
    file_bytes: u64,
    threads: u32,
    decode_tokens_per_s: f64,
    /// Prefill speed of hearth for the longest prompt.
    prefill_tokens_per_s: Option<f64>,
    /// Bandwidth at which hearth reads weights while decoding, as a share of the bandwidth that the same threads reach
    /// when they only read memory.
    bandwidth_share: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ratio: Option<Ratio>,
    hearth: InferenceSpeed,
    #[serde(skip_serializing_if = "Option::is_none")]
    llama_cpp: Option<InferenceSpeed>,
}

/// The speeds of hearth divided by the speeds of llama.cpp.
#[derive(Debug, Serialize)]
struct Ratio {
    decode: f64,
    prefill: Option<f64>,
}

impl Comparison {
    fn new(
        args: &BenchArgs,
        file_bytes: u64,
        threads: u32,
        hearth: InferenceSpeed,
        llama_cpp: Option<InferenceSpeed>,
    ) -> Self {
        let prefill = |speed: &InferenceSpeed| longest_prefill(speed).map(|prefill| prefill.tokens_per_s);
        let ratio = llama_cpp.as_ref().map(|theirs| Ratio {
            decode: hearth.decode_tokens_per_s / theirs.decode_tokens_per_s,
            prefill: prefill(&hearth).zip(prefill(theirs)).map(|(ours, theirs)| ours / theirs),
        });
        Self {
            model: args.model.display().to_string(),
            file_bytes,
            threads,
            decode_tokens_per_s: hearth.decode_tokens_per_s,
            prefill_tokens_per_s: prefill(&hearth),
            bandwidth_share: share_of_reading(&hearth, hearth.decode_tokens_per_s),
            ratio,
            hearth,
            llama_cpp,
        }
    }
}

fn longest_prefill(speed: &InferenceSpeed) -> Option<&PrefillSpeed> {
    speed.prefill_speeds.iter().max_by_key(|prefill| prefill.tokens)
}

/// Returns the memory bandwidth that a decode speed requires, as a share of the read bandwidth that hearth measured.
fn share_of_reading(hearth: &InferenceSpeed, tokens_per_s: f64) -> Option<f64> {
    let needed = tokens_per_s * hearth.weight_bytes_per_token? as f64;
    Some(needed / hearth.memory_read_bytes_per_s?)
}

pub fn run(args: &BenchArgs, json: bool) -> Result<ExitCode, Failure> {
    if args.once {
        let threads = args.threads.first().map_or(1, |&threads| threads as usize);
        let options =
            SpeedOptions { threads, prompt_lengths: args.prompt_lengths.clone(), decode_tokens: args.tokens };
        print_json(&measure(&args.model, &options)?)?;
        return Ok(ExitCode::SUCCESS);
    }
    // Checks that all files can be read before an engine starts.
    let weights = Weights::open(&args.model)?;
    check_text_support(&weights, &args.model)?;
    let file_bytes = weights.file_paths().iter().map(|part| file_bytes(part)).sum::<Result<u64, _>>()?;
    let all = std::thread::available_parallelism().map_or(1, |threads| threads.get() as u32);
    let threads = if args.threads.is_empty() { vec![all] } else { args.threads.clone() };
    let run_count = u64::from(args.repeats) * threads.len() as u64;
    let bar = progress::progress_bar("runs", run_count, progress::ITEMS_TEMPLATE);
    let (mut comparisons, mut no_llama_cpp) =
        (Vec::new(), (args.llama_cpp_python == "none").then(String::new));
    for &threads in &threads {
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for _ in 0..args.repeats {
            ours.push(run_engine(hearth_command(args, threads)?, args).map_err(Failure::failed)?);
            if no_llama_cpp.is_none() {
                match run_engine(llama_cpp_command(args, threads), args) {
                    Ok(run) => theirs.push(run),
                    Err(why) => no_llama_cpp = Some(why),
                }
            }
            bar.inc(1);
        }
        let ours = median(&ours).expect("at least one run");
        comparisons.push(Comparison::new(args, file_bytes, threads, ours, median(&theirs)));
    }
    bar.finish_and_clear();
    match &comparisons[..] {
        [only] if json => print_json(only)?,
        several if json => print_json(&several)?,
        all => say!("{}", all.iter().map(table).collect::<String>()),
    }
    if let Some(why) = no_llama_cpp.filter(|why| !why.is_empty()) {
        tracing::info!("note: some runs of llama.cpp have no result: {why}");
        tracing::info!(
            "hint:  use `--peer` to select a Python interpreter that has the package llama-cpp-python, or use `--peer none`"
        );
    }
    Ok(ExitCode::SUCCESS)
}

fn file_bytes(path: &Path) -> Result<u64, Failure> {
    std::fs::metadata(path)
        .map(|file| file.len())
        .map_err(|error| Error::from_io_error(path, "read", &error).into())
}

fn hearth_command(args: &BenchArgs, threads: u32) -> Result<Command, Failure> {
    let program = std::env::current_exe().map_err(Failure::failed)?;
    let mut command = Command::new(program);
    command.arg("bench").arg(&args.model).arg("--once");
    command.arg("--threads").arg(threads.to_string());
    command.arg("--prompts").arg(joined(&args.prompt_lengths));
    command.arg("--tokens").arg(args.tokens.to_string());
    Ok(command)
}

fn llama_cpp_command(args: &BenchArgs, threads: u32) -> Command {
    let python =
        if args.llama_cpp_python == DEFAULT_PYTHON.0 { DEFAULT_PYTHON.1 } else { &args.llama_cpp_python };
    let mut command = Command::new(python);
    command.arg("-c").arg(LLAMA_CPP_SCRIPT).arg(&args.model);
    command.arg(threads.to_string()).arg(joined(&args.prompt_lengths)).arg(args.tokens.to_string());
    command
}

fn joined(numbers: &[u32]) -> String {
    numbers.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}

/// Runs a benchmark process and parses its result. The error is the reason why there is no result.
fn run_engine(mut command: Command, args: &BenchArgs) -> Result<InferenceSpeed, String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let started = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = started.map_err(|error| format!("cannot start `{name}`: {error}"))?;
    // Both pipes are read while the engine runs, so that it never blocks on a full pipe.
    let output = child.stdout.take().map(read_in_background);
    let errors = child.stderr.take().map(read_in_background);
    let polls = Duration::from_secs(args.timeout_seconds).as_nanos() / POLL_INTERVAL.as_nanos();
    let mut status = None;
    for _ in 0..=polls {
        status = child.try_wait().map_err(|error| error.to_string())?;
        if status.is_some() {
            break;
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    let Some(status) = status else {
        let _ = child.kill();
        let _ = child.wait();
        return Err(format!(
            "`{name}` did not finish within {} s; set a longer time limit with `--deadline`",
            args.timeout_seconds
        ));
    };
    // A child process of the engine may still have a pipe open.
    let text = |reader: Option<Receiver<String>>| {
        reader.and_then(|reader| reader.recv_timeout(OUTPUT_TIMEOUT).ok()).unwrap_or_default()
    };
    let (output, errors) = (text(output), text(errors));
    if status.code() == Some(EXIT_MISSING_PACKAGE) {
        return Err(format!(
            "`{name}` has no package llama_cpp; install the package with `pip install llama-cpp-python`"
        ));
    }
    if !status.success() {
        let mut lines = errors.lines().filter(|line| !line.trim().is_empty() && !line.starts_with("hint:"));
        return Err(format!("`{name}` ended with {status}: {}", lines.next_back().unwrap_or("no message")));
    }
    serde_json::from_str(&output).map_err(|error| format!("`{name}` printed no result: {error}"))
}

fn read_in_background(mut from: impl Read + Send + 'static) -> Receiver<String> {
    let (text_tx, text_rx) = mpsc::channel();
    std::thread::spawn(move || {
        let mut text = String::new();
        let _ = from.read_to_string(&mut text);
        let _ = text_tx.send(text);
    });
    text_rx
}

/// Returns the median of each measured value over the runs, and the maximum of the memory read bandwidth.
fn median(runs: &[InferenceSpeed]) -> Option<InferenceSpeed> {
    let first = runs.first()?;
    let of =
        |number: &dyn Fn(&InferenceSpeed) -> f64| Samples::new(runs.iter().map(number).collect()).median();
    let mut median = first.clone();
    median.first_logits_s = of(&|run| run.first_logits_s);
    median.decode_tokens_per_s = of(&|run| run.decode_tokens_per_s);
    let bytes = |bytes: fn(&InferenceSpeed) -> Option<u64>| {
        bytes(first).map(|_| of(&|run| bytes(run).unwrap_or(0) as f64) as u64)
    };
    median.resident_bytes = bytes(|run| run.resident_bytes);
    median.resident_bytes_after_prompts = bytes(|run| run.resident_bytes_after_prompts);
    // The read bandwidth is an upper bound, so the best run counts.
    median.memory_read_bytes_per_s =
        runs.iter().filter_map(|run| run.memory_read_bytes_per_s).max_by(f64::total_cmp);
    for (at, prefill) in median.prefill_speeds.iter_mut().enumerate() {
        prefill.tokens_per_s =
            of(&|run| run.prefill_speeds.get(at).map_or(0.0, |prefill| prefill.tokens_per_s));
    }
    Some(median)
}

fn table(comparison: &Comparison) -> String {
    let Comparison { hearth, llama_cpp, threads, file_bytes, .. } = comparison;
    let llama_cpp = llama_cpp.as_ref();
    let mut lines = vec![format!(
        "{}, {threads} thread{}, {}",
        comparison.model,
        if *threads == 1 { "" } else { "s" },
        hearth.instruction_set.as_deref().unwrap_or("")
    )];
    let heads = if llama_cpp.is_some() { ["hearth", "llama.cpp", "ratio"] } else { ["hearth", "", ""] };
    lines.push(format!("{:<28}{:>10}{:>11}{:>8}", "", heads[0], heads[1], heads[2]));
    let mut row = |name: &str, digits: usize, ours: f64, theirs: Option<f64>, ratio: Option<f64>| {
        let theirs = theirs.map_or(String::new(), |number| format!("{number:.digits$}"));
        let ratio = ratio.map_or(String::new(), |number| format!("{number:.2}"));
        lines.push(format!("{name:<28}{ours:>10.digits$}{theirs:>11}{ratio:>8}").trim_end().to_string());
    };
    let (ours, theirs) = (hearth.first_logits_s, llama_cpp.map(|speed| speed.first_logits_s));
    row("time to first token, s", 2, ours, theirs, theirs.map(|theirs| theirs / ours));
    for (at, prefill) in hearth.prefill_speeds.iter().enumerate() {
        let theirs =
            llama_cpp.and_then(|speed| speed.prefill_speeds.get(at)).map(|prefill| prefill.tokens_per_s);
        let name = format!("prefill of {}, tokens/s", prefill.tokens);
        row(&name, 1, prefill.tokens_per_s, theirs, theirs.map(|theirs| prefill.tokens_per_s / theirs));
    }
    let (ours, theirs) = (hearth.decode_tokens_per_s, llama_cpp.map(|speed| speed.decode_tokens_per_s));
    row("decode, tokens/s", 2, ours, theirs, theirs.map(|theirs| ours / theirs));
    if let (Some(share), Some(reading)) = (comparison.bandwidth_share, hearth.memory_read_bytes_per_s) {
        let theirs = theirs.and_then(|theirs| share_of_reading(hearth, theirs));
        row("decode, % of reading", 0, 100.0 * share, theirs.map(|share| 100.0 * share), None);
        row("reading, GB/s", 1, reading * 1e-9, None, None);
    }
    let in_files = |bytes: Option<u64>| bytes.map(|bytes| bytes as f64 / *file_bytes as f64);
    let mut memory = |name: &str, bytes: fn(&InferenceSpeed) -> Option<u64>| {
        if let Some(ours) = in_files(bytes(hearth)) {
            row(name, 3, ours, llama_cpp.and_then(|speed| in_files(bytes(speed))), None);
        }
    };
    memory("resident memory / file", |speed| speed.resident_bytes);
    memory("  after the prompts", |speed| speed.resident_bytes_after_prompts);
    lines.push("\n".into());
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::{Cli, Verb};

    fn speed(decode: f64) -> InferenceSpeed {
        InferenceSpeed {
            first_logits_s: 1.0,
            prefill_speeds: vec![PrefillSpeed { tokens: 64, tokens_per_s: 10.0 * decode }],
            decode_tokens_per_s: decode,
            resident_bytes: Some(100),
            resident_bytes_after_prompts: None,
            weight_bytes_per_token: Some(1_000_000_000),
            memory_read_bytes_per_s: Some(decode * 2e9),
            instruction_set: None,
        }
    }

    #[test]
    fn median_of_speeds_and_maximum_of_the_read_rate() {
        let median = median(&[speed(3.0), speed(1.0), speed(2.0)]).unwrap();
        assert_eq!(median.decode_tokens_per_s, 2.0);
        assert_eq!(median.prefill_speeds[0].tokens_per_s, 20.0);
        assert_eq!(median.memory_read_bytes_per_s, Some(6e9));
    }

    #[test]
    fn ratio_is_hearth_over_llama_cpp() {
        let Verb::Bench(args) = Cli::parse_from(["hearth", "bench", "m.gguf"]).verb else {
            unreachable!("this is the verb")
        };
        let comparison = Comparison::new(&args, 100, 1, speed(3.0), Some(speed(2.0)));
        let table = table(&comparison);
        assert!(table.contains("decode, tokens/s                  3.00       2.00    1.50"), "{table}");
        assert!(table.contains("decode, % of reading                50         33\n"), "{table}");
        let ratio = comparison.ratio.expect("a speed of llama.cpp");
        assert_eq!((ratio.decode, ratio.prefill, comparison.bandwidth_share), (1.5, Some(1.5), Some(0.5)));
    }
}
