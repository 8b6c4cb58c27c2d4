//! Writes the logits of a model after each of the given tokens to the standard output.
//!
//! `cargo run --release -p hearth-runtime --example logits -- [--kv-cache=FORMAT] MODEL.gguf TOKEN.. > logits.f32`
//!
//! The output has one row of logits for each token, `[tokens, vocabulary]`, in f32, little-endian, for comparison with
//! other programs. The tokens are computed in passes of 16, so that they attend to positions of the same pass and of
//! earlier passes. The KV cache is f32 without `--kv-cache`.

use std::io::Write;
use std::sync::Arc;

use hearth_runtime::{Cpu, Engine, ExecError, KvFormat, ThreadPool, ThreadPoolOptions, Weights};

/// Number of tokens in a pass.
const PASS_TOKENS: usize = 16;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1).peekable();
    let flag = arguments.next_if(|first| first.starts_with("--kv-cache="));
    let kv_format = match flag.as_deref().and_then(|flag| flag.strip_prefix("--kv-cache=")) {
        None | Some("f32") => KvFormat::F32,
        Some("f16") => KvFormat::F16,
        Some("q8_0") => KvFormat::Q8_0,
        Some("q4_0") => KvFormat::Q4_0,
        Some(other) => return Err(format!("a KV cache in `{other}` is not supported").into()),
    };
    let path = arguments.next().ok_or("usage: logits [--kv-cache=FORMAT] MODEL.gguf TOKEN..")?;
    let tokens = arguments.map(|text| text.parse()).collect::<Result<Vec<u32>, _>>()?;
    let weights = Arc::new(Weights::open(path)?);
    let pool =
        ThreadPool::new(ThreadPoolOptions::default()).map_err(|source| ExecError::Threads { source })?;
    let cpu = Cpu::new(Arc::new(pool));
    let mut engine = Engine::new(weights, cpu, tokens.len() as u32, kv_format)?;
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    for tokens in tokens.chunks(PASS_TOKENS) {
        let hidden = engine.forward(tokens)?;
        for logit in engine.input_output_layers.logits(&hidden)? {
            out.write_all(&logit.to_le_bytes())?;
        }
    }
    Ok(())
}
