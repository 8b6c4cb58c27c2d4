//! Lets a hostile worker and a hostile head send random frames of the right shape, and checks that honest devices go
//! on.
//!
//!     cargo run --release -p hearth-ring --example hostile_devices [SECONDS] [SEED]
//!
//! All devices are in this process and connected by TCP on loopback; the trained model is that of the tests.
//!
//! Hostile worker: a head serves four clients on a ring with an honest and a hostile worker. The hostile worker answers
//! the commands of the head, passes nothing on, and at random sends other messages and damaged activations. The head
//! excludes it after some faults, so every few seconds a new ring begins. A response must have the tokens of one device
//! alone. Plausible activations with wrong values are not sent: they cannot be noticed.
//!
//! Hostile head: it opens sessions with a worker and sends random commands, plans and activations. After each session,
//! an honest head uses the same worker, and its tokens must be those of one device alone.
//!
//! The table has the numbers of frames, sessions and responses, the slowest response, and the resident memory of this
//! process after the first tenth of the time and at the end.

#[allow(dead_code)]
#[path = "../tests/it/fixture.rs"]
mod fixture;

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use fixture::{Q4_MODEL, open_model, prompts, ring_options, start_worker_at};
use hearth_profiles::Document;
use hearth_ring::wire::{
    ActivationCounts, ActivationsHeader, BrokenLink, ConnectionPurpose, EpochConfig, Frame, Message,
    PeerAddress, open_connection, read_hello, send_welcome,
};
use hearth_ring::{
    GenerationRequest, LocalModel, ModelSource, Request, ResponseEvent, Ring, SequenceOutput, ServeOptions,
    TcpTransport, bind, plan_for_sequences,
};
use hearth_runtime::sampler::greedy_token;
use hearth_schema::Plan;
use hearth_schema::pass::Pass;
use rand::{Rng, RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};

const NEW_TOKENS: u32 = 12;
/// A response or a session that takes longer counts as a hang.
const HANG: Duration = Duration::from_mins(2);
/// Time for which a ring with a hostile worker is used.
const RING_TIME: Duration = Duration::from_secs(8);

#[derive(Default)]
struct Tally {
    frames: AtomicU64,
    sessions: AtomicU64,
    right: AtomicU64,
    wrong: AtomicU64,
    failed: AtomicU64,
    slowest_ms: AtomicU64,
}

impl Tally {
    fn record(&self, begun: Instant, tokens: Option<&[u32]>, expected: &[u32]) {
        let counter = match tokens {
            None => &self.failed,
            Some(tokens) if tokens == expected => &self.right,
            Some(_) => &self.wrong,
        };
        counter.fetch_add(1, Ordering::Relaxed);
        self.slowest_ms.fetch_max(begun.elapsed().as_millis() as u64, Ordering::Relaxed);
    }

    fn report(&self, who: &str, memory: [u64; 2]) {
        let [frames, sessions, right, wrong, failed, slowest] =
            [&self.frames, &self.sessions, &self.right, &self.wrong, &self.failed, &self.slowest_ms]
                .map(|counter| counter.load(Ordering::Relaxed));
        let [early, late] = memory.map(|bytes| bytes >> 20);
        println!(
            "{who}: {frames} hostile frames in {sessions} sessions; {right} responses right, {wrong} wrong, {failed} \
             failed, the slowest {slowest} ms; resident {early} MiB early, {late} MiB at the end"
        );
    }
}

fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    statm.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok()).unwrap_or(0) * 4096
}

fn main() -> Result<(), Box<dyn Error>> {
    let argument = |index: usize| std::env::args().nth(index).map(|text| text.parse::<u64>()).transpose();
    let (seconds, seed) = (argument(1)?.unwrap_or(60), argument(2)?.unwrap_or(1));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(async {
        let model = open_model(Q4_MODEL);
        let expected = Arc::new(expected_tokens(&model).await?);
        let mut is_right = true;
        for who in ["hostile worker", "hostile head"] {
            let (tally, end) = (Arc::new(Tally::default()), Instant::now() + Duration::from_secs(seconds));
            let (model, expected) = (model.clone(), expected.clone());
            let attack = Attack { model, expected, tally: tally.clone(), end };
            let memory = tokio::spawn(async move {
                tokio::time::sleep(Duration::from_secs(seconds) / 10).await;
                resident_bytes()
            });
            let random = ChaCha8Rng::seed_from_u64(seed);
            if who == "hostile worker" {
                resist_worker(&attack, random).await?;
            } else {
                resist_head(&attack, random).await?;
            }
            tally.report(who, [memory.await?, resident_bytes()]);
            let [right, wrong] = [&tally.right, &tally.wrong].map(|count| count.load(Ordering::Relaxed));
            is_right &= right > 0 && wrong == 0;
        }
        if is_right { Ok(()) } else { Err("a response has wrong tokens, or there is none".into()) }
    })
}

/// Returns the tokens of each prompt on one device.
async fn expected_tokens(model: &Arc<LocalModel>) -> Result<Vec<Vec<u32>>, Box<dyn Error>> {
    let mut all = Vec::new();
    for prompt in prompts() {
        let mut ring = Ring::connect(&TcpTransport, plan(model, &[]), model.clone(), ring_options()).await?;
        let request = GenerationRequest::single_sequence(prompt, NEW_TOKENS, Box::new(greedy_token));
        all.push(ring.generate(request, |_, _| {}).await?.first_sequence_tokens().to_vec());
        ring.close().await;
    }
    Ok(all)
}

/// Creates a plan of a head and workers with these addresses, with about equal windows.
fn plan(model: &LocalModel, addresses: &[String]) -> Plan {
    let windows = [&[8][..], &[4, 4], &[3, 3, 2]][addresses.len()];
    let mut plan = fixture::plan(model, windows);
    for (device, address) in plan.devices.iter_mut().skip(1).zip(addresses) {
        device.address = Some(address.clone());
    }
    plan.context_length = 512;
    plan
}

/// What both attacks need: the model, the right tokens of each prompt, the results so far, and the end of the attack.
struct Attack {
    model: Arc<LocalModel>,
    expected: Arc<Vec<Vec<u32>>>,
    tally: Arc<Tally>,
    end: Instant,
}

impl Attack {
    async fn start_honest_worker(&self) -> String {
        start_worker_at(&TcpTransport, "127.0.0.1:0", ModelSource::File(self.model.clone())).await
    }
}

async fn resist_worker(attack: &Attack, mut random: ChaCha8Rng) -> Result<(), Box<dyn Error>> {
    let Attack { model, expected, tally, end } = attack;
    let honest = attack.start_honest_worker().await;
    while Instant::now() < *end {
        let hostile = start_hostile_worker(model, tally, random.random()).await?;
        let plan = plan_for_sequences(plan(model, &[honest.clone(), hostile]), 4, &model.profile.shape);
        let plan = Plan { context_length: 256, ..plan };
        let connecting = Ring::connect(&TcpTransport, plan, model.clone(), ring_options());
        let Ok(mut ring) = timeout(HANG, connecting).await? else { continue };
        tally.sessions.fetch_add(1, Ordering::Relaxed);
        let (request_tx, request_rx) = mpsc::unbounded_channel();
        let options =
            ServeOptions { micro_batch: 7, draft_tokens: 0, stop_tokens: vec![], on_device_report: None };
        let serving = tokio::spawn(async move {
            let (_, ended) = ring.serve(options, request_rx).await;
            ring.close().await;
            ended
        });
        let ring_end = Instant::now() + RING_TIME;
        let clients = (0..4).map(|client| {
            let (request_tx, expected, tally) = (request_tx.clone(), expected.clone(), tally.clone());
            tokio::spawn(async move {
                let (prompts, mut number) = (prompts(), client);
                while Instant::now() < ring_end {
                    number = (number + 1) % prompts.len();
                    let begun = Instant::now();
                    let tokens = request_tokens(&request_tx, prompts[number].clone()).await;
                    tally.record(begun, tokens.as_deref(), &expected[number]);
                    if tokens.is_none() {
                        return;
                    }
                }
            })
        });
        for client in clients.collect::<Vec<_>>() {
            client.await?;
        }
        drop(request_tx);
        if let Err(error) = timeout(HANG, serving).await?? {
            println!("the ring ended: {error}");
        }
    }
    Ok(())
}

/// Sends a request and returns its tokens, or `None` if it fails or hangs.
async fn request_tokens(request_tx: &mpsc::UnboundedSender<Request>, prompt: Vec<u32>) -> Option<Vec<u32>> {
    let (response_tx, mut events) = mpsc::unbounded_channel();
    let output = SequenceOutput::Tokens(Box::new(greedy_token));
    request_tx.send(Request { prompt, max_new_tokens: NEW_TOKENS, output, response_tx }).ok()?;
    let mut tokens = Vec::new();
    loop {
        match timeout(HANG, events.recv()).await.ok()? {
            Some(ResponseEvent::Token(token)) => tokens.push(token),
            Some(ResponseEvent::Started { .. }) => {}
            Some(ResponseEvent::Failed(_)) => return None,
            None => return Some(tokens),
        }
    }
}

/// Starts a worker that takes part in the protocol and sends random frames. Returns its address.
async fn start_hostile_worker(
    model: &Arc<LocalModel>,
    tally: &Arc<Tally>,
    seed: u64,
) -> Result<String, Box<dyn Error>> {
    let mut listener = bind(&TcpTransport, "127.0.0.1:0").await?;
    let address = hearth_ring::Listener::address(&listener);
    let (model, tally) = (model.clone(), tally.clone());
    tokio::spawn(async move {
        for number in 0.. {
            let Ok(stream) = hearth_ring::Listener::accept(&mut listener).await else { return };
            let random = ChaCha8Rng::seed_from_u64(seed.wrapping_add(number));
            tokio::spawn(serve_hostile_connection(stream, model.clone(), tally.clone(), random));
        }
    });
    Ok(address)
}

async fn serve_hostile_connection(
    mut stream: TcpStream,
    model: Arc<LocalModel>,
    tally: Arc<Tally>,
    mut random: ChaCha8Rng,
) -> Option<()> {
    let (session, purpose) = read_hello(&mut stream).await.ok()?;
    send_welcome(&mut stream, model.worker_info()).await.ok()?;
    if purpose != ConnectionPurpose::Control {
        // Takes the activations and passes nothing on.
        return tokio::io::copy(&mut stream, &mut tokio::io::sink()).await.ok().map(drop);
    }
    // The first rings of this worker misbehave less, so that requests are running by then.
    let misbehaves = Arc::new(AtomicBool::new(false));
    loop {
        let frame = Frame::read(&mut stream, 4 << 20).await.ok()??;
        let counts = ActivationCounts::default();
        let reply = match frame.message {
            Message::Prepare { epoch } => Some(Message::Prepared { epoch }),
            Message::Configure(config) => {
                let epoch = config.epoch;
                let random = ChaCha8Rng::seed_from_u64(random.next_u64());
                tokio::spawn(send_random_activations(config, session, model.clone(), tally.clone(), random));
                Some(Message::Ready { epoch })
            }
            Message::Reset { epoch } => {
                misbehaves.store(true, Ordering::Relaxed);
                Some(Message::Ready { epoch })
            }
            Message::Ping { nonce } => Some(Message::Pong { nonce, clock_ns: random.next_u64(), counts }),
            _ => None,
        };
        if let Some(reply) = reply.filter(|_| !random.random_bool(0.01)) {
            Frame::from(reply).write(&mut stream).await.ok()?;
        }
        if misbehaves.load(Ordering::Relaxed) && random.random_bool(0.3) {
            for _ in 0..random.random_range(1..20) {
                tally.frames.fetch_add(1, Ordering::Relaxed);
                random_frame(&mut random, &model).write(&mut stream).await.ok()?;
            }
        }
    }
}

/// Connects to the head and sends activations that are not the expected ones.
async fn send_random_activations(
    config: EpochConfig,
    session: u64,
    model: Arc<LocalModel>,
    tally: Arc<Tally>,
    mut random: ChaCha8Rng,
) -> Option<()> {
    let EpochConfig { epoch, device_index, head_address, .. } = config;
    let purpose = ConnectionPurpose::Data { from: device_index, epoch };
    let (mut stream, _) =
        open_connection(&TcpTransport, "head", &head_address, session, purpose).await.ok()?;
    loop {
        tokio::time::sleep(Duration::from_millis(random.random_range(1..3000))).await;
        tally.frames.fetch_add(1, Ordering::Relaxed);
        random_activations(&mut random, &model, epoch).write(&mut stream).await.ok()?;
    }
}

async fn resist_head(attack: &Attack, mut random: ChaCha8Rng) -> Result<(), Box<dyn Error>> {
    let Attack { model, expected, tally, end } = attack;
    let worker = attack.start_honest_worker().await;
    let plan = plan(model, std::slice::from_ref(&worker));
    for number in 0.. {
        if Instant::now() >= *end {
            break;
        }
        tally.sessions.fetch_add(1, Ordering::Relaxed);
        // An error ends the session, as intended.
        let _ = timeout(HANG, hostile_session(model, &worker, &plan, tally, &mut random)).await?;
        let begun = Instant::now();
        let prompt = number % expected.len();
        let honest = async {
            let mut ring = Ring::connect(&TcpTransport, plan.clone(), model.clone(), ring_options()).await?;
            let request = GenerationRequest::single_sequence(
                prompts()[prompt].clone(),
                NEW_TOKENS,
                Box::new(greedy_token),
            );
            let generated = ring.generate(request, |_, _| {}).await?;
            ring.close().await;
            Ok::<_, Box<dyn Error>>(generated.first_sequence_tokens().to_vec())
        };
        let tokens = timeout(HANG, honest).await?;
        if let Err(error) = &tokens {
            println!("after session {number}: {error}");
        }
        tally.record(begun, tokens.ok().as_deref(), &expected[prompt]);
    }
    Ok(())
}

/// Opens a session with a worker, and sends random commands and activations until the worker refuses one.
async fn hostile_session(
    model: &LocalModel,
    worker: &str,
    plan: &Plan,
    tally: &Tally,
    random: &mut ChaCha8Rng,
) -> Result<(), Box<dyn Error>> {
    let session = random.next_u64();
    let (mut stream, _) =
        open_connection(&TcpTransport, "worker", worker, session, ConnectionPurpose::Control).await?;
    let (mut epoch, mut data) = (0u32, Vec::<TcpStream>::new());
    for _ in 0..random.random_range(1..200) {
        tally.frames.fetch_add(1, Ordering::Relaxed);
        let frame = match random.random_range(0..10) {
            0 | 1 => {
                epoch += random.random_range(0..2);
                Frame::from(Message::Prepare { epoch })
            }
            2 | 3 => {
                let receivers = vec![PeerAddress { device_index: 0, address: worker.to_owned() }];
                let (device_index, first_pass_index) = (random.random_range(0..3), random.random_range(0..2));
                let head_address = worker.to_owned();
                let config = EpochConfig { epoch, device_index, first_pass_index, head_address, receivers };
                let mut payload = plan.to_yaml().into_bytes();
                if random.random_bool(0.5) {
                    let at = random.random_range(0..payload.len());
                    payload[at] = random.random();
                }
                Frame { message: Message::Configure(config), payload }
            }
            4 => Frame::from(Message::Reset { epoch }),
            5 => Frame::from(Message::CollectTrace),
            6 => {
                let purpose = ConnectionPurpose::Data { from: random.random_range(0..3), epoch };
                data.extend(
                    open_connection(&TcpTransport, "worker", worker, session, purpose)
                        .await
                        .ok()
                        .map(|open| open.0),
                );
                continue;
            }
            7 | 8 => {
                let frame = random_activations(random, model, epoch);
                if let Some(stream) = data.last_mut() {
                    let _ = timeout(Duration::from_millis(50), frame.write(stream)).await;
                }
                continue;
            }
            _ => random_frame(random, model),
        };
        frame.write(&mut stream).await?;
    }
    Ok(())
}

/// Returns activations with a random pass, and with values that are not finite or not complete.
fn random_activations(random: &mut ChaCha8Rng, model: &LocalModel, epoch: u32) -> Frame {
    let tokens = random.random_range(0..20u32);
    let pass = Pass {
        sequence_index: random.random_range(0..6),
        drafted: random.random_range(0..3),
        ..Pass::new(random.random_range(0..40), random.random_range(0..600), tokens, random.random_bool(0.5))
    };
    let header = ActivationsHeader {
        epoch,
        batch: pass.into(),
        round: random.random_range(0..3),
        is_f16: random.random_bool(0.2),
    };
    let values = tokens as usize * model.weights.shape().embedding_length as usize;
    let mut payload = vec![0u8; values * size_of::<f32>()];
    random.fill_bytes(&mut payload);
    match payload.len() {
        0 => {}
        // The last value is NaN, or is missing.
        length if random.random_bool(0.5) => payload[length - 4..].copy_from_slice(&[0, 0, 0xc0, 0x7f]),
        length => payload.truncate(length - 4),
    }
    Frame { message: Message::Activations(header), payload }
}

/// Returns a message with random fields, and sometimes a payload.
fn random_frame(random: &mut ChaCha8Rng, model: &LocalModel) -> Frame {
    let number =
        |random: &mut ChaCha8Rng| [0, 1, random.random_range(0..100), u32::MAX][random.random_range(0..4)];
    let epoch = number(random);
    let text: String = (0..random.random_range(0..2000)).map(|_| char::from(random.random::<u8>())).collect();
    let message = match random.random_range(0..13) {
        0 => Message::Refuse { reason: text },
        1 => Message::Prepared { epoch },
        2 => Message::Ready { epoch },
        3 => Message::Fetching { done: random.next_u64(), total: random.next_u64() },
        4 => Message::Uploading { done: random.next_u64(), total: 0 },
        5 => {
            let (peer_index, is_fault) = (random.random_range(0..4), random.random_bool(0.3));
            Message::LinkBroken(BrokenLink { epoch, peer_index, is_fault, reason: text })
        }
        6 => return random_activations(random, model, epoch),
        7 => Message::TraceLines { epoch, more: random.random_bool(0.5) },
        8 => {
            let counts = ActivationCounts { received: random.next_u64(), sent: random.next_u64() };
            Message::Pong { nonce: random.next_u64(), clock_ns: random.next_u64(), counts }
        }
        9 => Message::Welcome(model.worker_info()),
        10 => Message::GetChunk { file: random.random(), chunk: random.next_u64() },
        11 => Message::Files { files: vec![] },
        _ => Message::CollectTrace,
    };
    let mut payload = vec![0u8; if random.random_bool(0.2) { random.random_range(0..100_000) } else { 0 }];
    random.fill_bytes(&mut payload);
    Frame { message, payload }
}
