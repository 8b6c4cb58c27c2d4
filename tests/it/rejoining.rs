//! Tests that a device that returns rejoins the ring at the next request, and keeps the layers that it has fetched.
//!
//! The head runs in this process, so that it can handle several requests; workers are separate processes.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hearth_profiles::Document;
use hearth_ring::{
    GenerationRequest, Listener, LocalModel, Ring, RingError, RingOptions, TcpTransport, Transport,
};
use hearth_runtime::{Sampler, SamplerOptions, Tokenizer};
use hearth_schema::run_events::RunEventKind;
use hearth_schema::trace::StepKind;
use hearth_schema::{Plan, Trace};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;

use crate::folder::Folder;
use crate::namespace::{LinkEnd, NetworkNamespace};
use crate::processes::{HeadOutput, PROMPT, Worker, encrypted_transport, model_path, plan_yaml, send_signal};
use crate::proxy::Proxy;
use crate::recovery::{replanned_event, single_process_tokens};

/// A head in this process, with a connected ring, that handles several requests.
struct Session<T: Transport> {
    runtime: Runtime,
    ring: Ring<T>,
    prompt: Vec<u32>,
}

/// Returns a plan with these windows for the test model in a weight format, with workers at these addresses.
fn parsed_plan(format: &str, windows: &[u32], addresses: &[&str]) -> Plan {
    Plan::from_yaml(&plan_yaml(format, windows, addresses, 512)).expect("a plan")
}

impl<T: Transport> Session<T> {
    fn connect(transport: &T, format: &str, plan: Plan) -> Result<Session<T>, RingError> {
        let runtime = Runtime::new().expect("threads");
        let local = Arc::new(LocalModel::open(Path::new(&model_path(format))).expect("a test model"));
        let tokenizer = Tokenizer::new(&local.weights.model().metadata).expect("a tokenizer");
        let prompt = tokenizer.encode(PROMPT, false).expect("a text");
        let options = RingOptions { threads: 1, ..RingOptions::default() };
        let ring = runtime.block_on(Ring::connect(transport, plan, local, options))?;
        Ok(Session { runtime, ring, prompt })
    }

    /// Generates `count` tokens, and calls `on_token` after each with the number of tokens so far. There is a pause before
    /// each token after the first `pause_from` ones.
    fn request(
        &mut self,
        count: usize,
        (pause_from, pause): (usize, Duration),
        mut on_token: impl FnMut(usize) + Send + 'static,
    ) -> (HeadOutput, Option<Trace>) {
        let options = SamplerOptions { temperature: 0.0, ..SamplerOptions::default() };
        let mut sampler = Sampler::new(options).expect("greedy");
        let mut sampled = 0;
        let sample = Box::new(move |logits: &[f32]| {
            sampled += 1;
            if sampled > pause_from {
                std::thread::sleep(pause);
            }
            sampler.sample(logits)
        });
        let request = GenerationRequest::single_sequence(self.prompt.clone(), count as u32, sample);
        let times: Arc<Mutex<Vec<Instant>>> = Arc::default();
        let shared = times.clone();
        let response = self.ring.generate(request, move |_, _| {
            let mut times = shared.lock().expect("no panic");
            times.push(Instant::now());
            on_token(times.len());
        });
        let limit = pause * (count - pause_from) as u32 + Duration::from_mins(1);
        let ended = self.runtime.block_on(async { tokio::time::timeout(limit, response).await });
        let times = times.lock().expect("no panic");
        let gaps = times.windows(2).map(|pair| (pair[1] - pair[0]).saturating_sub(pause));
        let (max_token_gap, timed_out) = (gaps.max().unwrap_or_default(), ended.is_err());
        let mut observed = HeadOutput { max_token_gap, timed_out, ..HeadOutput::default() };
        let generated = match ended {
            Ok(Ok(generated)) => Some(generated),
            Ok(Err(unfinished)) => {
                observed.other_output = unfinished.error.to_string();
                unfinished.partial_result.map(|generated| *generated)
            }
            Err(_) => None,
        };
        observed.tokens =
            generated.as_ref().map_or(vec![], |generated| generated.first_sequence_tokens().to_vec());
        (observed, generated.map(|generated| generated.trace))
    }

    fn short_request(&mut self, count: usize) -> (HeadOutput, Option<Trace>) {
        self.request(count, (0, Duration::ZERO), |_| {})
    }

    fn close(self) {
        self.runtime.block_on(self.ring.close());
    }
}

/// Returns the names of the devices that computed layers in a run.
fn members(trace: &Trace) -> Vec<String> {
    let computing: BTreeSet<u16> =
        trace.records.iter().filter(|it| it.kind == StepKind::Compute).map(|it| it.device_index).collect();
    let name = |&device: &u16| trace.header.devices[usize::from(device)].name.clone();
    computing.iter().map(name).collect()
}

fn lost_devices(trace: &Trace) -> Vec<&str> {
    let silent = trace.run_events.iter().filter(|it| it.kind == RunEventKind::Silent);
    silent.filter_map(|it| it.device.as_deref()).collect()
}

/// Stops a worker at token `at` and resumes it after `duration`, while the run continues. Returns the run's output, and
/// whether the worker was lost only once and rejoined the ring at the next request, which gave the expected tokens.
pub fn suspend_worker(victim: usize, at: usize, duration: Duration, expected: &[u32]) -> (HeadOutput, bool) {
    let workers: Vec<Worker> = (0..3).map(|_| Worker::start(&model_path("q4_k"))).collect();
    let addresses: Vec<&str> = workers.iter().map(|worker| worker.address.as_str()).collect();
    let plan = parsed_plan("q4_k", &[1, 2, 1, 2], &addresses);
    let mut session = Session::connect(&TcpTransport, "q4_k", plan).expect("a ring");
    // The pause is long enough that the worker is resumed before the end of the run.
    let pause = (duration + Duration::from_secs(4)) / (expected.len() - at) as u32;
    let process = workers[victim].id();
    let (observed, trace) = session.request(expected.len(), (at, pause), move |count| {
        if count == at {
            send_signal(process, "STOP");
            std::thread::spawn(move || {
                std::thread::sleep(duration);
                send_signal(process, "CONT");
            });
        }
    });
    let name = format!("d{}", victim + 1);
    let lost_once = trace.is_some_and(|trace| lost_devices(&trace) == [name.as_str()]);
    let (again, trace) = session.short_request(8);
    let rejoined = trace.is_some_and(|trace| members(&trace).contains(&name));
    println!("lost once: {lost_once}, rejoined: {rejoined}");
    (observed, lost_once && rejoined && again.tokens == expected[..8])
}

/// Checks that the ring loses `d2` when `fail` is called during a request, and includes it again after `restore`.
fn check_rejoining<T: Transport>(
    session: &mut Session<T>,
    fail: impl FnOnce() + Send + 'static,
    restore: impl FnOnce(),
) {
    let expected = single_process_tokens(40);
    let all = ["d0", "d1", "d2"];
    let (before, trace) = session.short_request(4);
    assert_eq!(before.tokens, expected[..4]);
    assert_eq!(members(&trace.expect("a trace")), all);
    let mut fail = Some(fail);
    let (during, trace) = session.request(40, (0, Duration::from_millis(20)), move |count| {
        if let Some(fail) = fail.take_if(|_| count == 20) {
            fail();
        }
    });
    assert_eq!(during.tokens, expected, "{}", during.other_output);
    let trace = trace.expect("a trace");
    assert_eq!(lost_devices(&trace), ["d2"]);
    let what = &replanned_event(&trace).details;
    assert!(what.starts_with("d0 ") && !what.contains("d2"), "{what}");
    restore();
    let (after, trace) = session.short_request(8);
    assert_eq!(after.tokens, expected[..8], "{}", after.other_output);
    let trace = trace.expect("a trace");
    assert_eq!(members(&trace), all);
    assert_eq!(trace.run_events, [], "d2 is in the ring from the beginning");
}

#[test]
fn restarted_worker_rejoins_at_the_next_request() {
    let (first, second) = (Worker::start(&model_path("q4_k")), Worker::start(&model_path("q4_k")));
    let (process, address) = (second.id(), second.address.clone());
    let plan = parsed_plan("q4_k", &[2, 1, 1], &[&first.address, &address]);
    let mut session = Session::connect(&TcpTransport, "q4_k", plan).expect("a ring");
    let mut again = None;
    check_rejoining(
        &mut session,
        move || send_signal(process, "KILL"),
        || {
            drop(second);
            again = Some(Worker::with_flags(&["--listen", &address, "--model", &model_path("q4_k")]));
        },
    );
    session.close();
}

#[test]
fn resumed_worker_rejoins_at_the_next_request() {
    let expected = single_process_tokens(40);
    let (observed, rejoined) = suspend_worker(1, 10, Duration::from_secs(3), &expected);
    assert_eq!(observed.tokens, expected, "{}", observed.other_output);
    assert!(rejoined && !observed.timed_out);
}

#[test]
fn reconnected_worker_rejoins_at_the_next_request() {
    let Some(namespace) = NetworkNamespace::for_test("reconnected_worker_rejoins_at_the_next_request") else {
        return;
    };
    let (folder, q4_k) = (Folder::new(), model_path("q4_k"));
    let key = folder.write_ring_key();
    let flags = ["--model", &q4_k, "--key", &key];
    let near =
        Worker::with_flags(&[&flags[..], &["--listen", &format!("{}:0", namespace.host_address)]].concat());
    let far = Worker::in_namespace(&namespace, &flags);
    let plan = parsed_plan("q4_k", &[2, 1, 1], &[&near.address, &far.address]);
    let mut session = Session::connect(&encrypted_transport(&key), "q4_k", plan).expect("a ring");
    let namespace = Arc::new(namespace);
    let link = namespace.clone();
    check_rejoining(
        &mut session,
        move || link.set_link_up(LinkEnd::Namespace, false),
        || {
            namespace.set_link_up(LinkEnd::Namespace, true);
            // Waits until the neighbour table is rebuilt and the worker has noticed the loss of its head.
            std::thread::sleep(Duration::from_secs(3));
        },
    );
    session.close();
}

#[derive(Clone, Default)]
struct ProxiedTransport {
    /// Number of bytes received by the proxy after which it closes all connections.
    limit: u64,
    proxy: Arc<Mutex<Option<Proxy>>>,
}

struct ProxiedListener {
    listener: TcpListener,
    address: String,
}

impl Transport for ProxiedTransport {
    type Stream = TcpStream;
    type Listener = ProxiedListener;

    async fn connect(&self, address: &str) -> io::Result<TcpStream> {
        TcpTransport.connect(address).await
    }

    async fn bind(&self, address: &str) -> io::Result<ProxiedListener> {
        let listener = TcpTransport.bind(address).await?;
        let proxy = Proxy::with_byte_limit(&listener.address(), self.limit);
        let address = proxy.address.clone();
        *self.proxy.lock().expect("no panic") = Some(proxy);
        Ok(ProxiedListener { listener, address })
    }
}

impl Listener for ProxiedListener {
    type Stream = TcpStream;

    async fn accept(&mut self) -> io::Result<TcpStream> {
        Listener::accept(&mut self.listener).await
    }

    fn address(&self) -> String {
        self.address.clone()
    }
}

/// Size in bytes of a chunk, the unit in which workers fetch a model.
const CHUNK: usize = 1 << 20;
/// Size of the hash of a chunk in a manifest, in bytes.
const HASH: usize = 32;

/// Counts the chunks of a model that are present in a folder, and checks each against the bytes of the model file.
fn count_chunks(cache: &Folder, source: &[u8]) -> usize {
    let Some(name) = cache.file_names().pop() else { return 0 };
    let model = cache.path().join(name);
    let manifest = std::fs::read(model.join("model.gguf.chunks")).expect("a manifest");
    let file = std::fs::read(model.join("model.gguf")).expect("a file");
    let entries = manifest.chunks(HASH).enumerate().filter(|(_, hash)| hash.iter().any(|&byte| byte != 0));
    let present: Vec<usize> = entries.map(|(index, _)| index).collect();
    for &index in &present {
        let range = index * CHUNK..source.len().min((index + 1) * CHUNK);
        assert!(file[range.clone()] == source[range], "chunk {index} differs from the source");
    }
    present.len()
}

#[test]
fn interrupted_fetch_resumes() {
    let cache = Folder::new();
    let worker = Worker::with_flags(&["--listen", "127.0.0.1:0", "--fetch", &cache.path_of("")]);
    let source = std::fs::read(model_path("f16")).expect("a test model");
    let plan = parsed_plan("f16", &[2, 6], &[&worker.address]);
    let mut before = 0;
    // The connection breaks in the third MiB, then in the sixth, then not at all.
    for limit in [5 << 19, 11 << 19, u64::MAX] {
        let transport = ProxiedTransport { limit, ..ProxiedTransport::default() };
        let session = Session::connect(&transport, "f16", plan.clone());
        let proxy = transport.proxy.lock().expect("no panic");
        let received = proxy.as_ref().expect("the head listens").received_bytes();
        drop(proxy);
        let chunks = count_chunks(&cache, &source);
        println!("{received} bytes received, {chunks} chunks present");
        // All other bytes, such as the headers of frames, are less than half a chunk.
        let sent = (chunks - before) as u64 * CHUNK as u64;
        if limit < u64::MAX {
            let error = session.err().expect("the connection broke").to_string();
            assert!(error.contains("`d1`"), "{error}");
            assert!(chunks > before && sent <= received, "{chunks} chunks after {before}");
        } else {
            let mut session = session.expect("a ring");
            assert!(chunks > before && received < sent + CHUNK as u64 / 2, "{received} bytes for {sent}");
            let alone = Session::connect(&TcpTransport, "f16", parsed_plan("f16", &[8], &[]));
            let alone = alone.expect("one device").short_request(8).0;
            assert_eq!(session.short_request(8).0.tokens, alone.tokens);
        }
        before = chunks;
    }
    assert!(before * CHUNK < source.len() + CHUNK, "{before} chunks");
}
