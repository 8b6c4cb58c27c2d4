//! Conversion of clusters to instances, and of solutions to plan documents.

use hearth_core::{Cluster, LinkTable, Member};
use hearth_halda::{
    Device, ExactSearch, HeadChoice, Instance, LatencyModel, ManualPlan, MemoryProportional, SingleDevice,
    Strategy, exo_memory_by_device, plan_from_solution, solve,
};
use hearth_profiles::device::{DeviceProfile, Quota, shipped_profile as shipped_device};
use hearth_profiles::document::Document;
use hearth_profiles::{BytesPerSecond, FlopsPerSecond, Format, Link, Seconds, Sourced};
use hearth_schema::plan::{Plan, Role};
use hearth_schema::scenario::{KvFormat, Links, PairLink, UnreachableDirections, Workload};

use crate::fixtures::{self, ALL_RULES, MAY_DROP, scenario_record};

fn assumed<T>(value: T) -> Sourced<T> {
    Sourced::new(value, "assumed, for a test")
}

fn link(milliseconds: f64) -> Link {
    Link::constant(assumed(Seconds(milliseconds / 1e3)), assumed(BytesPerSecond(50e6)))
}

/// Returns a device with `gib` GiB of memory. `gpu` is (kind, whether memory is unified, GiB of GPU memory).
fn device(name: &str, os: &str, gib: u64, gpu: Option<(&str, bool, u64)>) -> Member {
    let yaml = format!(
        "schema: device/1
name: {name}
os: {os}
cpu:
  name: cpu
  cores: 4
  matvec: {{q4_k: {{value: 100 GFLOP/s, source: test}}}}
  read_bandwidth: {{value: 20 GB/s, source: test}}
  kv_copy: {{latency: {{value: 1 us, source: test}}, bandwidth: {{value: 10 GB/s, source: test}}}}
  compute_buffer: {{value: 100 MiB, source: test}}
memory:
  total: {{value: {gib} GiB, source: test}}
  available: {{value: {gib} GiB, source: test}}
  page_cache: two-list
disk:
  sequential: {{value: 2 GB/s, source: test}}
  random: {{value: 1 GB/s, source: test}}
"
    );
    let gpu = gpu.map_or(String::new(), |(kind, unified, gib)| {
        format!(
            "gpu:
  kind: {kind}
  name: gpu
  unified_memory: {unified}
  matvec: {{q4_k: {{value: 2 TFLOP/s, source: test}}}}
  read_bandwidth: {{value: 300 GB/s, source: test}}
  memory_available: {{value: {gib} GiB, source: test}}
  kv_copy: {{latency: {{value: 1 us, source: test}}, bandwidth: {{value: 100 GB/s, source: test}}}}
  upload: {{latency: {{value: 20 us, source: test}}, bandwidth: {{value: 10 GB/s, source: test}}}}
  download: {{latency: {{value: 20 us, source: test}}, bandwidth: {{value: 10 GB/s, source: test}}}}
  compute_buffer: {{value: 200 MiB, source: test}}
"
        )
    });
    let device = DeviceProfile::from_yaml(&(yaml + &gpu)).unwrap();
    Member { name: name.to_owned(), address: None, device, residency: None }
}

/// Returns links with a latency of 3 ms between all devices, except that `from` cannot send to `to`.
fn one_way(from: &str, to: &str) -> LinkTable {
    let devices = [from.to_owned(), to.to_owned()];
    let between =
        vec![PairLink { devices, link: None, unreachable_directions: Some(UnreachableDirections::Forward) }];
    LinkTable::new(Links { pair_links: between, ..Links::uniform(link(3.0)) })
}

/// Returns a cluster of a Mac, a desktop as the head, and a laptop, with a shipped model.
fn cluster(model: &str) -> Cluster {
    let members = vec![
        device("mac", "macos", 8, Some(("metal", true, 5))),
        device("desktop", "linux", 16, Some(("cuda", false, 8))),
        device("laptop", "linux", 4, None),
    ];
    let devices = ["laptop".to_owned(), "mac".to_owned()];
    let between = vec![PairLink { devices, link: Some(link(7.0)), unreachable_directions: None }];
    let links = Links { pair_links: between, ..Links::uniform(link(3.0)) };
    Cluster { head: 1, workload: Workload::new(100, 100), ..fixtures::cluster(model, members, links) }
}

#[test]
fn cpu_quota_slows_a_device() {
    let mut cluster = cluster("llama-8b");
    let of = |cluster: &Cluster| Instance::from_cluster(cluster, None).devices.swap_remove(1);
    let free = of(&cluster);
    let quota = |cores: f64| Quota { cores: assumed(cores), period: assumed(Seconds(0.01)) };
    let cores = f64::from(cluster.members[2].device.cpu.cores);
    cluster.members[2].device.cpu.quota = Some(quota(cores / 4.0));
    let slowed = of(&cluster);
    assert_eq!((free.name.as_str(), slowed.name.as_str()), ("laptop", "laptop"));
    assert_eq!(slowed.cpu_memory_rate, free.cpu_memory_rate / 4.0);
    let layer = |device: &Device| device.runtime.compute_times.as_ref().unwrap().cpu_layer_seconds[0];
    let ratio = layer(&slowed) / layer(&free);
    // The time to copy keys and values does not change.
    assert!((3.9..=4.0).contains(&ratio), "{ratio}");
    cluster.members[2].device.cpu.quota = Some(quota(cores));
    assert_eq!(of(&cluster), free, "a quota of all cores has no effect");
}

#[test]
fn instance_from_cluster_by_symbol() {
    let mut cluster = cluster("llama-8b");
    let instance = Instance::from_cluster(&cluster, None);
    let names: Vec<&str> = instance.devices.iter().map(|device| device.name.as_str()).collect();
    assert_eq!(names, ["desktop", "laptop", "mac"], "the ring begins at the head");
    assert_eq!(instance.slow_disk_threshold, 1e8);
    // Keys and values: 2 x 8 heads x 128 elements x 2 bytes x 1024 tokens = 4 MiB.
    assert_eq!(instance.model.layer_cache_bytes(), Some(4 << 20));
    assert_eq!(instance.model.layer_weight_bytes, cluster.model.mean_layer_bytes().0);
    let [desktop, laptop, mac] = &instance.devices[..] else { panic!("three devices") };
    // 4 * 4096 bytes at 50 MB/s plus the latency of the link; the link between laptop and mac has 7 ms.
    let wire = 16384.0 / 50e6;
    assert_eq!(desktop.hop_seconds, 0.003 + wire);
    assert_eq!(laptop.hop_seconds, 0.007 + wire);
    assert_eq!(mac.hop_seconds, 0.003 + wire);
    let own = [0.0, 0.003 + wire, 0.003 + wire].map(Some);
    let hops = instance.pair_hop_seconds.as_ref().unwrap();
    assert_eq!(hops[0], own, "from the desktop");
    assert_eq!(hops[1][2], Some(0.007 + wire), "from the laptop to the mac");
    let disks = (desktop.disk_read_rate, mac.disk_read_rate);
    assert_eq!(disks, (2e9, 1e9), "sequential on Linux, random on macOS");
    assert_eq!((desktop.cuda_available, mac.metal_available), (8 << 30, 5 << 30));
    assert_eq!(laptop.gpu_speed.len(), 0);
    // An unmeasured format gets the speed of the nearest format.
    assert_eq!(laptop.cpu_speed["q6_k"], 100e9);
    // The keys and values of one token and layer have 4096 bytes.
    assert_eq!(laptop.cpu_cache_write_seconds, 1e-6 + 4096.0 / 10e9);
    cluster.links = one_way("laptop", "mac");
    let hops = Instance::from_cluster(&cluster, None).pair_hop_seconds.unwrap();
    assert_eq!((hops[1][2], hops[2][1]), (None, Some(0.003 + wire)));
    cluster.kv_cache_format = KvFormat::F32;
    let wide = Instance::from_cluster(&cluster, None);
    assert_eq!(wide.model.layer_cache_bytes(), Some(8 << 20));
    cluster.members.truncate(1);
    cluster.head = 0;
    let alone = Instance::from_cluster(&cluster, None);
    assert_eq!(alone.devices[0].hop_seconds, 0.0, "a single device has no hop");
}

#[test]
fn shared_gpu_memory_is_counted_once() {
    let mut cluster = cluster("llama-8b");
    cluster.members[1].device.gpu = device("gpu", "linux", 8, Some(("vulkan", true, 6))).device.gpu;
    let instance = Instance::from_cluster(&cluster, None);
    let desktop = &instance.devices[0];
    assert_eq!((desktop.ram_available, desktop.cuda_available), (10 << 30, 6 << 30));
    assert!(desktop.unified_memory);
    LatencyModel::new(&instance).unwrap();
}

/// Solves a cluster, converts the solution to a plan document, and checks the document.
fn planned(cluster: &Cluster, strategy: &dyn Strategy) -> Plan {
    let instance = Instance::from_cluster(cluster, None);
    let model = LatencyModel::new(&instance).unwrap();
    let solution = solve(strategy, &model).unwrap();
    let plan = plan_from_solution(&solution, cluster, &scenario_record()).unwrap();
    assert_eq!(Plan::from_yaml(&plan.to_yaml()).unwrap(), plan);
    // The layers of each device in the plan document are those that the planner counted.
    for (position, device) in plan.devices.iter().enumerate() {
        let index = instance.devices.iter().position(|other| other.name == device.name).unwrap();
        let share = solution.breakdown.devices[index].layer_counts;
        let windows = plan.windows(position);
        assert_eq!(windows.len() as u32, share.windows, "{}", device.name);
        assert_eq!(windows.iter().map(|window| window.len() as u32).sum::<u32>(), share.layers);
        let on_gpu = (0..plan.rounds).map(|round| plan.gpu_window(position, round).len() as u32);
        assert_eq!(on_gpu.sum::<u32>(), share.gpu_layers, "{}", device.name);
    }
    plan
}

#[test]
fn solutions_become_plans() {
    let cluster = cluster("llama-70b");
    for rules in ALL_RULES {
        for head in [HeadChoice::Fixed(0), HeadChoice::Best] {
            for rounds in [None, Some(2), Some(5)] {
                planned(&cluster, &ExactSearch { rules, head, rounds, ..ExactSearch::default() });
            }
        }
    }
    planned(&cluster, &MemoryProportional::Available);
    let (window_layers, gpu_layers) = (vec![17, 7, 13], vec![5, 0, 2]);
    let manual = ManualPlan { head: 1, rounds: Some(3), window_layers, gpu_layers, ..ManualPlan::default() };
    let plan = planned(&cluster, &manual);
    let names: Vec<&str> = plan.devices.iter().map(|device| device.name.as_str()).collect();
    assert_eq!(names, ["laptop", "mac", "desktop"]);
    assert_eq!(plan.devices[0].role, Role::Head);
    assert_eq!(plan.planner.strategy, "manual");
}

#[test]
fn mem_total_gives_the_plan_of_exo() {
    let mut cluster = cluster("llama-8b");
    for (member, name) in cluster.members.iter_mut().zip(["d1", "d2", "d3"]) {
        member.device = shipped_device(name).unwrap();
    }
    cluster.head = 0;
    // prima.cpp paper, section 4.1: 8 GiB of RAM, 8 and 11 GiB of GPU memory and 32 layers give 9, 10, 13.
    let total = exo_memory_by_device(&cluster);
    assert_eq!(total, [8 << 30, 8 << 30, 11 << 30]);
    let plan = planned(&cluster, &MemoryProportional::Total(total));
    let windows: Vec<u32> = plan.devices.iter().map(|device| device.window).collect();
    assert_eq!(windows, [9, 10, 13]);
    assert_eq!(plan.planner.strategy, "mem-total");
    // The ring starts at the head, and memory that a GPU shares is counted once, as RAM.
    cluster.head = 1;
    cluster.members[2].device.gpu = device("gpu", "linux", 8, Some(("vulkan", true, 6))).device.gpu;
    assert_eq!(exo_memory_by_device(&cluster), [8 << 30, 16 << 30, 8 << 30]);
}

#[test]
fn plan_has_an_explanation() {
    let plan = planned(&cluster("llama-8b"), &SingleDevice { device: Some(0) });
    assert_eq!(plan.devices.len(), 1);
    assert_eq!(plan.devices[0].name, "desktop");
    assert_eq!(plan.dropped_devices.len(), 2);
    // The GPU of the mac is as fast as that of the desktop. So a plan with the mac costs two hops of 3 ms plus 16 KiB
    // at 50 MB/s. The desktop alone has no hop.
    assert_eq!(plan.dropped_devices[1].name, "mac");
    assert_eq!(plan.dropped_devices[1].reason, "a token would take 6.66 ms longer with it");
    assert_eq!(
        plan.explanation[1],
        "By the times that the planner expects, no other plan with this head and these options is faster."
    );
    let sentence = "`desktop` computes 32 layers, all on its GPU; its weights fit in memory; one more layer would take \
                    669 us.";
    assert_eq!(plan.explanation[0], "`desktop` computes all layers alone.");
    assert_eq!(plan.explanation[2], sentence);
    assert!(plan.model.file_digest.is_none(), "no file");
    let predicted = plan.devices[0].predicted_terms.unwrap();
    let terms = predicted.compute + predicted.memory + predicted.disk + predicted.communication;
    assert!((terms.0 - plan.prediction.unwrap().tpot.0).abs() < 1e-12);
}

#[test]
fn plan_has_relays() {
    // The desktop cannot send to the mac, but needs it for its memory. The laptop is too slow to have a layer.
    let mut cluster = cluster("llama-8b");
    cluster.links = one_way("desktop", "mac");
    cluster.members[1] = device("desktop", "linux", 3, None);
    cluster.members[2].device.cpu.matvec =
        [(Format::Q4K, assumed(FlopsPerSecond(1e7)))].into_iter().collect();
    for member in &mut cluster.members {
        // With slow disks no device may read weights for every token.
        member.device.disk.sequential_bandwidth = assumed(BytesPerSecond(5e7));
        member.device.disk.random_bandwidth = None;
    }
    let plan = planned(&cluster, &ExactSearch { rules: MAY_DROP, ..ExactSearch::default() });
    let ring: Vec<(&str, Role)> =
        plan.devices.iter().map(|device| (device.name.as_str(), device.role)).collect();
    assert_eq!(ring, [("desktop", Role::Head), ("laptop", Role::Relay), ("mac", Role::Worker)]);
    assert_eq!((plan.devices[1].window, plan.devices[1].gpu_layers), (0, 0));
    assert!(plan.devices[1].predicted_terms.unwrap().communication.0 > 0.0);
    assert!(plan.dropped_devices.is_empty());
    cluster.links.check_reachability(&plan).unwrap();
    let sentence = "`laptop` only relays activations from `desktop` to `mac`, which cannot reach each other.";
    assert!(plan.explanation.iter().any(|found| found == sentence), "{:?}", plan.explanation);
    // Without the relay the plan cannot be executed.
    let mut direct = plan;
    direct.devices.remove(1);
    let refused = cluster.links.check_reachability(&direct).unwrap_err().to_string();
    assert!(refused.starts_with("the plan sends messages from `desktop` to `mac`, but"), "{refused}");
}
