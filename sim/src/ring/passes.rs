//! Pass control: which pass enters the ring next, and how many of its drafts are accepted.

use hearth_core::Cluster;
use hearth_core::schedule::{Generation, GenerationError};
use hearth_schema::pass::Pass;

use crate::speculation::Acceptance;

/// The passes of a run: those started, and the state that determines the next.
#[derive(Debug, Clone)]
pub struct PassControl {
    pub generation: Generation,
    acceptance: Acceptance,
    started: Vec<Pass>,
}

/// The result of a pass.
#[derive(Debug, Clone, Copy)]
pub struct PassOutput {
    /// Number of tokens generated, one or more for each output position.
    pub tokens: u32,
    pub accepted_drafts: u32,
    pub drafted_tokens: u32,
}

impl PassControl {
    pub fn new(cluster: &Cluster) -> Self {
        Self {
            generation: Generation::new(&cluster.workload),
            acceptance: Acceptance::new(cluster.seed, &cluster.workload),
            started: Vec::new(),
        }
    }

    /// Starts the next pass and returns it; `None` if no pass may enter the ring now.
    pub fn start(&mut self) -> Option<Pass> {
        let pass = self.generation.begin_pass()?;
        self.started.push(pass);
        Some(pass)
    }

    /// Ends a pass whose output is computed.
    pub fn finish(&mut self, pass: u32) -> Result<PassOutput, GenerationError> {
        let (accepted_drafts, drafted_tokens) = match self.started.get(pass as usize) {
            Some(&started) => (self.acceptance.accepted_drafts(started), started.drafted),
            None => (0, 0),
        };
        let tokens = self.generation.complete_pass(pass, accepted_drafts)?;
        Ok(PassOutput { tokens, accepted_drafts, drafted_tokens })
    }

    /// Returns the passes that were started, in order.
    pub fn into_started(self) -> Vec<Pass> {
        self.started
    }
}
