//! How fast does this device decode and prefill a model, and how near is that to its memory's speed?
//!
//!     cargo run --release -p hearth-exec --example decode_speed -- model.gguf [threads] [tokens] [prompt]

use std::error::Error;
use std::sync::Arc;

use hearth_exec::clock::wall_nanos;
use hearth_exec::sampler::greedy;
use hearth_exec::{CacheFormat, CacheOptions, ComputeCost, Cpu, Head, Pool, PoolOptions, Stage, Weights};

/// Bytes read for every token: all layers and the output head.
fn bytes_a_token(weights: &Weights) -> u64 {
    let layers = weights.layers_extents(0..weights.shape().layers.0);
    layers.iter().chain(&weights.head_extents()).map(|extent| extent.length).sum()
}

/// The best of some passes over the layers' bytes, all threads adding up words.
fn read_bandwidth(weights: &Weights, pool: &Pool) -> f64 {
    let extents = weights.layers_extents(0..weights.shape().layers.0);
    let mut best = 0.0f64;
    for _ in 0..5 {
        let start = wall_nanos();
        let mut bytes = 0;
        for &extent in &extents {
            let words = weights.bytes(extent).expect("an extent of this model").as_chunks::<64>().0;
            bytes += words.len() * 64;
            pool.for_each(words.len(), 4096, |_, range| {
                let mut sums = [0u64; 8];
                for line in &words[range] {
                    for (sum, word) in sums.iter_mut().zip(line.as_chunks::<8>().0) {
                        *sum ^= u64::from_le_bytes(*word);
                    }
                }
                std::hint::black_box(sums);
            });
        }
        best = best.max(bytes as f64 / (wall_nanos() - start) as f64);
    }
    best
}

fn print_cost(cost: ComputeCost) {
    let share = |nanos: u64| 100.0 * nanos as f64 / cost.wall_ns.max(1) as f64;
    println!(
        "  critical path: {:.1} % cpu, {:.1} % run queue, {:.1} % waiting",
        share(cost.cpu_ns),
        share(cost.queue_ns),
        share(cost.demand_disk_ns())
    );
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().ok_or("give a GGUF file")?;
    let mut number = |default: usize| arguments.next().map_or(Ok(default), |text| text.parse());
    let defaults = PoolOptions::default();
    let (threads, tokens, prompt) = (number(defaults.threads)?, number(64)?, number(128)?.max(1));

    let weights = Arc::new(Weights::open(path)?);
    let pool = Arc::new(Pool::new(PoolOptions { threads, ..defaults })?);
    let cpu = Cpu::new(Arc::clone(&pool));
    let layers = weights.shape().layers.0;
    let context = (prompt + tokens + 1) as u32;
    let cache = CacheOptions { context, format: CacheFormat::F16 };
    let mut stage =
        Stage::on_cpu(Arc::clone(&weights), std::slice::from_ref(&(0..layers)), cache, cpu.clone())?;
    let mut head = Head::new(Arc::clone(&weights), cpu);
    let bandwidth = read_bandwidth(&weights, &pool);
    println!("{} threads, {}, reading {bandwidth:.1} GB/s", pool.threads(), stage.backend_name());

    let ids: Vec<u32> = (0..prompt as u32).map(|at| at * 7919 % weights.shape().vocabulary).collect();
    let positions: Vec<u32> = (0..prompt as u32).collect();
    let mut hidden = head.embed(&ids)?;
    let start = wall_nanos();
    let cost = stage.forward(0..layers, &mut hidden, &positions)?;
    let seconds = (wall_nanos() - start) as f64 * 1e-9;
    println!("prefill of {prompt}: {:.1} tokens/s", prompt as f64 / seconds);
    print_cost(cost);

    let mut token = greedy(&head.logits_of_last(&hidden)?);
    let mut cost = ComputeCost::default();
    let mut times = Vec::new();
    for position in (prompt as u32..).take(tokens) {
        let start = wall_nanos();
        let mut hidden = head.embed(&[token])?;
        cost += stage.forward(0..layers, &mut hidden, &[position])?;
        token = greedy(&head.logits_of_last(&hidden)?);
        cost += head.last_cost();
        times.push(wall_nanos() - start);
    }
    let seconds = times.iter().sum::<u64>() as f64 * 1e-9;
    times.sort_unstable();
    let median = times.get(times.len() / 2).copied().unwrap_or(1) as f64;
    let rate = bytes_a_token(&weights) as f64 / median;
    println!(
        "decode of {tokens}: {:.2} tokens/s, median {:.2}: {rate:.1} GB/s, {:.0} % of reading",
        tokens as f64 / seconds,
        1e9 / median,
        100.0 * rate / bandwidth
    );
    print_cost(cost);
    Ok(())
}
