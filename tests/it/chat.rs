//! `hearth execute` formats messages with the model's chat template.

use std::fs;
use std::path::Path;

use hearth_profiles::gguf::{GgufModel, HeaderWriter, Value};
use hearth_ring::LocalModel;

use crate::processes::{error, model, plan, run};

const TEMPLATE: &str = "{% for message in messages %}{{ message.role | upper }}: {{ message.content | trim }}\n\
     {% endfor %}{% if add_generation_prompt %}{{ 'ANSWER:' }}{% endif %}";

/// The trained model with a chat template.
pub fn with_template(path: &Path) {
    let source = model("q4_k");
    let (model, bytes) = (GgufModel::open(&source).expect("a model"), fs::read(&source).expect("a model"));
    let mut writer = HeaderWriter::default();
    for (key, value) in model.metadata.iter() {
        writer.key(key, value.clone()).expect("a key");
    }
    writer.key("tokenizer.chat_template", Value::Str(TEMPLATE.into())).expect("a key");
    for tensor in &model.tensors {
        writer.tensor(&tensor.name, &tensor.dims, tensor.format).expect("a tensor");
    }
    let layout = writer.finish();
    let mut file = layout.header.clone();
    file.resize(layout.file_bytes as usize, 0);
    for (to, from) in layout.tensors.iter().zip(&model.tensors) {
        let range = from.offset as usize..from.end() as usize;
        file[to.offset as usize..to.end() as usize].copy_from_slice(&bytes[range]);
    }
    fs::write(path, file).expect("the copy can be written");
}

/// A plan for that copy, a model with a digest of its own.
pub fn plan_for(path: &str, windows: &[u32], addresses: &[&str], context: u32) -> String {
    let digest = |path: &str| LocalModel::open(Path::new(path)).expect("a model").profile.digest.clone();
    plan("q4_k", windows, addresses, context).replace(&digest(&model("q4_k")), &digest(path))
}

fn tokens(arguments: &[&str]) -> String {
    let output = run(arguments);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    json["token_ids"].to_string()
}

#[test]
fn messages_are_formatted_with_the_template() {
    let folder = tempfile::tempdir().expect("a folder");
    let place = |name: &str| folder.path().join(name).display().to_string();
    let (file, chatty, said) = (place("plan.yaml"), place("chat.gguf"), place("said.json"));
    with_template(Path::new(&chatty));
    fs::write(&file, plan_for(&chatty, &[8], &[], 128)).expect("the plan can be written");
    let execute = ["execute", &file, "--model", &chatty, "--tokens", "8", "--ignore-end", "--json"];
    let asked = |more: &[&str]| tokens(&[&execute[..], more].concat());
    let chat = asked(&["--chat", "--system", "Speak as a king. ", "--prompt", "Who art thou?"]);
    let written = "SYSTEM: Speak as a king.\nUSER: Who art thou?\nANSWER:";
    assert_eq!(chat, asked(&["--prompt", written]));
    let messages = r#"[{"role": "system", "content": "Speak as a king."},
                       {"role": "user", "content": "Who art thou?"}]"#;
    fs::write(&said, messages).expect("the messages can be written");
    assert_eq!(chat, asked(&["--messages", &said]));
    assert_ne!(chat, asked(&["--prompt", "Who art thou?"]));
}

#[test]
fn wrong_messages_are_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let place = |name: &str| folder.path().join(name).display().to_string();
    let (file, said) = (place("plan.yaml"), place("said.json"));
    fs::write(&file, plan("q4_k", &[8], &[], 128)).expect("the plan can be written");
    let execute = ["execute", &file, "--model", &model("q4_k")];
    let text = error(&[&execute[..], &["--chat", "--prompt", "Hello"]].concat(), 2);
    assert!(
        text.contains("no chat template") && text.contains("\nhint:  use an instruction-tuned"),
        "{text}"
    );
    let text = error(&[&execute[..], &["--messages", &place("none.json")]].concat(), 2);
    assert!(text.contains("cannot open the file") && text.contains("\nwhere: "), "{text}");
    fs::write(&said, r#"[{"role": "user", "text": "Hello"}]"#).expect("the messages can be written");
    let text = error(&[&execute[..], &["--messages", &said]].concat(), 2);
    assert!(text.contains("unknown field `text`") && text.contains("said.json:1:"), "{text}");
    assert!(text.contains("\nhint:  write [{\"role\""), "{text}");
    for pair in [["--chat", "--prompt-tokens=8"], ["--chat", "--messages=x"]] {
        let text = error(&[&execute[..], &["--prompt", "x"], &pair].concat(), 2);
        assert!(text.contains("cannot be used with"), "{text}");
    }
    let text = error(&[&execute[..], &["--messages", "-", "--exit-with-stdin"]].concat(), 2);
    assert!(text.contains("cannot both have standard input"), "{text}");
    fs::write(&said, format!(r#"[{{"role": "user", "content": "{}"}}]"#, "word ".repeat(500)))
        .expect("written");
    let chatty = place("chat.gguf");
    with_template(Path::new(&chatty));
    fs::write(&file, plan_for(&chatty, &[8], &[], 128)).expect("the plan can be written");
    let text = error(&["execute", &file, "--model", &chatty, "--messages", &said], 2);
    assert!(text.contains("do not fit the plan's context of 128"), "{text}");
}
