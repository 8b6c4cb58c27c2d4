//! `hearth synth`: write a model of random weights, of any shape.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use hearth_profiles::Layers;
use hearth_profiles::model::Architecture;
use hearth_runtime::synth::{SynthError, SynthOptions, Tokenizer, synthesise, unfinished};
use serde::Serialize;

use super::print_json;
use crate::diagnostics::Failure;
use crate::files::can_write;
use crate::interruption::{self, INTERRUPTED};
use crate::output::say;
use crate::progress;

/// `hearth synth`.
#[derive(Debug, Args)]
pub struct SynthArgs {
    /// A shape by name: tiny, 120m, 1b, 3b, 8b, 70b, or a shipped model.
    #[arg(long, default_value = "tiny")]
    pub preset: String,
    /// Architecture instead of the preset's: llama, qwen2, qwen3, gemma, gemma2 or internlm2.
    #[arg(long)]
    pub arch: Option<String>,
    /// Layers instead of the preset's.
    #[arg(long)]
    pub layers: Option<u32>,
    /// Embedding length instead of the preset's.
    #[arg(long)]
    pub dim: Option<u32>,
    /// Feed-forward length instead of the preset's.
    #[arg(long)]
    pub ffn: Option<u32>,
    /// Attention heads instead of the preset's.
    #[arg(long)]
    pub heads: Option<u32>,
    /// Key-value heads instead of the preset's.
    #[arg(long)]
    pub kv_heads: Option<u32>,
    /// Numbers of a key and of a value; embedding length over heads if absent.
    #[arg(long)]
    pub head_length: Option<u32>,
    /// Context length instead of the preset's; the window of gemma2 is half of it.
    #[arg(long)]
    pub context: Option<u32>,
    /// Vocabulary instead of the preset's.
    #[arg(long)]
    pub vocab: Option<u32>,
    /// Reuse the embedding as output head, as gemma and gemma2 always do.
    #[arg(long)]
    pub tied: bool,
    /// Add factors of rotary frequencies, as Llama 3.1 has them.
    #[arg(long)]
    pub rope_factors: bool,
    /// Widens the weights; below 1 a layer changes less of what passes through it.
    #[arg(long, default_value_t = 1.0)]
    pub gain: f32,
    /// Weight format, or a mix such as q4_k_m; the preset's if absent.
    #[arg(long)]
    pub quant: Option<String>,
    /// Of the weights.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Where to write the model.
    #[arg(short, long)]
    pub output: PathBuf,
}

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
    can_write([&args.output], [])?;
    let options = options(args)?;
    let unfinished = unfinished(&args.output);
    interruption::at_each_signal(move || {
        // Nobody else knows what it is.
        let _ = std::fs::remove_file(&unfinished);
        std::process::exit(INTERRUPTED);
    });
    let bar = progress::bytes("weights", 0);
    let made = synthesise(&options, &args.output, &mut |written, total| {
        bar.set_length(total);
        bar.set_position(written);
    })
    .map_err(|error| refused(&error))?;
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
    (options.seed, options.gain) = (args.seed, args.gain);
    if let Some(quant) = &args.quant {
        options.quant = quant.parse().map_err(|error| Failure::unusable(format!("`--quant`: {error}")))?;
    }
    options.rope_frequencies = args.rope_factors;
    let preset = SynthOptions::preset(&args.preset).map_err(Failure::unusable)?;
    let shape = &mut options.shape;
    if let Some(name) = &args.arch {
        let parsed = name.parse();
        shape.architecture = parsed.map_err(|error| Failure::unusable(format!("`--arch`: {error}")))?;
        options.tokenizer = Tokenizer::of(shape.architecture);
        shape.tied_embeddings |= matches!(shape.architecture, Architecture::Gemma | Architecture::Gemma2);
    }
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
    if options != preset {
        options.name = format!("{}-custom", args.preset);
    }
    Ok(options)
}

/// A model that cannot be made, by the flag that asked for it.
fn refused(error: &SynthError) -> Failure {
    let (flag, hint) = match error {
        SynthError::KeyLength { .. } => {
            ("--head-length", "give an even length, or other `--dim` and `--heads`")
        }
        SynthError::Gain { .. } => ("--gain", "give a number from 0.001 to 1000, as 1"),
        SynthError::Vocabulary { .. } => ("--vocab", "give a number in this range"),
        SynthError::RopeFactors { .. } => ("--rope-factors", "leave it out, or give `--arch llama`"),
        SynthError::Block(_) => ("--quant", "give lengths that are whole blocks, or `--quant f16`"),
        _ => return Failure::unusable(error),
    };
    Failure::unusable(format!("`{flag}`: {error}")).hint(hint)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Verb {
        #[command(flatten)]
        args: SynthArgs,
    }

    fn given(more: &[&str]) -> SynthOptions {
        let verb = Verb::parse_from([&["synth", "--output", "x"], more].concat());
        options(&verb.args).expect("options")
    }

    #[test]
    fn only_the_presets_own_model_has_its_name() {
        assert_eq!(given(&[]).name, "tiny");
        assert_eq!(given(&["--gain", "1", "--seed", "1"]).name, "tiny");
        let others = ["--gain=2", "--rope-factors", "--quant=f16", "--seed=2", "--layers=3", "--arch=qwen3"];
        for other in others {
            assert_eq!(given(&[other]).name, "tiny-custom", "{other}");
        }
    }
}
