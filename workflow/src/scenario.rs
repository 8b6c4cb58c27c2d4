//! Loads a scenario and resolves its references to devices and models into a cluster.
//!
//! A scenario names each device or model by a shipped profile or by the path of a document, relative to its own folder.
//! A model can also be a GGUF file or the name of a model on a hub, and a device can be `measured` when the scenario is
//! loaded.

use std::fmt::Debug;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hearth_core::{Cluster, LinkTable, Member};
use hearth_profiles::document::DeprecationWarning;
use hearth_profiles::gguf::GgufModel;
use hearth_profiles::model::{ModelDocument, ModelProfile, shipped_names, shipped_profile};
use hearth_profiles::parts::Catalogue;
use hearth_profiles::{DeviceProfile, Document, device};
use hearth_schema::hub_model::{HubModelName, NAME_HINT, is_hub_model_name};
use hearth_schema::plan::ScenarioRecord;
use hearth_schema::request_trace::{Arrival, check_context};
use hearth_schema::scenario::{DeviceEntry, ModelRef, check_kv_sharing};
use hearth_schema::{Plan, Scenario};

use crate::documents::{read_document, read_requests, read_text};
use crate::sweep::with_values;
use crate::{Error, limits};

/// Resolves the references of a scenario that are not documents: measured devices and model files.
pub trait ReferenceResolver: Debug + Send + Sync {
    /// Measures this machine, for a device whose profile in the scenario is `measured`.
    fn measure(&self, entry: &DeviceEntry) -> Result<DeviceProfile, Error>;

    /// Returns the path of a model on a hub, which is downloaded if it is missing.
    fn hub_model(&self, name: &HubModelName) -> Result<PathBuf, Error>;

    /// Reads the profile of a model from a GGUF file.
    fn model(&self, path: &Path) -> Result<ModelProfile, Error>;
}

/// A resolver that reads the headers of model files. It supports neither measured devices nor models on a hub.
#[derive(Debug, Clone, Copy)]
pub struct FileResolver;

impl ReferenceResolver for FileResolver {
    fn measure(&self, entry: &DeviceEntry) -> Result<DeviceProfile, Error> {
        Err(Error::invalid(format!("device `{}` cannot be measured here", entry.name))
            .with_hint("name a shipped device or a device document as its `profile`"))
    }

    fn hub_model(&self, name: &HubModelName) -> Result<PathBuf, Error> {
        Err(Error::invalid(format!("model `{name}` cannot be downloaded here"))
            .with_hint("download it with `hearth pull`, and name its path"))
    }

    fn model(&self, path: &Path) -> Result<ModelProfile, Error> {
        read_model_profile(path)
    }
}

/// Reads the profile of a model from the header of a GGUF file.
pub fn read_model_profile(path: &Path) -> Result<ModelProfile, Error> {
    check_model_exists(path)?;
    let invalid = |error: &dyn std::fmt::Display| Error::invalid(error).with_location(path.display());
    let model = GgufModel::open(path).map_err(|error| invalid(&error))?;
    ModelProfile::from_gguf(&model).map_err(|error| invalid(&error))
}

/// Checks that a model file exists. If it does not, and `path` is the name of a shipped model, the hint of the error
/// says how to use the shipped model.
pub fn check_model_exists(path: &Path) -> Result<(), Error> {
    let Err(error) = fs::metadata(path) else { return Ok(()) };
    let name = path.to_str().filter(|name| shipped_names().any(|it| it == *name));
    let make =
        || "check the path, or make a model: `hearth synth --preset tiny --quant q4_k_m -o tiny.gguf`".into();
    let hint = name.map_or_else(make, |name| {
        format!(
            "give the path of a model file; to use the shape `{name}` without a file, write `model: {{profile: {name}}}` \
             in a scenario"
        )
    });
    let error = Error::from_io_error(path, "open", &error);
    let hub_name = path.to_str().and_then(|text| text.parse::<HubModelName>().ok());
    // The name of a model on a hub without its prefix: with a quantisation, or as such repositories are called.
    let hub_name = hub_name.filter(|name| {
        name.selector.is_some() || name.repository.name.to_ascii_lowercase().ends_with("-gguf")
    });
    Err(match hub_name {
        Some(name) => error.with_hint(format!("check the path; a model on Hugging Face is written `{name}`")),
        None => error.with_hint(hint),
    })
}

/// A scenario that was read from a file, with what is needed to resolve its references.
#[derive(Debug)]
pub struct LoadedScenario {
    pub scenario: Scenario,
    /// Name and digest of the scenario, as recorded in plans.
    pub record: ScenarioRecord,
    /// The question that the scenario answers: the text of the first comment line of the document.
    pub question: String,
    /// Deprecated keys that the scenario uses.
    pub deprecations: Vec<DeprecationWarning>,
    /// Path of the scenario file. Paths in the scenario are relative to its folder.
    path: PathBuf,
    resolver: &'static dyn ReferenceResolver,
}

impl LoadedScenario {
    pub fn read(path: &Path, resolver: &'static dyn ReferenceResolver) -> Result<Self, Error> {
        let text = read_text(path)?;
        let loaded = Self::parse(&text, path, resolver)?;
        Ok(Self { deprecations: Scenario::deprecations(&text), ..loaded })
    }

    /// Parses the text of a scenario as if the file `path` had this text.
    pub fn parse(text: &str, path: &Path, resolver: &'static dyn ReferenceResolver) -> Result<Self, Error> {
        let scenario = Scenario::from_yaml(text).map_err(|error| {
            let described = Error::from_document_error(path, &error);
            match Plan::from_yaml(text) {
                Ok(_) => described.with_hint(
                    "this is a plan: name its scenario; `simulate` and `lint` take both, with `--plan PLAN`",
                ),
                Err(_) => described,
            }
        })?;
        let origin =
            ScenarioRecord { name: scenario.name.clone(), digest: hearth_schema::digest::digest_text(text) };
        let path = path.to_path_buf();
        let first = text.lines().find_map(|line| line.strip_prefix("# "));
        let question = first.unwrap_or_default().trim().to_owned();
        Ok(Self { scenario, record: origin, question, deprecations: Vec::new(), path, resolver })
    }

    /// Sets the number of generated tokens. Fails if the tokens do not fit in the context.
    pub fn set_generated_tokens(&mut self, tokens: u32) -> Result<(), Error> {
        self.scenario.workload.generated_tokens = tokens;
        self.scenario.validate().map_err(Error::invalid)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    fn path_of(&self, named: impl AsRef<Path>) -> PathBuf {
        self.path.parent().unwrap_or(Path::new("")).join(named)
    }

    /// Returns the paths of the files that are read for the scenario: first the scenario file, then the files that it
    /// refers to.
    pub fn input_paths(&self) -> Vec<PathBuf> {
        let scenario = &self.scenario;
        let model = scenario.model.profile.as_deref();
        let profiles = scenario.devices.iter().map(|device| device.profile.as_str()).chain(model);
        let documents = profiles.filter(|name| is_path(name)).map(|name| self.path_of(name));
        let drafts = scenario.workload.speculation.as_ref().map(|drafts| &drafts.draft_model);
        let models =
            [Some(&scenario.model), drafts].into_iter().flatten().filter_map(|it| it.file.as_deref());
        // Files of a hub are in its cache, where no result is written.
        let models = models.filter(|file| !is_hub_model_name(file)).map(|file| self.path_of(file));
        let arrivals = scenario.workload.arrivals.as_ref().and_then(|arrivals| arrivals.file.as_ref());
        let requests = arrivals.map(|file| self.path_of(file));
        [self.path.clone()].into_iter().chain(models).chain(documents).chain(requests).collect()
    }

    /// Returns the path of the model file, if the scenario names one. A model on a hub is downloaded.
    pub fn model_file(&self) -> Result<Option<PathBuf>, Error> {
        self.scenario.model.file.as_deref().map(|file| self.locate_model(file)).transpose()
    }

    /// Returns the path of the file of the draft model like [`model_file`](Self::model_file).
    pub fn draft_model_file(&self) -> Result<Option<PathBuf>, Error> {
        let drafts = self.scenario.workload.speculation.as_ref();
        let file = drafts.and_then(|drafts| drafts.draft_model.file.as_deref());
        file.map(|file| self.locate_model(file)).transpose()
    }

    fn locate_model(&self, file: &str) -> Result<PathBuf, Error> {
        if !is_hub_model_name(file) {
            return Ok(self.path_of(file));
        }
        let invalid = |error| Error::invalid(error).with_location(self.path.display()).with_hint(NAME_HINT);
        self.resolver.hub_model(&file.parse().map_err(invalid)?)
    }

    /// Resolves all references of the scenario and returns the cluster, with all limits that do not depend on a plan.
    /// `model` is a file that replaces the model of the scenario.
    pub fn resolve_cluster(&self, model: Option<&Path>) -> Result<Cluster, Error> {
        let mut cluster = self.resolve_cluster_without_memory_limits(model)?;
        limits::apply_absolute_memory_limits(&self.scenario, &mut cluster);
        Ok(cluster)
    }

    /// Returns the cluster of [`Self::resolve_cluster`], but without memory limits.
    pub fn resolve_cluster_without_memory_limits(&self, model: Option<&Path>) -> Result<Cluster, Error> {
        // The model is read first, so that a missing model is reported before the measurements.
        let model = self.resolve_model_profile(model)?;
        let devices = self.resolve_devices(|_, entry| self.resolve_device(entry))?;
        self.assemble_cluster(devices, model, self.resolve_draft_model_profile()?)
    }

    /// Returns the device profiles of the scenario. `find` returns the profile for the index and the entry of a device,
    /// and is called only once for devices with the same profile and limits.
    pub fn resolve_devices(
        &self,
        mut find: impl FnMut(usize, &DeviceEntry) -> Result<DeviceProfile, Error>,
    ) -> Result<Vec<DeviceProfile>, Error> {
        let entries = &self.scenario.devices;
        let mut devices: Vec<DeviceProfile> = Vec::new();
        for (index, entry) in entries.iter().enumerate() {
            let equals = |other: &DeviceEntry| {
                (&other.profile, &other.parts, &other.values, &other.limits)
                    == (&entry.profile, &entry.parts, &entry.values, &entry.limits)
            };
            let mut device = match entries[..index].iter().position(equals) {
                Some(equal) => devices[equal].clone(),
                None => find(index, entry)?,
            };
            device.name.clone_from(&entry.name);
            devices.push(device);
        }
        Ok(devices)
    }

    /// Returns the cluster of measured devices, which must be in the scenario's order and have its memory limits.
    pub fn cluster_from_measured_devices(
        &self,
        devices: Vec<DeviceProfile>,
        model: Option<&Path>,
    ) -> Result<Cluster, Error> {
        let model = self.resolve_model_profile(model)?;
        self.assemble_cluster(devices, model, self.resolve_draft_model_profile()?)
    }

    /// Returns the profile of the model in `file`; if it is `None`, the profile of the scenario's model.
    pub fn resolve_model_profile(&self, file: Option<&Path>) -> Result<ModelProfile, Error> {
        match file {
            Some(path) => self.resolver.model(path),
            None => self.model(&self.scenario.model),
        }
    }

    pub fn resolve_draft_model_profile(&self) -> Result<Option<ModelProfile>, Error> {
        let drafts = self.scenario.workload.speculation.as_ref();
        drafts.map(|drafts| self.model(&drafts.draft_model)).transpose()
    }

    /// Returns the cluster for a model, a draft model, and device profiles in the order of the scenario. Reads no file
    /// but the recording of requests.
    pub fn assemble_cluster(
        &self,
        devices: Vec<DeviceProfile>,
        model: ModelProfile,
        draft: Option<ModelProfile>,
    ) -> Result<Cluster, Error> {
        let scenario = &self.scenario;
        let member = |(entry, device): (&DeviceEntry, DeviceProfile)| -> Result<Member, Error> {
            Ok(Member {
                name: entry.name.clone(),
                address: entry.address.clone(),
                device: with_soc_options(entry, device)?,
                residency: entry.residency.or(scenario.residency),
            })
        };
        let mut cluster = Cluster {
            members: scenario.devices.iter().zip(devices).map(member).collect::<Result<_, _>>()?,
            head: scenario.head_index(),
            links: LinkTable::new(scenario.links.clone()),
            model,
            context_length: scenario.context_length,
            kv_cache_format: scenario.kv_cache_format,
            activation_format: scenario.activation_format,
            draft_model: draft,
            routes: None,
            recorded_arrivals: self.recorded_arrivals()?,
            workload: scenario.workload.clone(),
            seed: scenario.seed,
        };
        for model in [Some(&cluster.model), cluster.draft_model.as_ref()].into_iter().flatten() {
            let checked = model.shape.check_kv_format(cluster.kv_cache_format.format());
            let hint = "set `kv_cache: f16` in the scenario";
            checked.map_err(|error| Error::invalid(error).with_location(&model.name).with_hint(hint))?;
            check_kv_sharing(&model.shape, cluster.activation_format, cluster.kv_cache_format)
                .map_err(|error| Error::invalid(error).with_location(&model.name))?;
        }
        if let Some(draft) = &cluster.draft_model {
            hearth_core::memory::draft::check_models(draft, &cluster.model).map_err(Error::invalid)?;
        }
        limits::apply_throttles(scenario, &mut cluster);
        Ok(cluster)
    }

    /// Reads the recorded requests of the workload.
    pub(crate) fn recorded_arrivals(&self) -> Result<Option<Arc<[Arrival]>>, Error> {
        let Some(arrivals) = &self.scenario.workload.arrivals else { return Ok(None) };
        let Some(path) = arrivals.file.as_ref().map(|file| self.path_of(file)) else { return Ok(None) };
        let recorded = read_requests(&path, arrivals.requests)?;
        check_context(&recorded, self.scenario.context_length).map_err(|what| {
            let hint = "raise `context`, or remove the request; `requests` takes only the first ones";
            Error::invalid(what).with_location(path.display()).with_hint(hint)
        })?;
        Ok(Some(recorded.into()))
    }

    #[must_use]
    pub fn with_scenario(&self, scenario: Scenario) -> Self {
        let (origin, question, path) = (self.record.clone(), self.question.clone(), self.path.clone());
        Self { scenario, record: origin, question, deprecations: Vec::new(), path, resolver: self.resolver }
    }

    fn model(&self, model: &ModelRef) -> Result<ModelProfile, Error> {
        if let Some(file) = &model.file {
            let path = self.locate_model(file)?;
            let model = self.resolver.model(&path);
            let hint = format!(
                "`model.file` is relative to the folder of the scenario: correct it, use `--model`, or make a model with random \
                 weights: `hearth synth --preset 1b --quant q4_k_m -o {}`",
                path.display()
            );
            return model.map_err(|error| if path.exists() { error } else { error.with_hint(hint) });
        }
        let name = model.profile.as_deref().unwrap_or_default();
        if !is_path(name) {
            return shipped_profile(name)
                .map_err(|unknown| Error::invalid(unknown).with_location(self.path.display()));
        }
        let path = self.path_of(name);
        let document: ModelDocument = read_document(&path)?;
        document.to_profile().map_err(|error| Error::from_document_error(&path, &error))
    }

    /// Reads or measures the profile of a device of the scenario.
    pub fn resolve_device(&self, entry: &DeviceEntry) -> Result<DeviceProfile, Error> {
        let device = self.resolve_profile(entry)?;
        if entry.values.is_empty() {
            return Ok(device);
        }
        let location = format!("{}, `values` of `{}`", self.path.display(), entry.name);
        with_values(device, &entry.values).map_err(|error| error.with_location(location))
    }

    fn resolve_profile(&self, entry: &DeviceEntry) -> Result<DeviceProfile, Error> {
        if let Some(parts) = &entry.parts {
            return parts.to_profile(&entry.name).map_err(|error| {
                let location = format!("{}, `parts` of `{}`", self.path.display(), entry.name);
                Error::invalid(&error).with_location(location).with_hint(error.hint())
            });
        }
        let name = entry.profile.as_str();
        if name == "measured" {
            return self.resolver.measure(entry);
        }
        let location = || format!("{}, `profile` of `{}`", self.path.display(), entry.name);
        if is_path(name) {
            let path = self.path_of(name);
            if path.exists() {
                return read_document(&path);
            }
            return Err(Error::invalid(format!("there is no file `{}`", path.display())).with_location(location()).with_hint(
                "the path of a profile is relative to the folder of the scenario; `hearth profile -o FILE` writes a profile",
            ));
        }
        device::shipped_profile(name).map_err(|unknown| {
            let error = Error::invalid(unknown).with_location(location());
            match Catalogue::shipped().part(name) {
                Ok(_) => error.with_hint(format!(
                    "`{name}` is a part: name all parts of the device, such as `rtx-3060-12gb, ddr4-3200-dual, 16 GiB, \
                     nvme-gen3, windows`"
                )),
                Err(_) => error,
            }
        })
    }
}

fn with_soc_options(entry: &DeviceEntry, mut device: DeviceProfile) -> Result<DeviceProfile, Error> {
    let Some(options) = entry.soc else { return Ok(device) };
    let name = &entry.name;
    let Some(soc) = &mut device.soc else {
        let what = format!(
            "device `{name}` has `soc` options, but its profile `{}` has no SoC",
            entry.profile_label()
        );
        return Err(Error::invalid(what)
            .with_hint("remove `soc`, or choose a profile with a SoC, such as `snapdragon-8-gen-3`"));
    };
    if let Some(why) = soc.options_error(&options) {
        return Err(Error::invalid(format!("device `{name}`: `soc` {why}"))
            .with_hint("see docs/reference/scenarios.md for what each strategy needs"));
    }
    soc.default_options = options;
    Ok(device)
}

/// Returns whether a reference to a device or model is a path, and not the name of a shipped profile.
fn is_path(name: &str) -> bool {
    name.contains('/') || Path::new(name).extension().is_some_and(|kind| kind == "yaml" || kind == "yml")
}
