//! How does a report on a suite read?
//!
//! What is demanded and whether it is met, where each scenario stands, its numbers, the terms, the pairs in the wrong
//! order, what failed, and the machine.
//!
//! Not here: the scores themselves ([`super::scores`]).

use std::fmt::Write;

use serde::Serialize;

use super::scores::{self, Bar, Errors, Judged, Scored, Scores};
use super::{Validation, chart};
use crate::document::{Block, Document, Figure, Section, Table, Text, Weight};
use crate::{escape, markdown, page};

/// The files of a report: page, Markdown, JSON, a table and the drawings, by name.
///
/// # Panics
///
/// Never: numbers and texts are JSON.
pub fn files(validation: &Validation) -> Vec<(String, Vec<u8>)> {
    let scores = validation.scores();
    let document = document(validation, &scores);
    let mut json = serde_json::to_vec_pretty(&Everything { validation, scores: &scores })
        .expect("numbers and texts are JSON, and memory takes them");
    json.push(b'\n');
    let mut files = vec![
        ("index.html".to_owned(), page::render(&document).into_bytes()),
        ("report.md".to_owned(), markdown::render(&document).into_bytes()),
        ("validation.csv".to_owned(), csv(&scores).into_bytes()),
        ("validation.json".to_owned(), json),
    ];
    files.extend(
        document
            .figures()
            .map(|figure| (format!("{}.svg", figure.name), figure.drawing.standalone().into_bytes())),
    );
    files
}

#[derive(Serialize)]
struct Everything<'a> {
    #[serde(flatten)]
    validation: &'a Validation,
    scores: &'a Scores,
}

/// What a suite comes to, in a few lines.
pub fn summary_text(validation: &Validation) -> String {
    let scores = validation.scores();
    let (measured, failed) = (validation.cases.len(), validation.failed.len());
    let mut text = format!("{measured} scenarios measured, {failed} failed\n");
    for bar in &scores.bars {
        let _ = writeln!(text, "  {}: {}{}", bar.text, found(bar), if bar.met { "" } else { ", NOT MET" });
    }
    for (name, errors) in [("time to the first token", &scores.ttft), ("bytes read", &scores.bytes_read)] {
        let _ = writeln!(text, "  {name}: {}", in_words(errors));
    }
    text
}

fn found(bar: &Bar) -> String {
    bar.found.map_or("no scenario says anything of it".into(), share)
}

fn share(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

fn in_words(errors: &Errors) -> String {
    let number = |error: Option<f64>| error.map_or("none".into(), share);
    format!(
        "median error {}, largest {}, over {} scenarios, {} of them judged by interval",
        number(errors.median),
        number(errors.worst),
        errors.count,
        errors.edges
    )
}

fn document(validation: &Validation, scores: &Scores) -> Document {
    let mut opening = vec![
        Block::Paragraph(Text::from(format!("Time per token: {}.", in_words(&scores.tpot)))),
        Block::Note(
            "Each scenario was planned and simulated from profiles of micro-workloads, with its threads, on its processors; \
             throttles of disks, quotas and shares of memory were set afterwards, and are the simulator's to know. The \
             prediction was written before anything was executed. Nothing is fitted to these runs."
                .into(),
        ),
    ];
    opening.extend(unsteady(validation));
    let mut sections = Vec::new();
    let mut section = |title: &str, anchor: &'static str, blocks: Vec<Block>| {
        if !blocks.is_empty() {
            sections.push(Section { title: title.to_owned(), anchor, blocks });
        }
    };
    section("What is demanded", "bars", vec![bars(scores)]);
    section("Once and again", "passes", passes(validation));
    section("Predicted and measured", "parity", parities(scores));
    section("Every scenario", "cases", cases(validation, scores));
    section("Where the time goes", "terms", terms(scores));
    section("Order", "order", order(scores));
    section("What failed", "failed", failed(validation));
    section("The machine", "machine", machine(validation));
    Document { title: Text::from("How right the simulator is: ").name(&validation.title), opening, sections }
}

/// How often the machine changed under a lab; nothing where it never did.
fn unsteady(validation: &Validation) -> Option<Block> {
    let runs = || validation.cases.iter().flat_map(|case| &case.runs);
    let over: u32 = runs().map(|run| run.started_over).sum();
    let changed = runs().filter(|run| !run.steady).count();
    (over > 0 || changed > 0).then(|| {
        let all = runs().count();
        let text = format!(
            "Beside the {all} runs here {over} were given up, because the machine computed faster or slower before or after \
             them than when it was measured, or others had its processors during them; {changed} of those that are here \
             are still such."
        );
        Block::Note(text.into())
    })
}

fn table(caption: &str, head: &[&str], rows: Vec<Vec<Text>>, wordy: bool) -> Block {
    Block::Table(Table {
        caption: caption.into(),
        head: head.iter().map(|&cell| cell.to_owned()).collect(),
        rows: rows.into_iter().map(|row| (Weight::Plain, row)).collect(),
        wordy,
    })
}

fn bars(scores: &Scores) -> Block {
    let row = |bar: &Bar| {
        let met = match (bar.found, bar.met) {
            (None, true) => "-",
            (_, true) => "met",
            (_, false) => "not met",
        };
        vec![Text::from(bar.text.as_str()), found(bar).into(), met.into()]
    };
    table("What was found", &["bar", "found", ""], scores.bars.iter().map(row).collect(), true)
}

/// What each pass over the scenarios would have said alone.
fn passes(validation: &Validation) -> Vec<Block> {
    let passes = scores::by_pass(&validation.cases);
    if passes.len() < 2 {
        return Vec::new();
    }
    let row = |(at, scores): (usize, &Scores)| {
        let bars = scores.bars.iter().map(|bar| Text::from(found(bar)));
        [Text::from((at + 1).to_string())].into_iter().chain(bars).collect()
    };
    let head: Vec<&str> =
        ["pass"].into_iter().chain(passes[0].bars.iter().map(|bar| bar.text.as_str())).collect();
    let caption =
        "Every pass predicts all scenarios anew and then measures them; errors of one pass have no intervals";
    vec![table(caption, &head, passes.iter().enumerate().map(row).collect(), true)]
}

fn parities(scores: &Scores) -> Vec<Block> {
    type Of = fn(&Scored) -> Option<Judged>;
    let quantities: [(&str, &str, &str, f64, Of); 3] = [
        ("parity-tpot", "Time per token", "ms", 1.0, |case| case.tpot),
        ("parity-ttft", "Time to the first token", "ms", 1.0, |case| case.ttft),
        ("parity-bytes", "Read from disk for a token", "MB", 1e-6, |case| case.bytes_read),
    ];
    let mut blocks = Vec::new();
    for (id, title, unit, factor, of) in quantities {
        let scaled = |one: Judged| Judged {
            predicted: one.predicted * factor,
            measured: one.measured * factor,
            range: one.range.map(|value| value * factor),
            ..one
        };
        let points: Vec<(&str, Judged)> =
            scores.cases.iter().filter_map(|case| Some((case.name.as_str(), scaled(of(case)?)))).collect();
        if let Some(drawing) = chart::parity(id, title, unit, &points) {
            let caption =
                "A point is a scenario; lines beside it reach over all that was measured of it.".into();
            blocks.push(Block::Figure(Figure { name: id.into(), drawing, caption }));
        }
    }
    blocks
}

fn cases(validation: &Validation, scores: &Scores) -> Vec<Block> {
    let number = |value: f64| if value >= 100.0 { format!("{value:.0}") } else { format!("{value:.1}") };
    let cells = |one: Option<Judged>, factor: f64| match one {
        None => ["-", "-", "-"].map(Text::from),
        Some(one) => {
            let measured = if one.edge {
                format!("{} to {}", number(one.range[0] * factor), number(one.range[1] * factor))
            } else {
                number(one.measured * factor)
            };
            let error = format!("{:+.1} %", one.error * 100.0);
            [number(one.predicted * factor), measured, error].map(Text::from)
        }
    };
    let row = |case: &Scored| {
        let repeated = case.tpot.filter(|tpot| tpot.runs > 1);
        let spread = repeated.map_or("-".into(), |tpot| share(tpot.spread));
        let mut row = vec![Text::default().name(&case.name)];
        row.extend(cells(case.tpot, 1.0));
        row.push(spread.into());
        row.extend(cells(case.ttft, 1.0));
        row.extend(cells(case.bytes_read, 1e-6));
        row
    };
    let head = [
        "scenario",
        "TPOT predicted, ms",
        "measured",
        "error",
        "spread",
        "TTFT predicted, ms",
        "measured",
        "error",
        "read predicted, MB a token",
        "measured",
        "error",
    ];
    let rows: Vec<Vec<Text>> = scores.cases.iter().map(row).collect();
    if rows.is_empty() {
        return Vec::new();
    }
    let caption = "Medians of all passes, errors too; where what was measured spreads by more than 15 % the range, and the error beyond it";
    let asked = |case: &super::Case| {
        vec![
            Text::default().name(&case.name),
            Text::default().name(&case.question),
            Text::default().code(predictions(case)),
        ]
    };
    let asked: Vec<Vec<Text>> = validation.cases.iter().map(asked).collect();
    vec![
        table(caption, &head, rows, false),
        table("What each asks", &["scenario", "question", "predictions"], asked, true),
    ]
}

/// The digests of a scenario's predictions.
fn predictions(case: &super::Case) -> String {
    let digests: Vec<&str> = case.runs.iter().map(|run| run.prediction.as_str()).collect();
    digests.join(" ")
}

fn terms(scores: &Scores) -> Vec<Block> {
    if scores.terms.is_empty() {
        return Vec::new();
    }
    let mean = scores
        .terms
        .iter()
        .map(|(name, error)| vec![Text::from(name.replace('_', " ")), share(*error).into()]);
    let mut head = vec!["scenario".to_owned()];
    head.extend(scores.terms.iter().map(|(name, _)| name.replace('_', " ")));
    let row = |case: &Scored| {
        let error = |term: &scores::Term| Text::from(format!("{:+.1} %", term.error * 100.0));
        let cells: Vec<Text> =
            [Text::default().name(&case.name)].into_iter().chain(case.terms.iter().map(error)).collect();
        (Weight::Plain, cells)
    };
    vec![
        table(
            "Mean size of a term's error, of the time per token",
            &["term", "error"],
            mean.collect(),
            false,
        ),
        Block::Table(Table {
            caption: "Predicted less measured, of the measured time per token".into(),
            head,
            rows: scores.cases.iter().filter(|case| !case.terms.is_empty()).map(row).collect(),
            wordy: false,
        }),
    ]
}

fn order(scores: &Scores) -> Vec<Block> {
    let mut blocks = Vec::new();
    for order in &scores.order {
        let right = order.share().map_or("no pair".into(), share);
        let (apart, pairs) = (share(order.apart), order.pairs);
        blocks.push(Block::Paragraph(
            format!(
                "Of {pairs} pairs whose measured times differ by more than {apart}, ordered right: {right}."
            )
            .into(),
        ));
    }
    let pair = |[fast, slow]: &[String; 2]| vec![Text::default().name(fast), Text::default().name(slow)];
    let wrong: Vec<Vec<Text>> = scores.order[0].wrong.iter().map(pair).collect();
    if !wrong.is_empty() {
        blocks.push(table(
            "Pairs that stand the other way round",
            &["faster, measured", "slower, measured"],
            wrong,
            true,
        ));
    }
    blocks
}

fn failed(validation: &Validation) -> Vec<Block> {
    let row =
        |failed: &super::Failed| vec![Text::default().name(&failed.name), Text::default().name(&failed.why)];
    let rows: Vec<Vec<Text>> = validation.failed.iter().map(row).collect();
    if rows.is_empty() {
        Vec::new()
    } else {
        vec![table("Scenarios without numbers", &["scenario", "why"], rows, true)]
    }
}

fn machine(validation: &Validation) -> Vec<Block> {
    let row = |(key, value): &(String, String)| vec![Text::from(key.as_str()), Text::default().name(value)];
    let rows: Vec<Vec<Text>> = validation.machine.iter().map(row).collect();
    if rows.is_empty() { Vec::new() } else { vec![table("Where it was measured", &["", ""], rows, true)] }
}

/// A line for each scenario.
fn csv(scores: &Scores) -> String {
    let mut text = String::from(
        "scenario,tpot_predicted_ms,tpot_measured_ms,tpot_least_ms,tpot_most_ms,tpot_error,edge,ttft_predicted_ms,\
         ttft_measured_ms,ttft_error,read_predicted_bytes,read_measured_bytes,read_error",
    );
    for (name, _) in &scores.terms {
        let _ = write!(text, ",{name}_error");
    }
    text.push('\n');
    let number = |value: Option<f64>| value.map_or(String::new(), |value| format!("{value:.6}"));
    for case in &scores.cases {
        let of = |one: Option<Judged>| one.map(|one| (one.predicted, one.measured, one.error));
        let [tpot, ttft, read] = [of(case.tpot), of(case.ttft), of(case.bytes_read)];
        let range = case.tpot.map(|tpot| tpot.range);
        let mut cells = vec![escape::csv(&case.name)];
        cells.extend([tpot.map(|tpot| tpot.0), tpot.map(|tpot| tpot.1)].map(number));
        cells.extend([range.map(|range| range[0]), range.map(|range| range[1])].map(number));
        cells.push(number(tpot.map(|tpot| tpot.2)));
        cells.push(case.tpot.map_or(String::new(), |tpot| tpot.edge.to_string()));
        for one in [ttft, read] {
            cells.extend([one.map(|one| one.0), one.map(|one| one.1), one.map(|one| one.2)].map(number));
        }
        let mut terms: Vec<String> = case.terms.iter().map(|term| number(Some(term.error))).collect();
        terms.resize(scores.terms.len(), String::new());
        cells.extend(terms);
        let _ = writeln!(text, "{}", cells.join(","));
    }
    text
}

#[cfg(test)]
mod tests {
    use hearth_core::metrics::Terms;

    use super::*;
    use crate::validation::{Case, Failed, Numbers, Run};

    fn validation() -> Validation {
        let numbers = |ms: f64| Numbers {
            tpot_ms: Some(ms),
            ttft_ms: Some(3.0 * ms),
            bytes_read: Some(ms * 1e6),
            terms: Terms { cpu: ms, ..Terms::default() },
        };
        let case = |name: &str, predicted: f64, measured: &[f64]| Case {
            name: name.into(),
            question: "Is <it> right?".into(),
            runs: measured
                .iter()
                .map(|&ms| Run {
                    prediction: "sha256:1".into(),
                    predicted: numbers(predicted),
                    measured: numbers(ms),
                    steady: true,
                    started_over: 0,
                })
                .collect(),
        };
        Validation {
            title: "suite".into(),
            machine: vec![("cores".into(), "2".into())],
            cases: vec![case("a", 105.0, &[100.0, 101.0, 99.0]), case("=b", 60.0, &[40.0, 80.0])],
            failed: vec![Failed { name: "c".into(), why: "no <disk>".into() }],
        }
    }

    fn text(files: &[(String, Vec<u8>)], name: &str) -> String {
        let found = files.iter().find(|(file, _)| file == name).expect(name);
        String::from_utf8(found.1.clone()).expect("text")
    }

    #[test]
    fn the_report_says_what_was_found_in_every_form() {
        let files = files(&validation());
        let markdown = text(&files, "report.md");
        assert!(markdown.contains("+5.0 %") && markdown.contains("40.0 to 80.0"), "{markdown}");
        assert!(markdown.contains("Once and again"), "{markdown}");
        assert!(
            markdown.contains("| scenarios that have all their numbers: all | 66.7 % | not met |"),
            "{markdown}"
        );
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
        assert_eq!(files, super::files(&validation()), "the same bytes again");
    }

    #[test]
    fn nothing_measured_is_a_report_too() {
        let empty = Validation { title: "none".into(), machine: vec![], cases: vec![], failed: vec![] };
        assert_eq!(files(&empty).len(), 4, "no drawing");
        assert!(summary_text(&empty).contains("NOT MET"));
        assert!(summary_text(&validation()).contains("2 scenarios measured, 1 failed"));
    }
}
