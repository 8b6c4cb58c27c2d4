//! `hearth bench`: how fast does this machine run a model, and how fast does llama.cpp run it?
//!
//! Each engine runs in a process of its own, in turn with the other, on the same file with the same threads, so that
//! both see the same machine. Medians and their ratio are printed. A ratio is of speeds: above one, hearth is faster.
//!
//! Not here: the measurement, which is `hearth_exec::speed` for hearth and `bench/llama_cpp.py` for llama.cpp.

use std::io::Read;
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use hearth_exec::speed::{Speed, SpeedOptions, measure};
use serde::Serialize;

use super::print_json;
use crate::cli::BenchArgs;
use crate::diagnostics::Failure;
use crate::output::{say, tell};
use crate::progress;

/// What times llama.cpp.
const PEER: &str = include_str!("bench/llama_cpp.py");
/// Exit code of [`PEER`] where the package is missing.
const MISSING: i32 = 77;
/// How often a running engine is looked at.
const LOOK: Duration = Duration::from_millis(20);

/// What `--json` gives: one entry for each number of threads.
#[derive(Debug, Serialize)]
struct Comparison {
    model: String,
    file_bytes: u64,
    threads: u32,
    hearth: Speed,
    #[serde(skip_serializing_if = "Option::is_none")]
    llama_cpp: Option<Speed>,
}

/// Runs the verb.
pub fn run(args: &BenchArgs, json: bool) -> Result<ExitCode, Failure> {
    if args.once {
        let threads = args.threads.first().map_or(1, |&threads| threads as usize);
        let options = SpeedOptions { threads, prompts: args.prompts.clone(), tokens: args.tokens };
        print_json(&measure(&args.model, &options)?)?;
        return Ok(ExitCode::SUCCESS);
    }
    let file = std::fs::metadata(&args.model).map_err(|error| Failure::file(&args.model, "read", &error))?;
    let all = std::thread::available_parallelism().map_or(1, |threads| threads.get() as u32);
    let threads = if args.threads.is_empty() { vec![all] } else { args.threads.clone() };
    let bar = progress::count("runs", u64::from(args.repeats) * threads.len() as u64);
    let (mut comparisons, mut peer) = (Vec::new(), args.peer != "none");
    for &threads in &threads {
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for _ in 0..args.repeats {
            ours.push(
                once(this(args, threads)?, args)?.ok_or_else(|| Failure::running("hearth left early"))?,
            );
            if peer {
                let run = once(llama_cpp(args, threads), args)?;
                peer = run.is_some();
                theirs.extend(run);
            }
            bar.inc(1);
        }
        comparisons.push(Comparison {
            model: args.model.display().to_string(),
            file_bytes: file.len(),
            threads,
            hearth: median(&ours).expect("at least one run"),
            llama_cpp: median(&theirs),
        });
    }
    bar.finish_and_clear();
    if json {
        print_json(&comparisons)?;
    } else {
        for comparison in &comparisons {
            say!("{}", table(comparison));
        }
    }
    if args.peer != "none" && !peer {
        tell!(
            "note: `{}` has no package llama_cpp, so hearth is alone; `pip install llama-cpp-python`, or name \
             another Python with --peer",
            args.peer
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// This program, timing itself.
fn this(args: &BenchArgs, threads: u32) -> Result<Command, Failure> {
    let program = std::env::current_exe().map_err(Failure::running)?;
    let mut command = Command::new(program);
    command.arg("bench").arg(&args.model).arg("--once");
    command.arg("--threads").arg(threads.to_string());
    command.arg("--prompts").arg(joined(&args.prompts));
    command.arg("--tokens").arg(args.tokens.to_string());
    Ok(command)
}

/// Python, timing llama.cpp.
fn llama_cpp(args: &BenchArgs, threads: u32) -> Command {
    let mut command = Command::new(&args.peer);
    command.arg("-c").arg(PEER).arg(&args.model);
    command.arg(threads.to_string()).arg(joined(&args.prompts)).arg(args.tokens.to_string());
    command
}

fn joined(numbers: &[u32]) -> String {
    numbers.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}

/// Runs an engine. `None`: it is not there.
fn once(mut command: Command, args: &BenchArgs) -> Result<Option<Speed>, Failure> {
    let name = command.get_program().to_string_lossy().into_owned();
    let mut child = match command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn() {
        Ok(child) => child,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Failure::running(format!("cannot start `{name}`: {error}"))),
    };
    // Both pipes are read to their ends while it runs, so that it never waits for a reader.
    let streams = (child.stdout.take(), child.stderr.take());
    let (Some(output), Some(complaints)) = streams else {
        return Err(Failure::running(format!("`{name}` has no pipes")));
    };
    let (output, complaints) = (reader(output), reader(complaints));
    let looks = Duration::from_secs(args.deadline).as_nanos() / LOOK.as_nanos();
    let mut status = None;
    for _ in 0..=looks {
        status = child.try_wait().map_err(Failure::running)?;
        if status.is_some() {
            break;
        }
        std::thread::sleep(LOOK);
    }
    let Some(status) = status else {
        let _ = child.kill();
        let _ = child.wait();
        let what = format!("`{name}` was not done within {} s", args.deadline);
        return Err(Failure::running(what).hint("give it more time with --deadline, or less to do"));
    };
    let text = |reader: std::thread::JoinHandle<String>| reader.join().unwrap_or_default();
    let (output, complaints) = (text(output), text(complaints));
    if status.code() == Some(MISSING) {
        return Ok(None);
    }
    if !status.success() {
        let last = complaints.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("it said nothing");
        return Err(Failure::running(format!("`{name}` ended with {status}: {last}")));
    }
    let speed = serde_json::from_str(&output);
    speed.map(Some).map_err(|error| Failure::running(format!("`{name}` printed no result: {error}")))
}

fn reader(mut from: impl Read + Send + 'static) -> std::thread::JoinHandle<String> {
    std::thread::spawn(move || {
        let mut text = String::new();
        let _ = from.read_to_string(&mut text);
        text
    })
}

/// The median of each number.
fn median(runs: &[Speed]) -> Option<Speed> {
    let first = runs.first()?;
    let of = |number: &dyn Fn(&Speed) -> f64| {
        let mut numbers: Vec<f64> = runs.iter().map(number).collect();
        numbers.sort_by(f64::total_cmp);
        numbers[numbers.len() / 2]
    };
    let mut median = first.clone();
    median.load_s = of(&|run| run.load_s);
    median.decode_tokens_per_s = of(&|run| run.decode_tokens_per_s);
    median.resident_bytes =
        first.resident_bytes.map(|_| of(&|run| run.resident_bytes.unwrap_or(0) as f64) as u64);
    // The rate of reading is a bound, so that the best run tells most.
    median.read_bytes_per_s = runs.iter().filter_map(|run| run.read_bytes_per_s).max_by(f64::total_cmp);
    for (at, prefill) in median.prefill.iter_mut().enumerate() {
        prefill.tokens_per_s = of(&|run| run.prefill.get(at).map_or(0.0, |prefill| prefill.tokens_per_s));
    }
    Some(median)
}

/// What people read.
fn table(comparison: &Comparison) -> String {
    let Comparison { hearth, llama_cpp, threads, file_bytes, .. } = comparison;
    let peer = llama_cpp.as_ref();
    let mut lines = vec![format!(
        "{}, {threads} thread{}, {}",
        comparison.model,
        if *threads == 1 { "" } else { "s" },
        hearth.instructions.as_deref().unwrap_or("")
    )];
    let heads = if peer.is_some() { ["hearth", "llama.cpp", "ratio"] } else { ["hearth", "", ""] };
    lines.push(format!("{:<28}{:>10}{:>11}{:>8}", "", heads[0], heads[1], heads[2]));
    let mut row = |name: &str, digits: usize, ours: f64, theirs: Option<f64>, ratio: Option<f64>| {
        let theirs = theirs.map_or(String::new(), |number| format!("{number:.digits$}"));
        let ratio = ratio.map_or(String::new(), |number| format!("{number:.2}"));
        lines.push(format!("{name:<28}{ours:>10.digits$}{theirs:>11}{ratio:>8}").trim_end().to_string());
    };
    let load = peer.map(|peer| peer.load_s);
    row("to the first token, s", 2, hearth.load_s, load, load.map(|load| load / hearth.load_s));
    for (at, prefill) in hearth.prefill.iter().enumerate() {
        let theirs = peer.and_then(|peer| peer.prefill.get(at)).map(|prefill| prefill.tokens_per_s);
        let name = format!("prefill of {}, tokens/s", prefill.tokens);
        row(&name, 1, prefill.tokens_per_s, theirs, theirs.map(|theirs| prefill.tokens_per_s / theirs));
    }
    let (ours, theirs) = (hearth.decode_tokens_per_s, peer.map(|peer| peer.decode_tokens_per_s));
    row("decode, tokens/s", 2, ours, theirs, theirs.map(|theirs| ours / theirs));
    if let (Some(bytes), Some(reading)) = (hearth.weight_bytes_per_token, hearth.read_bytes_per_s) {
        let share = |tokens: f64| 100.0 * tokens * bytes as f64 / reading;
        row("decode, % of reading", 0, share(ours), theirs.map(share), None);
        row("reading, GB/s", 1, reading * 1e-9, None, None);
    }
    let in_files = |bytes: Option<u64>| bytes.map(|bytes| bytes as f64 / *file_bytes as f64);
    let resident: [(&str, fn(&Speed) -> Option<u64>); 2] = [
        ("resident memory / file", |speed| speed.resident_bytes),
        ("  after the prompts", |speed| speed.resident_bytes_after_prompts),
    ];
    for (name, bytes) in resident {
        if let Some(ours) = in_files(bytes(hearth)) {
            row(name, 3, ours, peer.and_then(|peer| in_files(bytes(peer))), None);
        }
    }
    lines.push("\n".into());
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use hearth_exec::speed::Prefill;

    use super::*;

    fn speed(decode: f64) -> Speed {
        Speed {
            load_s: 1.0,
            prefill: vec![Prefill { tokens: 64, tokens_per_s: 10.0 * decode }],
            decode_tokens_per_s: decode,
            resident_bytes: Some(100),
            resident_bytes_after_prompts: None,
            weight_bytes_per_token: Some(1_000_000_000),
            read_bytes_per_s: Some(decode * 2e9),
            instructions: None,
        }
    }

    #[test]
    fn medians_are_taken_number_by_number_and_reading_is_the_best() {
        let median = median(&[speed(3.0), speed(1.0), speed(2.0)]).unwrap();
        assert_eq!(median.decode_tokens_per_s, 2.0);
        assert_eq!(median.prefill[0].tokens_per_s, 20.0);
        assert_eq!(median.read_bytes_per_s, Some(6e9));
    }

    #[test]
    fn a_ratio_is_of_speeds() {
        let comparison = Comparison {
            model: "m.gguf".into(),
            file_bytes: 100,
            threads: 1,
            hearth: speed(3.0),
            llama_cpp: Some(speed(2.0)),
        };
        let table = table(&comparison);
        assert!(table.contains("decode, tokens/s                  3.00       2.00    1.50"), "{table}");
        assert!(table.contains("decode, % of reading                50         33\n"), "{table}");
    }
}
