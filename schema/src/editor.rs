//! JSON Schemas of `scenario/1`, `plan/1`, `device/1` and `model/1` for editors.
//!
//! The schemas are derived from the types that parse the documents, including their doc comments. With them an editor
//! completes keys, explains them and marks mistakes. A schema accepts more than the parser, which also checks
//! contradictions between keys.

use hearth_profiles::model::ModelDocument;
use hearth_profiles::{DeviceProfile, Document};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};

use crate::{Plan, Scenario};

/// The kinds of documents that have a JSON Schema for editors.
pub const DOCUMENT_KINDS: [&str; 4] = ["scenario", "plan", "device", "model"];

/// Returns the JSON Schema of a kind of document; `None` if this kind has no schema.
pub fn json_schema(kind: &str) -> Option<Schema> {
    match kind {
        "scenario" => Some(of::<Scenario>()),
        "plan" => Some(of::<Plan>()),
        "device" => Some(of::<DeviceProfile>()),
        "model" => Some(of::<ModelDocument>()),
        _ => None,
    }
}

/// Returns the schema of a document type, with the value of the key `schema` as a constant.
fn of<D: Document + JsonSchema>() -> Schema {
    let mut schema = SchemaGenerator::default().into_root_schema_for::<D>();
    if let Some(first) = schema.pointer_mut("/properties/schema") {
        first["const"] = D::SCHEMA.into();
    }
    schema
}

/// Extends the JSON Schema of a map such that a document may have a string with the schema `text` instead of the map.
pub(crate) fn or_text(map: &mut Schema, text: &Schema) {
    let (description, described) = (map.remove("description"), map.clone());
    *map = json_schema!({"anyOf": [text, described]});
    if let Some(description) = description {
        map.insert("description".into(), description);
    }
}
