//! Planning in mid-run: the interface through which a runner asks a planner for another plan.
//!
//! The command line hands a [`Replanner`] to a runner, because neither runner knows a planner. The new plan reaches
//! every device as the payload of an event of its schedule ([`crate::schedule::Event::Replanned`]). The keys and values
//! of the old ring are lost, and all tokens so far are computed again.
//!
//! Not here: how a plan is found (`halda`), and when the ring is planned again ([`super::Recovery`]).

use crate::cluster::Cluster;
use hearth_schema::plan::Plan;

/// A planner that finds plans in mid-run.
pub trait Replanner: std::fmt::Debug {
    /// Returns a plan for the devices of this cluster, with the cluster's head, which holds the tokens.
    fn replan(&self, there: &Cluster) -> Result<Plan, NoPlan>;
}

/// The reason why there is no plan.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct NoPlan {
    /// For people, without a full stop.
    pub reason: String,
}
