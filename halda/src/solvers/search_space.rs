//! The search space that several solvers share: heads, ring sizes and orders of the ring.

use std::ops::Range;

use crate::{LatencyModel, OrderChoice, PlanRules, StrategyError, valid_rounds};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeadChoice {
    /// The device with this index is the head.
    Fixed(usize),
    /// Every device is tried as the head, and the head of the fastest plan is chosen; ties go to the lower index.
    Best,
}

impl HeadChoice {
    pub(crate) fn candidates(self, devices: usize) -> Result<Range<usize>, StrategyError> {
        match self {
            HeadChoice::Fixed(device) if device >= devices => {
                Err(StrategyError::NoSuchDevice { device, devices })
            }
            HeadChoice::Fixed(head) => Ok(head..head + 1),
            HeadChoice::Best => Ok(0..devices),
        }
    }
}

/// Returns a cycle of devices, rotated so that the head is first.
pub(crate) fn rotated_to_head(cycle: &[usize], head: usize) -> Vec<usize> {
    let mut order = cycle.to_vec();
    order.rotate_left(cycle.iter().position(|device| *device == head).unwrap_or(0));
    order
}

/// Returns the minimum window of each device in layers: 1 for the head and devices that must not be dropped, else 0.
pub(crate) fn min_windows(model: &LatencyModel, rules: PlanRules, head: usize) -> Vec<u32> {
    (0..model.device_count()).map(|device| u32::from(device == head || !rules.may_drop_devices)).collect()
}

/// Returns the options of a search that differ from the defaults, as `name=value`.
pub(crate) fn search_options(
    rules: PlanRules,
    head: HeadChoice,
    order: OrderChoice,
    rounds: Option<u32>,
) -> Vec<String> {
    let mut options = rules.to_option_strings();
    options.extend(match head {
        HeadChoice::Fixed(0) => None,
        HeadChoice::Fixed(head) => Some(format!("head={head}")),
        HeadChoice::Best => Some("head=best".to_owned()),
    });
    options.extend((order == OrderChoice::Best).then(|| "order=best".to_owned()));
    options.extend(rounds.map(|rounds| format!("rounds={rounds}")));
    options
}

/// Returns the ring sizes (layers per round) to search, in descending order; only those with `rounds` rounds if given.
pub(crate) fn ring_sizes(
    model_layers: u32,
    may_have_partial_round: bool,
    rounds: Option<u32>,
) -> Result<Vec<u32>, StrategyError> {
    let mut sizes: Vec<u32> = if may_have_partial_round {
        (model_layers.min(2)..=model_layers).rev().collect()
    } else {
        valid_rounds(model_layers).iter().map(|rounds| model_layers / rounds).collect()
    };
    let Some(rounds) = rounds else { return Ok(sizes) };
    let mut valid: Vec<u32> = sizes.iter().map(|size| model_layers.div_ceil(*size)).collect();
    sizes.retain(|size| model_layers.div_ceil(*size) == rounds);
    if sizes.is_empty() {
        valid.dedup();
        return Err(StrategyError::InvalidRounds { rounds, model_layers, valid });
    }
    Ok(sizes)
}
