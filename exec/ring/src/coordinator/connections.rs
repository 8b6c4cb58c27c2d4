//! The head's connections to the workers of a session, by the workers' names.

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
    /// The facts that each device reached so far sent about itself.
    facts: BTreeMap<String, WorkerFacts>,
    /// Connections opened so far; each has its number.
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

    /// Opens the control connection to a device, in place of an earlier one.
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

    /// Closes the connection to a worker, so that it is free for others when it wakes up.
    pub(super) fn remove(&mut self, name: &str) {
        self.connections.remove(name);
    }

    /// Returns the worker that a control connection by number leads to.
    pub(super) fn name_of(&self, connection: u64) -> Option<String> {
        self.connections.values().find(|open| open.number == connection).map(|open| open.name().to_owned())
    }

    /// The connections to the workers of a plan.
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

    /// This machine's address on each worker's side.
    pub(super) fn local_ips(&self) -> Vec<Option<IpAddr>> {
        self.connections.values().map(|worker| worker.local_ip).collect()
    }

    /// The description that a device sent of itself, if it was ever reached.
    pub(super) fn facts(&self, name: &str) -> WorkerFacts {
        self.facts.get(name).cloned().unwrap_or_default()
    }

    pub(super) fn set_facts(&mut self, name: &str, facts: WorkerFacts) {
        self.facts.insert(name.into(), facts);
    }

    /// The offset of a worker's clock, in nanoseconds: added to its times.
    pub(super) fn clock_offset(&self, name: &str) -> i64 {
        self.connections.get(name).map_or(0, WorkerConnection::clock_offset)
    }

    /// A sink that turns what data connections bring into events of the head.
    pub(super) fn data_sink(&self) -> DataSink {
        let inbox = self.inbox.clone();
        std::sync::Arc::new(move |event| inbox.send(HeadEvent::Data(event)).is_ok())
    }

    /// Connects the head to those that it sends activations to.
    pub(super) fn data_connector<'a>(&'a self, epoch: u32, sink: &'a DataSink) -> DataConnector<'a, T> {
        DataConnector { transport: &self.transport, session: self.session, epoch, place: 0, sink }
    }

    /// Ends the session in order; the workers then wait for the next head.
    pub(super) async fn close(&mut self) {
        for worker in self.connections.values_mut() {
            worker.close().await;
        }
    }
}
