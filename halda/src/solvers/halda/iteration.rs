//! The outer iteration of HALDA (prima.cpp paper, Algorithm 1), which alternates memory cases and integer programs.
//!
//! ```text
//! w in proportion to memory, n = 0, W = L
//! repeat
//!     cases from w, n and k; devices with slow disks and forced devices are in M4
//!     stop if the cases have not changed
//!     solve the program for each valid k; stop if none has a solution
//!     store the best plan so far
//!     if a GPU has free memory, and a device (the same or another) exceeds its memory, or has CPU layers beside a full
//!     GPU:
//!         force the device with the slowest disk of M1 to M3 into M4, and repeat with the same w and n
//!     w, n, k from the best plan
//! ```
//!
//! **Termination.** The plan of a program has the cases of that program, so the cases that follow from it are the
//! same. Only forcing changes the cases, and each device is forced at most once. So there are at most M + 1
//! iterations, and the loop is limited to this number.
//!
//! **Pruning.** Let (w, n) satisfy the constraints for k and some cases. Then (k w, k n) satisfies the constraints
//! for one round and the same cases: bounds of floor(X/k) become bounds of X when both sides are multiplied by k (w
//! <= floor(X/k) gives k w <= X; w >= floor(X/k) + 1 > X/k gives k w > X), and the sum of the windows is L. Its
//! objective is smaller by (k - 1) sum xi, which is not negative. So if one round takes `T_1`, then k rounds take at
//! least `T_1` + (k - 1) sum xi. A program whose bound is not below the best plan is skipped and recorded with its
//! bound (tested by `pruning_changes_no_plan`).
//!
//! **Flips.** Optionally, after the iteration, the other case of each device is tried, and the best improvement is
//! kept. This is repeated until there is none, at most 2 M times.

use super::Halda;
use super::integer_program::SplitWindow;
use super::linear_costs::LinearCosts;
use crate::{Assignment, InfeasibleReason, SearchStep};

/// The maximum number of integer programs solved for one plan; after that the best plan so far is returned. source:
/// assumed; 600 random rings of up to 24 devices took at most 24 programs each, or 273 with flips of memory cases. The
/// limit keeps the time for rings of hundreds of devices to minutes.
const MAX_PROGRAMS: usize = 5000;

/// A plan for the devices of [`LinearCosts`], with its vectors in the order of these devices.
pub(crate) struct CandidatePlan {
    pub objective_seconds: f64,
    pub rounds: u32,
    pub windows: Vec<SplitWindow>,
    exceeds_memory: Vec<bool>,
}

#[derive(Debug, Default)]
pub(crate) struct SearchRecord {
    pub steps: Vec<SearchStep>,
    /// The number of integer programs passed to HiGHS.
    programs: usize,
}

pub(crate) struct Search<'a, 'i> {
    pub objective: &'a LinearCosts<'a, 'i>,
    /// The numbers of rounds (k) to try.
    pub candidate_rounds: &'a [u32],
    pub halda: &'a Halda,
    pub record: &'a mut SearchRecord,
}

impl Search<'_, '_> {
    /// Runs the iteration and returns the best plan; records the outcome of each integer program.
    pub(crate) fn run(mut self) -> Option<CandidatePlan> {
        let objective = self.objective;
        let layers = objective.model.model_layers();
        let budget = |position: usize| objective.device_costs(position).memory_capacity_bytes.max(0) as u64;
        let budgets: Vec<u64> = (0..objective.devices.len()).map(budget).collect();
        let Some(start) = proportional_windows(&budgets, layers) else {
            // There are more devices than layers; this call records the reason for each k.
            return self.best_for_cases(&vec![false; budgets.len()]);
        };
        let mut forced = vec![false; budgets.len()];
        let mut best: Option<CandidatePlan> = None;
        let mut plan = (1, start);
        let mut last: Option<Vec<bool>> = None;
        for _ in 0..=budgets.len() {
            let exceeds_memory = memory_cases(objective, &forced, plan.0, &plan.1);
            if last.as_ref() == Some(&exceeds_memory) {
                break;
            }
            let found = self.best_for_cases(&exceeds_memory);
            last = Some(exceeds_memory);
            let Some(found) = found else { break };
            keep_better(&mut best, found);
            let Some(best) = &best else { break };
            let exceeds_memory = last.as_deref().unwrap_or_default();
            match slowest_disk(objective, exceeds_memory) {
                Some(slowest) if is_unbalanced(objective, best) => forced[slowest] = true,
                _ => plan = (best.rounds, best.windows.clone()),
            }
        }
        match last {
            Some(exceeds_memory) if self.halda.flip_memory_cases => self.with_flips(best, &exceeds_memory),
            _ => best,
        }
    }

    /// Improves a plan by flipping the memory case of one device at a time, starting with the cases of `best`, or with
    /// `over` if there is no plan yet.
    fn with_flips(
        &mut self,
        mut best: Option<CandidatePlan>,
        exceeds_memory: &[bool],
    ) -> Option<CandidatePlan> {
        for _ in 0..2 * exceeds_memory.len() {
            let from = best.as_ref().map_or(exceeds_memory, |best| &best.exceeds_memory).to_vec();
            let mut gained = false;
            for device in 0..from.len() {
                if self.objective.device_costs(device).has_slow_disk {
                    continue;
                }
                let mut flipped = from.clone();
                flipped[device] = !flipped[device];
                if let Some(found) = self.best_for_cases(&flipped) {
                    gained |= keep_better(&mut best, found);
                }
            }
            if !gained {
                break;
            }
        }
        best
    }

    /// Solves one integer program for each number of rounds with fixed memory cases, and returns the best plan.
    fn best_for_cases(&mut self, exceeds_memory: &[bool]) -> Option<CandidatePlan> {
        let mut best: Option<CandidatePlan> = None;
        for &rounds in self.candidate_rounds {
            let LinearCosts { model, head, .. } = *self.objective;
            let outcome = self.solve_program(exceeds_memory, rounds, best.as_ref()).map(|found| {
                let seconds = model.seconds_per_token(&to_assignment(self.objective, &found));
                keep_better(&mut best, found);
                seconds
            });
            let layers_per_round = model.model_layers() / rounds;
            self.record.steps.push(SearchStep { head, rounds, layers_per_round, outcome });
        }
        best
    }

    fn solve_program(
        &mut self,
        exceeds_memory: &[bool],
        rounds: u32,
        best: Option<&CandidatePlan>,
    ) -> Result<CandidatePlan, InfeasibleReason> {
        let objective = self.objective;
        let program = objective.integer_program(exceeds_memory, rounds);
        let layers_per_round = program.layers_per_round as u32;
        let devices = objective.devices.len();
        if devices > layers_per_round as usize {
            return Err(InfeasibleReason::MoreDevicesThanLayers { layers_per_round, devices });
        }
        program.check_feasibility(|position| InfeasibleReason::NoWindowInCase {
            device: objective.model.device_name(objective.devices[position]),
            case: objective.memory_case(position, exceeds_memory[position]),
        })?;
        if let Some(best) = best.filter(|best| self.halda.prune_by_bound && best.rounds == 1) {
            let bound = best.objective_seconds + f64::from(rounds - 1) * objective.additional_round_seconds();
            if bound >= best.objective_seconds {
                return Err(InfeasibleReason::Pruned { bound_seconds: bound });
            }
        }
        if self.record.programs >= MAX_PROGRAMS {
            return Err(InfeasibleReason::LimitReached { limit: MAX_PROGRAMS });
        }
        self.record.programs += 1;
        let windows = program.optimal_windows()?;
        let value = objective.objective_seconds(exceeds_memory, rounds, &windows);
        if !value.is_finite() {
            return Err(InfeasibleReason::SolverFailed { reason: "the objective is not finite".to_owned() });
        }
        Ok(CandidatePlan {
            objective_seconds: value,
            rounds,
            windows,
            exceeds_memory: exceeds_memory.to_vec(),
        })
    }
}

/// Returns the initial windows of Algorithm 1: one round with windows in proportion to the memory budgets, each of at
/// least one layer. Returns `None` if there are more devices than layers. The paper does not define the rounding; here
/// it is the largest remainder method, and ties go to the lower index.
fn proportional_windows(budgets: &[u64], layers: u32) -> Option<Vec<SplitWindow>> {
    let shared = u128::from(layers).checked_sub(budgets.len() as u128)?;
    let total: u128 = budgets.iter().map(|budget| u128::from(*budget)).sum();
    // If no device has memory, all get equal shares.
    let (total, least) = if total == 0 { (budgets.len() as u128, 1) } else { (total, 0) };
    let parts = budgets.iter().map(|budget| shared * u128::from(*budget).max(least));
    let (mut windows, rests): (Vec<u32>, Vec<u128>) =
        parts.map(|part| (1 + (part / total) as u32, part % total)).unzip();
    let missing = layers - windows.iter().sum::<u32>();
    let mut order: Vec<usize> = (0..rests.len()).collect();
    order.sort_by_key(|device| (std::cmp::Reverse(rests[*device]), *device));
    order.iter().take(missing as usize).for_each(|device| windows[*device] += 1);
    Some(windows.into_iter().map(|layers| SplitWindow { layers, gpu_layers: 0 }).collect())
}

/// The relative improvement of the objective below which a plan does not count as better. Without the costs of windows
/// (xi), k rounds and one round take the same time, and rounding errors must not decide between them. source: assumed,
/// a hundred times the rounding error of such sums
const MIN_IMPROVEMENT: f64 = 1e-12;

/// Replaces `best` with `found` if `found` is better, and returns whether it is.
fn keep_better(best: &mut Option<CandidatePlan>, found: CandidatePlan) -> bool {
    let is_better = |best: &CandidatePlan| {
        found.objective_seconds < best.objective_seconds - MIN_IMPROVEMENT * best.objective_seconds.abs()
    };
    let better = best.as_ref().is_none_or(is_better);
    if better {
        *best = Some(found);
    }
    better
}

/// Returns whether each device exceeds its memory with these rounds and windows. Devices that must be in case M4 (those
/// in `forced` and those with a slow disk) count as within their memory.
fn memory_cases(objective: &LinearCosts, forced: &[bool], rounds: u32, windows: &[SplitWindow]) -> Vec<bool> {
    let exceeds = |device: usize| {
        let must_fit = objective.device_costs(device).has_slow_disk || forced[device];
        let [layers, gpu_layers] = [windows[device].layers, windows[device].gpu_layers]
            .map(|layers| i64::from(rounds) * i64::from(layers));
        !must_fit && objective.exceeds_memory(device, layers, gpu_layers)
    };
    (0..windows.len()).map(exceeds).collect()
}

/// Returns whether a device has free GPU memory while a device, the same or another, exceeds its memory, or has CPU
/// layers although its GPU is full. Algorithm 1 then forces a device into M4.
fn is_unbalanced(objective: &LinearCosts, found: &CandidatePlan) -> bool {
    let free_gpu_layers = |device: usize| {
        let most = objective.max_gpu_layers(device, found.rounds)?;
        Some(most - i64::from(found.windows[device].gpu_layers))
    };
    let devices = found.windows.len();
    let overloaded = |device: usize| {
        let on_cpu = found.windows[device].layers > found.windows[device].gpu_layers;
        found.exceeds_memory[device] || on_cpu && free_gpu_layers(device).is_some_and(|free| free <= 0)
    };
    let has_free_gpu_memory = |device: usize| free_gpu_layers(device).is_some_and(|free| free > 0);
    (0..devices).any(has_free_gpu_memory) && (0..devices).any(overloaded)
}

/// Returns the position of the slowest disk among devices that exceed their memory (`over`). Ties go to the first.
fn slowest_disk(objective: &LinearCosts, exceeds_memory: &[bool]) -> Option<usize> {
    let disk = |device: &usize| objective.device_costs(*device).disk_read_rate;
    let overloaded = (0..exceeds_memory.len()).filter(|device| exceeds_memory[*device]);
    overloaded.min_by(|left, right| disk(left).total_cmp(&disk(right)))
}

/// Converts a plan for the devices of `objective` to an assignment, in which all other devices have no layers.
pub(crate) fn to_assignment(objective: &LinearCosts, found: &CandidatePlan) -> Assignment {
    let devices = objective.model.device_count();
    let mut assignment = Assignment::new(objective.head, found.rounds, vec![0; devices], vec![0; devices]);
    for (&device, window) in objective.devices.iter().zip(&found.windows) {
        assignment.window_layers[device] = window.layers;
        assignment.gpu_layers[device] = window.gpu_layers;
    }
    assignment
}

#[cfg(test)]
mod start_tests {
    use super::proportional_windows;

    #[test]
    fn every_device_gets_a_layer_and_largest_remainders_get_the_rest() {
        for (budgets, layers, expected) in [
            // 13 - 3 = 10 layers in the ratio 5:3:3 are 4.55, 2.73, 2.73: the last two go to the second and the third.
            (&[5, 3, 3][..], 13, Some(vec![5, 4, 4])),
            // All remainders are 1/3, so the lower index gets the layer.
            (&[1, 1, 1], 4, Some(vec![2, 1, 1])),
            (&[1, 1000, 0], 10, Some(vec![1, 8, 1])),
            (&[0, 0], 5, Some(vec![3, 2])),
            (&[0, u64::MAX, u64::MAX], 3, Some(vec![1, 1, 1])),
            (&[1, 1], 1, None),
        ] {
            let windows = proportional_windows(budgets, layers);
            let layers =
                windows.map(|windows| windows.iter().map(|window| window.layers).collect::<Vec<_>>());
            assert_eq!(layers, expected, "{budgets:?}");
        }
    }
}

#[cfg(all(test, feature = "highs"))]
mod tests {
    use super::super::linear_costs::CostTerms;
    use super::*;
    use crate::latency::LatencyModel;
    use crate::problem::assignment::valid_rounds;
    use crate::problem::instance::Instance;

    /// Calls `check` with the name, the objective and the valid numbers of rounds of each instance with a certified
    /// optimum.
    fn for_each_certified_instance(mut check: impl FnMut(&str, &LinearCosts, &[u32])) {
        let files = [
            include_str!("../../../tests/data/lda/small.jsonl"),
            include_str!("../../../tests/data/lda/medium.jsonl"),
            include_str!("../../../tests/data/lda/hard.jsonl"),
        ];
        for line in files.into_iter().flat_map(str::lines) {
            let mut row: serde_json::Value = serde_json::from_str(line).unwrap();
            let instance: Instance = serde_json::from_value(row["instance"].take()).unwrap();
            let model = LatencyModel::new(&instance).unwrap();
            let devices = (0..model.device_count()).collect();
            let objective = LinearCosts::new(&model, devices, 0, CostTerms::PRIMA_CPP_PAPER);
            check(&instance.name, &objective, &valid_rounds(model.model_layers()));
        }
    }

    #[test]
    fn objective_equals_the_latency_model() {
        let mut compared = 0;
        for_each_certified_instance(|name, objective, rounds| {
            for &k in rounds {
                let halda =
                    &Halda { prune_by_bound: false, flip_memory_cases: true, ..Halda::PRIMA_CPP_PAPER };
                let search =
                    Search { objective, candidate_rounds: &[k], halda, record: &mut SearchRecord::default() };
                let Some(found) = search.run() else { continue };
                let (value, model) = (found.objective_seconds, objective.model);
                let seconds = model.seconds_per_token(&to_assignment(objective, &found));
                // The objective counts the excess of the head even if it is less than the row that is read anyway.
                let row = model.sizes.head_device_row_bytes(true) / model.device_costs[0].disk_read_rate;
                let is_equal = (value - seconds).abs() <= 1e-9 * seconds + row;
                assert!(is_equal, "{name} k = {k}: {value} is not {seconds}");
                compared += 1;
            }
        });
        assert!(compared > 100, "{compared}");
    }

    #[test]
    fn optimal_plan_reproduces_its_memory_cases() {
        for_each_certified_instance(|name, objective, rounds| {
            let halda = &Halda { prune_by_bound: false, ..Halda::PRIMA_CPP_PAPER };
            let mut search =
                Search { objective, candidate_rounds: rounds, halda, record: &mut SearchRecord::default() };
            let devices = 0..objective.devices.len();
            for cases in 0..1_u32 << devices.len() {
                let exceeds_memory =
                    devices.clone().map(|m| cases >> m & 1 == 1 && !objective.device_costs(m).has_slow_disk);
                let exceeds_memory: Vec<bool> = exceeds_memory.collect();
                search.record.programs = 0;
                let Some(found) = search.best_for_cases(&exceeds_memory) else { continue };
                let forced = vec![false; exceeds_memory.len()];
                let reproduced = memory_cases(objective, &forced, found.rounds, &found.windows);
                assert_eq!(reproduced, exceeds_memory, "{name}");
            }
        });
    }
}
