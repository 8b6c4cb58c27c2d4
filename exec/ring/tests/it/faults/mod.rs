//! With any faults of devices and links, a ring gives the tokens of an undisturbed run or a clear error.
//!
//! The code of a real ring runs over a simulated network with a simulated clock ([`network`]). A seed determines a
//! ring of two to five devices, its windows, prompts of one to four sequences, batches, drafts, and faults: crashes
//! with and without a restart, frozen devices, pairs of devices that cannot communicate, broken connections, and lost,
//! repeated and damaged activations.
//! Every fourth ring has a model with recurrent states, which cannot be rolled back, and no drafts; another fourth has
//! a model whose later layers use the keys and values of earlier layers. Faults also happen while the ring connects,
//! while it plans again, and between two requests. Tokens are sampled, so that a token that is sampled twice by mistake
//! changes all later tokens.
//!
//! The test tries 100 seeds, or 1000 with `HEARTH_SLOW=1`. `HEARTH_STORMS` sets the number of seeds, and `HEARTH_STORM`
//! the first seed (by default 0). The error message names the seed that failed.

mod network;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use hearth_profiles::model::{Architecture, ModelShape, Quant, SharedKv};
use hearth_profiles::{Format, Layers};
use hearth_ring::{
    ComputeMode, FailedRequest, GenerationRequest, GenerationResult, LocalModel, ModelSource, Ring,
    RingError, RingOptions, SequenceRequest, Worker, WorkerOptions, bind,
};
use hearth_runtime::synth::{SynthOptions, synthesise};
use hearth_runtime::{Sampler, SamplerOptions};
use hearth_schema::Plan;
use hearth_schema::plan::{PlannedDraftModel, PlannedModel, Processor};
use hearth_schema::scenario::{ActivationFormat, KvFormat};
use hearth_schema::trace::Counter;
use network::{Endpoint, SimulatedNetwork, Tampering};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tokio::time::{sleep, timeout};

use crate::fixture::{self, address, token_listener};

const LAYERS: u32 = 6;
const CONTEXT: u32 = 64;
/// The limit of simulated time for a request: ten devices may be lost one after the other, each after a minute.
const MAX_REQUEST_TIME: Duration = Duration::from_mins(30);

/// A ring, its requests and its faults, drawn from a seed.
#[derive(Clone)]
struct FaultSchedule {
    windows: Vec<u32>,
    prompts: Vec<Vec<u32>>,
    generate: u32,
    micro_batch: u32,
    drafts: u32,
    temperature: f32,
    requests: usize,
    max_delay: Duration,
    /// Whether faults may happen before the ring is connected.
    early: bool,
    faults: Vec<(Duration, usize, Fault)>,
    activations: ActivationFormat,
}

#[derive(Debug, Clone, Copy)]
enum Fault {
    Crash { restarts_after: Option<Duration> },
    Freeze(Duration),
    Cut { other: usize, lasts: Duration },
    Reset,
    Tamper(Tampering),
}

impl FaultSchedule {
    fn from_seed(seed: u64) -> FaultSchedule {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let devices = random.random_range(2..=5usize);
        let mut windows = vec![1; devices];
        let more = random.random_range(0..=LAYERS - devices as u32);
        (0..more).for_each(|_| windows[random.random_range(0..devices)] += 1);
        let max_delay = Duration::from_millis(random.random_range(1..=40));
        let generate = random.random_range(4..=12);
        let prompt = |random: &mut ChaCha8Rng| {
            (0..random.random_range(1..=12)).map(|_| random.random_range(0..500)).collect()
        };
        let prompts = (0..random.random_range(1..=4)).map(|_| prompt(&mut random)).collect();
        let (micro_batch, drafts) = (random.random_range(1..=12), random.random_range(0..=3));
        let temperature = if random.random_bool(0.5) { 0.2 } else { 1.0 };
        // About as long as the tokens take.
        let hops = LAYERS.div_ceil(windows.iter().sum::<u32>()) * devices as u32;
        let span = max_delay * hops * generate / 2;
        let faults = random.random_range(1..=4);
        let fault = |random: &mut ChaCha8Rng| {
            let lasts = Duration::from_millis(random.random_range(10..=12_000));
            let device = random.random_range(0..devices);
            let fault = match random.random_range(0..8) {
                0 | 1 => Fault::Crash { restarts_after: random.random_bool(0.5).then_some(lasts) },
                2 => Fault::Freeze(lasts),
                3 => Fault::Cut { other: random.random_range(0..devices), lasts },
                4 | 5 => Fault::Reset,
                _ => Fault::Tamper(match random.random_range(0..4) {
                    0 => Tampering::Dropped,
                    1 => Tampering::SentTwice,
                    2 => Tampering::TooShort,
                    _ => Tampering::NotFinite,
                }),
            };
            let at = span.mul_f64(random.random_range(0.0..1.5));
            // The head does not crash, because its tokens would be lost.
            let device = if matches!(fault, Fault::Crash { .. }) { device.max(1) } else { device };
            (at, device, fault)
        };
        let mut faults: Vec<_> = (0..faults).map(|_| fault(&mut random)).collect();
        faults.sort_by_key(|fault| fault.0);
        let (requests, early) = (random.random_range(1..=2), random.random_bool(0.1));
        // For every third seed.
        let activations = if seed % 3 == 1 { ActivationFormat::F16 } else { ActivationFormat::F32 };
        FaultSchedule {
            windows,
            prompts,
            generate,
            micro_batch,
            drafts,
            temperature,
            requests,
            max_delay,
            early,
            faults,
            activations,
        }
    }
}

/// Creates a plan whose draft model is the model itself, so a draft is accepted if the most likely token is sampled.
fn plan(schedule: &FaultSchedule, model: &LocalModel, windows: &[u32]) -> Plan {
    let draft =
        PlannedDraftModel { model: PlannedModel::from_profile(&model.profile), processor: Processor::Cpu };
    let plan = fixture::plan(model, windows);
    // With f16 activations, keys and values of other devices need the same rounding in the cache.
    let has_f16 = model.profile.shape.shared_kv.is_some() && schedule.activations == ActivationFormat::F16;
    Plan {
        context_length: CONTEXT,
        activation_format: schedule.activations,
        kv_cache_format: if has_f16 { KvFormat::F16 } else { plan.kv_cache_format },
        sequences: schedule.prompts.len() as u32,
        draft_model: (schedule.drafts > 0).then_some(draft),
        ..plan
    }
}

fn start_worker(network: &SimulatedNetwork, device: usize, model: &Arc<LocalModel>) {
    let (endpoint, model) = (network.endpoint(device), model.clone());
    tokio::spawn(async move {
        let listener = bind(&endpoint, &address(device)).await.expect("a free address");
        let options =
            WorkerOptions { threads: 1, compute_mode: ComputeMode::Inline, ..WorkerOptions::default() };
        Worker::with_options(endpoint, ModelSource::File(model), options).serve(listener, |_| {}).await
    });
}

fn request(schedule: &FaultSchedule) -> GenerationRequest {
    let options = SamplerOptions {
        temperature: schedule.temperature,
        top_k: 0,
        top_p: 1.0,
        seed: 5,
        ..SamplerOptions::default()
    };
    let sampler = Sampler::new(options).expect("sound options");
    let sequence = |(prompt, number): (&Vec<u32>, u32)| {
        let mut sampler = sampler.for_sequence(number);
        SequenceRequest { prompt: prompt.clone(), sampler: Box::new(move |logits| sampler.sample(logits)) }
    };
    GenerationRequest {
        sequences: schedule.prompts.iter().zip(0..).map(sequence).collect(),
        micro_batch: schedule.micro_batch,
        draft_tokens: schedule.drafts,
        ..GenerationRequest::single_sequence(vec![], schedule.generate, Box::new(|_| 0))
    }
}

fn inline(model: &Arc<LocalModel>) -> RingOptions {
    RingOptions {
        draft_model: Some(model.clone()),
        threads: 1,
        pass_timeout: Duration::from_mins(5),
        compute_mode: ComputeMode::Inline,
        ..RingOptions::default()
    }
}

async fn inject(network: SimulatedNetwork, faults: Vec<(Duration, usize, Fault)>, model: Arc<LocalModel>) {
    let mut passed = Duration::ZERO;
    for (at, device, fault) in faults {
        sleep(at.saturating_sub(passed)).await;
        passed = at;
        match fault {
            Fault::Crash { restarts_after } => {
                network.crash(device);
                let (network, model) = (network.clone(), model.clone());
                if let Some(delay) = restarts_after {
                    tokio::spawn(async move {
                        sleep(delay).await;
                        start_worker(&network, device, &model);
                    });
                }
            }
            Fault::Freeze(lasts) => network.freeze(device, lasts),
            Fault::Cut { other, lasts } => network.cut(device, other, lasts),
            Fault::Reset => network.reset_connection(device),
            Fault::Tamper(how) => network.tamper(device, how),
        }
    }
}

/// Runs a request. Returns the result, and the tokens that the listener received by sequence.
async fn run_request(
    ring: &mut Ring<Endpoint>,
    schedule: &FaultSchedule,
) -> (Result<GenerationResult, FailedRequest>, Vec<Vec<u32>>) {
    let (received, on_token) = token_listener(schedule.prompts.len());
    let generating = ring.generate(request(schedule), on_token);
    let result = timeout(MAX_REQUEST_TIME, generating).await.expect("a request hangs");
    let received = received.lock().expect("one thread").clone();
    (result, received)
}

#[derive(Debug, Default)]
struct Tally {
    runs: u32,
    undisturbed: u32,
    reconfigured: u32,
    failed: BTreeMap<String, u32>,
    not_connected: BTreeMap<String, u32>,
    reconfigurations: u32,
    tampered: u64,
    drafted: u64,
    accepted: u64,
}

async fn run_schedule(
    seed: u64,
    schedule: &FaultSchedule,
    model: &Arc<LocalModel>,
    expected: &[Vec<u32>],
    tally: &mut Tally,
) {
    let network = SimulatedNetwork::new(seed, schedule.windows.len(), schedule.max_delay);
    (1..schedule.windows.len()).for_each(|device| start_worker(&network, device, model));
    sleep(Duration::from_millis(1)).await;
    let faults = || tokio::spawn(inject(network.clone(), schedule.faults.clone(), model.clone()));
    if schedule.early {
        faults();
    }
    let (own, plan) = (network.endpoint(0), plan(schedule, model, &schedule.windows));
    let connecting = Ring::connect(&own, plan, model.clone(), inline(model));
    let mut ring = match timeout(MAX_REQUEST_TIME, connecting).await.expect("connecting hangs") {
        Ok(ring) => ring,
        Err(error) => {
            assert!(schedule.early, "nothing has happened yet: {error}");
            *tally.not_connected.entry(kind(&error)).or_default() += 1;
            return;
        }
    };
    if !schedule.early {
        faults();
    }
    for _ in 0..schedule.requests {
        let (result, received) = run_request(&mut ring, schedule).await;
        tally.runs += 1;
        let generated = match result {
            Ok(generated) => {
                assert_eq!(generated.tokens_by_sequence, expected, "wrong tokens, lost or doubled ones");
                generated
            }
            Err(FailedRequest { error, partial_result }) => {
                println!("seed {seed}: {error}");
                *tally.failed.entry(kind(&error)).or_default() += 1;
                *partial_result.expect("the tokens so far")
            }
        };
        for (tokens, expected) in generated.tokens_by_sequence.iter().zip(expected) {
            assert_eq!(tokens[..], expected[..tokens.len()], "wrong tokens");
        }
        assert_eq!(generated.tokens_by_sequence, received, "the listener received other tokens");
        let readings = generated.trace.readings.iter();
        let accepted = readings.filter(|reading| reading.counter == Counter::Accepted);
        tally.accepted += accepted.map(|reading| reading.value).sum::<u64>();
        let drafted = generated.trace.passes.iter().map(|pass| u64::from(pass.drafted));
        tally.drafted += drafted.sum::<u64>();
        let reconfigurations = generated.later_plans.len();
        tally.reconfigurations += reconfigurations as u32;
        *(if reconfigurations == 0 { &mut tally.undisturbed } else { &mut tally.reconfigured }) += 1;
    }
    tally.tampered += network.tampered();
    timeout(MAX_REQUEST_TIME, ring.close()).await.expect("closing hangs");
}

/// Returns the kind of an error, without numbers and names.
fn kind(error: &RingError) -> String {
    let text = format!("{error:?}");
    text.split([' ', '(', '{']).next().unwrap_or_default().to_owned()
}

/// Returns a small model, whose layers have recurrent states or shared keys if its architecture can have them.
fn model(folder: &tempfile::TempDir, architecture: Architecture) -> Arc<LocalModel> {
    let path = folder.path().join(format!("{architecture}.gguf"));
    let mut options = SynthOptions::from_preset("tiny").expect("shipped");
    (options.shape.vocab_size, options.shape.layers) = (512, Layers(LAYERS));
    (options.shape.embedding_length, options.shape.feed_forward_length) = (64, 64);
    (options.shape.heads, options.shape.kv_heads) = (2, 1);
    (options.shape.key_length, options.shape.value_length) = (32, 32);
    options.shape = ModelShape { architecture, ..options.shape }.with_default_hybrid();
    if let (Architecture::Gemma4, Some(hybrid)) = (architecture, &mut options.shape.hybrid) {
        hybrid.full_attention_interval = 2;
        options.shape.shared_kv = Some(SharedKv { layers: 3, feed_forward_length: 32 });
        (options.shape.has_tied_embeddings, options.shape.per_layer_input_length) = (true, 32);
    }
    (options.quant, options.gain) = (Quant::Pure(Format::F32), 2.0);
    synthesise(&options, &path, &mut |_, _| ()).expect("a tiny model");
    Arc::new(LocalModel::open(&path).expect("a sound model"))
}

fn under_a_paused_clock<T>(work: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    runtime.expect("a runtime").block_on(work)
}

/// Returns the tokens of a ring that has only a head and no faults.
fn alone(schedule: &FaultSchedule, model: &Arc<LocalModel>) -> Vec<Vec<u32>> {
    under_a_paused_clock(async {
        let network = SimulatedNetwork::new(0, 1, Duration::from_millis(1));
        // Without drafts and batches, which change no token.
        let schedule = &FaultSchedule { drafts: 0, micro_batch: 512, ..schedule.clone() };
        let plan = plan(schedule, model, &[LAYERS]);
        let own = network.endpoint(0);
        let mut ring = Ring::connect(&own, plan, model.clone(), inline(model)).await.expect("a ring of one");
        run_request(&mut ring, schedule).await.0.expect("tokens").tokens_by_sequence
    })
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

#[test]
fn any_faults_leave_the_tokens_of_an_undisturbed_run_or_a_clear_error() {
    let folder = tempfile::tempdir().expect("a folder");
    let models = [Architecture::Llama, Architecture::Gemma4, Architecture::Qwen35]
        .map(|architecture| model(&folder, architecture));
    let default = if std::env::var("HEARTH_SLOW").is_ok_and(|slow| slow == "1") { 1000 } else { 100 };
    let (first, count) = (number("HEARTH_STORM", 0), number("HEARTH_STORMS", default));
    let mut tally = Tally::default();
    let mut different = BTreeSet::new();
    for seed in first..first + count {
        let mut schedule = FaultSchedule::from_seed(seed);
        let model = &models[usize::try_from(seed % 4).expect("small").saturating_sub(1)];
        if model.profile.shape.is_recurrent() {
            schedule.drafts = 0;
        }
        let expected = alone(&schedule, model);
        different.extend(expected.iter().flatten().copied());
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            under_a_paused_clock(run_schedule(seed, &schedule, model, &expected, &mut tally));
        }));
        assert!(outcome.is_ok(), "HEARTH_STORM={seed} HEARTH_STORMS=1 fails: {:?}", schedule.faults);
    }
    println!("{count} schedules from seed {first}: {tally:?}");
    assert!(different.len() > 50 || count < 100, "too few different tokens to tell them apart");
    let some = 0 < tally.accepted && tally.accepted < tally.drafted;
    assert!(some || count < 100, "some drafts are accepted and some are not");
    assert!(tally.tampered > 0 || count < 100, "some activations are changed");
    assert!(tally.reconfigured > 0 || count < 100, "some schedule makes a ring plan again");
}
