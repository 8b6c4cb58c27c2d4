//! Tests of managed residency: bytes read and time per token, against closed forms.
//!
//! Devices read weights at 10 GB/s from memory and at 1 GB/s from disk, so that expected times can be computed by hand.
//! Reads are counted after the first token, when the kept set is in memory.

use hearth_core::cluster::Cluster;
use hearth_core::metrics::{self, Metrics};
use hearth_core::residency::kept_bytes;
use hearth_core::schedule::{ModelPart, parts_by_busy_period};
use hearth_profiles::device::PageCachePolicy;
use hearth_profiles::model::ModelProfile;
use hearth_profiles::{Bytes, BytesPerSecond, Document, Seconds, Sourced};
use hearth_schema::Plan;
use hearth_schema::plan::Role;
use hearth_schema::residency::{Residency, ResidencyOptions};
use hearth_schema::trace::{Counter, Outcome, StepKind};
use hearth_sim::Options;
use proptest::prelude::*;

use crate::small_rings::{
    OS, PLENTY, assert_near, cluster, cold, count, layers, llama_8b, memories, plan, readings, records, run,
    set_prompt, tpot,
};

const MANAGED: ResidencyOptions = ResidencyOptions::with_policy(Residency::Managed);

/// Disk bandwidth of the devices of [`crate::small_rings`] in bytes per second.
const DISK: f64 = 1e9;
/// Memory bandwidth of the devices of [`crate::small_rings`] in bytes per second.
const MEMORY: f64 = 10e9;
const CORES: u32 = 4;

/// Returns the bytes of weights that a device's CPU uses for a token.
fn share(plan: &Plan, place: usize, model: &ModelProfile) -> Bytes {
    let bytes = |part| match part {
        ModelPart::Output => model.output_head_bytes(),
        ModelPart::Layers(part) => layers(model, part),
    };
    parts_by_busy_period(plan, place).into_iter().flatten().map(bytes).sum()
}

/// A ring in which all devices except the last have enough memory.
struct SmallLastDevice {
    cluster: Cluster,
    plan: Plan,
    /// Bytes of weights that the last device's CPU uses for a token: its share.
    share: f64,
    /// Bytes of the share that the last device does not keep in memory.
    streamed: f64,
}

impl SmallLastDevice {
    /// Creates a ring whose last device has a page cache for a fraction `part` of its share.
    fn new(windows: &[u32], options: ResidencyOptions, part: f64) -> Self {
        Self::with_context(512, windows, options, part)
    }

    fn with_context(context: u32, windows: &[u32], options: ResidencyOptions, part: f64) -> Self {
        let (model, last) = (llama_8b(), windows.len() - 1);
        let plan = Plan { context_length: context, ..plan(&model, windows, options) };
        let share = share(&plan, last, &model);
        let memory_budget = Bytes((share.as_f64() * part) as u64);
        let kept = kept_bytes(memory_budget.0, share.0, CORES, &options);
        let layers = plan.windows(last).iter().map(|window| window.len() as u64).sum::<u64>();
        let kv_format = plan.kv_cache_format.format();
        let mut memories = vec![PLENTY; windows.len()];
        memories[last] = memory_budget + model.shape.mixer(0).cache_bytes(context, kv_format) * layers;
        let cluster = cluster(&model.name, &memories, 6);
        Self { cluster, plan, share: share.as_f64(), streamed: share.as_f64() - kept as f64 }
    }

    fn run(&self) -> Metrics {
        run(&self.cluster, &self.plan)
    }
}

#[test]
fn reads_are_the_bytes_not_kept() {
    for windows in [[16, 16], [8, 8], [4, 4]] {
        for part in [0.9, 0.75, 0.5, 0.35] {
            let ring = SmallLastDevice::new(&windows, MANAGED, part);
            let read = ring.run().devices[1].bytes_read_per_token;
            // The last piece of a window is read completely, and the kept set is the largest that fits.
            let pieces = (read - ring.streamed) / MANAGED.piece_bytes().as_f64();
            let windows = f64::from(ring.plan.rounds);
            assert!(pieces.abs() <= 1.0 + windows, "{windows} windows, {part}: {pieces} pieces too many");
        }
    }
}

/// In each round a device takes the time to compute its window, or the time to read the streamed bytes that were not in
/// its stream buffer at the start of the round, whichever is longer.
///
/// A planner that adds both times assumes that the device reads only while it is idle. But the device also reads during
/// the computation, and the streamed pieces are evenly distributed in the window. So the simulated time is shorter, by
/// at most the computing time.
#[test]
fn visit_time_follows_the_closed_form() {
    for (windows, rounds) in [([16, 8, 8], 1.0), ([8, 4, 4], 2.0), ([4, 2, 2], 4.0)] {
        for (part, buffer) in [(0.9, 8), (0.75, 8), (0.5, 8), (0.35, 8), (0.75, 64), (0.5, 160)] {
            let options = ResidencyOptions { stream_buffer: Some(Bytes::from_mib(buffer)), ..MANAGED };
            let ring = SmallLastDevice::new(&windows, options, part);
            let quiet = tpot(&run(&cluster("llama-8b", &[PLENTY; 3], 6), &ring.plan)) / 1e3;
            let (stage, read) = (ring.share / MEMORY, ring.streamed);
            let buffer = options.stream_buffer_bytes().as_f64();
            // The buffer is filled while the other devices compute.
            let filled = buffer.min((quiet - stage) / rounds * DISK).min(read / rounds);
            let visit = (stage / rounds).max((read / rounds - filled) / DISK);
            let found = tpot(&ring.run()) / 1e3;
            let case = format!("k={rounds}, {part} of the share, a buffer of {buffer} bytes");
            assert_near(found, quiet - stage + rounds * visit, 0.02, &case);
            // The time that the planner's sum predicts.
            let hidden = read.min(rounds * buffer);
            let following = (quiet + (read - hidden) / DISK).max(stage + read / DISK);
            let range = following - stage - 0.02 * following..following + 0.02 * following;
            assert!(range.contains(&found), "{case}: {found} s, of {range:?}");
        }
    }
}

#[test]
fn single_device_overlaps_reading_and_computing() {
    for part in [0.97, 0.9, 0.75, 0.5, 0.35] {
        let ring = SmallLastDevice::new(&[32], MANAGED, part);
        let (computing, reading) = (ring.share / MEMORY, ring.streamed / DISK);
        let metrics = ring.run();
        let found = tpot(&metrics) / 1e3;
        assert_near(found, computing.max(reading), 0.02, format!("{part} of the share, s"));
        // The rest of the reading is hidden: all of it if computing takes longer. The reading for the token after the
        // last, one of five, is not complete.
        let (waits, hidden) = (metrics.terms_ms.demand_disk / 1e3, metrics.terms_ms.hidden_disk / 1e3);
        assert!((waits - (reading - computing).max(0.0)).abs() < 0.02 * found, "{part}: waits {waits} s");
        let range = 0.78 * reading.min(computing)..1.02 * reading.min(computing);
        assert!(range.contains(&hidden), "{part}: {hidden} s hidden, of {range:?}");
    }
}

#[test]
fn share_read_per_token() {
    let large_buffer = ResidencyOptions { stream_buffer: Some(Bytes::from_mib(256)), ..MANAGED };
    for (case, options, windows, part, expected) in [
        ("the system reads all", OS, [16, 16], 0.75, 0.98..1.02),
        ("a kept part is not read", MANAGED, [16, 16], 0.75, 0.25..0.27),
        ("the stream buffer shrinks to fit memory", large_buffer, [8, 8], 0.05, 0.9..1.0),
    ] {
        let ring = SmallLastDevice::new(&windows, options, part);
        let read = ring.run().devices[1].bytes_read_per_token / ring.share;
        assert!(expected.contains(&read), "{case}: {read} of the share");
    }
}

#[test]
fn policies_agree_with_enough_memory() {
    let model = llama_8b();
    let cluster = cluster("llama-8b", &[PLENTY, PLENTY], 6);
    let metrics = |options| run(&cluster, &plan(&model, &[8, 8], options));
    let (managed, system) = (metrics(MANAGED), metrics(ResidencyOptions::default()));
    assert_eq!(managed.devices[1].bytes_read_per_token, 0.0);
    // Under `os` a chunk is read around each new embedding row, under managed residency a page.
    let rows = 2.0 * Options::default().chunk_size.as_f64() / DISK * 1e3;
    let difference = tpot(&system) - tpot(&managed);
    assert!((0.0..2.0 * rows).contains(&difference), "{difference} ms");
}

/// With eviction of each window after its computation, reading the next window evicts no pages that are still needed.
#[test]
fn windowed_residency_avoids_thrashing() {
    let read = |policy, release| {
        let options = ResidencyOptions { evict_after_use: release, ..ResidencyOptions::with_policy(policy) };
        let mut ring = SmallLastDevice::new(&[8, 8], options, 0.76);
        // The head computes for longer than the other device needs to read its share.
        ring.cluster.members[0].device.cpu.read_bandwidth.value = BytesPerSecond(MEMORY / 10.0);
        let metrics = ring.run();
        (metrics.devices[1].bytes_read_per_token / ring.share, tpot(&metrics))
    };
    for policy in [Residency::Os, Residency::Windowed] {
        let (kept, released) = (read(policy, false), read(policy, true));
        assert!((0.99..1.01).contains(&released.0), "{policy:?}: {released:?}");
        assert!(released.1 < kept.1, "{policy:?}: {released:?} against {kept:?}");
        if policy == Residency::Os {
            // A real machine read 1.26 to 1.58 times its share (see `linux_rows`).
            assert!((1.2..1.6).contains(&kept.0), "{kept:?}");
        }
    }
}

#[test]
fn small_buffers_stream_too() {
    let options = ResidencyOptions { stream_buffer: Some(Bytes(512 << 10)), ..MANAGED };
    let ring = SmallLastDevice::new(&[8, 8], options, 0.75);
    let read = ring.run().devices[1].bytes_read_per_token;
    assert_near(read, ring.streamed, 0.01, "bytes read per token");
}

/// If several batches of a prompt are in the ring at once, pieces are not used in the order in which they are streamed.
#[test]
fn long_prompt_keeps_streaming() {
    for windows in [&[16, 16][..], &[4, 4], &[3, 2, 2]] {
        let mut ring = SmallLastDevice::with_context(2048, windows, MANAGED, 0.6);
        set_prompt(&mut ring.cluster, &mut ring.plan, 2048, 1100);
        let trace = cold(&ring.cluster, &ring.plan);
        assert_eq!(count(&trace, StepKind::Output), ring.cluster.workload.generated_tokens as usize);
        let last = windows.len() as u16 - 1;
        let read = readings(&trace, last, Counter::BytesRead).last().copied().unwrap_or(0) as f64;
        // The kept set is read once, the rest in each pass, and at most one buffer per window is read in vain.
        let buffer = MANAGED.stream_buffer_bytes().as_f64();
        let pass = ring.streamed + buffer * f64::from(ring.plan.rounds);
        let max = ring.share - ring.streamed + pass * trace.passes.len() as f64;
        assert!(read < max, "{windows:?}: {read} bytes");
    }
}

proptest! {
    #![proptest_config(crate::cases(60))]

    /// With more memory a device keeps the same pieces and more, so it reads at most one more piece per window.
    #[test]
    fn more_memory_never_reads_more(
        windows in prop::sample::select(vec![[16u32, 16], [8, 8], [4, 4]]),
        part in 0.1f64..1.1,
        more in 0.0f64..0.5,
        buffer_mib in 1u64..64,
    ) {
        let options = ResidencyOptions { stream_buffer: Some(Bytes::from_mib(buffer_mib)), ..MANAGED };
        let [few, many] = [part, part + more].map(|part| SmallLastDevice::new(&windows, options, part));
        let [less, much] = [&few, &many].map(|ring| ring.run().devices[1].bytes_read_per_token);
        let slack = options.piece_bytes().as_f64() * f64::from(1 + few.plan.rounds);
        prop_assert!(much <= less + slack, "{} of the share: {} bytes; {} more: {}", part, less, more, much);
    }

    /// For any windows, buffers and memory sizes, the run ends, and every layer is computed once for every pass. A
    /// device reads its share at most twice for a token, or three times if its buffer does not fit in memory: then
    /// pieces that were read ahead and evicted are populated, and may be evicted again before their use.
    #[test]
    fn streaming_never_deadlocks(
        windows in prop::collection::vec(0u32..7, 1..5),
        memory_mib in prop::collection::vec(16u64..700, 4),
        buffer_kib in prop::collection::vec(512u64..65536, 4),
        kept_mib in prop::collection::vec(prop::option::of(0u64..500), 4),
        managed in prop::collection::vec(prop::bool::weighted(0.8), 4),
        linear: bool,
        latency_us in 0u64..2000,
        prompt in 1u32..3,
        generate in 2u32..5,
    ) {
        prop_assume!(windows.iter().sum::<u32>() > 0);
        let memories = memories(&memory_mib, windows.len());
        let mut cluster = cluster("1b", &memories, generate);
        let mut plan = plan(&cluster.model, &windows, MANAGED);
        // A prompt of one batch or of several.
        set_prompt(&mut cluster, &mut plan, 2048, 1 + (prompt - 1) * 600);
        for (place, device) in plan.devices.iter_mut().enumerate() {
            let (buffer, kept) = (Some(Bytes(buffer_kib[place] << 10)), kept_mib[place].map(Bytes::from_mib));
            let own = ResidencyOptions { stream_buffer: buffer, kept_set_limit: kept, ..MANAGED };
            device.residency = if managed[place] { own } else { ResidencyOptions::default() };
            if place > 0 && device.window == 0 {
                device.role = Role::Relay;
            }
            let profile = &mut cluster.members[place].device;
            profile.disk.latency = Some(Sourced::new(Seconds(latency_us as f64 * 1e-6), "test"));
            if linear {
                profile.memory.page_cache = PageCachePolicy::PaperLinear;
            }
        }
        prop_assume!(plan.validate().is_ok());
        let trace = cold(&cluster, &plan);
        if trace.outcome == Outcome::Ok {
            prop_assert_eq!(count(&trace, StepKind::Output) as u32, generate);
            let computed = records(&trace, StepKind::Compute);
            let layers: u32 = computed.map(|record| record.layer_range().len() as u32).sum();
            prop_assert_eq!(layers, cluster.model.shape.layers.0 * trace.passes.len() as u32);
            let metrics = metrics::compute_metrics(&trace);
            for (place, device) in metrics.devices.iter().enumerate().filter(|(place, _)| managed[*place]) {
                let own = share(&plan, place, &cluster.model).as_f64();
                let buffer_fits = memories[place].0 > (buffer_kib[place] << 10) + (16 << 20);
                let max = if buffer_fits { 2.0 * own } else { 3.0 * own } + Bytes::from_mib(16).as_f64();
                prop_assert!(device.bytes_read_per_token <= max, "{:?} of {}", device, own);
            }
        }
    }
}
