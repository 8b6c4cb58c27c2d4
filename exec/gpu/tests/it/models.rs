//! Tests that whole models generate the same tokens on the GPU as on the CPU.
//!
//! The trained model runs with none, some and all of its layers on the GPU, teacher-forced along llama.cpp's golden
//! tokens. Its greedy token must be the golden one wherever the margin of the logits is above 0.05. Models with
//! random weights of every architecture must have logits within a relative RMS of 1e-4 of the oracle where
//! activations are not quantised, because floats are added in a different order. Where they are quantised, the bound is
//! 2e-2: a value near a tie can be rounded differently, and random weights do not attenuate the difference. (For the
//! same reason the executor is within 1e-2 of llama.cpp.)

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hearth_gpu::backend::GpuBackend;
use hearth_gpu::kernels::matmul::Tiling;
use hearth_gpu::layers::{GpuLayers, UploadOptions};
use hearth_gpu::{CapabilityMask, Gpu, GpuError, WarningSink};
use hearth_profiles::Layers;
use hearth_profiles::model::{Architecture, ModelShape};
use hearth_runtime::sampler::greedy_token;
use hearth_runtime::synth::{SynthOptions, synthesise};
use hearth_runtime::{
    Backend, BackendOptions, Cpu, InputOutputLayers, KvCacheOptions, KvFormat, Oracle, Stage, ThreadPool,
    ThreadPoolOptions, Tokenizer, UploadProgressReporter, Weights,
};
use serde_json::Value;

use crate::gpu::{lock_gpu, open, open_and_lock};
use crate::matmuls::plain_mask;

/// The options of the KV cache for one short sequence.
pub const CACHE: KvCacheOptions = KvCacheOptions { context: 40, format: KvFormat::F16, sequences: 1 };

/// Returns `count` arbitrary tokens, which are different for each seed.
pub fn arbitrary_tokens(count: u32, seed: u32) -> Vec<u32> {
    (0..count).map(|at| (at * 37 + 11 + seed * 101) % 512).collect()
}

pub fn cpu() -> Cpu {
    let options = ThreadPoolOptions { threads: 2, pin_workers: false, spin_ns: 10_000 };
    Cpu::new(Arc::new(ThreadPool::new(options).unwrap()))
}

pub type Warnings = Arc<Mutex<Vec<String>>>;

/// Returns a sink of warnings, and the list to which the sink adds the warnings.
pub fn warning_sink() -> (WarningSink, Warnings) {
    let warnings = Warnings::default();
    let pushed = warnings.clone();
    (Arc::new(move |warning| pushed.lock().unwrap().push(warning.to_owned())), warnings)
}

/// Creates a GPU backend. Returns the backend and the list of its warnings.
pub fn gpu_backend(gpu: &Arc<Gpu>, options: BackendOptions, upload: UploadOptions) -> (GpuBackend, Warnings) {
    let (sink, warnings) = warning_sink();
    (GpuBackend::new(gpu.clone(), upload, options, sink).unwrap(), warnings)
}

/// Returns the backend options of a device with layer windows `windows`, and with the layers `on_gpu` on its GPU.
pub fn backend_options(
    weights: &Arc<Weights>,
    windows: &[Range<u32>],
    on_gpu: &[Range<u32>],
    cache: KvCacheOptions,
) -> BackendOptions {
    BackendOptions {
        weights: weights.clone(),
        owned_layers: windows.to_vec(),
        gpu_layers: on_gpu.to_vec(),
        output_on_gpu: true,
        kv_cache_options: cache,
        rounding: None,
        cpu: cpu(),
        fallback_to_cpu: false,
        progress: UploadProgressReporter::default(),
    }
}

/// A model with some of its layers on the GPU.
struct Model {
    input_output: InputOutputLayers,
    stage: Stage,
    windows: Vec<Range<u32>>,
    /// Number of positions in the KV cache.
    length: u32,
    warnings: Warnings,
}

impl Model {
    fn new(
        gpu: &Arc<Gpu>,
        weights: &Arc<Weights>,
        windows: &[Range<u32>],
        on_gpu: &[Range<u32>],
        cache: KvCacheOptions,
        upload: UploadOptions,
    ) -> Model {
        let (backend, warnings) = gpu_backend(gpu, backend_options(weights, windows, on_gpu, cache), upload);
        let stage = Stage::new(weights.clone(), windows, cache, Box::new(backend)).unwrap();
        let input_output = InputOutputLayers::new(weights.clone(), cpu());
        Model { input_output, stage, windows: windows.to_vec(), length: 0, warnings }
    }

    /// Runs a pass of `tokens` at the next positions and returns the final hidden states, [tokens, embedding].
    fn pass(&mut self, tokens: &[u32]) -> Vec<f32> {
        let mut hidden = self.input_output.embed(tokens).unwrap();
        for window in self.windows.clone() {
            self.stage.forward(0, window, &mut hidden, self.length).unwrap();
        }
        self.length += tokens.len() as u32;
        hidden
    }

    /// Runs a pass of `tokens` and returns the logits of all tokens, computed on the CPU.
    fn logits(&mut self, tokens: &[u32]) -> Vec<f32> {
        let hidden = self.pass(tokens);
        self.input_output.logits(&hidden).unwrap()
    }

    /// Runs a pass of `tokens` and returns the logits of the last token.
    fn step(&mut self, tokens: &[u32]) -> Vec<f32> {
        let hidden = self.pass(tokens);
        let last = &hidden[hidden.len() - hidden.len() / tokens.len()..];
        match self.stage.logits(last) {
            Some((logits, _)) => self.input_output.check_finite(logits).unwrap(),
            None => self.input_output.logits(last).unwrap(),
        }
    }

    fn restart(&mut self) {
        self.stage.truncate_kv_caches(0);
        self.length = 0;
    }
}

pub fn models_folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/models")
}

pub fn golden_runs(file: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(models_folder().join("golden.json")).unwrap();
    let golden: BTreeMap<String, Value> = serde_json::from_str(&text).unwrap();
    golden["files"][file].as_array().unwrap().clone()
}

pub fn parse_tokens(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|token| token.as_u64().unwrap() as u32).collect()
}

/// Maximum difference of the two largest logits in a near tie. In a near tie, the greedy token is not checked.
const NEAR_TIE: f64 = 0.05;

/// The greedy token of a model at one position of the golden tokens.
pub struct Step {
    /// Whether the greedy token is the golden token.
    pub is_golden: bool,
    margin: f64,
}

impl Step {
    /// Whether the margin of the golden token is above [`NEAR_TIE`]. If so, the GPU must generate this token.
    pub fn is_clear(&self) -> bool {
        self.margin > NEAR_TIE
    }
}

/// Compares the greedy tokens of the trained model with llama.cpp's golden tokens at each position (teacher forcing).
pub fn teacher_forced(gpu: &Arc<Gpu>, file: &str, on_gpu: &[Range<u32>], upload: UploadOptions) -> Vec<Step> {
    let weights = Arc::new(Weights::open(models_folder().join(file)).unwrap());
    let cache = KvCacheOptions { context: 256, format: KvFormat::F32, ..CACHE };
    let mut model = Model::new(gpu, &weights, &[0..4, 4..8], on_gpu, cache, upload);
    let mut steps = Vec::new();
    for run in golden_runs(file) {
        model.restart();
        let mut logits = model.step(&parse_tokens(&run["prompt_ids"]));
        let margins = run["margins"].as_array().unwrap();
        for (expected, margin) in parse_tokens(&run["greedy_ids"]).into_iter().zip(margins) {
            let is_golden = greedy_token(&logits) == expected;
            steps.push(Step { is_golden, margin: margin.as_f64().unwrap() });
            logits = model.step(&[expected]);
        }
    }
    assert!(model.warnings.lock().unwrap().is_empty());
    steps
}

#[test]
fn trained_model_generates_the_golden_tokens() {
    let Some((_lock, gpu)) = open_and_lock(CapabilityMask::default()) else { return };
    let all = std::slice::from_ref(&(0..8));
    for (file, on_gpu) in [
        ("psalm-7m-q4_k.gguf", &[][..]),
        ("psalm-7m-q4_k.gguf", &[0..2, 4..7]),
        ("psalm-7m-q4_k.gguf", all),
        ("psalm-7m-q8_0.gguf", all),
        ("psalm-7m-f16.gguf", all),
    ] {
        let steps = teacher_forced(&gpu, file, on_gpu, Tiling::DEFAULT.into());
        for (number, step) in steps.iter().enumerate().filter(|(_, step)| step.is_clear()) {
            assert!(step.is_golden, "{file} {on_gpu:?}, token {number}, margin {}", step.margin);
        }
        let (checked, all) = (steps.iter().filter(|step| step.is_clear()).count(), steps.len());
        println!("{file}, layers {on_gpu:?} on the GPU: {checked} of {all} steps checked");
        assert!(checked > all * 9 / 10, "{checked} of {all} steps are too few");
    }
}

pub fn gpu_layers(
    gpu: &Arc<Gpu>,
    weights: &Arc<Weights>,
    layers: Range<u32>,
    output: bool,
    cache: KvCacheOptions,
    upload: impl Into<UploadOptions>,
) -> Result<GpuLayers, GpuError> {
    let windows = std::slice::from_ref(&layers);
    let part = BackendOptions { output_on_gpu: output, ..backend_options(weights, windows, windows, cache) };
    GpuLayers::new(gpu.clone(), &part, upload.into())
}

/// Returns a small model of an architecture with random weights in the format `quant`.
pub fn synthetic(architecture: Architecture, quant: &str) -> Arc<Weights> {
    let mut options = SynthOptions::from_preset("tiny").unwrap();
    options.quant = quant.parse().unwrap();
    options.gain = 0.5;
    options.add_rope_factors = architecture == Architecture::Llama;
    options.shape = ModelShape {
        architecture,
        layers: Layers(4),
        embedding_length: 256,
        feed_forward_length: 512,
        heads: 6,
        kv_heads: 3,
        key_length: 64,
        value_length: 128,
        values_are_keys: false,
        hybrid: None,
        shared_kv: None,
        experts: None,
        per_layer_input_length: 0,
        vocab_size: 512,
        context_length: 40,
        has_tied_embeddings: architecture.spec().always_ties_embeddings,
    };
    let file = tempfile::NamedTempFile::new().unwrap();
    synthesise(&options, file.path(), &mut |_, _| ()).unwrap();
    Arc::new(Weights::open(file.path()).unwrap())
}

pub fn relative_rms(own: &[f32], expected: &[f32]) -> f64 {
    let rms = |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>().sqrt();
    let off = rms(&mut own.iter().zip(expected).map(|(own, expected)| f64::from(own - expected)));
    off / rms(&mut expected.iter().map(|&value| f64::from(value)))
}

/// Returns the hidden states of all tokens before the first and after the last layer, as the oracle computes them.
pub fn oracle_rows(weights: &Arc<Weights>, tokens: &[u32], cache: KvCacheOptions) -> (Vec<f32>, Vec<f32>) {
    let oracle: Box<dyn Backend> = Box::new(Oracle::new(weights.clone(), 0..4, cache).unwrap());
    let whole = std::slice::from_ref(&(0..4));
    let mut stage = Stage::new(weights.clone(), whole, cache, oracle).unwrap();
    let before = InputOutputLayers::new(weights.clone(), cpu()).embed(tokens).unwrap();
    let mut hidden = before.clone();
    stage.forward(0, 0..4, &mut hidden, 0).unwrap();
    (before, hidden)
}

/// Returns the logits of all tokens, computed by the oracle.
fn expected(weights: &Arc<Weights>, tokens: &[u32], cache: KvCacheOptions) -> Vec<f32> {
    InputOutputLayers::new(weights.clone(), cpu()).logits(&oracle_rows(weights, tokens, cache).1).unwrap()
}

#[test]
fn logits_of_every_architecture_equal_those_of_the_oracle() {
    let _lock = lock_gpu();
    let [Some(full), Some(plain)] = [CapabilityMask::default(), plain_mask()].map(open) else { return };
    let (tokens, upload) = (arbitrary_tokens(39, 0), Tiling::DEFAULT.into());
    // There are no GPU kernels for Q5_K and IQ3_S, which become f16.
    let quants = ["f16", "q8_0", "q4_k", "q6_k", "q4_0", "f32", "q5_k", "iq3_s"];
    for (index, architecture) in Architecture::all_with_gpu_kernels().enumerate() {
        for (gpu, quant) in [(&full, quants[index % 8]), (&plain, quants[(index + 2) % 8])] {
            let weights = synthetic(architecture, quant);
            for format in [KvFormat::F16, KvFormat::F32] {
                let cache = KvCacheOptions { format, ..CACHE };
                let expected = expected(&weights, &tokens, cache);
                let mut model = Model::new(gpu, &weights, &[0..2, 2..4], &[0..2, 2..4], cache, upload);
                // A batch, single tokens, and another batch: earlier positions are in the cache.
                let passes = [&tokens[..7], &tokens[7..8], &tokens[8..9], &tokens[9..]];
                let own: Vec<f32> = passes.iter().flat_map(|tokens| model.logits(tokens)).collect();
                let off = relative_rms(&own, &expected);
                println!("{architecture} {quant} {format:?}: relative RMS {off:.1e}");
                let bound = if matches!(quant, "f16" | "f32") { 1e-4 } else { 2e-2 };
                assert!(off < bound, "{architecture} {quant} {format:?}: {off}");
            }
        }
    }
}

/// Returns the index and the value of the largest logit, and the value of the second largest.
fn two_largest(logits: &[f32]) -> (usize, f32, f32) {
    let mut largest = (0, f32::NEG_INFINITY, f32::NEG_INFINITY);
    for (index, &logit) in logits.iter().enumerate() {
        if logit > largest.1 {
            largest = (index, logit, largest.1);
        } else {
            largest.2 = largest.2.max(logit);
        }
    }
    largest
}

/// The choices must be equal where the two largest logits of the CPU differ by more than four times the error.
#[test]
fn public_models_choose_the_same_tokens_on_the_gpu() {
    let folder = std::env::var_os("HEARTH_PUBLIC")
        .map_or_else(|| PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("../public"), PathBuf::from);
    for name in ["smollm2-135m-instruct-q4_1.gguf", "gemma-3-270m-q4_k_m.gguf"] {
        let path = folder.join(name);
        if !path.exists() {
            let test = "public_models_choose_the_same_tokens_on_the_gpu";
            eprintln!("SKIPPED {test}: there is no {}; run scripts/public-models.sh", path.display());
            continue;
        }
        let Some((_lock, gpu)) = open_and_lock(CapabilityMask::default()) else { return };
        let weights = Arc::new(Weights::open(path).unwrap());
        let tokenizer = Tokenizer::new(&weights.model().metadata).unwrap();
        let tokens =
            tokenizer.encode("The capital of France is Paris, and that of Italy is Rome.", false).unwrap();
        let all = 0..weights.shape().layers.0;
        let layers = std::slice::from_ref(&all);
        let mut input_output = InputOutputLayers::new(weights.clone(), cpu());
        let mut hidden = input_output.embed(&tokens).unwrap();
        let mut on_cpu = Stage::on_cpu(weights.clone(), layers, CACHE, cpu()).unwrap();
        on_cpu.forward(0, all.clone(), &mut hidden, 0).unwrap();
        let expected = input_output.logits(&hidden).unwrap();
        let own = Model::new(&gpu, &weights, layers, layers, CACHE, Tiling::DEFAULT.into()).logits(&tokens);
        let width = weights.shape().vocab_size as usize;
        let mut decided = 0;
        for (own, expected) in own.chunks_exact(width).zip(expected.chunks_exact(width)) {
            let squares = own.iter().zip(expected).map(|(own, expected)| f64::from(own - expected).powi(2));
            let error = (squares.sum::<f64>() / width as f64).sqrt();
            let (choice, first, second) = two_largest(expected);
            if f64::from(first - second) > 4.0 * error {
                decided += 1;
                assert_eq!(two_largest(own).0, choice, "{name}");
            }
        }
        println!(
            "{name}: {decided} of {} choices, relative RMS {:.1e}",
            tokens.len(),
            relative_rms(&own, &expected)
        );
        assert!(3 * decided >= tokens.len(), "{name}: {decided}");
    }
}

type Failure = fn(&Gpu);

#[test]
fn run_continues_when_the_gpu_fails() {
    let weights = synthetic(Architecture::Llama, "q4_k");
    let tokens = arbitrary_tokens(30, 0);
    let expected = expected(&weights, &tokens, CACHE);
    let failures: [(Failure, &str); 3] = [
        (Gpu::destroy, "the GPU was lost"),
        (|gpu| gpu.set_timeout(Duration::ZERO), "the GPU did not finish a copy from the GPU"),
        // Not even the download of the next row can be allocated.
        (|gpu| gpu.set_memory_limit(gpu.reserved_bytes()), "has too little memory for a copy from the GPU"),
    ];
    for (failure, message) in failures {
        let Some((_lock, gpu)) = open_and_lock(CapabilityMask::default()) else { return };
        let (windows, upload) = ([0..2, 2..4], Tiling::DEFAULT.into());
        let mut model = Model::new(&gpu, &weights, &windows, &[0..1, 2..4], CACHE, upload);
        assert_eq!(model.stage.backend_name(), "gpu");
        let mut own = model.logits(&tokens[..12]);
        own.extend(model.logits(&tokens[12..13]));
        failure(&gpu);
        own.extend(model.logits(&tokens[13..14]));
        own.extend(model.logits(&tokens[14..]));
        assert!(relative_rms(&own, &expected) < 1e-2, "{message}");
        assert_eq!(model.stage.backend_name(), "gpu lost");
        let warnings = model.warnings.lock().unwrap();
        assert!(warnings.len() == 1 && warnings[0].contains(message), "{message}: {warnings:?}");
    }
}

#[test]
fn upload_beyond_the_memory_limit_fails_and_frees_its_memory() {
    let _lock = lock_gpu();
    let weights = synthetic(Architecture::Llama, "q8_0");
    let upload = |bytes: u64| {
        let gpu = open(CapabilityMask { max_memory_bytes: Some(bytes), ..CapabilityMask::default() })?;
        let layers = gpu_layers(&gpu, &weights, 0..4, true, CACHE, Tiling::DEFAULT);
        assert!(gpu.memory_limit_bytes() <= Some(bytes));
        Some((layers, gpu.reserved_bytes()))
    };
    let Some((layers, taken)) = upload(1 << 30) else { return };
    let [weight_bytes, kv_cache_bytes] = layers.unwrap().weight_and_cache_bytes();
    assert!(taken > weight_bytes + kv_cache_bytes, "{taken} of {weight_bytes} and {kv_cache_bytes}");
    let (layers, left) = upload(taken / 2).unwrap();
    let error = layers.unwrap_err();
    assert!(matches!(error, GpuError::OutOfMemory { .. }), "{error}");
    assert!(error.to_string().contains("fewer layers"), "{error}");
    assert_eq!(left, 0);
}

#[test]
fn upload_reports_its_progress() {
    let Some((_lock, gpu)) = open_and_lock(CapabilityMask::default()) else { return };
    let weights = synthetic(Architecture::Llama, "q8_0");
    let reports: Arc<Mutex<Vec<(u64, u64)>>> = Arc::default();
    let sink = reports.clone();
    let progress = UploadProgressReporter::new(move |done, total| {
        sink.lock().unwrap().push((done, total));
        true
    });
    let whole = std::slice::from_ref(&(0..4));
    let part = BackendOptions { progress, ..backend_options(&weights, whole, whole, CACHE) };
    drop(gpu_backend(&gpu, part, Tiling::DEFAULT.into()));
    let reports = reports.lock().unwrap();
    // Seven matrices per layer, and the output matrix.
    assert_eq!(reports.len(), 4 * 7 + 1);
    assert!(reports.is_sorted() && reports[0].0 > 0);
    assert!(reports.iter().all(|&(_, total)| total == reports[28].0), "{reports:?}");
}

#[test]
fn cache_larger_than_a_binding_is_rejected() {
    let mask = CapabilityMask { max_binding_bytes: Some(1 << 20), ..CapabilityMask::default() };
    let Some((_lock, gpu)) = open_and_lock(mask) else { return };
    let weights = synthetic(Architecture::Llama, "q8_0");
    let made = |context| {
        let cache = KvCacheOptions { context, format: KvFormat::F32, ..CACHE };
        gpu_layers(&gpu, &weights, 0..1, false, cache, Tiling::DEFAULT)
    };
    // Three heads of dimension 64 (keys) or 128 (values).
    assert!(made(512).is_ok());
    let error = made(1024).unwrap_err();
    assert!(matches!(error, GpuError::OutOfMemory { .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains("KV cache") && text.contains("`context`"), "{text}");
    // Kernels index a cache with 32 bits.
    let error = made(1 << 30).unwrap_err().to_string();
    assert!(error.contains("32-bit indices"), "{error}");
}

#[test]
fn shared_memory_is_counted_once() {
    let _lock = lock_gpu();
    let weights = synthetic(Architecture::Llama, "q8_0");
    let cache = KvCacheOptions { context: 4000, format: KvFormat::F32, ..CACHE };
    let taken = |owned: Range<u32>| {
        let gpu = open(CapabilityMask::default())?;
        let part = backend_options(&weights, &[owned], std::slice::from_ref(&(0..1)), cache);
        let (backend, _) = gpu_backend(&gpu, part, Tiling::DEFAULT.into());
        Some((gpu.reserved_bytes(), backend.kv_cache_bytes(), gpu.info().kind))
    };
    let Some((alone, own_caches, kind)) = taken(0..1) else { return };
    let (beside, all_caches, _) = taken(0..4).unwrap();
    let others = if matches!(kind, "integrated" | "software") { all_caches - own_caches } else { 0 };
    assert!(all_caches > own_caches);
    assert_eq!(beside - alone, others);
}
