//! Execution on the head and the workers: computes a device's layers in the order of the schedule.

mod compute_mode;
mod drafter;
mod model;
mod recorder;
mod runner;
mod sampling;
mod verification;

pub use compute_mode::ComputeMode;
pub use drafter::{check_draft_model, plan_with_draft_model};
pub use model::{LocalModel, check_digests, check_executable, worker_info_without_model};
pub use recorder::TraceLines;
pub use runner::{BatchOutput, MAX_BATCHES_PER_DEVICE, Outbox, SequenceTexts, StageRunner};
pub use sampling::{SampleFn, Samplers, SequenceOutput};
pub use verification::{OnVerificationProgress, Verification, check_has_weight_digests};
