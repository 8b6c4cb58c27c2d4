//! Response bodies of OpenAI's completion endpoints, as one JSON document or as server-sent events (SSE).
//!
//! The bodies are the objects `chat.completion`, `chat.completion.chunk` and `text_completion` of OpenAI's API. While
//! no token is ready, a stream sends SSE comments, so that proxies keep the connection open.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::http::StatusCode;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_core::Stream;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::connections::ResponseGuard;
use crate::error::ApiError;
use crate::generation::{Chunk, FinishReason, Generation};
use crate::metrics::Usage;

/// The interval between SSE comments in an idle stream.
/// source: assumed, shorter than the minute after which proxies close idle connections
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// Maximum number of server-sent events buffered for a slow client. Further tokens wait in the channel from the ring.
const STREAM_BUFFER_EVENTS: usize = 64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResponseKind {
    Chat,
    Completion,
}

/// The fields that are the same in all chunks of a response.
#[derive(Debug, Clone)]
pub struct ResponseMetadata {
    pub kind: ResponseKind,
    pub id: String,
    /// The time at which the response was created, as a Unix timestamp in seconds.
    pub created: u64,
    pub model: Arc<str>,
}

impl ResponseMetadata {
    /// Returns a complete response or, if `is_chunk`, a streamed chunk. The last chunk has the usage and no choices.
    fn document(&self, is_chunk: bool, choices: &[Value], usage: Option<Usage>) -> Value {
        let object = match (self.kind, is_chunk) {
            (ResponseKind::Chat, false) => "chat.completion",
            (ResponseKind::Chat, true) => "chat.completion.chunk",
            (ResponseKind::Completion, _) => "text_completion",
        };
        let mut document = json!({
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": &*self.model,
            "choices": choices,
        });
        if let Some(usage) = usage {
            document["usage"] = json!({
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.generated_tokens,
                "total_tokens": usage.prompt_tokens + usage.generated_tokens,
            });
        }
        document
    }

    /// Returns the complete response with the text and the finish reason of each choice.
    pub fn response_json(&self, texts: Vec<(String, FinishReason)>, usage: Usage) -> Value {
        let choice = |(index, (text, finish)): (usize, (String, FinishReason))| {
            let (key, content) = match self.kind {
                ResponseKind::Chat => {
                    ("message", json!({"role": "assistant", "content": text, "refusal": null}))
                }
                ResponseKind::Completion => ("text", text.into()),
            };
            choice_object(index, key, &content, Some(finish))
        };
        let choices: Vec<Value> = texts.into_iter().enumerate().map(choice).collect();
        self.document(false, &choices, Some(usage))
    }

    /// Returns the chunk with `text`, or the chunk with the finish reason. If both are `None`, returns the first chunk
    /// of a chat response, which has the role of the message.
    fn text_chunk(&self, index: usize, text: Option<&str>, finish: Option<FinishReason>) -> Value {
        let (key, content) = match (self.kind, text, finish) {
            (ResponseKind::Completion, ..) => ("text", text.unwrap_or_default().into()),
            (ResponseKind::Chat, _, Some(_)) => ("delta", json!({})),
            (ResponseKind::Chat, Some(text), None) => ("delta", json!({"content": text})),
            (ResponseKind::Chat, None, None) => ("delta", json!({"role": "assistant", "content": ""})),
        };
        self.document(true, &[choice_object(index, key, &content, finish)], None)
    }
}

fn choice_object(index: usize, key: &str, content: &Value, finish: Option<FinishReason>) -> Value {
    json!({"index": index, (key): content, "logprobs": null, "finish_reason": finish})
}

/// Returns a response that streams all generations as server-sent events, interleaved.
pub fn stream(
    header: ResponseMetadata,
    generations: Vec<Generation>,
    include_usage: bool,
    guard: Option<ResponseGuard>,
) -> Response {
    let (event_tx, event_rx) = mpsc::channel(STREAM_BUFFER_EVENTS);
    tokio::spawn(async move {
        send_all(header, generations, include_usage, event_tx).await;
        drop(guard);
    });
    Sse::new(EventStream(event_rx)).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)).into_response()
}

/// Sends the chunks of all generations. Cancels all generations if the client disconnects or one generation fails.
async fn send_all(
    header: ResponseMetadata,
    generations: Vec<Generation>,
    include_usage: bool,
    event_tx: mpsc::Sender<String>,
) {
    let mut tasks = JoinSet::new();
    for (index, generation) in generations.into_iter().enumerate() {
        let (header, event_tx) = (header.clone(), event_tx.clone());
        tasks.spawn(async move {
            tokio::select! {
                usage = send_one(&header, index, generation, &event_tx) => usage,
                () = event_tx.closed() => None,
            }
        });
    }
    let mut usages = Vec::new();
    while let Some(finished) = tasks.join_next().await {
        let Ok(Some(usage)) = finished else { return };
        usages.push(usage);
    }
    if include_usage {
        let _ = event_tx.send(header.document(true, &[], Some(usages.into_iter().sum())).to_string()).await;
    }
    let _ = event_tx.send("[DONE]".into()).await;
}

/// Sends the chunks of one generation. Returns the token usage, or `None` if the generation failed or was cancelled.
async fn send_one(
    header: &ResponseMetadata,
    index: usize,
    mut generation: Generation,
    event_tx: &mpsc::Sender<String>,
) -> Option<Usage> {
    if header.kind == ResponseKind::Chat {
        event_tx.send(header.text_chunk(index, None, None).to_string()).await.ok()?;
    }
    while let Some(chunk) = generation.next_chunk().await {
        let document = match chunk {
            Chunk::Text(text) => header.text_chunk(index, Some(&text), None),
            Chunk::End(reason) => header.text_chunk(index, None, Some(reason)),
            Chunk::Failed(message) => {
                let error = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "ring_failed", message);
                let _ = event_tx.send(error.to_json().to_string()).await;
                return None;
            }
        };
        event_tx.send(document.to_string()).await.ok()?;
    }
    Some(generation.usage)
}

/// A stream of server-sent events whose data come from a channel.
struct EventStream(mpsc::Receiver<String>);

impl Stream for EventStream {
    type Item = Result<Event, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context) -> Poll<Option<Self::Item>> {
        self.0.poll_recv(cx).map(|data| data.map(|data| Ok(Event::default().data(data))))
    }
}
