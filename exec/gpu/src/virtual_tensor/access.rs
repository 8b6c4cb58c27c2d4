//! Generation of WGSL functions that read and write a tensor independently of its layout.
//!
//! ML Drift paper, section 3.3. A kernel calls `NAME_read(b, x, y, s)` and `NAME_write(b, x, y, s, value)` for a tensor
//! NAME, with the coordinates of [`super::TexelCoordinates`]. These functions are generated for the layout of the
//! tensor, with the index arithmetic of [`super::layout`], so that the GPU need not look up the layout. An extent that
//! changes from pass to pass, such as the number of tokens, is a WGSL expression instead of a constant. Textures have
//! f16 components, which every device can read and write.

use std::fmt::Write;

use super::layout::{Shape, Storage};

/// The extent of a tensor axis in generated WGSL.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AxisExtent {
    /// A constant, known when the shader is generated.
    Fixed(u32),
    /// A WGSL expression of type u32.
    Expression(&'static str),
}

/// The access of a kernel to a tensor: reading, writing, or both.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AccessMode {
    Read,
    Write,
    /// Reading and writing, which only buffers support.
    ReadWrite,
}

/// A tensor argument of a kernel, for which WGSL functions are generated.
#[derive(Debug, Clone, Copy)]
pub struct Accessor {
    /// The prefix of the generated WGSL names.
    pub name: &'static str,
    pub storage: Storage,
    /// The extents of the axes batch, height and width.
    pub extents: [AxisExtent; 3],
    pub slices: AxisExtent,
    pub mode: AccessMode,
}

/// Returns the WGSL expression `index * extent + next`. Omits terms that are zero and factors that are one.
fn nested(index: &str, extent: AxisExtent, next: &str) -> String {
    let scaled = match extent {
        _ if index == "0u" => return next.into(),
        AxisExtent::Fixed(1) => index.to_owned(),
        AxisExtent::Fixed(count) => format!("({index}) * {count}u"),
        AxisExtent::Expression(expression) => format!("({index}) * ({expression})"),
    };
    if next == "0u" { scaled } else { format!("{scaled} + {next}") }
}

impl Accessor {
    /// Returns the accessor of a tensor [tokens, width], with one row of `width` channels per token.
    pub fn for_rows(name: &'static str, storage: Storage, width: u32, mode: AccessMode) -> Accessor {
        let extents = [AxisExtent::Fixed(1), AxisExtent::Fixed(1), AxisExtent::Expression("params.tokens")];
        let slices = AxisExtent::Fixed(width / super::SLICE_SIZE);
        Accessor { name, storage, extents, slices, mode }
    }

    /// Returns the accessor of a tensor of `shape`, whose extents are constants in the generated WGSL.
    pub fn for_shape(name: &'static str, storage: Storage, shape: &Shape, mode: AccessMode) -> Accessor {
        let extents = shape.extents().map(AxisExtent::Fixed);
        let slices = AxisExtent::Fixed(shape.slice_count());
        Accessor { name, storage, extents, slices, mode }
    }

    /// Returns the WGSL expression for the position of texel `(b, x, y, s)` in the buffer or texture.
    fn position(&self) -> String {
        let [batch, height, width] = self.extents;
        // The index along an axis with one element is zero.
        let index = |extent, name| if extent == AxisExtent::Fixed(1) { "0u" } else { name };
        let (b, y, x) = (index(batch, "b"), index(height, "y"), index(width, "x"));
        let s = index(self.slices, "s");
        let column = nested(x, batch, b);
        match self.storage {
            Storage::Buffer => nested(&nested(&nested(s, height, y), width, x), batch, b),
            Storage::Linear => nested(&nested(&nested(b, height, y), width, x), self.slices, s),
            Storage::Texture2d => format!("vec2<u32>({column}, {})", nested(y, self.slices, s)),
            Storage::Texture3d => format!("vec3<u32>({column}, {y}, {s})"),
        }
    }

    /// Returns the WGSL declaration of the tensor as binding `binding` of group 0.
    pub fn wgsl_declaration(&self, binding: u32) -> String {
        let name = self.name;
        let (variable, kind) = match (self.storage, self.mode) {
            (Storage::Buffer | Storage::Linear, AccessMode::Read) => ("<storage, read>", "array<vec4<f32>>"),
            (Storage::Buffer | Storage::Linear, _) => ("<storage, read_write>", "array<vec4<f32>>"),
            (Storage::Texture2d, AccessMode::Read) => ("", "texture_2d<f32>"),
            (Storage::Texture3d, AccessMode::Read) => ("", "texture_3d<f32>"),
            (Storage::Texture2d, _) => ("", "texture_storage_2d<rgba16float, write>"),
            (Storage::Texture3d, _) => ("", "texture_storage_3d<rgba16float, write>"),
        };
        format!("@group(0) @binding({binding}) var{variable} {name}_object: {kind};\n")
    }

    /// Returns the WGSL functions that read and write the tensor.
    pub fn wgsl_functions(&self) -> String {
        let (name, position) = (self.name, self.position());
        let (texel, store) = match self.storage {
            Storage::Buffer | Storage::Linear => {
                (format!("{name}_object[{position}]"), format!("{name}_object[{position}] = value"))
            }
            Storage::Texture2d | Storage::Texture3d => (
                format!("textureLoad({name}_object, {position}, 0)"),
                format!("textureStore({name}_object, {position}, value)"),
            ),
        };
        let index = "b: u32, x: u32, y: u32, s: u32";
        let mut text = String::new();
        if self.mode != AccessMode::Write {
            let _ = writeln!(text, "fn {name}_read({index}) -> vec4<f32> {{ return {texel}; }}");
        }
        if self.mode != AccessMode::Read {
            let _ = writeln!(text, "fn {name}_write({index}, value: vec4<f32>) {{ {store}; }}");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::layout::TexelCoordinates;
    use super::*;

    /// Evaluates a WGSL expression that consists of u32 numbers, coordinates of `texel`, sums, products and brackets.
    fn value(text: &str, texel: TexelCoordinates) -> u32 {
        fn sum(rest: &mut &str, texel: TexelCoordinates) -> u32 {
            let mut all = 0;
            loop {
                let mut part = atom(rest, texel);
                while let Some(after) = rest.strip_prefix(" * ") {
                    *rest = after;
                    part *= atom(rest, texel);
                }
                all += part;
                match rest.strip_prefix(" + ") {
                    Some(after) => *rest = after,
                    None => return all,
                }
            }
        }
        fn atom(rest: &mut &str, texel: TexelCoordinates) -> u32 {
            if let Some(after) = rest.strip_prefix('(') {
                *rest = after;
                let inner = sum(rest, texel);
                *rest = rest.strip_prefix(')').expect("a closed bracket");
                return inner;
            }
            let end = rest.find(|c: char| !c.is_ascii_alphanumeric()).unwrap_or(rest.len());
            let (word, after) = rest.split_at(end);
            *rest = after;
            match word {
                "b" => texel.b,
                "x" => texel.x,
                "y" => texel.y,
                "s" => texel.s,
                number => number.strip_suffix('u').expect("a u32").parse().expect("a number"),
            }
        }
        let mut rest = text;
        let all = sum(&mut rest, texel);
        assert_eq!(rest, "", "{text}");
        all
    }

    #[test]
    fn generated_functions_contain_the_index_arithmetic() {
        let functions = |storage| {
            let shape = Shape::new(2, 3, 4, 12).unwrap();
            Accessor::for_shape("src", storage, &shape, AccessMode::Read).wgsl_functions()
        };
        assert_eq!(
            functions(Storage::Buffer),
            "fn src_read(b: u32, x: u32, y: u32, s: u32) -> vec4<f32> \
             { return src_object[(((s) * 3u + y) * 4u + x) * 2u + b]; }\n"
        );
        let text = functions(Storage::Texture2d);
        assert!(text.contains("textureLoad(src_object, vec2<u32>((x) * 2u + b, (y) * 3u + s), 0)"), "{text}");
        let rows = Accessor::for_rows("out", Storage::Buffer, 64, AccessMode::Write);
        assert_eq!(
            rows.wgsl_functions(),
            "fn out_write(b: u32, x: u32, y: u32, s: u32, value: vec4<f32>) \
             { out_object[(s) * (params.tokens) + x] = value; }\n"
        );
        assert_eq!(
            rows.wgsl_declaration(3),
            "@group(0) @binding(3) var<storage, read_write> out_object: array<vec4<f32>>;\n"
        );
    }

    proptest! {
        #[test]
        fn generated_expressions_equal_the_layout(
            extents in prop::array::uniform3(1u32..5), channels in 1u32..14,
        ) {
            let [batch, height, width] = extents;
            let shape = Shape::new(batch, height, width, channels).unwrap();
            for storage in Storage::ALL {
                let text = Accessor::for_shape("src", storage, &shape, AccessMode::Read).position();
                let inner = text.split_once(">(").map_or(&text[..], |(_, rest)| &rest[..rest.len() - 1]);
                for texel in shape.all_texels() {
                    let found: Vec<u32> = inner.split(", ").map(|part| value(part, texel)).collect();
                    let wanted = storage.position(&shape, texel);
                    prop_assert_eq!(&found[..], &wanted[..found.len()], "{:?}: {}", storage, text);
                }
            }
        }
    }
}
