//! Entries of the fuzz targets: tokenizers and chat templates of model files.
//!
//! An entry gets arbitrary bytes. It calls the parser, and panics if the result violates a property. The fuzz targets
//! (`fuzz/`) and the tests below call the entries; no program contains them.

use std::sync::LazyLock;

use hearth_profiles::gguf::{Array, Metadata, Value};

use crate::tokenizer::{token_type, visible_char};
use crate::{ChatMessage, ChatTemplate, IncrementalDetokenizer, Tokenizer};

/// Returns the maximum memory of an entry for an input of this length, in bytes, without the thread of a chat template.
/// source: assumed; regular expressions take a few MiB, and a word or token a few hundred bytes in several tables
pub fn allowed_memory(input_bytes: usize) -> usize {
    (64 << 20) + 1000 * input_bytes
}

/// Builds a tokenizer from the metadata that the input describes ([`read_metadata`]), then encodes and decodes a text.
///
/// - All tokens are in the vocabulary.
/// - Text of a user, escaped or not, never becomes a token that ends a turn.
/// - Incremental decoding gives the same text as decoding all bytes at once.
pub fn tokenizer(input: &[u8]) {
    let (metadata, text) = read_metadata(&String::from_utf8_lossy(input));
    let Ok(tokenizer) = Tokenizer::new(&metadata) else { return };
    let count = metadata.get_str_array("tokenizer.ggml.tokens").ok().flatten().map_or(0, <[_]>::len);
    let escaped = tokenizer.escape_control_tokens(&text, &[]);
    // A vocabulary may have no tokens for some bytes of the text.
    let Ok(from_template) = tokenizer.encode_template(&escaped) else { return };
    for (ids, is_text) in [(tokenizer.encode(&text, true), false), (tokenizer.encode(&text, false), true)] {
        let Ok(ids) = ids else { return };
        assert!(ids.iter().all(|&id| (id as usize) < count));
        assert!(!is_text || !contains_end(&tokenizer, &ids), "the text of a user ends a turn: {ids:?}");
        let bytes: Vec<u8> = ids.iter().flat_map(|&id| tokenizer.token_bytes(id)).copied().collect();
        let mut stream = IncrementalDetokenizer::default();
        let pushed: String = ids.iter().map(|&id| stream.push(&tokenizer, id)).collect();
        // The harmony format is converted.
        let is_plain = !tokenizer.has_harmony();
        assert!(!is_plain || pushed + &stream.finish() == String::from_utf8_lossy(&bytes), "{ids:?}");
        let _ = tokenizer.decode(&ids);
    }
    assert!(!contains_end(&tokenizer, &from_template), "an escaped text ends a turn: {from_template:?}");
}

/// Returns whether tokens contain one that ends a turn, apart from a BOS token in front and an EOS token at the end.
fn contains_end(tokenizer: &Tokenizer, mut ids: &[u32]) -> bool {
    if let [first, rest @ ..] = ids
        && Some(*first) == tokenizer.bos()
    {
        ids = rest;
    }
    if let [rest @ .., last] = ids
        && Some(*last) == tokenizer.eos()
    {
        ids = rest;
    }
    ids.iter().any(|&id| tokenizer.is_eog(id) || tokenizer.is_harmony_token(id))
}

/// Returns the metadata of a tokenizer, and the text to encode. Each line has a key and a value:
///
/// - `token TYPE SCORE TEXT`: a token. `\n` in TEXT is a line end.
/// - `bytes spm` or `bytes bpe`: a token for each byte.
/// - `merge A B`: a merge of byte-level BPE.
/// - `text TEXT`: a line of the text to encode.
/// - `KEY VALUE`: the metadata `tokenizer.ggml.KEY`.
pub(crate) fn read_metadata(input: &str) -> (Metadata, String) {
    let (mut tokens, mut types, mut scores) = (Vec::new(), Vec::new(), Vec::new());
    let (mut merges, mut sample) = (Vec::new(), String::new());
    let mut metadata = Metadata::default();
    let mut put = |key: &str, value| metadata.insert(format!("tokenizer.ggml.{key}"), value);
    for line in input.lines() {
        let (key, value) = line.split_once(' ').unwrap_or((line, ""));
        match key {
            "token" => {
                let mut parts = value.splitn(3, ' ');
                let mut next = || parts.next().unwrap_or_default();
                types.push(next().parse().unwrap_or(token_type::NORMAL));
                scores.push(next().parse().unwrap_or(0.0));
                tokens.push(next().replace("\\n", "\n"));
            }
            "bytes" => {
                for byte in 0..=255u8 {
                    let is_bpe = value == "bpe";
                    types.push(if is_bpe { token_type::NORMAL } else { token_type::BYTE });
                    scores.push(0.0);
                    tokens.push(if is_bpe {
                        visible_char(byte).to_string()
                    } else {
                        format!("<0x{byte:02X}>")
                    });
                }
            }
            "merge" => merges.push(value.to_owned()),
            "text" => sample = sample + value + "\n",
            _ => {
                let value = match (value.parse(), value.parse()) {
                    (Ok(number), _) => Value::U32(number),
                    (_, Ok(flag)) => Value::Bool(flag),
                    _ => Value::Str(value.to_owned()),
                };
                put(key, value);
            }
        }
    }
    put("token_type", Value::Array(Array::I32(types)));
    put("scores", Value::Array(Array::F32(scores)));
    put("tokens", Value::Array(Array::Str(tokens)));
    put("merges", Value::Array(Array::Str(merges)));
    (metadata, sample)
}

/// A small tokenizer for chat templates.
static CHAT_TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| {
    let input = "model llama\nbytes spm\ntoken 3 0 <s>\ntoken 3 0 <|im_start|>\ntoken 3 0 <|im_end|>\n\
        bos_token_id 256\neos_token_id 258\nadd_bos_token false\nadd_space_prefix false\n";
    Tokenizer::new(&read_metadata(input).0).expect("a valid tokenizer")
});

/// Parses a chat template and renders messages with it. The input is the template and then for each message its role
/// and its content, separated by zero bytes.
///
/// - All tokens are in the vocabulary.
/// - The same messages give the same tokens.
pub fn chat_template(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    let mut parts = text.split('\0').map(str::to_owned);
    let mut metadata = Metadata::default();
    metadata.insert("tokenizer.chat_template".into(), Value::Str(parts.next().unwrap_or_default()));
    let tokenizer = &*CHAT_TOKENIZER;
    let Ok(template) = ChatTemplate::new(&metadata, tokenizer) else { return };
    let mut messages = Vec::new();
    while let (Some(role), Some(content)) = (parts.next(), parts.next()) {
        messages.push(ChatMessage::new(role, content));
    }
    if let Ok(ids) = template.encode(tokenizer, &messages, &[]) {
        assert!(ids.iter().all(|&id| id <= 258));
        assert_eq!(template.encode(tokenizer, &messages, &[]).ok(), Some(ids));
    }
}

#[cfg(test)]
#[path = "../../../fuzz/replay.rs"]
mod replay;

#[test]
fn tokenizer_corpus() {
    replay::replay("tokenizer", allowed_memory, tokenizer);
}

#[test]
fn chat_template_corpus() {
    replay::replay("chat_template", allowed_memory, chat_template);
}
