//! How is a drawing written so that it is legible in light and dark, on a desk and on a phone?
//!
//! Across, everything is a share of the width (SVG percentages), and down it is pixels: blocks stretch
//! with the page and letters keep their size, so one drawing serves every width without a script.
//! Labels of lanes and axes stand in a gutter of fixed width left of the drawing. Colours are classes
//! whose values are CSS variables: in a page they follow the page, in a file of its own the drawing
//! carries the same rules.
//!
//! Not here: what is drawn ([`crate::gantt`], [`crate::charts`]).

use std::fmt::Write;

use crate::escape;

/// The colours and the rules of all drawings, light and dark.
pub const STYLE: &str = include_str!("drawing.css");

/// Room for tick labels that reach past the right end, in pixels.
const MARGIN_RIGHT: u32 = 24;
/// The width of a drawing in a file of its own, in pixels.
const FILE_WIDTH: u32 = 960;
const LEGEND_ROW: f64 = 22.0;
const TITLE_HEIGHT: f64 = 34.0;

/// Where a text begins or has its middle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Anchor {
    /// Begins there.
    Start,
    /// Has its middle there.
    Middle,
}

/// A drawing under way.
#[derive(Debug, Clone)]
pub struct Drawing {
    title: String,
    /// Makes identifiers unique where several drawings share a page.
    id: String,
    gutter: u32,
    height: f64,
    body: String,
    legend: Vec<(&'static str, String)>,
    arrows: bool,
    /// Rules beyond [`STYLE`], for a file of its own.
    more_style: &'static str,
    /// The most pixels across, gutter included.
    most_width: Option<u32>,
}

impl Drawing {
    /// An empty drawing. `id` must be an identifier of this program, `gutter` is in pixels.
    pub fn new(id: &str, title: &str, gutter: u32) -> Self {
        Self {
            title: title.into(),
            id: id.into(),
            gutter,
            height: 0.0,
            body: String::new(),
            legend: Vec::new(),
            arrows: false,
            more_style: "",
            most_width: None,
        }
    }

    /// What it shows, in a few words.
    pub fn title(&self) -> &str {
        &self.title
    }

    /// Adds rules that only this kind of drawing needs, in a file of its own.
    pub fn style(&mut self, rules: &'static str) {
        self.more_style = rules;
    }

    /// Makes it at most this wide, in pixels.
    pub fn narrow(&mut self, width: u32) {
        self.most_width = Some(width + self.gutter + MARGIN_RIGHT);
    }

    /// Makes it at least this high, in pixels.
    pub fn reach(&mut self, height: f64) {
        self.height = self.height.max(height);
    }

    /// Adds a class and its meaning to the legend, once.
    pub fn explain(&mut self, class: &'static str, meaning: &str) {
        if !self.legend.iter().any(|(known, text)| *known == class && text == meaning) {
            self.legend.push((class, meaning.into()));
        }
    }

    /// A rectangle from one share of the width to another; `hover` is shown when pointed at.
    pub fn block(&mut self, class: &str, across: [f64; 2], down: [f64; 2], hover: &str) {
        let [start, end] = across.map(|share| share.clamp(0.0, 1.0));
        let _ = write!(
            self.body,
            r#"<rect class="{class}" x="{}%" y="{}" width="{}%" height="{}""#,
            number(100.0 * start),
            number(down[0]),
            number(100.0 * (end - start)),
            number(down[1] - down[0])
        );
        if hover.is_empty() {
            self.body.push_str("/>");
        } else {
            let _ = write!(self.body, "><title>{}</title></rect>", escape::markup(hover));
        }
        self.body.push('\n');
    }

    /// A dot at a share of the width and a height in pixels; `hover` is shown when pointed at.
    pub fn dot(&mut self, class: &str, across: f64, y: f64, hover: &str) {
        let _ = writeln!(
            self.body,
            r#"<circle class="{class}" cx="{}%" cy="{}" r="3.5"><title>{}</title></circle>"#,
            number(100.0 * across),
            number(y),
            escape::markup(hover)
        );
    }

    /// A text at a share of the width, shifted by pixels; `y` is its base line.
    pub fn text(&mut self, class: &str, at: (f64, f64), y: f64, anchor: Anchor, text: &str) {
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
        };
        let _ = writeln!(
            self.body,
            r#"<text class="{class}" x="{}%" dx="{}" y="{}" text-anchor="{anchor}">{}</text>"#,
            number(100.0 * at.0),
            number(at.1),
            number(y),
            escape::markup(text)
        );
    }

    /// A text in the gutter, `inset` pixels from its left edge.
    pub fn label(&mut self, class: &str, inset: f64, y: f64, text: &str) {
        self.text(class, (0.0, inset - f64::from(self.gutter)), y, Anchor::Start, text);
    }

    /// A straight line between two points (share of the width, pixels).
    pub fn line(&mut self, class: &str, from: (f64, f64), to: (f64, f64)) {
        self.stroke(class, from, to, "");
    }

    /// A line with a head at its end.
    pub fn arrow(&mut self, class: &str, from: (f64, f64), to: (f64, f64)) {
        self.arrows = true;
        let head = format!(r#" marker-end="url(#{}-head)""#, self.id);
        self.stroke(class, from, to, &head);
    }

    fn stroke(&mut self, class: &str, from: (f64, f64), to: (f64, f64), more: &str) {
        let _ = writeln!(
            self.body,
            r#"<line class="{class}" x1="{}%" y1="{}" x2="{}%" y2="{}"{more}/>"#,
            number(100.0 * from.0),
            number(from.1),
            number(100.0 * to.0),
            number(to.1)
        );
    }

    /// A line through points (share of the width, share of the height between `top` and `bottom`, upwards).
    pub fn curve(&mut self, class: &str, top: f64, bottom: f64, points: &[(f64, f64)]) {
        self.points("polyline", class, [top, bottom], points);
    }

    /// The area within points, as those of a curve.
    pub fn area(&mut self, class: &str, top: f64, bottom: f64, points: &[(f64, f64)]) {
        self.points("polygon", class, [top, bottom], points);
    }

    fn points(&mut self, element: &str, class: &str, [top, bottom]: [f64; 2], points: &[(f64, f64)]) {
        let _ = write!(
            self.body,
            r#"<svg x="0" y="{}" width="100%" height="{}" viewBox="0 0 1000 1000" preserveAspectRatio="none" overflow="visible"><{element} class="{class}" vector-effect="non-scaling-stroke" points=""#,
            number(top),
            number(bottom - top)
        );
        for (index, (x, y)) in points.iter().enumerate() {
            let gap = if index == 0 { "" } else { " " };
            let _ = write!(self.body, "{gap}{},{}", number(1000.0 * x), number(1000.0 * (1.0 - y)));
        }
        self.body.push_str("\"/></svg>\n");
    }

    /// The drawing as part of a page that has [`STYLE`].
    pub fn inline(&self) -> String {
        let mut out = String::new();
        let narrow = self.most_width.map_or_else(String::new, |width| format!(";max-width:{width}px"));
        let _ = write!(
            out,
            "<div class=\"drawing\" style=\"padding-left:{}px;padding-right:{MARGIN_RIGHT}px{narrow}\">\
             <svg width=\"100%\" height=\"{}\" role=\"img\" aria-label=\"{}\" overflow=\"visible\">\n{}{}</svg></div>",
            self.gutter,
            number(self.height),
            escape::markup(&self.title),
            self.heads(),
            self.body
        );
        if !self.legend.is_empty() {
            out.push_str("\n<ul class=\"legend\">");
            for (class, meaning) in &self.legend {
                let meaning = escape::markup(meaning);
                let _ = write!(out, "<li><i class=\"key {class}\"></i>{meaning}</li>");
            }
            out.push_str("</ul>");
        }
        out
    }

    /// The drawing as a file of its own.
    pub fn standalone(&self) -> String {
        let beside = self.gutter + MARGIN_RIGHT;
        let inner = (FILE_WIDTH - 32).min(self.most_width.unwrap_or(FILE_WIDTH)) - beside;
        let rows = self.legend.len().div_ceil(4) as f64;
        let height = TITLE_HEIGHT + self.height + 16.0 + rows * LEGEND_ROW;
        let mut out = String::new();
        let _ = write!(
            out,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{FILE_WIDTH}\" height=\"{h}\" \
             viewBox=\"0 0 {FILE_WIDTH} {h}\" role=\"img\">\n<title>{title}</title>\n<style>\n{STYLE}{more}</style>\n\
             <rect class=\"paper\" width=\"{FILE_WIDTH}\" height=\"{h}\"/>\n\
             <text class=\"name\" x=\"16\" y=\"22\">{title}</text>\n\
             <svg x=\"{x}\" y=\"{TITLE_HEIGHT}\" width=\"{inner}\" height=\"{body_height}\" overflow=\"visible\">\n\
             {heads}{body}</svg>\n",
            h = number(height),
            title = escape::markup(&self.title),
            more = self.more_style,
            x = self.gutter + 16,
            body_height = number(self.height),
            heads = self.heads(),
            body = self.body
        );
        for (index, (class, meaning)) in self.legend.iter().enumerate() {
            let x = 16.0 + (index % 4) as f64 * f64::from(FILE_WIDTH - 32) / 4.0;
            let y = TITLE_HEIGHT + self.height + 12.0 + (index / 4) as f64 * LEGEND_ROW;
            let (right, middle) = (x + 12.0, y + 6.0);
            let _ = match *class {
                "message" => {
                    write!(
                        out,
                        r#"<line class="message" x1="{x}" y1="{middle}" x2="{right}" y2="{middle}"/>"#
                    )
                }
                class => write!(
                    out,
                    r#"<rect class="key {class}" x="{x}" y="{y}" width="12" height="12" rx="2"/>"#
                ),
            };
            let meaning = escape::markup(meaning);
            let _ = writeln!(out, r#"<text class="tick" x="{}" y="{}">{meaning}</text>"#, x + 18.0, y + 10.0);
        }
        out.push_str("</svg>\n");
        out
    }

    fn heads(&self) -> String {
        if !self.arrows {
            return String::new();
        }
        format!(
            "<defs><marker id=\"{}-head\" viewBox=\"0 0 8 8\" refX=\"7\" refY=\"4\" markerWidth=\"7\" \
             markerHeight=\"7\" markerUnits=\"userSpaceOnUse\" orient=\"auto\">\
             <path class=\"head\" d=\"M0 1 L7 4 L0 7 Z\"/></marker></defs>\n",
            self.id
        )
    }
}

/// A number short enough for a drawing: three digits after the point, none where they are zero.
fn number(value: f64) -> String {
    if !value.is_finite() {
        return "0".into();
    }
    let text = format!("{value:.3}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    if text == "-0" { "0".into() } else { text.into() }
}

/// Round values from zero to at most `most`, about `wanted` of them, and the digits they need.
pub fn ticks(most: f64, wanted: usize) -> (Vec<f64>, u32) {
    ticks_between(0.0, most, wanted)
}

/// Round values in a range that begins at zero or later, about `wanted` of them, and the digits they
/// need.
pub fn ticks_between(from: f64, to: f64, wanted: usize) -> (Vec<f64>, u32) {
    let range = to - from;
    if !range.is_finite() || range <= 0.0 {
        return (vec![from], 0);
    }
    let rough = range / wanted.max(1) as f64;
    let power = 10_f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .map(|factor| factor * power)
        .find(|step| *step >= rough)
        .unwrap_or(10.0 * power);
    let digits = (-step.log10().floor()).clamp(0.0, 9.0) as u32;
    let first = (from / step * (1.0 - 1e-9)).ceil();
    let last = (to / step * (1.0 + 1e-9)).floor();
    let count = ((last - first).max(0.0) as usize).min(4 * wanted + 4);
    ((0..=count).map(|index| (first + index as f64) * step).collect(), digits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short_and_never_broken() {
        assert_eq!(number(12.5), "12.5");
        assert_eq!(number(100.0), "100");
        assert_eq!(number(-0.0001), "0");
        assert_eq!(number(f64::NAN), "0");
    }

    #[test]
    fn ticks_are_round() {
        assert_eq!(ticks(74.0, 5), (vec![0.0, 20.0, 40.0, 60.0], 0));
        let (tenths, digits) = ticks(0.5, 5);
        assert_eq!((tenths.len(), digits), (6, 1));
        assert_eq!(ticks(0.0, 5), (vec![0.0], 0));
        assert_eq!(ticks(f64::INFINITY, 5).0.len(), 1);
    }

    #[test]
    fn text_cannot_leave_its_element() {
        let mut drawing = Drawing::new("d", "</title><script>", 40);
        drawing.text("tick", (0.0, 0.0), 10.0, Anchor::Start, "</text><script>alert(1)</script>");
        drawing.block("cpu", [0.0, 1.0], [0.0, 8.0], "\"><script>");
        for text in [drawing.inline(), drawing.standalone()] {
            assert!(!text.contains("<script"), "{text}");
        }
    }
}
