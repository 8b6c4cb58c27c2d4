//! Corrects the profile of a device with the trace of a measured run.
//!
//! A profile is measured within seconds, but in a run of hours a device may be slower. All rates on which a pass of one
//! token depends are corrected by the ratio of the measured to the simulated median CPU time of such a pass.
//!
//! Rates that only prefill uses (`matmul`) do not change. The values of disk, memory and links do not change either,
//! because the waiting time for them depends on other devices, too. The recalibrated profile must be validated with a
//! different run: for the same run, its prediction is correct by construction.
//!
//! Not here: measuring (`hearth_runtime::profile`).

use std::collections::BTreeMap;

use hearth_profiles::units::RoundForDisplay;
use hearth_profiles::{DeviceProfile, Document, Sourced};
use hearth_schema::Trace;
use hearth_schema::pass::Pass;
use hearth_schema::trace::{Origin, Resource, StepKind};

use crate::Error;

/// Minimum number of passes for a meaningful median of their times. source: assumed
const MIN_PASSES: usize = 3;

/// Returns the profile of a device with corrected rates, and the ratio of the measured to the predicted CPU time.
pub fn recalibrate(
    mut device: DeviceProfile,
    predicted: &Trace,
    measured: &Trace,
) -> Result<(DeviceProfile, f64), Error> {
    let factor = factor(&device.name, predicted, measured)?;
    let plan = &measured.header.plan_digest;
    let new_source = |source: &str| {
        format!(
            "measured: a run of plan {plan} took {factor:.3} times the CPU time predicted with the previous \
             value ({source})"
        )
    };
    let cpu = &mut device.cpu;
    let tables =
        [&mut cpu.matvec, &mut cpu.matvec_streamed, &mut cpu.matmul_streamed, &mut cpu.matmul_medium];
    let rates = tables.into_iter().flat_map(|table| table.0.values_mut()).chain(&mut cpu.attention_rate);
    rates.for_each(|rate| update(rate, new_source, |rate| rate.0 /= factor));
    let bandwidths = [&mut cpu.read_bandwidth, &mut cpu.kv_copy.bandwidth];
    for rate in bandwidths.into_iter().chain(&mut cpu.activation_bandwidth) {
        update(rate, new_source, |rate| rate.0 /= factor);
    }
    let overheads = [&mut cpu.layer_overhead, &mut cpu.window_overhead, &mut cpu.token_overhead];
    let times = overheads.into_iter().flatten().chain([&mut cpu.kv_copy.latency]);
    times.for_each(|time| update(time, new_source, |time| time.0 *= factor));
    device.validate().map_err(Error::invalid)?;
    Ok((device, factor))
}

/// Returns whether a predicted trace was made with this profile without limits; true if the trace has no profile
/// digest.
pub fn is_prediction_of(device: &DeviceProfile, predicted: &Trace) -> bool {
    let own = predicted.header.devices.iter().find(|traced| traced.name == device.name);
    let profile = own.and_then(|traced| traced.profile_digest.as_ref());
    profile.is_none_or(|profile| *profile == hearth_schema::digest::digest_text(&device.to_yaml()))
}

fn update<T: RoundForDisplay + Copy>(
    number: &mut Sourced<T>,
    new_source: impl Fn(&str) -> String,
    change: impl Fn(&mut T),
) {
    change(&mut number.value);
    number.value = number.value.rounded();
    number.source = new_source(&number.source);
}

/// Returns the ratio of the measured to the predicted CPU time of the device `name` in a pass of one token.
fn factor(name: &str, predicted: &Trace, measured: &Trace) -> Result<f64, Error> {
    for (trace, origin, flag) in
        [(predicted, Origin::Simulated, "--predicted"), (measured, Origin::Measured, "--from-trace")]
    {
        if trace.header.origin != origin {
            let name = |origin: Origin| format!("{origin:?}").to_lowercase();
            let (wanted, is) = (name(origin), name(trace.header.origin));
            let what = format!("`{flag}` needs a {wanted} trace, but this one is {is}");
            let hint = "`hearth simulate --trace` writes the predicted trace, and `hearth execute --trace` writes the measured trace";
            return Err(Error::invalid(what).with_hint(hint));
        }
    }
    if predicted.header.plan_digest != measured.header.plan_digest {
        let hint =
            "simulate the plan file that was executed: `hearth simulate SCENARIO --plan PLAN --trace FILE`";
        return Err(Error::invalid("the two traces are of different plans").with_hint(hint));
    }
    // Attention takes longer at later positions.
    let first =
        |trace: &Trace| trace.passes.iter().find(|pass| is_decoding(pass)).map(|pass| pass.first_position);
    if let (Some(simulated), Some(real)) = (first(predicted), first(measured))
        && simulated != real
    {
        let what =
            format!("the prompt of the run has {real} tokens, but that of the prediction has {simulated}");
        let hint = format!("write `workload: {{prompt: {real}, ..}}` in the scenario and simulate again");
        return Err(Error::invalid(what).with_hint(hint));
    }
    // A median is never zero.
    if let Some((predicted, measured)) = median_time(name, predicted).zip(median_time(name, measured)) {
        return Ok(measured / predicted);
    }
    let devices = measured.header.devices.iter().map(|device| format!("`{}`", device.name));
    let devices = devices.collect::<Vec<_>>().join(", ");
    let what = format!(
        "one of the traces has fewer than {MIN_PASSES} passes of one token that device `{name}` computed on its \
         CPU"
    );
    Err(Error::invalid(what).with_hint(format!("give `--name` one of {devices}, or generate more tokens")))
}

fn is_decoding(pass: &Pass) -> bool {
    pass.tokens == 1 && pass.drafted == 0
}

/// Returns the median CPU time of a device in passes of one token, in nanoseconds; `None` if there are too few passes.
fn median_time(name: &str, trace: &Trace) -> Option<f64> {
    let index = trace.header.devices.iter().position(|device| device.name == name)?;
    let mut passes: BTreeMap<u32, u64> =
        trace.passes.iter().filter(|pass| is_decoding(pass)).map(|pass| (pass.index, 0)).collect();
    for record in &trace.records {
        let computed = matches!(record.kind, StepKind::Embed | StepKind::Compute | StepKind::Output);
        let own = usize::from(record.device_index) == index && record.resource == Resource::Cpu;
        if let Some((time, cost)) =
            passes.get_mut(&record.pass_index).zip(record.cost).filter(|_| own && computed)
        {
            *time += cost.cpu_ns;
        }
    }
    let mut times: Vec<u64> = passes.into_values().filter(|time| *time > 0).collect();
    times.sort_unstable();
    (times.len() >= MIN_PASSES).then(|| times[times.len() / 2] as f64)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::{FileResolver, LoadedScenario, SearchBudget, planning, simulation};

    const SCENARIO: &str = "# A device that is slower than its profile.
schema: scenario/1
name: n
model: {profile: 1b}
context: 256
workload: {prompt: 8, generate: 5}
devices: [{name: a, profile: d2}, {name: b, profile: d3}]
links: {default: {latency: {value: 1 ms, source: t}, bandwidth: {value: 1 GB/s, source: t}}}
planner: {strategy: manual, windows: [8, 8]}
";

    /// Simulates the scenario with `change` applied to the second device, and returns the trace and that device.
    fn run(change: impl Fn(DeviceProfile) -> DeviceProfile) -> (Trace, DeviceProfile) {
        let loaded = LoadedScenario::parse(SCENARIO, Path::new("n.yaml"), &FileResolver).expect("a scenario");
        let mut cluster = loaded.resolve_cluster(None).expect("a cluster");
        let plan = planning::make_plan(&loaded, &cluster, &loaded.scenario.planner, SearchBudget::NONE)
            .expect("a plan");
        cluster.members[1].device = change(cluster.members[1].device.clone());
        let trace = simulation::simulate(&cluster, &plan, &loaded.scenario, true).expect("a run");
        (trace, cluster.members[1].device.clone())
    }

    fn as_measured(mut trace: Trace) -> Trace {
        trace.header.origin = Origin::Measured;
        trace
    }

    #[test]
    fn recalibrated_device_takes_the_measured_time() {
        let (predicted, device) = run(|device| device);
        let slower = |mut device: DeviceProfile| {
            let cpu = &mut device.cpu;
            let rates = cpu.matvec.0.values_mut().chain(cpu.matvec_streamed.0.values_mut());
            rates.for_each(|rate| rate.value.0 /= 1.3);
            cpu.read_bandwidth.value.0 /= 1.3;
            device
        };
        let measured = as_measured(run(slower).0);
        let (found, factor) = recalibrate(device, &predicted, &measured).expect("a device");
        assert!(factor > 1.1, "{factor}");
        assert_eq!(found.cpu.matmul, run(|device| device).1.cpu.matmul, "prefill does not change");
        let source = &found.cpu.read_bandwidth.source;
        assert!(source.starts_with("measured: a run of plan sha256:"), "{source}");
        let (again, _) = run(|_| found.clone());
        let time = |trace: &Trace| median_time("b", trace).expect("passes");
        assert!(time(&measured) > 1.1 * time(&predicted), "the slower device takes longer");
        let error = time(&again) / time(&measured) - 1.0;
        assert!(error.abs() < 0.01, "{error}");
    }

    #[test]
    fn traces_that_do_not_match_are_rejected() {
        let (predicted, device) = run(|device| device);
        let rejected = |device: DeviceProfile, predicted: &Trace, measured: &Trace| {
            recalibrate(device, predicted, measured).expect_err("traces that do not match").one_line_message()
        };
        let measured = as_measured(predicted.clone());
        assert!(rejected(device.clone(), &predicted, &predicted).contains("--from-trace"));
        assert!(rejected(device.clone(), &measured, &measured).contains("--predicted"));
        let mut other = measured.clone();
        other.header.plan_digest = "sha256:0".into();
        assert!(rejected(device.clone(), &predicted, &other).contains("different plans"));
        let mut other = measured.clone();
        other.passes.iter_mut().for_each(|pass| pass.first_position += 1);
        assert!(rejected(device.clone(), &predicted, &other).contains("the prompt of the run has"));
        let other = DeviceProfile { description: "x".into(), ..device.clone() };
        assert!(is_prediction_of(&device, &predicted) && !is_prediction_of(&other, &predicted));
        let renamed = DeviceProfile { name: "c".into(), ..device };
        assert!(rejected(renamed, &predicted, &measured).contains("device `c`"));
    }
}
