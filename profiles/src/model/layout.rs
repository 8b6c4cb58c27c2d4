//! Tensor list of a model with a given shape: the name and dimensions of each tensor, in file order.
//!
//! Names, dimensions and file order (embedding, layers, output norm, output head) are those of llama.cpp's converters.
//! The list is used to compute the tensor sizes for a `model/1` document, to generate synthetic files, and to check
//! that a file is complete.
//!
//! Not here: the format of each tensor (`model::quant`).

use super::shape::ModelShape;
use super::token_mixer::{AttentionShape, DeltaNetShape, TokenMixer};

/// The kind of a tensor, which determines its arithmetic and, in a synthetic model, its random values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TensorKind {
    /// The input embedding. A token reads one row of this matrix.
    Embedding,
    Matrix,
    /// The weights of a normalisation (RMSNorm).
    Norm,
    /// A bias, which is added to the result of a matmul, or the sinks of attention.
    Bias,
    /// The kernels of a convolution over time, which are not quantised.
    Convolution,
    /// The negative factors of the logarithm of a state's decay.
    Decay,
    /// A positive factor.
    Scale,
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
    if shape.per_layer_input_length > 0 {
        let (length, layers) = (u64::from(shape.per_layer_input_length), u64::from(shape.layers.0));
        list.extend([
            outside("per_layer_token_embd.weight", vec![length * layers, vocabulary], TensorKind::Embedding),
            outside("per_layer_model_proj.weight", vec![embedding, length * layers], TensorKind::Matrix),
            outside("per_layer_proj_norm.weight", vec![length], TensorKind::Norm),
        ]);
    }
    for layer in 0..shape.layers.0 {
        list.extend(layer_tensors(shape, layer).into_iter().map(|(name, dims, kind)| TensorSpec {
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

/// The name (without `blk.N.`), the dimensions and the kind of a tensor of a layer.
type LayerTensor = (String, Vec<u64>, TensorKind);

/// Returns the tensors of the layer with the index `layer`.
fn layer_tensors(shape: &ModelShape, layer: u32) -> Vec<LayerTensor> {
    use TensorKind::{Matrix, Norm, Scale};
    let embedding = u64::from(shape.embedding_length);
    let spec = shape.architecture.spec();
    let tensor = |name: &str, dims: &[u64], kind| (format!("{name}.weight"), dims.to_vec(), kind);
    let norm = |name: &str| tensor(name, &[embedding], Norm);
    let mut list = Vec::new();
    list.extend(spec.has_pre_norms.then(|| norm("attn_norm")));
    list.extend(match shape.mixer(layer) {
        TokenMixer::Attention(attention) => {
            attention_tensors(shape, &attention, shape.kv_layer(layer) == layer)
        }
        TokenMixer::DeltaNet(net) => delta_net_tensors(shape, &net),
    });
    list.extend(spec.has_post_norms.then(|| norm("post_attention_norm")));
    list.extend(spec.has_pre_norms.then(|| norm(spec.feed_forward_norm)));
    list.extend(feed_forward_tensors(shape, layer));
    list.extend(spec.has_post_norms.then(|| norm("post_ffw_norm")));
    if shape.per_layer_input_length > 0 {
        let length = u64::from(shape.per_layer_input_length);
        list.push(tensor("inp_gate", &[embedding, length], Matrix));
        list.push(tensor("proj", &[length, embedding], Matrix));
        list.push(norm("post_norm"));
    }
    list.extend(spec.has_layer_scale.then(|| tensor("layer_output_scale", &[1], Scale)));
    list
}

/// Returns the matrices of a dense feed-forward block, or of a router, the experts and a shared block.
fn feed_forward_tensors(shape: &ModelShape, layer: u32) -> Vec<LayerTensor> {
    let embedding = u64::from(shape.embedding_length);
    let matrix = |name: &str, dims: &[u64]| (format!("{name}.weight"), dims.to_vec(), TensorKind::Matrix);
    let Some(experts) = shape.layer_experts(layer) else {
        let width = u64::from(shape.layer_feed_forward_length(layer));
        let down = matrix("ffn_down", &[width, embedding]);
        if shape.architecture.spec().has_fused_projections {
            return vec![matrix("ffn_up", &[embedding, 2 * width]), down];
        }
        return vec![matrix("ffn_gate", &[embedding, width]), matrix("ffn_up", &[embedding, width]), down];
    };
    let (count, width) = (u64::from(experts.count), u64::from(experts.feed_forward_length));
    let mut list = vec![
        matrix("ffn_gate_inp", &[embedding, count]),
        matrix("ffn_gate_exps", &[embedding, width, count]),
        matrix("ffn_up_exps", &[embedding, width, count]),
        matrix("ffn_down_exps", &[width, embedding, count]),
    ];
    if shape.architecture.spec().has_output_and_expert_biases {
        let bias = |name: &str, dims: &[u64]| (format!("{name}.bias"), dims.to_vec(), TensorKind::Bias);
        list.extend([
            bias("ffn_gate_inp", &[count]),
            bias("ffn_gate_exps", &[width, count]),
            bias("ffn_up_exps", &[width, count]),
            bias("ffn_down_exps", &[embedding, count]),
        ]);
    }
    let shared = u64::from(experts.shared_feed_forward_length);
    if shared > 0 {
        if shape.architecture.spec().has_shared_block_gate {
            list.push(matrix("ffn_gate_inp_shexp", &[embedding]));
        }
        list.extend([
            matrix("ffn_gate_shexp", &[embedding, shared]),
            matrix("ffn_up_shexp", &[embedding, shared]),
            matrix("ffn_down_shexp", &[shared, embedding]),
        ]);
    }
    list
}

/// Returns the tensors of attention; `has_keys` is whether the layer has keys and values of its own.
fn attention_tensors(shape: &ModelShape, attention: &AttentionShape, has_keys: bool) -> Vec<LayerTensor> {
    use TensorKind::{Bias, Matrix, Norm};
    let (spec, embedding) = (shape.architecture.spec(), u64::from(shape.embedding_length));
    let (query, key, value) = (attention.query_width(), attention.key_width(), attention.value_width());
    let tensor = |name: &str, dims: &[u64], kind| (name.to_owned(), dims.to_vec(), kind);
    let mut list = Vec::new();
    if spec.has_fused_projections {
        list.push(tensor("attn_qkv.weight", &[embedding, query + key + value], Matrix));
    } else {
        let query = if spec.has_attention_gate { 2 * query } else { query };
        list.push(tensor("attn_q.weight", &[embedding, query], Matrix));
        if has_keys {
            list.push(tensor("attn_k.weight", &[embedding, key], Matrix));
        }
        if has_keys && !attention.values_are_keys {
            list.push(tensor("attn_v.weight", &[embedding, value], Matrix));
        }
    }
    if spec.has_projection_biases {
        list.push(tensor("attn_q.bias", &[query], Bias));
        list.push(tensor("attn_k.bias", &[key], Bias));
        list.push(tensor("attn_v.bias", &[value], Bias));
    }
    if let Some([query_norm, key_norm]) = shape.query_key_norm_lengths(attention) {
        list.push(tensor("attn_q_norm.weight", &[query_norm], Norm));
        if has_keys {
            list.push(tensor("attn_k_norm.weight", &[key_norm], Norm));
        }
    }
    list.push(tensor("attn_output.weight", &[attention.output_width(), embedding], Matrix));
    if spec.has_output_and_expert_biases {
        list.push(tensor("attn_output.bias", &[embedding], Bias));
    }
    if spec.has_attention_sinks {
        list.push(tensor("attn_sinks.weight", &[u64::from(attention.heads)], Bias));
    }
    list
}

fn delta_net_tensors(shape: &ModelShape, net: &DeltaNetShape) -> Vec<LayerTensor> {
    use TensorKind::{Bias, Convolution, Decay, Matrix, Norm};
    let (embedding, heads, values) =
        (u64::from(shape.embedding_length), u64::from(net.value_heads), net.value_width());
    let tensor = |name: &str, dims: &[u64], kind| (name.to_owned(), dims.to_vec(), kind);
    vec![
        tensor("attn_qkv.weight", &[embedding, net.channels()], Matrix),
        tensor("attn_gate.weight", &[embedding, values], Matrix),
        tensor("ssm_conv1d.weight", &[u64::from(net.convolution_length), net.channels()], Convolution),
        tensor("ssm_dt.bias", &[heads], Bias),
        tensor("ssm_a", &[heads], Decay),
        tensor("ssm_beta.weight", &[embedding, heads], Matrix),
        tensor("ssm_alpha.weight", &[embedding, heads], Matrix),
        tensor("ssm_norm.weight", &[u64::from(net.head_length)], Norm),
        tensor("ssm_out.weight", &[values, embedding], Matrix),
    ]
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
        let hybrid = |architecture| {
            let shape = ModelShape { architecture, ..llama_8b() }.with_default_hybrid();
            tensor_specs(&shape).len() - 3
        };
        // 24 layers with a delta net, and 8 with attention and norms of Q and K.
        assert_eq!(hybrid(Architecture::Qwen35), 24 * 14 + 8 * 11);
        // 27 layers with a window, and 5 without values.
        assert_eq!(hybrid(Architecture::Gemma4), 27 * 14 + 5 * 13);
        assert_eq!(tensor_specs(&ModelShape { has_tied_embeddings: true, ..llama_8b() }).len(), 2 + 9 * 32);
    }
}
