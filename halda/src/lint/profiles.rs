//! Findings about device profiles with missing or noisy measurements, and about models that are too small.
//!
//! The findings name the values to measure, or to measure again. Implausible values are checked in `rates`.

use hearth_core::Cluster;
use hearth_profiles::device::DeviceProfile;
use hearth_profiles::model::ModelProfile;
use hearth_profiles::{Bytes, Format, FormatMap, Fraction, Sourced};
use hearth_schema::Scenario;
use hearth_schema::scenario::DeviceEntry;

use super::Finding;

/// The spread (half the interquartile range divided by the median) above which a measurement is noisy. source: assumed,
/// the accepted prediction error
const MAX_SPREAD: f64 = 0.1;
/// The fraction of a layer's bytes above which a weight format needs a measured rate. source: assumed
const MIN_FORMAT_SHARE: f64 = 0.05;
/// The size of a model below which predictions count as not validated, because fixed costs exceed the cost of reading
/// weights. source: assumed, a tenth of the 1B Llama (638 MB) with which `hearth lab` validates predictions
const MIN_MODEL_SIZE: Bytes = Bytes(64_000_000);

pub(super) fn findings(scenario: &Scenario, cluster: &Cluster, found: &mut Vec<Finding>) {
    let formats = formats(&cluster.model);
    for (entry, member) in scenario.devices.iter().zip(&cluster.members) {
        noisy(&entry.name, &member.device, &formats, found);
        unknown_formats(&entry.name, &member.device, &formats, found);
        threads(entry, &member.device, found);
    }
    let weights = cluster.model.total_bytes();
    if weights < MIN_MODEL_SIZE {
        let what = format!(
            "the weights of `{}` are only {weights}: fixed costs of layers and messages dominate, and predictions for \
             such small models have hardly been compared with runs",
            cluster.model.name
        );
        let fix = "rely on the ranking of the predictions rather than on their values";
        found.push(Finding::note("model-too-small", "scenario model", what, fix));
    }
}

fn formats(model: &ModelProfile) -> Vec<Format> {
    let layer = model.mean_layer();
    let least = layer.bytes().as_f64() * MIN_FORMAT_SHARE;
    let large = layer.totals_by_format().filter(|(_, share)| share.bytes.as_f64() >= least);
    large.map(|(format, _)| format).collect()
}

/// Returns the measured values of a device with a wide spread, the widest first, each as text such as
/// "`cpu.matvec.q4_k` by 14 %". The rate of a weight format is included only if `wanted` is true for the format.
pub fn uncertain_rates(device: &DeviceProfile, wanted: impl Fn(Format) -> bool) -> Vec<String> {
    let (cpu, disk) = (&device.cpu, &device.disk);
    let plain = [
        ("cpu.read_bandwidth", measured_spread(&cpu.read_bandwidth)),
        ("cpu.attention", cpu.attention_rate.as_ref().and_then(measured_spread)),
        ("cpu.activation_bandwidth", cpu.activation_bandwidth.as_ref().and_then(measured_spread)),
        ("disk.sequential", measured_spread(&disk.sequential_bandwidth)),
        ("disk.fault", disk.fault_bandwidth.as_ref().and_then(measured_spread)),
        ("disk.populate", disk.populate_bandwidth.as_ref().and_then(measured_spread)),
        ("disk.turnover", disk.page_cache_throughput.as_ref().and_then(measured_spread)),
        ("gpu.read_bandwidth", device.gpu.as_ref().and_then(|gpu| measured_spread(&gpu.read_bandwidth))),
    ];
    let gpu = device.gpu.iter().flat_map(|gpu| [("gpu.matvec", &gpu.matvec), ("gpu.matmul", &gpu.matmul)]);
    let by_format = [
        ("cpu.matvec", &cpu.matvec),
        ("cpu.matvec_streamed", &cpu.matvec_streamed),
        ("cpu.matmul_streamed", &cpu.matmul_streamed),
        ("cpu.matmul_medium", &cpu.matmul_medium),
        ("cpu.matmul", &cpu.matmul),
    ];
    let rates = by_format.into_iter().chain(gpu).flat_map(|(key, rates)| {
        let known = rates.iter().filter(|(format, _)| wanted(*format));
        known
            .map(move |(format, rate)| (format!("{key}.{format}"), measured_spread(rate)))
            .collect::<Vec<_>>()
    });
    let all = plain.into_iter().map(|(key, spread)| (key.to_owned(), spread)).chain(rates);
    let wide = all.filter_map(|(key, spread)| Some((key, spread.filter(|spread| spread.0 > MAX_SPREAD)?.0)));
    let mut wide: Vec<_> = wide.collect();
    wide.sort_by(|(_, one), (_, other)| other.total_cmp(one));
    wide.into_iter().map(|(key, spread)| format!("`{key}` by {:.0} %", 100.0 * spread)).collect()
}

/// Returns the spread of repeated measurements; `None` for a value of the catalogue of parts, whose spread is the
/// uncertainty of its class.
fn measured_spread<T>(value: &Sourced<T>) -> Option<Fraction> {
    value.spread.filter(|_| !value.source.starts_with("derived"))
}

fn noisy(name: &str, device: &DeviceProfile, formats: &[Format], found: &mut Vec<Finding>) {
    let wide = uncertain_rates(device, |format| formats.contains(&format));
    if !wide.is_empty() {
        let what =
            format!("measurements of `{name}` spread widely around their medians: {}", wide.join(", "));
        let fix = "measure again with nothing else running, and without `--quick`";
        found.push(Finding::warning("noisy-measurement", format!("device `{name}`"), what, fix));
    }
}

/// Reports weight formats of the model whose rate on a device was not measured; the nearest format's rate is used.
fn unknown_formats(name: &str, device: &DeviceProfile, formats: &[Format], found: &mut Vec<Finding>) {
    let without = |rates: &FormatMap<_>| -> Vec<String> {
        formats.iter().filter(|&&format| rates.get(format).is_none()).map(ToString::to_string).collect()
    };
    // A SoC has its own rates, which apply to all formats.
    let cpu = Some(&device.cpu.matvec).filter(|_| device.soc.is_none());
    let gpu = device.gpu.as_ref().map(|gpu| &gpu.matvec).filter(|rates| !rates.is_empty());
    for (key, rates) in [("cpu.matvec", cpu), ("gpu.matvec", gpu)] {
        let missing = rates.map(without).unwrap_or_default();
        if !missing.is_empty() {
            let what = format!(
                "`{name}` has no rate for {}, which the model uses: the rate of the format nearest in size \
                 is used",
                missing.join(", ")
            );
            let fix = "measure the device with the model: `hearth profile --model MODEL.gguf`";
            found.push(Finding::note("format-without-rate", format!("device `{name}` {key}"), what, fix));
        }
    }
}

fn threads(entry: &DeviceEntry, device: &DeviceProfile, found: &mut Vec<Finding>) {
    let cores = device.cpu.cores;
    let Some(threads) = entry.limits.as_ref().and_then(|limits| limits.threads).filter(|&all| all > cores)
    else {
        return;
    };
    let (name, fix) = (&entry.name, "set at most as many threads as cores");
    let what = format!(
        "`{name}` computes with {threads} threads on only {cores} cores, so threads wait for each other"
    );
    found.push(Finding::warning("threads-above-cores", format!("device `{name}` limits.threads"), what, fix));
}
