//! Tests of the managed stream: every piece arrives, the buffer bounds hold, and the computation never blocks for ever.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use hearth_core::schedule::ModelPart;
use hearth_profiles::{Bytes, Document};
use hearth_schema::Plan;

use super::managed::{MAX_WAIT, ManagedStream};
use super::{At, ResidencyBarrier, resident_bytes};
use crate::memory::MemoryReading;
use crate::weights::Weights;

const AT: At = At { pass: 0, round: 0 };
const BUFFER: u64 = 512 << 10;

fn weights() -> Arc<Weights> {
    let file = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/models/psalm-7m-f16.gguf");
    Arc::new(Weights::open(file).expect("the trained model is part of the repository"))
}

/// One device that takes `window` of the eight layers at a time.
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

fn layers(range: std::ops::Range<u32>) -> ModelPart {
    ModelPart::Layers(range)
}

/// Uses a part as a computation does; 512 bytes are a row. Returns the most bytes seen in the buffer.
fn compute_at(
    at: At,
    stream: &ManagedStream,
    barrier: &ResidencyBarrier,
    weights: &Weights,
    part: &ModelPart,
) -> u64 {
    let mut buffered = 0;
    stream.begin(part, at);
    for extent in weights.matrices_of(part) {
        let bytes = weights.bytes(extent).expect("a checked tensor");
        let mut at = 0;
        while at < bytes.len() {
            let ready = barrier.wait(&bytes[at..], 512);
            assert!(ready >= 512.min(bytes.len() - at), "a barrier lets at least a row pass");
            barrier.used(&bytes[at..at + ready]);
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

/// Waits until the helper has done what it can.
fn settle(stream: &ManagedStream) {
    for _ in 0..2000 {
        let state = stream.shared.lock();
        if state.residency.buffered_bytes() == 0 && !state.residency.is_measure_due() {
            return;
        }
        drop(state);
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("something stays in the buffer: {:?}", stream.shared.lock());
}

#[test]
fn parts_come_in_whatever_order_they_are_begun() {
    let weights = weights();
    let plan = plan(2, 1 << 20);
    let stream = ManagedStream::start(weights.clone(), &plan, 0, MemoryReading::default);
    let barrier = stream.barrier();
    // Begun without a request, requested and then not begun, requested twice, and begun again.
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
    // A part that is not this device's is ignored.
    stream.request(&layers(1..3), AT);
    stream.begin(&layers(1..3), AT);
    stream.finish(&layers(1..3));
}

#[test]
fn a_request_may_end_in_the_middle_of_a_part() {
    let weights = weights();
    let stream = ManagedStream::start(weights.clone(), &plan(2, 0), 0, MemoryReading::default);
    let barrier = stream.barrier();
    for _ in 0..3 {
        stream.begin(&layers(0..2), AT);
        stream.request(&layers(2..4), AT);
        let first = weights.matrices_of(&layers(0..2))[0];
        let bytes = weights.bytes(first).expect("a checked tensor");
        let ready = barrier.wait(bytes, 512);
        barrier.used(&bytes[..ready / 2]);
        stream.reset();
        settle(&stream);
    }
    compute(&stream, &barrier, &weights, &layers(0..2));
}

#[test]
fn computation_continues_when_the_helper_hangs_or_ends() {
    let weights = weights();
    let (go_on, stuck) = mpsc::channel::<()>();
    let hangs = Arc::new(AtomicBool::new(true));
    let still = hangs.clone();
    let stuck = std::sync::Mutex::new(stuck);
    let memory = move || {
        if still.load(Ordering::SeqCst) {
            let _ = stuck.lock().unwrap().recv_timeout(MAX_WAIT);
        }
        MemoryReading::default()
    };
    let stream =
        ManagedStream::with_max_wait(weights.clone(), &plan(2, 0), 0, memory, Duration::from_millis(20));
    let barrier = stream.barrier();
    let first = weights.matrices_of(&layers(0..2))[0];
    let bytes = weights.bytes(first).expect("a checked tensor");
    stream.begin(&layers(0..2), AT);
    assert_eq!(
        barrier.wait(bytes, 512),
        bytes.len(),
        "after the longest wait the computation goes on by itself"
    );
    barrier.used(bytes);
    hangs.store(false, Ordering::SeqCst);
    go_on.send(()).expect("the helper waits for it");
    // The helper does not read what was used without it, and catches up.
    for part in [layers(0..2), layers(2..4), layers(4..6)] {
        compute(&stream, &barrier, &weights, &part);
    }
    settle(&stream);
    drop(stream);
    assert_eq!(barrier.wait(bytes, 512), bytes.len(), "a barrier without a helper is open");
}

#[test]
fn the_kept_set_makes_way_and_comes_back() {
    let weights = weights();
    let whole: u64 = weights.part_bytes(&layers(0..8)) + weights.part_bytes(&ModelPart::Output);
    let (room, again) = (Arc::new(AtomicU64::new(64 << 20)), Arc::new(AtomicU64::new(0)));
    let seen = (room.clone(), again.clone());
    let memory = move || {
        let told = |number: &AtomicU64| Some(number.load(Ordering::SeqCst));
        MemoryReading { page_cache: told(&seen.0), refaulted: told(&seen.1) }
    };
    let stream = ManagedStream::start(weights.clone(), &plan(8, 64 << 20), 0, memory);
    let barrier = stream.barrier();
    let mut pass = 0;
    let mut token = |count: u32| {
        for _ in 0..count {
            // What was kept and is not any more may be used once more before it goes, buffer or not.
            for part in [ModelPart::Output, layers(0..8)] {
                compute_at(At { pass, round: 0 }, &stream, &barrier, &weights, &part);
            }
            pass += 1;
            settle(&stream);
        }
        resident_bytes(&weights, &layers(0..8)) + resident_bytes(&weights, &ModelPart::Output)
    };
    assert!(token(2) > whole * 9 / 10, "all fits");
    room.store(whole / 2, Ordering::SeqCst);
    let squeezed = token(3);
    room.store(64 << 20, Ordering::SeqCst);
    let back = token(12);
    // The system promises room and takes a quarter all the same.
    again.store(whole / 4, Ordering::SeqCst);
    let misled = token(3);
    if squeezed > whole * 9 / 10 {
        eprintln!("SKIPPED the_kept_set_makes_way_and_comes_back: the model is in a memory file system");
        return;
    }
    // Pages that two matrices share stay.
    assert!(squeezed < whole * 6 / 10, "{squeezed} of {whole} bytes");
    assert!(back > whole * 9 / 10, "{back} of {whole} bytes");
    assert!(misled > whole * 6 / 10 && misled < whole * 8 / 10, "{misled} of {whole} bytes");
}
