//! Is a file that cannot be executed refused before any of its weights is used?
//!
//! Each test patches bytes of equal length into the header of a good file.

use std::io::Write;
use std::path::PathBuf;

use hearth_exec::{ExecError, Weights};

fn good() -> Vec<u8> {
    let models = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/data/models");
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

#[test]
fn an_architecture_without_a_forward_pass() {
    let mut file = good();
    for at in 0..20_000 {
        if file[at..].starts_with(b"llama") {
            file[at..at + 5].copy_from_slice(b"qwen2");
        }
    }
    let error = open(&file);
    assert!(matches!(&error, ExecError::Architecture { found } if found == "qwen2"), "{error}");
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
        matches!(&error, ExecError::UnexpectedTensor { tensor } if tensor.starts_with("blk.7.")),
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
fn a_file_cut_short() {
    let mut file = good();
    file.truncate(file.len() - 1000);
    open(&file);
}

#[test]
fn extents_cover_the_file_once() {
    let models = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/data/models");
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
