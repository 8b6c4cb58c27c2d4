//! How long does a ring wait?
//!
//! Never without a limit: every wait for another device goes through here, and what took too long is an
//! error that says what.

use std::time::Duration;

use tokio::time::timeout;

use crate::error::RingError;

/// For a peer to take a frame.
pub const WRITE_DEADLINE: Duration = Duration::from_secs(10);

/// Waits with a deadline.
pub async fn within<T>(limit: Duration, what: &str, wait: impl Future<Output = T>) -> Result<T, RingError> {
    timeout(limit, wait).await.map_err(|_| RingError::Deadline {
        what: what.into(),
        seconds: limit.as_secs_f64(),
        hint: "see whether the other end still runs and the network is up",
    })
}
