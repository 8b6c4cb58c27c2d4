//! Compares processes under cgroup limits with the simulator's slow CPU and slow disk.
//!
//! - `--cpu`: a process computes bursts of work with half a CPU (CFS quota), for several periods of the bandwidth
//!   control. The time of a burst is compared with work / rate and with an exact model of the bandwidth control.
//! - `--disk`: a process reads bursts of data under a blkio throttle. The time of a burst is compared with bytes / rate
//!   and with the simulator's [`DiskSim`].
//! - `--duty`: several threads wait for each other after each burst of work, as in a matmul. The time of a burst is
//!   compared with the simulator's [`CpuSim`].
//!
//! All processes are idle between bursts. The program needs root.
//!
//! ```text
//! cargo run --release -p hearth-studies --bin cgroup_limits -- --cpu
//! cargo run --release -p hearth-studies --bin cgroup_limits -- --duty
//! cargo run --release -p hearth-studies --bin cgroup_limits -- --disk
//! ```
//!
//! The results are in `docs/decisions/0012-cgroup-limits-as-slow-hardware.md`, and for `--duty` in
//! `docs/decisions/0031-cpu-quota-and-lab-emulation.md`.
#![allow(clippy::disallowed_methods, reason = "a physical experiment measures time")]

use std::fs::File;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use hearth_profiles::device::Quota;
use hearth_profiles::measure::mapping::Advice;
use hearth_profiles::{Bytes, BytesPerSecond, Seconds, Sourced};
use hearth_sim::resource::{CpuSim, DiskSim, DiskSpeed, ReadKind};
use hearth_studies::cgroups::{
    CgroupLimits, Cgroups, MIB, WeightFile, advise, drop_from_cache, map_cold, median, parse_number,
    require_cgroup_access, unmap,
};
use hearth_studies::{StudyError, run_study, thread_cpu_seconds};

/// The CPU limit with `--cpu`, in CPUs.
const SHARE: f64 = 0.5;
const DISK_MBPS: u64 = 200;
const FILE_MIB: usize = 640;
/// The size of one read request to the kernel, in bytes.
const PIECE: usize = MIB;

fn main() -> ExitCode {
    run_study(run)
}

fn run(arguments: &[String]) -> Result<(), StudyError> {
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words[..] {
        ["--cpu"] => cpu_rows(),
        ["--duty"] => duty_rows(),
        ["--disk"] => disk_rows(),
        ["--child-cpu", threads, rounds, bursts, idle] => {
            spin(parse_number(threads)?, parse_number(rounds)?, parse_number(bursts)?, parse_number(idle)?)
        }
        ["--child-disk", file, burst, bursts, pause] => {
            read(Path::new(file), parse_number(burst)?, parse_number(bursts)?, parse_number(pause)?)
        }
        _ => Err("unknown arguments; run the study with `--cpu`, `--duty` or `--disk`".into()),
    }
}

/// Runs this program as a child process under limits. Returns the times that the child prints, in milliseconds.
fn in_child(limits: CgroupLimits, file: &Path, arguments: &[String]) -> Result<Vec<f64>, StudyError> {
    Cgroups::run_child(limits, file, arguments)?.split_whitespace().map(parse_number).collect()
}

/// Runs bursts of work in a child process with a CPU quota. Returns their wall times and CPU times in ms.
fn bursts_in_child(
    cores: f64,
    period_ms: u64,
    threads: usize,
    [rounds, bursts, idle_ms]: [u64; 3],
) -> Result<(Vec<f64>, Vec<f64>), StudyError> {
    let quota = (period_ms as f64 * 1e3 * cores) as u64;
    let limits = CgroupLimits { cpu_quota: Some((quota, period_ms * 1000)), ..CgroupLimits::default() };
    let numbers = [threads as u64, rounds, bursts, idle_ms].map(|number| number.to_string());
    let words = [&["--child-cpu".to_owned()][..], &numbers].concat();
    let pairs = in_child(limits, Path::new("/"), &words)?;
    // The first burst is ignored: the start of the process has used a part of its quota.
    let column = |at: usize| pairs.iter().copied().skip(2 + at).step_by(2).collect();
    Ok((column(0), column(1)))
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

fn quantile(values: &[f64], share: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[((sorted.len() - 1) as f64 * share).round() as usize]
}

/// Computes `rounds` rounds of arithmetic that the compiler cannot optimise away.
fn work(rounds: u64) -> u64 {
    (0..rounds).fold(1, |value: u64, round| std::hint::black_box(value.wrapping_mul(25_214_903_917) ^ round))
}

/// Returns the rounds of [`work`] per millisecond of an undisturbed CPU: the maximum of many measurements.
fn rounds_per_milli() -> f64 {
    const ROUNDS: u64 = 200_000;
    let rate = |_| {
        let begin = Instant::now();
        std::hint::black_box(work(ROUNDS));
        ROUNDS as f64 / (begin.elapsed().as_secs_f64() * 1e3)
    };
    (0..400).map(rate).fold(0.0, f64::max)
}

fn cpu_rows() -> Result<(), StudyError> {
    require_cgroup_access()?;
    let rate = rounds_per_milli();
    println!(
        "| period ms | work ms | charged ms | idle ms | naive ms | exact quota ms | measured mean ms | median | \
         p10 - p90 | measured / naive |\n|---|---|---|---|---|---|---|---|---|---|"
    );
    for period_ms in [2u64, 5, 10, 100] {
        for work_ms in [1u64, 3, 10, 50, 200] {
            for idle_ms in [1u64, 10, 50] {
                let bursts = (1000 / (2 * work_ms + idle_ms)).clamp(6, 100);
                let rounds = (rate * work_ms as f64) as u64;
                let (times, charged) = bursts_in_child(SHARE, period_ms, 1, [rounds, bursts, idle_ms])?;
                let (work, naive) = (mean(&charged), mean(&charged) / SHARE);
                let exact = exact_quota_ms(work, idle_ms as f64, period_ms as f64, bursts);
                let (took, [p10, median, p90]) =
                    (mean(&times), [0.1, 0.5, 0.9].map(|at| quantile(&times, at)));
                println!(
                    "| {period_ms} | {work_ms} | {work:.1} | {idle_ms} | {naive:.1} | {exact:.1} | {took:.1} | \
                     {median:.1} | {p10:.1} - {p90:.1} | {:.2} |",
                    took / naive,
                );
            }
        }
    }
    Ok(())
}

/// Runs as the child process of `--cpu` and `--duty`: several threads start and end each burst of work together. Prints
/// the wall time of each burst and the mean CPU time of the threads, in milliseconds.
fn spin(threads: usize, rounds: u64, bursts: usize, idle_ms: u64) -> Result<(), StudyError> {
    let _groups = Cgroups::join()?;
    let together = Barrier::new(threads);
    let burst = || {
        together.wait();
        let before = thread_cpu_seconds();
        std::hint::black_box(work(rounds));
        let charged = (thread_cpu_seconds() - before) * 1e3;
        together.wait();
        charged
    };
    let lines = std::thread::scope(|scope| {
        let all_bursts = || (0..bursts).map(|_| burst()).collect::<Vec<f64>>();
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(all_bursts)).collect();
        let mut rows = Vec::new();
        for _ in 0..bursts {
            std::thread::sleep(Duration::from_millis(idle_ms));
            let begin = Instant::now();
            let charged = burst();
            rows.push((begin.elapsed().as_secs_f64() * 1e3, charged));
        }
        let others: Vec<Vec<f64>> = others.into_iter().filter_map(|other| other.join().ok()).collect();
        let mean = |(at, (took, own)): (usize, &(f64, f64))| {
            let sum: f64 = others.iter().map(|other| other[at]).sum::<f64>() + own;
            format!("{took} {}", sum / threads as f64)
        };
        rows.iter().enumerate().map(mean).collect::<Vec<_>>()
    });
    println!("{}", lines.join("\n"));
    Ok(())
}

fn duty_rows() -> Result<(), StudyError> {
    const PERIOD_MS: u64 = 10;
    require_cgroup_access()?;
    let rate = rounds_per_milli();
    println!(
        "| processors | threads | charged ms | idle ms | work / rate ms | simulated ms | measured ms | measured / (work / \
         rate) | measured / simulated |\n|---|---|---|---|---|---|---|---|---|"
    );
    for (cores, threads) in [(0.5, 1usize), (0.25, 1), (0.5, 2), (1.0, 2), (1.5, 2)] {
        for work_ms in [1u64, 3, 10, 30] {
            for idle_ms in [10u64, 50] {
                let bursts = (800 / (3 * work_ms + idle_ms)).clamp(8, 40);
                let rounds = (rate * work_ms as f64) as u64;
                let numbers = [rounds, bursts, idle_ms];
                let (times, charged) = bursts_in_child(cores, PERIOD_MS, threads, numbers)?;
                let (took, charged) = (mean(&times), mean(&charged));
                let naive = charged * (threads as f64 / cores).max(1.0);
                let simulated = simulated_mean_ms(cores, threads as f64, charged, idle_ms, bursts);
                println!(
                    "| {cores} | {threads} | {charged:.1} | {idle_ms} | {naive:.1} | {simulated:.1} | {took:.1} | {:.2} \
                     | {:.2} |",
                    took / naive,
                    took / simulated
                );
            }
        }
    }
    Ok(())
}

/// Returns the mean time of a burst of work on the simulated CPU ([`CpuSim`]), in milliseconds.
fn simulated_mean_ms(cores: f64, threads: f64, work_ms: f64, idle_ms: u64, bursts: u64) -> f64 {
    let (value, period) = (Sourced::new(cores, "set"), Sourced::new(Seconds(0.01), "set"));
    let mut cpu = CpuSim::new(2.0).with_quota(Some(&Quota { cores: value, period }));
    let (mut now, mut total) = (0, 0);
    for _ in 0..bursts {
        now += idle_ms * 1_000_000;
        let begin = now;
        cpu.start_job(now, 0, threads, work_ms * 1e-3);
        now = cpu.next_completion_time().expect("work is under way");
        cpu.pop_completed(now).expect("the work is complete");
        total += now - begin;
    }
    total as f64 * 1e-6 / bursts as f64
}

/// Returns the mean time of a burst of work in milliseconds, by an exact model of the bandwidth control in
/// kernel/sched/fair.c: each period starts with a full quota, a thread stops as soon as the quota is used up and waits
/// for the next period, and unused quota is lost.
fn exact_quota_ms(work: f64, idle: f64, period: f64, bursts: u64) -> f64 {
    let quota = period * SHARE;
    let (mut now, mut left, mut ends) = (0.0, quota, period);
    let mut total = 0.0;
    for burst in 0..bursts {
        now += idle;
        let (begin, mut todo) = (now, work);
        while todo > 1e-9 {
            while now >= ends - 1e-9 {
                (left, ends) = (quota, ends + period);
            }
            let runs = todo.min(left).min(ends - now);
            now += runs;
            todo -= runs;
            left -= runs;
            if todo > 1e-9 && left <= 1e-9 {
                now = ends;
            }
        }
        if burst > 0 {
            total += now - begin;
        }
    }
    total / (bursts - 1) as f64
}

/// Runs as the child process of `--disk`: prints the time to request and read all pieces of a burst, in ms.
fn read(path: &Path, burst_mib: usize, bursts: usize, pause_ms: u64) -> Result<(), StudyError> {
    let _groups = Cgroups::join()?;
    let file = File::open(path)?;
    let map = map_cold(&file)?;
    let length = burst_mib * MIB;
    for burst in 0..bursts {
        let at = burst * length % (map.len() - length + 1) / length * length;
        let part = &map[at..at + length];
        unmap(map, part);
        drop_from_cache(&file, at, length);
        std::thread::sleep(Duration::from_millis(pause_ms));
        let begin = Instant::now();
        for advice in [Advice::WillNeed, Advice::PopulateRead] {
            part.chunks(PIECE).for_each(|piece| advise(piece, advice));
        }
        println!("{}", begin.elapsed().as_secs_f64() * 1e3);
    }
    Ok(())
}

fn disk_rows() -> Result<(), StudyError> {
    require_cgroup_access()?;
    let file = WeightFile::create(&std::env::temp_dir(), FILE_MIB)?;
    println!(
        "| burst MiB | pause ms | naive ms | simulated mean ms | measured mean ms | measured / simulated | \
         measured median | p10 - p90 |\n|---|---|---|---|---|---|---|---|"
    );
    for burst_mib in [2usize, 8, 32, 128] {
        for pause_ms in [10u64, 50, 100, 200, 500] {
            let bytes = (burst_mib * MIB) as f64;
            let naive = bytes / (DISK_MBPS as f64 * 1e3);
            let bursts = (4000.0 / (naive + pause_ms as f64)).clamp(6.0, 60.0) as usize;
            let limits = CgroupLimits { disk_mb_per_s: DISK_MBPS, ..CgroupLimits::default() };
            let numbers = [burst_mib.to_string(), bursts.to_string(), pause_ms.to_string()];
            let words = [&["--child-disk".to_owned(), file.path_text.clone()][..], &numbers].concat();
            let times = in_child(limits, &file.path, &words)?;
            let simulated = simulated_times_ms(burst_mib * MIB, bursts, pause_ms);
            let (simulated, took) = (mean(&simulated), mean(&times));
            let [p10, p90] = [0.1, 0.9].map(|at| quantile(&times, at));
            println!(
                "| {burst_mib} | {pause_ms} | {naive:.0} | {simulated:.1} | {took:.1} | {:.2} | {:.1} | \
                 {p10:.1} - {p90:.1} |",
                took / simulated,
                median(times),
            );
        }
    }
    Ok(())
}

/// Returns the time of each burst of reads from the simulated disk ([`DiskSim`]), in milliseconds.
fn simulated_times_ms(burst: usize, bursts: usize, pause_ms: u64) -> Vec<f64> {
    let speed = DiskSpeed {
        bandwidth: BytesPerSecond(1500e6),
        fault_read_rate: BytesPerSecond(744e6),
        prefetch_rate: BytesPerSecond(1438e6),
        throttle_rate: Some(BytesPerSecond(DISK_MBPS as f64 * 1e6)),
        latency: Seconds(0.0002),
        piece_latency: Seconds(0.0),
    };
    let mut disk = DiskSim::new(speed);
    let (mut now, mut times) = (0, Vec::new());
    for _ in 0..bursts {
        now += pause_ms * 1_000_000;
        let begin = now;
        let mut left = burst / PIECE;
        (0..left).for_each(|piece| disk.submit(now, ReadKind::Prefetch, piece, Bytes(PIECE as u64)));
        while left > 0 {
            now = disk.next_event_time().expect("a piece is under way").max(now);
            while disk.pop_completed(now).is_some() {
                left -= 1;
            }
        }
        times.push((now - begin) as f64 * 1e-6);
    }
    times
}
