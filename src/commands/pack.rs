//! `hearth pack`: writes packed weights beside a model, checks them, and measures what they gain.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use hearth_profiles::Bytes;
use hearth_profiles::measure::topology::Topology;
use hearth_runtime::Weights;
use hearth_runtime::speed::{InferenceSpeed, SpeedOptions, measure};
use hearth_runtime::weights::packed::{PackedSize, is_useful, packed_path};
use hearth_workflow::check_model_exists;
use hearth_workflow::files::PartialFile;
use serde::Serialize;

use super::print_result;
use crate::cli::PackArgs;
use crate::diagnostics::{ExitCode, Failure};
use crate::interruption::{self, EXIT_INTERRUPTED};
use crate::progress;

/// Number of runs of the benchmark with and without packed weights; the fastest counts.
const BENCH_RUNS: usize = 3;
/// Lengths of the prompts of the benchmark, in tokens: a batch of requests, and a prompt.
const BENCH_PROMPTS: [u32; 2] = [8, 256];
const BENCH_DECODE_TOKENS: u32 = 32;

#[derive(Serialize)]
struct Output {
    path: String,
    /// Whether this processor uses the file.
    is_useful: bool,
    size: Option<PackedSize>,
    bench: Option<Comparison>,
}

/// The speeds of the model as it is and with packed weights, in tokens per second.
#[derive(Serialize)]
struct Comparison {
    threads: usize,
    decode: [f64; 2],
    prompts: Vec<PromptComparison>,
}

#[derive(Serialize)]
struct PromptComparison {
    tokens: u32,
    tokens_per_s: [f64; 2],
}

pub fn run(args: &PackArgs, json: bool) -> Result<ExitCode, Failure> {
    check_model_exists(&args.model)?;
    let located = |error| Failure::from(error).with_location(args.model.display());
    let mut weights = Weights::open(&args.model).map_err(located)?;
    let path = packed_path(&weights.model().file_paths[0]);
    let mut output =
        Output { path: path.display().to_string(), is_useful: is_useful(), size: None, bench: None };
    if args.check {
        weights.use_packed_file(&path)?;
        let bar = progress::progress_bar("weights", 0, progress::BYTES_TEMPLATE);
        let is_equal = weights.check_packed(&mut |done, total| {
            bar.set_length(total);
            bar.set_position(done);
        })?;
        bar.finish_and_clear();
        if !is_equal {
            let what = "the packed weights differ from those of the model";
            return Err(Failure::invalid(what)
                .with_location(path.display())
                .with_hint("write them again with `hearth pack`"));
        }
        return print_result(json, &output, |Output { path, .. }| {
            format!("{path} has the weights of the model\n")
        });
    }
    output.size = Some(write(&weights, &path)?);
    drop(weights);
    if args.bench && is_useful() {
        let threads =
            args.threads.map_or_else(|| Topology::detect().compute_threads(), |threads| threads as usize);
        output.bench = Some(bench(&args.model, threads)?);
    }
    print_result(json, &output, text)
}

fn write(weights: &Weights, path: &Path) -> Result<PackedSize, Failure> {
    let partial_path = Arc::new(OnceLock::<PathBuf>::new());
    let written_path = partial_path.clone();
    interruption::on_signal(move || {
        let _ = written_path.get().map(std::fs::remove_file);
        EXIT_INTERRUPTED.exit();
    });
    let file = PartialFile::create(path)?;
    let _ = partial_path.set(file.path().to_owned());
    let bar = progress::progress_bar("weights", 0, progress::BYTES_TEMPLATE);
    let size = weights.pack(file.path(), &mut |written, total| {
        bar.set_length(total);
        bar.set_position(written);
    })?;
    file.commit()?;
    bar.finish_and_clear();
    Ok(size)
}

fn bench(model: &Path, threads: usize) -> Result<Comparison, Failure> {
    let bar = progress::progress_bar("runs", 2 * BENCH_RUNS as u64, progress::ITEMS_TEMPLATE);
    let mut runs: [Vec<InferenceSpeed>; 2] = [Vec::new(), Vec::new()];
    for _ in 0..BENCH_RUNS {
        for (packed, runs) in [false, true].into_iter().zip(&mut runs) {
            let options = SpeedOptions {
                threads,
                prompt_lengths: BENCH_PROMPTS.to_vec(),
                decode_tokens: BENCH_DECODE_TOKENS,
                packed,
            };
            runs.push(measure(model, &options)?);
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    let best = |of: &dyn Fn(&InferenceSpeed) -> f64| {
        runs.each_ref().map(|runs| runs.iter().map(of).fold(0.0, f64::max))
    };
    let prompts = BENCH_PROMPTS.iter().enumerate().map(|(at, &tokens)| PromptComparison {
        tokens,
        tokens_per_s: best(&|run| run.prefill_speeds[at].tokens_per_s),
    });
    Ok(Comparison { threads, decode: best(&|run| run.decode_tokens_per_s), prompts: prompts.collect() })
}

fn text(output: &Output) -> String {
    let Output { path, is_useful, size, bench } = output;
    let mut text = String::new();
    if let Some(PackedSize { matrices, packed_bytes, other_bytes, .. }) = size {
        let _ = write!(text, "wrote {path}: {matrices} matrices, {}", Bytes(*packed_bytes));
        if *other_bytes > 0 {
            let _ = write!(text, "; matrices of {} stay in the model file", Bytes(*other_bytes));
        }
        text.push('\n');
    }
    if !is_useful {
        text += "this processor does not use the file: it has no AVX-512 with VNNI\n";
    }
    if let Some(Comparison { threads, decode, prompts }) = bench {
        let row = |what: &str, [stored, packed]: [f64; 2]| {
            format!("{what:<20} {stored:>8.1} {packed:>8.1} {:>6.2}x\n", packed / stored)
        };
        let plural = if *threads == 1 { "" } else { "s" };
        let _ =
            writeln!(text, "tokens/s, {threads} thread{plural}\n{:<20} {:>8} {:>8}", "", "model", "packed");
        text += &row("decode", *decode);
        for PromptComparison { tokens, tokens_per_s } in prompts {
            text += &row(&format!("prompt of {tokens} tokens"), *tokens_per_s);
        }
    }
    text
}
