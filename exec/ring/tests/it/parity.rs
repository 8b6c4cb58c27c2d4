//! Parity: a ring gives the same tokens and logits as one process, bit for bit.
//!
//! Every feasible ring of 2, 3 and 4 devices is tested with the trained 8-layer model: all windows whose sum is at
//! most the number of layers. This includes all numbers of rounds, unequal windows and partial last rounds.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hearth_core::metrics;
use hearth_core::schedule::ModelPart;
use hearth_profiles::{Bytes, Document};
use hearth_ring::{
    EncryptedTransport, FailedRequest, GenerationRequest, GenerationResult, Key, LocalModel, MemoryTransport,
    ModelSource, OnFetchProgress, Ring, RingError, RingOptions, TcpTransport, Transport, bind,
};
use hearth_runtime::{BackendFactory, BackendOptions, CpuBackend, Extent};
use hearth_schema::Plan;
use hearth_schema::residency::{Residency, ResidencyOptions};
use hearth_schema::scenario::ActivationFormat;
use hearth_schema::trace::StepKind;

use crate::fixture::{
    F16_MODEL, LAYERS, NO_PREFETCH, Q4_MODEL, Q8_MODEL, READ_AHEAD, connect, connect_error, is_on_disk, key,
    model_path, open_model, plan, prompts, ring_options, start_worker, start_workers, with_residency,
    workers,
};

/// Number of tokens to generate, enough to test the KV caches. `HEARTH_RING_TOKENS=64` generates all 64 golden tokens.
const GENERATE: u32 = 12;

fn generated() -> u32 {
    std::env::var("HEARTH_RING_TOKENS").ok().and_then(|text| text.parse().ok()).unwrap_or(GENERATE)
}

fn prompt() -> Vec<u32> {
    prompts().swap_remove(0)
}

/// Returns the options of managed residency with `kept` bytes of kept weights and the smallest stream buffer.
fn managed(kept: u64) -> ResidencyOptions {
    let (kept_set_limit, stream_buffer) = (Some(Bytes(kept)), Some(Bytes(512 << 10)));
    ResidencyOptions { kept_set_limit, stream_buffer, ..ResidencyOptions::with_policy(Residency::Managed) }
}

/// Returns the residency options with which the next window is read ahead and weights are evicted after their use.
fn released() -> ResidencyOptions {
    ResidencyOptions { evict_after_use: true, ..READ_AHEAD }
}

fn largest(logits: &[f32]) -> u32 {
    let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]));
    best.expect("a vocabulary") as u32
}

/// Generates greedy tokens. Returns the result, and the bits of the logits of each token.
async fn generate<T: Transport>(
    ring: &mut Ring<T>,
    prompt: &[u32],
) -> Result<(GenerationResult, Vec<Vec<u32>>), FailedRequest> {
    let recorded = Arc::new(Mutex::new(Vec::new()));
    let logits = recorded.clone();
    let sample = move |row: &[f32]| {
        logits.lock().unwrap().push(row.iter().map(|logit| logit.to_bits()).collect());
        largest(row)
    };
    let request = GenerationRequest::single_sequence(prompt.to_vec(), generated(), Box::new(sample));
    let generated = ring.generate(request, |_, _| {}).await?;
    let bits = std::mem::take(&mut *recorded.lock().unwrap());
    Ok((generated, bits))
}

/// Connects a ring, generates tokens for a prompt, and closes the ring. Returns the same as [`generate`].
async fn tokens_of<T: Transport>(
    transport: &T,
    plan: Plan,
    model: &Arc<LocalModel>,
    prompt: &[u32],
) -> (GenerationResult, Vec<Vec<u32>>) {
    let mut ring = connect(transport, plan, model).await;
    let result = generate(&mut ring, prompt).await.expect("tokens");
    ring.close().await;
    result
}

/// Returns the tokens that one process generates, and the bits of the logits of each token.
async fn alone(model: &Arc<LocalModel>, activations: ActivationFormat) -> (Vec<u32>, Vec<Vec<u32>>) {
    let plan = Plan { activation_format: activations, ..plan(model, &[LAYERS]) };
    let (generated, bits) = tokens_of(&MemoryTransport::default(), plan, model, &prompt()).await;
    (generated.first_sequence_tokens().to_vec(), bits)
}

/// Returns all possible windows of `devices` devices, each with at least one layer in the first round.
fn feasible(devices: usize) -> Vec<Vec<u32>> {
    (0..devices).fold(vec![vec![]], |all, _| {
        let longer = |head: &Vec<u32>| {
            let free = LAYERS - head.iter().sum::<u32>();
            (1..=free).map(|window| [&head[..], &[window]].concat()).collect::<Vec<_>>()
        };
        all.iter().flat_map(longer).collect()
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_feasible_ring_gives_the_logits_of_one_process() {
    for file in [Q4_MODEL, Q8_MODEL, F16_MODEL] {
        every_ring_is_one_process(file, ActivationFormat::F32).await;
    }
    every_ring_is_one_process(Q4_MODEL, ActivationFormat::F16).await;
}

fn bytes_of(kind: StepKind, generated: &GenerationResult) -> u64 {
    let records = generated.trace.records.iter().filter(|record| record.kind == kind);
    records.map(|record| record.bytes).sum()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f16_activations_take_half_the_bytes() {
    // Weights in f16: with quantised weights, activations are also rounded to eight bits, which hides f16.
    let model = open_model(F16_MODEL);
    let transport = workers(&model, 2).await;
    let mut results = Vec::new();
    for activations in [ActivationFormat::F32, ActivationFormat::F16] {
        let plan = Plan { activation_format: activations, ..plan(&model, &[1, 2, 1]) };
        let (generated, bits) = tokens_of(&transport, plan, &model, &prompt()).await;
        let tokens = generated.first_sequence_tokens().to_vec();
        results.push((bytes_of(StepKind::Send, &generated), bits, tokens));
    }
    let [(wide, wide_bits, wide_tokens), (half, half_bits, half_tokens)] = &results[..] else { panic!() };
    assert_eq!(*wide, 2 * half);
    assert!(wide_bits != half_bits, "rounding changes logits");
    // The trained model has no near ties between tokens, so rounding does not change them.
    assert_eq!(wide_tokens, half_tokens);
    let values = |bits: &[u32]| bits.iter().map(|&bits| f32::from_bits(bits)).collect::<Vec<_>>();
    let (one, other) = (values(&wide_bits[0]), values(&half_bits[0]));
    let error: f64 = one.iter().zip(&other).map(|(one, other)| f64::from(one - other).powi(2)).sum();
    let size: f64 = one.iter().map(|&value| f64::from(value).powi(2)).sum();
    println!("relative RMS of the first logits: {:e}", (error / size).sqrt());
    assert!((error / size).sqrt() < 1e-2, "{error} of {size}");
}

async fn every_ring_is_one_process(file: &str, activations: ActivationFormat) {
    let (model, prompt) = (open_model(file), prompt());
    let transport = workers(&model, 3).await;
    let (single, bits) = alone(&model, activations).await;
    let (mut rings, mut partial, mut unequal) = (0usize, 0, 0);
    for windows in (2..=4).flat_map(feasible) {
        // No policy may change a bit. Policies that release weights are slow, so they are tested less often.
        let residency = match rings % 8 {
            2 => managed(1 << 20),
            6 => released(),
            even if even % 2 == 0 => READ_AHEAD,
            _ => NO_PREFETCH,
        };
        let plan =
            Plan { activation_format: activations, ..with_residency(plan(&model, &windows), residency) };
        plan.validate().expect("a feasible plan");
        let (generated, other) = tokens_of(&transport, plan, &model, &prompt).await;
        assert_eq!(generated.first_sequence_tokens(), single, "windows {windows:?}");
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
    // Two batches are in flight, so windows are used in another order than they were announced.
    let (model, prompt) = (open_model(Q4_MODEL), prompt().into_iter().cycle().take(700).collect::<Vec<_>>());
    let transport = workers(&model, 1).await;
    let mut logits = Vec::new();
    for residency in [NO_PREFETCH, managed(1 << 20)] {
        let long = Plan { context_length: 1024, ..with_residency(plan(&model, &[2, 2]), residency) };
        logits.push(tokens_of(&transport, long, &model, &prompt).await.1);
    }
    assert!(logits[0] == logits[1], "logits differ");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn weights_that_are_not_kept_are_read_again_for_every_token() {
    // A separate copy of the file, because other tests read the original into memory.
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder");
    let copy = folder.path().join("model.gguf");
    std::fs::copy(model_path(F16_MODEL), &copy).expect("a copy");
    std::fs::File::open(&copy).and_then(|file| file.sync_all()).expect("written");
    let (model, prompt) = (Arc::new(LocalModel::open(&copy).expect("a model")), prompt());
    // Writing leaves folios of many pages in memory, which can only be evicted as a whole.
    let length = model.weights.mappings().next().expect("a file").len() as u64;
    model.weights.evict(Extent { file_index: 0, offset: 0, length });
    let whole: u64 = model.weights.part_bytes(&ModelPart::Layers(0..LAYERS))
        + model.weights.part_bytes(&ModelPart::Output);
    let mut tokens: Option<Vec<u32>> = None;
    for kept in [0, whole / 2, 2 * whole] {
        let plan = with_residency(plan(&model, &[LAYERS]), managed(kept));
        let (generated, _) = tokens_of(&MemoryTransport::default(), plan, &model, &prompt).await;
        let first = tokens.get_or_insert(generated.first_sequence_tokens().to_vec());
        assert_eq!(generated.first_sequence_tokens(), first, "{kept} bytes kept");
        let passes = generated.trace.passes.len() as u64;
        let read = bytes_of(StepKind::Prefetch, &generated);
        let expected = whole.saturating_sub(kept);
        if !is_on_disk(&model) {
            eprintln!(
                "SKIPPED weights_that_are_not_kept_are_read_again_for_every_token: the model is on a tmpfs"
            );
            return;
        }
        // The first pass may find all weights in memory or none, and pages that two matrices share stay in memory.
        let (min, max) = ((passes - 1) * expected * 9 / 10, passes * expected * 21 / 20 + whole);
        assert!((min..=max).contains(&read), "{read} bytes in {passes} passes with {kept} of {whole} kept");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn terms_of_a_ring_trace_sum_to_the_token_time() {
    let (model, prompt) = (open_model(Q4_MODEL), prompt());
    let transport = workers(&model, 2).await;
    let plan = with_residency(plan(&model, &[1, 2, 1]), READ_AHEAD);
    let mut ring = connect(&transport, plan, &model).await;
    for _ in 0..2 {
        let (generated, _) = generate(&mut ring, &prompt).await.unwrap();
        let metrics = metrics::compute_metrics(&generated.trace);
        let tpot = metrics.tpot_ms.expect("twelve tokens").mean_ms;
        assert!(tpot > 0.0 && (metrics.terms_ms.sum() - tpot).abs() < 1e-6 * tpot);
        assert!(metrics.terms_ms.cpu > 0.0 && metrics.terms_ms.network > 0.0);
        assert!(metrics.terms_ms.bubble.abs() < 0.02 * tpot, "{:?}", metrics.terms_ms);
    }
    ring.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn encrypted_ring_gives_the_logits_of_one_process_and_needs_the_key() {
    let model = open_model(Q4_MODEL);
    let plain = MemoryTransport::default();
    let encrypted = EncryptedTransport::new(plain.clone(), key());
    start_workers(&encrypted, &model, 2).await;
    let (single, bits) = alone(&model, ActivationFormat::F32).await;
    let plan = plan(&model, &[1, 2, 1]);

    let without_key = connect_error(&plain, plan.clone(), &model).await;
    let other = EncryptedTransport::new(plain, Key::parse("a phrase for a rest").unwrap());
    let with_another = connect_error(&other, plan.clone(), &model).await;
    for refused in [without_key, with_another] {
        assert!(matches!(&refused, RingError::KeyMismatch { name, .. } if name == "d1"), "{refused}");
        assert_eq!(refused.hint().as_deref(), Some("give both devices the same `--key`"));
    }

    let (generated, other) = tokens_of(&encrypted, plan, &model, &prompt()).await;
    assert_eq!(generated.first_sequence_tokens(), single);
    assert!(other == bits, "logits differ");
}

#[tokio::test]
async fn worker_with_another_model_is_named() {
    let (q4, q8) = (open_model(Q4_MODEL), open_model(Q8_MODEL));
    let refused = connect_error(&workers(&q8, 1).await, plan(&q4, &[4, 4]), &q4).await;
    assert!(matches!(&refused, RingError::ModelMismatch { name, .. } if name == "worker `d1`"), "{refused}");
}

#[tokio::test]
async fn second_head_is_refused() {
    let (model, prompt) = (open_model(Q4_MODEL), prompt());
    let transport = workers(&model, 1).await;
    let plan = plan(&model, &[4, 4]);
    let mut first = connect(&transport, plan.clone(), &model).await;
    let second = connect_error(&transport, plan.clone(), &model).await;
    assert!(matches!(second, RingError::Refused { .. }), "{second:?}");
    generate(&mut first, &prompt).await.unwrap();
    first.close().await;
    // The worker is free again.
    tokens_of(&transport, plan, &model, &prompt).await;
}

#[tokio::test]
async fn unreachable_worker_is_an_error_with_a_hint() {
    let model = open_model(Q4_MODEL);
    let error = connect_error(&MemoryTransport::default(), plan(&model, &[4, 4]), &model).await;
    assert!(error.hint().unwrap().contains("hearth worker --listen localhost:9001"), "{error}");
}

#[tokio::test]
async fn public_address_without_a_key_is_refused() {
    let model = open_model(Q4_MODEL);
    for address in ["0.0.0.0:0", "192.168.1.7:9000", "[::]:0", "example.org:1"] {
        let error = bind(&TcpTransport, address).await.err();
        assert!(matches!(error, Some(RingError::KeyRequired { .. })), "{address}: {error:?}");
        // The head does not connect either: the activations would reveal the prompt.
        let mut plan = plan(&model, &[4, 4]);
        plan.devices[1].address = Some(address.into());
        let error = connect_error(&TcpTransport, plan, &model).await;
        assert!(matches!(error, RingError::KeyRequired { .. }), "{address}: {error}");
    }
    assert!(bind(&TcpTransport, "127.0.0.1:0").await.is_ok());
    let transport = MemoryTransport::default();
    let encrypted = EncryptedTransport::new(transport.clone(), key());
    assert!(bind(&encrypted, "0.0.0.0:1").await.is_ok(), "only peers with the key can use it");
    let _taken = transport.bind("localhost:7").await.unwrap();
    assert!(matches!(bind(&transport, "localhost:7").await, Err(RingError::CannotListen { .. })));
}

/// Returns the paths of the files called `name` in the subfolders of a folder.
fn found(folder: &tempfile::TempDir, name: &str) -> Vec<PathBuf> {
    let folders = std::fs::read_dir(folder.path()).unwrap();
    folders.map(|entry| entry.unwrap().path().join(name)).filter(|path| path.exists()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fetched_layers_are_kept_and_give_the_same_tokens() {
    let (model, prompt) = (open_model(F16_MODEL), prompt());
    let transport = MemoryTransport::default();
    let (single, bits) = alone(&model, ActivationFormat::F32).await;
    let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
    for (device_index, folder) in (1..).zip(&folders) {
        start_worker(&transport, device_index, ModelSource::Fetch(folder.path().into())).await;
    }
    let plan = plan(&model, &[6, 1, 1]);
    let mut fetched = Vec::new();
    for session in 0..3 {
        let bytes = Arc::new(Mutex::new(0));
        let total = bytes.clone();
        let on_fetch: OnFetchProgress = Arc::new(move |_, done, all| {
            assert!(done <= all);
            *total.lock().unwrap() += u64::from(done == all) * all;
        });
        let options = RingOptions { on_fetch_progress: Some(on_fetch), ..ring_options() };
        let mut ring = Ring::connect(&transport, plan.clone(), model.clone(), options).await.unwrap();
        let (generated, other) = generate(&mut ring, &prompt).await.unwrap();
        ring.close().await;
        assert!(generated.first_sequence_tokens() == single && other == bits, "session {session}");
        fetched.push(*bytes.lock().unwrap());
        if session == 1 {
            // Damage the last fetched byte that is not zero.
            let file = &found(&folders[0], "model.gguf")[0];
            let mut bytes = std::fs::read(file).unwrap();
            let last = bytes.iter().rposition(|&byte| byte != 0).unwrap();
            bytes[last] ^= 0x40;
            std::fs::write(file, bytes).unwrap();
        }
    }
    let whole = std::fs::metadata(model_path(F16_MODEL)).unwrap().len();
    assert!(fetched[0] > 0 && fetched[0] < whole, "{fetched:?} bytes of twice {whole}");
    assert_eq!(fetched[1..], [0, 1 << 20], "only the damaged chunk is fetched again");
    // The incomplete file cannot be opened as a model.
    let refused = LocalModel::open(&found(&folders[0], "model.gguf")[0]).expect_err("layers are missing");
    assert!(refused.to_string().contains("only some layers"), "{refused}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn layers_of_another_plan_are_fetched_too() {
    let model = open_model(Q4_MODEL);
    let transport = MemoryTransport::default();
    let folder = tempfile::tempdir().unwrap();
    start_worker(&transport, 1, ModelSource::Fetch(folder.path().into())).await;
    start_worker(&transport, 2, ModelSource::File(model.clone())).await;
    let (single, bits) = alone(&model, ActivationFormat::F32).await;
    // The worker without a model file first has layer 2, and then layers 4 to 7.
    for windows in [vec![2, 1, 5], vec![4, 4]] {
        let (generated, other) = tokens_of(&transport, plan(&model, &windows), &model, &prompt()).await;
        assert!(generated.first_sequence_tokens() == single && other == bits, "windows {windows:?}");
    }
}

/// Returns the factory of a CPU backend whose upload takes eight steps, which it reports if `reports` is set.
fn slow_upload(step: Duration, reports: bool) -> BackendFactory {
    BackendFactory::new(move |options: BackendOptions| {
        for done in 0..8 {
            std::thread::sleep(step);
            if reports {
                options.progress.report(done, 8);
            }
        }
        let layers = options.owned_layers.into_iter().flatten();
        Ok(Box::new(CpuBackend::new(options.weights, layers, options.kv_cache_options, options.cpu)))
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn upload_progress_extends_the_ready_deadline() {
    let (model, prompt) = (open_model(Q4_MODEL), prompt());
    // The upload takes far longer than the deadline, but each step takes far less.
    let (step, ready_timeout) = (Duration::from_millis(500), Duration::from_secs(2));
    for reports in [true, false] {
        let accelerated = LocalModel::open(&model_path(Q4_MODEL)).unwrap();
        let accelerated = Arc::new(accelerated.with_backend_factory(Some(slow_upload(step, reports))));
        let transport = workers(&accelerated, 1).await;
        let mut plan = plan(&model, &[6, 2]);
        plan.devices[1].gpu_layers = 1;
        let options = RingOptions { ready_timeout, ..ring_options() };
        let connected = Ring::connect(&transport, plan, model.clone(), options).await;
        assert_eq!(connected.is_ok(), reports, "a worker is waited for while it reports progress");
        match connected {
            Ok(mut ring) => {
                let (generated, _) = generate(&mut ring, &prompt).await.unwrap();
                assert_eq!(generated.first_sequence_tokens().len(), self::generated() as usize);
                ring.close().await;
            }
            Err(error) => assert!(matches!(error, RingError::Deadline { .. }), "{error}"),
        }
    }
}
