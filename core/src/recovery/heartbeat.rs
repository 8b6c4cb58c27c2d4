//! Heartbeats: how long the head takes to detect the loss of a device.
//!
//! At each heartbeat the head pings every device and checks the age of its last response. The last response of a
//! lost device answers the last heartbeat before its loss. The head detects the loss at the first heartbeat at
//! which the last response is older than [`LOSS_TIMEOUT_NS`]: 1.5 to 2.0 s after the device was lost.

/// The time between two heartbeats, in nanoseconds.
/// source: assumed; the executor's ring uses this value
pub const INTERVAL_NS: u64 = 500_000_000;

/// The time without a response after which a device is considered lost, in nanoseconds.
/// source: assumed; the executor's ring uses this value; longer than most stalls of Wi-Fi in a home, and
/// short enough that a loss is detected within 2 s
pub const LOSS_TIMEOUT_NS: u64 = 1_500_000_000;

/// Returns the time at which the head detects the loss of a device that was lost at the time `since`. Both times are in
/// nanoseconds from the same earlier heartbeat.
pub fn detection_time_ns(since: u64) -> u64 {
    (since / INTERVAL_NS + LOSS_TIMEOUT_NS / INTERVAL_NS + 1).saturating_mul(INTERVAL_NS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loss_is_detected_at_the_first_heartbeat_after_the_limit() {
        // Last response at 3.0 s: at 4.5 s it is 1.5 s old, which is not longer than the limit; at 5.0 s it is.
        assert_eq!(detection_time_ns(3_000_000_000), 5_000_000_000);
        assert_eq!(detection_time_ns(3_499_999_999), 5_000_000_000);
        assert_eq!(detection_time_ns(3_500_000_000), 5_500_000_000);
    }
}
