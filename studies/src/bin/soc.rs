//! Computes the prefill speed of a phone by prompt length, and the time of a matmul that GPU and NPU share.
//!
//!     cargo run --release -p hearth-studies --bin soc
//!
//! Writes two charts to `docs/studies/soc`, the same bytes on every machine, and prints averages over prompt lengths
//! and models that no scenario covers. The phone is the shipped device `snapdragon-8-gen-3`.
//!
//! Not here: the interpretation of the results, in `docs/studies/soc/README.md`.

use std::path::Path;
use std::process::ExitCode;

use hearth_core::soc::interval::total_time;
use hearth_core::soc::{Matmul, SocLatencyModel};
use hearth_profiles::device::soc::{PartitionPolicy, Soc, SocStrategy, Synchronisation};
use hearth_profiles::device::{SocOptions, shipped_profile};
use hearth_profiles::model::{self, ModelDocument, ModelProfile};
use hearth_profiles::{Document, Format};
use hearth_reports::charts::lines::{AxisPosition, LineChart, Series};
use hearth_schema::pass::Pass;
use hearth_studies::{StudyError, run_study};

/// Maximum prompt length in tokens. Lengths are 32 n, and 32 n + 1, which needs a larger NPU graph, for integers n.
const MAX_LENGTH: u32 = 1024;

fn main() -> ExitCode {
    run_study(|_| study())
}

fn study() -> Result<(), StudyError> {
    let folder = Path::new("docs/studies/soc");
    std::fs::create_dir_all(folder)?;
    for (name, lines) in [("prefill", prefill()?), ("partition", partition()?)] {
        let drawing = lines.to_standalone_svg().ok_or("the chart has no values")?;
        std::fs::write(folder.join(format!("{name}.svg")), drawing)?;
    }
    averages()
}

fn soc(default_options: SocOptions) -> Result<Soc, StudyError> {
    let soc = shipped_profile("snapdragon-8-gen-3")?.soc.ok_or("the device has no SoC")?;
    Ok(Soc { default_options, ..soc })
}

fn time(options: SocOptions, model: &ModelProfile, pass: Pass) -> Result<f64, StudyError> {
    let soc = soc(options)?;
    let forward = SocLatencyModel::new(&soc, model, Format::F16).forward_cost(pass);
    let layers = f64::from(model.shape.layers.0);
    let layer_time = total_time(&forward.layer_intervals) * layers;
    Ok((layer_time + forward.output_interval.time() + forward.preparation_time).0)
}

fn prefill() -> Result<LineChart, StudyError> {
    let model = model::shipped_profile("llama-8b")?;
    let lengths: Vec<u32> =
        (0..MAX_LENGTH / 32).flat_map(|step| [32 * step + 1, 32 * (step + 1)]).skip(1).collect();
    let mut lines = Vec::new();
    for strategy in SocStrategy::ALL_EXCEPT_BEST {
        let speed = |&tokens: &u32| {
            let pass = Pass::new(0, 0, tokens, true);
            Ok(Some(f64::from(tokens) / time(SocOptions::with_strategy(strategy), &model, pass)?))
        };
        let values = lengths.iter().map(speed).collect::<Result<_, StudyError>>()?;
        lines.push(Series { name: strategy.name().to_owned(), values });
    }
    let place = |&tokens: &u32| AxisPosition {
        x_fraction: f64::from(tokens) / f64::from(MAX_LENGTH),
        label: tokens.to_string(),
    };
    Ok(LineChart {
        title: "Prefill speed of Llama-8B over the length of the prompt".into(),
        x_title: "tokens of the prompt".into(),
        unit: "tokens/s".into(),
        x_positions: lengths.iter().map(place).collect(),
        series: lines,
        marks_missing_values: true,
    })
}

/// Returns a chart of the times of two matmuls with 256 tokens, over the share of tokens or rows that the NPU computes.
fn partition() -> Result<LineChart, StudyError> {
    let (soc, model) =
        (soc(SocOptions::with_strategy(SocStrategy::HeteroTensor))?, model::shipped_profile("llama-8b")?);
    let latency_model = SocLatencyModel::new(&soc, &model, Format::F16);
    let solver = latency_model.solver().ok_or("the SoC has no NPU")?;
    let parts: Vec<u64> = (0..=16).collect();
    let (down, pair) = (Matmul { inputs: 14336, outputs: 4096 }, solver.sync_cost.event_pair_seconds);
    let milliseconds =
        |part: u64, gpu: f64, npu: f64| 1e3 * (gpu.max(npu) + if part == 0 { 0.0 } else { pair });
    let by_tokens = |part: u64, matmul: Matmul| {
        let gpu = solver.gpu.matmul_seconds(matmul, 256 - part * 16);
        milliseconds(part, gpu, solver.npu.matmul_seconds(matmul, part * 16))
    };
    let by_rows = |part: u64, matmul: Matmul| {
        let rows = matmul.outputs / 16 * part;
        let gpu = solver.gpu.matmul_seconds(matmul.with_outputs(matmul.outputs - rows), 256);
        milliseconds(part, gpu, solver.npu.matmul_seconds(matmul.with_outputs(rows), 256))
    };
    let line = |name: &str, time: &dyn Fn(u64) -> f64| Series {
        name: name.to_owned(),
        values: parts.iter().map(|&part| Some(time(part))).collect(),
    };
    let place = |&part: &u64| AxisPosition {
        x_fraction: part as f64 / 16.0,
        label: format!("{:.0} %", part as f64 * 100.0 / 16.0),
    };
    let gate = Matmul { inputs: 4096, outputs: 14336 };
    Ok(LineChart {
        title: "Time of a product with 256 tokens over the part of it that the NPU computes".into(),
        x_title: "part of the product on the NPU".into(),
        unit: "ms".into(),
        x_positions: parts.iter().map(place).collect(),
        series: vec![
            line("down, cut by tokens", &|part| by_tokens(part, down)),
            line("down, cut by rows", &|part| by_rows(part, down)),
            line("gate, cut by tokens", &|part| by_tokens(part, gate)),
            line("gate, cut by rows", &|part| by_rows(part, gate)),
        ],
        marks_missing_values: true,
    })
}

/// Prints the gains of fast synchronisation, and the times of three strategies relative to `hetero-tensor`.
fn averages() -> Result<(), StudyError> {
    let read = |name: &str| -> Result<ModelProfile, StudyError> {
        let text = std::fs::read_to_string(format!("scenarios/soc/models/{name}.yaml"))?;
        Ok(ModelDocument::from_yaml(&text)?.to_profile()?)
    };
    let models = [model::shipped_profile("llama-8b")?, read("llama-7b")?, read("internlm-1.8b")?];
    println!(
        "What fast synchronisation gains: prefill at 64, 256 and 1024 tokens, their mean, and decoding.\n\n\
         | model | strategy | 64 | 256 | 1024 | mean | decoding |\n| --- | --- | --- | --- | --- | --- | --- |"
    );
    for model in &models {
        for strategy in [SocStrategy::HeteroLayer, SocStrategy::HeteroTensor] {
            let fast = SocOptions::with_strategy(strategy);
            let (synchronisation, partition_policy) = (Synchronisation::Slow, PartitionPolicy::Fixed);
            let slow = SocOptions { synchronisation, partition_policy, ..fast };
            let gain = |pass: Pass| -> Result<f64, StudyError> {
                Ok(time(slow, model, pass)? / time(fast, model, pass)? - 1.0)
            };
            let prefill = |tokens| gain(Pass::new(0, 0, tokens, true));
            let (short, middle, long) = (prefill(64)?, prefill(256)?, prefill(1024)?);
            let decoding = 1.0 + gain(Pass::new(1, 256, 1, true))?;
            let gains = [short, middle, long, (short + middle + long) / 3.0];
            let gains = gains.map(|gain| format!("{:.1} %", gain * 100.0)).join(" | ");
            println!("| {} | {} | {gains} | {decoding:.2} times |", model.name, strategy.name());
        }
    }
    println!("\nOver hetero-tensor, just above a graph's size, on Llama-8B:\n");
    println!("| tokens | online-prepare | padding | pipe |\n| --- | --- | --- | --- |");
    let mut means = [0.0; 3];
    let lengths = [33, 65, 135, 300, 525, 600, 1000];
    for tokens in lengths {
        let pass = Pass::new(0, 0, tokens, true);
        let of = |strategy| time(SocOptions::with_strategy(strategy), &models[0], pass);
        let tensor = of(SocStrategy::HeteroTensor)?;
        print!("| {tokens}");
        for (mean, strategy) in
            means.iter_mut().zip([SocStrategy::OnlinePrepare, SocStrategy::Padding, SocStrategy::Pipe])
        {
            let ratio = of(strategy)? / tensor;
            *mean += ratio / lengths.len() as f64;
            print!(" | {ratio:.2}");
        }
        println!(" |");
    }
    println!("| mean | {} |", means.map(|mean| format!("{mean:.2}")).join(" | "));
    Ok(())
}
