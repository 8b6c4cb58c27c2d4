//! A head finds workers by their names, and names those that are missing.

use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::time::Duration;

use hearth_ring::discovery::{Announcement, Medium};
use hearth_ring::{Key, Sealed, Tcp, discovery};

use crate::namespace::Namespace;
use crate::processes::{Worker, error, hearth, model, plan};
use crate::recovery::{key, write};

/// A worker that announces itself on this machine under a name.
fn named(name: &str, key: &str) -> Announced {
    let q4_k = model("q4_k");
    let arguments = ["worker", "--listen", "127.0.0.1:0", "--threads", "1", "--model", &q4_k, "--key", key];
    let mut command = hearth(&[&arguments[..], &["--name", name, "--announce", "always"]].concat());
    let mut process =
        command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("the worker starts");
    let out = process.stdout.take().expect("piped");
    let mut said = String::new();
    BufReader::new(out).read_line(&mut said).expect("the worker says where it listens");
    assert!(said.trim_end().ends_with(&format!(", announced as {name}")), "{said}");
    Announced(process)
}

struct Announced(Child);

impl Drop for Announced {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Whether multicast comes back on this machine: a worker of this process, found by this process.
fn multicast_works(key: &str, name: &str) -> bool {
    let worker = Worker::with_key(&model("q4_k"), "127.0.0.1:0", key);
    let address = worker.address.parse().expect("an address");
    let medium = Medium { loopback: true, ..Medium::default() };
    let Ok(_announcement) = Announcement::begin(name, address, medium) else { return false };
    let network = Sealed::new(Tcp, Key::given(Some(key.as_ref())).expect("a key").expect("ours"));
    let names = [name.to_owned()].into();
    let runtime = tokio::runtime::Runtime::new().expect("threads");
    runtime.block_on(discovery::find(&network, &names, Duration::from_secs(10), medium)).is_ok()
}

/// The plan without the workers' addresses, and with names that no other test has.
fn unaddressed(windows: &[u32], names: &[&str]) -> String {
    let addresses = vec!["127.0.0.1:1"; names.len()];
    let mut text = plan("q4_k", windows, &addresses, 64).replace("address: '127.0.0.1:1', ", "");
    for (place, name) in names.iter().enumerate() {
        text = text.replace(&format!("name: d{},", place + 1), &format!("name: {name},"));
    }
    text
}

#[test]
fn workers_are_found_by_name_and_missing_ones_are_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let (key, q4_k, process) = (key(folder.path()), model("q4_k"), std::process::id());
    let control = format!("control-{process}");
    if !multicast_works(&key, &control) {
        eprintln!("SKIPPED workers_are_found_by_name: multicast does not come back on this machine");
        return;
    }
    let (b, c) = (format!("b {process}"), format!("c.{process}"));
    let _workers = [named(&b, &key), named(&c, &key)];
    let file = write(folder.path(), "plan.yaml", &unaddressed(&[2, 3, 3], &[&b, &c]));
    let execute = ["execute", &file, "--model", &q4_k, "--prompt", "And", "--tokens", "4", "--ignore-end"];
    let execute = [&execute[..], &["--key", &key]].concat();
    let output = hearth(&[&execute[..], &["--discover", "30", "--json"]].concat()).output().expect("it runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains(&format!("found {b} at 127.0.0.1:")), "{said}");
    // Without asking for it nobody is looked for.
    let text = error(&execute, 2);
    assert!(
        text.contains(&format!("gives worker `{b}` no address")) && text.contains("--discover"),
        "{text}"
    );
    // One of the two is somebody else.
    let other = format!("nobody-{process}");
    let file = write(folder.path(), "other.yaml", &unaddressed(&[2, 3, 3], &[&b, &other]));
    let execute = ["execute", &file, "--model", &q4_k, "--prompt", "And", "--key", &key, "--discover", "3"];
    let text = error(&execute, 1);
    assert!(text.contains(&format!("not found within 3 s: `{other}` (nobody of that name")), "{text}");
    assert!(text.contains(&format!("Found: `{b}` at 127.0.0.1:")), "{text}");
    assert!(text.contains("hint:  start them with the same --key"), "{text}");
}

#[test]
fn worker_beyond_loopback_announces_itself() {
    let Some(namespace) = Namespace::for_test("a_worker_beyond_this_machine") else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let (key, q4_k) = (key(folder.path()), model("q4_k"));
    let name = format!("far-{}", std::process::id());
    // With a key, and reachable from elsewhere: no option asks for it.
    let listen = format!("{}:0", namespace.inside);
    let _worker = Worker::inside_as(&namespace.name, &q4_k, &listen, &key, &name);
    let file = write(folder.path(), "plan.yaml", &unaddressed(&[4, 4], &[&name]));
    let execute = ["execute", &file, "--model", &q4_k, "--prompt", "And", "--tokens", "4", "--ignore-end"];
    let output =
        hearth(&[&execute[..], &["--key", &key, "--discover", "30"]].concat()).output().expect("it runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert!(said.contains(&format!("found {name} at {}:", namespace.inside)), "{said}");
}

#[test]
fn wrong_worker_name_is_refused() {
    let q4_k = model("q4_k");
    let worker = ["worker", "--listen", "127.0.0.1:0", "--model", &q4_k, "--announce", "always", "--name"];
    let text = error(&[&worker[..], &[&"n".repeat(64)]].concat(), 2);
    assert!(text.contains("longer than 63 bytes") && text.contains("--name"), "{text}");
}

#[test]
fn worker_prints_its_address_as_json() {
    let q4_k = model("q4_k");
    let arguments = ["worker", "--json", "--listen", "127.0.0.1:0", "--threads", "1", "--model", &q4_k];
    let mut worker = hearth(&arguments).stdout(Stdio::piped()).spawn().expect("it starts");
    let mut line = String::new();
    let said = worker.stdout.take().map(BufReader::new).expect("a pipe").read_line(&mut line);
    worker.kill().and_then(|()| worker.wait()).expect("it ends");
    said.expect("a line");
    let said: serde_json::Value = serde_json::from_str(&line).expect("one line of JSON");
    let address = said["listening"].as_str().expect("an address");
    assert!(address.starts_with("127.0.0.1:") && !address.ends_with(":0"), "{line}");
    assert_eq!((said["model"].as_str(), said["announced"].as_str()), (Some("psalm-7m"), None), "{line}");
}
