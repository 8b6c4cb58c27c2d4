//! Can any text make the reader of `model/1` documents panic or hang?
//!
//! A million cases: `PROPTEST_CASES=1000000 cargo test --release -p hearth-profiles --test model_fuzz`.

use std::fmt::Write as _;

use hearth_profiles::Document;
use hearth_profiles::model::{ModelDocument, shipped_names, shipped_yaml};
use proptest::prelude::*;

/// A document that was accepted can be used and written.
fn use_it(text: &str) {
    if let Ok(document) = ModelDocument::from_yaml(text) {
        let profile = document.profile().expect("what was parsed has a profile");
        assert_eq!(profile.layers.len(), document.layers.0 as usize);
        assert!(profile.total_bytes() > profile.input_row_bytes());
    }
}

/// A number, a quantity or structure in place of a value.
fn replacement() -> impl Strategy<Value = String> {
    prop_oneof![
        any::<i64>().prop_map(|number| number.to_string()),
        any::<u32>().prop_map(|number| format!("{number} layers")),
        any::<f64>().prop_map(|number| format!("{number} GiB")),
        Just("[[[[[[[[".to_owned()),
        Just("{a: {b: {c: *anchor}}}".to_owned()),
        Just("&anchor [*anchor, *anchor]".to_owned()),
        Just("~".to_owned()),
        Just("!!binary x".to_owned()),
        Just("qwen2".to_owned()),
        Just("q8_0".to_owned()),
        "\\PC{0,20}",
    ]
}

proptest! {
    #[test]
    fn any_text_is_read_or_refused(text in "(\\PC|\n|\t|: |- ){0,200}") {
        use_it(&text);
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
            let again = lines[at.index(lines.len())].clone();
            lines.push(again);
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

#[test]
fn aliases_do_not_multiply() {
    // Nine levels of nine aliases would be 387 million strings.
    let mut text = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n".to_owned();
    for level in 1..9 {
        let aliases = vec![format!("*a{}", level - 1); 9].join(", ");
        writeln!(text, "a{level}: &a{level} [{aliases}]").unwrap();
    }
    assert!(ModelDocument::from_yaml(&text).is_err());
    assert!(ModelDocument::from_yaml(&"[".repeat(100_000)).is_err());
    assert!(ModelDocument::from_yaml(&"- ".repeat(600_000)).is_err(), "longer than any document");
}
