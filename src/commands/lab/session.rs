//! A lab session: sets up the devices, predicts, executes, and cleans up.
//!
//! Control groups and copies of the model are made, devices are measured within their limits, workers are started, the
//! prediction is written, and the head runs while counters are read and events happen. Everything is undone when the lab is
//! dropped, processes first.
//!
//! Not here: refused scenarios ([`super::checks`]), links ([`super::links`]), events ([`super::events`]).

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use hearth_core::Cluster;
use hearth_core::LinkTable;
use hearth_lab::{
    Child, DeviceLimits, DeviceUsage, Group, Groups, Meter, ModelCopies, Placement, WatchedDevice, copies,
};
use hearth_profiles::{Bytes, Device, Document};
use hearth_schema::Plan;
use hearth_schema::Scenario;
use hearth_schema::Trace;
use hearth_schema::events::Change;
use hearth_schema::pass::MAX_PASS_TOKENS;
use hearth_schema::scenario::Limits;
use hearth_sim::{Disturbances, Run};
use hearth_workflow::documents::{read, read_trace, write_run};
use hearth_workflow::files::{make_folder, write_in};
use hearth_workflow::simulation::{MemoryOptions, simulate_with};
use hearth_workflow::{Error, LoadedScenario, MidRunPlanner, limits};

use super::events::{self, DeviceProcesses, HeadReport};
use super::{links, steadiness};
use crate::cli::LabArgs;
use crate::diagnostics::Failure;
use crate::interruption;
use crate::machine::open_model;
use crate::ring::PROMPT_MARK;

/// For a profile under a slow disk.
const PROFILE_DEADLINE: Duration = Duration::from_mins(3);
/// For a worker to map its model.
const START_DEADLINE: Duration = Duration::from_secs(30);
/// How long a profile that was kept stands for the machine: one that others use too gets slower and faster.
/// source: measured; a shared virtual machine drifts by a tenth in some minutes
const KEPT_FOR: Duration = Duration::from_mins(10);
/// Between two lines of the head.
const RUN_DEADLINE: Duration = Duration::from_mins(30);

/// A lab that is set up.
pub struct Lab {
    children: BTreeMap<String, Child>,
    groups: BTreeMap<String, Group>,
    copies: ModelCopies,
    program: PathBuf,
    folder: PathBuf,
    /// Where profiles are kept for other labs.
    profiles: Option<PathBuf>,
    /// What tells one model from another.
    model_digest: String,
    draft: Option<PathBuf>,
    /// Tokens of the largest pass.
    pass_tokens: u32,
}

/// Set when a signal has come: the thread that undoes everything ends the process.
pub static INTERRUPTED: AtomicBool = AtomicBool::new(false);

impl Lab {
    pub fn set_up(loaded: &LoadedScenario, model: &Path, args: &LabArgs) -> Result<Lab, Failure> {
        let opened = open_model(model)?;
        let parts = opened.weights.parts().to_vec();
        let scratch =
            args.scratch.clone().or_else(|| model.parent().map(Path::to_path_buf)).unwrap_or_default();
        let names: Vec<String> = loaded.scenario.devices.iter().map(|entry| entry.name.clone()).collect();
        let limited = loaded.scenario.devices.iter().any(|entry| entry.limits.as_ref().is_some_and(bounds));
        let found = Groups::find(Path::new("/sys/fs/cgroup"));
        // Also by a lab that needs no groups itself: what a killed one left behind takes memory.
        if let Ok(found) = &found {
            found.sweep();
            if found.others() {
                tracing::warn!("another lab runs on this machine; each is part of what the other measures");
            }
        }
        let found = limited.then_some(found).transpose()?;
        undo_when_interrupted(found.clone(), copies::folder(&scratch));
        let copies = ModelCopies::make(&scratch, &parts, &names)?;
        let mut groups = BTreeMap::new();
        for (place, entry) in loaded.scenario.devices.iter().enumerate() {
            let Some(found) = &found else { break };
            let limits = entry.limits.clone().unwrap_or_default();
            // Disk and processor are measured first and limited then: a throttle passes bytes in slices and a
            // quota lets short work run at full speed, which the simulator models and a measurement would blur.
            let limits = DeviceLimits { memory: limits.memory, disk_read: None, cpu: limits.cpu };
            let group = found.create(place, copies.file(place), limits)?;
            group.limit_processor(None)?;
            groups.insert(entry.name.clone(), group);
        }
        let folder = args.report.clone().unwrap_or_else(|| copies::folder(&scratch));
        make_folder(&folder)?;
        if let Some(folder) = &args.profiles {
            make_folder(folder)?;
        }
        let workload = &loaded.scenario.workload;
        Ok(Lab {
            children: BTreeMap::new(),
            groups,
            copies,
            program: std::env::current_exe().map_err(Failure::running)?,
            folder,
            profiles: args.profiles.clone(),
            model_digest: opened.profile.digest.clone(),
            draft: loaded.draft_file(),
            pass_tokens: workload.prompt.min(workload.micro_batch).min(MAX_PASS_TOKENS),
        })
    }

    /// Where a device's processes run.
    fn seat<'s>(&'s self, name: &str, limits: &'s Limits) -> Placement<'s> {
        Placement { group: self.groups.get(name), processors: limits.affinity.as_deref().unwrap_or_default() }
    }

    /// Measures each device inside its limits; devices with equal limits are measured once. Also tells the machine's pace
    /// when they were.
    pub fn profiles(&self, loaded: &LoadedScenario) -> Result<(Vec<Device>, f64), Failure> {
        let now = steadiness::now()?;
        let mut paces = Vec::new();
        let devices = loaded.devices(|place, entry| {
            let limits = entry.limits.clone().unwrap_or_default();
            let (device, pace) =
                self.profile(place, &entry.name, &limits, now).map_err(Failure::into_error)?;
            paces.push(pace);
            Ok(device)
        })?;
        for entry in &loaded.scenario.devices {
            let limits = entry.limits.clone().unwrap_or_default();
            if let Some(group) = self.groups.get(&entry.name) {
                group.limit(DeviceLimits { memory: None, disk_read: limits.disk_read, cpu: limits.cpu })?;
            }
        }
        self.copies.drop_cache()?;
        let pace = paces.iter().sum::<f64>() / paces.len().max(1) as f64;
        Ok((devices, pace))
    }

    /// A device's profile, kept or measured, and the machine's pace when it was; `now` is the pace at present.
    fn profile(&self, place: usize, name: &str, limits: &Limits, now: f64) -> Result<(Device, f64), Failure> {
        let kept = self.profiles.as_ref().map(|folder| folder.join(self.profile_name(limits)));
        if let Some(kept) = kept.as_ref().filter(|kept| is_recent(kept))
            && let Some(pace) = pace_of(kept).filter(|then| steadiness::holds(*then, now))
        {
            return Ok((read(kept)?, pace));
        }
        let output = self.folder.join(format!("{name}.device.yaml"));
        let pass = self.pass_tokens.to_string();
        let mut arguments = strings(["profile", "--quick", "--exit-with-stdin", "--pass-tokens", &pass]);
        arguments.extend(strings(["--name", name, "--model"]));
        arguments.push(self.copies.file(place).display().to_string());
        arguments.extend(strings(["--output", &output.display().to_string()]));
        arguments.extend(threads(limits));
        Child::start(name, self.seat(name, limits), &self.program, &arguments)?
            .each_line(PROFILE_DEADLINE, |_| {})?;
        let device: Device = read(&output)?;
        let pace = steadiness::now()?;
        if let (Some(folder), Some(kept)) = (&self.profiles, kept) {
            let name = |path: &Path| path.file_name().map(PathBuf::from).unwrap_or_default();
            write_in(folder, name(&kept), device.to_yaml().as_bytes())?;
            write_in(folder, name(&beside(&kept)), pace.to_string().as_bytes())?;
        }
        Ok((device, pace))
    }

    /// The name of a profile by all that decides it: the model, what limited the measurement, and the largest pass.
    fn profile_name(&self, limits: &Limits) -> String {
        let Limits { memory, threads, affinity, .. } = limits;
        let said = format!("{} {memory:?} {threads:?} {affinity:?} {}", self.model_digest, self.pass_tokens);
        format!("{}.device.yaml", hearth_schema::digest::of(&said).replace(':', "-"))
    }

    /// Sets the limits that follow from the plan, starts the workers, and tells the cluster what memory and links there
    /// are.
    pub fn prepare(
        &mut self,
        loaded: &LoadedScenario,
        cluster: &mut Cluster,
        mut plan: Plan,
    ) -> Result<Plan, Failure> {
        let mut scenario = as_measured(loaded);
        for (place, device) in plan.devices.iter().enumerate() {
            let (_, limits) = entry(loaded, &device.name)?;
            if let (Some(_), Some(group)) = (limits.memory_share, self.groups.get(&device.name)) {
                let memory = limits::memory(&limits, cluster, &plan, place);
                group.limit(DeviceLimits { memory, ..DeviceLimits::default() })?;
            }
        }
        self.start_workers(loaded, &mut plan)?;
        // What a worker that does nothing yet takes of its memory for itself.
        let idle = |name: &String| self.groups.get(name).and_then(|group| group.memory().unreclaimable());
        let idle = self.children.keys().filter_map(idle).max().map_or(Bytes::ZERO, Bytes);
        limits::restrict_memory(&loaded.scenario, cluster, &plan, idle);
        for (entry, member) in loaded.scenario.devices.iter().zip(&cluster.members) {
            let name = format!("{}.device.yaml", entry.name);
            write_in(&self.folder, name, member.device.to_yaml().as_bytes())?;
        }
        if plan.devices.len() > 1 {
            scenario.links = links::measured(&scenario.links)?;
            cluster.links = LinkTable::new(scenario.links.clone());
        }
        if loses_a_device(&loaded.scenario) {
            write_in(&self.folder, "scenario.yaml", scenario.to_yaml().as_bytes())?;
        }
        Ok(plan)
    }

    /// Starts a worker for each place but the head's; those of an earlier run end. The plan gets their addresses.
    pub fn start_workers(&mut self, loaded: &LoadedScenario, plan: &mut Plan) -> Result<(), Failure> {
        self.children.clear();
        self.clear_memory()?;
        for place in 1..plan.devices.len() {
            let name = plan.devices[place].name.clone();
            let (index, limits) = entry(loaded, &name)?;
            let mut arguments =
                strings(["worker", "--listen", "127.0.0.1:0", "--exit-with-stdin", "--model"]);
            arguments.push(self.copies.file(index).display().to_string());
            arguments.extend(threads(&limits));
            arguments.extend(self.emulated(loaded, &name));
            let mut child = Child::start(&name, self.seat(&name, &limits), &self.program, &arguments)?;
            let said = child.line(START_DEADLINE)?;
            let address = said.split_ascii_whitespace().nth(2).unwrap_or_default().to_string();
            plan.devices[place].address = Some(address);
            self.children.insert(name, child);
        }
        if loaded.scenario.links.emulated && plan.devices.len() > 1 {
            links::write(&self.folder, &loaded.scenario, plan)?;
        }
        write_in(&self.folder, "plan.yaml", plan.to_yaml().as_bytes())?;
        Ok(())
    }

    /// Makes every device begin with an empty memory. The program's own pages are charged to whoever reads them first: to
    /// the lab, which is none of the devices.
    fn clear_memory(&self) -> Result<(), Failure> {
        self.copies.drop_cache()?;
        if self.groups.is_empty() {
            return Ok(());
        }
        self.groups.values().for_each(Group::empty);
        let mut program =
            File::open(&self.program).map_err(|error| Error::file(&self.program, "open", &error))?;
        io::copy(&mut program, &mut io::sink())
            .map_err(|error| Error::file(&self.program, "read", &error))?;
        Ok(())
    }

    fn emulated(&self, loaded: &LoadedScenario, name: &str) -> Vec<String> {
        let file = self.folder.join(links::file_name(name)).display().to_string();
        if loaded.scenario.links.emulated { vec!["--emulate-links".into(), file] } else { Vec::new() }
    }

    /// Simulates, and writes the prediction with its hash before anything is executed.
    pub fn predict(
        &self,
        cluster: &Cluster,
        plan: &Plan,
        loaded: &LoadedScenario,
    ) -> Result<(Trace, String), Failure> {
        let replanner = MidRunPlanner::new(loaded);
        let disturbances = Disturbances { events: &loaded.scenario.events, replanner: Some(&replanner) };
        let Run { trace, unreached_events, .. } =
            simulate_with(cluster, plan, &loaded.scenario, MemoryOptions::default(), &disturbances)?;
        for index in unreached_events {
            tracing::warn!("events[{index}] did not happen before the predicted run ended");
        }
        let mut text = Vec::new();
        trace.write(&mut text).map_err(Failure::running)?;
        let hash = hearth_schema::digest::of(&String::from_utf8_lossy(&text));
        write_run(&self.folder.join("predicted.trace"), &trace, &[])?;
        write_in(&self.folder, "predicted.sha256", format!("{hash}\n").as_bytes())?;
        Ok((trace, hash))
    }

    /// Runs the head inside its limits, makes the scenario's events happen, and looks at every device's counters after
    /// each token.
    pub fn execute(
        &self,
        loaded: &LoadedScenario,
        plan: &Plan,
        repeat: u32,
    ) -> Result<(Trace, Vec<DeviceUsage>), Failure> {
        let name = &plan.devices[0].name;
        let (index, limits) = entry(loaded, name)?;
        self.copies.drop_cache()?;
        if let Some(draft) = &self.draft {
            copies::drop_cache(draft)?;
        }
        let number = if repeat == 0 { String::new() } else { format!("-{}", repeat + 1) };
        let trace = self.folder.join(format!("measured{number}.trace"));
        let mut arguments = self.head(loaded, index, &trace);
        arguments.extend(threads(&limits));
        arguments.extend(self.emulated(loaded, name));
        let mut watched = Vec::new();
        for device in &plan.devices {
            let (index, limits) = entry(loaded, &device.name)?;
            watched.push(WatchedDevice {
                name: device.name.clone(),
                group: self.groups.get(&device.name),
                throttled: limits.disk_read.is_some(),
                resident_before: self.copies.resident_bytes(index),
            });
        }
        let mut meter = Meter::start(watched);
        let head = Child::start(name, self.seat(name, &limits), &self.program, &arguments)?;
        let missed = self.follow(loaded, head, || meter.token())?;
        for index in missed {
            tracing::warn!("events[{index}] did not happen before the run ended");
        }
        let trace = read_trace(&trace)?;
        let seen = meter.finish(&trace);
        Ok((trace, seen))
    }

    /// Listens to the head while events happen.
    fn follow(
        &self,
        loaded: &LoadedScenario,
        head: Child,
        mut token: impl FnMut(),
    ) -> Result<Vec<usize>, Failure> {
        let scenario = &loaded.scenario;
        let limits: Vec<Limits> =
            scenario.devices.iter().map(|entry| entry.limits.clone().unwrap_or_default()).collect();
        let hand = |(entry, limits)| {
            let entry: &hearth_schema::scenario::DeviceEntry = entry;
            let (seat, worker) =
                (self.seat(&entry.name, limits), self.children.get(&entry.name).map(Child::stopper));
            (entry.name.clone(), DeviceProcesses { seat, worker })
        };
        let hands: BTreeMap<String, DeviceProcesses> =
            scenario.devices.iter().zip(&limits).map(hand).collect();
        let (sender, said) = mpsc::channel();
        #[allow(clippy::disallowed_methods)] // events happen to real processes at real times
        let start = std::time::Instant::now();
        std::thread::scope(|scope| {
            let (list, hands, program) = (&scenario.events, &hands, &self.program);
            let applying =
                scope.spawn(move || events::apply(list, hands, program, &said, || start.elapsed()));
            let ended = head.each_line(RUN_DEADLINE, |line| {
                let word = if line.starts_with("token ") {
                    token();
                    HeadReport::Token
                } else if line == PROMPT_MARK {
                    HeadReport::Begins
                } else {
                    return;
                };
                // There is no receiver if an event failed, which is reported below.
                let _ = sender.send(word);
            });
            drop(sender);
            let applied = applying.join().map_err(|_| Failure::running("applying the events failed"))?;
            let missed = applied?;
            ended?;
            Ok(missed)
        })
    }

    /// What the head is started with.
    fn head(&self, loaded: &LoadedScenario, index: usize, trace: &Path) -> Vec<String> {
        let workload = &loaded.scenario.workload;
        let mut arguments =
            strings(["execute", "--json", "--exit-with-stdin", "--ignore-end", "--mark-tokens"]);
        arguments.push(self.folder.join("plan.yaml").display().to_string());
        for (flag, value) in [
            ("--model", self.copies.file(index).display().to_string()),
            ("--prompt-tokens", workload.prompt.to_string()),
            ("--sequences", workload.sequences.to_string()),
            ("--micro-batch", workload.micro_batch.to_string()),
            ("--tokens", workload.generate.to_string()),
            ("--trace", trace.display().to_string()),
            ("--seed", loaded.scenario.seed.to_string()),
        ] {
            arguments.extend([flag.to_string(), value]);
        }
        if let (Some(draft), drafts @ 1..) = (&self.draft, workload.drafts()) {
            arguments.extend(strings(["--draft-model", &draft.display().to_string()]));
            arguments.extend(strings(["--draft-tokens", &drafts.to_string()]));
        }
        if loses_a_device(&loaded.scenario) {
            let scenario = self.folder.join("scenario.yaml").display().to_string();
            arguments.extend(strings(["--scenario", &scenario]));
        } else {
            arguments.push("--give-up".into());
        }
        arguments
    }

    /// Ends the workers and removes limits and copies; the folder of the results, if it was to be kept.
    pub fn finish(self) -> PathBuf {
        self.folder.clone()
    }
}

/// Where the machine's pace is kept that a kept profile was measured at.
fn beside(kept: &Path) -> PathBuf {
    kept.with_extension("pace")
}

fn pace_of(kept: &Path) -> Option<f64> {
    let text = std::fs::read_to_string(beside(kept)).ok()?;
    text.trim().parse().ok().filter(|pace: &f64| pace.is_finite() && *pace > 0.0)
}

/// Whether a profile was kept that still holds.
fn is_recent(kept: &Path) -> bool {
    let modified = kept.metadata().and_then(|kept| kept.modified()).ok();
    modified.and_then(|at| at.elapsed().ok()).is_some_and(|age| age < KEPT_FOR)
}

/// Whether the head has to go on without somebody.
fn loses_a_device(scenario: &Scenario) -> bool {
    scenario.events.iter().any(|event| event.change() == Some(Change::Leaves))
}

/// The scenario with the devices as they were measured, from which the head plans again in mid-run as the simulator does.
/// What limits make of a device stands in its profile.
fn as_measured(loaded: &LoadedScenario) -> Scenario {
    let mut scenario = loaded.scenario.clone();
    for entry in &mut scenario.devices {
        (entry.profile, entry.limits) = (format!("./{}.device.yaml", entry.name), None);
    }
    // Given to the head by name.
    scenario.model = hearth_schema::scenario::ModelRef { profile: Some("unused".into()), file: None };
    scenario.workload.speculation = None;
    scenario.events.clear();
    scenario
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
fn undo_when_interrupted(groups: Option<Groups>, folder: PathBuf) {
    interruption::on_signal(move || {
        INTERRUPTED.store(true, Ordering::SeqCst);
        if let Some(groups) = &groups {
            groups.remove_own();
        }
        // Also a worker that is stopped, which its end of input would not end.
        copies::remove(&folder);
        tracing::info!("interrupted; limits and copies are removed");
        std::process::exit(interruption::INTERRUPTED);
    });
}

/// Whether limits need control groups.
fn bounds(limits: &Limits) -> bool {
    limits.memory.is_some()
        || limits.memory_share.is_some()
        || limits.disk_read.is_some()
        || limits.cpu.is_some()
}

fn strings<const N: usize>(words: [&str; N]) -> Vec<String> {
    words.map(str::to_string).into()
}

fn threads(limits: &Limits) -> Vec<String> {
    limits.threads.map_or(Vec::new(), |threads| vec!["--threads".into(), threads.to_string()])
}
