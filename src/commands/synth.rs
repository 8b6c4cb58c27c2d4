//! `hearth synth`: write a model of random weights, of any shape.

use std::process::ExitCode;

use hearth_exec::synth::{SynthOptions, Tokenizer, synthesise};
use hearth_profiles::Layers;
use hearth_profiles::model::Architecture;
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
    if !(args.gain.is_finite() && args.gain > 0.0) {
        return Err(Failure::unusable(format!("`--gain` is {}: use a positive number, as 1", args.gain)));
    }
    (options.seed, options.gain) = (args.seed, args.gain);
    if let Some(quant) = &args.quant {
        options.quant = quant.parse().map_err(Failure::unusable)?;
    }
    options.rope_frequencies = args.rope_factors;
    let shape = &mut options.shape;
    if let Some(name) = &args.arch {
        shape.architecture = name.parse().map_err(Failure::unusable)?;
        options.tokenizer = Tokenizer::of(shape.architecture);
        shape.tied_embeddings |= matches!(shape.architecture, Architecture::Gemma | Architecture::Gemma2);
    }
    let own = [
        args.layers,
        args.dim,
        args.ffn,
        args.heads,
        args.kv_heads,
        args.head_length,
        args.context,
        args.vocab,
    ];
    if own.iter().all(Option::is_none) && !args.tied && args.arch.is_none() {
        return Ok(options);
    }
    options.name = format!("{}-custom", args.preset);
    shape.layers = args.layers.map_or(shape.layers, Layers);
    for (field, value) in [
        (&mut shape.embedding, args.dim),
        (&mut shape.feed_forward, args.ffn),
        (&mut shape.heads, args.heads),
        (&mut shape.kv_heads, args.kv_heads),
        (&mut shape.context_length, args.context),
        (&mut shape.vocabulary, args.vocab),
    ] {
        *field = value.unwrap_or(*field);
    }
    if args.dim.is_some() || args.heads.is_some() {
        let length = shape.embedding.checked_div(shape.heads).unwrap_or(0);
        (shape.key_length, shape.value_length) = (length, length);
    }
    if let Some(length) = args.head_length {
        (shape.key_length, shape.value_length) = (length, length);
    }
    shape.tied_embeddings |= args.tied;
    Ok(options)
}
