//! Response bodies of OpenAI's completion endpoints, as one JSON document or as server-sent events (SSE).
//!
//! The bodies are the objects `chat.completion`, `chat.completion.chunk` and `text_completion` of OpenAI's API. While
//! no token is ready, a stream sends SSE comments, so that proxies keep the connection open.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_core::Stream;
use hearth_runtime::Tokenizer;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::answer::{Answer, DeltaWriter, Part};
use crate::connections::ResponseGuard;
use crate::generation::{Chunk, FinishReason, Generation};
use crate::logprobs::{TokenLogprobs, chat_logprobs, completion_logprobs};
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
    pub tokenizer: Arc<Tokenizer>,
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

    /// Returns the complete response.
    pub fn response_json(&self, answers: Vec<FinishedAnswer>, usage: Usage) -> Value {
        let choice = |(index, finished): (usize, FinishedAnswer)| {
            let FinishedAnswer { answer, logprobs, reason } = finished;
            let (key, content) = match self.kind {
                ResponseKind::Chat => ("message", answer.message()),
                ResponseKind::Completion => ("text", answer.text.into()),
            };
            choice_object(index, key, &content, &self.logprobs_json(&logprobs, &mut 0), Some(reason))
        };
        let choices: Vec<Value> = answers.into_iter().enumerate().map(choice).collect();
        self.document(false, &choices, Some(usage))
    }

    fn logprobs_json(&self, tokens: &[TokenLogprobs], offset: &mut usize) -> Value {
        match self.kind {
            _ if tokens.is_empty() => Value::Null,
            ResponseKind::Chat => chat_logprobs(&self.tokenizer, tokens),
            ResponseKind::Completion => completion_logprobs(&self.tokenizer, tokens, offset),
        }
    }

    /// Returns the first chunk of a streamed chat response, which has the role of the message.
    fn role_chunk(&self, index: usize) -> Value {
        let delta = json!({"role": "assistant", "content": ""});
        self.document(true, &[choice_object(index, "delta", &delta, &Value::Null, None)], None)
    }

    fn part_chunk(&self, stream: &mut ChoiceStream, part: &Part, logprobs: &[TokenLogprobs]) -> Value {
        let logprobs = self.logprobs_json(logprobs, &mut stream.offset);
        let (key, content) = match (self.kind, part) {
            (ResponseKind::Chat, part) => ("delta", stream.deltas.delta(part)),
            (ResponseKind::Completion, Part::Text(text)) => ("text", text.as_str().into()),
            (ResponseKind::Completion, _) => ("text", "".into()),
        };
        self.document(true, &[choice_object(stream.index, key, &content, &logprobs, None)], None)
    }

    fn end_chunk(&self, index: usize, reason: FinishReason) -> Value {
        let (key, content) = match self.kind {
            ResponseKind::Completion => ("text", "".into()),
            ResponseKind::Chat => ("delta", json!({})),
        };
        self.document(true, &[choice_object(index, key, &content, &Value::Null, Some(reason))], None)
    }
}

/// An answer that is complete.
#[derive(Debug)]
pub struct FinishedAnswer {
    pub answer: Answer,
    pub logprobs: Vec<TokenLogprobs>,
    pub reason: FinishReason,
}

/// The state of a choice that is streamed.
#[derive(Debug, Default)]
struct ChoiceStream {
    index: usize,
    deltas: DeltaWriter,
    /// The number of characters that were streamed.
    offset: usize,
}

fn choice_object(
    index: usize,
    key: &str,
    content: &Value,
    logprobs: &Value,
    finish: Option<FinishReason>,
) -> Value {
    json!({"index": index, (key): content, "logprobs": logprobs, "finish_reason": finish})
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
        event_tx.send(header.role_chunk(index).to_string()).await.ok()?;
    }
    let mut stream = ChoiceStream { index, ..ChoiceStream::default() };
    while let Some(chunk) = generation.next_chunk().await {
        match chunk {
            Chunk::Parts(mut parts, mut logprobs) => {
                if parts.is_empty() {
                    parts.push(Part::Text(String::new()));
                }
                for part in parts {
                    // The first of several parts has the log-probabilities of all.
                    let document = header.part_chunk(&mut stream, &part, &std::mem::take(&mut logprobs));
                    event_tx.send(document.to_string()).await.ok()?;
                }
            }
            Chunk::End(reason) => {
                event_tx.send(header.end_chunk(index, reason).to_string()).await.ok()?;
            }
            Chunk::Failed(error) => {
                let _ = event_tx.send(error.to_json().to_string()).await;
                return None;
            }
        }
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
