//! The strategy `exhaustive`: tries every plan, as an oracle for the solvers.
//!
//! It enumerates all windows w and GPU layers n, filters them by the constraints and evaluates them with the latency
//! model, independently of the dynamic program of [`crate::solvers::exact_search`]. With `c_m` = `w_m` - `n_m` CPU
//! layers, a plan consists of 2M integers whose sum is at most L, so there are C(L + 2M, 2M) plans. If hops depend on
//! the next device, each plan is combined with every choice of relays among the devices without layers. If the order is
//! free, it is also combined with every order of the devices after the head. Too many plans are an error.

use crate::latency::constraints::ring_violations;
use crate::solvers::overlap::best_residencies;
use crate::solvers::search_space::{ring_sizes, search_options};
use crate::{
    Assignment, HeadChoice, InfeasibleReason, LatencyModel, Objective, OrderChoice, PlanRules, Proposal,
    SearchStep, Strategy, StrategyError, violations,
};

const MAX_PLANS: f64 = 2e7;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ExhaustiveSearch {
    pub rules: PlanRules,
    /// The number of rounds per token (k); `None` to search every valid number.
    pub rounds: Option<u32>,
    pub order: OrderChoice,
    pub objective: Objective,
}

impl Strategy for ExhaustiveSearch {
    fn name(&self) -> &'static str {
        "exhaustive"
    }

    fn rules(&self) -> PlanRules {
        self.rules
    }

    fn objective(&self) -> Objective {
        self.objective
    }

    fn options(&self) -> Vec<String> {
        search_options(self.rules, HeadChoice::Fixed(0), self.order, self.rounds)
    }

    fn is_optimal(&self) -> bool {
        true
    }

    fn propose(&self, model: &LatencyModel) -> Result<Proposal, StrategyError> {
        let devices = model.device_count();
        let with_relays = self.rules.may_drop_devices && model.hop_times.has_pair_times();
        let plans = plan_count(model.model_layers(), devices, self.order, with_relays);
        if plans > MAX_PLANS {
            return Err(StrategyError::TooManyPlans { plans, limit: MAX_PLANS });
        }
        let orders = orders(devices, self.order);
        let rings = ring_sizes(model.model_layers(), self.rules.may_have_partial_round, self.rounds)?;
        let (mut search_steps, mut plans) = (Vec::new(), Vec::new());
        for layers_per_round in rings {
            let rounds = model.model_layers().div_ceil(layers_per_round);
            let mut plan = Assignment::new(0, rounds, vec![0; devices], vec![0; devices]);
            let mut search = Search { model, exhaustive: *self, with_relays, orders: &orders, best: None };
            for_each_split(&mut plan, 0, layers_per_round, &mut |plan| search.try_rings(plan));
            let seconds = search.best.as_ref().map(|(seconds, _)| *seconds);
            let outcome = seconds.ok_or(InfeasibleReason::NoAllowedPlan { layers_per_round });
            plans.extend(search.best);
            search_steps.push(SearchStep { head: 0, rounds, layers_per_round, outcome });
        }
        match plans.into_iter().min_by(|one, other| one.0.total_cmp(&other.0)) {
            Some((_, proposal)) => Ok(Proposal { search_steps, ..proposal }),
            None => Err(StrategyError::Infeasible(search_steps)),
        }
    }
}

/// Returns an upper bound of the number of plans: C(L + 2M, 2M) times the choices of relays times the ring orders.
fn plan_count(model_layers: u32, devices: usize, order: OrderChoice, with_relays: bool) -> f64 {
    let parts = 2.0 * devices as f64;
    let windows: f64 =
        (1..=model_layers).map(|layer| (parts + f64::from(layer)) / f64::from(layer)).product();
    let relays = if with_relays { 2.0_f64.powi(devices as i32 - 1) } else { 1.0 };
    let orders: f64 = match order {
        OrderChoice::Given => 1.0,
        OrderChoice::Best => (1..devices).map(|device| device as f64).product(),
    };
    windows * relays * orders
}

/// Returns every order of the devices with device 0 first, or only the instance's order, depending on `choice`.
fn orders(devices: usize, choice: OrderChoice) -> Vec<Vec<usize>> {
    if choice == OrderChoice::Given {
        return vec![(0..devices).collect()];
    }
    let mut orders = vec![vec![0]];
    for device in 1..devices {
        let grown = |order: Vec<usize>| {
            (1..=order.len()).map(move |position| {
                let mut order = order.clone();
                order.insert(position, device);
                order
            })
        };
        orders = orders.into_iter().flat_map(grown).collect();
    }
    orders
}

/// Calls `visit` for every distribution of `left` layers of a round over the processors of device `device` and later
/// ones.
pub fn for_each_split(
    plan: &mut Assignment,
    device: usize,
    left: u32,
    visit: &mut impl FnMut(&mut Assignment),
) {
    if device == plan.window_layers.len() {
        if left == 0 {
            visit(plan);
        }
        return;
    }
    for window in 0..=left {
        for gpu in 0..=window {
            (plan.window_layers[device], plan.gpu_layers[device]) = (window, gpu);
            for_each_split(plan, device + 1, left - window, visit);
        }
    }
}

struct Search<'a, 'i> {
    model: &'a LatencyModel<'i>,
    exhaustive: ExhaustiveSearch,
    with_relays: bool,
    orders: &'a [Vec<usize>],
    best: Option<(f64, Proposal)>,
}

impl Search<'_, '_> {
    /// Evaluates a plan in every ring order, with every choice of relays among the devices without layers.
    fn try_rings(&mut self, plan: &mut Assignment) {
        let devices = plan.window_layers.len();
        let idle: Vec<usize> = (0..devices).filter(|device| plan.window_layers[*device] == 0).collect();
        let choices = if self.with_relays { 1_usize << idle.len() } else { 1 };
        for order in self.orders {
            for choice in 0..choices {
                let is_in_ring = |device: &usize| {
                    let bit = idle.iter().position(|idle| idle == device);
                    bit.is_none_or(|bit| choice >> bit & 1 == 1)
                };
                plan.ring_order = Some(order.iter().copied().filter(is_in_ring).collect());
                self.evaluate_plan(plan);
            }
        }
    }

    fn evaluate_plan(&mut self, plan: &Assignment) {
        let ExhaustiveSearch { rules, objective, .. } = self.exhaustive;
        let mut proposal = Proposal::new(plan.clone());
        let seconds = match objective {
            Objective::Paper if violations(self.model, plan, rules).is_empty() => {
                self.model.seconds_per_token(plan)
            }
            Objective::SteadyState if ring_violations(self.model, plan, rules).is_empty() => {
                let Some(residencies) = best_residencies(self.model, plan) else { return };
                proposal.residencies = residencies;
                self.model.steady_state_seconds(&proposal.assignment, &proposal.residencies)
            }
            _ => return,
        };
        if self.best.as_ref().is_none_or(|(fastest, _)| seconds < *fastest) {
            self.best = Some((seconds, proposal));
        }
    }
}
