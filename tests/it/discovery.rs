//! Tests that a head finds workers by their names, and names the workers that it cannot find.

use std::time::Duration;

use hearth_ring::discovery::{self, Announcement, MdnsScope};

use crate::folder::Folder;
use crate::namespace::NetworkNamespace;
use crate::processes::{
    Process, Worker, assert_rejected, encrypted_transport, execute_arguments, hearth_command, model_path,
    parse_json, plan_yaml, run_failing_with_code, run_with_code,
};

const LOCAL: [&str; 5] = ["worker", "--listen", "127.0.0.1:0", "--threads", "1"];

/// Starts a worker that announces itself on the loopback interface.
fn start_announced(name: &str, key: &str) -> Process {
    let flags = ["--model", &model_path("q4_k"), "--key", key, "--name", name, "--announce", "always"];
    let (process, line) = Process::spawn_until_ready(hearth_command(&LOCAL).args(flags));
    assert!(line.trim_end().ends_with(&format!(", announced as {name}")), "{line}");
    process
}

/// Returns whether this process receives its own multicast announcements.
fn multicast_works(key: &str, name: &str) -> bool {
    let worker =
        Worker::with_flags(&["--listen", "127.0.0.1:0", "--model", &model_path("q4_k"), "--key", key]);
    let address = worker.address.parse().expect("an address");
    let scope = MdnsScope { loopback_only: true, ..MdnsScope::default() };
    let Ok(_announcement) = Announcement::start(name, address, scope) else { return false };
    let (transport, names) = (encrypted_transport(key), [name.to_owned()].into());
    let runtime = tokio::runtime::Runtime::new().expect("threads");
    runtime.block_on(discovery::find_workers(&transport, &names, Duration::from_secs(10), scope)).is_ok()
}

/// Returns a plan whose workers have the given names and no addresses.
fn plan_without_addresses(windows: &[u32], names: &[&str]) -> String {
    let addresses = vec!["127.0.0.1:1"; names.len()];
    let mut text = plan_yaml("q4_k", windows, &addresses, 64).replace("address: '127.0.0.1:1', ", "");
    for (index, name) in names.iter().enumerate() {
        text = text.replace(&format!("name: d{},", index + 1), &format!("name: {name},"));
    }
    text
}

#[test]
fn workers_are_found_by_name_and_missing_ones_are_named() {
    let folder = Folder::new();
    let (key, q4_k, process) = (folder.write_ring_key(), model_path("q4_k"), std::process::id());
    if !multicast_works(&key, &format!("control-{process}")) {
        eprintln!("SKIPPED workers_are_found_by_name: multicast messages do not return to this machine");
        return;
    }
    let (b, c) = (format!("b {process}"), format!("c.{process}"));
    let _workers = [start_announced(&b, &key), start_announced(&c, &key)];
    let plan = folder.write("plan.yaml", plan_without_addresses(&[2, 3, 3], &[&b, &c]));
    let command = |plan: &str, more: &[&str]| {
        let flags = ["--prompt", "And", "--tokens", "4", "--key", &key];
        execute_arguments(plan, &q4_k, &[&flags[..], more].concat())
    };
    let (_, stderr) = run_with_code(&command(&plan, &["--discover", "30"]), 0);
    assert!(stderr.contains(&format!("found {b} at 127.0.0.1:")), "{stderr}");
    // Discovery is off by default.
    let parts = [&format!("worker `{b}` has no address in the plan"), "--discover"];
    assert_rejected(&command(&plan, &[]), &parts);
    let missing = format!("nobody-{process}");
    let plan = folder.write("other.yaml", plan_without_addresses(&[2, 3, 3], &[&b, &missing]));
    let text = run_failing_with_code(&command(&plan, &["--discover", "3"]), 1);
    assert!(text.contains(&format!("not found within 3 s: `{missing}` (no worker with this name")), "{text}");
    assert!(text.contains(&format!("Found: `{b}` at 127.0.0.1:")), "{text}");
    assert!(text.contains("hint:  start the workers with the same `--key`"), "{text}");
}

#[test]
fn worker_beyond_loopback_announces_itself() {
    let Some(namespace) = NetworkNamespace::for_test("worker_beyond_loopback_announces_itself") else {
        return;
    };
    let folder = Folder::new();
    let (key, q4_k, name) =
        (folder.write_ring_key(), model_path("q4_k"), format!("far-{}", std::process::id()));
    // A worker with a key and a reachable address announces itself without a flag.
    let _worker = Worker::in_namespace(&namespace, &["--model", &q4_k, "--key", &key, "--name", &name]);
    let plan = folder.write("plan.yaml", plan_without_addresses(&[4, 4], &[&name]));
    let flags = ["--prompt", "And", "--tokens", "4", "--key", &key, "--discover", "30"];
    let (_, stderr) = run_with_code(&execute_arguments(&plan, &q4_k, &flags), 0);
    assert!(stderr.contains(&format!("found {name} at {}:", namespace.namespace_address)), "{stderr}");
}

#[test]
fn worker_prints_its_address_as_json() {
    let (_worker, line) =
        Process::spawn_until_ready(hearth_command(&LOCAL).args(["--json", "--model", &model_path("q4_k")]));
    let ready = parse_json(&line);
    let address = ready["listening"].as_str().expect("an address");
    assert!(address.starts_with("127.0.0.1:") && !address.ends_with(":0"), "{line}");
    assert_eq!((ready["model"].as_str(), ready["announced"].as_str()), (Some("psalm-7m"), None), "{line}");
}
