//! Options of the user that override the planner and residency options of a scenario.

use hearth_halda::systems::SYSTEM_NAMES;
use hearth_profiles::{Bytes, Document, Format, Seconds};
use hearth_schema::residency::{Residency, ResidencyOptions};
use hearth_schema::scenario::{PlannerOptions, RingOrder};

use crate::planning::DEFAULT_STRATEGY;
use crate::{Error, LoadedScenario};

/// Options that override those of a scenario, unless they are `None` or false.
#[derive(Debug, Clone, Default)]
pub struct Overrides {
    pub strategy: Option<String>,
    /// Number of rounds around the ring for one token.
    pub rounds: Option<u32>,
    /// Window size of each device in ring order, in layers. The strategy is then `manual`, unless another is given.
    pub windows: Option<Vec<u32>>,
    /// The number of GPU layers of each window.
    pub gpu_layers: Option<Vec<u32>>,
    /// Whether every device must have at least one layer.
    pub keep_all: bool,
    /// Whether the planner chooses the head.
    pub best_head: bool,
    pub order: Option<RingOrder>,
    /// The residency policy of all devices.
    pub residency: Option<Residency>,
    /// The size of the stream buffer of all devices with managed residency.
    pub stream_buffer: Option<Bytes>,
    /// The format to which the strategies `tpi-llm`, `hepti`, `galaxy` and `airinfer` convert weights.
    pub weights_as: Option<Format>,
    /// The time of one over-the-air all-reduce of `airinfer`.
    pub air_time: Option<Seconds>,
}

impl Overrides {
    /// Applies the options to a scenario.
    pub fn apply(&self, loaded: &mut LoadedScenario) -> Result<(), Error> {
        let scenario = &mut loaded.scenario;
        self.check(&scenario.planner)?;
        if self.residency.is_some() {
            scenario.devices.iter_mut().for_each(|device| device.residency = None);
        }
        scenario.residency = self.residency(scenario.residency);
        for device in scenario.devices.iter_mut().filter(|device| device.residency.is_some()) {
            device.residency = self.residency(device.residency);
        }
        let given = scenario.devices.iter().filter_map(|device| device.residency).chain(scenario.residency);
        let is_managed = given.into_iter().any(|options| options.policy == Residency::Managed);
        if self.stream_buffer.is_some() && !is_managed {
            let what = "--stream-buffer: no device has `managed` residency";
            return Err(Error::invalid(what).hint("add `--residency managed`"));
        }
        scenario.validate().map_err(Error::invalid)?;
        scenario.planner = self.planner(&scenario.planner);
        Ok(())
    }

    /// Returns an error if a given option would have no effect.
    fn check(&self, scenario: &PlannerOptions) -> Result<(), Error> {
        let named = self.strategy.as_deref().filter(|name| !matches!(*name, "manual" | "refine"));
        if let (Some(name), true) = (named, self.windows.is_some()) {
            return Err(Error::invalid(format!("--windows: strategy `{name}` chooses its own windows"))
                .hint("remove one of the two, or use strategy `manual` or `refine`"));
        }
        let windows = self.windows.is_some() || scenario.windows.is_some();
        let strategy = self.strategy.as_deref().or(scenario.strategy.as_deref()).unwrap_or(DEFAULT_STRATEGY);
        for (flag, given) in
            [("--weights-as", self.weights_as.is_some()), ("--air-time", self.air_time.is_some())]
        {
            if given && !SYSTEM_NAMES.contains(&strategy) {
                let what = format!("{flag} is for the plans of other systems, and `{strategy}` is not one");
                return Err(Error::invalid(what).hint(format!("use one of {}", SYSTEM_NAMES.join(", "))));
            }
        }
        if self.gpu_layers.is_some() && !windows {
            return Err(Error::invalid("--gpu-layers needs --windows").hint("add --windows"));
        }
        Ok(())
    }

    fn residency(&self, scenario: Option<ResidencyOptions>) -> Option<ResidencyOptions> {
        let mut options = self.residency.map(ResidencyOptions::with_policy).or(scenario)?;
        if options.policy == Residency::Managed {
            options.stream_buffer = self.stream_buffer.or(options.stream_buffer);
        }
        Some(options)
    }

    fn planner(&self, scenario: &PlannerOptions) -> PlannerOptions {
        let Overrides { strategy, rounds, windows, gpu_layers, .. } = self.clone();
        // With explicit windows the strategy is `manual`, even if the scenario names another one.
        let strategy = strategy.or_else(|| windows.as_ref().map(|_| "manual".into()));
        PlannerOptions {
            strategy: strategy.or_else(|| scenario.strategy.clone()),
            rounds: rounds.or(scenario.rounds),
            windows: windows.or_else(|| scenario.windows.clone()),
            gpu_layers: gpu_layers.or_else(|| scenario.gpu_layers.clone()),
            keep_all: self.keep_all || scenario.keep_all,
            best_head: self.best_head || scenario.best_head,
            order: self.order.or(scenario.order),
            slow_disk: scenario.slow_disk,
            weights_as: self.weights_as.or(scenario.weights_as),
            air_time: self.air_time.or(scenario.air_time),
        }
    }
}
