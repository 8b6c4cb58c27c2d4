//! Tests that compare the tokens of texts with llama.cpp.
//!
//! `data/tokens` has two vocabularies, difficult texts (numbers, contractions, scripts, emoji, white space, the texts
//! of control tokens), and llama.cpp's tokens of each text with every pre-tokenizer. The files were written by
//! `scripts/peers/llama_cpp_tokens.py`.

use std::collections::BTreeMap;
use std::fmt::Write;

use hearth_profiles::gguf::{GgufModel, Metadata, Value};
use hearth_runtime::Tokenizer;
use serde::Deserialize;

use crate::models;

#[derive(Deserialize)]
struct Fixture {
    texts: Vec<String>,
    /// The tokens of the texts with byte-level BPE, by pre-tokenizer.
    bpe: BTreeMap<String, ExpectedTokens>,
    /// The tokens of the texts with `SentencePiece`, by whether a space is added before the text (`true` or `false`).
    spm: BTreeMap<String, ExpectedTokens>,
}

#[derive(Deserialize)]
struct ExpectedTokens {
    /// The tokens of each text if control tokens in the text are treated as text.
    plain: Vec<Vec<u32>>,
    /// The tokens of each text if control tokens in the text are recognised.
    special: Vec<Vec<u32>>,
}

/// Pre-tokenizers and characters for which llama.cpp differs from the published tokenizer of a model family: llama.cpp
/// searches for Chinese characters, with a range that contains U+2003 (em space), in a text whose spaces it has
/// replaced.
const DIFFERENCES: [(&str, &str); 2] = [("deepseek-llm", "\u{2003}"), ("deepseek-coder", "\u{2003}")];

/// Control tokens that llama.cpp produces by merging pieces of a text in which no control token should be recognised.
/// If a space is added before the text, the merges are different.
const NEVER_MERGED: [&str; 3] = ["<s>", "<|im_start|>", "<|im_end|>"];

/// Returns the metadata `file` with the value `value` for the key `key`.
fn with(file: &Metadata, key: &str, value: Value) -> Metadata {
    let mut metadata = Metadata::default();
    for (name, old) in file.iter().filter(|(name, _)| *name != key) {
        metadata.insert(name.into(), old.clone());
    }
    metadata.insert(key.into(), value);
    metadata
}

/// Encodes all texts and compares the tokens with `expected`, whose keys name the values of the metadata key `key`.
fn check(
    file: &str,
    (key, value): (&str, fn(&str) -> Value),
    texts: &[String],
    expected: &BTreeMap<String, ExpectedTokens>,
) {
    let file = GgufModel::open(models::data("tokens").join(file)).unwrap().metadata;
    let mut wrong = String::new();
    for (name, expected) in expected {
        let tokenizer = Tokenizer::new(&with(&file, key, value(name))).unwrap();
        assert_eq!((texts.len(), texts.len()), (expected.plain.len(), expected.special.len()));
        for (special, wanted) in [(false, &expected.plain), (true, &expected.special)] {
            for (text, wanted) in texts.iter().zip(wanted) {
                let found = tokenizer.encode(text, special).unwrap();
                let merged =
                    name == "false" && !special && NEVER_MERGED.iter().any(|token| text.contains(token));
                let differs =
                    merged || DIFFERENCES.iter().any(|&(pre, part)| pre == name && text.contains(part));
                if (&found != wanted) != differs {
                    let _ = writeln!(wrong, "{name}, special {special}: {text:?}\n  {wanted:?}\n  {found:?}");
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
}

#[test]
fn every_pre_tokenizer_splits_like_llama_cpp() {
    let Fixture { texts, bpe, .. } = models::json(&models::data("tokens/tokens.json"));
    check("bpe.gguf", ("tokenizer.ggml.pre", |name| Value::Str(name.into())), &texts, &bpe);
    assert!(bpe.len() >= 8 && texts.len() >= 60, "the fixture is too small");
    // With this vocabulary the pre-tokenizers give different tokens.
    let plain = |pre: &str| &bpe[pre].plain;
    assert!(plain("gpt-2") != plain("llama-bpe") && plain("llama-bpe") != plain("qwen2"));
    assert!(plain("deepseek-llm") != plain("deepseek-v3") && plain("default") != plain("gpt-2"));
}

#[test]
fn sentence_piece_gives_the_tokens_of_llama_cpp() {
    let Fixture { texts, spm, .. } = models::json(&models::data("tokens/tokens.json"));
    check("spm.gguf", ("tokenizer.ggml.add_space_prefix", |name| Value::Bool(name == "true")), &texts, &spm);
    assert_eq!(spm.len(), 2);
}
