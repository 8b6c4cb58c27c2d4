//! An OpenAI-compatible HTTP server for a ring of devices that run one model together.
//!
//! The server offers chat and text completions, embeddings, the model list, health, metrics and a chat page. A handler
//! turns an HTTP request into a request to the ring ([`hearth_ring::Request`]), and the events from the ring into the
//! HTTP response. When a client disconnects, its response is dropped, and the ring frees the slot of the request.
//!
//! The command `hearth serve` connects the ring, and reconnects it after failures.

#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr, clippy::exit))]

mod answer;
mod auth;
mod body;
mod chat;
mod completions;
mod connections;
mod constraint;
mod embeddings;
mod error;
mod fields;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod generation;
mod logprobs;
mod metrics;
mod prompt;
mod request;
mod response;
mod tls;
mod tokenize;
mod tools;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use axum::extract::{Request, State};
use axum::http::{HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router, middleware};
use hearth_ring::{Request as RingRequest, ResponseEvent};
use hearth_runtime::{GrammarCompiler, Tokenizer};
use hearth_schema::Plan;
use serde_json::{Value, json};
use tokio::sync::mpsc;
pub use tokio_rustls::TlsAcceptor;
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

pub use self::auth::is_valid_bearer_token;
use self::body::RequestBody;
pub use self::chat::ChatFormat;
use self::completions::{create_chat_completion, create_completion};
pub use self::connections::serve;
use self::embeddings::create_embeddings;
use self::error::{ApiError, excerpt};
pub use self::metrics::Metrics;
pub use self::tls::tls_acceptor;

/// Maximum number of running and waiting requests; further requests are rejected.
/// source: assumed, far more than a home needs
const MAX_ACTIVE_REQUESTS: u64 = 512;

/// What the chat page may load and do: its own script, style and requests, and nothing else. So a page that shows text
/// from a model or a user cannot be made to run it, and no other site can embed the page.
const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
    img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The state shared by all request handlers.
pub struct AppState {
    pub request_tx: mpsc::UnboundedSender<RingRequest>,
    pub tokenizer: Arc<Tokenizer>,
    /// The model's chat format, or the reason why it cannot chat.
    pub chat_format: Result<ChatFormat, String>,
    /// The number of elements of an embedding, or the reason why the model has no embeddings.
    pub embedding_length: Result<u32, String>,
    /// Compiles grammars; created when a request needs it first.
    pub grammars: OnceLock<Result<GrammarCompiler, String>>,
    /// The model's name in the API.
    pub model_name: Arc<str>,
    /// The context length of each sequence, in tokens.
    pub context_length: u32,
    pub vocab_size: u32,
    pub metrics: Arc<Metrics>,
    /// The bearer token that clients must send; `None` only for a server that listens on loopback.
    pub bearer_token: Option<String>,
    /// The origins of web pages that may use the API; `*` stands for all.
    pub cors_origins: Vec<String>,
    /// The plan of the running ring: the layers of each device.
    pub plan: Mutex<Plan>,
    /// The time at which the server started, as a Unix timestamp in seconds.
    pub start_unix_time: u64,
    pub request_count: AtomicU64,
}

/// Returns the current Unix timestamp in seconds.
#[allow(clippy::disallowed_methods)] // responses carry their time of creation
pub fn unix_time() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Returns the router with all endpoints of the server.
pub fn router(state: Arc<AppState>) -> Router {
    let protected = Router::new()
        .route("/v1/chat/completions", post(create_chat_completion))
        .route("/v1/completions", post(create_completion))
        .route("/v1/embeddings", post(create_embeddings))
        .route("/v1/models", get(list_models))
        .route("/v1/models/{*name}", get(retrieve_model))
        .route("/tokenize", post(create_tokens))
        .route("/detokenize", post(create_text))
        .route("/metrics", get(get_metrics))
        .route("/ring", get(get_ring))
        .layer(middleware::from_fn_with_state(state.clone(), auth::check_token));
    let router = Router::new()
        .merge(protected)
        .route("/", get(async || page_file("text/html; charset=utf-8", include_str!("page/index.html"))))
        .route("/page.css", get(async || page_file("text/css; charset=utf-8", include_str!("page/page.css"))))
        .route(
            "/page.js",
            get(async || page_file("text/javascript; charset=utf-8", include_str!("page/page.js"))),
        )
        .route(
            "/markdown.js",
            get(async || page_file("text/javascript; charset=utf-8", include_str!("page/markdown.js"))),
        )
        .route("/health", get(get_health))
        .fallback(unknown_path)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(middleware::from_fn_with_state(state.clone(), auth::check_host))
        .layer(middleware::from_fn(forbid_sniffing));
    let router = if state.cors_origins.is_empty() { router } else { router.layer(cors(&state.cors_origins)) };
    router.with_state(state)
}

/// Returns the layer that tells browsers which web pages may use the API.
fn cors(origins: &[String]) -> CorsLayer {
    let allowed = if origins.iter().any(|origin| origin == "*") {
        AllowOrigin::any()
    } else {
        AllowOrigin::list(origins.iter().filter_map(|origin| HeaderValue::from_str(origin).ok()))
    };
    let methods = [Method::GET, Method::POST];
    CorsLayer::new()
        .allow_origin(allowed)
        .allow_methods(methods)
        .allow_headers(AllowHeaders::mirror_request())
}

/// Returns a file of the chat page.
fn page_file(content_type: &'static str, content: &'static str) -> Response {
    let headers = [
        (header::CONTENT_TYPE, content_type),
        (header::CONTENT_SECURITY_POLICY, CONTENT_SECURITY_POLICY),
        (header::REFERRER_POLICY, "no-referrer"),
    ];
    (headers, content).into_response()
}

/// Tells browsers not to interpret a response as anything else than its content type says.
async fn forbid_sniffing(request: Request, next: middleware::Next) -> Response {
    let mut response = next.run(request).await;
    response.headers_mut().insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

async fn unknown_path(request: Request) -> ApiError {
    let message = format!(
        "there is no endpoint `{} {}`: use /v1/chat/completions, /v1/completions, /v1/embeddings, /v1/models, \
         /tokenize, /detokenize, /health, /metrics, or / for the chat page",
        request.method(),
        excerpt(request.uri().path())
    );
    ApiError::new(StatusCode::NOT_FOUND, "unknown_url", message)
}

/// Returns the error for an endpoint that does not support the request's method; axum adds the `Allow` header.
async fn method_not_allowed(request: Request) -> ApiError {
    let path = excerpt(request.uri().path());
    let message = format!(
        "`{path}` does not support the method {}: use a method from the `Allow` header",
        request.method()
    );
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message)
}

async fn get_health(State(state): State<Arc<AppState>>) -> Response {
    let is_up = state.metrics.is_ring_up();
    let code = if is_up { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (code, Json(json!({"status": if is_up { "ok" } else { "the ring is down" }}))).into_response()
}

async fn get_metrics(State(state): State<Arc<AppState>>) -> Response {
    let content_type = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, content_type)], state.metrics.encode()).into_response()
}

async fn get_ring(State(state): State<Arc<AppState>>) -> Json<Value> {
    let plan = state.plan.lock().unwrap_or_else(PoisonError::into_inner);
    let device = |(index, device): (usize, &hearth_schema::plan::PlannedDevice)| {
        let layers: u32 = plan.windows(index).iter().map(|window| window.len() as u32).sum();
        json!({"name": device.name, "layers": layers, "window": device.window})
    };
    let devices: Vec<Value> = plan.devices.iter().enumerate().map(device).collect();
    Json(json!({
        "model": &*state.model_name,
        "rounds": plan.rounds,
        "sequences": plan.sequences,
        "context": state.context_length,
        "can_chat": state.chat_format.is_ok(),
        "devices": devices,
        "predicted_tpot_s": plan.prediction.map(|prediction| prediction.tpot.0),
        "status": state.metrics.snapshot(),
    }))
}

async fn list_models(State(state): State<Arc<AppState>>) -> Json<Value> {
    Json(json!({"object": "list", "data": [state.model_object()]}))
}

async fn retrieve_model(
    State(state): State<Arc<AppState>>,
    name: axum::extract::Path<String>,
) -> Result<Json<Value>, ApiError> {
    state.check_model(Some(&name))?;
    Ok(Json(state.model_object()))
}

async fn create_tokens(
    State(state): State<Arc<AppState>>,
    body: Result<RequestBody, ApiError>,
) -> Result<Json<Value>, ApiError> {
    Ok(body?.parse(&state, tokenize::tokenize).await?.0)
}

async fn create_text(
    State(state): State<Arc<AppState>>,
    body: Result<RequestBody, ApiError>,
) -> Result<Json<Value>, ApiError> {
    Ok(body?.parse(&state, tokenize::detokenize).await?.0)
}

impl AppState {
    /// Replaces the plan that the endpoint `/ring` returns.
    pub fn set_plan(&self, plan: &Plan) {
        self.plan.lock().unwrap_or_else(PoisonError::into_inner).clone_from(plan);
    }

    fn next_request_id(&self) -> u64 {
        self.request_count.fetch_add(1, Ordering::Relaxed)
    }

    /// Rejects `count` more requests if the ring is down, or if too many are running and waiting.
    fn check_capacity(&self, count: u64) -> Result<(), ApiError> {
        let unavailable =
            |code, message: &str| Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, code, message));
        if !self.metrics.is_ring_up() {
            let message = "the ring of devices is down: try again when all devices are reachable";
            return unavailable("ring_down", message);
        }
        if self.metrics.active_requests() + count > MAX_ACTIVE_REQUESTS {
            let message = format!("at most {MAX_ACTIVE_REQUESTS} requests can run or wait: try again later");
            return unavailable("overloaded", &message);
        }
        Ok(())
    }

    fn send_to_ring(&self, request: RingRequest) {
        // The ring's side is closed only while the server shuts down.
        if let Err(mpsc::error::SendError(request)) = self.request_tx.send(request) {
            let _ = request.response_tx.send(ResponseEvent::Failed("the server is shutting down".into()));
        }
    }

    fn model_object(&self) -> Value {
        json!({
            "id": &*self.model_name,
            "object": "model",
            "created": self.start_unix_time,
            "owned_by": "hearth",
            // The context of a request, under the name of vLLM.
            "max_model_len": self.context_length,
        })
    }

    fn check_model(&self, name: Option<&str>) -> Result<(), ApiError> {
        let Some(name) = name.filter(|name| *name != &*self.model_name) else { return Ok(()) };
        let message = format!("there is no model `{}` here: use `{}`", excerpt(name), self.model_name);
        let error = ApiError::new(StatusCode::NOT_FOUND, "model_not_found", message);
        Err(ApiError { param: Some("model".into()), ..error })
    }

    /// Rejects tokens that are not in the vocabulary.
    fn check_tokens(&self, param: &'static str, tokens: &[u32]) -> Result<(), ApiError> {
        let Some(token) = tokens.iter().find(|&&token| token >= self.vocab_size) else { return Ok(()) };
        let count = self.vocab_size;
        let message = format!("there is no token {token} in the vocabulary: use token ids below {count}");
        Err(ApiError::invalid(param, message))
    }
}
