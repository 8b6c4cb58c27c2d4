//! How many events a second does the kernel alone handle?
//!
//! The hold model: with N events pending, take the next one and put a new one a random delay ahead.
//!
//!     cargo run --release -p hearth-sim --example event_rate
#![allow(clippy::disallowed_methods, reason = "a measurement of speed reads the clock")]

use std::time::Instant;

use hearth_sim::engine::Engine;

/// The size of a simulator's event: an enum with two small numbers.
#[derive(Clone, Copy)]
enum Event {
    Step { device: u32, step: u32 },
}

fn main() {
    println!("| pending | million events/s |\n|---|---|");
    for pending in [16u64, 256, 4096] {
        // The best of five: the others shared their core with somebody.
        let rate = (0..5).map(|_| hold(pending, 4_000_000)).fold(0.0, f64::max);
        println!("| {pending} | {:.1} |", rate / 1e6);
    }
}

fn hold(pending: u64, events: u64) -> f64 {
    let mut engine = Engine::new();
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut delay = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state >> 44
    };
    for step in 0..pending {
        engine.at(delay(), Event::Step { device: 0, step: step as u32 });
    }
    let start = Instant::now();
    for _ in 0..events {
        let Some(Event::Step { device, step }) = engine.next_event() else { break };
        engine.after(delay(), Event::Step { device, step: step.wrapping_add(1) });
    }
    events as f64 / start.elapsed().as_secs_f64()
}
