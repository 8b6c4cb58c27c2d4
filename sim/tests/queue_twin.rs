//! Does the kernel run a queueing network as another simulator does?
//!
//! The numbers are what `studies/simpy_twin.py` prints with SimPy 4.1.2.

#[path = "../examples/event_rate/queues.rs"]
mod queues;

use queues::{Ended, hold, tandem};

#[test]
fn random_delays_end_when_simpy_says() {
    assert_eq!(hold(256, 20_000), Ended { events: 20_000, clock: 41_163_555, waited: 0 });
}

#[test]
fn jobs_wait_as_long_as_in_simpy() {
    assert_eq!(tandem(8, 64, 20_000), Ended { events: 20_000, clock: 1_360_264_855, waited: 76_362_582_728 });
}
