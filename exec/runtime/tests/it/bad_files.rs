//! Tests that invalid files are rejected when they are opened, before any weight is used.
//!
//! Most tests replace bytes in the header of a valid file with other bytes of the same length.

use std::io::Write;

use hearth_core::schedule::ModelPart;
use hearth_profiles::Format;
use hearth_profiles::gguf::{Array, GgufModel, HeaderWriter, Value};
use hearth_profiles::model::{Architecture, ModelShape};
use hearth_runtime::synth::SynthOptions;
use hearth_runtime::{ExecError, KvFormat, Weights};
use tempfile::NamedTempFile;

use crate::models;

fn good() -> Vec<u8> {
    std::fs::read(models::folder().join("psalm-7m-f16.gguf")).unwrap()
}

fn written(file: &[u8]) -> NamedTempFile {
    let mut named = NamedTempFile::new().unwrap();
    named.write_all(file).unwrap();
    named
}

fn open(file: &[u8]) -> ExecError {
    Weights::open(written(file).path()).expect_err("the file is bad")
}

/// Replaces the bytes `old`, which begin `skip` bytes after the start of `text` in a header, with `new`.
fn patched(mut file: Vec<u8>, text: &str, skip: usize, old: &[u8], new: &[u8]) -> Vec<u8> {
    let start = file.windows(text.len()).position(|window| window == text.as_bytes());
    let at = start.expect("the text is in the header") + skip;
    assert_eq!(file[at..][..old.len()], *old);
    file[at..][..new.len()].copy_from_slice(new);
    file
}

/// Returns the valid file with a different architecture, whose name must have the length of `llama`.
fn as_architecture(name: &[u8]) -> Vec<u8> {
    let mut file = good();
    for at in 0..20_000 {
        if file[at..].starts_with(b"llama") {
            file[at..at + 5].copy_from_slice(name);
        }
    }
    file
}

fn renamed(file: Vec<u8>, old: &str, new: &str) -> Vec<u8> {
    patched(file, old, 0, old.as_bytes(), new.as_bytes())
}

/// Returns the options and the file of a synthetic model with divisors of the rotary frequencies.
fn with_rope_factors() -> (SynthOptions, NamedTempFile) {
    let mut options = SynthOptions::from_preset("tiny").unwrap();
    options.shape.vocab_size = 400;
    options.add_rope_factors = true;
    let file = models::synthetic(&options);
    (options, file)
}

#[test]
fn invalid_headers_are_rejected() {
    let (key, gate) = ("llama.block_count", "blk.0.ffn_gate.weight");
    let [wide, tall] = [[256u64, 768], [768, 256]].map(|sides| sides.map(u64::to_le_bytes).concat());
    let factors = std::fs::read(with_rope_factors().1.path()).unwrap();
    for (file, message) in [
        (
            as_architecture(b"klama"),
            "architecture `klama` is not supported; use a model of one of llama, qwen2, ",
        ),
        (as_architecture(b"qwen2"), "tensor `blk.0.attn_q.bias` is missing"),
        (as_architecture(b"qwen3"), "tensor `blk.0.attn_q_norm.weight` is missing"),
        (
            renamed(good(), "blk.2.attn_k.weight", "blk.2.attn_?.weight"),
            "tensor `blk.2.attn_k.weight` is missing",
        ),
        // The metadata have one layer less than the file; the tensors of the last layer are unexpected.
        (
            patched(good(), key, key.len() + 4, &8u32.to_le_bytes(), &7u32.to_le_bytes()),
            "is not part of the llama architecture",
        ),
        (
            patched(good(), gate, gate.len() + 4, &wide, &tall),
            "tensor `blk.0.ffn_gate.weight` has dimensions [768, 256], but the metadata require [256, 768]",
        ),
        (
            renamed(factors, "rope_freqs.weight", "rope_fraqs.weight"),
            "tensor `rope_fraqs.weight` is not part of the llama architecture: \
             models with adapters or other additions are not supported; use a model without them",
        ),
    ] {
        let error = open(&file).to_string();
        assert!(error.contains(message), "{error}");
        assert!(message != "is not part of the llama architecture" || error.contains("`blk.7."), "{error}");
    }
}

#[test]
fn tensor_types_without_a_kernel_are_rejected() {
    let name = "blk.3.ffn_up.weight";
    // After the name are the number of dimensions (u32), two dimensions (u64) and the type, which is changed from 1
    // (f16) to 35 (ternary weights).
    let skip = name.len() + 4 + 16;
    let error = open(&patched(good(), name, skip, &1u32.to_le_bytes(), &35u32.to_le_bytes())).to_string();
    assert!(error.contains("`blk.3.ffn_up.weight`") && error.contains("35"), "{error}");
    assert!(error.contains("iq1_s"), "the known types are named: {error}");
}

#[test]
fn invalid_rope_factors_are_rejected() {
    let (options, named) = with_rope_factors();
    let tensor = GgufModel::open(named.path()).unwrap().tensor("rope_freqs.weight").unwrap().clone();
    let good = std::fs::read(named.path()).unwrap();
    for value in [0.0f32, -1.0, f32::NAN, f32::INFINITY] {
        let mut file = good.clone();
        file[tensor.offset as usize + 4..][..4].copy_from_slice(&value.to_le_bytes());
        let error = open(&file).to_string();
        assert!(error.contains("`rope_freqs.weight`") && error.contains("as factor 1"), "{error}");
    }
    // The file has one factor less than pairs.
    let pairs = u64::from(options.shape.key_length / 2);
    let less = (pairs - 1).to_le_bytes();
    let error = open(&patched(good, "rope_freqs.weight", 17 + 4, &pairs.to_le_bytes(), &less)).to_string();
    assert!(error.contains(&format!("[{}]", pairs - 1)) && error.contains(&format!("[{pairs}]")), "{error}");
}

/// Returns the logits after two tokens if `damage` has changed the bytes of the tensor `name`.
fn logits_with(name: &str, damage: impl Fn(&mut [u8])) -> Result<Vec<f32>, ExecError> {
    let path = models::folder().join("psalm-7m-q4_k.gguf");
    let tensor = GgufModel::open(&path).unwrap().tensor(name).unwrap().clone();
    let mut file = std::fs::read(path).unwrap();
    damage(&mut file[tensor.offset as usize..][..tensor.bytes.0 as usize]);
    models::open(written(&file).path(), KvFormat::F16).next_logits(&[5, 6])
}

#[test]
fn nan_weights_give_an_error_instead_of_tokens() {
    assert!(logits_with("blk.3.ffn_up.weight", |_| ()).is_ok());
    // f16 infinity and NaN as the scale of a block, and f32 NaN and infinity in a norm.
    for (name, bytes) in [
        ("blk.3.ffn_up.weight", vec![0x00, 0x7c]),
        ("blk.0.attn_q.weight", vec![0x00, 0x7e]),
        ("blk.5.ffn_down.weight", vec![0x01, 0x7e]),
        ("blk.2.attn_norm.weight", vec![0x00, 0x00, 0xc0, 0x7f]),
        ("output_norm.weight", vec![0x00, 0x00, 0x80, 0x7f]),
    ] {
        let result = logits_with(name, |tensor| tensor[..bytes.len()].copy_from_slice(&bytes));
        let Err(error) = result else { panic!("{name}: no error") };
        assert!(matches!(error, ExecError::NotFinite { .. }), "{name}: {error}");
    }
    let result = logits_with("blk.1.attn_norm.weight", |tensor| tensor.fill(0xff));
    let expected = "the logits of token 0 of the pass (counted from 0) are not finite (NaN): \
                    the weights are damaged or overflow; download the model again, or use another quantisation";
    assert_eq!(result.unwrap_err().to_string(), expected);
}

/// Writes the header of a synthetic model of a shape with changed keys and additional tensors, without weights.
fn with_changed_header(
    shape: ModelShape,
    change: impl Fn(&mut Vec<(String, Value)>, &mut Vec<(String, Vec<u64>)>),
) -> NamedTempFile {
    let mut options = SynthOptions::from_preset("tiny").unwrap();
    options.quant = "f32".parse().unwrap();
    options.shape = shape;
    let model = GgufModel::open(models::synthetic(&options).path()).unwrap();
    let mut keys: Vec<_> =
        model.metadata.iter().map(|(key, value)| (key.to_owned(), value.clone())).collect();
    let mut tensors: Vec<_> = model.tensors.iter().map(|it| (it.name.clone(), it.dims.clone())).collect();
    change(&mut keys, &mut tensors);
    let mut writer = HeaderWriter::default();
    for (key, value) in keys {
        writer.add_key(&key, value).unwrap();
    }
    for (name, dims) in tensors {
        writer.add_tensor(&name, &dims, Format::F32).unwrap();
    }
    let layout = writer.finish();
    let mut file = vec![0; layout.file_bytes as usize];
    file[..layout.header.len()].copy_from_slice(&layout.header);
    written(&file)
}

#[test]
fn contradictions_of_layers_of_different_kinds_are_rejected() {
    use Architecture::{Gemma4, Qwen35};
    type Keys = Vec<(String, Value)>;
    type Tensors = Vec<(String, Vec<u64>)>;
    let set = |keys: &mut Keys, name: &str, value: Value| {
        keys.iter_mut().find(|(key, _)| key.ends_with(name)).unwrap().1 = value;
    };
    let remove = |keys: &mut Keys, name: &str| keys.retain(|(key, _)| !key.ends_with(name));
    let check_shape = |shape: ModelShape, expected: &str, change: &dyn Fn(&mut Keys, &mut Tensors)| {
        let file = with_changed_header(shape, change);
        let error = Weights::open(file.path()).expect_err(expected).to_string();
        assert!(error.contains(expected), "{expected}: {error}");
    };
    let check = |architecture, expected: &str, change: &dyn Fn(&mut Keys, &mut Tensors)| {
        check_shape(models::shape(architecture), expected, change);
    };
    assert!(Weights::open(with_changed_header(models::shape(Gemma4), |_, _| ()).path()).is_ok());
    check(Gemma4, "attention.sliding_window", &|keys, _| remove(keys, "attention.sliding_window"));
    let pattern = "attention.sliding_window_pattern";
    check(Gemma4, "must be an array", &|keys, _| set(keys, pattern, Value::U32(3)));
    check(Gemma4, "groups of equal layers", &|keys, _| {
        set(keys, pattern, Value::Array(Array::Bool(vec![true, true, false, false])));
    });
    check(Gemma4, "groups of equal layers", &|keys, _| {
        set(keys, pattern, Value::Array(Array::Bool(vec![true; 4])));
    });
    check(Gemma4, "shared_kv_layers` is 4", &|keys, _| {
        keys.push(("gemma4.attention.shared_kv_layers".into(), Value::U32(4)));
    });
    let sharing = models::with_kv_sharing(models::shape(Gemma4));
    // Some converters write the keys of layers that do not use them.
    let with_key =
        |_: &mut Keys, tensors: &mut Tensors| tensors.push(("blk.7.attn_k.weight".into(), vec![8]));
    assert!(Weights::open(with_changed_header(sharing.clone(), with_key).path()).is_ok());
    check_shape(sharing, "blk.4294967295.attn_k.weight", &|_, tensors| {
        tensors.push(("blk.4294967295.attn_k.weight".into(), vec![8]));
    });
    check(Qwen35, "full_attention_interval", &|keys, _| set(keys, "full_attention_interval", Value::U32(0)));
    check(Qwen35, "ssm.inner_size", &|keys, _| set(keys, "ssm.inner_size", Value::U32(1)));
    check(Qwen35, "key_heads", &|keys, _| set(keys, "ssm.group_count", Value::U32(3)));
    check(Qwen35, "convolution_length", &|keys, _| set(keys, "ssm.conv_kernel", Value::U32(0)));
    check(Qwen35, "value_length", &|keys, _| set(keys, "attention.value_length", Value::U32(128)));
    check(Qwen35, "nextn_predict_layers", &|keys, _| {
        keys.push(("qwen35.nextn_predict_layers".into(), Value::Str("one".into())));
    });
    check(Qwen35, "blk.0.attn_q.bias", &|_, tensors| tensors.push(("blk.0.attn_q.bias".into(), vec![256])));
    check(Qwen35, "blk.3.attn_k.bias", &|_, tensors| tensors.push(("blk.3.attn_k.bias".into(), vec![128])));
}

#[test]
fn truncated_files_are_rejected() {
    let file = good();
    open(&file[..file.len() - 1000]);
}

#[test]
fn extents_cover_the_file_once() {
    let weights = Weights::open(models::folder().join("psalm-7m-q4_k.gguf")).unwrap();
    let layers = weights.shape().layers.0;
    let all = weights.part_extents(&ModelPart::Layers(0..layers));
    assert_eq!(all.len(), 1, "layers are contiguous in the file: {all:?}");
    let layer_bytes = |layer| weights.part_bytes(&ModelPart::Layers(layer..layer + 1));
    let apart: u64 = (0..layers).map(layer_bytes).sum();
    assert!(apart <= all[0].length && all[0].length - apart < 64 * u64::from(layers));
    // With tied embeddings, the output layer reads the embedding and the output norm.
    let output = weights.part_bytes(&ModelPart::Output);
    let embedding = weights.embedding_extents()[0];
    assert!(output >= embedding.length + 4 * 256);
    assert_eq!(weights.mapped_bytes(embedding).unwrap().len() as u64, embedding.length);
    assert!(weights.part_extents(&ModelPart::Layers(layers..layers + 1)).is_empty());
}
