//! The search space that several solvers share: heads, ring sizes and orders of the ring.

use std::ops::Range;

use crate::latency::constraints::Rules;
use crate::problem::assignment::valid_rounds;
use crate::strategy::StrategyError;

/// Which devices a search tries as the head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeadChoice {
    /// Only the device with this index.
    Fixed(usize),
    /// All devices; the one with the fastest plan is chosen, and ties go to the lower index.
    Best,
}

impl HeadChoice {
    /// Returns the indices of the devices to try.
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

/// Which orders of the ring a search tries.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OrderChoice {
    /// Only the instance's order, starting at the head.
    #[default]
    Given,
    /// All orders, or some of them if there are too many.
    Best,
}

/// Returns the options of a search that differ from the defaults, as `name=value`.
pub(crate) fn search_options(
    rules: Rules,
    head: HeadChoice,
    order: OrderChoice,
    rounds: Option<u32>,
) -> Vec<String> {
    let mut options = rules.options();
    options.extend(match head {
        HeadChoice::Fixed(0) => None,
        HeadChoice::Fixed(head) => Some(format!("head={head}")),
        HeadChoice::Best => Some("head=best".to_owned()),
    });
    options.extend((order == OrderChoice::Best).then(|| "order=best".to_owned()));
    options.extend(rounds.map(|rounds| format!("rounds={rounds}")));
    options
}

/// Returns the values of W to search in descending order, so that fewer rounds come first. With `rounds`, only those
/// with that k.
pub(crate) fn ring_sizes(
    model_layers: u32,
    may_leave_remainder: bool,
    rounds: Option<u32>,
) -> Result<Vec<u32>, StrategyError> {
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
        return Err(StrategyError::Rounds { rounds: wanted, model_layers, valid });
    }
    Ok(kept)
}
