//! Graphs of the three models of Stable Diffusion 1.4, to compare memory planning with the ML Drift paper.
//!
//! ML Drift paper, section 3.5 and Figure 3. The architecture is that of Rombach et al. 2022 as released: a text
//! encoder of twelve layers (CLIP ViT-L/14), a UNet over latents of 64 by 64 with skip connections from its down
//! blocks to its up blocks, and a decoder from latents to an image of 512 by 512. Text encoder and UNet have a batch
//! of two: one element with the prompt and one without (classifier-free guidance). Elements are f16.
//!
//! The memory depends on the fused operations, see [`FusedKernels`]. These graphs are planned, never executed.

use super::{Graph, Operation};
use crate::virtual_tensor::SLICE_SIZE;

const ELEMENT_BYTES: u64 = 2;
/// Number of tokens in a prompt. source: the context length of CLIP
const PROMPT_TOKENS: u64 = 77;
/// Number of attention heads in a layer of the UNet. source: `attention_head_dim: 8` in the configuration of the UNet
const HEADS: u64 = 8;
/// Height and width of the latents: 512 pixels / 8. source: `sample_size` in the configuration of the UNet
const LATENT_SIDE: u64 = 64;

/// The operations of Stable Diffusion that are fused into one kernel.
#[derive(Debug, Clone, Copy)]
pub struct FusedKernels {
    /// Whether self-attention over an image is one kernel, which never writes the attention scores to memory.
    pub attention: bool,
    /// Whether GELU and the multiplication by the gate are fused into the preceding matmul of the feed-forward block.
    pub geglu: bool,
    /// Whether GroupNorm is fused with the following SiLU.
    pub group_norm_silu: bool,
}

impl FusedKernels {
    /// All fusions, as in the ML Drift paper.
    pub const ALL: FusedKernels = FusedKernels { attention: true, geglu: true, group_norm_silu: true };
}

/// An image tensor of `side` by `side` positions.
#[derive(Debug, Clone, Copy)]
struct Image {
    /// Index of the tensor in the graph.
    tensor: usize,
    channels: u64,
    side: u64,
}

struct Builder {
    graph: Graph,
    batch: u64,
    kernels: FusedKernels,
}

/// Returns the graph of the text encoder of Stable Diffusion.
pub fn text_encoder_graph(kernels: FusedKernels) -> Graph {
    let mut builder = Builder::new(2, kernels);
    let (wide, heads) = (768, 12);
    let row = builder.bytes(PROMPT_TOKENS, wide);
    let tokens = builder.add_node("tok", &[], row);
    let mut hidden = builder.add_node("pos", &[tokens], row);
    for _ in 0..12 {
        let x = builder.add_node("ln", &[hidden], row);
        let [q, k, v] = builder.projections([(Some(x), row); 3]);
        let scores = builder.bytes(PROMPT_TOKENS * heads, PROMPT_TOKENS);
        let scores = builder.add_node("qk", &[q, k], scores);
        let mixed = builder.add_node("pv", &[scores, v], row);
        hidden = builder.project_and_add(mixed, hidden, row);
        let x = builder.add_node("ln", &[hidden], row);
        let inner = builder.bytes(PROMPT_TOKENS, 4 * wide);
        let first = builder.add_node("fc1", &[x], inner);
        let gelu = builder.add_node("gelu", &[first], inner);
        let second = builder.add_node("lin", &[gelu], row);
        hidden = builder.add_node("add", &[second, hidden], row);
    }
    builder.add_node("final_ln", &[hidden], row);
    builder.graph
}

/// Returns the graph of the UNet of Stable Diffusion for one denoising step.
pub fn unet_graph(kernels: FusedKernels) -> Graph {
    let mut builder = Builder::new(2, kernels);
    let widths = [320, 640, 1280, 1280];
    let time = builder.bytes(1, 4 * 320);
    let step = builder.add_node("temb", &[], time);
    let step = builder.add_node("temb", &[step], time);
    let step = builder.add_node("temb", &[step], time);
    let mut image = builder.image("conv_in", &[], 320, LATENT_SIDE);
    let mut skips = vec![image];
    for (level, &width) in widths.iter().enumerate() {
        for _ in 0..2 {
            image = builder.residual(image, width, Some(step));
            if level < 3 {
                image = builder.transformer(image);
            }
            skips.push(image);
        }
        if level < 3 {
            image = builder.image("down", &[image.tensor], width, image.side / 2);
            skips.push(image);
        }
    }
    image = builder.residual(image, 1280, Some(step));
    image = builder.transformer(image);
    image = builder.residual(image, 1280, Some(step));
    for (level, &width) in widths.iter().rev().enumerate() {
        for _ in 0..3 {
            if let Some(skip) = skips.pop() {
                let inputs = [image.tensor, skip.tensor];
                image = builder.image("concat", &inputs, image.channels + skip.channels, image.side);
            }
            image = builder.residual(image, width, Some(step));
            if level > 0 {
                image = builder.transformer(image);
            }
        }
        if level < 3 {
            image = builder.image("upconv", &[image.tensor], width, image.side * 2);
        }
    }
    let x = builder.normalised("gn", image);
    builder.image("conv_out", &[x], 4, LATENT_SIDE);
    builder.graph
}

/// Returns the graph of the VAE decoder of Stable Diffusion, which converts latents to an image.
pub fn vae_decoder_graph(kernels: FusedKernels) -> Graph {
    let mut builder = Builder::new(1, kernels);
    let latents = builder.image("lat", &[], 4, LATENT_SIDE);
    let latents = builder.image("post_quant", &[latents.tensor], 4, LATENT_SIDE);
    let mut image = builder.image("conv_in", &[latents.tensor], 512, LATENT_SIDE);
    image = builder.residual(image, 512, None);
    let positions = image.side * image.side;
    let bytes = builder.bytes(positions, 512);
    let x = builder.add_node("gn", &[image.tensor], bytes);
    let qkv = builder.projections([(Some(x), bytes); 3]);
    let mixed = builder.attend(qkv, [positions; 2], 1, bytes);
    image.tensor = builder.project_and_add(mixed, image.tensor, bytes);
    image = builder.residual(image, 512, None);
    for (level, width) in [512, 512, 256, 128].into_iter().enumerate() {
        for _ in 0..3 {
            image = builder.residual(image, width, None);
        }
        if level < 3 {
            image = builder.image("upconv", &[image.tensor], width, image.side * 2);
        }
    }
    let x = builder.normalised("gn", image);
    builder.image("conv_out", &[x], 3, image.side);
    builder.graph
}

impl Builder {
    fn new(batch: u64, kernels: FusedKernels) -> Builder {
        Builder { graph: Graph::default(), batch, kernels }
    }

    /// Returns the size in bytes of a tensor [batch, positions, channels], with padded channels.
    fn bytes(&self, positions: u64, channels: u64) -> u64 {
        self.batch * positions * channels.next_multiple_of(u64::from(SLICE_SIZE)) * ELEMENT_BYTES
    }

    fn add_node(&mut self, name: &'static str, inputs: &[usize], bytes: u64) -> usize {
        self.graph.add_node(Operation::Image(name), inputs, name, bytes)
    }

    fn image(&mut self, name: &'static str, inputs: &[usize], channels: u64, side: u64) -> Image {
        let bytes = self.bytes(side * side, channels);
        Image { tensor: self.add_node(name, inputs, bytes), channels, side }
    }

    fn normalised(&mut self, name: &'static str, image: Image) -> usize {
        let bytes = self.bytes(image.side * image.side, image.channels);
        let x = self.add_node(name, &[image.tensor], bytes);
        if self.kernels.group_norm_silu { x } else { self.add_node("silu", &[x], bytes) }
    }

    fn residual(&mut self, image: Image, width: u64, step: Option<usize>) -> Image {
        let side = image.side;
        let x = self.normalised("gn1", image);
        let mut x = self.image("conv1", &[x], width, side);
        if let Some(step) = step {
            x = self.image("temb", &[x.tensor, step], width, side);
        }
        let x = self.normalised("gn2", x);
        let x = self.image("conv2", &[x], width, side);
        let mut around = image;
        if image.channels != width {
            around = self.image("shortcut", &[image.tensor], width, side);
        }
        self.image("add", &[x.tensor, around.tensor], width, side)
    }

    /// Adds the matmuls of queries, keys and values, and the conversion of the results to the layouts that attention
    /// reads. Each argument is the input tensor, if the graph has one, and the size of the result in bytes.
    fn projections(&mut self, [q, k, v]: [(Option<usize>, u64); 3]) -> [usize; 3] {
        let projections = [("q", "q.r", q), ("k", "k.r", k), ("v", "v.r", v)];
        projections
            .map(|(name, layout, (x, bytes))| (layout, self.add_node(name, x.as_slice(), bytes), bytes))
            .map(|(layout, projection, bytes)| self.add_node(layout, &[projection], bytes))
    }

    /// Adds attention of `from` query positions over `to` key positions. `bytes` is the size of the result.
    fn attend(&mut self, [q, k, v]: [usize; 3], [from, to]: [u64; 2], heads: u64, bytes: u64) -> usize {
        // Self-attention over an image has many positions; over the prompt there are few, and the scores are small.
        if self.kernels.attention && to > PROMPT_TOKENS {
            return self.add_node("flash", &[q, k, v], bytes);
        }
        let scores = self.bytes(from * heads, to);
        let scores_of = self.add_node("qk", &[q, k], scores);
        let powers = self.add_node("softmax", &[scores_of], scores);
        self.add_node("pv", &[powers, v], bytes)
    }

    /// Adds the output projection of attention, whose input is `mixed`, and the residual addition to `hidden`.
    fn project_and_add(&mut self, mixed: usize, hidden: usize, bytes: u64) -> usize {
        let rows = self.add_node("o.r", &[mixed], bytes);
        let change = self.add_node("lin", &[rows], bytes);
        self.add_node("add", &[change, hidden], bytes)
    }

    /// Adds a transformer block: self-attention over the image, attention over the prompt, and feed-forward.
    fn transformer(&mut self, image: Image) -> Image {
        let (positions, width) = (image.side * image.side, image.channels);
        let [row, prompt] = [self.bytes(positions, width), self.bytes(PROMPT_TOKENS, width)];
        let x = self.add_node("gn", &[image.tensor], row);
        let mut hidden = self.add_node("proj_in", &[x], row);
        let x = self.add_node("ln", &[hidden], row);
        let qkv = self.projections([(Some(x), row); 3]);
        let mixed = self.attend(qkv, [positions; 2], HEADS, row);
        hidden = self.project_and_add(mixed, hidden, row);
        let x = self.add_node("ln", &[hidden], row);
        // The rows of the prompt are outputs of the text encoder, not tensors of this graph.
        let qkv = self.projections([(Some(x), row), (None, prompt), (None, prompt)]);
        let mixed = self.attend(qkv, [positions, PROMPT_TOKENS], HEADS, row);
        hidden = self.project_and_add(mixed, hidden, row);
        let x = self.add_node("ln", &[hidden], row);
        let inner = self.bytes(positions, 4 * width);
        let first = self.add_node("ffa", &[x], inner);
        let gated = if self.kernels.geglu {
            self.add_node("ffb+gelu+mul", &[x, first], inner)
        } else {
            let second = self.add_node("ffb", &[x], inner);
            let gelu = self.add_node("gelu", &[second], inner);
            self.add_node("mul", &[gelu, first], inner)
        };
        let change = self.add_node("lin", &[gated], row);
        hidden = self.add_node("add", &[change, hidden], row);
        let change = self.add_node("proj_out", &[hidden], row);
        Image { tensor: self.add_node("add", &[change, image.tensor], row), ..image }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{assign_offsets, naive_bytes};

    /// Returns the memory that all tensors of a graph need, in MiB, without and with memory planning.
    fn mib(graph: &Graph) -> [f64; 2] {
        let (_, records) = graph.usage_records();
        [naive_bytes(&records), assign_offsets(&records).total_size]
            .map(|bytes| bytes as f64 / f64::from(1 << 20))
    }

    #[test]
    fn memory_plans_are_as_large_as_published() {
        // ML Drift paper, Figure 3. The sums without planning depend on launches that the paper does not list, hence
        // the wider tolerance.
        for (name, graph, naive, planned) in [
            ("text encoder", text_encoder_graph(FusedKernels::ALL), 62.0, 2.0),
            ("UNet", unet_graph(FusedKernels::ALL), 2075.0, 65.0),
            ("decoder", vae_decoder_graph(FusedKernels::ALL), 2274.0, 320.0),
        ] {
            let [sum, own] = mib(&graph);
            println!("{name}: {} launches, {sum:.1} MiB, planned {own:.2}", graph.launch_count());
            assert!((own - planned).abs() < 0.05, "{name}: {own}");
            assert!((sum / naive - 1.0).abs() < 0.06, "{name}: {sum}");
        }
    }

    #[test]
    fn each_fusion_reduces_the_planned_memory() {
        let all = FusedKernels::ALL;
        let of_unet = |kernels| mib(&unet_graph(kernels))[1];
        let fused = of_unet(all);
        assert!(of_unet(FusedKernels { attention: false, ..all }) > 2.0 * fused);
        assert!(of_unet(FusedKernels { geglu: false, ..all }) > fused);
        let of_latents = |kernels| mib(&vae_decoder_graph(kernels))[1];
        assert!(of_latents(FusedKernels { group_norm_silu: false, ..all }) > of_latents(all));
    }
}
