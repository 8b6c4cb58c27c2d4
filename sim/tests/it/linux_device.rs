//! Simulated devices with the rates of the machine on which the page cache was measured.
//!
//! The devices run the 1B shape in Q4_K as the executor does with residency `os` or `windowed`, or as llama.cpp does,
//! which reads only by page faults. The limits are those of `exec/lab/examples/residency_table.rs`: the memory limit is
//! a part of the file size plus 64 MiB, and the disk limit is 200 MB/s.

use hearth_core::cluster::Cluster;
use hearth_profiles::device::DeviceProfile;
use hearth_profiles::model::{ModelProfile, shipped_profile};
use hearth_profiles::{Bytes, Document, Format};
use hearth_schema::plan::Plan;
use hearth_schema::residency::ResidencyOptions;
use hearth_schema::trace::{Counter, StepKind, Trace};
use hearth_sim::Options;

use crate::small_rings::{cluster, plan, simulate_with};

pub const FILE_BYTES: u64 = 675_681_184;
/// Bytes by which the memory limit exceeds the part of the model file that fits in memory.
pub const LIMIT_MARGIN: u64 = 64 << 20;
/// Memory in bytes that a process of the executor occupied in its cgroup, without weights: 22.3 MB that could not be
/// reclaimed, including keys and values; 4 MiB of program text on the active list (`active_file`), which reclaim does
/// not evict (`VM_EXEC`); and the stocks of charges of two CPUs (`MEMCG_CHARGE_BATCH`).
pub const EXECUTOR_MEMORY: u64 = 22_300_000 + (4 << 20) + (512 << 10);
/// Memory in bytes of a process of llama.cpp without weights: 49.6 MB were measured, the rest is as for the executor.
pub const LLAMA_CPP_MEMORY: u64 = 49_600_000 + (4 << 20) + (512 << 10);

/// Number of tokens until the page cache is in a steady state; these tokens are not counted.
const SETTLING: usize = 2;
const TOKENS: u32 = 12;

#[derive(Clone)]
pub struct DeviceRun {
    pub caches: Vec<u64>,
    pub windows: Vec<u32>,
    pub residency: ResidencyOptions,
    /// The kernel's read-ahead window for the model file.
    pub read_ahead: Bytes,
}

impl DeviceRun {
    /// Creates a run of one device. The memory limit is a fraction `part` of the file size plus [`LIMIT_MARGIN`], of
    /// which the process itself occupies `process` bytes.
    pub fn alone(part: f64, process: u64, residency: ResidencyOptions) -> Self {
        let limit = (FILE_BYTES as f64 * part) as u64 + LIMIT_MARGIN;
        Self { caches: vec![limit - process], windows: vec![16], residency, read_ahead: Bytes::from_mib(8) }
    }

    /// Simulates the run. Returns for each counted token the seconds and the bytes read.
    pub fn tokens(&self, seed: u64, spread: Bytes) -> Vec<(f64, f64)> {
        let (cluster, plan) = self.input(seed);
        // None of the measured programs called `madvise` for the embedding.
        let options = Options {
            chunk_size: Bytes(128 << 10),
            max_extra_process_memory: spread,
            read_around_embedding_rows: true,
            ..Options::default()
        };
        tokens(&simulate_with(&cluster, &plan, &options), plan.devices.len())[SETTLING..].to_vec()
    }

    fn input(&self, seed: u64) -> (Cluster, Plan) {
        let model = shipped_profile("1b").expect("shipped");
        let mut plan = plan(&model, &self.windows, self.residency);
        plan.context_length = 256;
        let mut cluster = cluster("1b", &vec![Bytes(0); self.windows.len()], TOKENS + SETTLING as u32 + 1);
        (cluster.context_length, cluster.workload.prompt_tokens, cluster.seed) = (256, 16, seed);
        for (place, member) in cluster.members.iter_mut().enumerate() {
            member.device = device(self.caches[place] + kv(&model, self.windows[place]), self.read_ahead);
        }
        (cluster, plan)
    }
}

/// Returns the bytes that the plan reserves for keys and values. The memory of the measured processes includes them.
fn kv(model: &ModelProfile, layers: u32) -> u64 {
    model.shape.mixer(0).cache_bytes(256, Format::F16).0 * u64::from(layers)
}

fn tokens(trace: &Trace, devices: usize) -> Vec<(f64, f64)> {
    let outputs = trace.records.iter().filter(|record| record.kind == StepKind::Output);
    let ends: Vec<u64> = outputs.map(|record| record.end_ns).collect();
    let read: Vec<u64> =
        trace.readings.iter().filter(|it| it.counter == Counter::BytesRead).map(|it| it.value).collect();
    let read: Vec<u64> = read.chunks(devices).map(|token| token.iter().sum()).collect();
    let pairs = ends.windows(2).zip(read.windows(2));
    pairs.map(|(end, read)| ((end[1] - end[0]) as f64 * 1e-9, (read[1] - read[0]) as f64)).collect()
}

/// Returns a device with the rates that `hearth lab` measured on the machine, while other programs were running.
fn device(available: u64, read_ahead: Bytes) -> DeviceProfile {
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
    DeviceProfile::from_yaml(&yaml).expect("a valid device")
}
