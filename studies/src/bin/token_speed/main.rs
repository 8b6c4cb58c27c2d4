//! Measures the CPU time to simulate a token, by number of devices, layers and tokens.
//!
//! ```text
//! cargo run --release -p hearth-studies --bin token_speed                 # a 70B model on four devices
//! cargo run --release -p hearth-studies --bin token_speed -- --scaling    # by devices, layers and tokens
//! ```
//!
//! Each time includes the simulation and its metrics, and is the shortest of five runs.

mod rings;

use hearth_core::metrics;
use hearth_schema::residency::{Residency, ResidencyOptions};
use hearth_studies::{StudyError, measure_cpu_seconds};
use rings::SimulatedRing;

const TOKENS: u32 = 64;

struct Measurement {
    /// Simulated time per output token, in milliseconds.
    tpot_ms: f64,
    records: usize,
    /// CPU time of the simulation and its metrics, in seconds.
    seconds: f64,
}

fn main() -> Result<(), StudyError> {
    if std::env::args().any(|argument| argument == "--scaling") { scaling() } else { four_devices() }
}

fn measure(ring: &SimulatedRing) -> Result<Measurement, StudyError> {
    let runs = (0..5)
        .map(|_| measure_cpu_seconds(|| ring.run().map(|trace| (metrics::compute_metrics(&trace), trace))));
    let fastest = runs.min_by(|one, other| one.1.total_cmp(&other.1)).expect("five runs");
    let (metrics, trace) = fastest.0?;
    let seconds = fastest.1;
    let tpot_ms = metrics.tpot_ms.map_or(0.0, |tpot| tpot.mean_ms);
    Ok(Measurement { tpot_ms, records: trace.records.len(), seconds })
}

fn four_devices() -> Result<(), StudyError> {
    println!(
        "| windows | rounds | residency | simulated TPOT ms | records a token | ms of our time a token |\n\
         |---|---|---|---|---|---|"
    );
    let (os, managed) = (ResidencyOptions::default(), ResidencyOptions::with_policy(Residency::Managed));
    let line = |windows: &[u32], what: &str, ring: &SimulatedRing| {
        let Measurement { tpot_ms, records, seconds } = measure(ring)?;
        let (ms_per_token, records) = (seconds * 1e3 / f64::from(TOKENS), records as u32 / TOKENS);
        let rounds = ring.plan.rounds;
        println!("| {windows:?} | {rounds} | {what} | {tpot_ms:.0} | {records} | {ms_per_token:.2} |");
        Ok::<(), StudyError>(())
    };
    line(&[51, 17, 12], "os, 36 layers on GPUs", &SimulatedRing::with_gpus(TOKENS)?)?;
    for (windows, what, residency) in [
        (&[40, 16, 16, 8], "os, no prefetch", os.without_prefetch()),
        (&[20, 8, 8, 4], "os", os),
        (&[5, 2, 2, 1], "os", os),
        (&[40, 16, 16, 8], "managed", managed),
        (&[20, 8, 8, 4], "managed", managed),
        (&[5, 2, 2, 1], "managed", managed),
    ] {
        line(windows, what, &SimulatedRing::new(windows, 80, TOKENS, residency, None)?)?;
    }
    Ok(())
}

fn scaling() -> Result<(), StudyError> {
    println!(
        "| in memory | devices | layers | tokens | ms in all | us a layer and token |\n|---|---|---|---|---|---|"
    );
    let by_devices = [1, 2, 4, 8, 16, 32].map(|devices| (devices, 160, 32));
    let by_layers = [20, 40, 80, 160].map(|layers| (4, layers, 32));
    let by_tokens = [8, 32, 128, 512].map(|tokens| (4, 80, tokens));
    for share in [0.5, 1.1] {
        for (devices, layers, tokens) in by_devices.into_iter().chain(by_layers).chain(by_tokens) {
            let windows = vec![layers / devices; devices as usize];
            let residency = ResidencyOptions::default();
            let ring = SimulatedRing::new(&windows, layers, tokens, residency, Some(share))?;
            let ms = measure(&ring)?.seconds * 1e3;
            let each = ms * 1e3 / f64::from(layers * tokens);
            let memory = if share == 0.5 { "half" } else { "all" };
            println!("| {memory} | {devices} | {layers} | {tokens} | {ms:.1} | {each:.1} |");
        }
    }
    Ok(())
}
