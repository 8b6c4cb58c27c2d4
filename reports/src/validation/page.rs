//! Report on a validation suite.
//!
//! The report has the acceptance criteria, the errors of each scenario, the errors of the terms, the pairs in the wrong
//! order, the failed scenarios, and the machine.

use std::fmt::Write;

use serde::Serialize;

use super::scores::{
    self, CaseScores, Criterion, ErrorStatistics, PredictionAccuracy, RankAgreement, Scores,
};
use super::{FailedScenario, Validation, ValidationCase};
use crate::charts::drawing::CssClass;
use crate::charts::parity::{self, ParityPoint};
use crate::document::{Block, Document, NO_VALUE, Table, Text, to_json};
use crate::exports::csv;
use crate::text::escape;

/// Returns the name and the contents of each file of the report: HTML, Markdown, figures, CSV and JSON.
pub fn render_files(validation: &Validation) -> Vec<(String, Vec<u8>)> {
    let scores = validation.scores();
    let mut files = document(validation, &scores).render_files();
    files.push(("validation.csv".to_owned(), csv_table(&scores)));
    files.push(("validation.json".to_owned(), to_json(&Json { validation, scores: &scores })));
    files
}

#[derive(Serialize)]
struct Json<'a> {
    #[serde(flatten)]
    validation: &'a Validation,
    scores: &'a Scores,
}

/// Returns the summary of a validation suite as text for a terminal.
pub fn summary_text(validation: &Validation) -> String {
    let scores = validation.scores();
    let (measured, failed) = (validation.cases.len(), validation.failed_scenarios.len());
    let mut text = format!("{measured} scenarios measured, {failed} failed\n");
    for criterion in &scores.criteria {
        let met = if criterion.is_met { "" } else { ", NOT MET" };
        let _ = writeln!(text, "  {}: {}{met}", criterion.text, value(criterion));
    }
    for (name, errors) in [("time to first token", &scores.ttft), ("bytes read", &scores.bytes_read)] {
        let _ = writeln!(text, "  {name}: {}", in_words(errors));
    }
    text
}

fn value(criterion: &Criterion) -> String {
    criterion.value.map_or("no scenario has it".into(), share)
}

fn share(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

fn in_words(errors: &ErrorStatistics) -> String {
    let number = |error: Option<f64>| error.map_or("none".into(), share);
    format!(
        "median error {}, largest error {}, over {} scenarios, {} of them with high variance",
        number(errors.median),
        number(errors.max),
        errors.scenario_count,
        errors.high_variance_count
    )
}

fn document(validation: &Validation, scores: &Scores) -> Document {
    let mut opening_blocks = vec![
        Block::Paragraph(Text::from(format!("Time per token: {}.", in_words(&scores.tpot)))),
        Block::Note(
            "Each scenario was planned and simulated from device profiles, which were measured with micro-benchmarks on the \
             same processors with the same number of threads. Limits of disks, processors and memory were set afterwards; \
             the simulator has to model them. Each prediction was written before the run. Nothing is fitted to these runs."
                .into(),
        ),
    ];
    opening_blocks.extend(unsteady(validation));
    let title = Text::from("Accuracy of the simulator: ").append_name(&validation.title);
    let mut document = Document { title, opening_blocks, sections: Vec::new() };
    document.push_section("Acceptance criteria", "criteria", criteria(scores));
    document.push_section("Repetitions", "repetitions", repetitions(validation));
    document.push_section("Predicted and measured", "parity", parities(scores));
    document.push_section("Scenarios", "cases", cases(validation, scores));
    document.push_section("Terms of the time per token", "terms", terms(scores));
    document.push_section("Order", "order", order(scores));
    document.push_section("Failed scenarios", "failed", failed(validation));
    document.push_section("Machine", "machine", machine(validation));
    document
}

/// Returns a note on the runs during which the speed of the machine changed; `None` if there are no such runs.
fn unsteady(validation: &Validation) -> Option<Block> {
    let runs = || validation.cases.iter().flat_map(|case| &case.run_pairs);
    let restarts: u32 = runs().map(|run| run.discarded_attempts).sum();
    let changed = runs().filter(|run| !run.has_steady_speed).count();
    (restarts > 0 || changed > 0).then(|| {
        let all = runs().count();
        let text = format!(
            "{restarts} runs were given up besides the {all} runs of this report, because the machine was faster or slower \
             than when it was measured, or because other programs used its processors. {changed} of the runs of this report \
             have the same problem."
        );
        Block::Note(text.into())
    })
}

fn criteria(scores: &Scores) -> Option<Block> {
    let row = |criterion: &Criterion| {
        let met = match (criterion.value, criterion.is_met) {
            (None, true) => NO_VALUE,
            (_, true) => "met",
            (_, false) => "not met",
        };
        vec![Text::from(criterion.text.as_str()), value(criterion).into(), met.into()]
    };
    let caption = "The criteria and the values of this suite.";
    Table::new(caption, ["Criterion", "Value", "Result"], scores.criteria.iter().map(row)).into_text_block()
}

/// Returns a table of the criteria for each repetition of the suite; `None` for fewer than two repetitions.
fn repetitions(validation: &Validation) -> Option<Block> {
    let repetitions = scores::score_repetitions(&validation.cases);
    if repetitions.len() < 2 {
        return None;
    }
    let row = |(at, scores): (usize, &Scores)| {
        let values = scores.criteria.iter().map(|criterion| Text::from(value(criterion)));
        [Text::from((at + 1).to_string())].into_iter().chain(values).collect()
    };
    let texts = repetitions[0].criteria.iter().map(|criterion| criterion.text.as_str());
    let headings = ["Repetition"].into_iter().chain(texts);
    let caption = "Each repetition predicts all scenarios anew and then measures them.";
    Table::new(caption, headings, repetitions.iter().enumerate().map(row)).into_text_block()
}

fn parities(scores: &Scores) -> Vec<Block> {
    type Of = fn(&CaseScores) -> Option<PredictionAccuracy>;
    let quantities: [(&str, &str, &str, f64, Of); 3] = [
        ("parity-tpot", "Time per token", "ms", 1.0, |case| case.tpot),
        ("parity-ttft", "Time to first token", "ms", 1.0, |case| case.ttft),
        ("parity-bytes", "Read from disk per token", "MB", 1e-6, |case| case.bytes_read_per_token),
    ];
    let mut blocks = Vec::new();
    for (id, title, unit, factor, of) in quantities {
        let point = |case: &CaseScores| {
            let score = of(case)?;
            let (group, class) = if score.has_high_variance {
                ("measurements differ by more than 15 %", CssClass::Series4)
            } else {
                ("scenario", CssClass::Series0)
            };
            Some(ParityPoint {
                group: group.into(),
                class,
                name: case.name.clone(),
                reference_value: score.median_measurement * factor,
                predicted_value: score.median_prediction * factor,
                measured_range: Some(score.measured_range.map(|value| value * factor)),
            })
        };
        let points: Vec<ParityPoint> = scores.cases.iter().filter_map(point).collect();
        if let Some(drawing) = parity::draw_parity_plot(id, title, unit, &points) {
            let caption = "Each dot is a scenario: the prediction over the measured value. Horizontal lines are the range \
                           of the measurements. Both axes are logarithmic."
                .into();
            blocks.push(Block::Figure(drawing, caption));
        }
    }
    blocks
}

fn cases(validation: &Validation, scores: &Scores) -> Vec<Block> {
    let number = |value: f64| if value >= 100.0 { format!("{value:.0}") } else { format!("{value:.1}") };
    let cells = |one: Option<PredictionAccuracy>, factor: f64| match one {
        None => [NO_VALUE; 3].map(Text::from),
        Some(one) => {
            let [min, max] = one.measured_range.map(|value| number(value * factor));
            let median = number(one.median_measurement * factor);
            let measured = if one.has_high_variance { format!("{min} to {max}") } else { median };
            let error = format!("{:+.1} %", one.relative_error * 100.0);
            [number(one.median_prediction * factor), measured, error].map(Text::from)
        }
    };
    let row = |case: &CaseScores| {
        let repeated = case.tpot.filter(|tpot| tpot.run_count > 1);
        let spread = Text::from_option(repeated.map(|tpot| share(tpot.measured_spread)));
        let mut row = vec![Text::default().append_name(&case.name)];
        row.extend(cells(case.tpot, 1.0));
        row.push(spread);
        row.extend(cells(case.ttft, 1.0));
        row.extend(cells(case.bytes_read_per_token, 1e-6));
        row
    };
    let headings = [
        "Scenario",
        "TPOT predicted, ms",
        "measured",
        "error",
        "spread",
        "TTFT predicted, ms",
        "measured",
        "error",
        "Read per token predicted, MB",
        "measured",
        "error",
    ];
    let caption = "Medians over all repetitions. Where the measurements differ by more than 15 %: their range, and the error to its nearest end.";
    let cases = Table::new(caption, headings, scores.cases.iter().map(row));
    let question = |case: &ValidationCase| {
        let [name, question] = [&case.name, &case.question].map(|text| Text::default().append_name(text));
        let digests: Vec<&str> = case.run_pairs.iter().map(|run| run.prediction_digest.as_str()).collect();
        vec![name, question, Text::default().append_code(digests.join(" "))]
    };
    let caption = "The question of each scenario, and the digests of its predictions.";
    let headings = ["Scenario", "Question", "Predictions"];
    let questions =
        Table::new(caption, headings, validation.cases.iter().map(question)).with_only_text_columns();
    [cases, questions].into_iter().filter_map(Table::into_block).collect()
}

fn terms(scores: &Scores) -> Vec<Block> {
    let mean = scores
        .mean_term_errors
        .iter()
        .map(|(name, error)| vec![Text::from(name.replace('_', " ")), share(*error).into()]);
    let names = scores.mean_term_errors.iter().map(|(name, _)| name.replace('_', " "));
    let headings = ["Scenario".to_owned()].into_iter().chain(names);
    let row = |case: &CaseScores| {
        let error =
            |term: &scores::TermComparison| Text::from(format!("{:+.1} %", term.relative_error * 100.0));
        [Text::default().append_name(&case.name)].into_iter().chain(case.terms.iter().map(error)).collect()
    };
    let rows = scores.cases.iter().filter(|case| !case.terms.is_empty()).map(row);
    let caption = "Mean absolute error of each term, as a share of the time per token.";
    let means = Table::new(caption, ["Term", "Error"], mean);
    let caption = "Predicted less measured, as a share of the measured time per token.";
    [means, Table::new(caption, headings, rows)].into_iter().filter_map(Table::into_block).collect()
}

fn order(scores: &Scores) -> Vec<Block> {
    let sentence = |order: &RankAgreement| {
        let right = order.concordant_share().map_or("no pair".into(), share);
        let (margin, pairs) = (share(order.margin), order.pair_count);
        let text = format!(
            "Pairs whose measured times differ by more than {margin}: {pairs}, of which {right} are in the right order."
        );
        Block::Paragraph(text.into())
    };
    let pair = |[fast, slow]: &[String; 2]| {
        vec![Text::default().append_name(fast), Text::default().append_name(slow)]
    };
    let headings = ["Faster in the measurement", "Slower in the measurement"];
    let misordered = scores.rank_agreements[0].discordant_pairs.iter().map(pair);
    let table = Table::new("Pairs in the wrong order.", headings, misordered).with_only_text_columns();
    scores.rank_agreements.iter().map(sentence).chain(table.into_block()).collect()
}

fn failed(validation: &Validation) -> Option<Block> {
    let row = |failed: &FailedScenario| {
        vec![Text::default().append_name(&failed.name), Text::default().append_name(&failed.reason)]
    };
    let rows = validation.failed_scenarios.iter().map(row);
    Table::new("Scenarios without numbers.", ["Scenario", "Reason"], rows).into_text_block()
}

fn machine(validation: &Validation) -> Option<Block> {
    let row =
        |(key, value): &(String, String)| vec![Text::from(key.as_str()), Text::default().append_name(value)];
    let rows = validation.machine_properties.iter().map(row);
    Table::new("The machine of the measurements.", ["Property", "Value"], rows).into_text_block()
}

/// Returns the contents of `validation.csv`, with a line for each scenario.
fn csv_table(scores: &Scores) -> Vec<u8> {
    let headings = "scenario tpot_predicted_ms tpot_measured_ms tpot_min_ms tpot_max_ms tpot_error high_variance \
                ttft_predicted_ms ttft_measured_ms ttft_error read_predicted_bytes read_measured_bytes read_error";
    let terms = scores.mean_term_errors.iter().map(|(name, _)| format!("{name}_error"));
    let headings = headings.split_whitespace().map(str::to_owned).chain(terms).collect();
    let number = |value: Option<f64>| value.map_or(String::new(), |value| format!("{value:.6}"));
    let row = |case: &CaseScores| {
        let of = |one: Option<PredictionAccuracy>| match one {
            None => [None; 3],
            Some(one) => [one.median_prediction, one.median_measurement, one.relative_error].map(Some),
        };
        let [predicted, measured, error] = of(case.tpot);
        let range = [0, 1].map(|end| case.tpot.map(|tpot| tpot.measured_range[end]));
        let mut cells = vec![escape::csv_field(&case.name)];
        cells.extend([predicted, measured, range[0], range[1], error].map(number));
        cells.push(case.tpot.map_or(String::new(), |tpot| tpot.has_high_variance.to_string()));
        cells.extend([of(case.ttft), of(case.bytes_read_per_token)].into_iter().flatten().map(number));
        let terms = scores.mean_term_errors.iter().enumerate();
        cells.extend(terms.map(|(index, _)| number(case.terms.get(index).map(|term| term.relative_error))));
        cells
    };
    csv::write_rows([headings].into_iter().chain(scores.cases.iter().map(row)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn validation() -> Validation {
        Validation {
            title: "suite".into(),
            machine_properties: vec![("cores".into(), "2".into())],
            cases: vec![
                ValidationCase::fixture("a", 105.0, &[100.0, 101.0, 99.0]),
                ValidationCase::fixture("=b", 60.0, &[40.0, 80.0]),
            ],
            failed_scenarios: vec![FailedScenario { name: "c".into(), reason: "no <disk>".into() }],
        }
    }

    fn text(files: &[(String, Vec<u8>)], name: &str) -> String {
        let found = files.iter().find(|(file, _)| file == name).expect(name);
        String::from_utf8(found.1.clone()).expect("text")
    }

    #[test]
    fn report_has_the_scores_in_every_format() {
        let files = render_files(&validation());
        let markdown = text(&files, "report.md");
        assert!(markdown.contains("+5.0 %") && markdown.contains("40.0 to 80.0"), "{markdown}");
        assert!(markdown.contains("Repetitions"), "{markdown}");
        assert!(markdown.contains("| scenarios with all numbers: all | 66.7 % | not met |"), "{markdown}");
        let html = text(&files, "index.html");
        assert!(html.contains("Is &lt;it&gt; right?") && !html.contains("<disk>"));
        let csv = text(&files, "validation.csv");
        let widths: Vec<usize> = csv.lines().map(|line| line.split(',').count()).collect();
        assert!(widths.iter().all(|width| *width == widths[0]), "{csv}");
        assert!(csv.contains("'=b"), "no cell is a formula");
        for name in ["parity-tpot.svg", "parity-ttft.svg", "parity-bytes.svg"] {
            assert!(text(&files, name).contains("<circle"), "{name}");
        }
        let json: serde_json::Value = serde_json::from_str(&text(&files, "validation.json")).expect("JSON");
        assert_eq!(json["scores"]["tpot"]["count"], 2);
        assert_eq!(json["failed"][0]["name"], "c");
        assert_eq!(files, render_files(&validation()), "the same bytes again");
    }

    #[test]
    fn empty_suite_makes_a_report() {
        let empty = Validation {
            title: "none".into(),
            machine_properties: vec![],
            cases: vec![],
            failed_scenarios: vec![],
        };
        assert_eq!(render_files(&empty).len(), 4, "no drawing");
        assert!(summary_text(&empty).contains("NOT MET"));
        assert!(summary_text(&validation()).contains("2 scenarios measured, 1 failed"));
    }
}
