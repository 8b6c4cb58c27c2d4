//! What does a run that somebody has made tell of a device's profile?
//!
//! Micro-workloads measure a device for seconds; a run of hours knows better how fast it stays. Given the trace of a run
//! and that of its prediction, made with the device's profile, the processor time of the device's passes stands beside
//! what was predicted: of passes of one token for the rates and overheads of decoding, of larger ones for those of
//! prompts. The medians' ratio is put on these rates, and their sources say so.
//!
//! Disk, memory and links stay as they are: their waits have causes in other devices too. A prediction of the recalibrated
//! profile for the same run proves nothing, and one for another run does.
//!
//! Not here: measuring ([`hearth_exec::profile`]).

use hearth_profiles::units::Rounded;
use hearth_profiles::{Device, Document, FlopsPerSecond, PerFormat, Sourced};
use hearth_schema::Trace;
use hearth_schema::trace::{Kind, Origin, Resource};

use crate::diagnostics::Failure;

/// Fewer passes of a kind tell nothing of the usual one.
/// source: assumed
const LEAST_PASSES: usize = 3;

/// How much longer computing took than predicted, as a factor; absent where there were too few passes.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Factors {
    decoding: Option<f64>,
    prompts: Option<f64>,
}

/// The device with the rates that explain a run, given what was predicted with the device as it is.
pub fn recalibrated(mut device: Device, predicted: &Trace, measured: &Trace) -> Result<Device, Failure> {
    let factors = factors(&device.name, predicted, measured)?;
    let plan = &measured.header.plan;
    let said = |factor: f64, source: &str| {
        format!(
            "measured: a run of plan {plan} took {factor:.3} times the processor time predicted with this: {source}"
        )
    };
    let cpu = &mut device.cpu;
    if let Some(factor) = factors.decoding {
        slow(&mut cpu.matvec, factor, said);
        slow(&mut cpu.matvec_streamed, factor, said);
        put(&mut cpu.read_bandwidth, said, factor, |rate| rate.0 /= factor);
        if let Some(attention) = &mut cpu.attention {
            put(attention, said, factor, |rate| rate.0 /= factor);
        }
        let overheads = [&mut cpu.layer_overhead, &mut cpu.window_overhead, &mut cpu.token_overhead];
        for overhead in overheads.into_iter().flatten() {
            put(overhead, said, factor, |time| time.0 *= factor);
        }
    }
    if let Some(factor) = factors.prompts {
        slow(&mut cpu.matmul, factor, said);
    }
    device.validate().map_err(Failure::unusable)?;
    Ok(device)
}

fn slow(
    rates: &mut PerFormat<Sourced<FlopsPerSecond>>,
    factor: f64,
    said: impl Fn(f64, &str) -> String + Copy,
) {
    rates.0.values_mut().for_each(|rate| put(rate, said, factor, |rate| rate.0 /= factor));
}

/// Changes a value, and has its source say why.
fn put<T: Rounded + Copy>(
    number: &mut Sourced<T>,
    said: impl Fn(f64, &str) -> String,
    factor: f64,
    change: impl Fn(&mut T),
) {
    change(&mut number.value);
    number.value = number.value.rounded();
    number.source = said(factor, &number.source);
}

fn factors(name: &str, predicted: &Trace, measured: &Trace) -> Result<Factors, Failure> {
    for (trace, origin, flag) in
        [(predicted, Origin::Simulated, "--predicted"), (measured, Origin::Measured, "--from-trace")]
    {
        if trace.header.origin != origin {
            let is = format!("{origin:?}").to_lowercase();
            return Err(Failure::unusable(format!("`{flag}` wants a trace that was {is}")));
        }
    }
    if predicted.header.plan != measured.header.plan {
        return Err(Failure::unusable("the two traces are of different plans").hint(
            "simulate the plan file that was executed: `hearth simulate SCENARIO --plan PLAN --trace FILE`",
        ));
    }
    let ratio = |prompt: bool| {
        let (predicted, measured) = (usual(name, predicted, prompt)?, usual(name, measured, prompt)?);
        (predicted > 0.0 && measured > 0.0).then(|| measured / predicted)
    };
    let factors = Factors { decoding: ratio(false), prompts: ratio(true) };
    if factors == (Factors { decoding: None, prompts: None }) {
        let what = format!(
            "the traces have neither {LEAST_PASSES} passes of one token nor one of a prompt that device `{name}` \
             computed on its processor"
        );
        return Err(
            Failure::unusable(what).hint("`--name` names the device as the plan does; generate more tokens")
        );
    }
    Ok(factors)
}

/// The median over the passes of one token, or of more, of a device's processor time, in nanoseconds a token.
fn usual(name: &str, trace: &Trace, prompt: bool) -> Option<f64> {
    let place = trace.header.devices.iter().position(|device| device.name == name)?;
    let mut passes: Vec<f64> = trace
        .passes
        .iter()
        .filter(|pass| (pass.tokens > 1) == prompt)
        .map(|pass| {
            let computed = |kind: Kind| matches!(kind, Kind::Embed | Kind::Compute | Kind::Output);
            let own = trace.records.iter().filter(|record| {
                record.pass == pass.index
                    && usize::from(record.device) == place
                    && record.resource == Resource::Cpu
                    && computed(record.kind)
            });
            own.filter_map(|record| record.cost).map(|cost| cost.cpu as f64).sum::<f64>()
                / f64::from(pass.tokens)
        })
        .filter(|time| *time > 0.0)
        .collect();
    passes.sort_by(f64::total_cmp);
    let enough = passes.len() >= if prompt { 1 } else { LEAST_PASSES };
    enough.then(|| passes[passes.len() / 2])
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
            slow(&mut device.cpu.matvec, 1.3, |_, source| source.into());
            slow(&mut device.cpu.matvec_streamed, 1.3, |_, source| source.into());
            device.cpu.read_bandwidth.value.0 /= 1.3;
            device
        };
        let measured = executed(run(slower).0);
        let found = recalibrated(device, &predicted, &measured).expect("a device");
        let source = &found.cpu.read_bandwidth.source;
        assert!(source.starts_with("measured: a run of plan sha256:"), "{source}");
        let (again, _) = run(|_| found.clone());
        let time = |trace: &Trace| usual("b", trace, false).expect("passes");
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
        assert!(refused(Device { name: "c".into(), ..device }, &predicted, &measured).contains("device `c`"));
    }
}
