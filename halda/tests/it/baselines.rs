//! Baselines on instances whose plans can be computed manually.
//!
//! A layer has 100 bytes, so reading it at 1000 B/s takes 0.1 s. There is no arithmetic, no cache and no buffer.

use hearth_halda::{
    Device, EdgeShard, ExactSearch, GpuApi, Instance, LatencyModel, LinguaLinked, PerformanceProportional,
    Solution, Strategy, solve,
};

use crate::fixtures::{plain_device, plain_instance, plain_model};

const LAYER_BYTES: u64 = 100;

/// Returns a device whose CPU computes `speed` layers per second and whose RAM holds `layers` layers.
fn device(name: &str, speed: f64, layers: u64) -> Device {
    Device {
        cpu_memory_rate: speed * LAYER_BYTES as f64,
        disk_read_rate: LAYER_BYTES as f64,
        ram_available: layers * LAYER_BYTES,
        ..plain_device(name)
    }
}

/// Adds a GPU that computes `speed` layers per second and holds `layers` layers.
fn with_gpu(device: Device, speed: f64, layers: u64) -> Device {
    Device {
        gpu: GpuApi::Cuda,
        gpu_memory_rate: speed * LAYER_BYTES as f64,
        cuda_available: layers * LAYER_BYTES,
        ..device
    }
}

fn solved(strategy: &dyn Strategy, layers: u32, devices: Vec<Device>) -> Result<Solution, String> {
    solved_instance(strategy, &plain_instance(plain_model(layers, LAYER_BYTES, 0.0), devices))
}

fn solved_instance(strategy: &dyn Strategy, instance: &Instance) -> Result<Solution, String> {
    solve(strategy, &LatencyModel::new(instance).unwrap()).map_err(|refusal| refusal.to_string())
}

/// Checks the windows and GPU layers of a strategy for a model of `layers` layers, in one round.
#[track_caller]
fn check(
    strategy: &dyn Strategy,
    layers: u32,
    devices: Vec<Device>,
    windows: &[u32],
    gpu_layers: &[u32],
) -> Solution {
    let solution = solved(strategy, layers, devices).unwrap();
    chosen(&solution, windows, gpu_layers);
    solution
}

#[track_caller]
fn chosen(solution: &Solution, windows: &[u32], gpu_layers: &[u32]) {
    assert_eq!(solution.assignment.window_layers, windows);
    assert_eq!(solution.assignment.gpu_layers, gpu_layers);
    assert_eq!(solution.assignment.rounds, 1);
}

/// Returns a head with 10 layers/s, a laptop with a GPU of 40 and a CPU of 5 layers/s, and a phone with 10 layers/s.
/// The arguments are the numbers of layers that fit in their memory; for the laptop in GPU memory and in RAM.
fn three(head: u64, laptop: [u64; 2], phone: u64) -> Vec<Device> {
    let laptop = with_gpu(device("laptop", 5.0, laptop[1]), 40.0, laptop[0]);
    vec![device("head", 10.0, head), laptop, device("phone", 10.0, phone)]
}

#[test]
fn perf_follows_compute_power_within_memory() {
    let perf = |layers, devices, windows: &[u32], gpu_layers: &[u32]| {
        check(&PerformanceProportional, layers, devices, windows, gpu_layers)
    };
    // 20 layers in the ratio 10:40:10 have the cumulative shares 3.33, 16.67, 20: windows of 3, 14, 3, which all fit.
    let solution = perf(20, three(20, [20, 20], 20), &[3, 14, 3], &[0, 14, 0]);
    assert!((solution.seconds_per_token() - (3.0 / 10.0 + 14.0 / 40.0 + 3.0 / 10.0)).abs() < 1e-12);

    let gpu = |name, speed, layers| with_gpu(device(name, 5.0, 10), speed, layers);
    let four =
        |last| vec![device("head", 10.0, 20), gpu("a", 40.0, 6), gpu("b", 20.0, 20), gpu("c", 20.0, last)];
    // 18 layers in the ratio 10:40:20:20 are 2, 8, 4, 4. 6 of the 8 fit; the other 2 go to the other GPUs, 1 each.
    perf(18, four(5), &[2, 6, 5, 5], &[0, 6, 5, 5]);
    // The last device cannot hold another layer.
    perf(18, four(4), &[2, 6, 6, 4], &[0, 6, 6, 4]);

    // The shares are 3, 14, 3, and the GPU holds 6. The other 8 layers in the ratio 10:5:10 have the cumulative
    // shares 3.2, 4.8, 8: 3, 2, 3. The phone can hold only 2 of its 3. The last layer in the ratio 10:5 has 0.67, 1:
    // it is the head's.
    perf(20, three(10, [6, 4], 5), &[7, 8, 5], &[0, 6, 0]);

    // 10 layers in the ratio 1:100 give the head 0.1, which rounds to zero, so it gets one layer of the other device.
    perf(10, vec![device("head", 1.0, 10), device("desktop", 100.0, 10)], &[1, 9], &[0, 0]);

    // The laptop counts with its CPU, so the ratio is 10:10. 4 layers fit in each RAM; the last 2 go to the slow GPU.
    let laptop = with_gpu(device("laptop", 10.0, 4), 2.0, 2);
    let solution = perf(10, vec![device("head", 10.0, 4), laptop], &[4, 6], &[0, 2]);
    assert!(!solution.breakdown.devices[1].exceeds_memory);
}

#[test]
fn perf_overloads_cpus_when_all_memory_is_full() {
    // 4, 6 + 1 and 5 layers fit. The other 4 in the ratio 10:5:10 have the cumulative shares 1.6, 2.4, 4: 2, 0, 2.
    let devices = three(4, [6, 1], 5);
    let solution = check(&PerformanceProportional, 20, devices.clone(), &[6, 7, 7], &[0, 6, 0]);
    // Two layers do not fit, and the disk reads one layer per second.
    assert_eq!(solution.breakdown.devices[0].disk_seconds, 2.0);

    // A device with a slow disk is skipped: the 4 layers in the ratio 10:5 have the cumulative shares 2.67, 4: 3, 1.
    let mut instance = plain_instance(plain_model(20, LAYER_BYTES, 0.0), devices);
    instance.slow_disk_threshold = 60.0;
    instance.devices[2].disk_read_rate = 50.0;
    let solution = solved_instance(&PerformanceProportional, &instance).unwrap();
    chosen(&solution, &[7, 8, 5], &[0, 6, 0]);

    instance.slow_disk_threshold = 101.0;
    let refusal = solved_instance(&PerformanceProportional, &instance).unwrap_err();
    let expected = "no plan exists: k = 1: a round has 20 layers, but only 16 fit in memory, and the disks are too slow \
                    to read weights for every token";
    assert_eq!(refusal, expected);
}

#[test]
fn edgeshard_trades_speed_for_hops() {
    // A layer takes 0.1 s on the head and 0.05 s on the others. A block on another device saves 0.05 s per layer and
    // costs a hop. 8 layers on the near device save 0.4 s for a hop of 0.1 s. One more layer on the far device would
    // save 0.05 s for a hop of 0.2 s.
    let near = Device { hop_seconds: 0.1, ..device("near", 20.0, 8) };
    let far = Device { hop_seconds: 0.2, ..device("far", 20.0, 20) };
    let devices = vec![device("head", 10.0, 10), near, far];
    let solution = check(&EdgeShard, 10, devices.clone(), &[2, 8, 0], &[0, 0, 0]);
    assert!((solution.seconds_per_token() - (2.0 * 0.1 + 8.0 * 0.05 + 0.1)).abs() < 1e-12);
    // With 20 layers, all but one are on the far device, so that there is only its hop.
    check(&EdgeShard, 20, devices, &[1, 0, 19], &[0, 0, 0]);
    // The faster processor of a device is filled first.
    for (gpu_speed, gpu_layers) in [(40.0, 3), (2.0, 1)] {
        check(&EdgeShard, 5, vec![with_gpu(device("desktop", 10.0, 4), gpu_speed, 3)], &[5], &[gpu_layers]);
    }
}

#[test]
fn edgeshard_reads_nothing_even_where_reading_is_faster() {
    // The worker is 100 times slower than the head, and the disk of the head reads 50 layers per second.
    let mut devices = vec![device("head", 100.0, 6), device("worker", 1.0, 10)];
    devices[0].disk_read_rate = 50.0 * LAYER_BYTES as f64;
    check(&EdgeShard, 10, devices.clone(), &[6, 4], &[0, 0]);
    check(&ExactSearch { rounds: Some(1), ..ExactSearch::default() }, 10, devices.clone(), &[9, 1], &[0, 0]);

    let refusal = solved(&EdgeShard, 17, devices.clone()).unwrap_err();
    assert_eq!(refusal, "`edgeshard` reads no weights from disk, and only 16 of the 17 layers fit in memory");
    devices[0].ram_available = LAYER_BYTES - 1;
    let small_head = "`edgeshard` reads no weights from disk, and the head device `head` has too little memory for \
                      a layer";
    assert_eq!(solved(&EdgeShard, 10, devices).unwrap_err(), small_head);
}

#[test]
fn lingualinked_balances_computing_and_communication() {
    // x/10 = (10 - x)/20 + 0.1 gives x = 4: both devices take 0.4 s.
    let near = Device { hop_seconds: 0.1, ..device("near", 20.0, 10) };
    let solution = check(&LinguaLinked, 10, vec![device("head", 10.0, 10), near.clone()], &[4, 6], &[0, 0]);
    let seconds = |device: usize| solution.breakdown.devices[device].seconds();
    assert!((seconds(0) - 0.4).abs() < 1e-12 && (seconds(1) - 0.4).abs() < 1e-12);
    // If the worker holds only 5 layers, or the head only 3, the other device gets the rest.
    let tight = Device { ram_available: 5 * LAYER_BYTES, ..near.clone() };
    check(&LinguaLinked, 10, vec![device("head", 10.0, 10), tight], &[5, 5], &[0, 0]);
    check(&LinguaLinked, 10, vec![device("head", 10.0, 3), near], &[3, 7], &[0, 0]);
    // GPU and CPU of the head both count: 4/40 + (x - 4)/10 = (11 - x)/10 gives x = 7.
    let head = with_gpu(device("head", 10.0, 20), 40.0, 4);
    check(&LinguaLinked, 11, vec![head, device("worker", 10.0, 20)], &[7, 4], &[4, 0]);
    // The hop of the far device takes 10 s, which is the longest time in any case. The sum of the other times is
    // minimal if the fast device has all layers but one.
    let far = Device { hop_seconds: 10.0, ..device("far", 10.0, 10) };
    let devices = vec![device("head", 10.0, 10), device("fast", 20.0, 10), far];
    check(&LinguaLinked, 10, devices, &[1, 9, 0], &[0, 0, 0]);
}

#[test]
fn lingualinked_without_memory_is_an_error() {
    let devices = vec![device("head", 10.0, 4), device("worker", 10.0, 5)];
    let expected = "`lingualinked` reads no weights from disk, and only 9 of the 10 layers fit in memory";
    assert_eq!(solved(&LinguaLinked, 10, devices).unwrap_err(), expected);
}
