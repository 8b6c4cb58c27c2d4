//! The worker's end of the head's control connection.
//!
//! A separate task reads the frames, so that no frame is lost when another event cancels a wait. Every wait and every
//! write has a deadline.

use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, WriteHalf};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout, timeout_at};

use crate::error::RingError;
use crate::wire::WRITE_DEADLINE;
use crate::wire::{Frame, MAX_DOCUMENT_PAYLOAD, WireError};

/// The head counts as lost if no message arrives for this time. It sends a ping every half second.
const SILENCE_DEADLINE: Duration = Duration::from_secs(10);

/// The worker's end of the head's control connection.
pub struct HeadConnection<S> {
    frames: mpsc::Receiver<Result<Frame, WireError>>,
    writer: WriteHalf<S>,
    reader: JoinHandle<()>,
    last_frame: Instant,
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
        Self { frames, writer, reader, last_frame: Instant::now() }
    }

    /// Returns the next frame. Cancel safe.
    pub async fn next(&mut self) -> Result<Frame, RingError> {
        let lost = |reason: &str| RingError::Disconnected { name: "the head".into(), reason: reason.into() };
        let frame = timeout_at(self.last_frame + SILENCE_DEADLINE, self.frames.recv()).await;
        let frame = frame.map_err(|_| lost("it does not respond"))?;
        let frame = frame.ok_or_else(|| lost("it closed the connection"))??;
        self.last_frame = Instant::now();
        Ok(frame)
    }

    /// Sends a frame. Not cancel safe: a cancelled call may leave an incomplete frame.
    pub async fn send(&mut self, frame: impl Into<Frame>) -> Result<(), RingError> {
        let frame = frame.into();
        match timeout(WRITE_DEADLINE, frame.write(&mut self.writer)).await {
            Ok(written) => Ok(written?),
            Err(_) => Err(RingError::Disconnected {
                name: "the head".into(),
                reason: "it does not read any more".into(),
            }),
        }
    }
}

impl<S> Drop for HeadConnection<S> {
    fn drop(&mut self) {
        self.reader.abort();
    }
}
