//! Entry of the fuzz target: HTTP requests of clients.
//!
//! The entry gets arbitrary bytes. It calls the server, and panics if the response violates a property. The fuzz target
//! (`fuzz/`) and the test below call the entry; no program contains it.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, LazyLock, Mutex, OnceLock};
use std::time::Duration;

use hearth_profiles::Document;
use hearth_profiles::gguf::{Array, Metadata, Value};
use hearth_ring::{ResponseEvent, SequenceOutput};
use hearth_runtime::{ChatTemplate, Tokenizer};
use hearth_schema::Plan;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::connections::http_protocol;
use crate::{AppState, ChatFormat, Metrics, router};

/// Returns the maximum memory of the entry for an input of this length, in bytes. source: assumed; a response of 64
/// prompts has some ten KiB, and a JSON value takes a few hundred bytes in the several forms of a request
pub fn allowed_memory(input_bytes: usize) -> usize {
    (8 << 20) + 1000 * input_bytes
}

const PIPE_BYTES: usize = 1 << 20;
const VOCAB_SIZE: u32 = 258;
const EMBEDDING_LENGTH: u32 = 4;

const PLAN: &str = "schema: plan/1
scenario: {name: t, digest: 'sha256:0'}
model: {name: m, shape_digest: 'shape:0', layers: 2}
planner: {strategy: manual}
rounds: 1
context: 64
kv_cache: f16
devices:
- {name: a, role: head, window: 2, gpu_layers: 0, residency: {}}
";

const TEMPLATE: &str =
    "{% for m in messages %}{{ '<s>' + m.role + ' ' + m.content | trim + '</s>' }}{% endfor %}";

/// Sends the input to the server as the bytes of a connection. The server has a small vocabulary, and a ring that
/// generates tokens at once.
///
/// - The server answers, or closes the connection, without waiting for a time limit.
/// - No request is the fault of the server: no status is 500 or above.
pub fn http(input: &[u8]) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    runtime.expect("a runtime").block_on(async {
        let start = Instant::now();
        let (request_tx, mut requests) = mpsc::unbounded_channel::<hearth_ring::Request>();
        let service = TowerToHyperService::new(router(Arc::new(state(request_tx))));
        let ring = tokio::spawn(async move {
            while let Some(request) = requests.recv().await {
                let _ = request.response_tx.send(ResponseEvent::Started { cached_tokens: 0 });
                if let SequenceOutput::Embedding(embedding_tx) = request.output {
                    let _ = embedding_tx.send(vec![1.0; EMBEDDING_LENGTH as usize]);
                    continue;
                }
                for token in (0..request.max_new_tokens).chain([VOCAB_SIZE - 1]) {
                    let _ = request.response_tx.send(ResponseEvent::Token(token % VOCAB_SIZE));
                }
            }
        });
        let (mut client, server) = tokio::io::duplex(PIPE_BYTES);
        let mut http = http_protocol();
        // The end of the input does not close the connection before the response.
        http.half_close(true);
        let serve = http.serve_connection(TokioIo::new(server), service);
        let exchange = async {
            // The server closes the connection at an error.
            let _ = client.write_all(input).await;
            let _ = client.shutdown().await;
            let mut response = Vec::new();
            let _ = client.read_to_end(&mut response).await;
            response
        };
        let (response, _) = tokio::join!(exchange, serve);
        ring.abort();
        let is_error = |line: &[u8]| line.starts_with(b"HTTP/1.1 5");
        assert!(!response.split(|&byte| byte == b'\n').any(is_error), "{}", response.escape_ascii());
        assert_eq!(start.elapsed(), Duration::ZERO, "the server waited for a time limit");
    });
}

fn state(request_tx: mpsc::UnboundedSender<hearth_ring::Request>) -> AppState {
    static MODEL: LazyLock<(Metadata, Arc<Tokenizer>)> = LazyLock::new(|| {
        let metadata = metadata();
        let tokenizer = Tokenizer::new(&metadata).expect("a valid tokenizer");
        (metadata, Arc::new(tokenizer))
    });
    let (metadata, tokenizer) = &*MODEL;
    let metrics = Arc::<Metrics>::default();
    metrics.set_ring_up(true);
    AppState {
        request_tx,
        tokenizer: tokenizer.clone(),
        chat_format: ChatTemplate::new(metadata, tokenizer)
            .map(|template| ChatFormat::new(template, tokenizer))
            .map_err(|error| error.to_string()),
        embedding_length: Ok(EMBEDDING_LENGTH),
        grammars: OnceLock::new(),
        model_name: "m".into(),
        context_length: 64,
        vocab_size: VOCAB_SIZE,
        metrics,
        bearer_token: None,
        cors_origins: Vec::new(),
        plan: Mutex::new(Plan::from_yaml(PLAN).expect("a valid plan")),
        start_unix_time: 0,
        request_count: AtomicU64::new(0),
    }
}

/// Returns the metadata of a tokenizer with 256 byte tokens, `<s>` and `</s>`.
fn metadata() -> Metadata {
    let bytes = (0..256).map(|byte| format!("<0x{byte:02X}>"));
    let tokens: Vec<String> = bytes.chain(["<s>".to_owned(), "</s>".to_owned()]).collect();
    let types = (0..tokens.len()).map(|id| if id < 256 { 6 } else { 3 }).collect();
    let scores = vec![0.0; tokens.len()];
    let mut metadata = Metadata::default();
    metadata.insert("tokenizer.chat_template".into(), Value::Str(TEMPLATE.into()));
    let keys = [
        ("model", Value::Str("llama".into())),
        ("tokens", Value::Array(Array::Str(tokens))),
        ("token_type", Value::Array(Array::I32(types))),
        ("scores", Value::Array(Array::F32(scores))),
        ("bos_token_id", Value::U32(256)),
        ("eos_token_id", Value::U32(257)),
    ];
    for (key, value) in keys {
        metadata.insert(format!("tokenizer.ggml.{key}"), value);
    }
    metadata
}

#[cfg(test)]
#[path = "../../fuzz/replay.rs"]
mod replay;

#[test]
fn http_corpus() {
    replay::replay("http", allowed_memory, http);
}
