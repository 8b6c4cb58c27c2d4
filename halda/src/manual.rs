//! How good is a plan somebody has written by hand?
//!
//! Windows, GPU layers, rounds and head are taken as they are, checked like any other plan, and explained.
//! Devices may have no layers, and k W may be less than L: then the last turn is partial.
//!
//! Not here: mending a plan that breaks a constraint. The refusal says which one.

use crate::assignment::Assignment;
use crate::constraints::Rules;
use crate::latency::LatencyModel;
use crate::strategy::{Proposal, Refusal, Strategy};

/// A plan given by hand.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Manual {
    /// The plan.
    pub assignment: Assignment,
}

impl Strategy for Manual {
    fn name(&self) -> &'static str {
        "manual"
    }

    fn rules(&self) -> Rules {
        Rules { may_drop: true, may_leave_remainder: true }
    }

    fn propose(&self, _: &LatencyModel) -> Result<Proposal, Refusal> {
        Ok(Proposal { assignment: self.assignment.clone(), searched: Vec::new() })
    }
}
