//! Tests that a memory limit as a share leaves memory for that share of the weights.

use std::path::Path;

use hearth_core::memory::{MemoryBudget, draft};
use hearth_profiles::Bytes;
use hearth_workflow::limits::apply_memory_limits;
use hearth_workflow::{Budget, FileResolver, LoadedScenario, planning};

#[test]
fn memory_share_is_that_share_of_the_weights() {
    for draft in
        ["", ", speculation: {draft: {profile: 1b}, tokens: 2, acceptance: {value: 50 %, source: t}}"]
    {
        check_shares(draft);
    }
}

fn check_shares(speculation: &str) {
    let text = format!("# Two devices with shares of memory.
schema: scenario/1
name: n
model: {{profile: 1b}}
context: 256
workload: {{prompt: 8, generate: 2{speculation}}}
devices: [{{name: a, profile: d2, limits: {{memory_share: 50 %}}}}, {{name: b, profile: d3, limits: {{memory_share: 35 %}}}}]
links: {{default: {{latency: {{value: 1 ms, source: t}}, bandwidth: {{value: 1 GB/s, source: t}}}}}}
planner: {{strategy: manual, windows: [4, 4]}}
");
    let loaded = LoadedScenario::parse(&text, Path::new("n.yaml"), &FileResolver).expect("a scenario");
    let mut cluster = loaded.cluster(None).expect("a cluster");
    let plan = planning::make(&loaded, &cluster, &loaded.scenario.planner, Budget::NONE).expect("a plan");
    apply_memory_limits(&loaded.scenario, &mut cluster, &plan, Bytes::ZERO);
    for (index, share) in [(0, 0.5), (1, 0.35)] {
        let device = &cluster.members[index].device;
        let device = draft::device_without_draft(&plan, index, cluster.draft.as_ref(), device)
            .expect("the draft fits");
        let budget = MemoryBudget::new(&plan, index, &cluster.model, &device);
        assert!(budget.weights > Bytes::mib(100), "{}", budget.weights);
        assert!(budget.kv_cache > Bytes::ZERO && budget.buffers > Bytes::ZERO);
        let left = budget.weight_cache.as_f64() / budget.weights.as_f64();
        assert!((left - share).abs() < 1e-6, "{left} of the weights, not {share}");
    }
}
