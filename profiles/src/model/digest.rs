//! Digests of models, by which a plan identifies its model.
//!
//! The digest of a GGUF model covers all its files: the header of each file, the size of the file, and the first 4 KiB
//! of every tensor in file order. Different models differ in these bytes, and hashing them takes milliseconds for a
//! file of 40 GB. The digest of a shape covers the dimensions that determine sizes, and the name of the quantisation,
//! but neither the context length nor the name of the model. All digests are SHA-256.

use std::fs::File;
use std::io::{self, ErrorKind, Read, Seek, SeekFrom};

use sha2::{Digest, Sha256};

use super::shape::{AttentionShape, DeltaNetShape, Hybrid, ModelShape, SharedKv, TokenMixer};
use crate::gguf::{GgufError, GgufModel};

/// Number of bytes that are hashed at the start of each tensor.
const SAMPLE_BYTES: u64 = 4096;

/// Returns the digest of a model's files: `sha256:` and 64 hex digits.
pub(super) fn gguf_digest(model: &GgufModel) -> Result<String, GgufError> {
    let mut hash = Sha256::new();
    for (index, (path, size)) in model.file_paths.iter().zip(&model.file_sizes).enumerate() {
        let failed = |source| GgufError::Read { path: path.clone(), source };
        let mut file = File::open(path).map_err(failed)?;
        feed(&mut hash, &mut file, 0, size.data_start.min(size.file_bytes)).map_err(failed)?;
        hash.update(size.file_bytes.to_le_bytes());
        for tensor in model.tensors.iter().filter(|tensor| tensor.file_index == index) {
            feed(&mut hash, &mut file, tensor.offset, tensor.bytes.0.min(SAMPLE_BYTES)).map_err(failed)?;
        }
    }
    Ok(format!("sha256:{:x}", hash.finalize()))
}

fn feed(hash: &mut Sha256, file: &mut File, from: u64, count: u64) -> io::Result<()> {
    file.seek(SeekFrom::Start(from))?;
    if io::copy(&mut file.take(count), hash)? < count {
        return Err(io::Error::new(
            ErrorKind::UnexpectedEof,
            "the file ends inside its header or inside a tensor: wait until it is complete, or download it again",
        ));
    }
    Ok(())
}

/// Returns the digest of a shape and a quantisation: `shape:` and 64 hex digits.
pub(super) fn shape_digest(shape: &ModelShape, quant: &str) -> String {
    let text = format!(
        "shape/1\narchitecture {}\nlayers {}\nembedding {}\nfeed_forward {}\nheads {}\nkv_heads {}\nkey_length {}\n\
         value_length {}\nvocabulary {}\ntied_embeddings {}\nquant {quant}\n{}",
        shape.architecture,
        shape.layers.0,
        shape.embedding_length,
        shape.feed_forward_length,
        shape.heads,
        shape.kv_heads,
        shape.key_length,
        shape.value_length,
        shape.vocab_size,
        shape.has_tied_embeddings,
        shape.hybrid.map_or_else(String::new, |hybrid| hybrid_lines(shape, hybrid))
            + &shape.shared_kv.map_or_else(String::new, |shared| shared_lines(shape, shared)),
    );
    format!("shape:{:x}", Sha256::digest(text))
}

/// Returns the lines that only models with different layers have.
fn hybrid_lines(shape: &ModelShape, hybrid: Hybrid) -> String {
    let other = match hybrid.other {
        TokenMixer::Attention(local) => {
            let AttentionShape { heads, kv_heads, key_length, value_length, shares_keys } = local;
            format!("attention {heads} {kv_heads} {key_length} {value_length} {shares_keys}")
        }
        TokenMixer::DeltaNet(net) => {
            let DeltaNetShape { key_heads, value_heads, head_length, convolution_length } = net;
            format!("delta_net {key_heads} {value_heads} {head_length} {convolution_length}")
        }
    };
    let interval = hybrid.full_attention_interval;
    format!("shares_keys {}\nfull_attention_interval {interval}\nother {other}\n", shape.shares_keys)
}

/// Returns the lines that only models with shared keys and values, or inputs of layers, have.
fn shared_lines(shape: &ModelShape, SharedKv { layers, feed_forward_length }: SharedKv) -> String {
    format!("shared_kv {layers} {feed_forward_length}\nlayer_input {}\n", shape.layer_input_length)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Architecture;
    use crate::model::shape::tests::llama_8b;

    #[test]
    fn shape_digest_ignores_context_length() {
        let shape = llama_8b();
        let longer = ModelShape { context_length: 131_072, ..shape.clone() };
        let deeper = ModelShape { layers: crate::Layers(60), ..shape.clone() };
        assert_eq!(shape_digest(&shape, "q4_k_m"), shape_digest(&longer, "q4_k_m"));
        assert_ne!(shape_digest(&shape, "q4_k_m"), shape_digest(&deeper, "q4_k_m"));
        assert_ne!(shape_digest(&shape, "q4_k_m"), shape_digest(&shape, "q8_0"));
        assert_eq!(shape_digest(&shape, "q8_0").len(), "shape:".len() + 64);
        let hybrid = ModelShape { architecture: Architecture::Qwen35, ..shape }.with_default_hybrid();
        let plain = ModelShape { hybrid: None, ..hybrid.clone() };
        assert_ne!(shape_digest(&hybrid, "q8_0"), shape_digest(&plain, "q8_0"));
    }
}
