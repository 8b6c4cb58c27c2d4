//! How long does it take to simulate a token of a 70B model on four devices?
//!
//! The shipped devices d1 to d4 without GPUs, so that every byte goes through a page cache: the worst case,
//! in which most chunks are read from disk again for every token.
//!
//!     cargo run --release -p hearth-sim --example token_speed
#![allow(clippy::disallowed_methods, reason = "a measurement of speed reads the clock")]

use std::time::Instant;

use hearth_profiles::device::shipped as shipped_device;
use hearth_profiles::model::shipped;
use hearth_profiles::{BytesPerSecond, Link, Seconds, Sourced};
use hearth_schema::cluster::{Cluster, LinkTable, Member};
use hearth_schema::metrics;
use hearth_schema::plan::{Origin, Plan, PlannedDevice, PlannedModel, PlannerRecord, Role};
use hearth_schema::residency::{Residency, ResidencyOptions};
use hearth_schema::scenario::{KvFormat, Links, Workload};
use hearth_schema::schedule::Processor;
use hearth_sim::{Input, Options, simulate};

const GENERATE: u32 = 64;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let cluster = cluster()?;
    println!(
        "| windows | rounds | residency | simulated TPOT ms | records a token | ms of our time a token |\n\
         |---|---|---|---|---|---|"
    );
    let (os, managed) = (ResidencyOptions::default(), ResidencyOptions::of(Residency::Managed));
    for (windows, what, residency) in [
        ([40, 16, 16, 8], "os, no prefetch", os.without_prefetch()),
        ([20, 8, 8, 4], "os", os),
        ([5, 2, 2, 1], "os", os),
        ([40, 16, 16, 8], "managed", managed),
        ([20, 8, 8, 4], "managed", managed),
        ([5, 2, 2, 1], "managed", managed),
    ] {
        let plan = plan(&cluster, windows, residency);
        let options = Options { warm: true, ..Options::default() };
        let start = Instant::now();
        let trace = simulate(&Input { cluster: &cluster, plan: &plan, options: &options })?;
        let ours = start.elapsed().as_secs_f64() * 1e3 / f64::from(GENERATE);
        let tpot = metrics::compute(&trace).tpot_ms.map_or(0.0, |tpot| tpot.mean);
        let records = trace.records.len() as u32 / GENERATE;
        println!("| {windows:?} | {} | {what} | {tpot:.0} | {records} | {ours:.2} |", plan.rounds);
    }
    Ok(())
}

fn cluster() -> Result<Cluster, Box<dyn std::error::Error>> {
    let mut members = Vec::new();
    for name in ["d3", "d2", "d1", "d4"] {
        let mut device = shipped_device(name)?;
        device.gpu = None;
        members.push(Member { name: name.into(), address: None, device, residency: None });
    }
    let default = Link {
        latency: Sourced::new(Seconds(0.005), "assumed"),
        bandwidth: Sourced::new(BytesPerSecond(58e6), "assumed"),
    };
    Ok(Cluster {
        members,
        head: 0,
        links: LinkTable::new(Links { default, between: vec![] }),
        model: shipped("llama-70b")?,
        context: 1024,
        kv_cache: KvFormat::F16,
        workload: Workload { prompt: 32, generate: GENERATE },
        seed: 1,
    })
}

fn plan(cluster: &Cluster, windows: [u32; 4], residency: ResidencyOptions) -> Plan {
    let layers = cluster.model.shape.layers.0;
    let device = |(place, &window): (usize, &u32)| PlannedDevice {
        name: cluster.members[place].name.clone(),
        address: None,
        role: if place == 0 { Role::Head } else { Role::Worker },
        window,
        gpu_layers: 0,
        residency,
        predicted: None,
    };
    Plan {
        schema: "plan/1".into(),
        scenario: Origin { name: "speed".into(), digest: String::new() },
        model: PlannedModel {
            name: cluster.model.name.clone(),
            digest: None,
            shape_digest: cluster.model.shape_digest(),
            layers,
        },
        planner: PlannerRecord { strategy: "manual".into(), options: vec![] },
        rounds: layers.div_ceil(windows.iter().sum()),
        context: cluster.context,
        kv_cache: cluster.kv_cache,
        output: Processor::Cpu,
        devices: windows.iter().enumerate().map(device).collect(),
        dropped: vec![],
        predicted: None,
        explanation: vec![],
    }
}
