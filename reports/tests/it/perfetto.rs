//! Tests that exported timelines conform to the trace event format.

use hearth_reports::Report;
use hearth_reports::exports::perfetto;
use hearth_schema::trace::{Kind, Origin};
use serde_json::{Value, json};

use crate::{sample, trace_events};

fn file(report: &Report, name: &str) -> Vec<u8> {
    crate::file(report, name).into_bytes()
}

#[test]
fn overlay_has_the_events_of_both_traces() {
    let report = Report::new(sample::pair(6)).unwrap();
    let [one, other] = ["simulated.perfetto.json", "measured.perfetto.json"].map(|name| file(&report, name));
    let (one, other) = (trace_events::check(&one).unwrap(), trace_events::check(&other).unwrap());
    let overlay = file(&report, "simulated-measured.perfetto.json");
    let both = trace_events::check(&overlay).unwrap();
    // The overlay has the events of both traces and no others.
    assert_eq!(both, std::array::from_fn(|index| one[index] + other[index]));
    // 6 passes * 2 rounds * 3 hops = 36 messages.
    assert_eq!((one[2], other[2]), (36, 36));
    let overlay: Value = serde_json::from_slice(&overlay).unwrap();
    let events = overlay["traceEvents"].as_array().unwrap();
    let named = |name: &'static str| events.iter().filter(move |event| event["name"] == name);
    let processes: Vec<&str> =
        named("process_name").map(|event| event["args"]["name"].as_str().unwrap()).collect();
    assert_eq!((processes.len(), processes[0], processes[5]), (6, "simulated laptop", "measured phone"));
    assert!(events.iter().any(|event| event["ph"] == "C"), "counters");
    // The first step of the simulated laptop takes 30 microseconds.
    let embed = named("embed").next().unwrap();
    assert_eq!((embed["ts"].as_f64(), embed["dur"].as_f64()), (Some(0.0), Some(30.0)));
}

#[test]
fn clock_offset_causes_no_arrow_back_in_time() {
    let mut trace = sample::trace(Origin::Measured, 4);
    for record in trace.records.iter_mut().filter(|record| record.device == 1) {
        // The clock of the desktop was 40 ms behind the offset estimated at the handshake.
        let early = 40_000_000.min(record.start);
        (record.start, record.end) = (record.start - early, record.end - early);
    }
    let [_, _, flows] = trace_events::check(&perfetto::export(&trace)).unwrap();
    let sent = trace.records.iter().filter(|record| record.kind == Kind::Send).count();
    assert!(0 < flows && flows < sent, "{flows} of {sent}");
}

/// A change of the events of a file that makes the file invalid.
type Change<'c> = &'c dyn Fn(&mut Vec<Value>);

#[test]
fn format_checker_finds_errors() {
    let good = file(&Report::new(sample::pair(3)).unwrap(), "simulated.perfetto.json");
    let good: Value = serde_json::from_slice(&good).unwrap();
    let broken = |change: &dyn Fn(&mut Vec<Value>)| {
        let mut file = good.clone();
        change(file["traceEvents"].as_array_mut().unwrap());
        trace_events::check(&serde_json::to_vec(&file).unwrap()).unwrap_err()
    };
    let first = |events: &[Value], phase: &str| events.iter().position(|event| event["ph"] == phase).unwrap();
    let cases: [(&str, Change<'_>); 8] = [
        ("is no time", &|events| {
            let at = first(events, "X");
            events[at]["dur"] = json!(-1.0);
        }),
        ("`dur` is missing", &|events| {
            let at = first(events, "X");
            events[at].as_object_mut().unwrap().remove("dur");
        }),
        ("does not belong here", &|events| events[0]["colour"] = json!("red")),
        ("has no name", &|events| events.retain(|event| event["name"] != "thread_name")),
        ("overlaps", &|events| {
            let at = first(events, "X");
            let mut twin = events[at].clone();
            twin["ts"] = json!(twin["ts"].as_f64().unwrap() + twin["dur"].as_f64().unwrap() / 2.0);
            events.push(twin);
        }),
        ("0 ends", &|events| {
            let at = first(events, "f");
            events.remove(at);
        }),
        ("ends before it begins", &|events| {
            let at = first(events, "s");
            events[at]["ts"] = json!(1e9);
        }),
        ("back in time", &|events| {
            let at = first(events, "C");
            events[at]["ts"] = json!(1e9);
        }),
    ];
    for (expected, change) in cases {
        let error = broken(change);
        assert!(error.contains(expected), "{expected}: {error}");
    }
}
