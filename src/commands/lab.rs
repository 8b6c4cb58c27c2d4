//! `hearth lab`: plan, simulate, execute and compare on this machine, with limits for each device.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hearth_exec::lab::{
    Child, Copies, DeviceLimits, Group, Groups, LabError, Meter, Metered, Watched, copies,
};
use hearth_exec::ring::Tcp;
use hearth_exec::ring::probe::{self, ProbeEffort};
use hearth_profiles::{Bytes, Device, Document, Link};
use hearth_reports::Report;
use hearth_schema::metrics::{self, Metrics};
use hearth_schema::scenario::{Limits, Links, Workload};
use hearth_schema::schedule::MAX_PASS_TOKENS;
use hearth_schema::{Cluster, LinkTable, Plan, Scenario, Trace};
use serde::Serialize;
use tokio::signal::unix::{SignalKind, signal};

use super::{plan, print_json, simulate};
use crate::cli::LabArgs;
use crate::counters;
use crate::diagnostics::Failure;
use crate::documents::{
    LoadedScenario, in_a_folder, make_folder, open_model, read, read_trace, write_in, write_trace,
};
use crate::limits;
use crate::output::{say, tell};
use crate::progress;

/// For a profile under a slow disk.
const PROFILE_DEADLINE: Duration = Duration::from_mins(3);
/// For a worker to map its model.
const START_DEADLINE: Duration = Duration::from_secs(30);
/// Between two lines of the head.
const RUN_DEADLINE: Duration = Duration::from_mins(30);

/// What `--json` gives.
#[derive(Serialize)]
struct Output {
    predicted: simulate::Output,
    measured: simulate::Output,
    error: Errors,
    /// Each device by the counters of its own control group, in ring order.
    groups: Vec<Metered>,
}

/// Relative errors of the prediction; absent where nothing was measured.
#[derive(Serialize)]
struct Errors {
    tpot: Option<f64>,
    ttft: Option<f64>,
    bytes_read: Option<f64>,
}

impl From<LabError> for Failure {
    fn from(error: LabError) -> Self {
        match error {
            LabError::NoGroups { .. } | LabError::Copy { .. } | LabError::Cache { .. } => {
                Failure::unusable(error)
            }
            LabError::Limit { .. } | LabError::Process { .. } => Failure::running(error),
        }
    }
}

/// A lab that is set up: what it holds is undone when it is dropped, processes first.
struct Lab {
    children: Vec<Child>,
    groups: BTreeMap<String, Group>,
    copies: Copies,
    program: PathBuf,
    folder: PathBuf,
    /// Tokens of the largest pass.
    pass_tokens: u32,
}

/// Set when a signal has come: the thread that undoes everything ends the process.
static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Runs the verb.
pub fn run(args: &LabArgs, json: bool) -> Result<ExitCode, Failure> {
    let result = run_through(args, json);
    while INTERRUPTED.load(Ordering::SeqCst) {
        std::thread::park();
    }
    result
}

/// What a lab leaves out of a scenario is told or refused.
fn check(args: &LabArgs, scenario: &Scenario) -> Result<(), Failure> {
    if !scenario.events.is_empty() {
        tell!(
            "warning: the lab does not make the scenario's events happen: neither its prediction nor its run has them"
        );
    }
    let workload = &scenario.workload;
    if *workload != Workload::plain(workload.prompt, workload.generate) {
        let what = "the lab executes one sequence without a draft, its prompt in the largest batches";
        return Err(Failure::unusable(what).at(args.scenario.display()).hint(
            "leave `sequences`, `micro_batch` and `speculation` out of `workload`, or use `hearth simulate`",
        ));
    }
    Ok(())
}

fn run_through(args: &LabArgs, json: bool) -> Result<ExitCode, Failure> {
    let mut loaded = LoadedScenario::read(&args.scenario)?;
    loaded.keep_weights(&args.planning)?;
    if let Some(tokens) = args.tokens {
        loaded.generate(tokens)?;
    }
    check(args, &loaded.scenario)?;
    args.report.as_deref().map_or(Ok(()), in_a_folder)?;
    let model = args.model.clone().or_else(|| loaded.model_file()).ok_or_else(|| {
        Failure::unusable("the lab runs a real model, and the scenario names none")
            .at(args.scenario.display())
            .hint("give --model GGUF, or make one with `hearth synth`")
    })?;
    let line = progress::line();
    line.set_message("copying the model");
    let mut lab = Lab::set_up(&loaded, &model, args)?;
    line.set_message("measuring the devices inside their limits");
    let devices = lab.profiles(&loaded)?;
    let mut cluster = loaded.cluster_of(devices, Some(&model))?;
    limits::bound_memory(&loaded.scenario, &mut cluster);
    let plan = plan::read_or_make(args.plan.as_deref(), &loaded, &cluster, &args.planning)?;
    line.set_message("starting the workers");
    // Here every device reaches every other; the devices that this machine stands for do not.
    cluster.links.carry(&plan).map_err(Failure::unusable)?;
    let plan = lab.start_workers(&loaded, &mut cluster, plan)?;
    let (predicted, hash) = lab.predict(&cluster, &plan, &loaded)?;
    line.set_message(format!("prediction {hash} is written; executing"));
    let (measured, groups) = lab.execute(&loaded, &plan)?;
    line.finish_and_clear();
    drop(lab.children.drain(..));
    let folder = lab.folder.clone();
    drop(lab);
    let report = Report::new(vec![predicted.clone(), measured.clone()]).map_err(Failure::running)?;
    if args.report.is_some() {
        for (name, bytes) in report.files() {
            write_in(&folder, name, &bytes)?;
        }
    }
    let output = Output {
        error: Errors::of(&metrics::compute(&predicted), &metrics::compute(&measured)),
        predicted: simulate::Output::of(&predicted),
        measured: simulate::Output::of(&measured),
        groups,
    };
    for warning in output.groups.iter().flat_map(counters::warnings) {
        tell!("warning: {warning}");
    }
    if json {
        print_json(&output)?;
    } else {
        say!("{}", plan::table(&plan));
        say!("\nprediction {hash}, written before the run\n");
        say!("predicted: {}\n", simulate::table(&output.predicted.metrics));
        say!("measured:  {}\n", simulate::table(&output.measured.metrics));
        say!("{}\n", counters::table(&output.groups));
        say!("{}\n", output.error.sentence());
        if args.report.is_some() {
            say!("report: {}\n", folder.join("index.html").display());
        }
    }
    Ok(ExitCode::SUCCESS)
}

impl Lab {
    fn set_up(loaded: &LoadedScenario, model: &Path, args: &LabArgs) -> Result<Lab, Failure> {
        let parts = open_model(model)?.weights.parts().to_vec();
        let scratch =
            args.scratch.clone().or_else(|| model.parent().map(Path::to_path_buf)).unwrap_or_default();
        let names: Vec<String> = loaded.scenario.devices.iter().map(|entry| entry.name.clone()).collect();
        let limited = loaded.scenario.devices.iter().any(|entry| entry.limits.as_ref().is_some_and(bounds));
        let mut groups = BTreeMap::new();
        let found = Groups::find(Path::new("/sys/fs/cgroup"));
        // Also by a lab that needs no groups itself: what a killed one left behind takes memory.
        if let Ok(found) = &found {
            found.sweep();
        }
        let found = limited.then_some(found).transpose()?;
        undo_when_interrupted(found.clone(), copies::folder(&scratch));
        let copies = Copies::make(&scratch, &parts, &names)?;
        if let Some(found) = &found {
            for (place, entry) in loaded.scenario.devices.iter().enumerate() {
                let limits = entry.limits.clone().unwrap_or_default();
                // The disk is measured first and throttled then: a throttle passes bytes in slices, which the
                // simulator models and a short measurement would only blur.
                let limits = DeviceLimits { memory: limits.memory, disk_read: None };
                groups.insert(entry.name.clone(), found.create(place, copies.file(place), limits)?);
            }
        }
        let folder = args.report.clone().unwrap_or_else(|| copies::folder(&scratch));
        make_folder(&folder)?;
        let program = std::env::current_exe().map_err(Failure::running)?;
        let pass_tokens = loaded.scenario.workload.prompt.min(MAX_PASS_TOKENS);
        Ok(Lab { children: Vec::new(), groups, copies, program, folder, pass_tokens })
    }

    /// Measures each device inside its limits; devices with equal limits are measured once.
    fn profiles(&self, loaded: &LoadedScenario) -> Result<Vec<Device>, Failure> {
        let devices = loaded.devices(|place, entry| {
            let limits = entry.limits.clone().unwrap_or_default();
            self.profile(place, &entry.name, &limits)
        })?;
        for entry in &loaded.scenario.devices {
            let disk_read = entry.limits.as_ref().and_then(|limits| limits.disk_read);
            if let Some(group) = self.groups.get(&entry.name) {
                group.limit(DeviceLimits { memory: None, disk_read })?;
            }
        }
        self.copies.drop_cache()?;
        Ok(devices)
    }

    fn profile(&self, place: usize, name: &str, limits: &Limits) -> Result<Device, Failure> {
        let output = self.folder.join(format!("{name}.device.yaml"));
        let pass = self.pass_tokens.to_string();
        let mut arguments = strings(["profile", "--quick", "--exit-with-stdin", "--pass-tokens", &pass]);
        arguments.extend(strings(["--name", name, "--model"]));
        arguments.push(self.copies.file(place).display().to_string());
        arguments.extend(strings(["--output", &output.display().to_string()]));
        arguments.extend(threads(limits));
        Child::start(name, self.groups.get(name), &self.program, &arguments)?
            .each_line(PROFILE_DEADLINE, |_| {})?;
        read(&output)
    }

    /// Starts a worker for each place but the head's, sets the limits that follow from the plan, and tells
    /// the cluster what memory and links there are.
    fn start_workers(
        &mut self,
        loaded: &LoadedScenario,
        cluster: &mut Cluster,
        mut plan: Plan,
    ) -> Result<Plan, Failure> {
        let mut idle = Bytes::ZERO;
        let mut first = None;
        for place in 0..plan.devices.len() {
            let name = plan.devices[place].name.clone();
            let (index, limits) = entry(loaded, &name)?;
            if let (Some(_), Some(group)) = (limits.memory_share, self.groups.get(&name)) {
                let memory = limits::memory(&limits, cluster, &plan, place);
                group.limit(DeviceLimits { memory, disk_read: None })?;
            }
            if place == 0 {
                continue;
            }
            let mut arguments =
                strings(["worker", "--listen", "127.0.0.1:0", "--exit-with-stdin", "--model"]);
            arguments.push(self.copies.file(index).display().to_string());
            arguments.extend(threads(&limits));
            let group = self.groups.get(&name);
            let mut child = Child::start(&name, group, &self.program, &arguments)?;
            let said = child.line(START_DEADLINE)?;
            let address = said.split_ascii_whitespace().nth(2).unwrap_or_default().to_string();
            first.get_or_insert_with(|| address.clone());
            plan.devices[place].address = Some(address);
            idle =
                idle.max(group.and_then(|group| group.memory().unreclaimable()).map_or(Bytes::ZERO, Bytes));
            self.children.push(child);
        }
        self.set_memory(loaded, cluster, &plan, idle)?;
        if let Some(address) = first {
            cluster.links = measured_links(&address)?;
        }
        write_in(&self.folder, "plan.yaml", plan.to_yaml().as_bytes())?;
        Ok(plan)
    }

    /// Memory limits that were set after the profile was taken become the devices' memory; `idle` is what
    /// a worker that does nothing yet takes of it for itself.
    fn set_memory(
        &self,
        loaded: &LoadedScenario,
        cluster: &mut Cluster,
        plan: &Plan,
        idle: Bytes,
    ) -> Result<(), Failure> {
        limits::restrict_memory(&loaded.scenario, cluster, plan, idle);
        for (entry, member) in loaded.scenario.devices.iter().zip(&cluster.members) {
            let name = format!("{}.device.yaml", entry.name);
            write_in(&self.folder, name, member.device.to_yaml().as_bytes())?;
        }
        Ok(())
    }

    /// Simulates, and writes the prediction with its hash before anything is executed.
    fn predict(
        &self,
        cluster: &Cluster,
        plan: &Plan,
        loaded: &LoadedScenario,
    ) -> Result<(Trace, String), Failure> {
        let trace = simulate::simulate(cluster, plan, &loaded.scenario, false)?;
        let mut text = Vec::new();
        trace.write(&mut text).map_err(Failure::running)?;
        let hash = hearth_schema::digest::of(&String::from_utf8_lossy(&text));
        write_trace(&self.folder.join("predicted.trace"), &trace)?;
        write_in(&self.folder, "predicted.sha256", format!("{hash}\n").as_bytes())?;
        Ok((trace, hash))
    }

    /// Runs the head inside its limits, and looks at every device's counters after each token.
    fn execute(&self, loaded: &LoadedScenario, plan: &Plan) -> Result<(Trace, Vec<Metered>), Failure> {
        let name = &plan.devices[0].name;
        let (index, limits) = entry(loaded, name)?;
        self.copies.drop_cache()?;
        let trace = self.folder.join("measured.trace");
        let workload = &loaded.scenario.workload;
        let mut arguments =
            strings(["execute", "--json", "--exit-with-stdin", "--ignore-end", "--mark-tokens", "--give-up"]);
        arguments.push(self.folder.join("plan.yaml").display().to_string());
        for (flag, value) in [
            ("--model", self.copies.file(index).display().to_string()),
            ("--prompt-tokens", workload.prompt.to_string()),
            ("--tokens", workload.generate.to_string()),
            ("--trace", trace.display().to_string()),
            ("--seed", loaded.scenario.seed.to_string()),
        ] {
            arguments.extend([flag.to_string(), value]);
        }
        arguments.extend(threads(&limits));
        let mut watched = Vec::new();
        for device in &plan.devices {
            let (index, limits) = entry(loaded, &device.name)?;
            watched.push(Watched {
                name: device.name.clone(),
                group: self.groups.get(&device.name),
                throttled: limits.disk_read.is_some(),
                resident_before: self.copies.resident_bytes(index),
            });
        }
        let mut meter = Meter::start(watched);
        let head = Child::start(name, self.groups.get(name), &self.program, &arguments)?;
        head.each_line(RUN_DEADLINE, |line| {
            if line.starts_with("token ") {
                meter.token();
            }
        })?;
        let trace = read_trace(&trace)?;
        let seen = meter.finish(&trace);
        Ok((trace, seen))
    }
}

/// A device's place in the scenario and its limits.
fn entry(loaded: &LoadedScenario, name: &str) -> Result<(usize, Limits), Failure> {
    let devices = &loaded.scenario.devices;
    let index = devices
        .iter()
        .position(|entry| entry.name == name)
        .ok_or_else(|| Failure::unusable(format!("the plan's device `{name}` is not in the scenario")))?;
    Ok((index, devices[index].limits.clone().unwrap_or_default()))
}

/// Undoes what the lab has set up when a person or the system stops it; destructors do not run then.
fn undo_when_interrupted(groups: Option<Groups>, copies: PathBuf) {
    std::thread::spawn(move || {
        let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else { return };
        runtime.block_on(async {
            let Ok(mut terminated) = signal(SignalKind::terminate()) else { return };
            tokio::select! {
                _ = tokio::signal::ctrl_c() => {}
                _ = terminated.recv() => {}
            }
            INTERRUPTED.store(true, Ordering::SeqCst);
            if let Some(groups) = groups {
                groups.remove_own();
            }
            let _ = std::fs::remove_dir_all(copies);
            tell!("interrupted; limits and copies are removed");
            std::process::exit(130);
        });
    });
}

/// Whether limits need control groups.
fn bounds(limits: &Limits) -> bool {
    limits.memory.is_some() || limits.memory_share.is_some() || limits.disk_read.is_some()
}

fn strings<const N: usize>(words: [&str; N]) -> Vec<String> {
    words.map(str::to_string).into()
}

fn threads(limits: &Limits) -> Vec<String> {
    limits.threads.map_or(Vec::new(), |threads| vec!["--threads".into(), threads.to_string()])
}

/// Every link is this machine's loopback; it is measured against a worker that is up.
fn measured_links(address: &str) -> Result<LinkTable, Failure> {
    let runtime = tokio::runtime::Runtime::new().map_err(Failure::running)?;
    let link = runtime.block_on(probe::link(&Tcp, address, ProbeEffort::quick()))?;
    let default = Link { latency: link.latency, bandwidth: link.bandwidth };
    Ok(LinkTable::new(Links::constant(default)))
}

impl Errors {
    fn of(predicted: &Metrics, measured: &Metrics) -> Errors {
        let relative = |predicted: Option<f64>, measured: Option<f64>| {
            let (predicted, measured) = predicted.zip(measured)?;
            (measured != 0.0).then(|| predicted / measured - 1.0)
        };
        let read = |run: &Metrics| run.devices.iter().map(|device| device.bytes_read_per_token).sum::<f64>();
        Errors {
            tpot: relative(predicted.tpot_ms.map(|tpot| tpot.mean), measured.tpot_ms.map(|tpot| tpot.mean)),
            ttft: relative(predicted.ttft_ms, measured.ttft_ms),
            bytes_read: relative(Some(read(predicted)), Some(read(measured))),
        }
    }

    fn sentence(&self) -> String {
        let percent =
            |error: Option<f64>| error.map_or("-".into(), |error| format!("{:+.1} %", error * 100.0));
        format!(
            "error of the prediction: TPOT {}, TTFT {}, bytes read {}",
            percent(self.tpot),
            percent(self.ttft),
            percent(self.bytes_read)
        )
    }
}
