//! Merges the tables of the shards of a sweep.
//!
//! Tables can be merged if their first lines have the same digest. Every row must be present exactly once. The result
//! is byte for byte equal to the table that a single process writes.

use std::path::PathBuf;

use super::table::{TableHeader, cells};
use super::values::MAX_ROWS;
use crate::Error;

/// Maximum number of missing rows that an error message lists.
const MAX_LISTED: usize = 5;

/// The table of a shard and the path of its file.
pub struct ShardTable {
    pub path: PathBuf,
    pub text: String,
}

/// The CSV line of a row, and its location as `PATH:LINE`.
struct FoundRow<'p> {
    line: &'p str,
    location: String,
}

pub fn merge_shards(parts: &[ShardTable]) -> Result<String, Error> {
    let Some(first) = parts.first() else { return Err(Error::invalid("there is nothing to merge")) };
    let (header, columns) = parse_header(first)?;
    if header.row_count > MAX_ROWS {
        let rows = header.row_count;
        let what = format!("the first line declares {rows} rows, but a sweep has at most {MAX_ROWS}");
        return Err(Error::invalid(what).with_location(first.path.display()));
    }
    let mut rows: Vec<Option<FoundRow>> = Vec::new();
    rows.resize_with(header.row_count, || None);
    for part in parts {
        let (other, own) = parse_header(part)?;
        if (&other.digest, other.row_count, own) != (&header.digest, header.row_count, columns) {
            let what = format!("this table belongs to a different sweep than `{}`", first.path.display());
            return Err(Error::invalid(what)
                .with_location(part.path.display())
                .with_hint("merge tables of one scenario, one set of flags and one version of hearth"));
        }
        place_rows(part, cells(columns).len(), &mut rows)?;
    }
    let missing: Vec<usize> = (0..rows.len()).filter(|&index| rows[index].is_none()).collect();
    if !missing.is_empty() {
        return Err(missing_rows(&missing, parts));
    }
    let whole = TableHeader { shard: None, ..header };
    let lines = rows.iter().flatten().flat_map(|row| [row.line, "\n"]);
    Ok(format!("{whole}\n{columns}\n") + &lines.collect::<String>())
}

/// Returns the parsed first line of a table, and the second line, which has the names of the columns.
fn parse_header(part: &ShardTable) -> Result<(TableHeader, &str), Error> {
    let mut lines = part.text.lines();
    let header = lines.next().and_then(TableHeader::parse);
    let columns = lines.next().filter(|columns| columns.starts_with("index,"));
    header.zip(columns).ok_or_else(|| {
        Error::invalid("this is not the table of a sweep")
            .with_location(part.path.display())
            .with_hint("merge files that `hearth sweep -o` wrote, with their first line")
    })
}

/// Stores each row of a shard in `rows` at its index. `width` is the number of columns of the table.
fn place_rows<'p>(
    part: &'p ShardTable,
    width: usize,
    rows: &mut [Option<FoundRow<'p>>],
) -> Result<(), Error> {
    for (line, number) in part.text.lines().zip(1..).skip(2) {
        let location = format!("{}:{number}", part.path.display());
        let cells = cells(line);
        let index = cells[0].parse::<usize>().ok().filter(|&index| index < rows.len());
        let Some(index) = index.filter(|_| cells.len() == width) else {
            return Err(Error::invalid("this line is not a row of the sweep")
                .with_location(location)
                .with_hint("the file is damaged: run the sweep again"));
        };
        if let Some(before) = &rows[index] {
            let what = format!("row {index} is present twice, first at {}", before.location);
            return Err(Error::invalid(what).with_location(location).with_hint("give each shard only once"));
        }
        rows[index] = Some(FoundRow { line, location });
    }
    Ok(())
}

/// Returns the error that lists the missing rows. The hint names the shard of the first missing row.
fn missing_rows(missing: &[usize], parts: &[ShardTable]) -> Error {
    let named: Vec<String> = missing.iter().take(MAX_LISTED).map(usize::to_string).collect();
    let more = missing.len().saturating_sub(MAX_LISTED);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    let failure = Error::invalid(format!("rows are missing: {}{more}", named.join(", ")));
    let shard = parts.iter().find_map(|part| TableHeader::parse(part.text.lines().next()?)?.shard);
    let Some((_, of)) = shard.filter(|(_, of)| *of > 0) else {
        return failure.with_hint("the sweep was stopped: run it again");
    };
    failure.with_hint(format!("run `--shard {}/{of}` again, and give its table as well", missing[0] % of + 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(name: &str, shard: &str, rows: &[usize]) -> ShardTable {
        let mut text = format!("# hearth sweep/1, sha256:0, 4 rows{shard}\nindex,x,outcome\n");
        text.extend(rows.iter().map(|row| format!("{row},\"{row},0\",ok\n")));
        ShardTable { path: name.into(), text }
    }

    #[test]
    fn shards_merge_to_the_whole() {
        let whole = part("whole", "", &[0, 1, 2, 3]);
        let shards = [part("b", ", shard 2 of 2", &[1, 3]), part("a", ", shard 1 of 2", &[0, 2])];
        assert_eq!(merge_shards(&shards).expect("a whole"), whole.text);
        assert_eq!(merge_shards(&[part("whole", "", &[0, 1, 2, 3])]).expect("a whole"), whole.text);
    }

    #[test]
    fn incomplete_tables_are_rejected() {
        let one = || part("a", ", shard 1 of 2", &[0, 2]);
        let check = |parts: &[ShardTable], expected: &[&str]| {
            let error = merge_shards(parts).expect_err("not whole");
            let (location, hint) = (error.location(), error.hint_text());
            let text = [error.message(), location.unwrap_or_default(), hint.unwrap_or_default()].join("\n");
            assert!(expected.iter().all(|part| text.contains(part)), "{expected:?}: {text}");
        };
        check(&[one()], &["rows are missing: 1, 3", "--shard 2/2"]);
        let twice = part("b", ", shard 2 of 2", &[1, 2, 3]);
        check(&[one(), twice], &["row 2 is present twice, first at a:4\nb:4"]);
        let mut other = part("b", ", shard 2 of 2", &[1, 3]);
        other.text = other.text.replace("sha256:0", "sha256:1");
        check(&[one(), other], &["a different sweep"]);
        check(&[part("a", "", &[0, 1, 2, 9])], &["not a row of the sweep", "a:6"]);
        let mut cut = part("a", "", &[0, 1, 2, 3]);
        cut.text.truncate(cut.text.len() - 4);
        check(&[cut], &["not a row of the sweep"]);
        for (text, expected) in [
            ("index,x\n", "not the table of a sweep"),
            ("# hearth sweep/1, d, 99999999999 rows\nindex,\n", "at most 100000"),
        ] {
            check(&[ShardTable { path: "x".into(), text: text.into() }], &[expected]);
        }
    }
}
