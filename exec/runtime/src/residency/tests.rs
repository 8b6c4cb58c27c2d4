//! Tests of the managed stream: every piece arrives, the buffer stays within its limit, and the computation never
//! hangs.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use hearth_core::schedule::ModelPart;
use hearth_profiles::{Bytes, Document};
use hearth_schema::Plan;

use super::managed::{MAX_WAIT, ManagedStream};
use super::{ResidencyBarrier, StepId, resident_bytes};
use crate::memory::MemoryReading;
use crate::weights::Weights;

const AT: StepId = StepId { pass: 0, round: 0 };
const BUFFER: u64 = 512 << 10;

fn weights() -> Arc<Weights> {
    let file = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/models/psalm-7m-f16.gguf");
    Arc::new(Weights::open(file).expect("the trained model is part of the repository"))
}

/// Returns a plan with one device that computes `window` of the eight layers per round and keeps `kept` bytes.
fn plan(window: u32, kept: u64) -> Plan {
    let kept = Bytes(kept);
    let text = format!(
        "schema: plan/1\nscenario: {{name: t, digest: ''}}\nmodel: {{name: m, shape_digest: 's', layers: 8}}\n\
         planner: {{strategy: manual}}\nrounds: {}\ncontext: 64\nkv_cache: f16\ndevices:\n\
         - {{name: a, role: head, window: {window}, gpu_layers: 0, residency: {{policy: managed, \
         stream_buffer: 512 KiB, kept: {kept}}}}}\n",
        8 / window
    );
    Plan::from_yaml(&text).expect("a valid plan")
}

/// Starts a stream of the layers in windows of `window`, which keeps `kept` bytes.
fn start(
    window: u32,
    kept: u64,
    memory: impl Fn() -> MemoryReading + Send + 'static,
    max_wait: Duration,
) -> (Arc<Weights>, ManagedStream, ResidencyBarrier) {
    let weights = weights();
    let stream = ManagedStream::start(weights.clone(), &plan(window, kept), 0, memory, max_wait);
    let barrier = stream.barrier();
    (weights, stream, barrier)
}

fn layers(range: std::ops::Range<u32>) -> ModelPart {
    ModelPart::Layers(range)
}

/// Uses a part as a computation does, with rows of 512 bytes. Returns the maximum number of bytes seen in the buffer.
fn compute_at(
    at: StepId,
    stream: &ManagedStream,
    barrier: &ResidencyBarrier,
    weights: &Weights,
    part: &ModelPart,
) -> u64 {
    let mut buffered = 0;
    stream.begin(part, at);
    for extent in weights.matrix_extents(part) {
        let bytes = weights.bytes(extent).expect("a checked tensor");
        let mut at = 0;
        while at < bytes.len() {
            let ready = barrier.wait(&bytes[at..], 512);
            assert!(ready >= 512.min(bytes.len() - at), "a barrier returns at least a row");
            barrier.mark_used(&bytes[at..at + ready]);
            at += ready;
            buffered = buffered.max(stream.shared.lock().residency.buffered_bytes());
        }
    }
    stream.finish(part);
    buffered
}

fn compute(stream: &ManagedStream, barrier: &ResidencyBarrier, weights: &Weights, part: &ModelPart) {
    let buffered = compute_at(AT, stream, barrier, weights, part);
    assert!(buffered <= BUFFER, "the buffer is never larger than planned");
}

fn settle(stream: &ManagedStream) {
    for _ in 0..2000 {
        let state = stream.shared.lock();
        if state.residency.buffered_bytes() == 0 && !state.residency.is_measure_due() {
            return;
        }
        drop(state);
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("the buffer does not become empty: {:?}", stream.shared.lock());
}

#[test]
fn parts_arrive_in_any_order_of_use() {
    let (weights, stream, barrier) = start(2, 1 << 20, MemoryReading::default, MAX_WAIT);
    // Parts are begun without a request, requested but not begun, requested twice, and begun twice.
    compute(&stream, &barrier, &weights, &layers(2..4));
    stream.request(&layers(4..6), AT);
    compute(&stream, &barrier, &weights, &layers(6..8));
    stream.request(&layers(0..2), AT);
    stream.request(&layers(0..2), AT);
    compute(&stream, &barrier, &weights, &layers(0..2));
    compute(&stream, &barrier, &weights, &layers(0..2));
    stream.request(&ModelPart::Output, AT);
    stream.request(&layers(0..2), AT);
    compute(&stream, &barrier, &weights, &ModelPart::Output);
    compute(&stream, &barrier, &weights, &layers(4..6));
    stream.reset();
    settle(&stream);
    // A part that does not belong to this device is ignored.
    stream.request(&layers(1..3), AT);
    stream.begin(&layers(1..3), AT);
    stream.finish(&layers(1..3));
}

#[test]
fn a_reset_in_the_middle_of_a_part_is_harmless() {
    let (weights, stream, barrier) = start(2, 0, MemoryReading::default, MAX_WAIT);
    for _ in 0..3 {
        stream.begin(&layers(0..2), AT);
        stream.request(&layers(2..4), AT);
        let first = weights.matrix_extents(&layers(0..2))[0];
        let bytes = weights.bytes(first).expect("a checked tensor");
        let ready = barrier.wait(bytes, 512);
        barrier.mark_used(&bytes[..ready / 2]);
        stream.reset();
        settle(&stream);
    }
    compute(&stream, &barrier, &weights, &layers(0..2));
}

#[test]
fn computation_continues_when_the_helper_hangs_or_ends() {
    let (resume_tx, resume_rx) = mpsc::channel::<()>();
    let hangs = Arc::new(AtomicBool::new(true));
    let helper_hangs = hangs.clone();
    let resume_rx = std::sync::Mutex::new(resume_rx);
    let memory = move || {
        if helper_hangs.load(Ordering::SeqCst) {
            let _ = resume_rx.lock().unwrap().recv_timeout(MAX_WAIT);
        }
        MemoryReading::default()
    };
    let (weights, stream, barrier) = start(2, 0, memory, Duration::from_millis(20));
    let first = weights.matrix_extents(&layers(0..2))[0];
    let bytes = weights.bytes(first).expect("a checked tensor");
    stream.begin(&layers(0..2), AT);
    let opened = "after the maximum wait the computation continues without the helper";
    assert_eq!(barrier.wait(bytes, 512), bytes.len(), "{opened}");
    barrier.mark_used(bytes);
    hangs.store(false, Ordering::SeqCst);
    resume_tx.send(()).expect("the helper waits for this message");
    // The helper skips the pieces that were used without it.
    for part in [layers(0..2), layers(2..4), layers(4..6)] {
        compute(&stream, &barrier, &weights, &part);
    }
    settle(&stream);
    drop(stream);
    assert_eq!(barrier.wait(bytes, 512), bytes.len(), "a barrier without a helper is open");
}

#[test]
fn the_kept_set_follows_the_available_memory() {
    let (page_cache, refaulted) = (Arc::new(AtomicU64::new(64 << 20)), Arc::new(AtomicU64::new(0)));
    let measured = (page_cache.clone(), refaulted.clone());
    let memory = move || {
        let value = |bytes: &AtomicU64| Some(bytes.load(Ordering::SeqCst));
        MemoryReading { page_cache_available: value(&measured.0), refaulted_bytes: value(&measured.1) }
    };
    let (weights, stream, barrier) = start(8, 64 << 20, memory, MAX_WAIT);
    let whole = weights.part_bytes(&layers(0..8)) + weights.part_bytes(&ModelPart::Output);
    let mut pass = 0;
    let mut token = |count: u32| {
        for _ in 0..count {
            // Pieces that leave the kept set may be used once more before they are evicted, so the buffer limit is
            // not checked here.
            for part in [ModelPart::Output, layers(0..8)] {
                compute_at(StepId { pass, round: 0 }, &stream, &barrier, &weights, &part);
            }
            pass += 1;
            settle(&stream);
        }
        resident_bytes(&weights, &layers(0..8)) + resident_bytes(&weights, &ModelPart::Output)
    };
    assert!(token(2) > whole * 9 / 10, "all fits");
    page_cache.store(whole / 2, Ordering::SeqCst);
    let shrunk = token(3);
    page_cache.store(64 << 20, Ordering::SeqCst);
    let grown = token(12);
    // The system reports enough available memory, but evicts a quarter of the weights.
    refaulted.store(whole / 4, Ordering::SeqCst);
    let after_refaults = token(3);
    if shrunk > whole * 9 / 10 {
        eprintln!("SKIPPED the_kept_set_follows_the_available_memory: the model is in a memory file system");
        return;
    }
    // Pages that two matrices share are not evicted.
    assert!(shrunk < whole * 6 / 10, "{shrunk} of {whole} bytes");
    assert!(grown > whole * 9 / 10, "{grown} of {whole} bytes");
    assert!(
        after_refaults > whole * 6 / 10 && after_refaults < whole * 8 / 10,
        "{after_refaults} of {whole} bytes"
    );
}
