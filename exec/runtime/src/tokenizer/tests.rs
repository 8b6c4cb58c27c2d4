//! Tests with small vocabularies, whose tokens can be computed by hand.

use hearth_profiles::gguf::{Array, Metadata, Value};
use proptest::prelude::*;

use super::*;

fn put(metadata: &mut Metadata, name: &str, value: Value) {
    metadata.insert(format!("tokenizer.ggml.{name}"), value);
}

/// Returns a tokenizer with byte tokens, some letters and words. Scores decrease with the id, so that lower ids are
/// merged first.
fn sentence_pieces() -> Tokenizer {
    let mut texts: Vec<String> = ["<unk>", "<s>", "</s>"].map(String::from).to_vec();
    texts.extend((0..=255).map(|byte| format!("<0x{byte:02X}>")));
    texts.extend(["▁a", "ab", "bc", "▁ab", "▁", "a", "b", "c", "▁abc"].map(String::from));
    let types = (0..texts.len()).map(|id| [2, 3, 3].get(id).copied().unwrap_or(if id < 259 { 6 } else { 1 }));
    let scores = (0..texts.len()).map(|id| -(id as f32));
    let mut metadata = Metadata::default();
    put(&mut metadata, "model", Value::Str("llama".into()));
    put(&mut metadata, "token_type", Value::Array(Array::I32(types.collect())));
    put(&mut metadata, "scores", Value::Array(Array::F32(scores.collect())));
    put(&mut metadata, "tokens", Value::Array(Array::Str(texts)));
    for (name, id) in [("unknown_token_id", 0), ("bos_token_id", 1), ("eos_token_id", 2)] {
        put(&mut metadata, name, Value::U32(id));
    }
    Tokenizer::new(&metadata).unwrap()
}

#[test]
fn the_merge_with_the_highest_score_comes_first() {
    let tokenizer = sentence_pieces();
    // "▁abc": ▁a (259) is the best pair, then bc (261); "▁a" + "bc" is ▁abc (267), a piece.
    assert_eq!(tokenizer.encode("abc", false).unwrap(), [1, 267]);
    // Without the space in front: ab (260), then c (266).
    assert_eq!(tokenizer.encode_continuation("abc", false).unwrap(), [260, 266]);
}

#[test]
fn unknown_characters_are_encoded_as_bytes() {
    let tokenizer = sentence_pieces();
    // ▁ (263), then é as its two bytes 0xC3, 0xA9.
    assert_eq!(tokenizer.encode("é", false).unwrap(), [1, 263, 3 + 0xc3, 3 + 0xa9]);
    assert_eq!(tokenizer.decode(&[1, 263, 3 + 0xc3, 3 + 0xa9]), "é");
}

#[test]
fn special_tokens_are_recognised_only_on_request() {
    let tokenizer = sentence_pieces();
    assert_eq!(tokenizer.encode("a</s>", true).unwrap(), [1, 259, 2]);
    assert!(!tokenizer.encode("a</s>", false).unwrap().contains(&2));
    assert!(tokenizer.is_end(2));
}

#[test]
fn text_of_a_user_cannot_be_a_control_token() {
    let tokenizer = sentence_pieces();
    // The text of the user is guarded; the text of the template is not.
    let guarded = tokenizer.guard("a</s>", &[]);
    let ids = tokenizer.encode_template(&format!("<s>{guarded}</s>")).unwrap();
    let end = ids.iter().filter(|&&id| id == 2).count();
    assert_eq!((ids[0], ids.last(), end), (1, Some(&2), 1));
    assert_eq!(ids[1..ids.len() - 1], tokenizer.encode("a</s>", false).unwrap()[1..]);
    // Guard characters in the text of a user have no effect.
    assert_eq!(tokenizer.guard("<\u{fdd0}/s>", &[]), tokenizer.guard("</s>", &[]));
}

#[test]
fn turn_ends_are_control_tokens_regardless_of_their_type_in_the_file() {
    let mut texts: Vec<String> = ["<unk>", "<s>", "</s>"].map(String::from).to_vec();
    texts.extend((0..=255).map(|byte| format!("<0x{byte:02X}>")));
    // The first three are user-defined, and `</s` is a piece from which `</s>` could be merged.
    texts.extend(
        ["<start_of_turn>", "<end_of_turn>", "</think>", "</", "</s", "<", "/", "s", ">"].map(String::from),
    );
    let types = (0..texts.len()).map(|id| {
        if matches!(id, 1 | 2 | 259..=261) {
            4
        } else if id < 259 {
            6
        } else {
            1
        }
    });
    let mut metadata = Metadata::default();
    put(&mut metadata, "model", Value::Str("llama".into()));
    put(&mut metadata, "token_type", Value::Array(Array::I32(types.collect())));
    put(&mut metadata, "scores", Value::Array(Array::F32(vec![0.0; texts.len()])));
    put(&mut metadata, "tokens", Value::Array(Array::Str(texts)));
    for (name, id) in [("unknown_token_id", 0), ("bos_token_id", 1), ("eos_token_id", 2)] {
        put(&mut metadata, name, Value::U32(id));
    }
    let tokenizer = Tokenizer::new(&metadata).unwrap();
    assert!(tokenizer.is_end(2) && tokenizer.is_end(260) && !tokenizer.is_end(261));
    let ids = tokenizer.encode("</s><end_of_turn><start_of_turn></think>", false).unwrap();
    assert!(ids[1..].iter().all(|&id| !matches!(id, 1 | 2 | 259 | 260)) && ids.contains(&261), "{ids:?}");
    let template = format!("<start_of_turn>{}<end_of_turn>", tokenizer.guard("<end_of_turn></s>", &[]));
    let ids = tokenizer.encode_template(&template).unwrap();
    assert_eq!(ids.iter().filter(|&&id| matches!(id, 2 | 260)).count(), 1, "{ids:?}");
    assert!(tokenizer.bytes_of(260).is_empty());
}

#[test]
fn many_special_tokens_are_found_quickly() {
    let mut texts: Vec<String> = (0..=255).map(|byte| format!("<0x{byte:02X}>")).collect();
    texts.extend((0..100_000).map(|number| format!("<{number}>")));
    let types = (0..texts.len()).map(|id| if id < 256 { 6 } else { 3 });
    let mut metadata = Metadata::default();
    put(&mut metadata, "model", Value::Str("llama".into()));
    put(&mut metadata, "token_type", Value::Array(Array::I32(types.collect())));
    put(&mut metadata, "scores", Value::Array(Array::F32(vec![0.0; texts.len()])));
    put(&mut metadata, "tokens", Value::Array(Array::Str(texts)));
    put(&mut metadata, "add_bos_token", Value::Bool(false));
    put(&mut metadata, "add_space_prefix", Value::Bool(false));
    let tokenizer = Tokenizer::new(&metadata).unwrap();
    let text = "<7><".repeat(20_000);
    let ids = tokenizer.encode(&text, true).unwrap();
    assert_eq!((ids.len(), ids[0], ids[1]), (40_000, 256 + 7, u32::from(b'<')));
    assert_eq!(tokenizer.guard(&text, &[]).len(), text.len() + 40_000 * 3);
}

#[test]
fn incomplete_characters_are_buffered() {
    let tokenizer = sentence_pieces();
    let mut stream = TextStream::default();
    assert_eq!(stream.push(&tokenizer, 3 + 0xc3), "");
    assert_eq!(stream.push(&tokenizer, 3 + 0xa9), "é");
    assert_eq!(stream.push(&tokenizer, 3 + 0xff), "\u{fffd}");
    assert_eq!(stream.push(&tokenizer, 3 + 0xe2), "");
    assert_eq!(stream.finish(), "\u{fffd}");
}

#[test]
fn an_unknown_pre_tokenizer_is_an_error() {
    let mut metadata = Metadata::default();
    put(&mut metadata, "model", Value::Str("gpt2".into()));
    put(&mut metadata, "tokens", Value::Array(Array::Str(vec!["a".into()])));
    put(&mut metadata, "pre", Value::Str("klingon".into()));
    let error = Tokenizer::new(&metadata).unwrap_err().to_string();
    let start = "pre-tokenizer `klingon` is not known; use a model with one of gpt-2, ";
    assert!(error.starts_with(start) && error.contains(" qwen2, "), "{error}");
}

/// Returns a tokenizer with all bytes, and the merges `12`, `123` and `1234`.
fn byte_level(pre: &str) -> Tokenizer {
    let mut texts: Vec<String> = (0..=255).map(|byte| visible_char(byte).to_string()).collect();
    texts.extend(["12", "123", "1234", "<|eot|>"].map(String::from));
    let types = (0..texts.len()).map(|id| if id == 259 { 3 } else { 1 });
    let merges = ["1 2", "12 3", "123 4"].map(String::from).to_vec();
    let mut metadata = Metadata::default();
    put(&mut metadata, "model", Value::Str("gpt2".into()));
    put(&mut metadata, "pre", Value::Str(pre.into()));
    put(&mut metadata, "token_type", Value::Array(Array::I32(types.collect())));
    put(&mut metadata, "merges", Value::Array(Array::Str(merges)));
    put(&mut metadata, "tokens", Value::Array(Array::Str(texts)));
    put(&mut metadata, "add_bos_token", Value::Bool(false));
    Tokenizer::new(&metadata).unwrap()
}

#[test]
fn the_pre_tokenizer_decides_what_can_be_merged() {
    // GPT-2 does not split a run of digits; Llama 3 splits it after three digits.
    assert_eq!(byte_level("gpt-2").encode("1234", false).unwrap(), [258]);
    assert_eq!(byte_level("llama-bpe").encode("1234", false).unwrap(), [257, u32::from(b'4')]);
    assert_eq!(byte_level("qwen2").encode("12", false).unwrap(), [b'1', b'2'].map(u32::from));
    assert_eq!(byte_level("llama-bpe").encode("é<|eot|>", true).unwrap(), [0xc3, 0xa9, 259]);
}

proptest! {
    #[test]
    fn bytes_give_any_text_back(text in "\\PC{0,30}") {
        for pre in ["default", "llama-bpe", "qwen2", "deepseek-llm", "deepseek-v3", "smollm"] {
            let tokenizer = byte_level(pre);
            prop_assert_eq!(tokenizer.decode(&tokenizer.encode(&text, false).unwrap()), text.as_str());
        }
    }

    #[test]
    fn pieces_give_any_text_back(text in "[abc é▁\u{1f600}]{0,30}") {
        let tokenizer = sentence_pieces();
        let ids = tokenizer.encode(&text, false).unwrap();
        prop_assert_eq!(tokenizer.decode(&ids), text.replace('▁', " "));
    }
}
