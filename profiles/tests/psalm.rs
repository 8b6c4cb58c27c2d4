//! Are the headers of real files, written by llama.cpp and gguf-py, read as they are?

use std::path::PathBuf;

use hearth_profiles::gguf::{GgufError, GgufModel, HeaderError, TensorInfo};
use hearth_profiles::model::{
    Architecture, DigestMatch, ModelDocument, ModelProfile, ModelShape, Quant, layout,
};
use hearth_profiles::{Bytes, Format, Layers};

fn path(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/data/models").join(name)
}

#[test]
fn four_real_files_are_read() {
    for (name, layers, feed_forward, file_bytes) in [
        ("psalm-7m-f16.gguf", 8, 768, 13_714_432),
        ("psalm-7m-q4_k.gguf", 8, 768, 4_288_544),
        ("psalm-7m-q8_0.gguf", 8, 768, 7_324_704),
        ("psalm-draft-1m-q8_0.gguf", 2, 256, 1_460_160),
    ] {
        let model = GgufModel::open(path(name)).unwrap();
        let expected = ModelShape {
            architecture: Architecture::Llama,
            layers: Layers(layers),
            embedding: 256,
            feed_forward,
            heads: 4,
            kv_heads: 2,
            key_length: 64,
            value_length: 64,
            vocabulary: 2048,
            tied_embeddings: true,
            context_length: model.shape().unwrap().context_length,
        };
        assert_eq!(model.shape().unwrap(), expected, "{name}");
        assert_eq!(model.file_bytes(), Bytes(file_bytes), "{name}");
        // Embedding, output norm, 9 tensors a layer.
        assert_eq!(model.tensors.len(), 2 + 9 * layers as usize, "{name}");
        assert_eq!(model.metadata.get_str("tokenizer.ggml.model").unwrap(), Some("gpt2"), "{name}");
        let tokens = model.metadata.get_str_array("tokenizer.ggml.tokens").unwrap().unwrap();
        assert_eq!((tokens.len(), tokens[0].as_str()), (2048, "<|bos|>"), "{name}");
        // Every byte after the header is a tensor or padding before the next one.
        let end = model.tensors.iter().map(TensorInfo::end).max().unwrap();
        assert_eq!(end.next_multiple_of(32), file_bytes, "{name}");
    }
    let mixed = GgufModel::open(path("psalm-7m-q4_k.gguf")).unwrap();
    assert_eq!(mixed.tensor("blk.0.ffn_down.weight").unwrap().format, Format::Q6K);
    assert_eq!(mixed.tensor("blk.0.ffn_up.weight").unwrap().format, Format::Q4K);
}

#[test]
fn a_truncated_download_names_the_tensor() {
    let whole = std::fs::read(path("psalm-draft-1m-q8_0.gguf")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let short = folder.path().join("short.gguf");
    std::fs::write(&short, &whole[..1_000_000]).unwrap();
    let error = GgufModel::open(&short).unwrap_err();
    assert!(matches!(error, GgufError::Header { problem: HeaderError::PastEnd { .. }, .. }), "{error}");
    let text = error.to_string();
    assert!(
        text.contains("past the end of the file (1 000 000): the download is truncated; fetch it again"),
        "{text}"
    );
}

#[test]
fn a_missing_file_is_named() {
    let error = GgufModel::open("no-such-model.gguf").unwrap_err();
    assert!(error.to_string().starts_with("cannot open `no-such-model.gguf`: "), "{error}");
}

#[test]
fn llama_cpp_mixes_q4_k_m_as_the_rule_says() {
    let model = GgufModel::open(path("psalm-7m-q4_k.gguf")).unwrap();
    let shape = model.shape().unwrap();
    let list = layout::tensors(&shape);
    assert_eq!(list.len(), model.tensors.len());
    for wanted in list {
        let found = model.tensor(&wanted.name).unwrap();
        assert_eq!(found.dims, wanted.dims, "{}", wanted.name);
        assert_eq!(Ok(found.format), Quant::Q4KM.format(&wanted, &shape), "{}", wanted.name);
    }
}

#[test]
fn a_profile_counts_every_byte_of_the_tensors() {
    for (name, quant) in [
        ("psalm-7m-f16.gguf", "f16"),
        ("psalm-7m-q4_k.gguf", "q4_k_m"),
        ("psalm-7m-q8_0.gguf", "q8_0"),
        ("psalm-draft-1m-q8_0.gguf", "q8_0"),
    ] {
        let model = GgufModel::open(path(name)).unwrap();
        let profile = ModelProfile::from_gguf(&model).unwrap();
        assert_eq!(profile.quant, quant, "{name}");
        assert_eq!(profile.total_bytes(), model.tensors.iter().map(|tensor| tensor.bytes).sum(), "{name}");
        // The same shape and quantisation without the file give the same groups.
        let quant = quant.parse().unwrap();
        let twin = ModelProfile::from_shape("twin", profile.shape.clone(), quant).unwrap();
        assert_eq!(
            (&twin.layers, &twin.input, &twin.output),
            (&profile.layers, &profile.input, &profile.output)
        );
    }
}

#[test]
fn a_plan_for_a_document_fits_a_file_of_that_shape() {
    let document = ModelDocument::parse(
        "{schema: model/1, name: twin, source: psalm, architecture: llama, layers: 8 layers, embedding: 256,
          feed_forward: 768, heads: 4, kv_heads: 2, vocabulary: 2048, tied_embeddings: true, context_length: 512,
          quant: q4_k_m}",
    );
    let planned = document.unwrap().profile().unwrap();
    let profile = |name| ModelProfile::from_gguf(&GgufModel::open(path(name)).unwrap()).unwrap();
    let file = profile("psalm-7m-q4_k.gguf");
    assert_eq!(file.matches(&planned.digest), DigestMatch::SameShape);
    assert_eq!(file.matches(&file.digest), DigestMatch::Same);
    assert_eq!(profile("psalm-7m-q8_0.gguf").matches(&planned.digest), DigestMatch::Different);
    assert_eq!(profile("psalm-7m-q8_0.gguf").matches(&file.digest), DigestMatch::Different);
}

#[test]
fn one_changed_weight_near_the_start_of_a_tensor_changes_the_digest() {
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
