//! A key keeps other programs out of the ring and lets its devices in.

use std::fs;
use std::path::Path;
use std::time::Duration;

use crate::processes::{Worker, error, hearth, model, plan};

#[allow(clippy::disallowed_methods)] // that nothing hangs is a matter of time
fn now() -> std::time::Instant {
    std::time::Instant::now()
}

const KEY: &str = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f";

fn write(folder: &Path, name: &str, text: &str, mode: u32) -> String {
    let path = folder.join(name);
    fs::write(&path, text).expect("the temporary folder can be written");
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("it is ours");
    }
    path.display().to_string()
}

#[test]
fn ring_needs_the_same_key() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let key = write(folder.path(), "ring.key", KEY, 0o600);
    let other = write(folder.path(), "other.key", "a phrase that is another key", 0o600);
    let q4_k = model("q4_k");
    let worker = Worker::with_key(&q4_k, "127.0.0.1:0", &key);
    let plan = write(folder.path(), "plan.yaml", &plan("q4_k", &[4, 4], &[&worker.address], 64), 0o644);
    let execute = ["execute", &plan, "--model", &q4_k, "--prompt", "And", "--tokens", "4", "--ignore-end"];

    let started = now();
    let text = error(&execute, 2);
    assert!(text.contains("`d1`") && text.contains("give both ends the same --key"), "{text}");
    let text = error(&[&execute[..], &["--key", &other]].concat(), 2);
    assert!(text.contains("`d1`") && text.contains("no key or another one"), "{text}");
    assert!(started.elapsed() < Duration::from_secs(6), "both took {:?}", started.elapsed());

    let with_file = hearth(&[&execute[..], &["--key", &key, "--json"]].concat()).output().expect("it starts");
    let with_variable =
        hearth(&[&execute[..], &["--json"]].concat()).env("HEARTH_KEY", KEY).output().expect("it starts");
    for output in [with_file, with_variable] {
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{text}");
        let json: serde_json::Value = serde_json::from_slice(&output.stdout).expect("one JSON document");
        assert_eq!(json["token_ids"].as_array().expect("tokens").len(), 4);
    }
}

#[test]
fn worker_without_the_key_is_refused() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let key = write(folder.path(), "ring.key", KEY, 0o600);
    let worker = Worker::start(&model("q4_k"));
    let plan = write(folder.path(), "plan.yaml", &plan("q4_k", &[4, 4], &[&worker.address], 64), 0o644);
    let started = now();
    let text = error(&["execute", &plan, "--model", &model("q4_k"), "--prompt", "And", "--key", &key], 2);
    assert!(text.contains("`d1`") && text.contains("give both ends the same --key"), "{text}");
    assert!(started.elapsed() < Duration::from_secs(6), "it took {:?}", started.elapsed());
}

#[test]
fn worker_with_a_key_may_listen_everywhere() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let key = write(folder.path(), "ring.key", KEY, 0o600);
    let worker = Worker::with_key(&model("q4_k"), "0.0.0.0:0", &key);
    assert!(worker.address.starts_with("0.0.0.0:"), "{}", worker.address);
}

#[test]
fn wrong_key_is_refused_at_start() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let short = write(folder.path(), "short.key", "hunter2", 0o600);
    let open = write(folder.path(), "open.key", KEY, 0o644);
    let absent = folder.path().join("absent.key").display().to_string();
    let mut cases = vec![(short, "is only 7 bytes long"), (absent, "cannot read the key file")];
    if cfg!(unix) {
        cases.push((open, "chmod 600"));
    }
    for (key, what) in cases {
        let text = error(&["worker", "--listen", "127.0.0.1:0", "--model", &model("q4_k"), "--key", &key], 2);
        assert!(text.contains(what) && text.contains(&key) && !text.contains("hunter2"), "{text}");
    }
}
