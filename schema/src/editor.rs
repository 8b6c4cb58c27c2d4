//! JSON Schemas of `scenario/1`, `plan/1`, `device/1` and `model/1` for editors.
//!
//! They are derived from the types that read the documents, with their comments: an editor completes keys, explains
//! them and marks mistakes. A schema accepts more than a reader: contradictions are found by reading.

use hearth_profiles::model::ModelDocument;
use hearth_profiles::{Device, Document};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};

use crate::{Plan, Scenario};

/// The kinds of documents that have a schema.
pub const KINDS: [&str; 4] = ["scenario", "plan", "device", "model"];

/// The schema of a kind of document.
pub fn schema(kind: &str) -> Option<Schema> {
    match kind {
        "scenario" => Some(of::<Scenario>()),
        "plan" => Some(of::<Plan>()),
        "device" => Some(of::<Device>()),
        "model" => Some(of::<ModelDocument>()),
        _ => None,
    }
}

/// The schema of a document, whose first key is fixed.
fn of<D: Document + JsonSchema>() -> Schema {
    let mut schema = SchemaGenerator::default().into_root_schema_for::<D>();
    if let Some(first) = schema.pointer_mut("/properties/schema") {
        first["const"] = D::SCHEMA.into();
    }
    schema
}

/// Lets a text stand for a map.
pub(crate) fn or_text(map: &mut Schema, text: &Schema) {
    let (description, described) = (map.remove("description"), map.clone());
    *map = json_schema!({"anyOf": [text, described]});
    if let Some(description) = description {
        map.insert("description".into(), description);
    }
}
