//! The table of a sweep: a CSV file that can be merged with the tables of other shards.
//!
//! The first line is a comment with the digest of all inputs of the rows, the number of rows of the whole sweep, and
//! for a shard its number. The second line has the names of the columns. The rows follow in ascending order of their
//! index. The same sweep always gives the same bytes.
//!
//! Not here: opening files, and merging shards ([`crate::sweep::merge`]).

use std::fmt;

use hearth_reports::csv_field;
use hearth_reports::exports::csv;
pub use hearth_reports::exports::csv::split_fields as cells;

use super::{Sweep, SweepRow};

/// Beginning of the first line of the table of a sweep.
const HEADER_PREFIX: &str = "# hearth sweep/1, ";

/// The name of a column, and the function that returns the cell of a row in this column.
pub type Column = (&'static str, fn(&SweepRow) -> String);

/// Names of the columns before those of the varied fields.
pub const INDEX_COLUMNS: [&str; 1] = ["index"];
/// The columns after those of the varied fields. Milliseconds have six decimals (nanoseconds); unknown values are
/// empty.
pub const RESULT_COLUMNS: [Column; 12] = [
    ("seed", |row| row.seed.to_string()),
    ("strategy", |row| row.evaluation.strategy.as_deref().map_or_else(String::new, csv_field)),
    ("rounds", |row| row.evaluation.rounds.map_or_else(String::new, |rounds| rounds.to_string())),
    ("windows", |row| row.evaluation.windows.as_deref().map_or_else(String::new, csv_field)),
    ("tpot_ms", |row| number(row.evaluation.tpot_ms, 6)),
    ("ttft_ms", |row| number(row.evaluation.ttft_ms, 6)),
    ("tokens_per_s", |row| number(row.evaluation.tokens_per_s, 6)),
    ("ttft_p95_ms", |row| number(row.evaluation.ttft_p95_ms, 6)),
    ("itl_p95_ms", |row| number(row.evaluation.itl_p95_ms, 6)),
    ("bytes_read_per_token", |row| number(row.evaluation.bytes_read_per_token, 0)),
    ("memory_pressure", |row| number(row.evaluation.memory_pressure, 6)),
    ("outcome", |row| csv_field(&row.evaluation.outcome)),
];

/// The content of the first line of the table of a sweep.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableHeader {
    pub digest: String,
    /// Number of rows of the whole sweep.
    pub row_count: usize,
    /// Number of the shard, counted from 1, and number of all shards; `None` for the whole sweep.
    pub shard: Option<(usize, usize)>,
}

impl TableHeader {
    /// Parses the first line of the table of a sweep; `None` if the line has a different format.
    pub fn parse(line: &str) -> Option<TableHeader> {
        let mut parts = line.strip_prefix(HEADER_PREFIX)?.split(", ");
        let digest = parts.next()?.to_owned();
        let rows = parts.next()?.strip_suffix(" rows")?.parse().ok()?;
        let shard = match parts.next() {
            None => None,
            Some(shard) => {
                let (part, of) = shard.strip_prefix("shard ")?.split_once(" of ")?;
                Some((part.parse().ok()?, of.parse().ok()?))
            }
        };
        parts.next().is_none().then_some(TableHeader { digest, row_count: rows, shard })
    }
}

impl fmt::Display for TableHeader {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{HEADER_PREFIX}{}, {} rows", self.digest, self.row_count)?;
        self.shard.map_or(Ok(()), |(part, of)| write!(f, ", shard {part} of {of}"))
    }
}

/// Returns the table with these rows of a sweep, which must be in ascending order of their index.
pub fn csv_text(sweep: &Sweep, shard: Option<(usize, usize)>, rows: &[SweepRow]) -> String {
    let header = TableHeader { digest: sweep.digest.clone(), row_count: sweep.row_count(), shard };
    let fields = sweep.fields.iter().map(|field| csv_field(&field.path));
    let columns = INDEX_COLUMNS.map(str::to_owned).into_iter().chain(fields);
    let columns: Vec<String> = columns.chain(RESULT_COLUMNS.map(|(name, _)| name.to_owned())).collect();
    let rows = csv::write_rows([columns].into_iter().chain(rows.iter().map(cells_of)));
    format!("{header}\n{}", String::from_utf8_lossy(&rows))
}

fn cells_of(row: &SweepRow) -> Vec<String> {
    let values = row.values.iter().map(|value| csv_field(value));
    let results = RESULT_COLUMNS.iter().map(|(_, cell)| cell(row));
    [row.index.to_string()].into_iter().chain(values).chain(results).collect()
}

fn number(value: Option<f64>, digits: usize) -> String {
    value.filter(|value| value.is_finite()).map_or_else(String::new, |value| format!("{value:.digits$}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_round_trips() {
        for shard in [None, Some((2, 3))] {
            let header = TableHeader { digest: "sha256:0".into(), row_count: 70, shard };
            assert_eq!(TableHeader::parse(&header.to_string()), Some(header));
        }
        let other = ["# hearth sweep/2, sha256:0, 7 rows", "# hearth sweep/1, sha256:0, x rows"];
        for wrong in ["", "index,seed"].into_iter().chain(other) {
            assert_eq!(TableHeader::parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn cells_round_trip() {
        let written = ["1", "a \"b\", c", "", "2 GiB"];
        let line = csv::write_rows([written.map(csv_field).to_vec()]);
        assert_eq!(cells(&String::from_utf8_lossy(&line)), written);
    }
}
