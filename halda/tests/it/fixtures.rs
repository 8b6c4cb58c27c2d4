//! Instances and settings that several tests share.

use std::collections::BTreeMap;

use hearth_halda::{Device, Gpu, Instance, Model, OperatingSystem, Practice};
use proptest::prelude::ProptestConfig;
use serde_json::Value;

/// Files of instances with certified optima, described in `data/lda/README.md`.
const FILES: [(&str, &str); 3] = [
    ("small.jsonl", include_str!("../data/lda/small.jsonl")),
    ("medium.jsonl", include_str!("../data/lda/medium.jsonl")),
    ("hard.jsonl", include_str!("../data/lda/hard.jsonl")),
];

/// Every instance with certified optima: where it is, the instance, and its whole line.
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

/// The instance with certified optima of this name.
pub fn certified_instance(name: &str) -> Instance {
    certified_rows().into_iter().find(|(_, instance, _)| instance.name == name).unwrap().1
}

/// A device on Linux without a GPU and without costs but for its disk: no memory, no hops, no buffers.
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
        to_gpu: 0.0,
        from_gpu: 0.0,
        unified_memory: false,
        hop: 0.0,
        disk_read: 1e6,
        ram_available: 0,
        metal_available: 0,
        cuda_available: 0,
        can_swap: 0,
        swap_available: 0,
        cpu_buffer_bytes: 0,
        gpu_buffer_bytes: 0,
        practice: Practice::default(),
    }
}

/// A model of layers of these bytes and operations, without a cache, an embedding or an output matrix.
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
        vocabulary: 1,
        layer_weight_bytes: layer_bytes,
        input_embedding_bytes: 0,
        output_head_bytes: 0,
        layer_flops: BTreeMap::from([("q4k".to_owned(), layer_flops)]),
        output_flops: BTreeMap::new(),
        layer_bytes: Vec::new(),
    }
}

/// The number of random cases: all of them with `HEARTH_SLOW=1`, else what `PROPTEST_CASES` says, else an eighth.
pub fn cases(all: u32) -> ProptestConfig {
    if std::env::var_os("HEARTH_SLOW").is_some_and(|value| value == "1") {
        ProptestConfig::with_cases(all)
    } else if std::env::var_os("PROPTEST_CASES").is_some() {
        ProptestConfig::default()
    } else {
        ProptestConfig::with_cases((all / 8).max(8))
    }
}
