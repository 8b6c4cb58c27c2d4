//! Small rings of invented devices on a shipped model, so that every expectation can be computed by hand.

use hearth_core::cluster::Cluster;
use hearth_core::cluster::LinkTable;
use hearth_core::cluster::Member;
use hearth_core::metrics;
use hearth_core::metrics::Metrics;
use hearth_profiles::model::{ModelProfile, shipped};
use hearth_profiles::{Bytes, BytesPerSecond, Device, Document, Link, Seconds, Sourced};
use hearth_schema::Scenario;
use hearth_schema::plan::Origin;
use hearth_schema::plan::Plan;
use hearth_schema::plan::PlanKind;
use hearth_schema::plan::PlannedDevice;
use hearth_schema::plan::PlannedModel;
use hearth_schema::plan::PlannerRecord;
use hearth_schema::plan::Processor;
use hearth_schema::plan::Role;
use hearth_schema::residency::ResidencyOptions;
use hearth_schema::scenario::KvFormat;
use hearth_schema::scenario::Links;
use hearth_schema::scenario::Workload;
use hearth_sim::{Input, Options, simulate};

/// Memory for everything.
pub const PLENTY: Bytes = Bytes(40 << 30);

/// 10 GB/s of reading and nothing else that takes time; a disk of 1 GB/s.
fn device(available: Bytes) -> Device {
    let yaml = format!(
        "schema: device/1
name: plain
os: linux
cpu:
  name: test
  cores: 4
  matvec: {{f32: {{value: 1000 TFLOP/s, source: test}}}}
  read_bandwidth: {{value: 10 GB/s, source: test}}
  kv_copy: {{latency: {{value: 0 s, source: test}}, bandwidth: {{value: 1 TB/s, source: test}}}}
  compute_buffer: {{value: 0 B, source: test}}
memory:
  total: {{value: 64 GiB, source: test}}
  available: {{value: {} B, source: test}}
  page_cache: two-list
disk:
  sequential: {{value: 1 GB/s, source: test}}
  read_ahead: {{value: 8 MiB, source: test}}
",
        available.0
    );
    Device::from_yaml(&yaml).expect("a valid device")
}

/// One way.
pub const LATENCY: Seconds = Seconds(0.004);

/// Devices of these memories in a ring; a hop takes [`LATENCY`] and the message's bytes at 100 MB/s.
pub fn cluster(model: &str, memories: &[Bytes], generate: u32) -> Cluster {
    let link = Link {
        latency: Sourced::new(LATENCY, "test"),
        bandwidth: Sourced::new(BytesPerSecond(100e6), "test"),
    };
    Cluster {
        members: memories
            .iter()
            .enumerate()
            .map(|(index, &memory)| Member {
                name: format!("d{index}"),
                address: None,
                device: device(memory),
                residency: None,
            })
            .collect(),
        head: 0,
        links: LinkTable::new(Links::constant(link)),
        model: shipped(model).expect("a shipped model"),
        context: 512,
        kv_cache: KvFormat::F16,
        activations: hearth_schema::scenario::ActivationFormat::F32,
        draft: None,
        workload: Workload::plain(4, generate),
        seed: 7,
    }
}

/// The first device is the head; the residency is everybody's.
pub fn plan(model: &ModelProfile, windows: &[u32], residency: ResidencyOptions) -> Plan {
    let layers = model.shape.layers.0;
    Plan {
        schema: "plan/1".into(),
        scenario: Origin { name: "test".into(), digest: String::new() },
        model: PlannedModel {
            name: model.name.clone(),
            digest: None,
            shape_digest: model.shape_digest(),
            layers,
        },
        planner: PlannerRecord { strategy: "manual".into(), options: vec![] },
        kind: PlanKind::Ring,
        rounds: layers.div_ceil(windows.iter().sum()),
        context: 512,
        kv_cache: KvFormat::F16,
        activations: hearth_schema::scenario::ActivationFormat::F32,
        output: Processor::Cpu,
        sequences: 1,
        draft: None,
        devices: windows
            .iter()
            .enumerate()
            .map(|(index, &window)| PlannedDevice {
                name: format!("d{index}"),
                address: None,
                role: if index == 0 { Role::Head } else { Role::Worker },
                window,
                gpu_layers: 0,
                residency,
                predicted: None,
            })
            .collect(),
        dropped: vec![],
        predicted: None,
        explanation: vec![],
    }
}

/// Puts all devices on one Wi-Fi channel, of which `channel` says more, with these options of TCP.
#[allow(dead_code, reason = "most of the tests that share this have wires")]
pub fn on_air(cluster: &mut Cluster, channel: &str, tcp: &str) {
    let names: Vec<&str> = cluster.members.iter().map(|member| member.name.as_str()).collect();
    let entries: Vec<String> = names.iter().map(|name| format!("{{name: {name}, profile: d1}}")).collect();
    let text = format!(
        "schema: scenario/1
name: t
seed: 1
model: {{profile: llama-8b}}
context: 64
workload: {{prompt: 8, generate: 4}}
devices: [{}]
links:
  default: {{latency: {{value: 0.2 ms, source: t}}, bandwidth: {{value: 1 Gbit/s, source: t}}}}
  wifi:
    channels:
      - {{name: w, bandwidth: {{value: 800 Mbit/s, source: t}}, stations: [{}]{channel}}}
    tcp: {{{tcp}}}
",
        entries.join(", "),
        names.join(", ")
    );
    let scenario = Scenario::from_yaml(&text).expect("a sound scenario");
    cluster.links = LinkTable::new(scenario.links);
}

/// A run's numbers.
#[allow(dead_code, reason = "one of the tests that share this looks at traces")]
pub fn run(cluster: &Cluster, plan: &Plan) -> Metrics {
    let options = Options::default();
    let trace = simulate(&Input { cluster, plan, options: &options }).expect("a plan that can be run");
    metrics::compute(&trace)
}
