//! Device profiles: `device/1` documents.
//!
//! A profile has those parameters of the latency model (prima.cpp paper, Table 6 and appendix A.3) that depend on
//! neither the model nor the plan, each with its source. Times that depend on the shape of a model are computed from
//! a latency and a bandwidth: `t_kv_cpu` is [`TransferCost::transfer_time`] for the keys and values of one token.
//!
//! ```
//! let desktop = hearth_profiles::device::shipped_profile("d3").unwrap();
//! assert_eq!(desktop.memory.available_memory.value.to_string(), "9.70 GiB");
//! assert_eq!(desktop.disk_read_rate().to_string(), "3.17 GB/s");
//! ```
//!
//! The module [`crate::measure`] measures the values on this machine.

pub mod quota;
pub mod shipped_devices;
pub mod soc;
mod speed;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use quota::Quota;
pub use shipped_devices::{shipped_names, shipped_profile, shipped_yaml};
pub use soc::{Soc, SocOptions};

use crate::document::{Document, DocumentError};
use crate::document_values::{FormatMap, Sourced};
use crate::format::Format;
use crate::link::PeerLink;
use crate::units::{Bytes, BytesPerSecond, FlopsPerSecond, Fraction, Seconds};

/// Maximum of each size in a device profile, so that sums of sizes cannot overflow.
/// source: assumed, a thousand times the memory of a large server
pub const MAX_MEMORY_BYTES: Bytes = Bytes(1 << 50);

/// Operating system of a device. Memory reclaim depends on the operating system.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Os {
    /// Linux on a desktop, a laptop or a server.
    Linux,
    /// macOS. Whether Metal is used depends on the GPU of the device.
    Macos,
    /// Windows. Its memory reclaim is simulated as that of Linux.
    Windows,
    /// Android or `HarmonyOS`, which swap out idle applications under memory pressure.
    Android,
}

/// Programming interface of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum GpuKind {
    /// CUDA: an NVIDIA GPU with its own memory.
    Cuda,
    /// Metal: an Apple GPU that shares main memory with the CPU.
    Metal,
    /// Vulkan: a GPU of any vendor.
    Vulkan,
    /// `DirectX` 12: a GPU of any vendor.
    Dx12,
}

/// Policy by which the kernel reclaims page cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum PageCachePolicy {
    /// Reloads the part of the weights that does not fit in memory, as in the latency model of the prima.cpp paper.
    PaperLinear,
    /// Linux with active and inactive page lists.
    TwoList,
    /// Linux with multi-generational LRU (`CONFIG_LRU_GEN`).
    #[serde(rename = "mglru")]
    MgLru,
    /// Evicts pages at random, each with equal probability.
    Random,
    /// macOS on the CPU, without Metal.
    Macos,
    /// macOS with Metal, which wires the weights (pins the pages in memory).
    MacosMetal,
    /// Android: memory of other applications is compressed, and the run may be killed.
    Android,
}

impl PageCachePolicy {
    /// Returns the name of the policy in device profiles.
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

/// Parameters of page-cache policies. The simulator has a default for each absent parameter.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[serde(expecting = "the parameters of memory reclaim, such as `{keep_alive: true}`")]
pub struct ReclaimParameters {
    /// macOS and Android: size of compressed memory, as a fraction of its original size.
    #[serde(rename = "compressed", skip_serializing_if = "Option::is_none")]
    pub compressed_fraction: Option<Sourced<Fraction>>,
    /// Android: memory of other applications that is compressed for each evicted file page, as a fraction of a page.
    #[serde(rename = "swapped_per_eviction", skip_serializing_if = "Option::is_none")]
    pub swapped_fraction_per_eviction: Option<Sourced<Fraction>>,
    /// Android: size of the page cache below which the run is killed under memory pressure.
    #[serde(rename = "kill_below", skip_serializing_if = "Option::is_none")]
    pub kill_threshold: Option<Sourced<Bytes>>,
    /// macOS: fraction of the installed memory that remains for file pages under memory pressure.
    #[serde(rename = "file_floor", skip_serializing_if = "Option::is_none")]
    pub min_file_page_fraction: Option<Sourced<Fraction>>,
    /// Metal: idle time after which the weights are unwired (no longer pinned in memory).
    #[serde(rename = "unwire_after", skip_serializing_if = "Option::is_none")]
    pub unwire_timeout: Option<Sourced<Seconds>>,
    /// Metal: whether the weights are accessed during idle times, so that they stay wired.
    #[serde(rename = "keep_alive", skip_serializing_if = "std::ops::Not::not")]
    pub keeps_weights_wired: bool,
}

/// Cost of a copy: a fixed time and a time per byte.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    deny_unknown_fields,
    expecting = "a copy's `latency` and `bandwidth`, each with a source, such as `latency: {value: 10 us, source: \"measured\"}`"
)]
pub struct TransferCost {
    /// Fixed time of a copy.
    pub latency: Sourced<Seconds>,
    /// Transfer rate of a long copy.
    pub bandwidth: Sourced<BytesPerSecond>,
}

impl TransferCost {
    /// Returns the time to copy `bytes`.
    pub fn transfer_time(&self, bytes: Bytes) -> Seconds {
        self.latency.value + bytes / self.bandwidth.value
    }
}

/// Number of tokens of the products that [`Cpu::matmul_streamed`] describes.
pub const SMALL_BATCH_TOKENS: u32 = 4;

/// Number of tokens of the products that [`Cpu::matmul_medium`] describes.
pub const MEDIUM_BATCH_TOKENS: u32 = 16;

/// Number of tokens of the products that [`Cpu::matmul`] describes.
pub const LARGE_BATCH_TOKENS: u32 = 128;

/// The CPU of a device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    deny_unknown_fields,
    expecting = "the keys of a CPU: `name`, `cores`, `matvec` and others, as `hearth profile` writes them"
)]
pub struct Cpu {
    /// Name of the CPU as the operating system reports it.
    pub name: String,
    /// Number of cores that a run can use.
    pub cores: u32,
    /// Speed of matrix-vector products with weights in cache: s_cpu,q of the prima.cpp paper.
    pub matvec: FormatMap<Sourced<FlopsPerSecond>>,
    /// Speed of matrix-vector products with weights streamed from memory, as in decoding; absent if not measured.
    #[serde(default, skip_serializing_if = "FormatMap::is_empty")]
    pub matvec_streamed: FormatMap<Sourced<FlopsPerSecond>>,
    /// Speed of matrix products with [`SMALL_BATCH_TOKENS`] tokens and weights streamed from memory, as for sequences
    /// that share a batch and for drafted tokens; absent if not measured.
    #[serde(default, skip_serializing_if = "FormatMap::is_empty")]
    pub matmul_streamed: FormatMap<Sourced<FlopsPerSecond>>,
    /// Speed of matrix products with [`MEDIUM_BATCH_TOKENS`] tokens and weights streamed from memory, as for many sequences
    /// and for short prompts; absent if not measured.
    #[serde(default, skip_serializing_if = "FormatMap::is_empty")]
    pub matmul_medium: FormatMap<Sourced<FlopsPerSecond>>,
    /// Speed of matrix products with [`LARGE_BATCH_TOKENS`] tokens, as in prefill.
    #[serde(default, skip_serializing_if = "FormatMap::is_empty")]
    pub matmul: FormatMap<Sourced<FlopsPerSecond>>,
    /// Bandwidth of reading weights from memory: T_cpu of the prima.cpp paper.
    pub read_bandwidth: Sourced<BytesPerSecond>,
    /// Speed of attention over cached keys and values.
    #[serde(rename = "attention", default, skip_serializing_if = "Option::is_none")]
    pub attention_rate: Option<Sourced<FlopsPerSecond>>,
    /// Speed of norms, activation functions and residual additions between matrix products, in bytes of
    /// [`ModelShape::layer_activation_bytes`](crate::model::ModelShape::layer_activation_bytes); absent if not measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub activation_bandwidth: Option<Sourced<BytesPerSecond>>,
    /// Fixed time of a layer in addition to its matrix products and activations: waking threads, rounding, small buffers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layer_overhead: Option<Sourced<Seconds>>,
    /// Fixed time of a pass through one window (the layers of the device in a round): waking threads, framing a
    /// message.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window_overhead: Option<Sourced<Seconds>>,
    /// Fixed time of a token on the head device: embedding, sampling, and time that no other term explains.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_overhead: Option<Sourced<Seconds>>,
    /// Cost of copying keys and values into the cache, from which t_kv_cpu is computed.
    pub kv_copy: TransferCost,
    /// Size of the compute buffers: c_cpu of the prima.cpp paper.
    pub compute_buffer: Sourced<Bytes>,
    /// CPU quota of a control group for all threads; absent without a quota. The other values are without the quota.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quota: Option<Quota>,
}

/// A GPU with its own queue that computes whole layers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    deny_unknown_fields,
    expecting = "the keys of a GPU: `kind`, `name`, `memory_available` and others, as in the shipped device `d3`"
)]
pub struct Gpu {
    pub kind: GpuKind,
    /// Name of the GPU as the driver reports it.
    pub name: String,
    /// Whether the GPU shares main memory with the CPU, so that copies between both take no time.
    pub unified_memory: bool,
    /// Speed of matrix-vector products: s_gpu,q of the prima.cpp paper.
    pub matvec: FormatMap<Sourced<FlopsPerSecond>>,
    /// Speed of matrix products with a batch of tokens, as in prefill.
    #[serde(default, skip_serializing_if = "FormatMap::is_empty")]
    pub matmul: FormatMap<Sourced<FlopsPerSecond>>,
    /// Bandwidth of reading weights from GPU memory: T_gpu of the prima.cpp paper.
    pub read_bandwidth: Sourced<BytesPerSecond>,
    /// GPU memory available to a run: d_cuda, or for Metal the recommended working set d_metal.
    pub memory_available: Sourced<Bytes>,
    /// Cost of copying keys and values within GPU memory, from which t_kv_gpu is computed.
    pub kv_copy: TransferCost,
    /// Cost of copies from main memory to GPU memory, from which t_ram_vram is computed.
    pub upload: TransferCost,
    /// Cost of copies from GPU memory to main memory, from which t_vram_ram is computed.
    pub download: TransferCost,
    /// Size of the compute buffers: c_gpu of the prima.cpp paper.
    pub compute_buffer: Sourced<Bytes>,
    /// Fixed time of a pass through one window (the layers of the device in a round): kernel launches, synchronisation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window_overhead: Option<Sourced<Seconds>>,
    /// Fixed time of a layer in addition to its matrix products: launches of its kernels, and small operations.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layer_overhead: Option<Sourced<Seconds>>,
}

/// Main memory of a device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    deny_unknown_fields,
    expecting = "the keys of memory, such as `available: {value: 9.7 GiB, source: \"read from /proc/meminfo\"}`"
)]
pub struct Memory {
    /// Installed memory, or the limit of the control group if it is lower.
    #[serde(rename = "total")]
    pub total_memory: Sourced<Bytes>,
    /// Memory that a run can use, including page cache: d_avail of the prima.cpp paper.
    #[serde(rename = "available")]
    pub available_memory: Sourced<Bytes>,
    /// Memory of other programs that could be swapped out: bytes_can_swap of the prima.cpp paper.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub can_swap: Option<Sourced<Bytes>>,
    /// Free swap space: d_swap_avail of the prima.cpp paper.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub swap_available: Option<Sourced<Bytes>>,
    pub page_cache: PageCachePolicy,
    /// Parameters of the page-cache policy, if they are known.
    #[serde(rename = "reclaim", default, skip_serializing_if = "Option::is_none")]
    pub reclaim_parameters: Option<ReclaimParameters>,
}

impl Memory {
    /// Returns the memory that a run can obtain: the available memory, and the memory of other programs that is
    /// swapped out under memory pressure (`can_swap`, limited by the free swap space if known). Deviation: the
    /// prima.cpp paper counts swapped-out memory on Android only (appendix A.3), but the times in the paper contradict
    /// this restriction; see the sources in the shipped devices.
    pub fn obtainable_bytes(&self) -> Bytes {
        let swappable = self.can_swap.as_ref().map_or(Bytes::ZERO, |bytes| bytes.value);
        let swap = self.swap_available.as_ref().map_or(swappable, |bytes| bytes.value);
        self.available_memory.value + swappable.min(swap)
    }
}

/// The disk that stores the model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[serde(expecting = "the keys of a disk, such as `sequential: {value: 3 GB/s, source: \"measured\"}`")]
pub struct Disk {
    /// Rate of sequential reads by read calls, as opposed to page faults: s_disk on Linux and Android.
    #[serde(rename = "sequential")]
    pub sequential_bandwidth: Sourced<BytesPerSecond>,
    /// Rate of sequential reads by page faults on a mapping; if absent, equal to `sequential`.
    #[serde(rename = "fault", default, skip_serializing_if = "Option::is_none")]
    pub fault_bandwidth: Option<Sourced<BytesPerSecond>>,
    /// Rate of random reads of 4 KiB: s_disk on macOS; if absent, equal to `sequential`.
    #[serde(rename = "random", default, skip_serializing_if = "Option::is_none")]
    pub random_bandwidth: Option<Sourced<BytesPerSecond>>,
    /// Rate of reading a memory mapping ahead of use (`MADV_POPULATE_READ`).
    #[serde(rename = "populate", default, skip_serializing_if = "Option::is_none")]
    pub populate_bandwidth: Option<Sourced<BytesPerSecond>>,
    /// Maximum rate at which one thread reads pages into the page cache and evicts them again. The CPU time of the
    /// kernel limits this rate, not the disk, and the rate limits a device that streams weights from disk. The default
    /// was measured on one machine.
    #[serde(rename = "turnover", default, skip_serializing_if = "Option::is_none")]
    pub page_cache_throughput: Option<Sourced<BytesPerSecond>>,
    /// Time from a read request to its first byte.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latency: Option<Sourced<Seconds>>,
    /// Time that a direct read of 1 MiB at a random place takes, in addition to the time at the rate of `populate`; if
    /// absent, equal to `latency`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub piece_latency: Option<Sourced<Seconds>>,
    /// Limit of a control group for the rate of all reads; absent without a limit. All other rates exclude it.
    #[serde(rename = "limit", default, skip_serializing_if = "Option::is_none")]
    pub bandwidth_limit: Option<Sourced<BytesPerSecond>>,
    /// Size of the read-ahead window, which also limits how much one `madvise` call reads.
    #[serde(rename = "read_ahead", default, skip_serializing_if = "Option::is_none")]
    pub read_ahead_window: Option<Sourced<Bytes>>,
}

/// A device profile, with values from measurements or from publications.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "a device document, which begins with `schema: device/1`")]
pub struct DeviceProfile {
    /// Schema of the document: `device/1`.
    pub schema: String,
    /// Short name of the device, different for each device of a scenario.
    pub name: String,
    /// Description of the device.
    #[serde(rename = "about", default, skip_serializing_if = "String::is_empty")]
    pub description: String,
    pub os: Os,
    pub cpu: Cpu,
    pub memory: Memory,
    pub disk: Disk,
    /// GPU of the device, if a run may use a GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<Gpu>,
    /// GPU and NPU of a SoC that compute in place of the CPU, if a run may use them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub soc: Option<Soc>,
    /// Measured links from this device to other devices.
    #[serde(rename = "peers", default, skip_serializing_if = "Vec::is_empty")]
    pub peer_links: Vec<PeerLink>,
}

impl DeviceProfile {
    /// Returns s_disk of the latency model (prima.cpp paper, appendix A.3): the sequential rate on Linux and Android,
    /// the random rate on macOS, but in both cases at most the limit of the disk.
    pub fn disk_read_rate(&self) -> BytesPerSecond {
        let rate = match self.os {
            Os::Linux | Os::Windows | Os::Android => self.disk.sequential_bandwidth.value,
            Os::Macos => self.disk.random_bandwidth.as_ref().unwrap_or(&self.disk.sequential_bandwidth).value,
        };
        self.disk.within_limit(rate)
    }

    /// Returns whether the GPU reads its weights from the mapped file, as with Metal, so that evicted pages are read
    /// from disk again. Other GPUs have copies of the weights in their own memory.
    pub fn gpu_maps_weights(&self) -> bool {
        let unified = self.gpu.as_ref().is_some_and(|gpu| gpu.unified_memory);
        unified && self.memory.page_cache == PageCachePolicy::MacosMetal
    }

    fn sizes(&self) -> impl Iterator<Item = (&'static str, Bytes)> {
        let (memory, gpu) = (&self.memory, self.gpu.as_ref());
        let sizes = [
            ("memory.total", Some(&memory.total_memory)),
            ("memory.available", Some(&memory.available_memory)),
            ("cpu.compute_buffer", Some(&self.cpu.compute_buffer)),
            ("memory.can_swap", memory.can_swap.as_ref()),
            ("memory.swap_available", memory.swap_available.as_ref()),
            ("disk.read_ahead", self.disk.read_ahead_window.as_ref()),
            ("gpu.memory_available", gpu.map(|gpu| &gpu.memory_available)),
            ("gpu.compute_buffer", gpu.map(|gpu| &gpu.compute_buffer)),
        ];
        sizes.into_iter().filter_map(|(key, size)| Some((key, size?.value)))
    }

    fn rates(&self) -> Vec<(String, f64)> {
        let (cpu, disk, gpu) = (&self.cpu, &self.disk, self.gpu.as_ref());
        let rate = |rate: &Sourced<BytesPerSecond>| rate.value.0;
        let single = [
            ("cpu.read_bandwidth", Some(rate(&cpu.read_bandwidth))),
            ("cpu.kv_copy.bandwidth", Some(rate(&cpu.kv_copy.bandwidth))),
            ("disk.sequential", Some(rate(&disk.sequential_bandwidth))),
            ("disk.fault", disk.fault_bandwidth.as_ref().map(rate)),
            ("disk.random", disk.random_bandwidth.as_ref().map(rate)),
            ("disk.populate", disk.populate_bandwidth.as_ref().map(rate)),
            ("disk.turnover", disk.page_cache_throughput.as_ref().map(rate)),
            ("disk.limit", disk.bandwidth_limit.as_ref().map(rate)),
            ("cpu.activation_bandwidth", cpu.activation_bandwidth.as_ref().map(rate)),
            ("cpu.attention", cpu.attention_rate.as_ref().map(|rate| rate.value.0)),
            ("gpu.read_bandwidth", gpu.map(|gpu| rate(&gpu.read_bandwidth))),
            ("gpu.kv_copy.bandwidth", gpu.map(|gpu| rate(&gpu.kv_copy.bandwidth))),
            ("gpu.upload.bandwidth", gpu.map(|gpu| rate(&gpu.upload.bandwidth))),
            ("gpu.download.bandwidth", gpu.map(|gpu| rate(&gpu.download.bandwidth))),
        ];
        let tables = [
            ("cpu.matvec", Some(&cpu.matvec)),
            ("cpu.matvec_streamed", Some(&cpu.matvec_streamed)),
            ("cpu.matmul_streamed", Some(&cpu.matmul_streamed)),
            ("cpu.matmul_medium", Some(&cpu.matmul_medium)),
            ("cpu.matmul", Some(&cpu.matmul)),
            ("gpu.matvec", gpu.map(|gpu| &gpu.matvec)),
            ("gpu.matmul", gpu.map(|gpu| &gpu.matmul)),
        ];
        let by_format = tables.into_iter().flat_map(|(key, table)| {
            let rates = table.into_iter().flat_map(FormatMap::iter);
            rates.map(move |(format, rate)| (format!("{key}.{format}"), rate.value.0))
        });
        single.into_iter().filter_map(|(key, rate)| Some((key.to_owned(), rate?))).chain(by_format).collect()
    }
}

impl Disk {
    /// Returns the rate of reading ahead: the rate of populating a mapping or, if unknown, the sequential rate.
    pub fn read_ahead_rate(&self) -> BytesPerSecond {
        self.within_limit(self.populate_bandwidth.as_ref().unwrap_or(&self.sequential_bandwidth).value)
    }

    /// Returns the latency of reading some MiB at a random place.
    pub fn piece_latency(&self) -> Seconds {
        let known = self.piece_latency.as_ref().or(self.latency.as_ref());
        known.map_or(Seconds(0.0), |latency| latency.value)
    }

    /// Returns the read rate of page faults or, if unknown, the sequential rate.
    pub fn fault_read_rate(&self) -> BytesPerSecond {
        self.within_limit(self.fault_bandwidth.as_ref().unwrap_or(&self.sequential_bandwidth).value)
    }

    fn within_limit(&self, rate: BytesPerSecond) -> BytesPerSecond {
        self.bandwidth_limit.as_ref().map_or(rate, |limit| BytesPerSecond(rate.0.min(limit.value.0)))
    }
}

impl Cpu {
    /// Returns the speed of matrix-vector products with weights in a format.
    ///
    /// A format without a measured speed has the speed of the format with the closest number of bits per weight:
    /// decoding is memory-bound, and formats differ less in arithmetic than in size.
    pub fn matvec_rate(&self, format: Format) -> Option<FlopsPerSecond> {
        nearest_format_rate(&self.matvec, format)
    }
}

impl Gpu {
    /// Returns the speed of matrix-vector products with weights in a format, as [`Cpu::matvec_rate`] for the CPU.
    pub fn matvec_rate(&self, format: Format) -> Option<FlopsPerSecond> {
        nearest_format_rate(&self.matvec, format)
    }
}

/// Returns the rate of a format, or of the measured format with the closest number of bits per weight.
pub fn nearest_format_rate(
    rates: &FormatMap<Sourced<FlopsPerSecond>>,
    format: Format,
) -> Option<FlopsPerSecond> {
    let distance = |other: Format| (other.bits_per_weight() - format.bits_per_weight()).abs();
    rates.get(format).map(|rate| rate.value).or_else(|| {
        rates.iter().min_by(|a, b| distance(a.0).total_cmp(&distance(b.0))).map(|(_, rate)| rate.value)
    })
}

impl Document for DeviceProfile {
    const SCHEMA: &'static str = "device/1";

    fn validate(&self) -> Result<(), DocumentError> {
        let name = &self.name;
        let refuse = |key: &str, what: String| {
            Err(DocumentError::invalid_value(key, format!("device `{name}`: {what}")))
        };
        if self.name.is_empty() {
            return refuse("name", "`name` is empty; give the device a name".into());
        }
        if self.cpu.cores == 0 {
            return refuse("cpu.cores", "`cpu.cores` is 0; a device needs at least one core".into());
        }
        if self.cpu.matvec.is_empty() {
            let what = "`cpu.matvec` is empty; add at least the rate for the main weight format of the model";
            return refuse("cpu.matvec", what.into());
        }
        if let Some(what) = self.cpu.quota.as_ref().and_then(Quota::invalid_reason) {
            return refuse("cpu.quota", what);
        }
        for (place, rate) in self.rates() {
            if rate <= 0.0 {
                let what = format!("`{place}` is zero, so a run would never end; measure it again");
                return refuse(&place, what);
            }
        }
        for (place, bytes) in self.sizes() {
            if bytes > MAX_MEMORY_BYTES {
                let what = format!("`{place}` is {bytes}, more than {MAX_MEMORY_BYTES}: check its unit");
                return refuse(place, what);
            }
        }
        if self.memory.available_memory.value > self.memory.total_memory.value {
            let what = "`memory.available` is more than `memory.total`; check both values";
            return refuse("memory.available", what.into());
        }
        let reclaim = self.memory.reclaim_parameters.iter();
        let fractions = reclaim.flat_map(|it| {
            [("compressed", &it.compressed_fraction), ("file_floor", &it.min_file_page_fraction)]
        });
        for (key, fraction) in fractions {
            if fraction.as_ref().is_some_and(|fraction| fraction.value.0 > 1.0) {
                let what = format!("`memory.reclaim.{key}` is more than 100 %; choose from 0 % to 100 %");
                return refuse(&format!("memory.reclaim.{key}"), what);
            }
        }
        if self.soc.is_some() && self.gpu.is_some() {
            let what = "both `gpu` and `soc` are present; write the GPU of a SoC in `soc.gpu` only";
            return refuse("soc", what.into());
        }
        self.soc.as_ref().map_or(Ok(()), |soc| soc.validate(name))
    }
}
