//! Files that cannot be executed are refused before any weight is used.
//!
//! Each test patches bytes of equal length into the header of a good file.

use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;

use hearth_profiles::gguf::GgufModel;
use hearth_runtime::synth::{SynthOptions, synthesise};
use hearth_runtime::{CacheFormat, CacheOptions, Cpu, ExecError, Head, Pool, PoolOptions, Stage, Weights};

fn good() -> Vec<u8> {
    let models = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/models");
    std::fs::read(models.join("psalm-7m-f16.gguf")).unwrap()
}

fn find(file: &[u8], text: &[u8]) -> usize {
    file.windows(text.len()).position(|window| window == text).expect("the text is in the header")
}

fn open(file: &[u8]) -> ExecError {
    let mut named = tempfile::NamedTempFile::new().unwrap();
    named.write_all(file).unwrap();
    Weights::open(named.path()).expect_err("the file is bad")
}

/// The good file as one of another architecture with a name as long.
fn as_architecture(name: [u8; 5]) -> Vec<u8> {
    let mut file = good();
    for at in 0..20_000 {
        if file[at..].starts_with(b"llama") {
            file[at..at + 5].copy_from_slice(&name);
        }
    }
    file
}

#[test]
fn an_architecture_without_a_forward_pass() {
    assert_eq!(
        open(&as_architecture(*b"klama")).to_string(),
        "architecture `klama` is not supported: use a model of one of llama, qwen2, qwen3, gemma, gemma2, internlm2"
    );
}

#[test]
fn an_architecture_whose_tensors_are_not_there() {
    let error = open(&as_architecture(*b"qwen2"));
    assert!(
        matches!(&error, ExecError::MissingTensor { tensor } if tensor == "blk.0.attn_q.bias"),
        "{error}"
    );
    let error = open(&as_architecture(*b"qwen3"));
    assert!(
        matches!(&error, ExecError::MissingTensor { tensor } if tensor == "blk.0.attn_q_norm.weight"),
        "{error}"
    );
}

#[test]
fn a_tensor_type_without_a_kernel() {
    let mut file = good();
    let name = b"blk.3.ffn_up.weight";
    // After the name: u32 dimensions (2), two u64, and the type: from 1 (f16) to 35, which has three values a weight.
    let at = find(&file, name) + name.len() + 4 + 16;
    assert_eq!(file[at..at + 4], 1u32.to_le_bytes());
    file[at..at + 4].copy_from_slice(&35u32.to_le_bytes());
    let error = open(&file).to_string();
    assert!(error.contains("`blk.3.ffn_up.weight`") && error.contains("35"), "{error}");
    assert!(error.contains("iq1_s"), "what would do is named: {error}");
}

#[test]
fn a_missing_tensor() {
    let mut file = good();
    let at = find(&file, b"blk.2.attn_k.weight");
    file[at..at + 19].copy_from_slice(b"blk.2.attn_?.weight");
    let error = open(&file);
    assert!(
        matches!(&error, ExecError::MissingTensor { tensor } if tensor == "blk.2.attn_k.weight"),
        "{error}"
    );
}

#[test]
fn a_tensor_that_would_be_left_out() {
    let mut file = good();
    // The file now says that it has one layer less; the last one's tensors remain.
    let key = b"llama.block_count";
    let at = find(&file, key) + key.len() + 4;
    assert_eq!(file[at..at + 4], 8u32.to_le_bytes());
    file[at..at + 4].copy_from_slice(&7u32.to_le_bytes());
    let error = open(&file);
    assert!(
        matches!(&error, ExecError::UnexpectedTensor { tensor, .. } if tensor.starts_with("blk.7.")),
        "{error}"
    );
}

#[test]
fn a_matrix_lying_on_its_side() {
    let mut file = good();
    let name = b"blk.0.ffn_gate.weight";
    let at = find(&file, name) + name.len() + 4;
    let (first, second) = (768u64.to_le_bytes(), 256u64.to_le_bytes());
    file[at..at + 8].copy_from_slice(&first);
    file[at + 8..at + 16].copy_from_slice(&second);
    let error = open(&file);
    let expected = matches!(&error, ExecError::Dimensions { found, expected, .. } if *found == [768, 256] && *expected == [256, 768]);
    assert!(expected, "{error}");
}

#[test]
fn a_global_tensor_that_would_be_left_out() {
    let mut options = SynthOptions::preset("tiny").unwrap();
    options.shape.vocabulary = 400;
    options.rope_frequencies = true;
    let named = tempfile::NamedTempFile::new().unwrap();
    synthesise(&options, named.path(), &mut |_, _| ()).unwrap();
    let mut file = std::fs::read(named.path()).unwrap();
    let at = find(&file, b"rope_freqs.weight");
    file[at..at + 17].copy_from_slice(b"rope_fraqs.weight");
    assert_eq!(
        open(&file).to_string(),
        "tensor `rope_fraqs.weight` has no place in the forward pass of llama: \
         the model is a variant (experts, adapters) that cannot be executed; use one without it"
    );
}

#[test]
fn factors_of_rotary_frequencies_that_are_none() {
    let mut options = SynthOptions::preset("tiny").unwrap();
    options.shape.vocabulary = 400;
    options.rope_frequencies = true;
    let named = tempfile::NamedTempFile::new().unwrap();
    synthesise(&options, named.path(), &mut |_, _| ()).unwrap();
    let tensor = GgufModel::open(named.path()).unwrap().tensor("rope_freqs.weight").unwrap().clone();
    let good = std::fs::read(named.path()).unwrap();
    for value in [0.0f32, -1.0, f32::NAN, f32::INFINITY] {
        let mut file = good.clone();
        file[tensor.offset as usize + 4..][..4].copy_from_slice(&value.to_le_bytes());
        let error = open(&file).to_string();
        assert!(error.contains("`rope_freqs.weight`") && error.contains("as factor 1"), "{error}");
    }
    // One factor less than there are pairs.
    let mut file = good;
    let at = find(&file, b"rope_freqs.weight") + 17 + 4;
    let pairs = u64::from(options.shape.key_length / 2);
    assert_eq!(file[at..at + 8], pairs.to_le_bytes());
    file[at..at + 8].copy_from_slice(&(pairs - 1).to_le_bytes());
    let error = open(&file).to_string();
    assert!(error.contains(&format!("[{}]", pairs - 1)) && error.contains(&format!("[{pairs}]")), "{error}");
}

/// A token's logits, with `damage` done to the bytes of the tensor called `name`.
fn logits_with(name: &str, damage: impl Fn(&mut [u8])) -> Result<Vec<f32>, ExecError> {
    let models = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/models");
    let path = models.join("psalm-7m-q4_k.gguf");
    let tensor = GgufModel::open(&path).unwrap().tensor(name).unwrap().clone();
    let mut file = std::fs::read(path).unwrap();
    damage(&mut file[tensor.offset as usize..][..tensor.bytes.0 as usize]);
    let mut named = tempfile::NamedTempFile::new().unwrap();
    named.write_all(&file).unwrap();
    let weights = Arc::new(Weights::open(named.path()).unwrap());
    let pool = Pool::new(PoolOptions { threads: 1, pin: false, spin_ns: 0 }).unwrap();
    let cpu = Cpu::new(Arc::new(pool));
    let cache = CacheOptions { context: 4, format: CacheFormat::F16, sequences: 1 };
    let whole = std::slice::from_ref(&(0..8));
    let mut stage = Stage::on_cpu(Arc::clone(&weights), whole, cache, cpu.clone()).unwrap();
    let mut head = Head::new(weights, cpu);
    let mut hidden = head.embed(&[5, 6]).unwrap();
    stage.forward(0..8, &mut hidden, &[0, 1]).unwrap();
    head.logits_of_last(&hidden)
}

#[test]
fn weights_that_are_no_numbers_give_an_error_and_no_token() {
    assert!(logits_with("blk.3.ffn_up.weight", |_| ()).is_ok());
    // Infinity and NaN in f16: the scale of a block; in f32: a norm.
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
    assert_eq!(
        result.unwrap_err().to_string(),
        "the logits of row 0 of the pass are not finite (NaN): weights are damaged or overflow; \
         fetch the model again, or use another quantisation of it"
    );
}

#[test]
fn a_file_cut_short() {
    let mut file = good();
    file.truncate(file.len() - 1000);
    open(&file);
}

#[test]
fn extents_cover_the_file_once() {
    let models = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/models");
    let weights = Weights::open(models.join("psalm-7m-q4_k.gguf")).unwrap();
    let layers = weights.shape().layers.0;
    let all = weights.layers_extents(0..layers);
    assert_eq!(all.len(), 1, "layers lie one after another: {all:?}");
    let apart: u64 = (0..layers).flat_map(|layer| weights.layer_extents(layer)).map(|e| e.length).sum();
    assert!(apart <= all[0].length && all[0].length - apart < 64 * u64::from(layers));
    // Tied: the head reads the embedding and the last norm.
    let head: u64 = weights.head_extents().iter().map(|extent| extent.length).sum();
    let embedding = weights.embedding_extents()[0];
    assert!(head >= embedding.length + 4 * 256);
    assert_eq!(weights.bytes(embedding).unwrap().len() as u64, embedding.length);
    assert!(weights.layer_extents(layers).is_empty());
}
