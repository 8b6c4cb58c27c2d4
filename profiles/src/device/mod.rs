//! Device profiles: `device/1` documents.
//!
//! They have the symbols of the latency model (prima.cpp paper, Table 6 and appendix A.3) that depend on neither the
//! model nor the plan, each with its source. What depends on a model's shape follows from a latency and a bandwidth:
//! `t_kv_cpu` is [`Transfer::time`] of one token's keys and values.
//!
//! ```
//! let desktop = hearth_profiles::device::shipped("d3").unwrap();
//! assert_eq!(desktop.memory.available.value.to_string(), "9.70 GiB");
//! assert_eq!(desktop.disk_read().to_string(), "3.17 GB/s");
//! ```
//!
//! Not here: how the numbers are measured ([`crate::measure`]).

pub mod quota;
pub mod shipped;
pub mod soc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use quota::Quota;
pub use shipped::{shipped, shipped_names, shipped_yaml};
pub use soc::{Soc, SocOptions};

use crate::document::{Document, DocumentError};
use crate::format::Format;
use crate::link::PeerLink;
use crate::units::{Bytes, BytesPerSecond, FlopsPerSecond, Fraction, Seconds};
use crate::values::{PerFormat, Sourced};

/// More than any memory of a device: sums of sizes below it never overflow.
/// source: assumed, a thousand times the memory of a large server
pub const MAX_BYTES: Bytes = Bytes(1 << 50);

/// Operating system, which decides how memory is reclaimed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Os {
    /// Linux on a desktop, laptop or server.
    Linux,
    /// macOS; whether Metal is used follows from the GPU.
    Macos,
    /// Android and `HarmonyOS`, where idle applications are swapped to make room.
    Android,
}

/// API of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum GpuKind {
    /// NVIDIA, own memory.
    Cuda,
    /// Apple, shared memory.
    Metal,
    /// Any vendor through Vulkan.
    Vulkan,
    /// Any vendor through DX12.
    Dx12,
}

/// How the kernel reclaims page cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum PageCachePolicy {
    /// Reload what does not fit, as in the paper's latency model.
    PaperLinear,
    /// Linux with active and inactive lists.
    TwoList,
    /// Linux with generations (`CONFIG_LRU_GEN`).
    #[serde(rename = "mglru")]
    MgLru,
    /// Any page with equal probability.
    Random,
    /// macOS whose GPU is not used.
    Macos,
    /// macOS where Metal holds the weights.
    MacosMetal,
    /// Android: other applications are compressed, and the run may be killed.
    Android,
}

impl PageCachePolicy {
    /// The policy's name in documents.
    pub fn name(self) -> &'static str {
        match self {
            Self::PaperLinear => "paper-linear",
            Self::TwoList => "two-list",
            Self::MgLru => "mglru",
            Self::Random => "random",
            Self::Macos => "macos",
            Self::MacosMetal => "macos-metal",
            Self::Android => "android",
        }
    }
}

/// Parameters of page-cache policies; absent ones have the simulator's defaults.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(
    deny_unknown_fields,
    default,
    expecting = "keys of how memory is reclaimed, such as `{keep_alive: true}`"
)]
pub struct Reclaim {
    /// macOS and Android: compressed size of memory, as a share of its size.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compressed: Option<Sourced<Fraction>>,
    /// Android: how much memory of other applications is compressed for each evicted page of files.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub swapped_per_eviction: Option<Sourced<Fraction>>,
    /// Android: page cache below which the run is killed under pressure.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kill_below: Option<Sourced<Bytes>>,
    /// macOS: share of the installed memory that files always keep.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file_floor: Option<Sourced<Fraction>>,
    /// Metal: idle time after which weights are unwired.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unwire_after: Option<Sourced<Seconds>>,
    /// Metal: whether something uses the weights in between, so that they stay wired.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub keep_alive: bool,
}

/// A copy with a fixed time and a time per byte.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    deny_unknown_fields,
    expecting = "a copy's `latency` and `bandwidth`, each with a source, such as `latency: {value: 10 us, source: \"measured\"}`"
)]
pub struct Transfer {
    /// Time of an empty copy.
    pub latency: Sourced<Seconds>,
    /// Rate of a long copy.
    pub bandwidth: Sourced<BytesPerSecond>,
}

impl Transfer {
    /// Returns the time to copy `bytes`.
    pub fn time(&self, bytes: Bytes) -> Seconds {
        self.latency.value + bytes / self.bandwidth.value
    }
}

/// Processor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    deny_unknown_fields,
    expecting = "the keys of a processor: `name`, `cores`, `matvec` and others, such as `hearth profile` writes them"
)]
pub struct Cpu {
    /// Name reported by the system.
    pub name: String,
    /// Cores available to a run.
    pub cores: u32,
    /// Matrix times one vector, weights in cache: s_cpu,q of the paper.
    pub matvec: PerFormat<Sourced<FlopsPerSecond>>,
    /// Matrix times one vector, weights streamed from memory as in decoding; absent if not measured.
    #[serde(default, skip_serializing_if = "PerFormat::is_empty")]
    pub matvec_streamed: PerFormat<Sourced<FlopsPerSecond>>,
    /// Matrix times a batch of vectors, as in prefill.
    #[serde(default, skip_serializing_if = "PerFormat::is_empty")]
    pub matmul: PerFormat<Sourced<FlopsPerSecond>>,
    /// Reading weights from memory: T_cpu.
    pub read_bandwidth: Sourced<BytesPerSecond>,
    /// Attention over cached keys and values.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attention: Option<Sourced<FlopsPerSecond>>,
    /// Fixed cost of a layer beside its arithmetic: waking threads, norms, small buffers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layer_overhead: Option<Sourced<Seconds>>,
    /// Fixed cost of a pass through one window: waking up, framing a message.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window_overhead: Option<Sourced<Seconds>>,
    /// Fixed cost of a token on the head: embedding, sampling, and what no other term explains.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_overhead: Option<Sourced<Seconds>>,
    /// Copying one token's keys and values into the cache; t_kv_cpu follows from it.
    pub kv_copy: Transfer,
    /// Compute buffers: c_cpu.
    pub compute_buffer: Sourced<Bytes>,
    /// Quota on all its threads together, set by a control group; absent: none. The rates above are without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quota: Option<Quota>,
}

/// GPU with its own queue, for whole layers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    deny_unknown_fields,
    expecting = "the keys of a GPU: `kind`, `name`, `memory_available` and others, as in the shipped device `d3`"
)]
pub struct Gpu {
    /// API.
    pub kind: GpuKind,
    /// Name reported by the driver.
    pub name: String,
    /// Whether it shares the processor's memory, so that nothing is uploaded.
    pub unified_memory: bool,
    /// Matrix times one vector: s_gpu,q.
    pub matvec: PerFormat<Sourced<FlopsPerSecond>>,
    /// Matrix times a batch of vectors.
    #[serde(default, skip_serializing_if = "PerFormat::is_empty")]
    pub matmul: PerFormat<Sourced<FlopsPerSecond>>,
    /// Reading weights from its memory: T_gpu.
    pub read_bandwidth: Sourced<BytesPerSecond>,
    /// Memory available to a run: d_cuda, or for Metal the recommended working set d_metal.
    pub memory_available: Sourced<Bytes>,
    /// Copying keys and values within its memory; t_kv_gpu follows from it.
    pub kv_copy: Transfer,
    /// Host to device: t_ram_vram follows from it.
    pub upload: Transfer,
    /// Device to host: t_vram_ram follows from it.
    pub download: Transfer,
    /// Compute buffers: c_gpu.
    pub compute_buffer: Sourced<Bytes>,
    /// Fixed cost of a pass through one window: launches and synchronisation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window_overhead: Option<Sourced<Seconds>>,
}

/// Main memory.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    deny_unknown_fields,
    expecting = "the keys of memory, such as `available: {value: 9.7 GiB, source: \"read from /proc/meminfo\"}`"
)]
pub struct Memory {
    /// Installed, or the limit of the control group.
    pub total: Sourced<Bytes>,
    /// Memory that a run can use, including page cache: d_avail.
    pub available: Sourced<Bytes>,
    /// Memory of other programs that could be swapped out: bytes_can_swap.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub can_swap: Option<Sourced<Bytes>>,
    /// Free swap space.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub swap_available: Option<Sourced<Bytes>>,
    /// Page-cache policy.
    pub page_cache: PageCachePolicy,
    /// Parameters of the policy, where they are known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reclaim: Option<Reclaim>,
}

impl Memory {
    /// Memory obtainable by a run: what is available, and what other programs give up under pressure (`can_swap`,
    /// limited by the swap space where that is known). Deviation: the prima.cpp paper counts the latter on Android only
    /// (appendix A.3); its published times contradict that, see the shipped devices' sources.
    pub fn obtainable(&self) -> Bytes {
        let given_up = self.can_swap.as_ref().map_or(Bytes::ZERO, |bytes| bytes.value);
        let swap = self.swap_available.as_ref().map_or(given_up, |bytes| bytes.value);
        self.available.value + given_up.min(swap)
    }
}

/// The disk that holds the model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    deny_unknown_fields,
    expecting = "the keys of a disk, such as `sequential: {value: 3 GB/s, source: \"measured\"}`"
)]
pub struct Disk {
    /// Explicit sequential reads: s_disk on Linux and Android.
    pub sequential: Sourced<BytesPerSecond>,
    /// Sequential page faults on a mapping; absent: as fast as sequential.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fault: Option<Sourced<BytesPerSecond>>,
    /// Random 4 KiB reads: s_disk on macOS; absent: as fast as sequential.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub random: Option<Sourced<BytesPerSecond>>,
    /// Populating a mapping ahead of use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub populate: Option<Sourced<BytesPerSecond>>,
    /// Most bytes per second that one thread brings into the page cache and evicts again on any disk: the kernel's work
    /// for pages, which bounds a device that streams its weights. Absent: as on the machine where it was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub turnover: Option<Sourced<BytesPerSecond>>,
    /// Time to the first byte of a request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latency: Option<Sourced<Seconds>>,
    /// Throttle on all its reads together, set by a control group; absent: none. The rates above are without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<Sourced<BytesPerSecond>>,
    /// Read-ahead window, which also bounds what one advice call reads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_ahead: Option<Sourced<Bytes>>,
}

/// Device, measured or published.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "a device document, which begins with `schema: device/1`")]
pub struct Device {
    /// `device/1`.
    pub schema: String,
    /// Short name, unique in a cluster.
    pub name: String,
    /// Description.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub about: String,
    /// Operating system.
    pub os: Os,
    pub cpu: Cpu,
    pub memory: Memory,
    pub disk: Disk,
    /// Graphics processor, if a run may use one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<Gpu>,
    /// GPU and NPU that compute together over main memory, if a run may use them, in place of the processor.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub soc: Option<Soc>,
    /// Links measured from this device to others.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub peers: Vec<PeerLink>,
}

impl Device {
    /// s_disk of the latency model: sequential on Linux and Android, random on macOS (paper, A.3), up to the throttle.
    pub fn disk_read(&self) -> BytesPerSecond {
        let rate = match self.os {
            Os::Linux | Os::Android => self.disk.sequential.value,
            Os::Macos => self.disk.random.as_ref().unwrap_or(&self.disk.sequential).value,
        };
        self.disk.within_limit(rate)
    }

    /// Whether the GPU's weights are pages of the mapped file, as with Metal: they are read again if memory does not
    /// keep them. Other GPUs have copies that stay.
    pub fn gpu_maps_weights(&self) -> bool {
        let unified = self.gpu.as_ref().is_some_and(|gpu| gpu.unified_memory);
        unified && self.memory.page_cache == PageCachePolicy::MacosMetal
    }
}

impl Disk {
    /// The rate of reading ahead: of populating, or of sequential reads.
    pub fn read_ahead_rate(&self) -> BytesPerSecond {
        self.within_limit(self.populate.as_ref().unwrap_or(&self.sequential).value)
    }

    /// The rate of page faults, or of sequential reads.
    pub fn fault_read_rate(&self) -> BytesPerSecond {
        self.within_limit(self.fault.as_ref().unwrap_or(&self.sequential).value)
    }

    fn within_limit(&self, rate: BytesPerSecond) -> BytesPerSecond {
        self.limit.as_ref().map_or(rate, |limit| BytesPerSecond(rate.0.min(limit.value.0)))
    }
}

impl Cpu {
    /// The single-vector rate of a format.
    ///
    /// A format without a rate has that of the format with the closest size per weight: decoding is bound by reading,
    /// and the arithmetic differs by less than the sizes do.
    pub fn matvec_rate(&self, format: Format) -> Option<FlopsPerSecond> {
        nearest(&self.matvec, format)
    }
}

impl Gpu {
    /// The same as [`Cpu::matvec_rate`] for the GPU.
    pub fn matvec_rate(&self, format: Format) -> Option<FlopsPerSecond> {
        nearest(&self.matvec, format)
    }
}

/// The rate of a format, or of the measured format with the closest size per weight.
pub fn nearest(rates: &PerFormat<Sourced<FlopsPerSecond>>, format: Format) -> Option<FlopsPerSecond> {
    let distance = |other: Format| (other.bits_per_weight() - format.bits_per_weight()).abs();
    rates.get(format).map(|rate| rate.value).or_else(|| {
        rates.iter().min_by(|a, b| distance(a.0).total_cmp(&distance(b.0))).map(|(_, rate)| rate.value)
    })
}

impl Document for Device {
    const SCHEMA: &'static str = "device/1";

    fn validate(&self) -> Result<(), DocumentError> {
        let name = &self.name;
        let refuse =
            |key: &str, what: String| Err(DocumentError::invalid_at(key, format!("device `{name}`: {what}")));
        if self.name.is_empty() {
            return refuse("name", "`name` is empty".into());
        }
        if self.cpu.cores == 0 {
            return refuse("cpu.cores", "`cpu.cores` is 0; a device needs at least one".into());
        }
        if self.cpu.matvec.is_empty() {
            let what = "`cpu.matvec` names no format; give at least the model's main one";
            return refuse("cpu.matvec", what.into());
        }
        if let Some(what) = self.cpu.quota.as_ref().and_then(Quota::wrong) {
            return refuse("cpu.quota", what);
        }
        for (place, rate) in self.rates() {
            if rate <= 0.0 {
                let what = format!("`{place}` is zero, so nothing would ever finish; measure it again");
                return refuse(&place, what);
            }
        }
        for (place, bytes) in self.sizes() {
            if bytes > MAX_BYTES {
                let what = format!("`{place}` is {bytes}, more than {MAX_BYTES}: check its unit");
                return refuse(place, what);
            }
        }
        if self.memory.available.value > self.memory.total.value {
            let what = "`memory.available` is more than `memory.total`";
            return refuse("memory.available", what.into());
        }
        let reclaim = self.memory.reclaim.iter();
        for (key, of_whole) in
            reclaim.flat_map(|it| [("compressed", &it.compressed), ("file_floor", &it.file_floor)])
        {
            if of_whole.as_ref().is_some_and(|part| part.value.0 > 1.0) {
                let what = format!("`memory.reclaim.{key}` is more than 100 %; it is a part of the whole");
                return refuse(&format!("memory.reclaim.{key}"), what);
            }
        }
        if self.soc.is_some() && self.gpu.is_some() {
            return refuse("soc", "it has `gpu` and `soc`; a GPU of a SoC stands in `soc.gpu` only".into());
        }
        self.soc.as_ref().map_or(Ok(()), |soc| soc.validate(name))
    }
}

impl Device {
    /// Every size, by its key.
    fn sizes(&self) -> Vec<(&'static str, Bytes)> {
        let memory = &self.memory;
        let mut sizes = vec![
            ("memory.total", memory.total.value),
            ("memory.available", memory.available.value),
            ("cpu.compute_buffer", self.cpu.compute_buffer.value),
        ];
        let more = [
            ("memory.can_swap", &memory.can_swap),
            ("memory.swap_available", &memory.swap_available),
            ("disk.read_ahead", &self.disk.read_ahead),
        ];
        sizes.extend(more.into_iter().filter_map(|(place, size)| Some((place, size.as_ref()?.value))));
        if let Some(gpu) = &self.gpu {
            sizes.push(("gpu.memory_available", gpu.memory_available.value));
            sizes.push(("gpu.compute_buffer", gpu.compute_buffer.value));
        }
        sizes
    }

    /// Every rate by its key.
    fn rates(&self) -> Vec<(String, f64)> {
        let (cpu, disk) = (&self.cpu, &self.disk);
        let mut rates = vec![
            ("cpu.read_bandwidth", cpu.read_bandwidth.value.0),
            ("cpu.kv_copy.bandwidth", cpu.kv_copy.bandwidth.value.0),
            ("disk.sequential", disk.sequential.value.0),
        ];
        let optional = [
            ("disk.fault", &disk.fault),
            ("disk.random", &disk.random),
            ("disk.populate", &disk.populate),
            ("disk.turnover", &disk.turnover),
            ("disk.limit", &disk.limit),
        ];
        rates.extend(optional.into_iter().filter_map(|(key, rate)| Some((key, rate.as_ref()?.value.0))));
        rates.extend(cpu.attention.as_ref().map(|rate| ("cpu.attention", rate.value.0)));
        let mut tables = vec![
            ("cpu.matvec", &cpu.matvec),
            ("cpu.matvec_streamed", &cpu.matvec_streamed),
            ("cpu.matmul", &cpu.matmul),
        ];
        if let Some(gpu) = &self.gpu {
            rates.extend([
                ("gpu.read_bandwidth", gpu.read_bandwidth.value.0),
                ("gpu.kv_copy.bandwidth", gpu.kv_copy.bandwidth.value.0),
                ("gpu.upload.bandwidth", gpu.upload.bandwidth.value.0),
                ("gpu.download.bandwidth", gpu.download.bandwidth.value.0),
            ]);
            tables.extend([("gpu.matvec", &gpu.matvec), ("gpu.matmul", &gpu.matmul)]);
        }
        let by_format = tables.into_iter().flat_map(|(key, table)| {
            table.iter().map(move |(format, rate)| (format!("{key}.{format}"), rate.value.0))
        });
        rates.into_iter().map(|(key, rate)| (key.to_owned(), rate)).chain(by_format).collect()
    }
}
