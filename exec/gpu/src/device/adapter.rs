//! The GPU adapters of this machine and their capabilities.
//!
//! ML Drift paper, section 3.4: the capabilities of a device select the variant of a kernel. This module queries the
//! capabilities. A [`CapabilityMask`] disables some capabilities, so that every variant can be tested on one machine.

use super::memory::BUDGET_PERCENT;

/// The capabilities of a device that kernels use. The default is a device without capabilities.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Capabilities {
    /// Whether WGSL has the dot product of four packed bytes, even if the hardware has no single instruction for it.
    pub packed_dot: bool,
    /// The minimum and maximum subgroup size, if the device supports subgroup operations.
    pub subgroup_size_range: Option<(u32, u32)>,
    pub shader_f16: bool,
    /// Whether the device supports timestamp queries. Only `hearth gpu` shows this value: measurements time whole
    /// submissions on the CPU, because a run also waits for whole submissions.
    pub timestamp_queries: bool,
    pub max_binding_bytes: u64,
    pub max_buffer_bytes: u64,
    /// Maximum size in bytes of the memory that the threads of a workgroup share.
    pub workgroup_memory_bytes: u32,
    pub max_workgroup_threads: u32,
}

/// The capabilities and limits of a device that are disabled or lowered, for tests and comparisons.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CapabilityMask {
    pub no_packed_dot: bool,
    pub no_subgroups: bool,
    pub no_shader_f16: bool,
    /// Maximum size of a buffer binding in bytes; larger matrices are split.
    pub max_binding_bytes: Option<u64>,
    /// Maximum amount of GPU memory that may be allocated, in bytes.
    pub max_memory_bytes: Option<u64>,
}

/// The description of a GPU adapter, as the driver reports it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdapterInfo {
    pub name: String,
    /// The kind of the device: `discrete`, `integrated`, `virtual`, `software` or `other`.
    pub kind: &'static str,
    /// The graphics API: Vulkan, Metal or DX12.
    pub api: String,
    pub driver: String,
    pub capabilities: Capabilities,
}

impl Capabilities {
    /// Returns these capabilities without those that the mask disables.
    #[must_use]
    pub fn with_mask(self, mask: CapabilityMask) -> Capabilities {
        let max = mask.max_binding_bytes.unwrap_or(u64::MAX);
        Capabilities {
            packed_dot: self.packed_dot && !mask.no_packed_dot,
            subgroup_size_range: self.subgroup_size_range.filter(|_| !mask.no_subgroups),
            shader_f16: self.shader_f16 && !mask.no_shader_f16,
            max_binding_bytes: self.max_binding_bytes.min(max),
            max_buffer_bytes: self.max_buffer_bytes.min(max),
            ..self
        }
    }

    /// Returns the wgpu features that a device with these capabilities must be opened with.
    pub(super) fn required_features(self) -> wgpu::Features {
        let mut features = wgpu::Features::empty();
        features.set(wgpu::Features::SUBGROUP, self.subgroup_size_range.is_some());
        features.set(wgpu::Features::SHADER_F16, self.shader_f16);
        features
    }
}

impl AdapterInfo {
    /// Returns the key under which the file of tuned tilings stores the tiling of this adapter and its driver.
    pub fn tuning_key(&self) -> String {
        format!("{} | {} | {}", self.name, self.api, self.driver)
    }

    pub fn is_software(&self) -> bool {
        self.kind == "software"
    }

    fn of(adapter: &wgpu::Adapter, packed_dot: bool) -> AdapterInfo {
        let (info, features, limits) = (adapter.get_info(), adapter.features(), adapter.limits());
        let lanes = (info.subgroup_min_size, info.subgroup_max_size);
        let kind = match info.device_type {
            wgpu::DeviceType::DiscreteGpu => "discrete",
            wgpu::DeviceType::IntegratedGpu => "integrated",
            wgpu::DeviceType::VirtualGpu => "virtual",
            wgpu::DeviceType::Cpu => "software",
            wgpu::DeviceType::Other => "other",
        };
        AdapterInfo {
            name: info.name,
            kind,
            api: info.backend.to_string(),
            driver: [info.driver, info.driver_info].join(" ").trim().to_owned(),
            capabilities: Capabilities {
                packed_dot,
                subgroup_size_range: features.contains(wgpu::Features::SUBGROUP).then_some(lanes),
                shader_f16: features.contains(wgpu::Features::SHADER_F16),
                timestamp_queries: features.contains(wgpu::Features::TIMESTAMP_QUERY),
                max_binding_bytes: limits.max_storage_buffer_binding_size,
                max_buffer_bytes: limits.max_buffer_size,
                workgroup_memory_bytes: limits.max_compute_workgroup_storage_size,
                max_workgroup_threads: limits.max_compute_invocations_per_workgroup,
            },
        }
    }
}

/// Returns the descriptions of all GPU adapters of this machine, starting with the preferred adapter.
pub fn enumerate_adapters() -> Vec<AdapterInfo> {
    find_adapters().into_iter().map(|(_, info)| info).collect()
}

/// Returns all GPU adapters of this machine and their descriptions, starting with the preferred adapter.
pub(super) fn find_adapters() -> Vec<(wgpu::Adapter, AdapterInfo)> {
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor {
        memory_budget_thresholds: wgpu::MemoryBudgetThresholds {
            for_resource_creation: Some(BUDGET_PERCENT),
            ..wgpu::MemoryBudgetThresholds::default()
        },
        ..wgpu::InstanceDescriptor::new_without_display_handle()
    });
    let packed = wgpu::WgslLanguageFeatures::Packed4x8IntegerDotProduct;
    let packed = instance.wgsl_language_features().contains(packed);
    let adapters = pollster::block_on(instance.enumerate_adapters(wgpu::Backends::PRIMARY));
    let infos: Vec<AdapterInfo> = adapters.iter().map(|adapter| AdapterInfo::of(adapter, packed)).collect();
    let mut found: Vec<(wgpu::Adapter, AdapterInfo)> = adapters.into_iter().zip(infos).collect();
    let rank = |info: &AdapterInfo| {
        ["discrete", "integrated", "virtual", "other", "software"].iter().position(|kind| *kind == info.kind)
    };
    found.sort_by(|(_, one), (_, other)| (rank(one), &one.name).cmp(&(rank(other), &other.name)));
    found
}
