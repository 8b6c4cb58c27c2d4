//! Probes of `madvise` on the mapping of a file.
//!
//! The probes measure the behaviour on which managed residency relies: how a piece of the file can be dropped from
//! memory, and at what cost; whether `MADV_RANDOM` restricts reads to the requested range; and how many bytes
//! must be in flight to keep the disk busy if the helper thread waits for one piece after another.

use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant};

use hearth_profiles::measure::mapping::{Advice, FileMapping};
use rustix::thread::{Uid, set_thread_uid};

use crate::passes::{DropMethod, load_into_memory};
use hearth_studies::StudyError;
use hearth_studies::cgroups::{
    CgroupCounters, Cgroups, MIB, PAGE_SIZE, advise, advise_access_pattern, checksum, drop_from_cache,
    map_cold, median, missing_page_count, unmap,
};

pub fn run(groups: &Cgroups, path: &Path, what: &str) -> Result<(), StudyError> {
    let file = File::open(path)?;
    let map = map_cold(&file)?;
    match what {
        "drop" => probe_drops(groups, &file, map, "owner")?,
        "drop-other" => {
            // There is no other thread yet, and later threads inherit the user.
            set_thread_uid(Uid::from_raw(65534))?;
            probe_drops(groups, &file, map, "another user")?;
        }
        "reading" => probe_reads(groups, &file, map)?,
        "depth" => probe_depths(&file, map),
        other => Err(format!("unknown probe `{other}`; use `drop`, `drop-other`, `reading` or `depth`"))?,
    }
    Ok(())
}

/// Measures the time to drop pieces, and the number of pages that remain in memory, for each drop method.
fn probe_drops(groups: &Cgroups, file: &File, map: &FileMapping, who: &str) -> Result<(), StudyError> {
    for method in [DropMethod::PageOut, DropMethod::UnmapAndFadvise] {
        for random in [false, true] {
            for used in [false, true] {
                for piece_kib in [256, 1024, 4096] {
                    let before = CgroupCounters::read(groups)?.memory_usage_bytes;
                    drop_pieces(file, map, method, random, used, piece_kib, who);
                    let now = CgroupCounters::read(groups)?.memory_usage_bytes;
                    println!("    charged after it: {:+.1} MiB", (now as f64 - before as f64) / MIB as f64);
                    drop_from_cache(file, 0, map.len());
                }
            }
        }
    }
    Ok(())
}

/// Loads, optionally reads, and drops one piece after another; prints the time and the remaining pages.
fn drop_pieces(
    file: &File,
    map: &FileMapping,
    method: DropMethod,
    random: bool,
    used: bool,
    kib: usize,
    who: &str,
) {
    advise_access_pattern(map, random);
    let length = kib << 10;
    let (mut times, mut remaining, mut sum) = (Vec::new(), 0, 0u64);
    for at in (0..128 * MIB).step_by(length) {
        let piece = &map[at..at + length];
        // Another thread loads, like the helper: the per-processor batches of the kernel may contain its last pages.
        std::thread::scope(|scope| scope.spawn(|| load_into_memory(piece)).join())
            .expect("loading cannot fail");
        if used {
            sum = sum.wrapping_add(checksum(piece));
        }
        let begin = Instant::now();
        method.drop_piece(file, map, piece);
        times.push(begin.elapsed().as_secs_f64() * 1e3 * MIB as f64 / length as f64);
        remaining += length / PAGE_SIZE - missing_page_count(piece);
    }
    let advice = if random { "random" } else { "normal" };
    let pages = 128 * MIB / PAGE_SIZE;
    println!(
        "{who}: {method:?}, {advice}, used {used}, {kib} KiB: {:.3} ms/MiB, {remaining} of {pages} pages remain",
        median(times)
    );
    unmap(map, map);
    std::hint::black_box(sum);
}

/// Measures the bytes that a page fault, a `WILLNEED` and a `POPULATE_READ` read, with and without `MADV_RANDOM`.
fn probe_reads(groups: &Cgroups, file: &File, map: &FileMapping) -> Result<(), StudyError> {
    for advice in ["normal", "random"] {
        advise_access_pattern(map, advice == "random");
        for what in ["fault", "willneed", "populate", "willneed+populate"] {
            DropMethod::UnmapAndFadvise.drop_piece(file, map, map);
            for length in [256 << 10, MIB, 4 * MIB, 16 * MIB] {
                let at = 128 * MIB + length * 4;
                let piece = &map[at..at + length];
                let before = CgroupCounters::read(groups)?;
                let begin = Instant::now();
                if what == "fault" {
                    std::hint::black_box(piece[length / 2]);
                }
                if what.contains("willneed") {
                    advise(piece, Advice::WillNeed);
                }
                if what.contains("populate") {
                    advise(piece, Advice::PopulateRead);
                }
                let took = begin.elapsed().as_secs_f64() * 1e3;
                std::thread::sleep(Duration::from_millis(150));
                let read = CgroupCounters::read(groups)?.since(&before).bytes_read >> 10;
                let resident = (length / PAGE_SIZE - missing_page_count(piece)) * 4;
                let all = (map.len() / PAGE_SIZE - missing_page_count(map)) * 4;
                println!(
                    "{advice}: {what} of {} KiB took {took:.2} ms, read {read} KiB; {resident} KiB of the piece are resident, {all} of the file",
                    length >> 10
                );
                DropMethod::UnmapAndFadvise.drop_piece(file, map, map);
            }
        }
    }
    Ok(())
}

/// Measures the read speed for several piece sizes and numbers of bytes requested ahead.
fn probe_depths(file: &File, map: &FileMapping) {
    for random in [false, true] {
        advise_access_pattern(map, random);
        for kib in [256, 1024, 4096] {
            for ahead_kib in [0, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768] {
                if ahead_kib > 0 && ahead_kib < kib {
                    continue;
                }
                let (length, depth) = (kib << 10, ahead_kib / kib);
                let begin = Instant::now();
                let mut requested = 0;
                let mut paging = Duration::ZERO;
                let pieces: Vec<&[u8]> = map[..384 * MIB].chunks(length).collect();
                for (at, piece) in pieces.iter().enumerate() {
                    while requested < pieces.len().min(at + depth) {
                        advise(pieces[requested], Advice::WillNeed);
                        requested += 1;
                    }
                    advise(piece, Advice::PopulateRead);
                    let start = Instant::now();
                    advise(piece, Advice::PageOut);
                    paging += start.elapsed();
                }
                let took = begin.elapsed().as_secs_f64();
                println!(
                    "random {random}, pieces of {kib} KiB, {ahead_kib} KiB requested ahead: {:.0} MB/s, page-out {:.1} % of the time",
                    (384 * MIB) as f64 * 1e-6 / took,
                    paging.as_secs_f64() / took * 100.0
                );
                DropMethod::UnmapAndFadvise.drop_piece(file, map, map);
                // The throttle starts with a new time slice after a pause.
                std::thread::sleep(Duration::from_millis(250));
            }
        }
    }
}
