//! Tests that hidden states have the same bits for any number of threads, batch size, layer window and backend.
//!
//! The final hidden states must be equal to those of the oracle, bit for bit, for each trained model and for a model
//! with random weights of each architecture.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use hearth_core::memory::kv_cache_bytes;
use hearth_kernels::InstructionSet;
use hearth_profiles::model::{Architecture, ModelShape};
use hearth_runtime::synth::SynthOptions;
use hearth_runtime::{
    Cpu, ExecError, InputOutputLayers, KvCacheOptions, KvFormat, Oracle, Stage, ThreadPool,
    ThreadPoolOptions, Tokenizer, Weights,
};
use hearth_schema::pass::{Batch, Pass};
use proptest::prelude::*;

use crate::models;
use crate::public::{MODELS, public};

const FILES: [&str; 3] = ["psalm-7m-f16.gguf", "psalm-7m-q4_k.gguf", "psalm-7m-q8_0.gguf"];

fn weights(file: usize) -> Arc<Weights> {
    static OPEN: [OnceLock<Arc<Weights>>; 3] = [const { OnceLock::new() }; 3];
    let open = || Arc::new(Weights::open(models::folder().join(FILES[file])).unwrap());
    Arc::clone(OPEN[file].get_or_init(open))
}

fn cpu(threads: usize) -> Cpu {
    static POOLS: [OnceLock<Arc<ThreadPool>>; 4] = [const { OnceLock::new() }; 4];
    let start = || {
        Arc::new(ThreadPool::new(ThreadPoolOptions { threads, pin_workers: false, spin_ns: 10_000 }).unwrap())
    };
    Cpu::new(Arc::clone(POOLS[threads].get_or_init(start)))
}

fn cache(format: KvFormat) -> KvCacheOptions {
    KvCacheOptions { context: 40, format, sequences: 1 }
}

/// Runs `tokens` through all `stages`, in batches of the sizes `batches` (the last size is repeated). Returns the bits
/// of all final hidden states.
fn run(
    input_output: &InputOutputLayers,
    stages: &mut [Stage],
    tokens: &[u32],
    batches: &[usize],
) -> Vec<u32> {
    let mut bits = Vec::new();
    let mut sizes = batches.iter().copied().chain(std::iter::repeat(*batches.last().unwrap()));
    let mut at = 0;
    while at < tokens.len() {
        let end = (at + sizes.next().unwrap()).min(tokens.len());
        let mut hidden = input_output.embed(&tokens[at..end]).unwrap();
        for (stage, window) in windows_in_order(stages) {
            stages[stage].forward(0, window, &mut hidden, at as u32).unwrap();
        }
        bits.extend(input_output.hidden_states(&hidden).iter().map(|value| value.to_bits()));
        at = end;
    }
    bits
}

/// Returns the windows of all stages in the order of their layers, as they run in a ring, each with its stage.
fn windows_in_order(stages: &[Stage]) -> Vec<(usize, Range<u32>)> {
    let of = |(index, stage): (usize, &Stage)| {
        stage.layer_ranges().iter().map(move |window| (index, window.clone())).collect::<Vec<_>>()
    };
    let mut windows: Vec<_> = stages.iter().enumerate().flat_map(of).collect();
    windows.sort_by_key(|(_, window)| window.start);
    windows
}

/// Checks that three sequences in batches have the bits that each has alone, with these windows of devices.
fn check_batches(name: &str, weights: &Arc<Weights>, windows: &[&[Range<u32>]]) {
    let text = |sequence: u32| (0..39).map(move |at| (at * 37 + 11 * sequence + 5) % 512);
    let texts: Vec<Vec<u32>> = (0..3).map(|sequence| text(sequence).collect()).collect();
    let options = KvCacheOptions { sequences: 3, ..cache(KvFormat::F16) };
    let input_output = InputOutputLayers::new(Arc::clone(weights), cpu(1));
    let owned = windows.iter().zip([2, 1, 3]);
    let mut stages: Vec<Stage> =
        owned.map(|(owned, threads)| stage(weights, owned, options, cpu(threads))).collect();
    let mut bits: Vec<Vec<u32>> = vec![Vec::new(); 3];
    let (mut done, mut index) = ([0, 0, 0], 0);
    // Each batch is a list of sequences and numbers of tokens. A large batch is computed in several parts, which may
    // divide a sequence.
    let batches: [&[(usize, usize)]; 6] = [
        &[(1, 2)],
        &[(2, 1), (1, 1)],
        &[(0, 36), (1, 35), (2, 33)],
        &[(1, 1), (0, 1), (2, 1)],
        &[(0, 2)],
        &[(2, 4)],
    ];
    for batch in batches {
        let mut passes = Vec::new();
        let mut tokens = Vec::new();
        for &(sequence, count) in batch {
            let first = done[sequence];
            tokens.extend_from_slice(&texts[sequence][first..first + count]);
            let pass = Pass::new(index, first as u32, count as u32, true);
            passes.push(Pass { sequence_index: sequence as u32, ..pass });
            (done[sequence], index) = (first + count, index + 1);
        }
        let joined = Batch::new(passes).unwrap();
        let mut hidden = input_output.embed(&tokens).unwrap();
        for (stage, window) in windows_in_order(&stages) {
            stages[stage].forward_batch(window, &mut hidden, &joined).unwrap();
        }
        let mut rows = input_output.hidden_states(&hidden).chunks_exact(hidden_width(weights));
        for &(sequence, count) in batch {
            let own = rows.by_ref().take(count).flatten();
            bits[sequence].extend(own.map(|value| value.to_bits()));
        }
    }
    for (sequence, text) in texts.iter().enumerate() {
        let alone = oracle(weights, cache(KvFormat::F16), text);
        assert!(alone == bits[sequence], "{name}: sequence {sequence} with {windows:?}");
    }
}

fn hidden_width(weights: &Weights) -> usize {
    weights.shape().embedding_length as usize
}

#[test]
fn sequences_of_a_batch_have_the_bits_that_they_have_alone() {
    for (architecture, quant) in Architecture::all_runnable().zip(["f16", "q8_0", "q4_k"].iter().cycle()) {
        let (name, weights) = (format!("{architecture} {quant}"), synthetic(architecture, quant));
        check_batches(&name, &weights, &[&[0..1, 2..3], &[1..2, 3..4]]);
    }
    check_batches("one device", &synthetic(Architecture::Llama, "q8_0"), &[std::slice::from_ref(&(0..4))]);
    let shared = with_kv_sharing();
    check_batches("shared keys", &shared, &[&[0..4, 6..9], &[4..6, 10..12], std::slice::from_ref(&(9..10))]);
}

fn stage(weights: &Arc<Weights>, owned: &[Range<u32>], options: KvCacheOptions, cpu: Cpu) -> Stage {
    Stage::on_cpu(Arc::clone(weights), owned, options, cpu).unwrap()
}

const KV_FORMATS: [KvFormat; 4] = [KvFormat::F16, KvFormat::F32, KvFormat::Q8_0, KvFormat::Q4_0];

const WHOLE: &[Range<u32>] = std::slice::from_ref(&(0..8));

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    #[test]
    fn bits_do_not_depend_on_threads_batches_and_windows(
        file in 0usize..3,
        format in prop::sample::select(KV_FORMATS.to_vec()),
        tokens in prop::collection::vec(0u32..2048, 1..40),
        // Batches of at least twelve tokens use panels.
        batches in prop::collection::vec(1usize..30, 1..4),
        cuts in (1u32..4, 4u32..6, 6u32..8),
    ) {
        let weights = weights(file);
        let options = cache(format);
        let input_output = InputOutputLayers::new(Arc::clone(&weights), cpu(1));
        let expected = oracle(&weights, options, &tokens);
        for threads in [1, 2, 3] {
            let whole = stage(&weights, WHOLE, options, cpu(threads));
            prop_assert_eq!(&expected, &run(&input_output, &mut [whole], &tokens, &batches), "{} threads", threads);
        }
        // Two devices and two rounds: the first device has the first and third window, the other one the rest.
        let (a, b, c) = cuts;
        let first = stage(&weights, &[0..a, b..c], options, cpu(2));
        let second = stage(&weights, &[a..b, c..8], options, cpu(1));
        prop_assert_eq!(&expected, &run(&input_output, &mut [first, second], &tokens, &batches), "windows");
    }
}

/// Returns the bits of the final hidden states that the oracle computes token by token.
fn oracle(weights: &Arc<Weights>, options: KvCacheOptions, tokens: &[u32]) -> Vec<u32> {
    let layers = 0..weights.shape().layers.0;
    let oracle = Oracle::new(Arc::clone(weights), layers.clone(), options).unwrap();
    let stage = Stage::new(Arc::clone(weights), std::slice::from_ref(&layers), options, Box::new(oracle));
    run(&InputOutputLayers::new(Arc::clone(weights), cpu(1)), &mut [stage.unwrap()], tokens, &[1])
}

fn synthetic(architecture: Architecture, quant: &str) -> Arc<Weights> {
    let mut options = SynthOptions::from_preset("tiny").unwrap();
    options.quant = quant.parse().unwrap();
    options.add_rope_factors = architecture == Architecture::Llama;
    // Architectures with a sliding window have one of 10 positions, half of the context.
    let shape = models::shape(architecture);
    // Values of hybrid models can be keys, and the heads of their other layers are half as long.
    let (key_length, value_length) =
        if shape.hybrid.is_some() { (256, 256) } else { (shape.key_length, 128) };
    let shape = ModelShape { heads: 6, kv_heads: 3, key_length, value_length, ..shape };
    options.shape = shape.with_default_hybrid();
    if let Some(experts) = options.shape.experts.as_mut().filter(|_| architecture == Architecture::GraniteMoe)
    {
        // A shared block without a gate.
        experts.shared_feed_forward_length = 256;
    }
    // The rows of matrices must be whole blocks: 6 heads with values of 128 are 768.
    Arc::new(Weights::open(models::synthetic(&options).path()).unwrap())
}

#[test]
fn every_architecture_has_the_bits_of_the_oracle() {
    for (architecture, quant) in Architecture::all_runnable().zip(["f16", "q8_0", "q4_k"].iter().cycle()) {
        let (name, weights) = (format!("{architecture} {quant}"), synthetic(architecture, quant));
        let input_output = InputOutputLayers::new(Arc::clone(&weights), cpu(1));
        let whole = std::slice::from_ref(&(0..4));
        let tokens: Vec<u32> = (0..33).map(|at| (at * 37 + 11) % 512).collect();
        for format in KV_FORMATS {
            let options = cache(format);
            let expected = oracle(&weights, options, &tokens);
            let own = stage(&weights, whole, options, cpu(2));
            assert!(expected == run(&input_output, &mut [own], &tokens, &[7, 1, 9]), "{name}");
            let first = stage(&weights, &[0..1, 2..3], options, cpu(3));
            let second = stage(&weights, &[1..2, 3..4], options, cpu(1));
            assert!(expected == run(&input_output, &mut [first, second], &tokens, &[33]), "{name}: windows");
        }
    }
}

#[test]
fn public_models_have_the_same_bits_with_every_instruction_set_and_in_unequal_windows() {
    let test = "public_models_have_the_same_bits_with_every_instruction_set_and_in_unequal_windows";
    for name in MODELS {
        let Some(path) = public(test, &format!("{name}.gguf")) else { continue };
        let weights = Arc::new(Weights::open(path).unwrap());
        let tokenizer = Tokenizer::new(&weights.model().metadata).unwrap();
        let tokens =
            tokenizer.encode("The capital of France is Paris, and that of Italy is Rome.", false).unwrap();
        let input_output = InputOutputLayers::new(Arc::clone(&weights), cpu(2));
        let (layers, options) = (weights.shape().layers.0, cache(KvFormat::F16));
        let with = |instruction_set, threads| Cpu { instruction_set, ..cpu(threads) };
        let whole = 0..layers;
        let whole = std::slice::from_ref(&whole);
        let scalar = stage(&weights, whole, options, with(InstructionSet::SCALAR, 3));
        let expected = run(&input_output, &mut [scalar], &tokens, &[3, 1, 20]);
        let (first, second) = (layers / 2, layers - 2);
        for instructions in InstructionSet::detect_all() {
            let mut devices = [0..first, first..second, second..layers]
                .map(|window| stage(&weights, &[window], options, with(instructions, 2)));
            let bits = run(&input_output, &mut devices, &tokens, &[20]);
            assert!(expected == bits, "{name} with {}", instructions.name());
        }
    }
}

/// Returns a model whose layers 4 and 5 have the keys and values of layers 6 to 11.
fn with_kv_sharing() -> Arc<Weights> {
    let mut options = SynthOptions::from_preset("tiny").unwrap();
    options.quant = "q8_0".parse().unwrap();
    options.shape = models::with_kv_sharing(models::shape(Architecture::Gemma4));
    Arc::new(Weights::open(models::synthetic(&options).path()).unwrap())
}

#[test]
fn layers_use_keys_and_values_of_other_devices() {
    let weights = with_kv_sharing();
    let input_output = InputOutputLayers::new(Arc::clone(&weights), cpu(1));
    let tokens: Vec<u32> = (0..33).map(|at| (at * 37 + 11) % 512).collect();
    for format in KV_FORMATS {
        let options = cache(format);
        let expected = oracle(&weights, options, &tokens);
        let whole = stage(&weights, std::slice::from_ref(&(0..12)), options, cpu(2));
        assert!(expected == run(&input_output, &mut [whole], &tokens, &[7, 1, 9]), "{format:?}");
        let first = stage(&weights, &[0..4, 6..9], options, cpu(3));
        let second = stage(&weights, &[4..6, 10..12], options, cpu(1));
        let third = stage(&weights, std::slice::from_ref(&(9..10)), options, cpu(2));
        let shape = weights.shape();
        for (device, layers) in [(&first, vec![0, 1, 2, 3, 6, 7, 8]), (&third, vec![9])] {
            let planned = kv_cache_bytes(shape, layers, options.context, format, options.sequences);
            assert_eq!(device.kv_cache_bytes(), planned.0, "{format:?}");
        }
        let devices = &mut [first, second, third];
        assert!(expected == run(&input_output, devices, &tokens, &[33, 1]), "{format:?}: windows");
    }
}

/// Runs the first window of a stage over `tokens`, which begin at the position `first`.
fn forward(
    stage: &mut Stage,
    input_output: &InputOutputLayers,
    tokens: &[u32],
    first: u32,
) -> Result<Vec<f32>, ExecError> {
    let mut hidden = input_output.embed(tokens).unwrap();
    let window = stage.layer_ranges()[0].clone();
    stage.forward(0, window, &mut hidden, first).map(|_| hidden)
}

#[test]
fn recurrent_state_is_continued_or_cleared_but_not_rolled_back() {
    let weights = synthetic(Architecture::Qwen35, "f16");
    let input_output = InputOutputLayers::new(Arc::clone(&weights), cpu(2));
    let mut stage = stage(&weights, std::slice::from_ref(&(0..4)), cache(KvFormat::F16), cpu(2));
    let forward = |stage: &mut Stage, tokens: &[u32], first| forward(stage, &input_output, tokens, first);
    forward(&mut stage, &[1, 297, 68], 0).unwrap();
    let straight = forward(&mut stage, &[389, 322], 3).unwrap();
    assert!(matches!(
        forward(&mut stage, &[389, 322], 3),
        Err(ExecError::RolledBackState { first: 3, filled: 5 })
    ));
    stage.roll_back(0, 4);
    assert!(matches!(forward(&mut stage, &[5], 4), Err(ExecError::Positions { filled: 0, .. })));
    forward(&mut stage, &[1, 297, 68], 0).unwrap();
    assert_eq!(straight, forward(&mut stage, &[389, 322], 3).unwrap());
}

#[test]
fn rolling_back_removes_a_rejected_draft() {
    let weights = weights(1);
    let input_output = InputOutputLayers::new(Arc::clone(&weights), cpu(2));
    let mut stage = stage(&weights, WHOLE, cache(KvFormat::F16), cpu(2));
    let forward = |stage: &mut Stage, tokens: &[u32], first| forward(stage, &input_output, tokens, first);
    forward(&mut stage, &[0, 297, 668], 0).unwrap();
    let straight = forward(&mut stage, &[389, 322], 3).unwrap();
    forward(&mut stage, &[5, 6, 7], 3).unwrap();
    assert_eq!(straight, forward(&mut stage, &[389, 322], 3).unwrap());
    stage.truncate_kv_caches(3);
    assert!(matches!(forward(&mut stage, &[322], 4), Err(ExecError::Positions { filled: 3, .. })));
    assert!(matches!(forward(&mut stage, &[0; 38], 3), Err(ExecError::Positions { context: 40, .. })));
    let mut hidden = input_output.embed(&[0]).unwrap();
    assert!(matches!(stage.forward(0, 7..9, &mut hidden, 0), Err(ExecError::Layers { .. })));
    assert!(matches!(stage.forward(0, 0..8, &mut hidden[1..], 0), Err(ExecError::Hidden { .. })));
    assert!(matches!(input_output.embed(&[2048]), Err(ExecError::Token { token: 2048, vocab_size: 2048 })));
}
