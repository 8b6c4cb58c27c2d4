//! The read-ahead policy: a helper thread reads the next window while the device computes.
//!
//! The thread processes requests in order, and each part of the model in small pieces. Eviction is left to the system.
//! As measured on Linux 6.x, one `madvise(WILLNEED)` reads at most about one read-ahead window instead of the requested
//! range, so a piece is advised in small calls. `MADV_POPULATE_READ` reads the whole range and returns when the pages
//! are in memory.
//!
//! - `os`: advises the pages with `MADV_WILLNEED` (prima.cpp paper, Section 3.1);
//! - `windowed`: reads the pages with `MADV_POPULATE_READ`.
//!
//! Both policies read a window from its beginning, up to the prefetch budget of the plan. If the plan requires it, the
//! thread also evicts windows after their computation. On systems other than Linux nothing is read ahead.
//!
//! Not here: managed residency, which keeps a fixed set of pieces ([`super::managed_policy`]).

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use hearth_core::schedule::ModelPart;
use hearth_profiles::measure::mapping::{Advice, advise};
use hearth_schema::residency::{Residency, ResidencyOptions};

use crate::clock::monotonic_nanos;
use crate::read_counter::ReadCounter;
use crate::weights::Weights;

use super::{ReadSpan, ResidencyPolicy, StepId, is_residency_known, origin_of};
use crate::pages::{populate, read_ahead, resident_bytes};

/// Size of a piece that is checked and read at once, in bytes: large enough for sequential reading, small enough for
/// quick cancellation.
const PIECE_BYTES: usize = 2 << 20;

/// Time between two checks of whether the advised pages have arrived.
const POLL: Duration = Duration::from_millis(2);
/// Maximum number of checks, after which missing pages count as evicted or as not read by the kernel.
const MAX_POLLS: usize = 500;

enum Task {
    Read(StepId),
    Evict,
}

struct Request {
    part: ModelPart,
    task: Task,
    generation: u64,
}

/// The state shared by the helper thread and the policy.
#[derive(Debug, Default)]
struct Shared {
    spans: Mutex<Vec<ReadSpan>>,
    /// The generation of valid requests. Requests of earlier generations are cancelled before the next piece is read.
    generation: AtomicU64,
    /// Number of requests that the helper thread has not started.
    waiting: AtomicU64,
    /// Total bytes that the helper thread has read from disk.
    read: AtomicU64,
}

/// The policies `os` and `windowed`. The helper thread ends when the policy is dropped.
pub struct ReadAheadPolicy {
    requests: Option<mpsc::Sender<Request>>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl ReadAheadPolicy {
    pub fn start(weights: Arc<Weights>, options: ResidencyOptions) -> Self {
        let (requests, inbox) = mpsc::channel::<Request>();
        let shared = Arc::new(Shared::default());
        let mine = shared.clone();
        let thread = std::thread::spawn(move || {
            let mut helper = Helper {
                is_residency_known: is_residency_known(&weights),
                weights,
                options,
                shared: mine,
                counter: ReadCounter::for_current_thread(),
            };
            for request in inbox {
                helper.shared.waiting.fetch_sub(1, Ordering::Relaxed);
                match request.task {
                    Task::Read(at) => helper.read_ahead(&request, at),
                    Task::Evict => helper.evict(&request),
                }
            }
        });
        Self { requests: Some(requests), shared, thread: Some(thread) }
    }

    fn send(&self, part: ModelPart, task: Task) {
        if let Some(requests) = &self.requests {
            self.shared.waiting.fetch_add(1, Ordering::Relaxed);
            let generation = self.shared.generation.load(Ordering::Relaxed);
            // The thread ends only when this is dropped, so sending cannot fail.
            let _ = requests.send(Request { part, task, generation });
        }
    }
}

impl ResidencyPolicy for ReadAheadPolicy {
    fn prefetch(&self, part: ModelPart, at: StepId) {
        self.send(part, Task::Read(at));
    }

    fn release(&self, part: ModelPart) {
        self.send(part, Task::Evict);
    }

    fn reset(&self) {
        self.shared.generation.fetch_add(1, Ordering::Relaxed);
        self.take_spans();
    }

    fn take_spans(&self) -> Vec<ReadSpan> {
        self.shared.spans.lock().map(|mut spans| std::mem::take(&mut *spans)).unwrap_or_default()
    }

    fn bytes_read(&self) -> u64 {
        self.shared.read.load(Ordering::Relaxed)
    }
}

impl Drop for ReadAheadPolicy {
    fn drop(&mut self) {
        self.reset();
        self.requests = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Helper {
    weights: Arc<Weights>,
    options: ResidencyOptions,
    shared: Arc<Shared>,
    counter: ReadCounter,
    /// Whether the system reports which pages are in memory.
    is_residency_known: bool,
}

impl Helper {
    fn evict(&self, request: &Request) {
        for extent in self.weights.part_extents(&request.part) {
            if self.shared.generation.load(Ordering::Relaxed) != request.generation {
                return;
            }
            self.weights.evict(extent);
        }
    }

    fn read_ahead(&mut self, request: &Request, at: StepId) {
        let weights = self.weights.clone();
        let ResidencyOptions { policy, prefetch_budget, prefetch_in_one_call, .. } = self.options;
        let origin = origin_of(&request.part, at);
        let (mut span, mut left) = (None, prefetch_budget.map_or(u64::MAX, |budget| budget.0));
        let mut last = None;
        let regions = weights.part_extents(&request.part);
        for region in regions.iter().filter_map(|&extent| weights.mapped_bytes(extent)) {
            let take = (region.len() as u64).min(left) as usize;
            left -= take as u64;
            let step = if prefetch_in_one_call { take.max(1) } else { PIECE_BYTES };
            for piece in region[..take].chunks(step) {
                if self.shared.generation.load(Ordering::Relaxed) != request.generation {
                    return;
                }
                let missing = piece.len() as u64 - resident_bytes(piece);
                // Advising pages that are in memory has no effect and costs CPU time: three devices of a lab with all
                // weights in memory took 38 ms a token with it and 32 ms without. Populating marks pages as used.
                if missing == 0 && self.is_residency_known && policy == Residency::Os && !prefetch_in_one_call
                {
                    continue;
                }
                let start = monotonic_nanos();
                let requested = match policy {
                    Residency::Os if prefetch_in_one_call => {
                        let before = self.counter.bytes_read();
                        let _ = advise(piece, Advice::WillNeed);
                        self.counter.bytes_read() - before
                    }
                    Residency::Os => read_ahead(piece),
                    _ => populate(piece),
                };
                self.shared.read.store(self.counter.bytes_read(), Ordering::Relaxed);
                if missing == 0 {
                    continue;
                }
                let span = span.get_or_insert_with(|| ReadSpan::starting(origin, start));
                span.bytes += missing.min(requested);
                span.end_ns = monotonic_nanos();
                last = Some(piece);
            }
        }
        let Some(mut span) = span.filter(|span| span.bytes > 0) else { return };
        if let (Residency::Os, Some(piece)) = (policy, last) {
            self.wait_for_arrival(request, piece);
            span.end_ns = monotonic_nanos();
        }
        if let Ok(mut spans) = self.shared.spans.lock() {
            spans.push(span);
        }
    }

    /// Waits until the piece that was advised last is in memory, or another request is queued.
    fn wait_for_arrival(&self, request: &Request, piece: &[u8]) {
        for _ in 0..MAX_POLLS {
            let is_stale = self.shared.generation.load(Ordering::Relaxed) != request.generation;
            let is_other_queued = self.shared.waiting.load(Ordering::Relaxed) > 0;
            if is_stale || is_other_queued || resident_bytes(piece) == piece.len() as u64 {
                return;
            }
            std::thread::sleep(POLL);
        }
    }
}
