//! `hearth sweep`: plans and simulates a scenario for each combination of values of one or two fields.

use std::fmt::Write;
use std::path::PathBuf;

use hearth_workflow::documents::read_sweep_table;
use hearth_workflow::files::{check_outputs, write};
use hearth_workflow::parallel_jobs;
use hearth_workflow::sweep::{Sweep, SweepOptions, SweepRow, chart, merge, table};
use serde::Serialize;

use super::print_json;
use crate::cli::{MergeArgs, PlanSource, SweepArgs, SweepCommand};
use crate::diagnostics::{EXIT_INCOMPLETE, ExitCode, Failure};
use crate::machine::read_scenario;
use crate::output::say;
use crate::progress::TerminalProgress;

/// The result of `hearth sweep` as `--json` prints it.
#[derive(Serialize)]
struct Output<'s> {
    digest: &'s str,
    fields: Vec<&'s str>,
    all_rows: usize,
    rows: &'s [SweepRow],
}

/// The result of `hearth sweep merge` as `--json` prints it.
#[derive(Serialize)]
struct Merged<'t> {
    tables: usize,
    rows: usize,
    /// The merged table as CSV, unless it was written to a file.
    #[serde(skip_serializing_if = "Option::is_none")]
    table: Option<&'t str>,
}

pub fn run(args: &SweepArgs, json: bool) -> Result<ExitCode, Failure> {
    if let Some(SweepCommand::Merge(args)) = &args.verb {
        return merge_tables(args, json);
    }
    let sweep = read(args)?;
    let (first, step) = args.shard.map_or((0, 1), |(number, count)| (number - 1, count));
    let indices: Vec<usize> = (first..sweep.row_count()).step_by(step).collect();
    let save = |rows: &[SweepRow]| match &args.output {
        Some(path) => write(path, table::csv_text(&sweep, args.shard, rows).as_bytes()),
        None => Ok(()),
    };
    let progress = TerminalProgress::new();
    let rows = sweep.run(&indices, parallel_jobs::thread_count(args.jobs), &progress, save)?;
    drop(progress);
    save(&rows)?;
    let text = table::csv_text(&sweep, args.shard, &rows);
    if json {
        let fields = sweep.fields.iter().map(|field| field.path.as_str()).collect();
        print_json(&Output { digest: &sweep.digest, fields, all_rows: sweep.row_count(), rows: &rows })?;
    } else if args.output.is_none() {
        say!("{text}");
    } else {
        say!("{}\n", summary(&sweep, &rows));
    }
    if let Some(path) = &args.chart {
        write(path, chart::draw_svg(&text)?.as_bytes())?;
    }
    if rows.len() < indices.len() {
        tracing::info!("stopped: {} of {} rows were computed", rows.len(), indices.len());
        return Ok(ExitCode(EXIT_INCOMPLETE));
    }
    Ok(ExitCode::SUCCESS)
}

fn read(args: &SweepArgs) -> Result<Sweep, Failure> {
    let Some(path) = &args.scenario else { return Err(Failure::invalid("no scenario is given")) };
    let PlanSource { plan, planning } = &args.source;
    let loaded = read_scenario(path)?;
    let inputs = loaded.input_paths();
    check_outputs(args.output.iter().chain(&args.chart), inputs.iter().chain(plan).chain(&planning.model))?;
    let options = SweepOptions {
        varied_fields: args.vary.clone(),
        overrides: planning.overrides(),
        plan_path: plan.clone(),
        model_path: planning.model.clone(),
        generated_tokens: args.tokens,
        seeds_per_point: args.repeat,
        is_shard: args.shard.is_some(),
    };
    Ok(Sweep::new(loaded, &options)?)
}

fn merge_tables(args: &MergeArgs, json: bool) -> Result<ExitCode, Failure> {
    check_outputs(args.output.iter().chain(&args.chart), &args.tables)?;
    let part = |path: &PathBuf| Ok(merge::ShardTable { path: path.clone(), text: read_sweep_table(path)? });
    let parts: Vec<merge::ShardTable> = args.tables.iter().map(part).collect::<Result<_, Failure>>()?;
    let text = merge::merge_shards(&parts)?;
    if let Some(path) = &args.output {
        write(path, text.as_bytes())?;
    }
    if json {
        let table = args.output.is_none().then_some(text.as_str());
        print_json(&Merged { tables: parts.len(), rows: text.lines().count().saturating_sub(2), table })?;
    } else if args.output.is_none() {
        say!("{text}");
    }
    if let Some(path) = &args.chart {
        write(path, chart::draw_svg(&text)?.as_bytes())?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Summarises the outcomes of the rows and names the fastest row.
fn summary(sweep: &Sweep, rows: &[SweepRow]) -> String {
    let ran = rows.iter().filter(|row| row.evaluation.is_ok()).count();
    let mut text = format!("{} rows, {ran} of them ok", rows.len());
    let timed = rows.iter().filter_map(|row| Some((row.evaluation.tpot_ms?, row)));
    let fastest = timed.clone().min_by(|(one, _), (other, _)| one.total_cmp(other));
    let slowest = timed.max_by(|(one, _), (other, _)| one.total_cmp(other));
    if let (Some((least, row)), Some((most, _))) = (fastest, slowest) {
        let values = sweep.fields.iter().zip(&row.values);
        let at: Vec<String> = values.map(|(field, value)| format!("{} = {value}", field.path)).collect();
        let _ = if least < most {
            write!(text, "\nfastest: {least:.1} ms per token at {}", at.join(", "))
        } else {
            write!(text, "\nall rows: {least:.1} ms per token")
        };
    }
    if let Some(row) = rows.iter().find(|row| !row.evaluation.is_ok()) {
        let _ = write!(text, "\nfirst not ok: row {}: {}", row.index, row.evaluation.outcome);
    }
    text
}
