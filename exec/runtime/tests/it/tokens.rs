//! Tests of the tokens of texts against llama.cpp.
//!
//! `data/tokens` has two vocabularies, difficult texts (numbers, contractions, scripts, emoji, white space, the texts
//! of control tokens), and llama.cpp's tokens of each text with every pre-tokenizer. They were written by
//! `scripts/peers/llama_cpp_tokens.py`.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::PathBuf;

use hearth_profiles::gguf::{GgufModel, Metadata, Value};
use hearth_runtime::Tokenizer;
use serde::Deserialize;

#[derive(Deserialize)]
struct Fixture {
    texts: Vec<String>,
    /// The tokens of byte-level BPE, by pre-tokenizer.
    bpe: BTreeMap<String, ExpectedTokens>,
    /// The tokens of `SentencePiece`, by whether a space is added before the text.
    spm: BTreeMap<String, ExpectedTokens>,
}

/// The expected tokens of each text.
#[derive(Deserialize)]
struct ExpectedTokens {
    /// Control tokens are not recognised.
    plain: Vec<Vec<u32>>,
    /// Control tokens are recognised by their text.
    special: Vec<Vec<u32>>,
}

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data/tokens")
}

fn fixture() -> Fixture {
    serde_json::from_str(&std::fs::read_to_string(folder().join("tokens.json")).unwrap()).unwrap()
}

/// Texts for which llama.cpp differs from the published tokenizer of a family: it searches for Chinese characters,
/// with a range that contains U+2003 (em space), in a text whose spaces it has replaced.
const DIFFERENCES: [(&str, &str); 2] = [("deepseek-llm", "\u{2003}"), ("deepseek-coder", "\u{2003}")];

/// Control tokens that llama.cpp produces by merging pieces of a text in which no control token should be recognised.
/// With a space before the text the merges are different.
const NEVER_MERGED: [&str; 3] = ["<s>", "<|im_start|>", "<|im_end|>"];

/// Returns the metadata of a file with another value for one key.
fn with(file: &Metadata, key: &str, value: Value) -> Metadata {
    let mut metadata = Metadata::default();
    for (name, old) in file.iter().filter(|(name, _)| *name != key) {
        metadata.insert(name.into(), old.clone());
    }
    metadata.insert(key.into(), value);
    metadata
}

/// Encodes all texts and returns a description of all differences from the expected tokens.
fn check(name: &str, metadata: &Metadata, texts: &[String], expected: &ExpectedTokens) -> String {
    let tokenizer = Tokenizer::new(metadata).unwrap();
    let mut wrong = String::new();
    assert_eq!((texts.len(), texts.len()), (expected.plain.len(), expected.special.len()));
    for (special, wanted) in [(false, &expected.plain), (true, &expected.special)] {
        for (text, wanted) in texts.iter().zip(wanted) {
            let found = tokenizer.encode(text, special).unwrap();
            let merged = name == "false" && !special && NEVER_MERGED.iter().any(|token| text.contains(token));
            let differs = merged || DIFFERENCES.iter().any(|&(pre, part)| pre == name && text.contains(part));
            if (&found != wanted) != differs {
                let _ = writeln!(wrong, "{name}, special {special}: {text:?}\n  {wanted:?}\n  {found:?}");
            }
        }
    }
    wrong
}

#[test]
fn every_pre_tokenizer_splits_like_llama_cpp() {
    let fixture = fixture();
    let file = GgufModel::open(folder().join("bpe.gguf")).unwrap().metadata;
    let mut wrong = String::new();
    for (pre, expected) in &fixture.bpe {
        let metadata = with(&file, "tokenizer.ggml.pre", Value::Str(pre.clone()));
        wrong += &check(pre, &metadata, &fixture.texts, expected);
    }
    assert!(wrong.is_empty(), "{wrong}");
    assert!(fixture.bpe.len() >= 8 && fixture.texts.len() >= 60, "the fixture is too small");
    // With this vocabulary the pre-tokenizers give different tokens.
    let plain = |pre: &str| &fixture.bpe[pre].plain;
    assert!(plain("gpt-2") != plain("llama-bpe") && plain("llama-bpe") != plain("qwen2"));
    assert!(plain("deepseek-llm") != plain("deepseek-v3") && plain("default") != plain("gpt-2"));
}

#[test]
fn sentence_piece_gives_the_tokens_of_llama_cpp() {
    let fixture = fixture();
    let file = GgufModel::open(folder().join("spm.gguf")).unwrap().metadata;
    let mut wrong = String::new();
    for (prefix, expected) in &fixture.spm {
        let metadata = with(&file, "tokenizer.ggml.add_space_prefix", Value::Bool(prefix == "true"));
        wrong += &check(prefix, &metadata, &fixture.texts, expected);
    }
    assert!(wrong.is_empty(), "{wrong}");
    assert_eq!(fixture.spm.len(), 2);
}
