//! The head's handle to a ring: connects the devices, runs or serves requests, and closes the session.

use std::sync::Arc;

use hearth_schema::Plan;
use tokio::sync::mpsc;

use super::coordinator::Coordinator;
use super::generation::{FailedRequest, GenerationResult, generate};
use super::options::RingOptions;
use super::request::GenerationRequest;
use super::scheduler::{Request, ServeOptions, serve};
use super::worker_connection::HeadEvent;
use crate::error::{Result, RingError};
use crate::execution::{ComputeMode, LocalModel};
use crate::wire::Transport;

/// Cancels the active request of a ring.
#[derive(Debug, Clone)]
pub struct CancelHandle(mpsc::UnboundedSender<HeadEvent>);

impl CancelHandle {
    pub fn cancel(&self) {
        let _ = self.0.send(HeadEvent::Cancel);
    }
}

/// The head's handle to a connected ring, which runs or serves requests.
pub struct Ring<T: Transport> {
    /// `None` while a request is running.
    coordinator: Option<Box<Coordinator<T>>>,
    plan: Plan,
    compute_mode: ComputeMode,
    cancel_handle: CancelHandle,
}

impl<T: Transport> Ring<T> {
    /// Connects to the workers of a plan and waits until all devices are ready.
    pub async fn connect(
        transport: &T,
        plan: Plan,
        model: Arc<LocalModel>,
        options: RingOptions,
    ) -> Result<Ring<T>> {
        let (inbox, events) = mpsc::unbounded_channel();
        let (compute_mode, cancel_handle) = (options.compute_mode, CancelHandle(inbox.clone()));
        let connecting =
            Coordinator::connect(transport.clone(), plan.clone(), model, options, (inbox, events));
        // Allocating a large cache takes seconds, during which heartbeats must continue.
        let coordinator = compute_mode.run(connecting).await??;
        Ok(Ring { coordinator: Some(Box::new(coordinator)), plan, compute_mode, cancel_handle })
    }

    /// Runs a request. When a token is generated, `on_token` receives the index of its sequence and the token.
    pub async fn generate(
        &mut self,
        request: GenerationRequest,
        on_token: impl FnMut(u32, u32) + Send + 'static,
    ) -> Result<GenerationResult, FailedRequest> {
        let mut coordinator = self.take_coordinator()?;
        let running = async move {
            let ended = generate(&mut coordinator, request, on_token).await;
            (coordinator, ended)
        };
        let (coordinator, ended) = self.compute_mode.run(running).await?;
        self.coordinator = Some(coordinator);
        ended
    }

    /// Serves requests until the channel closes or the ring fails; a failure is reported to all active requests.
    /// Returns `request_rx`, so that another ring can use it.
    pub async fn serve(
        &mut self,
        options: ServeOptions,
        mut request_rx: mpsc::UnboundedReceiver<Request>,
    ) -> (mpsc::UnboundedReceiver<Request>, Result<()>) {
        let mut coordinator = match self.take_coordinator() {
            Ok(coordinator) => coordinator,
            Err(error) => return (request_rx, Err(error)),
        };
        let serving = async move {
            let ended = serve(&mut coordinator, options, &mut request_rx).await;
            (coordinator, request_rx, ended)
        };
        match self.compute_mode.run(serving).await {
            Ok((coordinator, request_rx, ended)) => {
                self.coordinator = Some(coordinator);
                (request_rx, ended)
            }
            // The serving thread panicked, so its requests are lost.
            Err(error) => (mpsc::unbounded_channel().1, Err(error)),
        }
    }

    fn take_coordinator(&mut self) -> Result<Box<Coordinator<T>>> {
        self.coordinator
            .take()
            .ok_or_else(|| RingError::invalid_plan("the previous request of this ring is still running"))
    }

    pub fn cancel_handle(&self) -> CancelHandle {
        self.cancel_handle.clone()
    }

    /// Ends the session with a goodbye message to the workers, which then wait for the next head.
    pub async fn close(mut self) {
        if let Some(coordinator) = &mut self.coordinator {
            for worker in coordinator.connections.workers.values_mut() {
                worker.close().await;
            }
        }
    }

    /// Returns the plan with which the ring was connected.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }
}

impl<T: Transport> Drop for Ring<T> {
    fn drop(&mut self) {
        // A request may still be waiting on its own thread.
        self.cancel_handle.cancel();
    }
}
