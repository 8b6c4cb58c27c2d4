//! Downloads that succeed: the cache, continued files, repeated requests and concurrent processes.

use std::fs::{self, File};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use hearth_hub::{HubErrorKind, Monitor, Pull, RetryPolicy};

use crate::server::{COMMIT, LIST_PATH, Repo, Request, Response, Server, sha256};
use crate::{Fixture, PATIENCE, bytes, hub_at, name};

const FILE: &str = "m-Q4_K_M.gguf";

#[test]
fn model_is_stored_like_other_tools_store_it() {
    let content = bytes(70_000, 1);
    let files: [(&str, &[u8]); 3] = [(FILE, &content), ("README.md", b"text"), ("mmproj-F16.gguf", b"eyes")];
    let server = Server::serving(Repo::new(&files));
    let fixture = Fixture::new(&server);
    let path = fixture.pull("q4_k_m").expect("a download");
    assert_eq!(path, fixture.snapshot(FILE));
    assert_eq!(fs::read(&path).expect("a file"), content);
    let link = fs::read_link(&path).expect("a link");
    assert_eq!(link.to_str(), Some(format!("../../blobs/{}", sha256(&content)).as_str()));
    assert_eq!(fs::read_to_string(fixture.folder().join("refs/main")).expect("a file"), COMMIT);
    assert_eq!(fixture.blobs(), [sha256(&content)]);
    let before = server.requests().len();
    assert_eq!(fixture.pull("").expect("the only model"), path);
    assert_eq!(server.requests().len(), before + 1, "the list is requested again, the file is not");
    assert_eq!(fixture.hub.locate(&name("Q4_K_M"), &Monitor::NONE).expect("in the cache"), path);
    assert_eq!(server.requests().len(), before + 1, "a downloaded model is found without a request");
}

#[test]
fn several_models_are_listed() {
    let small = bytes(10, 1);
    let large = bytes(3000, 2);
    let parts: [(&str, &[u8]); 3] = [
        (FILE, &small),
        ("sub/m-F16-00001-of-00002.gguf", &large),
        ("sub/m-F16-00002-of-00002.gguf", &small),
    ];
    let server = Server::serving(Repo::new(&parts));
    let fixture = Fixture::new(&server);
    let path = fixture.pull("f16").expect("a split model");
    assert_eq!(path, fixture.snapshot("sub/m-F16-00001-of-00002.gguf"));
    assert_eq!(fs::read(path).expect("a file"), large);
    assert_eq!(fs::read(fixture.snapshot("sub/m-F16-00002-of-00002.gguf")).expect("a file"), small);
    let Pull::Choice(models) = fixture.hub.pull(&name(""), &Monitor::NONE).expect("a list") else {
        panic!("there are two models");
    };
    let found: Vec<_> =
        models.iter().map(|one| (one.quant.as_str(), one.bytes, one.files.len(), one.downloaded)).collect();
    // The only file of Q4_K_M equals a part of the other model, so that it need not be downloaded.
    assert_eq!(found, [("Q4_K_M", 10, 1, true), ("F16", 3010, 2, true)]);
    let error = fixture.hub.pull(&name("Q8_0"), &Monitor::NONE).expect_err("no such model");
    assert_eq!((error.kind(), error.location()), (HubErrorKind::Invalid, Some("hf:owner/repo:Q8_0")));
}

#[test]
fn broken_connections_are_continued() {
    let content = bytes(5 << 20, 3);
    let repo = Repo::new(&[(FILE, &content)]);
    // Each connection brings 1.5 MB, so that the file needs more attempts than may fail in a row.
    let server = Server::start(move |request, _| {
        let response = repo.answer(request);
        let cut_after = request.is_for_a_file().then_some(1_500_000);
        Response { cut_after, ..response }
    });
    let fixture = Fixture::new(&server);
    let path = fixture.pull("").expect("a download");
    assert!(fs::read(path).expect("a file") == content);
    let starts = server.starts();
    assert_eq!(starts.len(), 4, "{starts:?}");
    assert!(starts.is_sorted() && starts[0] == 0 && starts[1] >= 1_000_000, "{starts:?}");
}

#[test]
fn stalled_connection_is_replaced() {
    let content = bytes(100_000, 4);
    let repo = Repo::new(&[(FILE, &content)]);
    let server = Server::start(move |request, files| {
        let stall_after = (request.is_for_a_file() && files == 0).then_some(40_000);
        Response { stall_after, ..repo.answer(request) }
    });
    let fixture =
        Fixture::with(&server, &[], RetryPolicy { no_data: Duration::from_millis(1500), ..PATIENCE });
    let path = fixture.pull("").expect("a download");
    assert!(fs::read(path).expect("a file") == content);
    assert_eq!(server.starts(), [0, 40_000]);
}

#[test]
fn partial_file_of_an_earlier_run_is_continued() {
    let content = bytes(600_000, 5);
    let server = Server::serving(Repo::new(&[(FILE, &content)]));
    for (left, expected_starts) in [(&content[..400_000], &[400_000][..]), (&content[..], &[])] {
        let fixture = Fixture::new(&server);
        fixture.write_partial(&sha256(&content), left);
        let before = server.starts().len();
        let path = fixture.pull("").expect("a download");
        assert!(fs::read(path).expect("a file") == content);
        assert_eq!(server.starts()[before..], *expected_starts);
        assert_eq!(fixture.blobs(), [sha256(&content)]);
    }
    // A partial file that is too long is not of this file.
    let fixture = Fixture::new(&server);
    fixture.write_partial(&sha256(&content), &bytes(700_000, 6));
    assert!(fs::read(fixture.pull("").expect("a download")).expect("a file") == content);
}

#[test]
fn server_without_ranges_sends_the_file_again() {
    let content = bytes(200_000, 7);
    let repo = Repo::new(&[(FILE, &content)]);
    let server = Server::start(move |request, files| {
        let whole = repo.answer(&Request { start: None, ..request.clone() });
        let cut_after = (request.is_for_a_file() && files == 0).then_some(150_000);
        Response { cut_after, ..whole }
    });
    let fixture = Fixture::new(&server);
    assert!(fs::read(fixture.pull("").expect("a download")).expect("a file") == content);
    assert_eq!(server.starts(), [0, 150_000]);
}

#[test]
fn failing_requests_are_repeated_a_few_times() {
    let content = bytes(1000, 8);
    let repo = Repo::new(&[(FILE, &content)]);
    let server = Server::start(move |request, files| match files {
        0 if request.is_for_a_file() => Response::new(503, "overloaded"),
        1 if request.is_for_a_file() => Response::new(429, "wait").with_header("Retry-After", "1"),
        _ => repo.answer(request),
    });
    let start = Instant::now();
    Fixture::new(&server).pull("").expect("the third attempt succeeds");
    assert_eq!(server.starts().len(), 3);
    assert!(start.elapsed() >= Duration::from_secs(1), "the server's pause is kept");

    let down = Server::start(|_, _| Response::new(500, "down"));
    let error = Fixture::new(&down).pull("").expect_err("it is down");
    assert_eq!((error.kind(), down.requests().len()), (HubErrorKind::Unreachable, 3));
    let busy = Server::start(|_, _| Response::new(429, "no").with_header("Retry-After", "86400"));
    let error = Fixture::new(&busy).pull("").expect_err("a day is too long");
    assert_eq!((error.kind(), busy.requests().len()), (HubErrorKind::Unreachable, 1));
    assert!(error.hint().is_some_and(|hint| hint.contains("HF_TOKEN")), "{error}");
}

#[test]
fn two_pulls_at_once_download_once() {
    let content = bytes(400_000, 9);
    let repo = Repo::new(&[(FILE, &content)]);
    let server = Server::start(move |request, _| Response {
        delay: Duration::from_millis(300),
        ..repo.answer(request)
    });
    let fixture = Fixture::new(&server);
    let paths: Vec<_> = std::thread::scope(|scope| {
        let pulls = [(); 3].map(|()| scope.spawn(|| fixture.pull("").expect("a download")));
        pulls.map(|pull| pull.join().expect("no panic")).into()
    });
    assert!(paths.iter().all(|path| *path == fixture.snapshot(FILE)));
    assert!(fs::read(&paths[0]).expect("a file") == content);
    assert_eq!(server.starts(), [0]);
    assert_eq!(fixture.blobs(), [sha256(&content)]);
}

#[test]
fn other_process_without_progress_is_not_waited_for() {
    let content = bytes(1000, 14);
    let server = Server::serving(Repo::new(&[(FILE, &content)]));
    let fixture =
        Fixture::with(&server, &[], RetryPolicy { other_process: Duration::from_millis(200), ..PATIENCE });
    let folder = fixture.home.path().join("hub/.locks/models--owner--repo");
    fs::create_dir_all(&folder).expect("it is ours");
    let lock = File::create(folder.join(format!("{}.lock", sha256(&content)))).expect("it is ours");
    lock.lock().expect("nobody else has it");
    let error = fixture.pull("").expect_err("the other process hangs");
    assert!(error.to_string().contains("no progress"), "{error}");
    assert!(server.starts().is_empty(), "nothing was requested");
    drop(lock);
    fixture.pull("").expect("a download");
}

#[test]
fn pull_gets_the_latest_version() {
    let (old, new) = (bytes(1000, 15), bytes(900, 16));
    let (old_repo, new_repo) = (Repo::new(&[(FILE, &old)]), Repo::new(&[(FILE, &new)]));
    let (new_commit, is_new) = ("f".repeat(40), Arc::new(AtomicBool::new(false)));
    let (commit, flag) = (new_commit.clone(), is_new.clone());
    let server = Server::start(move |request, _| {
        if !flag.load(Ordering::SeqCst) {
            return old_repo.answer(request);
        }
        if request.path == LIST_PATH {
            let mut list = new_repo.listing();
            list["sha"] = commit.clone().into();
            return Response::new(200, list.to_string());
        }
        new_repo.answer(&Request { path: request.path.replace(&commit, COMMIT), ..request.clone() })
    });
    let fixture = Fixture::new(&server);
    let old_path = fixture.pull("").expect("a download");
    is_new.store(true, Ordering::SeqCst);
    let locate = || fixture.hub.locate(&name("Q4_K_M"), &Monitor::NONE).expect("in the cache");
    assert_eq!(locate(), old_path, "a command does not change the model");
    let new_path = fixture.pull("").expect("a download");
    assert!(fs::read(&new_path).expect("a file") == new && fs::read(&old_path).expect("it is kept") == old);
    assert!(new_path.to_str().is_some_and(|path| path.contains(&new_commit)), "{}", new_path.display());
    assert_eq!(locate(), new_path);
}

#[test]
fn cancelled_download_keeps_what_was_received() {
    let content = bytes(300_000, 10);
    let repo = Repo::new(&[(FILE, &content)]);
    let server = Server::start(move |request, files| {
        let stall_after = (request.is_for_a_file() && files == 0).then_some(120_000);
        Response { stall_after, ..repo.answer(request) }
    });
    let fixture = Fixture::with(&server, &[], RetryPolicy { no_data: Duration::from_mins(10), ..PATIENCE });
    let is_cancelled = AtomicBool::new(false);
    let monitor = Monitor {
        on_progress: &|progress| {
            if progress.done == 120_000 {
                is_cancelled.store(true, Ordering::SeqCst);
            }
        },
        is_cancelled: &|| is_cancelled.load(Ordering::SeqCst),
    };
    // The server is silent now, and the cancellation does not wait for it.
    let error = fixture.hub.pull(&name(""), &monitor).expect_err("cancelled");
    assert_eq!(error.kind(), HubErrorKind::Cancelled, "{error}");
    assert!(error.hint().is_some_and(|hint| hint.contains("continue")));
    let partial = fixture.folder().join("blobs").join(format!("{}.incomplete", sha256(&content)));
    assert!(fs::read(partial).expect("it is kept") == content[..120_000]);
    assert!(fs::read(fixture.pull("").expect("a download")).expect("a file") == content);
    assert_eq!(server.starts(), [0, 120_000]);
}

#[test]
fn downloaded_model_works_without_the_hub() {
    let content = bytes(2000, 11);
    let server = Server::serving(Repo::new(&[(FILE, &content), ("m-Q8_0.gguf", b"other")]));
    let fixture = Fixture::new(&server);
    let path = fixture.pull("Q4_K_M").expect("a download");
    // Nobody listens on the port of discarded packets.
    let dead = "http://127.0.0.1:9";
    for (endpoint, variables) in [(dead, &[][..]), (server.endpoint.as_str(), &[("HF_HUB_OFFLINE", "1")])] {
        let before = server.requests().len();
        let hub = hub_at(fixture.home.path(), endpoint, variables, PATIENCE);
        for selector in ["Q4_K_M", "q4_k_m", FILE, ""] {
            match hub.pull(&name(selector), &Monitor::NONE).expect("it is in the cache") {
                Pull::Model(found) => assert_eq!(found, path, "{selector}"),
                Pull::Choice(models) => panic!("{models:?}"),
            }
            assert_eq!(hub.locate(&name(selector), &Monitor::NONE).expect("it is in the cache"), path);
        }
        for result in [
            hub.pull(&name("Q8_0"), &Monitor::NONE).map(|_| ()),
            hub.locate(&name("Q8_0"), &Monitor::NONE).map(|_| ()),
        ] {
            let error = result.expect_err("it is not in the cache");
            assert_eq!(error.kind(), HubErrorKind::Unreachable, "{error}");
        }
        assert_eq!(server.requests().len(), before);
    }
}
