//! The name of the strategy in planner options, and the errors for an unknown strategy and for a missing plan.

use hearth_halda::registry::STRATEGY_NAMES;
use hearth_halda::{StrategyError, systems};
use hearth_profiles::device::soc::Strategy as SocStrategy;
use hearth_schema::scenario::PlannerOptions;

use crate::Error;

/// The strategy if the options name none.
pub const DEFAULT_STRATEGY: &str = "overlap";

/// The strategy that improves a plan by simulating its neighbours.
pub const REFINE: &str = "refine";

/// Returns the name of the strategy in the options; if they name none, `manual` with windows and else the default.
pub fn strategy_name(options: &PlannerOptions) -> &str {
    let unnamed = if options.windows.is_some() { "manual" } else { DEFAULT_STRATEGY };
    options.strategy.as_deref().unwrap_or(unnamed)
}

/// Returns the error for a strategy that does not exist.
pub(super) fn unknown(name: &str) -> Error {
    let error = Error::invalid(format!("there is no strategy `{name}`"));
    if SocStrategy::ALL.iter().any(|strategy| strategy.name() == name) {
        return error.hint(format!(
            "it is a strategy for the processors of a phone: write `soc: {{strategy: {name}}}` at the device in the scenario"
        ));
    }
    let (own, others) = (STRATEGY_NAMES.join(", "), systems::SYSTEM_NAMES.join(", "));
    error.hint(format!("use one of {own}, {REFINE}, {others}"))
}

/// Returns the error for a scenario for which a strategy finds no plan.
pub(super) fn no_plan(error: StrategyError) -> Error {
    let hint = error.hint();
    Error::invalid(error).hint(hint)
}
