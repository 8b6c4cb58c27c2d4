//! Tests of `hearth pull`, and of `hf:OWNER/REPO:QUANT` where a model file is expected.
//!
//! Not here: broken connections and hostile servers (`hub/tests/it`).

// The server of the tests of hearth-hub. Not all of it is used here.
#[path = "../../hub/tests/it/server.rs"]
#[allow(dead_code)]
mod server;

use std::fs;
use std::process::{Command, Stdio};
use std::time::Duration;

use self::server::{Repo, Response, Server, sha256};
use crate::folder::{Folder, scenario_yaml};
use crate::processes::{
    Process, hearth_command, model_path, output_texts, parse_json, run_command, run_successfully,
    send_signal, wait_until,
};

const TEXT: &str = "And the LORD said unto them";

/// A repository with the test model as `Q4_K`, and a second model.
fn repo() -> Repo {
    let model = fs::read(model_path("q4_k")).expect("a test model");
    Repo::new(&[("psalm-Q4_K.gguf", &model), ("psalm-Q8_0.gguf", b"another model")])
}

/// Returns a command with an empty cache in `folder` and the hub `server`.
fn command(folder: &Folder, server: &Server, arguments: &[&str]) -> Command {
    let mut command = hearth_command(arguments);
    command.env("HF_HOME", folder.path()).env("HF_ENDPOINT", &server.endpoint);
    for variable in ["HF_TOKEN", "HF_TOKEN_PATH", "HF_HUB_CACHE", "HF_HUB_OFFLINE"] {
        command.env_remove(variable);
    }
    command
}

#[test]
fn pull_prints_only_the_path() {
    let (folder, server) = (Folder::new(), Server::serving(repo()));
    let run = |arguments: &[&str], code| run_command(&mut command(&folder, &server, arguments), code);
    let (listed, _) = run(&["pull", "owner/repo"], 0);
    assert!(listed.contains("Q4_K") && listed.contains("Q8_0") && !listed.contains("downloaded"), "{listed}");
    let (stdout, stderr) = run(&["pull", "owner/repo:q4_k"], 0);
    let path = stdout.strip_suffix('\n').expect("one line");
    assert!(
        fs::read(path).expect("a file") == fs::read(model_path("q4_k")).expect("a test model"),
        "{stdout}"
    );
    assert!(stderr.contains("downloading psalm-Q4_K.gguf"), "{stderr}");
    let (json, stderr) = run(&["pull", "hf:owner/repo:Q4_K", "--json"], 0);
    assert_eq!((parse_json(&json)["path"].as_str(), stderr.as_str()), (Some(path), ""));
    let (json, _) = run(&["pull", "owner/repo", "--json"], 0);
    let models = &parse_json(&json)["models"];
    assert_eq!((&models[0]["downloaded"], &models[1]["downloaded"]), (&true.into(), &false.into()), "{json}");
    for (name, code, parts) in [
        ("owner/repo:Q4_0", 2, &["Q4_K, Q8_0", "did you mean", "where: hf:owner/repo:Q4_0"][..]),
        ("owner/missing", 2, &["404", "check the owner"]),
        ("owner", 2, &["no owner", "OWNER/REPO:QUANT"]),
    ] {
        let (_, stderr) = run(&["pull", name], code);
        assert!(stderr.starts_with("error: ") && parts.iter().all(|part| stderr.contains(part)), "{stderr}");
    }
    let down = Server::start(|_, _| Response::new(500, ""));
    let (_, stderr) = run_command(&mut command(&folder, &down, &["pull", "owner/other"]), 1);
    assert!(stderr.contains("HTTP status 500"), "{stderr}");
}

#[test]
fn hub_model_can_be_used_like_a_file() {
    let (folder, server) = (Folder::new(), Server::serving(repo()));
    let run = |arguments: &[&str]| run_command(&mut command(&folder, &server, arguments), 0).0;
    let expected = run_successfully(&["tokenize", &model_path("q4_k"), TEXT]);
    assert_eq!(run(&["tokenize", "hf:owner/repo:q4_k", TEXT]), expected);
    let requests = server.requests().len();
    let answer =
        |model: &str| run(&["run", model, TEXT, "--complete", "--tokens", "2", "--temperature", "0"]);
    assert_eq!(answer("hf:owner/repo:Q4_K"), answer(&model_path("q4_k")));
    let scenario = scenario_yaml("  - {name: a, profile: d3}")
        .replace("profile: llama-8b", "file: 'hf:owner/repo:Q4_K'");
    let by_scenario = folder.write("s.yaml", scenario);
    let other = folder.write("other.yaml", scenario_yaml("  - {name: a, profile: d3}"));
    let plan = run(&["plan", &by_scenario]);
    assert!(plan.contains("psalm"), "{plan}");
    let digest = |plan: &str| {
        plan.lines().find(|line| line.contains("digest: ") && line.contains("model")).map(str::to_owned)
    };
    assert_eq!(digest(&run(&["plan", &other, "--model", "hf:owner/repo:Q4_K"])), digest(&plan));
    let written = folder.path_of("new.yaml");
    run(&["init", &written, "--model", "hf:owner/repo:Q4_K", "--device", "a=d3"]);
    assert!(folder.read("new.yaml").contains("hf:owner/repo:Q4_K"), "{}", folder.read("new.yaml"));
    run(&["lint", &written]);
    assert_eq!(server.requests().len(), requests, "the downloaded file is used without a request");
    for (arguments, part) in [
        (&["tokenize", "hf:owner", TEXT][..], "write OWNER/REPO"),
        (&["tokenize", "hf:owner/repo", TEXT, "--json"], "OWNER/REPO:QUANT"),
        (&["tokenize", "owner/repo:Q4_K", TEXT], "`hf:owner/repo:Q4_K`"),
    ] {
        let empty = Folder::new();
        let (_, stderr) = run_command(&mut command(&empty, &server, arguments), 2);
        assert!(stderr.contains(part), "{stderr}");
    }
    let malformed = folder.write("bad.yaml", folder.read("s.yaml").replace("owner/repo:Q4_K", "owner//repo"));
    let (_, stderr) = run_command(&mut command(&folder, &server, &["lint", &malformed]), 2);
    assert!(stderr.contains("model.file") && stderr.contains("bad.yaml"), "{stderr}");
}

#[test]
fn worker_with_a_downloaded_model_ends_cleanly() {
    let (folder, server) = (Folder::new(), Server::serving(repo()));
    let arguments = ["worker", "--listen", "127.0.0.1:0", "--model", "hf:owner/repo:Q4_K"];
    let (mut worker, _) = Process::spawn_until_ready(&mut command(&folder, &server, &arguments));
    std::thread::sleep(Duration::from_millis(200));
    send_signal(worker.0.id(), "INT");
    // The handler of the download would exit with code 130.
    assert_eq!(worker.0.wait().expect("it ends").code(), Some(0));
}

#[test]
fn interrupted_pull_says_how_to_continue() {
    let (folder, repo) = (Folder::new(), repo());
    let (digest, stalled) = (sha256(&repo.files[0].1), repo.clone());
    let server = Server::start(move |request, files| {
        let stall_after = (request.is_for_a_file() && files == 0).then_some(200_000);
        Response { stall_after, ..stalled.answer(request) }
    });
    let pull = ["pull", "owner/repo:Q4_K"];
    let mut interrupted = command(&folder, &server, &pull);
    let child = interrupted.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("it starts");
    let partial = folder.path().join(format!("hub/models--owner--repo/blobs/{digest}.incomplete"));
    let received = || fs::metadata(&partial).is_ok_and(|file| file.len() == 200_000);
    assert!(wait_until(Duration::from_secs(20), received), "a partial file");
    send_signal(child.id(), "INT");
    let output = child.wait_with_output().expect("it ends");
    let (_, stderr) = output_texts(&output);
    assert_eq!(output.status.code(), Some(130), "{stderr}");
    assert!(stderr.contains("run the command again to continue"), "{stderr}");
    let (stdout, stderr) = run_command(&mut command(&folder, &server, &pull), 0);
    assert!(stderr.contains("continuing psalm-Q4_K.gguf"), "{stderr}");
    assert!(fs::read(stdout.trim_end()).expect("a file") == repo.files[0].1);
    assert_eq!(server.starts(), [0, 200_000]);
}
