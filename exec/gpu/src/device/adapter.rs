//! The capabilities of an adapter that kernels use.
//!
//! ML Drift paper, section 3.4: the capabilities of a device select the variant of a kernel. This module queries them;
//! a
//! [`CapabilityMask`] removes some, so that every variant can be tested on one machine.

use super::memory::BUDGET_PERCENT;

/// The capabilities of a device that kernels use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    /// Whether one instruction (at least of the shading language) multiplies four bytes by four bytes and adds up.
    pub packed_dot: bool,
    /// Lanes of the smallest and the largest subgroup, if lanes can exchange values.
    pub subgroups: Option<(u32, u32)>,
    /// Whether it has arithmetic in half precision.
    pub half: bool,
    /// Whether the device supports timestamp queries. They are reported but not used: what is timed here is whole
    /// submissions, as a run waits for them.
    pub timestamps: bool,
    /// The largest binding of a buffer.
    pub binding_bytes: u64,
    pub buffer_bytes: u64,
    /// Bytes that threads of a group share.
    pub shared_bytes: u32,
    pub group_threads: u32,
}

/// Device capabilities to ignore, for tests and comparisons.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CapabilityMask {
    /// Whether packed dot products are ignored.
    pub packed_dot: bool,
    /// Whether subgroup operations are ignored.
    pub subgroups: bool,
    /// Whether half precision is ignored.
    pub half: bool,
    /// Largest size of a buffer in bytes; larger weights are split.
    pub binding_bytes: Option<u64>,
    pub memory_bytes: Option<u64>,
}

/// A description of an adapter, from its driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdapterFacts {
    pub name: String,
    /// Discrete, integrated, virtual, or the processor itself.
    pub kind: &'static str,
    /// Vulkan, Metal or DX12.
    pub interface: String,
    pub driver: String,
    pub capabilities: Capabilities,
}

impl Capabilities {
    /// Returns the capabilities that the mask leaves.
    #[must_use]
    pub fn without(self, mask: CapabilityMask) -> Capabilities {
        let max = mask.binding_bytes.unwrap_or(u64::MAX);
        Capabilities {
            packed_dot: self.packed_dot && !mask.packed_dot,
            subgroups: self.subgroups.filter(|_| !mask.subgroups),
            half: self.half && !mask.half,
            binding_bytes: self.binding_bytes.min(max),
            buffer_bytes: self.buffer_bytes.min(max),
            ..self
        }
    }

    /// Returns the features to open the device with.
    pub(super) fn features(self) -> wgpu::Features {
        let mut features = wgpu::Features::empty();
        features.set(wgpu::Features::SUBGROUP, self.subgroups.is_some());
        features.set(wgpu::Features::SHADER_F16, self.half);
        features
    }
}

impl AdapterFacts {
    /// Returns the key under which tuning choices for this adapter are stored.
    pub fn key(&self) -> String {
        format!("{} | {} | {}", self.name, self.interface, self.driver)
    }

    /// Whether the adapter is a software driver.
    pub fn is_software(&self) -> bool {
        self.kind == "software"
    }

    fn of(adapter: &wgpu::Adapter, packed_dot: bool) -> AdapterFacts {
        let (info, features, limits) = (adapter.get_info(), adapter.features(), adapter.limits());
        let lanes = (info.subgroup_min_size, info.subgroup_max_size);
        let kind = match info.device_type {
            wgpu::DeviceType::DiscreteGpu => "discrete",
            wgpu::DeviceType::IntegratedGpu => "integrated",
            wgpu::DeviceType::VirtualGpu => "virtual",
            wgpu::DeviceType::Cpu => "software",
            wgpu::DeviceType::Other => "other",
        };
        AdapterFacts {
            name: info.name,
            kind,
            interface: info.backend.to_string(),
            driver: [info.driver, info.driver_info].join(" ").trim().to_owned(),
            capabilities: Capabilities {
                packed_dot,
                subgroups: features.contains(wgpu::Features::SUBGROUP).then_some(lanes),
                half: features.contains(wgpu::Features::SHADER_F16),
                timestamps: features.contains(wgpu::Features::TIMESTAMP_QUERY),
                binding_bytes: limits.max_storage_buffer_binding_size,
                buffer_bytes: limits.max_buffer_size,
                shared_bytes: limits.max_compute_workgroup_storage_size,
                group_threads: limits.max_compute_invocations_per_workgroup,
            },
        }
    }
}

/// Returns all adapters, the preferred one first.
pub fn adapters() -> Vec<AdapterFacts> {
    found().into_iter().map(|(_, facts)| facts).collect()
}

pub(super) fn best() -> Option<(wgpu::Adapter, AdapterFacts)> {
    found().into_iter().next()
}

fn found() -> Vec<(wgpu::Adapter, AdapterFacts)> {
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
    let mut found: Vec<(wgpu::Adapter, AdapterFacts)> = adapters
        .into_iter()
        .map(|adapter| {
            let facts = AdapterFacts::of(&adapter, packed);
            (adapter, facts)
        })
        .collect();
    let rank = |facts: &AdapterFacts| {
        ["discrete", "integrated", "virtual", "other", "software"].iter().position(|kind| *kind == facts.kind)
    };
    found.sort_by(|(_, one), (_, other)| (rank(one), &one.name).cmp(&(rank(other), &other.name)));
    found
}
