//! User options that override the planner options and the residency policies of a scenario.

use hearth_halda::systems::SYSTEM_NAMES;
use hearth_profiles::{Bytes, Document};
use hearth_schema::residency::{Residency, ResidencyOptions};
use hearth_schema::scenario::PlannerOptions;

use crate::planning::DEFAULT_STRATEGY;
use crate::{Error, LoadedScenario};

/// User options, each of which replaces the same option of a scenario unless it is `None` or false.
#[derive(Debug, Clone, Default)]
pub struct ScenarioOverrides {
    /// The planner options. With `windows` the strategy is `manual`, unless `strategy` is also given.
    pub planner: PlannerOptions,
    /// The residency policy of all devices.
    pub residency: Option<Residency>,
    /// The size of the stream buffer of all devices with managed residency.
    pub stream_buffer: Option<Bytes>,
}

impl ScenarioOverrides {
    /// Replaces the options of a scenario with these options. Fails if an option would have no effect.
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
            let what = "`--stream-buffer`: no device has `managed` residency";
            return Err(Error::invalid(what).with_hint("add `--residency managed`"));
        }
        scenario.validate().map_err(Error::invalid)?;
        scenario.planner = self.planner(std::mem::take(&mut scenario.planner));
        Ok(())
    }

    /// Fails if one of these planner options would have no effect on a scenario with the planner options `scenario`.
    fn check(&self, scenario: &PlannerOptions) -> Result<(), Error> {
        let PlannerOptions { strategy, windows, gpu_layers, weight_format, all_reduce_time, .. } =
            &self.planner;
        let named = strategy.as_deref().filter(|name| !matches!(*name, "manual" | "refine"));
        if let (Some(name), true) = (named, windows.is_some()) {
            return Err(Error::invalid(format!("`--windows`: strategy `{name}` chooses its own windows"))
                .with_hint("remove `--windows`, or use strategy `manual` or `refine`"));
        }
        let strategy = strategy.as_deref().or(scenario.strategy.as_deref()).unwrap_or(DEFAULT_STRATEGY);
        let flags = [("--weights-as", weight_format.is_some()), ("--air-time", all_reduce_time.is_some())];
        for (flag, given) in flags {
            if given && !SYSTEM_NAMES.contains(&strategy) {
                let what = format!(
                    "`{flag}` is only for the strategies of other systems, but the strategy is `{strategy}`"
                );
                return Err(Error::invalid(what).with_hint(format!("use one of {}", SYSTEM_NAMES.join(", "))));
            }
        }
        if gpu_layers.is_some() && windows.is_none() && scenario.windows.is_none() {
            return Err(Error::invalid("`--gpu-layers` needs `--windows`").with_hint("add `--windows`"));
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

    fn planner(&self, scenario: PlannerOptions) -> PlannerOptions {
        let given = self.planner.clone();
        // With explicit windows the strategy is `manual`, even if the scenario names a different one.
        let manual = given.windows.as_ref().map(|_| "manual".into());
        PlannerOptions {
            strategy: given.strategy.or(manual).or(scenario.strategy),
            rounds: given.rounds.or(scenario.rounds),
            windows: given.windows.or(scenario.windows),
            gpu_layers: given.gpu_layers.or(scenario.gpu_layers),
            keep_all_devices: given.keep_all_devices || scenario.keep_all_devices,
            choose_best_head: given.choose_best_head || scenario.choose_best_head,
            order: given.order.or(scenario.order),
            risk: given.risk.or(scenario.risk),
            slow_disk_threshold: given.slow_disk_threshold.or(scenario.slow_disk_threshold),
            weight_format: given.weight_format.or(scenario.weight_format),
            all_reduce_time: given.all_reduce_time.or(scenario.all_reduce_time),
        }
    }
}
