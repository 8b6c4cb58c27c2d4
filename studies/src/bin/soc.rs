//! Computes the prefill speed of a phone by prompt length, and the time of a matmul by its partition.
//!
//!     cargo run --release -p hearth-studies --bin soc
//!
//! Writes two charts to `docs/studies/soc`, the same bytes on every machine, and prints the averages over lengths and
//! models, for which there is no scenario. The phone is the shipped `snapdragon-8-gen-3`.
//!
//! Not here: the interpretation of the results, in `docs/studies/soc/README.md`.

use std::path::Path;
use std::process::ExitCode;

use hearth_core::soc::interval::total_time;
use hearth_core::soc::{Matmul, SocLatencyModel};
use hearth_profiles::device::soc::{PartitionPolicy, Soc, Strategy, Synchronisation};
use hearth_profiles::device::{SocOptions, shipped};
use hearth_profiles::model::{self, ModelDocument, ModelProfile};
use hearth_profiles::{Bytes, Document};
use hearth_reports::charts::lines::{LineChart, Position, Series};
use hearth_schema::pass::Pass;
use hearth_studies::run_study;

type Failed = Box<dyn std::error::Error>;

/// The maximum length of the compared prompts. Lengths are the multiples of 32, and each of them plus one token,
/// where another graph is needed.
const MAX_LENGTH: u32 = 1024;

fn main() -> ExitCode {
    run_study(|_| study())
}

fn study() -> Result<(), Failed> {
    let folder = Path::new("docs/studies/soc");
    std::fs::create_dir_all(folder)?;
    for (name, lines) in [("prefill", prefill()?), ("partition", partition()?)] {
        let drawing = lines.standalone_svg().ok_or("the chart has no values")?;
        std::fs::write(folder.join(format!("{name}.svg")), drawing)?;
    }
    averages()
}

fn soc(options: SocOptions) -> Result<Soc, Failed> {
    let mut soc = shipped("snapdragon-8-gen-3")?.soc.ok_or("the device has no SoC")?;
    soc.default_options = options;
    Ok(soc)
}

/// Returns the seconds of a pass through a whole model.
fn time(options: SocOptions, model: &ModelProfile, pass: Pass) -> Result<f64, Failed> {
    let soc = soc(options)?;
    let forward = SocLatencyModel::new(&soc, model, Bytes(2)).forward_cost(pass);
    let layers = f64::from(model.shape.layers.0);
    Ok((total_time(&forward.layer_intervals) * layers
        + forward.output_interval.time()
        + forward.preparation_time)
        .0)
}

/// Returns the chart of the prefill speed by prompt length, for each strategy.
fn prefill() -> Result<LineChart, Failed> {
    let model = model::shipped("llama-8b")?;
    let lengths: Vec<u32> =
        (0..MAX_LENGTH / 32).flat_map(|step| [32 * step + 1, 32 * (step + 1)]).skip(1).collect();
    let mut lines = Vec::new();
    for strategy in Strategy::ALL {
        let mut values = Vec::new();
        for &tokens in &lengths {
            let pass = Pass::new(0, 0, tokens, true);
            values.push(Some(f64::from(tokens) / time(SocOptions::with_strategy(strategy), &model, pass)?));
        }
        lines.push(Series { name: strategy.name().to_owned(), values });
    }
    let place = |&tokens: &u32| Position {
        fraction: f64::from(tokens) / f64::from(MAX_LENGTH),
        label: tokens.to_string(),
    };
    Ok(LineChart {
        title: "Prefill speed of Llama-8B over the length of the prompt".into(),
        x_title: "tokens of the prompt".into(),
        unit: "tokens/s".into(),
        positions: lengths.iter().map(place).collect(),
        series: lines,
        mark_missing: true,
    })
}

/// Returns the chart of the time of two feed-forward matmuls with 256 tokens, by the share of their tokens or rows
/// that the NPU computes.
fn partition() -> Result<LineChart, Failed> {
    let (soc, model) = (soc(SocOptions::with_strategy(Strategy::HeteroTensor))?, model::shipped("llama-8b")?);
    let latency_model = SocLatencyModel::new(&soc, &model, Bytes(2));
    let solver = latency_model.solver().ok_or("the SoC has no NPU")?;
    let parts: Vec<u64> = (0..=16).collect();
    let (down, pair) = (Matmul { inputs: 14336, outputs: 4096 }, solver.sync.pair_cost());
    let by_tokens = |part: u64, matmul: Matmul| {
        let on_npu = part * 16;
        let gpu = solver.gpu.matmul_time(matmul, 256 - on_npu);
        let npu = solver.npu.matmul_time(matmul, on_npu);
        1e3 * (gpu.max(npu) + if on_npu == 0 { 0.0 } else { pair })
    };
    let by_rows = |part: u64, matmul: Matmul| {
        let rows = matmul.outputs / 16 * part;
        let gpu = solver.gpu.matmul_time(matmul.with_outputs(matmul.outputs - rows), 256);
        1e3 * (gpu.max(solver.npu.matmul_time(matmul.with_outputs(rows), 256))
            + if rows == 0 { 0.0 } else { pair })
    };
    let line = |name: &str, time: &dyn Fn(u64) -> f64| Series {
        name: name.to_owned(),
        values: parts.iter().map(|&part| Some(time(part))).collect(),
    };
    let place = |&part: &u64| Position {
        fraction: part as f64 / 16.0,
        label: format!("{:.0} %", part as f64 * 100.0 / 16.0),
    };
    let gate = Matmul { inputs: 4096, outputs: 14336 };
    Ok(LineChart {
        title: "Time of a product with 256 tokens over the part of it that the NPU computes".into(),
        x_title: "part of the product on the NPU".into(),
        unit: "ms".into(),
        positions: parts.iter().map(place).collect(),
        series: vec![
            line("down, cut by tokens", &|part| by_tokens(part, down)),
            line("down, cut by rows", &|part| by_rows(part, down)),
            line("gate, cut by tokens", &|part| by_tokens(part, gate)),
            line("gate, cut by rows", &|part| by_rows(part, gate)),
        ],
        mark_missing: true,
    })
}

/// Prints the gains of fast synchronisation, and the times of other strategies relative to hetero-tensor.
fn averages() -> Result<(), Failed> {
    let read = |name: &str| -> Result<ModelProfile, Failed> {
        let text = std::fs::read_to_string(format!("scenarios/soc/models/{name}.yaml"))?;
        Ok(ModelDocument::from_yaml(&text)?.profile()?)
    };
    let models = [model::shipped("llama-8b")?, read("llama-7b")?, read("internlm-1.8b")?];
    println!(
        "What fast synchronisation gains: prefill at 64, 256 and 1024 tokens, their mean, and decoding.\n"
    );
    println!(
        "| model | strategy | 64 | 256 | 1024 | mean | decoding |\n| --- | --- | --- | --- | --- | --- | --- |"
    );
    for model in &models {
        for strategy in [Strategy::HeteroLayer, Strategy::HeteroTensor] {
            let fast = SocOptions::with_strategy(strategy);
            let slow = SocOptions {
                synchronisation: Synchronisation::Slow,
                partitions: PartitionPolicy::Fixed,
                ..fast
            };
            let gain = |pass: Pass| -> Result<f64, Failed> {
                Ok(time(slow, model, pass)? / time(fast, model, pass)? - 1.0)
            };
            let lengths = [64, 256, 1024].map(|tokens| gain(Pass::new(0, 0, tokens, true)));
            let [short, middle, long] = lengths;
            let (short, middle, long) = (short?, middle?, long?);
            let decoding = 1.0 + gain(Pass::new(1, 256, 1, true))?;
            let mean = (short + middle + long) / 3.0;
            let [short, middle, long, mean] = [short, middle, long, mean].map(|gain| gain * 100.0);
            println!(
                "| {} | {} | {short:.1} % | {middle:.1} % | {long:.1} % | {mean:.1} % | {decoding:.2} times |",
                model.name,
                strategy.name()
            );
        }
    }
    println!("\nOver hetero-tensor, just above a graph's size, on Llama-8B:\n");
    println!("| tokens | online-prepare | padding | pipe |\n| --- | --- | --- | --- |");
    let mut sums = [0.0; 3];
    let lengths = [33, 65, 135, 300, 525, 600, 1000];
    for tokens in lengths {
        let pass = Pass::new(0, 0, tokens, true);
        let tensor = time(SocOptions::with_strategy(Strategy::HeteroTensor), &models[0], pass)?;
        let mut cells = [0.0; 3];
        for (at, strategy) in
            [Strategy::OnlinePrepare, Strategy::Padding, Strategy::Pipe].into_iter().enumerate()
        {
            cells[at] = time(SocOptions::with_strategy(strategy), &models[0], pass)? / tensor;
            sums[at] += cells[at] / lengths.len() as f64;
        }
        println!("| {tokens} | {:.2} | {:.2} | {:.2} |", cells[0], cells[1], cells[2]);
    }
    println!("| mean | {:.2} | {:.2} | {:.2} |", sums[0], sums[1], sums[2]);
    Ok(())
}
