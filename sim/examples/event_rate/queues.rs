//! Two small queueing models that any discrete-event simulator can run with the same events.
//!
//! [`run_hold_model`] measures the engine alone: with a fixed number of pending events, each event schedules a new
//! event after a random delay. [`run_tandem_queues`] is a closed ring of single servers with queues, in which jobs move
//! from one server to the next; every service takes a random time. Delays are integers from a generator of a few lines,
//! so a simulator in another language, such as SimPy in `studies/simpy_twin.py`, has the same events at the same times.

use std::collections::VecDeque;

use hearth_sim::engine::{Engine, Nanos};

/// The result of a queueing model's run; two runs with the same events have the same result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RunResult {
    /// Number of completed delays or services.
    pub event_count: u64,
    pub end_time: Nanos,
    /// The total time that jobs waited in queues; zero for [`run_hold_model`].
    pub total_wait: Nanos,
}

/// Random delays: the high bits of Marsaglia's xorshift with 13, 7 and 17 ("Xorshift RNGs", 2003).
#[derive(Debug, Clone, Copy)]
struct Delays(u64);

/// An odd number near 2^64 divided by the golden ratio. The seeds of the random streams are different multiples.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

impl Delays {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 >> 44
    }
}

/// An event of the size of a typical simulation event: an enum with two small numbers.
#[derive(Debug, Clone, Copy)]
enum Event {
    Step { device: u32, step: u32 },
}

/// Runs the hold model until `events` events have occurred; `pending` events are pending at any time.
pub fn run_hold_model(pending: u64, events: u64) -> RunResult {
    let mut engine = Engine::new();
    let mut delays = Delays(GOLDEN);
    for step in 0..pending {
        engine.schedule_at(delays.next(), Event::Step { device: 0, step: step as u32 });
    }
    for _ in 0..events {
        let Some(Event::Step { device, step }) = engine.next_event() else { break };
        engine.schedule_after(delays.next(), Event::Step { device, step: step.wrapping_add(1) });
    }
    RunResult { event_count: events, end_time: engine.now(), total_wait: 0 }
}

#[derive(Debug, Clone, Copy)]
struct Job {
    delays: Delays,
    arrived: Nanos,
    waited: Nanos,
}

/// Runs jobs through a closed ring of servers until `services` services are complete. Job j begins at j % `servers`.
pub fn run_tandem_queues(servers: u32, jobs: u32, services: u64) -> RunResult {
    let mut engine = Engine::new();
    let start = |job: u32| Delays(GOLDEN.wrapping_mul(u64::from(job) + 1));
    let mut all: Vec<Job> = (0..jobs).map(|job| Job { delays: start(job), arrived: 0, waited: 0 }).collect();
    let mut queues: Vec<VecDeque<u32>> = vec![VecDeque::new(); servers as usize];
    for job in 0..jobs {
        let server = job % servers;
        queues[server as usize].push_back(job);
        if queues[server as usize].len() == 1 {
            serve(&mut engine, &mut all, server, job);
        }
    }
    let (mut done, mut waited) = (0, 0);
    while done < services {
        let Some(Event::Step { device: server, step: job }) = engine.next_event() else { break };
        done += 1;
        waited += all[job as usize].waited;
        queues[server as usize].pop_front();
        if let Some(&next) = queues[server as usize].front() {
            serve(&mut engine, &mut all, server, next);
        }
        let next = (server + 1) % servers;
        all[job as usize].arrived = engine.now();
        queues[next as usize].push_back(job);
        if queues[next as usize].len() == 1 {
            serve(&mut engine, &mut all, next, job);
        }
    }
    RunResult { event_count: done, end_time: engine.now(), total_wait: waited }
}

fn serve(engine: &mut Engine<Event>, jobs: &mut [Job], server: u32, job: u32) {
    let current = &mut jobs[job as usize];
    current.waited = engine.now() - current.arrived;
    let delay = current.delays.next();
    engine.schedule_after(delay, Event::Step { device: server, step: job });
}
