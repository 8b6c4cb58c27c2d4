//! The head's connections to the workers of a session, by worker name.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use hearth_schema::Plan;
use hearth_schema::plan::PlannedDevice;
use tokio::sync::mpsc;

use super::worker_connection::{HeadEvent, WorkerConnection};
use crate::error::RingError;
use crate::wire::{DataConnector, DataSink, Frame, Message, Transport, WorkerFacts};

/// The control connections of a session.
pub(super) struct WorkerConnections<T: Transport> {
    transport: T,
    session: u64,
    inbox: mpsc::UnboundedSender<HeadEvent>,
    connections: BTreeMap<String, WorkerConnection>,
    /// The facts that each device has sent about itself, by name.
    facts: BTreeMap<String, WorkerFacts>,
    /// Number of connections opened so far, which is also the number of the last one.
    opened: u64,
}

impl<T: Transport> WorkerConnections<T> {
    pub(super) fn new(transport: T, session: u64, inbox: mpsc::UnboundedSender<HeadEvent>) -> Self {
        let (connections, facts) = (BTreeMap::new(), BTreeMap::new());
        Self { transport, session, inbox, connections, facts, opened: 0 }
    }

    pub(super) fn session(&self) -> u64 {
        self.session
    }

    pub(super) fn transport(&self) -> &T {
        &self.transport
    }

    /// Opens the control connection to a device, and replaces an earlier one.
    pub(super) async fn open(&mut self, plan: &Plan, device: &PlannedDevice) -> Result<(), RingError> {
        self.opened += 1;
        let numbers = (self.session, self.opened);
        let connection = WorkerConnection::open(&self.transport, plan, device, numbers, &self.inbox).await?;
        self.facts.insert(device.name.clone(), connection.facts.clone());
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
        self.connections.values().find(|open| open.number == connection).map(|open| open.name().to_owned())
    }

    /// Returns the connections to the workers of a plan.
    pub(super) fn members<'a>(&'a self, plan: &'a Plan) -> impl Iterator<Item = &'a WorkerConnection> {
        plan.devices.iter().skip(1).filter_map(|device| self.connections.get(&device.name))
    }

    /// Sends a message to every worker of a plan. Returns their names.
    pub(super) fn broadcast(&self, plan: &Plan, message: &Message) -> BTreeSet<String> {
        let send = |worker: &WorkerConnection| {
            worker.send(Frame::from(message.clone()));
            worker.name().to_owned()
        };
        self.members(plan).map(send).collect()
    }

    /// Returns this machine's own address on the connection to each worker.
    pub(super) fn local_ips(&self) -> Vec<Option<IpAddr>> {
        self.connections.values().map(|worker| worker.local_ip).collect()
    }

    /// Returns the facts that a device has sent about itself, or empty facts if it was never reached.
    pub(super) fn facts(&self, name: &str) -> WorkerFacts {
        self.facts.get(name).cloned().unwrap_or_default()
    }

    pub(super) fn set_facts(&mut self, name: &str, facts: WorkerFacts) {
        self.facts.insert(name.into(), facts);
    }

    /// Returns the nanoseconds to add to a worker's times, to convert them to the head's clock.
    pub(super) fn clock_offset(&self, name: &str) -> i64 {
        self.connections.get(name).map_or(0, WorkerConnection::clock_offset)
    }

    /// Creates a sink that forwards events of data connections to the head's inbox.
    pub(super) fn data_sink(&self) -> DataSink {
        let inbox = self.inbox.clone();
        std::sync::Arc::new(move |event| inbox.send(HeadEvent::Data(event)).is_ok())
    }

    /// Creates the connector for the data connections from the head to its neighbours.
    pub(super) fn data_connector<'a>(&'a self, epoch: u32, sink: &'a DataSink) -> DataConnector<'a, T> {
        DataConnector { transport: &self.transport, session: self.session, epoch, place: 0, sink }
    }

    /// Says goodbye to the workers, which then wait for the next head.
    pub(super) async fn close(&mut self) {
        for worker in self.connections.values_mut() {
            worker.close().await;
        }
    }
}
