//! Synthesises a model file with random weights.
//!
//! `cargo run --release -p hearth-runtime --example synth -- PRESET OUT.gguf [QUANT] [bpe] [tied] [SEED] [threads=N]`

use hearth_runtime::synth::{SynthOptions, TokenizerKind, synthesise};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let (Some(preset), Some(path)) = (arguments.next(), arguments.next()) else {
        return Err("usage: synth PRESET OUT.gguf [QUANT] [bpe] [tied] [SEED] [threads=N]".into());
    };
    let mut options = SynthOptions::from_preset(&preset)?;
    for argument in arguments {
        match argument.as_str() {
            "bpe" => options.tokenizer = TokenizerKind::Bpe,
            "tied" => options.shape.has_tied_embeddings = true,
            text if text.starts_with("threads=") => options.threads = text["threads=".len()..].parse()?,
            text => match text.parse() {
                Ok(seed) => options.seed = seed,
                Err(_) => options.quant = text.parse()?,
            },
        }
    }
    let mut shown = u64::MAX;
    let made = synthesise(&options, path.as_ref(), &mut |done, total| {
        let percent = 100 * done / total;
        if percent != shown {
            eprint!("\r{percent} %");
            shown = percent;
        }
    })?;
    eprintln!(
        "\r{}: {} parameters, {} tensors, {}",
        path, made.parameter_count, made.tensor_count, made.file_bytes
    );
    Ok(())
}
