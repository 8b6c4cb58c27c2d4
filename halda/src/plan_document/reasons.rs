//! The sentences in a plan document that explain the plan, generated from its [`Explanation`](crate::Explanation).

use crate::latency::steady_state::may_run_out_of_memory;
use crate::{
    AvoidedRisk, BindingConstraint, DeviceExplanation, DeviceTerms, DropReason, InfeasibleReason,
    LayerCounts, Solution,
};

/// Returns the explanation of a solution as sentences: first about the plan, then about each device with layers.
pub fn explanation_sentences(solution: &Solution) -> Vec<String> {
    let mut all = vec![best_by_rounds(solution)];
    match &solution.explanation.avoided_risk {
        Some(avoided) => all.push(avoided_risk(avoided)),
        None => all.extend(optimality(solution)),
    }
    all.extend(limit(solution));
    let relays = solution.explanation.devices.iter().filter_map(|device| {
        let relay = device.relay.as_ref()?;
        let (from, to) = (&relay.previous_device, &relay.next_device);
        let direct = "which is faster than their direct link";
        let why = if relay.has_direct_link { direct } else { "which cannot reach each other" };
        Some(format!("`{}` only relays activations from `{from}` to `{to}`, {why}.", device.name))
    });
    all.extend(relays);
    let devices = solution.explanation.devices.iter().zip(&solution.breakdown.devices);
    all.extend(devices.filter(|(device, _)| device.drop_reason.is_none()).map(|(device, terms)| {
        let binding: Vec<&str> = device.binding_constraints.iter().copied().map(binding_words).collect();
        let limits =
            if binding.is_empty() { "no constraint limits it".to_owned() } else { binding.join(", ") };
        format!("`{}`: {}; {limits}; {}.", device.name, share(terms), one_more(device))
    }));
    all
}

/// Returns how the plan compares with the optimum, if the optimum is known.
fn optimality(solution: &Solution) -> Option<String> {
    let explanation = &solution.explanation;
    let (optimum, gap) = explanation.optimal_seconds_per_token.zip(explanation.optimality_gap)?;
    Some(if gap.abs() < 1e-9 {
        "By the same latency model, no plan under the same rules is faster.".to_owned()
    } else {
        let (percent, optimum) = (gap * 100.0, time(optimum));
        format!(
            "By the same latency model, the optimal plan takes {optimum}; this one is {percent:.1} % slower."
        )
    })
}

fn avoided_risk(avoided: &AvoidedRisk) -> String {
    let AvoidedRisk { fastest_seconds, fastest_mean_seconds, mean_seconds } = *avoided;
    let on_average = |mean_seconds: f64| {
        if may_run_out_of_memory(mean_seconds) {
            "may run out of memory".to_owned()
        } else {
            format!("takes {} on average", time(mean_seconds))
        }
    };
    format!(
        "The fastest plan takes {} in the memory of the profiles, which is uncertain; in the memory that the devices \
         may have, that plan {}, and this one {}.",
        time(fastest_seconds),
        on_average(fastest_mean_seconds),
        on_average(mean_seconds)
    )
}

fn limit(solution: &Solution) -> Vec<String> {
    let Some(limit) = &solution.explanation.incomplete_search else { return Vec::new() };
    let mut all = limit.notes.clone();
    if let Some(bound) = limit.lower_bound_seconds {
        let ratio = if bound > 0.0 { solution.seconds_per_token() / bound } else { f64::INFINITY };
        let (above, bound) = ((ratio - 1.0).max(0.0) * 100.0, time(bound));
        all.push(format!("No plan can be faster than {bound}; this one is at most {above:.1} % slower."));
    }
    all
}

/// Returns why a device was dropped; `None` if the plan uses the device.
pub fn drop_reason_text(device: &DeviceExplanation) -> Option<String> {
    Some(match device.drop_reason? {
        DropReason::Slower(seconds) if seconds < 0.0 => {
            format!("the strategy drops it, although using it would save {} per token", time(-seconds))
        }
        DropReason::Slower(seconds) if seconds < NEGLIGIBLE => {
            "the best plan that uses it is as fast".to_owned()
        }
        DropReason::Slower(seconds) => {
            format!("the best plan that uses it takes {} longer per token", time(seconds))
        }
        DropReason::MayRunOutOfMemory => {
            "the best plan that uses it may run out of memory, because memory is uncertain".to_owned()
        }
        DropReason::Unreachable => "links are missing, so no ring in this order can include it".to_owned(),
        DropReason::NoLayerFits => {
            "one layer of a round does not fit in its memory, and its disk is too slow to read it for every token"
                .to_owned()
        }
        DropReason::NotFaster => "no plan that uses it is faster".to_owned(),
        DropReason::NoLayerLeft => "a round has too few layers to give it one".to_owned(),
    })
}

fn best_by_rounds(solution: &Solution) -> String {
    let head = solution.assignment.head;
    let steps = solution.explanation.search_steps.iter().filter(|step| step.head == head);
    // A k occurs more than once with partial last rounds, and if several memory cases are tried.
    let mut by_rounds: Vec<(u32, Option<f64>, bool)> = Vec::new();
    for step in steps {
        let found = step.outcome.as_ref().ok().copied();
        let skipped = matches!(step.outcome, Err(InfeasibleReason::Pruned { .. }));
        match by_rounds.iter_mut().find(|(rounds, ..)| *rounds == step.rounds) {
            Some((_, best, any_skipped)) => {
                *best = [*best, found].into_iter().flatten().min_by(f64::total_cmp);
                *any_skipped |= skipped;
            }
            None => by_rounds.push((step.rounds, found, skipped)),
        }
    }
    let describe = |(rounds, best, skipped): (u32, Option<f64>, bool)| {
        let none = if skipped { "not faster" } else { "no plan" };
        format!("{rounds}: {}", best.map_or(none.to_owned(), time))
    };
    let each: Vec<String> = by_rounds.into_iter().map(describe).collect();
    format!("Best time per token by number of rounds: {}.", each.join(", "))
}

fn share(terms: &DeviceTerms) -> String {
    let memory = if terms.exceeds_memory { "its weights exceed memory" } else { "its weights fit in memory" };
    let LayerCounts { layers, gpu_layers, .. } = terms.layer_counts;
    format!("{layers} layers, {gpu_layers} of them on the GPU; {memory}")
}

/// The seconds per token below which a difference between plans counts as zero. source: assumed
const NEGLIGIBLE: f64 = 1e-9;

fn one_more(device: &DeviceExplanation) -> String {
    match device.extra_layer_seconds {
        None => "a wider window is not allowed".to_owned(),
        Some(seconds) if seconds.abs() < NEGLIGIBLE => {
            "a window one layer wider would add no time".to_owned()
        }
        Some(seconds) if seconds < 0.0 => {
            format!("a window one layer wider would save {}, but cost more on other devices", time(-seconds))
        }
        Some(seconds) => format!("a window one layer wider would add {} per token", time(seconds)),
    }
}

fn binding_words(binding: BindingConstraint) -> &'static str {
    match binding {
        BindingConstraint::SmallestWindow => "its window has the minimum size",
        BindingConstraint::GpuMemory => "its GPU memory is full",
        BindingConstraint::Memory => "its memory is full",
        BindingConstraint::Overloaded => "it reads weights from disk for every token",
        BindingConstraint::SlowDisk => "its memory is full, and its disk is too slow",
    }
}

fn time(seconds: f64) -> String {
    hearth_profiles::Seconds(seconds).to_string()
}
