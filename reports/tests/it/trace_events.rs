//! A strict checker of the trace event format.
//!
//! "Trace Event Format" (Google, 2016) and what Perfetto's importer counts as an error: an object with `traceEvents`,
//! in it events of known phases with exactly their keys; numbers that are finite and times that are not negative; a
//! name for every process and thread that is used; stretches of one thread apart or one within the other; flows that
//! begin once and end once, later, on a stretch of the same process and thread; counters that grow in time.
//!
//! It is written from the format's description, not from the exporter.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

type Thread = (u64, u64);

/// An end of a flow: when, in nanoseconds, and where.
type End = (u64, Thread);

#[derive(Default)]
struct Seen {
    processes: BTreeSet<u64>,
    threads: BTreeSet<Thread>,
    /// Stretches by thread, in nanoseconds.
    stretches: BTreeMap<Thread, Vec<(u64, u64)>>,
    /// Counters by process and name: when they were read.
    counters: BTreeMap<(u64, String), Vec<u64>>,
    /// Flows by category and number: begins and ends.
    flows: BTreeMap<(String, u64), [Vec<End>; 2]>,
}

/// How many stretches, counters and flows a file has, if it keeps the format.
pub fn check(bytes: &[u8]) -> Result<[usize; 3], String> {
    let file: Value = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    let object = file.as_object().ok_or("the file is no object")?;
    keys(object, &["traceEvents", "displayTimeUnit", "otherData"], &["traceEvents"])?;
    if !matches!(object.get("displayTimeUnit").and_then(Value::as_str), None | Some("ms" | "ns")) {
        return Err("displayTimeUnit is ms or ns".into());
    }
    let events = object["traceEvents"].as_array().ok_or("traceEvents is a list")?;
    let mut seen = Seen::default();
    for (index, event) in events.iter().enumerate() {
        let event = event.as_object().ok_or(format!("event {index} is no object"))?;
        take(&mut seen, event).map_err(|error| format!("event {index}: {error}: {event:?}"))?;
    }
    named(&seen)?;
    nested(&mut seen)?;
    flowing(&seen)?;
    for ((process, name), times) in &seen.counters {
        if times.windows(2).any(|pair| pair[0] > pair[1]) {
            return Err(format!("counter `{name}` of process {process} goes back in time"));
        }
    }
    let stretches = seen.stretches.values().map(Vec::len).sum();
    let counters = seen.counters.values().map(Vec::len).sum();
    Ok([stretches, counters, seen.flows.len()])
}

fn keys(object: &Map<String, Value>, known: &[&str], needed: &[&str]) -> Result<(), String> {
    if let Some(key) = object.keys().find(|key| !known.contains(&key.as_str())) {
        return Err(format!("`{key}` does not belong here"));
    }
    match needed.iter().find(|key| !object.contains_key(**key)) {
        Some(key) => Err(format!("`{key}` is missing")),
        None => Ok(()),
    }
}

/// A time of the format, microseconds, in nanoseconds.
fn nanos(event: &Map<String, Value>, key: &str) -> Result<u64, String> {
    let micros = event[key].as_f64().filter(|time| time.is_finite() && *time >= 0.0);
    Ok((micros.ok_or(format!("`{key}` is no time"))? * 1e3).round() as u64)
}

fn whole(event: &Map<String, Value>, key: &str) -> Result<u64, String> {
    event[key].as_u64().ok_or(format!("`{key}` is no whole number"))
}

fn text<'e>(event: &'e Map<String, Value>, key: &str) -> Result<&'e str, String> {
    event[key].as_str().ok_or(format!("`{key}` is no text"))
}

fn take(seen: &mut Seen, event: &Map<String, Value>) -> Result<(), String> {
    let phase = event.get("ph").and_then(Value::as_str).ok_or("no phase")?;
    let base = ["name", "ph", "pid", "tid"];
    let more: &[&str] = match phase {
        "M" => &["args"],
        "X" => &["cat", "ts", "dur"],
        "C" => &["ts", "args"],
        "s" => &["cat", "ts", "id"],
        "f" => &["cat", "ts", "id", "bp"],
        _ => return Err(format!("phase `{phase}` is not written")),
    };
    let needed = [&base[..], more].concat();
    let known = if phase == "X" { [&needed[..], &["args"]].concat() } else { needed.clone() };
    keys(event, &known, &needed)?;
    let thread = (whole(event, "pid")?, whole(event, "tid")?);
    if thread.0 == 0 {
        return Err("process 0 is the idle one".into());
    }
    if text(event, "name")?.is_empty() {
        return Err("it has no name".into());
    }
    match phase {
        "M" => meta(seen, event, thread)?,
        "X" => {
            let (start, length) = (nanos(event, "ts")?, nanos(event, "dur")?);
            seen.stretches.entry(thread).or_default().push((start, start + length));
        }
        "C" => {
            let args = event["args"].as_object().ok_or("a counter's args are an object")?;
            if args.is_empty() || !args.values().all(Value::is_number) {
                return Err("a counter has numbers".into());
            }
            let name = (thread.0, text(event, "name")?.to_owned());
            seen.counters.entry(name).or_default().push(nanos(event, "ts")?);
        }
        _ => {
            if phase == "f" && text(event, "bp")? != "e" {
                return Err("a flow ends in the stretch around it".into());
            }
            let flow = (text(event, "cat")?.to_owned(), whole(event, "id")?);
            let place = usize::from(phase == "f");
            seen.flows.entry(flow).or_default()[place].push((nanos(event, "ts")?, thread));
        }
    }
    Ok(())
}

fn meta(seen: &mut Seen, event: &Map<String, Value>, thread: Thread) -> Result<(), String> {
    let args = event["args"].as_object().ok_or("args are an object")?;
    match text(event, "name")? {
        "process_name" if args.get("name").is_some_and(Value::is_string) => {
            seen.processes.insert(thread.0).then_some(()).ok_or("a process has two names")?;
        }
        "thread_name" if args.get("name").is_some_and(Value::is_string) => {
            seen.threads.insert(thread).then_some(()).ok_or("a thread has two names")?;
        }
        "process_sort_index" | "thread_sort_index" if args.get("sort_index").is_some_and(Value::is_u64) => {}
        name => return Err(format!("`{name}` is no known metadata")),
    }
    Ok(())
}

fn named(seen: &Seen) -> Result<(), String> {
    let used = seen.stretches.keys().copied();
    let ends = seen.flows.values().flatten().flatten().map(|(_, thread)| *thread);
    for thread in used.chain(ends) {
        if !seen.threads.contains(&thread) || !seen.processes.contains(&thread.0) {
            return Err(format!("process {} or its thread {} has no name", thread.0, thread.1));
        }
    }
    match seen.counters.keys().find(|(process, _)| !seen.processes.contains(process)) {
        Some((process, _)) => Err(format!("process {process} of a counter has no name")),
        None => Ok(()),
    }
}

/// Viewers drop a stretch that overlaps another of its thread without lying in it.
fn nested(seen: &mut Seen) -> Result<(), String> {
    for (thread, stretches) in &mut seen.stretches {
        // Of those that begin together the longest is the outer one.
        stretches.sort_by_key(|&(start, end)| (start, u64::MAX - end));
        let mut open: Vec<u64> = Vec::new();
        for &(start, end) in &*stretches {
            while open.last().is_some_and(|&until| until <= start) {
                open.pop();
            }
            if open.last().is_some_and(|&until| end > until) {
                return Err(format!("thread {thread:?}: {start} to {end} ns overlaps the one before it"));
            }
            open.push(end);
        }
    }
    Ok(())
}

fn flowing(seen: &Seen) -> Result<(), String> {
    let around = |(at, thread): &End| {
        let stretches = seen.stretches.get(thread).map_or(&[][..], Vec::as_slice);
        stretches.iter().any(|&(start, end)| start <= *at && *at <= end)
    };
    for (flow, [begins, ends]) in &seen.flows {
        let ([begin], [end]) = (&begins[..], &ends[..]) else {
            return Err(format!("flow {flow:?} has {} begins and {} ends", begins.len(), ends.len()));
        };
        if end.0 < begin.0 {
            return Err(format!("flow {flow:?} ends before it begins"));
        }
        if !around(begin) || !around(end) {
            return Err(format!("flow {flow:?} has an end on no stretch"));
        }
    }
    Ok(())
}
