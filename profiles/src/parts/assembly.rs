//! The profile of a device that consists of parts of the catalogue.

use super::{
    Catalogue, CpuEfficiency, CpuPart, DeviceParts, DiskPart, GpuEfficiency, PartsError, SystemPart,
    UnknownPart,
};
use crate::device::{Cpu, DeviceProfile, Disk, Gpu, GpuKind, Memory, Os, PageCachePolicy, TransferCost};
use crate::document::Document;
use crate::uncertainty::spread_of_uncertainty;
use crate::{Bytes, BytesPerSecond, FlopsPerSecond, Format, FormatMap, Fraction, Seconds, Sourced};

/// Share of the installed memory that is available at least. source: assumed
const MIN_AVAILABLE: f64 = 0.25;
/// Share of the installed memory that Metal recommends as the working set, up to a size and above it. source: measured
/// by users: `recommendedMaxWorkingSetSize` that llama.cpp prints
const METAL_WORKING_SET: [f64; 2] = [0.667, 0.75];
const LARGE_MAC: Bytes = Bytes::from_mib(36 << 10);
/// The largest uncertainty of the available memory: that of an assumed value.
const MAX_MEMORY_UNCERTAINTY: f64 = 0.25;
/// Compute buffers in memory, and in the memory of a graphics card. source: the shipped devices d2 and d3
const CPU_BUFFER: Bytes = Bytes::from_mib(256);
const GPU_BUFFER: Bytes = Bytes(650_000_000);
/// Latency and bandwidth of copies over PCI Express. source: the shipped devices d2 and d3
const COPY: (Seconds, BytesPerSecond) = (Seconds(10e-6), BytesPerSecond(12e9));
/// Arithmetic that is so fast that reading bounds decoding: the bandwidths below are those of whole products.
/// source: assumed, as in the shipped devices
const ARITHMETIC_ABOVE_READING: f64 = 100.0;
/// The weight formats with rates; other formats get the rate of the nearest one.
const FORMATS: [Format; 5] = [Format::Q4K, Format::Q6K, Format::Q8_0, Format::F16, Format::F32];

const AS_SHIPPED: &str = "assumed: as in the shipped devices d2 and d3";
/// The source of buffer sizes, which hearth chooses and therefore knows.
const KNOWN_BUFFER: &str = "derived: as in the shipped devices d2 and d3";

impl DeviceParts {
    /// Returns the profile of a device with these parts. Fails if the catalogue does not have a part, if the parts do
    /// not exist together, or if the size of the memory is not plausible.
    pub fn to_profile(&self, name: &str) -> Result<DeviceProfile, PartsError> {
        let catalogue = Catalogue::shipped();
        let system = catalogue.system(&self.os)?;
        let (family, chip) = catalogue.cpu_in_family(&self.cpu)?;
        let (disk_family, disk_part) = catalogue.disk_in_family(&self.disk)?;
        self.check_combination(system.os, &family.class)?;
        if self.memory == Bytes::ZERO {
            return Err(PartsError::Invalid { reason: "a device needs some memory, but it has 0 B".into() });
        }
        let gpu = match (&self.gpu, chip.gpu_fp32) {
            (Some(card), _) => Some(graphics_card(catalogue, card, system)?),
            (None, Some(fp32)) if system.os == Os::Macos => Some(self.metal(catalogue, chip, fp32)),
            (None, _) => None,
        };
        let profile = DeviceProfile {
            schema: DeviceProfile::SCHEMA.into(),
            name: name.to_owned(),
            description: format!(
                "{}, {}{}, {}, {}; from the catalogue of parts.",
                chip.name,
                self.memory,
                gpu.as_ref()
                    .filter(|_| self.gpu.is_some())
                    .map_or_else(String::new, |gpu| format!(", {}", gpu.name)),
                disk_part.name,
                system.name
            ),
            os: system.os,
            cpu: cpu(catalogue.cpu_efficiency(&family.class), &family.source, chip),
            memory: self.memory(system),
            disk: disk(disk_part, &disk_family.source, system.os),
            gpu,
            soc: None,
            peer_links: Vec::new(),
        };
        profile.validate().map_err(|error| PartsError::Invalid { reason: error.to_string() })?;
        Ok(profile)
    }

    /// Refuses parts that do not exist together.
    fn check_combination(&self, os: Os, class: &str) -> Result<(), PartsError> {
        let refuse = |reason: &'static str| Err(PartsError::Incompatible { reason });
        let is_apple = class == "apple";
        match os {
            Os::Macos if !is_apple => refuse("macOS needs an Apple chip, such as `apple-m1`"),
            Os::Macos if self.gpu.is_some() => {
                refuse("macOS uses the GPU of the chip; leave the graphics card out")
            }
            Os::Windows | Os::Android if is_apple => refuse("an Apple chip needs `macos` or `linux`"),
            Os::Android if self.gpu.is_some() => refuse("Android has no graphics card; leave it out"),
            Os::Android if class != "phone" => {
                refuse("Android needs the chip of a phone, such as `snapdragon-8-gen-2`")
            }
            _ => Ok(()),
        }
    }

    fn memory(&self, system: &SystemPart) -> Memory {
        let used = &system.used_memory;
        let least = Bytes((self.memory.as_f64() * MIN_AVAILABLE) as u64);
        let available = self.memory.saturating_sub(used.value).max(least);
        let what =
            format!("{} less what other programs hold ({}), at least a quarter", used.value, used.source);
        // The uncertainty is that of the other programs, whatever remains.
        let lost = used.value.as_f64() * used.relative_uncertainty() / available.as_f64().max(1.0);
        let spread = Some(spread_of_uncertainty(lost.min(MAX_MEMORY_UNCERTAINTY)));
        // No more can be swapped out than others hold.
        let held = self.memory.saturating_sub(available);
        let can_swap = system.swap.clone().map(|swap| Sourced { value: swap.value.min(held), ..swap });
        Memory {
            total_memory: Sourced::new(self.memory, "set: installed memory"),
            available_memory: Sourced { value: available, source: format!("derived: {what}"), spread },
            can_swap,
            swap_available: None,
            page_cache: PageCachePolicy::TwoList,
            reclaim_parameters: None,
        }
    }

    /// Returns the GPU of an Apple chip, which shares the memory.
    fn metal(&self, catalogue: &Catalogue, chip: &CpuPart, fp32: FlopsPerSecond) -> Gpu {
        let share = METAL_WORKING_SET[usize::from(self.memory > LARGE_MAC)];
        let working_set = Bytes((self.memory.as_f64() * share) as u64);
        let what = format!("{:.0} % of the memory, the working set that Metal recommends", share * 100.0);
        let class = catalogue.gpu_efficiency("apple");
        // The GPUs compute 8-bit integers as fast as 32-bit numbers.
        let peaks = (chip.bandwidth, fp32, "Apple, technical specifications");
        let available = Sourced::new(working_set, format!("derived: {what}"));
        gpu(GpuKind::Metal, &chip.name, peaks, class, available)
    }
}

fn cpu(class: &CpuEfficiency, source: &str, part: &CpuPart) -> Cpu {
    let by_memory = part.bandwidth.0 * class.bandwidth_share.value.0;
    let by_cores = class.core_rate.value.0 * f64::from(part.cores);
    let read_bandwidth = if by_memory <= by_cores {
        let share = &class.bandwidth_share;
        let what =
            format!("{} of the peak of {} ({}); {}", percent(share), part.bandwidth, source, share.source);
        derived(BytesPerSecond(by_memory), &what, share)
    } else {
        let rate = &class.core_rate;
        let what = format!("{} cores at {} of weights; {}", part.cores, rate.value, rate.source);
        derived(BytesPerSecond(by_cores), &what, rate)
    };
    let matmul = class.core_matmul.value.0 * f64::from(part.cores);
    let what = format!("{} cores at {}; {}", part.cores, class.core_matmul.value, class.core_matmul.source);
    let matmul = derived(FlopsPerSecond(matmul), &what, &class.core_matmul);
    Cpu {
        name: part.name.clone(),
        cores: part.cores,
        matvec: reading_bound_rates(read_bandwidth.value),
        matvec_streamed: FormatMap::default(),
        matmul_streamed: FormatMap::default(),
        matmul_medium: FormatMap::default(),
        matmul: same_rates(&matmul),
        kv_copy: copy_at(&read_bandwidth),
        read_bandwidth,
        attention_rate: None,
        activation_bandwidth: None,
        layer_overhead: None,
        window_overhead: None,
        token_overhead: None,
        compute_buffer: Sourced::new(CPU_BUFFER, KNOWN_BUFFER),
        quota: None,
    }
}

fn disk(part: &DiskPart, source: &str, os: Os) -> Disk {
    Disk {
        sequential_bandwidth: Sourced::new(part.sequential, source),
        fault_bandwidth: None,
        random_bandwidth: Some(Sourced::new(part.random, "assumed: one request at a time")),
        populate_bandwidth: None,
        page_cache_throughput: None,
        latency: Some(Sourced::new(part.latency, "assumed: usual of such disks")),
        piece_latency: None,
        bandwidth_limit: None,
        read_ahead_window: matches!(os, Os::Linux | Os::Android)
            .then(|| Sourced::new(Bytes(128 << 10), "assumed: the default of Linux block devices")),
    }
}

fn graphics_card(catalogue: &Catalogue, id: &str, system: &SystemPart) -> Result<Gpu, UnknownPart> {
    let (family, part) = catalogue.gpu_in_family(id)?;
    let class = catalogue.gpu_efficiency(&family.class);
    let reserved = &system.gpu_reserved;
    let available = part.memory.saturating_sub(reserved.value);
    let what =
        format!("derived: {} less {} for the desktop; {}", part.memory, reserved.value, reserved.source);
    let int8 = FlopsPerSecond(part.fp32.0 * family.int8);
    let peaks = (part.bandwidth, int8, family.source.as_str());
    Ok(gpu(family.kind, &part.name, peaks, class, Sourced::new(available, what)))
}

fn gpu(
    kind: GpuKind,
    name: &str,
    (bandwidth, int8, source): (BytesPerSecond, FlopsPerSecond, &str),
    class: &GpuEfficiency,
    memory_available: Sourced<Bytes>,
) -> Gpu {
    let share = &class.bandwidth_share;
    let what = format!("{} of the peak of {bandwidth} ({source}); {}", percent(share), share.source);
    let read_bandwidth = derived(BytesPerSecond(bandwidth.0 * share.value.0), &what, share);
    let share = &class.matmul_share;
    let what = format!(
        "{} of the peak of {int8} in products of 8-bit integers ({source}); {}",
        percent(share),
        share.source
    );
    let matmul = derived(FlopsPerSecond(int8.0 * share.value.0), &what, share);
    let unified = kind == GpuKind::Metal;
    let copy = || TransferCost {
        latency: Sourced::new(COPY.0, AS_SHIPPED),
        bandwidth: Sourced::new(COPY.1, AS_SHIPPED),
    };
    Gpu {
        kind,
        name: name.to_owned(),
        unified_memory: unified,
        matvec: reading_bound_rates(read_bandwidth.value),
        matmul: same_rates(&matmul),
        kv_copy: copy_at(&read_bandwidth),
        read_bandwidth,
        memory_available,
        upload: copy(),
        download: copy(),
        compute_buffer: Sourced::new(if unified { CPU_BUFFER } else { GPU_BUFFER }, KNOWN_BUFFER),
        window_overhead: None,
        layer_overhead: Some(class.layer_time.clone()),
    }
}

fn percent(share: &Sourced<Fraction>) -> String {
    format!("{:.0} %", share.value.0 * 100.0)
}

/// Returns a value that follows from a data sheet and a coefficient, as uncertain as the coefficient.
fn derived<T, C>(value: T, what: &str, coefficient: &Sourced<C>) -> Sourced<T> {
    let spread = Some(spread_of_uncertainty(coefficient.relative_uncertainty()));
    Sourced { value, source: format!("derived: {what}"), spread }
}

/// Returns rates of arithmetic that do not bound decoding.
fn reading_bound_rates(bandwidth: BytesPerSecond) -> FormatMap<Sourced<FlopsPerSecond>> {
    let source = "assumed: decoding is bound by reading, and the read bandwidth includes the arithmetic";
    let rate = |format: Format| {
        let flops_per_byte = 16.0 / format.bits_per_weight();
        (
            format,
            Sourced::new(FlopsPerSecond(ARITHMETIC_ABOVE_READING * bandwidth.0 * flops_per_byte), source),
        )
    };
    FormatMap(FORMATS.map(rate).into())
}

/// Returns the same rate for all formats.
///
/// Deviation: GPUs compute products of 16-bit weights, and attention, at the rate of 8-bit integers.
fn same_rates(rate: &Sourced<FlopsPerSecond>) -> FormatMap<Sourced<FlopsPerSecond>> {
    FormatMap(FORMATS.map(|format| (format, rate.clone())).into())
}

fn copy_at(bandwidth: &Sourced<BytesPerSecond>) -> TransferCost {
    TransferCost {
        latency: Sourced::new(Seconds(0.0), "assumed: part of the time of a layer"),
        bandwidth: Sourced::new(bandwidth.value, "assumed: as fast as reading weights"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arithmetic_follows_from_the_peak_of_8_bit_integers() {
        let rate = |text: &str| {
            let device = text.parse::<DeviceParts>().unwrap().to_profile("a").unwrap();
            device.gpu.unwrap().matmul.0[&Format::Q4K].value.0 / 1e12
        };
        let close =
            |found: f64, expected: f64| assert!((found / expected - 1.0).abs() < 1e-9, "{found} {expected}");
        let pc = "ddr4-3200-dual, 16 GiB, nvme-gen3, linux";
        // Eight times 12.7 TFLOP/s, of which 27 %.
        close(rate(&format!("rtx-3060-12gb, {pc}")), 8.0 * 12.7 * 0.27);
        close(rate(&format!("tesla-p40, {pc}")), 4.0 * 11.8 * 0.27);
        close(rate(&format!("rx-7900-xtx, {pc}")), 2.0 * 61.4 * 0.27);
        close(rate("apple-m1, 8 GiB, apple-ssd, macos"), 2.6 * 0.6);
    }
}
