//! The options of a ring: threads, deadlines, the reaction to a lost device, and callbacks.

use std::sync::Arc;
use std::time::Duration;

use hearth_core::Cluster;
use hearth_core::recovery::Replanner;
use hearth_schema::Plan;
use hearth_schema::run_events::RunEvent;

use crate::execution::{ComputeMode, LocalModel};

/// The head's options for connecting to a ring and running requests.
#[derive(Clone)]
pub struct RingOptions {
    /// Number of compute threads of the head; 0 uses all cores.
    pub threads: usize,
    /// The time limit of one pass, counted from its start or from the end of the previous pass, whichever is later.
    pub pass_timeout: Duration,
    /// The time limit for workers to get ready, which starts again when a worker reports progress.
    pub ready_timeout: Duration,
    /// The draft model, which a plan with speculative decoding needs on the head.
    pub draft_model: Option<Arc<LocalModel>>,
    pub recovery: RecoveryPolicy,
    pub compute_mode: ComputeMode,
    pub on_fetch_progress: Option<OnFetchProgress>,
    pub on_run_event: Option<OnRunEvent>,
}

/// Receives the progress of a worker that fetches layers: its name, the bytes fetched so far, and the bytes to fetch.
pub type OnFetchProgress = Arc<dyn Fn(&str, u64, u64) + Send + Sync>;

/// Receives each run event, and the new plan if the ring continues with another plan.
pub type OnRunEvent = Arc<dyn Fn(&RunEvent, Option<&Plan>) + Send + Sync>;

impl Default for RingOptions {
    fn default() -> Self {
        Self {
            threads: 0,
            pass_timeout: Duration::from_mins(10),
            // source: assumed, far more than loading mapped layers takes
            ready_timeout: Duration::from_mins(1),
            draft_model: None,
            recovery: RecoveryPolicy::default(),
            compute_mode: ComputeMode::default(),
            on_fetch_progress: None,
            on_run_event: None,
        }
    }
}

/// The head's reaction to the loss of a device.
#[derive(Clone, Default)]
pub enum RecoveryPolicy {
    /// The request fails.
    Fail,
    /// The remaining devices take over the layers of the lost device, in proportion to their own layers.
    #[default]
    Spread,
    /// `replanner` makes another plan for the available devices of `cluster`. If `adapts` is true, a ring that serves
    /// also changes its plan if the devices become slower or have less memory than in `cluster`.
    Replan { cluster: Arc<Cluster>, replanner: Arc<dyn Replanner>, adapts: bool },
}
