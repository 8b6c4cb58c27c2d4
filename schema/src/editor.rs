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
        "scenario" => Some(schema_of::<Scenario>()),
        "plan" => Some(schema_of::<Plan>()),
        "device" => Some(schema_of::<DeviceProfile>()),
        "model" => Some(schema_of::<ModelDocument>()),
        _ => None,
    }
}

/// Returns the JSON Schema of a document type, in which the key `schema` has a single valid value.
fn schema_of<D: Document + JsonSchema>() -> Schema {
    let mut schema = SchemaGenerator::default().into_root_schema_for::<D>();
    if let Some(first) = schema.pointer_mut("/properties/schema") {
        first["const"] = D::SCHEMA.into();
    }
    schema
}

/// Extends the JSON Schema of a map such that a document may have a string instead of the map. `string` is the JSON
/// Schema of the string.
pub(crate) fn allow_string(map: &mut Schema, string: &Schema) {
    let (description, described) = (map.remove("description"), map.clone());
    *map = json_schema!({"anyOf": [string, described]});
    if let Some(description) = description {
        map.insert("description".into(), description);
    }
}
