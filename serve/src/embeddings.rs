//! The endpoint `/v1/embeddings` of OpenAI's API.
//!
//! The embedding of a text is the final hidden state of its last token, divided by its Euclidean norm, as in the server
//! of llama.cpp. The ring computes it like a prompt after which no token is generated.

use std::sync::{Arc, PoisonError};

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hearth_ring::{Request as RingRequest, ResponseEvent, SequenceOutput};
use hearth_runtime::Tokenizer;
use serde::{Deserialize, Serialize};
use tokio::sync::{Semaphore, mpsc, oneshot};

use crate::AppState;
use crate::body::RequestBody;
use crate::completions::join_all;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::metrics::Usage;
use crate::prompt::{Prompt, prompts};

/// Maximum number of texts in a request. source: OpenAI's API reference
const MAX_INPUTS: usize = 2048;
/// Maximum number of elements of all embeddings in a response, so that it has at most some ten megabytes.
/// source: assumed
const MAX_ELEMENTS: usize = 2 << 20;

/// How an embedding is written in a response.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Encoding {
    #[default]
    Float,
    /// The elements as f32 in little-endian order.
    Base64,
}

/// The validated body of a request.
#[derive(Debug, PartialEq, Eq)]
struct EmbeddingRequest {
    /// The tokens of each text.
    inputs: Vec<Vec<u32>>,
    dimensions: usize,
    encoding: Encoding,
}

// The response is serialised without `serde_json::Value`, which takes several times its memory.
#[derive(Debug, Serialize)]
struct EmbeddingList<'a> {
    object: &'static str,
    data: Vec<EmbeddingObject>,
    model: &'a str,
    usage: EmbeddingUsage,
}

#[derive(Debug, Serialize)]
struct EmbeddingObject {
    object: &'static str,
    index: usize,
    embedding: EncodedEmbedding,
}

#[derive(Debug, PartialEq, Serialize)]
#[serde(untagged)]
enum EncodedEmbedding {
    Float(Vec<f32>),
    Base64(String),
}

#[derive(Debug, Serialize)]
struct EmbeddingUsage {
    prompt_tokens: usize,
    total_tokens: usize,
}

pub async fn create_embeddings(
    State(state): State<Arc<AppState>>,
    body: Result<RequestBody, ApiError>,
) -> Response {
    let answered = async {
        let (request, _guard) = body?.parse(&state, EmbeddingRequest::parse).await?;
        compute(&state, request).await
    };
    let response = answered.await.unwrap_or_else(ApiError::into_response);
    state.metrics.record_response("embeddings", response.status().as_u16());
    response
}

/// Computes the embeddings of all inputs, a few at a time, so that other requests need not wait for all of them.
async fn compute(state: &Arc<AppState>, request: EmbeddingRequest) -> Result<Response, ApiError> {
    let EmbeddingRequest { inputs, dimensions, encoding } = request;
    let slots = state.plan.lock().unwrap_or_else(PoisonError::into_inner).sequences as usize;
    state.check_capacity(inputs.len().min(slots) as u64)?;
    let slots = Arc::new(Semaphore::new(slots));
    let prompt_tokens = inputs.iter().map(Vec::len).sum();
    let embedding = |tokens: Vec<u32>| {
        let (state, slots) = (state.clone(), slots.clone());
        async move {
            // The semaphore is never closed.
            let _slot = slots.acquire().await;
            let hidden = final_hidden_state(&state, tokens).await?;
            Ok(encoding.encode(normalised(hidden, dimensions)))
        }
    };
    let embeddings = join_all(inputs.into_iter().map(embedding)).await?;
    let object = |(index, embedding)| EmbeddingObject { object: "embedding", index, embedding };
    let list = EmbeddingList {
        object: "list",
        data: embeddings.into_iter().enumerate().map(object).collect(),
        model: &state.model_name,
        usage: EmbeddingUsage { prompt_tokens, total_tokens: prompt_tokens },
    };
    Ok(Json(list).into_response())
}

/// Returns the final hidden state `[embedding]` of the last token of a text. Dropping the returned future cancels the
/// request to the ring.
async fn final_hidden_state(state: &AppState, tokens: Vec<u32>) -> Result<Vec<f32>, ApiError> {
    let prompt_tokens = tokens.len() as u32;
    let (response_tx, mut events) = mpsc::unbounded_channel();
    let (embedding_tx, embedding_rx) = oneshot::channel();
    let mut active = state.metrics.start_request();
    let output = SequenceOutput::Embedding(embedding_tx);
    state.send_to_ring(RingRequest { prompt: tokens, max_new_tokens: 1, output, response_tx });
    let mut failure = None;
    while let Some(event) = events.recv().await {
        match event {
            ResponseEvent::Started { .. } => active.record_running(prompt_tokens),
            ResponseEvent::Failed(message) => failure = Some(message),
            // No token follows an embedding.
            ResponseEvent::Token(_) => {}
        }
    }
    active.finish();
    let hidden = embedding_rx.await.map_err(|_| {
        ApiError::ring_failed(failure.unwrap_or_else(|| "the ring ended before the embedding".into()))
    })?;
    active.record_usage(Usage { prompt_tokens, generated_tokens: 0 });
    Ok(hidden)
}

/// Returns the maximum number of texts in a request for embeddings with `dimensions` elements.
fn max_inputs(dimensions: usize) -> usize {
    MAX_INPUTS.min(MAX_ELEMENTS / dimensions).max(1)
}

/// Returns the first `dimensions` elements of a hidden state, divided by their Euclidean norm.
fn normalised(mut hidden: Vec<f32>, dimensions: usize) -> Vec<f32> {
    hidden.truncate(dimensions);
    // The response holds all embeddings.
    hidden.shrink_to_fit();
    let norm = hidden.iter().map(|&element| f64::from(element).powi(2)).sum::<f64>().sqrt();
    if norm > 0.0 {
        for element in &mut hidden {
            *element = (f64::from(*element) / norm) as f32;
        }
    }
    hidden
}

impl Encoding {
    fn encode(self, embedding: Vec<f32>) -> EncodedEmbedding {
        match self {
            Encoding::Float => EncodedEmbedding::Float(embedding),
            Encoding::Base64 => {
                let bytes: Vec<u8> = embedding.into_iter().flat_map(f32::to_le_bytes).collect();
                EncodedEmbedding::Base64(STANDARD.encode(bytes))
            }
        }
    }
}

impl EmbeddingRequest {
    fn parse(state: &AppState, body: &[u8]) -> Result<EmbeddingRequest, ApiError> {
        let mut fields = Fields::from_json(body)?;
        let input = fields.take("input")?;
        let model: Option<String> = fields.take("model")?;
        let dimensions: Option<u32> = fields.take("dimensions")?;
        let encoding = fields.take("encoding_format")?.unwrap_or_default();
        fields.reject_others(&["user"])?;
        state.check_model(model.as_deref())?;
        let length = state.embedding_length()?;
        let dimensions = dimensions.unwrap_or(length);
        if !(1..=length).contains(&dimensions) {
            let message = format!(
                "`dimensions` is {dimensions}: it must be 1 to {length}, the length of the model's embeddings"
            );
            return Err(ApiError::invalid("dimensions", message));
        }
        let dimensions = dimensions as usize;
        let inputs = prompts("input", input, max_inputs(dimensions))?;
        let inputs = inputs.into_iter().map(|input| state.embedding_tokens(input));
        Ok(EmbeddingRequest { inputs: inputs.collect::<Result<_, _>>()?, dimensions, encoding })
    }
}

impl AppState {
    fn embedding_length(&self) -> Result<u32, ApiError> {
        self.embedding_length.as_ref().copied().map_err(|reason| {
            let message = format!("the served model has no embeddings: {reason}");
            ApiError::new(StatusCode::BAD_REQUEST, "no_embeddings", message)
        })
    }

    fn embedding_tokens(&self, input: Prompt) -> Result<Vec<u32>, ApiError> {
        if matches!(&input, Prompt::Text(text) if text.is_empty()) {
            return Err(ApiError::invalid("input", "`input` has an empty text: send some text"));
        }
        let tokens = self.prompt_tokens("input", input, Tokenizer::encode_document)?;
        // The ring reserves the position of a generated token.
        let max_tokens = self.context_length as usize - 1;
        if tokens.len() > max_tokens {
            let message =
                format!("`input` has a text of {} tokens: send at most {max_tokens} tokens", tokens.len());
            return Err(ApiError::context_length_exceeded("input", message));
        }
        Ok(tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn embedding_has_length_one_after_it_is_truncated() {
        // 3, 4 has length 5, and 3 alone has length 3.
        assert_eq!(normalised(vec![3.0, -4.0, 0.0], 3), [0.6, -0.8, 0.0]);
        assert_eq!(normalised(vec![3.0, -4.0, 0.0], 1), [1.0]);
        assert_eq!(normalised(vec![0.0, 0.0], 2), [0.0, 0.0]);
    }

    #[test]
    fn response_has_at_most_two_million_elements() {
        assert_eq!([256, 1024, 4096, 4 << 20].map(max_inputs), [2048, 2048, 512, 1]);
    }

    #[test]
    fn base64_has_the_bytes_of_each_element_in_little_endian_order() {
        // 1.0 is 0x3f800000, so the bytes are 00 00 80 3f.
        assert_eq!(Encoding::Base64.encode(vec![1.0]), EncodedEmbedding::Base64("AACAPw==".into()));
        assert_eq!(Encoding::Float.encode(vec![1.0]), EncodedEmbedding::Float(vec![1.0]));
    }
}
