//! Access control by bearer token or, on loopback, by `Host` header.
//!
//! If the server has a bearer token, every API request must contain the token. A server without a token listens on
//! loopback only, and rejects requests whose `Host` header is not a loopback address, so that a web page cannot use
//! DNS rebinding to access the server.

use std::net::IpAddr;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use crate::AppState;
use crate::error::{ApiError, excerpt};

/// Rejects requests whose `Host` header is not a loopback address, unless the server requires a bearer token.
pub async fn check_host(State(state): State<Arc<AppState>>, request: Request, next: Next) -> Response {
    let host = request.headers().get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
    if state.bearer_token.is_some() || is_loopback_host(host) {
        return next.run(request).await;
    }
    let host = excerpt(host);
    let message = format!(
        "the `Host` header `{host}` is not a loopback address: use localhost or 127.0.0.1, or start the server \
         with `--token FILE`"
    );
    ApiError::new(StatusCode::FORBIDDEN, "wrong_host", message).into_response()
}

/// Rejects requests without the bearer token if the server requires a bearer token.
pub async fn check_token(State(state): State<Arc<AppState>>, request: Request, next: Next) -> Response {
    let Some(token) = &state.bearer_token else { return next.run(request).await };
    let header = request.headers().get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let bearer = header
        .and_then(|value| value.split_once(' '))
        .filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"));
    if bearer.is_some_and(|(_, given)| equal_in_constant_time(given.trim(), token)) {
        return next.run(request).await;
    }
    let message = "the bearer token is missing or wrong: send the header `Authorization: Bearer TOKEN`, or set the \
                   token as the API key of the client";
    ApiError::new(StatusCode::UNAUTHORIZED, "invalid_api_key", message).into_response()
}

fn is_loopback_host(host: &str) -> bool {
    let name = host.rsplit_once(':').filter(|(_, port)| port.bytes().all(|byte| byte.is_ascii_digit()));
    let name = name.map_or(host, |(name, _)| name);
    let address = name.trim_start_matches('[').trim_end_matches(']');
    let is_loopback = address.parse::<IpAddr>().is_ok_and(|address| address.is_loopback());
    name.eq_ignore_ascii_case("localhost") || is_loopback
}

fn equal_in_constant_time(given: &str, token: &str) -> bool {
    let difference = given.bytes().zip(token.bytes()).fold(0, |sum, (one, other)| sum | (one ^ other));
    difference == 0 && given.len() == token.len()
}

/// Returns whether a string can be sent as a bearer token.
pub fn is_valid_bearer_token(token: &str) -> bool {
    HeaderValue::from_str(token).is_ok() && !token.contains(char::is_whitespace)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_loopback_hosts_are_accepted() {
        for own in ["localhost", "LOCALHOST:8080", "127.0.0.1:80", "127.3.2.1", "[::1]:8080", "[::1]"] {
            assert!(is_loopback_host(own), "{own}");
        }
        for other in
            ["", "example.org", "localhost.example.org:8080", "10.0.0.1:8080", "127.0.0.1.nip.io", "0.0.0.0"]
        {
            assert!(!is_loopback_host(other), "{other}");
        }
    }

    #[test]
    fn tokens_are_compared_whole() {
        assert!(equal_in_constant_time("secret", "secret"));
        assert!(!equal_in_constant_time("secre", "secret") && !equal_in_constant_time("secrets", "secret"));
        assert!(!equal_in_constant_time("", "secret"));
        assert_eq!(["abc-DEF_123", "a b", "a\nb"].map(is_valid_bearer_token), [true, false, false]);
    }
}
