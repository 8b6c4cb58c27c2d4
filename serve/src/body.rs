//! Request bodies: reads a body of limited size within a time limit, and parses it on a separate thread.
//!
//! Parsing and tokenizing a large prompt takes seconds and a multiple of its memory. So both happen outside of the
//! async runtime, for a few requests at a time, and other requests wait for their turn.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{FromRequest, Request};
use axum::http::{StatusCode, header};
use hyper::body::Body;
use memmap2::MmapMut;
use tokio::sync::Semaphore;

use crate::AppState;
use crate::connections::{Connection, ResponseGuard};
use crate::error::ApiError;

/// Maximum size of a request body, in bytes. source: assumed, enough for a prompt of 100,000 tokens
const MAX_BODY_BYTES: usize = 4 << 20;
/// Maximum time until the body of a request has arrived, counted from the end of the head. source: assumed
const BODY_DEADLINE: Duration = Duration::from_secs(30);
/// Permits to parse a request. Few requests are parsed at the same time, so that their memory is bounded.
/// source: assumed
static PARSING: Semaphore = Semaphore::const_new(2);

/// Size from which a body is stored in memory of its own, in bytes. source: assumed, longer than most prompts
const LARGE_BODY_BYTES: usize = 64 << 10;

/// The bytes of a body. A large body is not on the heap, so that its memory returns to the system when it is dropped.
enum BodyBytes {
    Small(Vec<u8>),
    /// A map of [`MAX_BODY_BYTES`], of which the first bytes are used. Unused pages take no memory.
    Large(MmapMut, usize),
}

impl BodyBytes {
    fn as_slice(&self) -> &[u8] {
        match self {
            BodyBytes::Small(bytes) => bytes,
            BodyBytes::Large(map, len) => &map[..*len],
        }
    }

    /// Appends bytes, up to [`MAX_BODY_BYTES`] in all.
    fn append(&mut self, data: &[u8]) -> std::io::Result<()> {
        match self {
            BodyBytes::Small(bytes) if bytes.len() + data.len() <= LARGE_BODY_BYTES => {
                bytes.extend_from_slice(data);
            }
            BodyBytes::Small(bytes) => {
                let mut map = MmapMut::map_anon(MAX_BODY_BYTES)?;
                map[..bytes.len()].copy_from_slice(bytes);
                *self = BodyBytes::Large(map, bytes.len());
                self.append(data)?;
            }
            BodyBytes::Large(map, len) => {
                map[*len..][..data.len()].copy_from_slice(data);
                *len += data.len();
            }
        }
        Ok(())
    }
}

/// A request body that has arrived completely.
pub struct RequestBody {
    bytes: BodyBytes,
    connection: Option<Connection>,
    /// Keeps the connection open until the response is complete.
    pub response_guard: Option<ResponseGuard>,
}

impl FromRequest<Arc<AppState>> for RequestBody {
    type Rejection = ApiError;

    async fn from_request(request: Request, _: &Arc<AppState>) -> Result<Self, ApiError> {
        check_content_type(&request)?;
        let connection = request.extensions().get::<Connection>().cloned();
        let read = tokio::time::timeout(BODY_DEADLINE, read(request, connection.as_ref())).await;
        let read = read.unwrap_or_else(|_| {
            let seconds = BODY_DEADLINE.as_secs();
            let message = format!("the request body did not arrive within {seconds} s: send it again");
            Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, "too_slow", message))
        });
        match read {
            Ok(bytes) => {
                let response_guard = connection.as_ref().map(Connection::begin_response);
                Ok(Self { bytes, connection, response_guard })
            }
            Err(error) => {
                connection.iter().for_each(Connection::release_body);
                Err(error)
            }
        }
    }
}

fn check_content_type(request: &Request) -> Result<(), ApiError> {
    let value = request.headers().get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let kind = value.and_then(|value| value.split(';').next()).unwrap_or_default().trim();
    if kind.eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    let message = "the request body is not JSON: send the header `Content-Type: application/json`";
    Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "invalid_request", message))
}

async fn read(request: Request, connection: Option<&Connection>) -> Result<BodyBytes, ApiError> {
    let too_large = || {
        let message = format!("the request body is larger than {MAX_BODY_BYTES} bytes: shorten the prompt");
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "request_too_large", message)
    };
    let mut body = request.into_body();
    if body.size_hint().lower() > MAX_BODY_BYTES as u64 {
        return Err(too_large());
    }
    let mut bytes = BodyBytes::Small(Vec::new());
    while let Some(frame) = std::future::poll_fn(|cx| std::pin::Pin::new(&mut body).poll_frame(cx)).await {
        let incomplete =
            |error| ApiError::invalid_request(format!("the request body is incomplete: {error}"));
        // Trailers are ignored.
        let Ok(data) = frame.map_err(incomplete)?.into_data() else { continue };
        if bytes.as_slice().len() + data.len() > MAX_BODY_BYTES {
            return Err(too_large());
        }
        let has_room = connection.is_none_or(|connection| connection.try_buffer(data.len()));
        if !has_room || bytes.append(&data).is_err() {
            let message = "too many requests are arriving: try again later";
            return Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "overloaded", message));
        }
    }
    Ok(bytes)
}

impl RequestBody {
    /// Parses the body with `parse`, on a separate thread. Also returns the guard of the response.
    pub async fn parse<V: Send + 'static>(
        self,
        state: &Arc<AppState>,
        parse: impl FnOnce(&AppState, &[u8]) -> Result<V, ApiError> + Send + 'static,
    ) -> Result<(V, Option<ResponseGuard>), ApiError> {
        let failed = || ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "failed", "the request failed");
        let permit = PARSING.acquire().await.map_err(|_| failed())?;
        let Self { bytes, connection, response_guard } = self;
        let shared = state.clone();
        let parsing = tokio::task::spawn_blocking(move || {
            let parsed = parse(&shared, bytes.as_slice());
            drop(bytes);
            connection.iter().for_each(Connection::release_body);
            drop(permit);
            parsed
        });
        let parsed = parsing.await.map_err(|_| failed())??;
        Ok((parsed, response_guard))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_of_any_size_are_stored() {
        for size in [0, 1, LARGE_BODY_BYTES, LARGE_BODY_BYTES + 1, MAX_BODY_BYTES] {
            let expected: Vec<u8> = (0..size).map(|at| at as u8).collect();
            let mut bytes = BodyBytes::Small(Vec::new());
            for data in expected.chunks(10_000) {
                bytes.append(data).expect("memory");
            }
            assert!(bytes.as_slice() == expected, "{size}");
            assert_eq!(matches!(bytes, BodyBytes::Large(..)), size > LARGE_BODY_BYTES, "{size}");
        }
    }
}
