//! Simulates exo, dllama, TPI-LLM and other systems on the testbed of the prima.cpp paper.
//!
//!     cargo run --release -p hearth-studies --bin other_systems > docs/studies/other-systems/report.md
//!
//! Prints a page with these sections: exo and dllama compared with the times in Table 4 and the memory pressures in
//! Table 5 of the paper; both systems with the 70B model and without the memory check; TPI-LLM on devices of 4 GiB; and
//! all systems compared with each other. No parameter is fitted to these results; all are from the device profiles.
//!
//! All links are constant, except in the section about the shared Wi-Fi channel of `scenarios/home`.
//!
//! Not here: the interpretation of the results, in `docs/studies/other-systems/reading.md`.

use std::fmt::Write;
use std::path::Path;
use std::process::ExitCode;

use hearth_core::metrics::Metrics;
use hearth_core::{Cluster, Member, metrics};
use hearth_halda::systems::{self, SystemPlanOptions};
use hearth_profiles::{Bytes, BytesPerSecond, Format, Seconds, Sourced};
use hearth_schema::Plan;
use hearth_schema::plan::tensor_parallel::AllReduce;
use hearth_schema::plan::{PlanKind, ScenarioRecord};
use hearth_schema::trace::Outcome;
use hearth_sim::{Input, Options, simulate};
use hearth_studies::{StudyError, run_study};
use hearth_workflow::{FileResolver, LoadedScenario};

/// Time per output token (TPOT) and time to the first token (TTFT), in milliseconds.
type Times = (f64, f64);

/// Published times by system and model size; `None` if the system ran out of memory. source: prima.cpp paper, Table 4
const PUBLISHED: [(&str, &str, Option<Times>); 4] = [
    ("exo", "8b", Some((263.0, 960.0))),
    ("exo", "70b", None),
    ("dllama", "8b", Some((459.0, 1845.0))),
    ("dllama", "70b", None),
];

/// Published memory pressure with the 8B model, in percent of a device's memory. source: prima.cpp paper, Table 5
const PRESSURE: [(&str, &[(&str, f64)]); 2] = [
    ("exo", &[("d1", 20.0), ("d2", 51.3), ("d3", 42.5)]),
    ("dllama", &[("d1", 13.5), ("d2", 12.8), ("d3", 55.8), ("d4", 12.8)]),
];

fn main() -> ExitCode {
    run_study(|_| page().map(|page| print!("{page}")))
}

fn page() -> Result<String, StudyError> {
    let head = "# Other systems on the testbed of the prima.cpp paper\n\nWritten by\n\n    \
        cargo run --release -p hearth-studies --bin other_systems > docs/studies/other-systems/report.md\n\nfrom `scenarios/paper/*-on-d1-d4.yaml`, \
        the same bytes on every machine, and read in [reading.md](reading.md). The links are constant, as the scenarios \
        have them. Numbers of d1 to d4 and of the link are inferred from the paper's Table 4, see their sources; none from \
        the column exo.\n";
    let texts = [table_4()?, table_5()?, without_check()?, on_one_channel()?, four_gib()?, side_by_side()?];
    Ok(format!("{head}\n{}", texts.join("\n")))
}

fn paper(size: &str) -> Result<Cluster, StudyError> {
    cluster(&format!("scenarios/paper/llama-{size}-on-d1-d4.yaml"))
}

fn cluster(path: &str) -> Result<Cluster, StudyError> {
    Ok(LoadedScenario::read(Path::new(path), &FileResolver)?.resolve_cluster(None)?)
}

fn planned(system: &str, cluster: &Cluster, options: SystemPlanOptions) -> Result<Plan, StudyError> {
    let origin = ScenarioRecord { name: "study".into(), digest: String::new() };
    Ok(systems::plan(system, cluster, &origin, options)?)
}

fn run(cluster: &Cluster, plan: &Plan, ignore_memory: bool) -> Result<Metrics, StudyError> {
    let options = Options { ignore_memory_shortages: ignore_memory, ..Options::default() };
    Ok(metrics::compute_metrics(&simulate(&Input { cluster, plan, options: &options })?))
}

/// Makes the plan of `system`, with the weight format that this system uses, and simulates the plan.
fn run_system(system: &str, cluster: &Cluster, ignore_memory: bool) -> Result<Metrics, StudyError> {
    run(cluster, &planned(system, cluster, SystemPlanOptions::default())?, ignore_memory)
}

fn name(pattern: AllReduce) -> Result<String, StudyError> {
    Ok(serde_json::to_string(&pattern)?.trim_matches('"').to_owned())
}

/// Returns the times of a run, or a description of its memory shortages if the run failed.
fn times(metrics: &Metrics) -> Result<Times, String> {
    if let (Outcome::Ok, Some(tpot), Some(ttft)) = (metrics.outcome, metrics.tpot_ms, metrics.ttft_ms) {
        return Ok((tpot.mean_ms, ttft));
    }
    let short: Vec<&str> = metrics.memory_shortages.iter().map(|short| short.device.as_str()).collect();
    Err(format!("out of memory: {}", short.join(", ")))
}

fn table_4() -> Result<String, StudyError> {
    let mut text = "## Table 4: times in ms\n\n| system | size | TPOT, paper | TPOT, simulated | error | TTFT, paper | TTFT, \
                    simulated | terms of TPOT |\n| --- | --- | ---: | ---: | ---: | ---: | ---: | --- |\n"
        .to_owned();
    for (system, size, published) in PUBLISHED {
        let cluster = paper(size)?;
        let metrics = run_system(system, &cluster, false)?;
        let rows = metrics.terms_ms.named_terms();
        let terms = rows.iter().filter(|(_, ms)| *ms >= 0.5).map(|(name, ms)| format!("{name} {ms:.0}"));
        let terms = terms.collect::<Vec<_>>().join(", ");
        let row = match (times(&metrics), published) {
            (Ok((tpot, ttft)), Some((paper, first))) => format!(
                "{paper:.0} | {tpot:.0} | {:+.1} % | {first:.0} | {ttft:.0} | {terms}",
                (tpot / paper - 1.0) * 100.0
            ),
            (Ok((tpot, ttft)), None) => format!("out of memory | {tpot:.0} | - | - | {ttft:.0} |"),
            (Err(why), published) => {
                let paper = published.map_or("out of memory".to_owned(), |(tpot, _)| format!("{tpot:.0}"));
                format!("{paper} | {why} | - | - | - |")
            }
        };
        let _ = writeln!(text, "| {system} | {size} | {row} |");
    }
    Ok(text)
}

fn table_5() -> Result<String, StudyError> {
    let mut text = "## Table 5: memory pressure at 8B, in % of the device's memory\n\n| system | device | paper | simulated |\n\
                    | --- | --- | ---: | ---: |\n"
        .to_owned();
    let cluster = paper("8b")?;
    for (system, published) in PRESSURE {
        let metrics = run_system(system, &cluster, false)?;
        for (name, paper) in published {
            let device = metrics.devices.iter().find(|device| device.name == *name);
            let found = device.map_or(f64::NAN, |device| device.memory_pressure * 100.0);
            let _ = writeln!(text, "| {system} | {name} | {paper:.1} | {found:.1} |");
        }
    }
    Ok(text)
}

fn without_check() -> Result<String, StudyError> {
    let cluster = paper("70b")?;
    let metrics = run_system("dllama", &cluster, true)?;
    let (tpot, _) = times(&metrics)?;
    let sums = 2 * cluster.model.shape.layers.0;
    let network = metrics.terms_ms.network;
    let mut text = format!(
        "## 70B with the memory check off\n\ndllama: {tpot:.0} ms a token, of these {network:.0} ms of messages: {:.2} ms for each of \
         {sums} all-reduces. The paper's independent tests have about 150 ms, 24 s together, and about 30 s a token.\n\n",
        network / f64::from(sums)
    );
    let (tpot, _) = times(&run_system("exo", &cluster, true)?)?;
    let _ = writeln!(text, "exo: {tpot:.0} ms a token. The paper has no number.\n");
    text.push_str("One all-reduce of 8192 numbers over four devices, on these links and idle:\n\n| pattern | numbers as | messages | \
             bytes on the links | ms |\n| --- | --- | ---: | ---: | ---: |\n");
    for (system, format) in
        [("dllama", Format::Q8_0), ("dllama", Format::F32), ("tpi-llm", Format::F32), ("galaxy", Format::F32)]
    {
        text.push_str(&all_reduce_row(&cluster, system, format)?);
    }
    Ok(text)
}

/// Returns the section about dllama with several all-reduce patterns over one Wi-Fi channel.
fn on_one_channel() -> Result<String, StudyError> {
    let mut text = "## 70B over one Wi-Fi channel, with the memory check off\n\nThe shared channel of `scenarios/home`, whose \
                    latency, stalls and losses are the simulator's model of one; 8 tokens each. Messages are ms for each of 160 \
                    all-reduces.\n\n| channel | pattern | numbers as | ms a token | messages |\n| --- | --- | --- | ---: | ---: |\n"
        .to_owned();
    for (words, file) in [("quiet", "llama-70b-on-wifi"), ("a Mac's stalls", "llama-70b-on-wifi-stalls")] {
        let mut cluster = cluster(&format!("scenarios/home/{file}.yaml"))?;
        (cluster.workload.prompt_tokens, cluster.workload.generated_tokens) = (1, 9);
        let plan = planned("dllama", &cluster, SystemPlanOptions::default())?;
        for (all_reduce, values) in [
            (AllReduce::AllGather, Format::Q8_0),
            (AllReduce::AllGather, Format::F32),
            (AllReduce::Star, Format::F32),
            (AllReduce::Ring, Format::F32),
        ] {
            let mut plan = plan.clone();
            if let PlanKind::Tensor(tensor) = &mut plan.kind {
                (tensor.all_reduce, tensor.partial_result_format) = (all_reduce, values);
            }
            let metrics = run(&cluster, &plan, true)?;
            let (tpot, _) = times(&metrics)?;
            let pattern = name(all_reduce)?;
            let each = metrics.terms_ms.network / f64::from(2 * cluster.model.shape.layers.0);
            let _ = writeln!(text, "| {words} | {pattern} | {values} | {tpot:.0} | {each:.1} |");
        }
    }
    Ok(text)
}

/// Returns a table row with the time of one all-reduce of a system, from the sizes of its messages.
fn all_reduce_row(cluster: &Cluster, system: &str, format: Format) -> Result<String, StudyError> {
    let weights_as = (system != "dllama").then_some(Format::Q4_0);
    let ample = with_ample_memory(cluster);
    let plan =
        planned(system, &ample, SystemPlanOptions { weight_format: weights_as, all_reduce_time: None })?;
    let tensor = plan.kind.tensor_plan().ok_or("slices")?;
    let devices = plan.devices.len();
    let partial = Bytes(8192 / format.block_len() * format.block_bytes());
    let all_reduce = hearth_core::tensor::Collective { algorithm: tensor.all_reduce, devices };
    let message = all_reduce.message_bytes(partial);
    let link = ample.links.default_link();
    let awaited: Vec<_> = (0..devices).map(|place| all_reduce.total_messages(place)).collect();
    let (count, steps) = (awaited.iter().sum::<usize>(), awaited.into_iter().max().unwrap_or(0));
    // The number of message times one after another: all-gather sends to all devices at once, a star sends to the
    // head and back, and a ring has several steps.
    let legs = match system {
        "dllama" => 1,
        "tpi-llm" => 2,
        _ => steps,
    };
    let ms = link.message_time(message).as_millis() * legs as f64;
    let (pattern, bytes) = (name(tensor.all_reduce)?, message.0 * count as u64);
    Ok(format!("| {pattern} | {format} | {count} | {bytes} | {ms:.1} |\n"))
}

fn with_ample_memory(cluster: &Cluster) -> Cluster {
    let mut ample = cluster.clone();
    for device in ample.members.iter_mut().map(|member| &mut member.device) {
        let main = [&mut device.memory.total_memory, &mut device.memory.available_memory];
        let gpu = device.gpu.as_mut().map(|gpu| &mut gpu.memory_available);
        main.into_iter().chain(gpu).for_each(|memory| *memory = Sourced::new(Bytes(1 << 40), "set"));
    }
    ample
}

/// Returns the section about TPI-LLM on devices with 4 GiB of memory and the disks of the prima.cpp paper's Fig. 2.
fn four_gib() -> Result<String, StudyError> {
    let mut text = "## TPI-LLM: 70B on devices of 4 GiB\n\nThe paper: 30 s a token, with weights in 32 bit; it does not say on how \
                    many devices. Assumed: the processor of D2, and a disk of 2 GB/s as in the cluster of the paper's Fig. \
                    2.\n\n| devices | weights | s a token | of these waiting for the disk | blocks at once |\n| ---: | --- | ---: | \
                    ---: | --- |\n"
        .to_owned();
    let paper = paper("70b")?;
    let mut member = paper.members[1].clone();
    member.device.gpu = None;
    member.device.memory.total_memory = Sourced::new(Bytes(4 << 30), "prima.cpp paper, section 2");
    member.device.memory.available_memory = member.device.memory.total_memory.clone();
    member.device.memory.can_swap = None;
    member.device.disk.sequential_bandwidth = Sourced::new(BytesPerSecond(2e9), "prima.cpp paper, Fig. 2");
    for count in [4, 8] {
        let members = (0..count).map(|at| Member { name: format!("m{at}"), ..member.clone() }).collect();
        let cluster = Cluster { members, head: 0, ..paper.clone() };
        for weights in [Format::F32, Format::F16] {
            let options = SystemPlanOptions { weight_format: Some(weights), all_reduce_time: None };
            let plan = planned("tpi-llm", &cluster, options)?;
            let metrics = run(&cluster, &plan, false)?;
            let (tpot, _) = times(&metrics)?;
            let blocks = plan.devices[1].residency.resident_blocks.unwrap_or(0);
            let (total, disk) = (tpot / 1e3, metrics.terms_ms.demand_disk / 1e3);
            let _ = writeln!(text, "| {count} | {weights} | {total:.1} | {disk:.1} | {blocks} |");
        }
    }
    Ok(text)
}

fn side_by_side() -> Result<String, StudyError> {
    let mut text = "## Every system at 8B\n\nWeights as the system has them, and as q4_0. AirInfer's all-reduce takes 1 ms here, as \
                    an input.\n\n| system | weights | ms a token | of these messages | slices (heads, rows) or layers |\n| --- | --- | \
                    ---: | ---: | --- |\n"
        .to_owned();
    let cluster = paper("8b")?;
    for system in systems::SYSTEM_NAMES {
        let formats: &[Option<Format>] =
            if matches!(system, "exo" | "dllama") { &[None] } else { &[None, Some(Format::Q4_0)] };
        for &weights_as in formats {
            let air_time = (system == "airinfer").then_some(Seconds(0.001));
            let format = match weights_as {
                Some(format) => format.name(),
                None if system == "exo" => "mixed",
                None if system == "dllama" => "q4_0",
                None => "f32",
            };
            let options = SystemPlanOptions { weight_format: weights_as, all_reduce_time: air_time };
            let row = match planned(system, &cluster, options) {
                Ok(plan) => {
                    let metrics = run(&cluster, &plan, false)?;
                    let (network, parts) = (metrics.terms_ms.network, parts(&plan));
                    match times(&metrics) {
                        Ok((tpot, _)) => format!("{tpot:.0} | {network:.0} | {parts}"),
                        Err(why) => format!("{why} | - | {parts}"),
                    }
                }
                Err(refusal) => format!("no plan | - | {refusal}"),
            };
            let _ = writeln!(text, "| {system} | {format} | {row} |");
        }
    }
    Ok(text)
}

fn parts(plan: &Plan) -> String {
    let part = |(place, device): (usize, &hearth_schema::plan::PlannedDevice)| match plan.kind.tensor_plan() {
        None => format!("{} {}", device.name, device.window),
        Some(tensor) => {
            let slice = &tensor.slices[place];
            format!("{} {}, {}", device.name, slice.kv_heads, slice.feed_forward_rows)
        }
    };
    plan.devices.iter().enumerate().map(part).collect::<Vec<_>>().join("; ")
}
