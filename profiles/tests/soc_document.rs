//! Is every wrong number of a SoC told, where it stands?

use hearth_profiles::device::soc::{SocOptions, Strategy};
use hearth_profiles::device::{shipped, shipped_names, shipped_yaml};
use hearth_profiles::{Device, Document};

const TABLE: &str = "    profiled: {mode: table, source: \"measured\", shapes: [{outputs: 32, inputs: 32, tokens: 32, time: 1 ms}]}\n  bus:";

fn error(from: &str, to: &str) -> String {
    let text = shipped_yaml("snapdragon-8-gen-3").expect("it is shipped");
    let changed = text.replacen(from, to, 1);
    assert_ne!(changed, text, "the test is out of date: {from}");
    Device::from_yaml(&changed).expect_err(to).to_string()
}

#[test]
fn what_no_soc_can_have_is_refused_with_its_place() {
    for (from, to, said) in [
        ("one: {value: 43.3 GB/s", "one: {value: 0 GB/s", "`soc.bus.one` is zero"),
        ("together: {value: 59.1 GB/s", "together: {value: 80 GB/s", "more than `soc.bus.peak`"),
        ("together: {value: 59.1 GB/s", "together: {value: 40 GB/s", "more than `soc.bus.together`"),
        ("matmul: {value: 11.64 TFLOP/s", "matmul: {value: 0 TFLOP/s", "`soc.npu.matmul` is zero"),
        ("matmul: {value: 0.910 TFLOP/s", "matmul: {value: .nan", "speed in operations per second"),
        ("tile: {value: 32", "tile: {value: 0", "the array has 1 to"),
        ("order_penalty: {value: 2.188", "order_penalty: {value: .nan", "give 0 to"),
        ("order_penalty: {value: 2.188", "order_penalty: {value: .inf", "give 0 to"),
        ("weight_bits: {value: 16", "weight_bits: {value: .nan", "more than 0 and at most"),
        ("sizes: {value: [32, 64", "sizes: {value: [0, 64", "not 1 to"),
        ("sizes: {value: [32, 64", "sizes: {value: [64, 64", "ascending"),
        ("sizes: {value: [32, 64, 128, 256, 512, 1024]", "sizes: {value: []", "give 1 to"),
        ("fast: {value: 15.9 us", "fast: {value: 90 min", "at most an hour"),
        ("  bus:", &TABLE.replace("1 ms", "0 ms"), "a time is above zero"),
        ("  bus:", &TABLE.replace("mode: table", "mode: guess"), "unknown variant `guess`"),
        ("  bus:", "  usual: {strategy: turbo}\n  bus:", "unknown variant `turbo`"),
        ("  bus:", "  usual: {strategy: chunked, chunk: 0}\n  bus:", "a chunk of 0 tokens"),
        ("  bus:", "  turbo: true\n  bus:", "unknown field `turbo`"),
    ] {
        let text = error(from, to);
        assert!(text.contains(said) && text.contains("line "), "{to}: {text}");
    }
}

#[test]
fn a_table_of_measurements_is_read_and_written() {
    let text = shipped_yaml("snapdragon-8-gen-3").expect("it is shipped").replacen("  bus:", TABLE, 1);
    let device = Device::from_yaml(&text).expect("a valid table");
    assert_eq!(Device::from_yaml(&device.to_yaml()).expect("what was written"), device);
}

#[test]
fn without_an_npu_only_the_gpu_can_be_asked_for() {
    for name in shipped_names() {
        let Some(soc) = shipped(name).expect("a name").soc else { continue };
        for strategy in Strategy::ALL {
            let wrong = soc.wrong_options(&SocOptions::of(strategy));
            let without = soc.npu.is_none() && strategy != Strategy::GpuOnly;
            assert_eq!(wrong.is_some(), without, "{name}, {}: {wrong:?}", strategy.name());
        }
    }
}
