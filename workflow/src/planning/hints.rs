//! Hints for every reason why a planner has no plan: what to change in the scenario or on the command line.

use hearth_halda::{Infeasible, StrategyError, Violation};

pub fn of_refusal(refusal: &StrategyError) -> &'static str {
    match refusal {
        StrategyError::Infeasible(steps) => {
            let reasons = || steps.iter().filter_map(|step| step.outcome.as_ref().err());
            // What was not searched because of something else is not the reason.
            let named = reasons().find(|reason| !not_searched(reason)).or_else(|| reasons().next());
            named.map_or("try another strategy, such as `overlap`", of_infeasible)
        }
        StrategyError::ConstraintsViolated { violations, .. } => {
            violations.first().map_or("try another strategy, such as `overlap`", of_violation)
        }
        StrategyError::Rounds { .. } => {
            "give one of these to `--rounds`, or leave it out and let the planner choose"
        }
        StrategyError::NoSuchDevice { .. } => "name one of the scenario's devices, counted from 0",
        StrategyError::MemoryCount { .. } => "give one memory size for each device",
        StrategyError::NoMemory => "check `memory.available` of the devices: none of them has any",
        StrategyError::OutOfMemory { .. } => {
            "use a strategy that reads from disk, such as `overlap`, a smaller model, or more devices"
        }
        StrategyError::HeadOutOfMemory { .. } => {
            "write `head: true` at a device with more memory, or use a strategy that reads from disk, such as `overlap`"
        }
        StrategyError::NoSolver { .. } => {
            "build with `--features highs`, or use another strategy, such as `overlap`"
        }
        StrategyError::Unsolved { .. } => "try another strategy, such as `overlap`",
        StrategyError::TooManyWindows { .. } => {
            "use fewer devices, or `--strategy exact`, which does not try every window"
        }
        StrategyError::TooManyPlans { .. } => {
            "use `--strategy overlap` or `exact`, which do not try every plan"
        }
    }
}

fn not_searched(reason: &Infeasible) -> bool {
    matches!(reason, Infeasible::Pruned { .. } | Infeasible::LimitReached { .. })
}

fn of_infeasible(reason: &Infeasible) -> &'static str {
    match reason {
        Infeasible::MoreDevicesThanLayers { .. } => {
            "leave `keep_all` out, use fewer rounds, or fewer devices"
        }
        Infeasible::NoLayerFits { .. } => {
            "give it more memory, shorten `context`, lower `planner.slow_disk` so that its disk may be read, or leave \
             `keep_all` out, if it is given, so that the device may stay idle"
        }
        Infeasible::TooLittleMemory { .. } => {
            "add devices or memory, shorten `context`, or lower `planner.slow_disk` so that disks may be read"
        }
        Infeasible::NoRoute { .. } => {
            "let the planner choose the order, `--order best`, or complete `links.between`"
        }
        Infeasible::NoWindowInCase { .. }
        | Infeasible::CasesAllowTooFewLayers { .. }
        | Infeasible::CasesRequireMoreLayers { .. }
        | Infeasible::Solver { .. } => "use `--strategy exact`, which needs no memory cases",
        Infeasible::Pruned { .. } | Infeasible::LimitReached { .. } => {
            "use `--strategy exact`, which searches all plans"
        }
        Infeasible::NothingAllowed { .. } => "add devices or memory, shorten `context`, or use fewer rounds",
    }
}

fn of_violation(violation: &Violation) -> &'static str {
    match violation {
        Violation::NoGpu { .. } => "give the device no GPU layers, or complete `gpu` in its profile",
        Violation::GpuMemory { .. } | Violation::GpuBytes { .. } | Violation::MetalWorkingSet { .. } => {
            "give its GPU fewer layers, or shorten `context`, whose cache is in GPU memory too"
        }
        Violation::SlowDiskOverloaded { .. } => {
            "give the device fewer layers, or lower `planner.slow_disk` if its disk may be read for every token"
        }
        Violation::OutOfMemory { .. } => "shorten `context`, or give the device fewer layers or none",
        Violation::Unreachable { .. } => "use `--order best`, or add the link to `links.between`",
        Violation::PartialLastRound { .. } | Violation::RelayInPartialRound { .. } => {
            "use rounds that divide the layers, or leave them to the planner"
        }
        Violation::EmptyWindow { .. } => "leave `keep_all` out, or give every device a layer",
        Violation::HeadWithoutLayers { .. } => {
            "give the head a layer, or write `head: true` at another device"
        }
        Violation::RingExceedsModel { .. } | Violation::RoundsDoNotCover { .. } => {
            "give windows whose sum times the rounds is the number of layers"
        }
        _ => "check the given windows, GPU layers and rounds",
    }
}
