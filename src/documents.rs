//! How do the names in a scenario become numbers?
//!
//! The one place that opens scenario, plan, device, model and trace files. A device or model is named by
//! a shipped name, by the path of its document (from the scenario's folder), or as `measured`.

use std::fs;
use std::io::{BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use hearth_exec::profile::{ProfileOptions, profile};
use hearth_exec::ring::LocalModel;
use hearth_profiles::document::MAX_DOCUMENT_BYTES;
use hearth_profiles::model::{ModelDocument, ModelProfile, shipped, shipped_names};
use hearth_profiles::{Device, Document, DocumentError, device};
use hearth_schema::plan::Origin;
use hearth_schema::residency::Residency;
use hearth_schema::scenario::{DeviceEntry, ModelRef};
use hearth_schema::{Cluster, LinkTable, Member, Plan, Scenario, Trace};

use crate::cli::{GpuWeights, Planning};
use crate::diagnostics::Failure;
use crate::gpu;
use crate::limits;
use crate::output::tell;
use crate::progress;

/// The largest table of a sweep that is read.
/// source: computed, a kilobyte for each of the most rows, rounded up
const MOST_TABLE_BYTES: u64 = 128 << 20;

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

/// Reads a text file of at most so many bytes, whatever it says of its own length: a pipe says nothing.
pub fn read_at_most(path: &Path, most: u64) -> Result<String, Failure> {
    text_of(fs::File::open(path).map_err(|error| Failure::file(path, "open", &error))?, path, most)
}

/// The same of what is open already; `path` is its name.
pub fn text_of(from: impl Read, path: &Path, most: u64) -> Result<String, Failure> {
    let mut bytes = Vec::new();
    from.take(most + 1).read_to_end(&mut bytes).map_err(|error| Failure::file(path, "read", &error))?;
    if bytes.starts_with(b"GGUF") {
        return Err(Failure::unusable("this is a model, and a text is wanted here").at(path.display()));
    }
    if bytes.len() as u64 > most {
        let what = format!("there are more than the {most} bytes that are read");
        return Err(Failure::unusable(what).at(path.display()).hint("is this the file you meant?"));
    }
    String::from_utf8(bytes).map_err(|error| {
        let what = format!("this is no text: byte {} is not UTF-8", error.utf8_error().valid_up_to() + 1);
        Failure::unusable(what).at(path.display()).hint("is this the file you meant?")
    })
}

/// Reads a text file within the limit of documents.
fn read_text(path: &Path) -> Result<String, Failure> {
    read_at_most(path, MAX_DOCUMENT_BYTES as u64)
}

/// Reads a document.
pub fn read<D: Document>(path: &Path) -> Result<D, Failure> {
    D::from_yaml(&read_text(path)?).map_err(|error| Failure::document(path, &error))
}

/// Refuses a file whose folder is not there, before long work is done for it: a mistyped folder is not made.
pub fn in_a_folder(path: &Path) -> Result<(), Failure> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    match folder.filter(|folder| !folder.is_dir()) {
        Some(missing) => Err(Failure::unusable(format!("there is no folder `{}`", missing.display()))
            .at(path.display())
            .hint("check the path, or make the folder first")),
        None => Ok(()),
    }
}

/// Refuses to write over a file that is read for it.
pub fn no_input<P: AsRef<Path>>(output: &Path, inputs: impl IntoIterator<Item = P>) -> Result<(), Failure> {
    in_a_folder(output)?;
    let real = |path: &Path| fs::canonicalize(path).ok();
    let mut inputs = inputs.into_iter();
    match real(output).filter(|output| inputs.any(|input| real(input.as_ref()).as_ref() == Some(output))) {
        Some(_) => Err(Failure::unusable("this file is read here, and would be lost")
            .at(output.display())
            .hint("name another file to write to")),
        None => Ok(()),
    }
}

/// Writes a text file into a folder that is there.
pub fn write(path: &Path, bytes: &[u8]) -> Result<(), Failure> {
    in_a_folder(path)?;
    fs::write(path, bytes).map_err(|error| Failure::file(path, "write", &error))
}

/// Makes a folder inside one that is there.
pub fn make_folder(folder: &Path) -> Result<(), Failure> {
    in_a_folder(folder)?;
    fs::create_dir_all(folder).map_err(|error| Failure::file(folder, "create", &error))
}

/// Writes a file of a folder that is made for it, beside what is there already; `name` may have folders in it.
pub fn write_in(folder: &Path, name: impl AsRef<Path>, bytes: &[u8]) -> Result<(), Failure> {
    make_folder(folder)?;
    let path = folder.join(name);
    let own = path.parent().unwrap_or(folder);
    fs::create_dir_all(own).map_err(|error| Failure::file(own, "create", &error))?;
    fs::write(&path, bytes).map_err(|error| Failure::file(&path, "write", &error))
}

/// Writes a file as a whole or not at all: whoever reads it meanwhile sees the old one or the new one. What is no
/// file (a pipe, a device) is written to as it is.
pub fn write_at_once(path: &Path, bytes: &[u8]) -> Result<(), Failure> {
    at_once(path, |path| fs::write(path, bytes))
}

/// The same with whatever writes the file at the path that it is given.
fn at_once(path: &Path, fill: impl FnOnce(&Path) -> std::io::Result<()>) -> Result<(), Failure> {
    let Some(beside) = beside(path)? else {
        in_a_folder(path)?;
        return fill(path).map_err(|error| Failure::file(path, "write", &error));
    };
    let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
    fill(&beside).and_then(|()| fs::rename(&beside, &target)).map_err(|error| {
        // What is left of it is of no use to anybody.
        let _ = fs::remove_file(&beside);
        Failure::file(path, "write", &error)
    })
}

/// Whether a file can be written there, before long work is done for it.
pub fn can_write(path: &Path) -> Result<(), Failure> {
    let Some(beside) = beside(path)? else { return Ok(()) };
    let tried = fs::write(&beside, []).and_then(|()| fs::remove_file(&beside));
    tried.map_err(|error| Failure::file(path, "write", &error))
}

/// A file of this process beside the one to be written, where nothing or a file stands there.
fn beside(path: &Path) -> Result<Option<PathBuf>, Failure> {
    let there = fs::metadata(path);
    if there.as_ref().is_ok_and(fs::Metadata::is_dir) {
        return Err(Failure::unusable("this is a folder").at(path.display()).hint("name a file in it"));
    }
    if there.is_ok_and(|there| !there.is_file()) {
        return Ok(None);
    }
    let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
    let Some(name) = target.file_name() else {
        return Err(Failure::unusable("this names no file").at(path.display()).hint("check the path"));
    };
    in_a_folder(&target)?;
    let name = format!(".{}.{}.part", name.to_string_lossy(), std::process::id());
    Ok(Some(target.with_file_name(name)))
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

/// Writes a trace as a whole or not at all.
pub fn write_trace(path: &Path, trace: &Trace) -> Result<(), Failure> {
    at_once(path, |path| {
        let mut out = BufWriter::new(fs::File::create(path)?);
        trace.write(&mut out).and_then(|()| out.flush())
    })
}

/// Writes a run's trace, and beside it the plans that followed the first.
pub fn write_run(path: &Path, trace: &Trace, plans: &[Plan]) -> Result<(), Failure> {
    write_trace(path, trace)?;
    for (number, plan) in plans.iter().enumerate() {
        let path = path.with_extension(format!("plan-{}.yaml", number + 1));
        write(&path, plan.to_yaml().as_bytes())?;
    }
    Ok(())
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
            hearth_schema::draft::same_vocabulary(draft, &cluster.model).map_err(Failure::unusable)?;
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
            return profile(&options, |what| line.set_message(format!("{}: {what}", entry.name)))
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
