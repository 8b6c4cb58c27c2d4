//! Digests of models, by which a plan identifies its model.
//!
//! The digest of a GGUF model covers all its files: the header of each file, the size of the file, and the first 4 KiB
//! of every tensor in file order. Different models differ in these bytes, and hashing them takes milliseconds for a
//! file of 40 GB. The digest of a shape covers the dimensions that determine sizes, and the name of the quantisation,
//! but neither the context length nor the name of the model. All digests are SHA-256.

use std::fs::File;
use std::io::{self, ErrorKind, Read, Seek, SeekFrom};

use sha2::{Digest, Sha256};

use super::experts::Experts;
use super::shape::ModelShape;
use super::token_mixer::{AttentionShape, DeltaNetShape, Hybrid, SharedKv, TokenMixer};
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
        lines_of_parts(shape),
    );
    format!("shape:{:x}", Sha256::digest(text))
}

/// Returns the lines of the parts that only some models have, so that the digests of others do not depend on them.
fn lines_of_parts(shape: &ModelShape) -> String {
    let other = |hybrid: Hybrid| match hybrid.other {
        TokenMixer::Attention(local) => {
            let AttentionShape { heads, kv_heads, key_length, value_length, values_are_keys } = local;
            format!("attention {heads} {kv_heads} {key_length} {value_length} {values_are_keys}")
        }
        TokenMixer::DeltaNet(net) => {
            let DeltaNetShape { key_heads, value_heads, head_length, convolution_length } = net;
            format!("delta_net {key_heads} {value_heads} {head_length} {convolution_length}")
        }
    };
    let input = shape.per_layer_input_length;
    let lines = [
        shape.values_are_keys.then(|| "values_are_keys true\n".to_owned()),
        shape.hybrid.map(|hybrid| {
            format!("full_attention_interval {}\nother {}\n", hybrid.full_attention_interval, other(hybrid))
        }),
        shape.shared_kv.map(|SharedKv { layers, feed_forward_length }| {
            format!("shared_kv {layers} {feed_forward_length}\n")
        }),
        (input > 0).then(|| format!("per_layer_input {input}\n")),
        shape.experts.map(|experts| {
            let Experts { count, used, feed_forward_length, shared_feed_forward_length, dense_layers } =
                experts;
            format!(
                "experts {count} {used} {feed_forward_length} {shared_feed_forward_length} {dense_layers}\n"
            )
        }),
    ];
    lines.into_iter().flatten().collect()
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
        let with_input = ModelShape { per_layer_input_length: 32, ..plain.clone() };
        assert_ne!(shape_digest(&with_input, "q8_0"), shape_digest(&plain, "q8_0"));
    }
}
