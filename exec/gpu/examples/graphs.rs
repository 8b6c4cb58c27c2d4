//! Launches and memory that fusion and planned memory save, for each architecture and for Stable Diffusion 1.4.
//!
//! ML Drift paper, sections 3.5 and 3.6. Decoders have the dimensions of Llama 3.1 8B, so that architectures can be
//! compared; a prompt of 1024 tokens, a context of 1280, halves, as in the paper. No GPU is needed.

use hearth_gpu::graph::diffusion::{Kernels, decoder_of_latents, text_encoder, unet};
use hearth_gpu::graph::{Fusion, Graph, Numbers, Residual, decoder, fuse};
use hearth_gpu::memory::{Record, arena, improved, naive_bytes, plain};
use hearth_profiles::model::{Architecture, ModelShape, shipped_document};

fn shape(architecture: Architecture) -> ModelShape {
    ModelShape { architecture, ..shipped_document("llama-8b").expect("it is shipped").shape() }
}

/// One kind of fusion after another, each with those before it.
const STEPS: [(&str, Fusion); 5] = [
    ("nothing", Fusion::NONE),
    ("element-wise", Fusion { pointwise: true, ..Fusion::NONE }),
    ("residual + norm", Fusion { pointwise: true, residual: Residual::IntoNorm, ..Fusion::NONE }),
    ("rotary + layout", Fusion { attention: false, ..Fusion::ALL }),
    ("attention", Fusion::ALL),
];

fn line(name: &str, graph: &Graph) {
    let records: Vec<Record> = graph.records().into_iter().map(|(_, record)| record).collect();
    let bytes =
        [naive_bytes(&records), arena(&records).total, plain(&records).total(), improved(&records).total()];
    let [naive, offsets, objects, better] = bytes.map(|bytes| bytes as f64 / f64::from(1 << 20));
    println!("{name:28} {:8} {naive:9.1} {offsets:9.2} {objects:9.2} {better:9.2}", graph.launches());
}

fn main() {
    println!(
        "{:28} {:>8} {:>9} {:>9} {:>9} {:>9}",
        "", "launches", "naive", "offsets", "objects", "improved"
    );
    println!("{:28} {:>8} {:>39}", "", "", "MiB");
    for &architecture in Architecture::ALL {
        let numbers = Numbers { layers: 32, tokens: 1024, context: 1280, element_bytes: 2 };
        let graph = decoder(&shape(architecture), numbers);
        line(&format!("{architecture}, no fusion"), &graph);
        line(&format!("{architecture}, all"), &fuse(graph, Fusion::ALL));
    }
    println!("llama, one kind of fusion after another:");
    for (name, fusion) in STEPS {
        let numbers = Numbers { layers: 32, tokens: 1024, context: 1280, element_bytes: 2 };
        line(&format!("  {name}"), &fuse(decoder(&shape(Architecture::Llama), numbers), fusion));
    }
    println!("Stable Diffusion 1.4:");
    line("  text encoder", &text_encoder(Kernels::FUSED));
    line("  UNet", &unet(Kernels::FUSED));
    line("  decoder of latents", &decoder_of_latents(Kernels::FUSED));
}
