//! Tests of `hearth serve`: concurrent requests get the same text as single requests, and invalid ones are rejected.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::time::{Duration, Instant};

use hearth_profiles::gguf;
use serde_json::{Value, json};

use crate::chat::write_model_with_keys;
use crate::folder::{Folder, scenario_yaml};
use crate::processes::{
    Process, Worker, assert_rejected, hearth_command, integer_values, model_path, parse_json,
    plan_yaml_for_model, run_json, test_data_path, wait_until,
};
use crate::proxy::Proxy;
use crate::recovery::trial_seeds;

const TIMEOUT: Duration = Duration::from_mins(1);

/// A server and its workers, with the trained test model.
pub struct Server {
    process: Process,
    address: String,
    workers: Vec<Worker>,
    /// A proxy in front of each worker.
    proxies: Vec<Proxy>,
    /// The folder of the plan and the model.
    _folder: Folder,
}

impl Server {
    /// Starts a server with the given number of workers and additional flags.
    pub fn start(workers: usize, more: &[&str]) -> Server {
        Server::start_with_plan(workers, |plan| plan, &[], more)
    }

    /// Starts a server whose model has the metadata keys `keys`, and whose plan `edit` has changed.
    pub fn start_with_plan(
        workers: usize,
        edit: impl FnOnce(String) -> String,
        keys: &[(&str, gguf::Value)],
        more: &[&str],
    ) -> Server {
        let folder = Folder::new();
        let chat_model = folder.path_of("chat.gguf");
        write_model_with_keys(Path::new(&chat_model), keys);
        let workers: Vec<Worker> = (0..workers).map(|_| Worker::start(&chat_model)).collect();
        let proxies: Vec<Proxy> = workers.iter().map(|worker| Proxy::new(&worker.address)).collect();
        let addresses: Vec<&str> = proxies.iter().map(|proxy| proxy.address.as_str()).collect();
        let windows = [&[8][..], &[4, 4], &[3, 3, 2], &[2, 2, 2, 2]][workers.len()];
        let plan = edit(plan_yaml_for_model(&chat_model, windows, &addresses, 1024));
        let plan = folder.write("plan.yaml", plan);
        let flags = ["--model", &chat_model, "--listen", "127.0.0.1:0", "--threads", "1", "--name", "psalm"];
        let (process, line) =
            Process::spawn_until_ready(hearth_command(&["serve", &plan]).args(flags).args(more));
        let (_, rest) = line.split_once("http://").expect("an address");
        let address = rest.split_once(',').expect("more of it").0.to_owned();
        Server { process, address, workers, proxies, _folder: folder }
    }

    fn open(&self, request: impl AsRef<[u8]>) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).expect("it listens");
        stream.set_read_timeout(Some(TIMEOUT)).expect("a time limit");
        // The server may respond to a request that is too long before it is sent completely.
        let _ = stream.write_all(request.as_ref());
        stream
    }

    pub fn send(&self, request: impl AsRef<[u8]>) -> String {
        let mut response = String::new();
        let _ = self.open(request).read_to_string(&mut response);
        response
    }

    fn request(&self, method: &str, path: &str, headers: &str, body: &str) -> (u16, String) {
        let response = self.send(with_headers(method, path, headers, body));
        let (head, body) = response.split_once("\r\n\r\n").expect("a head and a body");
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
        (status.unwrap_or_else(|| panic!("no status in {head}")), body.to_owned())
    }

    pub fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let (status, body) = self.request("POST", path, "", &body.to_string());
        (status, parse_json(&body))
    }

    pub fn get(&self, path: &str) -> (u16, String) {
        self.request("GET", path, "", "")
    }

    /// Returns the events of a streamed response, without the final `[DONE]`.
    pub fn stream(&self, path: &str, mut body: Value) -> Vec<Value> {
        body["stream"] = true.into();
        let (_, body) = self.request("POST", path, "", &body.to_string());
        let mut events: Vec<&str> = body.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
        assert_eq!(events.pop(), Some("[DONE]"), "{body}");
        events.into_iter().map(parse_json).collect()
    }

    /// Returns the text that the server generates greedily after a prompt.
    fn text(&self, prompt: &str, tokens: u32) -> String {
        let (status, response) = self.post("/v1/completions", &greedy(prompt, tokens));
        assert_eq!(status, 200, "{response}");
        response["choices"][0]["text"].as_str().expect("a text").to_owned()
    }

    /// Requests an answer and disconnects after `events` events of its stream.
    fn cancel_after(&self, prompt: &str, events: usize) {
        let mut body = greedy(prompt, 100);
        body["stream"] = true.into();
        let request = with_headers("POST", "/v1/completions", "", &body.to_string());
        let lines = BufReader::new(self.open(&request)).lines().map_while(Result::ok);
        lines.filter(|line| line.starts_with("data: ")).take(events).for_each(drop);
    }

    /// Makes eight concurrent requests, calls `meanwhile`, and checks the generated text of each.
    fn check_concurrent(&self, tokens: u32, expected: &[String], meanwhile: impl FnOnce()) {
        std::thread::scope(|scope| {
            let request = |it: usize| scope.spawn(move || self.text(PROMPTS[it % 4], tokens));
            let threads: Vec<_> = (0..8).map(request).collect();
            meanwhile();
            for (it, text) in threads.into_iter().enumerate() {
                assert_eq!(text.join().expect("no panic"), expected[it % 4], "request {it}");
            }
        });
    }

    fn resident_bytes(&self) -> u64 {
        let path = format!("/proc/{}/statm", self.process.0.id());
        let pages = std::fs::read_to_string(path).expect("the server runs");
        pages.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok()).expect("a number") * 4096
    }

    /// Returns the value of a metric without labels.
    fn metric(&self, name: &str) -> u64 {
        let text = self.get("/metrics").1;
        let line = text.lines().find_map(|line| line.strip_prefix(&format!("hearth_{name} ")));
        line.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("{name}: {text}"))
    }
}

pub fn with_headers(method: &str, path: &str, headers: &str, body: &str) -> String {
    let kind = if body.is_empty() { "" } else { "Content-Type: application/json\r\n" };
    let length = body.len();
    format!(
        "{method} {path} HTTP/1.0\r\nHost: localhost\r\n{kind}{headers}Content-Length: {length}\r\n\r\n{body}"
    )
}

fn greedy(prompt: &str, tokens: u32) -> Value {
    json!({"prompt": prompt, "max_tokens": tokens, "temperature": 0})
}

/// Returns the text that `hearth execute` generates for a prompt in one process.
fn alone(prompt: &str, tokens: u32) -> String {
    let folder = Folder::new();
    let (plan, model, tokens) = (folder.write_plan(&[8], &[], 256), model_path("q4_k"), tokens.to_string());
    let arguments = ["execute", &plan, "--model", &model, "--prompt", prompt, "--tokens", &tokens];
    run_json(&arguments)["text"].as_str().expect("a text").to_owned()
}

const PROMPTS: [&str; 4] = ["And Jesus said unto them,", "In the beginning", "The LORD is my", "Blessed are"];

#[test]
fn concurrent_requests_get_the_text_of_a_single_one() {
    let server = Server::start(2, &["--sequences", "3"]);
    let expected: Vec<String> = PROMPTS.iter().map(|prompt| alone(prompt, 24)).collect();
    // Eight concurrent requests share three slots.
    server.check_concurrent(24, &expected, || {});
    // A streamed response has the same text; its last event has the usage.
    let mut body = greedy(PROMPTS[0], 24);
    body["stream_options"] = json!({"include_usage": true});
    let events = server.stream("/v1/completions", body);
    let text = events.iter().filter_map(|event| event["choices"][0]["text"].as_str());
    assert_eq!(text.collect::<String>(), expected[0]);
    let last = &events[events.len() - 1];
    assert_eq!((&last["usage"]["completion_tokens"], &last["choices"]), (&json!(24), &json!([])));
    assert_eq!(events[events.len() - 2]["choices"][0]["finish_reason"], "length");
    // A request may have several prompts.
    let (_, several) =
        server.post("/v1/completions", &json!({"prompt": &PROMPTS[..2], "max_tokens": 24, "temperature": 0}));
    assert_eq!(several["choices"][1]["text"], expected[1]);
    assert_eq!(several["usage"]["completion_tokens"], 48);
    // A stop string is not part of the text.
    let word = expected[0].split_whitespace().nth(4).expect("some words");
    let mut body = greedy(PROMPTS[0], 24);
    body["stop"] = json!([word]);
    let (_, stopped) = server.post("/v1/completions", &body);
    let before = expected[0].split_once(word).expect("it is there").0;
    let choice = &stopped["choices"][0];
    assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!(before), &json!("stop")));
    assert_eq!(server.metric("requests_active"), 0);
}

#[test]
fn cached_turns_have_the_same_text_and_are_not_reported() {
    let server = Server::start(1, &["--sequences", "2"]);
    let chat = |messages: &Value| {
        let body = json!({"model": "psalm", "messages": messages, "max_tokens": 12, "temperature": 0});
        let (status, response) = server.post("/v1/chat/completions", &body);
        assert_eq!(status, 200, "{response}");
        response
    };
    let first = chat(&json!([{"role": "user", "content": "Who art thou?"}]));
    let content = first["choices"][0]["message"]["content"].clone();
    assert_eq!(first["choices"][0]["message"]["role"], "assistant");
    let turns = json!([{"role": "user", "content": "Who art thou?"}, {"role": "answer", "content": content},
        {"role": "user", "content": "And whence?"}]);
    let second = chat(&turns);
    // The number of cached tokens would tell one user the prompts of another.
    assert!(
        !second.to_string().contains("cached") && !server.get("/metrics").1.contains("cached"),
        "{second}"
    );
    // The text is the same as without the cache.
    let fresh = Server::start(0, &[]);
    let body = json!({"messages": turns, "max_tokens": 12, "temperature": 0});
    assert_eq!(fresh.post("/v1/chat/completions", &body).1["choices"], second["choices"]);
    // A streamed chat begins with the role.
    let events = server.stream("/v1/chat/completions", body);
    assert_eq!(events[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    let text = events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str());
    assert_eq!(text.collect::<String>(), second["choices"][0]["message"]["content"]);
}

#[test]
fn disconnected_client_frees_its_slot() {
    let server = Server::start(1, &[]);
    let mut body = greedy(PROMPTS[0], 400);
    body["stream"] = true.into();
    let request = with_headers("POST", "/v1/completions", "", &body.to_string());
    let mut lines = BufReader::new(server.open(&request)).lines().map_while(Result::ok);
    assert!(lines.any(|line| line.starts_with("data: ")), "no event");
    assert_eq!(server.metric("requests_active"), 1);
    drop(lines);
    let has_ended = wait_until(Duration::from_secs(10), || server.metric("requests_active") == 0);
    assert!(has_ended, "the request is still active after ten seconds");
    assert_eq!(server.metric("requests_cancelled_total"), 1);
    // The only slot is free.
    assert_eq!(server.text(PROMPTS[1], 8), alone(PROMPTS[1], 8));
}

#[test]
fn requests_survive_a_killed_worker() {
    let mut server = Server::start(2, &["--sequences", "4"]);
    let expected: Vec<String> = PROMPTS.iter().map(|prompt| alone(prompt, 60)).collect();
    let mut worker = server.workers.pop().expect("two");
    server.check_concurrent(60, &expected, || {
        std::thread::sleep(Duration::from_millis(150));
        worker.kill();
    });
    assert_eq!(server.metric("ring_up"), 1);
    // The remaining devices have all layers.
    let (_, body) = server.get("/ring");
    let ring = parse_json(&body);
    let layers = integer_values(&ring["devices"], "layers");
    assert_eq!((layers.len(), layers.iter().sum::<u64>()), (2, 8), "{body}");
}

#[test]
fn ring_changes_its_plan_for_what_the_devices_measure() {
    let folder = Folder::new();
    // No computer is as fast as this profile, and messages take longer than all layers together.
    let fast = "profile: d4, values: {cpu.read_bandwidth: 5000 GB/s, cpu.token_overhead: 0 s}";
    let devices = ["d0", "d1", "d2"].map(|name| format!("  - {{name: {name}, {fast}}}")).join("\n");
    let scenario = folder.write("scenario.yaml", scenario_yaml(&devices).replace("llama-8b", "tiny"));
    let edit = |plan: String| plan.replace("strategy: manual", "strategy: overlap");
    let flags = ["--scenario", &scenario, "--sequences", "2"];
    let expected = alone(PROMPTS[0], 200);
    for (more, adapts) in [(&[][..], true), (&["--keep-plan"][..], false)] {
        let server = Server::start_with_plan(2, edit, &[], &[&flags[..], more].concat());
        let asks_until = |is_over: &dyn Fn() -> bool| {
            let is_over = wait_until(Duration::from_mins(1), || {
                assert_eq!(server.text(PROMPTS[0], 200), expected);
                is_over()
            });
            assert!(is_over, "{}", server.get("/metrics").1);
        };
        if adapts {
            asks_until(&|| server.metric("plan_changes_total") > 0);
        } else {
            let since = Instant::now();
            asks_until(&|| since.elapsed() > Duration::from_secs(5));
        }
        let ring = parse_json(&server.get("/ring").1);
        let layers = integer_values(&ring["devices"], "layers");
        assert_eq!(layers == [3, 3, 2], !adapts, "{ring}");
        assert_eq!(ring["status"]["devices"]["d0"]["slowdown"].is_number(), adapts, "{ring}");
        assert_eq!(server.text(PROMPTS[0], 200), expected, "{ring}");
    }
}

/// A fault of a worker while requests are running.
#[derive(Debug, Clone, Copy)]
enum Fault {
    Killed,
    Stopped,
    /// The worker is stopped for three seconds.
    Suspended,
    Dropped,
    Disconnected,
}

#[test]
fn eight_clients_get_their_text_whatever_happens_to_workers() {
    use Fault::{Disconnected, Dropped, Killed, Stopped, Suspended};
    const TOKENS: u32 = 60;
    const FAULTS: [Fault; 5] = [Killed, Stopped, Suspended, Dropped, Disconnected];
    let resume = |workers: &[Worker], victims: &[usize]| {
        for &victim in victims {
            workers[victim].send_signal("CONT");
        }
    };
    let expected: Vec<String> = PROMPTS.iter().map(|prompt| alone(prompt, TOKENS)).collect();
    let mut slowest: BTreeMap<String, Duration> = BTreeMap::new();
    let seeds = trial_seeds().unwrap_or(0..2);
    let count = seeds.end - seeds.start;
    for seed in seeds {
        let fault = FAULTS[(seed % 5) as usize];
        let draft = test_data_path("models/psalm-draft-1m-q8_0.gguf").display().to_string();
        let has_drafts = seed % 2 == 1;
        let more: &[&str] = if has_drafts { &["--draft-model", &draft] } else { &[] };
        let mut server = Server::start(3, &[&["--sequences", "4"], more].concat());
        let mut workers = std::mem::take(&mut server.workers);
        let is_double = seed.is_multiple_of(3);
        let victims = if is_double {
            vec![seed as usize % 3, (seed as usize + 1) % 3]
        } else {
            vec![seed as usize % 3]
        };
        let begun = Instant::now();
        let mut fail = || {
            std::thread::sleep(Duration::from_millis(50 + seed * 37 % 300));
            for &victim in &victims {
                match fault {
                    Killed => workers[victim].kill(),
                    Stopped | Suspended => workers[victim].send_signal("STOP"),
                    Dropped => server.proxies[victim].drop_all_bytes(),
                    Disconnected => server.proxies[victim].disconnect(),
                }
            }
            if matches!(fault, Suspended) {
                std::thread::sleep(Duration::from_secs(3));
                resume(&workers, &victims);
            }
        };
        server.check_concurrent(TOKENS, &expected, || {
            std::thread::scope(|scope| {
                for (at, prompt) in PROMPTS.iter().enumerate() {
                    let events = 1 + (seed as usize * 7 + at * 11) % 40;
                    let server = &server;
                    scope.spawn(move || server.cancel_after(prompt, events));
                }
                fail();
            });
        });
        let with_drafts = if has_drafts { ", drafts" } else { "" };
        let name = format!("{fault:?}{}{with_drafts}", if is_double { ", two workers" } else { "" });
        let longest = slowest.entry(name).or_default();
        *longest = (*longest).max(begun.elapsed());
        if matches!(fault, Stopped) {
            resume(&workers, &victims);
        }
        assert_eq!(server.text(PROMPTS[0], TOKENS), expected[0], "the next request");
        assert_eq!(server.metric("requests_active"), 0, "cancelled requests are gone");
    }
    println!(
        "{count} trials with eight clients and four that disconnect: every text is right; the last of eight responses:"
    );
    for (name, longest) in slowest {
        println!("{name}: {} ms at most", longest.as_millis());
    }
}

#[test]
fn token_and_host_header_are_checked() {
    let folder = Folder::new();
    let (plan, q4_k) = (folder.write_plan(&[8], &[], 128), model_path("q4_k"));
    for (flags, part) in [
        (["--listen", "0.0.0.0:0"], "no API key is required"),
        (["--token", &folder.write_key("short", "secret")], "at least 16"),
        (["--token", &folder.write_key("words", "two words that are long")], "one word"),
        (["--token", &folder.write("open", "0123456789abcdef0123")], "chmod 600"),
    ] {
        assert_rejected(&[&["serve", &plan, "--model", &q4_k], &flags[..]].concat(), &[part]);
    }
    let token = folder.write_key("token", "0123456789abcdef0123\n");
    let server = Server::start(0, &["--token", &token]);
    for wrong in [
        "",
        "Authorization: Bearer 0123456789abcdef0124\r\n",
        "Authorization: Basic 0123456789abcdef0123\r\n",
    ] {
        for path in ["/v1/models", "/metrics", "/ring"] {
            let (status, body) = server.request("GET", path, wrong, "");
            assert!(status == 401 && body.contains("invalid_api_key"), "{path}: {body}");
        }
    }
    let right = "Authorization: Bearer 0123456789abcdef0123\r\n";
    assert_eq!(server.request("GET", "/v1/models", right, "").0, 200);
    assert_eq!((server.get("/health").0, server.get("/").0), (200, 200));
    // DNS rebinding: another site uses a host name that resolves to the address of this server.
    let open = Server::start(0, &[]);
    let response = open.send("GET /v1/models HTTP/1.0\r\nHost: evil.example:80\r\n\r\n");
    assert!(response.starts_with("HTTP/1.0 403") && response.contains("wrong_host"), "{response}");
}

#[test]
fn sampling_fields_change_the_answer() {
    let server = Server::start(0, &[]);
    let post = |more: Value| {
        let mut body = greedy("the LORD", 8);
        body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        let (status, response) = server.post("/v1/completions", &body);
        assert_eq!(status, 200, "{response}");
        response
    };
    let text =
        |response: &Value, choice: usize| response["choices"][choice]["text"].as_str().map(str::to_owned);
    let one = post(json!({}));
    let three = post(json!({"n": 3}));
    assert!((0..3).all(|choice| text(&three, choice) == text(&one, 0)), "{three}");
    assert_eq!(three["usage"]["prompt_tokens"], one["usage"]["prompt_tokens"]);
    assert_eq!(
        three["usage"]["completion_tokens"].as_u64(),
        one["usage"]["completion_tokens"].as_u64().map(|it| 3 * it)
    );
    // A biased token is generated each time, unless a penalty keeps it from coming again.
    let biased = post(json!({"logit_bias": {"300": 100}}));
    let penalised = post(json!({"logit_bias": {"300": 100}, "repeat_penalty": 1e6}));
    assert!(
        text(&biased, 0) != text(&one, 0) && text(&penalised, 0) != text(&biased, 0),
        "{biased} {penalised}"
    );
}

#[test]
fn invalid_requests_get_an_error_that_says_why() {
    let server = Server::start(0, &[]);
    let tool = json!({"type": "function", "function": {"name": "f"}});
    let unknown = json!({"type": "xml"});
    let cases = [
        ("/v1/completions", json!({"prompt": "a", "model": "gpt-4"}), 404, "model_not_found"),
        ("/v1/completions", json!({"prompt": []}), 400, "`prompt` is missing"),
        ("/v1/completions", json!({"prompt": [9_999_999]}), 400, "there is no token 9999999"),
        ("/v1/completions", json!({"prompt": "a", "max_tokens": 100_000}), 400, "context_length_exceeded"),
        ("/v1/completions", json!({"prompt": "word ".repeat(3000)}), 400, "context_length_exceeded"),
        // Rejected by its length, without tokenizing it.
        ("/v1/completions", json!({"prompt": "a!".repeat(2_000_000)}), 400, "at least"),
        (
            "/v1/chat/completions",
            json!({"messages": [{"role": "user", "content": "a ".repeat(2_000_000)}]}),
            400,
            "context_length_exceeded",
        ),
        ("/v1/chat/completions", json!({"prompt": "a"}), 400, "`messages` is missing"),
        ("/v1/completions", json!({"prompt": "a", "temperature": -1}), 400, "temperature"),
        ("/v1/completions", json!({"prompt": "a", "logprobs": 30}), 400, "too many"),
        ("/v1/completions", json!({"prompt": "a", "tools": [tool]}), 400, "use /v1/chat/completions"),
        (
            "/v1/completions",
            json!({"prompt": "a", "grammar": "start: missing"}),
            400,
            "the grammar is not supported",
        ),
        ("/v1/completions", json!({"prompt": "a", "response_format": unknown}), 400, "`response_format`"),
        ("/v1/completions", json!({"prompt": "a", "mirostat": 2}), 400, "`mirostat` is not supported"),
        ("/v1/completions", json!({"prompt": "a", "logit_bias": {"9999999": 1}}), 400, "token 9999999"),
        ("/v1/completions", json!({"prompt": {"a": 1}}), 400, "a string or a list"),
        ("/v1/chat/completions", json!({"messages": []}), 400, "there are no messages"),
        ("/v1/chat/completions", json!({"messages": "hello"}), 400, "invalid_request"),
        ("/v1/embeddings", json!({"input": "a"}), 400, "set `--pooling last`"),
        ("/v1/responses", json!({"input": "a"}), 404, "unknown_url"),
    ];
    for (path, body, status, what) in cases {
        let (own, response) = server.post(path, &body);
        let is_named = response["error"].to_string().contains(what);
        assert!(own == status && is_named, "{path} {body}: {own} {response}");
    }
    assert_eq!(server.request("POST", "/v1/completions", "", "{\"prompt\": ").0, 400);
    let text =
        "POST /v1/completions HTTP/1.0\r\nHost: localhost\r\nContent-Length: 14\r\n\r\n{\"prompt\":\"a\"}";
    assert!(server.send(text).starts_with("HTTP/1.0 415"), "another site's form can send text, but not JSON");
    let (status, body) = server.get("/v1/chat/completions");
    assert!(status == 405 && body.contains("method_not_allowed"), "{status} {body}");
    // A body that exceeds the limit is rejected by its declared length, before it is sent.
    let head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n";
    for length in ["5000000", "9223372036854775807"] {
        let response = server.send(format!("{head}Connection: close\r\nContent-Length: {length}\r\n\r\n"));
        assert!(response.starts_with("HTTP/1.1 413"), "{length}: {response}");
    }
    // A chunked body takes precedence over a length, and the connection is closed (RFC 9112, section 6.1), so that the
    // rest cannot be taken for another request.
    let body = greedy("a", 1).to_string();
    let smuggled = format!(
        "{head}Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n{:x}\r\n{body}\r\n0\r\n\r\nGET /health HTTP/1.1\r\nHost: \
         localhost\r\nConnection: close\r\n\r\n",
        body.len()
    );
    let response = server.send(&smuggled);
    assert!(response.starts_with("HTTP/1.1 200") && response.matches("HTTP/1.1").count() == 1, "{response}");
    let (status, models) = server.get("/v1/models");
    assert!(status == 200 && models.contains("\"psalm\""), "{models}");
    assert!(server.get("/ring").1.contains("\"can_chat\":true"));
    // The server still works.
    assert_eq!(server.text(PROMPTS[2], 8), alone(PROMPTS[2], 8));
}

#[test]
fn chat_page_runs_no_other_scripts() {
    let server = Server::start(0, &[]);
    let page = server.send("GET / HTTP/1.0\r\nHost: localhost\r\n\r\n");
    for header in [
        "content-security-policy: default-src 'none'; script-src 'self';",
        "frame-ancestors 'none'",
        "x-content-type-options: nosniff",
        "referrer-policy: no-referrer",
    ] {
        assert!(page.contains(header), "{header}: {page}");
    }
    // The policy would block inline scripts and styles.
    assert!(!page.contains("<style") && !page.contains("style=") && !page.contains("<script>"), "{page}");
    for (path, kind) in [("page.js", "text/javascript"), ("page.css", "text/css")] {
        assert!(page.contains(&format!("\"{path}\"")), "{page}");
        let file = server.send(format!("GET /{path} HTTP/1.0\r\nHost: localhost\r\n\r\n"));
        assert!(file.starts_with("HTTP/1.0 200") && file.contains(kind), "{file}");
    }
}

#[test]
fn silent_connections_and_unfinished_bodies_shut_nobody_out() {
    let server = Server::start(0, &[]);
    let expected = alone(PROMPTS[0], 4);
    let silent: Vec<TcpStream> = (0..600).map(|_| server.open("")).collect();
    let begun = Instant::now();
    assert_eq!((server.get("/health").0, server.text(PROMPTS[0], 4)), (200, expected.clone()));
    // Without room for another connection, the server would wait a minute.
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    drop(silent);
    let before = server.resident_bytes();
    let body = "x".repeat(3 << 20);
    let request = with_headers("POST", "/v1/completions", "", &body);
    let unfinished = &request[..request.len() - 1];
    let pending: Vec<TcpStream> = (0..40).map(|_| server.open(unfinished)).collect();
    let grown = server.resident_bytes().saturating_sub(before);
    assert!(grown < 100 << 20, "120 MiB of bodies were sent, and {grown} more bytes are resident");
    assert_eq!(server.text(PROMPTS[0], 4), expected);
    drop(pending);
}
