//! SVG drawings: shapes with CSS classes, a legend, and a backend for the `plotters` crate.
//!
//! Horizontal positions are fractions of the plot's width (SVG percentages), vertical positions are pixels. So shapes
//! stretch with the page, text keeps its size, and one drawing fits every page width without a script. Tick labels
//! are in a gutter of fixed width to the left of the plot. Colours are CSS classes that use CSS variables: inline
//! drawings use the style sheet of the page, and a standalone file includes it.
//!
//! [`PlottersBackend`] is a plotters backend. One horizontal unit is a hundredth of a percent of the plot's width (in
//! the gutter: a tenth of a pixel), and one vertical unit is a tenth of a pixel. The red component of a plotters colour
//! is the index of a [`CssClass`].

use std::convert::Infallible;
use std::fmt::{self, Write};

use plotters::element::{Drawable, PointCollection};
use plotters::style::Color;
use plotters::style::text_anchor::{HPos, VPos};
use plotters_backend::{
    BackendColor, BackendCoord as Coord, BackendStyle, BackendTextStyle, DrawingBackend, DrawingErrorKind,
    FontTransform,
};

use crate::text::escape;

/// Style sheet of all drawings, with light and dark colours.
pub const STYLE_SHEET: &str = include_str!("drawing.css");

/// Width of the margin to the right of the plot, for tick labels that extend beyond the plot, in pixels.
const MARGIN_RIGHT: u32 = 24;
/// Width of a standalone drawing, in pixels.
const FILE_WIDTH: u32 = 960;
/// Height of a row of the legend in a standalone drawing, in pixels.
const LEGEND_ROW: f64 = 22.0;
const TITLE_HEIGHT: f64 = 34.0;
/// Number of horizontal units of [`PlottersBackend`] across the plot.
const PLOT_UNITS: i32 = 10_000;
/// Number of [`PlottersBackend`] units per pixel, vertically and, in the gutter, also horizontally.
pub const UNITS_PER_PIXEL: u32 = 10;
/// Radius of the marker of a point, in pixels.
const MARKER_RADIUS: f64 = 3.5;

macro_rules! classes {
    ($($class:ident $name:literal),+) => {
        /// The CSS class of a shape, named after its meaning; the style sheet maps it to a colour.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
        pub enum CssClass { $($class),+ }

        /// All classes with their names in the style sheet.
        const CLASSES: &[(CssClass, &str)] = &[$((CssClass::$class, $name)),+];
    };
}

classes! {
    Cpu "cpu", Gpu "gpu", Memory "memory", Demand "demand", Network "network", Queue "queue", Bubble "bubble",
    Hidden "hidden", Concurrent "concurrent", Event "event", Message "message", Band "band", Grid "grid", Lane "lane",
    Tick "tick", Name "name", Series0 "series-0", Series1 "series-1", Series2 "series-2", Series3 "series-3",
    Series4 "series-4", Series5 "series-5", Series6 "series-6", Series7 "series-7"
}

impl CssClass {
    /// Returns the class of the series with this index in a chart. The colours repeat after eight series.
    pub fn for_series(index: usize) -> Self {
        CLASSES[CssClass::Series0 as usize + index % 8].0
    }

    /// Returns the class that a plotters colour represents; `None` if the colour is transparent.
    fn of(color: BackendColor) -> Option<Self> {
        CLASSES.get(usize::from(color.rgb.0)).map(|(class, _)| *class).filter(|_| color.alpha > 0.0)
    }
}

impl fmt::Display for CssClass {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(CLASSES[*self as usize].1)
    }
}

impl Color for CssClass {
    fn to_backend_color(&self) -> BackendColor {
        BackendColor { alpha: 1.0, rgb: (*self as u8, 0, 0) }
    }
}

/// A point in a drawing: the horizontal position as a fraction of the width of the plot, and the vertical position in
/// pixels from the top.
pub type Point = (f64, f64);

/// An SVG drawing under construction.
#[derive(Debug, Clone, Default)]
pub struct Drawing {
    pub title: String,
    /// Prefix of SVG identifiers, unique among the drawings of a page; also the name of the SVG file.
    pub id: String,
    /// Width of the gutter to the left of the plot, in pixels.
    pub gutter_width: u32,
    /// Height without title and legend, in pixels.
    pub height: f64,
    body: String,
    legend: Vec<(CssClass, String)>,
    arrows: bool,
    /// Maximum width of the drawing with its gutter, in pixels.
    max_width: Option<u32>,
}

impl Drawing {
    /// Creates an empty drawing. `id` is not escaped, so it must not come from a trace. `gutter` is a width in pixels.
    pub fn new(id: &str, title: &str, gutter: u32) -> Self {
        Self { title: title.into(), id: id.into(), gutter_width: gutter, ..Self::default() }
    }

    /// Limits the width of the plot to `width` pixels.
    pub fn limit_width(&mut self, width: u32) {
        self.max_width = Some(width + self.gutter_width + MARGIN_RIGHT);
    }

    /// Adds a class and its meaning to the legend, unless the legend has them already.
    pub fn add_to_legend(&mut self, class: CssClass, meaning: &str) {
        if !self.legend.iter().any(|(known, text)| *known == class && text == meaning) {
            self.legend.push((class, meaning.into()));
        }
    }

    /// Adds a rectangle between two horizontal positions (fractions of the width) and two vertical positions (pixels).
    /// An empty `tooltip` is omitted.
    pub fn add_rect(&mut self, class: CssClass, x: [f64; 2], y: [f64; 2], tooltip: &str) {
        let [start, end] = x.map(|fraction| fraction.clamp(0.0, 1.0));
        let _ = write!(
            self.body,
            r#"<rect class="{class}" x="{}%" y="{}" width="{}%" height="{}""#,
            number(100.0 * start),
            number(y[0]),
            number(100.0 * (end - start)),
            number(y[1] - y[0])
        );
        self.close("rect", tooltip);
    }

    fn marker(&mut self, class: CssClass, (x, y): Point, tooltip: &str) {
        let (x, y) = (number(100.0 * x), number(y));
        let _ = write!(self.body, r#"<circle class="{class}" cx="{x}%" cy="{y}" r="{MARKER_RADIUS}""#);
        self.close("circle", tooltip);
    }

    /// Closes the SVG element of a shape, and adds the tooltip unless it is empty.
    fn close(&mut self, element: &str, tooltip: &str) {
        let _ = match tooltip {
            "" => writeln!(self.body, "/>"),
            tooltip => writeln!(self.body, "><title>{}</title></{element}>", escape::html(tooltip)),
        };
    }

    /// Adds text that is horizontally centred at `x`; `y` is the baseline.
    pub fn add_centred_text(&mut self, class: CssClass, (x, y): Point, text: &str) {
        let attributes = format!(r#"x="{}%" y="{}" text-anchor="middle""#, number(100.0 * x), number(y));
        self.text(class, &attributes, text);
    }

    /// Adds text at the left edge of the gutter; `y` is the baseline, in pixels.
    pub fn add_gutter_text(&mut self, class: CssClass, y: f64, text: &str) {
        let attributes = format!(r#"x="-{}" y="{}""#, self.gutter_width, number(y));
        self.text(class, &attributes, text);
    }

    fn text(&mut self, class: CssClass, attributes: &str, text: &str) {
        let _ = writeln!(self.body, r#"<text class="{class}" {attributes}>{}</text>"#, escape::html(text));
    }

    pub fn add_line(&mut self, class: CssClass, from: Point, to: Point) {
        self.stroke(class, from, to, "");
    }

    pub fn add_arrow(&mut self, class: CssClass, from: Point, to: Point) {
        self.arrows = true;
        let head = format!(r#" marker-end="url(#{}-head)""#, self.id);
        self.stroke(class, from, to, &head);
    }

    fn stroke(&mut self, class: CssClass, from: Point, to: Point, attributes: &str) {
        let [x1, x2] = [from, to].map(|(x, _)| number(100.0 * x));
        let [y1, y2] = [from, to].map(|(_, y)| number(y));
        let line =
            format!(r#"<line class="{class}" x1="{x1}%" y1="{y1}" x2="{x2}%" y2="{y2}"{attributes}/>"#);
        let _ = writeln!(self.body, "{line}");
    }

    /// Returns the drawing as HTML for a page that includes [`STYLE_SHEET`].
    pub fn to_inline_html(&self) -> String {
        let limit = self.max_width.map_or_else(String::new, |width| format!(";max-width:{width}px"));
        let mut out = format!(
            "<div class=\"drawing\" style=\"padding-left:{}px;padding-right:{MARGIN_RIGHT}px{limit}\">\
             <svg width=\"100%\" height=\"{}\" role=\"img\" aria-label=\"{}\" overflow=\"visible\">\n{}{}</svg></div>",
            self.gutter_width,
            number(self.height),
            escape::html(&self.title),
            self.arrow_head(),
            self.body
        );
        if !self.legend.is_empty() {
            out.push_str("\n<ul class=\"legend\">");
            for (class, meaning) in &self.legend {
                let meaning = escape::html(meaning);
                let _ = write!(out, "<li><i class=\"key {class}\"></i>{meaning}</li>");
            }
            out.push_str("</ul>");
        }
        out
    }

    /// Returns the drawing as the contents of an SVG file.
    pub fn to_standalone_svg(&self) -> String {
        let margins = self.gutter_width + MARGIN_RIGHT;
        let inner = (FILE_WIDTH - 32).min(self.max_width.unwrap_or(FILE_WIDTH)) - margins;
        let rows = self.legend.len().div_ceil(4) as f64;
        let height = TITLE_HEIGHT + self.height + 16.0 + rows * LEGEND_ROW;
        let mut out = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{FILE_WIDTH}\" height=\"{h}\" \
             viewBox=\"0 0 {FILE_WIDTH} {h}\" role=\"img\">\n<title>{title}</title>\n<style>\n{STYLE_SHEET}</style>\n\
             <rect class=\"paper\" width=\"{FILE_WIDTH}\" height=\"{h}\"/>\n\
             <text class=\"name\" x=\"16\" y=\"22\">{title}</text>\n\
             <svg x=\"{x}\" y=\"{TITLE_HEIGHT}\" width=\"{inner}\" height=\"{body_height}\" overflow=\"visible\">\n\
             {head}{body}</svg>\n",
            h = number(height),
            title = escape::html(&self.title),
            x = self.gutter_width + 16,
            body_height = number(self.height),
            head = self.arrow_head(),
            body = self.body
        );
        for (index, (class, meaning)) in self.legend.iter().enumerate() {
            let x = 16.0 + (index % 4) as f64 * f64::from(FILE_WIDTH - 32) / 4.0;
            let y = TITLE_HEIGHT + self.height + 12.0 + (index / 4) as f64 * LEGEND_ROW;
            let _ = writeln!(
                out,
                "<rect class=\"key {class}\" x=\"{x}\" y=\"{y}\" width=\"12\" height=\"12\" rx=\"2\"/>\
                 <text class=\"tick\" x=\"{}\" y=\"{}\">{}</text>",
                x + 18.0,
                y + 10.0,
                escape::html(meaning)
            );
        }
        out.push_str("</svg>\n");
        out
    }

    fn arrow_head(&self) -> String {
        if !self.arrows {
            return String::new();
        }
        format!(
            "<defs><marker id=\"{}-head\" viewBox=\"0 0 8 8\" refX=\"7\" refY=\"4\" markerWidth=\"7\" \
             markerHeight=\"7\" markerUnits=\"userSpaceOnUse\" orient=\"auto\">\
             <path class=\"message\" d=\"M0 1 L7 4 L0 7 Z\"/></marker></defs>\n",
            self.id
        )
    }
}

/// Formats a number with at most three digits after the decimal point, without trailing zeros. A number that is not
/// finite becomes `0`.
fn number(value: f64) -> String {
    if !value.is_finite() {
        return "0".into();
    }
    let text = format!("{value:.3}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    if text == "-0" { "0".into() } else { text.into() }
}

/// A plotters backend that adds shapes to a drawing.
pub struct PlottersBackend<'d>(pub &'d mut Drawing);

/// The result of a drawing operation; writing to memory cannot fail.
type DrawResult<T = ()> = Result<T, DrawingErrorKind<Infallible>>;

impl PlottersBackend<'_> {
    fn gutter(&self) -> i32 {
        (self.0.gutter_width * UNITS_PER_PIXEL) as i32
    }

    fn point(&self, (x, y): Coord) -> Point {
        (f64::from(x - self.gutter()) / f64::from(PLOT_UNITS), f64::from(y) / f64::from(UNITS_PER_PIXEL))
    }

    /// Adds a polyline or polygon in a nested SVG whose coordinate system stretches with the plot.
    fn shape(&mut self, element: &str, style: &impl BackendStyle, points: impl IntoIterator<Item = Coord>) {
        let Some(class) = CssClass::of(style.color()) else { return };
        let (gutter, height) = (self.gutter(), self.0.height);
        let points: Vec<String> = points.into_iter().map(|(x, y)| format!("{},{y}", x - gutter)).collect();
        let _ = writeln!(
            self.0.body,
            "<svg width=\"100%\" height=\"{}\" viewBox=\"0 0 {PLOT_UNITS} {}\" preserveAspectRatio=\"none\" \
             overflow=\"visible\"><{element} class=\"{class}\" vector-effect=\"non-scaling-stroke\" \
             points=\"{}\"/></svg>",
            number(height),
            number(height * f64::from(UNITS_PER_PIXEL)),
            points.join(" ")
        );
    }
}

impl DrawingBackend for PlottersBackend<'_> {
    type ErrorType = Infallible;

    fn get_size(&self) -> (u32, u32) {
        let height = (self.0.height * f64::from(UNITS_PER_PIXEL)) as u32;
        (self.0.gutter_width * UNITS_PER_PIXEL + PLOT_UNITS as u32 + 1, height + 1)
    }

    fn ensure_prepared(&mut self) -> DrawResult {
        Ok(())
    }

    fn present(&mut self) -> DrawResult {
        Ok(())
    }

    fn draw_pixel(&mut self, _: Coord, _: BackendColor) -> DrawResult {
        Ok(())
    }

    fn draw_line<S: BackendStyle>(&mut self, from: Coord, to: Coord, style: &S) -> DrawResult {
        if let Some(class) = CssClass::of(style.color()) {
            let (from, to) = (self.point(from), self.point(to));
            self.0.add_line(class, from, to);
        }
        Ok(())
    }

    fn draw_rect<S: BackendStyle>(&mut self, a: Coord, b: Coord, style: &S, _: bool) -> DrawResult {
        if let Some(class) = CssClass::of(style.color()) {
            let (a, b) = (self.point(a), self.point(b));
            self.0.add_rect(class, [a.0, b.0], [a.1, b.1], "");
        }
        Ok(())
    }

    fn draw_path<S: BackendStyle, I: IntoIterator<Item = Coord>>(
        &mut self,
        path: I,
        style: &S,
    ) -> DrawResult {
        self.shape("polyline", style, path);
        Ok(())
    }

    fn fill_polygon<S: BackendStyle, I: IntoIterator<Item = Coord>>(
        &mut self,
        path: I,
        style: &S,
    ) -> DrawResult {
        self.shape("polygon", style, path);
        Ok(())
    }

    fn draw_text<S: BackendTextStyle>(&mut self, text: &str, style: &S, at: Coord) -> DrawResult {
        let Some(class) = CssClass::of(style.color()).filter(|_| !text.is_empty()) else { return Ok(()) };
        let (anchor, (x, y)) = (style.anchor(), self.point(at));
        // Moves `y` from the anchor to the baseline.
        let y = y + match anchor.v_pos {
            VPos::Top => 10.0,
            VPos::Center => 4.0,
            VPos::Bottom => -3.0,
        };
        let side = match anchor.h_pos {
            HPos::Left => "start",
            HPos::Center => "middle",
            HPos::Right => "end",
        };
        let pixels = f64::from(at.0 - self.gutter()) / f64::from(UNITS_PER_PIXEL);
        let x = if pixels < 0.0 { number(pixels) } else { format!("{}%", number(100.0 * x)) };
        let turn = match style.transform() {
            FontTransform::Rotate270 => format!(r#" transform="rotate(-90 {x} {})""#, number(y)),
            _ => String::new(),
        };
        let attributes = format!(r#"x="{x}" y="{}" text-anchor="{side}"{turn}"#, number(y));
        self.0.text(class, &attributes, text);
        Ok(())
    }

    fn estimate_text_size<S: BackendTextStyle>(&self, text: &str, _: &S) -> DrawResult<(u32, u32)> {
        Ok((text.chars().count() as u32 * 7 * UNITS_PER_PIXEL, 12 * UNITS_PER_PIXEL))
    }
}

/// A bar or the marker of a point, with a tooltip.
pub struct ShapeWithTooltip {
    /// Top left and bottom right corner of a bar, or the centre of a marker.
    pub points: Vec<(f64, f64)>,
    pub class: CssClass,
    pub tooltip: String,
}

impl<'a> PointCollection<'a, (f64, f64)> for &'a ShapeWithTooltip {
    type Point = &'a (f64, f64);
    type IntoIter = &'a [(f64, f64)];

    fn point_iter(self) -> Self::IntoIter {
        &self.points
    }
}

impl Drawable<PlottersBackend<'_>> for ShapeWithTooltip {
    fn draw<I: Iterator<Item = Coord>>(
        &self,
        points: I,
        canvas: &mut PlottersBackend,
        _: (u32, u32),
    ) -> DrawResult {
        let points: Vec<Point> = points.map(|point| canvas.point(point)).collect();
        match points[..] {
            [a, b] => {
                let x = [a.0.min(b.0), a.0.max(b.0)];
                canvas.0.add_rect(self.class, x, [a.1.min(b.1), a.1.max(b.1)], &self.tooltip);
            }
            [centre] => canvas.0.marker(self.class, centre, &self.tooltip),
            _ => {}
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short_and_finite() {
        assert_eq!([12.5, 100.0, -0.0001, f64::NAN].map(number), ["12.5", "100", "0", "0"]);
    }

    #[test]
    fn text_cannot_leave_its_element() {
        let mut drawing = Drawing::new("d", "</title><script>", 40);
        drawing.add_centred_text(CssClass::Tick, (0.0, 10.0), "</text><script>alert(1)</script>");
        drawing.add_rect(CssClass::Cpu, [0.0, 1.0], [0.0, 8.0], "\"><script>");
        for text in [drawing.to_inline_html(), drawing.to_standalone_svg()] {
            assert!(!text.contains("<script"), "{text}");
        }
    }

    #[test]
    fn every_class_has_a_colour() {
        assert_eq!(CssClass::Series7.to_string(), "series-7");
        for (_, name) in CLASSES {
            assert!(STYLE_SHEET.contains(&format!(".{name}")), "{name}");
        }
    }
}
