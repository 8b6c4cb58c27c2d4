//! The quantities of a document: all its values with a unit and a source.

use serde_yaml::Value;

/// A value of a document that has a unit and a source.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Quantity<'a> {
    /// Keys from the root of the document to the quantity.
    pub keys: Vec<String>,
    /// The value with its unit, such as `9.7 GiB`.
    pub text: &'a str,
    pub source: &'a str,
    /// The spread of repeated measurements, as text.
    pub spread: Option<&'a str>,
}

impl Quantity<'_> {
    /// Returns the keys, separated by dots.
    pub fn name(&self) -> String {
        self.keys.join(".")
    }
}

/// Returns all quantities of a document in its order.
pub(crate) fn quantities(document: &Value) -> Vec<Quantity<'_>> {
    let mut found = Vec::new();
    collect(document, &mut Vec::new(), &mut found);
    found
}

fn collect<'a>(value: &'a Value, keys: &mut Vec<String>, found: &mut Vec<Quantity<'a>>) {
    let inner: Vec<(String, &Value)> = match value {
        Value::Mapping(map) => {
            let text = |key: &str| map.get(key).and_then(Value::as_str);
            if let (Some(value), Some(source)) = (text("value"), text("source")) {
                found.push(Quantity { keys: keys.clone(), text: value, source, spread: text("spread") });
                return;
            }
            map.iter().map(|(key, inner)| (key.as_str().unwrap_or_default().to_owned(), inner)).collect()
        }
        Value::Sequence(items) => {
            items.iter().enumerate().map(|(index, item)| (index.to_string(), item)).collect()
        }
        _ => Vec::new(),
    };
    for (key, value) in inner {
        keys.push(key);
        collect(value, keys, found);
        keys.pop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_have_a_value_and_a_source() {
        let text = "disk: {sequential: {value: 2.5 GB/s, source: x}}\nlinks:\n- {size: {value: 3 B, source: y}, cores: 4}";
        let document: Value = serde_yaml::from_str(text).expect("YAML");
        let found = quantities(&document);
        assert_eq!(found.iter().map(Quantity::name).collect::<Vec<_>>(), ["disk.sequential", "links.0.size"]);
        assert_eq!((found[1].text, found[1].source), ("3 B", "y"));
    }
}
