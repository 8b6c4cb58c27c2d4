//! Lint rules, each tested on a valid scenario and plan with one change.
//!
//! All codes of the findings are compared, so a test also fails if another rule fires. The tests of the command line
//! check that a memory error means that a run fails before it starts.

use hearth_core::memory::MemoryBudget;
use hearth_core::{Cluster, Member};
use hearth_halda::lint::{self, Finding, Severity};
use hearth_halda::{Instance, LatencyModel, ManualPlan, OverlapSearch, Strategy, plan_from_solution, solve};
use hearth_profiles::{
    Bytes, BytesPerSecond, Document, Format, Fraction, Seconds, device, model::shipped_profile,
};
use hearth_schema::plan::{Role, ScenarioRecord};
use hearth_schema::residency::{Residency, ResidencyOptions};
use hearth_schema::scenario::KvFormat;
use hearth_schema::{Plan, Scenario};

use crate::fixtures;

const SCENARIO: &str = "schema: scenario/1
name: t
seed: 1
model: {profile: llama-8b}
context: 512
workload: {prompt: 16, generate: 12}
devices:
  - {name: a, profile: d3}
  - {name: b, profile: d2}
links:
  default: {latency: {value: 2 ms, source: test}, bandwidth: {value: 400 Mbit/s, source: test}}
";

struct Case {
    scenario: Scenario,
    origin: ScenarioRecord,
    cluster: Cluster,
}

impl Case {
    fn new(text: &str) -> Case {
        let scenario = Scenario::from_yaml(text).unwrap();
        let origin =
            ScenarioRecord { name: scenario.name.clone(), digest: hearth_schema::digest::digest_text(text) };
        let member = |entry: &hearth_schema::scenario::DeviceEntry| Member {
            name: entry.name.clone(),
            address: entry.address.clone(),
            device: device::shipped_profile(&entry.profile).unwrap(),
            residency: entry.residency.or(scenario.residency),
        };
        let members = scenario.devices.iter().map(member).collect();
        let model = scenario.model.profile.as_deref().unwrap();
        let cluster = Cluster {
            head: scenario.head_index(),
            context_length: scenario.context_length,
            kv_cache_format: scenario.kv_cache_format,
            activation_format: scenario.activation_format,
            workload: scenario.workload.clone(),
            ..fixtures::cluster(model, members, scenario.links.clone())
        };
        Case { scenario, origin, cluster }
    }

    fn plan(&self, windows: &[u32]) -> Plan {
        self.plan_by(&ManualPlan { window_layers: windows.to_vec(), ..ManualPlan::default() })
    }

    fn plan_by(&self, strategy: &dyn Strategy) -> Plan {
        let instance = Instance::from_cluster(&self.cluster, None);
        let solution = solve(strategy, &LatencyModel::new(&instance).unwrap()).unwrap();
        plan_from_solution(&solution, &self.cluster, &self.origin).unwrap()
    }

    fn lint(&self, plan: &Plan) -> Vec<Finding> {
        lint::check_plan(plan, &self.origin, &self.cluster, self.scenario.planner.slow_disk_threshold)
    }

    fn lint_scenario(&self) -> Vec<Finding> {
        lint::check_scenario(&self.scenario, &self.cluster)
    }

    /// Sets the memory of a device so that `left` bytes remain beside buffers and the KV cache of `layers` layers.
    fn set_memory_left(&mut self, device: usize, layers: u32, left: Bytes) {
        let member = &mut self.cluster.members[device].device;
        let cache = self.cluster.model.shape.mixer(0).cache_bytes(512, Format::F16).0 * u64::from(layers);
        member.memory.available_memory.value = left + Bytes(cache) + member.cpu.compute_buffer.value;
        (member.memory.can_swap, member.memory.swap_available) = (None, None);
    }
}

/// Checks that the findings have exactly the expected codes, which are in ascending order. Findings about the speed of
/// a plan count only if they are expected: most plans here are slow on purpose.
#[track_caller]
fn codes(found: &[Finding], expected: &[&str]) {
    // Rules that fire for many scenarios, since their devices are those of a paper.
    let usual = ["far-above-optimum", "memory-cliff", "stand-in", "swap-relied-on", "slow-first-token"];
    let counts = |code: &&str| !usual.contains(code) || expected.contains(code);
    let mut codes: Vec<&str> = found.iter().map(|finding| finding.code).filter(counts).collect();
    codes.sort_unstable();
    assert_eq!(codes, expected, "{found:#?}");
    for finding in found {
        assert!(!finding.what.is_empty() && !finding.location.is_empty() && !finding.hint.is_empty());
    }
}

#[test]
fn valid_plan_has_no_findings() {
    let case = Case::new(SCENARIO);
    codes(&case.lint_scenario(), &[]);
    codes(&case.lint(&case.plan(&[24, 8])), &[]);
}

#[track_caller]
fn findings_with(text: &str, from: &str, to: &str) -> Vec<Finding> {
    assert!(text.contains(from));
    Case::new(&text.replace(from, to)).lint_scenario()
}

#[test]
fn scenario_findings() {
    let lint = |from: &str, to: &str| findings_with(SCENARIO, from, to);
    codes(&lint("profile: d2", "profile: d2, limits: {memory: 1 TiB}"), &["limit-above-memory"]);
    codes(&lint("profile: d2", "profile: d2, limits: {memory: 1 GiB}"), &[]);
    let share = "profile: d2, limits: {memory_share: 50 %}";
    codes(&lint("profile: d2", share), &["memory-share-while-planning"]);
    let with_windows = format!("{share}}}\nplanner: {{strategy: manual, windows: [16, 16]");
    codes(&lint("profile: d2", &with_windows), &[]);
    codes(&lint("value: 2 ms", "value: 60 ms"), &["slow-link"]);
    codes(&lint("400 Mbit/s", "1 Mbit/s"), &["slow-link"]);
    codes(&lint("profile: d2", "profile: d2, limits: {threads: 64}"), &["threads-above-cores"]);
    codes(&lint("profile: d2", "profile: d2, limits: {threads: 2}"), &[]);
    let both = SCENARIO
        .replace("profile: d3", "profile: d3, address: '10.0.0.1:9'")
        .replace("profile: d2", "profile: d2, address: '10.0.0.1:9'");
    codes(&Case::new(&both).lint_scenario(), &["same-address"]);
    let named = |pair: &str| {
        let link = "{latency: {value: 1 ms, source: t}, bandwidth: {value: 1 GB/s, source: t}}";
        format!("    - {{devices: {pair}, link: {link}}}\n")
    };
    let links = [named("[a, b]"), named("[b, a]")].concat();
    let case = Case::new(&format!("{}  between:\n{links}", SCENARIO.replace("value: 2 ms", "value: 1 s")));
    // Every pair has its own link, so the slow default link is not used.
    codes(&case.lint_scenario(), &["link-twice"]);
}

#[test]
fn profile_findings() {
    let lint = |change: &dyn Fn(&mut Case)| {
        let mut case = Case::new(SCENARIO);
        change(&mut case);
        case.lint_scenario()
    };
    let cpu = |case: &mut Case, spread: f64| {
        let cpu = &mut case.cluster.members[1].device.cpu;
        cpu.read_bandwidth.spread = Some(Fraction(spread));
        let rate = cpu.matvec.0.get_mut(&Format::Q4K).unwrap();
        rate.spread = Some(Fraction(spread));
        // The model does not have this format.
        let rate = rate.clone();
        cpu.matvec.0.insert(Format::Iq1S, rate);
    };
    let found = lint(&|case| cpu(case, 0.25));
    codes(&found, &["noisy-measurement"]);
    let what = "measurements of `b` spread widely around their medians: `cpu.read_bandwidth` by 25 %, `cpu.matvec.q4_k` \
                by 25 %";
    assert_eq!(found[0].what, what);
    codes(&lint(&|case| cpu(case, 0.1)), &[]);
    let found = lint(&|case| {
        case.cluster.members[0].device.cpu.matvec.0.retain(|&format, _| format == Format::F32);
    });
    codes(&found, &["format-without-rate"]);
    assert!(found[0].what.contains("no rate for q4_k, q6_k,"), "{}", found[0].what);
    let found = lint(&|case| case.cluster.model = shipped_profile("tiny").unwrap());
    assert!(found.iter().any(|finding| finding.code == "model-too-small"), "{found:?}");
}

#[test]
fn slow_wifi_channel_is_found_and_unused_wire_is_not() {
    let channel = "{name: w, bandwidth: {value: 600 Mbit/s, source: t}, stations: [a, b]}";
    let text = format!("{SCENARIO}  wifi:\n    channels: [{channel}]\n");
    let lint = |from: &str, to: &str| findings_with(&text, from, to);
    codes(&lint("value: 2 ms", "value: 60 ms"), &[]);
    // 16 KiB at 0.5 MB/s, to the access point and from it.
    let found = lint("600 Mbit/s", "4 Mbit/s");
    codes(&found, &["slow-link"]);
    assert_eq!(found[0].location, "scenario links.wifi.channels[0]");
    // If the other device is wired, the message is sent over the channel only once.
    codes(&lint("600 Mbit/s, source: t}, stations: [a, b]", "4 Mbit/s, source: t}, stations: [b]"), &[]);
}

#[test]
fn more_devices_than_layers() {
    let devices: Vec<String> =
        (0..33).map(|index| format!("  - {{name: x{index}, profile: d2}}\n")).collect();
    let text = SCENARIO.replace("links:", &format!("{}links:", devices.concat()));
    let found = Case::new(&text).lint_scenario();
    codes(&found, &["more-devices-than-layers"]);
    assert_eq!(found[0].severity, Severity::Warning);
    assert!(found[0].what.contains("35 devices share 32 layers: 3 stay idle"), "{}", found[0].what);
    let kept = Case::new(&format!("{text}planner: {{keep_all: true}}\n"));
    assert_eq!(kept.lint_scenario()[0].severity, Severity::Error);
}

#[test]
fn plan_for_another_scenario_or_model() {
    let mut case = Case::new(SCENARIO);
    let plan = case.plan(&[24, 8]);
    let gap = Plan { rounds: 2, ..plan.clone() };
    let found = case.lint(&gap);
    codes(&found, &["plan-invalid"]);
    assert!(found[0].what.contains("set `rounds: 1`"), "{}", found[0].what);
    case.origin.digest = "sha256:0000000000000000".to_owned();
    codes(&case.lint(&plan), &["other-scenario"]);
    case.cluster.context_length = 1024;
    codes(&case.lint(&plan), &["other-context", "other-scenario"]);
    let mut case = Case::new(SCENARIO);
    case.cluster.members[1].name = "c".to_owned();
    codes(&case.lint(&plan), &["unknown-device"]);
    let other = Case::new(&SCENARIO.replace("llama-8b", "1b"));
    codes(&other.lint(&plan), &["other-model", "other-scenario"]);
}

#[test]
fn missing_or_small_gpus() {
    let mut case = Case::new(SCENARIO);
    let mut plan = case.plan(&[24, 8]);
    plan.devices[0].gpu_layers = 20;
    codes(&case.lint(&plan), &[]);
    case.cluster.members[0].device.gpu.as_mut().unwrap().memory_available.value = Bytes::from_mib(2048);
    let found = case.lint(&plan);
    codes(&found, &["gpu-memory"]);
    assert!(found[0].location.contains("devices[0] `a`.gpu_layers"), "{}", found[0].location);
    case.cluster.members[0].device.gpu = None;
    codes(&case.lint(&plan), &["no-gpu"]);
}

#[test]
fn gpus_are_not_used_with_a_quantised_kv_cache() {
    let mut case = Case::new(SCENARIO);
    case.scenario.kv_cache_format = KvFormat::Q8_0;
    case.cluster.kv_cache_format = KvFormat::Q8_0;
    let plan = case.plan_by(&OverlapSearch::default());
    assert!(plan.devices.iter().all(|device| device.gpu_layers == 0), "{plan:?}");
    let found = lint::check_scenario(&case.scenario, &case.cluster);
    assert!(found.iter().any(|finding| finding.code == "gpu-without-kv-format"), "{found:?}");
    let mut manual = case.plan(&[24, 8]);
    manual.devices[0].gpu_layers = 1;
    assert!(manual.validate().expect_err("GPU layers").to_string().contains("KV cache in q8_0"));
}

#[test]
fn memory_findings() {
    let mut case = Case::new(SCENARIO);
    let plan = case.plan(&[24, 8]);
    // The minimum memory for weights is 16 MiB. The output head of llama-8b alone has about 400 MiB.
    case.set_memory_left(0, 24, Bytes::from_mib(16) - Bytes(1));
    codes(&case.lint(&plan), &["memory-exceeded"]);
    case.set_memory_left(0, 24, Bytes::from_mib(16));
    codes(&case.lint(&plan), &["head-over-memory", "one-round-over-memory", "share-exceeds-memory"]);
    case.set_memory_left(0, 24, Bytes::from_mib(1024));
    codes(&case.lint(&plan), &["one-round-over-memory", "share-exceeds-memory"]);
    case.cluster.members[0].device.disk.sequential_bandwidth.value = BytesPerSecond(5e7);
    codes(&case.lint(&plan), &["one-round-over-memory", "share-exceeds-memory", "slow-disk-overloaded"]);
    case.scenario.planner.slow_disk_threshold = Some(BytesPerSecond(1e7));
    codes(&case.lint(&plan), &["one-round-over-memory", "share-exceeds-memory"]);
}

#[test]
fn rounds_and_residency_findings() {
    let mut case = Case::new(SCENARIO);
    let fits = case.plan(&[6, 2]);
    assert_eq!(fits.rounds, 4);
    let found = case.lint(&fits);
    codes(&found, &["rounds-without-reading"]);
    assert!(found[0].what.contains("additional hops take"), "{}", found[0].what);
    let layer = case.cluster.model.max_layer_bytes();
    // The worker has 8 layers in 4 windows of 2.
    case.set_memory_left(1, 8, layer * 5);
    codes(&case.lint(&fits), &["share-exceeds-memory"]);
    case.set_memory_left(1, 8, layer * 3);
    codes(&case.lint(&fits), &["share-exceeds-memory", "windows-evict-each-other"]);
    let mut bounded = fits.clone();
    bounded.devices[1].residency.prefetch_budget = Some(Bytes(layer.0 / 2));
    codes(&case.lint(&bounded), &["share-exceeds-memory"]);
    case.set_memory_left(1, 8, layer);
    codes(&case.lint(&fits), &["share-exceeds-memory", "window-exceeds-memory"]);
    let mut plain = fits.clone();
    plain.devices[1].residency = ResidencyOptions::default().without_prefetch();
    codes(&case.lint(&plain), &["reads-without-prefetch", "share-exceeds-memory"]);
    let mut managed = fits;
    managed.devices[1].residency = ResidencyOptions::with_policy(Residency::Managed);
    codes(&case.lint(&managed), &["share-exceeds-memory"]);
    managed.devices[1].residency.stream_buffer = Some(Bytes(layer.0 / 2 + 1));
    codes(&case.lint(&managed), &["share-exceeds-memory", "stream-buffer-too-large"]);
}

#[test]
fn partial_rounds_hops_and_addresses() {
    let case = Case::new(SCENARIO);
    let partial = case.plan(&[20, 3]);
    let found = case.lint(&partial);
    codes(&found, &["partial-last-round", "rounds-without-reading"]);
    let note = found.iter().find(|finding| finding.code == "partial-last-round").unwrap();
    assert!(note.what.contains("only 9 of 23 layers; devices without layers in it: `b`"), "{}", note.what);
    let mut plan = case.plan(&[24, 8]);
    plan.prediction.as_mut().unwrap().tpot = Seconds(0.008);
    codes(&case.lint(&plan), &["hops-dominate"]);
    let mut devices = Case::new(&SCENARIO.replace("links:", "  - {name: c, profile: d2}\nlinks:"));
    devices.cluster.members[1].address = Some("10.0.0.1:9".to_owned());
    let plan = devices.plan(&[16, 8, 8]);
    assert!(plan.devices.iter().any(|device| device.role == Role::Worker));
    codes(&devices.lint(&plan), &["no-address"]);
}

#[test]
fn dropped_device_that_would_help() {
    let mut case = Case::new(SCENARIO);
    case.cluster.members[0].device.memory.available_memory.value = Bytes::from_mib(3072);
    let found = case.lint(&case.plan(&[32, 0]));
    codes(&found, &["dropped-device-would-help"]);
    assert!(found.iter().any(|finding| finding.what.starts_with("`b` has no layers")), "{found:#?}");
    // The best plan by the same latency model drops no device wrongly.
    let best = case.plan_by(&OverlapSearch::default());
    assert!(case.lint(&best).iter().all(|finding| finding.code != "dropped-device-would-help"));
}

#[test]
fn plans_at_a_cliff_and_slow_plans() {
    let mut case = Case::new(SCENARIO);
    let best = case.plan_by(&OverlapSearch::default());
    codes(&case.lint(&best), &[]);
    let found = case.lint(&case.plan(&[24, 8]));
    codes(&found, &["far-above-optimum"]);
    assert!(found.iter().any(|finding| finding.what.contains("times the")), "{found:#?}");
    // All layers on the CPU of the first device, in memory for them and 2 % more.
    let windows = ManualPlan { window_layers: vec![32, 0], ..ManualPlan::default() };
    let weights: u64 = (0..32).map(|layer| case.cluster.model.layer_bytes(layer).0).sum();
    let head = case.cluster.model.output_head_bytes().0;
    case.set_memory_left(0, 32, Bytes((weights + head) / 50 * 51 + (64 << 20)));
    let found = case.lint(&case.plan_by(&windows));
    codes(&found, &["dropped-device-would-help", "far-above-optimum", "memory-cliff"]);
}

#[test]
fn every_code_is_documented() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src/lint");
    let read = |name: &str| std::fs::read_to_string(folder.join(name)).unwrap();
    let table = read("../../../docs/reference/lint.md");
    let mut codes = 0;
    for entry in std::fs::read_dir(&folder).unwrap() {
        let text = read(entry.unwrap().file_name().to_str().unwrap());
        for made in ["Finding::error(", "Finding::warning(", "Finding::note("] {
            for rest in text.split(made).skip(1) {
                let Some(code) = rest.trim_start().strip_prefix('"').and_then(|rest| rest.split('"').next())
                else {
                    continue;
                };
                codes += 1;
                assert!(table.contains(&format!("`{code}`")), "docs/reference/lint.md has no `{code}`");
            }
        }
    }
    assert!(codes > 30, "{codes}");
}

#[test]
fn stand_ins_are_named() {
    let found = Case::new(SCENARIO).lint_scenario();
    codes(&found, &["stand-in"]);
    assert!(found[0].what.contains("`a` (d3), `b` (d2)"), "{found:#?}");
}

#[test]
fn memory_of_other_programs_is_reported() {
    let mut case = Case::new(SCENARIO);
    // 4.0 GB of weights on a device with 2 GiB available, which can swap out 3.3 GiB.
    case.cluster.members[1].device.memory.available_memory.value = Bytes::from_mib(2048);
    let windows = ManualPlan { window_layers: vec![1, 31], ..ManualPlan::default() };
    let lint = |case: &Case| {
        case.lint(&case.plan_by(&windows)).into_iter().find(|finding| finding.code == "swap-relied-on")
    };
    assert!(lint(&case).is_some_and(|finding| finding.what.starts_with("`b` needs ")));
    case.cluster.members[1].device.memory.can_swap = None;
    assert_eq!(lint(&case), None);
}

#[test]
fn long_prompts_are_slow() {
    let mut case = Case::new(SCENARIO);
    let windows = ManualPlan { window_layers: vec![1, 31], ..ManualPlan::default() };
    let lint = |case: &Case| {
        case.lint(&case.plan_by(&windows)).into_iter().find(|finding| finding.code == "slow-first-token")
    };
    // 16 tokens take 1.3 s at 0.2 TFLOP/s, 256 tokens 21 s, and 4096 tokens 5.5 min.
    assert_eq!(lint(&case), None);
    case.cluster.context_length = 8192;
    assert!(lint(&case).is_some_and(
        |finding| finding.what.contains("a prompt of 4096 tokens") && finding.what.contains(" min ")
    ));
    case.cluster.workload.prompt_tokens = 1024;
    assert!(lint(&case).is_some_and(|finding| finding.location == "scenario workload.prompt"));
}

#[test]
fn kept_sets_below_memory_are_reported() {
    let mut case = Case::new(SCENARIO);
    let windows = ManualPlan { window_layers: vec![16, 16], ..ManualPlan::default() };
    let mut plan = case.plan_by(&windows);
    let managed = ResidencyOptions::with_policy(Residency::Managed);
    plan.devices[1].residency = ResidencyOptions { kept_set_limit: Some(Bytes::from_mib(512)), ..managed };
    let is_small = |case: &mut Case, plan: &Plan| {
        case.lint(plan).iter().any(|finding| finding.code == "budget-below-working-set")
    };
    assert!(is_small(&mut case, &plan));
    plan.devices[1].residency = managed;
    assert!(!is_small(&mut case, &plan));
}

#[test]
fn experts_that_exceed_memory_are_reported() {
    let mut case = Case::new(SCENARIO);
    case.cluster.model = shipped_profile("llama-4-scout").unwrap();
    assert!(case.lint_scenario().iter().any(|finding| finding.code == "not-runnable"));
    case.cluster.model = shipped_profile("qwen3-30b-a3b").unwrap();
    codes(&case.lint_scenario(), &[]);
    let windows = ManualPlan { window_layers: vec![24, 24], ..ManualPlan::default() };
    let plan = case.plan_by(&windows);
    let found = case.lint(&plan);
    assert!(found.iter().any(|finding| finding.code == "experts-exceed-memory"), "{found:#?}");
    // Half of the layers have 0.27 GiB that every token uses, and 0.5 GiB of experts of a token.
    for (mib, code) in [(600, "token-experts-exceed-memory"), (150, "shared-weights-exceed-memory")] {
        set_memory_for_weights(&mut case, &plan, Bytes::from_mib(mib));
        let found = case.lint(&plan);
        assert!(found.iter().any(|finding| finding.code == code), "{mib} MiB: {found:#?}");
    }
}

/// Sets the available memory of the second device so that `bytes` are left for weights.
fn set_memory_for_weights(case: &mut Case, plan: &Plan, bytes: Bytes) {
    let name = &plan.devices[1].name;
    let member = case.cluster.members.iter_mut().find(|member| member.name == *name).expect("a member");
    member.device.memory.can_swap = None;
    member.device.memory.available_memory.value = Bytes::from_mib(64 << 10);
    let budget = MemoryBudget::new(plan, 1, &case.cluster.model, &member.device);
    let taken = budget.available_memory.saturating_sub(budget.weight_cache);
    member.device.memory.available_memory.value = taken + bytes;
}

#[test]
fn context_above_that_of_the_model_is_reported() {
    let mut case = Case::new(SCENARIO);
    case.cluster.context_length = case.cluster.model.shape.context_length;
    codes(&case.lint_scenario(), &[]);
    case.cluster.context_length += 1;
    codes(&case.lint_scenario(), &["context-above-model"]);
}
