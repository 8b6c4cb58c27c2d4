//! Tokens of texts against llama.cpp's.
//!
//! `data/tokens` has two vocabularies, difficult texts (numbers, contractions, scripts, emoji, white space, control
//! tokens written out) and llama.cpp's tokens of each under every pre-tokenizer; `scripts/peers/llama_cpp_tokens.py`
//! made them.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::PathBuf;

use hearth_profiles::gguf::{GgufModel, Metadata, Value};
use hearth_runtime::Tokenizer;
use serde::Deserialize;

#[derive(Deserialize)]
struct Kept {
    texts: Vec<String>,
    /// By pre-tokenizer.
    bpe: BTreeMap<String, Answers>,
    /// By whether a space is put in front.
    spm: BTreeMap<String, Answers>,
}

/// Tokens of each text.
#[derive(Deserialize)]
struct Answers {
    /// Without control tokens.
    plain: Vec<Vec<u32>>,
    /// With those that are written out.
    special: Vec<Vec<u32>>,
}

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data/tokens")
}

fn kept() -> Kept {
    serde_json::from_str(&std::fs::read_to_string(folder().join("tokens.json")).unwrap()).unwrap()
}

/// Where llama.cpp departs from the tokenizer that the family publishes: it looks for Chinese characters, a range that
/// has U+2003 (a wide space) in it, in a text whose spaces it has replaced.
const DEPARTURES: [(&str, &str); 2] = [("deepseek-llm", "\u{2003}"), ("deepseek-coder", "\u{2003}")];

/// Control tokens that llama.cpp joins from the pieces of a text in which none should be recognised; a space in front
/// leads to other joins.
const NEVER_JOINED: [&str; 3] = ["<s>", "<|im_start|>", "<|im_end|>"];

/// The keys of a file, one of them with another value.
fn with(file: &Metadata, key: &str, value: Value) -> Metadata {
    let mut metadata = Metadata::default();
    for (name, old) in file.iter().filter(|(name, _)| *name != key) {
        metadata.insert(name.into(), old.clone());
    }
    metadata.insert(key.into(), value);
    metadata
}

fn check(name: &str, metadata: &Metadata, texts: &[String], answers: &Answers) -> String {
    let tokenizer = Tokenizer::new(metadata).unwrap();
    let mut wrong = String::new();
    assert_eq!((texts.len(), texts.len()), (answers.plain.len(), answers.special.len()));
    for (special, wanted) in [(false, &answers.plain), (true, &answers.special)] {
        for (text, wanted) in texts.iter().zip(wanted) {
            let found = tokenizer.encode(text, special).unwrap();
            let joined = name == "false" && !special && NEVER_JOINED.iter().any(|token| text.contains(token));
            let departs = joined || DEPARTURES.iter().any(|&(pre, part)| pre == name && text.contains(part));
            if (&found != wanted) != departs {
                let _ = writeln!(wrong, "{name}, special {special}: {text:?}\n  {wanted:?}\n  {found:?}");
            }
        }
    }
    wrong
}

#[test]
fn every_pre_tokenizer_cuts_as_llama_cpp_does() {
    let kept = kept();
    let file = GgufModel::open(folder().join("bpe.gguf")).unwrap().metadata;
    let mut wrong = String::new();
    for (pre, answers) in &kept.bpe {
        let metadata = with(&file, "tokenizer.ggml.pre", Value::Str(pre.clone()));
        wrong += &check(pre, &metadata, &kept.texts, answers);
    }
    assert!(wrong.is_empty(), "{wrong}");
    assert!(kept.bpe.len() >= 8 && kept.texts.len() >= 60, "too little to mean anything");
    // The vocabulary tells them apart.
    let plain = |pre: &str| &kept.bpe[pre].plain;
    assert!(plain("gpt-2") != plain("llama-bpe") && plain("llama-bpe") != plain("qwen2"));
    assert!(plain("deepseek-llm") != plain("deepseek-v3") && plain("default") != plain("gpt-2"));
}

#[test]
fn sentence_pieces_cut_as_llama_cpp_does() {
    let kept = kept();
    let file = GgufModel::open(folder().join("spm.gguf")).unwrap().metadata;
    let mut wrong = String::new();
    for (prefix, answers) in &kept.spm {
        let metadata = with(&file, "tokenizer.ggml.add_space_prefix", Value::Bool(prefix == "true"));
        wrong += &check(prefix, &metadata, &kept.texts, answers);
    }
    assert!(wrong.is_empty(), "{wrong}");
    assert_eq!(kept.spm.len(), 2);
}
