//! Batching: how many sequences share a batch, and how many batches are in flight (continuous batching).
//!
//! A batch reads the weights of a device once for all its tokens. While weights limit the speed, a batch of several
//! sequences takes hardly longer than one token. A sequence enters the next batch after each of its tokens, so requests
//! join and leave at any time (Orca: Yu et al., OSDI 2022).
//!
//! In a ring, a batch uses one device at a time, so there is a second way to generate more tokens: several batches in
//! flight, one for each device. With `d` equal devices, `d` batches with a share of the sequences each are `d` times
//! as fast as one batch with all of them. With a device that takes most of the time of a token, they are slower, because
//! this device reads its weights once for each batch. So the number of batches in flight is the number of times that
//! the work of the busiest device fits into the time of a token. It is 1 for devices that read weights from disk while
//! they wait for each other.
//!
//! A chunk of a prompt joins the batch of the other sequences, which have to wait for it. The chunk is small, so that
//! they continue during a long prompt, unless weights are read from disk: then a larger chunk costs little more.
//!
//! Deviation: the limits follow from the planner's terms for one token, which do not count the tokens of a batch.

use hearth_profiles::Seconds;
use hearth_schema::pass::MAX_PASS_TOKENS;
use hearth_schema::plan::{Plan, PlannedDevice};

/// The number of prompt tokens that join a batch of other sequences. source: assumed, the number of tokens from which on
/// arithmetic takes longer than reading weights on a CPU
pub const SHARED_PROMPT_TOKENS: u32 = 64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchLimits {
    /// Maximum number of batches in flight while tokens are generated. The sequences are divided among them.
    pub in_flight: u32,
    /// Maximum number of prompt tokens in a batch with passes of other sequences.
    pub shared_prompt_tokens: u32,
}

impl BatchLimits {
    /// Returns the limits for the devices of a plan. Without the planner's terms, all devices are taken as equal.
    pub fn for_plan(plan: &Plan) -> Self {
        let own_time = |device: &PlannedDevice| {
            let terms = device.predicted_terms.unwrap_or_default();
            terms.compute.0 + terms.memory.0 + terms.disk.0
        };
        let busiest = plan.devices.iter().map(own_time).fold(0.0, f64::max);
        let computing = plan.devices.iter().filter(|device| device.window > 0).count().max(1) as f64;
        let in_flight = match plan.prediction {
            Some(prediction) if busiest > 0.0 => (prediction.tpot.0 / busiest).round(),
            _ => computing,
        };
        let reads_disk =
            |device: &PlannedDevice| device.predicted_terms.is_some_and(|terms| terms.disk > Seconds(0.0));
        let reads_disk = plan.devices.iter().any(reads_disk);
        Self {
            in_flight: in_flight.clamp(1.0, computing) as u32,
            shared_prompt_tokens: if reads_disk { MAX_PASS_TOKENS } else { SHARED_PROMPT_TOKENS },
        }
    }
}
