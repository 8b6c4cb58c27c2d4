//! Comparison of the simulated Linux page cache with measured values.
//!
//! The measured rows are those of the study `windowed_reader`, of the executor and of llama.cpp with less memory than
//! weights. Each row is printed with the simulated values, which must be within 15 %. For rows on an edge, where the
//! measurements vary, the interval of simulated values over seeds must cover the measured interval. See
//! `docs/studies/linux-page-cache`.
//!
//!     cargo test -p hearth-sim --test it linux_rows -- --nocapture

use std::ops::RangeInclusive;

use hearth_profiles::Bytes;
use hearth_schema::residency::{Residency, ResidencyOptions};

use crate::linux_device::{DeviceRun, EXECUTOR_MEMORY, LLAMA_CPP_MEMORY};
use crate::linux_reader::{BASE, Prefetch, Setup, windowed};

/// Measured ranges of the seconds and of the data read per token; data is in multiples of the file size or in MB.
type Measured = (RangeInclusive<f64>, RangeInclusive<f64>);

type Row = (&'static str, Setup, Measured);

fn row(name: &'static str, setup: Setup, seconds: RangeInclusive<f64>, read: RangeInclusive<f64>) -> Row {
    (name, setup, (seconds, read))
}

/// Returns the rows with published values: the first rows of the table in `docs/studies/linux-page-cache/report.md`.
fn published() -> Vec<Row> {
    let chunks = |rounds| windowed(rounds, Prefetch::Chunks);
    let managed = |rounds, kept_mib| Setup { release: true, kept_mib, ..chunks(rounds) };
    let mut rows: Vec<_> = [385, 365, 305, 205]
        .map(|memory_mib| row("cyclic", Setup { memory_mib, others: 0, ..BASE }, 1.05..=1.09, 1.0..=1.02))
        .into();
    rows.extend([
        row("no limit", Setup { memory_mib: 0, ..BASE }, 1.345..=1.345, 0.0..=0.0),
        row("k=1 none", BASE, 2.34..=2.34, 1.02..=1.02),
        row("k=1 chunks", chunks(1), 2.34..=2.34, 2.02..=2.02),
        row("k=2 chunks", chunks(2), 2.0..=2.1, 1.26..=1.58),
        // On an edge: two windows of 200 MiB and 205 MiB of memory. With less than 5 MiB for the process the machine
        // reads half of the share again, with more all of it (see `measured`); the published row is one with more.
        row("k=2 chunks", Setup { memory_mib: 205, process_mib: 8, ..chunks(2) }, 2.22..=2.22, 2.0..=2.0),
        row("k=2 chunks, release", Setup { release: true, ..chunks(2) }, 1.5..=1.5, 1.0..=1.0),
        row("k=4 managed, 200 MiB kept", managed(4, 200), 1.42..=1.42, 0.50..=0.50),
        row("k=16 managed, 250 MiB kept", managed(16, 250), 1.41..=1.41, 0.38..=0.38),
        // On the same edge: three windows of 100 MiB and 305 MiB of memory; this row is one with less.
        row("k=4 chunks", chunks(4), 1.4..=1.4, 1.01..=1.01),
    ]);
    rows
}

/// Returns the rows measured with `windowed_reader` on the machine of `docs/studies/linux-page-cache/report.md`.
fn measured() -> Vec<Row> {
    let chunks = |rounds| windowed(rounds, Prefetch::Chunks);
    let small = |setup| Setup { process_mib: 2, ..setup };
    let large = |setup| Setup { process_mib: 10, ..setup };
    let at_205 = |setup| Setup { memory_mib: 205, ..setup };
    let others = |others| small(Setup { others, ..chunks(1) });
    let one = windowed(4, Prefetch::One);
    // Each thread sums half of the share, without a pause between tokens.
    let halves = Setup { share_mib: 608, disk_mbps: 200, others: 0, threads: 2, ..chunks(1) };
    vec![
        row("k=2 chunks, small", small(chunks(2)), 1.68..=1.86, 1.14..=1.36),
        row("k=2 chunks, large", large(chunks(2)), 1.71..=1.87, 1.18..=1.34),
        row("k=2 chunks, small", small(at_205(chunks(2))), 1.86..=1.88, 1.51..=1.52),
        row("k=2 chunks, large", large(at_205(chunks(2))), 1.96..=2.23, 1.64..=2.01),
        row("k=4 chunks, small", small(chunks(4)), 1.38..=1.50, 1.0..=1.01),
        row("k=4 chunks, large", large(chunks(4)), 1.79..=1.90, 1.48..=1.48),
        // The published row has 3.08 s, which this machine takes at 200 MB/s, not at 400.
        row("k=4 one call", small(one), 2.20..=2.26, 1.0..=1.03),
        row("k=4 one call, 200 MB/s", small(Setup { disk_mbps: 200, ..one }), 3.19..=3.21, 1.0..=1.03),
        row("k=1 chunks, others 0.2 s", others(200_000_000), 2.10..=2.10, 2.0..=2.0),
        row("k=1 chunks, others 0.6 s", others(600_000_000), 2.09..=2.10, 1.96..=1.99),
        row("k=4 populate", small(windowed(4, Prefetch::Populate)), 1.355..=1.42, 0.82..=0.97),
        row("no pause, chunks, two threads", Setup { memory_mib: 491, ..halves }, 3.17..=3.22, 0.99..=1.01),
        row("no pause, chunks, two threads", Setup { memory_mib: 365, ..halves }, 3.19..=4.02, 1.0..=1.25),
    ]
}

/// Number of simulated runs over which the rows of whole devices are averaged, as in the measurements.
const SEEDS: u64 = 5;

/// Returns rows of the executor and llama.cpp: name, part of the file that fits in memory, run, measured ranges.
fn runs() -> Vec<(&'static str, f64, DeviceRun, Measured)> {
    let os = ResidencyOptions::default();
    let (none, windowed) = (os.without_prefetch(), ResidencyOptions::with_policy(Residency::Windowed));
    let row = |name, part, process, residency, seconds: f64, mb: f64| {
        (name, part, DeviceRun::alone(part, process, residency), (seconds..=seconds, mb..=mb))
    };
    vec![
        row("llama.cpp", 0.75, LLAMA_CPP_MEMORY, none, 2.9, 584.0),
        row("llama.cpp", 0.50, LLAMA_CPP_MEMORY, none, 2.8, 560.0),
        row("llama.cpp", 0.35, LLAMA_CPP_MEMORY, none, 3.2, 640.0),
        row("os, no prefetch", 0.75, EXECUTOR_MEMORY, none, 3.217, 648.0),
        row("os, no prefetch", 0.50, EXECUTOR_MEMORY, none, 3.213, 646.0),
        row("os, no prefetch", 0.35, EXECUTOR_MEMORY, none, 3.2, 639.0),
        row("os", 0.75, EXECUTOR_MEMORY, os, 3.196, 638.0),
        row("os", 0.50, EXECUTOR_MEMORY, os, 6.094, 1216.0),
        row("os", 0.35, EXECUTOR_MEMORY, os, 6.195, 1232.0),
        row("windowed", 0.75, EXECUTOR_MEMORY, windowed, 3.228, 647.0),
        row("windowed", 0.50, EXECUTOR_MEMORY, windowed, 3.252, 652.0),
        row("windowed", 0.35, EXECUTOR_MEMORY, windowed, 3.346, 670.0),
    ]
}

/// Returns the relative difference between a value and the nearest value of a range; zero inside the range.
fn error(value: f64, range: &RangeInclusive<f64>) -> f64 {
    let nearest = value.clamp(*range.start(), *range.end());
    if nearest == 0.0 { value } else { value / nearest - 1.0 }
}

fn cell(range: &RangeInclusive<f64>, digits: usize) -> String {
    let (start, end) = (range.start(), range.end());
    if start == end { format!("{start:.digits$}") } else { format!("{start:.digits$} to {end:.digits$}") }
}

/// Prints a row. Returns whether both simulated values are within 15 % of the measured ranges.
fn print(name: &str, memory: &str, simulated: (f64, f64), measured: &Measured, digits: usize) -> bool {
    let errors = (error(simulated.0, &measured.0), error(simulated.1, &measured.1));
    println!(
        "| {name} | {memory} | {} | {:.2} | {:+.0} % | {} | {:.digits$} | {:+.0} % |",
        cell(&measured.0, 2),
        simulated.0,
        100.0 * errors.0,
        cell(&measured.1, digits),
        simulated.1,
        100.0 * errors.1,
    );
    errors.0.abs() <= 0.15 && errors.1.abs() <= 0.15
}

/// Returns a run of three devices with memory for three quarters of their weights and measured process memory.
fn three_devices(residency: ResidencyOptions) -> DeviceRun {
    let caches = vec![246_120_448 - 15_300_000, 198_901_760 - 14_000_000, 234_913_792 - 11_000_000];
    DeviceRun { caches, windows: vec![5, 5, 6], residency, read_ahead: Bytes::from_mib(8) }
}

/// Returns the rows whose measurements vary: name, memory limit, run, extra process memory, and measured ranges.
fn edges() -> Vec<(&'static str, &'static str, DeviceRun, Bytes, Measured)> {
    let os = ResidencyOptions::default();
    let none = os.without_prefetch();
    let peer = DeviceRun::alone(0.9, LLAMA_CPP_MEMORY, none);
    let no_prefetch = three_devices(none);
    vec![
        // The seconds are not measured: they are the bytes at the rate of the throttle.
        ("llama.cpp", "90 %", peer, Bytes::from_mib(4), (0.3..=3.3, 60.0..=660.0)),
        ("three devices, os", "75 %", three_devices(os), Bytes::ZERO, (0.85..=1.34, 209.0..=255.0)),
        ("three devices, os, no prefetch", "75 %", no_prefetch, Bytes::ZERO, (1.3..=1.315, 261.0..=266.0)),
    ]
}

/// Rows that the simulator does not reproduce; `docs/studies/linux-page-cache` states the reasons, if known.
const MISSED: [&str; 5] = [
    "llama.cpp at 50 %",
    "os at 75 %",
    "llama.cpp at 90 %",
    "three devices, os at 75 %",
    "three devices, os, no prefetch at 75 %",
];

#[test]
fn every_row_within_fifteen_per_cent() {
    let mut wrong = Vec::new();
    println!(
        "| experiment | memory | measured s | simulated s | error | measured read | simulated read | error |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    for (name, setup, measured) in published().into_iter().chain(measured()) {
        let memory = format!("{} MiB", setup.memory_mib);
        if !print(name, &memory, crate::linux_reader::simulate(setup), &measured, 2) {
            wrong.push(format!("{name} at {memory}"));
        }
    }
    for (name, part, run, measured) in runs() {
        let tokens: Vec<_> = (1..=SEEDS).flat_map(|seed| run.tokens(seed, Bytes::ZERO)).collect();
        let memory = format!("{:.0} %", part * 100.0);
        if !print(name, &memory, mean(&tokens), &measured, 0) {
            wrong.push(format!("{name} at {memory}"));
        }
    }
    println!();
    println!("| on an edge | memory | observed s | simulated s | observed MB | simulated MB |");
    println!("|---|---|---|---|---|---|");
    for (name, memory, run, spread, measured) in edges() {
        if !print_edge(name, memory, &run, spread, &measured) {
            wrong.push(format!("{name} at {memory}"));
        }
    }
    assert_eq!(wrong, MISSED, "rows more than 15 % off, or an interval that does not cover the measured one");
}

/// Returns the mean seconds and the mean MB read per token.
fn mean(tokens: &[(f64, f64)]) -> (f64, f64) {
    let mean = |of: fn(&(f64, f64)) -> f64| tokens.iter().map(of).sum::<f64>() / tokens.len() as f64;
    (mean(|it| it.0), mean(|it| it.1 * 1e-6))
}

/// Prints a row with the interval of the simulated means over seeds. Returns whether this interval covers nine tenths
/// of the measured interval and is at most 1.2 times as wide.
fn print_edge(name: &str, memory: &str, run: &DeviceRun, spread: Bytes, (seconds, mb): &Measured) -> bool {
    let means: Vec<_> = (1..=2 * SEEDS).map(|seed| mean(&run.tokens(seed, spread))).collect();
    let span = |of: fn(&(f64, f64)) -> f64| {
        let (min, max) = (f64::INFINITY, f64::NEG_INFINITY);
        means.iter().map(of).fold((min, max), |(min, max), it| (min.min(it), max.max(it)))
    };
    let (time, read) = (span(|it| it.0), span(|it| it.1));
    println!(
        "| {name} | {memory} | {} | {:.2} to {:.2} | {} | {:.0} to {:.0} |",
        cell(seconds, 2),
        time.0,
        time.1,
        cell(mb, 0),
        read.0,
        read.1
    );
    let covers = |span: (f64, f64), range: &RangeInclusive<f64>| {
        let width = range.end() - range.start();
        let covered = span.1.min(*range.end()) - span.0.max(*range.start());
        covered >= 0.9 * width && span.1 - span.0 <= 1.2 * width
    };
    covers(time, seconds) && covers(read, mb)
}
