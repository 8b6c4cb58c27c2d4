//! Instances and checks for several tests.

use std::collections::BTreeMap;

use hearth_halda::{
    Device, Exact, Gpu, HeadChoice, Instance, LatencyModel, Model, OperatingSystem, Rules, RuntimeModel,
    Strategy, StrategyError, solve,
};
use proptest::prelude::*;
use serde_json::Value;

/// The files of instances with certified optima, described in `data/lda/README.md`.
const FILES: [(&str, &str); 3] = [
    ("small.jsonl", include_str!("../data/lda/small.jsonl")),
    ("medium.jsonl", include_str!("../data/lda/medium.jsonl")),
    ("hard.jsonl", include_str!("../data/lda/hard.jsonl")),
];

/// Returns all instances with certified optima as (file and line, instance, JSON object of the line).
pub fn certified_rows() -> Vec<(String, Instance, Value)> {
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
}

/// Returns the instance with certified optima that has this name.
pub fn certified_instance(name: &str) -> Instance {
    certified_rows().into_iter().find(|(_, instance, _)| instance.name == name).unwrap().1
}

/// Returns a device on Linux without GPU, memory, hops and buffers. Only its disk takes time.
pub fn plain_device(name: &str) -> Device {
    Device {
        name: name.to_owned(),
        os: OperatingSystem::Linux,
        gpu: Gpu::None,
        cpu_speed: BTreeMap::new(),
        gpu_speed: BTreeMap::new(),
        cpu_memory_rate: 1e24,
        gpu_memory_rate: 0.0,
        cpu_cache_write: 0.0,
        gpu_cache_write: 0.0,
        gpu_upload: 0.0,
        gpu_download: 0.0,
        unified_memory: false,
        hop: 0.0,
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
        hidden_width: 1,
        key_heads: 1,
        key_head_width: 1,
        value_heads: 1,
        value_head_width: 1,
        cached_tokens: 0,
        vocab_size: 1,
        layer_weight_bytes: layer_bytes,
        input_embedding_bytes: 0,
        output_head_bytes: 0,
        layer_flops: BTreeMap::from([("q4k".to_owned(), layer_flops)]),
        output_flops: BTreeMap::new(),
        layer_bytes: Vec::new(),
    }
}

/// All combinations of the optional rules.
pub const ALL_RULES: [Rules; 4] = [
    Rules { may_drop: false, may_leave_remainder: false },
    Rules { may_drop: false, may_leave_remainder: true },
    Rules { may_drop: true, may_leave_remainder: false },
    Rules { may_drop: true, may_leave_remainder: true },
];

/// Returns whether two values are equal to a relative 1e-9.
pub fn equal(left: f64, right: f64) -> bool {
    (left - right).abs() <= 1e-9 * left.abs().max(right.abs())
}

/// Checks that a strategy finds a plan as fast as that of the oracle, without a search limit, or that neither finds a
/// plan.
pub fn same_time(
    strategy: &dyn Strategy,
    oracle: &dyn Strategy,
    model: &LatencyModel,
) -> Result<(), TestCaseError> {
    match (solve(strategy, model), solve(oracle, model)) {
        (Ok(found), Ok(expected)) => {
            let (seconds, expected) = (found.seconds(), expected.seconds());
            prop_assert!(
                equal(seconds, expected),
                "{:?}: {} is not {}",
                strategy.options(),
                seconds,
                expected
            );
            prop_assert!(found.explanation.limit.is_none());
            Ok(())
        }
        (Err(StrategyError::Infeasible(_)), Err(StrategyError::Infeasible(_))) => Ok(()),
        (found, expected) => {
            Err(TestCaseError::fail(format!("{:?}: {found:?}\nbut\n{expected:?}", strategy.options())))
        }
    }
}

/// Checks that `exact` with [`HeadChoice::Best`] is as fast as with the fastest fixed head.
pub fn best_head_is_fastest(exact: Exact, model: &LatencyModel) -> Result<(), TestCaseError> {
    let with =
        |head| solve(&Exact { head, ..exact }, model).map_or(f64::INFINITY, |solution| solution.seconds());
    let each = (0..model.device_count()).map(|head| with(HeadChoice::Fixed(head)));
    let fastest = each.fold(f64::INFINITY, f64::min);
    let best = with(HeadChoice::Best);
    prop_assert!(best == fastest || equal(best, fastest), "{exact:?}: {best} is not {fastest}");
    Ok(())
}

/// Returns the number of random cases: `all` with `HEARTH_SLOW=1`, else `PROPTEST_CASES` if it is set, else an eighth
/// of `all` but at least 8.
pub fn cases(all: u32) -> ProptestConfig {
    if std::env::var_os("HEARTH_SLOW").is_some_and(|value| value == "1") {
        ProptestConfig::with_cases(all)
    } else if std::env::var_os("PROPTEST_CASES").is_some() {
        ProptestConfig::default()
    } else {
        ProptestConfig::with_cases((all / 8).max(8))
    }
}
