//! Access control: the bearer token, and the `Host` header on loopback.
//!
//! With a token, every API request must carry it. Without one the server listens on loopback only and accepts only
//! requests whose `Host` names this machine, so that no web page can reach it through DNS rebinding.

use std::net::IpAddr;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use crate::AppState;
use crate::error::{ApiError, excerpt};

/// Rejects requests whose `Host` header does not name this machine, unless the server requires a bearer token.
pub async fn check_host(State(state): State<Arc<AppState>>, request: Request, next: Next) -> Response {
    let host = request.headers().get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
    if state.bearer_token.is_some() || is_loopback_host(host) {
        return next.run(request).await;
    }
    let host = excerpt(host);
    let message = format!(
        "`{host}` is not a loopback address: use localhost or 127.0.0.1, or start the server with --token"
    );
    ApiError::new(StatusCode::FORBIDDEN, "wrong_host", message).into_response()
}

/// Rejects requests that lack the bearer token, if the server requires one.
pub async fn check_token(State(state): State<Arc<AppState>>, request: Request, next: Next) -> Response {
    let Some(token) = &state.bearer_token else { return next.run(request).await };
    let header = request.headers().get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let bearer = header
        .and_then(|value| value.split_once(' '))
        .filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"));
    if bearer.is_some_and(|(_, given)| equal_in_constant_time(given.trim(), token)) {
        return next.run(request).await;
    }
    let message = "the token is missing or wrong: send `Authorization: Bearer TOKEN`, or set the token as the \
                   API key of the client";
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

/// Whether a text can be sent as a bearer token.
pub fn is_valid_bearer_token(text: &str) -> bool {
    HeaderValue::from_str(text).is_ok() && !text.contains(char::is_whitespace)
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
        assert!(
            is_valid_bearer_token("abc-DEF_123")
                && !is_valid_bearer_token("a b")
                && !is_valid_bearer_token("a\nb")
        );
    }
}
