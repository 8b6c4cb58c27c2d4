//! Which assignment is the fastest of all?
//!
//! For a fixed ring size W the objective is separable: T = `sum_m` `g_m(w_m)` with `sum_m` `w_m` = W, where `g_m(w)` is
//! the best time of device m with a window of w over its GPU splits ([`crate::gpu_split`]). The memory case
//! and the slow-disk rule are functions of the device's own window, so they live inside `g_m`, and the circular
//! dependency that makes the paper iterate over sets M1-M4 does not arise. A dynamic programme over devices,
//!
//! ```text
//! f_m(j) = min over w of f_{m-1}(j - w) + g_m(w),      answer f_M(W),      O(M W^2)
//! ```
//!
//! is exact; dropping a device is the choice w = 0 with `g_m(0)` = 0. The ring sizes are L/k for every valid k.
//!
//! **Remainder windows.** If W does not divide L, the last turn is partial and what a device does in it
//! depends on the layers that are left when the turn reaches it: `rest_m` = max(0, R - sum_{j before m} `w_j`). The
//! programme goes through the devices in ring order, and that sum *is* its state, so `g_m(w)` only becomes
//! `g_m(w`, rest) and the result stays exact: every W from L down to 2 costs O(M W (R + W)) table entries and
//! additions, all of them together O(M L^3).
//!
//! Not here: the order of the ring (the instance's is kept) and hops that depend on the neighbour.

use std::ops::Range;

use crate::assignment::{Assignment, ring_order, valid_rounds};
use crate::constraints::Rules;
use crate::gpu_split::Turns;
use crate::latency::LatencyModel;
use crate::strategy::{Infeasible, Proposal, Refusal, SearchStep, Strategy};

/// Which device is the head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeadChoice {
    /// This one.
    Fixed(usize),
    /// The one that gives the fastest plan; ties go to the lower index.
    Best,
}

impl HeadChoice {
    /// The devices to try.
    pub(crate) fn candidates(self, devices: usize) -> Result<Range<usize>, Refusal> {
        match self {
            HeadChoice::Fixed(device) if device >= devices => Err(Refusal::NoSuchDevice { device, devices }),
            HeadChoice::Fixed(head) => Ok(head..head + 1),
            HeadChoice::Best => Ok(0..devices),
        }
    }

    /// The choice as `name=value`, if it is not the usual one.
    pub(crate) fn option(self) -> Option<String> {
        match self {
            HeadChoice::Fixed(0) => None,
            HeadChoice::Fixed(head) => Some(format!("head={head}")),
            HeadChoice::Best => Some("head=best".to_owned()),
        }
    }
}

/// The global optimum of the latency model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exact {
    /// Which optional rules the plan may use.
    pub rules: Rules,
    /// Which device is the head.
    pub head: HeadChoice,
    /// Only plans with this k; every valid one if absent.
    pub rounds: Option<u32>,
}

impl Default for Exact {
    /// Device 0 is the head, every device keeps a layer, whole turns only, any k: the paper's problem.
    fn default() -> Self {
        Self { rules: Rules::default(), head: HeadChoice::Fixed(0), rounds: None }
    }
}

impl Strategy for Exact {
    fn name(&self) -> &'static str {
        "exact"
    }

    fn rules(&self) -> Rules {
        self.rules
    }

    fn options(&self) -> Vec<String> {
        let mut options = self.rules.options();
        options.extend(self.head.option());
        options.extend(self.rounds.map(|rounds| format!("rounds={rounds}")));
        options
    }

    fn is_optimal(&self) -> bool {
        true
    }

    fn propose(&self, model: &LatencyModel) -> Result<Proposal, Refusal> {
        let rings = ring_sizes(model.model_layers(), self.rules.may_leave_remainder, self.rounds)?;
        let heads = self.head.candidates(model.device_count())?;
        let least = u32::from(!self.rules.may_drop);
        let mut searched = Vec::with_capacity(heads.len() * rings.len());
        let mut best: Option<(f64, Assignment)> = None;
        for head in heads {
            let mut windows = vec![least; model.device_count()];
            windows[head] = 1;
            for &ring_layers in &rings {
                let ring = SizedProblem { model, head, ring_layers, least_windows: &windows };
                let outcome = ring.optimum().map(|assignment| {
                    let seconds = evaluated(model, &assignment);
                    if best.as_ref().is_none_or(|(fastest, _)| seconds < *fastest) {
                        best = Some((seconds, assignment));
                    }
                    seconds
                });
                let rounds = model.model_layers().div_ceil(ring_layers);
                searched.push(SearchStep { head, rounds, ring_layers, outcome });
            }
        }
        match best {
            Some((_, assignment)) => Ok(Proposal::searched(assignment, searched)),
            None => Err(Refusal::Infeasible(searched)),
        }
    }
}

/// T of an assignment whose shape is known to be right.
pub(crate) fn evaluated(model: &LatencyModel, assignment: &Assignment) -> f64 {
    model.evaluate(assignment).map_or(f64::INFINITY, |breakdown| breakdown.seconds)
}

/// Every W to search, largest (fewest rounds) first.
pub(crate) fn ring_sizes(
    model_layers: u32,
    may_leave_remainder: bool,
    rounds: Option<u32>,
) -> Result<Vec<u32>, Refusal> {
    let whole = valid_rounds(model_layers);
    let sizes: Vec<u32> = if may_leave_remainder {
        (model_layers.min(2)..=model_layers).rev().collect()
    } else {
        whole.iter().map(|rounds| model_layers / rounds).collect()
    };
    let Some(wanted) = rounds else { return Ok(sizes) };
    let kept: Vec<u32> =
        sizes.iter().copied().filter(|size| model_layers.div_ceil(*size) == wanted).collect();
    if kept.is_empty() {
        let mut valid: Vec<u32> = sizes.iter().map(|size| model_layers.div_ceil(*size)).collect();
        valid.dedup();
        return Err(Refusal::Rounds { rounds: wanted, model_layers, valid });
    }
    Ok(kept)
}

/// The problem for one ring size and one head.
pub(crate) struct SizedProblem<'a, 'i> {
    pub model: &'a LatencyModel<'i>,
    pub head: usize,
    pub ring_layers: u32,
    /// The smallest window of each device: 1 keeps it in the ring, 0 lets it be dropped.
    pub least_windows: &'a [u32],
}

impl SizedProblem<'_, '_> {
    /// The fastest assignment of exactly W layers a turn.
    pub(crate) fn optimum(&self) -> Result<Assignment, Infeasible> {
        let ring_layers = self.ring_layers as usize;
        let remainder = self.remainder();
        let devices = self.model.device_count();
        let mut fastest = vec![f64::INFINITY; ring_layers + 1];
        fastest[0] = 0.0;
        // chosen[position * (W + 1) + j]: the window of the device at that position when j layers are placed.
        let mut chosen = vec![0_u16; devices * (ring_layers + 1)];
        let mut table = Vec::new();
        for (position, device) in ring_order(self.head, devices).enumerate() {
            self.fill(device, &mut table);
            let mut next = vec![f64::INFINITY; ring_layers + 1];
            let windows = &mut chosen[position * (ring_layers + 1)..(position + 1) * (ring_layers + 1)];
            for (placed, before) in fastest.iter().enumerate().filter(|(_, before)| before.is_finite()) {
                let rest = remainder.saturating_sub(placed);
                let row = &table[rest * (ring_layers + 1)..(rest + 1) * (ring_layers + 1) - placed];
                for (window, seconds) in row.iter().enumerate() {
                    let total = before + seconds;
                    if total < next[placed + window] {
                        next[placed + window] = total;
                        windows[placed + window] = window as u16;
                    }
                }
            }
            fastest = next;
        }
        if fastest[ring_layers].is_finite() {
            Ok(self.traced_back(&chosen))
        } else {
            Err(self.reason(&mut table))
        }
    }

    /// R.
    fn remainder(&self) -> usize {
        (self.model.model_layers() % self.ring_layers) as usize
    }

    fn turns(&self, rest: usize) -> Turns {
        Turns { rounds: self.model.model_layers() / self.ring_layers, rest: rest as u32 }
    }

    /// table[rest * (W + 1) + w] = g(w, rest), infinite where not allowed.
    fn fill(&self, device: usize, table: &mut Vec<f64>) {
        let head = device == self.head;
        table.clear();
        for rest in 0..=self.remainder() {
            // With a rest of r, R - r layers are placed already: wider windows cannot come up.
            let widest = if rest == 0 {
                self.ring_layers
            } else {
                self.ring_layers - (self.remainder() - rest) as u32
            };
            for window in 0..=self.ring_layers {
                let allowed = window >= self.least_windows[device] && window <= widest;
                let split = if allowed {
                    self.model.best_split(device, head, window, self.turns(rest))
                } else {
                    None
                };
                table.push(split.map_or(f64::INFINITY, |split| split.seconds));
            }
        }
    }

    /// Reads the windows off the choices, last device first, and splits each.
    fn traced_back(&self, chosen: &[u16]) -> Assignment {
        let devices = self.model.device_count();
        let columns = self.ring_layers as usize + 1;
        let rounds = self.model.model_layers().div_ceil(self.ring_layers);
        let mut assignment = Assignment::new(self.head, rounds, vec![0; devices], vec![0; devices]);
        let mut placed = self.ring_layers as usize;
        let order: Vec<usize> = ring_order(self.head, devices).collect();
        for (position, &device) in order.iter().enumerate().rev() {
            let window = u32::from(chosen[position * columns + placed]);
            placed -= window as usize;
            let turns = self.turns(self.remainder().saturating_sub(placed));
            let split = self.model.best_split(device, device == self.head, window, turns);
            assignment.window_layers[device] = window;
            assignment.gpu_layers[device] = split.map_or(0, |split| split.gpu_layers);
        }
        assignment
    }

    /// Names what makes this ring size impossible.
    fn reason(&self, table: &mut Vec<f64>) -> Infeasible {
        let ring_layers = self.ring_layers;
        let kept = self.least_windows.iter().filter(|least| **least > 0).count();
        if kept > ring_layers as usize {
            return Infeasible::MoreDevicesThanLayers { ring_layers, devices: kept };
        }
        let mut held = 0;
        for device in 0..self.model.device_count() {
            self.fill(device, table);
            let widest = table[..=ring_layers as usize].iter().rposition(|seconds| seconds.is_finite());
            match widest {
                None => {
                    let device = self.model.instance().devices[device].name.clone();
                    return Infeasible::HoldsNothing { device };
                }
                Some(window) => held += window as u32,
            }
        }
        if held < ring_layers {
            Infeasible::HoldsTooLittle { ring_layers, held }
        } else {
            // Enough for a whole turn, and too little for what a partial last one adds.
            Infeasible::NothingAllowed { ring_layers }
        }
    }
}
