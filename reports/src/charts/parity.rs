//! Parity plots: predicted values against measured or published values, on logarithmic axes.
//!
//! Exact predictions are on the diagonal. Predictions in the band around the diagonal differ from the reference value
//! by a factor of at most 1.1; on logarithmic axes the band has the same width for 10 ms and 10 s.

use plotters::element::{PathElement, Polygon};

use super::drawing::{CssClass, Drawing, ShapeWithTooltip};
use super::{Axis, Scale, label, plot};
use crate::comparison::{Comparison, Unit};
use crate::text::numbers;

/// Maximum ratio of prediction and reference inside the band around the diagonal.
const BAND: f64 = 1.1;
/// Height of the plot in pixels. The plot is nearly square because both axes have the same scale.
const HEIGHT: f64 = 360.0;
/// Maximum width of the plot in pixels.
const MAX_WIDTH: u32 = 480;
const GUTTER: u32 = 76;
/// Minimum value that is drawn, in the unit of the plot; the resolution of the clock dominates ratios of shorter times.
const MIN_VALUE: f64 = 0.01;
/// Maximum number of points in a plot; more points could not be distinguished.
const MAX_PLOTTED: usize = 2000;

/// A predicted value and the reference value that it is compared with.
#[derive(Debug, Clone, PartialEq)]
pub struct ParityPoint {
    /// The kind of value that the point stands for, as named in the legend.
    pub group: String,
    pub class: CssClass,
    /// The name of the value in the tooltip.
    pub name: String,
    /// The measured or published value.
    pub reference_value: f64,
    pub predicted_value: f64,
    /// The smallest and the largest measurement, if there were several measurements.
    pub measured_range: Option<[f64; 2]>,
}

/// Returns a point for each time of a comparison: predicted against measured times of the pairs of runs, and times of
/// the runs against published times.
pub fn comparison_points(comparison: &Comparison) -> Vec<ParityPoint> {
    let mut points = Vec::new();
    let mut add = |group: &str, index, name, reference_value, predicted_value| {
        let (group, class, measured_range) = (group.into(), CssClass::for_series(index), None);
        points.push(ParityPoint { group, class, name, reference_value, predicted_value, measured_range });
    };
    for pair in &comparison.run_comparisons {
        let [predicted_run, measured_run] = pair.run_indices().map(|run| &comparison.runs[run].label);
        for row in pair.quantity_comparisons.iter().filter(|row| row.unit == Unit::Milliseconds) {
            let Some((predicted, reference)) = row.predicted_value.zip(row.measured_value) else { continue };
            let (group, index) = match row.key {
                "tpot" => ("time per token, measured", 0),
                "ttft" => ("time to first token, measured", 1),
                "tpot_p50" | "tpot_p95" => continue,
                _ => ("term of the time per token, measured", 2),
            };
            let name = format!("{}, {predicted_run} and {measured_run}", row.key);
            add(group, index, name, reference, predicted);
        }
    }
    for cell in comparison.published_cells.iter().filter(|cell| cell.is_selected) {
        let run = &comparison.runs[cell.run_index];
        let times = [
            ("time per token, published", 3, cell.tpot_ms, run.metrics.tpot_ms.map(|tpot| tpot.mean_ms)),
            ("time to first token, published", 4, cell.ttft_ms, run.metrics.ttft_ms),
        ];
        for (group, index, reference, ours) in times {
            let Some((reference, predicted)) = reference.zip(ours) else { continue };
            let name = format!("{}, {}, {}", run.label, cell.system, cell.row);
            add(group, index, name, reference, predicted);
        }
    }
    points
}

/// Draws a parity plot of `points`; `None` if no point can be drawn. `id` is the prefix of the SVG identifiers.
pub fn draw_parity_plot(id: &str, title: &str, unit: &str, points: &[ParityPoint]) -> Option<Drawing> {
    let visible = |value: f64| value.is_finite() && value >= MIN_VALUE;
    let points = points.iter().filter(|it| visible(it.reference_value) && visible(it.predicted_value));
    let points: Vec<&ParityPoint> = points.take(MAX_PLOTTED).collect();
    let values = || {
        points.iter().flat_map(|point| {
            [point.reference_value, point.predicted_value]
                .into_iter()
                .chain(point.measured_range.into_iter().flatten())
        })
    };
    let (min, max) = (values().reduce(f64::min)? / 1.5, values().fold(0.0, f64::max) * 1.5);
    let mut drawing = Drawing::new(id, title, GUTTER);
    drawing.limit_width(MAX_WIDTH);
    let mut groups: Vec<(CssClass, &str)> = points.iter().map(|it| (it.class, it.group.as_str())).collect();
    groups.sort_unstable();
    for (class, group) in groups {
        drawing.add_to_legend(class, group);
    }
    drawing.add_to_legend(CssClass::Band, "within 10 %");
    let ticks = ticks(min, max);
    let scale = || Scale { range: min..max, is_logarithmic: true, ticks: ticks.clone() };
    let axis = |title| Axis { scale: scale(), format_label: &|value| label(*value, ""), title, grid: true };
    let (x, y) = (format!("reference, {unit}"), format!("predicted, {unit}"));
    plot(&mut drawing, HEIGHT, axis(x.as_str()), axis(y.as_str()), |chart| {
        let band = vec![
            (min, min),
            (min, min * BAND),
            (max / BAND, max),
            (max, max),
            (max, max / BAND),
            (min * BAND, min),
        ];
        chart.draw_series([Polygon::new(band, CssClass::Band)])?;
        chart.draw_series([PathElement::new([(min, min), (max, max)], CssClass::Message)])?;
        let ranges = points.iter().filter_map(|point| Some((point, point.measured_range?)));
        let range = |(point, range): (&&ParityPoint, [f64; 2])| {
            PathElement::new(range.map(|reference| (reference, point.predicted_value)), point.class)
        };
        chart.draw_series(ranges.map(range))?;
        chart.draw_series(points.iter().map(|point| ShapeWithTooltip {
            points: vec![(point.reference_value, point.predicted_value)],
            class: point.class,
            tooltip: tooltip(point, unit),
        }))?;
        Ok(())
    });
    Some(drawing)
}

fn tooltip(point: &ParityPoint, unit: &str) -> String {
    let error = numbers::FixedPoint::new(100.0 * (point.predicted_value / point.reference_value - 1.0), 1)
        .to_signed_text();
    let (name, values) = (&point.name, [point.predicted_value, point.reference_value]);
    let [predicted, reference] = values.map(numbers::format_three_digits);
    format!("{name}: predicted {predicted} {unit}, reference {reference} {unit} ({error} %)")
}

/// Returns the ticks of a logarithmic axis between two values: 1, 2 and 5 times the powers of ten, or only the powers
/// of ten for more than three decades.
fn ticks(min: f64, max: f64) -> Vec<f64> {
    let (first, last) = (min.log10().floor() as i32, max.log10().ceil() as i32);
    let steps: &[f64] = if last - first > 3 { &[1.0] } else { &[1.0, 2.0, 5.0] };
    (first..=last)
        .flat_map(|power| steps.iter().map(move |step| step * 10_f64.powi(power)))
        .filter(|tick| (min..=max).contains(tick))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(reference_value: f64, predicted_value: f64) -> ParityPoint {
        let (group, class, name) = ("a time".into(), CssClass::Series0, "<one>".into());
        ParityPoint { group, class, name, reference_value, predicted_value, measured_range: None }
    }

    #[test]
    fn exact_prediction_is_on_the_diagonal_of_logarithmic_axes() {
        let times = [point(10.0, 10.0), point(1000.0, 500.0), point(100.0, 110.0)];
        let drawing = draw_parity_plot("parity", "t", "ms", &times).expect("a drawing");
        let text = drawing.to_standalone_svg();
        let markers: Vec<&str> = text.lines().filter(|line| line.starts_with("<circle")).collect();
        let number = |line: &str, key: &str| -> f64 {
            let rest = &line[line.find(key).expect(key) + key.len()..];
            rest.split(['"', '%']).next().expect("a value").parse().expect("a number")
        };
        let diagonal = |x: f64| super::super::MARGIN_TOP + HEIGHT * (1.0 - x / 100.0);
        let (x, y) = (number(markers[0], "cx=\""), number(markers[0], "cy=\""));
        assert!((y - diagonal(x)).abs() < 0.3, "{x} % and {y} px");
        // A prediction of half the measured time is below the diagonal.
        let (x, y) = (number(markers[1], "cx=\""), number(markers[1], "cy=\""));
        assert!(y > diagonal(x) + 1.0);
        assert!(!text.contains("<one>") && text.contains("(\u{2212}50.0 %)"), "{text}");
        // On logarithmic axes, 100 is halfway between 10 and 1000.
        let x = [0, 1, 2].map(|at| number(markers[at], "cx=\""));
        assert!((x[2] - f64::midpoint(x[0], x[1])).abs() < 0.1, "{x:?}");
        assert!(markers.len() == 3 && text.contains("(+10.0 %)"), "{text}");
    }

    #[test]
    fn values_that_cannot_be_drawn_are_left_out() {
        assert!(draw_parity_plot("parity", "t", "ms", &[]).is_none());
        let odd = [point(f64::NAN, 1.0), point(0.0, 3.0), point(f64::INFINITY, 1.0), point(-1.0, 2.0)];
        assert!(draw_parity_plot("parity", "t", "ms", &odd).is_none());
        assert_eq!(ticks(0.9, 12.0), [1.0, 2.0, 5.0, 10.0]);
        assert_eq!(ticks(1.0, 1e5).len(), 6);
    }
}
