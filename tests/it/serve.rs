//! `hearth serve` gives every client the text that the ring would give it alone, and rejects the unauthorised.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Stdio};
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::chat::with_template;
use crate::processes::{Worker, error, hearth, model, plan, run};

/// The longest that a test waits for an answer.
const PATIENCE: Duration = Duration::from_mins(1);

/// A server over workers of the trained model.
struct Server {
    process: Child,
    address: String,
    workers: Vec<Worker>,
    /// Where the plan and the model with a chat template lie.
    _folder: TempDir,
}

impl Server {
    /// With so many workers beside the head.
    fn start(workers: usize, more: &[&str]) -> Server {
        let folder = tempfile::tempdir().expect("a folder");
        let (chatty, file) = (folder.path().join("chat.gguf"), folder.path().join("plan.yaml"));
        with_template(&chatty);
        let chatty = chatty.display().to_string();
        let workers: Vec<Worker> = (0..workers).map(|_| Worker::start(&chatty)).collect();
        let addresses: Vec<&str> = workers.iter().map(|worker| worker.address.as_str()).collect();
        let windows = [&[8][..], &[4, 4], &[3, 3, 2]][workers.len()];
        fs::write(&file, crate::chat::plan_for(&chatty, windows, &addresses, 512)).expect("a plan");
        let file = file.display().to_string();
        let arguments = [
            "serve",
            &file,
            "--model",
            &chatty,
            "--listen",
            "127.0.0.1:0",
            "--threads",
            "1",
            "--name",
            "psalm",
        ];
        let mut command = hearth(&[&arguments[..], more].concat());
        command.env_remove("HEARTH_TOKEN").stdout(Stdio::piped()).stderr(Stdio::null());
        let mut process = command.spawn().expect("the server starts");
        let mut line = String::new();
        BufReader::new(process.stdout.take().expect("piped"))
            .read_line(&mut line)
            .expect("it says where it is");
        let (_, rest) = line.split_once("http://").expect("an address");
        let address = rest.split_once(',').expect("more of it").0.to_owned();
        Server { process, address, workers, _folder: folder }
    }

    fn open(&self, request: &str) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).expect("it listens");
        stream.set_read_timeout(Some(PATIENCE)).expect("a time limit");
        // A request that is too long is answered before all of it is there.
        let _ = stream.write_all(request.as_bytes());
        stream
    }

    /// Status and body.
    fn ask(&self, method: &str, path: &str, headers: &str, body: &str) -> (u16, String) {
        let length = body.len();
        let kind = if body.is_empty() { "" } else { "Content-Type: application/json\r\n" };
        let request = format!(
            "{method} {path} HTTP/1.0\r\nHost: localhost\r\n{kind}{headers}Content-Length: {length}\r\n\r\n{body}"
        );
        let mut answer = String::new();
        let _ = self.open(&request).read_to_string(&mut answer);
        let (head, body) = answer.split_once("\r\n\r\n").expect("a head and a body");
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
        (status.unwrap_or_else(|| panic!("no status in {head}")), body.to_owned())
    }

    fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let (status, body) = self.ask("POST", path, "", &body.to_string());
        (status, serde_json::from_str(&body).unwrap_or_else(|_| panic!("no JSON: {body}")))
    }

    fn get(&self, path: &str) -> (u16, String) {
        self.ask("GET", path, "", "")
    }

    /// The greedy text after a prompt.
    fn text(&self, prompt: &str, tokens: u32) -> String {
        let (status, answer) = self.post("/v1/completions", &greedy(prompt, tokens));
        assert_eq!(status, 200, "{answer}");
        answer["choices"][0]["text"].as_str().expect("a text").to_owned()
    }

    /// A metric without labels.
    fn metric(&self, name: &str) -> f64 {
        let text = self.get("/metrics").1;
        let line = text.lines().find(|line| line.starts_with(&format!("hearth_{name} ")));
        line.and_then(|line| line.rsplit_once(' ')?.1.parse().ok())
            .unwrap_or_else(|| panic!("{name}: {text}"))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn greedy(prompt: &str, tokens: u32) -> Value {
    json!({"prompt": prompt, "max_tokens": tokens, "temperature": 0})
}

/// What `hearth execute` gives for the same prompt in one process.
fn alone(prompt: &str, tokens: u32) -> String {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("plan.yaml");
    fs::write(&file, plan("q4_k", &[8], &[], 256)).expect("a plan");
    let (file, model, tokens) = (file.display().to_string(), model("q4_k"), tokens.to_string());
    let output =
        run(&["execute", &file, "--model", &model, "--prompt", prompt, "--tokens", &tokens, "--json"]);
    let told: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    told["text"].as_str().expect("a text").to_owned()
}

/// The pieces of a stream: each event's document, without the last word.
fn pieces(body: &str) -> Vec<Value> {
    let mut events: Vec<&str> = body.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
    assert_eq!(events.pop(), Some("[DONE]"), "{body}");
    events.into_iter().map(|event| serde_json::from_str(event).expect("a document")).collect()
}

const PROMPTS: [&str; 4] = ["And Jesus said unto them,", "In the beginning", "The LORD is my", "Blessed are"];

#[test]
fn concurrent_requests_get_the_text_of_a_single_one() {
    let server = Server::start(2, &["--sequences", "3"]);
    let expected: Vec<String> = PROMPTS.iter().map(|prompt| alone(prompt, 24)).collect();
    // Eight at once over three seats.
    std::thread::scope(|scope| {
        let asked: Vec<_> = (0..8)
            .map(|it| {
                scope.spawn({
                    let server = &server;
                    move || server.text(PROMPTS[it % 4], 24)
                })
            })
            .collect();
        for (it, text) in asked.into_iter().enumerate() {
            assert_eq!(text.join().expect("no panic"), expected[it % 4]);
        }
    });
    // In pieces they are the same, and what it took comes last.
    let mut body = greedy(PROMPTS[0], 24);
    body["stream"] = true.into();
    body["stream_options"] = json!({"include_usage": true});
    let pieces = pieces(&server.ask("POST", "/v1/completions", "", &body.to_string()).1);
    let text = pieces.iter().filter_map(|piece| piece["choices"][0]["text"].as_str());
    assert_eq!(text.collect::<String>(), expected[0]);
    let last = &pieces[pieces.len() - 1];
    assert_eq!((&last["usage"]["completion_tokens"], &last["choices"]), (&json!(24), &json!([])));
    assert_eq!(pieces[pieces.len() - 2]["choices"][0]["finish_reason"], "length");
    // Several prompts of one request.
    let (_, several) =
        server.post("/v1/completions", &json!({"prompt": &PROMPTS[..2], "max_tokens": 24, "temperature": 0}));
    assert_eq!(several["choices"][1]["text"], expected[1]);
    assert_eq!(several["usage"]["completion_tokens"], 48);
    // A stop string ends it before itself.
    let word = expected[0].split_whitespace().nth(4).expect("some words");
    let mut body = greedy(PROMPTS[0], 24);
    body["stop"] = json!([word]);
    let (_, stopped) = server.post("/v1/completions", &body);
    let before = expected[0].split_once(word).expect("it is there").0;
    assert_eq!(
        (&stopped["choices"][0]["text"], &stopped["choices"][0]["finish_reason"]),
        (&json!(before), &json!("stop"))
    );
    assert!(server.metric("requests_active").abs() < 0.5);
}

#[test]
fn shared_prefix_is_taken_from_the_cache() {
    let server = Server::start(1, &["--sequences", "2"]);
    let ask = |messages: &Value| {
        let body = json!({"model": "psalm", "messages": messages, "max_tokens": 12, "temperature": 0});
        let (status, answer) = server.post("/v1/chat/completions", &body);
        assert_eq!(status, 200, "{answer}");
        answer
    };
    let first = ask(&json!([{"role": "user", "content": "Who art thou?"}]));
    let said = first["choices"][0]["message"]["content"].clone();
    let held =
        |answer: &Value| answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("told");
    assert_eq!((held(&first), &first["choices"][0]["message"]["role"]), (0, &json!("assistant")));
    let turns = json!([{"role": "user", "content": "Who art thou?"}, {"role": "answer", "content": said},
        {"role": "user", "content": "And whence?"}]);
    let second = ask(&turns);
    let asked = first["usage"]["prompt_tokens"].as_u64().expect("told");
    assert!(held(&second) >= asked, "{second}");
    // What was known gives what is computed anew.
    let fresh = Server::start(0, &[]);
    let body = json!({"messages": turns, "max_tokens": 12, "temperature": 0});
    assert_eq!(fresh.post("/v1/chat/completions", &body).1["choices"], second["choices"]);
    // A chat in pieces begins with who speaks.
    let body = json!({"messages": turns, "max_tokens": 12, "temperature": 0, "stream": true});
    let pieces = pieces(&server.ask("POST", "/v1/chat/completions", "", &body.to_string()).1);
    assert_eq!(pieces[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    let text: String =
        pieces.iter().filter_map(|piece| piece["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(text, second["choices"][0]["message"]["content"].as_str().expect("a text"));
}

#[test]
fn disconnected_client_frees_its_slot() {
    let server = Server::start(1, &[]);
    let mut body = greedy(PROMPTS[0], 400);
    body["stream"] = true.into();
    let body = body.to_string();
    let request = format!(
        "POST /v1/completions HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let stream = server.open(&request);
    let mut lines = BufReader::new(stream).lines();
    let mut before = Vec::new();
    let mut told = lines.by_ref().map_while(Result::ok).inspect(|line| before.push(line.clone()));
    assert!(told.any(|line| line.starts_with("data: ")), "{before:#?}");
    assert!((server.metric("requests_active") - 1.0).abs() < 0.5);
    drop(lines);
    let is_over = (0..500).any(|_| {
        std::thread::sleep(Duration::from_millis(20));
        server.metric("requests_active") < 0.5
    });
    assert!(is_over, "it is still under way after ten seconds");
    assert!((server.metric("requests_cancelled_total") - 1.0).abs() < 0.5);
    // The only seat is free.
    assert_eq!(server.text(PROMPTS[1], 8), alone(PROMPTS[1], 8));
}

#[test]
fn requests_survive_a_killed_worker() {
    let mut server = Server::start(2, &["--sequences", "4"]);
    let expected: Vec<String> = PROMPTS.iter().map(|prompt| alone(prompt, 60)).collect();
    let mut worker = server.workers.pop().expect("two");
    std::thread::scope(|scope| {
        let server = &server;
        let asked: Vec<_> = (0..8).map(|it| scope.spawn(move || server.text(PROMPTS[it % 4], 60))).collect();
        std::thread::sleep(Duration::from_millis(150));
        worker.kill();
        for (it, text) in asked.into_iter().enumerate() {
            assert_eq!(text.join().expect("no panic"), expected[it % 4], "request {it}");
        }
    });
    assert!((server.metric("ring_up") - 1.0).abs() < 0.5);
    // Whoever looks sees the ring as it is now.
    let (_, body) = server.get("/ring");
    let ring: Value = serde_json::from_str(&body).expect("JSON");
    let devices = ring["devices"].as_array().expect("devices");
    let layers: u64 = devices.iter().map(|device| device["layers"].as_u64().expect("a number")).sum();
    assert_eq!((devices.len(), layers), (2, 8), "{body}");
}

#[test]
fn token_and_host_header_are_checked() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        fs::write(&path, text).expect("a file");
        path.display().to_string()
    };
    let plan = file("plan.yaml", &plan("q4_k", &[8], &[], 128));
    let serve = |more: &[&str]| error(&[&["serve", &plan, "--model", &model("q4_k")][..], more].concat(), 2);
    assert!(serve(&["--listen", "0.0.0.0:0"]).contains("there is no token"));
    assert!(serve(&["--token", &file("short", "secret")]).contains("at least 16"));
    assert!(serve(&["--token", &file("words", "two words that are long")]).contains("one word"));
    let token = file("token", "0123456789abcdef0123\n");
    let server = Server::start(0, &["--token", &token]);
    for wrong in [
        "",
        "Authorization: Bearer 0123456789abcdef0124\r\n",
        "Authorization: Basic 0123456789abcdef0123\r\n",
    ] {
        for path in ["/v1/models", "/metrics", "/ring"] {
            let (status, body) = server.ask("GET", path, wrong, "");
            assert!(status == 401 && body.contains("invalid_api_key"), "{path}: {body}");
        }
    }
    assert_eq!(server.ask("GET", "/v1/models", "Authorization: Bearer 0123456789abcdef0123\r\n", "").0, 200);
    assert_eq!((server.get("/health").0, server.get("/").0), (200, 200));
    // A page of another site that has its name point here.
    let open = Server::start(0, &[]);
    let mut answer = String::new();
    let request = "GET /v1/models HTTP/1.0\r\nHost: evil.example:80\r\n\r\n";
    open.open(request).read_to_string(&mut answer).expect("an answer");
    assert!(answer.starts_with("HTTP/1.0 403") && answer.contains("wrong_host"), "{answer}");
}

#[test]
fn invalid_requests_get_an_error_that_says_why() {
    let server = Server::start(0, &[]);
    let cases = [
        ("/v1/completions", json!({"prompt": "a", "model": "gpt-4"}), 404, "model_not_found"),
        ("/v1/completions", json!({"prompt": []}), 400, "the prompt is missing"),
        ("/v1/completions", json!({"prompt": [9_999_999]}), 400, "there is no token 9999999"),
        ("/v1/completions", json!({"prompt": "a", "max_tokens": 100_000}), 400, "context_length_exceeded"),
        ("/v1/completions", json!({"prompt": "word ".repeat(3000)}), 400, "context_length_exceeded"),
        ("/v1/completions", json!({"prompt": "a", "temperature": -1}), 400, "temperature"),
        ("/v1/completions", json!({"prompt": "a", "n": 3}), 400, "`n` is not supported"),
        ("/v1/completions", json!({"prompt": {"a": 1}}), 422, "invalid_request"),
        ("/v1/chat/completions", json!({"messages": []}), 400, "there is no message"),
        ("/v1/chat/completions", json!({"messages": "hello"}), 422, "invalid_request"),
        ("/v1/embeddings", json!({"input": "a"}), 404, "unknown_url"),
    ];
    for (path, body, status, what) in cases {
        let (seen, answer) = server.post(path, &body);
        assert!(
            seen == status && answer["error"].to_string().contains(what),
            "{path} {body}: {seen} {answer}"
        );
    }
    assert_eq!(server.ask("POST", "/v1/completions", "", "{\"prompt\": ").0, 400);
    let (status, answer) = server.get("/v1/chat/completions");
    assert!(status == 405 && answer.contains("method_not_allowed"), "{status} {answer}");
    // Said to be longer than anything that is read.
    let mut answer = String::new();
    let head = "POST /v1/completions HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\n";
    let long = format!("{head}Content-Length: 5000000\r\n\r\n{}", "x".repeat(4_300_000));
    let _ = server.open(&long).read_to_string(&mut answer);
    assert!(answer.is_empty() || answer.contains(" 413 "), "{answer}");
    let (status, models) = server.get("/v1/models");
    assert!(status == 200 && models.contains("\"psalm\""), "{models}");
    assert!(server.get("/ring").1.contains("\"can_chat\":true"));
    // After all that it still answers.
    assert_eq!(server.text(PROMPTS[2], 8), alone(PROMPTS[2], 8));
}
