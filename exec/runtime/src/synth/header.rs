//! The metadata, tensors and weight distributions of a synthetic model.
//!
//! The metadata keys and the order of tensors are those of llama.cpp's converters. The tensors of a shape come from
//! `hearth_profiles::model::layout`, so that a synthetic file and a `model/1` document of the same shape agree.

use hearth_profiles::Format;
use hearth_profiles::gguf::{Array, FileLayout, HeaderWriter, Value};
use hearth_profiles::model::Hybrid;
use hearth_profiles::model::architecture::RopeFactorTensors;
use hearth_profiles::model::{
    ArchitectureSpec, AttentionShape, ModelShape, TensorKind, TensorSpec, TokenMixer, layout,
};

use super::blocks::Distribution;
use super::{GAIN_RANGE, SynthError, SynthOptions};

/// The layout of a synthetic file and the weight distributions of its tensors.
pub(super) struct SynthPlan {
    pub layout: FileLayout,
    /// The distribution of the weights of each tensor, in the order of the layout.
    pub distributions: Vec<Distribution>,
}

pub(super) fn plan_file(options: &SynthOptions) -> Result<SynthPlan, SynthError> {
    let shape = &options.shape;
    shape.check()?;
    shape.check_runnable()?;
    for mixer in shape.mixers() {
        if let TokenMixer::Attention(AttentionShape { key_length: found, .. }) = mixer
            && !found.is_multiple_of(2)
        {
            return Err(SynthError::KeyLength { found });
        }
    }
    if !GAIN_RANGE.contains(&options.gain) {
        let (min, max) = (*GAIN_RANGE.start(), *GAIN_RANGE.end());
        return Err(SynthError::Gain { found: options.gain, min, max });
    }
    let spec = shape.architecture.spec();
    if spec.always_ties_embeddings && !shape.has_tied_embeddings {
        return Err(SynthError::Untied { architecture: shape.architecture.to_string() });
    }
    if options.add_rope_factors && spec.rope_factors.is_none() {
        return Err(SynthError::RopeFactors { architecture: shape.architecture.to_string() });
    }
    let mut writer = HeaderWriter::default();
    for (key, value) in keys(options)? {
        writer.add_key(&key, value)?;
    }
    let mut distributions = Vec::new();
    for tensor in layout::tensor_specs(shape) {
        let format = options.quant.tensor_format(&tensor, shape)?;
        writer.add_tensor(&tensor.name, &tensor.dims, format)?;
        distributions.push(distribution(&tensor, options.gain, spec));
        let names: &[&str] = match spec.rope_factors {
            Some(RopeFactorTensors::Single) => &["rope_freqs.weight"],
            Some(RopeFactorTensors::ShortAndLong) => {
                &["rope_factors_long.weight", "rope_factors_short.weight"]
            }
            None => &[],
        };
        for name in names {
            if options.add_rope_factors && tensor.name == "token_embd.weight" {
                let pairs = u64::from(shape.key_length / 2).max(1);
                writer.add_tensor(name, &[pairs], Format::F32)?;
                distributions.push(ROPE_FACTORS);
            }
        }
    }
    Ok(SynthPlan { layout: writer.finish(), distributions })
}

/// The distribution of the divisors of the rotary frequencies: positive and not all one, so that they have an effect.
/// source: assumed; the factors of Llama 3.1 are from 1 to 8
const ROPE_FACTORS: Distribution = Distribution { mean: 2.0, standard_deviation: 0.3 };

fn distribution(tensor: &TensorSpec, gain: f32, spec: &ArchitectureSpec) -> Distribution {
    let (mean, standard_deviation) = match tensor.kind {
        // Without norms before blocks, these weights alone determine how much a block changes the hidden state, whose
        // elements are of order 0.5. source: assumed, a change that is as small as in trained models
        TensorKind::Norm if !spec.has_pre_norms && tensor.name.contains(".post_") => {
            (0.25 * gain, 0.01 * gain)
        }
        // source: assumed; convolved values are about as large as the values
        TensorKind::Embedding | TensorKind::Convolution => (0.0, 0.5),
        TensorKind::Matrix => (0.0, gain / (tensor.dims[0] as f32).sqrt()),
        // Without a scale of attention scores, the norm of queries has the scale, as in trained models.
        TensorKind::Norm if spec.attention_scale.is_some() && tensor.name.ends_with("attn_q_norm.weight") => {
            (1.0 / (tensor.dims[0] as f32).sqrt(), 0.05 / (tensor.dims[0] as f32).sqrt())
        }
        TensorKind::Norm | TensorKind::Scale => (1.0, 0.05),
        TensorKind::Bias => (0.0, 0.02),
        // source: assumed; a token keeps three quarters of the state
        TensorKind::Decay => (-0.4, 0.1),
    };
    Distribution { mean, standard_deviation }
}

fn keys(options: &SynthOptions) -> Result<Vec<(String, Value)>, SynthError> {
    let shape = &options.shape;
    let architecture = shape.architecture.name();
    let mut keys = vec![
        ("general.architecture".to_owned(), Value::Str(architecture.to_owned())),
        ("general.name".to_owned(), Value::Str(options.name.clone())),
    ];
    let mut add = |key: &str, value| keys.push((format!("{architecture}.{key}"), value));
    add("context_length", Value::U32(shape.context_length));
    add("embedding_length", Value::U32(shape.embedding_length));
    add("block_count", Value::U32(shape.layers.0));
    if let Some(shared) = shape.shared_kv {
        let widths = (0..shape.layers.0).map(|layer| shape.layer_feed_forward_length(layer) as i32).collect();
        add("feed_forward_length", Value::Array(Array::I32(widths)));
        add("attention.shared_kv_layers", Value::U32(shared.layers));
    } else {
        add("feed_forward_length", Value::U32(shape.feed_forward_length));
    }
    if let Some(experts) = shape.experts {
        add("expert_count", Value::U32(experts.count));
        add("expert_used_count", Value::U32(experts.used));
        add("expert_feed_forward_length", Value::U32(experts.feed_forward_length));
        if experts.shared_feed_forward_length > 0 {
            add("expert_shared_feed_forward_length", Value::U32(experts.shared_feed_forward_length));
        }
        if experts.dense_layers > 0 {
            add("leading_dense_block_count", Value::U32(experts.dense_layers));
        }
    }
    add("attention.head_count", Value::U32(shape.heads));
    if shape.hybrid.is_none() {
        add("attention.head_count_kv", Value::U32(shape.kv_heads));
    }
    add("attention.key_length", Value::U32(shape.key_length));
    add("attention.value_length", Value::U32(shape.value_length));
    add("attention.layer_norm_rms_epsilon", Value::F32(1e-5));
    if shape.is_recurrent() {
        // source: Qwen 3.5, a quarter of the dimensions in three sections
        let pairs = (shape.key_length / 8).max(1);
        let sections = [pairs.div_ceil(3), pairs.div_ceil(3).min(pairs / 2), 0];
        let last = pairs - sections[0] - sections[1];
        add("rope.dimension_count", Value::U32(2 * pairs));
        let sections = [sections[0], sections[1], last, 0].map(|section| section as i32).to_vec();
        add("rope.dimension_sections", Value::Array(Array::I32(sections)));
    } else {
        add("rope.dimension_count", Value::U32(shape.key_length));
    }
    add("rope.freq_base", Value::F32(options.rope_base));
    add("vocab_size", Value::U32(shape.vocab_size));
    let spec = shape.architecture.spec();
    if let Some(caps) = spec.soft_caps {
        let caps = [
            ("attn_logit_softcapping", caps.default_attention),
            ("final_logit_softcapping", caps.default_logits),
        ];
        for (key, cap) in caps {
            if let Some(cap) = cap {
                add(key, Value::F32(cap));
            }
        }
    }
    if spec.has_scale_factors {
        // source: assumed, of the order of those of Granite 3
        add("embedding_scale", Value::F32(4.0));
        add("residual_scale", Value::F32(0.5));
        add("attention.scale", Value::F32(0.1));
        add("logit_scale", Value::F32(2.0));
    }
    if spec.rope_factors == Some(RopeFactorTensors::ShortAndLong) && options.add_rope_factors {
        add("rope.scaling.original_context_length", Value::U32((shape.context_length / 2).max(1)));
        add("rope.scaling.attn_factor", Value::F32(1.1));
    }
    if let Some(hybrid) = shape.hybrid {
        add_hybrid_keys(shape, hybrid, &mut add);
    }
    if spec.sliding_window.is_some() {
        // The window of Gemma 2 is half of its context, and those of other models are shorter.
        add("attention.sliding_window", Value::U32((shape.context_length / 2).max(1)));
    }
    if let Some(number) = options.quant.file_type() {
        keys.push(("general.file_type".to_owned(), Value::U32(number)));
    }
    keys.push(("general.quantization_version".to_owned(), Value::U32(2)));
    let tokenizer = options.tokenizer.metadata_keys(shape.vocab_size, shape.architecture)?;
    keys.extend(tokenizer.into_iter().map(|(key, value)| (key.to_owned(), value)));
    Ok(keys)
}

/// Adds the keys of a model whose layers do not all have full attention.
fn add_hybrid_keys(shape: &ModelShape, hybrid: Hybrid, add: &mut impl FnMut(&str, Value)) {
    let is_full = |layer: u32| shape.has_full_attention(layer);
    match hybrid.other {
        TokenMixer::DeltaNet(net) => {
            add("attention.head_count_kv", Value::U32(shape.kv_heads));
            add("full_attention_interval", Value::U32(hybrid.full_attention_interval));
            add("ssm.conv_kernel", Value::U32(net.convolution_length));
            add("ssm.state_size", Value::U32(net.head_length));
            add("ssm.group_count", Value::U32(net.key_heads));
            add("ssm.time_step_rank", Value::U32(net.value_heads));
            add("ssm.inner_size", Value::U32(net.value_heads * net.head_length));
        }
        TokenMixer::Attention(local) => {
            let layers = 0..shape.layers.0;
            let kv_heads =
                layers.clone().map(|layer| if is_full(layer) { shape.kv_heads } else { local.kv_heads });
            let kv_heads = kv_heads.map(|heads| heads as i32).collect();
            add("attention.head_count_kv", Value::Array(Array::I32(kv_heads)));
            add("attention.key_length_swa", Value::U32(local.key_length));
            add("attention.value_length_swa", Value::U32(local.value_length));
            add("rope.dimension_count_swa", Value::U32(local.key_length));
            add("rope.freq_base_swa", Value::F32(10_000.0));
            let is_local = layers.map(|layer| !is_full(layer)).collect();
            add("attention.sliding_window_pattern", Value::Array(Array::Bool(is_local)));
            add("embedding_length_per_layer_input", Value::U32(shape.per_layer_input_length));
        }
    }
}
