//! Prints the launches and the memory that fusion and memory planning save, for each architecture and Stable Diffusion.
//!
//! ML Drift paper, sections 3.5 and 3.6. All decoders have the dimensions of Llama 3.1 8B, so that architectures can
//! be compared, with a prompt of 1024 tokens, a context of 1280 and f16 elements, as in the paper. No GPU is needed.

use hearth_gpu::graph::diffusion::{FusedKernels, text_encoder_graph, unet_graph, vae_decoder_graph};
use hearth_gpu::graph::{FusionOptions, Graph, PassSize, ResidualFusion, decoder_graph, fuse};
use hearth_gpu::memory::{assign_offsets, greedy_by_size, greedy_by_size_improved, naive_bytes};
use hearth_profiles::model::{Architecture, ModelShape, shipped_document};

/// The dimensions of the pass of the decoders: a prompt of 1024 tokens, with elements in f16.
const SIZE: PassSize = PassSize { layers: 32, tokens: 1024, context_length: 1280, element_bytes: 2 };

fn shape(architecture: Architecture) -> ModelShape {
    ModelShape { architecture, ..shipped_document("llama-8b").expect("llama-8b is shipped").to_shape() }
}

/// The sets of enabled kinds of fusion, with their names. Each set has one kind of fusion more than the previous set.
const FUSIONS: [(&str, FusionOptions); 5] = [
    ("nothing", FusionOptions::NONE),
    ("element-wise", FusionOptions { pointwise: true, ..FusionOptions::NONE }),
    (
        "residual + norm",
        FusionOptions { pointwise: true, residual: ResidualFusion::IntoNorm, ..FusionOptions::NONE },
    ),
    ("rotary + layout", FusionOptions { attention: false, ..FusionOptions::ALL }),
    ("attention", FusionOptions::ALL),
];

fn print_row(name: &str, graph: &Graph) {
    let (_, records) = graph.usage_records();
    let bytes = [
        naive_bytes(&records),
        assign_offsets(&records).total_size,
        greedy_by_size(&records).total_size(),
        greedy_by_size_improved(&records).total_size(),
    ];
    let [naive, offsets, objects, improved] = bytes.map(|bytes| bytes as f64 / f64::from(1 << 20));
    println!("{name:28} {:8} {naive:9.1} {offsets:9.2} {objects:9.2} {improved:9.2}", graph.launch_count());
}

fn main() {
    println!(
        "{:28} {:>8} {:>9} {:>9} {:>9} {:>9}",
        "", "launches", "naive", "offsets", "objects", "improved"
    );
    println!("{:28} {:>8} {:>39}", "", "", "MiB");
    for architecture in Architecture::all_with_gpu_kernels() {
        let graph = decoder_graph(&shape(architecture), SIZE);
        print_row(&format!("{architecture}, no fusion"), &graph);
        print_row(&format!("{architecture}, all"), &fuse(graph, FusionOptions::ALL));
    }
    println!("llama, one kind of fusion after another:");
    for (name, fusion) in FUSIONS {
        print_row(&format!("  {name}"), &fuse(decoder_graph(&shape(Architecture::Llama), SIZE), fusion));
    }
    println!("Stable Diffusion 1.4:");
    print_row("  text encoder", &text_encoder_graph(FusedKernels::ALL));
    print_row("  UNet", &unet_graph(FusedKernels::ALL));
    print_row("  decoder of latents", &vae_decoder_graph(FusedKernels::ALL));
}
