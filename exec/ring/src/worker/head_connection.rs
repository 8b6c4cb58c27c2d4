//! The worker's end of the control connection that the head opens.
//!
//! A separate task reads frames, so that a cancelled wait loses no frame. Every wait and every write has a deadline.

use std::time::Duration;

use tokio::io::WriteHalf;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout, timeout_at};

use crate::error::{Result, RingError};
use crate::wire::{ByteStream, Frame, MAX_DOCUMENT_PAYLOAD_BYTES, WRITE_TIMEOUT, WireError};

/// The time without a message after which the head counts as lost. The head sends a ping every half second.
const SILENCE_DEADLINE: Duration = Duration::from_secs(10);

/// Maximum number of received frames that wait to be handled; a frame can have a payload of several MiB.
const MAX_WAITING_FRAMES: usize = 4;

pub struct HeadConnection<S> {
    frames: mpsc::Receiver<Result<Frame, WireError>>,
    writer: WriteHalf<S>,
    reader: JoinHandle<()>,
    last_frame: Instant,
}

impl<S: ByteStream> HeadConnection<S> {
    /// Creates the connection from a stream whose hello has been read.
    pub fn new(stream: S) -> Self {
        let (mut reader, writer) = tokio::io::split(stream);
        let (sender, frames) = mpsc::channel(MAX_WAITING_FRAMES);
        let reader = tokio::spawn(async move {
            loop {
                let read = Frame::read(&mut reader, MAX_DOCUMENT_PAYLOAD_BYTES).await;
                let Some(frame) = read.transpose() else { return };
                let failed = frame.is_err();
                if sender.send(frame).await.is_err() || failed {
                    return;
                }
            }
        });
        Self { frames, writer, reader, last_frame: Instant::now() }
    }

    /// Waits for the next frame of the head. This method is cancel safe.
    pub async fn next_frame(&mut self) -> Result<Frame> {
        let frame = timeout_at(self.last_frame + SILENCE_DEADLINE, self.frames.recv()).await;
        let frame = frame.map_err(|_| lost("it does not respond"))?;
        let frame = frame.ok_or_else(|| lost("it closed the connection"))??;
        self.last_frame = Instant::now();
        Ok(frame)
    }

    /// Sends a frame to the head. This method is not cancel safe: a cancelled call may send an incomplete frame.
    pub async fn send(&mut self, frame: impl Into<Frame>) -> Result<()> {
        let frame = frame.into();
        match timeout(WRITE_TIMEOUT, frame.write(&mut self.writer)).await {
            Ok(written) => Ok(written?),
            Err(_) => Err(lost("it no longer reads messages")),
        }
    }
}

fn lost(reason: &str) -> RingError {
    RingError::disconnected("the head", reason)
}

impl<S> Drop for HeadConnection<S> {
    fn drop(&mut self) {
        self.reader.abort();
    }
}
