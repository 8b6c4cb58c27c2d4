//! Golden tests of reports on the sample traces.
//!
//! After an intended change, `HEARTH_UPDATE_GOLDEN=1 cargo test -p hearth-reports` updates the golden files; review
//! the difference before you commit it.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use hearth_reports::Report;
use hearth_reports::comparison::RunComparison;
use hearth_schema::Trace;
use hearth_schema::run_events::{RunEvent, RunEventKind};
use hearth_schema::trace::{Origin, Outcome, StepKind, StepRecord};

use crate::{columns_that_add_up, file, sample};

fn check(report: &Report, name: &str, golden: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(golden);
    let found = file(report, name);
    if std::env::var_os("HEARTH_UPDATE_GOLDEN").is_some() {
        fs::write(&path, &found).expect("the golden file can be written");
    }
    let expected = fs::read_to_string(&path).unwrap_or_default();
    assert!(
        found == expected,
        "{name} differs from {}; if that is intended, run with HEARTH_UPDATE_GOLDEN=1",
        path.display()
    );
}

#[test]
fn pair_single_trace_and_stopped_run() {
    let single = vec![sample::trace(Origin::Simulated, 3)];
    let stopped = vec![Trace { outcome: Outcome::Killed, ..sample::trace(Origin::Measured, 1) }];
    for (traces, name) in [(sample::pair(4), "pair"), (single, "single"), (stopped, "stopped")] {
        let report = Report::new(traces).unwrap();
        check(&report, "report.md", &format!("{name}.md"));
        check(&report, "comparison.csv", &format!("{name}.csv"));
    }
}

#[test]
fn trace_with_events() {
    let mut trace = sample::trace(Origin::Simulated, 6);
    let output = |pass: u32| {
        let is_output = |it: &&StepRecord| it.kind == StepKind::Output && it.pass_index == pass;
        trace.records.iter().find(is_output).expect("a token").end_ns
    };
    let run_event = |kind, device: Option<&str>, start_ns, end_ns, details: &str| {
        let (device, details, plan_digest) = (device.map(String::from), details.to_owned(), None);
        RunEvent { kind, device, start_ns, end_ns, details, plan_digest }
    };
    let detected = output(2) + 1_000_000;
    trace.run_events = vec![
        run_event(RunEventKind::Memory, Some("phone"), output(1), Some(output(3)), "2.00 GiB"),
        run_event(RunEventKind::Silent, Some("lap|top"), output(2), Some(detected), "no sign of life"),
        run_event(RunEventKind::Replanned, None, detected, Some(output(3)), "a 1, b 2"),
        run_event(RunEventKind::Stalls, None, output(4), None, ""),
    ];
    let report = Report::new(vec![trace]).unwrap();
    check(&report, "report.md", "events.md");
    let timeline = file(&report, "simulated.perfetto.json");
    assert_eq!(timeline.matches("\"cat\":\"event\"").count(), 4);
    assert!(file(&report, "tokens.svg").matches("class=\"event\"").count() >= 4);
}

#[test]
fn runs_of_different_plans() {
    let mut traces = sample::pair(3);
    traces[1].header.plan_digest = "sha256:0000000000000001".into();
    let report = Report::new(traces).unwrap();
    check(&report, "report.md", "different-plans.md");
    assert!(report.comparison.run_comparisons.is_empty());
}

/// Returns the cells of a Markdown table row after the first; `None` for cells that are not numbers.
fn cells(line: &str) -> Vec<Option<f64>> {
    let number = |cell: &str| cell.trim().replace('\u{2212}', "-").replace(['*', '+'], "").parse().ok();
    line.trim_matches('|').split('|').skip(1).map(number).collect()
}

#[test]
fn printed_terms_sum_to_the_printed_tpot() {
    for tokens in [2, 3, 8, 21] {
        let text = file(&Report::new(sample::pair(tokens)).unwrap(), "report.md");
        let rows: Vec<&str> =
            text.lines().skip_while(|line| !line.starts_with("| CPU, ms")).take(8).collect();
        assert!(rows[7].contains("TPOT"), "{}", rows[7]);
        // The columns are predicted, measured and error.
        for column in 0..3 {
            let sum: f64 = rows[..7].iter().map(|row| cells(row)[column].expect("a number")).sum();
            let total = cells(rows[7])[column].expect("a number");
            assert!((sum - total).abs() < 1e-9, "column {column} of {tokens} tokens: {sum} is not {total}");
        }
        let csv = file(&Report::new(sample::pair(tokens)).unwrap(), "comparison.csv");
        assert_eq!(columns_that_add_up(&csv, 3), 3, "{csv}");
    }
}

#[test]
fn report_is_deterministic() {
    let [first, second] = [Report::new(sample::pair(5)).unwrap(), Report::new(sample::pair(5)).unwrap()];
    assert!(first.render_files() == second.render_files());
}

#[test]
fn runs_are_paired_by_plan() {
    let mut traces = sample::pair(3);
    traces.extend(sample::pair(3));
    let report = Report::new(traces).unwrap();
    let pairs: Vec<[usize; 2]> =
        report.comparison.run_comparisons.iter().map(RunComparison::run_indices).collect();
    assert_eq!(pairs, [[0, 1], [2, 1], [0, 3]]);
    let names: Vec<String> = report.render_files().into_iter().map(|(name, _)| name).collect();
    assert!(names.contains(&"measured-2.perfetto.json".to_owned()));
    assert_eq!(names.iter().collect::<BTreeSet<_>>().len(), names.len());
}

type Change = fn(&mut Trace);

#[test]
fn damaged_traces_are_refused() {
    assert_eq!(
        Report::new(Vec::new()).unwrap_err().to_string(),
        "no trace to report on; name at least one trace"
    );
    let cases: [(Change, &str); 3] = [
        (|trace| trace.records[2].device_index = 9, "trace 1, step 2: device 9 is not in the header"),
        (
            |trace| trace.records[0].end_ns = u64::MAX,
            "trace 1, step 0: the end, 18446744073709551615 ns, is later than 104 days",
        ),
        (|trace| trace.passes.reverse(), "trace 1: the token of pass 1 ends before the previous token"),
    ];
    for (change, expected) in cases {
        let mut trace = sample::trace(Origin::Measured, 3);
        change(&mut trace);
        let error = Report::new(vec![trace]).unwrap_err().to_string();
        assert_eq!(error, format!("{expected}; the trace is damaged: record it again"));
    }
}
