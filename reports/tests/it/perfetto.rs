//! Tests that exported timelines conform to the trace event format.

use hearth_reports::Report;
use hearth_reports::exports::perfetto;
use hearth_schema::trace::{Origin, StepKind};
use serde_json::{Value, json};

use crate::{file, sample, trace_events};

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
    let overlay: Value = serde_json::from_str(&overlay).unwrap();
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
    for record in trace.records.iter_mut().filter(|record| record.device_index == 1) {
        // The clock of the desktop was 40 ms behind the offset estimated at the handshake.
        let early = 40_000_000.min(record.start_ns);
        (record.start_ns, record.end_ns) = (record.start_ns - early, record.end_ns - early);
    }
    let [_, _, flows] =
        trace_events::check(&String::from_utf8(perfetto::export_traces(&[(None, &trace)])).unwrap()).unwrap();
    let sent = trace.records.iter().filter(|record| record.kind == StepKind::Send).count();
    assert!(0 < flows && flows < sent, "{flows} of {sent}");
}

#[test]
fn format_checker_finds_errors() {
    type Change = fn(&mut Vec<Value>, usize);
    let good = file(&Report::new(sample::pair(3)).unwrap(), "simulated.perfetto.json");
    let good: Value = serde_json::from_str(&good).unwrap();
    // The expected error, a phase, and a change of the events with the index of the first event of this phase.
    let cases: [(&str, &str, Change); 8] = [
        ("is no time", "X", |events, at| events[at]["dur"] = json!(-1.0)),
        ("`dur` is missing", "X", |events, at| {
            events[at].as_object_mut().unwrap().remove("dur");
        }),
        ("does not belong here", "M", |events, at| events[at]["colour"] = json!("red")),
        ("has no name", "M", |events, _| events.retain(|event| event["name"] != "thread_name")),
        ("overlaps", "X", |events, at| {
            let mut twin = events[at].clone();
            twin["ts"] = json!(twin["ts"].as_f64().unwrap() + twin["dur"].as_f64().unwrap() / 2.0);
            events.push(twin);
        }),
        ("0 ends", "f", |events, at| drop(events.remove(at))),
        ("ends before it begins", "s", |events, at| events[at]["ts"] = json!(1e9)),
        ("back in time", "C", |events, at| events[at]["ts"] = json!(1e9)),
    ];
    for (expected, phase, change) in cases {
        let mut file = good.clone();
        let events = file["traceEvents"].as_array_mut().unwrap();
        let first = events.iter().position(|event| event["ph"] == phase).unwrap();
        change(events, first);
        let error = trace_events::check(&file.to_string()).unwrap_err();
        assert!(error.contains(expected), "{expected}: {error}");
    }
}
