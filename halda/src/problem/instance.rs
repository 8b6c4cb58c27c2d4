//! Instances of the layer-to-device assignment (LDA) problem.
//!
//! prima.cpp paper, Definition 1 and Table 6: a model of L layers, and a ring of M devices. In JSON the keys are the
//! paper's symbols. Memory sizes are integers in bytes; all other quantities are in SI units.

use std::collections::BTreeMap;

use hearth_profiles::device::Os;
use serde::{Deserialize, Serialize};

use crate::runtime_model::RuntimeModel;

/// A value for each weight format. The keys are names of formats, such as `q4k`, `q6k` or `f16`.
pub type ValuesByFormat = BTreeMap<String, f64>;

/// A layer-to-device assignment problem. Device 0 is the head unless a plan names a different one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Instance {
    pub name: String,
    /// The read rate in bytes per second below which a disk must not be read for every token.
    #[serde(rename = "s_threshold")]
    pub slow_disk_threshold: f64,
    pub model: Model,
    /// The devices in ring order.
    pub devices: Vec<Device>,
    /// `t_comm`: the seconds to send the hidden state, by sender (row) and receiver (column); null without a link.
    /// The diagonal is ignored. If absent, [`Device::hop_seconds`] of the sender is used for all receivers.
    #[serde(rename = "t_comm_between", default, skip_serializing_if = "Option::is_none")]
    pub pair_hop_seconds: Option<Vec<Vec<Option<f64>>>>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    pub name: String,
    /// L: the number of decoder layers.
    #[serde(rename = "L")]
    pub model_layers: u32,
    /// e: the width of the hidden state in elements. The hop times (`t_comm`) already depend on it.
    #[serde(rename = "e")]
    pub hidden_size: u64,
    /// `h_k`: the number of heads in the key cache.
    #[serde(rename = "h_k")]
    pub key_heads: u64,
    /// `e_k`: the width of a key head in elements.
    #[serde(rename = "e_k")]
    pub key_head_dim: u64,
    /// `h_v`: the number of heads in the value cache.
    #[serde(rename = "h_v")]
    pub value_heads: u64,
    /// `e_v`: the width of a value head in elements.
    #[serde(rename = "e_v")]
    pub value_head_dim: u64,
    /// `n_kv`: the number of tokens in the KV cache.
    #[serde(rename = "n_kv")]
    pub cached_tokens: u64,
    /// V: the number of tokens in the vocabulary. Each token reads one of the V rows of the input embedding.
    #[serde(rename = "V")]
    pub vocab_size: u64,
    /// b: the weight bytes of a layer.
    #[serde(rename = "b")]
    pub layer_weight_bytes: u64,
    /// `b_i`: the bytes of the input embedding.
    #[serde(rename = "b_i")]
    pub input_embedding_bytes: u64,
    /// `b_o`: the bytes of the output norm and the output head.
    #[serde(rename = "b_o")]
    pub output_head_bytes: u64,
    /// `f_q`: the floating-point operations of a layer for one token, by weight format.
    #[serde(rename = "f_layer")]
    pub layer_flops: ValuesByFormat,
    /// f_{q,out}: the floating-point operations of the output head for one token, by weight format.
    #[serde(rename = "f_out")]
    pub output_flops: ValuesByFormat,
    /// The weight bytes of each layer, for exact memory accounting if layers differ; empty if all layers are equal.
    #[serde(rename = "layer_bytes", default, skip_serializing_if = "Vec::is_empty")]
    pub weight_bytes_by_layer: Vec<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GpuApi {
    /// No GPU: all layers run on the CPU.
    None,
    /// A GPU with its own memory budget, such as a CUDA device.
    Cuda,
    /// A GPU that shares memory with the CPU and is used through Metal.
    Metal,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Device {
    pub name: String,
    /// The operating system. If weights exceed memory, Linux and Android reclaim the excess, as does macOS without
    /// Metal; macOS with Metal reclaims all weights. Android can also swap out other programs.
    pub os: Os,
    pub gpu: GpuApi,
    /// s_{cpu,q}: the speed of the CPU in FLOP/s, by weight format.
    #[serde(rename = "s_cpu")]
    pub cpu_speed: ValuesByFormat,
    /// s_{gpu,q}: the speed of the GPU in FLOP/s, by weight format; empty without a GPU.
    #[serde(rename = "s_gpu")]
    pub gpu_speed: ValuesByFormat,
    /// `T_cpu`: the bandwidth from RAM to the CPU in bytes per second.
    #[serde(rename = "T_cpu")]
    pub cpu_memory_rate: f64,
    /// `T_gpu`: the bandwidth from GPU memory to the GPU in bytes per second; 0 without a GPU.
    #[serde(rename = "T_gpu")]
    pub gpu_memory_rate: f64,
    /// `t_kv_cpu`: the seconds to write the keys and values of one token and layer on the CPU.
    #[serde(rename = "t_kv_cpu")]
    pub cpu_cache_write_seconds: f64,
    /// `t_kv_gpu`: the seconds to write the keys and values of one token and layer on the GPU.
    #[serde(rename = "t_kv_gpu")]
    pub gpu_cache_write_seconds: f64,
    /// `t_ram_vram`: the seconds to copy the hidden state to the GPU.
    #[serde(rename = "t_ram_vram")]
    pub gpu_upload_seconds: f64,
    /// `t_vram_ram`: the seconds to copy the hidden state back from the GPU.
    #[serde(rename = "t_vram_ram")]
    pub gpu_download_seconds: f64,
    /// UMA: whether CPU and GPU share memory, so copying the hidden state takes no time.
    #[serde(rename = "uma")]
    pub unified_memory: bool,
    /// `t_comm`: the seconds to send the hidden state to the next device; an estimate if hops depend on the receiver.
    #[serde(rename = "t_comm")]
    pub hop_seconds: f64,
    /// `s_disk`: the disk throughput in bytes per second, for the access pattern of the operating system.
    #[serde(rename = "s_disk")]
    pub disk_read_rate: f64,
    /// `d_avail`: the available RAM in bytes.
    #[serde(rename = "d_avail")]
    pub ram_available: u64,
    /// `d_metal`: Metal's recommended working set in bytes.
    #[serde(rename = "d_metal")]
    pub metal_available: u64,
    /// `d_cuda`: the available GPU memory in bytes.
    #[serde(rename = "d_cuda")]
    pub cuda_available: u64,
    /// `bytes_can_swap`: the bytes of other programs that can be swapped out (Android).
    #[serde(rename = "d_can_swap")]
    pub swappable_bytes: u64,
    /// `d_swap_avail`: the free swap space in bytes (Android).
    #[serde(rename = "d_swap_avail")]
    pub swap_available: u64,
    /// `c_cpu`: the compute buffers in RAM, in bytes.
    #[serde(rename = "c_cpu")]
    pub cpu_buffer_bytes: u64,
    /// `c_gpu`: the compute buffers in GPU memory, in bytes.
    #[serde(rename = "c_gpu")]
    pub gpu_buffer_bytes: u64,
    /// The residency policies, page cache, disk rates and overheads, which the prima.cpp paper's model leaves out.
    #[serde(default, alias = "practice")]
    pub runtime: RuntimeModel,
}

impl Model {
    /// Returns 2 (`h_k` `e_k` + `h_v` `e_v`) `n_kv`, the bytes of a layer's f16 KV cache; `None` on overflow.
    pub fn layer_cache_bytes(&self) -> Option<u64> {
        let keys = self.key_heads.checked_mul(self.key_head_dim)?;
        let values = self.value_heads.checked_mul(self.value_head_dim)?;
        keys.checked_add(values)?.checked_mul(2)?.checked_mul(self.cached_tokens)
    }

    /// Returns b', the bytes of the weights and the KV cache of a layer; `None` on overflow.
    pub fn layer_resident_bytes(&self) -> Option<u64> {
        self.layer_weight_bytes.checked_add(self.layer_cache_bytes()?)
    }
}
