//! Who finds a new plan when the ring has changed in mid-run?
//!
//! The head does, through a [`Replanner`] that the command line hands to a runner: neither runner knows a planner. The
//! new plan reaches every device as the payload of an event of its schedule
//! ([`crate::schedule::Event::Replanned`]); keys and values of the old ring are lost, and all tokens so far are computed
//! once more.
//!
//! Not here: how a plan is found (`halda`), and who notices that a device is gone ([`crate::heartbeat`]).

use crate::cluster::Cluster;
use hearth_schema::plan::Plan;

/// Finds plans in mid-run.
pub trait Replanner: std::fmt::Debug {
    /// A plan for the devices that are there now. Its head must be the cluster's: the tokens are there.
    fn replan(&self, there: &Cluster) -> Result<Plan, NoPlan>;
}

/// Why there is no plan.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct NoPlan {
    /// For people, without a full stop.
    pub reason: String,
}
