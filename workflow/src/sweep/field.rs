//! A field that varies: the path `devices.d2.memory.available` as a place in a document.
//!
//! Paths are those of the scenario, with a device's own document under its name: `context`, `workload.prompt`,
//! `links.default.latency`, `links.between.d1.d2.link.latency`, `devices.d2.limits.memory`, `devices.d2.disk.limit`.
//! The types of the documents decide which paths and values are valid; an unknown path is refused with the nearest
//! known one.

use hearth_profiles::Device;
use hearth_schema::Scenario;
use serde_json::Value;

use super::tree;
use super::values::{Setting, Values};
use crate::Error;

/// Keys that only describe.
const DESCRIBING: [&str; 6] = ["schema", "name", "about", "source", "spread", "address"];

/// A part of the error for a value without its source.
const WITHOUT_SOURCE: &str = "a value and where it comes from";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    Scenario,
    /// The device of an entry of the scenario.
    Device(usize),
}

/// The documents as trees, before anything varies.
#[derive(Debug)]
pub struct Documents {
    scenario: Scenario,
    tree: Value,
    devices: Vec<Value>,
}

/// What varies.
#[derive(Debug)]
pub struct Field {
    /// The name in the table.
    pub path: String,
    /// The new value.
    pub values: Values,
    target: Target,
    keys: Vec<String>,
    /// Whether a value that the document lacks is added with a source.
    sourced: bool,
}

/// Why a value is not valid at a path.
enum Refused {
    /// There is no such key; these are valid there.
    Unknown { key: String, beside: Vec<String> },
    /// The key takes another type of value.
    Value(String),
}

impl Documents {
    /// A scenario and its devices, in the scenario's order.
    pub fn new(scenario: &Scenario, devices: &[Device]) -> Result<Self, Error> {
        let trees: Result<Vec<Value>, _> = devices.iter().map(serde_json::to_value).collect();
        Ok(Self {
            scenario: scenario.clone(),
            tree: serde_json::to_value(scenario).map_err(Error::failed)?,
            devices: trees.map_err(Error::failed)?,
        })
    }

    /// The scenario with every field at its setting.
    pub fn scenario<'s>(
        &self,
        settings: impl Iterator<Item = (&'s Field, &'s Setting)>,
    ) -> Result<Scenario, String> {
        let mut tree = self.tree.clone();
        for (field, setting) in settings.filter(|(field, _)| field.target == Target::Scenario) {
            tree::set(&mut tree, &field.keys, &setting.json, field.sourced);
        }
        serde_json::from_value(tree).map_err(|error| error.to_string())
    }

    /// A device with every field at its setting.
    pub fn device<'s>(
        index: usize,
        device: Device,
        settings: impl Iterator<Item = (&'s Field, &'s Setting)>,
    ) -> Result<Device, String> {
        let mut settings = settings.filter(|(field, _)| field.target == Target::Device(index)).peekable();
        if settings.peek().is_none() {
            return Ok(device);
        }
        let mut tree = serde_json::to_value(&device).map_err(|error| error.to_string())?;
        for (field, setting) in settings {
            tree::set(&mut tree, &field.keys, &setting.json, field.sourced);
        }
        serde_json::from_value(tree).map_err(|error| error.to_string())
    }

    /// The possible places of a path, the likeliest first.
    fn places(&self, path: &str) -> Vec<(Target, Vec<String>)> {
        let split = |rest: &str| rest.split('.').map(str::to_owned).collect::<Vec<_>>();
        let within = |key: &str, index: usize, rest: &str| {
            let mut keys: Vec<String> = key.split('.').map(str::to_owned).collect();
            keys.push(index.to_string());
            keys.extend(split(rest));
            keys
        };
        if let Some(rest) = path.strip_prefix("devices.") {
            let names = self.scenario.devices.iter().map(|entry| format!("{}.", entry.name)).enumerate();
            // A name may have dots; the longest match wins.
            let named = names.filter(|(_, name)| rest.starts_with(name)).max_by_key(|(_, name)| name.len());
            let Some((index, name)) = named else { return Vec::new() };
            let rest = &rest[name.len()..];
            return vec![
                (Target::Scenario, within("devices", index, rest)),
                (Target::Device(index), split(rest)),
            ];
        }
        if let Some(rest) = path.strip_prefix("links.between.") {
            let mut pairs = self.scenario.links.between.iter().map(|named| &named.devices).enumerate();
            let rest_of = |[a, b]: &[String; 2]| {
                let either = [format!("{a}.{b}."), format!("{b}.{a}.")];
                either.iter().find_map(|names| rest.strip_prefix(names.as_str()))
            };
            let found = pairs.find_map(|(index, pair)| Some((index, rest_of(pair)?)));
            let keys = found.map(|(index, rest)| within("links.between", index, rest));
            return keys.map(|keys| (Target::Scenario, keys)).into_iter().collect();
        }
        vec![(Target::Scenario, split(path))]
    }

    /// Returns whether the value needs a source, or why it is not valid there.
    fn accepts(&self, target: Target, keys: &[String], value: &Value) -> Result<bool, Refused> {
        let try_set = |sourced: bool| {
            let mut tree = match target {
                Target::Scenario => self.tree.clone(),
                Target::Device(index) => self.devices[index].clone(),
            };
            if !tree::set(&mut tree, keys, value, sourced) {
                return Err("unknown field ``".into());
            }
            match target {
                Target::Scenario => serde_json::from_value::<Scenario>(tree).map(|_| sourced),
                Target::Device(_) => serde_json::from_value::<Device>(tree).map(|_| sourced),
            }
            .map_err(|error| error.to_string())
        };
        try_set(false).or_else(|plain| {
            try_set(true).map_err(|sourced| {
                if plain.contains("unknown field `") {
                    let mut keys = quoted(&plain).map(str::to_owned);
                    return Refused::Unknown { key: keys.next().unwrap_or_default(), beside: keys.collect() };
                }
                Refused::Value(if plain.contains(WITHOUT_SOURCE) { sourced } else { plain })
            })
        })
    }

    /// Every path that has a value.
    fn known(&self) -> Vec<String> {
        let mut known = Vec::new();
        tree::leaves(&self.tree, "", &mut known);
        for (entry, tree) in self.scenario.devices.iter().zip(&self.devices) {
            tree::leaves(tree, &format!("devices.{}", entry.name), &mut known);
        }
        known.retain(|path| !describes(path));
        known
    }
}

impl Field {
    /// Reads `PATH=VALUES`.
    pub fn parse(text: &str, documents: &Documents) -> Result<Field, Error> {
        let Some((path, values)) = text.split_once('=') else {
            return Err(Error::invalid(format!("`{text}` has no values"))
                .at("--vary")
                .hint("write `--vary devices.d2.memory.available=2GiB..8GiB/7`"));
        };
        let path = path.trim();
        // A sourced number has one value, however it is named.
        let path = path.strip_suffix(".value").unwrap_or(path);
        if describes(path) {
            return Err(Error::invalid(format!("`{path}` has no effect on a plan or a run"))
                .at(format!("--vary {text}"))
                .hint("vary a field that a plan or a run depends on"));
        }
        let values = Values::parse(path, values)?;
        let mut beside = Vec::new();
        for (target, keys) in documents.places(path) {
            match documents.accepts(target, &keys, &values.0[0].json) {
                Ok(sourced) => {
                    let field = Field { path: path.to_owned(), values, target, keys, sourced };
                    field.check(documents)?;
                    return Ok(field);
                }
                Err(Refused::Unknown { key, beside: keys }) => {
                    let parents: Vec<&str> = path.split('.').take_while(|part| *part != key).collect();
                    let join = |key: &String| {
                        parents.iter().copied().chain([key.as_str()]).collect::<Vec<_>>().join(".")
                    };
                    beside.extend(keys.iter().map(join));
                }
                Err(Refused::Value(why)) => return Err(wrong(path, &values.0[0], &why)),
            }
        }
        Err(unknown(path, beside, documents))
    }

    pub fn overlaps(&self, other: &Field) -> bool {
        let (one, two) = (&self.keys, &other.keys);
        self.target == other.target && (one.starts_with(two) || two.starts_with(one))
    }

    /// Its values, if it is the profile of an entry of the scenario.
    pub fn profiles(&self) -> Option<(usize, Vec<&str>)> {
        match self.keys.as_slice() {
            [devices, index, key]
                if self.target == Target::Scenario && devices == "devices" && key == "profile" =>
            {
                let names = self.values.0.iter().map(|setting| setting.spelled.as_str());
                Some((index.parse().ok()?, names.collect()))
            }
            _ => None,
        }
    }

    pub fn has_key(&self, key: &str) -> bool {
        self.keys.iter().any(|own| own == key)
    }

    /// Returns whether it is in the scenario itself and not in a device's document.
    pub fn in_scenario(&self) -> bool {
        self.target == Target::Scenario
    }

    /// Refuses values that are not valid for the field.
    fn check(&self, documents: &Documents) -> Result<(), Error> {
        for setting in &self.values.0 {
            match documents.accepts(self.target, &self.keys, &setting.json) {
                Ok(sourced) if sourced == self.sourced => {}
                Ok(_) | Err(Refused::Unknown { .. }) => {
                    return Err(wrong(&self.path, setting, "it has another type than the other values"));
                }
                Err(Refused::Value(why)) => return Err(wrong(&self.path, setting, &why)),
            }
        }
        Ok(())
    }
}

fn describes(path: &str) -> bool {
    path.rsplit('.').next().is_some_and(|key| DESCRIBING.contains(&key))
}

/// The parts between back quotes.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

fn wrong(path: &str, setting: &Setting, why: &str) -> Error {
    let failure =
        Error::invalid(format!("`{path}` cannot be {}: {why}", setting.spelled)).at(format!("--vary {path}"));
    if why.starts_with("missing field") {
        return failure.hint("its parent is absent; add that to the document and vary one value of it");
    }
    failure.hint("write the value as in the document")
}

fn unknown(path: &str, beside: Vec<String>, documents: &Documents) -> Error {
    let mut known = documents.known();
    // Siblings have a value or could have one; a map is not a field.
    let beside = beside.into_iter().filter(|path| !describes(path));
    let map = |path: &String| known.iter().any(|other| other.starts_with(&format!("{path}.")));
    let more: Vec<String> = beside.filter(|path| !map(path)).collect();
    known.extend(more);
    let failure = Error::invalid(format!("there is no field `{path}`")).at(format!("--vary {path}"));
    match tree::nearest(path, &known) {
        Some(nearest) => failure.hint(format!("did you mean `{nearest}`?")),
        None => failure,
    }
}
