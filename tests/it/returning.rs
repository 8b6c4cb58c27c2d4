//! A device that comes back is in the ring at the next request, and keeps what it fetched.
//!
//! The head is this process, so that it has several requests; workers are processes. A worker is killed and started
//! again, stopped and woken, or its link is taken down and up again. The head goes on without it, what it says when it
//! wakes up disturbs nothing, and the next request has it computing again.

#![allow(clippy::disallowed_methods)] // how long a ring stands still is what these tests are about

use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hearth_profiles::Document;
use hearth_ring::{Key, Listener, LocalModel, Network, Request, Ring, RingError, RingOptions, Sealed, Tcp};
use hearth_runtime::{Sampler, SamplerOptions, Tokenizer};
use hearth_schema::Plan;
use hearth_schema::Trace;
use hearth_schema::run_events::RunEventKind;
use hearth_schema::trace::Kind;
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;

use crate::gate::Gate;
use crate::namespace::{End, Namespace};
use crate::processes::{Worker, model, plan, signal};
use crate::recovery::{PROMPT, Seen, undisturbed};

/// The head of a ring, for several requests.
pub struct Session<N: Network> {
    runtime: Runtime,
    ring: Ring<N>,
    prompt: Vec<u32>,
}

/// A plan of these windows whose workers are at these addresses.
fn planned(format: &str, windows: &[u32], addresses: &[&str]) -> Plan {
    Plan::from_yaml(&plan(format, windows, addresses, 512)).expect("a plan")
}

impl<N: Network> Session<N> {
    /// Brings a ring up.
    pub fn begin(network: &N, format: &str, plan: Plan) -> Result<Session<N>, RingError> {
        let runtime = Runtime::new().expect("threads");
        let local = Arc::new(LocalModel::open(Path::new(&model(format))).expect("a test model"));
        let tokenizer = Tokenizer::new(&local.weights.model().metadata).expect("a tokenizer");
        let prompt = tokenizer.encode(PROMPT, false).expect("a text");
        let options = RingOptions { threads: 1, ..RingOptions::default() };
        let ring = runtime.block_on(Ring::connect(network, plan, local, options))?;
        Ok(Session { runtime, ring, prompt })
    }

    /// Generates, with a pause before each token, and calls back when so many are out.
    pub fn ask(
        &mut self,
        count: usize,
        pause: Duration,
        mut at: impl FnMut(usize) + Send + 'static,
    ) -> (Seen, Option<Trace>) {
        let options = SamplerOptions { temperature: 0.0, ..SamplerOptions::default() };
        let mut sampler = Sampler::new(options).expect("greedy");
        let sample = Box::new(move |logits: &[f32]| {
            std::thread::sleep(pause);
            sampler.sample(logits)
        });
        let request = Request::one(self.prompt.clone(), count as u32, sample);
        let times: Arc<Mutex<Vec<Instant>>> = Arc::default();
        let out = times.clone();
        let asked = self.ring.generate(request, move |_, _| {
            let mut out = out.lock().expect("no panic");
            out.push(Instant::now());
            at(out.len());
        });
        let limit = pause * count as u32 + Duration::from_mins(1);
        let ended = self.runtime.block_on(async { tokio::time::timeout(limit, asked).await });
        let times = times.lock().expect("no panic");
        let longest = times.windows(2).map(|pair| (pair[1] - pair[0]).saturating_sub(pause)).max();
        let (tokens, trace, said, hung) = match ended {
            Ok(Ok(generated)) => (generated.tokens().to_vec(), Some(generated.trace), String::new(), false),
            Ok(Err(unfinished)) => {
                let said = unfinished.error.to_string();
                let so_far = unfinished.so_far.map(|generated| *generated);
                let (tokens, trace) = so_far.map(|it| (it.tokens().to_vec(), it.trace)).unzip();
                (tokens.unwrap_or_default(), trace, said, false)
            }
            Err(_) => (vec![], None, "it hung".into(), true),
        };
        (Seen { tokens, longest: longest.unwrap_or_default(), hung, said }, trace)
    }

    /// Ends it in order.
    pub fn end(self) {
        self.runtime.block_on(self.ring.close());
    }
}

/// The devices that computed layers, by name.
pub fn members(trace: &Trace) -> Vec<String> {
    let computes = |place: usize| {
        trace.records.iter().any(|it| it.kind == Kind::Compute && usize::from(it.device) == place)
    };
    let named = trace.header.devices.iter().enumerate();
    named.filter(|(place, _)| computes(*place)).map(|(_, device)| device.name.clone()).collect()
}

/// Who was missed during a request.
fn missed(trace: &Trace) -> Vec<&str> {
    let silent = trace.run_events.iter().filter(|it| it.kind == RunEventKind::Silent);
    silent.filter_map(|it| it.device.as_deref()).collect()
}

/// A worker stands still in the middle of a run and wakes up while the run goes on. The run, and whether the worker was
/// in the ring of the next request, with the right tokens.
pub fn stopped_for_a_while(victim: usize, at: usize, lasts: Duration, expected: &[u32]) -> (Seen, bool) {
    let workers: Vec<Worker> = (0..3).map(|_| Worker::start(&model("q4_k"))).collect();
    let addresses: Vec<&str> = workers.iter().map(|worker| worker.address.as_str()).collect();
    let mut session = Session::begin(&Tcp, "q4_k", planned("q4_k", &[1, 2, 1, 2], &addresses));
    let session = session.as_mut().expect("a ring");
    // So slow that the worker wakes up in the middle, wherever in the run it was stopped.
    let pause = (lasts + Duration::from_secs(4)) / (expected.len() - at) as u32;
    let process = workers[victim].id();
    let (seen, trace) = session.ask(expected.len(), pause, move |count| {
        if count == at {
            signal(process, "STOP");
            std::thread::spawn(move || {
                std::thread::sleep(lasts);
                signal(process, "CONT");
            });
        }
    });
    let name = format!("d{}", victim + 1);
    let is_undisturbed = trace.is_some_and(|trace| missed(&trace) == [name.as_str()]);
    let (again, trace) = session.ask(8, Duration::ZERO, |_| {});
    let is_back = trace.is_some_and(|trace| members(&trace).contains(&name));
    println!("missed once: {is_undisturbed}, back: {is_back}");
    (seen, is_undisturbed && is_back && again.tokens == expected[..8])
}

/// A request during which `blow` is dealt, then one after `mend`: the first does without `d2`, the second has it.
fn leaves_and_returns<N: Network>(
    session: &mut Session<N>,
    blow: impl FnOnce() + Send + 'static,
    mend: impl FnOnce(),
) {
    let expected = undisturbed(40);
    let everybody = ["d0", "d1", "d2"];
    let (before, trace) = session.ask(4, Duration::ZERO, |_| {});
    assert_eq!(
        (&before.tokens[..], members(&trace.expect("a trace"))),
        (&expected[..4], everybody.map(String::from).to_vec())
    );
    let mut blow = Some(blow);
    let (seen, trace) = session.ask(40, Duration::from_millis(20), move |count| {
        if let (20, Some(blow)) = (count, blow.take_if(|_| count == 20)) {
            blow();
        }
    });
    assert_eq!(seen.tokens, expected, "{}", seen.said);
    let trace = trace.expect("a trace");
    assert_eq!(missed(&trace), ["d2"]);
    let without =
        trace.run_events.iter().find(|it| it.kind == RunEventKind::Replanned).expect("another plan");
    assert!(without.what.starts_with("d0 ") && !without.what.contains("d2"), "{}", without.what);
    mend();
    let (after, trace) = session.ask(8, Duration::ZERO, |_| {});
    assert_eq!(after.tokens, expected[..8], "{}", after.said);
    let trace = trace.expect("a trace");
    assert_eq!(members(&trace), everybody, "{}", after.said);
    assert_eq!(trace.run_events, [], "it was there from the beginning");
}

#[test]
fn restarted_worker_rejoins_at_the_next_request() {
    let (first, second) = (Worker::start(&model("q4_k")), Worker::start(&model("q4_k")));
    let (process, address) = (second.id(), second.address.clone());
    let plan = planned("q4_k", &[2, 1, 1], &[&first.address, &address]);
    let mut session = Session::begin(&Tcp, "q4_k", plan).expect("a ring");
    let mut again = None;
    leaves_and_returns(
        &mut session,
        move || signal(process, "KILL"),
        || {
            drop(second);
            again = Some(Worker::again(&model("q4_k"), &address));
        },
    );
    session.end();
}

#[test]
fn resumed_worker_rejoins_at_the_next_request() {
    let expected = undisturbed(40);
    let (seen, is_back) = stopped_for_a_while(1, 10, Duration::from_secs(3), &expected);
    assert_eq!(seen.tokens, expected, "{}", seen.said);
    assert!(is_back && !seen.hung);
}

#[test]
fn reconnected_worker_rejoins_at_the_next_request() {
    let Some(namespace) = Namespace::for_test("a_worker_whose_link_was_down") else { return };
    let (folder, q4_k) = (tempfile::tempdir().expect("a folder"), model("q4_k"));
    let key = crate::recovery::key(folder.path());
    let near = Worker::with_key(&q4_k, &format!("{}:0", namespace.here), &key);
    let far = Worker::inside(&namespace.name, &q4_k, &format!("{}:0", namespace.inside), &key);
    let plan = planned("q4_k", &[2, 1, 1], &[&near.address, &far.address]);
    let network = Sealed::new(Tcp, Key::given(Some(Path::new(&key))).expect("a key").expect("ours"));
    let mut session = Session::begin(&network, "q4_k", plan).expect("a ring");
    let namespace = Arc::new(namespace);
    let link = namespace.clone();
    leaves_and_returns(
        &mut session,
        move || link.set(End::Inside, false),
        || {
            namespace.set(End::Inside, true);
            // Addresses are asked for again after a link was down, and the worker has to miss its head.
            std::thread::sleep(Duration::from_secs(3));
        },
    );
    session.end();
}

/// A network whose listeners stand behind a gate.
#[derive(Clone, Default)]
struct Gated {
    limit: u64,
    gate: Arc<Mutex<Option<Gate>>>,
}

struct Behind {
    listener: TcpListener,
    address: String,
}

impl Network for Gated {
    type Stream = TcpStream;
    type Listener = Behind;

    async fn connect(&self, address: &str) -> io::Result<TcpStream> {
        Tcp.connect(address).await
    }

    async fn bind(&self, address: &str) -> io::Result<Behind> {
        let listener = Tcp.bind(address).await?;
        let gate = Gate::breaking_after(&listener.address(), self.limit);
        let address = gate.address.clone();
        *self.gate.lock().expect("no panic") = Some(gate);
        Ok(Behind { listener, address })
    }
}

impl Listener for Behind {
    type Stream = TcpStream;

    async fn accept(&mut self) -> io::Result<TcpStream> {
        Listener::accept(&mut self.listener).await
    }

    fn address(&self) -> String {
        self.address.clone()
    }
}

/// Bytes of a chunk, and of its hash in a manifest.
const CHUNK: usize = 1 << 20;
const HASH: usize = 32;

/// Which chunks of a model are in a folder, each checked against the file that they came from.
fn chunks_there(kept: &Path, source: &[u8]) -> Vec<usize> {
    let Some(folder) = std::fs::read_dir(kept).expect("a folder").next() else { return vec![] };
    let folder = folder.expect("readable").path();
    let manifest = std::fs::read(folder.join("model.gguf.chunks")).expect("a manifest");
    let file = std::fs::read(folder.join("model.gguf")).expect("a file");
    let entries = manifest.chunks(HASH).enumerate().filter(|(_, hash)| hash.iter().any(|&byte| byte != 0));
    let there: Vec<usize> = entries.map(|(index, _)| index).collect();
    for &index in &there {
        let range = index * CHUNK..source.len().min((index + 1) * CHUNK);
        assert!(file[range.clone()] == source[range], "chunk {index} is not the source's");
    }
    there
}

#[test]
fn interrupted_fetch_resumes() {
    let kept = tempfile::tempdir().expect("a folder");
    let worker = Worker::fetching(&kept.path().display().to_string());
    let source = std::fs::read(model("f16")).expect("a test model");
    let plan = planned("f16", &[2, 6], &[&worker.address]);
    let mut before = 0;
    // Cut twice, in the third and in the sixth MiB that it is sent, then let through.
    for limit in [5 << 19, 11 << 19, u64::MAX] {
        let network = Gated { limit, ..Gated::default() };
        let begun = Session::begin(&network, "f16", plan.clone());
        let carried = network.gate.lock().expect("no panic").as_ref().expect("the head listens").carried();
        let there = chunks_there(kept.path(), &source).len();
        println!("{carried} bytes came through, {there} chunks are there");
        // The data connections and the frames' headers are less than half a chunk.
        let sent = (there - before) as u64 * CHUNK as u64;
        if limit < u64::MAX {
            let error = begun.err().expect("it was cut").to_string();
            assert!(error.contains("`d1`"), "{error}");
            assert!(there > before && sent <= carried, "{there} chunks after {before}");
        } else {
            let mut session = begun.expect("the ring comes up");
            assert!(there > before && carried < sent + CHUNK as u64 / 2, "{carried} bytes for {sent}");
            let alone = Session::begin(&Tcp, "f16", planned("f16", &[8], &[]));
            let alone = alone.expect("one device").ask(8, Duration::ZERO, |_| {}).0;
            assert_eq!(session.ask(8, Duration::ZERO, |_| {}).0.tokens, alone.tokens);
        }
        before = there;
    }
    assert!(before * CHUNK < source.len() + CHUNK, "{before} chunks");
}
