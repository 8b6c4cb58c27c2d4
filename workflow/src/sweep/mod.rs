//! Plans and simulates a scenario for each combination of values of one or two of its fields.
//!
//! A point is a combination of values of the fields. It has one row, or with `--repeat` a row for each of several
//! seeds. A row is the [`Evaluation`] of the documents with these values. All files are read before the first row, so
//! that rows are pure: they can be computed in any order, on any number of threads and machines, with the same result.
//!
//! Not here: how rows become a table ([`table`]) or a chart ([`chart`]).

pub mod chart;
pub mod field;
pub mod merge;
pub mod table;
pub mod tree;
pub mod values;

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::PathBuf;

use hearth_core::Cluster;
use hearth_profiles::model::ModelProfile;
use hearth_profiles::{DeviceProfile, Document};
use hearth_schema::request_trace::format_requests;
use hearth_schema::scenario::{DeviceEntry, ModelRef};
use hearth_schema::{Plan, Scenario, digest};
use serde::Serialize;

use crate::documents::read_plan;
use crate::evaluation::Evaluation;
use crate::planning::REFINE_STRATEGY;
use crate::{Error, LoadedScenario, Progress, ScenarioOverrides, limits, parallel_jobs};
pub(crate) use field::with_values;
use field::{DocumentTrees, VariedField};
use values::{FieldValue, MAX_ROWS};

/// Maximum number of varied fields: a chart has one field as its axis, and a line for each value of the other field.
const MAX_FIELDS: usize = 2;

/// The options of a sweep: the varied fields, and how each point is planned and simulated.
#[derive(Debug, Clone, Default)]
pub struct SweepOptions {
    /// The varied fields with their values, each as `PATH=VALUES`.
    pub varied_fields: Vec<String>,
    pub overrides: ScenarioOverrides,
    /// Path of a plan that all points use; `None` to plan each point.
    pub plan_path: Option<PathBuf>,
    /// Path of a model file that replaces the scenario's model.
    pub model_path: Option<PathBuf>,
    /// Number of generated tokens, which replaces the number in the scenario.
    pub generated_tokens: Option<u32>,
    /// Number of seeds for each point: the seed of the scenario and the following numbers.
    pub seeds_per_point: u32,
    /// Whether this process computes only a part of the rows (a shard).
    pub is_shard: bool,
}

/// One row of a sweep: one point with one seed.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SweepRow {
    /// Index of the row in the whole sweep, from 0.
    pub index: usize,
    /// The values of the varied fields, written as in a document.
    pub values: Vec<String>,
    pub seed: u64,
    #[serde(flatten)]
    pub evaluation: Evaluation,
}

/// Returns whether a scenario can have a field, which is named as in a sweep: it cannot have fields of other devices.
pub(crate) fn can_have_field(scenario: &Scenario, path: &str) -> bool {
    let Some(rest) = path.strip_prefix("devices.") else { return true };
    let mut devices = scenario.devices.iter();
    devices.any(|entry| rest.strip_prefix(&entry.name).is_some_and(|key| key.starts_with('.')))
}

/// Returns a scenario and its cluster with other values of some fields, which are named as in a sweep. Fields that the
/// scenario cannot have are ignored. `devices` are the profiles of the scenario, and `cluster` consists of them.
pub(crate) fn replace_values(
    loaded: &LoadedScenario,
    devices: &[DeviceProfile],
    cluster: &Cluster,
    values: &BTreeMap<String, String>,
) -> Result<(LoadedScenario, Cluster), Error> {
    let documents = DocumentTrees::new(&loaded.scenario, devices)?;
    let present = values.iter().filter(|(path, _)| can_have_field(&loaded.scenario, path));
    let field =
        |(path, value): (&String, &String)| {
            let field = VariedField::parse(&format!("{path}={value}"), &documents)?;
            match field.values.len() {
                1 => Ok(field),
                _ => Err(Error::invalid(format!("`{path}` has several values: {value}"))
                    .with_hint("give one value")),
            }
        };
    let fields = present.map(field).collect::<Result<Vec<_>, Error>>()?;
    let settings: Vec<_> = fields.iter().map(|field| (field, &field.values[0])).collect();
    let scenario = documents.scenario_with_settings(&settings).map_err(Error::invalid)?;
    let replace = |(index, device): (usize, &DeviceProfile)| {
        let device = DocumentTrees::device_with_settings(index, device.clone(), &settings)?;
        device.validate().map_err(|error| error.to_string())?;
        Ok(device)
    };
    let devices = devices.iter().enumerate().map(replace).collect::<Result<Vec<_>, String>>();
    let (model, draft) = (cluster.model.clone(), cluster.draft_model.clone());
    let loaded = loaded.with_scenario(scenario);
    let mut cluster = loaded.assemble_cluster(devices.map_err(Error::invalid)?, model, draft)?;
    limits::apply_absolute_memory_limits(&loaded.scenario, &mut cluster);
    Ok((loaded, cluster))
}

/// A sweep with all documents from which its rows are computed.
pub struct Sweep {
    loaded: LoadedScenario,
    documents: DocumentTrees,
    pub fields: Vec<VariedField>,
    /// The device profiles of all rows, by name of the profile and, for measured devices, index in the scenario.
    devices: BTreeMap<(String, Option<usize>), DeviceProfile>,
    /// The models and draft models of all rows.
    models: BTreeMap<ModelRef, ModelProfile>,
    plan: Option<Plan>,
    pub seeds_per_point: usize,
    /// Digest of all inputs of the sweep. Only tables with the same digest can be merged.
    pub digest: String,
}

impl Sweep {
    /// Creates a sweep of a scenario, and reads all documents from which its rows are computed.
    pub fn new(mut loaded: LoadedScenario, options: &SweepOptions) -> Result<Self, Error> {
        options.overrides.apply(&mut loaded)?;
        if let Some(tokens) = options.generated_tokens {
            loaded.set_generated_tokens(tokens)?;
        }
        let own = loaded.resolve_devices(|_, entry| loaded.resolve_device(entry))?;
        let entries = loaded.scenario.devices.iter().enumerate();
        let keys = entries.map(|(index, entry)| device_key(index, entry));
        let devices = keys.zip(own.iter().cloned()).collect();
        let documents = DocumentTrees::new(&loaded.scenario, &own)?;
        let parse = |text: &String| VariedField::parse(text, &documents);
        let fields: Vec<VariedField> = options.varied_fields.iter().map(parse).collect::<Result<_, _>>()?;
        let plan = options.plan_path.as_deref().map(read_plan).transpose()?;
        check_fields(&fields, options, &loaded.scenario)?;
        let (models, seeds_per_point) = (BTreeMap::new(), options.seeds_per_point as usize);
        let digest = String::new();
        let mut sweep = Self { loaded, documents, fields, devices, models, plan, seeds_per_point, digest };
        sweep.check_row_count()?;
        sweep.read_profiles()?;
        sweep.read_models(options)?;
        if options.is_shard && sweep.devices.keys().any(|(profile, _)| profile == "measured") {
            return Err(Error::invalid("`--shard`: a measured device would have different values in each shard")
                .with_location(sweep.loaded.path().display())
                .with_hint("write its profile to a file with `hearth profile -o this.yaml`, and name that file in the scenario"));
        }
        sweep.digest = sweep.compute_digest();
        Ok(sweep)
    }

    pub fn row_count(&self) -> usize {
        self.fields.iter().map(|field| field.values.len()).product::<usize>() * self.seeds_per_point
    }

    /// Returns the varied fields, each with its value in a row. From row to row, the seed changes fastest and the first
    /// field slowest.
    fn settings(&self, index: usize) -> Vec<(&VariedField, &FieldValue)> {
        let mut point = index / self.seeds_per_point;
        let mut settings = Vec::new();
        for field in self.fields.iter().rev() {
            let values = &field.values;
            settings.push((field, &values[point % values.len()]));
            point /= values.len();
        }
        settings.reverse();
        settings
    }

    pub fn compute_row(&self, index: usize) -> SweepRow {
        let settings = self.settings(index);
        let repetition = (index % self.seeds_per_point) as u64;
        let values = settings.iter().map(|(_, setting)| setting.text.clone()).collect();
        let mut seed = self.loaded.scenario.seed.wrapping_add(repetition);
        let evaluation = self.documents.scenario_with_settings(&settings).and_then(|scenario| {
            scenario.validate().map_err(|error| error.to_string())?;
            seed = scenario.seed.wrapping_add(repetition);
            let loaded = self.loaded.with_scenario(scenario);
            let cluster = Cluster { seed, ..self.cluster(&loaded, &settings)? };
            Ok(Evaluation::new(&loaded, cluster, self.plan.as_ref()))
        });
        let evaluation = evaluation.unwrap_or_else(|why| Evaluation::rejected(&why));
        SweepRow { index, values, seed, evaluation }
    }

    /// Computes the rows with these indices; after a cancellation some rows are missing. `save` is called with the rows
    /// so far at regular intervals.
    pub fn run(
        &self,
        indices: &[usize],
        threads: usize,
        progress: &dyn Progress,
        mut save: impl FnMut(&[SweepRow]) -> Result<(), Error>,
    ) -> Result<Vec<SweepRow>, Error> {
        let rows = |done: &[(usize, SweepRow)]| done.iter().map(|(_, row)| row.clone()).collect::<Vec<_>>();
        let job = |position: usize| self.compute_row(indices[position]);
        let done = parallel_jobs::run_jobs(indices.len(), threads, progress, job, |done| save(&rows(done)))?;
        Ok(done.into_iter().map(|(_, row)| row).collect())
    }

    fn cluster(
        &self,
        loaded: &LoadedScenario,
        settings: &[(&VariedField, &FieldValue)],
    ) -> Result<Cluster, String> {
        let mut devices = Vec::new();
        for (member, entry) in loaded.scenario.devices.iter().enumerate() {
            let mut device = if entry.parts.is_some() {
                // The parts may be varied.
                loaded.resolve_device(entry).map_err(|error| error.one_line_message())?
            } else {
                let found = self.devices.get(&device_key(member, entry));
                found.cloned().ok_or_else(|| format!("there is no device `{}`", entry.profile))?
            };
            device.name.clone_from(&entry.name);
            let device = DocumentTrees::device_with_settings(member, device, settings)?;
            device.validate().map_err(|error| error.to_string())?;
            devices.push(device);
        }
        let model = self.models.get(&loaded.scenario.model);
        let model = model.cloned().ok_or("the model of the row was not read")?;
        let draft = loaded.scenario.workload.speculation.as_ref();
        let draft = draft.and_then(|drafts| self.models.get(&drafts.draft_model).cloned());
        loaded.assemble_cluster(devices, model, draft).map_err(|error| error.one_line_message())
    }

    fn check_row_count(&self) -> Result<(), Error> {
        let counts = self.fields.iter().map(|field| field.values.len()).chain([self.seeds_per_point]);
        let rows = counts.fold(1u128, |rows, count| rows.saturating_mul(count as u128));
        if rows > MAX_ROWS as u128 {
            return Err(Error::invalid(format!("the sweep has {rows} rows; the limit is {MAX_ROWS}"))
                .with_hint("give fewer values or fewer repeats"));
        }
        Ok(())
    }

    fn read_profiles(&mut self) -> Result<(), Error> {
        for (index, names) in self.fields.iter().filter_map(VariedField::device_profile_values) {
            for name in names {
                let entry =
                    DeviceEntry { profile: name.to_owned(), ..self.loaded.scenario.devices[index].clone() };
                let key = device_key(index, &entry);
                if !self.devices.contains_key(&key) {
                    let device = self.loaded.resolve_device(&entry)?;
                    self.devices.insert(key, device);
                }
            }
        }
        Ok(())
    }

    fn read_models(&mut self, options: &SweepOptions) -> Result<(), Error> {
        let varies = |key: &str| self.fields.iter().any(|field| field.is_in_scenario() && field.has_key(key));
        let (varies, drafts_vary) = (varies("model"), varies("draft"));
        if varies && options.model_path.is_some() {
            return Err(Error::invalid("`--model` replaces the model that `--vary` changes")
                .with_hint("remove one of the two"));
        }
        if !varies {
            let model = self.loaded.resolve_model_profile(options.model_path.as_deref())?;
            self.models.insert(self.loaded.scenario.model.clone(), model);
        }
        let points = if varies || drafts_vary { self.row_count() } else { 1 };
        for index in (0..points).step_by(self.seeds_per_point) {
            let scenario =
                self.documents.scenario_with_settings(&self.settings(index)).map_err(Error::invalid)?;
            if scenario.validate().is_err() {
                continue;
            }
            let point = self.loaded.with_scenario(scenario);
            let name = point.scenario.model.clone();
            if varies && !self.models.contains_key(&name) {
                self.models.insert(name, point.resolve_model_profile(None)?);
            }
            let draft = point.scenario.workload.speculation.as_ref().map(|drafts| drafts.draft_model.clone());
            if let Some(name) = draft.filter(|name| !self.models.contains_key(name))
                && let Some(model) = point.resolve_draft_model_profile()?
            {
                self.models.insert(name, model);
            }
        }
        Ok(())
    }

    fn compute_digest(&self) -> String {
        let mut text = format!("hearth {}\n{}", env!("CARGO_PKG_VERSION"), self.loaded.scenario.to_yaml());
        for ((profile, index), device) in &self.devices {
            let _ = write!(text, "\ndevice {profile} {index:?}\n{}", device.to_yaml());
        }
        for model in self.models.values() {
            let _ = write!(text, "\nmodel {} {} {}", model.name, model.digest, model.shape_digest());
        }
        for field in &self.fields {
            let _ = write!(text, "\nfield {}", field.path);
            for setting in &field.values {
                let _ = write!(text, "\n{}", setting.json);
            }
        }
        if let Ok(Some(recorded)) = self.loaded.recorded_arrivals() {
            let _ = write!(text, "\nrequests {}", format_requests(&recorded));
        }
        let plan = self.plan.as_ref().map_or_else(String::new, Plan::digest);
        let _ = write!(text, "\nplan {plan}\nrepeat {}", self.seeds_per_point);
        digest::digest_text(&text)
    }
}

fn device_key(index: usize, entry: &DeviceEntry) -> (String, Option<usize>) {
    (entry.profile.clone(), (entry.profile == "measured" || entry.parts.is_some()).then_some(index))
}

/// Checks that the varied fields are different, and that each of them has an effect on the rows.
fn check_fields(fields: &[VariedField], options: &SweepOptions, scenario: &Scenario) -> Result<(), Error> {
    if fields.len() > MAX_FIELDS {
        let what = format!("{} fields are varied; the maximum is {MAX_FIELDS}", fields.len());
        return Err(Error::invalid(what)
            .with_hint("vary fewer fields, and run one sweep for each value of the remaining ones"));
    }
    if let [one, two] = fields
        && one.overlaps(two)
    {
        return Err(Error::invalid(format!("`{}` and `{}` are the same field", one.path, two.path))
            .with_location("--vary")
            .with_hint("name each field once, with all its values"));
    }
    let planned = options.plan_path.is_some();
    let varied = fields.iter().filter(|field| field.path == "planner.strategy");
    let strategies = varied.flat_map(|field| &field.values).map(|setting| setting.text.as_str());
    let own = Some(scenario).filter(|_| !planned).and_then(|scenario| scenario.planner.strategy.as_deref());
    let mut strategies = strategies.chain(options.overrides.planner.strategy.as_deref()).chain(own);
    if strategies.any(|name| name == REFINE_STRATEGY) {
        let what = format!(
            "strategy `{REFINE_STRATEGY}` ends after a time limit, so its plan does not depend on the scenario alone"
        );
        let hint = "make the plan once with `hearth plan`, and use it with `--plan`";
        return Err(Error::invalid(what).with_hint(hint));
    }
    for field in fields {
        let path = &field.path;
        let under = |key: &str| path == key || path.starts_with(&format!("{key}."));
        let fixed = under("context") || under("kv_cache") || under("activations") || under("planner");
        if planned && (fixed || field.has_key("residency") || field.has_key("head")) {
            return Err(Error::invalid(format!("`{path}` is fixed by the plan"))
                .with_location("--plan")
                .with_hint("remove `--plan`, so that each point is planned"));
        }
        if let Some(flag) = overriding_flag(field, options) {
            return Err(Error::invalid(format!("`{flag}` and `{path}` set the same field"))
                .with_hint("remove one of the two"));
        }
        if let Some(limit) = overriding_limit(path, scenario) {
            let what = format!("`{limit}` of the scenario replaces `{path}`: all rows would be identical");
            return Err(Error::invalid(what).with_hint("vary the limit, or remove it from the scenario"));
        }
        if path.ends_with(".limits.threads") {
            let what = format!("`{path}` affects only the measurement of the device, which is made once");
            return Err(Error::invalid(what).with_hint("vary a value of the device, such as `cpu.cores`"));
        }
    }
    Ok(())
}

/// Returns the path of the limit in the scenario that replaces the device's value at `path`; `None` without a limit.
fn overriding_limit(path: &str, scenario: &Scenario) -> Option<String> {
    scenario.devices.iter().find_map(|entry| {
        let (name, limits) = (&entry.name, entry.limits.as_ref()?);
        let key = path.strip_prefix("devices.")?.strip_prefix(name.as_str())?.strip_prefix('.')?;
        let replaced = [
            (limits.memory.is_some(), "memory", ["memory.available", "memory.total"].as_slice()),
            (limits.disk_read_rate.is_some(), "disk_read", &["disk.limit"]),
            (limits.cpu_cores.is_some(), "cpu", &["cpu.quota"]),
        ];
        let found =
            replaced.into_iter().find(|(given, _, keys)| *given && keys.iter().any(|it| key.starts_with(it)));
        found.map(|(_, limit, _)| format!("devices.{name}.limits.{limit}"))
    })
}

/// Returns the flag of the user that sets the same value as a varied field; `None` if there is no such flag.
fn overriding_flag(field: &VariedField, options: &SweepOptions) -> Option<String> {
    let (overrides, path) = (&options.overrides, field.path.as_str());
    // Options that are not given are absent in the document.
    let given = serde_json::to_value(&overrides.planner).unwrap_or_default();
    let key = path.strip_prefix("planner.").filter(|key| given.get(key).is_some());
    let residency = field.has_key("residency") && (path.ends_with("residency") || field.has_key("policy"));
    let flags = [
        (overrides.planner.windows.is_some(), path == "planner.strategy", "--windows"),
        (overrides.residency.is_some(), residency, "--residency"),
        (overrides.stream_buffer.is_some(), field.has_key("stream_buffer"), "--stream-buffer"),
        (options.generated_tokens.is_some(), path == "workload.generate", "--tokens"),
        (options.seeds_per_point > 1, path == "seed", "--repeat"),
    ];
    let flag = || flags.into_iter().find_map(|(given, same, flag)| (given && same).then(|| flag.to_owned()));
    key.map(|key| format!("--{}", key.replace('_', "-"))).or_else(flag)
}
