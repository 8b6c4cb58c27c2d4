//! The roofline model of a phone's GPU against the rows of the ML Drift paper.
//!
//! ML Drift paper, Table 2: a prompt of 1024 tokens, 256 generated tokens. The rates of each GPU are fitted to the
//! two rows of Gemma2 2B; the other rows are predictions. `docs/studies/ml-drift` shows them all.

use hearth_profiles::Layers;
use hearth_profiles::model::{Architecture, ModelShape};
use hearth_sim::mobile_gpu::WeightFormat::{Mixed, Q8};
use hearth_sim::mobile_gpu::{MeasuredSpeeds, MobileGpu, WeightFormat};

const GPUS: [&str; 5] = ["Adreno 830", "Adreno 750", "Adreno 740", "Immortalis-G720", "Mali-G715"];

/// A row of Table 2: the model, its format, and the prefill and decode speeds of the GPUs in tokens per second. A
/// speed of 0 means that the paper has no value because the memory was too small.
/// source: ML Drift paper, Table 2
type Row = (&'static str, WeightFormat, [f64; 5], [f64; 5]);
const TABLE: [Row; 8] = [
    ("Gemma 2B", Q8, [1440., 1440., 1120., 1280., 796.], [22.8, 23.1, 20.4, 18.2, 11.9]),
    ("Gemma 2B", Mixed, [1490., 1480., 1150., 1380., 813.], [42.5, 42.7, 38.1, 32.5, 12.2]),
    ("Gemma2 2B", Q8, [1220., 1290., 1010., 1170., 700.], [20.8, 21.3, 18.3, 15.7, 11.2]),
    ("Gemma2 2B", Mixed, [1250., 1370., 1040., 1250., 729.], [37.0, 37.1, 32.4, 27.3, 18.4]),
    ("Llama3.2 3B", Q8, [960., 917., 720., 791., 507.], [17.1, 17.5, 15.4, 12.5, 8.71]),
    ("Llama3.2 3B", Mixed, [983., 959., 741., 850., 516.], [30.4, 30.3, 26.8, 21.2, 15.0]),
    ("Llama3.1 8B", Q8, [389., 0., 0., 270., 0.], [7.70, 0., 0., 4.72, 0.]),
    ("Llama3.1 8B", Mixed, [413., 412., 325., 378., 240.], [13.4, 12.7, 10.7, 8.88, 6.46]),
];

const PROMPT: u32 = 1024;
/// Mean position of the 256 generated tokens.
const POSITION: u32 = PROMPT + 128;

/// The model to whose rows the arithmetic rate and the bandwidth of each GPU are fitted.
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

fn gpus() -> Vec<MobileGpu> {
    let of = |gpu: usize| {
        let rows = TABLE.iter().filter(|(name, ..)| *name == FITTED);
        let speeds = |&(_, weights, prefill, decode): &Row| {
            let (prefill, decode) = (prefill[gpu], decode[gpu]);
            MeasuredSpeeds { weights, prefill, decode }
        };
        let measured: Vec<_> = rows.map(speeds).collect();
        MobileGpu::fit(&shape(FITTED), &measured, PROMPT, POSITION).unwrap()
    };
    (0..GPUS.len()).map(of).collect()
}

/// Returns whether the prefill and the decode speed of a row are probably not limited by the GPU, or misprinted.
/// Gemma 2B 8/4/4 decodes on the Mali as fast as q8. 8B q8 is much slower than 8/4/4 on the Immortalis even in
/// prefill, unlike any other pair of rows; for GPUs with less memory the paper has no value.
fn is_suspicious(gpu: &str, name: &str, weights: WeightFormat) -> [bool; 2] {
    let short_of_memory = gpu == "Immortalis-G720" && name == "Llama3.1 8B" && weights == Q8;
    let misprint = gpu == "Mali-G715" && name == "Gemma 2B" && weights == Mixed;
    [short_of_memory, short_of_memory || misprint]
}

#[test]
fn two_rows_determine_each_gpu() {
    let wanted = [(5.27, 58.3), (5.67, 59.1), (4.37, 51.2), (5.16, 43.5), (3.05, 30.2)];
    for ((gpu, name), (compute, bandwidth)) in gpus().iter().zip(GPUS).zip(wanted) {
        let MobileGpu { arithmetic_rate, bandwidth: found } = gpu;
        assert!((arithmetic_rate.0 / 1e12 - compute).abs() < 0.006, "{name}: {:e}", arithmetic_rate.0);
        assert!((found.0 / 1e9 - bandwidth).abs() < 0.06, "{name}: {:e}", found.0);
    }
    assert_eq!(MobileGpu::fit(&shape(FITTED), &[], PROMPT, POSITION), None);
}

#[test]
fn predicted_rows_are_within_limits() {
    let mut errors = [Vec::new(), Vec::new()];
    for (at, (gpu, name)) in gpus().iter().zip(GPUS).enumerate() {
        for &(model, weights, prefill, decode) in TABLE.iter().filter(|(model, ..)| *model != FITTED) {
            let shape = shape(model);
            let [no_prefill, no_decode] = is_suspicious(name, model, weights);
            let speeds = [
                ("prefill", gpu.prefill_speed(&shape, weights, PROMPT), prefill[at], no_prefill),
                ("decode", gpu.decode_speed(&shape, weights, POSITION), decode[at], no_decode),
            ];
            for (kind, (what, own, printed, suspicious)) in speeds.into_iter().enumerate() {
                if printed == 0.0 {
                    continue;
                }
                let error = own / printed - 1.0;
                let left_out = if suspicious { " (left out)" } else { "" };
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
    let one = gpu.prefill_speed(&shape, Q8, 1);
    assert!((one / gpu.decode_speed(&shape, Q8, 0) - 1.0).abs() < 1e-9);
    assert!(gpu.prefill_speed(&shape, Mixed, 1) > one * 1.5);
    let long = |weights| gpu.prefill_speed(&shape, weights, 1024);
    assert_eq!(long(Q8), long(Mixed));
}
