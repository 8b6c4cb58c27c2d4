//! The sentences in a plan document that explain the plan, generated from its [`Explanation`](crate::Explanation).

use crate::latency::steady_state::may_run_out_of_memory;
use crate::{
    AvoidedRisk, BindingConstraint, DeviceExplanation, DeviceTerms, DropReason, InfeasibleReason,
    LayerCounts, Solution,
};

/// Returns the explanation of a solution as sentences: first about the plan, then about each device with layers.
pub fn explanation_sentences(solution: &Solution) -> Vec<String> {
    let mut all = Vec::new();
    // A single device leaves nothing to compare.
    if solution.explanation.devices.len() > 1 {
        all.push(alone(solution).unwrap_or_else(|| best_by_rounds(solution)));
        match &solution.explanation.avoided_risk {
            Some(avoided) => all.push(avoided_risk(avoided)),
            None => all.extend(optimality(solution)),
        }
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
    let computing = devices.filter(|(device, _)| device.drop_reason.is_none());
    all.extend(computing.map(|(device, terms)| {
        let one_more =
            one_more(device, terms.layer_counts.windows).map_or_else(String::new, |text| format!("; {text}"));
        format!("`{}` {}{one_more}.", device.name, share(terms, &device.binding_constraints))
    }));
    all
}

/// Returns how the plan compares with the optimum, if the optimum is known.
fn optimality(solution: &Solution) -> Option<String> {
    let explanation = &solution.explanation;
    let (optimum, gap) = explanation.optimal_seconds_per_token.zip(explanation.optimality_gap)?;
    Some(if gap.abs() < 1e-9 {
        "By the times that the planner expects, no other plan with this head and these options is faster."
            .to_owned()
    } else {
        let (percent, optimum) = (gap * 100.0, time(optimum));
        format!(
            "The fastest plan with the same head and options would take {optimum}; this one is {percent:.1} % slower."
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
        "Another plan would take {} if every device has exactly the memory of its profile. That is uncertain: over the \
         memory that they may have, the other plan {} and this one {}.",
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
            format!("the strategy leaves it out, although it would save {} per token", time(-seconds))
        }
        DropReason::Slower(seconds) if seconds < NEGLIGIBLE => {
            "a token would take as long with it".to_owned()
        }
        DropReason::Slower(seconds) => {
            format!("a token would take {} longer with it", time(seconds))
        }
        DropReason::MayRunOutOfMemory => {
            "with it, a device may run out of memory, because its memory is uncertain".to_owned()
        }
        DropReason::Unreachable => "links are missing, so no ring in this order can include it".to_owned(),
        DropReason::NoLayerFits => {
            "one layer of a round does not fit in its memory, and its disk is too slow to read it for every token"
                .to_owned()
        }
        DropReason::NotFaster => "a token would be no faster with it".to_owned(),
        DropReason::NoLayerLeft => "a round has too few layers to give it one".to_owned(),
    })
}

/// Returns which device computes all layers, if others could.
fn alone(solution: &Solution) -> Option<String> {
    let devices = &solution.explanation.devices;
    let mut computing = devices.iter().filter(|device| device.drop_reason.is_none());
    let (first, others) = (computing.next()?, computing.next().is_some());
    (!others).then(|| format!("`{}` computes all layers alone.", first.name))
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
    by_rounds.sort_by(|(_, one, _), (_, other, _)| {
        let key = |best: &Option<f64>| best.unwrap_or(f64::INFINITY);
        key(one).total_cmp(&key(other))
    });
    by_rounds.truncate(MAX_ROUNDS_LISTED);
    by_rounds.sort_by_key(|(rounds, ..)| *rounds);
    let describe = |(rounds, best, skipped): (u32, Option<f64>, bool)| {
        let none = if skipped { "not faster" } else { "no plan" };
        let word = if rounds == 1 { "round" } else { "rounds" };
        format!("{rounds} {word} {}", best.map_or(none.to_owned(), time))
    };
    let each: Vec<String> = by_rounds.into_iter().map(describe).collect();
    format!("Fastest plan by the number of rounds around the devices: {}.", each.join(", "))
}

/// Returns what a device computes, and what limits its number of layers.
fn share(terms: &DeviceTerms, binding: &[BindingConstraint]) -> String {
    let LayerCounts { layers, gpu_layers, .. } = terms.layer_counts;
    let of_gpu = match gpu_layers {
        0 => String::new(),
        gpu if gpu == layers => ", all on its GPU".to_owned(),
        gpu => format!(", {gpu} of them on its GPU"),
    };
    let word = if layers == 1 { "layer" } else { "layers" };
    let memory = if terms.exceeds_memory {
        "its weights exceed its memory, so it reads a part from disk for every token"
    } else {
        "its weights fit in memory"
    };
    let limits = binding.iter().filter_map(|binding| limit_words(*binding));
    let all: Vec<&str> = [memory].into_iter().chain(limits).collect();
    format!("computes {layers} {word}{of_gpu}; {}", all.join(", "))
}

/// Number of rounds of which the time is named. source: assumed, fits on a line
const MAX_ROUNDS_LISTED: usize = 4;

/// The seconds per token below which a difference between plans counts as zero. source: assumed
const NEGLIGIBLE: f64 = 1e-9;

/// Returns what one more layer would change; `None` if the device cannot take one.
fn one_more(device: &DeviceExplanation, windows: u32) -> Option<String> {
    let more = if windows > 1 { "one more layer in each round" } else { "one more layer" };
    Some(match device.extra_layer_seconds? {
        seconds if seconds.abs() < NEGLIGIBLE => format!("{more} would take no time"),
        seconds if seconds < 0.0 => {
            format!("{more} would save {}, but cost more on other devices", time(-seconds))
        }
        seconds => format!("{more} would take {}", time(seconds)),
    })
}

/// Returns what limits a device; `None` if [`share`] has said so.
fn limit_words(binding: BindingConstraint) -> Option<&'static str> {
    match binding {
        BindingConstraint::SmallestWindow => Some("it must have at least one in each round"),
        BindingConstraint::GpuMemory => Some("its GPU memory is full"),
        BindingConstraint::Memory => Some("its memory is full"),
        BindingConstraint::Overloaded => None,
        BindingConstraint::SlowDisk => Some("its memory is full and its disk too slow to read more"),
    }
}

fn time(seconds: f64) -> String {
    hearth_profiles::Seconds(seconds).to_string()
}
