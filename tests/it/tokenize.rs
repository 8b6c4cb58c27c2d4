//! Tests of `hearth tokenize`.

use crate::folder::Folder;
use crate::processes::{assert_rejected, model_path, run_json, run_successfully};

#[test]
fn tokens_of_a_text_and_of_a_file_are_equal() {
    let (folder, model) = (Folder::new(), model_path("q4_k"));
    let ids = |arguments: &[&str]| -> Vec<u64> {
        let json = run_json(&[&["tokenize", &model], arguments].concat());
        let ids = json["tokens"].as_array().expect("tokens").iter();
        ids.map(|token| token["id"].as_u64().expect("an id")).collect()
    };
    let text = "And the LORD said <|eos|> unto them";
    let whole = ids(&[text]);
    let file = folder.write("text.txt", text);
    assert_eq!(ids(&["--file", &file]), whole);
    assert_eq!(ids(&["--no-bos", text]), whole[1..]);
    let control = |arguments: &[&str]| {
        let json = run_json(&[&["tokenize", &model, text], arguments].concat());
        let tokens = json["tokens"].as_array().expect("tokens").clone();
        let control = tokens.into_iter().filter(|token| token["is_control"] == true);
        control.map(|token| token["text"].as_str().expect("text").to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(control(&[]), ["<|bos|>"]);
    assert_eq!(control(&["--special"]), ["<|bos|>", "<|eos|>"]);
    assert_eq!(run_successfully(&["tokenize", &model, text, "--ids"]), format!("{whole:?}\n"));
    let table = run_successfully(&["tokenize", &model, text]);
    assert!(table.lines().next().is_some_and(|line| line.ends_with("  <|bos|>")), "{table}");
    assert!(table.ends_with(&format!("{} tokens\n", whole.len())) && table.contains("\" the\""), "{table}");
}

#[test]
fn wrong_arguments_are_explained() {
    let (folder, model) = (Folder::new(), model_path("q4_k"));
    assert_rejected(&["tokenize", &model], &["<TEXT>"]);
    assert_rejected(&["tokenize", &model, "a", "--chat"], &["no chat template"]);
    let text = folder.write("text.txt", "plain");
    assert_rejected(&["tokenize", &text, "a"], &["text.txt"]);
}
