//! The registry of strategies by name, for the command line, scenarios and examples.

use hearth_schema::scenario::PlannerOptions;

use crate::{
    EdgeShard, EvenWindows, ExactSearch, ExhaustiveSearch, Halda, HeadChoice, LinguaLinked, ManualPlan,
    MemoryProportional, MemoryRisk, OrderChoice, OverlapSearch, PerformanceProportional, PlanRules,
    SingleDevice, Strategy,
};

/// The options of all strategies. Each strategy ignores the options that do not apply to it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StrategyOptions {
    pub rules: PlanRules,
    /// The index of the head device. If `None`, `single` uses the fastest device, and other strategies use device 0.
    pub head: Option<usize>,
    /// Whether `overlap` and `exact` choose the head device; they then ignore `head`.
    pub choose_best_head: bool,
    /// The order of the devices in the ring for the strategies `overlap`, `exact` and `exhaustive`.
    pub order: OrderChoice,
    /// How `overlap` treats the uncertainty of the available memory.
    pub memory_risk: MemoryRisk,
    /// The number of rounds per token (k); `None` lets the strategy choose it.
    pub rounds: Option<u32>,
    pub window_layers: Option<Vec<u32>>,
    pub gpu_layers: Option<Vec<u32>>,
    /// The total memory of each device in bytes, in the instance's order, for the strategy `mem-total`.
    pub total_bytes_by_device: Option<Vec<u64>>,
}

impl From<&PlannerOptions> for StrategyOptions {
    fn from(options: &PlannerOptions) -> Self {
        Self {
            choose_best_head: options.choose_best_head,
            rules: PlanRules { may_drop_devices: !options.keep_all_devices, may_have_partial_round: false },
            order: options.order.unwrap_or_default(),
            memory_risk: options.risk.unwrap_or_default(),
            rounds: options.rounds,
            window_layers: options.windows.clone(),
            gpu_layers: options.gpu_layers.clone(),
            ..Self::default()
        }
    }
}

/// Why no strategy is created: its name is unknown, or an option that it needs is missing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StrategyLookupError {
    #[error("no strategy is called `{name}`: use one of {}", STRATEGY_NAMES.join(", "))]
    UnknownStrategy { name: String },
    #[error("strategy `{strategy}` needs {needs}")]
    MissingOption { strategy: &'static str, needs: &'static str },
}

/// The names of all strategies, in the order in which comparisons print them.
pub const STRATEGY_NAMES: [&str; 13] = [
    "overlap",
    "exact",
    "halda",
    "halda-shipped",
    "single",
    "mem",
    "mem-total",
    "perf",
    "edgeshard",
    "lingualinked",
    "even",
    "manual",
    "exhaustive",
];

/// Returns the strategy called `name`. Fails if there is no such strategy, or `options` lacks an option that it needs.
pub fn strategy_by_name(
    name: &str,
    options: &StrategyOptions,
) -> Result<Box<dyn Strategy>, StrategyLookupError> {
    let StrategyOptions { rules, rounds, order, memory_risk, .. } = *options;
    let first = options.head.unwrap_or(0);
    let head = if options.choose_best_head { HeadChoice::Best } else { HeadChoice::Fixed(first) };
    let missing = |strategy, needs| StrategyLookupError::MissingOption { strategy, needs };
    Ok(match name {
        "exact" => Box::new(ExactSearch { rules, head, rounds, order }),
        "overlap" => Box::new(OverlapSearch { rules, head, rounds, order, memory_risk }),
        "halda" | "halda-shipped" => {
            let base = if name == "halda" { Halda::default() } else { Halda::PRIMA_CPP };
            Box::new(Halda { may_drop_devices: rules.may_drop_devices, head: first, rounds, ..base })
        }
        "single" => Box::new(SingleDevice { device: options.head }),
        "mem" => Box::new(MemoryProportional::Available),
        "mem-total" => {
            let no_total = || missing("mem-total", "the total memory of every device");
            Box::new(MemoryProportional::Total(options.total_bytes_by_device.clone().ok_or_else(no_total)?))
        }
        "perf" => Box::new(PerformanceProportional),
        "edgeshard" => Box::new(EdgeShard),
        "lingualinked" => Box::new(LinguaLinked),
        "even" => Box::new(EvenWindows { rounds: rounds.unwrap_or(1) }),
        "manual" => {
            let no_windows = || missing("manual", "a window for every device");
            let window_layers = options.window_layers.clone().ok_or_else(no_windows)?;
            let gpu_layers = options.gpu_layers.clone().unwrap_or_default();
            Box::new(ManualPlan { head: first, rounds, window_layers, gpu_layers, residencies: Vec::new() })
        }
        "exhaustive" => Box::new(ExhaustiveSearch { rules, rounds, order, ..ExhaustiveSearch::default() }),
        _ => return Err(StrategyLookupError::UnknownStrategy { name: name.to_owned() }),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_selects_its_strategy() {
        let options = StrategyOptions {
            window_layers: Some(vec![1]),
            total_bytes_by_device: Some(vec![1]),
            ..StrategyOptions::default()
        };
        for name in STRATEGY_NAMES {
            assert_eq!(strategy_by_name(name, &options).unwrap().name(), name);
        }
        let unknown = strategy_by_name("haldo", &options).err().unwrap().to_string();
        assert!(unknown.starts_with("no strategy is called `haldo`: use one of overlap, exact"), "{unknown}");
        let missing = |name| strategy_by_name(name, &StrategyOptions::default()).err().unwrap().to_string();
        assert_eq!(missing("manual"), "strategy `manual` needs a window for every device");
        assert_eq!(missing("mem-total"), "strategy `mem-total` needs the total memory of every device");
    }
}
