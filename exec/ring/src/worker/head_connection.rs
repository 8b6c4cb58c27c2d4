//! The worker's end of the head's control connection.
//!
//! A task reads its frames, so that no frame is lost when a wait is given up for another event. Every wait and every
//! write has a deadline.

use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, WriteHalf};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout, timeout_at};

use crate::error::RingError;
use crate::wire::WRITE_DEADLINE;
use crate::wire::{Frame, MAX_DOCUMENT_PAYLOAD, WireError};

/// The time without a message of the head, which sends a ping every half second, after which it counts as lost.
const SILENCE_DEADLINE: Duration = Duration::from_secs(10);

/// The worker's end of its head's control connection.
pub struct HeadConnection<S> {
    frames: mpsc::Receiver<Result<Frame, WireError>>,
    writer: WriteHalf<S>,
    reader: JoinHandle<()>,
    report_rx: Instant,
}

impl<S> HeadConnection<S>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    /// Creates the connection from a stream whose hello has been read.
    pub fn new(stream: S) -> Self {
        let (mut reader, writer) = tokio::io::split(stream);
        let (sender, frames) = mpsc::channel(16);
        let reader = tokio::spawn(async move {
            loop {
                let frame = match Frame::read(&mut reader, MAX_DOCUMENT_PAYLOAD).await {
                    Ok(None) => return,
                    Ok(Some(frame)) => Ok(frame),
                    Err(error) => Err(error),
                };
                let failed = frame.is_err();
                if sender.send(frame).await.is_err() || failed {
                    return;
                }
            }
        });
        Self { frames, writer, reader, report_rx: Instant::now() }
    }

    /// The next frame. May be given up at any moment.
    pub async fn next(&mut self) -> Result<Frame, RingError> {
        let gone = |reason: &str| RingError::Disconnected { name: "the head".into(), reason: reason.into() };
        let frame = timeout_at(self.report_rx + SILENCE_DEADLINE, self.frames.recv()).await;
        let frame = frame.map_err(|_| gone("it fell silent"))?.ok_or_else(|| gone("it hung up"))??;
        self.report_rx = Instant::now();
        Ok(frame)
    }

    /// Sends a frame. Given up half way it would leave half a frame behind.
    pub async fn send(&mut self, frame: impl Into<Frame>) -> Result<(), RingError> {
        let frame = frame.into();
        match timeout(WRITE_DEADLINE, frame.write(&mut self.writer)).await {
            Ok(written) => Ok(written?),
            Err(_) => Err(RingError::Disconnected {
                name: "the head".into(),
                reason: "it takes nothing any more".into(),
            }),
        }
    }
}

impl<S> Drop for HeadConnection<S> {
    fn drop(&mut self) {
        self.reader.abort();
    }
}
