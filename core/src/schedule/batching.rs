//! Batching: how many sequences share a batch, and how many batches are in flight (continuous batching).
//!
//! A batch reads the weights of a device once for all its tokens. While weights limit the speed, a batch of several
//! sequences takes hardly longer than one token. A sequence enters the next batch after each of its tokens, so requests
//! join and leave at any time (Orca: Yu et al., OSDI 2022).
//!
//! In a ring, a batch uses one device at a time, and several batches in flight use several devices. Let a token take `t`
//! in all, and `b` on the busiest device. `n` sequences in one batch generate `n` tokens in `t` while weights limit the
//! speed. In `m` batches they generate `n` tokens in the longer of `t` and `m b`, because the busiest device reads its
//! weights for each batch: no more, but with large batches, which arithmetic limits, up to `m` times as many. So there
//! are as many batches in flight as cost nothing, `m = t / b`. There is one if a device reads weights from disk, because
//! it reads ahead while it waits for the other devices.
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

/// By how much the work of the busiest device for all batches in flight may exceed the time of a token. source: assumed,
/// for devices that are as equal as whole layers allow
const EXCESS: f64 = 1.1;

impl BatchLimits {
    /// Returns the limits for the devices of a plan. Without the planner's terms, all devices are taken as equal.
    pub fn for_plan(plan: &Plan) -> Self {
        let terms = |device: &PlannedDevice| device.predicted_terms.unwrap_or_default();
        if plan.devices.iter().any(|device| terms(device).disk > Seconds(0.0)) {
            return Self { in_flight: 1, shared_prompt_tokens: MAX_PASS_TOKENS };
        }
        let own_times = plan.devices.iter().map(|device| (terms(device).compute + terms(device).memory).0);
        let busiest = own_times.fold(0.0, f64::max);
        let computing = plan.devices.iter().filter(|device| device.window > 0).count().max(1) as f64;
        let in_flight = match plan.prediction {
            Some(prediction) if busiest > 0.0 => (EXCESS * prediction.tpot.0 / busiest).floor(),
            _ => computing,
        };
        let in_flight = in_flight.clamp(1.0, computing) as u32;
        Self { in_flight, shared_prompt_tokens: SHARED_PROMPT_TOKENS }
    }
}
