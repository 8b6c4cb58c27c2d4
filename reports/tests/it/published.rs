//! Tests of reports with published numbers, sweeps and several plans.

use hearth_profiles::Document;
use hearth_reports::Report;
use hearth_reports::charts::lines::{AxisPosition, LineChart, Series};
use hearth_reports::published_results::{PublishedResults, SHIPPED_DOCUMENTS};
use hearth_schema::trace::{Origin, StepKind};

use crate::{file, sample};

const DOCUMENT: &str = "\
schema: published/1
name: made-up
title: Two rows
source: nobody
tolerance: 25 %
caveats: [The kitchen was warm.]
systems:
  - {name: one, planner: {strategy: single}}
  - {name: two, planner: {strategy: mem}}
rows:
  - {label: 8B, scenario: ../kitchen-3.yaml, cells: {one: {tpot: 50 ms, ttft: 200 ms}, two: {outcome: out_of_memory}}}
  - {label: 14B, scenario: ../kitchen-4.yaml, cells: {one: {tpot: 90 ms}}}
";

fn document() -> PublishedResults {
    PublishedResults::from_yaml(DOCUMENT).expect("a valid document")
}

#[test]
fn published_numbers_are_between_predicted_and_measured() {
    let report =
        Report::new(sample::pair(4)).unwrap().with_published_results(&document(), Some("one")).unwrap();
    let text = file(&report, "report.md");
    for expected in [
        "| Quantity | Predicted | Published | Measured | Error |",
        "| **TPOT (sum), ms** | **54.35** | **50.00** | **60.45** |",
        "| TTFT, ms | 183.15 | 200.00 | 187.15 |",
        // 60.45 / 50 - 1 = 20.9 %.
        "Published for one, 8B: 50.0 ms per token; this run takes 20.9 % longer.",
        "The kitchen was warm.",
    ] {
        assert!(text.contains(expected), "{expected}: {text}");
    }
    let csv = file(&report, "comparison.csv");
    assert!(csv.lines().next().unwrap().contains("published one for measured"), "{csv}");
    let widths: Vec<usize> = csv.lines().map(|line| line.matches(',').count()).collect();
    assert!(widths.windows(2).all(|pair| pair[0] == pair[1]), "{csv}");
}

#[test]
fn without_a_name_no_system_is_selected() {
    let report = Report::new(sample::pair(4)).unwrap().with_published_results(&document(), None).unwrap();
    let text = file(&report, "report.md");
    assert!(
        text.contains("| one, 8B | 50.0 | 60.5 |") && text.contains("| two, 8B | out of memory |"),
        "{text}"
    );
    assert!(!text.contains("| Published |") && !text.contains("90.0"), "{text}");
}

#[test]
fn unmatched_documents_are_refused() {
    let refusal = |published: &PublishedResults, system| {
        let report = Report::new(sample::pair(3)).unwrap();
        report.with_published_results(published, system).unwrap_err().to_string()
    };
    let error = refusal(&document(), Some("three"));
    assert_eq!(error, "`made-up` has no system `three`; use one of `one`, `two`");
    let elsewhere = PublishedResults::from_yaml(&DOCUMENT.replace("kitchen-3", "kitchen-5")).unwrap();
    let error = refusal(&elsewhere, None);
    assert!(
        error.starts_with("`made-up` has no row for scenario `kitchen-3`; compare runs of these scenarios"),
        "{error}"
    );
    let without_two = DOCUMENT.replace("two: {outcome: out_of_memory}", "").replace("200 ms}, }", "200 ms}}");
    let error = refusal(&PublishedResults::from_yaml(&without_two).unwrap(), Some("two"));
    assert!(error.contains("has no published result of `two`"), "{error}");
}

#[test]
fn every_shipped_document_is_found_by_its_name() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("published");
    // Subfolders have the files that documents refer to.
    let documents = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    assert_eq!(SHIPPED_DOCUMENTS.len(), documents.filter(|path| path.is_file()).count());
    for (name, text) in SHIPPED_DOCUMENTS {
        assert_eq!(PublishedResults::from_yaml(text).expect(name).name, name);
    }
}

#[test]
fn runs_with_other_rounds_make_a_line_over_k() {
    let two = sample::trace(Origin::Simulated, 4);
    let mut one = two.clone();
    one.header.plan_digest = "sha256:0000000000000001".into();
    // The second round of each token becomes part of the first round.
    for record in one.records.iter_mut().filter(|record| record.kind == StepKind::Compute) {
        record.round = 0;
    }
    let report = Report::new(vec![one, two.clone()]).unwrap();
    let drawing = file(&report, "rounds.svg");
    let counts = ["<circle", "<polyline"].map(|element| drawing.matches(element).count());
    assert_eq!(counts, [2, 1], "{drawing}");
    assert!(file(&report, "report.md").contains("![Time per token over k](rounds.svg)"));
    // With a single plan there is nothing to draw.
    let alone = Report::new(vec![two]).unwrap();
    assert!(!alone.render_files().iter().any(|(name, _)| name == "rounds.svg" || name == "sizes.svg"));
}

#[test]
fn runs_of_other_models_make_a_line_over_their_size() {
    let mut traces = vec![sample::trace(Origin::Simulated, 4), sample::trace(Origin::Simulated, 4)];
    for (trace, model) in traces.iter_mut().zip(["llama-8b", "llama-70b"]) {
        trace.header.model_name = model.into();
    }
    let drawing = file(&Report::new(traces).unwrap(), "sizes.svg");
    assert!(drawing.contains("simulated, k = 2") && drawing.contains("GiB</text>"), "{drawing}");
}

#[test]
fn a_sweep_is_a_figure_of_the_report() {
    let position = |fraction: f64| AxisPosition { x_fraction: fraction, label: format!("{fraction} <GiB>") };
    let chart = LineChart {
        title: "Time over <memory>".into(),
        x_title: "memory".into(),
        unit: "ms".into(),
        x_positions: vec![position(0.0), position(1.0)],
        series: vec![Series { name: String::new(), values: vec![Some(10.0), Some(20.0)] }],
        marks_missing_values: true,
    };
    let report = Report::new(sample::pair(3)).unwrap().with_sweep_chart(chart);
    assert!(file(&report, "sweep-1.svg").contains("<circle"));
    let page = file(&report, "index.html");
    assert!(page.contains("id=\"scaling\"") && !page.contains("<memory>"));
}
