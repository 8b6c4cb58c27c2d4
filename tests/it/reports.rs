//! `hearth report` adds published numbers and sweeps to traces, and refuses wrong input.

use std::fs;

use crate::processes::{error, run};

fn scenario(name: &str) -> String {
    format!("{}/scenarios/paper/{name}.yaml", env!("CARGO_MANIFEST_DIR"))
}

fn succeed(arguments: &[&str]) {
    let output = run(arguments);
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn report_has_published_numbers_and_a_sweep() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name).display().to_string();
    let (path, trace, table, out) = (scenario("llama-8b-on-d1-d4"), at("a.trace"), at("k.csv"), at("report"));
    succeed(&["simulate", &path, "--tokens", "3", "--strategy", "single", "--trace", &trace]);
    succeed(&[
        "sweep",
        &path,
        "--vary",
        "planner.rounds=1,2,4",
        "--tokens",
        "2",
        "--strategy",
        "exact",
        "-o",
        &table,
    ]);
    let published = ["--published", "prima-table-4", "--system", "prima.cpp", "--sweep", &table];
    succeed(&[&["report", &trace, "-o", &out], &published[..]].concat());
    let text = fs::read_to_string(folder.path().join("report/report.md")).expect("the report");
    assert!(text.contains("Published for prima.cpp, 8B: 15.0 ms per token"), "{text}");
    assert!(text.contains("![Time per token over k (planner.rounds)](sweep-1.svg)"), "{text}");
    assert!(text.contains("parity.svg"), "{text}");
    let page = fs::read_to_string(folder.path().join("report/index.html")).expect("the page");
    for outside in ["http:", "https:", "src=", "url(h", "@import", "<link", "<script"] {
        assert!(!page.contains(outside), "the page refers to {outside}");
    }
}

#[test]
fn wrong_report_input_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name).display().to_string();
    let (trace, out) = (at("a.trace"), at("report"));
    succeed(&["simulate", &scenario("fig-6-a"), "--tokens", "2", "--trace", &trace]);
    let refused = |more: &[&str], expected: &str| {
        let text = error(&[&["report", &trace, "-o", &out], more].concat(), 2);
        assert!(text.contains(expected), "{text}");
    };
    refused(&["--published", "prima-table-5"], "no document of published numbers is called `prima-table-5`");
    refused(&["--published", "prima-table-4"], "has no row for scenario `fig-6-a`");
    refused(&["--system", "prima.cpp"], "--published");
    refused(&["--sweep", &trace], "");
    assert!(!folder.path().join("report").exists());
}
