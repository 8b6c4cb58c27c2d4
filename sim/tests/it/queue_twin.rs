//! The engine runs two queueing models, and the event times equal those of SimPy.
//!
//! The numbers are what `studies/simpy_twin.py` prints with SimPy 4.1.2.

#[path = "../../examples/event_rate/queues.rs"]
mod queues;

use queues::{RunResult, hold, tandem};

#[test]
fn hold_model_matches_simpy() {
    assert_eq!(hold(256, 20_000), RunResult { events: 20_000, clock: 41_163_555, total_wait: 0 });
}

#[test]
fn tandem_queue_matches_simpy() {
    let expected = RunResult { events: 20_000, clock: 1_360_264_855, total_wait: 76_362_582_728 };
    assert_eq!(tandem(8, 64, 20_000), expected);
}
