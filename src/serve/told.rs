//! How is an answer told: as one document, or in pieces as they come?
//!
//! The shapes of OpenAI's API: `chat.completion` and `chat.completion.chunk`, `text_completion`. Pieces are server-sent
//! events; a comment is sent now and then while nothing comes, so that whoever is between does not hang up.
//!
//! Not here: what is asked ([`super::asked`]).

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_core::Stream;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::answer::{Answer, Finish, Piece, Usage};
use super::counters::UnderWay;

/// Between two signs of life of a stream.
/// source: assumed, below the minute after which proxies hang up
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// Pieces that wait for a reader who is slow. Further tokens wait in the guest's queue.
const PIECES_AHEAD: usize = 64;

/// What is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sort {
    /// A message of a conversation.
    Chat,
    /// Texts that go on.
    Completion,
}

/// What all pieces of one response say of themselves.
#[derive(Debug, Clone)]
pub struct Heading {
    /// What it is.
    pub sort: Sort,
    /// Its name.
    pub id: String,
    /// When it began, in seconds since 1970.
    pub created: u64,
    /// The model's name.
    pub model: Arc<str>,
}

impl Heading {
    fn with(&self, object: &str, choices: &[Value], usage: Option<Usage>) -> Value {
        let mut document = json!({
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": &*self.model,
            "choices": choices,
        });
        if let Some(usage) = usage {
            document["usage"] = told(usage);
        }
        document
    }

    /// A whole answer: a text and why it ended, for each prompt.
    pub fn whole(&self, texts: Vec<(String, Finish)>, usage: Usage) -> Value {
        let choice = |(index, (text, finish)): (usize, (String, Finish))| match self.sort {
            Sort::Chat => json!({
                "index": index,
                "message": {"role": "assistant", "content": text, "refusal": null},
                "logprobs": null,
                "finish_reason": finish,
            }),
            Sort::Completion => {
                json!({"index": index, "text": text, "logprobs": null, "finish_reason": finish})
            }
        };
        let object = match self.sort {
            Sort::Chat => "chat.completion",
            Sort::Completion => "text_completion",
        };
        let choices: Vec<Value> = texts.into_iter().enumerate().map(choice).collect();
        self.with(object, &choices, Some(usage))
    }

    /// More of a text; at first of a chat who speaks, at last why it ended.
    fn piece(&self, index: usize, text: Option<&str>, finish: Option<Finish>) -> Value {
        match self.sort {
            Sort::Chat => {
                let delta = match (text, finish) {
                    (_, Some(_)) => json!({}),
                    (Some(text), None) => json!({"content": text}),
                    (None, None) => json!({"role": "assistant", "content": ""}),
                };
                let choice =
                    json!({"index": index, "delta": delta, "logprobs": null, "finish_reason": finish});
                self.with("chat.completion.chunk", &[choice], None)
            }
            Sort::Completion => {
                let text = text.unwrap_or_default();
                let choice = json!({"index": index, "text": text, "logprobs": null, "finish_reason": finish});
                self.with("text_completion", &[choice], None)
            }
        }
    }

    /// What it took, when all is told.
    fn took(&self, usage: Usage) -> Value {
        let object = match self.sort {
            Sort::Chat => "chat.completion.chunk",
            Sort::Completion => "text_completion",
        };
        self.with(object, &[], Some(usage))
    }
}

fn told(usage: Usage) -> Value {
    json!({
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.generated,
        "total_tokens": usage.prompt + usage.generated,
        "prompt_tokens_details": {"cached_tokens": usage.held},
    })
}

/// The sum of what several answers took.
pub fn sum(usages: impl Iterator<Item = Usage>) -> Usage {
    usages.fold(Usage::default(), |sum, more| Usage {
        prompt: sum.prompt + more.prompt,
        held: sum.held + more.held,
        generated: sum.generated + more.generated,
    })
}

/// An error in the shape that clients know.
pub fn error(message: &str, sort: &str, param: Option<&str>, code: &str) -> Value {
    json!({"error": {"message": message, "type": sort, "param": param, "code": code}})
}

/// Tells answers in pieces, those of several prompts as they come.
pub fn in_pieces(heading: Heading, answers: Vec<(Answer, UnderWay)>, include_usage: bool) -> Response {
    let (sender, pieces) = mpsc::channel(PIECES_AHEAD);
    tokio::spawn(tell(heading, answers, include_usage, sender));
    let events = Events { pieces };
    Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)).into_response()
}

/// Ends, and with it the answers, when nobody listens any more.
async fn tell(
    heading: Heading,
    answers: Vec<(Answer, UnderWay)>,
    include_usage: bool,
    sender: mpsc::Sender<String>,
) {
    let mut usages = Vec::new();
    let (ended, mut ends) = mpsc::unbounded_channel();
    let count = answers.len();
    let mut tasks = tokio::task::JoinSet::new();
    for (index, (answer, under_way)) in answers.into_iter().enumerate() {
        let (heading, sender, ended) = (heading.clone(), sender.clone(), ended.clone());
        tasks.spawn(async move {
            let usage = tokio::select! {
                usage = tell_one(&heading, index, answer, under_way, &sender) => usage,
                () = sender.closed() => None,
            };
            let _ = ended.send(usage);
        });
    }
    drop(ended);
    while let Some(Some(usage)) = ends.recv().await {
        usages.push(usage);
    }
    if usages.len() < count {
        return;
    }
    if include_usage {
        let _ = sender.send(heading.took(sum(usages.into_iter())).to_string()).await;
    }
    let _ = sender.send("[DONE]".into()).await;
}

/// One of them; what it took, unless it was given up.
async fn tell_one(
    heading: &Heading,
    index: usize,
    mut answer: Answer,
    mut under_way: UnderWay,
    sender: &mpsc::Sender<String>,
) -> Option<Usage> {
    if heading.sort == Sort::Chat {
        sender.send(heading.piece(index, None, None).to_string()).await.ok()?;
    }
    while let Some(piece) = answer.next().await {
        let document = match &piece {
            Piece::Text(text) => {
                under_way.text();
                heading.piece(index, Some(text), None)
            }
            Piece::End(finish) => heading.piece(index, None, Some(*finish)),
            Piece::Failed(why) => {
                under_way.over();
                let document = error(why, "server_error", None, "ring_failed");
                let _ = sender.send(document.to_string()).await;
                return None;
            }
        };
        sender.send(document.to_string()).await.ok()?;
    }
    under_way.over();
    under_way.took(answer.usage());
    Some(answer.usage())
}

/// Server-sent events of what comes out of a channel.
struct Events {
    pieces: mpsc::Receiver<String>,
}

impl Stream for Events {
    type Item = Result<Event, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context) -> Poll<Option<Self::Item>> {
        self.pieces.poll_recv(context).map(|piece| piece.map(|piece| Ok(Event::default().data(piece))))
    }
}
