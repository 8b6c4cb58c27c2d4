//! Names of strategies, and the errors of a strategy that is unknown or has no plan.

use hearth_halda::registry::NAMES;
use hearth_halda::{StrategyError, systems};
use hearth_profiles::device::soc::Strategy as SocStrategy;
use hearth_schema::scenario::PlannerOptions;

use crate::Error;

/// The strategy where none is named.
pub const DEFAULT_STRATEGY: &str = "overlap";

/// The strategy that improves a plan by simulating its neighbours.
pub const REFINE: &str = "refine";

/// The name of the strategy that options stand for: `manual` for windows by hand, unless one is named.
pub fn strategy(options: &PlannerOptions) -> &str {
    let unnamed = if options.windows.is_some() { "manual" } else { DEFAULT_STRATEGY };
    options.strategy.as_deref().unwrap_or(unnamed)
}

pub(super) fn unknown(name: &str) -> Error {
    let error = Error::invalid(format!("there is no strategy `{name}`"));
    if SocStrategy::ALL.iter().any(|strategy| strategy.name() == name) {
        return error.hint(format!(
            "it is a strategy of a phone's processors: write `soc: {{strategy: {name}}}` at the device in the scenario"
        ));
    }
    let (own, others) = (NAMES.join(", "), systems::NAMES.join(", "));
    error.hint(format!("use one of {own}, {REFINE}, {others}"))
}

pub(super) fn refused(refusal: StrategyError) -> Error {
    let hint = refusal.hint();
    Error::invalid(refusal).hint(hint)
}
