//! Tests with small vocabularies, whose tokens can be computed by hand.

use std::sync::LazyLock;

use hearth_profiles::gguf::{Array, Metadata, Value};
use proptest::prelude::*;

use super::*;

/// Returns the metadata of a tokenizer with the tokens `texts`, the type `kind` of each token and the additional keys
/// `keys`. Scores decrease with the token id, so that lower ids are merged first.
pub(crate) fn metadata(
    model: &str,
    texts: Vec<String>,
    kind: impl Fn(usize) -> i32,
    keys: &[(&str, Value)],
) -> Metadata {
    let types = (0..texts.len()).map(kind).collect();
    let scores = (0..texts.len()).map(|id| -(id as f32)).collect();
    let mut metadata = Metadata::default();
    let mut put = |name: &str, value| metadata.insert(format!("tokenizer.ggml.{name}"), value);
    put("model", Value::Str(model.into()));
    put("token_type", Value::Array(Array::I32(types)));
    put("scores", Value::Array(Array::F32(scores)));
    put("tokens", Value::Array(Array::Str(texts)));
    for (name, value) in keys {
        put(name, value.clone());
    }
    metadata
}

const SPECIAL_IDS: [(&str, Value); 3] =
    [("unknown_token_id", Value::U32(0)), ("bos_token_id", Value::U32(1)), ("eos_token_id", Value::U32(2))];

/// Returns a vocabulary: three special tokens, 256 byte tokens, and `others` from id 259 on.
fn with_bytes<const N: usize>(others: [&str; N]) -> Vec<String> {
    let mut texts = ["<unk>", "<s>", "</s>"].map(String::from).to_vec();
    texts.extend((0..=255).map(|byte| format!("<0x{byte:02X}>")));
    texts.extend(others.map(String::from));
    texts
}

/// Returns a `SentencePiece` tokenizer with byte tokens, some letters and words.
fn sentence_pieces() -> Tokenizer {
    let texts = with_bytes(["▁a", "ab", "bc", "▁ab", "▁", "a", "b", "c", "▁abc"]);
    let kind = |id| [2, 3, 3].get(id).copied().unwrap_or(if id < 259 { 6 } else { 1 });
    Tokenizer::new(&metadata("llama", texts, kind, &SPECIAL_IDS)).unwrap()
}

#[test]
fn the_merge_with_the_highest_score_comes_first() {
    let tokenizer = sentence_pieces();
    // "▁abc": ▁a (259) is the best pair, then bc (261); "▁a" + "bc" is ▁abc (267), a piece.
    assert_eq!(tokenizer.encode("abc", false).unwrap(), [1, 267]);
    // Without the space in front: ab (260), then c (266).
    let Kind::SentencePiece(pieces) = &tokenizer.kind else { panic!("another tokenizer") };
    let mut ids = Vec::new();
    pieces.encode("abc", false, &mut ids);
    assert_eq!(ids, [260, 266]);
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
    assert!(tokenizer.is_eog(2));
}

#[test]
fn document_has_bos_and_eos_once() {
    let keys = [&SPECIAL_IDS[..], &[("add_eos_token", Value::Bool(true))]].concat();
    let kind = |id| [2, 3, 3].get(id).copied().unwrap_or(if id < 259 { 6 } else { 1 });
    let tokenizer = Tokenizer::new(&metadata("llama", with_bytes(["▁a"]), kind, &keys)).unwrap();
    for text in ["a", "<s>a", "a</s>", "<s>a</s>"] {
        assert_eq!(tokenizer.encode_document(text).unwrap(), [1, 259, 2], "{text}");
    }
    let inside = tokenizer.encode_document("a</s>a").unwrap();
    assert_eq!((inside.iter().filter(|&&id| id == 2).count(), inside.last()), (1, Some(&2)));
    // A model that adds no EOS token has none in the text.
    let ids = sentence_pieces().encode_document("a</s>").unwrap();
    assert!(ids[0] == 1 && !ids.contains(&2), "{ids:?}");
}

#[test]
fn text_of_a_user_cannot_be_a_control_token() {
    let tokenizer = sentence_pieces();
    // The text of the user is escaped; the text of the template is not.
    let escaped = tokenizer.escape_control_tokens("a</s>", &[]);
    let ids = tokenizer.encode_template(&format!("<s>{escaped}</s>")).unwrap();
    let end = ids.iter().filter(|&&id| id == 2).count();
    assert_eq!((ids[0], ids.last(), end), (1, Some(&2), 1));
    assert_eq!(ids[1..ids.len() - 1], tokenizer.encode("a</s>", false).unwrap()[1..]);
    // Escape characters in the text of a user have no effect.
    let escape = |text| tokenizer.escape_control_tokens(text, &[]);
    assert_eq!(escape("<\u{fdd0}/s>"), escape("</s>"));
}

#[test]
fn text_of_a_user_cannot_be_a_control_token_of_one_character() {
    let mut keys = SPECIAL_IDS;
    keys[2].1 = Value::U32(259);
    let kind = |id| [2, 3].get(id).copied().unwrap_or(if (3..259).contains(&id) { 6 } else { 1 });
    let tokenizer = Tokenizer::new(&metadata("llama", with_bytes(["a", "b"]), kind, &keys)).unwrap();
    let ids = tokenizer.encode_template(&tokenizer.escape_control_tokens("bab", &[])).unwrap();
    assert_eq!(ids.last_chunk(), Some(&[260, 3 + u32::from(b'a'), 260]), "`a` is the EOS token: {ids:?}");
}

#[test]
fn turn_ends_are_control_tokens_regardless_of_their_type_in_the_file() {
    // The first three are user-defined, and `</s` is a piece from which `</s>` could be merged.
    let others = ["<start_of_turn>", "<end_of_turn>", "</think>", "</", "</s", "<", "/", "s", ">"];
    let kind = |id| match id {
        1 | 2 | 259..=261 => 4,
        0..259 => 6,
        _ => 1,
    };
    let tokenizer = Tokenizer::new(&metadata("llama", with_bytes(others), kind, &SPECIAL_IDS)).unwrap();
    assert!(tokenizer.is_eog(2) && tokenizer.is_eog(260) && !tokenizer.is_eog(261));
    let ids = tokenizer.encode("</s><end_of_turn><start_of_turn></think>", false).unwrap();
    assert!(ids[1..].iter().all(|&id| !matches!(id, 1 | 2 | 259 | 260)) && ids.contains(&261), "{ids:?}");
    let template =
        format!("<start_of_turn>{}<end_of_turn>", tokenizer.escape_control_tokens("<end_of_turn></s>", &[]));
    let ids = tokenizer.encode_template(&template).unwrap();
    assert_eq!(ids.iter().filter(|&&id| matches!(id, 2 | 260)).count(), 1, "{ids:?}");
    assert!(tokenizer.token_bytes(260).is_empty());
}

#[test]
fn messages_in_the_harmony_format_are_one_answer() {
    let marks = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"];
    let kind = |id| if (3..259).contains(&id) { 6 } else { 3 };
    let tokenizer = |count: usize| {
        let mut texts = with_bytes(marks);
        texts.truncate(259 + count);
        let keys = [&SPECIAL_IDS[..], &[("add_space_prefix", Value::Bool(false))]].concat();
        Tokenizer::new(&metadata("llama", texts, kind, &keys)).unwrap()
    };
    let (with, without) = (tokenizer(6), tokenizer(4));
    assert!(with.has_harmony() && !without.has_harmony());
    assert_eq!([262, 263, 264].map(|id| with.is_eog(id)), [false, true, true]);
    assert!(without.is_eog(262), "elsewhere `<|end|>` ends the answer");
    let answer =
        "<|channel|>analysis<|message|>H\u{e9}<|end|><|start|>assistant<|channel|>final<|message|>No";
    let ids = with.encode_without_bos(answer, true).unwrap();
    let mut stream = IncrementalDetokenizer::default();
    let text: String = ids.iter().map(|&id| stream.push(&with, id)).collect();
    assert_eq!(text, "<think>H\u{e9}</think>\n\nNo");
}

#[test]
fn many_special_tokens_are_found_quickly() {
    let mut texts: Vec<String> = (0..=255).map(|byte| format!("<0x{byte:02X}>")).collect();
    texts.extend((0..100_000).map(|number| format!("<{number}>")));
    let kind = |id| if id < 256 { 6 } else { 3 };
    let keys = [("add_bos_token", Value::Bool(false)), ("add_space_prefix", Value::Bool(false))];
    let tokenizer = Tokenizer::new(&metadata("llama", texts, kind, &keys)).unwrap();
    let text = "<7><".repeat(20_000);
    let ids = tokenizer.encode(&text, true).unwrap();
    assert_eq!((ids.len(), ids[0], ids[1]), (40_000, 256 + 7, u32::from(b'<')));
    assert_eq!(tokenizer.escape_control_tokens(&text, &[]).len(), text.len() + 40_000 * 3);
}

#[test]
fn incomplete_characters_are_buffered() {
    let tokenizer = sentence_pieces();
    let mut stream = IncrementalDetokenizer::default();
    assert_eq!(stream.push(&tokenizer, 3 + 0xc3), "");
    assert_eq!(stream.push(&tokenizer, 3 + 0xa9), "é");
    assert_eq!(stream.push(&tokenizer, 3 + 0xff), "\u{fffd}");
    assert_eq!(stream.push(&tokenizer, 3 + 0xe2), "");
    assert_eq!(stream.finish(), "\u{fffd}");
}

#[test]
fn an_unknown_pre_tokenizer_is_an_error() {
    let metadata = metadata("gpt2", vec!["a".into()], |_| 1, &[("pre", Value::Str("klingon".into()))]);
    let error = Tokenizer::new(&metadata).unwrap_err().to_string();
    let start = "pre-tokenizer `klingon` is not supported; use a model with one of gpt-2, ";
    assert!(error.starts_with(start) && error.contains(" qwen2, "), "{error}");
}

/// Returns a byte-level BPE tokenizer with the pre-tokenizer `pre`, all bytes, and the merges `12`, `123` and `1234`.
fn byte_level(pre: &str) -> Tokenizer {
    let mut texts: Vec<String> = (0..=255).map(|byte| visible_char(byte).to_string()).collect();
    texts.extend(["12", "123", "1234", "<|eot|>"].map(String::from));
    let merges = ["1 2", "12 3", "123 4"].map(String::from).to_vec();
    let keys = [
        ("pre", Value::Str(pre.into())),
        ("merges", Value::Array(Array::Str(merges))),
        ("add_bos_token", Value::Bool(false)),
    ];
    let kind = |id| if id == 259 { 3 } else { 1 };
    Tokenizer::new(&metadata("gpt2", texts, kind, &keys)).unwrap()
}

#[test]
fn the_pre_tokenizer_decides_what_can_be_merged() {
    // GPT-2 does not split a run of digits; Llama 3 splits it after three digits.
    assert_eq!(byte_level("gpt-2").encode("1234", false).unwrap(), [258]);
    assert_eq!(byte_level("llama-bpe").encode("1234", false).unwrap(), [257, u32::from(b'4')]);
    assert_eq!(byte_level("qwen2").encode("12", false).unwrap(), [b'1', b'2'].map(u32::from));
    assert_eq!(byte_level("llama-bpe").encode("é<|eot|>", true).unwrap(), [0xc3, 0xa9, 259]);
}

#[test]
fn a_byte_without_a_token_is_an_error_of_the_texts_that_need_it() {
    let mut texts: Vec<String> = (0..=255).map(|byte| visible_char(byte).to_string()).collect();
    texts[4] = "unused".into();
    let keys = [
        ("pre", Value::Str("smollm".into())),
        ("merges", Value::Array(Array::Str(vec![]))),
        ("add_bos_token", Value::Bool(false)),
    ];
    let tokenizer = Tokenizer::new(&metadata("gpt2", texts, |_| 1, &keys)).unwrap();
    assert_eq!(tokenizer.encode("ab", false).unwrap(), [b'a', b'b'].map(u32::from));
    for text in ["\u{4}", "a\u{4}b", "ab\u{4}"] {
        let error = tokenizer.encode(text, false).unwrap_err().to_string();
        assert!(error.contains("no token for the byte 0x04"), "{error}");
    }
}

#[test]
fn gemma_4_merges_characters_and_spaces() {
    let mut texts: Vec<String> = (0..=255).map(|byte| format!("<0x{byte:02X}>")).collect();
    texts.extend(["a", "\u{2581}", "\u{2581}a", "\n", "\n\n", "<bos>"].map(String::from));
    let kind = |id| if id < 256 { 6 } else { 1 };
    let keys = [
        ("merges", Value::Array(Array::Str(vec!["\u{2581} a".into()]))),
        ("bos_token_id", Value::U32(261)),
        // Wrong in published files.
        ("add_bos_token", Value::Bool(false)),
    ];
    let tokenizer = Tokenizer::new(&metadata("gemma4", texts, kind, &keys)).unwrap();
    let ids = tokenizer.encode("a a\n\né", false).unwrap();
    assert_eq!(ids, [261, 256, 258, 260, 0xc3, 0xa9]);
    assert_eq!(tokenizer.decode(&ids), "a a\n\né");
}

#[test]
fn a_merge_without_a_token_is_an_error() {
    let bytes: Vec<String> = (0..=255).map(|byte| visible_char(byte).to_string()).collect();
    // The result of the second merge is longer than every token.
    for merge in ["a b", "\u{120} \u{121}"] {
        let keys = [("merges", Value::Array(Array::Str(vec![merge.into()])))];
        let error = Tokenizer::new(&metadata("gpt2", bytes.clone(), |_| 1, &keys)).unwrap_err().to_string();
        assert!(error.contains("merge"), "{error}");
    }
}

#[test]
fn text_does_not_become_a_control_token_with_the_same_text() {
    let mut texts: Vec<String> = (0..=255).map(|byte| visible_char(byte).to_string()).collect();
    texts.extend(["a", "ab", "ab"].map(String::from));
    let keys = [
        ("pre", Value::Str("llama-bpe".into())),
        ("merges", Value::Array(Array::Str(vec!["a b".into()]))),
        ("bos_token_id", Value::U32(256)),
        ("eos_token_id", Value::U32(258)),
        ("add_bos_token", Value::Bool(false)),
    ];
    let tokenizer = Tokenizer::new(&metadata("gpt2", texts, |_| 1, &keys)).unwrap();
    assert_eq!(tokenizer.encode("a", false).unwrap(), [u32::from(b'a')]);
    assert_eq!(tokenizer.encode("ab", false).unwrap(), [257]);
}

/// A tokenizer for each pre-tokenizer, shared because its regular expressions take long to compile.
static BYTE_LEVEL: LazyLock<[Tokenizer; 6]> = LazyLock::new(|| {
    ["default", "llama-bpe", "qwen2", "deepseek-llm", "deepseek-v3", "smollm"].map(byte_level)
});

proptest! {
    #[test]
    fn byte_level_bpe_round_trips_any_text(text in "\\PC{0,30}") {
        for tokenizer in &*BYTE_LEVEL {
            prop_assert_eq!(tokenizer.decode(&tokenizer.encode(&text, false).unwrap()), text.as_str());
        }
    }

    #[test]
    fn sentence_piece_round_trips_any_text(text in "[abc é▁\u{1f600}]{0,30}") {
        let tokenizer = sentence_pieces();
        let ids = tokenizer.encode(&text, false).unwrap();
        prop_assert_eq!(tokenizer.decode(&ids), text.replace('▁', " "));
    }
}
