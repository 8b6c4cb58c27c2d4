//! Tests with the headers of real model files, which llama.cpp and gguf-py wrote.

use std::path::PathBuf;

use hearth_profiles::Document;
use hearth_profiles::gguf::{GgufError, GgufModel, HeaderError, TensorInfo, split_suffix};
use hearth_profiles::model::{DigestMatch, ModelDocument, ModelProfile, Quant, TensorGroup, layout};
use hearth_profiles::{Bytes, Format};

fn path(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/data/models").join(name)
}

/// Returns a `model/1` document with the dimensions of the trained test models, whose head dimension is 64.
fn document(layers: u32, feed_forward: u32, context: u32) -> ModelDocument {
    let text = format!(
        "schema: model/1\nname: twin\nsource: psalm\narchitecture: llama\nlayers: {layers} layers\nembedding: 256\n\
         feed_forward: {feed_forward}\nheads: 4\nkv_heads: 2\nvocabulary: 2048\ntied_embeddings: true\n\
         context_length: {context}\nquant: q4_k_m\n"
    );
    ModelDocument::from_yaml(&text).unwrap()
}

fn groups(profile: &ModelProfile) -> (&[TensorGroup], &TensorGroup, &TensorGroup) {
    (&profile.layers, &profile.input_embedding, &profile.output_head)
}

#[test]
fn real_files_are_read_and_profiled() {
    for (name, quant, layers, feed_forward, file_bytes) in [
        ("psalm-7m-f16.gguf", "f16", 8, 768, 13_714_432),
        ("psalm-7m-q4_k.gguf", "q4_k_m", 8, 768, 4_288_544),
        ("psalm-7m-q8_0.gguf", "q8_0", 8, 768, 7_324_704),
        ("psalm-draft-1m-q8_0.gguf", "q8_0", 2, 256, 1_460_160),
    ] {
        let model = GgufModel::open(path(name)).unwrap();
        let shape = model.shape().unwrap();
        assert_eq!(shape, document(layers, feed_forward, shape.context_length).to_shape(), "{name}");
        assert_eq!(model.file_bytes(), Bytes(file_bytes), "{name}");
        // Embedding, output norm, 9 tensors a layer.
        assert_eq!(model.tensors.len(), 2 + 9 * layers as usize, "{name}");
        assert_eq!(model.metadata.get_str("tokenizer.ggml.model").unwrap(), Some("gpt2"), "{name}");
        let tokens = model.metadata.get_str_array("tokenizer.ggml.tokens").unwrap().unwrap();
        assert_eq!((tokens.len(), tokens[0].as_str()), (2048, "<|bos|>"), "{name}");
        // Every byte after the header is a tensor or padding before the next one.
        let end = model.tensors.iter().map(TensorInfo::end_offset).max().unwrap();
        assert_eq!(end.next_multiple_of(32), file_bytes, "{name}");
        // Every byte of a tensor is in the profile.
        let profile = ModelProfile::from_gguf(&model).unwrap();
        assert_eq!(profile.quant, quant, "{name}");
        assert_eq!(profile.total_bytes(), model.tensors.iter().map(|tensor| tensor.bytes).sum(), "{name}");
        // The same shape and quantisation without the file give the same groups.
        let twin = ModelProfile::from_shape("twin", profile.shape.clone(), quant.parse().unwrap()).unwrap();
        assert_eq!(groups(&twin), groups(&profile));
    }
    let mixed = GgufModel::open(path("psalm-7m-q4_k.gguf")).unwrap();
    assert_eq!(mixed.tensor("blk.0.ffn_down.weight").unwrap().format, Format::Q6K);
    assert_eq!(mixed.tensor("blk.0.ffn_up.weight").unwrap().format, Format::Q4K);
}

#[test]
fn truncated_or_missing_file_is_reported() {
    let error = GgufModel::open("no-such-model.gguf").unwrap_err();
    assert!(error.to_string().starts_with("cannot open `no-such-model.gguf`: "), "{error}");
    let whole = std::fs::read(path("psalm-draft-1m-q8_0.gguf")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let short = folder.path().join("short.gguf");
    std::fs::write(&short, &whole[..1_000_000]).unwrap();
    let error = GgufModel::open(&short).unwrap_err();
    assert!(matches!(error, GgufError::Header { source: HeaderError::PastEnd { .. }, .. }), "{error}");
    let text = error.to_string();
    let expected = "`: tensor `blk.0.ffn_up.weight` ends at byte 1 040 320, past the end of the file (1 000 000 bytes): \
                    the download is truncated; download it again";
    assert!(text.ends_with(expected), "{text}");
}

#[test]
fn q4_k_m_formats_match_llama_cpp() {
    let model = GgufModel::open(path("psalm-7m-q4_k.gguf")).unwrap();
    let shape = model.shape().unwrap();
    let list = layout::tensor_specs(&shape);
    assert_eq!(list.len(), model.tensors.len());
    for wanted in list {
        let found = model.tensor(&wanted.name).unwrap();
        assert_eq!(found.dims, wanted.dims, "{}", wanted.name);
        assert_eq!(Ok(found.format), Quant::Q4KM.tensor_format(&wanted, &shape), "{}", wanted.name);
    }
}

#[test]
fn shape_digest_of_document_matches_file() {
    let planned = document(8, 768, 512).to_profile().unwrap();
    let profile = |name| ModelProfile::from_gguf(&GgufModel::open(path(name)).unwrap()).unwrap();
    let file = profile("psalm-7m-q4_k.gguf");
    assert_eq!(file.match_digest(&planned.digest), DigestMatch::SameShape);
    assert_eq!(file.match_digest(&file.digest), DigestMatch::Same);
    assert_eq!(profile("psalm-7m-q8_0.gguf").match_digest(&planned.digest), DigestMatch::Different);
    assert_eq!(profile("psalm-7m-q8_0.gguf").match_digest(&file.digest), DigestMatch::Different);
}

#[test]
fn changed_weight_changes_the_digest() {
    let folder = tempfile::tempdir().unwrap();
    let copy = folder.path().join("copy.gguf");
    let mut bytes = std::fs::read(path("psalm-draft-1m-q8_0.gguf")).unwrap();
    std::fs::write(&copy, &bytes).unwrap();
    let digest = || ModelProfile::from_gguf(&GgufModel::open(&copy).unwrap()).unwrap().digest;
    let before = digest();
    assert_eq!(before.len(), "sha256:".len() + 64);
    let offset = GgufModel::open(&copy).unwrap().tensor("blk.1.ffn_up.weight").unwrap().offset;
    bytes[offset as usize + 4000] ^= 1;
    std::fs::write(&copy, &bytes).unwrap();
    assert_ne!(digest(), before);
}

#[test]
fn split_model_has_same_profile_and_other_digest() {
    let source = std::fs::read(path("psalm-draft-1m-q8_0.gguf")).unwrap();
    let whole = GgufModel::open(path("psalm-draft-1m-q8_0.gguf")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let (first, second) = whole.tensors.split_at(7);
    for (number, tensors) in [(0, first), (1, second)] {
        let mut writer = crate::split_writer(number, 2, whole.tensors.len());
        for (key, value) in whole.metadata.iter().filter(|_| number == 0) {
            writer.add_key(key, value.clone()).unwrap();
        }
        for tensor in tensors {
            writer.add_tensor(&tensor.name, &tensor.dims, tensor.format).unwrap();
        }
        let layout = writer.finish();
        let mut file = layout.header;
        for (from, to) in tensors.iter().zip(&layout.tensors) {
            file.resize(to.offset as usize, 0);
            file.extend(&source[from.offset as usize..from.end_offset() as usize]);
        }
        file.resize(layout.file_bytes as usize, 0);
        std::fs::write(folder.path().join(format!("draft{}", split_suffix(number, 2))), file).unwrap();
    }
    let split = GgufModel::open(folder.path().join("draft-00002-of-00002.gguf")).unwrap();
    let (whole, split) = (ModelProfile::from_gguf(&whole).unwrap(), ModelProfile::from_gguf(&split).unwrap());
    assert_eq!(groups(&split), groups(&whole));
    assert_eq!(split.match_digest(&whole.shape_digest()), DigestMatch::SameShape);
    assert_ne!(split.digest, whole.digest);
}
