//! Test fixtures: small rings of devices with simple rates and a shipped model, so that times can be computed by hand.

use std::fmt::Display;
use std::ops::Range;

use hearth_core::cluster::{Cluster, LinkTable, Member};
use hearth_core::memory::draft;
use hearth_core::metrics::{self, Metrics};
use hearth_profiles::model::{ModelProfile, shipped_profile};
use hearth_profiles::{Bytes, BytesPerSecond, DeviceProfile, Document, Fraction, Link, Seconds, Sourced};
use hearth_schema::Scenario;
use hearth_schema::plan::{Plan, PlannedDevice, PlannedModel, PlannerRecord, Role, ScenarioRecord};
use hearth_schema::residency::{Residency, ResidencyOptions};
use hearth_schema::scenario::{ActivationFormat, KvFormat, Links, ModelRef, Speculation, Workload};
use hearth_schema::trace::{Counter, StepKind, StepRecord, Trace};
use hearth_sim::{Input, Options, SimError, simulate};

/// Memory size that is enough for all weights.
pub const PLENTY: Bytes = Bytes(40 << 30);

/// One-way latency of every link.
pub const LATENCY: Seconds = Seconds(0.004);

/// Residency `os` without prefetching: the system decides which weights stay in memory.
pub const OS: ResidencyOptions = ResidencyOptions::with_policy(Residency::Os).without_prefetch();

/// Returns a device whose computations take only the time to read memory at 10 GB/s; its disk reads 1 GB/s.
fn device(available: Bytes) -> DeviceProfile {
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
    DeviceProfile::from_yaml(&yaml).expect("a valid device")
}

/// Adds a GPU with memory bandwidth `rate`. `copies` are its upload and download latencies; `None` for unified memory.
pub fn add_gpu(device: &mut DeviceProfile, kind: &str, rate: &str, copies: Option<[&str; 2]>) {
    let ([up, down], unified) = (copies.unwrap_or(["0 s"; 2]), copies.is_none());
    let gpu = format!(
        "gpu:
  kind: {kind}
  name: test
  unified_memory: {unified}
  matvec: {{f32: {{value: 10000 TFLOP/s, source: test}}}}
  read_bandwidth: {{value: {rate}, source: test}}
  memory_available: {{value: 8 GiB, source: test}}
  kv_copy: {{latency: {{value: 0 s, source: test}}, bandwidth: {{value: 1000 TB/s, source: test}}}}
  upload: {{latency: {{value: {up}, source: test}}, bandwidth: {{value: 1 TB/s, source: test}}}}
  download: {{latency: {{value: {down}, source: test}}, bandwidth: {{value: 1 TB/s, source: test}}}}
  compute_buffer: {{value: 0 B, source: test}}
"
    );
    *device = DeviceProfile::from_yaml(&(device.to_yaml() + &gpu)).expect("a valid device");
}

pub fn links(latency: Seconds, bandwidth: f64) -> LinkTable {
    let (latency, bandwidth) =
        (Sourced::new(latency, "test"), Sourced::new(BytesPerSecond(bandwidth), "test"));
    LinkTable::new(Links::uniform(Link::constant(latency, bandwidth)))
}

/// Returns a cluster of devices with these memory sizes. Links have [`LATENCY`] and a bandwidth of 100 MB/s.
pub fn cluster(model: &str, memories: &[Bytes], generate: u32) -> Cluster {
    let member = |(index, &memory)| {
        let (name, device) = (format!("d{index}"), device(memory));
        Member { name, address: None, device, residency: None }
    };
    Cluster {
        members: memories.iter().enumerate().map(member).collect(),
        head: 0,
        links: links(LATENCY, 100e6),
        model: shipped_profile(model).expect("a shipped model"),
        context_length: 512,
        kv_cache_format: KvFormat::F16,
        activation_format: ActivationFormat::F32,
        draft_model: None,
        routes: None,
        recorded_arrivals: None,
        workload: Workload::new(4, generate),
        seed: 7,
    }
}

pub fn set_prompt(cluster: &mut Cluster, plan: &mut Plan, context: u32, prompt: u32) {
    (cluster.context_length, cluster.workload.prompt_tokens, plan.context_length) =
        (context, prompt, context);
}

pub fn memories(mib: &[u64], count: usize) -> Vec<Bytes> {
    mib.iter().take(count).map(|&mib| Bytes::from_mib(mib)).collect()
}

/// Returns a plan with these windows, in layers. The first device is the head; all devices have the same residency.
pub fn plan(model: &ModelProfile, windows: &[u32], residency: ResidencyOptions) -> Plan {
    let device = |(index, &window)| {
        let role = if index == 0 { Role::Head } else { Role::Worker };
        PlannedDevice { residency, ..PlannedDevice::new(format!("d{index}"), role, window) }
    };
    let scenario = ScenarioRecord { name: "test".into(), digest: String::new() };
    let planned = PlannedModel { file_digest: None, ..PlannedModel::from_profile(model) };
    let planner = PlannerRecord { strategy: "manual".into(), options: vec![] };
    Plan {
        rounds: model.shape.layers.0.div_ceil(windows.iter().sum()),
        context_length: 512,
        devices: windows.iter().enumerate().map(device).collect(),
        ..Plan::empty(scenario, planned, planner)
    }
}

/// Returns a cluster for Llama 3 8B with these memory sizes, and a plan with these windows.
pub fn ring(memory: &[Bytes], generate: u32, windows: &[u32], options: ResidencyOptions) -> (Cluster, Plan) {
    let cluster = cluster("llama-8b", memory, generate);
    let plan = plan(&cluster.model, windows, options);
    (cluster, plan)
}

/// Returns a plan for a cluster, with the sequences and the draft model of its workload.
pub fn planned(cluster: &Cluster, windows: &[u32], residency: ResidencyOptions) -> Plan {
    let sequences = cluster.workload.sequences;
    Plan { sequences, draft_model: draft::planned_draft(cluster), ..plan(&cluster.model, windows, residency) }
}

/// Returns the time in which the devices of a plan read their layers from memory.
pub fn reading_time(plan: &Plan, cluster: &Cluster) -> Seconds {
    let time = |(index, device): (usize, &PlannedDevice)| {
        let bandwidth = cluster.member(&device.name).expect("a member").device.cpu.read_bandwidth.value;
        let layers = plan.windows(index).into_iter().flatten();
        layers.map(|layer| cluster.model.layers[layer as usize].bytes() / bandwidth).sum()
    };
    plan.devices.iter().enumerate().map(time).sum()
}

/// Returns a plan for the reachable devices, with the head first.
pub fn replanned(reachable: &Cluster, windows: &[u32], residency: ResidencyOptions) -> Plan {
    let mut plan = planned(reachable, windows, residency);
    for (place, device) in plan.devices.iter_mut().enumerate() {
        device.name.clone_from(&reachable.members[(reachable.head + place) % windows.len()].name);
    }
    plan
}

/// Adds a draft model of 120M, which drafts `tokens` tokens; each draft is accepted with probability `acceptance`.
pub fn with_drafts(mut cluster: Cluster, tokens: u32, acceptance: f64) -> Cluster {
    let draft = ModelRef { profile: Some("120m".into()), file: None };
    let acceptance = Sourced::new(Fraction(acceptance), "assumed: a test");
    cluster.workload.speculation =
        Some(Speculation { draft_model: draft, tokens, acceptance, processor: None });
    cluster.draft_model = Some(draft_model(&cluster.model));
    cluster
}

/// Returns the 120M model with the vocabulary size of the large model.
pub fn draft_model(large: &ModelProfile) -> ModelProfile {
    let mut draft = shipped_profile("120m").expect("shipped");
    draft.shape.vocab_size = large.shape.vocab_size;
    draft
}

/// Connects all devices by one Wi-Fi channel. `channel` has further YAML keys of the channel, `tcp` those of TCP.
pub fn use_wifi(cluster: &mut Cluster, channel: &str, tcp: &str) {
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
    let scenario = Scenario::from_yaml(&text).expect("a valid scenario");
    cluster.links = LinkTable::new(scenario.links);
}

/// Returns the error of a plan that cannot be simulated.
pub fn simulation_error(cluster: &Cluster, plan: &Plan) -> SimError {
    simulate(&Input { cluster, plan, options: &Options::default() }).expect_err("an error")
}

pub fn simulate_with(cluster: &Cluster, plan: &Plan, options: &Options) -> Trace {
    simulate(&Input { cluster, plan, options }).expect("a plan that can be run")
}

/// Simulates a run in which all weights are on disk at the start.
pub fn cold(cluster: &Cluster, plan: &Plan) -> Trace {
    simulate_with(cluster, plan, &Options::default())
}

/// Simulates a run in which as many weights as fit are in the page cache at the start.
pub fn warm(cluster: &Cluster, plan: &Plan) -> Trace {
    simulate_with(cluster, plan, &Options { starts_warm: true, ..Options::default() })
}

pub fn run(cluster: &Cluster, plan: &Plan) -> Metrics {
    metrics::compute_metrics(&cold(cluster, plan))
}

/// Returns the mean milliseconds per token.
pub fn tpot(metrics: &Metrics) -> f64 {
    metrics.tpot_ms.expect("tokens after the first").mean_ms
}

/// Checks that the relative difference between `found` and `expected` is less than `within`.
#[track_caller]
pub fn assert_near(found: f64, expected: f64, within: f64, what: impl Display) {
    assert!((found / expected - 1.0).abs() < within, "{what}: {found}, expected {expected}");
}

/// Checks that the terms of the time per token sum to that time, no term is negative, and the pipeline bubble is zero.
pub fn assert_terms(metrics: &Metrics) {
    let (terms, tpot) = (&metrics.terms_ms, tpot(metrics));
    assert_near(terms.sum(), tpot, 1e-9, "the sum of the terms");
    assert!(terms.named_terms().iter().all(|(_, ms)| *ms > -1e-6), "{terms:?}");
    assert!(terms.bubble.abs() < 1e-6 * tpot, "{terms:?}");
}

pub fn written(trace: &Trace) -> Vec<u8> {
    let mut text = Vec::new();
    trace.write(&mut text).expect("writing to memory");
    text
}

pub fn records(trace: &Trace, kind: StepKind) -> impl Iterator<Item = &StepRecord> {
    trace.records.iter().filter(move |record| record.kind == kind)
}

pub fn count(trace: &Trace, kind: StepKind) -> usize {
    records(trace, kind).count()
}

pub fn bytes(trace: &Trace, kind: StepKind) -> u64 {
    records(trace, kind).map(|record| record.bytes).sum()
}

/// Returns the values of a counter of a device, one for each pass with output.
pub fn readings(trace: &Trace, device: u16, counter: Counter) -> Vec<u64> {
    let own = trace.readings.iter().filter(|it| (it.device_index, it.counter) == (device, counter));
    own.map(|it| it.value).collect()
}

pub fn llama_8b() -> ModelProfile {
    shipped_profile("llama-8b").expect("shipped")
}

pub fn layers(model: &ModelProfile, layers: Range<u32>) -> Bytes {
    layers.map(|layer| model.layer_bytes(layer)).sum()
}
