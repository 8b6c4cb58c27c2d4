//! Does a ring give the tokens and the logits of one process, bit for bit?
//!
//! Every feasible ring of 2, 3 and 4 devices over the trained 8-layer model: all windows that fit into the
//! layers, so every number of rounds, windows that differ and partial last rounds among them. Devices
//! are tasks of this process, joined by pipes; they run the code that processes run.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hearth_core::metrics;
use hearth_core::schedule::ModelPart;
use hearth_profiles::{Bytes, Document};
use hearth_ring::{
    Generated, Key, LocalModel, Memory, Network, OnFetch, Request, Ring, RingError, RingOptions, Sealed,
    Source, Unfinished, Worker, WorkerOptions, bind,
};
use hearth_runtime::{AcceleratedPlace, Accelerator, CpuLayers};
use hearth_schema::Plan;
use hearth_schema::plan::Origin;
use hearth_schema::plan::PlanKind;
use hearth_schema::plan::PlannedDevice;
use hearth_schema::plan::PlannedModel;
use hearth_schema::plan::PlannerRecord;
use hearth_schema::plan::Processor;
use hearth_schema::plan::Role;
use hearth_schema::residency::Residency;
use hearth_schema::residency::ResidencyOptions;
use hearth_schema::scenario::ActivationFormat;
use hearth_schema::scenario::KvFormat;
use hearth_schema::trace::Kind;

const LAYERS: u32 = 8;
/// Enough to show that caches are right; all 64 golden tokens with `HEARTH_RING_TOKENS=64`.
const GENERATE: u32 = 12;

fn generated() -> u32 {
    std::env::var("HEARTH_RING_TOKENS").ok().and_then(|text| text.parse().ok()).unwrap_or(GENERATE)
}

fn data(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/models").join(name)
}

fn open(name: &str) -> Arc<LocalModel> {
    Arc::new(LocalModel::open(&data(name)).expect("the trained model is part of the repository"))
}

fn prompt() -> Vec<u32> {
    let golden: serde_json::Value =
        serde_json::from_slice(&std::fs::read(data("golden.json")).unwrap()).unwrap();
    let ids = &golden["files"]["psalm-7m-q4_k.gguf"][0]["prompt_ids"];
    ids.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

/// Populates the next window ahead of its turn.
const AHEAD: ResidencyOptions = ResidencyOptions::of(Residency::Windowed);
/// Faults in what it touches.
const FAULTS: ResidencyOptions = AHEAD.without_prefetch();

/// A plan of these windows; `addresses` for the workers.
fn plan(model: &LocalModel, windows: &[u32], addresses: &[String], residency: ResidencyOptions) -> Plan {
    let devices = windows.iter().enumerate().map(|(place, &window)| PlannedDevice {
        name: format!("d{place}"),
        address: place.checked_sub(1).map(|worker| addresses[worker].clone()),
        role: if place == 0 { Role::Head } else { Role::Worker },
        window,
        gpu_layers: 0,
        residency,
        predicted: None,
    });
    Plan {
        schema: "plan/1".into(),
        scenario: Origin { name: "test".into(), digest: String::new() },
        model: PlannedModel::of(&model.profile),
        planner: PlannerRecord { strategy: "manual".into(), options: vec![] },
        kind: PlanKind::Ring,
        rounds: LAYERS.div_ceil(windows.iter().sum()),
        context: 128,
        kv_cache: KvFormat::F32,
        activations: ActivationFormat::F32,
        output: Processor::Cpu,
        sequences: 1,
        draft: None,
        devices: devices.collect(),
        dropped: vec![],
        predicted: None,
        explanation: vec![],
    }
}

/// Keeps so many bytes and streams the others through the smallest buffer.
fn managed(kept: u64) -> ResidencyOptions {
    let (kept, stream_buffer) = (Some(Bytes(kept)), Some(Bytes(512 << 10)));
    ResidencyOptions { kept, stream_buffer, ..ResidencyOptions::of(Residency::Managed) }
}

/// Populates, and gives up behind the computation.
fn given_up() -> ResidencyOptions {
    ResidencyOptions { release: true, ..AHEAD }
}

/// Starts workers on a network and gives their addresses.
async fn start(network: &impl Network, model: &Arc<LocalModel>, count: usize) -> Vec<String> {
    let mut addresses = Vec::new();
    for index in 0..count {
        let address = format!("localhost:{}", 9000 + index);
        let listener = bind(network, &address).await.unwrap();
        let worker = Worker::new(network.clone(), model.clone(), 1);
        tokio::spawn(async move { worker.serve(listener, |_| {}).await });
        addresses.push(address);
    }
    addresses
}

fn largest(logits: &[f32]) -> u32 {
    let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]));
    best.expect("a vocabulary") as u32
}

/// Greedy tokens, the bits of every step's logits, and the trace.
async fn generate<N: Network>(
    ring: &mut Ring<N>,
    prompt: &[u32],
) -> Result<(Generated, Vec<Vec<u32>>), Unfinished> {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let logits = seen.clone();
    let sample = move |row: &[f32]| {
        logits.lock().unwrap().push(row.iter().map(|logit| logit.to_bits()).collect());
        largest(row)
    };
    let request = Request::one(prompt.to_vec(), generated(), Box::new(sample));
    let generated = ring.generate(request, |_, _| {}).await?;
    let bits = std::mem::take(&mut *seen.lock().unwrap());
    Ok((generated, bits))
}

fn one_thread() -> RingOptions {
    RingOptions { threads: 1, pass_deadline: Duration::from_mins(1), ..RingOptions::default() }
}

/// All windows of `devices` devices that each get a layer in the first round.
fn feasible(devices: usize) -> Vec<Vec<u32>> {
    let mut all: Vec<Vec<u32>> = vec![vec![]];
    for _ in 0..devices {
        all = all
            .iter()
            .flat_map(|head| (1..=LAYERS).map(move |window| [head.clone(), vec![window]].concat()))
            .collect();
    }
    all.retain(|windows| windows.iter().sum::<u32>() <= LAYERS);
    all
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_feasible_ring_gives_the_tokens_and_logits_of_one_process() {
    for format in ["q4_k", "q8_0", "f16"] {
        every_ring_is_one_process(&format!("psalm-7m-{format}.gguf"), ActivationFormat::F32).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_activations_in_f16_every_feasible_ring_gives_the_logits_of_one_process_too() {
    every_ring_is_one_process("psalm-7m-q4_k.gguf", ActivationFormat::F16).await;
}

/// Bytes that all devices sent.
fn sent(generated: &Generated) -> u64 {
    let sends = generated.trace.records.iter().filter(|record| record.kind == Kind::Send);
    sends.map(|record| record.bytes).sum()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn activations_in_f16_take_half_the_bytes_and_are_other_bits() {
    // Weights in f16: quantised ones round activations to eight bits besides, which hides what f16 costs.
    let (model, prompt) = (open("psalm-7m-f16.gguf"), prompt());
    let network = Memory::default();
    let addresses = start(&network, &model, 2).await;
    let mut told = Vec::new();
    for activations in [ActivationFormat::F32, ActivationFormat::F16] {
        let plan = Plan { activations, ..plan(&model, &[1, 2, 1], &addresses, FAULTS) };
        let mut ring = Ring::connect(&network, plan, model.clone(), one_thread()).await.unwrap();
        let (generated, bits) = generate(&mut ring, &prompt).await.unwrap();
        ring.close().await;
        told.push((sent(&generated), bits, generated.tokens().to_vec()));
    }
    let [(wide, wide_bits, wide_tokens), (half, half_bits, half_tokens)] = &told[..] else { unreachable!() };
    assert_eq!(*wide, 2 * half);
    assert!(wide_bits != half_bits, "rounding changes logits");
    // The trained model is sure of what it says: none of its choices is a near tie.
    assert_eq!(wide_tokens, half_tokens);
    let close = |(one, other): (&u32, &u32)| {
        let (one, other) = (f32::from_bits(*one), f32::from_bits(*other));
        f64::from(one - other).powi(2)
    };
    let (one, other) = (&wide_bits[0], &half_bits[0]);
    let error: f64 = one.iter().zip(other).map(close).sum();
    let size: f64 = one.iter().map(|&bits| f64::from(f32::from_bits(bits)).powi(2)).sum();
    println!("relative RMS of the first logits: {:e}", (error / size).sqrt());
    assert!((error / size).sqrt() < 1e-2, "{error} of {size}");
}

async fn every_ring_is_one_process(file: &str, activations: ActivationFormat) {
    let (model, prompt) = (open(file), prompt());
    let network = Memory::default();
    let addresses = start(&network, &model, 3).await;
    let alone = Plan { activations, ..plan(&model, &[LAYERS], &[], FAULTS) };
    let mut alone = Ring::connect(&network, alone, model.clone(), one_thread()).await.unwrap();
    let (single, bits) = generate(&mut alone, &prompt).await.unwrap();
    let (mut rings, mut partial, mut unequal) = (0usize, 0, 0);
    for windows in (2..=4).flat_map(feasible) {
        // No policy may change a bit. Those that give up weights read them again from disk, which takes time.
        let residency = match rings % 8 {
            2 => managed(1 << 20),
            6 => given_up(),
            even if even % 2 == 0 => AHEAD,
            _ => FAULTS,
        };
        let plan = Plan { activations, ..plan(&model, &windows, &addresses, residency) };
        plan.validate().expect("a feasible plan");
        let mut ring = Ring::connect(&network, plan, model.clone(), one_thread()).await.unwrap();
        let (generated, other) = generate(&mut ring, &prompt).await.unwrap();
        ring.close().await;
        assert_eq!(generated.tokens(), single.tokens(), "windows {windows:?}");
        assert!(other == bits, "windows {windows:?}: logits differ");
        rings += 1;
        partial += u32::from(!LAYERS.is_multiple_of(windows.iter().sum::<u32>()));
        unequal += u32::from(windows.windows(2).any(|pair| pair[0] != pair[1]));
    }
    println!(
        "{file}, {activations:?}: {rings} rings, {partial} with a partial last round, {unequal} with unequal windows"
    );
    assert_eq!(rings, 28 + 56 + 70, "C(8, 2) + C(8, 3) + C(8, 4) ways to leave layers to later rounds");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batches_of_a_long_prompt_stream_past_each_other() {
    // Two batches are in the ring at once, so windows are needed in another order than they were announced in.
    let (model, prompt) =
        (open("psalm-7m-q4_k.gguf"), prompt().into_iter().cycle().take(700).collect::<Vec<_>>());
    let network = Memory::default();
    let addresses = start(&network, &model, 1).await;
    let mut seen = Vec::new();
    for residency in [FAULTS, managed(1 << 20)] {
        let long = Plan { context: 1024, ..plan(&model, &[2, 2], &addresses, residency) };
        let mut ring = Ring::connect(&network, long, model.clone(), one_thread()).await.unwrap();
        seen.push(generate(&mut ring, &prompt).await.unwrap().1);
        ring.close().await;
    }
    assert!(seen[0] == seen[1], "logits differ");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_not_kept_is_read_again_for_every_token() {
    // A copy of its own: what other tests read of the file would be in memory.
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder");
    let copy = folder.path().join("model.gguf");
    std::fs::copy(data("psalm-7m-f16.gguf"), &copy).expect("a copy");
    std::fs::File::open(&copy).and_then(|file| file.sync_all()).expect("written");
    let (model, prompt) = (Arc::new(LocalModel::open(&copy).expect("a model")), prompt());
    // Writing leaves folios of many pages in memory, which can only be given up as a whole.
    let (mapping, file) = (model.weights.mappings().next().expect("a file"), &model.weights.files()[0]);
    hearth_runtime::pages::evict(mapping, file, 0);
    let whole: u64 = model.weights.part_bytes(&ModelPart::Layers(0..LAYERS))
        + model.weights.part_bytes(&ModelPart::Output);
    let network = Memory::default();
    let mut tokens: Option<Vec<u32>> = None;
    for kept in [0, whole / 2, 2 * whole] {
        let plan = plan(&model, &[LAYERS], &[], managed(kept));
        let mut ring = Ring::connect(&network, plan, model.clone(), one_thread()).await.unwrap();
        let (generated, _) = generate(&mut ring, &prompt).await.unwrap();
        let first = tokens.get_or_insert(generated.tokens().to_vec());
        assert_eq!(generated.tokens(), first, "{kept} bytes kept");
        let passes = generated.trace.passes.len() as u64;
        let ahead = generated.trace.records.iter().filter(|record| record.kind == Kind::Prefetch);
        let read = ahead.map(|record| record.bytes).sum::<u64>();
        let expected = whole.saturating_sub(kept);
        if !is_on_disk(&model) {
            eprintln!(
                "SKIPPED what_is_not_kept_is_read_again_for_every_token: the model is in a memory file system"
            );
            return;
        }
        // The first pass finds all of it in memory or nothing, and pages that two matrices share stay.
        let (least, most) = ((passes - 1) * expected * 9 / 10, passes * expected * 21 / 20 + whole);
        assert!(
            (least..=most).contains(&read),
            "{read} bytes in {passes} passes with {kept} of {whole} kept"
        );
    }
}

/// Whether pages that are given up are really gone.
fn is_on_disk(model: &LocalModel) -> bool {
    let Some(extent) = model.weights.layer_extents(0).into_iter().next() else { return false };
    let Some((bytes, file)) = model.weights.bytes(extent).zip(model.weights.file(extent)) else {
        return false;
    };
    hearth_runtime::pages::populate(bytes);
    hearth_runtime::pages::evict(bytes, file, extent.offset);
    hearth_runtime::pages::resident(bytes) < bytes.len() as u64 / 2
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_ring_writes_a_trace_whose_terms_sum_to_the_token_time() {
    let (model, prompt) = (open("psalm-7m-q4_k.gguf"), prompt());
    let network = Memory::default();
    let addresses = start(&network, &model, 2).await;
    let plan = plan(&model, &[1, 2, 1], &addresses, AHEAD);
    let mut ring = Ring::connect(&network, plan, model, one_thread()).await.unwrap();
    for _ in 0..2 {
        let (generated, _) = generate(&mut ring, &prompt).await.unwrap();
        let metrics = metrics::compute(&generated.trace);
        let tpot = metrics.tpot_ms.expect("twelve tokens").mean;
        assert!(tpot > 0.0 && (metrics.terms_ms.sum() - tpot).abs() < 1e-6 * tpot);
        assert!(metrics.terms_ms.cpu > 0.0 && metrics.terms_ms.network > 0.0);
        assert!(metrics.terms_ms.bubble.abs() < 0.02 * tpot, "{:?}", metrics.terms_ms);
    }
    ring.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sealed_ring_gives_the_tokens_and_logits_of_one_process_to_who_has_the_key() {
    let (model, prompt) = (open("psalm-7m-q4_k.gguf"), prompt());
    let network = Memory::default();
    let sealed = Sealed::new(network.clone(), Key::parse("a phrase for a test").unwrap());
    let addresses = start(&sealed, &model, 2).await;
    let alone = plan(&model, &[LAYERS], &[], FAULTS);
    let mut alone = Ring::connect(&network, alone, model.clone(), one_thread()).await.unwrap();
    let (single, bits) = generate(&mut alone, &prompt).await.unwrap();
    let plan = plan(&model, &[1, 2, 1], &addresses, FAULTS);

    let stranger = Ring::connect(&network, plan.clone(), model.clone(), one_thread()).await.err();
    let other = Sealed::new(network.clone(), Key::parse("a phrase for a rest").unwrap());
    let other = Ring::connect(&other, plan.clone(), model.clone(), one_thread()).await.err();
    for refused in [stranger, other] {
        let refused = refused.expect("they have no key");
        assert!(matches!(&refused, RingError::Key { name, .. } if name == "d1"), "{refused}");
    }

    let mut ring = Ring::connect(&sealed, plan, model, one_thread()).await.unwrap();
    let (generated, other) = generate(&mut ring, &prompt).await.unwrap();
    ring.close().await;
    assert_eq!(generated.tokens(), single.tokens());
    assert!(other == bits, "logits differ");
}

#[tokio::test]
async fn worker_with_another_model_is_named() {
    let (q4, q8) = (open("psalm-7m-q4_k.gguf"), open("psalm-7m-q8_0.gguf"));
    let network = Memory::default();
    let addresses = start(&network, &q8, 1).await;
    let plan = plan(&q4, &[4, 4], &addresses, FAULTS);
    let refused = Ring::connect(&network, plan, q4, one_thread()).await.err().expect("models differ");
    assert!(matches!(&refused, RingError::AnotherModel { name, .. } if name == "worker `d1`"), "{refused}");
}

#[tokio::test]
async fn a_second_head_is_refused_and_the_first_goes_on() {
    let (model, prompt) = (open("psalm-7m-q4_k.gguf"), prompt());
    let network = Memory::default();
    let addresses = start(&network, &model, 1).await;
    let plan = plan(&model, &[4, 4], &addresses, FAULTS);
    let mut first = Ring::connect(&network, plan.clone(), model.clone(), one_thread()).await.unwrap();
    let second = Ring::connect(&network, plan.clone(), model.clone(), one_thread()).await.err();
    assert!(matches!(second, Some(RingError::Refused { .. })), "{second:?}");
    generate(&mut first, &prompt).await.unwrap();
    first.close().await;
    let mut third =
        Ring::connect(&network, plan, model, one_thread()).await.expect("the worker is free again");
    generate(&mut third, &prompt).await.unwrap();
}

#[tokio::test]
async fn nobody_at_an_address_is_an_error_with_a_hint() {
    let model = open("psalm-7m-q4_k.gguf");
    let plan = plan(&model, &[4, 4], &["localhost:9".into()], FAULTS);
    let error = Ring::connect(&Memory::default(), plan, model, one_thread()).await.err().unwrap();
    assert!(error.to_string().contains("hearth worker --listen localhost:9"), "{error}");
}

#[tokio::test]
async fn an_address_that_others_can_reach_is_refused_without_a_key() {
    let network = Memory::default();
    for address in ["0.0.0.0:0", "192.168.1.7:9000", "[::]:0", "example.org:1"] {
        assert!(matches!(bind(&network, address).await, Err(RingError::NotLoopback { .. })), "{address}");
    }
    assert!(bind(&network, "[::1]:0").await.is_ok());
    let sealed = Sealed::new(network.clone(), Key::parse("a phrase for a test").unwrap());
    assert!(bind(&sealed, "0.0.0.0:1").await.is_ok(), "a key keeps strangers out");
    let _taken = network.bind("localhost:7").await.unwrap();
    assert!(matches!(bind(&network, "localhost:7").await, Err(RingError::CannotListen { .. })));
}

/// A plan's ring whose workers have no model, and one folder for what each fetches.
async fn fetching(network: &Memory, folders: &[tempfile::TempDir]) -> Vec<String> {
    let mut addresses = Vec::new();
    for folder in folders {
        let address = format!("localhost:{}", 9500 + addresses.len());
        let listener = bind(network, &address).await.unwrap();
        let options = WorkerOptions { threads: 1, ..WorkerOptions::default() };
        let worker = Worker::with(network.clone(), Source::Fetch(folder.path().into()), options);
        tokio::spawn(async move { worker.serve(listener, |_| {}).await });
        addresses.push(address);
    }
    addresses
}

/// The files of this name in a folder's folders.
fn found(folder: &tempfile::TempDir, name: &str) -> Vec<PathBuf> {
    let folders = std::fs::read_dir(folder.path()).unwrap();
    folders.map(|entry| entry.unwrap().path().join(name)).filter(|path| path.exists()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_without_the_model_fetch_their_layers_once_and_give_the_same_tokens() {
    let (model, prompt) = (open("psalm-7m-f16.gguf"), prompt());
    let network = Memory::default();
    let alone = plan(&model, &[LAYERS], &[], FAULTS);
    let mut alone = Ring::connect(&network, alone, model.clone(), one_thread()).await.unwrap();
    let (single, bits) = generate(&mut alone, &prompt).await.unwrap();
    let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let addresses = fetching(&network, &folders).await;
    let plan = plan(&model, &[6, 1, 1], &addresses, FAULTS);
    let mut fetched = Vec::new();
    for session in 0..3 {
        let bytes = Arc::new(Mutex::new(0));
        let total = bytes.clone();
        let on_fetch: OnFetch = Arc::new(move |_, done, all| {
            assert!(done <= all);
            *total.lock().unwrap() += u64::from(done == all) * all;
        });
        let options = RingOptions { on_fetch: Some(on_fetch), ..one_thread() };
        let mut ring = Ring::connect(&network, plan.clone(), model.clone(), options).await.unwrap();
        let (generated, other) = generate(&mut ring, &prompt).await.unwrap();
        ring.close().await;
        assert!(generated.tokens() == single.tokens() && other == bits, "session {session}");
        fetched.push(*bytes.lock().unwrap());
        if session == 1 {
            // Somebody damages a byte of what was fetched: the last that is not zero.
            let file = &found(&folders[0], "model.gguf")[0];
            let mut bytes = std::fs::read(file).unwrap();
            let last = bytes.iter().rposition(|&byte| byte != 0).unwrap();
            bytes[last] ^= 0x40;
            std::fs::write(file, bytes).unwrap();
        }
    }
    let whole = std::fs::metadata(data("psalm-7m-f16.gguf")).unwrap().len();
    assert!(fetched[0] > 0 && fetched[0] < whole, "{fetched:?} bytes of twice {whole}");
    assert_eq!(fetched[1..], [0, 1 << 20], "what is there is not fetched again, and what is damaged is");
    // What is there of the file is no model.
    let refused = LocalModel::open(&found(&folders[0], "model.gguf")[0]).expect_err("layers are missing");
    assert!(refused.to_string().contains("only some layers"), "{refused}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_layers_of_another_plan_are_fetched_beside_those_that_are_there() {
    let (model, prompt) = (open("psalm-7m-q4_k.gguf"), prompt());
    let network = Memory::default();
    let folders = [(); 1].map(|()| tempfile::tempdir().unwrap());
    let mut addresses = fetching(&network, &folders).await;
    addresses.extend(start(&network, &model, 1).await);
    let alone = plan(&model, &[LAYERS], &[], FAULTS);
    let mut alone = Ring::connect(&network, alone, model.clone(), one_thread()).await.unwrap();
    let (single, bits) = generate(&mut alone, &prompt).await.unwrap();
    // First a ring in which the one without the model has layer 2, then one in which it has 4 to 8.
    for windows in [vec![2, 1, 5], vec![4, 4]] {
        let plan = plan(&model, &windows, &addresses, FAULTS);
        let mut ring = Ring::connect(&network, plan, model.clone(), one_thread()).await.unwrap();
        let (generated, other) = generate(&mut ring, &prompt).await.unwrap();
        ring.close().await;
        assert!(generated.tokens() == single.tokens() && other == bits, "windows {windows:?}");
    }
}

/// What puts layers somewhere in eight steps of so long, and computes them on processors all the same.
fn slow_upload(step: Duration, tells: bool) -> Accelerator {
    Accelerator::new(move |place: AcceleratedPlace| {
        for done in 0..8 {
            std::thread::sleep(step);
            if tells {
                place.progress.report(done, 8);
            }
        }
        let layers = place.owned.iter().cloned().flatten();
        Ok(Box::new(CpuLayers::new(place.weights.clone(), layers, place.cache, place.cpu.clone())))
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_says_how_far_its_upload_is_may_take_longer_than_the_deadline() {
    let (model, prompt) = (open("psalm-7m-q4_k.gguf"), prompt());
    // Together far more than the deadline, and each step far less.
    let (step, ready_deadline) = (Duration::from_millis(500), Duration::from_secs(2));
    for tells in [true, false] {
        let network = Memory::default();
        let accelerated = LocalModel::open(&data("psalm-7m-q4_k.gguf")).unwrap();
        let accelerated = Arc::new(accelerated.accelerated_by(Some(slow_upload(step, tells))));
        let addresses = start(&network, &accelerated, 1).await;
        let mut plan = plan(&model, &[6, 2], &addresses, FAULTS);
        plan.devices[1].gpu_layers = 1;
        let options = RingOptions { ready_deadline, ..one_thread() };
        match Ring::connect(&network, plan, model.clone(), options).await {
            Ok(mut ring) => {
                assert!(tells, "a worker that says nothing is waited for");
                let (generated, _) = generate(&mut ring, &prompt).await.unwrap();
                assert_eq!(generated.tokens().len(), self::generated() as usize);
                ring.close().await;
            }
            Err(error) => {
                assert!(!tells, "{error}");
                assert!(matches!(error, RingError::Deadline { .. }), "{error}");
            }
        }
    }
}
