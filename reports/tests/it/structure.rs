//! Tests that the files of a report are well-formed, self-contained, and safe for any names in a trace.

use hearth_reports::Report;
use hearth_schema::Trace;
use serde_json::Value;

use crate::{file, sample};

/// Checks that all elements of an HTML or SVG text are closed in order and all attributes are quoted. Returns the names
/// of the elements.
fn elements(text: &str) -> Vec<String> {
    let (mut open, mut seen): (Vec<String>, Vec<String>) = (Vec::new(), Vec::new());
    let mut rest = text.strip_prefix("<!DOCTYPE html>").unwrap_or(text);
    while let Some(at) = rest.find('<') {
        assert!(!rest[..at].contains('>'), "a bare > near {:?}", &rest[..at]);
        let end = at + rest[at..].find('>').expect("a tag is closed");
        let tag = &rest[at + 1..end];
        rest = &rest[end + 1..];
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop().as_deref(), Some(name));
            continue;
        }
        let name = tag.split([' ', '\n', '/']).next().unwrap_or_default().to_owned();
        assert!(!name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric()), "element `{name}`");
        assert_eq!(tag.matches('"').count() % 2, 0, "quotes of {tag}");
        let outside: String = tag.split('"').step_by(2).collect();
        assert_eq!(outside.matches('=').count(), tag.matches('"').count() / 2, "{tag}");
        assert!(!outside.contains(" on") && !outside.contains("src"), "a handler or source in {tag}");
        assert!(!outside.contains("href") || tag.contains(" href=\"#"), "an external link in {tag}");
        seen.push(name.clone());
        if name == "style" {
            rest = &rest[rest.find("</style>").expect("a style ends")..];
        }
        if !tag.ends_with('/') && name != "meta" {
            open.push(name);
        }
    }
    assert!(open.is_empty(), "left open: {open:?}");
    seen
}

/// Checks that all files of a report are well-formed, and that no file has a script or refers to another site.
fn check(traces: Vec<Trace>) {
    for (name, contents) in Report::new(traces).unwrap().render_files() {
        let text = String::from_utf8(contents).expect("every file is UTF-8");
        assert!(name.chars().all(|c| c.is_ascii_alphanumeric() || c == '.' || c == '-'), "{name}");
        let ending = name.rsplit('.').next().unwrap_or_default();
        if ending == "html" || ending == "svg" {
            let text = text.replace(" xmlns=\"http://www.w3.org/2000/svg\"", "");
            assert!(!text.contains("http://") && !text.contains("https://"), "{name} refers to another site");
            assert!(!text.contains("@import") && !text.contains("url(h"));
            let seen = elements(&text);
            for bad in ["script", "iframe", "object", "link", "img", "foreignObject", "form"] {
                assert!(!seen.iter().any(|element| element == bad), "{name} has <{bad}>");
            }
        } else if ending == "json" {
            serde_json::from_str::<Value>(&text).expect("JSON");
        } else if ending == "csv" {
            let quotes = |line: &str| line.matches('"').count();
            assert!(text.lines().all(|line| quotes(line) % 2 == 0));
        }
    }
}

#[test]
fn sample_is_well_formed_and_self_contained() {
    check(sample::pair(6));
}

#[test]
fn hostile_names_are_escaped() {
    const NAMES: [&str; 8] = [
        "</title></style><script>alert(1)</script>",
        "\" onload=\"alert(1)",
        "a]b](x) | ![i](x) `c` <img src=x onerror=alert(1)>\n# heading",
        "=HYPERLINK(\"x\"),@SUM(1)",
        "\u{0}\u{7}\u{202e}\u{2028}]]>--><!--",
        "{\"ph\":\"X\"}\\\",",
        "",
        "</svg></text></b></code>&lt;&amp;",
    ];
    for (index, name) in NAMES.iter().enumerate() {
        let mut traces = sample::pair(3);
        for trace in &mut traces {
            let header = &mut trace.header;
            for text in [
                &mut header.scenario_name,
                &mut header.plan_digest,
                &mut header.model_name,
                &mut header.program_version,
            ] {
                *text = (*name).into();
            }
            header.devices[index % 3].name = (*name).into();
            header.devices[0].os_and_kernel = Some((*name).into());
            header.devices[1].unvalidated_parts = Some(name.repeat(100));
            header.devices[2].profile_digest = Some((*name).into());
        }
        let report = Report::new(traces.clone()).unwrap();
        let markdown = file(&report, "report.md");
        assert!(!markdown.contains("<script") && !markdown.contains("<img"), "{markdown}");
        assert!(!markdown.lines().any(|line| line == "# heading"));
        // Names must not add columns or rows to a table.
        let columns = |line: &str| line.replace("\\|", "").matches('|').count();
        let devices: Vec<&str> =
            markdown.lines().skip_while(|line| !line.starts_with("| Device")).take(5).collect();
        assert!(devices.iter().all(|line| columns(line) == 8), "{devices:?}");
        assert!(!file(&report, "comparison.csv").lines().any(|line| line.starts_with(['=', '@', '+', '-'])));
        check(traces);
    }
}

#[test]
fn gantt_has_every_lane_interval_and_message() {
    let text = file(&Report::new(sample::pair(4)).unwrap(), "gantt-simulated.svg");
    let count = |what: &str| text.matches(what).count();
    // Each device has two rows: CPU and disk for laptop and phone, CPU and GPU for the desktop.
    assert_eq!(count("class=\"lane\""), 6);
    // 2 rounds * 3 hops = 6 messages.
    assert_eq!(count("marker-end"), 6);
    // Steps on CPUs: the embedding, 3 windows in each of 2 rounds, and the output.
    assert_eq!(count("class=\"cpu\""), 8);
    // The windows of laptop and phone wait for the disk; those of the desktop also run on the GPU.
    assert_eq!((count("class=\"demand\""), count("class=\"gpu\"")), (4, 2));
    // The laptop reads ahead twice per token. The phone has three reads, of which one ends in the next token.
    assert_eq!(count("class=\"hidden\""), 5);
}
