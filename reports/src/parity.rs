//! How near do predicted times lie to true ones, over all that a report compares?
//!
//! A dot for each time: across the measured or published one, upwards the predicted one, both in equal ratios, so
//! that a tenth is as wide for a token of 10 ms as for one of 10 s. On the line they are equal; within the band they
//! differ by a tenth.
//!
//! Not here: the numbers ([`crate::comparison`], [`crate::published`]).

use crate::comparison::{Comparison, Unit};
use crate::lines;
use crate::rounding;
use crate::svg::{Anchor, Drawing};

/// Half the width of the band, as a factor.
const BAND: f64 = 1.1;
/// Pixels from the bottom to the top of the plot.
const HEIGHT: f64 = 360.0;
/// Pixels across, at most: nearly square, as both axes are the same.
const WIDTH: u32 = 480;
const TOP: f64 = 8.0;
const GUTTER: u32 = 72;
/// Below this a time is noise of a clock, and its ratio says nothing, in milliseconds.
const LEAST: f64 = 0.01;
/// More dots than these would be a blur.
const MOST: usize = 2000;

/// A time predicted and true.
#[derive(Debug, Clone, PartialEq)]
pub struct Dot {
    /// What kind of time it is; the legend has it.
    pub sort: String,
    /// The colour of its sort.
    pub class: &'static str,
    /// What it is.
    pub name: String,
    /// In milliseconds.
    pub truth: f64,
    /// In milliseconds.
    pub predicted: f64,
}

/// The times of a comparison: of pairs against what was measured, and of runs against what was published.
pub fn dots(comparison: &Comparison) -> Vec<Dot> {
    let mut dots = Vec::new();
    for pair in &comparison.pairs {
        let names = (&comparison.runs[pair.predicted].label, &comparison.runs[pair.measured].label);
        for row in pair.rows.iter().filter(|row| row.unit == Unit::Milliseconds) {
            let Some((predicted, truth)) = row.predicted.zip(row.measured) else { continue };
            let (sort, class) = match row.key.as_str() {
                "tpot" => ("time per token, measured", "line-0"),
                "ttft" => ("time to the first token, measured", "line-1"),
                "tpot_p50" | "tpot_p95" => continue,
                _ => ("a term of it, measured", "line-2"),
            };
            let name = format!("{}, {} over {}", row.key, names.0, names.1);
            dots.push(Dot { sort: sort.into(), class, name, truth, predicted });
        }
    }
    for cell in comparison.published.iter().filter(|cell| cell.chosen) {
        let run = &comparison.runs[cell.run];
        let times = [
            ("time per token, published", "line-3", cell.tpot_ms, run.metrics.tpot_ms.map(|tpot| tpot.mean)),
            ("time to the first token, published", "line-4", cell.ttft_ms, run.metrics.ttft_ms),
        ];
        for (sort, class, truth, ours) in times {
            let Some((truth, predicted)) = truth.zip(ours) else { continue };
            let name = format!("{}, {}, {}", run.label, cell.system, cell.row);
            dots.push(Dot { sort: sort.into(), class, name, truth, predicted });
        }
    }
    dots
}

/// The picture of these times; none without a time.
pub fn draw(dots: &[Dot]) -> Option<Drawing> {
    let shown = |time: f64| time.is_finite() && time >= LEAST;
    let dots: Vec<&Dot> =
        dots.iter().filter(|dot| shown(dot.truth) && shown(dot.predicted)).take(MOST).collect();
    let times = || dots.iter().flat_map(|dot| [dot.truth, dot.predicted]);
    let least = times().reduce(f64::min)? / 1.5;
    let most = times().fold(0.0, f64::max) * 1.5;
    let width = (most / least).ln();
    let place = |time: f64| (time / least).ln() / width;
    let mut drawing = Drawing::new("parity", "Predicted against true times", GUTTER);
    drawing.style(lines::STYLE);
    drawing.narrow(WIDTH);
    let bottom = TOP + HEIGHT;
    // What a factor of a tenth is upwards; it leaves the plot at its upper and its right edge.
    let off = BAND.ln() / width;
    let band = [(0.0, off), (1.0 - off, 1.0), (1.0, 1.0), (1.0, 1.0 - off), (off, 0.0), (0.0, 0.0)];
    drawing.area("band", TOP, bottom, &band);
    for tick in ticks(least, most) {
        let (at, text) = (place(tick), rounding::tick(tick, u32::from(tick < 1.0) + u32::from(tick < 0.1)));
        let y = bottom - HEIGHT * at;
        drawing.line("grid", (0.0, y), (1.0, y));
        drawing.line("grid", (at, TOP), (at, bottom));
        drawing.label("tick", 0.0, y + 4.0, &text);
        drawing.text("tick", (at, 0.0), bottom + 16.0, Anchor::Middle, &text);
    }
    drawing.line("message", (0.0, bottom), (1.0, TOP));
    let mut sorts: Vec<(&'static str, &str)> =
        dots.iter().map(|dot| (dot.class, dot.sort.as_str())).collect();
    sorts.sort_unstable();
    for (class, sort) in sorts {
        drawing.explain(class, sort);
    }
    for dot in &dots {
        let hover = format!(
            "{}: predicted {}, true {}",
            dot.name,
            rounding::milliseconds(dot.predicted),
            rounding::milliseconds(dot.truth)
        );
        drawing.dot(dot.class, place(dot.truth), bottom - HEIGHT * place(dot.predicted), &hover);
    }
    drawing.explain("band", "within a tenth");
    drawing.label("tick", 0.0, bottom + 16.0, "ms");
    drawing.reach(bottom + 22.0);
    Some(drawing)
}

/// 1, 2 and 5 times powers of ten between two times; powers of ten alone where that were many.
fn ticks(least: f64, most: f64) -> Vec<f64> {
    let (first, last) = (least.log10().floor() as i32, most.log10().ceil() as i32);
    let steps: &[f64] = if last - first > 3 { &[1.0] } else { &[1.0, 2.0, 5.0] };
    (first..=last)
        .flat_map(|power| steps.iter().map(move |step| step * 10_f64.powi(power)))
        .filter(|tick| (least..=most).contains(tick))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dot(truth: f64, predicted: f64) -> Dot {
        Dot { sort: "a time".into(), class: "line-0", name: "<one>".into(), truth, predicted }
    }

    #[test]
    fn a_time_that_is_right_lies_on_the_line() {
        let text = draw(&[dot(10.0, 10.0), dot(1000.0, 500.0)]).expect("a drawing").standalone();
        let dots: Vec<&str> = text.lines().filter(|line| line.starts_with("<circle")).collect();
        let number = |line: &str, key: &str| -> f64 {
            let rest = &line[line.find(key).expect(key) + key.len()..];
            rest.split(['"', '%']).next().expect("a value").parse().expect("a number")
        };
        let (x, y) = (number(dots[0], "cx=\""), number(dots[0], "cy=\""));
        assert!((y - (TOP + HEIGHT * (1.0 - x / 100.0))).abs() < 0.01, "{x} % and {y} px");
        // Half of the truth lies below the line.
        let (x, y) = (number(dots[1], "cx=\""), number(dots[1], "cy=\""));
        assert!(y > TOP + HEIGHT * (1.0 - x / 100.0) + 1.0);
        assert!(!text.contains("<one>"));
    }

    #[test]
    fn nothing_is_no_drawing_and_odd_times_are_left_out() {
        assert!(draw(&[]).is_none());
        let odd = [dot(f64::NAN, 1.0), dot(0.0, 3.0), dot(f64::INFINITY, 1.0), dot(-1.0, 2.0)];
        assert!(draw(&odd).is_none());
        assert_eq!(ticks(0.9, 12.0), [1.0, 2.0, 5.0, 10.0]);
        assert_eq!(ticks(1.0, 1e5).len(), 6);
    }
}
