//! Finds the line and column of a key in YAML text.
//!
//! A validation error has the dotted path of a key (`cpu.matvec.q4_k`). The parent of a key is the nearest line above
//! the key with less indentation, as in block-style YAML. In flow style (`{a: 1}`) several keys share a line; the
//! search then ends at the innermost key that begins a line.

struct KeyLine<'a> {
    /// Number of characters before the key in its line: spaces and list markers.
    indent: usize,
    key: &'a str,
    /// Line number, from 1.
    line: usize,
}

fn key_lines(text: &str) -> impl Iterator<Item = KeyLine<'_>> {
    text.lines().zip(1..).filter_map(|(whole, line)| {
        let rest = whole.trim_start_matches([' ', '-']);
        if rest.starts_with('#') {
            return None;
        }
        let key = rest.split(':').next().unwrap_or_default();
        let key_ends = key.len() < rest.len();
        let (indent, key_text) = (whole.len() - rest.len(), key.trim().trim_matches(['"', '\'']));
        key_ends.then_some(KeyLine { indent, key: key_text, line })
    })
}

/// Returns the line and column of the key at a dotted path or, for an absent key, of the nearest parent that exists.
pub(super) fn locate(text: &str, key_path: &str) -> Option<(usize, usize)> {
    let lines: Vec<KeyLine<'_>> = key_lines(text).collect();
    let (mut from, mut parent, mut found) = (0, None, None);
    for segment in key_path.split('.') {
        // Children are indented more than their parent; the first line that is not ends the block.
        let inside = |line: &&KeyLine<'_>| parent.is_none_or(|indent| line.indent > indent);
        let block: Vec<&KeyLine<'_>> = lines[from..].iter().take_while(inside).collect();
        let Some(own) = block.first().map(|first| first.indent) else { break };
        let Some(at) = block.iter().position(|line| line.indent == own && line.key == segment) else { break };
        found = Some((block[at].line, block[at].indent + 1));
        (from, parent) = (from + at + 1, Some(own));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
# disk: not this one
schema: x/1
cpu:
  disk: 1
  matvec:
    q4_k: {value: 3 GFLOP/s}
disk:
  sequential:
    value: 0 GB/s
  sequential: 2
peers:
- peer: a
";

    #[test]
    fn path_is_resolved_by_indentation() {
        assert_eq!(locate(TEXT, "disk"), Some((7, 1)));
        assert_eq!(locate(TEXT, "cpu.disk"), Some((4, 3)));
        assert_eq!(locate(TEXT, "cpu.matvec.q4_k"), Some((6, 5)));
        assert_eq!(locate(TEXT, "disk.sequential.value"), Some((9, 5)));
        assert_eq!(locate(TEXT, "cpu.matvec.q4_k.value"), Some((6, 5)), "flow style: the line's first key");
        assert_eq!(locate(TEXT, "nothing"), None);
    }
}
