//! Fuzz tests: the readers of scenarios, plans and traces do not panic or hang for any text.
//!
//! Run a million cases of each test: `PROPTEST_CASES=1000000 cargo test --release -p hearth-core --test it
//! document_fuzz`.

use hearth_core::LinkTable;
use hearth_core::cluster::Connection;
use hearth_core::schedule::Schedule;
use hearth_profiles::{Bytes, Document};
use hearth_schema::pass::Pass;
use hearth_schema::{Plan, Scenario, Trace};
use proptest::prelude::*;

const SCENARIO: &str = "schema: scenario/1
name: test
seed: 1
model: {profile: llama-8b}
context: 64
kv_cache: f32
workload: {prompt: 8, generate: 4, sequences: 2, micro_batch: 4, speculation: {draft: {profile: llama-1b}, tokens: 3,
  acceptance: {value: 70 %, source: test}, processor: cpu}}
devices:
  - {name: a, profile: d3, head: true, limits: {memory_share: 50 %, disk_read: 200 MB/s, threads: 2}}
  - name: b
    profile: devices/b.yaml
    address: '127.0.0.1:9000'
    residency: {policy: managed, stream_buffer: 16 MiB}
links:
  default:
    latency: {value: 5 ms, source: test}
    bandwidth: {value: 400 Mbit/s, source: test, spread: 3 %}
  between:
    - devices: [a, b]
      link: {latency: {value: 1 ms, source: t}, bandwidth: {value: 1 GB/s, source: t}}
      unreachable: forward
  wifi:
    channels:
      - name: 5 GHz
        bandwidth: {value: 900 Mbit/s, source: t}
        delay: {median: {value: 2 ms, source: t}, sigma: {value: 0.5, source: t}}
        stalls: [{rate: 0.15 /s, from: 60 ms, to: 100 ms, source: t}]
        stations: [a]
        rates: {a: {value: 400 Mbit/s, source: t}}
    tcp: {idle_restart: false, loss: {value: 0.1 %, source: t}}
planner: {strategy: manual, windows: [2, 3], rounds: 2, order: best, slow_disk: 0.1 GB/s}
residency: {policy: windowed, prefetch: true, prefetch_budget: 64 MiB}
events:
  - {at: 3 s, for: 10 s, device: b, load: {threads: 4, gpu: 50 %}}
  - {token: 2, device: a, memory: {taken: 1 GiB, over: 5 s}}
  - {at: 1 s, device: b, swap: {rate: 100 MB/s, compression: 3}}
  - {at: 2 s, device: b, leaves: true}
  - {at: 9 s, device: b, returns: between-tokens}
  - {at: 4 s, for: 2 s, stalls: true}
";

const PLAN: &str = "schema: plan/1
scenario: {name: t, digest: 'sha256:0'}
model: {name: m, shape_digest: 'shape:0', layers: 8}
planner: {strategy: manual, options: ['rounds=2']}
rounds: 2
context: 64
kv_cache: f16
sequences: 2
draft: {model: {name: n, shape_digest: 'shape:1', layers: 2}, processor: gpu}
devices:
- {name: a, role: head, window: 2, gpu_layers: 1, residency: {policy: os, prefetch_budget: 0 B, release: true}}
- {name: b, address: 'x:1', role: relay, window: 0, gpu_layers: 0, residency: {policy: managed, stream_buffer: 16 MiB, kept: 1 GiB}}
- {name: c, role: worker, window: 2, gpu_layers: 0, residency: {},
   predicted: {compute: 1 ms, memory: 2 ms, disk: 0 s, communication: 1 us}}
dropped: [{name: d, reason: slow}]
predicted: {tpot: 5 ms}
explanation: [because]
";

const TENSOR: &str = "schema: plan/1
scenario: {name: t, digest: 'sha256:0'}
model: {name: m, shape_digest: 'shape:0', layers: 8}
planner: {strategy: airinfer}
kind:
  tensor:
    all_reduce: over-the-air
    air_time: 2 ms
    values: q8_0
    head_loads: model
    batch: 1
    embedding_as: f32
    slices:
    - {device: a, kv_heads: 1, feed_forward: 64}
    - {device: b, kv_heads: 0, feed_forward: 32}
rounds: 1
context: 64
kv_cache: f16
devices:
- {name: a, role: head, window: 8, gpu_layers: 8, residency: {policy: pinned, weights_as: q4_0, gpu_weights_as: f32}}
- {name: b, role: worker, window: 8, gpu_layers: 0, residency: {policy: sliding, weights_as: f32, blocks: 3}}
";

const TRACE: &str = r#"{"header":{"schema":"trace/1","origin":"measured","scenario":"s","plan":"p","model":"m","seed":1,"version":"0","devices":[{"name":"a","memory_total":5}]}}
{"pass":{"index":0,"first_position":0,"tokens":4,"output":true}}
{"pass":{"index":1,"first_position":4,"tokens":3,"output":true,"sequence":1,"drafted":2}}
{"step":{"device":0,"resource":"gpu","kind":"draft","pass":1,"round":0,"start":4,"end":5}}
{"step":{"device":0,"resource":"cpu","kind":"output","pass":0,"round":1,"layers":[0,2],"start":5,"end":9,"bytes":3,"cost":{"cpu":3,"queue":0}}}
{"counter":{"device":0,"counter":"bytes_read","pass":0,"at":9,"value":7}}
{"event":{"kind":"load","device":"a","start":3,"end":8,"what":"4 threads"}}
{"counter":{"device":0,"counter":"accepted","pass":1,"at":9,"value":7}}
{"end":"ok"}
"#;

/// Returns a strategy that generates `text` with one to three random replacements of up to 40 bytes.
fn damaged(text: &'static str) -> impl Strategy<Value = String> {
    let known = ["- ", "{", "]", ": ", "&a *a", "18446744073709551616", "-1e999 GiB", "\0", "!!binary "];
    let known = proptest::sample::select(known.to_vec()).prop_map(str::to_owned);
    let pieces = prop_oneof![9 => known, 1 => "\\PC{0,6}"];
    let edit = (0..text.len(), 0usize..40, pieces);
    proptest::collection::vec(edit, 1..4).prop_map(move |edits| {
        let mut bytes = text.as_bytes().to_vec();
        for (at, cut, piece) in edits {
            let at = at.min(bytes.len());
            let end = (at + cut).min(bytes.len());
            bytes.splice(at..end, piece.bytes());
        }
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

#[test]
fn undamaged_texts_are_valid() {
    Scenario::from_yaml(SCENARIO).unwrap();
    Plan::from_yaml(PLAN).unwrap();
    Plan::from_yaml(TENSOR).unwrap();
    Trace::read(&mut TRACE.as_bytes()).unwrap();
}

proptest! {
    #[test]
    fn any_text_is_read_or_rejected(text in "\\PC{0,200}") {
        let _ = Scenario::from_yaml(&text);
        let _ = Plan::from_yaml(&text);
        let _ = Scenario::from_yaml(&format!("schema: scenario/1\n{text}"));
        let _ = Plan::from_yaml(&format!("schema: plan/1\n{text}"));
        let _ = Trace::read(&mut text.as_bytes());
    }

    #[test]
    fn damaged_scenario_is_read_or_rejected(text in damaged(SCENARIO)) {
        if let Ok(scenario) = Scenario::from_yaml(&text) {
            prop_assert!(scenario.head_index() < scenario.devices.len());
            let again = Scenario::from_yaml(&scenario.to_yaml());
            prop_assert!(again.is_ok(), "{:?}", again);
            let table = LinkTable::new(scenario.links.clone());
            for (from, to) in [("a", "b"), ("b", "a")] {
                if let Some(Connection::Wireless(path)) = table.connection(from, to) {
                    let link = path.expected_link();
                    let (mean, time) = (path.mean_message_time(Bytes(1 << 20), true), link.message_time(Bytes(1 << 20)));
                    prop_assert!(mean.0.is_finite() && mean >= path.min_message_time() && time.0.is_finite(), "{:?}", path);
                }
            }
        }
    }

    #[test]
    fn damaged_plan_is_rejected_or_has_a_schedule(
        text in prop_oneof![damaged(PLAN), damaged(TENSOR)]
    ) {
        if let Ok(plan) = Plan::from_yaml(&text) {
            prop_assert!(plan.digest() == Plan::from_yaml(&plan.to_yaml()).unwrap().digest());
            let mut head = Schedule::new(plan.into(), 0);
            let _ = head.react(&hearth_core::schedule::Event::Begin(Pass::new(0, 0, 1, true)));
        }
    }

    #[test]
    fn damaged_trace_is_read_or_rejected(text in damaged(TRACE)) {
        if let Ok(trace) = Trace::read(&mut text.as_bytes()) {
            let _ = hearth_core::metrics::compute_metrics(&trace);
        }
    }
}
