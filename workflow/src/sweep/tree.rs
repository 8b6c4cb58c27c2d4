//! Finds and changes values of a document by their paths.
//!
//! Here a document is a tree of JSON values, which is converted from and to the type of the document. So every field
//! can be changed, and the conversion to the type finds invalid values.

use serde_json::{Map, Value};

/// The `source` of a value that a sweep or a scenario sets.
const SOURCE: &str = "set: by the user";

/// Sets the value at a path. The new value gets a `source` if the old value has one or, with `sourced`, if there was no
/// value. Returns false if a part of the path is neither a map nor an item of a list.
pub fn set_value(tree: &mut Value, path: &[String], value: &Value, sourced: bool) -> bool {
    let Some((key, rest)) = path.split_first() else {
        let has_source = tree.as_object().is_some_and(|map| map.contains_key("source"));
        *tree = if has_source || (sourced && tree.is_null()) {
            serde_json::json!({ "value": value, "source": SOURCE })
        } else {
            value.clone()
        };
        return true;
    };
    match tree {
        Value::Array(items) => {
            let item = key.parse::<usize>().ok().and_then(|index| items.get_mut(index));
            item.is_some_and(|item| set_value(item, rest, value, sourced))
        }
        Value::Null => {
            *tree = Value::Object(Map::new());
            set_value(tree, path, value, sourced)
        }
        Value::Object(map) => set_value(map.entry(key.clone()).or_insert(Value::Null), rest, value, sourced),
        _ => false,
    }
}

/// Appends to `found` the paths of all values of a tree that are neither maps nor lists, each after `prefix`. A map
/// with the key `source` is one value.
pub fn collect_leaf_paths(tree: &Value, prefix: &str, found: &mut Vec<String>) {
    let join = |key: &str| if prefix.is_empty() { key.to_owned() } else { format!("{prefix}.{key}") };
    match tree {
        Value::Object(map) if !map.contains_key("source") => {
            for (key, value) in map {
                collect_leaf_paths(value, &join(key), found);
            }
        }
        Value::Array(_) => {}
        _ => found.push(prefix.to_owned()),
    }
}

/// Returns the known path that was probably meant: one that ends with `path`, else that with the smallest edit
/// distance.
pub fn nearest_path<'p>(path: &str, known: &'p [String]) -> Option<&'p String> {
    let end = format!(".{path}");
    // Of paths that are equally near, the first one in alphabetical order.
    known.iter().min_by_key(|&other| {
        let is_beginning = other.starts_with(path);
        (!other.ends_with(&end), !is_beginning, strsim::osa_distance(path, other), other)
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn path(text: &str) -> Vec<String> {
        text.split('.').map(str::to_owned).collect()
    }

    #[test]
    fn value_is_set_by_its_path() {
        let mut tree = json!({"disk": {"rate": {"value": "1 GB/s", "source": "measured", "spread": "2 %"}}});
        assert!(set_value(&mut tree, &path("disk.rate"), &json!("2 GB/s"), false));
        assert_eq!(tree, json!({"disk": {"rate": {"value": "2 GB/s", "source": SOURCE}}}));
        assert!(set_value(&mut tree, &path("disk.limit"), &json!("1 MB/s"), true));
        assert_eq!(tree["disk"]["limit"]["source"], SOURCE);
        assert!(set_value(&mut tree, &path("planner.rounds"), &json!(3), false));
        assert_eq!(tree["planner"], json!({"rounds": 3}));
        assert!(!set_value(&mut tree, &path("planner.rounds.more"), &json!(3), false));
    }

    #[test]
    fn nearest_path_is_suggested() {
        let tree =
            json!({"seed": 1, "d1": {"memory": {"total": {"value": 1, "source": ""}, "available": 2}}});
        let mut known = Vec::new();
        collect_leaf_paths(&tree, "", &mut known);
        known.sort();
        assert_eq!(known, ["d1.memory.available", "d1.memory.total", "seed"]);
        assert_eq!(nearest_path("d1.memory.avail", &known).unwrap(), "d1.memory.available");
        assert_eq!(nearest_path("d1.memory.avaliable", &known).unwrap(), "d1.memory.available");
        assert_eq!(nearest_path("memory.total", &known).unwrap(), "d1.memory.total");
    }
}
