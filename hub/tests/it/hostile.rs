//! Servers that refuse, lie or attack: every answer is an error that says what is wrong.

use std::fs;
use std::time::Duration;

use hearth_hub::{HubError, HubErrorKind, RetryPolicy};
use serde_json::json;

use crate::server::{LIST_PATH, Repo, Response, Server, sha256};
use crate::{Fixture, PATIENCE, bytes};

const FILE: &str = "m-Q4_K_M.gguf";

/// Pulls from a server, and checks that the error has a text and that no file was stored.
fn assert_refused(fixture: &Fixture, kind: HubErrorKind, part: &str) -> HubError {
    let error = fixture.pull("").expect_err(part);
    let text = format!("{error} {:?} {:?}", error.location(), error.hint());
    assert_eq!(error.kind(), kind, "{text}");
    assert!(text.contains(part), "no `{part}` in {text}");
    assert!(!text.contains(char::is_control), "{text:?}");
    assert!(!fixture.snapshot(FILE).exists());
    error
}

/// A server whose answers to requests for files are `answer`, and whose list has a file of `content`.
fn with_file_answer(content: &[u8], answer: impl Fn(usize) -> Response + Send + Sync + 'static) -> Server {
    let repo = Repo::new(&[(FILE, content)]);
    Server::start(
        move |request, files| if request.is_for_a_file() { answer(files) } else { repo.answer(request) },
    )
}

fn with_list(list: impl Into<Vec<u8>>) -> Server {
    let list = list.into();
    Server::start(move |_, _| Response::new(200, list.clone()))
}

#[test]
fn wrong_digest_deletes_the_partial_file() {
    let content = bytes(50_000, 1);
    let server = with_file_answer(&content, |_| Response::new(200, bytes(50_000, 2)));
    let fixture = Fixture::new(&server);
    let error = assert_refused(&fixture, HubErrorKind::Failed, "SHA-256");
    assert!(error.to_string().contains("partial file was deleted"), "{error}");
    assert!(fixture.blobs().is_empty());
    // The part of an earlier run counts, too.
    let server = Server::serving(Repo::new(&[(FILE, &content)]));
    let fixture = Fixture::new(&server);
    fixture.write_partial(&sha256(&content), &bytes(20_000, 3));
    assert_refused(&fixture, HubErrorKind::Failed, "SHA-256");
    assert_eq!(server.starts(), [20_000]);
    assert!(fixture.blobs().is_empty());
    fixture.pull("").expect("the next run begins again");
}

#[test]
fn wrong_bodies_are_refused() {
    let content = bytes(1000, 4);
    let html =
        |_| Response::new(200, vec![b' '; 1000]).with_header("Content-Type", "Text/HTML; charset=utf-8");
    assert_refused(&Fixture::new(&with_file_answer(&content, html)), HubErrorKind::Failed, "web page");
    for length in [999, 1001] {
        let server = with_file_answer(&content, move |_| Response::new(200, bytes(length, 4)));
        assert_refused(&Fixture::new(&server), HubErrorKind::Failed, "1000 are missing");
        assert_eq!(server.starts().len(), 1);
    }
    let endless = |_| Response { has_length: false, ..Response::new(200, bytes(5000, 4)) };
    assert_refused(&Fixture::new(&with_file_answer(&content, endless)), HubErrorKind::Failed, "sends more");
    let short = |_| Response { has_length: false, ..Response::new(200, bytes(500, 4)) };
    assert_refused(
        &Fixture::new(&with_file_answer(&content, short)),
        HubErrorKind::Unreachable,
        "broke after",
    );
    let elsewhere = |_| Response::new(206, bytes(1000, 4)).with_header("Content-Range", "bytes 7-1006/2000");
    assert_refused(&Fixture::new(&with_file_answer(&content, elsewhere)), HubErrorKind::Failed, "wrong part");
    let unsatisfiable = |_| Response::new(416, "");
    assert_refused(&Fixture::new(&with_file_answer(&content, unsatisfiable)), HubErrorKind::Failed, "416");
}

#[test]
fn silent_server_ends_after_a_few_attempts() {
    let content = bytes(1000, 5);
    let server = with_file_answer(&content, |_| Response {
        stall_after: Some(0),
        ..Response::new(200, bytes(1000, 5))
    });
    let retry_policy = RetryPolicy { no_data: Duration::from_millis(500), ..PATIENCE };
    let error = assert_refused(
        &Fixture::with(&server, &[], retry_policy),
        HubErrorKind::Unreachable,
        "run the command again",
    );
    assert_eq!(server.starts(), [0, 0, 0], "{error}");
    let mute = Server::start(|_, _| Response { delay: Duration::from_secs(5), ..Response::new(200, "{}") });
    let retry_policy = RetryPolicy { listing: Duration::from_millis(300), ..PATIENCE };
    assert_refused(&Fixture::with(&mute, &[], retry_policy), HubErrorKind::Unreachable, "");
}

#[test]
fn refusals_say_what_to_do() {
    for (status, variables, kind, part) in [
        (401, &[][..], HubErrorKind::Invalid, "HF_TOKEN"),
        (403, &[], HubErrorKind::Invalid, "private or gated"),
        (403, &[("HF_TOKEN", "hf_x")], HubErrorKind::Invalid, "accept its terms"),
        (404, &[], HubErrorKind::Invalid, "no such repository"),
        (418, &[], HubErrorKind::Failed, "HTTP status 418"),
        (204, &[], HubErrorKind::Failed, "HTTP status 204"),
    ] {
        let server = Server::start(move |_, _| Response::new(status, ""));
        assert_refused(&Fixture::with(&server, variables, PATIENCE), kind, part);
        assert_eq!(server.requests().len(), 1, "{status}: not repeated");
    }
}

#[test]
fn wrong_lists_are_refused() {
    let page = "<!doctype html><title>\u{1b}[2J</title>";
    assert_refused(&Fixture::new(&with_list(page)), HubErrorKind::Failed, "sign-in");
    let huge = format!("{{\"sha\": \"{}\", \"siblings\": [{}", "0".repeat(40), " ".repeat(20 << 20));
    assert_refused(&Fixture::new(&with_list(huge)), HubErrorKind::Failed, "larger than");
    let none = json!({ "sha": "0".repeat(40), "siblings": [{ "rfilename": "model.safetensors" }] });
    assert_refused(&Fixture::new(&with_list(none.to_string())), HubErrorKind::Invalid, "no GGUF model");
}

#[test]
fn hostile_names_and_sizes_store_nothing() {
    for path in ["../../../../escape.gguf", "/tmp/escape.gguf", "\u{1b}]0;x\u{7}.gguf"] {
        let fixture = Fixture::new(&Server::serving(Repo::new(&[(path, b"x")])));
        assert_refused(&fixture, HubErrorKind::Failed, "not safe");
        assert_eq!(fs::read_dir(fixture.home.path()).expect("a folder").count(), 0);
    }
    for bytes in [1u64 << 60, u64::MAX] {
        let mut list = Repo::new(&[(FILE, b"x")]).listing();
        list["siblings"][0]["size"] = json!(bytes);
        list["siblings"][0]["lfs"]["size"] = json!(bytes);
        let server = with_list(list.to_string());
        assert_refused(&Fixture::new(&server), HubErrorKind::Failed, "does not fit");
        assert_eq!(server.requests().len(), 1, "refused before the download");
    }
}

#[test]
fn wrong_redirects_are_refused() {
    for target in [
        "file:///etc/passwd",
        "ftp://127.0.0.1/x",
        "//127.0.0.1/x",
        "x.gguf",
        "https://u:p@127.0.0.1/",
        "https://",
    ] {
        let server = Server::start(move |_, _| Response::redirect(target));
        assert_refused(&Fixture::new(&server), HubErrorKind::Failed, "wrong address");
        assert_eq!(server.requests().len(), 1, "{target}");
    }
    let lost = Server::start(|_, _| Response::new(302, ""));
    assert_refused(&Fixture::new(&lost), HubErrorKind::Failed, "no Location");
    let loops = Server::start(|_, _| Response::redirect(LIST_PATH));
    assert_refused(&Fixture::new(&loops), HubErrorKind::Failed, "more than 6 times");
    assert_eq!(loops.requests().len(), 7);
}

#[test]
fn token_stays_with_the_hub() {
    let content = bytes(2000, 6);
    let (repo, download) = (Repo::new(&[(FILE, &content)]), content.clone());
    let other = Server::start(move |_, _| Response::new(200, download.clone()));
    let target = format!("{}/cdn/m.gguf?Signature=s", other.endpoint);
    let server = Server::start(move |request, _| match request.path.as_str() {
        // As for a renamed repository: first to the same server.
        LIST_PATH => Response::redirect("/api/moved"),
        "/api/moved" => Response::new(200, repo.listing().to_string()),
        _ => Response::redirect(target.clone()),
    });
    let fixture = Fixture::with(&server, &[("HF_TOKEN", "hf_secret")], PATIENCE);
    assert!(fs::read(fixture.pull("").expect("a download")).expect("a file") == content);
    let sent: Vec<_> = server.requests().into_iter().map(|request| request.authorization).collect();
    assert_eq!(sent, vec![Some("Bearer hf_secret".to_owned()); 3]);
    let elsewhere: Vec<_> = other.requests().into_iter().map(|request| request.authorization).collect();
    assert_eq!(elsewhere, [None], "the token was sent to another server");
}
