//! How is a ring offered to programs and people: OpenAI's API, health, metrics, and a page to chat on?
//!
//! A request becomes a guest of the ring ([`hearth_exec::ring::Guest`]); what the guest is told becomes the answer. A
//! request whose client hangs up drops its guest, which leaves its seat. Off loopback every request needs the token; on
//! loopback without one, only requests that name this machine are taken, so that no web page can reach it under a name
//! of its own.
//!
//! Not here: the ring, which the verb keeps up.

mod answer;
mod asked;
mod connections;
mod counters;
mod told;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use hearth_exec::ring::{Guest, Said};
use hearth_exec::{ChatTemplate, ExecError, Sampler, Tokenizer};
use hearth_schema::Plan;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use self::answer::{Answer, Finish, Piece, Usage};
use self::asked::{Chat, Common, Complete, How, Prompt, Refused, shortened};
use self::connections::Document;
pub use self::connections::serve;
pub use self::counters::Counters;
use self::counters::UnderWay;
use self::told::{Heading, Sort};

/// Bytes of a request. source: assumed, a context of a hundred thousand tokens as text
const LONGEST_REQUEST: usize = 4 << 20;
/// Answers under way or waiting; whoever comes then is sent away. source: assumed, far more than a home asks at once
const MOST_ACTIVE: u64 = 512;
/// Tokens of a completion, if nobody says how many. source: OpenAI's API reference, `max_tokens`
const USUAL_COMPLETION: u32 = 16;

/// The page to chat on.
const PAGE: &str = include_str!("page.html");

/// What the handlers share.
pub struct House {
    /// Where guests go in.
    pub door: mpsc::UnboundedSender<Guest>,
    /// The model's.
    pub tokenizer: Arc<Tokenizer>,
    /// The model's, or why there is none.
    pub template: Result<ChatTemplate, String>,
    /// What the model is called.
    pub model: Arc<str>,
    /// Positions that each sequence has.
    pub context: u32,
    /// Tokens of the vocabulary.
    pub vocabulary: u32,
    /// What has been done.
    pub counters: Arc<Counters>,
    /// What who asks must know, unless it is somebody on this machine.
    pub token: Option<String>,
    /// Which device does what, now.
    pub plan: Mutex<Plan>,
    /// When the server began, in seconds since 1970.
    pub since: u64,
    /// Requests so far.
    pub asked: AtomicU64,
}

/// Seconds since 1970.
#[allow(clippy::disallowed_methods)] // clients are told when an answer was made
pub fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// All that is answered.
pub fn router(house: Arc<House>) -> Router {
    let guarded = Router::new()
        .route("/v1/chat/completions", post(chat))
        .route("/v1/completions", post(complete))
        .route("/v1/models", get(models))
        .route("/v1/models/{*name}", get(model))
        .route("/metrics", get(metrics))
        .route("/ring", get(ring))
        .layer(middleware::from_fn_with_state(house.clone(), known));
    Router::new()
        .merge(guarded)
        .route("/", get(page))
        .route("/health", get(health))
        .fallback(nothing_here)
        .method_not_allowed_fallback(not_so)
        .layer(DefaultBodyLimit::max(LONGEST_REQUEST))
        .layer(middleware::from_fn_with_state(house.clone(), by_own_name))
        .with_state(house)
}

fn refuse(Refused { status, message, param, code }: &Refused) -> Response {
    let sort = if *status < 500 { "invalid_request_error" } else { "server_error" };
    let status = StatusCode::from_u16(*status).unwrap_or(StatusCode::BAD_REQUEST);
    let mut response = (status, Json(told::error(message, sort, *param, code))).into_response();
    if status == StatusCode::SERVICE_UNAVAILABLE {
        response.headers_mut().insert(header::RETRY_AFTER, header::HeaderValue::from_static("1"));
    }
    response
}

/// Without a token a web page must not get through to this machine by a name that its owner points here.
async fn by_own_name(State(house): State<Arc<House>>, request: Request, next: Next) -> Response {
    let host = request.headers().get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
    if house.token.is_some() || is_own_name(host) {
        return next.run(request).await;
    }
    let message = format!(
        "`{}` is no name of this machine: ask localhost or 127.0.0.1, or start the server with --token",
        shortened(host)
    );
    refuse(&Refused { status: 403, message, param: None, code: "wrong_host" })
}

/// Whether a `Host` header names loopback.
fn is_own_name(host: &str) -> bool {
    let name = host.rsplit_once(':').filter(|(_, port)| port.bytes().all(|byte| byte.is_ascii_digit()));
    let name = name.map_or(host, |(name, _)| name);
    let bare = name.trim_start_matches('[').trim_end_matches(']');
    let is_loopback = bare.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback());
    name.eq_ignore_ascii_case("localhost") || is_loopback
}

/// Who asks must know the token.
async fn known(State(house): State<Arc<House>>, request: Request, next: Next) -> Response {
    let Some(token) = &house.token else { return next.run(request).await };
    let given = request.headers().get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let given =
        given.and_then(|value| value.split_once(' ')).filter(|(how, _)| how.eq_ignore_ascii_case("bearer"));
    if given.is_some_and(|(_, given)| is_same(given.trim(), token)) {
        return next.run(request).await;
    }
    let message =
        "the token is missing or wrong: send `Authorization: Bearer TOKEN` (an API key, for clients)";
    let refused = Refused { status: 401, message: message.into(), param: None, code: "invalid_api_key" };
    refuse(&refused)
}

/// Compared in the same time, however much is right.
fn is_same(given: &str, token: &str) -> bool {
    let differ = given.bytes().zip(token.bytes()).fold(0, |differ, (one, other)| differ | (one ^ other));
    differ == 0 && given.len() == token.len()
}

async fn nothing_here(request: Request) -> Response {
    let message = format!(
        "there is no `{} {}`: see /v1/chat/completions, /v1/completions, /v1/models, /health, /metrics, and / for people",
        request.method(),
        shortened(request.uri().path())
    );
    refuse(&Refused { status: 404, message, param: None, code: "unknown_url" })
}

/// The axum layer below adds which methods there are.
async fn not_so(request: Request) -> Response {
    let path = shortened(request.uri().path());
    let message = format!("`{path}` is not asked with {}: the `Allow` header says how", request.method());
    refuse(&Refused { status: 405, message, param: None, code: "method_not_allowed" })
}

async fn page() -> Html<&'static str> {
    Html(PAGE)
}

async fn health(State(house): State<Arc<House>>) -> Response {
    let is_up = house.counters.is_up();
    let status = if is_up { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Json(json!({"status": if is_up { "ok" } else { "the ring is down" }}))).into_response()
}

async fn metrics(State(house): State<Arc<House>>) -> Response {
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], house.counters.exposed())
        .into_response()
}

async fn ring(State(house): State<Arc<House>>) -> Json<Value> {
    let plan = house.plan.lock().unwrap_or_else(PoisonError::into_inner);
    let device = |(place, device): (usize, &hearth_schema::plan::PlannedDevice)| {
        let layers: u32 = plan.windows(place).iter().map(|window| window.len() as u32).sum();
        json!({"name": device.name, "layers": layers, "window": device.window})
    };
    let devices: Vec<Value> = plan.devices.iter().enumerate().map(device).collect();
    Json(json!({
        "model": &*house.model,
        "rounds": plan.rounds,
        "sequences": plan.sequences,
        "context": house.context,
        "can_chat": house.template.is_ok(),
        "devices": devices,
        "seen": house.counters.seen(),
    }))
}

fn card(house: &House) -> Value {
    json!({"id": &*house.model, "object": "model", "created": house.since, "owned_by": "hearth"})
}

async fn models(State(house): State<Arc<House>>) -> Json<Value> {
    Json(json!({"object": "list", "data": [card(&house)]}))
}

async fn model(State(house): State<Arc<House>>, name: axum::extract::Path<String>) -> Response {
    match of_model(&house, Some(&name)) {
        Ok(()) => Json(card(&house)).into_response(),
        Err(refused) => refuse(&refused),
    }
}

fn of_model(house: &House, name: Option<&str>) -> Result<(), Refused> {
    match name {
        Some(name) if name != &*house.model => {
            let message = format!("there is no model `{}` here: use `{}`", shortened(name), house.model);
            Err(Refused { status: 404, message, param: Some("model"), code: "model_not_found" })
        }
        _ => Ok(()),
    }
}

async fn chat(State(house): State<Arc<House>>, Document(chat): Document<Chat>) -> Response {
    let number = house.number();
    let asked = chat.and_then(|chat| {
        let how = house.how(&chat.common, number)?;
        Ok((vec![house.conversation(&chat)?], how))
    });
    answered(&house, (Sort::Chat, number), "chat", asked).await
}

async fn complete(State(house): State<Arc<House>>, Document(complete): Document<Complete>) -> Response {
    let number = house.number();
    let asked = complete.and_then(|complete| {
        let how = house.how(&complete.common, number)?;
        let prompts = complete.prompts()?.into_iter().map(|prompt| house.tokens(prompt));
        Ok((prompts.collect::<Result<_, _>>()?, How { most: how.most.or(Some(USUAL_COMPLETION)), ..how }))
    });
    answered(&house, (Sort::Completion, number), "completions", asked).await
}

async fn answered(
    house: &Arc<House>,
    (sort, number): (Sort, u64),
    endpoint: &'static str,
    asked: Result<(Vec<Vec<u32>>, How), Refused>,
) -> Response {
    let begun = asked.and_then(|(prompts, how)| Ok((house.begin(prompts, &how)?, how)));
    let response = match begun {
        Err(refused) => refuse(&refused),
        Ok((answers, how)) => {
            let prefix = if sort == Sort::Chat { "chatcmpl" } else { "cmpl" };
            let id = format!("{prefix}-{}-{number}", house.since);
            let heading = Heading { sort, id, created: now(), model: house.model.clone() };
            if how.stream {
                told::in_pieces(heading, answers, how.include_usage)
            } else {
                whole(&heading, answers).await
            }
        }
    };
    house.counters.answered(endpoint, response.status().as_u16());
    response
}

/// Waits for all of the answers, at once: each one's first token is seen when it comes. Given up, it gives them up.
async fn whole(heading: &Heading, answers: Vec<(Answer, UnderWay)>) -> Response {
    let mut coming = JoinSet::new();
    for (place, (answer, under_way)) in answers.into_iter().enumerate() {
        coming.spawn(async move { (place, in_full(answer, under_way).await) });
    }
    let mut ended = BTreeMap::new();
    while let Some(one) = coming.join_next().await {
        let one = one.map_err(|error| error.to_string()).and_then(|(place, one)| Ok((place, one?)));
        match one {
            Ok((place, one)) => ended.insert(place, one),
            Err(message) => {
                return refuse(&Refused { status: 503, message, param: None, code: "ring_failed" });
            }
        };
    }
    let (texts, usages): (Vec<_>, Vec<_>) = ended.into_values().unzip();
    Json(heading.whole(texts, told::sum(usages.into_iter()))).into_response()
}

/// Waits for an answer: its text, why it ended, and what it took; or why it failed.
async fn in_full(mut answer: Answer, mut under_way: UnderWay) -> Result<((String, Finish), Usage), String> {
    let (mut text, mut finish) = (String::new(), Finish::Length);
    while let Some(piece) = answer.next().await {
        match piece {
            Piece::Text(more) => {
                under_way.text();
                text += &more;
            }
            Piece::End(why) => finish = why,
            Piece::Failed(why) => {
                under_way.over();
                return Err(why);
            }
        }
    }
    under_way.over();
    under_way.took(answer.usage());
    Ok(((text, finish), answer.usage()))
}

impl House {
    /// From now on the ring is one of this plan.
    pub fn goes_by(&self, plan: &Plan) {
        self.plan.lock().unwrap_or_else(PoisonError::into_inner).clone_from(plan);
    }

    /// A number that no other request has.
    fn number(&self) -> u64 {
        self.asked.fetch_add(1, Ordering::Relaxed)
    }

    fn how(&self, common: &Common, number: u64) -> Result<How, Refused> {
        of_model(self, common.model.as_deref())?;
        // Each request draws of its own; with `seed` it can be asked again.
        common.how(self.since.wrapping_mul(1 << 20).wrapping_add(number))
    }

    fn conversation(&self, chat: &Chat) -> Result<Vec<u32>, Refused> {
        let template = self.template.as_ref().map_err(|why| Refused {
            status: 400,
            message: format!("{why} (/v1/completions goes on from a text)"),
            param: None,
            code: "no_chat_template",
        })?;
        let tokens = template.encode(&self.tokenizer, &chat.messages()?);
        tokens.map_err(|error| Refused::invalid("messages", error.to_string()))
    }

    fn tokens(&self, prompt: Prompt) -> Result<Vec<u32>, Refused> {
        let tokens = match prompt {
            Prompt::Text(text) => {
                let tokens = self.tokenizer.encode(&text, false);
                tokens.map_err(|error| Refused::invalid("prompt", error.to_string()))?
            }
            Prompt::Tokens(tokens) => tokens,
        };
        match tokens.iter().find(|&&token| token >= self.vocabulary) {
            _ if tokens.is_empty() => Err(Refused::invalid("prompt", "the prompt is empty: give some text")),
            Some(token) => {
                let what = format!("there is no token {token}: the vocabulary has {}", self.vocabulary);
                Err(Refused::invalid("prompt", what))
            }
            None => Ok(tokens),
        }
    }

    /// Lets guests with these prompts in.
    fn begin(&self, prompts: Vec<Vec<u32>>, how: &How) -> Result<Vec<(Answer, UnderWay)>, Refused> {
        let busy =
            |message: &str, code| Err(Refused { status: 503, message: message.into(), param: None, code });
        if !self.counters.is_up() {
            return busy(
                "the ring is down, and comes up again as soon as its devices are there: try later",
                "ring_down",
            );
        }
        if self.counters.active() + prompts.len() as u64 > MOST_ACTIVE {
            return busy("too many requests wait already: try later", "overloaded");
        }
        let sampler = Sampler::new(how.sampler).map_err(|error| {
            let param = if let ExecError::Sampling { name, .. } = &error { *name } else { "temperature" };
            Refused::invalid(param, error.to_string())
        })?;
        let mut guests = Vec::new();
        for (number, prompt) in (0..).zip(prompts) {
            let generate = self.room(prompt.len() as u64, how)?;
            let (said, heard) = mpsc::unbounded_channel();
            let answer = Answer::new(heard, self.tokenizer.clone(), prompt.len() as u32, how.stops.clone());
            let mut sampler = sampler.for_sequence(number);
            let sample = Box::new(move |logits: &[f32]| sampler.sample(logits));
            guests.push((Guest { prompt, generate, sample, said }, answer));
        }
        let begin = |(guest, answer)| {
            // Nobody takes it at the very end.
            if let Err(mpsc::error::SendError(guest)) = self.door.send(guest) {
                let _ = guest.said.send(Said::Failed("the server is stopping".into()));
            }
            (answer, self.counters.begin())
        };
        Ok(guests.into_iter().map(begin).collect())
    }

    /// How many tokens an answer to so many can have.
    fn room(&self, prompt: u64, how: &How) -> Result<u32, Refused> {
        let context = u64::from(self.context);
        let left = context.saturating_sub(prompt);
        let wanted = how.most.map_or(left, u64::from);
        if left == 0 || wanted > left {
            let message = format!(
                "a request has a context of {context} tokens; {prompt} of the prompt and {wanted} of the answer do not \
                 fit: shorten what is asked, or `max_tokens`"
            );
            return Err(Refused {
                status: 400,
                message,
                param: Some("max_tokens"),
                code: "context_length_exceeded",
            });
        }
        Ok(wanted as u32)
    }
}

/// What a token must look like to be sent in a header.
pub fn is_token(text: &str) -> bool {
    header::HeaderValue::from_str(text).is_ok() && !text.contains(char::is_whitespace)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_loopback_are_this_machines() {
        for own in ["localhost", "LOCALHOST:8080", "127.0.0.1:80", "127.3.2.1", "[::1]:8080", "[::1]"] {
            assert!(is_own_name(own), "{own}");
        }
        for other in
            ["", "example.org", "localhost.example.org:8080", "10.0.0.1:8080", "127.0.0.1.nip.io", "0.0.0.0"]
        {
            assert!(!is_own_name(other), "{other}");
        }
    }

    #[test]
    fn a_token_is_compared_whole() {
        assert!(is_same("secret", "secret"));
        assert!(!is_same("secre", "secret") && !is_same("secrets", "secret") && !is_same("", "secret"));
        assert!(is_token("abc-DEF_123") && !is_token("a b") && !is_token("a\nb"));
    }
}
