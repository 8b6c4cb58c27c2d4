//! The activations of a pass besides the hidden states.
//!
//! Most models have none. In Gemma 4 E2B and E4B, each token has an input for each layer, which the head
//! device computes from the token, and layers at the end use the keys and values of two earlier layers, which may be on
//! another device. Devices send these values to each other with the hidden states. The activations of a pass are
//!
//! ```text
//! hidden states    [tokens, embedding]
//! per-layer inputs [layers, tokens, per-layer input]
//! keys, values     [tokens, key width], [tokens, value width], for each layer whose keys and values others use
//! ```

use std::collections::BTreeMap;
use std::ops::Range;

use hearth_profiles::model::{ModelShape, TokenMixer};
use hearth_schema::pass::Pass;

use crate::cache::LayerCache;

/// The activations of a pass except the hidden states.
pub(crate) struct TokenInputs<'a> {
    tokens: usize,
    per_layer_input: usize,
    per_layer_inputs: &'a mut [f32],
    shared: Vec<SharedRows<'a>>,
}

/// The keys and values of one layer for the tokens of a pass.
struct SharedRows<'a> {
    layer: u32,
    keys: &'a mut [f32],
    values: &'a mut [f32],
}

impl<'a> TokenInputs<'a> {
    /// Splits the activations of some tokens into hidden states, `[tokens, embedding]`, and everything else. The length
    /// must be a multiple of [`ModelShape::activation_length`].
    pub(crate) fn split(shape: &ModelShape, activations: &'a mut [f32]) -> (&'a mut [f32], TokenInputs<'a>) {
        let tokens = activations.len() / shape.activation_length() as usize;
        let per_layer_input = shape.per_layer_input_length as usize;
        let (hidden, rest) = activations.split_at_mut(tokens * shape.embedding_length as usize);
        let (per_layer_inputs, mut rest) =
            rest.split_at_mut(tokens * shape.layers.0 as usize * per_layer_input);
        let mut take = |width: u64| {
            let (rows, after) = std::mem::take(&mut rest).split_at_mut(tokens * width as usize);
            rest = after;
            rows
        };
        let mut shared = Vec::new();
        for (layer, [key_width, value_width]) in shared_widths(shape) {
            let (keys, values) = (take(key_width), take(value_width));
            shared.push(SharedRows { layer, keys, values });
        }
        (hidden, TokenInputs { tokens, per_layer_input, per_layer_inputs, shared })
    }

    /// Returns the inputs of a layer for a range of tokens of the pass, `[tokens, per-layer input]`.
    pub(crate) fn per_layer_input(&self, layer: u32, tokens: Range<usize>) -> &[f32] {
        let first = (layer as usize * self.tokens + tokens.start) * self.per_layer_input;
        &self.per_layer_inputs[first..][..tokens.len() * self.per_layer_input]
    }

    /// Returns the per-layer inputs of all layers, `[layers, tokens, per-layer input]`.
    pub(crate) fn per_layer_inputs_mut(&mut self) -> &mut [f32] {
        self.per_layer_inputs
    }

    /// Stores the keys and values, `[tokens, width]`, of a layer from the token `first` of the pass on, if other layers
    /// use them.
    pub(crate) fn store_keys_and_values(&mut self, layer: u32, first: usize, keys: &[f32], values: &[f32]) {
        if let Some(shared) = self.shared.iter_mut().find(|shared| shared.layer == layer) {
            for (rows, new) in [(&mut *shared.keys, keys), (&mut *shared.values, values)] {
                let width = rows.len() / self.tokens;
                rows[first * width..][..new.len()].copy_from_slice(new);
            }
        }
    }

    /// Writes the keys and values that some of `layers` use, and that are of layers of other devices (`copied`), to the
    /// caches of the sequences of `passes`.
    pub(crate) fn copy_to_caches(
        &self,
        shape: &ModelShape,
        copied: &[u32],
        layers: &Range<u32>,
        caches: &mut BTreeMap<(u32, u32), LayerCache>,
        passes: &[Pass],
    ) {
        let is_used = |source: u32| layers.clone().any(|layer| shape.kv_layer(layer) == source);
        for shared in &self.shared {
            if !copied.contains(&shared.layer) || !is_used(shared.layer) {
                continue;
            }
            let widths = [shared.keys.len(), shared.values.len()].map(|length| length / self.tokens.max(1));
            let mut rows =
                shared.keys.chunks_exact(widths[0].max(1)).zip(shared.values.chunks_exact(widths[1].max(1)));
            for pass in passes {
                let own = rows.by_ref().take(pass.tokens as usize);
                let cache = caches.get_mut(&(pass.sequence_index, shared.layer));
                let Some(LayerCache::Attention(cache)) = cache else { continue };
                for (position, (keys, values)) in (pass.first_position as usize..).zip(own) {
                    cache.write(position, keys, values);
                }
            }
        }
    }
}

/// Returns the layers whose keys and values others use, each with the widths of its keys and values.
fn shared_widths(shape: &ModelShape) -> impl Iterator<Item = (u32, [u64; 2])> {
    shape.shared_kv_layers().into_iter().filter_map(|layer| match shape.mixer(layer) {
        TokenMixer::Attention(attention) => Some((layer, [attention.key_width(), attention.value_width()])),
        TokenMixer::DeltaNet(_) => None,
    })
}

/// Calls `compute` for each pass with its activations alone, which the layout of the module's description has for the
/// tokens of the pass. For backends that compute one sequence at a time.
pub fn for_each_pass(
    shape: &ModelShape,
    activations: &mut [f32],
    passes: &[Pass],
    mut compute: impl FnMut(Pass, &mut [f32]),
) {
    if let [pass] = passes {
        return compute(*pass, activations);
    }
    let tokens: usize = passes.iter().map(|pass| pass.tokens as usize).sum();
    let inputs = (0..shape.layers.0).map(|_| shape.per_layer_input_length as usize);
    let shared = shared_widths(shape).flat_map(|(_, widths)| widths).map(|width| width as usize);
    let widths: Vec<usize> =
        std::iter::once(shape.embedding_length as usize).chain(inputs).chain(shared).collect();
    let mut before = 0;
    for pass in passes {
        let own = pass.tokens as usize;
        let mut first = 0;
        let sections = widths.iter().map(|width| {
            let rows = first + before * width..first + (before + own) * width;
            first += tokens * width;
            rows
        });
        let sections: Vec<Range<usize>> = sections.collect();
        let mut rows: Vec<f32> =
            sections.iter().flat_map(|section| activations[section.clone()].iter().copied()).collect();
        compute(*pass, &mut rows);
        let mut rest = &rows[..];
        for section in sections {
            let (new, after) = rest.split_at(section.len());
            activations[section].copy_from_slice(new);
            rest = after;
        }
        before += own;
    }
}
