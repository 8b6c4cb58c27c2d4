//! Tests of `hearth report` with published numbers and sweeps, and with invalid input.

use crate::folder::Folder;
use crate::processes::{assert_rejected, run_successfully, scenario_path};

#[test]
fn report_has_published_numbers_and_a_sweep() {
    let folder = Folder::new();
    let (scenario, trace) = (scenario_path("paper/llama-8b-on-d1-d4"), folder.path_of("a.trace"));
    let (table, out) = (folder.path_of("k.csv"), folder.path_of("report"));
    run_successfully(&["simulate", &scenario, "--tokens", "3", "--strategy", "single", "--trace", &trace]);
    let rounds = ["--vary", "planner.rounds=1,2,4", "--tokens", "2", "--strategy", "exact", "-o", &table];
    run_successfully(&[&["sweep", &scenario], &rounds[..]].concat());
    let published = ["--published", "prima-table-4", "--system", "prima.cpp", "--sweep", &table];
    run_successfully(&[&["report", &trace, "-o", &out], &published[..]].concat());
    let text = folder.read("report/report.md");
    assert!(text.contains("Published for prima.cpp, 8B: 15.0 ms per token"), "{text}");
    assert!(text.contains("![Time per token over k (planner.rounds)](sweep-1.svg)"), "{text}");
    assert!(text.contains("parity.svg"), "{text}");
    let page = folder.read("report/index.html");
    for outside in ["http:", "https:", "src=", "url(h", "@import", "<link", "<script"] {
        assert!(!page.contains(outside), "the page refers to {outside}");
    }
}

#[test]
fn wrong_report_input_is_rejected() {
    let folder = Folder::new();
    let (trace, out) = (folder.path_of("a.trace"), folder.path_of("report"));
    run_successfully(&["simulate", &scenario_path("paper/fig-6-a"), "--tokens", "2", "--trace", &trace]);
    for (flags, part) in [
        (["--published", "prima-table-5"], "no document of published numbers is called `prima-table-5`"),
        (["--published", "prima-table-4"], "has no row for scenario `fig-6-a`"),
        (["--system", "prima.cpp"], "--published"),
        (["--sweep", &trace], ""),
    ] {
        assert_rejected(&[&["report", &trace, "-o", &out], &flags[..]].concat(), &[part]);
    }
    assert!(!folder.has_file("report"));
}
