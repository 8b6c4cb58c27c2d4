//! Resolves the path of a varied field, such as `devices.d2.memory.available`, to a key in a document.
//!
//! Paths are those of the scenario; the keys of a device document are under the name of the device: `context`,
//! `workload.prompt`, `links.default.latency`, `links.between.d1.d2.link.latency`, `devices.d2.limits.memory`,
//! `devices.d2.disk.limit`. The types of the documents determine which paths and values are valid. The error for an
//! unknown path suggests the nearest known one.

use std::collections::BTreeMap;

use hearth_profiles::{DeviceProfile, Document};
use hearth_schema::Scenario;
use hearth_schema::scenario::Scalar;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::tree;
use super::values::{self, FieldValue};
use crate::Error;

/// Keys of documents that have no effect on a plan or a run.
const DESCRIPTIVE_KEYS: [&str; 6] = ["schema", "name", "about", "source", "spread", "address"];

/// A part of the error message for a value without a `source`, by which this error is recognised.
const WITHOUT_SOURCE: &str = "a value and where it comes from";

/// The document that contains a field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FieldDocument {
    Scenario,
    /// The document of the device with this index in the scenario.
    Device(usize),
}

/// The scenario and its device documents as JSON trees, with the values before a field is varied.
#[derive(Debug)]
pub struct DocumentTrees {
    scenario: Scenario,
    tree: Value,
    devices: Vec<Value>,
}

/// A varied field and its values.
#[derive(Debug)]
pub struct VariedField {
    /// Path of the field, which is also the name of its column in the table.
    pub path: String,
    /// The values of the field in the order of the sweep, at least one and without duplicates.
    pub values: Vec<FieldValue>,
    target: FieldDocument,
    keys: Vec<String>,
    /// Whether a value needs the key `source`, because the document has no value at this path yet.
    sourced: bool,
}

enum InvalidValue {
    /// A document has no such key. `siblings` are the keys that are valid in its place.
    UnknownKey { key: String, siblings: Vec<String> },
    /// The value has a wrong type or is out of range; the text is the reason.
    Value(String),
}

impl DocumentTrees {
    /// Creates the trees of a scenario and its device profiles, which must be in the order of the scenario.
    pub fn new(scenario: &Scenario, devices: &[DeviceProfile]) -> Result<Self, Error> {
        let tree = serde_json::to_value(scenario).map_err(Error::failed)?;
        let devices: Result<Vec<Value>, _> = devices.iter().map(serde_json::to_value).collect();
        Ok(Self { scenario: scenario.clone(), tree, devices: devices.map_err(Error::failed)? })
    }

    /// Returns the scenario after setting those varied fields that belong to the scenario document.
    pub fn scenario_with_settings(
        &self,
        settings: &[(&VariedField, &FieldValue)],
    ) -> Result<Scenario, String> {
        with_fields(self.tree.clone(), FieldDocument::Scenario, settings)
    }

    /// Returns the profile of a device after setting those varied fields that belong to its document. `index` is the
    /// index of the device in the scenario.
    pub fn device_with_settings(
        index: usize,
        device: DeviceProfile,
        settings: &[(&VariedField, &FieldValue)],
    ) -> Result<DeviceProfile, String> {
        let target = FieldDocument::Device(index);
        if settings.iter().all(|(field, _)| field.target != target) {
            return Ok(device);
        }
        let tree = serde_json::to_value(&device).map_err(|error| error.to_string())?;
        with_fields(tree, target, settings)
    }

    /// Returns the documents and keys that a path may refer to, the most probable first.
    fn candidates(&self, path: &str) -> Vec<(FieldDocument, Vec<String>)> {
        let split = |rest: &str| rest.split('.').map(str::to_owned).collect::<Vec<_>>();
        let within = |key: &str, index: usize, rest: &str| split(&format!("{key}.{index}.{rest}"));
        if let Some(rest) = path.strip_prefix("devices.") {
            let names = self.scenario.devices.iter().map(|entry| format!("{}.", entry.name)).enumerate();
            // A name may contain dots, so the longest match is used.
            let named = names.filter(|(_, name)| rest.starts_with(name)).max_by_key(|(_, name)| name.len());
            let Some((index, name)) = named else { return Vec::new() };
            let rest = &rest[name.len()..];
            return vec![
                (FieldDocument::Scenario, within("devices", index, rest)),
                (FieldDocument::Device(index), split(rest)),
            ];
        }
        if let Some(rest) = path.strip_prefix("links.between.") {
            let mut pairs = self.scenario.links.pair_links.iter().map(|named| &named.devices).enumerate();
            let rest_of = |[a, b]: &[String; 2]| {
                let either = [format!("{a}.{b}."), format!("{b}.{a}.")];
                either.iter().find_map(|names| rest.strip_prefix(names.as_str()))
            };
            let found = pairs.find_map(|(index, pair)| Some((index, rest_of(pair)?)));
            let keys = found.map(|(index, rest)| within("links.between", index, rest));
            return keys.map(|keys| (FieldDocument::Scenario, keys)).into_iter().collect();
        }
        vec![(FieldDocument::Scenario, split(path))]
    }

    /// Tries to set a value. Returns whether the value needs the key `source`, or why it is invalid.
    fn try_value(&self, target: FieldDocument, keys: &[String], value: &Value) -> Result<bool, InvalidValue> {
        match target {
            FieldDocument::Scenario => {
                try_set::<Scenario>(&self.tree, keys, value).map(|(_, sourced)| sourced)
            }
            FieldDocument::Device(index) => {
                try_set::<DeviceProfile>(&self.devices[index], keys, value).map(|(_, sourced)| sourced)
            }
        }
    }

    fn known(&self) -> Vec<String> {
        let mut known = Vec::new();
        tree::collect_leaf_paths(&self.tree, "", &mut known);
        for (entry, tree) in self.scenario.devices.iter().zip(&self.devices) {
            tree::collect_leaf_paths(tree, &format!("devices.{}", entry.name), &mut known);
        }
        known.retain(|path| !is_descriptive(path));
        known
    }
}

impl VariedField {
    /// Parses the argument of `--vary`: `PATH=VALUES`.
    pub fn parse(text: &str, documents: &DocumentTrees) -> Result<VariedField, Error> {
        let Some((path, values)) = text.split_once('=') else {
            return Err(Error::invalid(format!("`{text}` has no values"))
                .with_location("--vary")
                .with_hint("write `--vary devices.d2.memory.available=2GiB..8GiB/7`"));
        };
        let path = path.trim();
        // A value with a source is a single field, with or without `.value`.
        let path = path.strip_suffix(".value").unwrap_or(path);
        if is_descriptive(path) {
            return Err(Error::invalid(format!("`{path}` has no effect on a plan or a run"))
                .with_location(format!("--vary {text}"))
                .with_hint("vary a different field, such as `devices.d2.memory.available`"));
        }
        let values = values::parse_values(path, values)?;
        let mut siblings = Vec::new();
        for (target, keys) in documents.candidates(path) {
            match documents.try_value(target, &keys, &values[0].json) {
                Ok(sourced) => {
                    let field = VariedField { path: path.to_owned(), values, target, keys, sourced };
                    field.check(documents)?;
                    return Ok(field);
                }
                Err(InvalidValue::UnknownKey { key, siblings: keys }) => {
                    let parents: Vec<&str> = path.split('.').take_while(|part| *part != key).collect();
                    let join = |key: &String| {
                        parents.iter().copied().chain([key.as_str()]).collect::<Vec<_>>().join(".")
                    };
                    siblings.extend(keys.iter().map(join));
                }
                Err(InvalidValue::Value(why)) => return Err(wrong_value(path, &values[0], &why)),
            }
        }
        Err(unknown_path(path, siblings, documents))
    }

    /// Returns whether two fields are the same, or one contains the other.
    pub fn overlaps(&self, other: &VariedField) -> bool {
        let (one, two) = (&self.keys, &other.keys);
        self.target == other.target && (one.starts_with(two) || two.starts_with(one))
    }

    /// Returns the index of the device and the values if this field is the `profile` of a device in the scenario.
    pub fn device_profile_values(&self) -> Option<(usize, Vec<&str>)> {
        let [devices, index, key] = self.keys.as_slice() else { return None };
        let is_profile = self.is_in_scenario() && devices == "devices" && key == "profile";
        let names = || self.values.iter().map(|value| value.text.as_str()).collect();
        is_profile.then(|| Some((index.parse().ok()?, names())))?
    }

    pub fn has_key(&self, key: &str) -> bool {
        self.keys.iter().any(|own| own == key)
    }

    /// Returns whether the field is in the scenario and not in a device document.
    pub fn is_in_scenario(&self) -> bool {
        self.target == FieldDocument::Scenario
    }

    fn check(&self, documents: &DocumentTrees) -> Result<(), Error> {
        for value in &self.values {
            match documents.try_value(self.target, &self.keys, &value.json) {
                Ok(sourced) if sourced == self.sourced => {}
                Ok(_) | Err(InvalidValue::UnknownKey { .. }) => {
                    return Err(wrong_value(&self.path, value, "the other values have a different type"));
                }
                Err(InvalidValue::Value(why)) => return Err(wrong_value(&self.path, value, &why)),
            }
        }
        Ok(())
    }
}

/// Sets a value of a document. Returns the document and whether the value needed the key `source`, or why the value is
/// invalid.
fn try_set<D: DeserializeOwned>(
    tree: &Value,
    keys: &[String],
    value: &Value,
) -> Result<(D, bool), InvalidValue> {
    let set = |sourced: bool| {
        let mut tree = tree.clone();
        if !tree::set_value(&mut tree, keys, value, sourced) {
            return Err("unknown field ``".into());
        }
        serde_json::from_value::<D>(tree)
            .map(|document| (document, sourced))
            .map_err(|error| error.to_string())
    };
    set(false).or_else(|plain| {
        set(true).map_err(|sourced| {
            if plain.contains("unknown field `") {
                let mut keys = quoted(&plain).map(str::to_owned);
                let key = keys.next().unwrap_or_default();
                return InvalidValue::UnknownKey { key, siblings: keys.collect() };
            }
            InvalidValue::Value(if plain.contains(WITHOUT_SOURCE) { sourced } else { plain })
        })
    })
}

/// Sets values of a device profile by their keys, such as `memory.available`.
pub fn with_values(
    mut device: DeviceProfile,
    values: &BTreeMap<String, Scalar>,
) -> Result<DeviceProfile, Error> {
    for (path, value) in values {
        let tree = serde_json::to_value(&device).map_err(Error::failed)?;
        let keys: Vec<String> = path.split('.').map(str::to_owned).collect();
        let value = serde_json::to_value(value).map_err(Error::failed)?;
        let set = if is_descriptive(path) { None } else { Some(try_set(&tree, &keys, &value)) };
        device = match set {
            Some(Ok((device, _))) => device,
            Some(Err(InvalidValue::Value(why))) => {
                return Err(Error::invalid(format!("`{path}` cannot be {value}: {why}"))
                    .with_hint("write the value as in a device document, such as `9 GiB`"));
            }
            None | Some(Err(InvalidValue::UnknownKey { .. })) => {
                let mut known = Vec::new();
                tree::collect_leaf_paths(&tree, "", &mut known);
                known.retain(|path| !is_descriptive(path));
                let error = Error::invalid(format!("a device has no value `{path}`"));
                return Err(match tree::nearest_path(path, &known) {
                    Some(nearest) => error.with_hint(format!("did you mean `{nearest}`?")),
                    None => error,
                });
            }
        };
    }
    device.validate().map_err(Error::invalid)?;
    Ok(device)
}

fn with_fields<D: DeserializeOwned>(
    mut tree: Value,
    target: FieldDocument,
    settings: &[(&VariedField, &FieldValue)],
) -> Result<D, String> {
    for (field, setting) in settings.iter().filter(|(field, _)| field.target == target) {
        tree::set_value(&mut tree, &field.keys, &setting.json, field.sourced);
    }
    serde_json::from_value(tree).map_err(|error| error.to_string())
}

fn is_descriptive(path: &str) -> bool {
    path.rsplit('.').next().is_some_and(|key| DESCRIPTIVE_KEYS.contains(&key))
}

fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

fn wrong_value(path: &str, value: &FieldValue, why: &str) -> Error {
    let failure = Error::invalid(format!("`{path}` cannot be {}: {why}", value.text))
        .with_location(format!("--vary {path}"));
    if why.starts_with("missing field") {
        return failure.with_hint(
            "the section of this field is absent: add it to the document, then vary one of its values",
        );
    }
    failure.with_hint("write the value as in the document")
}

fn unknown_path(path: &str, siblings: Vec<String>, documents: &DocumentTrees) -> Error {
    let mut known = documents.known();
    // Siblings are fields, also those without a value in the document; maps are not.
    let siblings = siblings.into_iter().filter(|path| !is_descriptive(path));
    let is_map = |path: &String| known.iter().any(|other| other.starts_with(&format!("{path}.")));
    let more: Vec<String> = siblings.filter(|path| !is_map(path)).collect();
    known.extend(more);
    let failure =
        Error::invalid(format!("there is no field `{path}`")).with_location(format!("--vary {path}"));
    let Some(nearest) = tree::nearest_path(path, &known) else { return failure };
    failure.with_hint(format!("did you mean `{nearest}`?"))
}
