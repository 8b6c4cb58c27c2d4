//! Does a mistake in a `device/1` document name its place, and can any text make its reader panic?
//!
//! A million cases: `PROPTEST_CASES=1000000 cargo test --release -p hearth-profiles --test device_document`.

use hearth_profiles::device::{shipped_names, shipped_yaml};
use hearth_profiles::{Device, Document};
use proptest::prelude::*;

/// Replaces one text in D3's document and checks what is said about it, and where.
fn check(replace: &str, with: &str, what: &str, line_begins: &str) {
    let good = shipped_yaml("d3").unwrap();
    assert!(good.contains(replace), "the test is out of date: {replace}");
    let text = good.replacen(replace, with, 1);
    let error = Device::from_yaml(&text).unwrap_err();
    assert!(error.what().contains(what), "{error}");
    let (line, column) = error.location().unwrap_or_else(|| panic!("no place: {error}"));
    let blamed = text.lines().nth(line - 1).unwrap();
    assert!(blamed.trim_start().starts_with(line_begins), "{error}: `{blamed}`");
    assert!(error.to_string().ends_with(&format!("(line {line}, column {column})")), "{error}");
}

#[test]
fn a_mistake_is_named_with_its_line_and_column() {
    check("value: 3.17 GB/s", "value: 0 GB/s", "`disk.sequential` is zero", "sequential:");
    check("value: 20.8 TFLOP/s", "value: 0 FLOP/s", "`cpu.matvec.q4_k` is zero", "q4_k:");
    check("cores: 16", "cores: 0", "`cpu.cores` is 0", "cores:");
    check("{value: 9.7 GiB", "{value: 97 GiB", "is more than `memory.total`", "available:");
    check("  cores: 16", "  cores: 16\n  core: 16", "unknown field `core`", "core:");
    check("value: 3.17 GB/s", "value: 3.17", "with its unit, as in `2.98 GB/s`", "value:");
    check("value: 3.17 GB/s", "value: 3.17 GB", "not a unit of", "value:");
    check("  cores: 16", "  cores: 16\n  cores: 8", "duplicate field `cores`", "cores: 8");
    check("    q6_k:", "    q4_k:", "duplicate entry `q4_k`", "q4_k: {value: 14.3");
    check("os: linux", "os: dos", "unknown variant `dos`", "os:");
    check("schema: device/1", "schema: device/2", "which this release does not read", "schema:");
    check("schema: device/1", "schema: plan/1", "it has schema `plan/1`; check which file", "schema:");
    check("schema: device/1", "schema: device", "the first line must be `schema: device/1`", "schema:");
    check("  cores: 16", "\tcores: 16", "indent with spaces", "cores: 16");
}

/// A document that was accepted can be written and read again.
fn use_it(text: &str) {
    if let Ok(device) = Device::from_yaml(text) {
        assert_eq!(Device::from_yaml(&device.to_yaml()).as_ref(), Ok(&device));
    }
}

/// A number, a quantity or structure in place of a value.
fn replacement() -> impl Strategy<Value = String> {
    prop_oneof![
        any::<i64>().prop_map(|number| number.to_string()),
        any::<f64>().prop_map(|number| format!("{number} GB/s")),
        any::<f64>().prop_map(|number| format!("{{value: {number:e} GiB, source: x}}")),
        Just("[[[[[[[[".to_owned()),
        Just("{a: {b: {c: *anchor}}}".to_owned()),
        Just("&anchor [*anchor, *anchor]".to_owned()),
        Just("~".to_owned()),
        Just("!!binary x".to_owned()),
        "\\PC{0,20}",
    ]
}

proptest! {
    #[test]
    fn any_text_is_read_or_refused(text in "(\\PC|\n|\t|: |- ){0,200}") {
        use_it(&text);
        use_it(&format!("schema: device/1\n{text}"));
    }

    #[test]
    fn a_shipped_document_with_other_values_is_read_or_refused(
        which in any::<prop::sample::Index>(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), replacement()), 1..4),
        twice in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let names: Vec<_> = shipped_names().collect();
        let text = shipped_yaml(names[which.index(names.len())]).unwrap();
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        for (at, value) in changes {
            let line = &mut lines[at.index(text.lines().count())];
            let key = line.split(':').next().unwrap_or("").to_owned();
            *line = format!("{key}: {value}");
        }
        if let Some(at) = twice {
            let at = at.index(lines.len());
            let again = lines[at].clone();
            lines.insert(at, again);
        }
        use_it(&lines.join("\n"));
    }

    #[test]
    fn a_shipped_document_with_other_bytes_is_read_or_refused(
        which in any::<prop::sample::Index>(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..5),
    ) {
        let names: Vec<_> = shipped_names().collect();
        let mut bytes = shipped_yaml(names[which.index(names.len())]).unwrap().as_bytes().to_vec();
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        use_it(&String::from_utf8_lossy(&bytes));
    }
}
