//! Key locations: finds the line and column of a key in a YAML text.
//!
//! An error in a value names its key's path (`cpu.matvec.q4_k`), and the location is found in the text: a key belongs
//! to the nearest line above it with less indentation, which is how block-style YAML nests. In flow style (`{a: 1}`)
//! several keys share a line; the search then ends at the innermost key that begins a line.

struct KeyLine<'a> {
    /// Spaces and list marks before the key.
    indent: usize,
    key: &'a str,
    /// Line, from 1.
    line: usize,
}

impl KeyLine<'_> {
    fn place(&self) -> (usize, usize) {
        (self.line, self.indent + 1)
    }
}

fn key_lines(text: &str) -> impl Iterator<Item = KeyLine<'_>> {
    text.lines().zip(1..).filter_map(|(whole, line)| {
        let rest = whole.trim_start_matches([' ', '-']);
        if rest.starts_with('#') {
            return None;
        }
        let key = rest.split(':').next().unwrap_or_default();
        let key_ends = key.len() < rest.len();
        key_ends.then(|| KeyLine {
            indent: whole.len() - rest.len(),
            key: key.trim().trim_matches(['"', '\'']),
            line,
        })
    })
}

/// Line and column of the key at a path, or of the longest part of the path that is found.
pub(super) fn of(text: &str, path: &str) -> Option<(usize, usize)> {
    let lines: Vec<KeyLine<'_>> = key_lines(text).collect();
    let (mut from, mut parent, mut found) = (0, None, None);
    for segment in path.split('.') {
        // Children are indented more than their parent; the first line that is not ends the block.
        let inside = |line: &&KeyLine<'_>| parent.is_none_or(|indent| line.indent > indent);
        let block: Vec<&KeyLine<'_>> = lines[from..].iter().take_while(inside).collect();
        let Some(own) = block.first().map(|first| first.indent) else { break };
        let Some(at) = block.iter().position(|line| line.indent == own && line.key == segment) else { break };
        found = Some(block[at].place());
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
        assert_eq!(of(TEXT, "disk"), Some((7, 1)));
        assert_eq!(of(TEXT, "cpu.disk"), Some((4, 3)));
        assert_eq!(of(TEXT, "cpu.matvec.q4_k"), Some((6, 5)));
        assert_eq!(of(TEXT, "disk.sequential.value"), Some((9, 5)));
        assert_eq!(of(TEXT, "cpu.matvec.q4_k.value"), Some((6, 5)), "flow style: the line's first key");
        assert_eq!(of(TEXT, "nothing"), None);
    }
}
