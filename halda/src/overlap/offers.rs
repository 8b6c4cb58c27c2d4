//! Which ways of keeping weights does a planner choose among?
//!
//! Those of the device's [`crate::practice::Practice`]. Where `managed` is offered without a stream buffer, buffers
//! of several sizes are: a larger one hides more in the idle time before a window and takes as much from what is
//! kept, so that the best depends on the plan.
//!
//! Not here: what a choice costs ([`crate::steady_state`]).

use hearth_profiles::Bytes;
use hearth_schema::residency::{Residency, ResidencyOptions};

/// Stream buffers on offer: powers of two, from the usual one to more than a round needs on any device at home.
/// source: assumed
const BUFFERS: std::ops::RangeInclusive<u32> = 23..=33;

/// Every residency that a planner may choose for a device.
pub fn offers(residencies: &[ResidencyOptions]) -> Vec<ResidencyOptions> {
    let mut all = Vec::new();
    for &residency in residencies {
        if residency.policy == Residency::Managed && residency.stream_buffer.is_none() {
            let sized = |power: u32| ResidencyOptions { stream_buffer: Some(Bytes(1 << power)), ..residency };
            all.extend(BUFFERS.map(sized));
        } else {
            all.push(residency);
        }
    }
    all
}
