//! Merges the tables of the shards of a sweep.
//!
//! Tables belong together if their first lines name the same sweep. Every row must be there once. The result is what
//! one process would have written, byte for byte.

use std::path::PathBuf;

use super::table::{Head, cells};
use super::values::MAX_ROWS;
use crate::Error;

/// The number of missing rows that are listed.
const NAMED: usize = 5;

/// A table and where it was read.
pub struct Part {
    pub path: PathBuf,
    pub text: String,
}

/// A row's line, and where it stands.
struct Found<'p> {
    line: &'p str,
    place: String,
}

pub fn merge(parts: &[Part]) -> Result<String, Error> {
    let Some(first) = parts.first() else { return Err(Error::invalid("there is nothing to merge")) };
    let (head, columns) = begin(first)?;
    if head.rows > MAX_ROWS {
        return Err(Error::invalid(format!(
            "the table says {} rows; a sweep has at most {MAX_ROWS}",
            head.rows
        ))
        .at(first.path.display()));
    }
    let mut rows: Vec<Option<Found>> = Vec::new();
    rows.resize_with(head.rows, || None);
    for part in parts {
        let (other, own) = begin(part)?;
        if (&other.digest, other.rows, own) != (&head.digest, head.rows, columns) {
            let what = format!("this table belongs to another sweep than `{}`", first.path.display());
            return Err(Error::invalid(what)
                .at(part.path.display())
                .hint("merge tables of one scenario, one set of flags and one version of hearth"));
        }
        take(part, cells(columns).len(), &mut rows)?;
    }
    let missing: Vec<usize> = (0..rows.len()).filter(|&index| rows[index].is_none()).collect();
    if !missing.is_empty() {
        return Err(absent(&missing, parts));
    }
    let whole = Head { shard: None, ..head };
    let mut text = format!("{whole}\n{columns}\n");
    for row in rows.iter().flatten() {
        text.push_str(row.line);
        text.push('\n');
    }
    Ok(text)
}

/// Parses the first two lines.
fn begin(part: &Part) -> Result<(Head, &str), Error> {
    let mut lines = part.text.lines();
    let head = lines.next().and_then(Head::parse);
    let columns = lines.next().filter(|columns| columns.starts_with("index,"));
    head.zip(columns).ok_or_else(|| {
        Error::invalid("this is not the table of a sweep")
            .at(part.path.display())
            .hint("merge files that `hearth sweep -o` wrote, with their header line")
    })
}

/// Puts the rows of a part at their indices.
fn take<'p>(part: &'p Part, width: usize, rows: &mut [Option<Found<'p>>]) -> Result<(), Error> {
    for (line, number) in part.text.lines().zip(1..).skip(2) {
        let place = format!("{}:{number}", part.path.display());
        let cells = cells(line);
        let index = cells[0].parse::<usize>().ok().filter(|&index| index < rows.len());
        let Some(index) = index.filter(|_| cells.len() == width) else {
            return Err(Error::invalid("this line is not a row of the sweep")
                .at(place)
                .hint("the file is damaged: run the sweep again"));
        };
        if let Some(before) = &rows[index] {
            return Err(Error::invalid(format!("row {index} is present twice, first at {}", before.place))
                .at(place)
                .hint("give each shard only once"));
        }
        rows[index] = Some(Found { line, place });
    }
    Ok(())
}

/// The error that names missing rows and a shard that has them.
fn absent(missing: &[usize], parts: &[Part]) -> Error {
    let named: Vec<String> = missing.iter().take(NAMED).map(usize::to_string).collect();
    let more = missing.len().saturating_sub(NAMED);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    let failure = Error::invalid(format!("rows are missing: {}{more}", named.join(", ")));
    let of = parts.iter().find_map(|part| Head::parse(part.text.lines().next()?)?.shard).map(|(_, of)| of);
    match of.filter(|&of| of > 0) {
        Some(of) => failure
            .hint(format!("run `--shard {}/{of}` again, and give its table as well", missing[0] % of + 1)),
        None => failure.hint("the sweep was stopped: run it again"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(name: &str, shard: &str, rows: &[usize]) -> Part {
        use std::fmt::Write;
        let mut text = format!("# hearth sweep/1, sha256:0, 4 rows{shard}\nindex,x,outcome\n");
        for row in rows {
            let _ = writeln!(text, "{row},\"{row},0\",ok");
        }
        Part { path: name.into(), text }
    }

    #[test]
    fn shards_merge_to_the_whole() {
        let whole = part("whole", "", &[0, 1, 2, 3]);
        let shards = [part("b", ", shard 2 of 2", &[1, 3]), part("a", ", shard 1 of 2", &[0, 2])];
        assert_eq!(merge(&shards).expect("a whole"), whole.text);
        assert_eq!(merge(&[part("whole", "", &[0, 1, 2, 3])]).expect("a whole"), whole.text);
    }

    #[test]
    fn incomplete_tables_are_refused() {
        let one = || part("a", ", shard 1 of 2", &[0, 2]);
        let told = |parts: &[Part]| {
            let error = merge(parts).expect_err("not whole");
            [error.text(), error.place().unwrap_or_default(), error.fix().unwrap_or_default()].join("\n")
        };
        let text = told(&[one()]);
        assert!(text.contains("rows are missing: 1, 3") && text.contains("--shard 2/2"), "{text}");
        let text = told(&[one(), part("b", ", shard 2 of 2", &[1, 2, 3])]);
        assert!(text.contains("row 2 is present twice, first at a:4\nb:4"), "{text}");
        let mut other = part("b", ", shard 2 of 2", &[1, 3]);
        other.text = other.text.replace("sha256:0", "sha256:1");
        assert!(told(&[one(), other]).contains("another sweep"));
        let text = told(&[part("a", "", &[0, 1, 2, 9])]);
        assert!(text.contains("not a row of the sweep") && text.contains("a:6"), "{text}");
        let mut cut = part("a", "", &[0, 1, 2, 3]);
        cut.text.truncate(cut.text.len() - 4);
        assert!(told(&[cut]).contains("not a row of the sweep"));
        assert!(
            told(&[Part { path: "x".into(), text: "index,x\n".into() }]).contains("not the table of a sweep")
        );
        let huge = Part { path: "x".into(), text: "# hearth sweep/1, d, 99999999999 rows\nindex,\n".into() };
        assert!(told(&[huge]).contains("at most 100000"));
    }
}
