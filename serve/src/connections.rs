//! HTTP connections: accepts connections up to a maximum number, and closes those of slow clients.
//!
//! A connection is closed if a request does not arrive within its time limit, or if the client reads nothing of a
//! response for [`WRITE_DEADLINE`]. The time to compute a response is not limited. Connections above the maximum number
//! wait until another connection is closed.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::extract::{FromRequest, Json, Request};
use axum::http::StatusCode;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::time::Sleep;

use crate::error::ApiError;

/// Maximum number of open connections. source: assumed, below the usual limit of 1024 open files
const MAX_CONNECTIONS: usize = 512;
/// Maximum time until the head of a request (request line and headers) has arrived, counted from the start of the
/// connection or from the end of the previous response.
/// source: assumed; clients keep connections open for their next request
const HEAD_DEADLINE: Duration = Duration::from_mins(1);
/// Maximum time until the body of a request has arrived, counted from the end of the head. source: assumed
const BODY_DEADLINE: Duration = Duration::from_secs(30);
/// Maximum time in which a client reads nothing while all send buffers are full.
/// source: assumed; a client program reads its socket without waiting for its user
const WRITE_DEADLINE: Duration = Duration::from_mins(1);
/// The pause after a failed attempt to accept a connection. source: assumed
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// Accepts and serves HTTP connections until the task is cancelled.
pub async fn serve(listener: TcpListener, router: Router) {
    let free = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let Ok(permit) = free.clone().acquire_owned().await else { return };
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(ACCEPT_RETRY).await;
            continue;
        };
        // Chunks of a streamed response must not wait for more data.
        let _ = stream.set_nodelay(true);
        let service = TowerToHyperService::new(router.clone());
        tokio::spawn(async move {
            let mut http = hyper::server::conn::http1::Builder::new();
            http.timer(TokioTimer::new()).header_read_timeout(HEAD_DEADLINE);
            let stream = WriteTimeout { stream, deadline: None };
            // An error needs no handling: the client sees that its connection was closed.
            let _ = http.serve_connection(TokioIo::new(stream), service).await;
            drop(permit);
        });
    }
}

/// A stream whose writes fail if the peer reads nothing for [`WRITE_DEADLINE`].
struct WriteTimeout<S> {
    stream: S,
    /// The timer until the current write fails; `None` while the stream accepts bytes.
    deadline: Option<Pin<Box<Sleep>>>,
}

impl<S: Unpin> WriteTimeout<S> {
    fn with_deadline<T>(
        &mut self,
        cx: &mut Context,
        write: impl FnOnce(Pin<&mut S>, &mut Context) -> Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        let result = write(Pin::new(&mut self.stream), cx);
        if result.is_ready() {
            self.deadline = None;
            return result;
        }
        let deadline = self.deadline.get_or_insert_with(|| Box::pin(tokio::time::sleep(WRITE_DEADLINE)));
        deadline.as_mut().poll(cx).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for WriteTimeout<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context, buffer: &mut ReadBuf) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for WriteTimeout<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.with_deadline(cx, |stream, cx| stream.poll_write(cx, bytes))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context) -> Poll<io::Result<()>> {
        self.with_deadline(cx, AsyncWrite::poll_flush)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context) -> Poll<io::Result<()>> {
        self.with_deadline(cx, AsyncWrite::poll_shutdown)
    }
}

/// An axum extractor for a JSON body, which must arrive within [`BODY_DEADLINE`].
pub struct JsonBody<T>(pub Result<T, ApiError>);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for JsonBody<T> {
    type Rejection = std::convert::Infallible;

    async fn from_request(request: Request, state: &S) -> Result<Self, Self::Rejection> {
        let read = tokio::time::timeout(BODY_DEADLINE, Json::<T>::from_request(request, state)).await;
        Ok(Self(match read {
            Ok(Ok(Json(document))) => Ok(document),
            Ok(Err(rejection)) => {
                Err(ApiError::new(rejection.status(), "invalid_request", rejection.body_text()))
            }
            Err(_) => {
                let seconds = BODY_DEADLINE.as_secs();
                let message = format!("the request body did not arrive within {seconds} s: send it again");
                Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, "too_slow", message))
            }
        }))
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn slow_client_is_kept_and_stalled_client_is_disconnected() {
        let (stream, mut theirs) = tokio::io::duplex(8);
        let mut ours = WriteTimeout { stream, deadline: None };
        let reader = tokio::spawn(async move {
            for _ in 0..4 {
                tokio::time::sleep(WRITE_DEADLINE / 2).await;
                theirs.read_exact(&mut [0; 8]).await.expect("eight bytes");
            }
            theirs
        });
        ours.write_all(&[0; 40]).await.expect("a slow reader is kept");
        let _open = reader.await.expect("the reader finishes");
        let error = ours.write_all(&[0; 8]).await.expect_err("a stalled reader is disconnected");
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
