//! How long does a head take to see that a device is gone?
//!
//! It asks every device for a sign of life at each heartbeat, and looks then whether the last one is too old. What
//! was asked for before the device left is still answered. So it notices at the first heartbeat that is further from
//! the last answered one than the silence that it bears: between 1.5 and 2.0 s after the device left.
//!
//! Not here: what it does then ([`crate::replan`]).

/// Between two signs of life that a device is asked for, in nanoseconds.
/// source: assumed, what the ring of `exec` uses
pub const INTERVAL: u64 = 500_000_000;

/// Without a sign of life for longer than this a device counts as gone, in nanoseconds.
/// source: assumed, what the ring of `exec` uses; long against most stalls of a home's Wi-Fi, and
/// short enough that with the interval a device is missed within 2 s
pub const SILENCE: u64 = 1_500_000_000;

/// When a silence that begins at `since` is noticed, if it lasts; in nanoseconds of a clock whose zero is a heartbeat.
pub fn noticed(since: u64) -> u64 {
    (since / INTERVAL + SILENCE / INTERVAL + 1).saturating_mul(INTERVAL)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_silence_is_noticed_at_the_first_heartbeat_that_is_too_late() {
        // Heard at 3.0 s; at 4.5 s the silence is 1.5 s and not longer, at 5.0 s it is.
        assert_eq!(noticed(3_000_000_000), 5_000_000_000);
        assert_eq!(noticed(3_499_999_999), 5_000_000_000);
        assert_eq!(noticed(3_500_000_000), 5_500_000_000);
    }
}
