//! Tests that `hearth execute` formats messages with the chat template of the model.

use std::fs;
use std::path::Path;

use hearth_profiles::gguf::{GgufModel, HeaderWriter, Value};

use crate::folder::Folder;
use crate::processes::{assert_rejected, execute_arguments, model_path, plan_yaml_for_model, run_json};

const TEMPLATE: &str = "{% for message in messages %}{{ message.role | upper }}: {{ message.content | trim }}\n\
     {% endfor %}{% if add_generation_prompt %}{{ 'ANSWER:' }}{% endif %}";

/// Writes a copy of the trained test model with a chat template.
pub fn write_model_with_template(path: &Path) {
    write_model_with_keys(path, &[]);
}

/// Writes a copy of the trained test model with a chat template and the metadata keys `keys`.
pub fn write_model_with_keys(path: &Path, keys: &[(&str, Value)]) {
    let source = model_path("q4_k");
    let (model, bytes) = (GgufModel::open(&source).expect("a model"), fs::read(&source).expect("a model"));
    let mut writer = HeaderWriter::default();
    for (key, value) in model.metadata.iter() {
        writer.add_key(key, value.clone()).expect("a key");
    }
    writer.add_key("tokenizer.chat_template", Value::Str(TEMPLATE.into())).expect("a key");
    for (key, value) in keys {
        writer.add_key(key, value.clone()).expect("a key");
    }
    for tensor in &model.tensors {
        writer.add_tensor(&tensor.name, &tensor.dims, tensor.format).expect("a tensor");
    }
    let layout = writer.finish();
    let mut file = layout.header.clone();
    file.resize(layout.file_bytes as usize, 0);
    for (to, from) in layout.tensors.iter().zip(&model.tensors) {
        let range = from.offset as usize..from.end_offset() as usize;
        file[to.offset as usize..to.end_offset() as usize].copy_from_slice(&bytes[range]);
    }
    fs::write(path, file).expect("the copy can be written");
}

#[test]
fn messages_are_formatted_with_the_template() {
    let folder = Folder::new();
    let chat_model = folder.path_of("chat.gguf");
    write_model_with_template(Path::new(&chat_model));
    let plan = folder.write("plan.yaml", plan_yaml_for_model(&chat_model, &[8], &[], 128));
    let tokens = |more: &[&str]| {
        let flags = [&["--tokens", "8"], more].concat();
        run_json(&execute_arguments(&plan, &chat_model, &flags))["token_ids"].clone()
    };
    let chat = tokens(&["--chat", "--system", "Speak as a king. ", "--prompt", "Who art thou?"]);
    let formatted = "SYSTEM: Speak as a king.\nUSER: Who art thou?\nANSWER:";
    assert_eq!(chat, tokens(&["--prompt", formatted]));
    let messages = r#"[{"role": "system", "content": "Speak as a king."},
                       {"role": "user", "content": "Who art thou?"}]"#;
    let messages = folder.write("messages.json", messages);
    assert_eq!(chat, tokens(&["--messages", &messages]));
    assert_ne!(chat, tokens(&["--prompt", "Who art thou?"]));
}

#[test]
fn wrong_messages_are_rejected() {
    let folder = Folder::new();
    let plan = folder.write_plan(&[8], &[], 128);
    let wrong = folder.write("wrong.json", r#"[{"role": "user", "text": "Hello"}]"#);
    let cases: [(&[&str], &[&str]); 6] = [
        (&["--chat", "--prompt", "Hello"], &["no chat template", "\nhint:  use an instruction-tuned"]),
        (&["--messages", &folder.path_of("none.json")], &["cannot open the file", "\nwhere: "]),
        (&["--messages", &wrong], &["unknown field `text`", "wrong.json:1:", "\nhint:  write [{\"role\""]),
        (&["--prompt", "x", "--chat", "--prompt-tokens=8"], &["cannot be used with"]),
        (&["--prompt", "x", "--chat", "--messages=x"], &["cannot be used with"]),
        (&["--messages", "-", "--exit-with-stdin"], &["cannot both use standard input"]),
    ];
    for (flags, parts) in cases {
        assert_rejected(&execute_arguments(&plan, &model_path("q4_k"), flags), parts);
    }
    let long = format!(r#"[{{"role": "user", "content": "{}"}}]"#, "word ".repeat(500));
    let (long, chat_model) = (folder.write("long.json", long), folder.path_of("chat.gguf"));
    write_model_with_template(Path::new(&chat_model));
    let plan = folder.write("plan.yaml", plan_yaml_for_model(&chat_model, &[8], &[], 128));
    let parts = ["do not fit in the plan's context of 128"];
    assert_rejected(&execute_arguments(&plan, &chat_model, &["--messages", &long]), &parts);
}
