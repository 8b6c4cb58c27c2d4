//! How do the names in a scenario become numbers?
//!
//! The one place that knows what stands in scenario, plan, device, model and trace files. A device or model is named by
//! a shipped name, by the path of its document (from the scenario's folder), or as `measured`.

use std::fs;
use std::io::{BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};

use hearth_core::Cluster;
use hearth_core::LinkTable;
use hearth_core::Member;
use hearth_profiles::document::MAX_DOCUMENT_BYTES;
use hearth_profiles::model::{ModelDocument, ModelProfile, shipped, shipped_names};
use hearth_profiles::{Device, Document, DocumentError, device};
use hearth_ring::LocalModel;
use hearth_ring::probe::{self, ProbeEffort};
use hearth_runtime::profile::{ProfileOptions, profile};
use hearth_schema::Plan;
use hearth_schema::Scenario;
use hearth_schema::Trace;
use hearth_schema::plan::Origin;
use hearth_schema::residency::Residency;
use hearth_schema::scenario::DeviceEntry;
use hearth_schema::scenario::ModelRef;

use crate::cli::{GpuWeights, Planning};
use crate::diagnostics::Failure;
use crate::files::{can_write, read_at_most, real, write, write_by};
use crate::gpu;
use crate::limits;
use crate::output::tell;
use crate::progress;

/// The largest table of a sweep that is read.
/// source: computed, a kilobyte for each of the most rows, rounded up
const MOST_TABLE_BYTES: u64 = 128 << 20;

/// Of so many later plans it is seen to that none is written over an input. source: assumed, more than a home has devices
const MOST_LATER_PLANS: usize = 64;

/// A scenario and where it came from.
#[derive(Debug)]
pub struct LoadedScenario {
    /// The document.
    pub scenario: Scenario,
    /// Its name and digest.
    pub origin: Origin,
    /// The first line of its comment, which asks what it is for.
    pub question: String,
    /// Its file; the document's paths are relative to its folder.
    path: PathBuf,
}

/// Reads a text file within the limit of documents.
fn read_text(path: &Path) -> Result<String, Failure> {
    read_at_most(path, MAX_DOCUMENT_BYTES as u64)
}

/// Reads a document.
pub fn read<D: Document>(path: &Path) -> Result<D, Failure> {
    D::from_yaml(&read_text(path)?).map_err(|error| Failure::document(path, &error))
}

/// Reads the table of a sweep.
pub fn read_table(path: &Path) -> Result<String, Failure> {
    read_at_most(path, MOST_TABLE_BYTES)
}

/// Reads a trace.
pub fn read_trace(path: &Path) -> Result<Trace, Failure> {
    let file = fs::File::open(path).map_err(|error| Failure::file(path, "open", &error))?;
    Trace::read(&mut BufReader::new(file)).map_err(|error| Failure::unusable(error).at(path.display()))
}

/// Refuses a run's trace, and the plans that may come to stand beside it, where something that is read would be lost.
pub fn can_write_run<'p>(
    trace: Option<&'p PathBuf>,
    inputs: impl IntoIterator<Item = &'p PathBuf>,
) -> Result<(), Failure> {
    let Some(trace) = trace else { return Ok(()) };
    let inputs: Vec<&PathBuf> = inputs.into_iter().collect();
    can_write([trace], inputs.iter().copied())?;
    let later: Vec<PathBuf> = (1..=MOST_LATER_PLANS).map(|number| real(&later_plan(trace, number))).collect();
    let later = inputs.into_iter().find(|input| later.contains(&real(input)));
    match later {
        Some(input) => Err(Failure::unusable("a plan made in mid-run would be written over this file")
            .at(input.display())
            .hint("give the trace another name than that of the run which this plan is from")),
        None => Ok(()),
    }
}

/// Writes a run's trace, and beside it the plans that followed the first.
pub fn write_run(path: &Path, trace: &Trace, plans: &[Plan]) -> Result<(), Failure> {
    write_by(path, |path| {
        let mut out = BufWriter::new(fs::File::create(path)?);
        trace.write(&mut out).and_then(|()| out.flush())
    })?;
    for (number, plan) in (1..).zip(plans) {
        write(&later_plan(path, number), plan.to_yaml().as_bytes())?;
    }
    Ok(())
}

/// Where the plan is written that is so many plans after a run's first: `run.plan-1.yaml` beside `run.trace`.
fn later_plan(trace: &Path, number: usize) -> PathBuf {
    let named = if trace.extension().is_some_and(|kind| kind == "trace") {
        trace.with_extension("")
    } else {
        trace.into()
    };
    let mut path = named.into_os_string();
    path.push(format!(".plan-{number}.yaml"));
    path.into()
}

/// Opens a model file.
pub fn open_model(path: &Path) -> Result<LocalModel, Failure> {
    fs::metadata(path).map_err(|error| {
        let named = path.to_str().filter(|name| shipped_names().any(|it| it == *name));
        let hint = match named {
            Some(name) => format!(
                "a file is wanted here; the shape `{name}` without one stands in a scenario, as `model: {{profile: {name}}}`"
            ),
            None => "check the path, or make a model: `hearth synth --preset tiny --quant q4_k_m -o tiny.gguf`".to_owned(),
        };
        Failure::file(path, "open", &error).hint(hint)
    })?;
    let model = LocalModel::open(path).map_err(|error| Failure::from(error).at(path.display()))?;
    Ok(model.accelerated_by(gpu::accelerator(GpuWeights::AsStored)))
}

impl LoadedScenario {
    /// Reads a scenario.
    pub fn read(path: &Path) -> Result<Self, Failure> {
        Self::parse(&read_text(path)?, path)
    }

    /// A scenario by its text, as if it stood in this file.
    pub fn parse(text: &str, path: &Path) -> Result<Self, Failure> {
        let scenario = Scenario::from_yaml(text).map_err(|error| Failure::document(path, &error))?;
        let origin = Origin { name: scenario.name.clone(), digest: hearth_schema::digest::of(text) };
        let path = path.to_path_buf();
        let first = text.lines().find_map(|line| line.strip_prefix("# "));
        Ok(Self { scenario, origin, question: first.unwrap_or_default().trim().to_owned(), path })
    }

    /// Changes how many tokens are generated, within the context.
    pub fn generate(&mut self, tokens: u32) -> Result<(), Failure> {
        self.scenario.workload.generate = tokens;
        self.scenario.validate().map_err(Failure::unusable)
    }

    /// Lets the command line say how every device keeps its weights.
    pub fn keep_weights(&mut self, planning: &Planning) -> Result<(), Failure> {
        planning.check(&self.scenario.planner)?;
        let scenario = &mut self.scenario;
        if planning.residency.is_some() {
            scenario.devices.iter_mut().for_each(|device| device.residency = None);
        }
        scenario.residency = planning.residency(scenario.residency);
        for device in scenario.devices.iter_mut().filter(|device| device.residency.is_some()) {
            device.residency = planning.residency(device.residency);
        }
        let said = scenario.devices.iter().filter_map(|device| device.residency).chain(scenario.residency);
        if planning.stream_buffer.is_some()
            && !said.into_iter().any(|options| options.policy == Residency::Managed)
        {
            return Err(Failure::unusable("--stream-buffer: no device's residency is `managed`")
                .hint("add `--residency managed`"));
        }
        scenario.validate().map_err(Failure::unusable)
    }

    /// A path that the document names.
    fn path_of(&self, named: impl AsRef<Path>) -> PathBuf {
        self.path.parent().unwrap_or(Path::new("")).join(named)
    }

    /// The files that the scenario is read from: its own, and those that it names.
    pub fn files(&self) -> Vec<PathBuf> {
        let scenario = &self.scenario;
        let model = scenario.model.profile.as_deref();
        let profiles = scenario.devices.iter().map(|device| device.profile.as_str()).chain(model);
        let documents = profiles.filter(|name| is_path(name)).map(|name| self.path_of(name));
        [self.path.clone()]
            .into_iter()
            .chain(self.model_file())
            .chain(self.draft_file())
            .chain(documents)
            .collect()
    }

    /// The model's file, if the scenario names one.
    pub fn model_file(&self) -> Option<PathBuf> {
        self.scenario.model.file.as_ref().map(|file| self.path_of(file))
    }

    /// The draft model's file, if the scenario names one.
    pub fn draft_file(&self) -> Option<PathBuf> {
        let draft = &self.scenario.workload.speculation.as_ref()?.draft;
        draft.file.as_ref().map(|file| self.path_of(file))
    }

    /// The cluster, with every reference read, in the scenario's absolute limits. `model` stands for the scenario's
    /// own.
    pub fn cluster(&self, model: Option<&Path>) -> Result<Cluster, Failure> {
        let mut cluster = self.cluster_with_all_memory(model)?;
        limits::bound_memory(&self.scenario, &mut cluster);
        Ok(cluster)
    }

    /// The cluster, as if the scenario had no memory limits.
    pub fn cluster_with_all_memory(&self, model: Option<&Path>) -> Result<Cluster, Failure> {
        // A model that is not there is told before ten seconds of measuring.
        let model = self.model_profile(model)?;
        let devices = self.devices(|_, entry| self.device(entry))?;
        self.assemble(devices, model, self.draft_profile()?)
    }

    /// The scenario's devices, found by place and entry. Those of equal profile and limits are found once.
    pub fn devices(
        &self,
        mut find: impl FnMut(usize, &DeviceEntry) -> Result<Device, Failure>,
    ) -> Result<Vec<Device>, Failure> {
        let entries = &self.scenario.devices;
        let mut devices: Vec<Device> = Vec::new();
        for (place, entry) in entries.iter().enumerate() {
            let twin = entries[..place]
                .iter()
                .position(|other| other.profile == entry.profile && other.limits == entry.limits);
            let mut device = match twin {
                Some(twin) => devices[twin].clone(),
                None => find(place, entry)?,
            };
            device.name.clone_from(&entry.name);
            devices.push(device);
        }
        Ok(devices)
    }

    /// The cluster of devices that were measured for this scenario, inside its memory limits, in its order.
    pub fn cluster_of(&self, devices: Vec<Device>, model: Option<&Path>) -> Result<Cluster, Failure> {
        let model = self.model_profile(model)?;
        self.assemble(devices, model, self.draft_profile()?)
    }

    /// The scenario's model, or the one in a file that stands for it.
    pub fn model_profile(&self, file: Option<&Path>) -> Result<ModelProfile, Failure> {
        match file {
            Some(path) => Ok(open_model(path)?.profile),
            None => self.model(&self.scenario.model),
        }
    }

    /// The model that drafts, if the scenario has one.
    pub fn draft_profile(&self) -> Result<Option<ModelProfile>, Failure> {
        let drafts = self.scenario.workload.speculation.as_ref();
        drafts.map(|drafts| self.model(&drafts.draft)).transpose()
    }

    /// The cluster of these devices, in the scenario's order, a model, and one that drafts. Nothing is read.
    pub fn assemble(
        &self,
        devices: Vec<Device>,
        model: ModelProfile,
        draft: Option<ModelProfile>,
    ) -> Result<Cluster, Failure> {
        let scenario = &self.scenario;
        let member = |(entry, device): (&DeviceEntry, Device)| -> Result<Member, Failure> {
            Ok(Member {
                name: entry.name.clone(),
                address: entry.address.clone(),
                device: used_so(entry, device)?,
                residency: entry.residency.or(scenario.residency),
            })
        };
        let mut cluster = Cluster {
            members: scenario.devices.iter().zip(devices).map(member).collect::<Result<_, _>>()?,
            head: scenario.head(),
            links: LinkTable::new(scenario.links.clone()),
            model,
            context: scenario.context,
            kv_cache: scenario.kv_cache,
            activations: scenario.activations,
            draft,
            workload: scenario.workload.clone(),
            seed: scenario.seed,
        };
        if let Some(draft) = &cluster.draft {
            hearth_core::draft::same_vocabulary(draft, &cluster.model).map_err(Failure::unusable)?;
        }
        limits::throttle(scenario, &mut cluster);
        Ok(cluster)
    }

    /// The same with another scenario in place of its own.
    pub fn with(&self, scenario: Scenario) -> Self {
        let (origin, question, path) = (self.origin.clone(), self.question.clone(), self.path.clone());
        Self { scenario, origin, question, path }
    }

    fn model(&self, model: &ModelRef) -> Result<ModelProfile, Failure> {
        if let Some(file) = &model.file {
            let path = self.path_of(file);
            let opened = open_model(&path);
            let hint = format!(
                "`model.file` is relative to the scenario's folder: correct it, give --model, or make one of random \
                 weights: `hearth synth --preset 1b --quant q4_k_m -o {}`",
                path.display()
            );
            return Ok(opened.map_err(|why| if path.exists() { why } else { why.hint(hint) })?.profile);
        }
        let name = model.profile.as_deref().unwrap_or_default();
        if !is_path(name) {
            return shipped(name).map_err(|unknown| Failure::unusable(unknown).at(self.path.display()));
        }
        let path = self.path_of(name);
        let document: ModelDocument = read(&path)?;
        document.profile().map_err(|error| Failure::document(&path, &error))
    }

    /// The device of an entry, read or measured.
    pub fn device(&self, entry: &DeviceEntry) -> Result<Device, Failure> {
        let name = entry.profile.as_str();
        if name == "measured" {
            tell!("measuring this machine as `{}` (about ten seconds)", entry.name);
            let line = progress::line();
            let threads = entry.limits.as_ref().and_then(|limits| limits.threads).unwrap_or(0) as usize;
            let options = ProfileOptions {
                name: entry.name.clone(),
                quick: true,
                threads,
                ..ProfileOptions::default()
            };
            let links = || Ok(probe::links(&[], None, ProbeEffort::quick())?);
            return profile(&options, links, |what| line.set_message(format!("{}: {what}", entry.name)))
                .map_err(Failure::running);
        }
        let place = || format!("{}, `profile` of `{}`", self.path.display(), entry.name);
        if is_path(name) {
            let path = self.path_of(name);
            if path.exists() {
                return read(&path);
            }
            return Err(Failure::unusable(format!("there is no file `{}`", path.display()))
                .at(place())
                .hint("a profile's path is relative to the scenario's folder; `hearth profile -o FILE` writes one"));
        }
        device::shipped(name).map_err(|unknown| Failure::unusable(unknown).at(place()))
    }
}

/// The device with its SoC used as the scenario says.
fn used_so(entry: &DeviceEntry, mut device: Device) -> Result<Device, Failure> {
    let Some(options) = entry.soc else { return Ok(device) };
    let name = &entry.name;
    let Some(soc) = &mut device.soc else {
        let what = format!(
            "device `{name}`: `soc` says how a SoC is used, and its profile `{}` has none",
            entry.profile
        );
        return Err(Failure::unusable(what)
            .hint("remove `soc`, or choose a profile with one, as `snapdragon-8-gen-3`"));
    };
    if let Some(why) = soc.wrong_options(&options) {
        return Err(Failure::unusable(format!("device `{name}`: `soc` {why}"))
            .hint("docs/scenarios.md says what each strategy needs"));
    }
    soc.usual = options;
    Ok(device)
}

/// Whether a reference is a path rather than a shipped name.
fn is_path(name: &str) -> bool {
    name.contains('/') || Path::new(name).extension().is_some_and(|kind| kind == "yaml" || kind == "yml")
}

/// Reads a plan.
pub fn read_plan(path: &Path) -> Result<Plan, Failure> {
    read(path)
}

/// Reads a plan that may contradict itself. What is wrong with a plan of the right form is a finding for who asks.
pub fn read_doubtful_plan(path: &Path) -> Result<Result<Plan, DocumentError>, Failure> {
    match Plan::from_yaml(&read_text(path)?) {
        Err(error @ DocumentError::Invalid { .. }) => Ok(Err(error)),
        read => read.map(Ok).map_err(|error| Failure::document(path, &error)),
    }
}
