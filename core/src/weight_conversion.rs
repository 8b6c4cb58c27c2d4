//! The size of a model whose matrices are converted to another weight format.
//!
//! Systems that do not compute in the format of the model file convert weights when they load them: dllama stores 32
//! weights in 18 bytes, exo on Linux uses two bytes per weight on a CPU and four on a GPU (prima.cpp paper, appendix
//! A.8). The number of weights follows from the bytes and their format. Norms stay in f32; they are small. The time of
//! the conversion is not counted, because it happens once.

use hearth_profiles::model::{FormatTotals, ModelProfile, TensorGroup};
use hearth_profiles::{Bytes, Flops, Format};

/// Whether the tensors of format `format` in a group are matrices. With several formats, f32 tensors are norms.
pub fn is_matrix_format(group: &TensorGroup, format: Format) -> bool {
    format != Format::F32 || group.totals_by_format().count() == 1
}

/// Returns the tensor group with its matrices converted to `format`, or an unchanged copy if `format` is `None`.
pub fn converted_group(group: &TensorGroup, format: Option<Format>) -> TensorGroup {
    let Some(to) = format else { return group.clone() };
    let mut result = TensorGroup::default();
    let elements = |bytes: Bytes, from: Format| {
        u128::from(bytes.0) * u128::from(from.block_len()) / u128::from(from.block_bytes())
    };
    let (mut weights, mut of_experts, mut flops) = (0, 0, Flops(0.0));
    for (from, share) in group.totals_by_format() {
        if is_matrix_format(group, from) {
            weights += elements(share.bytes, from);
            of_experts += elements(share.expert_bytes, from);
            flops = Flops(flops.0 + share.flops.0);
        } else {
            result.add_totals(from, share);
        }
    }
    let converted = |weights: u128| {
        Bytes((weights.div_ceil(u128::from(to.block_len())) * u128::from(to.block_bytes())) as u64)
    };
    if weights > 0 {
        let (bytes, expert_bytes) = (converted(weights), converted(of_experts));
        result.add_totals(to, FormatTotals { bytes, expert_bytes, flops });
    }
    result
}

/// Returns the model with the matrices of each layer converted to the format that `layer_format` returns for the index
/// of the layer. Converts the embedding and the output matrix to `embedding_format`. `None` means no conversion.
pub fn converted_model(
    model: &ModelProfile,
    embedding_format: Option<Format>,
    layer_format: impl Fn(u32) -> Option<Format>,
) -> ModelProfile {
    let converted_layer = |(layer, group)| converted_group(group, layer_format(layer));
    let layers = (0..).zip(&model.layers).map(converted_layer).collect();
    let [input_embedding, output_head] =
        [&model.input_embedding, &model.output_head].map(|group| converted_group(group, embedding_format));
    ModelProfile { layers, input_embedding, output_head, ..model.clone() }
}

#[cfg(test)]
mod tests {
    use hearth_profiles::model::shipped_profile;

    use super::*;

    #[test]
    fn a_layer_of_llama_8b_in_other_formats() {
        let model = shipped_profile("llama-8b").expect("shipped");
        // 218 103 808 weights in matrices, and two norms of 4096 elements of 4 bytes.
        let bytes = |format| converted_group(&model.layers[0], Some(format)).bytes();
        assert_eq!(bytes(Format::Q4_0), Bytes(218_103_808 / 32 * 18 + 32_768));
        assert_eq!(bytes(Format::F16), Bytes(2 * 218_103_808 + 32_768));
        // All tensors then have one format, so the norms are counted as weights.
        assert_eq!(bytes(Format::F32), Bytes(4 * 218_103_808 + 32_768));
        assert_eq!(converted_group(&model.layers[0], None), model.layers[0]);
        assert_eq!(converted_group(&model.layers[0], Some(Format::F16)).flops(), model.layers[0].flops());
    }

    #[test]
    fn experts_are_converted_with_their_layer() {
        let model = shipped_profile("qwen3-30b-a3b").expect("shipped");
        let converted = converted_group(&model.layers[0], Some(Format::F16));
        // 128 experts of three matrices of 2048 by 768; and q and o of 2048 by 4096, k and v of 2048 by 512. The router
        // of 2048 by 128 stays in f32, as norms do.
        let of_experts = 2 * 128 * 3 * 2048 * 768;
        assert_eq!(converted.expert_bytes(), Bytes(of_experts));
        let others = 2 * 2 * 2048 * (4096 + 512) + 4 * (2048 * 128 + 2 * 2048 + 2 * 128);
        assert_eq!(converted.bytes(), Bytes(of_experts + others));
    }

    #[test]
    fn each_layer_may_have_its_own_format() {
        let model = shipped_profile("llama-8b").expect("shipped");
        let mixed = converted_model(&model, Some(Format::F16), |layer| (layer < 2).then_some(Format::F32));
        assert_eq!(mixed.layer_bytes(2), model.layer_bytes(2));
        assert_eq!(mixed.layer_bytes(1), Bytes(4 * 218_103_808 + 32_768));
        assert_eq!(mixed.output_head_bytes(), Bytes(2 * 128_256 * 4096 + 16_384));
        assert_eq!(mixed.shape_digest(), model.shape_digest());
    }
}
