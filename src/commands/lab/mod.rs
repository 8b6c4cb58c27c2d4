//! `hearth lab`: predicts and measures scenarios on this machine, with resource limits for each device.
//!
//! This module runs one scenario; [`suite`] runs many scenarios.

mod checks;
mod events;
mod links;
mod network;
mod session;
mod steadiness;
mod suite;

use std::path::Path;
use std::sync::atomic::Ordering;

use hearth_core::metrics::{self, Metrics};
use hearth_lab::{DeviceUsage, LabError};
use hearth_profiles::measure::processor::allowed_cpus;
use hearth_reports::Report;
use hearth_schema::{Plan, Trace};
use hearth_workflow::files::check_parent_folder;
use hearth_workflow::planning;
use hearth_workflow::report_folder::ReportFolder;
use serde::Serialize;

use self::session::{IS_INTERRUPTED, Lab};
use self::steadiness::{Steadiness, measure_steadiness};
use super::print_json;
use crate::cli::LabArgs;
use crate::diagnostics::{ExitCode, Failure};
use crate::machine::read_scenario_with_overrides;
use crate::output::run::{RunSummary, format_table};
use crate::output::{counters, plan, say};
use crate::progress::{self, TerminalProgress};

/// The results of `hearth lab` for one scenario, as `--json` prints them.
#[derive(Serialize)]
struct Output {
    predicted: RunSummary,
    measured: RunSummary,
    error: Errors,
    /// The counters of the control group (cgroup) of each device, in ring order.
    groups: Vec<DeviceUsage>,
    /// The metrics of the measured runs after the first measured run.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    repeats: Vec<RunSummary>,
    /// The hash of the predicted trace, which was written before the measured runs.
    prediction: String,
    /// Whether the speed of the machine was steady during each measured run.
    steadiness: Vec<Steadiness>,
}

/// Relative errors of the prediction (predicted / measured - 1); `None` without a measured value.
#[derive(Serialize)]
struct Errors {
    tpot: Option<f64>,
    ttft: Option<f64>,
    bytes_read: Option<f64>,
}

impl From<LabError> for Failure {
    fn from(error: LabError) -> Self {
        let failure = match error {
            LabError::Limit { .. } | LabError::Process { .. } => Failure::failed(&error),
            _ => Failure::invalid(&error),
        };
        let failure = error.path().into_iter().fold(failure, Failure::with_location);
        error.hint().into_iter().fold(failure, Failure::with_hint)
    }
}

pub fn run(args: &LabArgs, json: bool) -> Result<ExitCode, Failure> {
    let Some(scenario) = &args.scenario else { return suite::run(args, json) };
    let result = run_one(args, scenario, json);
    while IS_INTERRUPTED.load(Ordering::SeqCst) {
        std::thread::park();
    }
    result
}

fn run_one(args: &LabArgs, scenario: &Path, json: bool) -> Result<ExitCode, Failure> {
    let loaded = read_scenario_with_overrides(scenario, &args.planning, args.tokens)?;
    checks::check(&loaded.scenario, &allowed_cpus())
        .map_err(|failure| failure.with_location(scenario.display()))?;
    for warning in checks::warnings(&loaded.scenario) {
        tracing::warn!("{warning}");
    }
    for folder in [&args.report, &args.profiles].into_iter().flatten() {
        check_parent_folder(folder)?;
    }
    let model = args.planning.model_file(&loaded)?;
    let model = model.ok_or_else(|| {
        Failure::invalid("the lab runs a real model, but the scenario has no model file")
            .with_location(scenario.display())
            .with_hint("name a model with `--model GGUF`; `hearth synth` can make a model")
    })?;
    let spinner = progress::spinner();
    spinner.set_message("copying the model");
    let mut lab = Lab::set_up(&loaded, &model, args)?;
    spinner.set_message("measuring the devices within their limits");
    let (devices, speed) = lab.measure_profiles()?;
    let mut cluster = loaded.cluster_from_measured_devices(devices, Some(&model))?;
    hearth_workflow::limits::apply_absolute_memory_limits(&loaded.scenario, &mut cluster);
    cluster.routes = lab.recorded_routes();
    let plan = {
        let progress = TerminalProgress::new();
        planning::read_or_make_plan(args.plan.as_deref(), &loaded, &cluster, args.planning.budget(&progress))?
    };
    spinner.set_message("starting the workers");
    // On this machine every device reaches every other, but not in the scenario.
    cluster.links.check_reachability(&plan).map_err(Failure::invalid)?;
    let mut plan = lab.prepare_devices(&mut cluster, plan)?;
    let (predicted, prediction) = lab.predict(&cluster, &plan)?;
    let predicted_metrics = metrics::compute_metrics(&predicted);
    let mut measured: Vec<(Trace, Vec<DeviceUsage>)> = Vec::new();
    let mut steadiness = Vec::new();
    for repeat in 0..args.repeats {
        let (number, repeats) = (repeat + 1, args.repeats);
        spinner.set_message(format!("prediction {prediction} written; executing run {number} of {repeats}"));
        if repeat > 0 {
            lab.start_workers(&mut plan)?;
        }
        let (run, steady) = measure_steadiness(speed, &predicted_metrics, || lab.execute(&plan, repeat))?;
        measured.push(run);
        steadiness.push(steady);
    }
    spinner.finish_and_clear();
    let report = lab.finish();
    show_all(args, json, report, &plan, (predicted, prediction), (measured, steadiness))
}

fn show_all(
    args: &LabArgs,
    json: bool,
    unfinished: Option<ReportFolder>,
    plan: &Plan,
    (predicted, prediction): (Trace, String),
    (measured, steadiness): (Vec<(Trace, Vec<DeviceUsage>)>, Vec<Steadiness>),
) -> Result<ExitCode, Failure> {
    let (mut traces, mut groups): (Vec<Trace>, Vec<Vec<DeviceUsage>>) = measured.into_iter().unzip();
    if groups.is_empty() {
        return Err(Failure::failed("the lab executed no run"));
    }
    let first = RunSummary::from_trace(&traces[0]);
    let repeats: Vec<RunSummary> = traces[1..].iter().map(RunSummary::from_trace).collect();
    let output = Output {
        error: Errors::from_metrics(&metrics::compute_metrics(&predicted), &first.metrics),
        predicted: RunSummary::from_trace(&predicted),
        measured: first,
        groups: groups.swap_remove(0),
        repeats,
        prediction,
        steadiness,
    };
    traces.insert(0, predicted);
    let report = Report::new(traces).map_err(Failure::failed)?;
    if let Some(folder) = unfinished {
        folder.finish(&report.render_files())?;
    }
    let unsteady = output.steadiness.iter().filter_map(Steadiness::warning);
    for warning in output.groups.iter().flat_map(counters::measurement_warnings).chain(unsteady) {
        tracing::warn!("{warning}");
    }
    if json {
        print_json(&output)?;
    } else {
        say!("{}", plan::format_table(plan, true));
        say!("\nprediction {}, written before the run\n", output.prediction);
        say!("predicted: {}\n", format_table(&output.predicted.metrics));
        if let Some(note) = plan::planner_disagreement(plan, &output.predicted.metrics) {
            say!("{note}\n");
        }
        say!("measured:  {}\n", format_table(&output.measured.metrics));
        for again in &output.repeats {
            say!("again:     {}\n", format_table(&again.metrics));
        }
        say!("{}\n", counters::format_table(&output.groups));
        say!("{}\n", output.error.sentence());
        if let Some(folder) = &args.report {
            say!("report: {}\n", folder.join("index.html").display());
        }
    }
    Ok(ExitCode::SUCCESS)
}

impl Errors {
    fn from_metrics(predicted: &Metrics, measured: &Metrics) -> Self {
        let relative = |predicted: Option<f64>, measured: Option<f64>| {
            let (predicted, measured) = predicted.zip(measured)?;
            (measured != 0.0).then(|| predicted / measured - 1.0)
        };
        let tpot = |metrics: &Metrics| metrics.tpot_ms.map(|tpot| tpot.mean_ms);
        Self {
            tpot: relative(tpot(predicted), tpot(measured)),
            ttft: relative(predicted.ttft_ms, measured.ttft_ms),
            bytes_read: relative(predicted.bytes_read_per_token(), measured.bytes_read_per_token()),
        }
    }

    fn sentence(&self) -> String {
        let percent = |error: f64| format!("{:+.1} %", error * 100.0);
        let [tpot, ttft, bytes] =
            [self.tpot, self.ttft, self.bytes_read].map(|error| error.map_or("-".into(), percent));
        format!("error of the prediction: TPOT {tpot}, TTFT {ttft}, bytes read {bytes}")
    }
}
