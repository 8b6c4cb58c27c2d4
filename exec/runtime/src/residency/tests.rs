//! Tests of managed residency: every piece arrives, the buffer stays within its limit, and computations never hang.

use std::fs::File;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use hearth_core::residency::in_use_bytes;
use hearth_core::schedule::ModelPart;
use hearth_profiles::measure::mapping::drop_cached_pages;
use hearth_profiles::{Bytes, Document};
use hearth_schema::Plan;

use super::experts::buffer_bytes;
use super::managed_policy::{MAX_WAIT, ManagedResidencyPolicy};
use super::{ExpertGroup, ResidencyBarrier, ResidencyPolicy, StepId, resident_bytes};
use crate::memory::MemoryReading;
use crate::pages::populate;
use crate::weights::{Extent, Weights};

const AT: StepId = StepId { pass: 0, round: 0 };
const BUFFER: u64 = 512 << 10;
/// The size of a piece with the stream buffer [`BUFFER`], in bytes.
const PIECE: usize = 64 << 10;

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/models/psalm-7m-f16.gguf");

const MIXTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/models/psalm-moe-f16.gguf");

/// Opens a copy of the model that is not in memory and whose pages can be evicted. Pages cannot be evicted while
/// another test maps them, before they are written back, or if they are part of a large folio that was just written.
fn open_copy() -> Weights {
    let folder = tempfile::tempdir().expect("a folder");
    let copy = folder.path().join("model.gguf");
    std::fs::copy(MODEL, &copy).expect("the trained model is part of the repository");
    let file = File::open(&copy).expect("the copy");
    file.sync_all().expect("the copy is written back");
    drop_cached_pages(&file, &(0..file.metadata().expect("a size").len()));
    Weights::open(&copy).expect("a model")
}

/// Returns whether the kernel can drop the pages of a single piece. It cannot if the file is in tmpfs, or if a folio of
/// the page cache is larger than a piece.
fn can_evict_pieces() -> bool {
    let weights = open_copy();
    let layers = layers(0..8);
    for extent in weights.part_extents(&layers) {
        populate(weights.mapped_bytes(extent).expect("bytes"));
        for offset in (0..extent.length).step_by(PIECE) {
            let length = (extent.length - offset).min(PIECE as u64);
            weights.evict(Extent { offset: extent.offset + offset, length, ..extent });
        }
    }
    resident_bytes(&weights, &layers) < weights.part_bytes(&layers) / 4
}

/// Returns a plan with one device that computes `window` of `layers` layers per round and keeps `kept` bytes of weights.
fn plan(layers: u32, window: u32, kept: u64) -> Plan {
    let kept = Bytes(kept);
    let text = format!(
        "schema: plan/1\nscenario: {{name: t, digest: ''}}\nmodel: {{name: m, shape_digest: 's', layers: {layers}}}\n\
         planner: {{strategy: manual}}\nrounds: {}\ncontext: 64\nkv_cache: f16\ndevices:\n\
         - {{name: a, role: head, window: {window}, gpu_layers: 0, residency: {{policy: managed, \
         stream_buffer: 512 KiB, kept: {kept}}}}}\n",
        layers / window
    );
    Plan::from_yaml(&text).expect("a valid plan")
}

fn layers(range: std::ops::Range<u32>) -> ModelPart {
    ModelPart::Layers(range)
}

struct Run {
    weights: Arc<Weights>,
    stream: ManagedResidencyPolicy,
    barrier: ResidencyBarrier,
}

impl Run {
    /// Starts the policy for a plan with windows of `window` layers and `kept` bytes of kept weights.
    fn start(
        window: u32,
        kept: u64,
        memory: impl Fn() -> MemoryReading + Send + 'static,
        max_wait: Duration,
    ) -> Run {
        let weights = Arc::new(open_copy());
        let stream =
            ManagedResidencyPolicy::start(weights.clone(), &plan(8, window, kept), 0, memory, max_wait);
        let barrier = stream.barrier();
        Run { weights, stream, barrier }
    }

    /// Uses the weights of a part as a computation does, with rows of 512 bytes. Returns the maximum number of bytes
    /// seen in the stream buffer.
    fn compute_at(&self, at: StepId, part: &ModelPart) -> u64 {
        let mut buffered = 0;
        self.stream.begin(part, at);
        for extent in self.weights.matrix_extents(part) {
            let bytes = self.weights.mapped_bytes(extent).expect("a checked tensor");
            let mut at = 0;
            while at < bytes.len() {
                let ready = self.barrier.wait(&bytes[at..], 512);
                assert!(ready >= 512.min(bytes.len() - at), "a barrier returns at least a row");
                self.barrier.mark_used(&bytes[at..at + ready]);
                at += ready;
                buffered = buffered.max(self.stream.shared.lock().residency.buffered_bytes());
            }
        }
        self.stream.release(part.clone());
        buffered
    }

    fn compute(&self, part: &ModelPart) {
        assert!(self.compute_at(AT, part) <= BUFFER, "the buffer is never larger than planned");
    }

    fn settle(&self) {
        for _ in 0..2000 {
            let state = self.stream.shared.lock();
            if state.residency.buffered_bytes() == 0 && !state.residency.is_measurement_due() {
                return;
            }
            drop(state);
            std::thread::sleep(Duration::from_millis(1));
        }
        panic!("the buffer does not become empty: {:?}", self.stream.shared.lock());
    }
}

fn first_matrix(weights: &Weights) -> &[u8] {
    weights.mapped_bytes(weights.matrix_extents(&layers(0..2))[0]).expect("a checked tensor")
}

#[test]
fn parts_arrive_in_any_order_of_use() {
    let run = Run::start(2, 1 << 20, MemoryReading::default, MAX_WAIT);
    // Parts are begun without a request, requested but not begun, requested twice, and begun twice.
    run.compute(&layers(2..4));
    run.stream.prefetch(layers(4..6), AT);
    run.compute(&layers(6..8));
    run.stream.prefetch(layers(0..2), AT);
    run.stream.prefetch(layers(0..2), AT);
    run.compute(&layers(0..2));
    run.compute(&layers(0..2));
    run.stream.prefetch(ModelPart::Output, AT);
    run.stream.prefetch(layers(0..2), AT);
    run.compute(&ModelPart::Output);
    run.compute(&layers(4..6));
    run.stream.reset();
    run.settle();
    // A part that does not belong to this device is ignored.
    run.stream.prefetch(layers(1..3), AT);
    run.stream.begin(&layers(1..3), AT);
    run.stream.release(layers(1..3));
}

#[test]
fn a_reset_in_the_middle_of_a_part_is_harmless() {
    let run = Run::start(2, 0, MemoryReading::default, MAX_WAIT);
    for _ in 0..3 {
        run.stream.begin(&layers(0..2), AT);
        run.stream.prefetch(layers(2..4), AT);
        let bytes = first_matrix(&run.weights);
        let ready = run.barrier.wait(bytes, 512);
        run.barrier.mark_used(&bytes[..ready / 2]);
        run.stream.reset();
        run.settle();
    }
    run.compute(&layers(0..2));
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
    let run = Run::start(2, 0, memory, Duration::from_millis(20));
    let weights = run.weights.clone();
    let bytes = first_matrix(&weights);
    run.stream.begin(&layers(0..2), AT);
    let opened = "after the maximum wait the computation continues without the helper";
    assert_eq!(run.barrier.wait(bytes, 512), bytes.len(), "{opened}");
    run.barrier.mark_used(bytes);
    hangs.store(false, Ordering::SeqCst);
    resume_tx.send(()).expect("the helper waits for this message");
    // The helper skips the pieces that were used without it.
    for part in [layers(0..2), layers(2..4), layers(4..6)] {
        run.compute(&part);
    }
    run.settle();
    let barrier = run.barrier.clone();
    drop(run);
    assert_eq!(barrier.wait(bytes, 512), bytes.len(), "a barrier without a helper is open");
}

#[test]
fn the_kept_set_follows_the_available_memory() {
    if !can_evict_pieces() {
        let reason = "the kernel does not evict single pieces of a file";
        eprintln!("SKIPPED the_kept_set_follows_the_available_memory: {reason}");
        return;
    }
    let (page_cache, refaulted) = (Arc::new(AtomicU64::new(64 << 20)), Arc::new(AtomicU64::new(0)));
    let measured = (page_cache.clone(), refaulted.clone());
    let memory = move || {
        let value = |bytes: &AtomicU64| Some(bytes.load(Ordering::SeqCst));
        MemoryReading {
            page_cache_available_bytes: value(&measured.0),
            refaulted_bytes: value(&measured.1),
            ..MemoryReading::default()
        }
    };
    let run = Run::start(8, 64 << 20, memory, MAX_WAIT);
    let whole = run.weights.part_bytes(&layers(0..8)) + run.weights.part_bytes(&ModelPart::Output);
    let mut pass = 0;
    let mut token = |count: u32| {
        for _ in 0..count {
            // Pieces that leave the kept set may be used once more before they are evicted, so the buffer limit is
            // not checked here.
            for part in [ModelPart::Output, layers(0..8)] {
                run.compute_at(StepId { pass, round: 0 }, &part);
            }
            pass += 1;
            run.settle();
        }
        resident_bytes(&run.weights, &layers(0..8)) + resident_bytes(&run.weights, &ModelPart::Output)
    };
    assert!(token(2) > whole * 9 / 10, "all fits");
    page_cache.store(whole / 2, Ordering::SeqCst);
    let shrunk = token(3);
    page_cache.store(64 << 20, Ordering::SeqCst);
    let grown = token(12);
    // The system reports enough available memory, but evicts a quarter of the weights.
    refaulted.store(whole / 4, Ordering::SeqCst);
    let after_refaults = token(3);
    // Pages that two matrices share are not evicted.
    assert!(shrunk < whole * 6 / 10, "{shrunk} of {whole} bytes");
    assert!(grown > whole * 9 / 10, "{grown} of {whole} bytes");
    let is_three_quarters = after_refaults > whole * 6 / 10 && after_refaults < whole * 8 / 10;
    assert!(is_three_quarters, "{after_refaults} of {whole} bytes");
}

/// Returns the size of the buffers of the largest expert.
fn largest_expert(weights: &Weights) -> u64 {
    (0..weights.shape().layers.0).map(|layer| buffer_bytes(weights, layer)).max().unwrap_or(0)
}

#[test]
fn experts_give_memory_back_although_nothing_is_computed() {
    let weights = Arc::new(Weights::open(Path::new(MIXTURE)).expect("the trained mixture"));
    let shape = weights.shape().experts.expect("a mixture");
    let layer_count = weights.shape().layers.0;
    let page_cache = Arc::new(AtomicU64::new(1 << 30));
    let measured = page_cache.clone();
    let memory = move || {
        let available = measured.load(Ordering::SeqCst);
        // Without memory, all buffers have been swapped out.
        MemoryReading {
            page_cache_available_bytes: Some(available),
            swapped_bytes: if available == 0 { 1 << 30 } else { 0 },
            ..MemoryReading::default()
        }
    };
    let plan = plan(layer_count, layer_count, 1 << 30);
    let policy = ManagedResidencyPolicy::start(weights.clone(), &plan, 0, memory, MAX_WAIT);
    let barrier = policy.barrier();
    policy.begin(&layers(0..layer_count), AT);
    while policy.shared.lock().residency.is_measurement_due() {
        std::thread::sleep(Duration::from_millis(1));
    }
    for layer in 0..layer_count {
        for expert in 0..shape.count {
            let mut group = ExpertGroup::new(layer, vec![expert], expert == 0);
            barrier.request_experts(&mut group);
            barrier.wait_for_expert(&mut group, expert);
            let in_memory = group.matrices(expert).expect("an expert in memory of its own");
            let mapped = weights.expert_extents(layer, expert);
            let mapped = mapped.map(|extent| weights.mapped_bytes(extent).expect("bytes"));
            assert!(in_memory.iter().map(|matrix| &matrix[..]).eq(mapped), "layer {layer}, expert {expert}");
            barrier.release_experts(group);
        }
    }
    policy.release(layers(0..layer_count));
    let whole = policy.buffer_bytes();
    assert!(whole >= u64::from(layer_count * shape.count) * weights.expert_bytes(0), "{whole}");
    page_cache.store(0, Ordering::SeqCst);
    let in_use = in_use_bytes(&shape, largest_expert(&weights));
    let has_yielded = (0..2000).any(|_| {
        std::thread::sleep(Duration::from_millis(5));
        policy.buffer_bytes() <= in_use
    });
    assert!(has_yielded && in_use < whole, "{} of {whole} bytes are still in memory", policy.buffer_bytes());
}

#[test]
fn buffers_of_two_groups_are_enough() {
    let weights = Arc::new(Weights::open(Path::new(MIXTURE)).expect("the trained mixture"));
    let shape = weights.shape().experts.expect("a mixture");
    let layer_count = weights.shape().layers.0;
    let plan = plan(layer_count, layer_count, 0);
    let policy = ManagedResidencyPolicy::start(weights.clone(), &plan, 0, MemoryReading::default, MAX_WAIT);
    let barrier = policy.barrier();
    policy.begin(&layers(0..layer_count), AT);
    // As for a prompt, each group is requested while the one before is computed.
    let largest = largest_expert(&weights);
    let limit = in_use_bytes(&shape, largest) + largest;
    for layer in 0..layer_count {
        let experts: Vec<u32> = (0..shape.count).collect();
        let mut groups = experts.chunks(shape.used as usize).enumerate().map(|(index, experts)| {
            let mut group = ExpertGroup::new(layer, experts.to_vec(), index == 0);
            barrier.request_experts(&mut group);
            (group, experts)
        });
        let mut next = groups.next();
        while let Some((mut group, experts)) = next {
            next = groups.next();
            for &expert in experts {
                barrier.wait_for_expert(&mut group, expert);
            }
            let bytes = policy.buffer_bytes();
            assert!(bytes <= limit, "{bytes} bytes of buffers, but at most two groups are in use: {limit}");
            barrier.release_experts(group);
        }
    }
}

#[test]
fn experts_that_cannot_be_read_are_used_in_the_mapped_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let copy = folder.path().join("model.gguf");
    std::fs::copy(MIXTURE, &copy).expect("the trained mixture is part of the repository");
    let weights = Arc::new(Weights::open(&copy).expect("a model"));
    let layer_count = weights.shape().layers.0;
    let plan = plan(layer_count, layer_count, 1 << 30);
    let policy = ManagedResidencyPolicy::start(weights.clone(), &plan, 0, MemoryReading::default, MAX_WAIT);
    let barrier = policy.barrier();
    let request = || {
        let mut group = ExpertGroup::new(layer_count - 1, vec![1], true);
        barrier.request_experts(&mut group);
        barrier.wait_for_expert(&mut group, 1);
        let is_read = group.matrices(1).is_some();
        barrier.release_experts(group);
        is_read
    };
    let file = File::options().write(true).open(&copy).expect("the copy");
    let length = file.metadata().expect("a size").len();
    file.set_len(1).expect("truncated");
    assert!(!request(), "an expert that is no longer in the file");
    file.set_len(length).expect("longer again");
    assert!(request(), "the next token tries again");
}
