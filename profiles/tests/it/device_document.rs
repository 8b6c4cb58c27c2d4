//! Tests that the errors of `device/1` documents name the mistake and the location.

use std::fmt::Write as _;

use hearth_profiles::device::soc::{SocOptions, SocStrategy};
use hearth_profiles::device::{shipped_names, shipped_profile, shipped_yaml};
use hearth_profiles::model::ModelDocument;
use hearth_profiles::{DeviceProfile, Document, DocumentError};

/// The YAML text of the key `profiled` of an NPU, with a table of one measured matmul.
const TABLE: &str = "    profiled: {mode: table, source: \"measured\", shapes: [{outputs: 32, inputs: 32, tokens: 32, time: 1 ms}]}\n  bus:";

/// Replaces `from` by `to` in the document of a shipped device. Returns the changed text and its error.
fn error(device: &str, from: &str, to: &str) -> (String, DocumentError) {
    let text = shipped_yaml(device).unwrap();
    let changed = text.replacen(from, to, 1);
    assert_ne!(changed, text, "the test is out of date: {from}");
    let error = DeviceProfile::from_yaml(&changed).expect_err(to);
    (changed, error)
}

/// Checks that an error in the shipped document `d3` contains `what`, at the line that begins with `line_begins`.
fn check(from: &str, to: &str, what: &str, line_begins: &str) {
    let (text, error) = error("d3", from, to);
    assert!(error.message().contains(what), "{error}");
    let (line, column) = error.location().unwrap_or_else(|| panic!("no place: {error}"));
    let blamed = text.lines().nth(line - 1).unwrap();
    assert!(blamed.trim_start().starts_with(line_begins), "{error}: `{blamed}`");
    assert!(error.to_string().ends_with(&format!("(line {line}, column {column})")), "{error}");
}

#[test]
fn device_errors_have_line_and_column() {
    check("value: 3.17 GB/s", "value: 0 GB/s", "`disk.sequential` is zero", "sequential:");
    check("value: 20.8 TFLOP/s", "value: 0 FLOP/s", "`cpu.matvec.q4_k` is zero", "q4_k:");
    check("cores: 16", "cores: 0", "`cpu.cores` is 0", "cores:");
    check("{value: 9.7 GiB", "{value: 97 GiB", "is more than `memory.total`", "available:");
    check("  cores: 16", "  cores: 16\n  core: 16", "unknown field `core`", "core:");
    check("value: 3.17 GB/s", "value: 3.17", "with its unit, as in `2.98 GB/s`", "value:");
    check("value: 3.17 GB/s", "value: 3.17 GB", "not a unit of", "value:");
    check("  cores: 16", "  cores: 16\n  cores: 8", "duplicate key `cores`", "cores: 8");
    check("    q6_k:", "    q4_k:", "duplicate key `q4_k`", "q4_k: {value: 14.3");
    check("os: linux", "os: dos", "unknown variant `dos`", "os:");
    check("schema: device/1", "schema: device/2", "which this release does not read", "schema:");
    check("schema: device/1", "schema: plan/1", "it has schema `plan/1`; check that this is", "schema:");
    check("schema: device/1", "schema: device", "the first line must be `schema: device/1`", "schema:");
    check("  cores: 16", "\tcores: 16", "indent with spaces", "cores: 16");
}

#[test]
fn soc_errors_have_line_and_column() {
    for (from, to, expected) in [
        ("one: {value: 43.3 GB/s", "one: {value: 0 GB/s", "`soc.bus.one` is zero"),
        ("together: {value: 59.1 GB/s", "together: {value: 80 GB/s", "more than `soc.bus.peak`"),
        ("together: {value: 59.1 GB/s", "together: {value: 40 GB/s", "more than `soc.bus.together`"),
        ("matmul: {value: 11.64 TFLOP/s", "matmul: {value: 0 TFLOP/s", "`soc.npu.matmul` is zero"),
        ("matmul: {value: 0.910 TFLOP/s", "matmul: {value: .nan", "speed in operations per second"),
        ("tile: {value: 32", "tile: {value: 0", "the array must have 1 to"),
        ("order_penalty: {value: 2.188", "order_penalty: {value: .nan", "give 0 to"),
        ("order_penalty: {value: 2.188", "order_penalty: {value: .inf", "give 0 to"),
        ("weight_bits: {value: 16", "weight_bits: {value: .nan", "more than 0 and at most"),
        ("sizes: {value: [32, 64", "sizes: {value: [0, 64", "outside 1 to"),
        ("sizes: {value: [32, 64", "sizes: {value: [64, 64", "ascending"),
        ("sizes: {value: [32, 64, 128, 256, 512, 1024]", "sizes: {value: []", "give 1 to"),
        ("fast: {value: 15.9 us", "fast: {value: 90 min", "at most an hour"),
        ("  bus:", &TABLE.replace("1 ms", "0 ms"), "it must be above zero"),
        ("  bus:", &TABLE.replace("mode: table", "mode: guess"), "unknown variant `guess`"),
        ("  bus:", "  usual: {strategy: turbo}\n  bus:", "unknown variant `turbo`"),
        ("  bus:", "  usual: {strategy: chunked, chunk: 0}\n  bus:", "a chunk of 0 tokens"),
        ("  bus:", "  turbo: true\n  bus:", "unknown field `turbo`"),
    ] {
        let text = error("snapdragon-8-gen-3", from, to).1.to_string();
        assert!(text.contains(expected) && text.contains("line "), "{to}: {text}");
    }
}

#[test]
fn profiled_table_round_trips() {
    let text = shipped_yaml("snapdragon-8-gen-3").expect("it is shipped").replacen("  bus:", TABLE, 1);
    let device = DeviceProfile::from_yaml(&text).expect("a valid table");
    assert_eq!(DeviceProfile::from_yaml(&device.to_yaml()).expect("what was written"), device);
}

#[test]
fn soc_without_npu_allows_gpu_only() {
    for name in shipped_names() {
        let Some(soc) = shipped_profile(name).expect("a name").soc else { continue };
        for strategy in SocStrategy::ALL_EXCEPT_BEST {
            let wrong = soc.options_error(&SocOptions::with_strategy(strategy));
            let without = soc.npu.is_none() && strategy != SocStrategy::GpuOnly;
            assert_eq!(wrong.is_some(), without, "{name}, {}: {wrong:?}", strategy.name());
        }
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
    for head in ["schema: device/1\n", "schema: model/1\n", ""] {
        assert!(DeviceProfile::from_yaml(&format!("{head}{text}")).is_err());
        assert!(ModelDocument::from_yaml(&format!("{head}{text}")).is_err());
    }
    assert!(ModelDocument::from_yaml(&"- ".repeat(600_000)).is_err(), "longer than any depth");
    // The parser would take quadratic time.
    let nested = format!("schema: model/1\nname: {}{}", "[".repeat(1_000_000), "]".repeat(1_000_000));
    let error = ModelDocument::from_yaml(&nested).expect_err("too deep").to_string();
    assert!(error.contains("nested levels") && error.contains("line 2"), "{error}");
}
