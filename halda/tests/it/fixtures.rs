//! Instances and checks for several tests.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use hearth_core::{Cluster, LinkTable, Member};
use hearth_halda::{
    Device, ExactSearch, GpuApi, HeadChoice, Instance, LatencyModel, Model, PlanRules, RuntimeModel,
    Solution, Strategy, StrategyError, solve, violations,
};
use hearth_profiles::device::Os;
use hearth_profiles::model::shipped_profile;
use hearth_schema::plan::ScenarioRecord;
use hearth_schema::scenario::{ActivationFormat, KvFormat, Links, Workload};
use proptest::prelude::*;
use serde_json::Value;

/// The files of instances with certified optima, described in `data/lda/README.md`.
const FILES: [(&str, &str); 3] = [
    ("small.jsonl", include_str!("../data/lda/small.jsonl")),
    ("medium.jsonl", include_str!("../data/lda/medium.jsonl")),
    ("hard.jsonl", include_str!("../data/lda/hard.jsonl")),
];

/// (file and line, instance, JSON object of the line) of each instance with certified optima.
static ROWS: LazyLock<Vec<(String, Instance, Value)>> = LazyLock::new(|| {
    let mut rows = Vec::new();
    for (file, text) in FILES {
        for (line, text) in text.lines().enumerate() {
            let row: Value = serde_json::from_str(text).unwrap();
            let instance = serde_json::from_value(row["instance"].clone()).unwrap();
            rows.push((format!("{file}:{}", line + 1), instance, row));
        }
    }
    assert_eq!(rows.len(), 75);
    rows
});

/// Returns (file and line, latency model, JSON object of the line) of each instance with certified optima.
pub fn certified_rows() -> impl Iterator<Item = (&'static str, LatencyModel<'static>, &'static Value)> {
    ROWS.iter().map(|(place, instance, row)| (place.as_str(), LatencyModel::new(instance).unwrap(), row))
}

/// Solves an instance, and checks the plan or the error. Returns `None` if the instance has no plan.
#[track_caller]
pub fn checked_solution(place: &str, strategy: &dyn Strategy, model: &LatencyModel) -> Option<Solution> {
    match solve(strategy, model) {
        Ok(solution) => {
            let evaluated = model.evaluate(&solution.assignment).unwrap().seconds_per_token;
            assert_eq!(solution.seconds_per_token(), evaluated, "{place}");
            assert_eq!(violations(model, &solution.assignment, strategy.rules()), [], "{place}");
            Some(solution)
        }
        Err(StrategyError::Infeasible(steps)) => {
            assert!(!steps.is_empty() && steps.iter().all(|step| step.outcome.is_err()), "{place}");
            None
        }
        Err(other) => panic!("{place}: {other}"),
    }
}

/// Returns the latency model of the instance with certified optima that has this name.
pub fn certified_model(name: &str) -> LatencyModel<'static> {
    certified_rows().find(|(_, model, _)| model.instance().name == name).unwrap().1
}

/// Returns a device on Linux without a GPU, memory, hops or buffers. Only its disk takes time.
pub fn plain_device(name: &str) -> Device {
    Device {
        name: name.to_owned(),
        os: Os::Linux,
        gpu: GpuApi::None,
        cpu_speed: BTreeMap::new(),
        gpu_speed: BTreeMap::new(),
        cpu_memory_rate: 1e24,
        gpu_memory_rate: 0.0,
        cpu_cache_write_seconds: 0.0,
        gpu_cache_write_seconds: 0.0,
        gpu_upload_seconds: 0.0,
        gpu_download_seconds: 0.0,
        unified_memory: false,
        hop_seconds: 0.0,
        disk_read_rate: 1e6,
        ram_available: 0,
        metal_available: 0,
        cuda_available: 0,
        swappable_bytes: 0,
        swap_available: 0,
        cpu_buffer_bytes: 0,
        gpu_buffer_bytes: 0,
        runtime: RuntimeModel::default(),
    }
}

/// Returns a model with equal layers of `layer_bytes` and `layer_flops`, without cache, embedding and output head.
pub fn plain_model(layers: u32, layer_bytes: u64, layer_flops: f64) -> Model {
    Model {
        name: "plain".to_owned(),
        model_layers: layers,
        hidden_size: 1,
        key_heads: 1,
        key_head_dim: 1,
        value_heads: 1,
        value_head_dim: 1,
        cached_tokens: 0,
        vocab_size: 1,
        layer_weight_bytes: layer_bytes,
        input_embedding_bytes: 0,
        output_head_bytes: 0,
        layer_flops: BTreeMap::from([("q4k".to_owned(), layer_flops)]),
        output_flops: BTreeMap::new(),
        weight_bytes_by_layer: Vec::new(),
    }
}

/// Returns an instance whose hops depend only on the sender, and whose disks may all be read for every token.
pub fn plain_instance(model: Model, devices: Vec<Device>) -> Instance {
    Instance { name: "plain".to_owned(), slow_disk_threshold: 0.0, model, devices, pair_hop_seconds: None }
}

/// Returns a cluster with a shipped model whose head is the first member.
pub fn cluster(model: &str, members: Vec<Member>, links: Links) -> Cluster {
    Cluster {
        members,
        head: 0,
        links: LinkTable::new(links),
        model: shipped_profile(model).unwrap(),
        context_length: 1024,
        kv_cache_format: KvFormat::F16,
        activation_format: ActivationFormat::F32,
        draft_model: None,
        routes: None,
        recorded_arrivals: None,
        workload: Workload::new(32, 16),
        seed: 1,
    }
}

pub fn scenario_record() -> ScenarioRecord {
    ScenarioRecord { name: "home".to_owned(), digest: "sha256:0123456789abcdef".to_owned() }
}

/// Devices may be dropped, and all rounds are whole.
pub const MAY_DROP: PlanRules = PlanRules { may_drop_devices: true, may_have_partial_round: false };

/// Devices may be dropped, and the last round may be partial.
pub const UNRESTRICTED: PlanRules = PlanRules { may_drop_devices: true, may_have_partial_round: true };

/// All combinations of the optional rules.
pub const ALL_RULES: [PlanRules; 4] = [
    PlanRules { may_drop_devices: false, may_have_partial_round: false },
    PlanRules { may_drop_devices: false, may_have_partial_round: true },
    MAY_DROP,
    UNRESTRICTED,
];

/// Returns whether two values differ by at most a relative 1e-9.
pub fn nearly_equal(left: f64, right: f64) -> bool {
    (left - right).abs() <= 1e-9 * left.abs().max(right.abs())
}

/// Checks that a complete search finds a plan as fast as the oracle's, or that neither finds a plan.
pub fn check_equally_fast(
    strategy: &dyn Strategy,
    oracle: &dyn Strategy,
    model: &LatencyModel,
) -> Result<(), TestCaseError> {
    match (solve(strategy, model), solve(oracle, model)) {
        (Ok(found), Ok(expected)) => {
            let (seconds, expected, options) =
                (found.seconds_per_token(), expected.seconds_per_token(), strategy.options());
            prop_assert!(nearly_equal(seconds, expected), "{options:?}: {seconds} is not {expected}");
            prop_assert!(found.explanation.incomplete_search.is_none());
            Ok(())
        }
        (Err(StrategyError::Infeasible(_)), Err(StrategyError::Infeasible(_))) => Ok(()),
        (found, expected) => {
            Err(TestCaseError::fail(format!("{:?}: {found:?}\nbut\n{expected:?}", strategy.options())))
        }
    }
}

/// Checks that `exact` with [`HeadChoice::Best`] is as fast as with the fastest fixed head.
pub fn check_best_head(exact: ExactSearch, model: &LatencyModel) -> Result<(), TestCaseError> {
    let with = |head| {
        solve(&ExactSearch { head, ..exact }, model)
            .map_or(f64::INFINITY, |solution| solution.seconds_per_token())
    };
    let each = (0..model.device_count()).map(|head| with(HeadChoice::Fixed(head)));
    let fastest = each.fold(f64::INFINITY, f64::min);
    let best = with(HeadChoice::Best);
    prop_assert!(best == fastest || nearly_equal(best, fastest), "{exact:?}: {best} is not {fastest}");
    Ok(())
}

/// Returns the number of cases: `all` with `HEARTH_SLOW=1`, else `PROPTEST_CASES` or an eighth of `all`, at least 8.
pub fn config_with_cases(all: u32) -> ProptestConfig {
    if std::env::var_os("HEARTH_SLOW").is_some_and(|value| value == "1") {
        ProptestConfig::with_cases(all)
    } else if std::env::var_os("PROPTEST_CASES").is_some() {
        ProptestConfig::default()
    } else {
        ProptestConfig::with_cases((all / 8).max(8))
    }
}
