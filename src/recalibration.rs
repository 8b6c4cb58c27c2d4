//! What does a run that somebody has made tell of a device's profile?
//!
//! Micro-workloads measure a device for seconds; a run of hours knows better how fast it stays. Given the trace of a run
//! and that of its prediction, made with the device's profile, the processor time of the device's passes of one token
//! stands beside what was predicted. The medians' ratio is put on all that such a pass takes of a processor, and the
//! sources say so.
//!
//! What only prompts take (`matmul`) stays as it is, and so do disk, memory and links, whose waits have causes in other
//! devices too. A prediction of the recalibrated profile for the same run proves nothing, and one for another run does.
//!
//! Not here: measuring ([`hearth_runtime::profile`]).

use std::collections::BTreeMap;

use hearth_profiles::units::Rounded;
use hearth_profiles::{Device, Document, Sourced};
use hearth_schema::Trace;
use hearth_schema::pass::Pass;
use hearth_schema::trace::Kind;
use hearth_schema::trace::Origin;
use hearth_schema::trace::Resource;

use crate::diagnostics::Failure;

/// Fewer passes tell nothing of the usual one.
/// source: assumed
const LEAST_PASSES: usize = 3;

/// The device with the rates that explain a run, given what was predicted with the device as it is; and how much longer
/// it computed than that.
pub fn recalibrated(
    mut device: Device,
    predicted: &Trace,
    measured: &Trace,
) -> Result<(Device, f64), Failure> {
    let factor = factor(&device.name, predicted, measured)?;
    let plan = &measured.header.plan;
    let said = |source: &str| {
        format!(
            "measured: a run of plan {plan} took {factor:.3} times the processor time predicted with this: {source}"
        )
    };
    let cpu = &mut device.cpu;
    let rates = cpu.matvec.0.values_mut().chain(cpu.matvec_streamed.0.values_mut()).chain(&mut cpu.attention);
    rates.for_each(|rate| put(rate, said, |rate| rate.0 /= factor));
    let transfers = [&mut cpu.read_bandwidth, &mut cpu.kv_copy.bandwidth];
    for rate in transfers {
        put(rate, said, |rate| rate.0 /= factor);
    }
    let overheads = [&mut cpu.layer_overhead, &mut cpu.window_overhead, &mut cpu.token_overhead];
    let times = overheads.into_iter().flatten().chain([&mut cpu.kv_copy.latency]);
    times.for_each(|time| put(time, said, |time| time.0 *= factor));
    device.validate().map_err(Failure::unusable)?;
    Ok((device, factor))
}

/// Whether a prediction was made with this device as it is: limits of a scenario make another of it.
pub fn is_of(device: &Device, predicted: &Trace) -> bool {
    let own = predicted.header.devices.iter().find(|traced| traced.name == device.name);
    let profile = own.and_then(|traced| traced.profile.as_ref());
    profile.is_none_or(|profile| *profile == hearth_schema::digest::of(&device.to_yaml()))
}

/// Changes a value, and has its source say why.
fn put<T: Rounded + Copy>(number: &mut Sourced<T>, said: impl Fn(&str) -> String, change: impl Fn(&mut T)) {
    change(&mut number.value);
    number.value = number.value.rounded();
    number.source = said(&number.source);
}

/// How much longer a pass of one token took than predicted.
fn factor(name: &str, predicted: &Trace, measured: &Trace) -> Result<f64, Failure> {
    for (trace, origin, flag) in
        [(predicted, Origin::Simulated, "--predicted"), (measured, Origin::Measured, "--from-trace")]
    {
        if trace.header.origin != origin {
            let is = format!("{origin:?}").to_lowercase();
            let hint = "`hearth simulate --trace` writes the one, `hearth execute --trace` the other";
            return Err(Failure::unusable(format!("`{flag}` wants a trace that was {is}")).hint(hint));
        }
    }
    if predicted.header.plan != measured.header.plan {
        return Err(Failure::unusable("the two traces are of different plans").hint(
            "simulate the plan file that was executed: `hearth simulate SCENARIO --plan PLAN --trace FILE`",
        ));
    }
    // Attention takes longer the further a text is.
    let first =
        |trace: &Trace| trace.passes.iter().find(|pass| is_decoding(pass)).map(|pass| pass.first_position);
    if let (Some(simulated), Some(real)) = (first(predicted), first(measured))
        && simulated != real
    {
        let what = format!("the run's prompt has {real} tokens, and the prediction's {simulated}");
        return Err(Failure::unusable(what)
            .hint(format!("say `workload: {{prompt: {real}, ..}}` in the scenario and simulate again")));
    }
    match usual(name, predicted).zip(usual(name, measured)) {
        Some((predicted, measured)) if predicted > 0.0 && measured > 0.0 => Ok(measured / predicted),
        _ => {
            let devices = measured.header.devices.iter().map(|device| format!("`{}`", device.name));
            let devices = devices.collect::<Vec<_>>().join(", ");
            let what = format!(
                "one of the traces has fewer than {LEAST_PASSES} passes of one token that device `{name}` computed on its \
                 processor"
            );
            Err(Failure::unusable(what)
                .hint(format!("say which device it is, `--name` one of {devices}; or generate more tokens")))
        }
    }
}

/// Whether a pass is of one token that nobody has drafted.
fn is_decoding(pass: &Pass) -> bool {
    pass.tokens == 1 && pass.drafted == 0
}

/// The median over the passes of one token of a device's processor time, in nanoseconds.
fn usual(name: &str, trace: &Trace) -> Option<f64> {
    let place = trace.header.devices.iter().position(|device| device.name == name)?;
    let mut passes: BTreeMap<u32, u64> =
        trace.passes.iter().filter(|pass| is_decoding(pass)).map(|pass| (pass.index, 0)).collect();
    for record in &trace.records {
        let computed = matches!(record.kind, Kind::Embed | Kind::Compute | Kind::Output);
        let own = usize::from(record.device) == place && record.resource == Resource::Cpu;
        if let Some((time, cost)) = passes.get_mut(&record.pass).zip(record.cost).filter(|_| own && computed)
        {
            *time += cost.cpu;
        }
    }
    let mut times: Vec<u64> = passes.into_values().filter(|time| *time > 0).collect();
    times.sort_unstable();
    (times.len() >= LEAST_PASSES).then(|| times[times.len() / 2] as f64)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::commands::{plan, simulate};
    use crate::documents::LoadedScenario;
    use crate::refinement::Effort;

    const SCENARIO: &str = "# How fast is it really?
schema: scenario/1
name: n
model: {profile: 1b}
context: 256
workload: {prompt: 8, generate: 5}
devices: [{name: a, profile: d2}, {name: b, profile: d3}]
links: {default: {latency: {value: 1 ms, source: t}, bandwidth: {value: 1 GB/s, source: t}}}
planner: {strategy: manual, windows: [8, 8]}
";

    /// What the simulator says of the scenario with this as its second device, and that device.
    fn run(change: impl Fn(Device) -> Device) -> (Trace, Device) {
        let loaded = LoadedScenario::parse(SCENARIO, Path::new("n.yaml")).expect("a scenario");
        let cluster = loaded.cluster(None).expect("a cluster");
        let effort = Effort { seconds: 1, evaluations: None };
        let plan = plan::make(&loaded, &cluster, &loaded.scenario.planner, effort).expect("a plan");
        let mut cluster = cluster;
        cluster.members[1].device = change(cluster.members[1].device.clone());
        let trace = simulate::simulate(&cluster, &plan, &loaded.scenario, true).expect("a run");
        (trace, cluster.members[1].device.clone())
    }

    /// As if it had been executed.
    fn executed(mut trace: Trace) -> Trace {
        trace.header.origin = Origin::Measured;
        trace
    }

    #[test]
    fn a_recalibrated_device_takes_the_time_that_was_measured() {
        let (predicted, device) = run(|device| device);
        let slower = |mut device: Device| {
            let cpu = &mut device.cpu;
            cpu.matvec
                .0
                .values_mut()
                .chain(cpu.matvec_streamed.0.values_mut())
                .for_each(|rate| rate.value.0 /= 1.3);
            cpu.read_bandwidth.value.0 /= 1.3;
            device
        };
        let measured = executed(run(slower).0);
        let (found, factor) = recalibrated(device, &predicted, &measured).expect("a device");
        assert!(factor > 1.1, "{factor}");
        assert_eq!(found.cpu.matmul, run(|device| device).1.cpu.matmul, "prompts are not told of");
        let source = &found.cpu.read_bandwidth.source;
        assert!(source.starts_with("measured: a run of plan sha256:"), "{source}");
        let (again, _) = run(|_| found.clone());
        let time = |trace: &Trace| usual("b", trace).expect("passes");
        assert!(time(&measured) > 1.1 * time(&predicted), "the slower device takes longer");
        let error = time(&again) / time(&measured) - 1.0;
        assert!(error.abs() < 0.01, "{error}");
    }

    #[test]
    fn what_tells_nothing_of_the_device_is_refused() {
        let (predicted, device) = run(|device| device);
        let refused = |device: Device, predicted: &Trace, measured: &Trace| {
            recalibrated(device, predicted, measured).expect_err("nothing to learn").reason()
        };
        let measured = executed(predicted.clone());
        assert!(refused(device.clone(), &predicted, &predicted).contains("--from-trace"));
        assert!(refused(device.clone(), &measured, &measured).contains("--predicted"));
        let mut other = measured.clone();
        other.header.plan = "sha256:0".into();
        assert!(refused(device.clone(), &predicted, &other).contains("different plans"));
        let mut other = measured.clone();
        other.passes.iter_mut().for_each(|pass| pass.first_position += 1);
        assert!(refused(device.clone(), &predicted, &other).contains("the run's prompt has"));
        assert!(
            is_of(&device, &predicted) && !is_of(&Device { about: "x".into(), ..device.clone() }, &predicted)
        );
        assert!(refused(Device { name: "c".into(), ..device }, &predicted, &measured).contains("device `c`"));
    }
}
