//! Error responses in the format of OpenAI's API.

use std::borrow::Cow;

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

/// An error response: the reason why a request was rejected or failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiError {
    pub status: StatusCode,
    /// The description of the problem and how to fix it.
    pub message: String,
    /// The name of the invalid request field; `None` if the error is not about a single field.
    pub param: Option<Cow<'static, str>>,
    /// The machine-readable error code, such as `model_not_found`.
    pub code: &'static str,
}

impl ApiError {
    /// Creates an error that is not about a single field of the request.
    pub fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), param: None, code }
    }

    /// Creates the error for a request that cannot be read.
    pub fn invalid_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request", message)
    }

    /// Creates the error for an invalid value of the request field `param`.
    pub fn invalid(param: impl Into<Cow<'static, str>>, message: impl Into<String>) -> Self {
        Self { param: Some(param.into()), ..Self::new(StatusCode::BAD_REQUEST, "invalid_value", message) }
    }

    /// Creates the error for a text in the field `param` that does not fit in the context.
    pub fn context_length_exceeded(param: &'static str, message: String) -> Self {
        let error = Self::new(StatusCode::BAD_REQUEST, "context_length_exceeded", message);
        Self { param: Some(param.into()), ..error }
    }

    /// Creates the error for a request that the ring did not complete.
    pub fn ring_failed(message: String) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "ring_failed", message)
    }

    /// Returns the JSON body of the error response.
    pub fn to_json(&self) -> Value {
        let kind = if self.status.is_server_error() { "server_error" } else { "invalid_request_error" };
        json!({"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}})
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.to_json())).into_response();
        if self.status == StatusCode::SERVICE_UNAVAILABLE {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}

/// Returns the first 60 characters of a client's string for an error message, with `?` for each control character.
pub fn excerpt(text: &str) -> String {
    text.chars().take(60).map(|letter| if letter.is_control() { '?' } else { letter }).collect()
}
