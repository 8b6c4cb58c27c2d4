//! An OpenAI-compatible HTTP server for a ring of devices that run one model together.
//!
//! The server offers chat and text completions, the model list, health, metrics and a chat page. A handler turns an
//! HTTP request into a request to the ring ([`hearth_ring::Request`]), and the events from the ring into the HTTP
//! response. When a client disconnects, its response is dropped, and the ring frees the slot of the request.
//!
//! The command `hearth serve` connects the ring, and reconnects it after failures.

#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr, clippy::exit))]

mod answer;
mod auth;
mod body;
mod chat;
mod connections;
mod constraint;
mod error;
mod fields;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod generation;
mod logprobs;
mod metrics;
mod request;
mod response;
mod tls;
mod tokenize;
mod tools;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use axum::extract::{Request, State};
use axum::http::{HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router, middleware};
use hearth_ring::{Request as RingRequest, ResponseEvent};
use hearth_runtime::chat::{JsonValue, THOUGHT_END, THOUGHT_START};
use hearth_runtime::tokenizer::Fragment;
use hearth_runtime::{
    ChatMessage, ExecError, GrammarCompiler, GrammarMatcher, Sampler, Tokenizer, ToolSyntax,
};
use hearth_schema::Plan;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
pub use tokio_rustls::TlsAcceptor;
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

use self::answer::{Answer, AnswerParser, AnswerSyntax};
pub use self::auth::is_valid_bearer_token;
use self::body::RequestBody;
pub use self::chat::ChatFormat;
use self::chat::Thinking;
use self::connections::ResponseGuard;
pub use self::connections::serve;
use self::constraint::TextFormat;
use self::error::{ApiError, excerpt};
use self::generation::{AnswerFormat, Chunk, FinishReason, Generation, PromptTokens};
use self::logprobs::TokenLogprobs;
pub use self::metrics::Metrics;
use self::metrics::Usage;
use self::request::{CompletionRequest, GenerationParams, Prompt};
use self::response::{FinishedAnswer, ResponseKind, ResponseMetadata};
pub use self::tls::tls_acceptor;

/// Maximum number of running and waiting requests; further requests are rejected.
/// source: assumed, far more than a home needs
const MAX_ACTIVE_REQUESTS: u64 = 512;
/// Default of `max_tokens` for text completions. source: OpenAI's API reference
const DEFAULT_COMPLETION_TOKENS: u32 = 16;

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
        "there is no endpoint `{} {}`: use /v1/chat/completions, /v1/completions, /v1/models, /tokenize, \
         /detokenize, /health, /metrics, or / for the chat page",
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

async fn create_chat_completion(
    State(state): State<Arc<AppState>>,
    body: Result<RequestBody, ApiError>,
) -> Response {
    let parse = |state: &AppState, body: &[u8], id| {
        let mut request = CompletionRequest::from_json(body)?;
        let params = state.params(&request, id)?;
        let chat = state.chat_format()?;
        let (messages, tools) = (request.take_messages()?, request.take_tool_descriptions());
        let of_tools: usize = tools.iter().map(JsonValue::text_bytes).sum();
        let of_messages: usize = messages.iter().map(ChatMessage::text_bytes).sum();
        state.check_length("messages", of_messages + of_tools)?;
        let encoded = chat.encode(&state.tokenizer, messages, tools);
        let (tokens, thinking) = encoded.map_err(|error| ApiError::invalid("messages", error.to_string()))?;
        let grammar = state.compile_grammar(&params, &chat.syntax, thinking)?;
        let tools = params.constraint.can_call().then(|| chat.syntax.clone());
        let can_follow_text = params.constraint.can_follow_text(&chat.syntax);
        let syntax = Some(AnswerSyntax { thinking, tools, can_follow_text });
        Ok(ParsedRequest { id, prompts: vec![tokens], params, grammar, syntax })
    };
    respond(&state, ResponseKind::Chat, body, parse).await
}

async fn create_completion(
    State(state): State<Arc<AppState>>,
    body: Result<RequestBody, ApiError>,
) -> Response {
    let parse = |state: &AppState, body: &[u8], id| {
        let mut request = CompletionRequest::from_json(body)?;
        let params = state.params(&request, id)?;
        if !params.constraint.tools.is_empty() {
            let message = "`tools` is not supported for text completions: use /v1/chat/completions";
            return Err(ApiError::invalid("tools", message));
        }
        let prompts = request.take_prompts()?.into_iter().map(|prompt| state.prompt_tokens(prompt));
        let prompts = prompts.collect::<Result<_, _>>()?;
        let grammar = state.compile_grammar(&params, &ToolSyntax::common(), Thinking::Never)?;
        let max_tokens = params.max_tokens.or(Some(DEFAULT_COMPLETION_TOKENS));
        let params = GenerationParams { max_tokens, ..params };
        Ok(ParsedRequest { id, prompts, params, grammar, syntax: None })
    };
    respond(&state, ResponseKind::Completion, body, parse).await
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

/// A request that is ready to start.
struct ParsedRequest {
    /// The number of the request.
    id: u64,
    /// The prompts as tokens.
    prompts: Vec<Vec<u32>>,
    params: GenerationParams,
    grammar: Option<GrammarMatcher>,
    /// What answers consist of; `None` if they are only text.
    syntax: Option<AnswerSyntax>,
}

/// Parses a request, starts a generation for each prompt, and returns the HTTP response, either streamed or complete.
async fn respond(
    state: &Arc<AppState>,
    kind: ResponseKind,
    body: Result<RequestBody, ApiError>,
    parse: impl FnOnce(&AppState, &[u8], u64) -> Result<ParsedRequest, ApiError> + Send + 'static,
) -> Response {
    let (endpoint, id_prefix) = match kind {
        ResponseKind::Chat => ("chat", "chatcmpl"),
        ResponseKind::Completion => ("completions", "cmpl"),
    };
    let id = state.next_request_id();
    let started = async {
        let (parsed, guard) = body?.parse(state, move |state, body| parse(state, body, id)).await?;
        let (is_stream, include_usage) = (parsed.params.stream, parsed.params.include_usage);
        Ok((state.start(parsed)?, is_stream, include_usage, guard))
    };
    let response = match started.await {
        Err(error) => ApiError::into_response(error),
        Ok((generations, is_stream, include_usage, guard)) => {
            let header = ResponseMetadata {
                kind,
                id: format!("{id_prefix}-{}-{id}", state.start_unix_time),
                created: unix_time(),
                model: state.model_name.clone(),
                tokenizer: state.tokenizer.clone(),
            };
            if is_stream {
                response::stream(header, generations, include_usage, guard)
            } else {
                let _open: Option<ResponseGuard> = guard;
                collect_all(&header, generations).await.into_response()
            }
        }
    };
    state.metrics.record_response(endpoint, response.status().as_u16());
    response
}

/// Waits for all generations concurrently, so that the time to first token of each generation is measured correctly.
/// Dropping the returned future cancels the generations.
async fn collect_all(
    header: &ResponseMetadata,
    generations: Vec<Generation>,
) -> Result<Json<Value>, ApiError> {
    let mut tasks = JoinSet::new();
    for (index, generation) in generations.into_iter().enumerate() {
        tasks.spawn(async move { (index, collect(generation).await) });
    }
    let failed = |error: tokio::task::JoinError| {
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "failed", error.to_string())
    };
    let mut finished = BTreeMap::new();
    while let Some(joined) = tasks.join_next().await {
        let (index, result) = joined.map_err(failed)?;
        finished.insert(index, result?);
    }
    let (answers, usages): (Vec<_>, Vec<Usage>) = finished.into_values().unzip();
    Ok(Json(header.response_json(answers, usages.into_iter().sum())))
}

/// Waits until a generation ends. Returns its answer and token usage.
async fn collect(mut generation: Generation) -> Result<(FinishedAnswer, Usage), ApiError> {
    let (answer, logprobs, reason) = (Answer::default(), Vec::new(), FinishReason::Length);
    let mut finished = FinishedAnswer { answer, logprobs, reason };
    while let Some(chunk) = generation.next_chunk().await {
        match chunk {
            Chunk::Parts(parts, logprobs) => {
                for part in parts {
                    finished.answer.add(part);
                }
                finished.logprobs.extend(logprobs);
            }
            Chunk::End(why) => finished.reason = why,
            Chunk::Failed(error) => return Err(error),
        }
    }
    Ok((finished, generation.usage))
}

impl AppState {
    /// Replaces the plan that the endpoint `/ring` returns.
    pub fn set_plan(&self, plan: &Plan) {
        self.plan.lock().unwrap_or_else(PoisonError::into_inner).clone_from(plan);
    }

    fn next_request_id(&self) -> u64 {
        self.request_count.fetch_add(1, Ordering::Relaxed)
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

    fn params(&self, request: &CompletionRequest, id: u64) -> Result<GenerationParams, ApiError> {
        self.check_model(request.model.as_deref())?;
        // Each request has its own random numbers; `seed` makes it repeatable.
        request.to_generation_params(self.start_unix_time.wrapping_mul(1 << 20).wrapping_add(id))
    }

    fn chat_format(&self) -> Result<&ChatFormat, ApiError> {
        self.chat_format.as_ref().map_err(|reason| {
            let message = format!("{reason}: use /v1/completions instead, which continues a prompt");
            ApiError::new(StatusCode::BAD_REQUEST, "no_chat_template", message)
        })
    }

    /// Compiles the grammar of an answer; `None` if the answer is not restricted.
    fn compile_grammar(
        &self,
        params: &GenerationParams,
        syntax: &ToolSyntax,
        thinking: Thinking,
    ) -> Result<Option<GrammarMatcher>, ApiError> {
        let Some(grammar) = params.constraint.grammar(syntax, &self.tokenizer, thinking) else {
            return Ok(None);
        };
        let create =
            || GrammarCompiler::new(&self.tokenizer, self.vocab_size).map_err(|error| error.to_string());
        let compiled = match self.grammars.get_or_init(create) {
            Ok(compiler) => compiler.compile(&grammar).map_err(|error| error.to_string()),
            Err(reason) => Err(reason.clone()),
        };
        let is_gbnf = matches!(&params.constraint.text, TextFormat::Grammar(text) if text.contains("::="));
        let compiled = compiled.map_err(|error| {
            if is_gbnf { format!("{error} (it looks like GBNF, which is not)") } else { error }
        });
        compiled.map(Some).map_err(|message| ApiError::invalid(params.constraint.field(), message))
    }

    /// Returns the control tokens that are part of the text of an answer: those around thoughts and calls.
    fn visible_tokens(&self, syntax: Option<&ToolSyntax>) -> BTreeSet<u32> {
        let texts = syntax.map(|syntax| {
            [&syntax.opening, &syntax.middle, &syntax.ending, syntax.next.as_ref().unwrap_or(&syntax.ending)]
        });
        let texts = texts.into_iter().flatten().map(String::as_str).chain([THOUGHT_START, THOUGHT_END]);
        let fragments = texts.flat_map(|text| self.tokenizer.split_control_tokens(text));
        fragments.filter_map(|part| if let Fragment::Token(id) = part { Some(id) } else { None }).collect()
    }

    fn prompt_tokens(&self, prompt: Prompt) -> Result<Vec<u32>, ApiError> {
        let tokens = match prompt {
            Prompt::Text(text) => {
                self.check_length("prompt", text.len())?;
                let tokens = self.tokenizer.encode(&text, false);
                tokens.map_err(|error| ApiError::invalid("prompt", error.to_string()))?
            }
            Prompt::Tokens(tokens) => tokens,
        };
        if tokens.is_empty() {
            return Err(ApiError::invalid("prompt", "the prompt has no tokens: send some text"));
        }
        self.check_tokens("prompt", &tokens)?;
        Ok(tokens)
    }

    /// Rejects tokens that are not in the vocabulary.
    fn check_tokens(&self, param: &'static str, tokens: &[u32]) -> Result<(), ApiError> {
        let Some(token) = tokens.iter().find(|&&token| token >= self.vocab_size) else { return Ok(()) };
        let count = self.vocab_size;
        let message = format!("there is no token {token} in the vocabulary: use token ids below {count}");
        Err(ApiError::invalid(param, message))
    }

    /// Rejects a text that cannot fit in the context, before it is tokenized, which takes long for a long text.
    fn check_length(&self, param: &'static str, bytes: usize) -> Result<(), ApiError> {
        let (min_tokens, context) = (self.tokenizer.min_tokens(bytes), self.context_length);
        if min_tokens < context as usize {
            return Ok(());
        }
        let message = format!(
            "{bytes} bytes of text have at least {min_tokens} tokens and do not fit in the context of {context} \
             tokens: shorten the prompt"
        );
        Err(context_length_exceeded(param, message))
    }

    /// Starts the generations of `params.choices` answers to each prompt.
    fn start(&self, request: ParsedRequest) -> Result<Vec<Generation>, ApiError> {
        let ParsedRequest { id, prompts, params, grammar, syntax } = request;
        let unavailable =
            |code, message: &str| Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, code, message));
        if !self.metrics.is_ring_up() {
            let message = "the ring of devices is down: try again when all devices are reachable";
            return unavailable("ring_down", message);
        }
        let (choices, answers) = (params.choices, prompts.len() as u64 * u64::from(params.choices));
        if self.metrics.active_requests() + answers > MAX_ACTIVE_REQUESTS {
            let message = format!("at most {MAX_ACTIVE_REQUESTS} requests can run or wait: try again later");
            return unavailable("overloaded", &message);
        }
        let sampler = Sampler::new(params.sampler).map_err(|error| {
            let param = if let ExecError::Sampling { name, .. } = &error { *name } else { "temperature" };
            ApiError::invalid(param, error.to_string())
        })?;
        let limits = prompts.iter().map(|prompt| self.tokens_to_generate(prompt.len() as u64, &params));
        let limits = limits.collect::<Result<Vec<u32>, _>>()?;
        if let Some((token, _)) = params.logit_bias.range(self.vocab_size..).next() {
            let count = self.vocab_size;
            let message = format!("`logit_bias` has token {token}, but the vocabulary has {count} tokens");
            return Err(ApiError::invalid("logit_bias", message));
        }
        let visible = syntax.as_ref().map(|syntax| self.visible_tokens(syntax.tools.as_deref()));
        let visible = Arc::new(visible.unwrap_or_default());
        let start = |(index, (prompt, max_new_tokens)): (u32, (Vec<u32>, u32))| {
            // The usage counts a prompt once.
            let reported = if index % choices == 0 { prompt.len() as u32 } else { 0 };
            let prompt_tokens = PromptTokens { count: prompt.len() as u32, reported };
            let (response_tx, events) = mpsc::unbounded_channel();
            let mut sampler = sampler.for_sequence(index).with_prompt_and_biases(&prompt, &params.logit_bias);
            let mut grammar_failure = None;
            if let Some(grammar) = grammar.clone() {
                grammar_failure = Some(grammar.failure());
                sampler = sampler.with_grammar(grammar);
            }
            let (logprobs_tx, logprobs) = mpsc::unbounded_channel();
            let count = params.logprobs;
            let mut clock = self.metrics.start_token_clock();
            let sampler = Box::new(move |logits: &[f32]| {
                let token = sampler.sample(logits);
                clock.tick();
                if let Some(count) = count {
                    // The client may have gone.
                    let _ = logprobs_tx.send(TokenLogprobs::new(logits, token, count as usize));
                }
                token
            });
            let request = RingRequest { prompt, max_new_tokens, sampler, response_tx };
            // The ring's side is closed only while the server shuts down.
            if let Err(mpsc::error::SendError(request)) = self.request_tx.send(request) {
                let _ = request.response_tx.send(ResponseEvent::Failed("the server is shutting down".into()));
            }
            let format = AnswerFormat {
                parser: syntax.as_ref().map(|syntax| {
                    // Calls of all requests since the server started have different ids.
                    AnswerParser::new(
                        syntax,
                        (self.start_unix_time.wrapping_mul(1 << 20).wrapping_add(id), index),
                    )
                }),
                visible: visible.clone(),
                stop_strings: params.stop_strings.clone(),
                logprobs: count.map(|_| logprobs),
                grammar_failure,
            };
            let tokenizer = self.tokenizer.clone();
            Generation::new(events, tokenizer, prompt_tokens, format, self.metrics.start_request())
        };
        let all = prompts.into_iter().zip(limits);
        let all = all.flat_map(|request| std::iter::repeat_n(request, choices as usize));
        Ok((0..).zip(all).map(start).collect())
    }

    /// Returns the maximum number of tokens to generate after a prompt of `prompt_tokens` tokens.
    fn tokens_to_generate(&self, prompt_tokens: u64, params: &GenerationParams) -> Result<u32, ApiError> {
        let context = u64::from(self.context_length);
        let left = context.saturating_sub(prompt_tokens);
        let wanted = params.max_tokens.map_or(left, u64::from);
        if left == 0 || wanted > left {
            let message = format!(
                "{prompt_tokens} prompt tokens and {wanted} generated tokens do not fit in the context of {context} \
                 tokens: shorten the prompt or lower `max_tokens`"
            );
            return Err(context_length_exceeded("max_tokens", message));
        }
        Ok(wanted as u32)
    }
}

fn context_length_exceeded(param: &'static str, message: String) -> ApiError {
    let error = ApiError::new(StatusCode::BAD_REQUEST, "context_length_exceeded", message);
    ApiError { param: Some(param.into()), ..error }
}
