//! Multiplications per second of one thread, for each format and number of tokens.
//!
//!     cargo run --release -p hearth-runtime --example product_speed -- \
//!         [--rows N] [--columns N] [--format F] [--tokens T,..] [--instructions scalar|avx2|avx512]
//!
//! One thread multiplies a matrix of `--rows` rows of `--columns` weights by so many tokens at once. A line for each
//! format: billions of multiplications per second of the thread's processor time, because the machine may be shared;
//! the best of a few passes counts. `--instructions` asks for less than the best that the processor has. A few
//! tokens are dot products, many meet the weights panel by panel, so that one line shows both ways.

use std::error::Error;
use std::sync::Arc;

use hearth_kernels::InstructionSet;
use hearth_profiles::measure::Kernels;
use hearth_runtime::clock::thread_cpu_nanos;
use hearth_runtime::profile::CpuKernels;
use hearth_runtime::{Cpu, Pool, PoolOptions};

/// Tokens that pass in a measured stretch, at least, so that the clock's own time does not count.
const TOKENS_A_PASS: usize = 256;

/// Passes; the best one counts.
const PASSES: usize = 7;

/// Every byte of plain numbers: as f32, f16 and bf16 an ordinary one, neither zero nor subnormal.
const ORDINARY: u8 = 0x1c;

/// What is measured.
struct Choice {
    rows: usize,
    columns: usize,
    /// All, if none is given.
    format: Option<String>,
    tokens: Vec<usize>,
    instructions: InstructionSet,
}

impl Choice {
    fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Choice, Box<dyn Error>> {
        let mut choice = Choice {
            rows: 512,
            columns: 2048,
            format: None,
            tokens: vec![1, 8, 16, 64, 512],
            instructions: InstructionSet::detect(),
        };
        while let Some(name) = arguments.next() {
            let value = arguments.next().ok_or_else(|| format!("{name} needs a value"))?;
            match name.as_str() {
                "--rows" => choice.rows = positive(&value)?,
                "--columns" => choice.columns = positive(&value)?,
                "--format" => choice.format = Some(value),
                "--tokens" => choice.tokens = value.split(',').map(positive).collect::<Result<_, _>>()?,
                "--instructions" => choice.instructions = named(&value)?,
                _ => {
                    return Err(format!(
                        "{name} is none of --rows, --columns, --format, --tokens, --instructions"
                    )
                    .into());
                }
            }
        }
        Ok(choice)
    }
}

fn positive(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|&number| number > 0).ok_or_else(|| format!("{text} is not a number above zero"))
}

fn named(name: &str) -> Result<InstructionSet, String> {
    let available = InstructionSet::available();
    available.iter().copied().find(|instructions| instructions.name() == name).ok_or_else(|| {
        let names: Vec<&str> = available.iter().map(|instructions| instructions.name()).collect();
        format!("this processor has no {name}, but {}", names.join(", "))
    })
}

fn main() -> Result<(), Box<dyn Error>> {
    let Choice { rows, columns, format: only, tokens, instructions } =
        Choice::parse(std::env::args().skip(1))?;
    let pool = Pool::new(PoolOptions { threads: 1, pin: false, spin_ns: 0 })?;
    let mut cpu = Cpu::new(Arc::new(pool));
    cpu.instructions = instructions;
    let mut kernels = CpuKernels::new(cpu);
    let mut formats = kernels.formats();
    formats.retain(|format| only.as_ref().is_none_or(|only| only == format.name()));
    if formats.is_empty() {
        return Err(format!("there are no kernels of {}", only.unwrap_or_default()).into());
    }
    println!(
        "G multiplications a second of processor time, {rows} rows of {columns}, {}",
        instructions.name()
    );
    let heads: Vec<String> = tokens.iter().map(ToString::to_string).collect();
    println!("| format \\ tokens | {} |", heads.join(" | "));
    println!("| --- |{}", " --- |".repeat(tokens.len()));
    for format in formats {
        let row =
            format.row_bytes(columns as u64).ok_or_else(|| format!("{columns} are no blocks of {format}"))?;
        let bytes = usize::try_from(row.0)?;
        let byte = |at: usize| if format.block_len() == 1 { ORDINARY } else { (at % 59) as u8 };
        let weights: Vec<u8> = (0..rows * bytes).map(byte).collect();
        print!("| {format} |");
        for &tokens in &tokens {
            let repeats = TOKENS_A_PASS.div_ceil(tokens);
            let products = (rows * columns * tokens * repeats) as f64;
            let mut best = 0.0f64;
            // The first pass fills buffers and is not counted.
            for pass in 0..=PASSES {
                let start = thread_cpu_nanos();
                kernels.multiply(format, columns, &weights, tokens, repeats);
                let speed = products / (thread_cpu_nanos() - start).max(1) as f64;
                best = if pass == 0 { 0.0 } else { best.max(speed) };
            }
            print!(" {best:.1} |");
        }
        println!();
    }
    Ok(())
}
