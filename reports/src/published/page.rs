//! How does a comparison with published numbers read?
//!
//! Times per token as a grid with published and simulated values in each cell, then times to the first token, memory
//! pressure, claims, scores, plans and spreads. A value outside its tolerance is marked. Remarks and caveats come from
//! the document.
//!
//! Not here: the scores themselves ([`super::scores`]).

use serde::Serialize;

use std::fmt::Write;

use hearth_schema::trace::Outcome;

use super::results::{Result, Results, Simulated};
use super::scores::{Error, Judgement, Scores};
use super::speeds::Speeds;
use super::{Cell, Published, Ratio};
use crate::document::{Block, Document, Figure, Section, Table, Text, Weight};
use crate::parity::{self, Dot};
use crate::{lines, markdown, page, rounding};

/// The files of a comparison: page, Markdown and JSON, by name.
///
/// # Panics
///
/// Never: numbers and texts are JSON.
pub fn files(published: &Published, results: &Results) -> Vec<(String, Vec<u8>)> {
    let scores = Scores::of(published, results);
    let document = document(published, results, &scores);
    let mut json = serde_json::to_vec_pretty(&Everything::new(published, results, &scores))
        .expect("numbers and texts are JSON, and memory takes them");
    json.push(b'\n');
    let mut files = vec![
        ("index.html".to_owned(), page::render(&document).into_bytes()),
        ("report.md".to_owned(), markdown::render(&document).into_bytes()),
        ("comparison.json".to_owned(), json),
    ];
    let drawings = document.figures();
    files.extend(
        drawings.map(|figure| (format!("{}.svg", figure.name), figure.drawing.standalone().into_bytes())),
    );
    files
}

/// What a comparison comes to, in a few sentences.
pub fn summary_text(published: &Published, results: &Results) -> String {
    let scores = Scores::of(published, results);
    let mut text = format!("{}: {}\n", published.name, summary(published, &scores).plain());
    for Judgement { text: claim, range: [from, to], ratio, .. } in
        scores.claims.iter().filter(|claim| !claim.holds)
    {
        let ratio = ratio.map_or("no ratio".into(), |ratio| format!("{ratio:.2}"));
        let _ =
            writeln!(text, "  does not hold: {claim} (simulated {ratio}, the text can mean {from} to {to})");
    }
    if let Some(speeds) = &scores.speeds {
        text += &speeds.text();
    }
    text
}

#[derive(Serialize)]
struct Everything<'a> {
    name: &'a str,
    scores: &'a Scores,
    runs: Vec<Ran<'a>>,
}

#[derive(Serialize)]
struct Ran<'a> {
    row: &'a str,
    system: &'a str,
    result: &'a Result,
}

impl<'a> Everything<'a> {
    fn new(published: &'a Published, results: &'a Results, scores: &'a Scores) -> Self {
        let ran = |(&(row, system), result): (&(usize, usize), &'a Result)| Ran {
            row: &published.rows[row].label,
            system: &published.systems[system].name,
            result,
        };
        Self { name: &published.name, scores, runs: results.iter().map(ran).collect() }
    }
}

fn document(published: &Published, results: &Results, scores: &Scores) -> Document {
    let source = Text::from(format!("{} ({}).", published.title, published.source));
    let mut opening = vec![Block::Paragraph(source), Block::Paragraph(summary(published, scores))];
    opening.extend(published.caveats.iter().map(|caveat| Block::Note(caveat.as_str().into())));
    let mut sections = Vec::new();
    let mut section = |title: &str, anchor: &'static str, blocks: Vec<Block>| {
        if !blocks.is_empty() {
            sections.push(Section { title: title.to_owned(), anchor, blocks });
        }
    };
    let mut tpot = times(published, &scores.tpot, "Time per output token in ms");
    tpot.extend(parity(published, &scores.tpot));
    section("Time per token", "tpot", tpot);
    section(
        "Time to the first token",
        "ttft",
        times(published, &scores.ttft, "Time to the first token in ms"),
    );
    section("Speeds", "speeds", scores.speeds.iter().flat_map(Speeds::blocks).collect());
    section("Memory pressure", "pressure", pressure(published, results));
    section("Memory by device and processor", "footprint", footprint(published, results));
    section("What the text says", "claims", claims(published, scores));
    section("Remarks", "remarks", remarks(published));
    section("How sure", "spread", spreads(published, results));
    section("Plans", "plans", plans(published, results));
    Document {
        title: Text::from(format!("Simulated beside published: {}", published.name)),
        opening,
        sections,
    }
}

fn summary(published: &Published, scores: &Scores) -> Text {
    let mut said = Vec::new();
    let percent = |share: f64| format!("{:.1} %", share * 100.0);
    if let Some(median) = scores.median {
        said.push(errors_in_words("Times per token", median, &scores.tpot));
        if let Some(held_out) = scores.median_held_out.filter(|_| !published.fitted.is_empty()) {
            said.push(format!("On the rows that nothing was fitted on the median is {}.", percent(held_out)));
        }
    }
    if let Some(median) = scores.median_ttft {
        said.push(errors_in_words("Times to the first token", median, &scores.ttft));
    }
    let list = |what: &str, found: &[String]| match found {
        [] => format!("{what}: none."),
        some => format!("{what}: {}.", some.join("; ")),
    };
    if published.systems.len() > 1 && scores.median.is_some() {
        said.push(list("Pairs of systems in the wrong order", &scores.order));
    }
    let rank = |(name, rank): &(String, f64)| format!("{name} {rank:.2}");
    if !scores.rank.is_empty() {
        let ranks: Vec<String> = scores.rank.iter().map(rank).collect();
        said.push(format!("Rank correlation of the rows: {}.", ranks.join(", ")));
    }
    said.push(list("Runs that ended otherwise than published", &scores.outcomes));
    if !scores.claims.is_empty() {
        let hold = scores.claims.iter().filter(|claim| claim.holds).count();
        said.push(format!("Of {} claims {hold} hold.", scores.claims.len()));
    }
    said.join(" ").into()
}

fn errors_in_words(what: &str, median: f64, errors: &[Error]) -> String {
    let counted = || errors.iter().filter(|error| !error.left_out);
    let (cells, outside) = (counted().count(), counted().filter(|error| !error.within).count());
    format!(
        "{what}: median error {:.1} %, {outside} of {cells} cells outside their tolerance.",
        median * 100.0
    )
}

fn times(published: &Published, errors: &[Error], what: &str) -> Vec<Block> {
    let used = |name: &str| errors.iter().any(|error| error.system == name);
    let systems: Vec<&str> =
        published.systems.iter().map(|system| system.name.as_str()).filter(|name| used(name)).collect();
    if systems.is_empty() {
        return Vec::new();
    }
    let rows = published.rows.iter().map(|row| {
        let fitted = if published.fitted.contains(&row.label) { " (fitted)" } else { "" };
        let mut cells = vec![Text::from(format!("{}{fitted}", row.label))];
        for name in &systems {
            let error = errors.iter().find(|error| error.row == row.label && error.system == *name);
            cells.push(error.map_or_else(|| missing(row.cells.get(*name)), time).into());
        }
        (Weight::Plain, cells)
    });
    let caption = format!(
        "{what}: published, simulated, error. In brackets what is outside its tolerance, {:.0} % unless a cell has its own.",
        published.tolerance.0 * 100.0
    );
    let head = std::iter::once(String::new()).chain(systems.iter().map(|name| (*name).to_owned())).collect();
    vec![Block::Table(Table { caption: caption.into(), head, rows: rows.collect(), wordy: true })]
}

/// Milliseconds as a table has them.
fn short(value: f64) -> String {
    rounding::tick(value, u32::from(value < 100.0))
}

fn missing(cell: Option<&Cell>) -> String {
    match cell.and_then(|cell| cell.outcome) {
        Some(Outcome::Ok) | None => "-".to_owned(),
        Some(ended) => ended.word().to_owned(),
    }
}

fn time(error: &Error) -> String {
    let Some((simulated, off)) = error.simulated_ms.zip(error.error) else {
        return format!("{}, none", short(error.published_ms));
    };
    let said = format!("{}, {}, {:+.0} %", short(error.published_ms), short(simulated), off * 100.0);
    if error.within { said } else { format!("[{said}]") }
}

/// Every cell as a dot, a colour a system.
fn parity(published: &Published, errors: &[Error]) -> Option<Block> {
    let dot = |error: &Error| {
        let system = published.systems.iter().position(|system| system.name == error.system)?;
        Some(Dot {
            sort: error.system.clone(),
            class: lines::CLASSES[system % lines::CLASSES.len()],
            name: format!("{}, {}", error.row, error.system),
            truth: error.published_ms,
            predicted: error.simulated_ms?,
        })
    };
    let dots: Vec<Dot> = errors.iter().filter_map(dot).collect();
    let drawing = parity::draw(&dots)?;
    let caption = "Upwards the simulated time, across the published one, both in equal ratios.".into();
    Some(Block::Figure(Figure { name: "parity".into(), drawing, caption }))
}

fn pressure(published: &Published, results: &Results) -> Vec<Block> {
    let mut rows = Vec::new();
    for (place, row) in published.rows.iter().enumerate() {
        for (column, system) in published.systems.iter().enumerate() {
            let Some(cell) = row.cells.get(&system.name).filter(|cell| !cell.pressure.is_empty()) else {
                continue;
            };
            let run = results.get(&(place, column)).and_then(Result::ran);
            let mut group = Weight::Group;
            for (device, share) in &cell.pressure {
                let percent = |share: f64| format!("{:.1} %", share * 100.0);
                // A device that the plan leaves out holds nothing.
                let simulated = run
                    .map_or("-".to_owned(), |run| percent(run.pressure.get(device).copied().unwrap_or(0.0)));
                let cells =
                    [row.label.clone(), system.name.clone(), device.clone(), percent(share.0), simulated];
                rows.push((group, cells.map(Text::from).to_vec()));
                group = Weight::Plain;
            }
        }
    }
    let head = ["", "system", "device", "published", "simulated"].map(str::to_owned).to_vec();
    let caption = "Memory that cannot be reclaimed, as a share of the device's memory.".into();
    if rows.is_empty() { Vec::new() } else { vec![Block::Table(Table { caption, head, rows, wordy: true })] }
}

/// What every processor's memory holds, a row a run.
fn footprint(published: &Published, results: &Results) -> Vec<Block> {
    let mut blocks = Vec::new();
    for (column, system) in published.systems.iter().enumerate() {
        if !published.footprint.contains(&system.name) {
            continue;
        }
        let runs: Vec<(&str, &Simulated)> = results
            .iter()
            .filter(|((_, of), _)| *of == column)
            .filter_map(|(&(row, _), result)| Some((published.rows[row].label.as_str(), result.ran()?)))
            .collect();
        let mut places: Vec<&str> =
            runs.iter().flat_map(|(_, run)| &run.footprint).map(|it| it.place.as_str()).collect();
        places.sort_unstable();
        places.dedup();
        let cell = |run: &Simulated, place: &str| {
            let found = run.footprint.iter().find(|it| it.place == place).filter(|it| it.bytes > 0);
            found.map_or("-".to_owned(), |it| {
                let gib = |bytes: u64| rounding::tick(bytes as f64 / f64::from(1 << 30), 1);
                let over = if it.bytes > it.available { " (over)" } else { "" };
                format!("{} of {}{over}", gib(it.bytes), gib(it.available))
            })
        };
        let rows = runs.iter().map(|(label, run)| {
            let cells = places.iter().map(|place| Text::from(cell(run, place)));
            (Weight::Plain, std::iter::once(Text::from(*label)).chain(cells).collect())
        });
        let caption = format!(
            "{}: weights, keys and values and buffers in GiB, of what a run can have; over: read from disk for every token, or too much.",
            system.name
        );
        let head =
            std::iter::once(String::new()).chain(places.iter().map(|place| (*place).to_owned())).collect();
        blocks.push(Block::Table(Table { caption: caption.into(), head, rows: rows.collect(), wordy: true }));
    }
    blocks
}

fn claims(published: &Published, scores: &Scores) -> Vec<Block> {
    let row = |claim: &Judgement| {
        let ratio = claim.ratio.map_or("none".to_owned(), |ratio| format!("{ratio:.2}"));
        let range = format!("{} to {}", claim.range[0], claim.range[1]);
        let holds = if claim.holds { "yes" } else { "no" };
        let cells = [claim.text.clone(), range, ratio, holds.to_owned()];
        (Weight::Plain, cells.map(Text::from).to_vec())
    };
    let rows: Vec<_> = scores.claims.iter().map(row).collect();
    let head = ["claim", "can mean", "simulated", "holds"].map(str::to_owned).to_vec();
    let mixed = published.claims.iter().any(|claim| claim.ratio != Ratio::Tpot);
    let caption =
        if mixed { "Ratios, of what each claim names." } else { "Ratios of times per token." }.into();
    if rows.is_empty() { Vec::new() } else { vec![Block::Table(Table { caption, head, rows, wordy: true })] }
}

fn remarks(published: &Published) -> Vec<Block> {
    let mut blocks = Vec::new();
    for system in published.systems.iter().filter(|system| !system.about.is_empty()) {
        blocks
            .push(Block::Paragraph(Text::default().name(&system.name).words(format!(": {}", system.about))));
    }
    for row in &published.rows {
        for (name, cell) in &row.cells {
            if let Some(remark) = &cell.remark {
                blocks.push(Block::Paragraph(format!("{}, {name}: {remark}", row.label).into()));
            }
        }
    }
    blocks
}

fn spreads(published: &Published, results: &Results) -> Vec<Block> {
    let mut rows = Vec::new();
    for (&(row, system), result) in results {
        let Some((run, spread)) = result.ran().and_then(|run| Some((run, run.spread.as_ref()?))) else {
            continue;
        };
        let cells = [
            published.rows[row].label.clone(),
            published.systems[system].name.clone(),
            run.tpot_ms.map_or_else(String::new, short),
            spread.between(),
            spread.moved_by(),
        ];
        rows.push((Weight::Plain, cells.map(Text::from).to_vec()));
    }
    let head =
        ["", "system", "ms a token", "eight of ten draws take", "moved most by"].map(str::to_owned).to_vec();
    let caption = "Every parameter of the devices and links is drawn around its value, by as much as its source leaves \
                   open. The last column moves one parameter at a time by its own uncertainty; to its end: the run \
                   ends out of memory then."
        .into();
    if rows.is_empty() { Vec::new() } else { vec![Block::Table(Table { caption, head, rows, wordy: true })] }
}

fn plans(published: &Published, results: &Results) -> Vec<Block> {
    let row = |(&(row, system), result): (&(usize, usize), &Result)| {
        let (plan, note) = match result {
            Result::Ran(run) => (run.plan.clone(), run.unvalidated.join("; ")),
            Result::Refused { refused } => ("none".to_owned(), refused.clone()),
        };
        let time = result.tpot_ms().map_or_else(|| "-".to_owned(), short);
        let cells =
            [published.rows[row].label.clone(), published.systems[system].name.clone(), time, plan, note];
        (Weight::Plain, cells.map(Text::from).to_vec())
    };
    let rows = results.iter().map(row).collect();
    let head = ["", "system", "ms a token", "layers (of these on the GPU)", "unvalidated"]
        .map(str::to_owned)
        .to_vec();
    let caption = "What was simulated.".into();
    vec![Block::Table(Table { caption, head, rows, wordy: true })]
}
