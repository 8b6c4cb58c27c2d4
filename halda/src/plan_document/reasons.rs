//! The sentences of a plan document that explain the plan, made from the [`Explanation`](crate::Explanation) alone.

use crate::explanation::{BindingConstraint, DeviceExplanation, DropReason};
use crate::latency::DeviceTerms;
use crate::solve::Solution;
use crate::strategy::Infeasible;

/// Returns the explanation: general sentences, then one sentence per device in the instance's order.
pub fn sentences(solution: &Solution) -> Vec<String> {
    let mut all = vec![best_by_rounds(solution)];
    if let (Some(optimum), Some(gap)) = (solution.explanation.optimum, solution.explanation.gap) {
        all.push(if gap.abs() < 1e-9 {
            "By the same count no plan of this kind is faster.".to_owned()
        } else {
            format!("By the same count it is {:.1} % above the optimum of {}.", gap * 100.0, time(optimum))
        });
    }
    all.extend(limit(solution));
    let relays = solution.explanation.devices.iter().filter_map(|device| {
        let relay = device.relay.as_ref()?;
        let why =
            if relay.reachable { "faster than they do directly" } else { "which cannot reach each other" };
        Some(format!(
            "`{}` has no layers and relays from `{}` to `{}`, {why}.",
            device.name, relay.from, relay.to
        ))
    });
    all.extend(relays);
    let devices = solution.explanation.devices.iter().zip(&solution.breakdown.devices);
    all.extend(devices.filter(|(device, _)| device.dropped.is_none()).map(|(device, terms)| {
        let binding: Vec<&str> = device.binding.iter().map(|binding| binding_words(*binding)).collect();
        let held = if binding.is_empty() { "nothing binds it".to_owned() } else { binding.join(", ") };
        format!("`{}`: {}, {held}; {}.", device.name, share(terms), one_more(device))
    }));
    all
}

/// Returns what was not searched, and the largest possible improvement.
fn limit(solution: &Solution) -> Vec<String> {
    let Some(limit) = &solution.explanation.limit else { return Vec::new() };
    let mut all = limit.notes.clone();
    if let Some(bound) = limit.lower_bound {
        let above =
            if bound > 0.0 { (solution.seconds() / bound - 1.0).max(0.0) * 100.0 } else { f64::INFINITY };
        all.push(format!("No plan can be under {}; this one is at most {above:.1} % above it.", time(bound)));
    }
    all
}

/// Returns why a device was dropped, `None` if it was not.
pub fn dropped_reason(device: &DeviceExplanation) -> Option<String> {
    Some(match device.dropped? {
        DropReason::Slower(seconds) if seconds < 0.0 => {
            format!("the strategy leaves it out, although using it would save {} a token", time(-seconds))
        }
        DropReason::Slower(seconds) if seconds < NEGLIGIBLE => {
            "the best plan that uses it is as fast".to_owned()
        }
        DropReason::Slower(seconds) => {
            format!("the best plan that uses it takes {} longer a token", time(seconds))
        }
        DropReason::Unreachable => "no ring in this order leads through it".to_owned(),
        DropReason::NoLayerFits => {
            "its memory holds not one layer of a turn, and its disk may not make up for it".to_owned()
        }
        DropReason::NotFaster => "no plan that uses it is faster".to_owned(),
        DropReason::NoLayerLeft => "a turn of the ring has no layer to spare for it".to_owned(),
    })
}

fn best_by_rounds(solution: &Solution) -> String {
    let head = solution.assignment.head;
    let steps = solution.explanation.searched.iter().filter(|step| step.head == head);
    // A k comes up more than once with partial last rounds, and when memory cases are tried one after the other.
    let mut by_rounds: Vec<(u32, Option<f64>, bool)> = Vec::new();
    for step in steps {
        let found = step.outcome.as_ref().ok().copied();
        let skipped = matches!(step.outcome, Err(Infeasible::Pruned { .. }));
        match by_rounds.iter_mut().find(|(rounds, ..)| *rounds == step.rounds) {
            Some((_, best, any_skipped)) => {
                *best = [*best, found].into_iter().flatten().min_by(f64::total_cmp);
                *any_skipped |= skipped;
            }
            None => by_rounds.push((step.rounds, found, skipped)),
        }
    }
    let each: Vec<String> = by_rounds
        .into_iter()
        .map(|(rounds, best, skipped)| {
            let none = if skipped { "none better" } else { "none" };
            format!("{rounds}: {}", best.map_or(none.to_owned(), time))
        })
        .collect();
    format!("Best time a token by rounds: {}.", each.join(", "))
}

fn share(terms: &DeviceTerms) -> String {
    let memory = if terms.over { "over its memory" } else { "within its memory" };
    format!("{} layers, {} of them on the GPU, {memory}", terms.share.layers, terms.share.gpu_layers)
}

/// Seconds that count as zero. source: assumed
const NEGLIGIBLE: f64 = 1e-9;

fn one_more(device: &DeviceExplanation) -> String {
    match device.one_more_layer {
        None => "a wider window is not allowed".to_owned(),
        Some(seconds) if seconds.abs() < NEGLIGIBLE => {
            "a window one layer wider would cost nothing".to_owned()
        }
        Some(seconds) if seconds < 0.0 => {
            format!("a window one layer wider would save it {}, and cost others more", time(-seconds))
        }
        Some(seconds) => format!("a window one layer wider would cost it {}", time(seconds)),
    }
}

fn binding_words(binding: BindingConstraint) -> &'static str {
    match binding {
        BindingConstraint::SmallestWindow => "has the smallest window there is",
        BindingConstraint::GpuMemory => "its GPU is full",
        BindingConstraint::Memory => "its memory is full",
        BindingConstraint::Overloaded => "reads from disk for every token",
        BindingConstraint::SlowDisk => "its memory is full and its disk too slow to help",
    }
}

fn time(seconds: f64) -> String {
    hearth_profiles::Seconds(seconds).to_string()
}
