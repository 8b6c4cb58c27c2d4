//! Tests that the JSON Schemas for editors agree with the readers of documents.
//!
//! Every document of the repository and plans of several strategies are valid under the schema of their kind.
//! Documents with mistakes are invalid.

use regex::Regex;
use serde_json::Value;

use crate::folder::Folder;
use crate::processes::{parse_json, run_successfully, scenario_path};
use crate::repository::{TextFile, text_files};

/// JSON Schema keywords that this test ignores.
const IGNORED: [&str; 9] =
    ["$schema", "$defs", "title", "description", "default", "format", "minimum", "maximum", "deprecated"];

/// Checks a JSON value against a JSON Schema; the error is the reason why the value is invalid.
fn check_value(value: &Value, schema: &Value, root: &Value) -> Result<(), String> {
    let Some(rules) = schema.as_object() else {
        return if *schema == Value::Bool(false) { Err("no value is allowed".into()) } else { Ok(()) };
    };
    let list = |of: &Value| of.as_array().cloned().unwrap_or_default();
    for (rule, of) in rules {
        let passes = |schema: &Value| check_value(value, schema, root);
        match rule.as_str() {
            "$ref" => {
                let place = of.as_str().and_then(|place| place.strip_prefix('#')).expect("a local reference");
                passes(root.pointer(place).expect("what it refers to"))?;
            }
            "type" => {
                let kinds = if of.is_array() { list(of) } else { vec![of.clone()] };
                if !kinds.iter().any(|kind| has_type(value, kind.as_str().unwrap_or_default())) {
                    return Err(format!("{value} is no {of}"));
                }
            }
            "const" if value != of => return Err(format!("{value} is not {of}")),
            "enum" if !list(of).contains(value) => return Err(format!("{value} is none of {of}")),
            "pattern" => {
                let regex = Regex::new(of.as_str().expect("a text")).expect("a regular expression");
                if value.as_str().is_some_and(|text| !regex.is_match(text)) {
                    return Err(format!("{value} does not match {of}"));
                }
            }
            "anyOf" | "oneOf" => {
                let passed = list(of).iter().filter(|schema| passes(schema).is_ok()).count();
                if passed == 0 || passed > 1 && rule == "oneOf" {
                    return Err(format!("{value} passes {passed} of {of}"));
                }
            }
            "allOf" => list(of).iter().try_for_each(passes)?,
            "items" => list(value).iter().try_for_each(|element| check_value(element, of, root))?,
            "required" => {
                let missing =
                    list(of).into_iter().find(|key| value.get(key.as_str().unwrap_or("")).is_none());
                if let Some(key) = missing.filter(|_| value.is_object()) {
                    return Err(format!("{key} is missing"));
                }
            }
            "properties" | "additionalProperties" | "propertyNames" | "const" | "enum" => {}
            other => assert!(IGNORED.contains(&other), "this test does not know `{other}`"),
        }
    }
    check_keys(value, schema, root)
}

fn check_keys(value: &Value, schema: &Value, root: &Value) -> Result<(), String> {
    for (key, value) in value.as_object().into_iter().flatten() {
        let named = schema.get("properties").and_then(|properties| properties.get(key));
        if let Some(rule) = named.or_else(|| schema.get("additionalProperties")) {
            check_value(value, rule, root).map_err(|why| format!("{key}: {why}"))?;
        }
        if let Some(names) = schema.get("propertyNames") {
            check_value(&Value::String(key.clone()), names, root)?;
        }
    }
    Ok(())
}

fn has_type(value: &Value, kind: &str) -> bool {
    match kind {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "integer" => value.is_u64() || value.is_i64(),
        "number" => value.is_number(),
        "string" => value.is_string(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        other => panic!("no kind of JSON is called {other}"),
    }
}

fn schema(kind: &str) -> Value {
    parse_json(&run_successfully(&["schema", kind]))
}

#[test]
fn every_document_passes_the_schema_of_its_kind() {
    let schemas = ["scenario", "plan", "device", "model"].map(|kind| (format!("{kind}/1"), schema(kind)));
    let (folder, home) = (Folder::new(), scenario_path("home/llama-70b-on-four"));
    let plans = ["overlap", "mem", "exo", "dllama", "tpi-llm"].map(|strategy| {
        run_successfully(&["plan", &home, "--strategy", strategy, "-o", &folder.path_of(strategy)]);
        TextFile { path: strategy.into(), text: folder.read(strategy) }
    });
    let documents = text_files().into_iter().filter(|file| file.extension() == "yaml");
    // The catalogue of parts is no document that users write.
    let folders = ["scenarios/", "profiles/devices/", "profiles/models/"];
    let shipped = documents.filter(|file| folders.iter().any(|folder| file.path.starts_with(folder)));
    let mut counts = [0; 4];
    for file in shipped.chain(plans) {
        let document: Value = serde_yaml::from_str(&file.text).expect("YAML");
        let at = schemas.iter().position(|(name, _)| document["schema"] == **name);
        let at = at.unwrap_or_else(|| panic!("{}: no known kind", file.path));
        let passed = check_value(&document, &schemas[at].1, &schemas[at].1);
        assert_eq!(passed, Ok(()), "{}", file.path);
        counts[at] += 1;
    }
    assert!(counts.iter().all(|&count| count > 0) && counts[0] > 100, "{counts:?}");
}

#[test]
fn schema_finds_mistakes() {
    let schema = schema("scenario");
    let good = "schema: scenario/1\nname: toy\nmodel: {profile: llama-8b}\ncontext: 128\n\
                workload: {prompt: 8, generate: 4}\ndevices: [{name: one, profile: d1, limits: {memory: 2 GiB}}]\n\
                residency: managed\nevents: [{at: 1 s, device: one, load: 4 threads}]\n\
                links: {default: {latency: {value: 1 ms, source: a}, bandwidth: {value: 1 Gbit/s, source: a}}}\n";
    let check = |text: &str| check_value(&serde_yaml::from_str(text).expect("YAML"), &schema, &schema);
    assert_eq!(check(good), Ok(()));
    assert_eq!(check(&good.replace("managed", "pinned")), Ok(()));
    for (right, wrong) in [
        ("scenario/1", "plan/1"),
        ("context: 128", "context: many"),
        ("context: 128\n", ""),
        ("context:", "contxt:"),
        ("2 GiB", "2"),
        ("2 GiB", "2 ms"),
        ("managed", "mangaed"),
        ("residency: managed", "residency: {policy: mangaed}"),
        ("4 threads", "4 cores"),
        ("source: a}}", "source: 1}}"),
    ] {
        assert!(good.contains(right), "the test is out of date: {right}");
        assert!(check(&good.replacen(right, wrong, 1)).is_err(), "{wrong}");
    }
}
