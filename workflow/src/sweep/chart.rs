//! Draws the chart of a sweep: the time per token over the first field, with a line for each value of the second field.
//!
//! Rows that differ only in the seed are averaged. The axis is logarithmic if the values of the first field grow by
//! equal ratios. Values that are not quantities are drawn at equal distances in the order of the table.
//!
//! Not here: drawing lines and axes (`hearth_reports`).

use std::collections::{BTreeMap, BTreeSet};

use hearth_profiles::model::shipped_profile;
use hearth_reports::charts::lines::{AxisPosition, LineChart, Series};

use super::table::{INDEX_COLUMNS, RESULT_COLUMNS, cells};
use super::values::{QuantityKind, parse_quantity};
use crate::Error;

/// Draws the table of a sweep over one or two fields as an SVG image.
pub fn draw_svg(table: &str) -> Result<String, Error> {
    let hint = "see the column `outcome` of the table";
    line_chart(table)?
        .to_standalone_svg()
        .ok_or_else(|| Error::invalid("no row has a time to draw").with_hint(hint))
}

/// Returns the line chart of the table of a sweep over one or two fields.
pub fn line_chart(table: &str) -> Result<LineChart, Error> {
    let mut lines = table.lines().skip(1);
    let columns = lines.next().map(cells).unwrap_or_default();
    let fields = columns.len().saturating_sub(INDEX_COLUMNS.len() + RESULT_COLUMNS.len());
    let column = |name: &str| columns.iter().rposition(|column| column == name);
    let (Some(across), Some(tpot), true) = (columns.get(INDEX_COLUMNS.len()), column("tpot_ms"), fields > 0)
    else {
        return Err(Error::invalid("no field is varied: there is nothing to draw").with_hint("add `--vary`"));
    };
    let rows: Vec<Vec<String>> = lines.map(cells).filter(|row| row.len() == columns.len()).collect();
    let (first, second) = (INDEX_COLUMNS.len(), (fields > 1).then_some(INDEX_COLUMNS.len() + 1));
    let names = unique(rows.iter().map(|row| row[first].as_str()));
    let others = unique(rows.iter().map(|row| second.map_or("", |second| row[second].as_str())));
    let mut times: BTreeMap<(&str, &str), (f64, f64)> = BTreeMap::new();
    for row in &rows {
        if let Ok(time) = row[tpot].parse::<f64>() {
            let (sum, count) = times.entry((&row[first], second.map_or("", |at| &row[at]))).or_default();
            (*sum, *count) = (*sum + time, *count + 1.0);
        }
    }
    let time = |name: &str, other: &str| times.get(&(name, other)).map(|(sum, count)| sum / count);
    let line = |&other: &&str| {
        let values = names.iter().map(|name| time(name, other)).collect();
        Series { name: other.to_owned(), values }
    };
    let by = second.map_or_else(String::new, |second| format!(", by {}", columns[second]));
    let label = match across.as_str() {
        "planner.rounds" => "k (planner.rounds)",
        "model.profile" => "model size (model.profile)",
        path => path,
    };
    Ok(LineChart {
        title: format!("Time per token over {label}{by}"),
        x_title: across.clone(),
        unit: "ms".to_owned(),
        x_positions: by_size(across, &names).unwrap_or_else(|| positions(&names)),
        series: others.iter().map(line).collect(),
        marks_missing_values: true,
    })
}

fn unique<'t>(texts: impl Iterator<Item = &'t str>) -> Vec<&'t str> {
    let mut seen = BTreeSet::new();
    texts.filter(|text| seen.insert(*text)).collect()
}

/// Returns the positions of the models `names` on an axis that shows the size of their weights; `None` unless the field
/// is `model.profile` and all models are shipped.
fn by_size(field: &str, names: &[&str]) -> Option<Vec<AxisPosition>> {
    let size = |name: &&str| Some(shipped_profile(name).ok()?.total_bytes().as_f64());
    let sizes: Vec<f64> =
        names.iter().map(size).collect::<Option<_>>().filter(|_| field == "model.profile")?;
    let most = sizes.iter().copied().fold(0.0, f64::max);
    let position =
        |(name, size): (&&str, f64)| AxisPosition { x_fraction: size / most, label: (*name).to_owned() };
    Some(names.iter().zip(sizes).map(position).collect())
}

/// Returns the positions of values on the axis: by size if all are quantities of one kind, else at equal distances.
fn positions(names: &[&str]) -> Vec<AxisPosition> {
    let position = |fraction: f64, name: &str| AxisPosition { x_fraction: fraction, label: name.to_owned() };
    let sizes: Option<Vec<(QuantityKind, f64)>> = names.iter().map(|name| parse_quantity(name)).collect();
    let sizes = sizes.filter(|sizes| sizes.iter().all(|(kind, _)| *kind == sizes[0].0));
    let Some(sizes) = sizes else {
        let last = (names.len() - 1).max(1) as f64;
        return names.iter().enumerate().map(|(at, name)| position(at as f64 / last, name)).collect();
    };
    let sizes: Vec<f64> = sizes.into_iter().map(|(_, size)| size).collect();
    let at: Vec<f64> =
        if is_geometric(&sizes) { sizes.iter().map(|size| size.ln()).collect() } else { sizes };
    let least = at.iter().copied().fold(f64::INFINITY, f64::min);
    let most = at.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let width = if most > least { most - least } else { 1.0 };
    names.iter().zip(&at).map(|(name, at)| position((at - least) / width, name)).collect()
}

/// Returns whether three or more values grow by equal ratios. The ratios may differ by 2 %, because values are rounded.
fn is_geometric(sizes: &[f64]) -> bool {
    let ratios: Vec<f64> = sizes.windows(2).map(|pair| pair[1] / pair[0]).collect();
    let is_equal = |ratio: &f64| ratio.is_finite() && *ratio > 0.0 && (ratio / ratios[0] - 1.0).abs() < 0.02;
    ratios.len() > 1 && ratios.iter().all(is_equal) && (ratios[0] - 1.0).abs() > 0.1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_placed_by_size() {
        let fractions =
            |names: &[&str]| positions(names).iter().map(|position| position.x_fraction).collect::<Vec<_>>();
        assert_eq!(fractions(&["2 GiB", "4 GiB", "6 GiB"]), [0.0, 0.5, 1.0]);
        assert_eq!(fractions(&["1 ms", "10 ms", "0.1 s"]), [0.0, 0.5, 1.0]);
        assert_eq!(fractions(&["8", "0"]), [1.0, 0.0]);
        assert_eq!(fractions(&["os", "managed", "windowed"]), [0.0, 0.5, 1.0]);
        assert_eq!(fractions(&["5"]), [0.0]);
    }
}
