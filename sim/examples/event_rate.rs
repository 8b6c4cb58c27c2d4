//! How many events a second does the kernel alone handle?
//!
//!     cargo run --release -p hearth-sim --example event_rate              # a table
//!     cargo run --release -p hearth-sim --example event_rate -- --twin    # lines for sim/benches/simpy_twin.py

mod queues;
mod stopwatch;

use queues::{Ended, hold, tandem};

/// Events of each model.
const EVENTS: u64 = 4_000_000;
/// Events of each model where a slower simulator runs them too.
const TWIN_EVENTS: u64 = 300_000;

fn main() {
    let twin = std::env::args().any(|argument| argument == "--twin");
    let events = if twin { TWIN_EVENTS } else { EVENTS };
    if !twin {
        println!("| model | million events/s |\n|---|---|");
    }
    let models: [(&str, &dyn Fn() -> Ended); 4] = [
        ("hold-16", &|| hold(16, events)),
        ("hold-256", &|| hold(256, events)),
        ("hold-4096", &|| hold(4096, events)),
        ("tandem-8-64", &|| tandem(8, 64, events)),
    ];
    for (name, run) in models {
        // The best of five: the others shared their core with somebody.
        let (Ended { events, clock, waited }, seconds) = stopwatch::fastest(5, run);
        if twin {
            println!("{name} {events} {clock} {waited} {seconds:.6}");
        } else {
            println!("| {name} | {:.1} |", events as f64 / seconds / 1e6);
        }
    }
}
