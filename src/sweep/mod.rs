//! What becomes of a scenario when one or two of its numbers vary?
//!
//! Every combination of the fields' values is a point; with `--repeat` each point has a row for each of several
//! seeds. A row is made as `hearth simulate` makes its answer: the documents with the row's values in them, the plan
//! of the same planner or the one given, the same simulator. Everything is read before the first row, so rows are
//! pure: they can be made in any order, by any number of threads and machines, and are the same bytes.
//!
//! Not here: how rows become a table ([`table`]) or a picture ([`chart`]), and who makes them ([`workers`]).

pub mod chart;
pub mod field;
pub mod merge;
pub mod table;
pub mod tree;
pub mod values;
pub mod workers;

use std::collections::BTreeMap;
use std::fmt::Write;

use hearth_core::Cluster;
use hearth_profiles::model::ModelProfile;
use hearth_profiles::{Device, Document};
use hearth_schema::Plan;
use hearth_schema::Scenario;
use hearth_schema::digest;
use hearth_schema::scenario::DeviceEntry;
use hearth_schema::scenario::ModelRef;
use serde::Serialize;

use crate::attempt::Attempt;
use crate::cli::{PlanAndModel, SweepArgs};
use crate::commands::plan;
use crate::diagnostics::Failure;
use crate::documents::{LoadedScenario, read_plan};
use crate::files::can_write;
use crate::refinement::{self, Effort};
use field::{Documents, Field};
use values::{MOST_ROWS, Setting};

/// The most fields that vary at once: an axis and a line for each value of the other.
const MOST_FIELDS: usize = 2;

/// A row.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    /// Its place in the whole sweep, from 0.
    pub index: usize,
    /// The fields' values, as a document has them.
    pub values: Vec<String>,
    /// The run's seed.
    pub seed: u64,
    /// What came of it.
    #[serde(flatten)]
    pub attempt: Attempt,
}

/// A sweep with everything read that its rows need.
pub struct Sweep {
    loaded: LoadedScenario,
    documents: Documents,
    /// What varies.
    pub fields: Vec<Field>,
    /// Every device document that a row may need, by profile, and for a measured one by its entry.
    devices: BTreeMap<(String, Option<usize>), Device>,
    /// Every model that a row may need, by profile and file.
    models: BTreeMap<(Option<String>, Option<String>), ModelProfile>,
    plan: Option<Plan>,
    effort: Effort,
    /// Seeds for each point.
    pub repeat: usize,
    /// Names the sweep: rows of the same sweep, and no others, belong together.
    pub digest: String,
}

impl Sweep {
    /// Reads everything that the rows need.
    pub fn read(args: &SweepArgs) -> Result<Self, Failure> {
        let Some(path) = &args.scenario else { return Err(Failure::unusable("no scenario is given")) };
        let PlanAndModel { plan: given, planning, model } = &args.planned;
        let mut loaded = LoadedScenario::read(path)?;
        let inputs = loaded.files();
        can_write(args.output.iter().chain(&args.chart), inputs.iter().chain(given).chain(model))?;
        loaded.keep_weights(planning)?;
        loaded.scenario.planner = plan::merged(&loaded.scenario.planner, planning);
        if let Some(tokens) = args.tokens {
            loaded.generate(tokens)?;
        }
        let mut devices = BTreeMap::new();
        let own = loaded.devices(|_, entry| loaded.device(entry))?;
        for (index, (entry, device)) in loaded.scenario.devices.iter().zip(&own).enumerate() {
            devices.insert(name_of(index, entry), device.clone());
        }
        let documents = Documents::new(&loaded.scenario, &own)?;
        let fields: Vec<Field> =
            args.vary.iter().map(|text| Field::parse(text, &documents)).collect::<Result<_, _>>()?;
        let given = given.as_deref().map(read_plan).transpose()?;
        check(&fields, args, &loaded.scenario, given.is_some())?;
        let repeat = args.repeat as usize;
        let mut sweep = Self {
            loaded,
            documents,
            fields,
            devices,
            models: BTreeMap::new(),
            plan: given,
            effort: Effort::of(planning),
            repeat,
            digest: String::new(),
        };
        sweep.count()?;
        sweep.read_profiles()?;
        sweep.read_models(args)?;
        if args.shard.is_some() && sweep.devices.keys().any(|(profile, _)| profile == "measured") {
            return Err(Failure::unusable("--shard: a measured device differs from one shard to the next")
                .at(path.display())
                .hint(
                    "write it down with `hearth profile -o this.yaml`, and name that file in the scenario",
                ));
        }
        sweep.digest = sweep.name();
        Ok(sweep)
    }

    /// How many rows it has.
    pub fn rows(&self) -> usize {
        self.fields.iter().map(|field| field.values.0.len()).product::<usize>() * self.repeat
    }

    /// The settings of a row, one for each field. Seeds change first, the first field last.
    pub fn settings(&self, index: usize) -> Vec<&Setting> {
        let mut point = index / self.repeat;
        let mut settings: Vec<&Setting> = Vec::new();
        for field in self.fields.iter().rev() {
            let values = &field.values.0;
            settings.push(&values[point % values.len()]);
            point /= values.len();
        }
        settings.reverse();
        settings
    }

    /// Plans and simulates.
    pub fn row(&self, index: usize) -> Row {
        let settings = self.settings(index);
        let repetition = (index % self.repeat) as u64;
        let values = settings.iter().map(|setting| setting.spelled.clone()).collect();
        let mut seed = self.loaded.scenario.seed.wrapping_add(repetition);
        let attempt = self.documents.scenario(self.set(index)).and_then(|scenario| {
            scenario.validate().map_err(|error| error.to_string())?;
            seed = scenario.seed.wrapping_add(repetition);
            let loaded = self.loaded.with(scenario);
            let cluster = Cluster { seed, ..self.cluster(&loaded, index)? };
            Ok(Attempt::of(&loaded, cluster, self.plan.as_ref(), self.effort))
        });
        Row { index, values, seed, attempt: attempt.unwrap_or_else(|why| Attempt::refused(&why)) }
    }

    /// What a row sets, field by field.
    fn set(&self, index: usize) -> impl Iterator<Item = (&Field, &Setting)> {
        self.fields.iter().zip(self.settings(index))
    }

    /// The devices and the models of a row's scenario.
    fn cluster(&self, loaded: &LoadedScenario, index: usize) -> Result<Cluster, String> {
        let mut devices = Vec::new();
        for (place, entry) in loaded.scenario.devices.iter().enumerate() {
            let found = self.devices.get(&name_of(place, entry));
            let mut device = found.cloned().ok_or_else(|| format!("no device `{}`", entry.profile))?;
            device.name.clone_from(&entry.name);
            let device = Documents::device(place, device, self.set(index))?;
            device.validate().map_err(|error| error.to_string())?;
            devices.push(device);
        }
        let model = self.models.get(&model_name(&loaded.scenario.model));
        let model = model.cloned().ok_or("its model was not read")?;
        let draft = loaded.scenario.workload.speculation.as_ref();
        let draft = draft.and_then(|drafts| self.models.get(&model_name(&drafts.draft)).cloned());
        loaded.assemble(devices, model, draft).map_err(|failure| failure.reason())
    }

    /// Refuses more rows than anybody would wait for.
    fn count(&self) -> Result<(), Failure> {
        let counts = self.fields.iter().map(|field| field.values.0.len()).chain([self.repeat]);
        let rows = counts.fold(1u128, |rows, count| rows.saturating_mul(count as u128));
        if rows > MOST_ROWS as u128 {
            return Err(Failure::unusable(format!(
                "the sweep has {rows} rows; at most {MOST_ROWS} are made"
            ))
            .hint("ask for fewer values, or for fewer repeats"));
        }
        Ok(())
    }

    /// Reads the device documents that a field names.
    fn read_profiles(&mut self) -> Result<(), Failure> {
        for (index, names) in self.fields.iter().filter_map(Field::profiles) {
            for name in names {
                let entry =
                    DeviceEntry { profile: name.to_owned(), ..self.loaded.scenario.devices[index].clone() };
                let key = name_of(index, &entry);
                if !self.devices.contains_key(&key) {
                    let device = self.loaded.device(&entry)?;
                    self.devices.insert(key, device);
                }
            }
        }
        Ok(())
    }

    /// Reads the models of all points, and those that draft for them.
    fn read_models(&mut self, args: &SweepArgs) -> Result<(), Failure> {
        let varies = |key: &str| self.fields.iter().any(|field| field.in_scenario() && field.has_key(key));
        let (varies, drafts_vary) = (varies("model"), varies("draft"));
        if varies && args.planned.model.is_some() {
            return Err(Failure::unusable("--model stands for the model that `--vary` changes")
                .hint("leave one of the two out"));
        }
        if !varies {
            let model = self.loaded.model_profile(args.planned.model.as_deref())?;
            self.models.insert(model_name(&self.loaded.scenario.model), model);
        }
        let points = if varies || drafts_vary { self.rows() } else { 1 };
        for index in (0..points).step_by(self.repeat) {
            let set = self.fields.iter().zip(self.settings(index));
            let scenario = self.documents.scenario(set).map_err(Failure::unusable)?;
            if scenario.validate().is_err() {
                continue;
            }
            let point = self.loaded.with(scenario);
            let name = model_name(&point.scenario.model);
            if varies && !self.models.contains_key(&name) {
                self.models.insert(name, point.model_profile(None)?);
            }
            let draft = point.scenario.workload.speculation.as_ref().map(|drafts| model_name(&drafts.draft));
            if let Some(name) = draft.filter(|name| !self.models.contains_key(name))
                && let Some(model) = point.draft_profile()?
            {
                self.models.insert(name, model);
            }
        }
        Ok(())
    }

    /// The digest of everything that the rows follow from.
    fn name(&self) -> String {
        let mut text = format!("hearth {}\n{}", env!("CARGO_PKG_VERSION"), self.loaded.scenario.to_yaml());
        for ((profile, place), device) in &self.devices {
            let _ = write!(text, "\ndevice {profile} {place:?}\n{}", device.to_yaml());
        }
        for model in self.models.values() {
            let _ = write!(text, "\nmodel {} {} {}", model.name, model.digest, model.shape_digest());
        }
        for field in &self.fields {
            let _ = write!(text, "\nfield {}", field.path);
            for setting in &field.values.0 {
                let _ = write!(text, "\n{}", setting.json);
            }
        }
        let plan = self.plan.as_ref().map_or_else(String::new, Plan::digest);
        let _ = write!(text, "\nplan {plan}\nrepeat {}", self.repeat);
        digest::of(&text)
    }
}

/// Under which a device document is kept.
fn name_of(index: usize, entry: &DeviceEntry) -> (String, Option<usize>) {
    (entry.profile.clone(), (entry.profile == "measured").then_some(index))
}

/// Under which a model is kept.
fn model_name(model: &ModelRef) -> (Option<String>, Option<String>) {
    (model.profile.clone(), model.file.clone())
}

/// Refuses fields that would be passed over, or counted twice.
fn check(fields: &[Field], args: &SweepArgs, scenario: &Scenario, planned: bool) -> Result<(), Failure> {
    if fields.len() > MOST_FIELDS {
        return Err(Failure::unusable(format!("{} fields vary; at most {MOST_FIELDS} can", fields.len()))
            .hint("make a sweep for each value of the others"));
    }
    if let [one, two] = fields
        && one.overlaps(two)
    {
        return Err(Failure::unusable(format!("`{}` and `{}` are one field", one.path, two.path))
            .at("--vary")
            .hint("name each field once, with all its values"));
    }
    let planning = &args.planned.planning;
    let searches = |name: &str| name == refinement::NAME;
    let varied = fields.iter().filter(|field| field.path == "planner.strategy");
    let strategies = varied.flat_map(|field| &field.values.0).map(|setting| setting.spelled.as_str());
    let own = Some(scenario).filter(|_| !planned).and_then(|scenario| scenario.planner.strategy.as_deref());
    if strategies.chain(planning.strategy.as_deref()).chain(own).any(searches) {
        return Err(Failure::unusable(format!(
            "strategy `{}` ends by the clock, not by its input",
            refinement::NAME
        ))
        .hint("make its plan once with `hearth plan`, and give it with `--plan`"));
    }
    for field in fields {
        let path = &field.path;
        let under = |key: &str| path == key || path.starts_with(&format!("{key}."));
        let fixed = under("context") || under("kv_cache") || under("activations") || under("planner");
        if planned && (fixed || field.has_key("residency") || field.has_key("head")) {
            return Err(Failure::unusable(format!("`{path}` stands in the plan already"))
                .at("--plan")
                .hint("leave --plan out: a plan is made for each point then"));
        }
        if let Some(flag) = overruling(field, args) {
            return Err(Failure::unusable(format!("{flag} and `{path}` say the same thing"))
                .hint("leave one of the two out"));
        }
        if let Some(limit) = overwriting(path, scenario) {
            return Err(Failure::unusable(format!(
                "`{limit}` of the scenario stands for `{path}`: rows would be alike"
            ))
            .hint("vary the limit, or take it out of the scenario"));
        }
        if path.ends_with(".limits.threads") {
            return Err(Failure::unusable(format!(
                "`{path}` is how a device is measured, which happens once"
            ))
            .hint("vary the device's own numbers, as `cpu.cores`"));
        }
    }
    Ok(())
}

/// The scenario's limit that is put in a field's place.
fn overwriting(path: &str, scenario: &Scenario) -> Option<String> {
    scenario.devices.iter().find_map(|entry| {
        let (name, limits) = (&entry.name, entry.limits.as_ref()?);
        let key = path.strip_prefix("devices.")?.strip_prefix(name.as_str())?.strip_prefix('.')?;
        let stand_in = [
            (limits.memory.is_some(), "memory", ["memory.available", "memory.total"].as_slice()),
            (limits.disk_read.is_some(), "disk_read", &["disk.limit"]),
            (limits.cpu.is_some(), "cpu", &["cpu.quota"]),
        ];
        let found =
            stand_in.into_iter().find(|(given, _, keys)| *given && keys.iter().any(|it| key.starts_with(it)));
        found.map(|(_, limit, _)| format!("devices.{name}.limits.{limit}"))
    })
}

/// The flag that says what a field says.
fn overruling(field: &Field, args: &SweepArgs) -> Option<&'static str> {
    let planning = &args.planned.planning;
    let (path, residency) = (field.path.as_str(), field.has_key("residency"));
    let said = [
        (planning.strategy.is_some(), path == "planner.strategy", "--strategy"),
        (planning.rounds.is_some(), path == "planner.rounds", "--rounds"),
        (planning.windows.is_some(), ["planner.strategy", "planner.windows"].contains(&path), "--windows"),
        (planning.gpu_layers.is_some(), path == "planner.gpu_layers", "--gpu-layers"),
        (planning.weights_as.is_some(), path == "planner.weights_as", "--weights-as"),
        (planning.air_time.is_some(), path == "planner.air_time", "--air-time"),
        (planning.keep_all, path == "planner.keep_all", "--keep-all"),
        (planning.best_head, path == "planner.best_head", "--best-head"),
        (planning.order.is_some(), path == "planner.order", "--order"),
        (
            planning.residency.is_some(),
            residency && (path.ends_with("residency") || field.has_key("policy")),
            "--residency",
        ),
        (planning.stream_buffer.is_some(), field.has_key("stream_buffer"), "--stream-buffer"),
        (args.tokens.is_some(), path == "workload.generate", "--tokens"),
        (args.repeat > 1, path == "seed", "--repeat"),
    ];
    said.into_iter().find(|(given, same, _)| *given && *same).map(|(_, _, flag)| flag)
}
