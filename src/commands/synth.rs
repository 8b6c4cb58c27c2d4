//! `hearth synth`: write a model of random weights, of any shape.

use std::process::ExitCode;

use hearth_exec::synth::{SynthOptions, synthesise};
use hearth_profiles::Layers;
use serde::Serialize;

use super::print_json;
use crate::cli::SynthArgs;
use crate::diagnostics::Failure;
use crate::output::say;
use crate::progress;

/// What `--json` gives.
#[derive(Serialize)]
struct Output {
    path: String,
    file_bytes: u64,
    parameters: u64,
    tensors: usize,
}

/// Runs the verb.
pub fn run(args: &SynthArgs, json: bool) -> Result<ExitCode, Failure> {
    let options = options(args)?;
    let bar = progress::bytes("weights", 0);
    let made = synthesise(&options, &args.output, &mut |written, total| {
        bar.set_length(total);
        bar.set_position(written);
    })
    .map_err(Failure::unusable)?;
    bar.finish_and_clear();
    let path = made.path.display().to_string();
    if json {
        let (file_bytes, parameters) = (made.file_bytes.0, made.parameters);
        return print_json(&Output { path, file_bytes, parameters, tensors: made.tensors })
            .map(|()| ExitCode::SUCCESS);
    }
    say!("wrote {path}: {}, {:.1} million weights\n", made.file_bytes, made.parameters as f64 / 1e6);
    Ok(ExitCode::SUCCESS)
}

fn options(args: &SynthArgs) -> Result<SynthOptions, Failure> {
    let mut options = SynthOptions::preset(&args.preset).map_err(Failure::unusable)?;
    options.seed = args.seed;
    if let Some(quant) = &args.quant {
        options.quant = quant.parse().map_err(Failure::unusable)?;
    }
    let shape = &mut options.shape;
    let own = [args.layers, args.dim, args.ffn, args.heads, args.kv_heads, args.vocab];
    if own.iter().all(Option::is_none) && !args.tied {
        return Ok(options);
    }
    options.name = format!("{}-custom", args.preset);
    shape.layers = args.layers.map_or(shape.layers, Layers);
    for (field, value) in [
        (&mut shape.embedding, args.dim),
        (&mut shape.feed_forward, args.ffn),
        (&mut shape.heads, args.heads),
        (&mut shape.kv_heads, args.kv_heads),
        (&mut shape.vocabulary, args.vocab),
    ] {
        *field = value.unwrap_or(*field);
    }
    if args.dim.is_some() || args.heads.is_some() {
        let length = shape.embedding.checked_div(shape.heads).unwrap_or(0);
        (shape.key_length, shape.value_length) = (length, length);
    }
    shape.tied_embeddings |= args.tied;
    Ok(options)
}
