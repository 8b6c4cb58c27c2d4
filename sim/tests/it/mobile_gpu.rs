//! The roofline model of a phone's GPU against the rows of the ML Drift paper.
//!
//! ML Drift paper, Table 2: a prompt of 1024 tokens, 256 generated tokens. F and BW come from the two rows of Gemma2
//! 2B; the other rows are predictions. `docs/studies/ml-drift` shows them all.

use hearth_profiles::Layers;
use hearth_profiles::model::{Architecture, ModelShape};
use hearth_sim::mobile_gpu::{MeasuredSpeeds, MobileGpu, WeightFormat};

const GPUS: [&str; 5] = ["Adreno 830", "Adreno 750", "Adreno 740", "Immortalis-G720", "Mali-G715"];

/// A row of the table: prefill and decode speed of each GPU in tokens per second. 0 where the paper has no value
/// because the memory was too small.
/// source: ML Drift paper, Table 2
type Row = (&'static str, WeightFormat, [(f64, f64); 5]);
const TABLE: [Row; 8] = [
    (
        "Gemma 2B",
        WeightFormat::Q8,
        [(1440., 22.8), (1440., 23.1), (1120., 20.4), (1280., 18.2), (796., 11.9)],
    ),
    (
        "Gemma 2B",
        WeightFormat::Mixed,
        [(1490., 42.5), (1480., 42.7), (1150., 38.1), (1380., 32.5), (813., 12.2)],
    ),
    (
        "Gemma2 2B",
        WeightFormat::Q8,
        [(1220., 20.8), (1290., 21.3), (1010., 18.3), (1170., 15.7), (700., 11.2)],
    ),
    (
        "Gemma2 2B",
        WeightFormat::Mixed,
        [(1250., 37.0), (1370., 37.1), (1040., 32.4), (1250., 27.3), (729., 18.4)],
    ),
    ("Llama3.2 3B", WeightFormat::Q8, [(960., 17.1), (917., 17.5), (720., 15.4), (791., 12.5), (507., 8.71)]),
    (
        "Llama3.2 3B",
        WeightFormat::Mixed,
        [(983., 30.4), (959., 30.3), (741., 26.8), (850., 21.2), (516., 15.0)],
    ),
    ("Llama3.1 8B", WeightFormat::Q8, [(389., 7.70), (0., 0.), (0., 0.), (270., 4.72), (0., 0.)]),
    (
        "Llama3.1 8B",
        WeightFormat::Mixed,
        [(413., 13.4), (412., 12.7), (325., 10.7), (378., 8.88), (240., 6.46)],
    ),
];

/// Prompt tokens.
const PROMPT: u32 = 1024;
/// Mean position of the 256 generated tokens.
const POSITION: u32 = PROMPT + 128;

/// The model whose rows F and BW are fitted on.
const FITTED: &str = "Gemma2 2B";

/// Returns the shape of a model.
/// source: the models' config.json
fn shape(name: &str) -> ModelShape {
    // Layers, embedding width, feed-forward width, query heads, KV heads, head dimension, vocabulary.
    let (architecture, [layers, embedding, feed_forward, heads, kv_heads, length, vocabulary]) = match name {
        "Gemma 2B" => (Architecture::Gemma, [18, 2048, 16384, 8, 1, 256, 256_000]),
        "Gemma2 2B" => (Architecture::Gemma2, [26, 2304, 9216, 8, 4, 256, 256_000]),
        "Llama3.2 3B" => (Architecture::Llama, [28, 3072, 8192, 24, 8, 128, 128_256]),
        _ => (Architecture::Llama, [32, 4096, 14336, 32, 8, 128, 128_256]),
    };
    ModelShape {
        architecture,
        layers: Layers(layers),
        embedding,
        feed_forward,
        heads,
        kv_heads,
        key_length: length,
        value_length: length,
        vocab_size: vocabulary,
        tied_embeddings: name != "Llama3.1 8B",
        context_length: 8192,
    }
}

/// Returns the fitted GPUs.
fn gpus() -> Vec<MobileGpu> {
    let of = |gpu: usize| {
        let measured: Vec<MeasuredSpeeds> = TABLE
            .iter()
            .filter(|(name, ..)| *name == FITTED)
            .map(|&(_, weights, speeds)| MeasuredSpeeds {
                weights,
                prefill: speeds[gpu].0,
                decode: speeds[gpu].1,
            })
            .collect();
        MobileGpu::fit(&shape(FITTED), &measured, PROMPT, POSITION).unwrap()
    };
    (0..GPUS.len()).map(of).collect()
}

/// Returns whether the prefill and the decode speed of a row are probably not limited by the GPU, or misprinted.
/// Gemma 2B 8/4/4 decodes on the Mali as fast as q8. 8B q8 is much slower than 8/4/4 on the Immortalis even in
/// prefill, unlike any other pair of rows; for GPUs with less memory the paper has no value.
fn is_suspicious(gpu: &str, name: &str, weights: WeightFormat) -> [bool; 2] {
    let short_of_memory = gpu == "Immortalis-G720" && name == "Llama3.1 8B" && weights == WeightFormat::Q8;
    let misprint = gpu == "Mali-G715" && name == "Gemma 2B" && weights == WeightFormat::Mixed;
    [short_of_memory, short_of_memory || misprint]
}

#[test]
fn two_rows_determine_each_gpu() {
    let wanted = [(5.27, 58.3), (5.67, 59.1), (4.37, 51.2), (5.16, 43.5), (3.05, 30.2)];
    for ((gpu, name), (compute, bandwidth)) in gpus().iter().zip(GPUS).zip(wanted) {
        assert!(
            (gpu.arithmetic_rate.0 / 1e12 - compute).abs() < 0.006,
            "{name}: {:e}",
            gpu.arithmetic_rate.0
        );
        assert!((gpu.bandwidth.0 / 1e9 - bandwidth).abs() < 0.06, "{name}: {:e}", gpu.bandwidth.0);
    }
    assert_eq!(MobileGpu::fit(&shape(FITTED), &[], PROMPT, POSITION), None);
}

#[test]
fn predicted_rows_are_within_limits() {
    let mut errors = [Vec::new(), Vec::new()];
    for (at, (gpu, name)) in gpus().iter().zip(GPUS).enumerate() {
        for &(model, weights, speeds) in TABLE.iter().filter(|(model, ..)| *model != FITTED) {
            let (shape, published) = (shape(model), [speeds[at].0, speeds[at].1]);
            let predicted =
                [gpu.prefill_speed(&shape, weights, PROMPT), gpu.decode_speed(&shape, weights, POSITION)];
            for ((kind, suspicious), (own, printed)) in is_suspicious(name, model, weights)
                .into_iter()
                .enumerate()
                .zip(predicted.into_iter().zip(published))
            {
                if printed == 0.0 {
                    continue;
                }
                let error = own / printed - 1.0;
                let left_out = if suspicious { " (left out)" } else { "" };
                let what = ["prefill", "decode"][kind];
                println!(
                    "{name} | {model} {weights:?} | {what} {printed} | {own:.3} | {:+.1} %{left_out}",
                    error * 100.0
                );
                if suspicious {
                    // A suspicious row must be far off: otherwise it would have to be counted.
                    assert!(error > 0.15, "{name} {model} {what}: {error}");
                } else {
                    errors[kind].push(error.abs());
                }
            }
        }
    }
    let mean = |errors: &[f64]| errors.iter().sum::<f64>() / errors.len() as f64;
    let [prefill, decode] = [mean(&errors[0]), mean(&errors[1])];
    println!(
        "mean error: prefill {:.2} % of {}, decode {:.2} % of {}",
        prefill * 1e2,
        errors[0].len(),
        decode * 1e2,
        errors[1].len()
    );
    assert_eq!([errors[0].len(), errors[1].len()], [26, 25]);
    assert!(prefill <= 0.08, "prefill {prefill}");
    assert!(decode <= 0.05, "decode {decode}");
}

#[test]
fn short_prompts_are_bandwidth_bound_long_ones_compute_bound() {
    let (gpu, shape) = (gpus()[0], shape("Llama3.2 3B"));
    // A prompt of one token takes W / BW, as decoding without a cache does.
    let one = gpu.prefill_speed(&shape, WeightFormat::Q8, 1);
    assert!((one / gpu.decode_speed(&shape, WeightFormat::Q8, 0) - 1.0).abs() < 1e-9);
    assert!(gpu.prefill_speed(&shape, WeightFormat::Mixed, 1) > one * 1.5);
    let long = |weights| gpu.prefill_speed(&shape, weights, 1024);
    assert_eq!(long(WeightFormat::Q8), long(WeightFormat::Mixed));
}
