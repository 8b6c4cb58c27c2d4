//! The endpoints `/tokenize` and `/detokenize`, with the fields of llama.cpp's server.

use axum::Json;
use serde_json::{Value, json};

use crate::AppState;
use crate::error::ApiError;
use crate::fields::Fields;

/// Maximum length of a text, in bytes, and maximum number of tokens, so that a response has at most some ten megabytes.
/// source: assumed; a text of 100,000 tokens
const MAX_TEXT_BYTES: usize = 512 << 10;
const MAX_TOKENS: usize = 1 << 17;

/// Returns the tokens of the text `content`, with their texts if `with_pieces` is true.
pub fn tokenize(state: &AppState, body: &[u8]) -> Result<Json<Value>, ApiError> {
    let mut fields = Fields::from_json(body)?;
    let content: String = fields.take("content")?.ok_or_else(|| missing("content", "a text"))?;
    if content.len() > MAX_TEXT_BYTES {
        let message =
            format!("`content` has {} bytes: send at most {MAX_TEXT_BYTES} at a time", content.len());
        return Err(ApiError::invalid("content", message));
    }
    let add_special = fields.take("add_special")?.unwrap_or(false);
    let parse_special = fields.take("parse_special")?.unwrap_or(true);
    let with_pieces = fields.take("with_pieces")?.unwrap_or(false);
    fields.reject_others(&["model"])?;
    let tokenizer = &state.tokenizer;
    let encoded = if add_special {
        tokenizer.encode(&content, parse_special)
    } else {
        tokenizer.encode_without_bos(&content, parse_special)
    };
    let tokens = encoded.map_err(|error| ApiError::invalid("content", error.to_string()))?;
    let piece = |&token: &u32| json!({"id": token, "piece": tokenizer.text_of(token)});
    let listed: Value =
        if with_pieces { tokens.iter().map(piece).collect() } else { tokens.as_slice().into() };
    Ok(Json(json!({"tokens": listed, "count": tokens.len(), "max_model_len": state.context_length})))
}

/// Returns the text of the list `tokens`.
pub fn detokenize(state: &AppState, body: &[u8]) -> Result<Json<Value>, ApiError> {
    let mut fields = Fields::from_json(body)?;
    let tokens: Vec<u32> = fields.take("tokens")?.ok_or_else(|| missing("tokens", "a list of token ids"))?;
    fields.reject_others(&["model"])?;
    state.check_tokens("tokens", &tokens)?;
    if tokens.len() > MAX_TOKENS {
        let message = format!("`tokens` has {} tokens: send at most {MAX_TOKENS} at a time", tokens.len());
        return Err(ApiError::invalid("tokens", message));
    }
    Ok(Json(json!({"content": state.tokenizer.decode(&tokens)})))
}

fn missing(name: &'static str, what: &str) -> ApiError {
    ApiError::invalid(name, format!("`{name}` is missing: send {what}"))
}
