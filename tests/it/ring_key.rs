//! Tests that a ring with a key accepts only devices with the same key.

use std::time::{Duration, Instant};

use crate::folder::Folder;
use crate::processes::{
    Worker, assert_rejected, execute_arguments, expect_array, hearth_command, model_path, parse_json,
    run_command,
};

const KEY: &str = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f";
const TWO_TOKENS: [&str; 4] = ["--prompt", "And", "--tokens", "2"];

#[test]
fn ring_needs_the_same_key() {
    let folder = Folder::new();
    let key = folder.write_key("ring.key", KEY);
    let other = folder.write_key("other.key", "a phrase that is another key");
    let q4_k = model_path("q4_k");
    let worker = Worker::with_flags(&["--listen", "127.0.0.1:0", "--model", &q4_k, "--key", &key]);
    let plan = folder.write_plan(&[4, 4], &[&worker.address], 64);
    let command = |key: &[&str]| execute_arguments(&plan, &q4_k, &[&TWO_TOKENS[..], key].concat());

    let start = Instant::now();
    assert_rejected(&command(&[]), &["`d1`", "give both devices the same `--key`"]);
    assert_rejected(&command(&["--key", &other]), &["`d1`", "no key or a different key"]);
    assert!(start.elapsed() < Duration::from_secs(6), "both took {:?}", start.elapsed());

    let mut with_file = hearth_command(&command(&["--key", &key, "--json"]));
    let mut with_variable = hearth_command(&command(&["--json"]));
    for command in [&mut with_file, with_variable.env("HEARTH_KEY", KEY)] {
        assert_eq!(expect_array(&parse_json(&run_command(command, 0).0)["token_ids"]).len(), 2);
    }
}

#[test]
fn worker_without_the_key_is_refused() {
    let (folder, worker) = (Folder::new(), Worker::start(&model_path("q4_k")));
    let key = folder.write_key("ring.key", KEY);
    let plan = folder.write_plan(&[4, 4], &[&worker.address], 64);
    let start = Instant::now();
    let command =
        execute_arguments(&plan, &model_path("q4_k"), &[&TWO_TOKENS[..], &["--key", &key]].concat());
    assert_rejected(&command, &["`d1`", "give both devices the same `--key`"]);
    assert!(start.elapsed() < Duration::from_secs(6), "it took {:?}", start.elapsed());
}

#[test]
fn worker_with_a_key_can_listen_on_all_addresses() {
    let folder = Folder::new();
    let key = folder.write_key("ring.key", KEY);
    let worker =
        Worker::with_flags(&["--listen", "0.0.0.0:0", "--model", &model_path("q4_k"), "--key", &key]);
    assert!(worker.address.starts_with("0.0.0.0:"), "{}", worker.address);
}

#[test]
fn wrong_key_is_rejected_at_start() {
    let folder = Folder::new();
    for (key, what) in [
        (folder.write_key("short.key", "hunter2"), "is only 7 bytes long"),
        (folder.path_of("absent.key"), "cannot read the key file"),
        (folder.write("open.key", KEY), "chmod 600"),
    ] {
        let arguments = ["worker", "--listen", "127.0.0.1:0", "--model", &model_path("q4_k"), "--key", &key];
        let text = crate::processes::run_failing_with_code(&arguments, 2);
        assert!(text.contains(what) && text.contains(&key) && !text.contains("hunter2"), "{text}");
    }
}
