//! Comparison of the event engine with SimPy on two queueing models.
//!
//! The expected numbers are those that `studies/simpy_twin.py` prints with SimPy 4.1.2.

#[path = "../../examples/event_rate/queues.rs"]
mod queues;

use queues::{RunResult, run_hold_model, run_tandem_queues};

#[test]
fn hold_model_matches_simpy() {
    let expected = RunResult { event_count: 20_000, end_time: 41_163_555, total_wait: 0 };
    assert_eq!(run_hold_model(256, 20_000), expected);
}

#[test]
fn tandem_queue_matches_simpy() {
    let expected = RunResult { event_count: 20_000, end_time: 1_360_264_855, total_wait: 76_362_582_728 };
    assert_eq!(run_tandem_queues(8, 64, 20_000), expected);
}
