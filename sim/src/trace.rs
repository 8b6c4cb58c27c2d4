//! The parts of a trace that all simulations write alike.

use hearth_profiles::device::Device;
use hearth_profiles::{Bytes, Document};
use hearth_schema::trace::{Counter, Header, Kind, Origin, Reading, Record, Resource, Trace, TracedDevice};

use crate::engine::Nanos;
use crate::input::Input;
use crate::page_cache::for_device::unvalidated;

/// The trace of a run so far.
#[derive(Debug, Clone)]
pub struct TraceCollector {
    pub header: Header,
    pub records: Vec<Record>,
    pub readings: Vec<Reading>,
}

/// A record that starts and ends now. The caller sets its end, its cost and its other fields.
pub fn start_record(
    device: usize,
    resource: Resource,
    kind: Kind,
    (pass, round): (u32, u32),
    now: Nanos,
) -> Record {
    Record {
        device: device as u16,
        resource,
        kind,
        pass,
        round,
        layers: None,
        start: now,
        end: now,
        bytes: 0,
        peer: None,
        cost: None,
    }
}

/// The unreclaimable memory of each device of a run that does not fit.
pub fn unreclaimable_readings(unreclaimable: impl Iterator<Item = Bytes>) -> Vec<Reading> {
    let reading = |(device, bytes): (u16, Bytes)| Reading {
        device,
        counter: Counter::Unreclaimable,
        pass: 0,
        at: 0,
        value: bytes.0,
    };
    (0..).zip(unreclaimable).map(reading).collect()
}

pub fn header(input: &Input, devices: &[&Device]) -> Header {
    let names = input.plan.devices.iter().map(|planned| &planned.name);
    Header {
        schema: Trace::SCHEMA.into(),
        origin: Origin::Simulated,
        scenario: input.plan.scenario.name.clone(),
        plan: input.plan.digest(),
        model: input.plan.model.name.clone(),
        kind: input.plan.kind.parallelism(),
        seed: input.cluster.seed,
        version: env!("CARGO_PKG_VERSION").into(),
        devices: names.zip(devices).map(|(name, device)| traced(name, device)).collect(),
    }
}

pub fn traced(name: &str, device: &Device) -> TracedDevice {
    TracedDevice {
        name: name.to_owned(),
        profile: Some(hearth_schema::digest::of(&device.to_yaml())),
        memory_total: device.memory.total.value.0,
        kernel: None,
        unvalidated: unvalidated(device),
        policy: Some(device.memory.page_cache),
    }
}
