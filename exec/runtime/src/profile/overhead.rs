//! Measures the fixed costs of a layer (beyond its matmuls) and of a token (beyond its layers).
//!
//! [`measure_overheads`] synthesises and runs a model whose weights fit in the CPU's cache. The time of a layer minus
//! the time of its matmuls, at the rate of cached weights, and of its norms and activation functions is the cost of
//! waking threads, rounding, rotary embedding and small buffers. The time of the input and output layers minus the time of the output matmul is the cost of the
//! embedding lookup, the norm and sampling.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use hearth_profiles::measure::{ComputeRates, MeasurementOptions, sampling};
use hearth_profiles::model::{Architecture, ModelShape, Quant};
use hearth_profiles::{Format, Layers, Seconds, Sourced};

use super::ProfileError;
use crate::synth::{SynthOptions, synthesise};
use crate::weights::packed::packed_path;
use crate::{Cpu, InputOutputLayers, KvCacheOptions, KvFormat, Sampler, SamplerOptions, Stage, Weights};

/// Number of tokens after which the measured sequence restarts, so that attention costs almost nothing.
const CONTEXT: u32 = 32;

/// Minimum reported cost of a layer or token: the time to read a clock and to execute a branch.
const MIN_COST: Seconds = Seconds(1e-7);

#[derive(Debug, Clone, PartialEq)]
pub(super) struct Overheads {
    pub(super) per_layer: Sourced<Seconds>,
    pub(super) per_token: Sourced<Seconds>,
}

/// Returns the options of the measured model, in which a layer has 0.8 million weights in 440 KiB.
fn small_model() -> SynthOptions {
    let shape = ModelShape {
        architecture: Architecture::Llama,
        layers: Layers(4),
        embedding_length: 256,
        feed_forward_length: 768,
        heads: 4,
        kv_heads: 2,
        key_length: 64,
        value_length: 64,
        values_are_keys: false,
        hybrid: None,
        shared_kv: None,
        experts: None,
        per_layer_input_length: 0,
        vocab_size: 4096,
        has_tied_embeddings: true,
        context_length: CONTEXT,
    };
    SynthOptions::new("overhead", shape, Quant::Pure(Format::Q4K))
}

struct TempFolder(PathBuf);

impl TempFolder {
    fn new() -> Result<TempFolder, ProfileError> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("hearth-profile-{}-{number}", std::process::id()));
        fs::create_dir_all(&path).map_err(|source| ProfileError::Folder { path: path.clone(), source })?;
        Ok(TempFolder(path))
    }
}

impl Drop for TempFolder {
    fn drop(&mut self) {
        // If this fails, a few MiB remain in the system's temporary folder.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Measures the fixed costs of a layer and a token with the threads of `cpu`. `rates` are the measured rates of the
/// same kernels, with packed weights if `packed` is set.
pub(super) fn measure_overheads(
    cpu: &Cpu,
    rates: &ComputeRates,
    packed: bool,
    measurement: &MeasurementOptions,
) -> Result<Overheads, ProfileError> {
    let folder = TempFolder::new()?;
    let path = folder.0.join("overhead.gguf");
    let options = small_model();
    synthesise(&options, &path, &mut |_, _| ())?;
    let mut weights = Weights::open(&path)?;
    if packed {
        let packed_path = packed_path(&path);
        weights.pack(&packed_path, &mut |_, _| ())?;
        weights.use_packed_file(&packed_path)?;
    }
    let weights = Arc::new(weights);
    // The mapped file is readable without its name, and nothing remains if the process is killed from here on.
    drop(folder);
    let shape = &options.shape;
    // Without a rate for the format nothing is subtracted, and the cost is an upper bound.
    let rate = hearth_profiles::device::nearest_format_rate(&rates.matvec, Format::Q4K);
    let arithmetic = |weights: u64| rate.map_or(0.0, |rate| 2.0 * weights as f64 / rate.0);
    let (embedding, feed_forward) = (u64::from(shape.embedding_length), u64::from(shape.feed_forward_length));
    let key_value = shape.attention().key_width() + shape.attention().value_width();
    let layer_weights = embedding * (2 * embedding + key_value + 3 * feed_forward);
    let layers = shape.layers.0;

    let cache = KvCacheOptions { context: CONTEXT, format: KvFormat::F16, sequences: 1 };
    let owned: Vec<_> = std::iter::once(0..layers).collect();
    let mut stage = Stage::on_cpu(weights.clone(), &owned, cache, cpu.clone())?;
    let mut input_output = InputOutputLayers::new(weights.clone(), cpu.clone());
    let mut hidden = input_output.embed(&[1])?;
    let start = hidden.clone();
    let mut position = 0;
    let mut failure = None;
    let layer = sampling::measure_duration(measurement, || {
        hidden.copy_from_slice(&start);
        failure = stage.forward(0, 0..layers, &mut hidden, position).err();
        position = (position + 1) % CONTEXT;
    });
    failure.map_or(Ok(()), Err)?;

    let mut sampler = Sampler::new(SamplerOptions::default())?;
    let mut failure = None;
    let token = sampling::measure_duration(measurement, || {
        let logits = input_output.embed(&[2]).and_then(|row| input_output.logits(&row));
        failure = logits.map(|logits| sampler.sample(&logits)).err();
    });
    failure.map_or(Ok(()), Err)?;

    let activations = shape.layer_activation_bytes(0) / rates.activation_bandwidth.value;
    let layer_cost = |all: f64| Seconds(all / f64::from(layers) - arithmetic(layer_weights) - activations.0);
    let token_cost = |all: f64| Seconds(all - arithmetic(embedding * u64::from(shape.vocab_size)));
    let at_least_min = |cost: Seconds| Seconds(cost.0.max(MIN_COST.0));
    let what = |part: &str| {
        format!("{part} of a model of width 256, minus its products and activations at the measured rates")
    };
    Ok(Overheads {
        per_layer: layer.sourced_median(|all| at_least_min(layer_cost(all)), &what("a layer")),
        per_token: token
            .sourced_median(|all| at_least_min(token_cost(all)), &what("embedding, output layer, sampling")),
    })
}
