//! HALDA's outer iteration: alternates between memory cases and integer programs.
//!
//! prima.cpp paper, Algorithm 1. The programs need the cases, and the cases follow from the windows, so the
//! two take turns:
//!
//! ```text
//! w in proportion to memory, n = 0, W = L
//! repeat
//!     cases from w, n and k; devices with slow disks and forced ones are in M4
//!     stop if the cases are the last ones
//!     solve the program of every valid k; stop if none has a solution
//!     keep the best plan of all so far
//!     if a GPU has room and another device is over its memory, or runs layers on the CPU beside a full GPU:
//!         force the device with the slowest disk of M1 to M3 into M4, and repeat with the same w and n
//!     w, n, k from the best plan
//! ```
//!
//! **It ends.** A program keeps the cases that it was given, so that a plan that is taken over reproduces them;
//! only forcing changes them, and it forces every device at most once. That makes M + 1 turns at the most, and
//! the loop counts them.
//!
//! **Not every k needs a program.** Let (w, n) satisfy the constraints for k and some cases. Then (k w, k n)
//! satisfies those for one round and the same cases: floor(X/k) bounds of integers become X bounds when both
//! sides are multiplied by k (w <= floor(X/k) gives k w <= X; w >= floor(X/k) + 1 > X/k gives k w > X), and the sum
//! of the windows is L. Its objective is less by (k - 1) sum xi, which is not negative. So if one round takes `T_1`,
//! then k rounds take at least `T_1` + (k - 1) sum xi, and a program whose bound is not below the best plan
//! known cannot replace it. It is skipped and recorded with its bound; which plan comes out is the same
//! (tested by `skipping_programs_changes_no_plan`).
//!
//! **Flips.** As an option, when the iteration has ended: try each device in its other case, take the change that
//! gains most, and repeat until none gains, at most 2 M times. Each step lowers the objective, so no cases come
//! up twice.
//!
//! Not here: how a program is solved ([`super::integer_program`]).

use super::integer_program::NoOptimum;
use super::linear_costs::LinearCosts;
use super::start::proportional;
use crate::problem::assignment::Assignment;
use crate::strategy::{Infeasible, SearchStep};

/// The largest number of programs solved for one plan; then the best so far is returned. source: assumed, far more
/// than needed (600 random rings of up to 24 devices took 24 at most, 273 with flips), and few enough that hundreds
/// of devices, each forced and removed on its own, take minutes.
const MAX_PROGRAMS: usize = 5000;

/// A plan for the devices of [`LinearCosts`], by their positions in it.
#[derive(Debug, Clone)]
pub(crate) struct CandidatePlan {
    pub value: f64,
    pub rounds: u32,
    pub windows: Vec<u32>,
    pub gpu_layers: Vec<u32>,
    /// Whether each device exceeds its memory.
    over: Vec<bool>,
}

#[derive(Debug, Default)]
pub(crate) struct SearchRecord {
    pub steps: Vec<SearchStep>,
    /// The number of programs passed to HiGHS.
    programs: usize,
}

pub(crate) struct Search<'a, 'i> {
    pub objective: &'a LinearCosts<'a, 'i>,
    pub rounds: &'a [u32],
    /// Whether to skip programs whose bound cannot improve the plan.
    pub skip_bounded: bool,
    /// Whether to flip the memory cases of single devices at the end.
    pub flip_memory_cases: bool,
}

impl Search<'_, '_> {
    /// Returns the best plan found. Every program and its outcome is recorded.
    pub(crate) fn run(&self, record: &mut SearchRecord) -> Option<CandidatePlan> {
        let objective = self.objective;
        let layers = objective.model().model_layers();
        let budgets: Vec<u64> = (0..objective.devices.len()).map(|m| objective.budget(m)).collect();
        let Some(start) = proportional(&budgets, layers) else {
            // More devices than layers: this gives the reason for every k.
            return self.solved(&vec![false; budgets.len()], record);
        };
        let mut forced = vec![false; budgets.len()];
        let mut best: Option<CandidatePlan> = None;
        let mut plan = (1, start, vec![0; budgets.len()]);
        let mut last: Option<Vec<bool>> = None;
        for _ in 0..=budgets.len() {
            let over = cases(objective, &forced, &plan);
            if last.as_ref() == Some(&over) {
                break;
            }
            let found = self.solved(&over, record);
            last = Some(over);
            let Some(found) = found else { break };
            keep_better(&mut best, found);
            let Some(best) = &best else { break };
            let over = last.as_deref().unwrap_or_default();
            match slowest_disk(objective, over) {
                Some(slowest) if is_unbalanced(objective, best) => forced[slowest] = true,
                _ => plan = (best.rounds, best.windows.clone(), best.gpu_layers.clone()),
            }
        }
        match last {
            Some(over) if self.flip_memory_cases => self.flipped(best, &over, record),
            _ => best,
        }
    }

    /// Takes the best flip of one device's case while one improves the plan; begins at the best plan's cases, or at
    /// `over` if there is no plan.
    fn flipped(
        &self,
        mut best: Option<CandidatePlan>,
        over: &[bool],
        record: &mut SearchRecord,
    ) -> Option<CandidatePlan> {
        for _ in 0..2 * over.len() {
            let from = best.as_ref().map_or(over, |best| &best.over).to_vec();
            let mut gained = false;
            for device in 0..from.len() {
                if self.objective.costs(device).slow_disk {
                    continue;
                }
                let mut flipped = from.clone();
                flipped[device] = !flipped[device];
                if let Some(found) = self.solved(&flipped, record) {
                    gained |= keep_better(&mut best, found);
                }
            }
            if !gained {
                break;
            }
        }
        best
    }

    fn solved(&self, over: &[bool], record: &mut SearchRecord) -> Option<CandidatePlan> {
        let mut best: Option<CandidatePlan> = None;
        for &rounds in self.rounds {
            let outcome = self.one(over, rounds, best.as_ref(), record).map(|found| {
                let seconds = self.objective.model().seconds(&expanded(self.objective, &found));
                keep_better(&mut best, found);
                seconds
            });
            let (model, head) = (self.objective.model(), self.objective.head());
            let ring_layers = model.model_layers() / rounds;
            record.steps.push(SearchStep { head, rounds, ring_layers, outcome });
        }
        best
    }

    fn one(
        &self,
        over: &[bool],
        rounds: u32,
        best: Option<&CandidatePlan>,
        record: &mut SearchRecord,
    ) -> Result<CandidatePlan, Infeasible> {
        let objective = self.objective;
        let program = objective.program(over, rounds);
        let ring_layers = program.ring_layers as u32;
        let devices = objective.devices.len();
        if devices > ring_layers as usize {
            return Err(Infeasible::MoreDevicesThanLayers { ring_layers, devices });
        }
        let explained = |reason| explained(objective, over, ring_layers, reason);
        program.check().map_err(explained)?;
        if let Some(best) = best.filter(|best| self.skip_bounded && best.rounds == 1) {
            let bound = best.value + f64::from(rounds - 1) * objective.round_cost();
            if bound >= best.value {
                return Err(Infeasible::Pruned { bound });
            }
        }
        if record.programs >= MAX_PROGRAMS {
            return Err(Infeasible::LimitReached { limit: MAX_PROGRAMS });
        }
        record.programs += 1;
        let optimum = program.optimum().map_err(explained)?;
        let value = objective.value(over, rounds, &optimum.windows, &optimum.gpu_layers);
        if !value.is_finite() {
            return Err(Infeasible::Solver { reason: "the objective is not finite".to_owned() });
        }
        let (windows, gpu_layers, over) = (optimum.windows, optimum.gpu_layers, over.to_vec());
        Ok(CandidatePlan { value, rounds, windows, gpu_layers, over })
    }
}

/// The relative difference above which a value is smaller: without xi, k rounds and one round cost the same, and
/// rounding must not decide. source: assumed, a hundred times the rounding error of such sums
const LESS: f64 = 1e-12;

/// Replaces `best` by `found` if that is better, and returns whether it did.
fn keep_better(best: &mut Option<CandidatePlan>, found: CandidatePlan) -> bool {
    let better = best.as_ref().is_none_or(|best| found.value < best.value - LESS * best.value.abs());
    if better {
        *best = Some(found);
    }
    better
}

/// Returns which devices exceed their memory with k, w and n; forced devices and those with a slow disk never do.
fn cases(objective: &LinearCosts, forced: &[bool], plan: &(u32, Vec<u32>, Vec<u32>)) -> Vec<bool> {
    let (rounds, windows, gpu_layers) = plan;
    let layers = |window: u32| i64::from(*rounds) * i64::from(window);
    (0..windows.len())
        .map(|device| {
            let held = objective.costs(device).slow_disk || forced[device];
            !held && objective.exceeds(device, layers(windows[device]), layers(gpu_layers[device]))
        })
        .collect()
}

/// Returns whether some GPU has free memory while another device exceeds its memory, or has CPU layers beside a full
/// GPU.
fn is_unbalanced(objective: &LinearCosts, found: &CandidatePlan) -> bool {
    let gpu_room = |device: usize| {
        let most = objective.max_gpu_layers(device, found.rounds)?;
        Some(most - i64::from(found.gpu_layers[device]))
    };
    let devices = found.windows.len();
    let overloaded = |device: usize| {
        let on_cpu = found.windows[device] > found.gpu_layers[device];
        found.over[device] || on_cpu && gpu_room(device).is_some_and(|room| room <= 0)
    };
    (0..devices)
        .filter(|device| gpu_room(*device).is_some_and(|room| room > 0))
        .any(|free| (0..devices).any(|other| other != free && overloaded(other)))
}

/// Returns the device of M1 to M3 with the slowest disk; ties go to the lower index.
fn slowest_disk(objective: &LinearCosts, over: &[bool]) -> Option<usize> {
    let disk = |device: &usize| objective.costs(*device).disk_read;
    let overloaded = (0..over.len()).filter(|device| over[*device]);
    overloaded.min_by(|left, right| disk(left).total_cmp(&disk(right)))
}

pub(crate) fn expanded(objective: &LinearCosts, found: &CandidatePlan) -> Assignment {
    let devices = objective.model().device_count();
    let mut assignment = Assignment::new(objective.head(), found.rounds, vec![0; devices], vec![0; devices]);
    for (position, device) in objective.devices.iter().enumerate() {
        assignment.window_layers[*device] = found.windows[position];
        assignment.gpu_layers[*device] = found.gpu_layers[position];
    }
    assignment
}

fn explained(objective: &LinearCosts, over: &[bool], ring_layers: u32, reason: NoOptimum) -> Infeasible {
    match reason {
        NoOptimum::NoWindow(position) => {
            let device = objective.devices[position];
            let device = objective.model().instance().devices[device].name.clone();
            Infeasible::NoWindowInCase { device, case: objective.case(position, over[position]) }
        }
        NoOptimum::AtLeast(least) => Infeasible::CasesRequireMoreLayers { ring_layers, least },
        NoOptimum::AtMost(held) => Infeasible::CasesAllowTooFewLayers { ring_layers, held },
        NoOptimum::Solver(reason) => Infeasible::Solver { reason },
    }
}

#[cfg(all(test, feature = "highs"))]
mod tests {
    use super::super::linear_costs::Terms;
    use super::*;
    use crate::latency::LatencyModel;
    use crate::problem::instance::Instance;

    fn rows() -> Vec<Instance> {
        let files = [
            include_str!("../../../tests/data/lda/small.jsonl"),
            include_str!("../../../tests/data/lda/medium.jsonl"),
            include_str!("../../../tests/data/lda/hard.jsonl"),
        ];
        let lines = files.into_iter().flat_map(str::lines);
        let row = |line| serde_json::from_str::<serde_json::Value>(line).unwrap();
        lines.map(|line| serde_json::from_value(row(line)["instance"].take()).unwrap()).collect()
    }

    #[test]
    fn objective_equals_the_latency_model() {
        let mut compared = 0;
        for instance in rows() {
            let model = LatencyModel::new(&instance).unwrap();
            let devices = (0..model.device_count()).collect();
            let objective = LinearCosts::new(&model, devices, 0, Terms::PAPER);
            let rounds = crate::problem::assignment::valid_rounds(model.model_layers());
            for k in rounds {
                let search = Search {
                    objective: &objective,
                    rounds: &[k],
                    skip_bounded: false,
                    flip_memory_cases: true,
                };
                let Some(found) = search.run(&mut SearchRecord::default()) else { continue };
                let seconds = model.seconds(&expanded(&objective, &found));
                // The head's excess is charged even where it is less than the row that is read anyway.
                let row = model.model.head_row(true) / model.devices[0].disk_read;
                let off = (found.value - seconds).abs();
                assert!(
                    off <= 1e-9 * seconds + row,
                    "{} k = {k}: {} is not {seconds}",
                    instance.name,
                    found.value
                );
                compared += 1;
            }
        }
        assert!(compared > 100, "{compared}");
    }

    #[test]
    fn optimal_plan_reproduces_its_memory_cases() {
        for instance in rows() {
            let model = LatencyModel::new(&instance).unwrap();
            let devices: Vec<usize> = (0..model.device_count()).collect();
            let objective = LinearCosts::new(&model, devices.clone(), 0, Terms::PAPER);
            let rounds = crate::problem::assignment::valid_rounds(model.model_layers());
            let search = Search {
                objective: &objective,
                rounds: &rounds,
                skip_bounded: false,
                flip_memory_cases: false,
            };
            for cases_tried in 0..1_u32 << devices.len() {
                let over =
                    devices.iter().map(|m| cases_tried >> m & 1 == 1 && !objective.costs(*m).slow_disk);
                let over: Vec<bool> = over.collect();
                let Some(found) = search.solved(&over, &mut SearchRecord::default()) else {
                    continue;
                };
                let plan = (found.rounds, found.windows, found.gpu_layers);
                assert_eq!(cases(&objective, &vec![false; over.len()], &plan), over, "{}", instance.name);
            }
        }
    }
}
