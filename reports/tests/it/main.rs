//! Integration tests of the reports on traces.

use hearth_reports::Report;

mod golden;
mod perfetto;
mod published;
mod random;
mod sample;
mod structure;
mod trace_events;

/// Checks that the terms in the first `columns` value columns of a CSV file sum exactly to the time per token. Returns
/// the number of columns that have values.
fn columns_that_add_up(csv: &str, columns: usize) -> usize {
    let rows: Vec<Vec<&str>> = csv.lines().skip(1).take(8).map(|line| line.split(',').collect()).collect();
    let has_sum = |column: &usize| {
        let units = |row: &Vec<&str>| row[*column].replace('.', "").parse::<i128>();
        let parts: Result<Vec<i128>, _> = rows[..7].iter().map(units).collect();
        let (Ok(parts), Ok(total)) = (parts, units(&rows[7])) else { return false };
        assert_eq!(parts.iter().sum::<i128>(), total, "column {column} of\n{csv}");
        true
    };
    (3..3 + columns).filter(has_sum).count()
}

/// Returns the text of the file `name` of a report.
fn file(report: &Report, name: &str) -> String {
    let files = report.render_files();
    let (_, contents) = files.iter().find(|(found, _)| found == name).expect("the file is in the report");
    String::from_utf8(contents.clone()).expect("it is text")
}
