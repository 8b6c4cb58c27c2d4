//! The head's handle of a ring: connects it, runs requests or serves them, and closes it.

use std::sync::Arc;

use hearth_schema::Plan;
use tokio::sync::mpsc;

use super::control::HeadEvent;
use super::generation::{Generated, Unfinished};
use super::options::RingOptions;
use super::reconfiguration::Lead;
use super::request::Request;
use super::scheduler::{Guest, Service};
use crate::error::RingError;
use crate::execution::{Computing, LocalModel};
use crate::wire::Network;
use hearth_runtime::clock::wall_nanos;

/// Ends the request under way of a ring.
#[derive(Debug, Clone)]
pub struct Stopper(mpsc::UnboundedSender<HeadEvent>);

impl Stopper {
    /// For a ring that is going to be connected.
    pub fn stop(&self) {
        let _ = self.0.send(HeadEvent::Stop);
    }
}

/// A ring with all its workers ready.
pub struct Ring<N: Network> {
    /// Away while a request runs.
    lead: Option<Box<Lead<N>>>,
    plan: Plan,
    computing: Computing,
    stopper: Stopper,
}

impl<N: Network> Ring<N> {
    /// Brings the ring of a plan up.
    pub async fn connect(
        network: &N,
        plan: Plan,
        model: Arc<LocalModel>,
        options: RingOptions,
    ) -> Result<Ring<N>, RingError> {
        let (inbox, events) = mpsc::unbounded_channel();
        let (computing, stopper) = (options.computing, Stopper(inbox.clone()));
        let session = session_id(&plan);
        let connecting =
            Lead::connect(network.clone(), plan.clone(), model, options, (inbox, events), session);
        // Making a large cache takes seconds, in which heartbeats must go on.
        let lead = computing.run(connecting).await??;
        Ok(Ring { lead: Some(Box::new(lead)), plan, computing, stopper })
    }

    /// Runs a request. `on_token` sees each token as it comes, after the number of its sequence, from another thread.
    pub async fn generate(
        &mut self,
        request: Request,
        on_token: impl FnMut(u32, u32) + Send + 'static,
    ) -> Result<Generated, Unfinished> {
        let lead = self.lead.take();
        let mut lead =
            lead.ok_or_else(|| RingError::Plan("a request that was given up is under way".into()))?;
        let running = async move {
            let ended = lead.request(request, on_token).await;
            (lead, ended)
        };
        let (lead, ended) = self.computing.run(running).await?;
        self.lead = Some(lead);
        ended
    }

    /// Answers guests as they come, until nobody can come any more or the ring fails; whoever is under way is told then.
    /// `guests` comes back, for another ring.
    pub async fn serve(
        &mut self,
        service: Service,
        mut guests: mpsc::UnboundedReceiver<Guest>,
    ) -> (mpsc::UnboundedReceiver<Guest>, Result<(), RingError>) {
        let Some(mut lead) = self.lead.take() else {
            let error = RingError::Plan("a request that was given up is under way".into());
            return (guests, Err(error));
        };
        let serving = async move {
            let ended = lead.serve(service, &mut guests).await;
            (lead, guests, ended)
        };
        match self.computing.run(serving).await {
            Ok((lead, guests, ended)) => {
                self.lead = Some(lead);
                (guests, ended)
            }
            // The thread that served is gone, and with it whoever waited.
            Err(error) => (mpsc::unbounded_channel().1, Err(error)),
        }
    }

    /// What ends a request under way.
    pub fn stopper(&self) -> Stopper {
        self.stopper.clone()
    }

    /// Ends the session in order; the workers then wait for the next head.
    pub async fn close(mut self) {
        if let Some(lead) = &mut self.lead {
            lead.close().await;
        }
    }

    /// The plan that it was brought up with.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }
}

impl<N: Network> Drop for Ring<N> {
    fn drop(&mut self) {
        // A request may still be waiting on its own thread.
        self.stopper.stop();
    }
}

/// Names a session: workers use it only to tell data connections of one head from those of another.
fn session_id(plan: &Plan) -> u64 {
    let digest = plan.digest();
    let bytes = digest.bytes().chain(wall_nanos().to_le_bytes()).chain(std::process::id().to_le_bytes());
    // FNV-1a, 64 bits.
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}
