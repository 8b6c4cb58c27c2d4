//! Tests of whole runs with the page-cache policy of each operating system.
//!
//! A run has one device of [`crate::small_rings`], with a disk of 1 GB/s and too little memory for the 8B shape. Reads
//! are counted after the first token. The trace marks policies that are not validated on a machine.

use hearth_core::metrics;
use hearth_profiles::device::PageCachePolicy::{
    self, Android, Macos, MacosMetal, MgLru, PaperLinear, Random, TwoList,
};
use hearth_profiles::device::{DeviceProfile, Os, ReclaimParameters};
use hearth_profiles::{Bytes, Format, Fraction, Seconds, Sourced};
use hearth_schema::trace::{Outcome, Trace};

use crate::small_rings::{OS, PLENTY, add_gpu, cluster, cold, llama_8b, plan, run};

const POLICIES: [PageCachePolicy; 7] = [PaperLinear, TwoList, MgLru, Random, Macos, MacosMetal, Android];

/// Runs the 8B shape on one device whose page cache can contain a fraction `part` of its weights; `change` may change
/// the device's profile. Returns the trace, and the bytes read per token as a fraction of the weights.
fn traced(part: f64, policy: PageCachePolicy, change: impl Fn(&mut DeviceProfile)) -> (Trace, f64) {
    let model = llama_8b();
    let plan = plan(&model, &[32], OS);
    let share = model.all_layers_bytes() + model.output_head_bytes();
    let kv = model.shape.mixer(0).cache_bytes(plan.context_length, Format::F16).0 * 32;
    let cache = (share.as_f64() * part) as u64;
    let mut cluster = cluster(&model.name, &[Bytes(cache + kv)], 5);
    let memory = &mut cluster.members[0].device.memory;
    memory.page_cache = policy;
    // The file floor of macOS is 0.15 of the total memory.
    memory.total_memory.value = Bytes(8 << 30);
    change(&mut cluster.members[0].device);
    let trace = cold(&cluster, &plan);
    let read =
        metrics::compute_metrics(&trace).devices.first().map_or(0.0, |device| device.bytes_read_per_token);
    (trace, read / share.as_f64())
}

#[test]
fn bytes_read_per_token_by_policy() {
    for policy in POLICIES {
        let (trace, read) = traced(1.02, policy, |_| ());
        // Only an embedding row and the pages around it are read again: some MiB of five GB.
        assert!(read < 0.01, "{policy:?}: {read}");
        let unvalidated = trace.header.devices[0].unvalidated_parts.is_some();
        assert_eq!(unvalidated, policy != TwoList, "{policy:?}");
        let (_, short) = traced(0.75, policy, |_| ());
        match policy {
            PaperLinear => assert!((0.24..0.27).contains(&short), "{policy:?}: {short}"),
            // With m of the share read per token there are as many evictions between two uses of a chunk: m = 1 -
            // exp(-m / 0.75) has the solution 0.45.
            Random => assert!((0.38..0.52).contains(&short), "{policy:?}: {short}"),
            _ => assert!((0.98..1.03).contains(&short), "{policy:?}: {short}"),
        }
    }
    let (trace, _) = traced(1.02, TwoList, |device| device.os = Os::Android);
    assert!(trace.header.devices[0].unvalidated_parts.is_some());
}

#[test]
fn low_memory_killer_ends_the_run() {
    let kill = |below: u64| {
        move |device: &mut DeviceProfile| {
            device.memory.reclaim_parameters = Some(ReclaimParameters {
                kill_threshold: Some(Sourced::new(Bytes(below), "test")),
                ..ReclaimParameters::default()
            });
        }
    };
    let cache = (llama_8b().all_layers_bytes().as_f64() * 0.5) as u64;
    assert_eq!(traced(0.5, Android, kill(cache / 2)).0.outcome, Outcome::Ok);
    assert_eq!(traced(0.5, Android, kill(cache * 2)).0.outcome, Outcome::Killed);
    // Without pressure nothing is killed.
    assert_eq!(traced(1.02, Android, kill(cache * 9)).0.outcome, Outcome::Ok);
}

#[test]
fn android_compression_frees_memory() {
    let read = |compressed: f64| {
        let with_zram = |device: &mut DeviceProfile| {
            // Other programs occupy a third of the share: if compression frees nothing, three quarters fit.
            device.memory.can_swap = Some(Sourced::new(Bytes(1_600_000_000), "test"));
            let compressed = Some(Sourced::new(Fraction(compressed), "test"));
            device.memory.reclaim_parameters =
                Some(ReclaimParameters { compressed_fraction: compressed, ..ReclaimParameters::default() });
        };
        traced(0.75, Android, with_zram).1
    };
    assert!(read(1.0) > 0.95, "{}", read(1.0));
    assert!(read(0.1) < 0.3, "{}", read(0.1));
}

/// While a worker waits for the head, Metal unwires its weights after the idle time, unless `keep_alive` is set.
#[test]
fn metal_unwires_idle_weights() {
    let model = llama_8b();
    let plan = plan(&model, &[16, 16], OS);
    let read = |unwire_after: f64, keep_alive| {
        let mut cluster = cluster(&model.name, &[PLENTY, Bytes(1 << 30)], 4);
        let metal = &mut cluster.members[1].device;
        metal.memory.page_cache = MacosMetal;
        add_gpu(metal, "metal", "10 GB/s", None);
        metal.memory.reclaim_parameters = Some(ReclaimParameters {
            unwire_timeout: Some(Sourced::new(Seconds(unwire_after), "test")),
            keeps_weights_wired: keep_alive,
            ..ReclaimParameters::default()
        });
        run(&cluster, &plan).devices[1].bytes_read_per_token
    };
    // The head computes for about 0.25 s per token.
    assert_eq!(read(1.0, false), 0.0);
    assert_eq!(read(0.1, true), 0.0);
    assert!(read(0.1, false) > 1e8, "{}", read(0.1, false));
}
