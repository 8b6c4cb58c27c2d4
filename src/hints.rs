//! What can a person do about a plan that is not to be had?
//!
//! One hint for each reason that a planner names: it says what to change in the scenario or on the command line.
//!
//! Not here: the reasons themselves, which are `halda`'s.

use hearth_halda::{Infeasible, Refusal, Violation};

/// What to do about a refusal.
pub fn of_refusal(refusal: &Refusal) -> &'static str {
    match refusal {
        Refusal::Infeasible(steps) => {
            let reasons = || steps.iter().filter_map(|step| step.outcome.as_ref().err());
            // What was left out because of something else is no reason.
            let named = reasons().find(|reason| !not_searched(reason)).or_else(|| reasons().next());
            named.map_or("try another strategy, such as `overlap`", of_infeasible)
        }
        Refusal::Breaks { violations, .. } => {
            violations.first().map_or("try another strategy, such as `overlap`", of_violation)
        }
        Refusal::Rounds { .. } => "give `--rounds` one of these, or leave it out and let the planner choose",
        Refusal::NoSuchDevice { .. } => "name one of the scenario's devices, counted from 0",
        Refusal::MemoryCount { .. } => "give one memory size for each device",
        Refusal::NoMemory => "check `memory.available` of the devices: all of them have none",
        Refusal::NoRoom { .. } => {
            "use a strategy that reads from disk, such as `overlap`, a smaller model, or more devices"
        }
        Refusal::NoRoomOnHead { .. } => {
            "say `head: true` of a device with more memory, or use a strategy that reads from disk, such as `overlap`"
        }
        Refusal::Unsolved { .. } => "try another strategy, such as `overlap`",
        Refusal::TooManyWindows { .. } => {
            "use fewer devices, or `--strategy exact`, which counts layers alike"
        }
        Refusal::TooManyPlans { .. } => {
            "use `--strategy overlap` or `exact`, which need not try them one by one"
        }
    }
}

fn not_searched(reason: &Infeasible) -> bool {
    matches!(reason, Infeasible::NoBetter { .. } | Infeasible::NotReached { .. })
}

fn of_infeasible(reason: &Infeasible) -> &'static str {
    match reason {
        Infeasible::MoreDevicesThanLayers { .. } => {
            "leave `keep_all` out, use fewer rounds, or fewer devices"
        }
        Infeasible::HoldsNothing { .. } => {
            "give it more memory, shorten `context`, lower `planner.slow_disk` so that its disk may be read, or leave \
             `keep_all` out, if it is said, so that the device may stay idle"
        }
        Infeasible::HoldsTooLittle { .. } => {
            "add devices or memory, shorten `context`, or lower `planner.slow_disk` so that disks may be read"
        }
        Infeasible::NoRing { .. } => {
            "let the planner choose the order, `--order best`, or complete `links.between`"
        }
        Infeasible::CaseHoldsNothing { .. }
        | Infeasible::CasesHoldTooLittle { .. }
        | Infeasible::CasesNeedMore { .. }
        | Infeasible::Solver { .. } => "use `--strategy exact`, which needs no memory cases",
        Infeasible::NoBetter { .. } | Infeasible::NotReached { .. } => {
            "use `--strategy exact`, which searches all"
        }
        Infeasible::NothingAllowed { .. } => "add devices or memory, shorten `context`, or use fewer rounds",
    }
}

fn of_violation(violation: &Violation) -> &'static str {
    match violation {
        Violation::NoGpu { .. } => "give the device no GPU layers, or complete `gpu` in its profile",
        Violation::GpuMemory { .. } | Violation::GpuBytes { .. } | Violation::MetalWorkingSet { .. } => {
            "give its GPU fewer layers, or shorten `context`, whose cache is there too"
        }
        Violation::SlowDiskOverloaded { .. } => {
            "give the device fewer layers, or lower `planner.slow_disk` if its disk is to be read for every token"
        }
        Violation::NoRoom { .. } => "shorten `context`, or give the device fewer layers or none",
        Violation::Unreachable { .. } => "use `--order best`, or add the link to `links.between`",
        Violation::PartialLastRound { .. } | Violation::RelayInPartialRound { .. } => {
            "use rounds that divide the layers, or leave them to the planner"
        }
        Violation::EmptyWindow { .. } => "leave `keep_all` out, or give every device a layer",
        Violation::HeadWithoutLayers { .. } => "give the head a layer, or say `head: true` of another device",
        Violation::RingExceedsModel { .. } | Violation::RoundsDoNotCover { .. } => {
            "give windows whose sum, times the rounds, is the model's layers"
        }
        _ => "check the windows, GPU layers and rounds that were given by hand",
    }
}
