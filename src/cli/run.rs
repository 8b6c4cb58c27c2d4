//! Flags of `hearth run`, and the flags that it shares with `hearth execute` and `hearth serve`.

use std::path::PathBuf;

use clap::Args;
use hearth_runtime::{Sampler, SamplerOptions};
use hearth_schema::scenario::KvFormat;

use super::{GpuWeightFormat, choice_parser};

#[derive(Debug, Args)]
pub struct RunArgs {
    /// The GGUF file of the model, or `hf:OWNER/REPO:QUANT` for a model on Hugging Face.
    pub model: PathBuf,
    /// Answer TEXT and exit. Without TEXT, `hearth run` answers what comes from standard input, or starts a chat if
    /// standard input is a terminal.
    pub text: Option<String>,
    /// Begin the conversation with this system message.
    #[arg(long, value_name = "TEXT", conflicts_with = "complete")]
    pub system: Option<String>,
    /// Continue the text instead of answering it, without the chat template of the model.
    #[arg(long)]
    pub complete: bool,
    /// Generate at most this many tokens for each answer [default: until the context is full].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub tokens: Option<u32>,
    /// Neither read nor write the file with the texts that were entered in earlier chats.
    #[arg(long)]
    pub no_history: bool,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    #[command(flatten)]
    pub single_device: SingleDeviceArgs,
    /// Compute with this many CPU threads [default: one per core].
    #[arg(long)]
    pub threads: Option<usize>,
    /// Set the format of the weights on the GPU. A conversion loses precision and changes the output.
    #[arg(long, value_enum, default_value_t = GpuWeightFormat::AsStored)]
    pub gpu_weights: GpuWeightFormat,
}

/// The sampling flags.
#[derive(Debug, Args)]
pub struct SamplingArgs {
    /// Set the sampling temperature; 0 selects the most likely token (greedy sampling) [default: 0 for `execute`, 0.8
    /// for `run`].
    #[arg(long, allow_hyphen_values = true, value_parser = parse_temperature)]
    pub temperature: Option<f32>,
    /// Sample from this many most likely tokens (top-k); 0 samples from all tokens.
    #[arg(long, default_value_t = 40)]
    pub top_k: usize,
    /// Set the nucleus sampling threshold (top-p).
    #[arg(long, default_value_t = 0.95, allow_hyphen_values = true, value_parser = parse_top_p)]
    pub top_p: f32,
    /// Set the random seed of sampling; each sequence uses a separate random stream.
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
}

/// The flags for a model that this device runs alone, without a plan file.
#[derive(Debug, Args)]
pub struct SingleDeviceArgs {
    /// Set the context of a model that runs without a plan file, in tokens [default: the context of the model, at most
    /// 4096].
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    pub context: Option<u32>,
    /// Set the format of the KV cache of a model that runs without a plan file [default: f16].
    #[arg(long, value_name = "FORMAT", value_parser = choice_parser(&KV_FORMATS))]
    pub kv_cache: Option<KvFormat>,
    /// Compute this many layers on the GPU if the model runs without a plan file; a number above the number of layers
    /// means all [default: 0].
    #[arg(long, value_name = "LAYERS")]
    pub gpu_layers: Option<u32>,
}

/// Parses and checks a temperature, so that a wrong one is an error before a model is downloaded.
fn parse_temperature(text: &str) -> Result<f32, String> {
    let options = |temperature| SamplerOptions { temperature, ..SamplerOptions::default() };
    parse_sampling(text, options)
}

fn parse_top_p(text: &str) -> Result<f32, String> {
    parse_sampling(text, |top_p| SamplerOptions { top_p, ..SamplerOptions::default() })
}

fn parse_sampling(text: &str, options: impl Fn(f32) -> SamplerOptions) -> Result<f32, String> {
    let value = text.parse().map_err(|_| "expected a number".to_owned())?;
    Sampler::new(options(value)).map_err(|error| error.to_string()).map(|_| value)
}

const KV_FORMATS: [(&str, &str, KvFormat); 4] = [
    ("f16", "Two bytes per element", KvFormat::F16),
    ("f32", "Four bytes per element", KvFormat::F32),
    ("q8_0", "8 bits per element and a scale for 32; not on GPUs", KvFormat::Q8_0),
    ("q4_0", "4 bits per element and a scale for 32; not on GPUs", KvFormat::Q4_0),
];

impl SamplingArgs {
    /// Returns the options of a sampler. `temperature` is the default temperature of the command.
    pub fn options(&self, temperature: f32) -> SamplerOptions {
        let temperature = self.temperature.unwrap_or(temperature);
        SamplerOptions {
            temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            seed: self.seed,
            ..SamplerOptions::default()
        }
    }
}
