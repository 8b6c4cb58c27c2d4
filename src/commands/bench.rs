//! `hearth bench`: measures the speed of a model with hearth and with llama.cpp.
//!
//! hearth and llama.cpp run alternately, each run in a separate process, with the same model file and the same number
//! of threads. Ratios are the speed of hearth divided by the speed of llama.cpp. The runs are repeated until the
//! confidence interval of the decode ratio is narrow.

use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};

use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

use hearth_profiles::measure::Samples;
use hearth_profiles::measure::processor::cpu_description;
use hearth_profiles::measure::topology::Topology;
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
/// Maximum half width of the confidence interval of the decode ratio, relative to the ratio, with which no more runs are
/// needed.
const MAX_INTERVAL: f64 = 0.05;
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
    /// The name and the microarchitecture of the CPU.
    processor: String,
    /// Number of runs of each engine.
    runs: usize,
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
    /// Half the width of the 95 % confidence interval of the decode ratio, relative to the ratio; `None` for one run.
    decode_interval: Option<f64>,
    prefill: Option<f64>,
}

/// Returns half the width of the 95 % confidence interval of the ratio of two speeds, relative to the ratio, given the
/// speeds of pairs of runs. The logarithms of the ratios are assumed to have a normal distribution. Returns `None` for
/// fewer than two pairs.
fn ratio_interval(pairs: &[(f64, f64)]) -> Option<f64> {
    // Quantiles 0.975 of Student's t distribution with 1, 2, ... degrees of freedom.
    const QUANTILES: [f64; 19] = [
        12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12,
        2.11, 2.10, 2.09,
    ];
    let freedom = pairs.len().checked_sub(1).filter(|&freedom| freedom > 0)?;
    let logarithms: Vec<f64> = pairs.iter().map(|(ours, theirs)| (ours / theirs).ln()).collect();
    let mean = logarithms.iter().sum::<f64>() / pairs.len() as f64;
    let variance = logarithms.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / freedom as f64;
    let quantile = QUANTILES[(freedom - 1).min(QUANTILES.len() - 1)];
    Some((quantile * (variance / pairs.len() as f64).sqrt()).exp_m1())
}

/// Returns the decode speeds of the pairs of runs of hearth and llama.cpp.
fn decode_pairs(ours: &[InferenceSpeed], theirs: &[InferenceSpeed]) -> Vec<(f64, f64)> {
    let speed = |run: &InferenceSpeed| run.decode_tokens_per_s;
    ours.iter().zip(theirs).map(|(ours, theirs)| (speed(ours), speed(theirs))).collect()
}

impl Comparison {
    fn new(
        args: &BenchArgs,
        file_bytes: u64,
        threads: u32,
        ours: &[InferenceSpeed],
        theirs: &[InferenceSpeed],
    ) -> Self {
        let hearth = median(ours).expect("at least one run");
        let llama_cpp = median(theirs);
        let prefill = |speed: &InferenceSpeed| longest_prefill(speed).map(|prefill| prefill.tokens_per_s);
        let pairs = decode_pairs(ours, theirs);
        let ratio = llama_cpp.as_ref().map(|theirs| Ratio {
            decode: hearth.decode_tokens_per_s / theirs.decode_tokens_per_s,
            decode_interval: ratio_interval(&pairs),
            prefill: prefill(&hearth).zip(prefill(theirs)).map(|(ours, theirs)| ours / theirs),
        });
        Self {
            model: args.model.display().to_string(),
            file_bytes,
            threads,
            processor: cpu_description(),
            runs: ours.len(),
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
        let options = SpeedOptions {
            threads,
            prompt_lengths: args.prompt_lengths.clone(),
            decode_tokens: args.tokens,
            packed: !args.unpacked,
        };
        print_json(&measure(&args.model, &options)?)?;
        return Ok(ExitCode::SUCCESS);
    }
    // Checks that all files can be read before an engine starts.
    let weights = Weights::open(&args.model)?;
    check_text_support(&weights, &args.model)?;
    let file_bytes =
        weights.model().file_paths.iter().map(|part| file_bytes(part)).sum::<Result<u64, _>>()?;
    let all = Topology::detect().compute_threads() as u32;
    let threads = if args.threads.is_empty() { vec![all] } else { args.threads.clone() };
    let max_repeats = args.max_repeats.max(args.repeats);
    let run_count = u64::from(max_repeats) * threads.len() as u64;
    let bar = progress::progress_bar("runs", run_count, progress::ITEMS_TEMPLATE);
    let (mut comparisons, mut no_llama_cpp) =
        (Vec::new(), (args.llama_cpp_python == "none").then(String::new));
    for &threads in &threads {
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for run in 0..max_repeats {
            let interval = ratio_interval(&decode_pairs(&ours, &theirs));
            if run >= args.repeats && interval.is_none_or(|interval| interval <= MAX_INTERVAL) {
                bar.inc(u64::from(max_repeats - run));
                break;
            }
            ours.push(run_engine(hearth_command(args, threads)?, args).map_err(Failure::failed)?);
            if no_llama_cpp.is_none() {
                match run_engine(llama_cpp_command(args, threads), args) {
                    Ok(run) => theirs.push(run),
                    Err(why) => no_llama_cpp = Some(why),
                }
            }
            bar.inc(1);
        }
        comparisons.push(Comparison::new(args, file_bytes, threads, &ours, &theirs));
    }
    bar.finish_and_clear();
    match &comparisons[..] {
        [only] if json => print_json(only)?,
        several if json => print_json(&several)?,
        all => say!("{}", all.iter().map(table).collect::<String>()),
    }
    for comparison in &comparisons {
        let interval = comparison.ratio.as_ref().and_then(|ratio| ratio.decode_interval);
        if let Some(interval) = interval.filter(|&interval| interval > MAX_INTERVAL) {
            let Comparison { threads, runs, .. } = comparison;
            let percent = 100.0 * interval;
            tracing::info!(
                "note: the machine is not quiet: with --threads {threads}, the decode ratio is known only to \u{b1}{percent:.0} % after {runs} runs"
            );
            tracing::info!("hint:  stop other programs, or increase --max-repeats");
        }
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
    if args.unpacked {
        command.arg("--unpacked");
    }
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

/// Returns a row of the table: its name, the values of hearth and llama.cpp with `digits` decimals, and their ratio.
fn row(name: &str, digits: usize, ours: f64, theirs: Option<f64>, ratio: Option<f64>) -> String {
    let theirs = theirs.map_or(String::new(), |number| format!("{number:.digits$}"));
    let ratio = ratio.map_or(String::new(), |number| format!("{number:.2}"));
    format!("{name:<28}{ours:>10.digits$}{theirs:>11}{ratio:>8}").trim_end().to_string()
}

fn table(comparison: &Comparison) -> String {
    let Comparison { hearth, llama_cpp, threads, file_bytes, .. } = comparison;
    let llama_cpp = llama_cpp.as_ref();
    let plural = if *threads == 1 { "" } else { "s" };
    let mut lines =
        vec![format!("{}, {threads} thread{plural}", comparison.model), comparison.processor.clone()];
    let instructions = |speed: &InferenceSpeed| {
        let packed = if speed.uses_packed() { ", packed weights" } else { "" };
        Some(format!("{}{packed}", speed.instruction_set.as_ref()?))
    };
    lines.extend(instructions(hearth).map(|names| format!("hearth: {names}")));
    lines.extend(llama_cpp.and_then(instructions).map(|names| format!("llama.cpp: {names}")));
    let heads = if llama_cpp.is_some() { ["hearth", "llama.cpp", "ratio"] } else { ["hearth", "", ""] };
    lines.push(format!("{:<28}{:>10}{:>11}{:>8}", "", heads[0], heads[1], heads[2]));
    let (ours, theirs) = (hearth.first_logits_s, llama_cpp.map(|speed| speed.first_logits_s));
    lines.push(row("time to first token, s", 2, ours, theirs, theirs.map(|theirs| theirs / ours)));
    for (at, prefill) in hearth.prefill_speeds.iter().enumerate() {
        let theirs =
            llama_cpp.and_then(|speed| speed.prefill_speeds.get(at)).map(|prefill| prefill.tokens_per_s);
        let name = format!("prefill of {}, tokens/s", prefill.tokens);
        lines.push(row(
            &name,
            1,
            prefill.tokens_per_s,
            theirs,
            theirs.map(|theirs| prefill.tokens_per_s / theirs),
        ));
    }
    let (ours, theirs) = (hearth.decode_tokens_per_s, llama_cpp.map(|speed| speed.decode_tokens_per_s));
    lines.push(row("decode, tokens/s", 2, ours, theirs, theirs.map(|theirs| ours / theirs)));
    if let Some((ratio, interval)) =
        comparison.ratio.as_ref().and_then(|ratio| Some((ratio.decode, ratio.decode_interval?)))
    {
        let (low, high) = (ratio / (1.0 + interval), ratio * (1.0 + interval));
        lines.push(format!("  95 % interval of the ratio: {low:.2} to {high:.2} ({} runs)", comparison.runs));
    }
    if let (Some(share), Some(reading)) = (comparison.bandwidth_share, hearth.memory_read_bytes_per_s) {
        let theirs = theirs.and_then(|theirs| share_of_reading(hearth, theirs));
        lines.push(row("decode, % of reading", 0, 100.0 * share, theirs.map(|share| 100.0 * share), None));
        lines.push(row("reading, GB/s", 1, reading * 1e-9, None, None));
    }
    let in_files = |bytes: Option<u64>| bytes.map(|bytes| bytes as f64 / *file_bytes as f64);
    let mut memory = |name: &str, bytes: fn(&InferenceSpeed) -> Option<u64>| {
        if let Some(ours) = in_files(bytes(hearth)) {
            lines.push(row(name, 3, ours, llama_cpp.and_then(|speed| in_files(bytes(speed))), None));
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
            packed: None,
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
    fn interval_of_the_ratio() {
        assert_eq!(ratio_interval(&[(3.0, 2.0)]), None);
        assert_eq!(ratio_interval(&[(3.0, 2.0), (6.0, 4.0)]), Some(0.0));
        // The logarithms are +-0.1, their standard deviation is 0.1414, and that of their mean 0.1. 12.71 * 0.1 = 1.271.
        let interval = ratio_interval(&[(0.1f64.exp(), 1.0), ((-0.1f64).exp(), 1.0)]).unwrap();
        assert!((interval - 1.271f64.exp_m1()).abs() < 1e-9, "{interval}");
    }

    #[test]
    fn ratio_is_hearth_over_llama_cpp() {
        let Verb::Bench(args) = Cli::parse_from(["hearth", "bench", "m.gguf"]).verb else {
            unreachable!("this is the verb")
        };
        let comparison = Comparison::new(&args, 100, 1, &[speed(3.0)], &[speed(2.0)]);
        let table = table(&comparison);
        assert!(table.contains("decode, tokens/s                  3.00       2.00    1.50"), "{table}");
        assert!(table.contains("decode, % of reading                50         33\n"), "{table}");
        let ratio = comparison.ratio.expect("a speed of llama.cpp");
        assert_eq!((ratio.decode, ratio.prefill, comparison.bandwidth_share), (1.5, Some(1.5), Some(0.5)));
    }
}
