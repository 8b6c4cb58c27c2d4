//! Does the simulator come as near to published numbers as the documentation says?
//!
//! The bars are those of the project: a median error of a tenth, every cell within the tolerance that its document
//! states, the systems and the sizes in their published order. They are checked, not fitted: what was fitted, and on
//! which rows, stands in the documents and in the profiles.

use serde_json::Value;

use crate::processes::run;

fn reproduce(document: &str) -> Value {
    let path = format!("{}/reports/published/{document}.yaml", env!("CARGO_MANIFEST_DIR"));
    let output = run(&["reproduce", &path, "--json"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let documents: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    documents[0]["scores"].clone()
}

fn cells(scores: &Value) -> &Vec<Value> {
    scores["tpot"].as_array().expect("times")
}

/// Cells whose error is above their tolerance; a tolerance of a half is meant as a factor both ways.
fn outside(scores: &Value) -> Vec<String> {
    let is_outside = |cell: &&Value| {
        let (error, tolerance) = (cell["error"].as_f64(), cell["tolerance"].as_f64().expect("a tolerance"));
        error.is_none_or(|error| {
            let factor = (1.0 + error).max(1.0 / (1.0 + error));
            if tolerance >= 0.5 { factor > 1.0 + tolerance } else { error.abs() > tolerance }
        })
    };
    let name = |cell: &Value| format!("{} {}: {}", cell["row"], cell["system"], cell["error"]);
    cells(scores).iter().filter(is_outside).map(name).collect()
}

#[test]
fn the_papers_testbed_comes_out_within_its_tolerances() {
    let scores = reproduce("prima-table-4");
    // exo's own cost of a token, Python and its messages, is not known; see the remark of that cell.
    let outside = outside(&scores);
    assert!(matches!(&outside[..], [one] if one.contains("8B") && one.contains("exo")), "{outside:?}");
    let median = scores["median"].as_f64().expect("a median");
    assert!(median <= 0.10, "median error {median}");
    assert_eq!(scores["order"], serde_json::json!([]), "systems in another order");
    assert_eq!(scores["outcomes"], serde_json::json!([]), "runs that ended otherwise");
    for column in scores["rank"].as_array().expect("ranks") {
        assert!(column[1].as_f64() > Some(0.999), "{column}");
    }
}

#[test]
fn without_selection_small_models_take_what_the_first_version_of_the_paper_says() {
    let scores = reproduce("prima-v1-all-kept");
    // 54 and 65 ms; nothing was fitted on them.
    assert!(scores["median"].as_f64() < Some(0.06), "{}", scores["median"]);
    assert!(outside(&scores).is_empty(), "{scores}");
}

#[test]
fn more_rounds_cost_what_fits_little_and_save_much_of_what_does_not() {
    let scores = reproduce("prima-fig-2");
    for claim in scores["claims"].as_array().expect("claims") {
        let ratio = claim["ratio"].as_f64().expect("a ratio");
        let text = claim["text"].as_str().expect("a text");
        if text.contains("cost little") {
            assert!((1.0..1.2).contains(&ratio), "{text}: {ratio}");
        } else {
            // A half in the text, 0.48 to 0.75 here: part of what is read in two rounds is still evicted before its use.
            assert!((0.3..0.8).contains(&ratio), "{text}: {ratio}");
        }
    }
}
