//! Read-ahead: a helper thread that reads the next window while the device computes, and leaves eviction to the system.
//!
//! It takes requests in order, and goes through a part in pieces. It rests on facts measured on
//! Linux 6.x: one `madvise(WILLNEED)` reads at most about one read-ahead window, not the range asked for, so a
//! piece is advised in small calls; `MADV_POPULATE_READ` reads in earnest and returns when the pages are there.
//!
//! - `os`: advises, and leaves the rest to the system (prima.cpp paper, Section 3.1);
//! - `windowed`: populates.
//!
//! Both cover as much of a window, from its front, as the plan's budget says. If the plan says so, the thread also
//! evicts windows that have been computed. Elsewhere than Linux nothing is read ahead.
//!
//! Not here: managed residency, which knows what to keep ([`super::managed`]).

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use hearth_core::residency::ReadOrigin;
use hearth_core::schedule::ModelPart;
use hearth_schema::residency::Residency;
use hearth_schema::residency::ResidencyOptions;

use crate::clock::wall_nanos;
use crate::read_counter::ReadCounter;
use crate::weights::Weights;

use super::{At, ReadSpan, is_residency_known, layers_of};
use crate::pages::{populate, resident, will_need, will_need_at_once};

/// Bytes that are checked and populated at once: long enough to stream, short enough to stop soon.
const PIECE_BYTES: usize = 2 << 20;

/// Time between two checks whether what was advised has arrived.
const POLL: Duration = Duration::from_millis(2);
/// The number of checks after which a page that has not arrived counts as evicted, or dropped by the kernel.
const MAX_POLLS: usize = 500;

enum Task {
    Read(At),
    Evict,
}

struct Request {
    part: ModelPart,
    task: Task,
    generation: u64,
}

/// State shared by the helper and its device.
#[derive(Debug, Default)]
struct Shared {
    spans: Mutex<Vec<ReadSpan>>,
    /// Requests of an earlier generation are not begun, and given up between two pieces.
    generation: AtomicU64,
    waiting: AtomicU64,
    read: AtomicU64,
}

/// The helper thread. It ends when this is dropped.
pub struct ReadAhead {
    requests: Option<mpsc::Sender<Request>>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl ReadAhead {
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
                counter: ReadCounter::of_this_thread(),
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

    /// Reads a part. Returns at once.
    pub fn request(&self, part: ModelPart, at: At) {
        self.send(part, Task::Read(at));
    }

    /// Evicts a part, after what was requested before. Returns at once.
    pub fn release(&self, part: ModelPart) {
        self.send(part, Task::Evict);
    }

    fn send(&self, part: ModelPart, task: Task) {
        if let Some(requests) = &self.requests {
            self.shared.waiting.fetch_add(1, Ordering::Relaxed);
            let generation = self.shared.generation.load(Ordering::Relaxed);
            // The thread only ends when this is dropped, so the request always finds it.
            let _ = requests.send(Request { part, task, generation });
        }
    }

    /// Cancels what was requested and drops the records.
    pub fn reset(&self) {
        self.shared.generation.fetch_add(1, Ordering::Relaxed);
        self.take_spans();
    }

    /// Returns the spans of reading since the last call.
    pub fn take_spans(&self) -> Vec<ReadSpan> {
        self.shared.spans.lock().map(|mut spans| std::mem::take(&mut *spans)).unwrap_or_default()
    }

    /// Bytes that the helper has read so far.
    pub fn bytes_read(&self) -> u64 {
        self.shared.read.load(Ordering::Relaxed)
    }
}

impl Drop for ReadAhead {
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
            super::evict(&self.weights, extent);
        }
    }

    fn read_ahead(&mut self, request: &Request, at: At) {
        let weights = self.weights.clone();
        let budget = self.options.prefetch_budget.map_or(u64::MAX, |budget| budget.0);
        let origin = ReadOrigin { pass: at.pass, round: at.round, layers: layers_of(&request.part) };
        let (mut span, mut left) = (None, budget);
        let mut last = None;
        let regions = weights.part_extents(&request.part);
        for region in regions.iter().filter_map(|&extent| weights.bytes(extent)) {
            let take = (region.len() as u64).min(left) as usize;
            left -= take as u64;
            let step = if self.options.one_call { take.max(1) } else { PIECE_BYTES };
            for piece in region[..take].chunks(step) {
                if self.shared.generation.load(Ordering::Relaxed) != request.generation {
                    return;
                }
                let missing = piece.len() as u64 - resident(piece);
                // To advise of what is there changes nothing and takes the processor from whichever process computes: three devices
                // of a lab with all weights in memory took 38 ms a token and 32 without. Populating marks pages as used.
                if missing == 0
                    && self.is_residency_known
                    && self.options.policy == Residency::Os
                    && !self.options.one_call
                {
                    continue;
                }
                let start = wall_nanos();
                let asked = match self.options.policy {
                    Residency::Os if self.options.one_call => {
                        let before = self.counter.bytes();
                        will_need_at_once(piece);
                        self.counter.bytes() - before
                    }
                    Residency::Os => will_need(piece),
                    _ => populate(piece),
                };
                self.shared.read.store(self.counter.bytes(), Ordering::Relaxed);
                if missing == 0 {
                    continue;
                }
                let span = span.get_or_insert_with(|| ReadSpan::starting(origin, start));
                span.bytes += missing.min(asked);
                span.end = wall_nanos();
                last = Some(piece);
            }
        }
        let Some(mut span) = span.filter(|span| span.bytes > 0) else { return };
        if let (Residency::Os, Some(piece)) = (self.options.policy, last) {
            self.settle(request, piece);
            span.end = wall_nanos();
        }
        if let Ok(mut spans) = self.shared.spans.lock() {
            spans.push(span);
        }
    }

    /// Waits until the last piece that was advised has arrived, as long as nothing else is to be done.
    fn settle(&self, request: &Request, piece: &[u8]) {
        for _ in 0..MAX_POLLS {
            let stale = self.shared.generation.load(Ordering::Relaxed) != request.generation;
            if stale
                || self.shared.waiting.load(Ordering::Relaxed) > 0
                || resident(piece) == piece.len() as u64
            {
                return;
            }
            std::thread::sleep(POLL);
        }
    }
}
