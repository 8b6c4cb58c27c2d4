//! Measures the speed of matmuls on one thread, for each weight format and number of tokens.
//!
//!     cargo run --release -p hearth-runtime --example matmul_speed -- \
//!         [--rows N] [--columns N] [--format F] [--tokens T,..] [--instructions scalar|avx2|avx512]
//!
//! One thread multiplies a matrix of `--rows` rows of `--columns` weights by a batch of tokens. For each format, the
//! example prints a line with billions of multiplications per second of the thread's CPU time, because the machine may
//! be shared; the best of several passes counts. `--instructions` selects the instruction set; the default is the
//! fastest. Small batches use dot products and large batches use panels, so each line shows both speeds.

use std::error::Error;
use std::sync::Arc;

use hearth_kernels::InstructionSet;
use hearth_profiles::measure::Kernels;
use hearth_runtime::clock::thread_cpu_nanos;
use hearth_runtime::profile::CpuKernels;
use hearth_runtime::{Cpu, ThreadPool, ThreadPoolOptions};

/// Minimum number of tokens in a measured pass, so that the cost of reading the clock does not matter.
const MIN_TOKENS: usize = 256;

/// Number of measured passes; the fastest pass counts.
const PASSES: usize = 7;

/// The value of every byte of float weights; with this value, no f32, f16 or bf16 number is subnormal.
const FLOAT_BYTE: u8 = 0x1c;

const OPTIONS: &str = "--rows, --columns, --format, --tokens or --instructions";

struct Arguments {
    rows: usize,
    columns: usize,
    /// The name of the only format to measure; all formats are measured if it is missing.
    format: Option<String>,
    tokens: Vec<usize>,
    instructions: InstructionSet,
}

impl Arguments {
    fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Arguments, Box<dyn Error>> {
        let mut parsed = Arguments {
            rows: 512,
            columns: 2048,
            format: None,
            tokens: vec![1, 8, 16, 64, 512],
            instructions: InstructionSet::detect(),
        };
        while let Some(name) = arguments.next() {
            let value = arguments.next().ok_or_else(|| format!("{name} needs a value"))?;
            match name.as_str() {
                "--rows" => parsed.rows = parse_count(&value)?,
                "--columns" => parsed.columns = parse_count(&value)?,
                "--format" => parsed.format = Some(value),
                "--tokens" => {
                    parsed.tokens = value.split(',').map(parse_count).collect::<Result<_, _>>()?;
                }
                "--instructions" => parsed.instructions = instruction_set_by_name(&value)?,
                _ => return Err(format!("unknown argument {name}; use {OPTIONS}").into()),
            }
        }
        Ok(parsed)
    }
}

fn parse_count(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|&number| number > 0).ok_or_else(|| format!("{text} is not a positive integer"))
}

fn instruction_set_by_name(name: &str) -> Result<InstructionSet, String> {
    let available = InstructionSet::detect_all();
    available.iter().copied().find(|instructions| instructions.name() == name).ok_or_else(|| {
        let names: Vec<&str> = available.iter().map(|instructions| instructions.name()).collect();
        format!("this CPU does not support {name}; use one of {}", names.join(", "))
    })
}

fn main() -> Result<(), Box<dyn Error>> {
    let Arguments { rows, columns, format: only, tokens, instructions } =
        Arguments::parse(std::env::args().skip(1))?;
    let pool = ThreadPool::new(ThreadPoolOptions { threads: 1, pin_workers: false, spin_ns: 0 })?;
    let mut cpu = Cpu::new(Arc::new(pool));
    cpu.instruction_set = instructions;
    let mut kernels = CpuKernels::new(cpu);
    let mut formats = kernels.formats();
    formats.retain(|format| only.as_ref().is_none_or(|only| only == format.name()));
    if formats.is_empty() {
        return Err(format!("there are no kernels for the format {}", only.unwrap_or_default()).into());
    }
    let name = instructions.name();
    println!("billions of multiplications per second of CPU time, {rows} rows of {columns}, {name}");
    let heads: Vec<String> = tokens.iter().map(ToString::to_string).collect();
    println!("| format \\ tokens | {} |", heads.join(" | "));
    println!("| --- |{}", " --- |".repeat(tokens.len()));
    for format in formats {
        let partial = || format!("{columns} weights do not fill blocks of {format}");
        let row = format.row_bytes(columns as u64).ok_or_else(partial)?;
        let bytes = usize::try_from(row.0)?;
        let byte = |at: usize| if format.block_len() == 1 { FLOAT_BYTE } else { (at % 59) as u8 };
        let weights: Vec<u8> = (0..rows * bytes).map(byte).collect();
        print!("| {format} |");
        for &tokens in &tokens {
            let repeats = MIN_TOKENS.div_ceil(tokens);
            let multiplications = (rows * columns * tokens * repeats) as f64;
            let mut best = 0.0f64;
            // The first pass fills buffers and is not counted.
            for pass in 0..=PASSES {
                let start = thread_cpu_nanos();
                kernels.multiply(format, columns, &weights, tokens, repeats);
                let speed = multiplications / (thread_cpu_nanos() - start).max(1) as f64;
                best = if pass == 0 { 0.0 } else { best.max(speed) };
            }
            print!(" {best:.1} |");
        }
        println!();
    }
    Ok(())
}
