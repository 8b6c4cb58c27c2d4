//! Log-probabilities of tokens, in the two formats of OpenAI's API.
//!
//! They are those of the model: neither temperature, penalties, biases nor a grammar change them.

use hearth_runtime::Tokenizer;
use serde_json::{Map, Value, json};

/// What a token that the model excludes gets, because JSON has no infinity. source: OpenAI's API reference
const MIN_LOGPROB: f64 = -9999.0;

/// The log-probabilities of a generated token, and of the most probable tokens at its place.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprobs {
    token: u32,
    logprob: f64,
    /// The most probable tokens first.
    top: Vec<(u32, f64)>,
}

impl TokenLogprobs {
    /// Computes the log-probabilities of `token` and of the `count` most probable tokens from the logits `[vocabulary]`.
    pub fn new(logits: &[f32], token: u32, count: usize) -> Self {
        let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        let sum: f64 = logits.iter().map(|&logit| (f64::from(logit) - max).exp()).sum();
        let logprob = |token: u32| {
            let logit = logits.get(token as usize).copied().unwrap_or(f32::NEG_INFINITY);
            (f64::from(logit) - max - sum.ln()).max(MIN_LOGPROB)
        };
        let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
        let by_logit =
            |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then_with(|| a.cmp(b));
        let count = count.min(ids.len());
        if count > 0 && count < ids.len() {
            ids.select_nth_unstable_by(count - 1, by_logit);
        }
        ids.truncate(count);
        ids.sort_unstable_by(by_logit);
        Self { token, logprob: logprob(token), top: ids.into_iter().map(|id| (id, logprob(id))).collect() }
    }
}

/// Returns the `logprobs` of a choice of a chat completion.
pub fn chat_logprobs(tokenizer: &Tokenizer, tokens: &[TokenLogprobs]) -> Value {
    let entry = |token: u32, logprob: f64| json!({"token": tokenizer.text_of(token), "logprob": logprob, "bytes": tokenizer.token_bytes(token)});
    let content = tokens.iter().map(|TokenLogprobs { token, logprob, top }| {
        let mut all = entry(*token, *logprob);
        all["top_logprobs"] = top.iter().map(|&(token, logprob)| entry(token, logprob)).collect();
        all
    });
    json!({"content": content.collect::<Vec<_>>(), "refusal": null})
}

/// Returns the `logprobs` of a choice of a text completion. `offset` is the number of characters before the first token.
pub fn completion_logprobs(tokenizer: &Tokenizer, tokens: &[TokenLogprobs], offset: &mut usize) -> Value {
    let text = |token: u32| tokenizer.text_of(token);
    let offsets = tokens.iter().map(|token| {
        let start = *offset;
        *offset += text(token.token).chars().count();
        start
    });
    let offsets: Vec<usize> = offsets.collect();
    let top = |TokenLogprobs { top, .. }: &TokenLogprobs| {
        Value::Object(
            top.iter().map(|&(token, logprob)| (text(token), logprob.into())).collect::<Map<_, _>>(),
        )
    };
    json!({
        "tokens": tokens.iter().map(|token| text(token.token)).collect::<Vec<_>>(),
        "token_logprobs": tokens.iter().map(|token| token.logprob).collect::<Vec<_>>(),
        "top_logprobs": tokens.iter().map(top).collect::<Vec<_>>(),
        "text_offset": offsets,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probabilities_are_those_of_the_softmax() {
        let logits = [0.0, 2f32.ln(), 5f32.ln(), f32::NEG_INFINITY];
        let found = TokenLogprobs::new(&logits, 1, 2);
        let near = |a: f64, b: f64| (a - b).abs() < 1e-6;
        assert!(near(found.logprob, 0.25f64.ln()), "{found:?}");
        assert!(found.top[0].0 == 2 && near(found.top[0].1, 0.625f64.ln()) && found.top[1].0 == 1);
        let all = TokenLogprobs::new(&logits, 3, 20);
        assert_eq!((all.top.len(), all.logprob), (4, MIN_LOGPROB));
        assert!(TokenLogprobs::new(&logits, 0, 0).top.is_empty());
    }
}
