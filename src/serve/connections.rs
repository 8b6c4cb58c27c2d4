//! How many may be connected at once, and how long may they say nothing?
//!
//! A connection that sends no request, or a request in crumbs, is closed after a while; while an answer is on its way
//! nobody is hurried. More connections than a limit wait to be accepted.
//!
//! Not here: what is answered.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{FromRequest, Json, Request};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use serde::de::DeserializeOwned;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;

use super::asked::Refused;

/// Connections at once. source: assumed, below the thousand files that a process may usually open
const MOST: usize = 512;
/// For the head of a request to come, from the connection's begin or the answer before.
/// source: assumed; clients keep a connection open for their next request
const HEAD_DEADLINE: Duration = Duration::from_mins(1);
/// For the rest of it.
const BODY_DEADLINE: Duration = Duration::from_secs(30);
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
            let _ = http.serve_connection(TokioIo::new(stream), service).await;
            drop(permit);
        });
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
