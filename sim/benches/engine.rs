//! How fast are the kernel and the simulator, and is the cost linear in what is simulated?
//!
//! ```text
//! cargo bench -p hearth-sim --bench engine
//! ```
//!
//! `kernel`: events a second, with so many pending, and of a small queueing network. `token`: a 70B model on four
//! devices; the rate is in tokens. `devices`, `layers`, `tokens`: the same simulation, larger in one respect; the rate
//! is in layers times tokens and should not fall. Every device there has page cache for half of its weights.

#[path = "../examples/queues/mod.rs"]
mod queues;
#[path = "../examples/rings/mod.rs"]
mod rings;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use hearth_schema::residency::Residency;
use hearth_schema::residency::ResidencyOptions;
use rings::{Ring, Size};

const EVENTS: u64 = 100_000;
const TOKENS: u32 = 16;

fn kernel(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("kernel");
    group.throughput(Throughput::Elements(EVENTS));
    for pending in [16, 256, 4096] {
        group.bench_with_input(BenchmarkId::new("hold", pending), &pending, |bencher, &pending| {
            bencher.iter(|| queues::hold(pending, EVENTS));
        });
    }
    group.bench_function("tandem/8-64", |bencher| bencher.iter(|| queues::tandem(8, 64, EVENTS)));
    group.finish();
}

fn token(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("token");
    group.sample_size(10);
    group.throughput(Throughput::Elements(u64::from(TOKENS)));
    let of = |windows: [u32; 4], residency| {
        Ring::new(Size { windows: &windows, layers: 80, tokens: TOKENS, residency, held: None })
            .expect("a ring")
    };
    let (os, managed) = (ResidencyOptions::default(), ResidencyOptions::of(Residency::Managed));
    let rings = [
        ("gpus", Ring::with_gpus(TOKENS).expect("a ring")),
        ("os, no prefetch", of([40, 16, 16, 8], os.without_prefetch())),
        ("os, 2 rounds", of([20, 8, 8, 4], os)),
        ("managed", of([40, 16, 16, 8], managed)),
    ];
    for (name, ring) in &rings {
        group.bench_with_input(BenchmarkId::from_parameter(name), ring, |bencher, ring| {
            bencher.iter(|| ring.run().expect("a trace"));
        });
    }
    group.finish();
}

/// A group of rings that are larger in one respect; `(devices, layers, tokens)` of each.
fn larger(criterion: &mut Criterion, name: &str, sizes: &[(u32, u32, u32)]) {
    let mut group = criterion.benchmark_group(name);
    group.sample_size(10);
    for &(devices, layers, tokens) in sizes {
        let windows = vec![layers / devices; devices as usize];
        let residency = ResidencyOptions::default();
        let held = Some(0.5);
        let ring = Ring::new(Size { windows: &windows, layers, tokens, residency, held }).expect("a ring");
        group.throughput(Throughput::Elements(u64::from(layers * tokens)));
        let id = BenchmarkId::from_parameter(match name {
            "devices" => devices,
            "layers" => layers,
            _ => tokens,
        });
        group.bench_with_input(id, &ring, |bencher, ring| bencher.iter(|| ring.run().expect("a trace")));
    }
    group.finish();
}

fn scaling(criterion: &mut Criterion) {
    larger(criterion, "devices", &[1, 2, 4, 8, 16, 32].map(|devices| (devices, 160, TOKENS)));
    larger(criterion, "layers", &[20, 40, 80, 160].map(|layers| (4, layers, TOKENS)));
    larger(criterion, "tokens", &[8, 32, 128, 512].map(|tokens| (4, 80, tokens)));
}

criterion_group!(benches, kernel, token, scaling);
criterion_main!(benches);
