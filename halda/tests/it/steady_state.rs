//! The steady-state model, compared with hand-computed times, and the choice of rounds and residency policies.
//!
//! There are two devices: a head with enough memory for all of its layers, which only adds time, and a reader like that
//! of `studies/src/bin/windowed_reader.rs`, with 400 MiB of weights and a disk of 400 MB/s. A token takes 1.345 s
//! without reading.

use std::collections::BTreeMap;

use hearth_core::expert_routes::expected_miss_rate;
use hearth_core::residency::kept_bytes;
use hearth_halda::{
    Assignment, Device, DeviceTerms, ExpertReads, Instance, LatencyBreakdown, LatencyModel, OverlapSearch,
    ReadRates, RereadScope, RuntimeModel, Solution, Strategy, solve,
};
use hearth_profiles::Bytes;
use hearth_schema::residency::{Residency, ResidencyOptions};

use crate::fixtures::{plain_device, plain_instance, plain_model};

const MIB: u64 = 1 << 20;
const LAYER_BYTES: u64 = 50 * MIB;
/// The bytes of memory that the kernel uses for page metadata of 400 MiB, free pages and read-around.
const KERNEL: u64 = 20 * MIB;
/// The seconds per token without reading from disk.
const QUIET: f64 = 1.345;
/// The disk rate in bytes per second.
const DISK: f64 = 400e6;
/// The seconds per token for which the second device computes its eight layers.
const STAGE: f64 = 0.08;

/// The seconds of a layer on the head. The rest of the head's time is token overhead.
const HEAD_LAYER: f64 = 0.001;

/// Returns a device whose CPU takes `layer` seconds for a layer.
fn device(name: &str, layer: f64, memory: u64, residency: ResidencyOptions) -> Device {
    Device {
        cpu_speed: BTreeMap::from([("q4k".to_owned(), 1e9 / layer)]),
        // Reading from memory takes negligible time.
        cpu_memory_rate: 1e15,
        unified_memory: true,
        disk_read_rate: DISK,
        ram_available: memory,
        runtime: RuntimeModel { allowed_residencies: vec![residency], ..RuntimeModel::default() },
        ..plain_device(name)
    }
}

/// Returns an instance with 16 layers for the two devices; a hop takes `hop` seconds.
fn instance(memory: u64, residency: ResidencyOptions, hop: f64) -> Instance {
    let mut devices = vec![
        device("head", HEAD_LAYER, 1 << 40, ResidencyOptions::default()),
        device("short", STAGE / 8.0, memory, residency),
    ];
    for device in &mut devices {
        device.hop_seconds = hop;
    }
    devices[0].runtime.token_overhead_seconds = QUIET - STAGE - 8.0 * HEAD_LAYER;
    plain_instance(plain_model(16, LAYER_BYTES, 1e9), devices)
}

/// Returns the times with eight layers on each device in k rounds. The second device has `residency`.
fn times(instance: &Instance, residency: ResidencyOptions, rounds: u32) -> LatencyBreakdown {
    let model = LatencyModel::new(instance).unwrap();
    let assignment = Assignment::new(0, rounds, vec![8 / rounds; 2], vec![0; 2]);
    model.evaluate_steady_state(&assignment, &[ResidencyOptions::default(), residency]).unwrap()
}

/// Returns the seconds per token with eight layers on each device in k rounds.
fn seconds(memory: u64, residency: ResidencyOptions, rounds: u32) -> f64 {
    times(&instance(memory, residency, 0.0), residency, rounds).seconds_per_token
}

/// Checks that a time in seconds differs by less than 5 ms from the expected time.
fn close(found: f64, expected: f64) {
    assert!((found - expected).abs() < 0.005, "{found} s, expected {expected} s");
}

#[test]
fn lru_page_cache_times() {
    let os = ResidencyOptions::with_policy(Residency::Os);
    // The rows of `sim/tests/it/linux_rows.rs` have the measured times 2.34, 2.34 to 2.38, 2.0 to 2.1, 2.22 and 1.40.
    close(seconds(305 * MIB, os.without_prefetch(), 1), 2.39);
    close(seconds(305 * MIB, os, 1), 2.39);
    close(seconds(305 * MIB, os, 2), 1.84);
    close(seconds(205 * MIB, os, 2), 2.37);
    close(seconds(305 * MIB, os, 4), QUIET);
    close(seconds(400 * MIB + KERNEL, os, 1), QUIET);
    // Half of a window is read ahead, the other half by page faults.
    let half = ResidencyOptions { prefetch_budget: Some(Bytes(50 * MIB)), ..os };
    close(seconds(305 * MIB, half, 4), QUIET + 200.0 * MIB as f64 / DISK);
    // A window that is released after its computation does not conflict with the next one.
    close(seconds(205 * MIB, ResidencyOptions { evict_after_use: true, ..os }, 2), QUIET);
}

#[test]
fn uncertain_memory_counts_with_its_mean() {
    let mean = |uncertainty: f64, slow_disk: f64| {
        let residency = ResidencyOptions::default().without_prefetch();
        // 60 MiB more than the weights. With 12 % less memory they do not fit, with 5 % less they do.
        let mut instance = instance(460 * MIB, residency, 0.0);
        instance.devices[1].runtime.memory_uncertainty = uncertainty;
        instance.slow_disk_threshold = slow_disk;
        let model = LatencyModel::new(&instance).unwrap();
        let assignment = Assignment::new(0, 1, vec![8; 2], vec![0; 2]);
        let residencies = [ResidencyOptions::default(), residency];
        close(model.steady_state_seconds(&assignment, &residencies), QUIET);
        let uncertain = model.with_uncertain_memory().expect("uncertain memory");
        uncertain.steady_state_seconds(&assignment, &residencies)
    };
    // One of the five quantiles, 10 %, is 12 % below: then a token reads everything, even from a slow disk.
    let reads = 400.0 * MIB as f64 / DISK;
    close(mean(0.1, 0.0), QUIET + reads / 5.0);
    close(mean(0.1, 2.0 * DISK), QUIET + reads / 5.0);
    close(mean(0.01, 0.0), QUIET);
    // With a fiftieth of the memory the device fails, which counts 10,000 s.
    assert!(mean(3.0, 0.0) > 2000.0);
    let certain = instance(460 * MIB, ResidencyOptions::default(), 0.0);
    assert!(LatencyModel::new(&certain).unwrap().with_uncertain_memory().is_none());
}

#[test]
fn paper_page_cache_rereads_the_excess() {
    let times = |memory, residency| {
        let mut instance = instance(memory, ResidencyOptions::default(), 0.0);
        instance.devices[1].runtime.reread_scope = RereadScope::Excess;
        times(&instance, residency, 1)
    };
    let found = times(305 * MIB, ResidencyOptions::default().without_prefetch());
    close(found.seconds_per_token, QUIET + 95.0 * MIB as f64 / DISK);
    close(found.devices[1].disk_seconds, 95.0 * MIB as f64 / DISK);
    // Fig. 3 of the paper: twice as many layers as fit in memory, one round. Prefetching doubles the reading, because
    // prefetched pages evict kept pages. It hides none of it, as the next window does not fit beside the current one.
    for (prefetch, read) in [(false, 200.0), (true, 400.0)] {
        let found = times(200 * MIB, ResidencyOptions { prefetch, ..ResidencyOptions::default() });
        close(found.seconds_per_token, QUIET + read * MIB as f64 / DISK);
    }
}

#[test]
fn token_of_a_mixture_reads_the_experts_that_a_cache_misses() {
    // 400 MiB of weights, of which 80 % are experts; a token uses an eighth of them, 40 MiB.
    let experts = ExpertReads {
        weight_share: 0.8,
        used_share: 0.125,
        in_use_bytes: 10 * MIB,
        used: 2,
        layer_bytes: 80 * MIB,
        latency_seconds: 0.0,
        read_around: 1.0,
    };
    let seconds = |memory: u64, residency: ResidencyOptions, scope| {
        let mut instance = instance(memory, residency, 0.0);
        instance.devices[1].runtime.experts = Some(experts);
        instance.devices[1].runtime.reread_scope = scope;
        times(&instance, residency, 1).seconds_per_token
    };
    let (os, managed) = (ResidencyOptions::default(), ResidencyOptions::with_policy(Residency::Managed));
    let all = RereadScope::Everything;
    close(seconds(400 * MIB + KERNEL, os, all), QUIET);
    let read = |missing: f64| missing * 40.0 * MIB as f64 / DISK;
    // 240 MiB leave 160 MiB for 320 MiB of experts. LRU works like a smaller cache that keeps the popular ones.
    close(seconds(240 * MIB, os, all), QUIET + read(expected_miss_rate(0.5, 0.125, true)));
    let kept = kept_bytes(230 * MIB, 400 * MIB, 1, &managed) as f64 / MIB as f64 - 80.0;
    close(seconds(240 * MIB, managed, all), QUIET + read(expected_miss_rate(kept / 320.0, 0.125, false)));
    // Less than a token uses: every expert is missing.
    close(seconds(110 * MIB, os, all), QUIET + read(1.0));
    // 60 MiB do not hold the 80 MiB that every token uses: the system evicts them before their use, the paper's page
    // cache keeps all but the excess.
    close(seconds(60 * MIB, os, all), QUIET + read(1.0) + 80.0 * MIB as f64 / DISK);
    close(seconds(60 * MIB, os, RereadScope::Excess), QUIET + read(1.0) + 20.0 * MIB as f64 / DISK);
    // Page faults read twice as much.
    let wide = ExpertReads { read_around: 2.0, ..experts };
    let mut faulting = instance(110 * MIB, os, 0.0);
    faulting.devices[1].runtime.experts = Some(wide);
    close(times(&faulting, os, 1).seconds_per_token, QUIET + 2.0 * read(1.0));
    // A layer in which an expert is missing waits once: there are four.
    let mut slow = instance(240 * MIB, managed, 0.0);
    slow.devices[1].runtime.experts = Some(ExpertReads { latency_seconds: 0.5, ..experts });
    let miss_rate = expected_miss_rate(kept / 320.0, 0.125, false);
    let latency = 4.0 * (1.0 - (1.0 - miss_rate).powi(2)) * 0.5;
    close(times(&slow, managed, 1).seconds_per_token, QUIET + read(miss_rate) + latency);
    // A limit on the kept weights.
    let limited = ResidencyOptions { kept_set_limit: Some(Bytes(80 * MIB)), ..managed };
    close(seconds(1 << 40, limited, all), QUIET + read(1.0));
}

#[test]
fn each_read_pattern_has_its_own_rate() {
    let reads =
        ReadRates { fault_read_rate: DISK / 4.0, read_ahead_rate: DISK, stream_read_rate: DISK / 2.0 };
    let seconds = |residency: ResidencyOptions, rounds: u32| {
        let mut instance = instance(305 * MIB, residency, 0.0);
        instance.devices[1].runtime.read_rates = Some(reads);
        times(&instance, residency, rounds).seconds_per_token
    };
    let share = 400.0 * MIB as f64;
    close(seconds(ResidencyOptions::default().without_prefetch(), 1), QUIET + 4.0 * share / DISK);
    // All four windows are read ahead, and there are no page faults.
    close(seconds(ResidencyOptions::default(), 4), QUIET);
    let managed = ResidencyOptions::with_policy(Residency::Managed);
    let read = (400 * MIB - kept_bytes(305 * MIB, 400 * MIB, 1, &managed) - 8 * MIB) as f64;
    close(seconds(managed, 1), QUIET - STAGE + 2.0 * read / DISK);
}

#[test]
fn managed_residency_times() {
    let managed_with = |buffer: u64| ResidencyOptions {
        stream_buffer: Some(Bytes(buffer * MIB)),
        ..ResidencyOptions::with_policy(Residency::Managed)
    };
    for (rounds, buffer) in [(1, 8), (2, 8), (4, 8), (4, 32)] {
        let managed = managed_with(buffer);
        let read = (400 * MIB - kept_bytes(305 * MIB, 400 * MIB, 1, &managed)) as f64;
        let waits = (read - f64::from(rounds) * (buffer * MIB) as f64) / DISK;
        close(seconds(305 * MIB, managed, rounds), QUIET - STAGE + waits.max(STAGE));
    }
    // If nothing else takes time, a token takes as long as its disk is busy.
    let managed = managed_with(48);
    let read = (400 * MIB - kept_bytes(205 * MIB, 400 * MIB, 1, &managed)) as f64;
    let mut instance = instance(205 * MIB, managed, 0.0);
    instance.devices[0].runtime.token_overhead_seconds = 0.0;
    let found = times(&instance, managed, 8);
    close(found.seconds_per_token, read / DISK);
    // Without hops, the terms of the devices sum to the time.
    close(found.seconds_per_token, found.devices.iter().map(DeviceTerms::seconds).sum());
}

/// Returns an instance whose head has memory for half of the model and must not read from disk.
fn small_head(memory: u64, residency: ResidencyOptions, hop: f64) -> Instance {
    let mut instance = instance(memory, residency, hop);
    instance.devices[0].ram_available = 8 * LAYER_BYTES + KERNEL;
    instance.devices[0].disk_read_rate = DISK / 2.0;
    instance.slow_disk_threshold = DISK * 0.75;
    instance
}

fn best(instance: &Instance) -> Solution {
    solve(&OverlapSearch::default(), &LatencyModel::new(instance).unwrap()).unwrap()
}

#[test]
fn rounds_are_chosen_only_where_they_pay() {
    let planned = |memory, residency, hop| best(&small_head(memory, residency, hop));
    let (os, managed) = (ResidencyOptions::default(), ResidencyOptions::with_policy(Residency::Managed));
    // Windows of half of the layers conflict with each other, windows of a quarter do not.
    let plan = planned(305 * MIB, os, 0.001);
    assert_eq!(plan.assignment.rounds, 4);
    close(plan.seconds_per_token(), QUIET + 4.0 * 0.002);
    // More rounds do not pay if they cost more than they hide, or if nothing is read.
    assert_eq!(planned(305 * MIB, os, 0.4).assignment.rounds, 1);
    assert_eq!(planned(400 * MIB + KERNEL, os, 0.0).assignment.rounds, 1);
    assert_eq!(planned(305 * MIB, os.without_prefetch(), 0.0).assignment.rounds, 1);
    // A stream buffer hides its size in every round, but a larger one leaves less memory for kept weights.
    let plan = planned(305 * MIB, managed, 0.001);
    let rounds = plan.assignment.rounds;
    assert!(rounds > 1, "{rounds}");
    close(plan.seconds_per_token(), QUIET + f64::from(rounds) * 0.002);
    let buffer = plan.residencies[1].stream_buffer_bytes().0;
    assert!(u64::from(rounds) * buffer >= 95 * MIB, "{rounds} rounds, a buffer of {buffer} bytes");
    assert_eq!(planned(305 * MIB, managed, 1.0).assignment.rounds, 1);
}

#[test]
fn fastest_residency_is_chosen() {
    let mut instance = small_head(205 * MIB, ResidencyOptions::default(), 0.5);
    let (os, managed) = (ResidencyOptions::default(), ResidencyOptions::with_policy(Residency::Managed));
    instance.devices.iter_mut().for_each(|device| device.runtime.allowed_residencies = vec![os, managed]);
    let plan = best(&instance);
    assert_eq!(plan.residencies[0], os, "everything fits");
    assert_eq!(plan.residencies[1].policy, Residency::Managed);
    let only = |residency| {
        let mut instance = instance.clone();
        instance.devices[1].runtime.allowed_residencies = vec![residency];
        best(&instance).seconds_per_token()
    };
    assert!(plan.seconds_per_token() < only(os));
    close(plan.seconds_per_token(), only(managed));
    assert_eq!(OverlapSearch::default().name(), "overlap");
}
