//! Heartbeats: how long the head takes to notice that a device is gone.
//!
//! At each heartbeat the head pings every device, and checks whether the last one is too old. A device
//! that leaves has still answered the heartbeat before. So the head notices at the first heartbeat that is further from
//! the last answered one than [`SILENCE`]: between 1.5 and 2.0 s after the device left.
//!
//! Not here: what the head does then ([`super::Recovery`]).

/// The time between two heartbeats, in nanoseconds.
/// source: assumed, what the ring of `exec` uses
pub const INTERVAL: u64 = 500_000_000;

/// A device without a heartbeat for longer than this is lost, in nanoseconds.
/// source: assumed, what the ring of `exec` uses; long against most stalls of a home's Wi-Fi, and
/// short enough that with the interval a device is missed within 2 s
pub const SILENCE: u64 = 1_500_000_000;

/// Returns the time at which a silence since `since` is detected, in nanoseconds of a clock whose zero is a heartbeat.
pub fn detection_time(since: u64) -> u64 {
    (since / INTERVAL + SILENCE / INTERVAL + 1).saturating_mul(INTERVAL)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silence_is_noticed_at_the_first_heartbeat_after_the_limit() {
        // Heard at 3.0 s; at 4.5 s the silence is 1.5 s and not longer, at 5.0 s it is.
        assert_eq!(detection_time(3_000_000_000), 5_000_000_000);
        assert_eq!(detection_time(3_499_999_999), 5_000_000_000);
        assert_eq!(detection_time(3_500_000_000), 5_500_000_000);
    }
}
