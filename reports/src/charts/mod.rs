//! Charts: bars, lines, scatter plots and the Gantt chart of a token, drawn with plotters as SVG.
//!
//! Charts are made from a comparison or from traces. The functions return `None` if there is nothing to draw.

pub mod bars;
pub mod drawing;
pub mod gantt;
pub mod lines;
pub mod memory;
pub mod parity;
pub mod tokens;

use std::ops::Range;

use plotters::chart::{ChartBuilder, ChartContext, LabelAreaPosition};
use plotters::coord::cartesian::Cartesian2d;
use plotters::coord::ranged1d::{DefaultFormatting, KeyPointHint, Ranged};
use plotters::coord::types::RangedCoordf64;
use plotters::drawing::{DrawingAreaErrorKind, IntoDrawingArea};
use plotters::style::{Color, IntoFont, TRANSPARENT, TextStyle};

use drawing::{CssClass, Drawing, PlottersBackend, UNITS_PER_PIXEL};

/// Height of a line plot, in pixels.
const PLOT_HEIGHT: f64 = 170.0;
/// Width of the gutter of a plot whose vertical axis has labels, in pixels.
const GUTTER: u32 = 72;
/// Maximum number of points of a curve; longer curves are thinned.
const MAX_POINTS: usize = 400;
const MARGIN_TOP: f64 = 8.0;

type Chart<'c, 'd> = ChartContext<'c, PlottersBackend<'d>, Cartesian2d<Scale, Scale>>;
type PlotResult = Result<(), DrawingAreaErrorKind<std::convert::Infallible>>;

struct Scale {
    range: Range<f64>,
    is_logarithmic: bool,
    ticks: Vec<f64>,
}

impl Ranged for Scale {
    type FormatOption = DefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        let scaled = |value: f64| if self.is_logarithmic { value.ln() } else { value };
        let range = scaled(self.range.start)..scaled(self.range.end);
        RangedCoordf64::from(range).map(&scaled(*value), limit)
    }

    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        if hint.max_num_points() > 0 { self.ticks.clone() } else { Vec::new() }
    }

    fn range(&self) -> Range<f64> {
        self.range.clone()
    }
}

struct Axis<'a> {
    scale: Scale,
    format_label: &'a dyn Fn(&f64) -> String,
    /// The title of the axis; empty if the axis has no title.
    title: &'a str,
    grid: bool,
}

impl<'a> Axis<'a> {
    /// Creates a linear axis without a title and without grid lines.
    fn new(range: Range<f64>, max_ticks: usize, format_label: &'a dyn Fn(&f64) -> String) -> Self {
        let ticks = round_values(&range, max_ticks);
        let scale = Scale { range, is_logarithmic: false, ticks };
        Self { scale, format_label, title: "", grid: false }
    }

    /// Creates a vertical axis without labels for `count` rows, the first row at the top.
    fn rows(count: usize) -> Self {
        Self::new(count as f64..0.0, 0, &|_| String::new())
    }
}

/// Draws the axes of a plot with grid lines and labels, then the content. `height` is the height of the plot in pixels.
fn plot(
    drawing: &mut Drawing,
    height: f64,
    x: Axis<'_>,
    y: Axis<'_>,
    content: impl FnOnce(&mut Chart<'_, '_>) -> PlotResult,
) {
    let label_counts = [&x, &y].map(|axis| axis.scale.ticks.len());
    let below = 24.0 + if x.title.is_empty() { 0.0 } else { 18.0 };
    let gutter = drawing.gutter_width;
    drawing.height = MARGIN_TOP + height + below;
    let draw = || -> PlotResult {
        let area = PlottersBackend(drawing).into_drawing_area();
        let mut chart = ChartBuilder::on(&area)
            .margin_top(MARGIN_TOP as u32 * UNITS_PER_PIXEL)
            .set_label_area_size(LabelAreaPosition::Left, gutter * UNITS_PER_PIXEL)
            .set_label_area_size(LabelAreaPosition::Bottom, below as u32 * UNITS_PER_PIXEL)
            .build_cartesian_2d(x.scale, y.scale)?;
        let mut mesh = chart.configure_mesh();
        if !x.grid {
            mesh.disable_x_mesh();
        }
        if !y.grid {
            mesh.disable_y_mesh();
        }
        mesh.max_light_lines(0)
            .bold_line_style(CssClass::Grid)
            .axis_style(if y.grid { TRANSPARENT } else { CssClass::Grid.to_rgba() })
            .label_style(text(CssClass::Tick))
            .set_all_tick_mark_size(4 * UNITS_PER_PIXEL)
            .x_labels(label_counts[0])
            .y_labels(label_counts[1])
            .x_label_formatter(x.format_label)
            .y_label_formatter(y.format_label)
            .x_desc(x.title)
            .y_desc(y.title)
            .draw()?;
        content(&mut chart)
    };
    draw().expect("drawing to memory cannot fail");
}

fn text(class: CssClass) -> TextStyle<'static> {
    ("sans-serif", 11 * UNITS_PER_PIXEL).into_font().color(&class)
}

/// Returns at most `count` round numbers within a range, for the ticks of an axis.
fn round_values(range: &Range<f64>, count: usize) -> Vec<f64> {
    RangedCoordf64::from(range.clone()).key_points(count)
}

/// Formats a value as an axis label, rounded to nine significant digits to hide floating-point errors.
fn label(value: f64, unit: &str) -> String {
    let digits = (8.0 - value.abs().max(1e-9).log10().floor()).clamp(0.0, 12.0);
    let scale = 10_f64.powf(digits);
    let value = (value * scale).round() / scale;
    let gap = if unit.is_empty() { "" } else { " " };
    format!("{value}{gap}{unit}").replace('-', "\u{2212}")
}

fn millis(nanos: u64) -> f64 {
    nanos as f64 * 1e-6
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axis_labels_are_round() {
        assert_eq!(round_values(&(0.0..74.0), 5), [0.0, 20.0, 40.0, 60.0]);
        assert_eq!(label(0.1 + 0.2, "ms"), "0.3 ms");
        assert_eq!(label(15_000.0, ""), "15000");
        assert_eq!(label(0.0, "ms"), "0 ms");
    }
}
