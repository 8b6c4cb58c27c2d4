//! Does the simulator come as near to published numbers as the documentation says?
//!
//! The bars are those of the project: a median error of a tenth, every cell within the tolerance that its document
//! states, the systems and the sizes in their published order. They are checked, not fitted: what was fitted, and on
//! which rows, stands in the documents and in the profiles.

use serde_json::Value;

use crate::processes::run;

/// What fails of Fig. 2 and 8, and how much of Fig. 10. The caveats of the documents say why.
const FIG_2: [&str; 1] = ["65B: two rounds take about half"];
const FIG_8: [&str; 3] = [
    "{D1, D2, D3, D4} is slower than {D2, D3, D5}",
    "{D1, D2, D3, D5} is slower than {D2, D3, D5}",
    "All six are slower than {D2, D3, D5}",
];
const FIG_10: usize = 4;
/// It contradicts the numbers beside it.
const HETEROLLM: [&str; 1] =
    ["256 tokens: 3.3 % more energy than layer-level, which contradicts the powers and speeds beside it"];

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

fn outside(scores: &Value) -> Vec<String> {
    let name = |cell: &Value| format!("{} {}: {}", cell["row"], cell["system"], cell["error"]);
    cells(scores).iter().filter(|cell| cell["within"] != true).map(name).collect()
}

/// The claims that do not hold.
fn fails(scores: &Value) -> Vec<String> {
    let claims = scores["claims"].as_array().expect("claims");
    let text = |claim: &Value| claim["text"].as_str().expect("a text").to_owned();
    claims.iter().filter(|claim| claim["holds"] != true).map(text).collect()
}

#[test]
fn the_papers_testbed_comes_out_within_its_tolerances() {
    let scores = reproduce("prima-table-4");
    // exo's own cost of a token, Python and its messages, is not known; see the remark of that cell.
    let outside = outside(&scores);
    assert!(matches!(&outside[..], [one] if one.contains("8B") && one.contains("exo")), "{outside:?}");
    let median = |key: &str| scores[key].as_f64().expect("a median");
    assert!(median("median") <= 0.10, "median error {}", median("median"));
    assert!(median("median_ttft") <= 0.25, "of times to the first token {}", median("median_ttft"));
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
fn claims_hold_but_for_those_that_the_documents_explain() {
    assert_eq!(fails(&reproduce("prima-fig-2")), FIG_2);
    assert_eq!(fails(&reproduce("prima-fig-8")), FIG_8);
    let heuristics = fails(&reproduce("prima-fig-10"));
    assert_eq!(heuristics.len(), FIG_10, "{heuristics:?}");
}

#[test]
fn a_phone_with_gpu_and_npu_comes_out_within_its_tolerances() {
    let scores = reproduce("heterollm");
    let times = ["tpot", "ttft"].map(|key| scores[key].as_array().expect("times").clone()).concat();
    assert!(times.len() >= 6 && times.iter().all(|cell| cell["within"] == true), "{times:?}");
    assert_eq!(scores["outcomes"], serde_json::json!([]), "runs that ended otherwise");
    assert_eq!(fails(&scores), HETEROLLM);
}
