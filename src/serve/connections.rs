//! How many may be connected at once, and how long may they say nothing?
//!
//! A connection that sends no request, or a request in crumbs, is closed after a while, and so is one that takes nothing
//! of its answer; while an answer is made nobody is hurried. More connections than a limit wait to be accepted.
//!
//! Not here: what is answered.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::extract::{FromRequest, Json, Request};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::time::Sleep;

use super::asked::Refused;

/// Connections at once. source: assumed, below the thousand files that a process may usually open
const MOST: usize = 512;
/// For the head of a request to come, from the connection's begin or the answer before.
/// source: assumed; clients keep a connection open for their next request
const HEAD_DEADLINE: Duration = Duration::from_mins(1);
/// For the rest of it.
const BODY_DEADLINE: Duration = Duration::from_secs(30);
/// For a client to take some of what is sent to it, when all buffers between are full.
/// source: assumed; a person who reads does not hold up a program, which reads ahead
const WRITE_DEADLINE: Duration = Duration::from_mins(1);
/// After a connection that could not be accepted.
const PAUSE: Duration = Duration::from_millis(100);

/// Answers whoever connects, for ever.
pub async fn serve(listener: TcpListener, router: Router) {
    let free = Arc::new(Semaphore::new(MOST));
    loop {
        let Ok(permit) = free.clone().acquire_owned().await else { return };
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(PAUSE).await;
            continue;
        };
        // Pieces of an answer go out as they come.
        let _ = stream.set_nodelay(true);
        let service = TowerToHyperService::new(router.clone());
        tokio::spawn(async move {
            let mut http = hyper::server::conn::http1::Builder::new();
            http.timer(TokioTimer::new()).header_read_timeout(HEAD_DEADLINE);
            // Whoever broke it off knows.
            let _ = http.serve_connection(TokioIo::new(Hurried::new(stream)), service).await;
            drop(permit);
        });
    }
}

/// A stream whose other side must take what is written to it, in time.
struct Hurried<S> {
    stream: S,
    /// Runs while nothing can be written.
    patience: Option<Pin<Box<Sleep>>>,
}

impl<S: Unpin> Hurried<S> {
    fn new(stream: S) -> Self {
        Self { stream, patience: None }
    }

    /// Tries to write; fails when that was in vain for too long.
    fn hurry<T>(
        &mut self,
        context: &mut Context,
        write: impl FnOnce(Pin<&mut S>, &mut Context) -> Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        let tried = write(Pin::new(&mut self.stream), context);
        if tried.is_ready() {
            self.patience = None;
            return tried;
        }
        let patience = self.patience.get_or_insert_with(|| Box::pin(tokio::time::sleep(WRITE_DEADLINE)));
        patience.as_mut().poll(context).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Hurried<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context,
        buffer: &mut ReadBuf,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Hurried<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.hurry(context, |stream, context| stream.poll_write(context, bytes))
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context) -> Poll<io::Result<()>> {
        self.hurry(context, AsyncWrite::poll_flush)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context) -> Poll<io::Result<()>> {
        self.hurry(context, AsyncWrite::poll_shutdown)
    }
}

/// A request's document, in time.
pub struct Document<T>(pub Result<T, Refused>);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Document<T> {
    type Rejection = std::convert::Infallible;

    async fn from_request(request: Request, state: &S) -> Result<Self, Self::Rejection> {
        let read = tokio::time::timeout(BODY_DEADLINE, Json::<T>::from_request(request, state)).await;
        Ok(Self(match read {
            Ok(Ok(Json(document))) => Ok(document),
            Ok(Err(rejection)) => Err(Refused {
                status: rejection.status().as_u16(),
                message: rejection.body_text(),
                param: None,
                code: "invalid_request",
            }),
            Err(_) => Err(Refused {
                status: 408,
                message: format!("the request did not come within {} s", BODY_DEADLINE.as_secs()),
                param: None,
                code: "too_slow",
            }),
        }))
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn who_takes_nothing_is_left_and_who_takes_little_is_not() {
        let (ours, mut theirs) = tokio::io::duplex(8);
        let mut ours = Hurried::new(ours);
        let reader = tokio::spawn(async move {
            for _ in 0..4 {
                tokio::time::sleep(WRITE_DEADLINE / 2).await;
                theirs.read_exact(&mut [0; 8]).await.expect("eight bytes");
            }
            theirs
        });
        ours.write_all(&[0; 40]).await.expect("the reader is slow, and reads");
        let _open = reader.await.expect("it has read");
        let error = ours.write_all(&[0; 8]).await.expect_err("nobody reads any more");
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
