//! Measures whether the kept set of managed residency remains in the page cache of the kernel.
//!
//! A process cyclically reads a file of 640 MiB at 200 MB/s and computes only a checksum. The file exceeds the memory
//! limit of the process. A part of the file should remain in memory; the rest is streamed through a small buffer. Both
//! parts are ordinary page cache, so the measurement shows whether reclaim evicts the kept part. It needs root.
//!
//! ```text
//! cargo run --release -p hearth-studies --bin cyclic_reader -- --table      # by limit, buffer and piece size
//! cargo run --release -p hearth-studies --bin cyclic_reader -- --margin     # by distance to the limit
//! cargo run --release -p hearth-studies --bin cyclic_reader -- --probe drop     # or drop-other, reading, depth
//! cargo run --release -p hearth-studies --bin cyclic_reader -- --log cyclic.log     # for the test cyclic_rows
//! cargo run --release -p hearth-studies --bin cyclic_reader -- --limit-kib 331776 --kept-mib 312
//! ```
//!
//! The numbers are in `docs/decisions/0010-kept-set-margin.md`.
#![allow(clippy::disallowed_methods, reason = "a physical experiment measures time")]

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use hearth_studies::cgroups::{CgroupLimits, Cgroups, MIB, WeightFile, median, require_cgroup_access};
use hearth_studies::{StudyError, run_study};
use passes::{PassOptions, ReadMode};

mod passes;
mod probes;

/// Memory of the process in MiB, without the pages of the file: 0.4 MiB of the program, 2.8 MiB of page tables and
/// nodes of the page cache's tree for 640 MiB, and a margin.
const PROCESS_MIB: usize = 5;

fn main() -> ExitCode {
    run_study(|_| run(Arguments::parse()))
}

#[derive(Parser)]
struct Arguments {
    /// Internal: run as a child process and read this file.
    #[arg(long)]
    child: Option<PathBuf>,
    /// Run a probe: `drop`, `drop-other`, `reading` or `depth`.
    #[arg(long)]
    probe: Option<String>,
    /// Create the file in this folder.
    #[arg(long, default_value_os_t = std::env::temp_dir())]
    directory: PathBuf,
    /// Limit disk reads to this rate in MB/s.
    #[arg(long, default_value_t = 200)]
    disk_mbps: u64,
    /// Measure a table of experiments with several memory limits, buffers and piece sizes.
    #[arg(long)]
    table: bool,
    /// Measure with memory limits close to the total size of the kept set and the buffer.
    #[arg(long)]
    margin: bool,
    #[command(flatten)]
    base: PassOptions,
}

fn run(arguments: Arguments) -> Result<(), StudyError> {
    let Arguments { child, probe, directory, disk_mbps, table, margin, base } = arguments;
    if let Some(file) = child {
        let groups = Cgroups::join()?;
        return match probe {
            Some(probe) => probes::run(&groups, &file, &probe),
            None => base.run_passes(&groups, &file),
        };
    }
    require_cgroup_access()?;
    let file = WeightFile::create(&directory, base.file_mib)?;
    if let Some(probe) = probe {
        let limits =
            CgroupLimits { memory_bytes: 2 * base.file_mib * MIB, disk_mb_per_s: disk_mbps, cpu_quota: None };
        print!("{}", in_child(limits, &file, vec!["--probe".into(), probe])?);
        return Ok(());
    }
    println!(
        "| experiment | limit MiB | kept | buffer | piece KiB | s a pass | read MiB | read / must | lost pages | \
         refaults | dropping s | limit met | most used MiB | kernel MiB | active MiB |\n\
         |---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|"
    );
    let rows = match (table, margin) {
        (true, _) => table_rows(&base),
        (_, true) => margin_rows(&base),
        _ if base.log_path.is_some() => log_rows(&base),
        _ => vec![("custom".into(), base)],
    };
    for (name, row) in rows {
        measure(&name, &row, disk_mbps, &file)?;
    }
    Ok(())
}

fn in_child(
    limits: CgroupLimits,
    file: &WeightFile,
    mut arguments: Vec<String>,
) -> Result<String, StudyError> {
    arguments.extend(["--child".into(), file.path_text.clone()]);
    Cgroups::run_child(limits, &file.path, &arguments)
}

/// Returns the experiments of `--table`: limits of 90 to 35 % of the file size, and kept sets that use the limit.
fn table_rows(base: &PassOptions) -> Vec<(String, PassOptions)> {
    let mut rows = Vec::new();
    for percent in [90, 75, 50, 35] {
        let budget = base.file_mib * percent / 100;
        let limited =
            PassOptions { memory_limit_kib: (budget + PROCESS_MIB) << 10, kept_mib: 0, ..base.clone() };
        let named = |name: &str, passes| (format!("{percent} %, {name}"), passes);
        let behind = PassOptions { stream_buffer_kib: 32 << 10, ..limited.clone() };
        rows.push(named("plain", PassOptions { mode: ReadMode::Plain, ..limited.clone() }));
        rows.push(named("ahead", PassOptions { mode: ReadMode::Ahead, ..behind.clone() }));
        rows.push(named("behind", behind));
        for buffer in [4, 8, 32] {
            let managed =
                PassOptions { kept_mib: budget - buffer, stream_buffer_kib: buffer << 10, ..limited.clone() };
            rows.push(named("managed", managed));
        }
        if percent == 50 {
            let managed = PassOptions { kept_mib: budget - 8, ..limited.clone() };
            rows.push(named("managed", PassOptions { piece_kib: 256, ..managed.clone() }));
            rows.push(named("managed", PassOptions { piece_kib: 4096, ..managed.clone() }));
            let fadvise = PassOptions { drops_with_fadvise: true, ..managed };
            let in_helper = PassOptions { helper_drops_pieces: true, ..fadvise.clone() };
            rows.push(named("managed, fadvise", fadvise));
            rows.push(named("managed, fadvise in the helper", in_helper));
        }
    }
    rows
}

/// Returns the experiments of `--margin`: a kept set of 312 MiB, a buffer of 8 MiB, and limits that approach their sum.
fn margin_rows(base: &PassOptions) -> Vec<(String, PassOptions)> {
    let managed = PassOptions { kept_mib: 312, ..base.clone() };
    let fadvise = PassOptions { drops_with_fadvise: true, ..managed.clone() };
    let variants = [
        ("page-out", managed.clone()),
        ("page-out, random", PassOptions { madvise_random: true, ..managed }),
        ("fadvise", fadvise.clone()),
        ("fadvise in the helper", PassOptions { helper_drops_pieces: true, ..fadvise }),
    ];
    let mut rows = Vec::new();
    for (name, passes) in variants {
        for limit in [328, 326, 324, 323, 322, 321, 320, 318] {
            rows.push((name.into(), PassOptions { memory_limit_kib: limit << 10, ..passes.clone() }));
        }
    }
    rows
}

/// Returns the experiments of `--log`, for `sim/tests/it/cyclic_rows.rs`: few passes in large pieces, for a short log.
fn log_rows(base: &PassOptions) -> Vec<(String, PassOptions)> {
    let limited = PassOptions {
        memory_limit_kib: 325 << 10,
        kept_mib: 0,
        piece_kib: 2048,
        pass_count: 4,
        ..base.clone()
    };
    let behind = PassOptions { stream_buffer_kib: 32 << 10, ..limited.clone() };
    let managed = PassOptions { kept_mib: 312, ..limited.clone() };
    let no_margin = PassOptions { memory_limit_kib: 320 << 10, ..managed.clone() };
    let rows = [
        ("plain", PassOptions { mode: ReadMode::Plain, ..limited }),
        ("ahead", PassOptions { mode: ReadMode::Ahead, ..behind.clone() }),
        ("behind", behind),
        ("managed", managed.clone()),
        ("managed, fadvise", PassOptions { drops_with_fadvise: true, ..managed }),
        ("managed, no margin", no_margin.clone()),
        ("managed, fadvise, no margin", PassOptions { drops_with_fadvise: true, ..no_margin }),
    ];
    rows.into_iter().map(|(name, row)| (name.into(), row)).collect()
}

/// Runs one experiment and prints its row: medians over the passes after the first, and the maximum memory usage.
fn measure(name: &str, row: &PassOptions, disk_mbps: u64, file: &WeightFile) -> Result<(), StudyError> {
    let limits =
        CgroupLimits { memory_bytes: row.memory_limit_kib << 10, disk_mb_per_s: disk_mbps, cpu_quota: None };
    let text = in_child(limits, file, row.to_arguments())?;
    let numbers = |line: &str| line.split(' ').skip(2).filter_map(|word| word.parse().ok()).collect();
    let passes: Vec<Vec<f64>> = text.lines().map(numbers).collect();
    let settled = &passes[1.min(passes.len() - 1)..];
    let middle = |column: usize| median(settled.iter().map(|pass| pass[column]).collect());
    let most = |column: usize| settled.iter().map(|pass| pass[column]).fold(0.0, f64::max);
    println!(
        "| {name} | {:.0} | {} | {} | {} | {:.3} | {:.0} | {:.2} | {:.0} | {:.0} | {:.3} | {:.0} | {:.1} | {:.2} | {:.0} |",
        row.memory_limit_kib as f64 / 1024.0,
        if row.mode == ReadMode::Managed { row.kept_mib } else { 0 },
        if row.mode == ReadMode::Plain { 0 } else { row.stream_buffer_kib >> 10 },
        row.piece_kib,
        middle(0),
        middle(1) / MIB as f64,
        middle(1) / middle(2),
        middle(3),
        middle(4),
        middle(5),
        middle(6),
        most(7),
        most(8),
        middle(9),
    );
    Ok(())
}
