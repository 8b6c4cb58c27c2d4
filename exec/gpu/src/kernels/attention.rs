//! The attention kernel, which reads keys and values from a cache with the layouts of weights.
//!
//! `softmax(cap(scale * q K^T)) V` over the positions that a token attends to. ML Drift paper, section 3.8: keys have
//! the layout of a weight matrix with one output per position, and values that of a weight matrix with one input per
//! position. Scores are never written to memory: a workgroup computes one query head of one token, processes the
//! positions in tiles, and updates the maximum and the sum of the softmax after each tile (online softmax, Milakov and
//! Gimelshein 2018).
//!
//! Deviation: the paper measures without this fusion of attention; here the fusion saves the memory of the scores.

use std::fmt::Write;

use super::Declarations;
use super::rope::AttentionShape;
use crate::virtual_tensor::{AccessMode, Accessor, ShapeError, Storage};

/// Number of positions in a tile, and number of threads in a workgroup.
const TILE: u32 = 64;

/// The attention kernel of a layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionKernel {
    pub shape: AttentionShape,
    /// The factor of the dot products of queries and keys.
    pub scale: f32,
    /// The soft cap of the scores; `None` if the model has no soft cap.
    pub soft_cap: Option<f32>,
    /// Size of the sliding window in positions, including the token itself; `None` for full attention.
    pub sliding_window: Option<u32>,
    /// The layout of the output tensor.
    pub output_storage: Storage,
}

impl AttentionKernel {
    /// Generates the WGSL source. Bindings: parameters, queries, keys, values, output [tokens, heads * value_length].
    pub fn wgsl_source(&self) -> Result<String, ShapeError> {
        let heads = &self.shape;
        let (slices, width) = (heads.key_length / 4, heads.heads * heads.value_length);
        let queries = heads.query_accessor(AccessMode::Read);
        let out = Accessor::for_rows("out", self.output_storage, width, AccessMode::Write);
        let mut kernel = Declarations::new(false);
        let _ = writeln!(kernel.text, "const QUERY_GROUP: u32 = {}u;", heads.queries_per_kv_head());
        kernel.declare_tensor(&queries);
        heads.declare_cache(&mut kernel, "k", &heads.key_cache_shape()?, AccessMode::Read);
        heads.declare_cache(&mut kernel, "v", &heads.value_cache_shape()?, AccessMode::Read);
        kernel.declare_tensor(&out);
        let _ = write!(
            kernel.text,
            "var<workgroup> query: array<vec4<f32>, {slices}>;\n\
             var<workgroup> scores: array<f32, {TILE}>;\nvar<workgroup> powers: array<f32, {TILE}>;\n\
             var<workgroup> result: array<f32, {}>;\n\
             fn four_powers(i: u32) -> vec4<f32> {{\n    \
             return vec4<f32>(powers[4u * i], powers[4u * i + 1u], powers[4u * i + 2u], powers[4u * i + 3u]);\n}}\n",
            heads.value_length,
        );
        Ok(kernel.text + &self.main())
    }

    /// Returns the number of workgroups in the directions x, y and z for `tokens` tokens.
    pub fn workgroup_count(&self, tokens: u32) -> [u32; 3] {
        [tokens * self.shape.queries_per_kv_head(), self.shape.kv_heads, 1]
    }

    fn main(&self) -> String {
        let heads = &self.shape;
        let (slices, value_slices) = (heads.key_length / 4, heads.value_length / 4);
        let (scale, group) = (self.scale, heads.queries_per_kv_head());
        let dimensions = heads.value_length.div_ceil(TILE);
        let first_seen = |window| format!("max(position + 1u, {window}u) - {window}u");
        let seen = self.sliding_window.map_or("0u".to_owned(), first_seen);
        let cap = self.soft_cap.map_or(String::new(), |cap| {
            // tanh is one beyond 10 in f32.
            format!("            score = {cap:e} * tanh(clamp(score / {cap:e}, -10.0, 10.0));\n")
        });
        format!(
            "@compute @workgroup_size({TILE})\n\
             fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {{\n    \
             let kv = group.y;\n    let token = group.x / {group}u;\n    let position = params.first_position + token;\n    \
             let seen = {seen};\n    \
             for (var s = lane; s < {slices}u; s += {TILE}u) {{ query[s] = q_read(kv, group.x, 0u, s); }}\n    \
             var largest = -3e38;\n    var sum = 0.0;\n    var acc: array<f32, {dimensions}>;\n    \
             for (var d = 0u; d < {dimensions}u; d++) {{ acc[d] = 0.0; }}\n    workgroupBarrier();\n    \
             for (var tile = seen / {TILE}u * {TILE}u; tile <= position; tile += {TILE}u) {{\n        \
             let at = tile + lane;\n        var score = -3e38;\n        \
             if (at >= seen && at <= position) {{\n            var products = 0.0;\n            \
             for (var s = 0u; s < {slices}u; s++) {{ products += dot(query[s], k_load(kv, at, s)); }}\n            \
             score = products * {scale:e};\n{cap}        }}\n        \
             scores[lane] = score;\n        workgroupBarrier();\n        var next = largest;\n        \
             for (var i = 0u; i < {TILE}u; i++) {{ next = max(next, scores[i]); }}\n        \
             let power = select(exp(score - next), 0.0, score <= -3e38);\n        \
             powers[lane] = power;\n        let kept = exp(largest - next);\n        \
             workgroupBarrier();\n        largest = next;\n        sum *= kept;\n        \
             for (var i = 0u; i < {tile_slices}u; i++) {{ sum += dot(four_powers(i), vec4<f32>(1.0)); }}\n        \
             for (var d = 0u; d < {dimensions}u; d++) {{\n            let dimension = d * {TILE}u + lane;\n            \
             if (dimension >= {length}u) {{ break; }}\n            var mixed = acc[d] * kept;\n            \
             let last = min(position / 4u - tile / 4u, {last_slice}u);\n            \
             for (var i = 0u; i <= last; i++) {{ mixed += dot(four_powers(i), v_load(kv, dimension, tile / 4u + i)); }}\n            \
             acc[d] = mixed;\n        }}\n        workgroupBarrier();\n    }}\n    \
             for (var d = 0u; d < {dimensions}u; d++) {{\n        let dimension = d * {TILE}u + lane;\n        \
             if (dimension < {length}u) {{ result[dimension] = acc[d] / sum; }}\n    }}\n    workgroupBarrier();\n    \
             let head = kv * {group}u + group.x % {group}u;\n    \
             for (var s = lane; s < {value_slices}u; s += {TILE}u) {{\n        \
             let texel = vec4<f32>(result[4u * s], result[4u * s + 1u], result[4u * s + 2u], result[4u * s + 3u]);\n        \
             out_write(0u, token, 0u, head * {value_slices}u + s, texel);\n    }}\n}}\n",
            tile_slices = TILE / 4,
            last_slice = TILE / 4 - 1,
            length = heads.value_length,
        )
    }
}

#[cfg(test)]
mod tests {
    use hearth_runtime::KvFormat;

    use super::*;
    use crate::virtual_tensor::WeightOrder;

    #[test]
    fn workgroup_vectors_are_written_as_a_whole() {
        let shape = AttentionShape {
            heads: 8,
            kv_heads: 2,
            key_length: 64,
            value_length: 64,
            context_length: 256,
            format: KvFormat::F16,
            cache_order: WeightOrder::Interleaved,
        };
        let (soft_cap, sliding_window, output_storage) = (None, None, Storage::Linear);
        let kernel = AttentionKernel { shape, scale: 0.1, soft_cap, sliding_window, output_storage };
        let text = kernel.wgsl_source().unwrap();
        // Threads that write different components of one vector race: WGSL, "Memory Locations" and "Data Races".
        let shared = text.lines().filter_map(|line| line.strip_prefix("var<workgroup> "));
        let vectors: Vec<&str> = shared
            .filter(|line| line.contains("array<vec"))
            .filter_map(|line| line.split_once(':').map(|(name, _)| name))
            .collect();
        assert_eq!(vectors, ["query"]);
        let writes = |line: &&str| line.contains("query[") && line.contains("] =");
        for line in text.lines().filter(writes) {
            assert!(line.contains("query[s] = q_read("), "{line}");
        }
    }
}
