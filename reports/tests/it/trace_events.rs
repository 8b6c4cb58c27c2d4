//! A strict checker of files in the trace event format.
//!
//! The rules are those of "Trace Event Format" (Google, 2016) and the errors of Perfetto's importer. The file is an
//! object with `traceEvents`. Events have known phases and exactly the keys of their phase. Numbers are finite and
//! times are not negative. All processes and threads have names. Slices of one thread do not overlap unless they are
//! nested. Flows begin once and end once, later, on a slice of their process and thread. Readings of a counter are in
//! order of time.
//!
//! The checker is written from the description of the format, independently of the exporter.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

/// Process id and thread id.
type Thread = (u64, u64);

/// The start or the end of a flow: the time in nanoseconds, and the thread.
type FlowEnd = (u64, Thread);

/// What the checks need from a trace event file.
#[derive(Default)]
struct Contents {
    /// Ids of the processes that have a name.
    processes: BTreeSet<u64>,
    /// Threads that have a name.
    threads: BTreeSet<Thread>,
    /// Start and end of the slices of each thread, in nanoseconds.
    slices: BTreeMap<Thread, Vec<(u64, u64)>>,
    /// Times of the readings of each counter in nanoseconds, by process id and name of the counter.
    counters: BTreeMap<(u64, String), Vec<u64>>,
    /// The starts and the ends of the flows, by category and id of the flow.
    flows: BTreeMap<(String, u64), [Vec<FlowEnd>; 2]>,
}

/// Returns the numbers of slices, counter readings and flows in a file; an error if the file violates the format.
pub fn check(text: &str) -> Result<[usize; 3], String> {
    let file: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
    let object = file.as_object().ok_or("the file is no object")?;
    check_keys(object, &["traceEvents", "displayTimeUnit", "otherData"], &["traceEvents"])?;
    if !matches!(object.get("displayTimeUnit").and_then(Value::as_str), None | Some("ms" | "ns")) {
        return Err("displayTimeUnit is ms or ns".into());
    }
    let events = object["traceEvents"].as_array().ok_or("traceEvents is a list")?;
    let mut contents = Contents::default();
    for (index, event) in events.iter().enumerate() {
        let event = event.as_object().ok_or(format!("event {index} is no object"))?;
        read_event(&mut contents, event).map_err(|error| format!("event {index}: {error}: {event:?}"))?;
    }
    check_names(&contents)?;
    check_nesting(&mut contents)?;
    check_flows(&contents)?;
    for ((process, name), times) in &contents.counters {
        if times.windows(2).any(|pair| pair[0] > pair[1]) {
            return Err(format!("counter `{name}` of process {process} goes back in time"));
        }
    }
    let slices = contents.slices.values().map(Vec::len).sum();
    let counters = contents.counters.values().map(Vec::len).sum();
    Ok([slices, counters, contents.flows.len()])
}

fn check_keys(object: &Map<String, Value>, known: &[&str], needed: &[&str]) -> Result<(), String> {
    if let Some(key) = object.keys().find(|key| !known.contains(&key.as_str())) {
        return Err(format!("`{key}` does not belong here"));
    }
    match needed.iter().find(|key| !object.contains_key(**key)) {
        Some(key) => Err(format!("`{key}` is missing")),
        None => Ok(()),
    }
}

/// Reads a time in microseconds from an event, and returns the time in nanoseconds.
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

fn read_event(contents: &mut Contents, event: &Map<String, Value>) -> Result<(), String> {
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
    check_keys(event, &known, &needed)?;
    let thread = (whole(event, "pid")?, whole(event, "tid")?);
    if thread.0 == 0 {
        return Err("process 0 is the idle one".into());
    }
    if text(event, "name")?.is_empty() {
        return Err("it has no name".into());
    }
    match phase {
        "M" => read_metadata(contents, event, thread)?,
        "X" => {
            let (start, length) = (nanos(event, "ts")?, nanos(event, "dur")?);
            contents.slices.entry(thread).or_default().push((start, start + length));
        }
        "C" => {
            let args = event["args"].as_object().ok_or("a counter's args are an object")?;
            if args.is_empty() || !args.values().all(Value::is_number) {
                return Err("a counter has numbers".into());
            }
            let name = (thread.0, text(event, "name")?.to_owned());
            contents.counters.entry(name).or_default().push(nanos(event, "ts")?);
        }
        _ => {
            if phase == "f" && text(event, "bp")? != "e" {
                return Err("a flow must end in the enclosing slice".into());
            }
            let flow = (text(event, "cat")?.to_owned(), whole(event, "id")?);
            let end = usize::from(phase == "f");
            contents.flows.entry(flow).or_default()[end].push((nanos(event, "ts")?, thread));
        }
    }
    Ok(())
}

fn read_metadata(contents: &mut Contents, event: &Map<String, Value>, thread: Thread) -> Result<(), String> {
    let args = event["args"].as_object().ok_or("args are an object")?;
    match text(event, "name")? {
        "process_name" if args.get("name").is_some_and(Value::is_string) => {
            contents.processes.insert(thread.0).then_some(()).ok_or("a process has two names")?;
        }
        "thread_name" if args.get("name").is_some_and(Value::is_string) => {
            contents.threads.insert(thread).then_some(()).ok_or("a thread has two names")?;
        }
        "process_sort_index" | "thread_sort_index" if args.get("sort_index").is_some_and(Value::is_u64) => {}
        name => return Err(format!("`{name}` is no known metadata")),
    }
    Ok(())
}

fn check_names(contents: &Contents) -> Result<(), String> {
    let used = contents.slices.keys().copied();
    let ends = contents.flows.values().flatten().flatten().map(|(_, thread)| *thread);
    for thread in used.chain(ends) {
        if !contents.threads.contains(&thread) || !contents.processes.contains(&thread.0) {
            return Err(format!("process {} or its thread {} has no name", thread.0, thread.1));
        }
    }
    match contents.counters.keys().find(|(process, _)| !contents.processes.contains(process)) {
        Some((process, _)) => Err(format!("process {process} of a counter has no name")),
        None => Ok(()),
    }
}

/// Checks that slices of one thread are disjoint or nested; viewers drop slices that overlap in another way.
fn check_nesting(contents: &mut Contents) -> Result<(), String> {
    for (thread, slices) in &mut contents.slices {
        // Of slices with the same start, the longest is the outer one.
        slices.sort_by_key(|&(start, end)| (start, u64::MAX - end));
        let mut open: Vec<u64> = Vec::new();
        for &(start, end) in &*slices {
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

fn check_flows(contents: &Contents) -> Result<(), String> {
    let is_on_slice = |(at, thread): &FlowEnd| {
        let slices = contents.slices.get(thread).map_or(&[][..], Vec::as_slice);
        slices.iter().any(|&(start, end)| start <= *at && *at <= end)
    };
    for (flow, [begins, ends]) in &contents.flows {
        let ([begin], [end]) = (&begins[..], &ends[..]) else {
            return Err(format!("flow {flow:?} has {} begins and {} ends", begins.len(), ends.len()));
        };
        if end.0 < begin.0 {
            return Err(format!("flow {flow:?} ends before it begins"));
        }
        if !is_on_slice(begin) || !is_on_slice(end) {
            return Err(format!("flow {flow:?} begins or ends outside of all slices"));
        }
    }
    Ok(())
}
