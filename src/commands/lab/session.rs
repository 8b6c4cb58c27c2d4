//! A lab session: sets up the devices, predicts and executes a plan, and cleans up.
//!
//! The lab creates control groups and copies of the model, measures the devices within their limits, starts the
//! workers and writes the prediction. Then it runs the head, reads counters and applies events. Dropping the lab ends
//! the processes and removes the control groups and copies.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use hearth_core::expert_routes::RecordedRoutes;
use hearth_core::schedule::arrivals::arrivals;
use hearth_core::{Cluster, LinkTable};
use hearth_lab::{
    Cgroup, CgroupHierarchy, DeviceLimits, DeviceProcess, DeviceUsage, LabError, Meter, ModelCopies,
    Placement, WatchedDevice, copies,
};
use hearth_profiles::{Bytes, DeviceProfile, Document};
use hearth_schema::events::Change;
use hearth_schema::pass::MAX_PASS_TOKENS;
use hearth_schema::request_trace::format_requests;
use hearth_schema::scenario::{DeviceEntry, LinkEmulation, ResourceLimits};
use hearth_schema::{Plan, Scenario, Trace};
use hearth_sim::{ScenarioEvents, SimulationResult};
use hearth_workflow::documents::{read_document, read_routes, read_trace, write_run_outputs};
use hearth_workflow::files::{create_folder, write_in_folder};
use hearth_workflow::report_folder::ReportFolder;
use hearth_workflow::simulation::{MemoryOptions, simulate_with_events};
use hearth_workflow::{Error, LoadedScenario, ScenarioReplanner, limits};

use super::events::{EventTarget, HeadProgress, apply};
use super::network::LabNetwork;
use super::{links, steadiness};
use crate::cli::{GpuWeightFormat, LabArgs};
use crate::diagnostics::Failure;
use crate::interruption;
use crate::machine::open_model;
use crate::ring::PROMPT_START_LINE;

/// The file with the requests that arrive during the runs, in the folder of the lab.
const REQUESTS_FILE: &str = "requests.csv";
/// Time limit for measuring the profile of a device, long enough for a slow disk.
const PROFILE_DEADLINE: Duration = Duration::from_mins(3);
/// Time limit for the start of a worker, which maps the model file into memory.
const START_DEADLINE: Duration = Duration::from_secs(30);
/// Maximum age of a cached device profile.
/// source: measured; the speed of a shared virtual machine drifts by a tenth within a few minutes
const MAX_PROFILE_AGE: Duration = Duration::from_mins(10);
/// Time limit between two lines of the output of the head.
const RUN_DEADLINE: Duration = Duration::from_mins(30);

pub struct Lab<'l> {
    loaded: &'l LoadedScenario,
    children: BTreeMap<String, DeviceProcess>,
    groups: BTreeMap<String, Cgroup>,
    copies: ModelCopies,
    network: Option<LabNetwork>,
    program: PathBuf,
    /// The folder of the plan, the traces and the files for the devices: the report, or else beside the copies.
    folder: PathBuf,
    report: Option<ReportFolder>,
    /// The folder of cached device profiles, which other labs can reuse.
    profiles: Option<PathBuf>,
    model_digest: String,
    draft: Option<PathBuf>,
    /// The recording of `--routes`, and its file.
    routes: Option<(PathBuf, Arc<RecordedRoutes>)>,
    pass_tokens: u32,
}

/// Whether the process received a signal. The thread of the signal handler then cleans up and exits the process.
pub static IS_INTERRUPTED: AtomicBool = AtomicBool::new(false);

impl<'l> Lab<'l> {
    pub fn set_up(loaded: &'l LoadedScenario, model: &Path, args: &LabArgs) -> Result<Self, Failure> {
        let opened = open_model(model, GpuWeightFormat::AsStored)?;
        let parts = opened.weights.model().file_paths.clone();
        let read = |path: &Path| Ok::<_, Failure>((path.to_owned(), read_routes(path, &opened.profile)?));
        let routes = args.routes.as_deref().map(read).transpose()?;
        let scratch = args.scratch.clone().or_else(|| model.parent().map(PathBuf::from)).unwrap_or_default();
        let devices = &loaded.scenario.devices;
        let names: Vec<String> = devices.iter().map(|entry| entry.name.clone()).collect();
        let limited = devices.iter().any(|entry| entry.limits.as_ref().is_some_and(need_groups));
        let found = CgroupHierarchy::find(Path::new("/sys/fs/cgroup"));
        // Also done by a lab without groups, because a killed lab leaves processes that occupy memory.
        if let Ok(found) = &found {
            found.remove_stale_groups();
            if found.has_other_labs() {
                tracing::warn!("another lab is running on this machine and disturbs the measurements");
            }
        }
        let found = limited.then_some(found).transpose()?;
        let report = args.report.as_deref().map(|folder| ReportFolder::create(folder, "hearth lab"));
        let report = report.transpose()?;
        let report_folder = report.as_ref().map(|report| report.path().to_owned());
        clean_up_on_signal(found.clone(), copies::copies_folder(&scratch), report_folder.clone());
        let copies = ModelCopies::create(&scratch, &parts, &names)?;
        let network = LabNetwork::start(&loaded.scenario, &copies::copies_folder(&scratch))?;
        let mut groups = BTreeMap::new();
        for (index, entry) in devices.iter().enumerate() {
            let Some(found) = &found else { break };
            let ResourceLimits { memory, cpu_cores: cpu, .. } = limits_of(entry);
            // Disk and CPU are limited only after the measurement of the device, because the simulator models
            // throttles, which pass bytes in slices, and quotas, under which short work runs at full speed.
            let limits = DeviceLimits { memory, disk_read: None, cpus: cpu };
            let group = found.create_group(index, copies.first_file(index), limits)?;
            group.set_cpu_limit(None)?;
            groups.insert(entry.name.clone(), group);
        }
        if let Some(folder) = &args.profiles {
            create_folder(folder)?;
        }
        let workload = &loaded.scenario.workload;
        Ok(Lab {
            loaded,
            children: BTreeMap::new(),
            groups,
            copies,
            network,
            program: std::env::current_exe().map_err(Failure::failed)?,
            folder: report_folder.unwrap_or_else(|| copies::copies_folder(&scratch)),
            report,
            profiles: args.profiles.clone(),
            model_digest: opened.profile.digest.clone(),
            draft: loaded.draft_model_file()?,
            routes,
            pass_tokens: workload.prompt_tokens.min(workload.micro_batch).min(MAX_PASS_TOKENS),
        })
    }

    fn entry(&self, name: &str) -> Result<(usize, &'l DeviceEntry), Failure> {
        let mut entries = self.loaded.scenario.devices.iter().enumerate();
        let found = entries.find(|(_, entry)| entry.name == name);
        found.ok_or_else(|| Failure::invalid(format!("device `{name}` of the plan is not in the scenario")))
    }

    /// Starts this program with `arguments` as a device of the lab, within the resource limits of the device.
    fn start(&self, entry: &DeviceEntry, mut arguments: Vec<String>) -> Result<DeviceProcess, LabError> {
        if let Some(threads) = entry.limits.as_ref().and_then(|limits| limits.threads) {
            arguments.extend(strings(["--threads", &threads.to_string()]));
        }
        DeviceProcess::start(&entry.name, self.placement(entry), &self.program, &arguments)
    }

    fn placement<'s>(&'s self, entry: &'s DeviceEntry) -> Placement<'s> {
        let affinity = entry.limits.as_ref().and_then(|limits| limits.affinity.as_deref());
        let host = self.network.as_ref().zip(self.entry(&entry.name).ok());
        Placement {
            cgroup: self.groups.get(&entry.name),
            cpus: affinity.unwrap_or_default(),
            host: host.map(|(network, (device, _))| &network.host(device).namespace),
        }
    }

    /// Measures the profile of each device within its limits; devices with equal limits share a measurement. Also
    /// returns the mean speed of the machine during these measurements, in FLOP/s.
    pub fn measure_profiles(&self) -> Result<(Vec<DeviceProfile>, f64), Failure> {
        let now = steadiness::measure_flops_per_second()?;
        let mut speeds = Vec::new();
        let devices = self.loaded.resolve_devices(|index, entry| {
            let (device, speed) = self.profile(index, entry, now).map_err(Failure::into_error)?;
            speeds.push(speed);
            Ok(device)
        })?;
        for entry in &self.loaded.scenario.devices {
            if let Some(group) = self.groups.get(&entry.name) {
                let ResourceLimits { disk_read_rate: disk_read, cpu_cores: cpu, .. } = limits_of(entry);
                group.set_limits(DeviceLimits { memory: None, disk_read, cpus: cpu })?;
            }
        }
        self.copies.drop_page_cache()?;
        let speed = speeds.iter().sum::<f64>() / speeds.len().max(1) as f64;
        Ok((devices, speed))
    }

    /// Returns the profile of a device, cached or newly measured, and the speed of the machine when the profile was
    /// measured. `now` is the current speed. Speeds are in FLOP/s.
    fn profile(&self, index: usize, entry: &DeviceEntry, now: f64) -> Result<(DeviceProfile, f64), Failure> {
        let cached = self.profiles.as_ref().map(|folder| folder.join(self.profile_name(&limits_of(entry))));
        if let Some(cached) = cached.as_ref().filter(|cached| is_recent(cached))
            && let Some(speed) = speed_of(cached).filter(|then| steadiness::is_similar_speed(*then, now))
        {
            return Ok((read_document(cached)?, speed));
        }
        let name = entry.name.as_str();
        let output = self.folder.join(format!("{name}.device.yaml"));
        let pass = self.pass_tokens.to_string();
        let mut arguments = strings(["profile", "--quick", "--exit-with-stdin", "--pass-tokens", &pass]);
        arguments.extend(strings(["--name", name, "--model"]));
        arguments.push(self.copies.first_file(index).display().to_string());
        arguments.extend(strings(["--output", &output.display().to_string()]));
        self.start(entry, arguments)?.for_each_line(PROFILE_DEADLINE, |_| {})?;
        let device: DeviceProfile = read_document(&output)?;
        let speed = steadiness::measure_flops_per_second()?;
        if let (Some(folder), Some(cached)) = (&self.profiles, cached) {
            let name = |path: &Path| path.file_name().map(PathBuf::from).unwrap_or_default();
            write_in_folder(folder, name(&cached), device.to_yaml().as_bytes())?;
            write_in_folder(folder, name(&speed_file(&cached)), speed.to_string().as_bytes())?;
        }
        Ok((device, speed))
    }

    /// Returns the file name of a cached device profile: a digest of everything that the profile depends on.
    fn profile_name(&self, limits: &ResourceLimits) -> String {
        let ResourceLimits { memory, threads, affinity, .. } = limits;
        let key = format!("{} {memory:?} {threads:?} {affinity:?} {}", self.model_digest, self.pass_tokens);
        format!("{}.device.yaml", hearth_schema::digest::digest_text(&key).replace(':', "-"))
    }

    /// Sets the memory limits that depend on the plan, starts the workers, and updates the memory and the links of the
    /// simulated cluster. Returns the plan with the addresses of the workers.
    pub fn prepare_devices(&mut self, cluster: &mut Cluster, mut plan: Plan) -> Result<Plan, Failure> {
        let mut scenario = as_measured(self.loaded);
        for (index, device) in plan.devices.iter().enumerate() {
            let limits = limits_of(self.entry(&device.name)?.1);
            if let (Some(_), Some(group)) = (limits.memory_share, self.groups.get(&device.name)) {
                let memory = limits::memory_limit(&limits, cluster, &plan, index);
                group.set_limits(DeviceLimits { memory, ..DeviceLimits::default() })?;
            }
        }
        self.start_workers(&mut plan)?;
        // The unreclaimable memory of a worker before it computes.
        let idle = |name: &String| self.groups.get(name)?.memory().unreclaimable_bytes();
        let idle = self.children.keys().filter_map(idle).max().map_or(Bytes::ZERO, Bytes);
        limits::apply_memory_limits(&self.loaded.scenario, cluster, &plan, idle);
        for (entry, member) in self.loaded.scenario.devices.iter().zip(&cluster.members) {
            let name = format!("{}.device.yaml", entry.name);
            write_in_folder(&self.folder, name, member.device.to_yaml().as_bytes())?;
        }
        if plan.devices.len() > 1 {
            scenario.links = match &self.network {
                Some(network) => {
                    let devices = plan.devices.iter().map(|device| Ok(self.entry(&device.name)?.0));
                    network.measure(&scenario, &devices.collect::<Result<Vec<_>, Failure>>()?)?
                }
                None => links::measure(&scenario.links)?,
            };
            write_in_folder(&self.folder, "links.yaml", links::to_yaml(&scenario.links)?.as_bytes())?;
            cluster.links = LinkTable::new(scenario.links.clone());
        }
        if loses_a_device(&self.loaded.scenario) {
            write_in_folder(&self.folder, "scenario.yaml", scenario.to_yaml().as_bytes())?;
        }
        Ok(plan)
    }

    /// Ends the workers of an earlier run, starts new ones, and writes their addresses into the plan.
    pub fn start_workers(&mut self, plan: &mut Plan) -> Result<(), Failure> {
        self.children.clear();
        self.drop_caches()?;
        for device in plan.devices.iter_mut().skip(1) {
            let (index, entry) = self.entry(&device.name)?;
            let network = self.network.as_ref();
            let listen = network.map_or("127.0.0.1:0".into(), |network| network.listen_address(index));
            let mut arguments = strings(["worker", "--listen", &listen, "--exit-with-stdin"]);
            arguments.extend(strings(["--announce", "never", "--model"]));
            arguments.push(self.copies.first_file(index).display().to_string());
            arguments.extend(self.network_flags(&entry.name));
            let mut child = self.start(entry, arguments)?;
            let line = child.next_line(START_DEADLINE)?;
            device.address = Some(line.split_ascii_whitespace().nth(2).unwrap_or_default().to_string());
            self.children.insert(entry.name.clone(), child);
        }
        let emulation = self.loaded.scenario.links.emulation;
        if emulation == LinkEmulation::Delays && plan.devices.len() > 1 {
            links::write(&self.folder, &self.loaded.scenario, plan)?;
        }
        write_in_folder(&self.folder, "plan.yaml", plan.to_yaml().as_bytes())?;
        Ok(())
    }

    /// Drops the page cache of every device. The lab then reads the program file, so that the kernel does not charge
    /// the pages of this file to a device.
    fn drop_caches(&self) -> Result<(), Failure> {
        self.copies.drop_page_cache()?;
        if self.groups.is_empty() {
            return Ok(());
        }
        self.groups.values().for_each(Cgroup::drop_page_cache);
        let failed =
            |what: &'static str| move |error: io::Error| Error::from_io_error(&self.program, what, &error);
        let mut program = File::open(&self.program).map_err(failed("open"))?;
        io::copy(&mut program, &mut io::sink()).map_err(failed("read"))?;
        Ok(())
    }

    /// Returns the flags for the network of a device: its emulated links, or the key of a ring of several hosts.
    fn network_flags(&self, name: &str) -> Vec<String> {
        let emulated = self.folder.join(links::file_name(name));
        match (&self.network, self.loaded.scenario.links.emulation) {
            (Some(network), _) => strings(["--key", &network.key_file().display().to_string()]),
            (None, LinkEmulation::Delays) => strings(["--emulate-links", &emulated.display().to_string()]),
            (None, _) => Vec::new(),
        }
    }

    /// Simulates the plan, and writes the predicted trace and its hash, and the requests if they arrive during the run.
    /// Returns the trace and the hash.
    pub fn predict(&self, cluster: &Cluster, plan: &Plan) -> Result<(Trace, String), Failure> {
        if let Some(arrivals) = arrivals(cluster) {
            write_in_folder(&self.folder, REQUESTS_FILE, format_requests(&arrivals).as_bytes())?;
        }
        let (scenario, memory) = (&self.loaded.scenario, MemoryOptions::default());
        let replanner = ScenarioReplanner::new(self.loaded);
        let events = ScenarioEvents { events: &scenario.events, replanner: Some(&replanner), adapts: false };
        let SimulationResult { trace, unreached_event_indices: unreached_events, .. } =
            simulate_with_events(cluster, plan, scenario, memory, &events)?;
        for index in unreached_events {
            tracing::warn!("events[{index}] did not happen before the predicted run ended");
        }
        let mut text = Vec::new();
        trace.write(&mut text).map_err(Failure::failed)?;
        let hash = hearth_schema::digest::digest_text(&String::from_utf8_lossy(&text));
        write_run_outputs(&self.folder.join("predicted.trace"), &trace, &[])?;
        write_in_folder(&self.folder, "predicted.sha256", format!("{hash}\n").as_bytes())?;
        Ok((trace, hash))
    }

    /// Runs the head within its limits, applies the events of the scenario, and reads the counters of all devices
    /// after each token.
    pub fn execute(&self, plan: &Plan, repeat: u32) -> Result<(Trace, Vec<DeviceUsage>), Failure> {
        let (index, head) = self.entry(&plan.devices[0].name)?;
        self.copies.drop_page_cache()?;
        if let Some(draft) = &self.draft {
            copies::drop_page_cache(draft)?;
        }
        self.copies.fill_memory()?;
        let number = if repeat == 0 { String::new() } else { format!("-{}", repeat + 1) };
        let trace = self.folder.join(format!("measured{number}.trace"));
        let mut arguments = self.head_arguments(index, &trace);
        arguments.extend(self.network_flags(&head.name));
        let mut watched = Vec::new();
        for device in &plan.devices {
            let (index, entry) = self.entry(&device.name)?;
            watched.push(WatchedDevice {
                name: device.name.clone(),
                cgroup: self.groups.get(&device.name),
                is_throttled: limits_of(entry).disk_read_rate.is_some(),
                resident_bytes_before: self.copies.resident_bytes(index),
            });
        }
        let mut meter = Meter::start(watched);
        let head = self.start(head, arguments)?;
        let missed = self.follow(head, || meter.on_token())?;
        for index in missed {
            tracing::warn!("events[{index}] did not happen before the run ended");
        }
        let trace = read_trace(&trace)?;
        let usage = meter.finish(&trace);
        Ok((trace, usage))
    }

    /// Reads the output of the head, calls `token` at each token, and applies events. Returns the indices of the events
    /// that did not happen.
    fn follow(&self, head: DeviceProcess, mut token: impl FnMut()) -> Result<Vec<usize>, Failure> {
        let scenario = &self.loaded.scenario;
        let processes = |entry: &'l DeviceEntry| EventTarget {
            placement: self.placement(entry),
            worker_freeze_handle: self.children.get(&entry.name).map(DeviceProcess::freeze_handle),
        };
        let devices: BTreeMap<String, EventTarget> =
            scenario.devices.iter().map(|entry| (entry.name.clone(), processes(entry))).collect();
        let (report_tx, reports) = mpsc::channel();
        #[allow(clippy::disallowed_methods)] // events happen to real processes at real times
        let start = std::time::Instant::now();
        std::thread::scope(|scope| {
            let (list, devices, program) = (&scenario.events, &devices, &self.program);
            let applying = scope.spawn(move || apply(list, devices, program, &reports, || start.elapsed()));
            let ended = head.for_each_line(RUN_DEADLINE, |line| {
                let report = if line.starts_with("token ") {
                    token();
                    HeadProgress::Token
                } else if line == PROMPT_START_LINE {
                    HeadProgress::Prompt
                } else {
                    return;
                };
                // There is no receiver if an event failed, which is reported below.
                let _ = report_tx.send(report);
            });
            drop(report_tx);
            let applied = applying.join().map_err(|_| Failure::failed("the event thread panicked"))?;
            let missed = applied?;
            ended?;
            Ok(missed)
        })
    }

    /// Returns the recorded routes that the tokens of the lab take, if any.
    pub fn recorded_routes(&self) -> Option<Arc<RecordedRoutes>> {
        self.routes.as_ref().map(|(_, routes)| routes.clone())
    }

    fn head_arguments(&self, index: usize, trace: &Path) -> Vec<String> {
        let workload = &self.loaded.scenario.workload;
        let mut arguments =
            strings(["execute", "--json", "--exit-with-stdin", "--ignore-end", "--mark-tokens"]);
        arguments.push(self.folder.join("plan.yaml").display().to_string());
        for (flag, value) in [
            ("--model", self.copies.first_file(index).display().to_string()),
            ("--sequences", workload.sequences.to_string()),
            ("--micro-batch", workload.micro_batch.to_string()),
            ("--trace", trace.display().to_string()),
            ("--seed", self.loaded.scenario.seed.to_string()),
        ] {
            arguments.extend([flag.to_string(), value]);
        }
        if workload.arrivals.is_some() {
            let requests = self.folder.join(REQUESTS_FILE).display().to_string();
            arguments.extend(["--arrivals".into(), requests]);
        } else {
            arguments.extend(["--prompt-tokens".into(), workload.prompt_tokens.to_string()]);
            arguments.extend(["--tokens".into(), workload.generated_tokens.to_string()]);
        }
        if let (Some(draft), drafts @ 1..) = (&self.draft, workload.drafted_tokens()) {
            arguments.extend(strings(["--draft-model", &draft.display().to_string()]));
            arguments.extend(strings(["--draft-tokens", &drafts.to_string()]));
        }
        if let Some((path, _)) = &self.routes {
            arguments.extend(strings(["--routes", &path.display().to_string()]));
        }
        if loses_a_device(&self.loaded.scenario) {
            let scenario = self.folder.join("scenario.yaml").display().to_string();
            arguments.extend(strings(["--scenario", &scenario]));
        } else {
            arguments.push("--give-up".into());
        }
        arguments
    }

    /// Ends the workers, and removes the control groups and the copies of the model. Returns the unfinished report.
    pub fn finish(mut self) -> Option<ReportFolder> {
        self.report.take()
    }
}

/// Keeps the traces of a lab that failed.
impl Drop for Lab<'_> {
    fn drop(&mut self) {
        if let Some(kept) = self.report.take().and_then(ReportFolder::keep_failed) {
            tracing::info!("the traces of the runs so far are in {}", kept.display());
        }
    }
}

/// Returns the path of the file with the speed of the machine (FLOP/s) when a cached profile was measured.
fn speed_file(profile: &Path) -> PathBuf {
    profile.with_extension("pace")
}

fn speed_of(profile: &Path) -> Option<f64> {
    let text = std::fs::read_to_string(speed_file(profile)).ok()?;
    text.trim().parse().ok().filter(|speed: &f64| speed.is_finite() && *speed > 0.0)
}

fn is_recent(profile: &Path) -> bool {
    let modified = profile.metadata().and_then(|file| file.modified()).ok();
    modified.and_then(|at| at.elapsed().ok()).is_some_and(|age| age < MAX_PROFILE_AGE)
}

fn loses_a_device(scenario: &Scenario) -> bool {
    scenario.events.iter().any(|event| event.change() == Some(Change::Leaves))
}

/// Returns the scenario with the measured device profiles, which include the limits. The head uses this scenario to
/// plan again during the run.
fn as_measured(loaded: &LoadedScenario) -> Scenario {
    let mut scenario = loaded.scenario.clone();
    for entry in &mut scenario.devices {
        (entry.profile, entry.parts, entry.limits) = (format!("./{}.device.yaml", entry.name), None, None);
    }
    // The head gets its model from a flag.
    scenario.model = hearth_schema::scenario::ModelRef { profile: Some("unused".into()), file: None };
    (scenario.workload.speculation, scenario.workload.arrivals) = (None, None);
    scenario.events.clear();
    scenario
}

pub fn limits_of(entry: &DeviceEntry) -> ResourceLimits {
    entry.limits.clone().unwrap_or_default()
}

/// Installs a signal handler that removes control groups, copies of the model and an unfinished report, because
/// destructors do not run after a signal.
fn clean_up_on_signal(groups: Option<CgroupHierarchy>, copies: PathBuf, report: Option<PathBuf>) {
    interruption::on_signal(move || {
        IS_INTERRUPTED.store(true, Ordering::SeqCst);
        if let Some(groups) = &groups {
            groups.kill_and_remove_own_groups();
        }
        // Also ends stopped workers, which cannot detect the end of their input.
        copies::remove_copies_folder(&copies);
        if let Some(report) = &report {
            let _ = std::fs::remove_dir_all(report);
        }
        tracing::info!("interrupted; control groups and copies of the model are removed");
        interruption::EXIT_INTERRUPTED.exit();
    });
}

fn need_groups(limits: &ResourceLimits) -> bool {
    let ResourceLimits { memory, memory_share, disk_read_rate: disk_read, cpu_cores: cpu, .. } = limits;
    memory.is_some() || memory_share.is_some() || disk_read.is_some() || cpu.is_some()
}

fn strings<const N: usize>(words: [&str; N]) -> Vec<String> {
    words.map(str::to_string).into()
}
