//! `hearth gpu`: lists the GPUs that can compute layers, and tunes their kernels.

use crate::cli::GpuArgs;
use crate::diagnostics::{ExitCode, Failure};

#[cfg(not(feature = "gpu"))]
pub fn run(_: &GpuArgs, json: bool) -> Result<ExitCode, Failure> {
    super::print_result(json, &Vec::<u8>::new(), |_| format!("{}\n", crate::gpu::NO_GPU_MESSAGE))
}

#[cfg(feature = "gpu")]
pub fn run(args: &GpuArgs, json: bool) -> Result<ExitCode, Failure> {
    listing::run(args, json)
}

#[cfg(feature = "gpu")]
mod listing {
    use std::fmt::Write;

    use hearth_gpu::tuning::{self, TimedTiling};
    use hearth_gpu::virtual_tensor::WeightOrder;
    use hearth_gpu::{AdapterInfo, CapabilityMask, Gpu, enumerate_adapters};
    use hearth_profiles::Bytes;
    use hearth_workflow::Error;
    use hearth_workflow::files::write;
    use serde::Serialize;

    use crate::cli::GpuArgs;
    use crate::commands::print_result;
    use crate::diagnostics::{ExitCode, Failure};
    use crate::gpu::{Tiling, tuned_kernels};

    /// A GPU adapter as `--json` prints it. hearth computes on the first adapter.
    #[derive(Serialize)]
    struct Adapter {
        name: String,
        kind: &'static str,
        interface: String,
        driver: String,
        packed_dot: bool,
        /// Minimum and maximum number of lanes of a subgroup.
        subgroups: Option<(u32, u32)>,
        /// Whether shaders can compute in f16.
        half: bool,
        timestamps: bool,
        binding_bytes: u64,
        shared_bytes: u32,
        group_threads: u32,
        /// Usable memory of the first adapter, if the adapter shares the memory of the machine.
        memory_bytes: Option<u64>,
        /// The selected kernel variant of the first adapter.
        kernels: Option<Kernels>,
        #[serde(skip_serializing_if = "Option::is_none")]
        cannot_open: Option<String>,
    }

    #[derive(Serialize, Clone)]
    struct Kernels {
        /// `measured` if tuning selected this kernel variant, `usual` for the default variant.
        choice: &'static str,
        layout: &'static str,
        slices: u32,
        splits: u32,
        /// Time of a matmul with a 2048 x 2048 weight matrix, in microseconds: the geometric mean over all weight
        /// formats, for one token and for a batch of tokens.
        #[serde(skip_serializing_if = "Option::is_none")]
        product_us: Option<f64>,
        /// Time of the same matmul in microseconds, with the best kernel variant for the naive weight layout.
        #[serde(skip_serializing_if = "Option::is_none")]
        naive_product_us: Option<f64>,
    }

    pub fn run(args: &GpuArgs, json: bool) -> Result<ExitCode, Failure> {
        let found = enumerate_adapters();
        let (opened, cannot_open) = match found.first().map(|_| Gpu::open(CapabilityMask::default())) {
            None => (None, None),
            Some(Ok(gpu)) => (Some(gpu), None),
            Some(Err(error)) if args.tune => return Err(Failure::failed(error)),
            Some(Err(error)) => (None, Some(error.to_string())),
        };
        let kernels = |gpu| if args.tune { tune(gpu) } else { Ok(selected_kernels(gpu)) };
        let kernels = opened.as_ref().map(kernels).transpose()?;
        let mut list: Vec<Adapter> = found.into_iter().map(adapter).collect();
        if let Some(first) = list.first_mut() {
            first.kernels = kernels;
            first.cannot_open = cannot_open;
            first.memory_bytes = opened.as_ref().and_then(Gpu::memory_limit_bytes);
        }
        print_result(json, &list, |list| text(list))
    }

    fn adapter(facts: AdapterInfo) -> Adapter {
        let AdapterInfo { name, kind, api: interface, driver, capabilities } = facts;
        Adapter {
            name,
            kind,
            interface,
            driver,
            packed_dot: capabilities.packed_dot,
            subgroups: capabilities.subgroup_size_range,
            half: capabilities.shader_f16,
            timestamps: capabilities.timestamp_queries,
            binding_bytes: capabilities.max_binding_bytes,
            shared_bytes: capabilities.workgroup_memory_bytes,
            group_threads: capabilities.max_workgroup_threads,
            memory_bytes: None,
            kernels: None,
            cannot_open: None,
        }
    }

    fn kernels(tiling: Tiling, choice: &'static str) -> Kernels {
        let layout = match tiling.weight_order {
            WeightOrder::ByOutput => "by output",
            WeightOrder::Interleaved => "interleaved",
        };
        let (slices, splits) = (tiling.slices_per_workgroup, tiling.split_k);
        Kernels { choice, layout, slices, splits, product_us: None, naive_product_us: None }
    }

    fn selected_kernels(gpu: &Gpu) -> Kernels {
        let measured = tuned_kernels::load().get(gpu);
        measured.map_or(kernels(Tiling::DEFAULT, "usual"), |tiling| kernels(tiling, "measured"))
    }

    fn tune(gpu: &Gpu) -> Result<Kernels, Failure> {
        let timed = tuning::time_candidates(gpu).map_err(Failure::failed)?;
        let naive = timed.iter().find(|timed| timed.tiling.weight_order == WeightOrder::ByOutput);
        let micros = |timed: &TimedTiling| (timed.geometric_mean_seconds() * 1e7).round() / 10.0;
        let Some(best) = timed.first() else {
            let what = "the GPU supports too few threads per workgroup for any kernel variant";
            return Err(Failure::failed(what)
                .with_hint("omit `--tune`: the default kernel variant needs fewer threads per workgroup"));
        };
        let mut choices = tuned_kernels::load();
        choices.set(gpu, best.tiling);
        if let Some(path) = tuned_kernels::cache_file_path() {
            if let Some(folder) = path.parent() {
                std::fs::create_dir_all(folder)
                    .map_err(|error| Error::from_folder_error(folder, "create", &error))?;
            }
            write(&path, choices.to_text().as_bytes())?;
        } else {
            tracing::info!("the selected kernels are not saved: neither XDG_CACHE_HOME nor HOME is set");
        }
        let (product_us, naive_product_us) = (Some(micros(best)), naive.map(micros));
        Ok(Kernels { product_us, naive_product_us, ..kernels(best.tiling, "measured") })
    }

    fn text(list: &[Adapter]) -> String {
        if list.is_empty() {
            return "no GPU found by Vulkan, Metal or DX12: layers are computed on the CPU\n".into();
        }
        let mut text = String::new();
        for (index, adapter) in list.iter().enumerate() {
            let is_used = index == 0 && adapter.cannot_open.is_none();
            let used = if is_used { ", used" } else { "" };
            let _ = writeln!(text, "{} ({}{used})", adapter.name, adapter.kind);
            for (label, value) in rows(adapter, is_used) {
                let _ = writeln!(text, "  {label:<16}{value}");
            }
        }
        text
    }

    /// Returns the labels and the values of the lines that describe an adapter.
    fn rows(adapter: &Adapter, is_used: bool) -> Vec<(&'static str, String)> {
        let yes = |has: bool| if has { "yes" } else { "no" }.to_owned();
        let lanes = adapter.subgroups.map_or("no".to_owned(), |(min, max)| {
            if min == max { format!("{min} lanes") } else { format!("{min} to {max} lanes") }
        });
        let mut rows = vec![("driver", format!("{}, {}", adapter.interface, adapter.driver))];
        rows.extend(adapter.cannot_open.iter().map(|why| ("not usable", why.clone())));
        let shared = Bytes(u64::from(adapter.shared_bytes));
        rows.extend([
            ("packed dot", yes(adapter.packed_dot)),
            ("subgroups", lanes),
            ("half precision", yes(adapter.half)),
            ("largest buffer", Bytes(adapter.binding_bytes).to_string()),
            ("groups", format!("{} threads, {shared} shared", adapter.group_threads)),
        ]);
        if is_used {
            let memory = adapter.memory_bytes.map_or(
                "unknown: the driver does not report it; allocations that exceed it fail".to_owned(),
                |bytes| format!("{} available of the memory shared with the machine", Bytes(bytes)),
            );
            rows.push(("memory", memory));
        }
        let Some(Kernels { choice, layout, slices, splits, product_us, naive_product_us }) = &adapter.kernels
        else {
            return rows;
        };
        let hint = if *choice == "usual" { "; `hearth gpu --tune` measures all variants" } else { "" };
        let kernels =
            format!("{choice}: weights {layout}, {slices} slices per group, {splits} threads per row{hint}");
        rows.push(("kernels", kernels));
        if let (Some(own), Some(naive)) = (product_us, naive_product_us) {
            let difference = (naive / own - 1.0) * 100.0;
            let matmul = format!("{own:.1} us; {naive:.1} us in the naive layout, {difference:+.0} %");
            rows.push(("matmul", matmul));
        }
        rows
    }

    #[cfg(test)]
    mod tests {
        use hearth_gpu::Capabilities;

        use super::*;

        #[test]
        fn adapter_that_cannot_be_opened_is_listed_with_the_reason() {
            let named = |name: &str| {
                let (api, driver) = ("vulkan".to_owned(), "a driver".to_owned());
                let capabilities = Capabilities::default();
                adapter(AdapterInfo { name: name.into(), kind: "discrete", api, driver, capabilities })
            };
            let broken = Adapter { cannot_open: Some("the driver is too old".into()), ..named("one") };
            let text = text(&[broken, named("other")]);
            assert!(text.contains("one (discrete)\n") && text.contains("other (discrete)\n"), "{text}");
            assert!(text.contains("not usable      the driver is too old"), "{text}");
            assert!(!text.contains("used") && !text.contains("memory  "), "{text}");
        }
    }
}
