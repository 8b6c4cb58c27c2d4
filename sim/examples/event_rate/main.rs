//! Measures how many events per second the event engine handles without a simulation.
//!
//! ```text
//! cargo run --release -p hearth-sim --example event_rate              # a table
//! cargo run --release -p hearth-sim --example event_rate -- --twin    # lines for studies/simpy_twin.py
//! ```
#![allow(clippy::disallowed_methods, reason = "it measures time")]

mod queues;

use std::time::Instant;

use queues::{RunResult, run_hold_model, run_tandem_queues};

const EVENTS: u64 = 4_000_000;
/// Number of events of each queueing model if SimPy, which is slower, also runs the models.
const TWIN_EVENTS: u64 = 300_000;

fn main() {
    let twin = std::env::args().any(|argument| argument == "--twin");
    let events = if twin { TWIN_EVENTS } else { EVENTS };
    if !twin {
        println!("| model | million events/s |\n|---|---|");
    }
    let models: [(&str, &dyn Fn() -> RunResult); 4] = [
        ("hold-16", &|| run_hold_model(16, events)),
        ("hold-256", &|| run_hold_model(256, events)),
        ("hold-4096", &|| run_hold_model(4096, events)),
        ("tandem-8-64", &|| run_tandem_queues(8, 64, events)),
    ];
    for (name, run) in models {
        // The shortest of five runs, because other programs slow down some of the runs.
        let timed = |_| {
            let started = Instant::now();
            (run(), started.elapsed().as_secs_f64())
        };
        let runs = (0..5).map(timed).min_by(|one, other| one.1.total_cmp(&other.1));
        let (RunResult { event_count: events, end_time: clock, total_wait: waited }, seconds) =
            runs.expect("five runs");
        if twin {
            println!("{name} {events} {clock} {waited} {seconds:.6}");
        } else {
            println!("| {name} | {:.1} |", events as f64 / seconds / 1e6);
        }
    }
}
