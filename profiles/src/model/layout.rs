//! Tensor list of a model with a given shape: the name and dimensions of each tensor, in file order.
//!
//! Names, dimensions and file order (embedding, layers, output norm, output head) are those of llama.cpp's converters.
//! The list is used to compute the tensor sizes for a `model/1` document, to generate synthetic files, and to check
//! that a file is complete.
//!
//! Not here: the format of each tensor (`model::quant`).

use super::shape::ModelShape;

/// The kind of a tensor, which determines its arithmetic and, in a synthetic model, its random values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TensorKind {
    /// The input embedding. A token reads one row of this matrix.
    Embedding,
    Matrix,
    /// The weights of a normalisation (RMSNorm).
    Norm,
    /// A bias, which is added to the result of a matmul.
    Bias,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// Name of the tensor, for example `blk.3.ffn_up.weight`.
    pub name: String,
    /// Dimensions in the order of ggml: `dims[0]` is the length of a row.
    pub dims: Vec<u64>,
    pub kind: TensorKind,
    /// Index of the tensor's layer, from 0; `None` for a tensor outside the layers.
    pub layer_index: Option<u32>,
}

impl TensorSpec {
    pub fn element_count(&self) -> u64 {
        self.dims.iter().product()
    }
}

/// Returns the tensors of a model in file order. The shape must have passed [`ModelShape::check`].
pub fn tensor_specs(shape: &ModelShape) -> Vec<TensorSpec> {
    let (embedding, vocabulary) = (u64::from(shape.embedding_length), u64::from(shape.vocab_size));
    let outside = |name: &str, dims, kind| TensorSpec { name: name.into(), dims, kind, layer_index: None };
    let mut list = vec![outside("token_embd.weight", vec![embedding, vocabulary], TensorKind::Embedding)];
    for layer in 0..shape.layers.0 {
        list.extend(layer_tensors(shape).into_iter().map(|(name, dims, kind)| TensorSpec {
            name: format!("blk.{layer}.{name}"),
            dims,
            kind,
            layer_index: Some(layer),
        }));
    }
    list.push(outside("output_norm.weight", vec![embedding], TensorKind::Norm));
    if !shape.has_tied_embeddings {
        list.push(outside("output.weight", vec![embedding, vocabulary], TensorKind::Matrix));
    }
    list
}

/// Returns the name (without `blk.N.`), the dimensions and the kind of each tensor of one layer.
fn layer_tensors(shape: &ModelShape) -> Vec<(&'static str, Vec<u64>, TensorKind)> {
    use TensorKind::{Bias, Matrix, Norm};
    let (embedding, feed_forward) = (u64::from(shape.embedding_length), u64::from(shape.feed_forward_length));
    let (query, key, value) = (shape.query_width(), shape.key_width(), shape.value_width());
    let spec = shape.architecture.spec();
    let attended = u64::from(shape.heads) * u64::from(shape.value_length);
    let mut list = Vec::new();
    if spec.has_pre_norms {
        list.push(("attn_norm.weight", vec![embedding], Norm));
    }
    if spec.has_fused_projections {
        list.push(("attn_qkv.weight", vec![embedding, query + key + value], Matrix));
    } else {
        list.push(("attn_q.weight", vec![embedding, query], Matrix));
        list.push(("attn_k.weight", vec![embedding, key], Matrix));
        list.push(("attn_v.weight", vec![embedding, value], Matrix));
    }
    if spec.has_projection_biases {
        list.push(("attn_q.bias", vec![query], Bias));
        list.push(("attn_k.bias", vec![key], Bias));
        list.push(("attn_v.bias", vec![value], Bias));
    }
    if let Some([query_norm, key_norm]) = shape.query_key_norm_lengths() {
        list.push(("attn_q_norm.weight", vec![query_norm], Norm));
        list.push(("attn_k_norm.weight", vec![key_norm], Norm));
    }
    list.push(("attn_output.weight", vec![attended, embedding], Matrix));
    if spec.has_post_norms {
        list.push(("post_attention_norm.weight", vec![embedding], Norm));
    }
    if spec.has_pre_norms {
        list.push(("ffn_norm.weight", vec![embedding], Norm));
    }
    if spec.has_fused_projections {
        list.push(("ffn_up.weight", vec![embedding, 2 * feed_forward], Matrix));
    } else {
        list.push(("ffn_gate.weight", vec![embedding, feed_forward], Matrix));
        list.push(("ffn_up.weight", vec![embedding, feed_forward], Matrix));
    }
    list.push(("ffn_down.weight", vec![feed_forward, embedding], Matrix));
    if spec.has_post_norms {
        list.push(("post_ffw_norm.weight", vec![embedding], Norm));
    }
    list
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Architecture;
    use crate::model::shape::tests::llama_8b;

    #[test]
    fn llama_8b_has_eight_billion_weights() {
        let list = tensor_specs(&llama_8b());
        // Embedding, output norm, head, 9 a layer.
        assert_eq!(list.len(), 3 + 9 * 32);
        assert_eq!(list.iter().map(TensorSpec::element_count).sum::<u64>(), 8_030_261_248);
    }

    #[test]
    fn architectures_add_tensors() {
        let count = |architecture| tensor_specs(&ModelShape { architecture, ..llama_8b() }).len() - 3;
        assert_eq!(count(Architecture::Qwen2), 32 * 12);
        assert_eq!(count(Architecture::Qwen3), 32 * 11);
        assert_eq!(count(Architecture::Gemma2), 32 * 11);
        assert_eq!(count(Architecture::Gemma3), 32 * 13);
        assert_eq!(count(Architecture::Phi3), 32 * 6);
        assert_eq!(count(Architecture::Olmo2), 32 * 11);
        assert_eq!(tensor_specs(&ModelShape { has_tied_embeddings: true, ..llama_8b() }).len(), 2 + 9 * 32);
    }
}
