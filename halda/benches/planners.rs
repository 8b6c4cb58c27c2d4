//! How long do the planners take for 4, 8, 16 and 32 devices?
//!
//! ```text
//! cargo bench -p hearth-halda --bench planners
//! ```
//!
//! The devices are those of `tests/data/lda/medium.jsonl`, the model has 80 layers, the head is fixed, and every
//! device keeps a layer: the problem of the prima.cpp paper, whose own times for it are 10 to 12 ms. A planner joins
//! by a line in [`planners`]; all of them are asked for a proposal, without check and explanation.

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use hearth_halda::{Device, Exact, Halda, Instance, LatencyModel, Model, Overlap, Rules, Strategy};

/// What is measured, by name.
fn planners() -> Vec<(&'static str, Box<dyn Strategy>)> {
    vec![
        ("exact", Box::new(Exact::default())),
        ("halda", Box::new(Halda { may_drop: false, ..Halda::PAPER })),
        ("overlap", Box::new(Overlap { rules: Rules::default(), ..Overlap::default() })),
    ]
}

/// The paper's problem with so many devices.
fn instance(devices: &[Device], model: &Model, count: usize) -> Instance {
    Instance {
        name: format!("{count}x{}", model.model_layers),
        slow_disk_threshold: 3e8,
        model: model.clone(),
        devices: devices.iter().cycle().take(count).cloned().collect(),
        hops: None,
    }
}

/// The devices and a model of 80 layers.
fn material() -> (Vec<Device>, Model) {
    let lines = include_str!("../tests/data/lda/medium.jsonl").lines();
    let instances: Vec<Instance> = lines
        .map(|line| {
            let row: serde_json::Value = serde_json::from_str(line).expect("JSON");
            serde_json::from_value(row["instance"].clone()).expect("an instance")
        })
        .collect();
    let deep = instances.iter().find(|instance| instance.model.model_layers == 80).expect("80 layers");
    let model = deep.model.clone();
    (instances.into_iter().flat_map(|instance| instance.devices).collect(), model)
}

fn propose(criterion: &mut Criterion) {
    let (devices, model) = material();
    for (name, planner) in planners() {
        let mut group = criterion.benchmark_group(name);
        for count in [4, 8, 16, 32] {
            let instance = instance(&devices, &model, count);
            let latency = LatencyModel::new(&instance).expect("a valid instance");
            group.bench_with_input(BenchmarkId::from_parameter(count), &latency, |bencher, latency| {
                bencher.iter(|| planner.propose(latency));
            });
        }
        group.finish();
    }
}

criterion_group!(benches, propose);
criterion_main!(benches);
