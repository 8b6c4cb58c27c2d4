//! Findings about the speed of a plan by the steady-state model, compared with other plans and with less memory.

use hearth_core::Cluster;
use hearth_core::compute_cost::prompt_time;
use hearth_profiles::{BytesPerSecond, Seconds};
use hearth_schema::Plan;

use super::Finding;
use crate::{DropReason, Instance, LatencyModel, ManualPlan, OverlapSearch, Solution, solve};

/// The ratio to the time of the best plan from which a plan is reported. source: assumed
const FAR_ABOVE: f64 = 2.0;
/// The fraction of a device's memory without which a plan should still be fast. source: assumed, what a program that is
/// opened during a run takes
const MEMORY_RESERVE: f64 = 0.05;

/// The time to the first token that is reported. source: assumed, longer than people wait
const MAX_FIRST_TOKEN: Seconds = Seconds(60.0);

/// The fraction of a plan's time from which a saving is reported. source: assumed, below the error of the model
const NOTEWORTHY: f64 = 0.02;

/// Compares a plan with the best plan, with plans that use its dropped devices, and with itself in less memory.
pub(super) fn findings(plan: &Plan, cluster: &Cluster, slow_disk: Option<BytesPerSecond>) -> Vec<Finding> {
    let instance = Instance::from_cluster(cluster, slow_disk);
    let Ok(model) = LatencyModel::new(&instance) else { return Vec::new() };
    // The instance does not describe a plan with another order or head.
    let Some(strategy) = ManualPlan::of_plan(plan, &instance) else { return Vec::new() };
    let Ok(solution) = solve(&strategy, &model) else { return Vec::new() };
    let mut found = cliffs(&model, &solution);
    found.extend(far_above_optimum(&model, &solution));
    found.extend(dropped(plan, &solution));
    found
}

/// Reports a prompt whose first token takes long, by the time of computing the prompt alone: that of the scenario, or
/// one that fills half of the context.
pub(super) fn slow_first_token(plan: &Plan, cluster: &Cluster) -> Option<Finding> {
    let prompt = cluster.workload.prompt_tokens;
    let seconds = |tokens: u32| prompt_time(plan, cluster, tokens);
    let (tokens, place) =
        [(prompt, "scenario workload.prompt"), (plan.context_length / 2, "scenario context")]
            .into_iter()
            .find(|(tokens, _)| seconds(*tokens) > MAX_FIRST_TOKEN)?;
    let what = format!(
        "after a prompt of {tokens} tokens the first token takes at least {}",
        seconds(tokens).in_words()
    );
    let fix = "give more layers to GPUs or to faster devices, or use a smaller model";
    Some(Finding::warning("slow-first-token", place, what, fix))
}

/// Reports a plan that takes much longer than the default one, which is fast in uncertain memory too.
fn far_above_optimum(model: &LatencyModel, solution: &Solution) -> Option<Finding> {
    let best = solve(&OverlapSearch::default(), model).ok()?.seconds_per_token();
    let seconds = solution.seconds_per_token();
    (seconds >= FAR_ABOVE * best).then(|| {
        let what = format!(
            "by the steady-state model a token takes {} with this plan, {:.1} times the {} of the plan of `overlap`",
            Seconds(seconds),
            seconds / best,
            Seconds(best)
        );
        Finding::error("far-above-optimum", "plan devices", what, "plan with `--strategy overlap`")
    })
}

/// Reports devices whose weights just fit, so that a little less memory makes the plan much slower.
fn cliffs(model: &LatencyModel, solution: &Solution) -> Vec<Finding> {
    let before = solution.seconds_per_token();
    let cliff = |device: usize| {
        let with_less = model.with_less_memory(device, MEMORY_RESERVE);
        let after = with_less.steady_state_seconds(&solution.assignment, &solution.residencies);
        (after >= FAR_ABOVE * before).then(|| {
            let name = model.device_name(device);
            let then = if after.is_finite() {
                format!("a token would take {} instead of {}", Seconds(after), Seconds(before))
            } else {
                "it could not run this plan".to_owned()
            };
            let what = format!("with {:.0} % less memory for `{name}`, {then}", MEMORY_RESERVE * 100.0);
            let fix = "give it fewer layers, close other programs on it, or plan with `--residency managed`";
            Finding::warning("memory-cliff", format!("plan device `{name}`"), what, fix)
        })
    };
    (0..model.device_count()).filter_map(cliff).collect()
}

/// Reports dropped devices whose use would make the plan faster.
fn dropped(plan: &Plan, solution: &Solution) -> Vec<Finding> {
    let is_planned = |name: &str| plan.devices.iter().any(|device| device.name == name);
    let unused = solution.explanation.devices.iter().filter(|device| !is_planned(&device.name));
    let slower = unused.filter_map(|device| match device.drop_reason {
        Some(DropReason::Slower(seconds)) if -seconds >= NOTEWORTHY * solution.seconds_per_token() => {
            Some((&device.name, Seconds(-seconds)))
        }
        _ => None,
    });
    slower
        .map(|(name, saved)| {
            let what = format!(
                "`{name}` has no layers, but by the latency model the best plan that uses it is {saved} per \
                 token faster"
            );
            let fix = "compare the plans in the simulator with `hearth plan --compare`";
            Finding::note("dropped-device-would-help", "plan dropped", what, fix)
        })
        .collect()
}
