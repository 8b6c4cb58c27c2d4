//! Instances of the layer-to-device assignment (LDA) problem.
//!
//! prima.cpp paper, Definition 1 and Table 6: a model of L layers, a ring of M devices of which the first
//! is the head, and the measured speeds and memory of each. In JSON every field carries the paper's symbol
//! and nothing else is accepted; bytes are integers, everything else is SI. In code the names are words.
//!
//! Not here: what makes an instance meaningful ([`crate::problem::validation`]), what a layer costs
//! ([`crate::latency::coefficients`]), and where the numbers come from (device and model profiles).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::runtime_model::RuntimeModel;

/// A number for each weight format, keyed by the paper's format names (`q4k`, `q6k`, `f16`, ...).
pub type PerFormat = BTreeMap<String, f64>;

/// A layer-to-device assignment problem. Device 0 is the head unless a plan names another.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Instance {
    /// The name in messages.
    pub name: String,
    /// Disks slower than this (bytes per second) may never be read for a token; equal is not slower.
    #[serde(rename = "s_threshold")]
    pub slow_disk_threshold: f64,
    pub model: Model,
    /// In ring order.
    pub devices: Vec<Device>,
    /// `t_comm` by pair: row of the sender, column of the receiver, in the order of the devices; null where there is
    /// no link. The diagonal is ignored. If absent, the sender's `hop` is used for every next device.
    #[serde(rename = "t_comm_between", default, skip_serializing_if = "Option::is_none")]
    pub hops: Option<Vec<Vec<Option<f64>>>>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    pub name: String,
    /// L: decoder layers.
    #[serde(rename = "L")]
    pub model_layers: u32,
    /// e: width of the hidden state. The hop time `t_comm` already contains it.
    #[serde(rename = "e")]
    pub hidden_width: u64,
    /// `h_k`: heads of the key cache.
    #[serde(rename = "h_k")]
    pub key_heads: u64,
    /// `e_k`: width of a key head.
    #[serde(rename = "e_k")]
    pub key_head_width: u64,
    /// `h_v`: heads of the value cache.
    #[serde(rename = "h_v")]
    pub value_heads: u64,
    /// `e_v`: width of a value head.
    #[serde(rename = "e_v")]
    pub value_head_width: u64,
    /// `n_kv`: tokens in the key-value cache.
    #[serde(rename = "n_kv")]
    pub cached_tokens: u64,
    /// V: vocabulary; one token reads `b_i/V` bytes of the input embedding.
    #[serde(rename = "V")]
    pub vocabulary: u64,
    /// b: weight bytes of a layer.
    #[serde(rename = "b")]
    pub layer_weight_bytes: u64,
    /// `b_i`: bytes of the input embedding.
    #[serde(rename = "b_i")]
    pub input_embedding_bytes: u64,
    /// `b_o`: bytes of the output head.
    #[serde(rename = "b_o")]
    pub output_head_bytes: u64,
    /// `f_q`: floating-point operations of a layer for one token, by weight format.
    #[serde(rename = "f_layer")]
    pub layer_flops: PerFormat,
    /// f_{q,out}: floating-point operations of the output head for one token, by weight format.
    #[serde(rename = "f_out")]
    pub output_flops: PerFormat,
    /// Weight bytes of each layer, for exact memory accounting where they differ; empty if each has b.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layer_bytes: Vec<u64>,
}

/// The operating system, which determines how memory is reclaimed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OperatingSystem {
    /// Linux: reclaims what exceeds memory; the GPU share leaves RAM.
    Linux,
    /// macOS: as Linux without Metal; with Metal everything is reclaimed at once.
    Macos,
    /// Android: as Linux, with elastic swap.
    Android,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Gpu {
    /// No GPU: every layer runs on the CPU.
    None,
    /// A GPU with memory of its own, as through CUDA.
    Cuda,
    /// A GPU sharing memory with the CPU, through Metal.
    Metal,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Device {
    pub name: String,
    pub os: OperatingSystem,
    pub gpu: Gpu,
    /// s_{cpu,q}: CPU speed by weight format, FLOP/s.
    #[serde(rename = "s_cpu")]
    pub cpu_speed: PerFormat,
    /// s_{gpu,q}: GPU speed by weight format, FLOP/s; empty without a GPU.
    #[serde(rename = "s_gpu")]
    pub gpu_speed: PerFormat,
    /// `T_cpu`: bytes per second from RAM to the CPU.
    #[serde(rename = "T_cpu")]
    pub cpu_memory_rate: f64,
    /// `T_gpu`: bytes per second from GPU memory to the GPU; 0 without a GPU.
    #[serde(rename = "T_gpu")]
    pub gpu_memory_rate: f64,
    /// `t_kv_cpu`: seconds to write one layer's new keys and values on the CPU.
    #[serde(rename = "t_kv_cpu")]
    pub cpu_cache_write: f64,
    /// `t_kv_gpu`: the same on the GPU.
    #[serde(rename = "t_kv_gpu")]
    pub gpu_cache_write: f64,
    /// `t_ram_vram`: seconds to copy the hidden state to the GPU.
    #[serde(rename = "t_ram_vram")]
    pub to_gpu: f64,
    /// `t_vram_ram`: seconds to copy it back.
    #[serde(rename = "t_vram_ram")]
    pub from_gpu: f64,
    /// Whether CPU and GPU share memory, so that these two copies cost nothing.
    #[serde(rename = "uma")]
    pub unified_memory: bool,
    /// `t_comm`: seconds to hand the hidden state to the next device, where the instance has no hops by pair.
    #[serde(rename = "t_comm")]
    pub hop: f64,
    /// `s_disk`: bytes per second read from disk, in this system's own access pattern.
    #[serde(rename = "s_disk")]
    pub disk_read: f64,
    /// `d_avail`: bytes of RAM available.
    #[serde(rename = "d_avail")]
    pub ram_available: u64,
    /// `d_metal`: bytes of Metal's recommended working set.
    #[serde(rename = "d_metal")]
    pub metal_available: u64,
    /// `d_cuda`: bytes of GPU memory available.
    #[serde(rename = "d_cuda")]
    pub cuda_available: u64,
    /// Bytes the system could swap out (Android).
    #[serde(rename = "d_can_swap")]
    pub can_swap: u64,
    /// Bytes of swap available (Android).
    #[serde(rename = "d_swap_avail")]
    pub swap_available: u64,
    /// `c_cpu`: bytes of compute buffers in RAM.
    #[serde(rename = "c_cpu")]
    pub cpu_buffer_bytes: u64,
    /// `c_gpu`: bytes of compute buffers in GPU memory.
    #[serde(rename = "c_gpu")]
    pub gpu_buffer_bytes: u64,
    /// Device properties that the paper's symbols do not cover.
    #[serde(default, alias = "practice")]
    pub runtime: RuntimeModel,
}

impl Model {
    /// kv = 2 (`h_k` `e_k` + `h_v` `e_v`) `n_kv`: bytes of a layer's key-value cache in f16, `None` past 2^64.
    pub fn layer_cache_bytes(&self) -> Option<u64> {
        let keys = self.key_heads.checked_mul(self.key_head_width)?;
        let values = self.value_heads.checked_mul(self.value_head_width)?;
        keys.checked_add(values)?.checked_mul(2)?.checked_mul(self.cached_tokens)
    }

    /// b' = b + kv: bytes that a layer keeps resident, `None` past 2^64.
    pub fn layer_resident_bytes(&self) -> Option<u64> {
        self.layer_weight_bytes.checked_add(self.layer_cache_bytes()?)
    }
}
