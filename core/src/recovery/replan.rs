//! Planning during a run: the interface through which a runner asks a planner for another plan.
//!
//! The command line gives a [`Replanner`] to a runner, because simulator and executor do not depend on a planner.
//! Each device receives the new plan in an event of its schedule ([`crate::schedule::Event::Replanned`]). The keys
//! and values of the old ring are lost, and all tokens so far are computed again.
//!
//! Not here: how a plan is found (`halda`), and when the ring is planned again ([`super::Recovery`]).

use crate::cluster::Cluster;
use hearth_schema::plan::Plan;

/// A planner that can be called during a run.
pub trait Replanner: std::fmt::Debug {
    /// Returns a plan for the devices of this cluster. The plan must have the head of the cluster, which stores the
    /// generated tokens.
    fn replan(&self, available: &Cluster) -> Result<Plan, NoPlan>;
}

/// The reason why there is no plan.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct NoPlan {
    /// Text for users, without a full stop at the end.
    pub reason: String,
}
