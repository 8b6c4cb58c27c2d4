//! Resources with a rate: CPU cores, disks, links.
//!
//! A resource has a method that returns the time at which its next job ends, and a method that removes the job that has
//! ended. After every change the simulation reads that time again and sets the timer of the resource; a resource has no
//! access to the event queue.
//!
//! Not here: memory ([`crate::page_cache`]).

pub mod cpu;
pub mod disk;
pub mod link;
mod quota;
mod sharing;
mod throttle;

use crate::engine::Nanos;

pub use cpu::CpuSim;
pub use disk::{DiskSim, DiskSpeed, ReadKind};

/// Converts seconds to nanoseconds, rounded up. Without a rounding instruction `f64::ceil` would be a function call.
fn nanos_until(seconds: f64) -> Nanos {
    let nanos = seconds * 1e9;
    let whole = nanos as Nanos;
    whole.saturating_add(Nanos::from(nanos > whole as f64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nanos_until_rounds_up() {
        for seconds in [0.0, 1e-10, 1e-9, 1.000_000_1e-3, 0.1, 5e6, 1e10, 1e30, f64::INFINITY] {
            assert_eq!(nanos_until(seconds), (seconds * 1e9).ceil() as Nanos, "{seconds}");
        }
        assert_eq!((nanos_until(-1.0), nanos_until(f64::NAN)), (0, 0));
    }
}
