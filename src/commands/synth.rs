//! `hearth synth`: writes a model of any shape with random weights.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use hearth_profiles::Layers;
use hearth_profiles::model::{Experts, ModelShape, SharedKv};
use hearth_runtime::synth::{SynthError, SynthOptions, TokenizerKind, synthesise};
use hearth_workflow::files::PartialFile;
use serde::Serialize;

use super::print_result;
use crate::cli::SynthArgs;
use crate::diagnostics::{ExitCode, Failure};
use crate::interruption::{self, EXIT_INTERRUPTED};
use crate::progress;

/// A summary of the written model, as `--json` prints it.
#[derive(Serialize)]
struct Output {
    path: String,
    file_bytes: u64,
    parameters: u64,
    tensors: usize,
}

pub fn run(args: &SynthArgs, json: bool) -> Result<ExitCode, Failure> {
    let options = options(args)?;
    let partial_path = Arc::new(OnceLock::<PathBuf>::new());
    let written_path = partial_path.clone();
    interruption::on_signal(move || {
        let _ = written_path.get().map(std::fs::remove_file);
        EXIT_INTERRUPTED.exit();
    });
    let file = PartialFile::create(&args.output)?;
    let _ = partial_path.set(file.path().to_owned());
    let bar = progress::progress_bar("weights", 0, progress::BYTES_TEMPLATE);
    let model = synthesise(&options, file.path(), &mut |written, total| {
        bar.set_length(total);
        bar.set_position(written);
    })
    .map_err(|error| with_flag(&error))?;
    file.commit()?;
    bar.finish_and_clear();
    let output = Output {
        path: args.output.display().to_string(),
        file_bytes: model.file_bytes.0,
        parameters: model.parameter_count,
        tensors: model.tensor_count,
    };
    print_result(json, &output, |Output { path, parameters, .. }| {
        format!("wrote {path}: {}, {:.1} million weights\n", model.file_bytes, *parameters as f64 / 1e6)
    })
}

fn options(args: &SynthArgs) -> Result<SynthOptions, Failure> {
    let preset = SynthOptions::from_preset(&args.preset).map_err(Failure::invalid)?;
    let (seed, gain, rope_frequencies) = (args.seed, args.gain, args.rope_factors);
    let mut options = SynthOptions { seed, gain, add_rope_factors: rope_frequencies, ..preset.clone() };
    if let Some(quant) = &args.quant {
        options.quant = quant.parse().map_err(|error| Failure::invalid(format!("`--quant`: {error}")))?;
    }
    let shape = &mut options.shape;
    if let Some(name) = &args.arch {
        let parsed = name.parse();
        shape.architecture = parsed.map_err(|error| Failure::invalid(format!("`--arch`: {error}")))?;
        options.tokenizer = TokenizerKind::for_architecture(shape.architecture);
        shape.has_tied_embeddings |= shape.architecture.spec().always_ties_embeddings;
    }
    shape.layers = args.layers.map_or(shape.layers, Layers);
    for (field, value) in [
        (&mut shape.embedding_length, args.dim),
        (&mut shape.feed_forward_length, args.ffn),
        (&mut shape.heads, args.heads),
        (&mut shape.kv_heads, args.kv_heads),
        (&mut shape.context_length, args.context),
        (&mut shape.vocab_size, args.vocab),
    ] {
        *field = value.unwrap_or(*field);
    }
    if args.dim.is_some() || args.heads.is_some() {
        let length = shape.embedding_length.checked_div(shape.heads).unwrap_or(0);
        (shape.key_length, shape.value_length) = (length, length);
    }
    if let Some(length) = args.head_dim {
        (shape.key_length, shape.value_length) = (length, length);
    }
    shape.has_tied_embeddings |= args.tied_embeddings;
    let changes_heads = [args.dim, args.heads, args.kv_heads, args.head_dim].iter().any(Option::is_some);
    if args.arch.is_some() || changes_heads {
        options.shape = options.shape.with_default_hybrid().with_default_experts();
    }
    options.shape.experts = experts(args, &options.shape);
    let shape = &mut options.shape;
    for (flag, value) in [("--shared-kv", args.shared_kv), ("--per-layer-input", args.per_layer_input)] {
        if value.is_some() && !shape.architecture.spec().has_local_dimensions {
            let what = format!("`{flag}`: {} models have no such layers", shape.architecture);
            return Err(Failure::invalid(what).with_hint("omit this flag, or use `--arch gemma4`"));
        }
    }
    if let Some(layers) = args.shared_kv {
        let feed_forward_length = shape.feed_forward_length.saturating_mul(2);
        shape.shared_kv = Some(SharedKv { layers, feed_forward_length });
        // As in the published models with shared keys, which have values of their own in all other layers.
        shape.values_are_keys = false;
    }
    shape.per_layer_input_length = args.per_layer_input.unwrap_or(shape.per_layer_input_length);
    if options != preset {
        options.name = format!("{}-custom", args.preset);
    }
    Ok(options)
}

/// Converts an error into a failure that names the flag that causes the error, and has a hint.
fn with_flag(error: &SynthError) -> Failure {
    let (flag, hint) = match error {
        SynthError::KeyLength { .. } => {
            ("--head-length", "use an even length, or change `--dim` and `--heads`")
        }
        SynthError::Gain { .. } => ("--gain", "use a number from 0.001 to 1000, such as 1"),
        SynthError::Vocabulary { .. } => ("--vocab", "use a number of tokens in the range of the message"),
        SynthError::RopeFactors { .. } => ("--rope-factors", "omit this flag, or use `--arch llama`"),
        SynthError::Block(_) => {
            ("--quant", "use dimensions that are multiples of the block size, or `--quant f16`")
        }
        _ => return Failure::invalid(error),
    };
    Failure::invalid(format!("`{flag}`: {error}")).with_hint(hint)
}

/// Returns the experts of the shape, with the numbers of the flags.
fn experts(args: &SynthArgs, shape: &ModelShape) -> Option<Experts> {
    let SynthArgs { experts, experts_used, expert_ffn, .. } = *args;
    if experts.or(experts_used).or(expert_ffn).is_none() {
        return shape.experts;
    }
    let before = shape.experts.unwrap_or(Experts {
        count: 8,
        used: 2,
        feed_forward_length: shape.feed_forward_length,
        shared_feed_forward_length: 0,
        dense_layers: 0,
    });
    let count = experts.unwrap_or(before.count);
    let used = experts_used.unwrap_or(if experts.is_some() { (count / 4).max(1) } else { before.used });
    let feed_forward_length = expert_ffn.unwrap_or(before.feed_forward_length);
    Some(Experts { count, used, feed_forward_length, ..before })
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::{Cli, Verb};

    fn parsed(more: &[&str]) -> SynthOptions {
        let cli = Cli::parse_from([&["hearth", "synth", "--output", "x"], more].concat());
        let Verb::Synth(args) = cli.verb else { unreachable!("this is the verb") };
        options(&args).expect("options")
    }

    #[test]
    fn changed_preset_has_a_different_name() {
        assert_eq!(parsed(&[]).name, "tiny");
        assert_eq!(parsed(&["--gain", "1", "--seed", "1"]).name, "tiny");
        let others = ["--gain=2", "--rope-factors", "--quant=f16", "--seed=2", "--layers=3", "--arch=qwen3"];
        for other in others {
            assert_eq!(parsed(&[other]).name, "tiny-custom", "{other}");
        }
    }
}
