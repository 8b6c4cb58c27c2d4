//! A transport with a fixed delay, for tests of a slow network on one machine.
//!
//! Written bytes arrive after a fixed delay, in order and at full bandwidth. The precision is about a millisecond.
//!
//! Not here: bandwidth limits, random delays and shared media ([`super::paths`]).

use std::io;
use std::time::Duration;

use tokio::io::DuplexStream;
use tokio::time::{Instant, sleep_until};

use super::shaped::{InFlightLimits, ShapedTransport, Shaper, delay_outgoing};
use crate::wire::ByteStream;

/// Limits of the chunks in flight: 64 MiB, more than the activations of the largest pass. source: assumed
const LIMITS: InFlightLimits = InFlightLimits { max_chunk_bytes: 64 << 10, max_chunks: 1024 };

/// A transport that delays everything it sends by a fixed time.
pub type DelayedTransport<T> = ShapedTransport<T, FixedDelay>;

/// A [`Shaper`] that delays all bytes by the same time.
#[derive(Debug, Clone, Copy)]
pub struct FixedDelay(Duration);

impl<T> DelayedTransport<T> {
    pub fn new(transport: T, delay: Duration) -> Self {
        Self { transport, shaper: FixedDelay(delay) }
    }
}

impl Shaper for FixedDelay {
    type Path = Duration;

    fn path(&self, _address: Option<&str>) -> io::Result<Duration> {
        Ok(self.0)
    }

    fn shape<S: ByteStream>(&self, delay: Duration, stream: S) -> io::Result<DuplexStream> {
        delay_outgoing(
            stream,
            LIMITS,
            move |_| Ok(Instant::now() + delay),
            |mut waiting, arrived| {
                tokio::spawn(async move {
                    while let Some((at, chunk)) = waiting.recv().await {
                        sleep_until(at).await;
                        if arrived.send(chunk).await.is_err() {
                            return;
                        }
                    }
                });
                Ok(())
            },
        )
    }
}

#[cfg(test)]
mod tests {
    use super::super::shaped::tests::check_frames_arrive_whole;
    use super::*;
    use crate::wire::MemoryTransport;

    /// The clock is paused, so that the delay is exact.
    #[tokio::test(start_paused = true)]
    async fn delayed_frames_arrive_later_and_whole() {
        let delay = Duration::from_millis(5);
        let begin = Instant::now();
        check_frames_arrive_whole(DelayedTransport::new(MemoryTransport::default(), delay), || {
            assert!(begin.elapsed() < delay, "a writer does not wait for the delay");
        })
        .await;
        // Tokio's clock has steps of a millisecond.
        assert!((delay..delay * 2).contains(&begin.elapsed()), "{:?}", begin.elapsed());
    }
}
