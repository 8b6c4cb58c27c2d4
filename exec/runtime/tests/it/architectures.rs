//! Tests that compare the logits of every architecture with llama.cpp.
//!
//! `data/architectures` has llama.cpp's logits of models with random weights (written by
//! `scripts/peers/llama_cpp_agreement.py --fixtures`). The tests synthesise the same models from the same seeds. The
//! compared tokens attend to cached positions and to positions of the same batch, some of them outside the sliding
//! window if the architecture has one.

use std::io::Write;
use std::path::{Path, PathBuf};

use hearth_profiles::Layers;
use hearth_profiles::gguf::{GgufModel, HeaderWriter, TensorInfo, Value};
use hearth_profiles::model::{Architecture, Experts, ModelProfile, ModelShape};
use hearth_runtime::synth::{SynthOptions, TokenizerKind, synthesise};
use hearth_runtime::{KvFormat, Weights};
use serde::Deserialize;
use sha2::{Digest, Sha256};

use crate::models;

#[derive(Deserialize)]
struct Fixture {
    tokens: Vec<u32>,
    rows: Vec<usize>,
    vocabulary: u32,
    context: u32,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    architecture: Architecture,
    /// `shared` if layers use the keys and values of earlier layers, and tokens have per-layer inputs.
    #[serde(default)]
    variant: String,
    quant: String,
    sha256: String,
    logits: String,
    /// The relative RMS difference between the logits of this runtime and of llama.cpp when the fixture was created.
    relative_rms: f64,
}

/// Returns whether kernels round the activations that they multiply with weights of the quantisation `quant`.
fn is_rounded(quant: &str) -> bool {
    !matches!(quant, "f16" | "f32")
}

fn model(fixture: &Fixture, case: &Case, path: &Path) {
    let Case { architecture, ref quant, ref variant, .. } = *case;
    let mut options = SynthOptions::from_preset("tiny").unwrap();
    options.name = "tiny-custom".into();
    options.quant = quant.parse().unwrap();
    options.gain = if is_rounded(quant) { 0.5 } else { 1.0 };
    options.tokenizer = TokenizerKind::for_architecture(architecture);
    options.add_rope_factors = architecture.spec().rope_factors.is_some();
    let is_wide = matches!(
        architecture,
        Architecture::Qwen3 | Architecture::Gemma4 | Architecture::Qwen35 | Architecture::Qwen35Moe
    );
    let head_length = if is_wide { 128 } else { 64 };
    let shape = ModelShape {
        // Gemma 3 and 4 attend to all positions in every sixth layer.
        layers: Layers(if matches!(architecture, Architecture::Gemma3 | Architecture::Gemma4) {
            7
        } else {
            4
        }),
        key_length: head_length,
        value_length: head_length,
        vocab_size: fixture.vocabulary,
        context_length: fixture.context,
        // llama.cpp requires that OLMoE has as many key heads as query heads.
        kv_heads: if architecture == Architecture::Olmoe { 4 } else { 2 },
        ..models::shape(architecture)
    };
    options.shape = shape.with_default_hybrid();
    if variant == "shared" {
        options.shape = models::with_kv_sharing(options.shape);
    }
    if variant == "experts" {
        let (count, used) = (8, 2);
        let feed_forward_length = options.shape.feed_forward_length;
        let (shared_feed_forward_length, dense_layers) = (0, 0);
        options.shape.experts =
            Some(Experts { count, used, feed_forward_length, shared_feed_forward_length, dense_layers });
    }
    synthesise(&options, path, &mut |_, _| ()).unwrap();
}

/// Returns the logits of all tokens, `[tokens, vocabulary]`, computed in passes of 16 tokens.
fn logits(path: &Path, tokens: &[u32]) -> Vec<f32> {
    let mut model = models::open(path, KvFormat::F32);
    let pass = |tokens| {
        let hidden = model.forward(tokens).unwrap();
        model.input_output_layers.logits(&hidden).unwrap()
    };
    tokens.chunks(16).flat_map(pass).collect()
}

fn rms(values: impl Iterator<Item = f64> + Clone) -> f64 {
    let count = values.clone().count();
    (values.map(|value| value * value).sum::<f64>() / count as f64).sqrt()
}

#[test]
fn logits_are_close_to_those_of_llama_cpp() {
    let fixture: Fixture = models::json(&models::data("architectures/cases.json"));
    let folder_of_models = tempfile::tempdir().unwrap();
    let path = folder_of_models.path().join("model.gguf");
    let mut seen = std::collections::BTreeSet::new();
    for case in &fixture.cases {
        let name = format!("{} {} {}", case.architecture, case.variant, case.quant);
        model(&fixture, case, &path);
        let digest = format!("{:x}", Sha256::digest(std::fs::read(&path).unwrap()));
        let changed = "the synthesised model has changed; create the fixtures again";
        assert_eq!(digest, case.sha256, "{name}: {changed}");
        let own = logits(&path, &fixture.tokens);
        let reference = std::fs::read(models::data("architectures").join(&case.logits)).unwrap();
        let reference: Vec<f32> =
            reference.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        let width = fixture.vocabulary as usize;
        let own: Vec<f32> =
            fixture.rows.iter().flat_map(|&row| own[row * width..][..width].to_vec()).collect();
        assert_eq!(own.len(), reference.len(), "{name}");
        let difference = own.iter().zip(&reference).map(|(own, reference)| f64::from(own - reference));
        let relative = rms(difference) / rms(reference.iter().map(|&logit| f64::from(logit)));
        let bound = if is_rounded(&case.quant) { 1e-2 } else { 1e-3 };
        let before = case.relative_rms;
        println!("{name}: relative RMS {relative:.1e}, {before:.1e} when the fixture was created");
        assert!(relative <= bound, "{name}: relative RMS {relative}");
        seen.insert(case.architecture);
    }
    assert_eq!(seen.len(), Architecture::all_runnable().count(), "every architecture has a case");
}

/// Splits the model at `path` into files of at most `count` tensors, with the file names of llama.cpp.
fn split(path: &Path, count: usize) -> Vec<PathBuf> {
    let (model, bytes) = (GgufModel::open(path).unwrap(), std::fs::read(path).unwrap());
    let parts = model.tensors.len().div_ceil(count);
    let paths: Vec<PathBuf> =
        (1..=parts).map(|part| path.with_file_name(format!("parts-{part:05}-of-{parts:05}.gguf"))).collect();
    for (part, (tensors, path)) in model.tensors.chunks(count).zip(&paths).enumerate() {
        let mut writer = HeaderWriter::default();
        for (key, value) in model.metadata.iter().filter(|_| part == 0) {
            writer.add_key(key, value.clone()).unwrap();
        }
        writer.add_key("split.no", Value::U16(part as u16)).unwrap();
        writer.add_key("split.count", Value::U16(parts as u16)).unwrap();
        writer.add_key("split.tensors.count", Value::I32(model.tensors.len() as i32)).unwrap();
        for tensor in tensors {
            writer.add_tensor(&tensor.name, &tensor.dims, tensor.format).unwrap();
        }
        let layout = writer.finish();
        let mut file = vec![0; layout.file_bytes as usize];
        file[..layout.header.len()].copy_from_slice(&layout.header);
        for (to, from) in layout.tensors.iter().zip(tensors) {
            let range = from.offset as usize..from.end_offset() as usize;
            file[to.offset as usize..to.end_offset() as usize].copy_from_slice(&bytes[range]);
        }
        std::fs::File::create(path).unwrap().write_all(&file).unwrap();
    }
    paths
}

#[test]
fn any_file_of_a_split_model_opens_it() {
    let fixture: Fixture = models::json(&models::data("architectures/cases.json"));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let is_plain = |case: &&Case| case.architecture == Architecture::Qwen2 && case.quant == "q8_0";
    model(&fixture, fixture.cases.iter().find(is_plain).unwrap(), &path);
    let whole = logits(&path, &fixture.tokens[..20]);
    let parts = split(&path, 20);
    assert_eq!(parts.len(), 3, "3 tensors and 12 a layer");
    for part in &parts {
        assert!(logits(part, &fixture.tokens[..20]) == whole, "{}", part.display());
    }
    std::fs::remove_file(&parts[1]).unwrap();
    let error = Weights::open(&parts[2]).unwrap_err().to_string();
    assert!(error.contains("parts-00002-of-00003.gguf"), "{error}");
}

/// Writes the mixture of experts at `path` to `to`, with the gate and the up projection of each expert in one matrix.
fn fuse_experts(path: &Path, to: &Path) {
    let (model, bytes) = (GgufModel::open(path).unwrap(), std::fs::read(path).unwrap());
    let data = |tensor: &TensorInfo| &bytes[tensor.offset as usize..tensor.end_offset() as usize];
    let mut writer = HeaderWriter::default();
    for (key, value) in model.metadata.iter() {
        writer.add_key(key, value.clone()).unwrap();
    }
    let mut written: Vec<Vec<u8>> = Vec::new();
    for tensor in model.tensors.iter().filter(|tensor| !tensor.name.ends_with("ffn_up_exps.weight")) {
        let (mut name, mut dims, mut own) = (tensor.name.clone(), tensor.dims.clone(), data(tensor).to_vec());
        if name.ends_with("ffn_gate_exps.weight") {
            let up = data(model.tensor(&name.replace("gate", "up")).unwrap());
            let expert = own.len() / dims[2] as usize;
            own = own
                .chunks(expert)
                .zip(up.chunks(expert))
                .flat_map(|pair| [pair.0, pair.1].concat())
                .collect();
            (name, dims[1]) = (name.replace("gate", "gate_up"), 2 * dims[1]);
        }
        writer.add_tensor(&name, &dims, tensor.format).unwrap();
        written.push(own);
    }
    let layout = writer.finish();
    let mut file = layout.header;
    for (tensor, own) in layout.tensors.iter().zip(&written) {
        file.resize(tensor.offset as usize, 0);
        file.extend(own);
    }
    std::fs::write(to, file).unwrap();
}

#[test]
fn fused_matrices_of_experts_give_the_same_logits() {
    let folder = tempfile::tempdir().unwrap();
    let (separate, fused) = (models::folder().join("psalm-moe-q8_0.gguf"), folder.path().join("fused.gguf"));
    fuse_experts(&separate, &fused);
    let sizes = |path: &Path| {
        let weights = Weights::open(path).unwrap();
        (ModelProfile::from_gguf(weights.model()).unwrap().layers, weights.expert_bytes(3))
    };
    assert_eq!(sizes(&separate), sizes(&fused));
    let tokens: Vec<u32> = (0..20).map(|at| at * 97 % 2048).collect();
    assert!(logits(&separate, &tokens) == logits(&fused, &tokens));
}
