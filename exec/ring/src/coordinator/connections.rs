//! The head's connections to the workers of a session, by worker name.

use std::collections::{BTreeMap, BTreeSet};

use hearth_schema::Plan;
use hearth_schema::plan::PlannedDevice;
use tokio::sync::mpsc;

use super::worker_connection::{HeadEvent, WorkerConnection};
use crate::error::Result;
use crate::wire::{DataLinkEventSink, Message, Transport, WorkerInfo};

/// The head's connections to the workers of a session, and the information that each worker sent about itself.
pub(super) struct WorkerConnections<T: Transport> {
    pub(super) transport: T,
    pub(super) session: u64,
    inbox: mpsc::UnboundedSender<HeadEvent>,
    /// The control connections, by worker name.
    pub(super) workers: BTreeMap<String, WorkerConnection>,
    pub(super) worker_info: BTreeMap<String, WorkerInfo>,
    /// Number of connections that have been opened, which is also the number of the last connection.
    opened: u64,
}

impl<T: Transport> WorkerConnections<T> {
    pub(super) fn new(transport: T, session: u64, inbox: mpsc::UnboundedSender<HeadEvent>) -> Self {
        let (workers, worker_info) = (BTreeMap::new(), BTreeMap::new());
        Self { transport, session, inbox, workers, worker_info, opened: 0 }
    }

    pub(super) async fn open(&mut self, plan: &Plan, device: &PlannedDevice) -> Result<()> {
        self.opened += 1;
        let numbers = (self.session, self.opened);
        let (connection, info) =
            WorkerConnection::open(&self.transport, plan, device, numbers, &self.inbox).await?;
        self.worker_info.insert(device.name.clone(), info);
        self.workers.insert(device.name.clone(), connection);
        Ok(())
    }

    /// Returns the name of the worker at the other end of the control connection with this number.
    pub(super) fn name_of(&self, connection: u64) -> Option<String> {
        self.workers.iter().find(|(_, open)| open.connection_id == connection).map(|(name, _)| name.clone())
    }

    /// Returns the connected workers of a plan, with their names.
    pub(super) fn workers_in(&self, plan: &Plan) -> impl Iterator<Item = (&String, &WorkerConnection)> {
        plan.devices.iter().skip(1).filter_map(|device| self.workers.get_key_value(&device.name))
    }

    /// Sends a message to every connected worker of a plan. Returns the names of these workers.
    pub(super) fn broadcast(&self, plan: &Plan, message: &Message) -> BTreeSet<String> {
        self.workers_in(plan).for_each(|(_, worker)| worker.send(message.clone()));
        self.workers_in(plan).map(|(name, _)| name.clone()).collect()
    }

    pub(super) fn data_sink(&self) -> DataLinkEventSink {
        let inbox = self.inbox.clone();
        std::sync::Arc::new(move |event| inbox.send(HeadEvent::Data(event)).is_ok())
    }
}
