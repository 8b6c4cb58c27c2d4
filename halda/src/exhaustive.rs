//! What is the fastest plan if every single one is tried?
//!
//! The oracle for [`crate::exact`]: it enumerates (w, n) blindly, asks the constraints and the latency model
//! about each, and shares no reasoning with the programme it checks. With `w_m` = `n_m` + `c_m` a plan is 2M
//! numbers whose sum is at most L, so there are C(L + 2M, 2M) of them; beyond a limit it refuses.
//!
//! Not here: anything clever.

use crate::assignment::Assignment;
use crate::constraints::{Rules, violations};
use crate::exact::{evaluated, ring_sizes};
use crate::latency::LatencyModel;
use crate::strategy::{Infeasible, Proposal, Refusal, SearchStep, Strategy};

/// Plans tried at most.
const PLANS_LIMIT: f64 = 2e7;

/// Every plan with device 0 as the head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Exhaustive {
    /// Which optional rules the plan may use.
    pub rules: Rules,
    /// Only plans with this k; every valid one if absent.
    pub rounds: Option<u32>,
}

impl Strategy for Exhaustive {
    fn name(&self) -> &'static str {
        "exhaustive"
    }

    fn rules(&self) -> Rules {
        self.rules
    }

    fn options(&self) -> Vec<String> {
        let mut options = self.rules.options();
        options.extend(self.rounds.map(|rounds| format!("rounds={rounds}")));
        options
    }

    fn is_optimal(&self) -> bool {
        true
    }

    fn propose(&self, model: &LatencyModel) -> Result<Proposal, Refusal> {
        let plans = plan_count(model.model_layers(), model.device_count());
        if plans > PLANS_LIMIT {
            return Err(Refusal::TooManyPlans { plans, limit: PLANS_LIMIT });
        }
        let rings = ring_sizes(model.model_layers(), self.rules.may_leave_remainder, self.rounds)?;
        let mut searched = Vec::new();
        let mut best: Option<(f64, Assignment)> = None;
        for ring_layers in rings {
            let rounds = model.model_layers().div_ceil(ring_layers);
            let devices = model.device_count();
            let plan = Assignment::new(0, rounds, vec![0; devices], vec![0; devices]);
            let mut search = Search { model, rules: self.rules, plan, best: None };
            search.place(0, ring_layers);
            let outcome = match search.best {
                None => Err(Infeasible::NothingAllowed { ring_layers }),
                Some((seconds, plan)) => {
                    if best.as_ref().is_none_or(|(fastest, _)| seconds < *fastest) {
                        best = Some((seconds, plan));
                    }
                    Ok(seconds)
                }
            };
            searched.push(SearchStep { head: 0, rounds, ring_layers, outcome });
        }
        match best {
            Some((_, assignment)) => Ok(Proposal { searched, ..Proposal::of(assignment) }),
            None => Err(Refusal::Infeasible(searched)),
        }
    }
}

/// C(L + 2M, 2M).
fn plan_count(model_layers: u32, devices: usize) -> f64 {
    let parts = 2.0 * devices as f64;
    (1..=model_layers).map(|layer| (parts + f64::from(layer)) / f64::from(layer)).product()
}

struct Search<'a, 'i> {
    model: &'a LatencyModel<'i>,
    rules: Rules,
    plan: Assignment,
    best: Option<(f64, Assignment)>,
}

impl Search<'_, '_> {
    /// Gives `left` layers of a turn to `device` and those after it in every way.
    fn place(&mut self, device: usize, left: u32) {
        if device == self.plan.window_layers.len() {
            if left == 0 && violations(self.model, &self.plan, self.rules).is_empty() {
                let seconds = evaluated(self.model, &self.plan);
                if self.best.as_ref().is_none_or(|(fastest, _)| seconds < *fastest) {
                    self.best = Some((seconds, self.plan.clone()));
                }
            }
            return;
        }
        for window in 0..=left {
            for gpu in 0..=window {
                self.plan.window_layers[device] = window;
                self.plan.gpu_layers[device] = gpu;
                self.place(device + 1, left - window);
            }
        }
    }
}
