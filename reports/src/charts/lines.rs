//! Line charts: a line for each series, with a value at each position of the horizontal axis.
//!
//! Where a value that should exist is missing, the line is broken and a cross on the axis marks the position.

use plotters::element::{PathElement, Text};
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::drawing::{CssClass, Drawing, ShapeWithTooltip};
use super::{Axis, GUTTER, PLOT_HEIGHT, Scale, label, plot, text};
use crate::text::{escape, numbers};

/// Width of a letter of a label, as a fraction of the plot width on a phone, where drawings are narrowest.
/// source: measured, 6.2 px of 266 px, the plot width on a screen of 390 px
const LETTER: f64 = 6.2 / 266.0;

/// A labelled position on the horizontal axis of a line chart.
#[derive(Debug, Clone, PartialEq)]
pub struct AxisPosition {
    /// The horizontal position, from 0 on the left to 1 on the right.
    pub x_fraction: f64,
    pub label: String,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Series {
    /// Name in the legend; empty if there is only one series.
    pub name: String,
    /// The value at each position of the horizontal axis; `None` if the value is missing.
    pub values: Vec<Option<f64>>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct LineChart {
    pub title: String,
    pub x_title: String,
    pub unit: String,
    pub x_positions: Vec<AxisPosition>,
    pub series: Vec<Series>,
    /// Whether every series should have a value at every position, so that missing values are marked with a cross.
    pub marks_missing_values: bool,
}

impl LineChart {
    /// Returns the chart as the contents of an SVG file; `None` if no value is positive.
    pub fn to_standalone_svg(&self) -> Option<String> {
        self.to_drawing("lines").map(|drawing| drawing.to_standalone_svg())
    }

    /// Draws the chart with `id` as the prefix of its SVG identifiers; `None` if no value is positive.
    pub(crate) fn to_drawing(&self, id: &str) -> Option<Drawing> {
        let numbers = self.series.iter().flat_map(|series| &series.values).flatten().copied();
        let max = numbers.filter(|number| number.is_finite()).fold(0.0, f64::max);
        if max <= 0.0 {
            return None;
        }
        let mut drawing = Drawing::new(id, &escape::sanitize_sentence(&self.title), GUTTER);
        for (index, series) in self.series.iter().enumerate().filter(|(_, series)| !series.name.is_empty()) {
            drawing.add_to_legend(CssClass::for_series(index), &escape::sanitize_name(&series.name));
        }
        let fractions = self.labelled().iter().map(|position| position.x_fraction).collect();
        let name = |fraction: &f64| {
            let found = self.x_positions.iter().find(|position| position.x_fraction == *fraction);
            found.map_or_else(String::new, |position| escape::sanitize_name(&position.label))
        };
        let scale = Scale { range: 0.0..1.0, is_logarithmic: false, ticks: fractions };
        let x_title = escape::sanitize_sentence(&self.x_title);
        let x = Axis { scale, format_label: &name, title: &x_title, grid: false };
        let unit = |value: &f64| label(*value, &self.unit);
        let y = Axis { grid: true, ..Axis::new(0.0..max * 1.05, 5, &unit) };
        plot(&mut drawing, PLOT_HEIGHT, x, y, |chart| {
            for (index, series) in self.series.iter().enumerate() {
                let class = CssClass::for_series(index);
                for run in self.unbroken(series).into_iter().filter(|run| run.len() > 1) {
                    chart.draw_series([PathElement::new(run, class)])?;
                }
                let points = || self.x_positions.iter().zip(&series.values);
                let markers = points().filter_map(|(position, value)| {
                    let value = value.filter(|value| value.is_finite())?;
                    let tooltip = self.tooltip(series, position, value);
                    Some(ShapeWithTooltip { points: vec![(position.x_fraction, value)], class, tooltip })
                });
                chart.draw_series(markers)?;
                let missing = points()
                    .filter(|(_, value)| self.marks_missing_values && !value.is_some_and(f64::is_finite));
                let above = text(CssClass::Tick).pos(Pos::new(HPos::Center, VPos::Bottom));
                let cross = |at: &AxisPosition| Text::new("×", (at.x_fraction, 0.0), above.clone());
                chart.draw_series(missing.map(|(position, _)| cross(position)))?;
            }
            Ok(())
        });
        Some(drawing)
    }

    fn tooltip(&self, series: &Series, position: &AxisPosition, value: f64) -> String {
        let name = if series.name.is_empty() {
            String::new()
        } else {
            format!("{}, ", escape::sanitize_name(&series.name))
        };
        format!("{name}{}: {} {}", position.label, numbers::format_three_digits(value), self.unit)
    }

    /// Splits the points of a series at missing values; returns one piece if missing values are not marked.
    fn unbroken(&self, series: &Series) -> Vec<Vec<(f64, f64)>> {
        let point = |(position, value): (&AxisPosition, &Option<f64>)| {
            Some((position.x_fraction, value.filter(|value| value.is_finite())?))
        };
        let mut points: Vec<_> = self.x_positions.iter().zip(&series.values).map(point).collect();
        points.retain(|point| self.marks_missing_values || point.is_some());
        points.split(Option::is_none).map(|run| run.iter().copied().flatten().collect()).collect()
    }

    /// Returns the positions whose labels are drawn, so that labels do not overlap. The labels of all positions are in
    /// the tooltips of the points.
    fn labelled(&self) -> Vec<&AxisPosition> {
        let mut positions: Vec<&AxisPosition> = self.x_positions.iter().collect();
        positions.sort_by(|one, other| one.x_fraction.total_cmp(&other.x_fraction));
        let mut end = f64::NEG_INFINITY;
        positions.retain(|position| {
            let half = LETTER * escape::sanitize_name(&position.label).chars().count() as f64 / 2.0;
            let fits = position.x_fraction - half > end + LETTER;
            if fits {
                end = position.x_fraction + half;
            }
            fits
        });
        positions
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(values: &[Option<f64>]) -> LineChart {
        let position = |at: usize| AxisPosition { x_fraction: at as f64 / 2.0, label: format!("{at} <GiB>") };
        LineChart {
            title: "Time over <memory>".into(),
            x_title: "memory".into(),
            unit: "ms".into(),
            x_positions: (0..3).map(position).collect(),
            series: vec![Series { name: "\"one\"".into(), values: values.to_vec() }],
            marks_missing_values: true,
        }
    }

    #[test]
    fn missing_number_breaks_the_line() {
        let whole = chart(&[Some(10.0), Some(20.0), Some(30.0)]).to_standalone_svg().expect("a drawing");
        assert_eq!((whole.matches("<polyline").count(), whole.matches("<circle").count()), (1, 3));
        let broken = chart(&[Some(10.0), None, Some(30.0)]).to_standalone_svg().expect("a drawing");
        assert_eq!((broken.matches("<polyline").count(), broken.matches("<circle").count()), (0, 2));
        assert_eq!(broken.matches('×').count(), 1);
        assert!(!whole.contains("<GiB>") && !whole.contains("<memory>"));
    }

    #[test]
    fn without_numbers_there_is_no_drawing() {
        assert_eq!(chart(&[None, None, None]).to_standalone_svg(), None);
        assert_eq!(chart(&[Some(f64::NAN), None, Some(f64::INFINITY)]).to_standalone_svg(), None);
    }
}
