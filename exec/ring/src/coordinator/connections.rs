//! The head's connections to the workers of a session, by worker name.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use hearth_schema::Plan;
use hearth_schema::plan::PlannedDevice;
use tokio::sync::mpsc;

use super::worker_connection::{HeadEvent, WorkerConnection};
use crate::error::RingError;
use crate::wire::{DataConnector, DataSink, Message, Transport, WorkerFacts};

/// The control connections of a session.
pub(super) struct WorkerConnections<T: Transport> {
    pub(super) transport: T,
    pub(super) session: u64,
    inbox: mpsc::UnboundedSender<HeadEvent>,
    connections: BTreeMap<String, WorkerConnection>,
    pub(super) facts: BTreeMap<String, WorkerFacts>,
    /// Number of connections opened so far, which is also the number of the last one.
    opened: u64,
}

impl<T: Transport> WorkerConnections<T> {
    pub(super) fn new(transport: T, session: u64, inbox: mpsc::UnboundedSender<HeadEvent>) -> Self {
        let (connections, facts) = (BTreeMap::new(), BTreeMap::new());
        Self { transport, session, inbox, connections, facts, opened: 0 }
    }

    pub(super) async fn open(&mut self, plan: &Plan, device: &PlannedDevice) -> Result<(), RingError> {
        self.opened += 1;
        let numbers = (self.session, self.opened);
        let (connection, facts) =
            WorkerConnection::open(&self.transport, plan, device, numbers, &self.inbox).await?;
        self.facts.insert(device.name.clone(), facts);
        self.connections.insert(device.name.clone(), connection);
        Ok(())
    }

    pub(super) fn get(&self, name: &str) -> Option<&WorkerConnection> {
        self.connections.get(name)
    }

    /// Closes the connection to a worker, so that the worker can serve a head when it is back.
    pub(super) fn remove(&mut self, name: &str) {
        self.connections.remove(name);
    }

    /// Returns the name of the worker of a control connection, by the number of the connection.
    pub(super) fn name_of(&self, connection: u64) -> Option<String> {
        self.connections.iter().find(|(_, open)| open.number() == connection).map(|(name, _)| name.clone())
    }

    /// Returns the connected workers of a plan, with their names.
    pub(super) fn members(&self, plan: &Plan) -> impl Iterator<Item = (&String, &WorkerConnection)> {
        plan.devices.iter().skip(1).filter_map(|device| self.connections.get_key_value(&device.name))
    }

    /// Sends a message to every worker of a plan. Returns their names.
    pub(super) fn broadcast(&self, plan: &Plan, message: &Message) -> BTreeSet<String> {
        self.members(plan).for_each(|(_, worker)| worker.send(message.clone()));
        self.members(plan).map(|(name, _)| name.clone()).collect()
    }

    pub(super) fn local_ips(&self) -> Vec<Option<IpAddr>> {
        self.connections.values().map(|worker| worker.local_ip).collect()
    }

    /// Returns the nanoseconds to add to a worker's times, to convert them to the head's clock.
    pub(super) fn clock_offset(&self, name: &str) -> i64 {
        self.connections.get(name).map_or(0, WorkerConnection::clock_offset)
    }

    pub(super) fn data_sink(&self) -> DataSink {
        let inbox = self.inbox.clone();
        std::sync::Arc::new(move |event| inbox.send(HeadEvent::Data(event)).is_ok())
    }

    pub(super) fn data_connector<'a>(&'a self, epoch: u32, sink: &'a DataSink) -> DataConnector<'a, T> {
        DataConnector { transport: &self.transport, session: self.session, epoch, device_index: 0, sink }
    }

    /// Says goodbye to the workers, which then wait for the next head.
    pub(super) async fn close(&mut self) {
        for worker in self.connections.values_mut() {
            worker.close().await;
        }
    }
}
