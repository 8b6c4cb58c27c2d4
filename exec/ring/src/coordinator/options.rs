//! The options of a ring: deadlines, threads, what to do when a device is lost, and who hears of it.

use std::sync::Arc;
use std::time::Duration;

use hearth_core::Cluster;
use hearth_core::recovery::Replanner;
use hearth_schema::Plan;
use hearth_schema::run_events::RunEvent;

use crate::execution::{Computing, LocalModel};

/// How a ring is run.
#[derive(Clone)]
pub struct RingOptions {
    /// Threads the head computes with; 0 for all cores.
    pub threads: usize,
    /// The longest that one pass may take, without waiting for those before it.
    pub pass_deadline: Duration,
    /// The longest that a worker may say nothing of how far it has come before it is ready.
    pub ready_deadline: Duration,
    /// The model that drafts on the head, for a plan that has one.
    pub draft: Option<Arc<LocalModel>>,
    /// What to do when a device is gone.
    pub renewal: Renewal,
    /// Where the head computes.
    pub computing: Computing,
    /// Hears of a worker that fetches its layers how many bytes of how many are there.
    pub on_fetch: Option<OnFetch>,
    /// Hears what happens to the ring, as it does.
    pub on_happening: Option<OnRunEvent>,
}

/// Hears how far a worker by name has come with fetching: bytes that are there, and bytes to fetch.
pub type OnFetch = Arc<dyn Fn(&str, u64, u64) + Send + Sync>;

/// Hears what has happened to the ring, and by which plan it goes on, if by another.
pub type OnRunEvent = Arc<dyn Fn(&RunEvent, Option<&Plan>) + Send + Sync>;

/// What a worker has until it is ready, or says how far it is.
/// source: assumed, far more than taking up mapped layers needs
const READY_DEADLINE: Duration = Duration::from_mins(1);

impl Default for RingOptions {
    fn default() -> Self {
        let pass_deadline = Duration::from_mins(10);
        Self {
            threads: 0,
            pass_deadline,
            ready_deadline: READY_DEADLINE,
            draft: None,
            renewal: Renewal::default(),
            computing: Computing::default(),
            on_fetch: None,
            on_happening: None,
        }
    }
}

/// What a head does when a device is gone.
#[derive(Clone, Default)]
pub enum Renewal {
    /// It ends the request.
    Never,
    /// The others take its layers, in proportion to their own.
    #[default]
    Spread,
    /// A planner that knows the devices plans again.
    Planner {
        /// All devices that may be there.
        cluster: Arc<Cluster>,
        /// Who plans.
        replanner: Arc<dyn Replanner + Send + Sync>,
    },
}

impl std::fmt::Debug for Renewal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Renewal::Never => "Never",
            Renewal::Spread => "Spread",
            Renewal::Planner { .. } => "Planner",
        })
    }
}
