//! Tests with public models and with the test data of llama.cpp.
//!
//! `scripts/public-models.sh` downloads the files. Without them, each test prints `SKIPPED`. `data/public` has texts,
//! and llama.cpp's tokens of each text (`scripts/peers/llama_cpp_public.py`).

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use hearth_profiles::gguf::{Array, GgufModel, Metadata, Value};
use hearth_runtime::{ChatMessage, ChatTemplate, Tokenizer, ToolSyntax};

use crate::models;

/// The public models, without the ending of their files.
pub const MODELS: [&str; 2] = ["smollm2-135m-instruct-q4_1", "gemma-3-270m-q4_k_m"];

/// Returns the path of a public file; `None` if it was not downloaded.
pub fn public(test: &str, name: &str) -> Option<PathBuf> {
    let folder = std::env::var_os("HEARTH_PUBLIC")
        .map_or_else(|| Path::new(env!("CARGO_TARGET_TMPDIR")).join("../public"), PathBuf::from);
    let path = folder.join(name);
    if path.exists() {
        return Some(path);
    }
    eprintln!("SKIPPED {test}: there is no {}; run scripts/public-models.sh", path.display());
    None
}

/// The vocabularies of llama.cpp whose tokenizer hearth does not have, with a part of the error.
const UNSUPPORTED: [(&str, &str); 1] = [("bert-bge", "tokenizer model `bert` is not supported")];

/// Texts and their tokens, without a BOS token.
fn cases(vocabulary: &Path) -> Vec<(String, Vec<u32>)> {
    let read = |suffix: &str| {
        let path = format!("{}.{suffix}", vocabulary.display());
        String::from_utf8_lossy(&fs::read(path).unwrap()).into_owned()
    };
    let (texts, tokens) = (read("inp"), read("out"));
    let texts = texts.split("\n__ggml_vocab_test__\n").map(str::to_owned);
    let tokens = tokens.lines().map(|line| line.split_whitespace().map(|id| id.parse().unwrap()).collect());
    texts.zip(tokens).collect()
}

#[test]
fn tokens_of_published_vocabularies_equal_those_of_llama_cpp() {
    let test = "tokens_of_published_vocabularies_equal_those_of_llama_cpp";
    let Some(folder) = public(test, "llama.cpp") else { return };
    let (mut wrong, mut count) = (String::new(), 0);
    let mut files: Vec<PathBuf> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    for path in files.into_iter().filter(|path| path.extension().is_some_and(|end| end == "inp")) {
        let path = path.with_extension("");
        let name = path.file_stem().unwrap().to_str().unwrap().trim_start_matches("ggml-vocab-").to_owned();
        let tokenizer = Tokenizer::new(&GgufModel::open(path.clone()).unwrap().metadata);
        if let Some((_, what)) = UNSUPPORTED.iter().find(|(unsupported, _)| *unsupported == name)
            && let Err(error) = &tokenizer
        {
            assert!(error.to_string().contains(what), "{name}: {error}");
            continue;
        }
        let tokenizer = tokenizer.unwrap_or_else(|error| panic!("{name}: {error}"));
        let cases = cases(&path);
        assert!(cases.len() > 40, "{name}: {} cases", cases.len());
        count += 1;
        for (text, expected) in cases {
            let tokens = tokenizer.encode_without_bos(&text, false);
            if tokens.as_ref().ok() != Some(&expected) {
                let _ = writeln!(wrong, "{name}: {text:?}\n  {expected:?}\n  {tokens:?}");
            }
        }
    }
    assert!(wrong.is_empty() && count >= 13, "{count} vocabularies\n{wrong}");
}

/// The models and parts of texts for which llama.cpp differs from the published tokenizer: it takes `</s>` for the end
/// of the text, although in Gemma it is a tag of HTML.
const DIFFERENCES: [(&str, &str); 1] = [("gemma-3-270m-q4_k_m", "</s>")];

#[test]
fn tokens_of_1000_texts_equal_those_of_llama_cpp() {
    let data = models::data("public");
    let texts: Vec<String> = models::json(&data.join("texts.json"));
    assert_eq!(texts.len(), 1000);
    for name in MODELS {
        let test = "tokens_of_1000_texts_equal_those_of_llama_cpp";
        let Some(model) = public(test, &format!("{name}.gguf")) else { continue };
        let tokenizer = Tokenizer::new(&GgufModel::open(model).unwrap().metadata).unwrap();
        let expected: Vec<Vec<u32>> = models::json(&data.join(format!("{name}.json")));
        let mut wrong = String::new();
        for (text, expected) in texts.iter().zip(expected) {
            let tokens = tokenizer.encode_without_bos(text, false);
            let differs = DIFFERENCES.iter().any(|&(model, part)| model == name && text.contains(part));
            if tokens.as_ref().ok() != Some(&expected) && !differs {
                let _ = writeln!(wrong, "{name}: {text:?}\n  {expected:?}\n  {tokens:?}");
            }
        }
        assert!(wrong.is_empty(), "{wrong}");
    }
}

/// The templates that need a variable which transformers does not define either, with a part of the error.
const UNUSABLE_TEMPLATES: [(&str, &str); 1] =
    [("fireworks-ai-llama-3-firefunction-v2.jinja", "`functions` is undefined")];

#[test]
fn every_published_chat_template_loads() {
    let test = "every_published_chat_template_loads";
    let Some(folder) = public(test, "llama.cpp/templates") else { return };
    let file = GgufModel::open(models::folder().join("psalm-7m-q4_k.gguf")).unwrap().metadata;
    let tokenizer = Tokenizer::new(&file).unwrap();
    let (mut wrong, mut count) = (String::new(), 0);
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|end| end != "jinja") {
            continue;
        }
        count += 1;
        let mut metadata = Metadata::default();
        metadata.insert("tokenizer.chat_template".into(), Value::Str(fs::read_to_string(&path).unwrap()));
        let messages = [("user", "Hello"), ("assistant", "Hi!"), ("user", "How are you?")]
            .map(|(role, text)| ChatMessage::new(role, text));
        let rendered = ChatTemplate::new(&metadata, &tokenizer)
            .and_then(|template| template.encode(&tokenizer, &messages, &[]));
        let name = path.file_name().unwrap().to_str().unwrap();
        let unusable = UNUSABLE_TEMPLATES.iter().find(|(template, _)| *template == name);
        let error = rendered.err().map(|error| error.to_string()).unwrap_or_default();
        if error.is_empty() != unusable.is_none() || unusable.is_some_and(|(_, what)| !error.contains(what)) {
            let _ = writeln!(wrong, "{name}: {error:?}");
        }
    }
    assert!(wrong.is_empty() && count >= 70, "{count} templates\n{wrong}");
}

/// Some of the templates whose syntax of calls is found, with the texts before the name and the arguments.
const CALLS: [(&str, &str, &str); 10] = [
    ("MiMo-VL", "<tool_call>\n{\"name\": \"", "\", \"arguments\": "),
    ("Qwen-QwQ-32B", "<tool_call>\n{\"name\": \"", "\", \"arguments\": "),
    ("Qwen-Qwen3-0.6B", "<tool_call>\n{\"name\": \"", "\", \"arguments\": "),
    ("ibm-granite-granite-4.0", "<tool_call>\n{\"name\": \"", "\", \"arguments\": "),
    ("meetkai-functionary-medium-v3.1", "<function=", ">"),
    ("meta-llama-Llama-3.1-8B-Instruct", "{\"name\": \"", "\", \"parameters\": "),
    ("mistralai-Mistral-Nemo-Instruct-2407", "[TOOL_CALLS][{\"name\": \"", "\", \"arguments\": "),
    ("unsloth-mistral-Devstral-Small-2507", "[TOOL_CALLS]", "[ARGS]"),
    (
        "llama-cpp-deepseek-r1",
        "<\u{ff5c}tool\u{2581}calls\u{2581}begin\u{ff5c}><\u{ff5c}tool\u{2581}call\u{2581}begin\u{ff5c}>\
         function<\u{ff5c}tool\u{2581}sep\u{ff5c}>",
        "\n```json\n",
    ),
    ("openai-gpt-oss-120b", "to=functions.", "<|channel|>commentary json<|message|>"),
];

#[test]
fn syntax_of_calls_is_found_in_published_templates() {
    let test = "syntax_of_calls_is_found_in_published_templates";
    let Some(folder) = public(test, "llama.cpp/templates") else { return };
    let ends = [
        "</s>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<|im_end|>",
        "<|call|>",
        "<\u{ff5c}end\u{2581}of\u{2581}sentence\u{ff5c}>",
    ];
    let bytes = (0..=255).map(|byte| format!("<0x{byte:02X}>"));
    let texts: Vec<String> = ends.map(String::from).into_iter().chain(bytes).collect();
    let kinds = (0..texts.len()).map(|id| if id < ends.len() { 3 } else { 6 }).collect();
    let mut metadata = Metadata::default();
    let mut put = |name: &str, value| metadata.insert(format!("tokenizer.ggml.{name}"), value);
    put("model", Value::Str("llama".into()));
    put("scores", Value::Array(Array::F32(vec![0.0; texts.len()])));
    put("token_type", Value::Array(Array::I32(kinds)));
    put("tokens", Value::Array(Array::Str(texts)));
    put("eos_token_id", Value::U32(0));
    put("add_bos_token", Value::Bool(false));
    let tokenizer = Tokenizer::new(&metadata).unwrap();
    let syntax = |path: &Path| {
        let mut metadata = Metadata::default();
        let source = fs::read_to_string(path).unwrap();
        metadata.insert("tokenizer.chat_template".into(), Value::Str(source));
        let template = ChatTemplate::new(&metadata, &tokenizer).ok()?;
        Some(ToolSyntax::of(&template, &tokenizer)).filter(|syntax| syntax.is_native)
    };
    for (name, opening, middle) in CALLS {
        let found = syntax(&folder.join(name).with_added_extension("jinja")).expect(name);
        assert_eq!((&*found.opening, &*found.middle), (opening, middle), "{name}");
        assert!(!found.ending.contains("probe"), "{name}: {found:?}");
    }
    let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let found = files.filter(|path| syntax(path).is_some()).count();
    assert!(found >= 19, "the syntax of {found} templates is found");
}
