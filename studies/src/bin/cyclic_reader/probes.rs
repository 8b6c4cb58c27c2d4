//! Probes of the advice calls on a mapping.
//!
//! They answer what the managed residency relies on: how a piece is dropped from memory and what that costs; whether
//! `MADV_RANDOM` restricts reading to what was asked for; and how many bytes must be in flight to keep the disk busy
//! when the helper waits for one piece after another.

use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::passes::{DropMethod, load};
use hearth_studies::cgroups::{
    Cgroups, Counters, Failure, MIB, PAGE, advise, checksum, drop_from_cache, map_cold, median, missing,
};

pub fn run(groups: &Cgroups, path: &Path, what: &str) -> Result<(), Failure> {
    let file = File::open(path)?;
    let map = map_cold(&file)?;
    match what {
        "drop" => drops(groups, &file, map, "owner")?,
        "drop-other" => {
            // SAFETY: no other thread exists yet that could see half of the change.
            unsafe { libc::setuid(65534) };
            drops(groups, &file, map, "another user")?;
        }
        "reading" => reading(groups, &file, map)?,
        "depth" => depths(&file, map),
        other => return Err(format!("no such probe: {other}").into()),
    }
    Ok(())
}

fn drops(groups: &Cgroups, file: &File, map: &'static [u8], who: &str) -> Result<(), Failure> {
    for way in [DropMethod::PageOut, DropMethod::ZapAndFadvise] {
        for random in [false, true] {
            for used in [false, true] {
                for piece_kib in [256, 1024, 4096] {
                    let before = Counters::read(groups)?.used;
                    drop_pieces(file, map, way, random, used, piece_kib, who);
                    let now = Counters::read(groups)?.used;
                    println!("    charged after it: {:+.1} MiB", (now as f64 - before as f64) / MIB as f64);
                    drop_from_cache(file, 0, map.len());
                }
            }
        }
    }
    Ok(())
}

/// Loads, optionally uses and then drops one piece after another.
fn drop_pieces(
    file: &File,
    map: &'static [u8],
    way: DropMethod,
    random: bool,
    used: bool,
    kib: usize,
    who: &str,
) {
    advise(map, if random { libc::MADV_RANDOM } else { libc::MADV_NORMAL });
    let length = kib << 10;
    let (mut times, mut left, mut sum) = (Vec::new(), 0, 0u64);
    for at in (0..128 * MIB).step_by(length) {
        let piece = &map[at..at + length];
        // Another thread loads, as the helper does: its processor may hold the last pages in a batch.
        std::thread::scope(|scope| scope.spawn(|| load(piece)).join()).expect("loading cannot fail");
        if used {
            sum = sum.wrapping_add(checksum(piece));
        }
        let begin = Instant::now();
        way.drop(file, map, piece);
        times.push(begin.elapsed().as_secs_f64() * 1e3 * MIB as f64 / length as f64);
        left += length / PAGE - missing(piece);
    }
    let advice = if random { "random" } else { "normal" };
    let pages = 128 * MIB / PAGE;
    println!(
        "{who}: {way:?}, {advice}, used {used}, {kib} KiB: {:.3} ms/MiB, {left} of {pages} pages left",
        median(times)
    );
    advise(map, libc::MADV_DONTNEED);
    std::hint::black_box(sum);
}

/// Measures the bytes read by one fault, one `WILLNEED` and one `POPULATE_READ`, with and without `MADV_RANDOM`.
fn reading(groups: &Cgroups, file: &File, map: &'static [u8]) -> Result<(), Failure> {
    for advice in ["normal", "random"] {
        advise(map, if advice == "random" { libc::MADV_RANDOM } else { libc::MADV_NORMAL });
        for what in ["fault", "willneed", "populate", "willneed+populate"] {
            advise(map, libc::MADV_DONTNEED);
            drop_from_cache(file, 0, map.len());
            for length in [256 << 10, MIB, 4 * MIB, 16 * MIB] {
                let at = 128 * MIB + length * 4;
                let piece = &map[at..at + length];
                let before = Counters::read(groups)?;
                let begin = Instant::now();
                match what {
                    "fault" => {
                        std::hint::black_box(piece[length / 2]);
                    }
                    "willneed" => {
                        advise(piece, libc::MADV_WILLNEED);
                    }
                    "populate" => {
                        advise(piece, libc::MADV_POPULATE_READ);
                    }
                    _ => load(piece),
                }
                let took = begin.elapsed().as_secs_f64() * 1e3;
                std::thread::sleep(Duration::from_millis(150));
                let read = Counters::read(groups)?.since(&before).bytes >> 10;
                let there = (length / PAGE - missing(piece)) * 4;
                let all = (map.len() / PAGE - missing(map)) * 4;
                println!(
                    "{advice}: {what} of {} KiB took {took:.2} ms, read {read} KiB; {there} KiB of the piece there, {all} of the file",
                    length >> 10
                );
                advise(map, libc::MADV_DONTNEED);
                drop_from_cache(file, 0, map.len());
            }
        }
    }
    Ok(())
}

/// Measures the speed of a helper by the number of pieces that it requests ahead.
fn depths(file: &File, map: &'static [u8]) {
    for random in [false, true] {
        advise(map, if random { libc::MADV_RANDOM } else { libc::MADV_NORMAL });
        for kib in [256, 1024, 4096] {
            for ahead_kib in [0, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768] {
                if ahead_kib > 0 && ahead_kib < kib {
                    continue;
                }
                let (length, depth) = (kib << 10, ahead_kib / kib);
                let begin = Instant::now();
                let mut asked = 0;
                let mut paging = Duration::ZERO;
                let pieces: Vec<&[u8]> = map[..384 * MIB].chunks(length).collect();
                for (at, piece) in pieces.iter().enumerate() {
                    while asked < pieces.len().min(at + depth) {
                        advise(pieces[asked], libc::MADV_WILLNEED);
                        asked += 1;
                    }
                    advise(piece, libc::MADV_POPULATE_READ);
                    let start = Instant::now();
                    advise(piece, libc::MADV_PAGEOUT);
                    paging += start.elapsed();
                }
                let took = begin.elapsed().as_secs_f64();
                println!(
                    "random {random}, pieces of {kib} KiB, {ahead_kib} KiB asked ahead: {:.0} MB/s, page-out {:.1} % of the time",
                    (384 * MIB) as f64 * 1e-6 / took,
                    paging.as_secs_f64() / took * 100.0
                );
                advise(map, libc::MADV_DONTNEED);
                drop_from_cache(file, 0, map.len());
                // A throttle begins with a fresh slice.
                std::thread::sleep(Duration::from_millis(250));
            }
        }
    }
}
