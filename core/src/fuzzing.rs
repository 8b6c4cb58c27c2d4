//! Entries of the fuzz targets: documents and traces.
//!
//! An entry gets arbitrary bytes. It calls the parser, and panics if the result violates a property. The fuzz targets
//! (`fuzz/`) and the tests below call the entries; no program contains them.

use hearth_profiles::model::ModelDocument;
use hearth_profiles::{Bytes, DeviceProfile, Document};
use hearth_schema::pass::Pass;
use hearth_schema::{Plan, Scenario, Trace};

use crate::cluster::Connection;
use crate::schedule::{Event, Schedule};
use crate::{LinkTable, metrics};

/// Returns the maximum memory of an entry for an input of this length, in bytes. source: assumed; a node of a parsed
/// document or a step of a trace takes a few hundred bytes, and a layer of a model or a plan too
pub fn allowed_memory(input_bytes: usize) -> usize {
    (8 << 20) + 500 * input_bytes
}

/// Parses a device, model, scenario or plan document.
///
/// - A valid document that is written and parsed again is the same document.
/// - A model has a profile with all its layers.
/// - The links of a scenario have finite times.
/// - A plan has a schedule.
pub fn document(input: &[u8]) {
    let Ok(text) = str::from_utf8(input) else { return };
    round_trip::<DeviceProfile>(text);
    if let Some(model) = round_trip::<ModelDocument>(text) {
        let profile = model.to_profile().expect("a valid model has a profile");
        assert_eq!(profile.layers.len(), model.layers.0 as usize);
    }
    if let Some(scenario) = round_trip::<Scenario>(text) {
        check_scenario(&scenario);
    }
    if let Some(plan) = round_trip::<Plan>(text) {
        let mut head = Schedule::new(plan.into(), 0);
        let _ = head.react(&Event::Begin(Pass::new(0, 0, 1, true).into()));
    }
}

fn round_trip<D: Document>(text: &str) -> Option<D> {
    let document = D::from_yaml(text).ok()?;
    let _ = D::deprecations(text);
    let written = document.to_yaml();
    let again = D::from_yaml(&written).expect("what was written is valid");
    assert_eq!(again.to_yaml(), written);
    Some(document)
}

fn check_scenario(scenario: &Scenario) {
    assert!(scenario.head_index() < scenario.devices.len());
    let table = LinkTable::new(scenario.links.clone());
    let names = || scenario.devices.iter().map(|device| device.name.as_str()).take(4);
    for (from, to) in names().flat_map(|from| names().map(move |to| (from, to))) {
        if let Some(Connection::Wireless(path)) = table.connection(from, to) {
            let time = path.expected_link().message_time(Bytes(1 << 20));
            let mean = path.mean_message_time(Bytes(1 << 20), true);
            assert!(mean.0.is_finite() && mean >= path.min_message_time() && time.0.is_finite(), "{path:?}");
        }
    }
}

/// Reads a trace and computes its metrics. A trace that is written and read again is the same trace.
pub fn trace(input: &[u8]) {
    let Ok(trace) = Trace::read(&mut &*input) else { return };
    let mut written = Vec::new();
    trace.write(&mut written).expect("memory accepts all bytes");
    assert_eq!(Trace::read(&mut written.as_slice()).expect("what was written is valid"), trace);
    let _ = metrics::compute_metrics(&trace);
}

#[cfg(test)]
#[path = "../../fuzz/replay.rs"]
mod replay;

#[test]
fn seeds_are_valid() {
    Scenario::from_yaml(include_str!("../../fuzz/corpus/document/scenario")).expect("a valid scenario");
    Plan::from_yaml(include_str!("../../fuzz/corpus/document/plan")).expect("a valid plan");
    Plan::from_yaml(include_str!("../../fuzz/corpus/document/tensor")).expect("a valid plan");
    let trace = include_bytes!("../../fuzz/corpus/trace/all-lines");
    Trace::read(&mut trace.as_slice()).expect("a valid trace");
}

#[test]
fn document_corpus() {
    replay::replay("document", allowed_memory, document);
}

#[test]
fn trace_corpus() {
    replay::replay("trace", allowed_memory, trace);
}
