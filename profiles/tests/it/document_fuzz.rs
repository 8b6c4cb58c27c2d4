//! Tests that the parser of `device/1` and `model/1` documents never panics or hangs.
//!
//! Run a million cases with `PROPTEST_CASES=1000000 cargo test --release -p hearth-profiles --test it document_fuzz`.

use std::fmt::Write as _;

use hearth_profiles::model::{self, ModelDocument};
use hearth_profiles::{DeviceProfile, Document, device};
use proptest::prelude::*;

/// Parses a device document, and checks that an accepted document can be written and parsed again.
fn parse_device(text: &str) {
    if let Ok(device) = DeviceProfile::from_yaml(text) {
        assert_eq!(DeviceProfile::from_yaml(&device.to_yaml()).as_ref(), Ok(&device));
    }
}

fn parse_model(text: &str) {
    if let Ok(document) = ModelDocument::from_yaml(text) {
        let profile = document.to_profile().expect("what was parsed has a profile");
        assert_eq!(profile.layers.len(), document.layers.0 as usize);
        assert!(profile.total_bytes() > profile.embedding_row_bytes());
    }
}

fn shipped_text() -> impl Strategy<Value = (&'static str, fn(&str))> {
    let devices = device::shipped_names().map(|name| device::shipped_yaml(name).unwrap());
    let models = model::shipped_names().map(|name| model::shipped_yaml(name).unwrap());
    let (devices, models) = (devices.collect::<Vec<_>>(), models.collect::<Vec<_>>());
    prop_oneof![
        prop::sample::select(devices).prop_map(|text| (text, parse_device as fn(&str))),
        prop::sample::select(models).prop_map(|text| (text, parse_model as fn(&str))),
    ]
}

/// Generates the text that replaces a value: a number, a quantity, a YAML structure, or random characters.
fn replacement() -> impl Strategy<Value = String> {
    prop_oneof![
        any::<i64>().prop_map(|number| number.to_string()),
        any::<u32>().prop_map(|number| format!("{number} layers")),
        any::<f64>().prop_map(|number| format!("{number} GB/s")),
        any::<f64>().prop_map(|number| format!("{{value: {number:e} GiB, source: x}}")),
        prop::sample::select(vec![
            "[[[[[[[[",
            "{a: {b: {c: *anchor}}}",
            "&anchor [*anchor, *anchor]",
            "~",
            "!!binary x",
            "qwen2",
            "q8_0",
        ])
        .prop_map(str::to_owned),
        "\\PC{0,20}",
    ]
}

/// Returns twice the usual number of cases, because device documents and model documents share the cases.
fn cases() -> ProptestConfig {
    let usual = ProptestConfig::default();
    ProptestConfig { cases: usual.cases.saturating_mul(2), ..usual }
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn random_text_never_panics(text in "(\\PC|\n|\t|: |- ){0,200}") {
        parse_device(&text);
        parse_device(&format!("schema: device/1\n{text}"));
        parse_model(&text);
        parse_model(&format!("schema: model/1\n{text}"));
    }

    #[test]
    fn shipped_document_with_random_values_never_panics(
        (text, parse) in shipped_text(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), replacement()), 1..4),
        duplicate in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        for (at, value) in changes {
            let line = &mut lines[at.index(text.lines().count())];
            let key = line.split(':').next().unwrap_or("").to_owned();
            *line = format!("{key}: {value}");
        }
        if let Some(at) = duplicate {
            let at = at.index(lines.len());
            let again = lines[at].clone();
            lines.insert(at, again);
        }
        parse(&lines.join("\n"));
    }

    #[test]
    fn shipped_document_with_random_bytes_never_panics(
        (text, parse) in shipped_text(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..5),
    ) {
        let mut bytes = text.as_bytes().to_vec();
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        parse(&String::from_utf8_lossy(&bytes));
    }
}

#[test]
fn nested_aliases_are_refused() {
    // Nine levels of nine aliases would be 387 million strings.
    let mut text = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n".to_owned();
    for level in 1..9 {
        let aliases = vec![format!("*a{}", level - 1); 9].join(", ");
        writeln!(text, "a{level}: &a{level} [{aliases}]").unwrap();
    }
    assert!(ModelDocument::from_yaml(&text).is_err());
    assert!(ModelDocument::from_yaml(&"[".repeat(100_000)).is_err());
    // The parser would take quadratic time.
    let nested = format!("schema: model/1\nname: {}{}", "[".repeat(1_000_000), "]".repeat(1_000_000));
    let error = ModelDocument::from_yaml(&nested).expect_err("too deep").to_string();
    assert!(error.contains("nested levels") && error.contains("line 2"), "{error}");
    assert!(ModelDocument::from_yaml(&"- ".repeat(600_000)).is_err(), "longer than any document");
}
