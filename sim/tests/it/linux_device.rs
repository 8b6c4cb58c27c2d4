//! Whole devices of the machine on which the page cache was measured, running the 1B shape in Q4_K.
//!
//! They do what the executor does under `os` and `windowed`, and what llama.cpp does, which only faults. The limits are
//! those of `exec/lab/examples/residency_table.rs`: memory for a part of the file and 64 MiB, reads at 200 MB/s.

use hearth_core::cluster::Cluster;
use hearth_profiles::device::Device;
use hearth_profiles::model::{ModelProfile, shipped};
use hearth_profiles::{Bytes, Document};
use hearth_schema::plan::Plan;
use hearth_schema::residency::ResidencyOptions;
use hearth_schema::trace::{Counter, Kind, Trace};
use hearth_sim::Options;

use crate::small_rings::{cluster, plan, simulate_with};

/// The model file of the measurements.
pub const FILE: u64 = 675_681_184;
/// Beside the part of the file.
pub const PROCESS: u64 = 64 << 20;
/// What a process of the executor had of its group's memory beside weights: 22.3 MB that could not be reclaimed, keys
/// and values included; 4 MiB of program text on the active list (`active_file`), which reclaim spares (`VM_EXEC`);
/// and the stock of charges of two processors (`MEMCG_CHARGE_BATCH`).
pub const HELD: u64 = 22_300_000 + (4 << 20) + (512 << 10);
/// The same of llama.cpp, of which only the first was measured.
pub const PEER_HELD: u64 = 49_600_000 + (4 << 20) + (512 << 10);

/// Tokens until the page cache has settled, and those that count.
const SETTLING: usize = 2;
const TOKENS: u32 = 12;

/// Devices with page caches of these bytes, and the layers that they compute.
#[derive(Clone)]
pub struct Run {
    pub caches: Vec<u64>,
    pub windows: Vec<u32>,
    pub residency: ResidencyOptions,
    /// The window of the open file.
    pub read_ahead: Bytes,
}

impl Run {
    /// One device with a limit for a part of the file, whose process holds `held` bytes.
    pub fn alone(part: f64, held: u64, residency: ResidencyOptions) -> Self {
        let limit = (FILE as f64 * part) as u64 + PROCESS;
        Self { caches: vec![limit - held], windows: vec![16], residency, read_ahead: Bytes::mib(8) }
    }

    /// Seconds and bytes of each token that counts.
    pub fn tokens(&self, seed: u64, spread: Bytes) -> Vec<(f64, f64)> {
        let (cluster, plan) = self.input(seed);
        // None of the measured programs advised the system about the embedding.
        let options = Options {
            chunk: Bytes(128 << 10),
            process_spread: spread,
            rows_read_around: true,
            ..Options::default()
        };
        tokens(&simulate_with(&cluster, &plan, &options), plan.devices.len())[SETTLING..].to_vec()
    }

    fn input(&self, seed: u64) -> (Cluster, Plan) {
        let model = shipped("1b").expect("shipped");
        let mut plan = plan(&model, &self.windows, self.residency);
        plan.context = 256;
        let mut cluster = cluster("1b", &vec![Bytes(0); self.windows.len()], TOKENS + SETTLING as u32 + 1);
        (cluster.context, cluster.workload.prompt, cluster.seed) = (256, 16, seed);
        for (place, member) in cluster.members.iter_mut().enumerate() {
            member.device = device(self.caches[place] + kv(&model, self.windows[place]), self.read_ahead);
        }
        (cluster, plan)
    }
}

/// What the plan takes for keys and values, which the measured processes hold already.
fn kv(model: &ModelProfile, layers: u32) -> u64 {
    model.shape.kv_bytes_per_layer(256, Bytes(2)).0 * u64::from(layers)
}

fn tokens(trace: &Trace, devices: usize) -> Vec<(f64, f64)> {
    let outputs = trace.records.iter().filter(|record| record.kind == Kind::Output);
    let ends: Vec<u64> = outputs.map(|record| record.end).collect();
    let read: Vec<u64> =
        trace.readings.iter().filter(|it| it.counter == Counter::BytesRead).map(|it| it.value).collect();
    let read: Vec<u64> = read.chunks(devices).map(|token| token.iter().sum()).collect();
    let pairs = ends.windows(2).zip(read.windows(2));
    pairs.map(|(end, read)| ((end[1] - end[0]) as f64 * 1e-9, (read[1] - read[0]) as f64)).collect()
}

/// Rates as `hearth lab` measured them on the machine, with other work beside it.
fn device(available: u64, read_ahead: Bytes) -> Device {
    let yaml = format!(
        "schema: device/1
name: vm
os: linux
cpu:
  name: two cores
  cores: 2
  matvec:
    q4_k: {{value: 17.4 GFLOP/s, source: test}}
    q6_k: {{value: 11 GFLOP/s, source: test}}
    f32: {{value: 23 GFLOP/s, source: test}}
  read_bandwidth: {{value: 4.8 GB/s, source: test}}
  layer_overhead: {{value: 234 us, source: test}}
  kv_copy: {{latency: {{value: 0 s, source: test}}, bandwidth: {{value: 443 MB/s, source: test}}}}
  compute_buffer: {{value: 0 B, source: test}}
memory:
  total: {{value: 64 GiB, source: test}}
  available: {{value: {available} B, source: test}}
  page_cache: two-list
disk:
  sequential: {{value: 856 MB/s, source: test}}
  fault: {{value: 1389 MB/s, source: test}}
  populate: {{value: 1.43 GB/s, source: test}}
  latency: {{value: 39.5 us, source: test}}
  limit: {{value: 200 MB/s, source: test}}
  read_ahead: {{value: {read_ahead}, source: test}}
"
    );
    Device::from_yaml(&yaml).expect("a valid device")
}
