//! The simulator is as close to published numbers as the documentation says.
//!
//! The bounds are those of the project: a median error of a tenth, every cell within the tolerance of its document, the
//! systems and the sizes in their published order. Nothing is fitted here: the documents and the profiles say what was
//! fitted, and on which rows.

use serde_json::Value;

use crate::processes::{json, list};
use crate::repository::root;

/// The claims of Fig. 2 and 8 that fail, and their number in Fig. 10. The caveats of the documents say why.
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
    let path = root().join(format!("reports/published/{document}.yaml")).display().to_string();
    json(&["reproduce", &path])[0]["scores"].clone()
}

/// The times that are out of their tolerance.
fn outside(scores: &Value) -> Vec<String> {
    let name = |cell: &Value| format!("{} {}: {}", cell["row"], cell["system"], cell["error"]);
    list(&scores["tpot"]).iter().filter(|cell| cell["within"] != true).map(name).collect()
}

/// The claims that do not hold.
fn fails(scores: &Value) -> Vec<String> {
    let text = |claim: &Value| claim["text"].as_str().expect("a text").to_owned();
    list(&scores["claims"]).iter().filter(|claim| claim["holds"] != true).map(text).collect()
}

#[test]
fn testbed_of_the_paper_is_within_its_tolerances() {
    let scores = reproduce("prima-table-4");
    // exo's own cost of a token, Python and its messages, is not known; see the remark of that cell.
    let outside = outside(&scores);
    assert!(matches!(&outside[..], [one] if one.contains("8B") && one.contains("exo")), "{outside:?}");
    let median = |key: &str| scores[key].as_f64().expect("a median");
    assert!(median("median_tpot") <= 0.10, "median error {}", median("median_tpot"));
    assert!(median("median_ttft") <= 0.25, "of times to the first token {}", median("median_ttft"));
    assert_eq!(scores["misordered"], serde_json::json!([]), "systems in another order");
    assert_eq!(scores["outcome_mismatches"], serde_json::json!([]), "runs that ended otherwise");
    for column in list(&scores["rank_correlation"]) {
        assert!(column[1].as_f64() > Some(0.999), "{column}");
    }
}

#[test]
fn small_models_without_selection_match_the_first_version_of_the_paper() {
    let scores = reproduce("prima-v1-all-kept");
    // 54 and 65 ms; nothing was fitted on them.
    assert!(scores["median_tpot"].as_f64().expect("a number") < 0.06, "{}", scores["median_tpot"]);
    assert!(outside(&scores).is_empty(), "{scores}");
}

#[test]
fn claims_hold_except_those_with_a_caveat() {
    assert_eq!(fails(&reproduce("prima-fig-2")), FIG_2);
    assert_eq!(fails(&reproduce("prima-fig-8")), FIG_8);
    let heuristics = fails(&reproduce("prima-fig-10"));
    assert_eq!(heuristics.len(), FIG_10, "{heuristics:?}");
}

#[test]
fn phone_with_gpu_and_npu_is_within_its_tolerances() {
    let scores = reproduce("heterollm");
    let times = ["tpot", "ttft"].map(|key| list(&scores[key]).clone()).concat();
    assert!(times.len() >= 6 && times.iter().all(|cell| cell["within"] == true), "{times:?}");
    assert_eq!(scores["outcome_mismatches"], serde_json::json!([]), "runs that ended otherwise");
    assert_eq!(fails(&scores), HETEROLLM);
}

/// The mean errors of the two-parameter model of a GPU: prefill of 1024 tokens, and decode.
const MEAN_ERRORS: [f64; 2] = [0.08, 0.05];

#[test]
fn mobile_gpu_model_predicts_other_models_within_a_few_percent() {
    let scores = reproduce("ml-drift");
    let speeds = &scores["speeds"];
    for ((stage, bar), cells) in ["prefill", "decode"].into_iter().zip(MEAN_ERRORS).zip([26, 25]) {
        assert!(speeds[stage]["error"].as_f64().expect("a number") <= bar, "{stage}: {}", speeds[stage]);
        assert_eq!(speeds[stage]["cells"], cells, "{stage}");
    }
    // Every printed number of Table 2: 37 cells of two.
    let all = list(&speeds["all"]);
    assert_eq!(all.len(), 74);
    // Excluded speeds must be far off; otherwise they would have to count.
    let excluded: Vec<&Value> = all.iter().filter(|speed| !speed["excluded"].is_null()).collect();
    assert_eq!(excluded.len(), 3);
    assert!(excluded.iter().all(|speed| speed["error"].as_f64() > Some(0.15)), "{excluded:?}");
    assert!(
        outside(&scores).iter().all(|cell| cell.contains("Immortalis") || cell.contains("Mali")),
        "{scores}"
    );
}

#[test]
fn mobile_gpu_parameters_follow_from_the_fitted_rows() {
    use hearth_profiles::Document;
    use hearth_profiles::model::ModelDocument;
    use hearth_reports::published::speeds::Quantisation;
    use hearth_reports::published::{Published, shipped};
    use hearth_sim::mobile_gpu::{Measured, MobileGpu, Weights};

    let published = Published::from_yaml(shipped("ml-drift").expect("shipped")).expect("a document");
    let folder = root().join("reports/published");
    let rows: Vec<_> = published.rows.iter().filter(|row| published.fitted.contains(&row.label)).collect();
    assert_eq!(rows.len(), 2);
    for system in &published.systems {
        let gpu = system.gpu.as_ref().expect("a GPU");
        let mut measured = Vec::new();
        let mut shape = None;
        for row in &rows {
            let (pass, cell) = (row.roofline.as_ref().expect("a pass"), &row.cells[&system.name]);
            let weights = if pass.weights == Quantisation::Q8 { Weights::Q8 } else { Weights::Mixed };
            let [prefill, decode] = [cell.prefill, cell.decode].map(|speed| speed.expect("a speed").0);
            measured.push(Measured { weights, prefill, decode });
            let text = std::fs::read_to_string(folder.join(&pass.model)).expect("a model");
            shape = Some(ModelDocument::from_yaml(&text).expect("a model").shape());
        }
        let shape = shape.expect("a row");
        let own = MobileGpu::fitted(&shape, &measured, 1024, 1024 + 128).expect("speeds");
        // Written with three digits.
        let near = |own: f64, written: f64| (own / written - 1.0).abs() < 2e-3;
        assert!(near(own.compute.0, gpu.compute.value.0), "{}: {own:?}", system.name);
        assert!(near(own.bandwidth.0, gpu.bandwidth.value.0), "{}: {own:?}", system.name);
    }
}
