//! The kernel that applies the rotary embedding to queries and keys, and writes keys and values to the cache.
//!
//! ML Drift paper, sections 3.6 and 3.8. The kernel applies the norms of heads if the architecture has them, then the
//! rotary embedding, and changes the layouts. With h_q query heads and h_kv key heads of d_h elements, queries change
//! from (1, tokens, h_q * d_h) to (h_kv, tokens * h_q / h_kv, d_h). The cache stores keys as weights OHWI with
//! O = cache size and I = d_h, and values as weights with O = d_h and I = cache size.
//!
//! For queries and keys, a workgroup processes one head of one token. For values, it processes one head of four
//! neighbouring positions, because these positions share texels of the cache, and one thread must write a whole texel.
//! The components of a texel after the end of the sequence are set to zero.

use std::fmt::Write;

use hearth_profiles::model::PairLayout;
use hearth_runtime::KvFormat;

use super::{Declarations, group_sum, lane_arguments};
use crate::device::Capabilities;
use crate::virtual_tensor::{
    AccessMode, Accessor, AxisExtent, ShapeError, Storage, WeightOrder, WeightShape,
};

const THREADS: u32 = 32;
/// Message for a KV cache in a format that `GpuLayers::new` rejects.
const UNSUPPORTED: &str = "there is no GPU kernel for a KV cache in this format";

/// The dimensions of attention in a layer, and the format and layout of its KV cache.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionShape {
    /// Number of query heads.
    pub heads: u32,
    /// Number of key heads, which equals the number of value heads.
    pub kv_heads: u32,
    /// Number of elements in a query head or key head.
    pub key_length: u32,
    /// Number of elements in a value head.
    pub value_length: u32,
    /// Number of positions in the KV cache.
    pub context_length: u32,
    pub format: KvFormat,
    /// The weight layout in which the cache stores keys and values.
    pub cache_order: WeightOrder,
}

impl AttentionShape {
    /// Returns the number of query heads that share a key head.
    pub fn queries_per_kv_head(&self) -> u32 {
        self.heads / self.kv_heads
    }

    /// Returns the shape of the key cache of one head, as the shape of a weight matrix.
    pub fn key_cache_shape(&self) -> Result<WeightShape, ShapeError> {
        WeightShape::new(self.context_length, self.key_length, 1)
    }

    /// Returns the shape of the value cache of one head, as the shape of a weight matrix.
    pub fn value_cache_shape(&self) -> Result<WeightShape, ShapeError> {
        WeightShape::new(self.value_length, self.context_length, 1)
    }

    /// Returns the size in bytes of the key cache of one sequence, and that of the value cache.
    pub fn kv_cache_bytes(&self) -> Result<[u64; 2], ShapeError> {
        let texel_bytes = match self.format {
            KvFormat::F16 => 8,
            KvFormat::F32 => 16,
            format => panic!("{UNSUPPORTED}: {format:?}"),
        };
        let bytes = |shape: WeightShape| {
            let texels = shape.element_count() / 4;
            // Kernels index the texels of all heads with 32 bits.
            let Some(texels) = texels.checked_mul(self.kv_heads) else {
                let AttentionShape { kv_heads, context_length: context, .. } = self;
                let shape = format!("the KV cache of {kv_heads} heads and {context} positions");
                return Err(ShapeError::TooLarge { shape });
            };
            Ok(u64::from(texels) * texel_bytes)
        };
        Ok([bytes(self.key_cache_shape()?)?, bytes(self.value_cache_shape()?)?])
    }

    /// Returns the accessor of the queries in the layout that the attention kernel reads.
    pub(crate) fn query_accessor(&self, mode: AccessMode) -> Accessor {
        // A key head has one row for each token and query head that shares it.
        let rows = AxisExtent::Expression("params.tokens * QUERY_GROUP");
        let extents = [AxisExtent::Fixed(self.kv_heads), AxisExtent::Fixed(1), rows];
        let slices = AxisExtent::Fixed(self.key_length / 4);
        Accessor { name: "q", storage: Storage::Linear, extents, slices, mode }
    }

    /// Declares a key cache or value cache of the given shape in WGSL, the function `NAME_load` and, unless `mode` is
    /// `Read`, the function `NAME_store`. The functions access the texel of one output and one slice of inputs.
    pub(crate) fn declare_cache(
        &self,
        kernel: &mut Declarations,
        name: &str,
        shape: &WeightShape,
        mode: AccessMode,
    ) {
        let access = if mode == AccessMode::Read { "read" } else { "read_write" };
        let texels = shape.element_count() / 4;
        let place = shape.texel_index_wgsl(self.cache_order, "output", "input");
        let (kind, load, store) = match self.format {
            KvFormat::F16 => (
                "vec2<u32>",
                "vec4<f32>(unpack2x16float(texel.x), unpack2x16float(texel.y))",
                "vec2<u32>(pack2x16float(value.xy), pack2x16float(value.zw))",
            ),
            KvFormat::F32 => ("vec4<f32>", "texel", "value"),
            format => panic!("{UNSUPPORTED}: {format:?}"),
        };
        kernel.declare_buffer(access, &format!("{name}_object"), kind);
        let _ = write!(
            kernel.text,
            "fn {name}_load(head: u32, output: u32, input: u32) -> vec4<f32> {{\n    \
             let texel = {name}_object[head * {texels}u + {place}];\n    return {load};\n}}\n"
        );
        if mode != AccessMode::Read {
            let _ = write!(
                kernel.text,
                "fn {name}_store(head: u32, output: u32, input: u32, value: vec4<f32>) {{\n    \
                 {name}_object[head * {texels}u + {place}] = {store};\n}}\n"
            );
        }
    }
}

/// The kernel that rotates the queries and keys of a layer and writes keys and values to the cache.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RopeKernel {
    pub shape: AttentionShape,
    /// The pairs of dimensions of a head that are rotated together.
    pub pair_layout: PairLayout,
    /// Number of rotated pairs in a head.
    pub pair_count: u32,
    /// The layout of the input tensors: queries, keys and values.
    pub input_storage: Storage,
    /// The epsilon of the norms of query heads and key heads; `None` if the model does not have these norms.
    pub norm_epsilon: Option<f32>,
    pub capabilities: Capabilities,
}

impl RopeKernel {
    /// Generates the WGSL source of the kernel. The bindings after the parameters are: the projected queries, keys and
    /// values; angles [tokens, pairs] as cosine and sine; rotated queries; key cache; value cache; and the norm weights
    /// of query heads and key heads, if the model has these norms.
    pub fn wgsl_source(&self) -> Result<String, ShapeError> {
        let heads = &self.shape;
        let inputs = [
            ("query", heads.heads * heads.key_length),
            ("key", heads.kv_heads * heads.key_length),
            ("value", heads.kv_heads * heads.value_length),
        ]
        .map(|(name, width)| Accessor::for_rows(name, self.input_storage, width, AccessMode::Read));
        let queries = heads.query_accessor(AccessMode::Write);
        let mut kernel = Declarations::new(self.capabilities.shader_f16);
        let _ = writeln!(kernel.text, "const QUERY_GROUP: u32 = {}u;", heads.queries_per_kv_head());
        for input in &inputs {
            kernel.declare_tensor(input);
        }
        kernel.declare_buffer("read", "angles", "vec2<f32>");
        kernel.declare_tensor(&queries);
        heads.declare_cache(&mut kernel, "k", &heads.key_cache_shape()?, AccessMode::ReadWrite);
        heads.declare_cache(&mut kernel, "v", &heads.value_cache_shape()?, AccessMode::ReadWrite);
        if self.norm_epsilon.is_some() {
            kernel.declare_buffer("read", "query_weight", "f32");
            kernel.declare_buffer("read", "key_weight", "f32");
            kernel.text += &group_sum(self.capabilities, THREADS);
        }
        let _ = writeln!(kernel.text, "var<workgroup> head: array<f32, {}>;", heads.key_length);
        Ok(kernel.text + &self.rotation() + &self.main())
    }

    /// Returns the number of workgroups in the directions x, y and z for `tokens` tokens.
    pub fn workgroup_count(&self, tokens: u32) -> [u32; 3] {
        [self.shape.heads + 2 * self.shape.kv_heads, tokens, 1]
    }

    /// Generates the WGSL function `finish_head`, which normalises and rotates the head in workgroup memory, and the
    /// functions that copy texels to and from workgroup memory.
    fn rotation(&self) -> String {
        let (length, pairs) = (self.shape.key_length, self.pair_count);
        let mut text = String::from(
            "fn finish_head(token: u32, of_query: bool, lane: u32, sublane: u32) {\n    workgroupBarrier();\n",
        );
        if let Some(epsilon) = self.norm_epsilon {
            let _ = write!(
                text,
                "    var squares = 0.0;\n    \
                 for (var i = lane; i < {length}u; i += {THREADS}u) {{ squares += head[i] * head[i]; }}\n    \
                 let scale = 1.0 / sqrt(group_sum(squares, lane, sublane) / {length}.0 + {epsilon:e});\n    \
                 for (var i = lane; i < {length}u; i += {THREADS}u) {{\n        \
                 let weight = select(key_weight[i], query_weight[i], of_query);\n        \
                 head[i] = head[i] * scale * weight;\n    }}\n    workgroupBarrier();\n"
            );
        }
        let (one, other) = match self.pair_layout {
            PairLayout::Interleaved => ("2u * i".to_owned(), "2u * i + 1u".to_owned()),
            PairLayout::Halves => ("i".to_owned(), format!("i + {pairs}u")),
        };
        let _ = write!(
            text,
            "    for (var i = lane; i < {pairs}u; i += {THREADS}u) {{\n        \
             let turn = angles[token * {pairs}u + i];\n        \
             let x = head[{one}];\n        let y = head[{other}];\n        \
             head[{one}] = fma(x, turn.x, -(y * turn.y));\n        head[{other}] = fma(x, turn.y, y * turn.x);\n    }}\n    \
             workgroupBarrier();\n}}\n"
        );
        text + "fn head_texel(s: u32) -> vec4<f32> {\n    \
             return vec4<f32>(head[4u * s], head[4u * s + 1u], head[4u * s + 2u], head[4u * s + 3u]);\n}\n\
             fn keep(s: u32, texel: vec4<f32>) {\n    head[4u * s] = texel.x;\n    head[4u * s + 1u] = texel.y;\n    \
             head[4u * s + 2u] = texel.z;\n    head[4u * s + 3u] = texel.w;\n}\n"
    }

    fn main(&self) -> String {
        let AttentionShape { heads, kv_heads, key_length, value_length, .. } = self.shape;
        let (slices, value_slices) = (key_length / 4, value_length / 4);
        let (arguments, sublane) = lane_arguments(self.capabilities);
        let lanes = |slices: u32| format!("for (var s = lane; s < {slices}u; s += {THREADS}u)");
        let (each, each_value) = (lanes(slices), lanes(value_slices));
        format!(
            "@compute @workgroup_size({THREADS})\n\
             fn main(@builtin(workgroup_id) group: vec3<u32>, {arguments}) {{\n{sublane}    \
             let position = params.first_position + group.y;\n    \
             if (group.x < {heads}u) {{\n        \
             {each} {{ keep(s, query_read(0u, group.y, 0u, group.x * {slices}u + s)); }}\n        \
             finish_head(group.y, true, lane, sublane);\n        \
             let row = group.y * QUERY_GROUP + group.x % QUERY_GROUP;\n        \
             {each} {{ q_write(group.x / QUERY_GROUP, row, 0u, s, head_texel(s)); }}\n    \
             }} else if (group.x < {keys_end}u) {{\n        let kv = group.x - {heads}u;\n        \
             {each} {{ keep(s, key_read(0u, group.y, 0u, kv * {slices}u + s)); }}\n        \
             finish_head(group.y, false, lane, sublane);\n        \
             {each} {{ k_store(kv, position, s, head_texel(s)); }}\n    \
             }} else {{\n        let kv = group.x - {keys_end}u;\n        \
             let input = params.first_position / 4u + group.y;\n        let end = params.first_position + params.tokens;\n        \
             if (4u * input >= end) {{ return; }}\n        \
             {each_value} {{\n            \
             var old = array<vec4<f32>, 4>(v_load(kv, 4u * s, input), v_load(kv, 4u * s + 1u, input), \
             v_load(kv, 4u * s + 2u, input), v_load(kv, 4u * s + 3u, input));\n            \
             for (var i = 0u; i < 4u; i++) {{\n                let at = 4u * input + i;\n                \
             if (at < params.first_position) {{ continue; }}\n                var texel = vec4<f32>(0.0);\n                \
             if (at < end) {{ texel = value_read(0u, at - params.first_position, 0u, kv * {value_slices}u + s); }}\n                \
             old[0][i] = texel.x;\n                old[1][i] = texel.y;\n                old[2][i] = texel.z;\n                \
             old[3][i] = texel.w;\n            }}\n            \
             for (var i = 0u; i < 4u; i++) {{ v_store(kv, 4u * s + i, input, old[i]); }}\n        }}\n    }}\n}}\n",
            keys_end = heads + kv_heads,
        )
    }
}
