//! Tests of documents: rejected values, defaults and renamed keys.

use hearth_profiles::Document;
use hearth_schema::Scenario;
use hearth_schema::run_events::RunEvent;
use hearth_schema::scenario::{LinkEmulation, Workload};

fn text(context: u32, workload: &str, limits: &str, more: &str) -> String {
    format!(
        "schema: scenario/1\nname: test\nseed: 1\nmodel: {{profile: llama-8b}}\ncontext: {context}\n\
         workload: {{prompt: 8, generate: 4, {workload}}}\ndevices:\n  - {{name: a, profile: d3, {limits}}}\nlinks:\n  \
         default:\n    latency: {{value: 5 ms, source: test}}\n    bandwidth: {{value: 400 Mbit/s, source: test}}\n{more}"
    )
}

fn scenario(context: u32, workload: &str, more: &str) -> Result<Scenario, String> {
    Scenario::from_yaml(&text(context, workload, "", more)).map_err(|error| error.to_string())
}

fn drafting(tokens: &str, acceptance: &str) -> String {
    format!(
        "speculation: {{draft: {{profile: llama-1b}}, tokens: {tokens}, acceptance: {{value: {acceptance}, source: t}}}}"
    )
}

#[test]
fn defaults_are_omitted_in_documents() {
    let plain = scenario(64, "", "").expect("valid");
    assert_eq!(plain.workload, Workload::new(8, 4));
    let yaml = plain.to_yaml();
    assert!(!yaml.contains("sequences") && !yaml.contains("micro_batch") && !yaml.contains("speculation"));
    let explicit =
        scenario(64, &format!("sequences: 2, micro_batch: 4, {}", drafting("5", "70 %")), "").expect("valid");
    let workload = &explicit.workload;
    assert_eq!((workload.sequences, workload.micro_batch, workload.drafted_tokens()), (2, 4, 5));
    assert_eq!(Scenario::from_yaml(&explicit.to_yaml()).expect("reads back"), explicit);
}

#[test]
fn hostile_values_are_rejected() {
    let most = u32::MAX.to_string();
    let cases = [
        (64, "sequences: 0".to_owned(), "`workload.sequences` is 0"),
        (64, "sequences: 1000000000".into(), "1 to 1024"),
        (64, format!("sequences: {most}"), "1 to 1024"),
        (64, "sequences: -1".into(), "expected a whole number from 0"),
        (u32::MAX, "sequences: 2".into(), "at most 4294967295 are possible"),
        (64, "micro_batch: 0".into(), "1 to 512"),
        (64, "micro_batch: 513".into(), "1 to 512"),
        (64, drafting("0", "70 %"), "1 to 511"),
        (64, drafting("512", "70 %"), "1 to 511"),
        (64, drafting(&most, "70 %"), "1 to 511"),
        (64, drafting("5", "100.1 %"), "0 % to 100 %"),
        (64, drafting("5", "-1 %"), "not below zero"),
        (64, drafting("5", ".nan"), "acceptance"),
        (64, drafting("5", "1e400 %"), "not"),
        (
            64,
            drafting("5", "70 %").replace("profile: llama-1b", ""),
            "`workload.speculation.draft` needs either",
        ),
        (64, drafting("5", "70 %").replace("tokens: 5", "tokens: 5, temperature: 1"), "unknown field"),
    ];
    for (context, workload, what) in cases {
        let rejected = scenario(context, &workload, "").expect_err(&workload);
        assert!(rejected.contains(what), "{workload}: {rejected}");
    }
    let best_head = scenario(64, &drafting("5", "70 %"), "planner: {best_head: true}").expect_err("no head");
    assert!(best_head.contains("best_head"), "{best_head}");
}

#[test]
fn impossible_limits_are_rejected() {
    let limited = |limits: &str| {
        let yaml = text(64, "", &format!("limits: {{{limits}}}"), "  emulation: delays\n");
        Scenario::from_yaml(&yaml).map_err(|error| error.to_string())
    };
    let valid = limited("cpu: 0.5, affinity: [1, 0]").expect("valid");
    assert!(valid.links.emulation == LinkEmulation::Delays);
    assert_eq!(Scenario::from_yaml(&valid.to_yaml()).expect("written and read"), valid);
    for (limits, complaint) in [
        ("cpu: 0", "`limits.cpu` is 0"),
        ("cpu: -1", "from 0.01 to 1024"),
        ("cpu: .nan", "`limits.cpu`"),
        ("cpu: 5000", "from 0.01 to 1024"),
        ("affinity: []", "is empty"),
        ("affinity: [0, 0]", "twice"),
        ("affinity: [9000]", "the highest number is 8191"),
        ("memory: 1 GiB, memory_share: 50 %", "not both"),
        ("memory: 0 B", "`limits.memory` is 0"),
        ("memory: 2000 TiB", "check its unit"),
        ("memory_share: 0 %", "`limits.memory_share` is 0"),
        ("disk_read: 0 B/s", "`limits.disk_read` is 0"),
        ("threads: 0", "`limits.threads` is 0"),
    ] {
        let error = limited(limits).expect_err(limits);
        assert!(error.contains(complaint) && error.contains("device `a`"), "{limits}: {error}");
    }
}

#[test]
fn only_a_single_device_needs_no_links() {
    let with_links = text(64, "", "", "");
    let (before, _) = with_links.split_once("links:").expect("links");
    let alone = Scenario::from_yaml(before).expect("one device");
    assert_eq!(Scenario::from_yaml(&alone.to_yaml()).expect("written and read"), alone);
    assert!(!alone.to_yaml().contains("links:"), "{}", alone.to_yaml());
    let two = before.replace("devices:\n", "devices:\n  - {name: b, profile: d2}\n");
    let error = Scenario::from_yaml(&two).expect_err("two devices").to_string();
    assert!(error.contains("several devices need the key `links`"), "{error}");
}

#[test]
fn old_keys_are_read_with_a_warning() {
    let wifi = |keys: &[&str]| {
        let channels = "{channels: [{name: w, bandwidth: {value: 1 Gbit/s, source: t}, stations: [a]}]}";
        let yaml = keys.iter().fold(String::new(), |yaml, key| yaml + &format!("  {key}: {channels}\n"));
        let text = scenario(64, "", "").expect("valid").to_yaml();
        text.replacen("links:\n", &format!("links:\n{yaml}"), 1)
    };
    let (old, new) = (wifi(&["air"]), wifi(&["wifi"]));
    let read = Scenario::from_yaml(&old).expect("the old key is read");
    assert_eq!(read, Scenario::from_yaml(&new).expect("the new key is read"));
    assert!(read.to_yaml().contains("wifi:") && Scenario::deprecations(&new).is_empty());
    let line = old.lines().position(|line| line.starts_with("  air:")).expect("a key") + 1;
    let [warning] = &Scenario::deprecations(&old)[..] else { panic!("one old key") };
    assert_eq!((warning.key.old_key, warning.key.new_key, warning.line), ("links.air", "links.wifi", line));
    let both = Scenario::from_yaml(&wifi(&["air", "wifi"])).expect_err("two names of one key");
    assert!(both.to_string().contains("duplicate field `wifi`"), "{both}");
}

#[test]
fn run_events_are_read_by_their_old_key() {
    let read = |key: &str| {
        let json = format!(r#"{{"{key}":"load","device":"a","start":3,"end":8,"what":"4 threads"}}"#);
        serde_json::from_str::<RunEvent>(&json).expect("a run event")
    };
    assert_eq!(read("sort"), read("kind"));
}
