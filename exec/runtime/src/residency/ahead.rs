//! How is the next window read ahead of its turn, while the device goes on?
//!
//! A helper thread takes requests in order, and goes through a part in pieces. It rests on facts measured on
//! Linux 6.x: one `madvise(WILLNEED)` reads at most about one read-ahead window, not the range asked for, so a
//! piece is advised in small calls; `MADV_POPULATE_READ` reads in earnest and returns when the pages are there.
//!
//! - `os`: advises, and leaves the rest to the system (prima.cpp paper, Section 3.1);
//! - `windowed`: populates.
//!
//! Both cover as much of a window, from its front, as the plan's budget says. If the plan says so, the thread also
//! gives windows up behind the computation. Elsewhere than Linux nothing is read ahead.
//!
//! Not here: managed residency, which knows what to keep ([`super::stream`]).

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use hearth_core::schedule::ModelPart;
use hearth_schema::residency::Residency;
use hearth_schema::residency::ResidencyOptions;

use crate::clock::wall_nanos;
use crate::read_counter::ReadCounter;
use crate::weights::Weights;

use super::{At, Span, is_told};
use crate::pages::{populate, resident, will_need, will_need_at_once};

/// What is looked at and populated at once: long enough to stream, short enough to stop soon.
const PIECE_BYTES: usize = 2 << 20;

/// Between two looks whether what was advised has arrived.
const LOOK: Duration = Duration::from_millis(2);
/// What has not arrived after so many looks was evicted, or dropped by the kernel.
const LOOKS: usize = 500;

/// What the thread is asked for.
enum Task {
    ReadAhead(At),
    GiveUp,
}

struct Request {
    part: ModelPart,
    task: Task,
    generation: u64,
}

/// What the helper shares with its device.
#[derive(Debug, Default)]
struct Shared {
    spans: Mutex<Vec<Span>>,
    /// Requests of an earlier generation are not begun, and given up between two pieces.
    generation: AtomicU64,
    /// Requests that wait.
    waiting: AtomicU64,
    /// Bytes that the helper has caused to be read.
    read: AtomicU64,
}

/// The helper thread. It ends when this is dropped.
pub struct Prefetcher {
    requests: Option<mpsc::Sender<Request>>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Prefetcher {
    /// Starts the helper thread.
    pub fn start(weights: Arc<Weights>, options: ResidencyOptions) -> Self {
        let (requests, inbox) = mpsc::channel::<Request>();
        let shared = Arc::new(Shared::default());
        let mine = shared.clone();
        let thread = std::thread::spawn(move || {
            let mut helper = Helper {
                told: is_told(&weights),
                weights,
                options,
                shared: mine,
                counter: ReadCounter::of_this_thread(),
            };
            for request in inbox {
                helper.shared.waiting.fetch_sub(1, Ordering::Relaxed);
                match request.task {
                    Task::ReadAhead(at) => helper.read_ahead(&request, at),
                    Task::GiveUp => helper.give_up(&request),
                }
            }
        });
        Self { requests: Some(requests), shared, thread: Some(thread) }
    }

    /// Asks for a part. Returns at once.
    pub fn request(&self, part: ModelPart, at: At) {
        self.send(part, Task::ReadAhead(at));
    }

    /// Gives a part up, after what was asked for before. Returns at once.
    pub fn release(&self, part: ModelPart) {
        self.send(part, Task::GiveUp);
    }

    fn send(&self, part: ModelPart, task: Task) {
        if let Some(requests) = &self.requests {
            self.shared.waiting.fetch_add(1, Ordering::Relaxed);
            let generation = self.shared.generation.load(Ordering::Relaxed);
            // The thread only ends when this is dropped, so the request always finds it.
            let _ = requests.send(Request { part, task, generation });
        }
    }

    /// Gives up what was asked for and forgets what was done.
    pub fn reset(&self) {
        self.shared.generation.fetch_add(1, Ordering::Relaxed);
        self.take_spans();
    }

    /// What was done since the last call.
    pub fn take_spans(&self) -> Vec<Span> {
        self.shared.spans.lock().map(|mut spans| std::mem::take(&mut *spans)).unwrap_or_default()
    }

    /// Bytes that the helper has caused to be read so far.
    pub fn bytes_read(&self) -> u64 {
        self.shared.read.load(Ordering::Relaxed)
    }
}

impl Drop for Prefetcher {
    fn drop(&mut self) {
        self.reset();
        self.requests = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The thread's own side.
struct Helper {
    weights: Arc<Weights>,
    options: ResidencyOptions,
    shared: Arc<Shared>,
    counter: ReadCounter,
    /// Whether the system tells what is in memory.
    told: bool,
}

impl Helper {
    fn give_up(&self, request: &Request) {
        for extent in self.weights.part_extents(&request.part) {
            if self.shared.generation.load(Ordering::Relaxed) != request.generation {
                return;
            }
            super::give_up(&self.weights, extent);
        }
    }

    fn read_ahead(&mut self, request: &Request, at: At) {
        let weights = self.weights.clone();
        let budget = self.options.prefetch_budget.map_or(u64::MAX, |budget| budget.0);
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
                // To advise of what is there changes nothing and takes the processor from whoever computes: three devices
                // of a lab with all weights in memory took 38 ms a token and 32 without. Populating marks pages as used.
                if missing == 0 && self.told && self.options.policy == Residency::Os && !self.options.one_call
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
                let span = span.get_or_insert_with(|| Span::of(&request.part, at, start));
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
        for _ in 0..LOOKS {
            let stale = self.shared.generation.load(Ordering::Relaxed) != request.generation;
            if stale
                || self.shared.waiting.load(Ordering::Relaxed) > 0
                || resident(piece) == piece.len() as u64
            {
                return;
            }
            std::thread::sleep(LOOK);
        }
    }
}
