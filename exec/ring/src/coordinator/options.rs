//! The options of a ring: threads, deadlines, what to do when a device is lost, and callbacks.

use std::sync::Arc;
use std::time::Duration;

use hearth_core::Cluster;
use hearth_core::recovery::Replanner;
use hearth_schema::Plan;
use hearth_schema::run_events::RunEvent;

use crate::execution::{ComputeMode, LocalModel};

/// The default of [`RingOptions::ready_deadline`].
/// source: assumed, far more than taking up mapped layers needs
const READY_DEADLINE: Duration = Duration::from_mins(1);

/// How a ring is run.
#[derive(Clone)]
pub struct RingOptions {
    /// Threads the head computes with; 0 for all cores.
    pub threads: usize,
    /// The time limit of one pass, without waiting for those before it.
    pub pass_deadline: Duration,
    /// The longest time without a sign of progress from a worker that is not ready.
    pub ready_deadline: Duration,
    /// The model that drafts on the head, for a plan that has one.
    pub draft: Option<Arc<LocalModel>>,
    pub recovery: RecoveryPolicy,
    pub compute_mode: ComputeMode,
    pub on_fetch: Option<OnFetch>,
    pub on_run_event: Option<OnRunEvent>,
}

/// Receives the progress of a worker's fetch, by name: bytes already present, and bytes to fetch.
pub type OnFetch = Arc<dyn Fn(&str, u64, u64) + Send + Sync>;

/// Receives what has happened to the ring, and the plan by which it continues, if that is another.
pub type OnRunEvent = Arc<dyn Fn(&RunEvent, Option<&Plan>) + Send + Sync>;

impl Default for RingOptions {
    fn default() -> Self {
        Self {
            threads: 0,
            pass_deadline: Duration::from_mins(10),
            ready_deadline: READY_DEADLINE,
            draft: None,
            recovery: RecoveryPolicy::default(),
            compute_mode: ComputeMode::default(),
            on_fetch: None,
            on_run_event: None,
        }
    }
}

/// The head's reaction to the loss of a device.
#[derive(Clone, Default)]
pub enum RecoveryPolicy {
    /// The request fails.
    Never,
    /// The others take its layers, in proportion to their own.
    #[default]
    Spread,
    /// A planner that knows all devices that may be there plans again.
    Replan { cluster: Arc<Cluster>, replanner: Arc<dyn Replanner + Send + Sync> },
}

impl std::fmt::Debug for RecoveryPolicy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            RecoveryPolicy::Never => "Never",
            RecoveryPolicy::Spread => "Spread",
            RecoveryPolicy::Replan { .. } => "Replan",
        })
    }
}
