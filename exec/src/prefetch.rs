//! How is the next window read ahead of its turn, while the device goes on?
//!
//! A helper thread takes requests in order. Facts measured on Linux 6.x that it rests on: one
//! `madvise(WILLNEED)` reads at most about one read-ahead window, not the range asked for, so the
//! range is advised in small chunks; `MADV_POPULATE_READ` reads in earnest and returns when the pages
//! are there.
//!
//! - `os`: advises, and leaves the rest to the system (prima.cpp paper, Section 3.1);
//! - `windowed`: populates, up to the plan's budget.
//!
//! Elsewhere than Linux nothing is read ahead.

use std::sync::{Arc, Mutex, mpsc};
use std::thread::JoinHandle;

use hearth_profiles::Bytes;
use hearth_schema::scenario::Residency;
use hearth_schema::schedule::Part;

use crate::clock::wall_nanos;
use crate::ring::recorder::At;
use crate::weights::{Extent, Weights};

/// One call of `MADV_WILLNEED`: the size the kernel honours wherever the read-ahead window stands.
const ADVISE_BYTES: usize = 128 << 10;

/// One call of `MADV_POPULATE_READ`: long enough to stream, short enough to stop soon.
const POPULATE_BYTES: usize = 2 << 20;

/// What one request did.
#[derive(Debug, Clone)]
pub struct Span {
    /// After which pass and round it was asked for.
    pub at: At,
    /// Which layers.
    pub layers: Option<[u32; 2]>,
    /// When it was taken up.
    pub start: u64,
    /// When the last call returned.
    pub end: u64,
    /// Bytes advised or populated.
    pub bytes: u64,
}

struct Request {
    part: Part,
    at: At,
}

/// The helper thread. It ends when this is dropped.
pub struct Prefetcher {
    requests: Option<mpsc::Sender<Request>>,
    spans: Arc<Mutex<Vec<Span>>>,
    thread: Option<JoinHandle<()>>,
}

impl Prefetcher {
    /// Starts the helper thread.
    pub fn start(weights: Arc<Weights>, policy: Residency, budget: Option<Bytes>) -> Self {
        let (requests, inbox) = mpsc::channel::<Request>();
        let spans = Arc::new(Mutex::new(Vec::new()));
        let done = spans.clone();
        let thread = std::thread::spawn(move || {
            for request in inbox {
                let span = serve(&weights, policy, budget, &request);
                if let Ok(mut spans) = done.lock() {
                    spans.push(span);
                }
            }
        });
        Self { requests: Some(requests), spans, thread: Some(thread) }
    }

    /// Asks for a part. Returns at once.
    pub fn request(&self, part: Part, at: At) {
        if let Some(requests) = &self.requests {
            // The thread only ends when this is dropped, so the request always finds it.
            let _ = requests.send(Request { part, at });
        }
    }

    /// What was done since the last call.
    pub fn take_spans(&self) -> Vec<Span> {
        self.spans.lock().map(|mut spans| std::mem::take(&mut *spans)).unwrap_or_default()
    }
}

impl Drop for Prefetcher {
    fn drop(&mut self) {
        self.requests = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn serve(weights: &Weights, policy: Residency, budget: Option<Bytes>, request: &Request) -> Span {
    let start = wall_nanos();
    let mut left = budget.map_or(u64::MAX, |budget| budget.0);
    let mut bytes = 0;
    let regions = extents(weights, &request.part);
    for region in regions.iter().filter_map(|&extent| weights.bytes(extent)) {
        let take = (region.len() as u64).min(left) as usize;
        left -= take as u64;
        match policy {
            Residency::Os => advise(&region[..take], ADVISE_BYTES, Advice::WillNeed),
            Residency::Windowed => advise(&region[..take], POPULATE_BYTES, Advice::Populate),
        }
        bytes += take as u64;
    }
    let layers = match &request.part {
        Part::Layers(layers) => Some([layers.start, layers.end]),
        Part::Output => None,
    };
    Span { at: request.at, layers, start, end: wall_nanos(), bytes }
}

/// Where a part's weights lie.
pub fn extents(weights: &Weights, part: &Part) -> Vec<Extent> {
    match part {
        Part::Layers(layers) => weights.layers_extents(layers.clone()),
        Part::Output => weights.head_extents(),
    }
}

/// Bytes of a part's weights.
pub fn bytes(weights: &Weights, part: &Part) -> u64 {
    extents(weights, part).iter().map(|extent| extent.length).sum()
}

#[derive(Clone, Copy)]
enum Advice {
    WillNeed,
    Populate,
}

#[cfg(target_os = "linux")]
fn advise(region: &[u8], chunk: usize, advice: Advice) {
    const PAGE: usize = 4096;
    let advice = match advice {
        Advice::WillNeed => libc::MADV_WILLNEED,
        Advice::Populate => libc::MADV_POPULATE_READ,
    };
    let begin = region.as_ptr() as usize;
    let (mut at, end) = (begin & !(PAGE - 1), begin + region.len());
    while at < end {
        let length = chunk.min(end - at);
        // SAFETY: the range lies in a live read-only file mapping (its first page may begin earlier, in the
        // same mapping, whose start is page-aligned), and both advices only read pages in.
        let result = unsafe { libc::madvise(at as *mut libc::c_void, length, advice) };
        if result != 0 {
            // A kernel before 5.14 has no POPULATE_READ; whatever is not read ahead is read when needed.
            return;
        }
        at += length;
    }
}

#[cfg(not(target_os = "linux"))]
fn advise(_region: &[u8], _chunk: usize, _advice: Advice) {}
