//! How does a number follow another, for each of several cases?
//!
//! A line for each case over places on an axis, a dot for each number. Where a number is missing that was asked for,
//! the line is broken and a cross stands on the axis.
//!
//! Not here: where the numbers come from.

use crate::charts::{self, PLOT_HEIGHT, PLOT_TOP};
use crate::escape;
use crate::rounding;
use crate::svg::{Anchor, Drawing};

const GUTTER: u32 = 72;
/// Classes of lines and their dots; more lines than these share a colour.
pub(crate) const CLASSES: [&str; 8] =
    ["line-0", "line-1", "line-2", "line-3", "line-4", "line-5", "line-6", "line-7"];
/// A letter of a label takes so much of the width on a phone, where drawings are narrowest.
/// source: measured, 6.2 px of the 266 px that a screen of 390 px leaves
const LETTER: f64 = 6.2 / 266.0;
/// Colours of what other drawings do not have.
pub(crate) const STYLE: &str = "\
svg .band { fill: var(--hidden); opacity: 0.22; }
svg circle { stroke: var(--paper); stroke-width: 1; }
svg .line-4 { stroke: var(--demand); } svg .line-5 { stroke: var(--air); }
svg .line-6 { stroke: var(--memory); } svg .line-7 { stroke: var(--queue); }
svg .key.line-4 { fill: var(--demand); stroke: none; } svg .key.line-5 { fill: var(--air); stroke: none; }
svg .key.line-6 { fill: var(--memory); stroke: none; } svg .key.line-7 { fill: var(--queue); stroke: none; }
svg circle.line-0 { fill: var(--cpu); } svg circle.line-1 { fill: var(--second); }
svg circle.line-2 { fill: var(--hidden); } svg circle.line-3 { fill: var(--gpu); }
svg circle.line-4 { fill: var(--demand); } svg circle.line-5 { fill: var(--air); }
svg circle.line-6 { fill: var(--memory); } svg circle.line-7 { fill: var(--queue); }
";

/// A place on the axis.
#[derive(Debug, Clone, PartialEq)]
pub struct Place {
    /// From 0 on the left to 1 on the right.
    pub share: f64,
    /// What it is called.
    pub label: String,
}

/// A case.
#[derive(Debug, Clone, PartialEq)]
pub struct Line {
    /// What it is called; nothing if there is only one.
    pub name: String,
    /// Its number at each place, where there is one.
    pub values: Vec<Option<f64>>,
}

/// Lines over one axis.
#[derive(Debug, Clone, PartialEq)]
pub struct Lines {
    /// What is shown.
    pub title: String,
    /// What varies along the axis.
    pub across: String,
    /// The unit of the numbers.
    pub unit: String,
    /// Where numbers stand, in order.
    pub places: Vec<Place>,
    /// The cases.
    pub lines: Vec<Line>,
    /// Whether every case was asked for at every place, so that an absent number is a gap.
    pub gaps: bool,
}

impl Lines {
    /// As an SVG file; none if there is no number to draw.
    pub fn standalone(&self) -> Option<String> {
        self.drawing("lines").map(|drawing| drawing.standalone())
    }

    /// As a drawing of that identifier.
    pub(crate) fn drawing(&self, id: &str) -> Option<Drawing> {
        let numbers = self.lines.iter().flat_map(|line| &line.values).flatten().copied();
        let most = numbers.filter(|number| number.is_finite()).fold(0.0, f64::max);
        if most <= 0.0 {
            return None;
        }
        let mut drawing = Drawing::new(id, &escape::phrase(&self.title), GUTTER);
        drawing.style(STYLE);
        let height = charts::plot(&mut drawing, most, &self.unit);
        for (index, line) in self.lines.iter().enumerate() {
            self.line(&mut drawing, line, CLASSES[index % CLASSES.len()], height);
        }
        self.axis(&mut drawing);
        Some(drawing)
    }

    fn line(&self, drawing: &mut Drawing, line: &Line, class: &'static str, height: f64) {
        let bottom = PLOT_TOP + PLOT_HEIGHT;
        let name = escape::name(&line.name);
        let mut stretch: Vec<(f64, f64)> = Vec::new();
        let mut dots = Vec::new();
        for (place, value) in self.places.iter().zip(&line.values) {
            if let Some(value) = value.filter(|value| value.is_finite()) {
                stretch.push((place.share, value / height));
                let case = if line.name.is_empty() { String::new() } else { format!("{name}, ") };
                let hover = format!("{case}{}: {} {}", place.label, text(value), self.unit);
                dots.push((place.share, bottom - PLOT_HEIGHT * value / height, hover));
            } else if self.gaps {
                drawing.text("tick", (place.share, 0.0), bottom - 3.0, Anchor::Middle, "×");
                draw(drawing, class, &mut stretch);
            }
        }
        draw(drawing, class, &mut stretch);
        for (share, y, hover) in dots {
            drawing.dot(class, share, y, &hover);
        }
        if !line.name.is_empty() {
            drawing.explain(class, &name);
        }
    }

    fn axis(&self, drawing: &mut Drawing) {
        let y = PLOT_TOP + PLOT_HEIGHT + 18.0;
        let mut places: Vec<&Place> = self.places.iter().collect();
        places.sort_by(|one, other| one.share.total_cmp(&other.share));
        // Where the last label ends; one that would touch it is left out, as the dots have their places when pointed at.
        let mut end = f64::NEG_INFINITY;
        for place in places {
            let label = escape::name(&place.label);
            let half = LETTER * label.chars().count() as f64 / 2.0;
            if place.share - half > end + LETTER {
                drawing.text("tick", (place.share, 0.0), y, Anchor::Middle, &label);
                end = place.share + half;
            }
        }
        drawing.text("tick", (0.0, 0.0), y + 18.0, Anchor::Start, &escape::phrase(&self.across));
        drawing.reach(y + 24.0);
    }
}

/// A stretch without a gap; a single number has its dot only.
fn draw(drawing: &mut Drawing, class: &str, stretch: &mut Vec<(f64, f64)>) {
    if stretch.len() > 1 {
        drawing.curve(class, PLOT_TOP, PLOT_TOP + PLOT_HEIGHT, stretch);
    }
    stretch.clear();
}

fn text(value: f64) -> String {
    rounding::Fixed::new(value, rounding::digits_for(value).saturating_sub(1)).text()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(values: &[Option<f64>]) -> Lines {
        let place = |at: usize| Place { share: at as f64 / 2.0, label: format!("{at} <GiB>") };
        Lines {
            title: "Time over <memory>".into(),
            across: "memory".into(),
            unit: "ms".into(),
            places: (0..3).map(place).collect(),
            lines: vec![Line { name: "\"one\"".into(), values: values.to_vec() }],
            gaps: true,
        }
    }

    #[test]
    fn a_gap_breaks_the_line_and_leaves_the_dots() {
        let whole = lines(&[Some(10.0), Some(20.0), Some(30.0)]).standalone().expect("a drawing");
        assert_eq!((whole.matches("<polyline").count(), whole.matches("<circle").count()), (1, 3));
        let broken = lines(&[Some(10.0), None, Some(30.0)]).standalone().expect("a drawing");
        assert_eq!((broken.matches("<polyline").count(), broken.matches("<circle").count()), (0, 2));
        assert_eq!(broken.matches('×').count(), 1);
        assert!(!whole.contains("<GiB>") && !whole.contains("<memory>"));
    }

    #[test]
    fn nothing_is_no_drawing() {
        assert_eq!(lines(&[None, None, None]).standalone(), None);
        assert_eq!(lines(&[Some(f64::NAN), None, Some(f64::INFINITY)]).standalone(), None);
    }
}
