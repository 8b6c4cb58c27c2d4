//! Matches runs with published cells of the same scenario.
//!
//! A row of a `published/1` document names a scenario file. A run of a scenario with the same name (that of the file,
//! without the extension) is compared with the cells of the row. A trace does not name the system of the document
//! that it corresponds to, so one table shows all systems. Cells for which the document replaces parts of the scenario
//! match no run. The requested system, or the only system, is also shown
//! in the other tables of the report.
//!
//! Not here: running the scenarios of a document ([`super::scores`], `hearth reproduce`).

use std::collections::BTreeSet;
use std::path::Path;

use super::{PublishedResults, ResultRow};
use crate::comparison::{PublishedCell, Run};
use crate::text::escape;

/// The reason why published numbers cannot be compared with the runs.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct MatchError(String);

/// Returns the cells of a document that belong to the scenarios of the runs: those of `system`, or of all systems if
/// `system` is `None`.
pub fn find_cells(
    published: &PublishedResults,
    system: Option<&str>,
    runs: &[Run],
) -> Result<Vec<PublishedCell>, MatchError> {
    let (document, error) = (&published.name, |what: String| Err(MatchError(what)));
    if let Some(system) = system.filter(|name| !published.systems.iter().any(|system| system.name == **name))
    {
        let known = list(published.systems.iter().map(|system| system.name.as_str()));
        let system = escape::sanitize_name(system);
        return error(format!("`{document}` has no system `{system}`; use one of {known}"));
    }
    let rows = |run: &Run| {
        let name = run.scenario.clone();
        published.rows.iter().filter(move |row| scenario(row) == Some(name.as_str()))
    };
    let comparable = |row: &ResultRow, name: &str| {
        let system = published.systems.iter().find(|system| system.name == name);
        system.is_some_and(|system| published.keeps_scenario(row, system))
    };
    if !runs.iter().any(|run| rows(run).next().is_some()) {
        let known = list(published.rows.iter().filter_map(scenario));
        let scenario = runs.first().map_or("", |run| &run.scenario);
        return error(format!(
            "`{document}` has no row for scenario `{scenario}`; compare runs of these scenarios: {known}"
        ));
    }
    let mut found = Vec::new();
    for (index, run) in runs.iter().enumerate() {
        for row in rows(run) {
            let requested = row
                .cells_by_system
                .iter()
                .filter(|(name, _)| comparable(row, name) && system.is_none_or(|system| system == *name));
            let selected = requested.clone().count() == 1;
            found.extend(requested.map(|(name, cell)| PublishedCell {
                run_index: index,
                document: published.name.clone(),
                source: escape::sanitize_sentence(&published.source),
                row: escape::sanitize_name(&row.label),
                system: escape::sanitize_name(name),
                is_selected: selected,
                tpot_ms: row.tpot(cell).map(|time| time.0 * 1e3),
                ttft_ms: row.ttft(cell).map(|time| time.0 * 1e3),
                outcome: cell.outcome,
                tolerance: cell.tolerance.unwrap_or(published.tolerance).0,
                is_fitted: published.fitted_rows.contains(&row.label),
            }));
        }
    }
    match system {
        Some(system) if found.is_empty() => error(format!(
            "`{document}` has no published result of `{system}` for these scenarios; omit `--system` to compare with \
             the other systems"
        )),
        _ => Ok(found),
    }
}

fn scenario(row: &ResultRow) -> Option<&str> {
    Path::new(row.scenario.as_deref()?).file_stem()?.to_str()
}

fn list<'n>(names: impl Iterator<Item = &'n str>) -> String {
    let names: BTreeSet<String> = names.map(|name| format!("`{}`", escape::sanitize_name(name))).collect();
    names.into_iter().collect::<Vec<_>>().join(", ")
}
