//! Where does each scenario stand, measured across and predicted up?
//!
//! Both axes are logarithmic, because times range over three orders of magnitude, so that the band of 10 % has the same
//! width everywhere. A point on the diagonal was predicted exactly.
//!
//! Not here: the errors themselves ([`super::scores`]).

use super::scores::Judged;
use crate::svg::{Anchor, Drawing};

const GUTTER: u32 = 56;
/// Height of the plot, in pixels.
const HEIGHT: f64 = 420.0;
const TOP: f64 = 10.0;
/// The band beside the diagonal.
const BAND: f64 = 0.10;

/// A logarithmic axis over whole powers of ten or their halves.
struct Axis {
    from: f64,
    to: f64,
}

impl Axis {
    fn over(values: impl Iterator<Item = f64>) -> Option<Axis> {
        let logs: Vec<f64> = values.filter(|value| *value > 0.0).map(f64::log10).collect();
        let least = logs.iter().copied().min_by(f64::total_cmp)?;
        let most = logs.iter().copied().max_by(f64::total_cmp)?;
        Some(Axis { from: least - 0.1, to: most + 0.1 })
    }

    /// A value as a share of the axis.
    fn at(&self, value: f64) -> f64 {
        ((value.max(f64::MIN_POSITIVE).log10() - self.from) / (self.to - self.from)).clamp(0.0, 1.0)
    }

    /// One, two and five times powers of ten, as far as they are on the axis.
    fn ticks(&self) -> Vec<f64> {
        let powers = self.from.floor() as i32..=self.to.ceil() as i32;
        let steps = powers.flat_map(|power| [1.0, 2.0, 5.0].map(|step| step * 10f64.powi(power)));
        let all: Vec<f64> = steps.filter(|tick| (self.from..=self.to).contains(&tick.log10())).collect();
        let many = all.len() > 9;
        all.into_iter().filter(|tick| !many || tick.log10().fract().abs() < 1e-9).collect()
    }
}

/// A scatter of the scenarios that have a quantity.
pub fn parity(id: &str, title: &str, unit: &str, points: &[(&str, Judged)]) -> Option<Drawing> {
    let values = points.iter().flat_map(|(_, one)| [one.predicted, one.range[0], one.range[1]]);
    let axis = Axis::over(values)?;
    let mut drawing = Drawing::new(id, title, GUTTER);
    let bottom = TOP + HEIGHT;
    let height = |value: f64| bottom - HEIGHT * axis.at(value);
    for tick in axis.ticks() {
        let (x, y) = (axis.at(tick), height(tick));
        drawing.line("grid", (x, TOP), (x, bottom));
        drawing.line("grid", (0.0, y), (1.0, y));
        drawing.text("tick", (x, 0.0), bottom + 16.0, Anchor::Middle, &short(tick));
        drawing.label("tick", 0.0, y + 4.0, &short(tick));
    }
    let ends = [axis.from, axis.to].map(|log| 10f64.powf(log));
    for factor in [1.0 - BAND, 1.0, 1.0 + BAND] {
        let class = if factor == 1.0 { "line-2" } else { "line-3" };
        let points = ends.map(|end| (axis.at(end), axis.at(end * factor)));
        drawing.curve(class, TOP, bottom, &points);
    }
    drawing.explain("line-2", "predicted as measured");
    drawing.explain("line-3", "10 % off");
    for (name, one) in points {
        let y = height(one.predicted);
        if one.range[1] > one.range[0] {
            drawing.line("grid", (axis.at(one.range[0]), y), (axis.at(one.range[1]), y));
        }
        let class = if one.edge { "demand" } else { "cpu" };
        drawing.explain(class, if one.edge { "repeats differ by more than 15 %" } else { "a scenario" });
        let hover = format!(
            "{name}: {} {unit} predicted, {} measured ({:+.1} %)",
            short(one.predicted),
            short(one.measured),
            one.error * 100.0
        );
        drawing.dot(class, axis.at(one.measured), y, &hover);
    }
    drawing.text("tick", (0.5, 0.0), bottom + 34.0, Anchor::Middle, &format!("measured, {unit}"));
    drawing.text("tick", (0.0, 6.0), TOP + 12.0, Anchor::Start, &format!("predicted, {unit}"));
    drawing.reach(bottom + 40.0);
    Some(drawing)
}

/// A number to three figures.
fn short(value: f64) -> String {
    match value {
        value if value >= 100.0 => format!("{value:.0}"),
        value if value >= 10.0 => format!("{value:.1}"),
        value => format!("{value:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judged(predicted: f64, measured: f64) -> Judged {
        Judged::of(&[(Some(predicted), Some(measured))]).expect("numbers")
    }

    #[test]
    fn an_axis_is_logarithmic_and_its_ticks_are_round() {
        let axis = Axis::over([10.0, 1000.0].into_iter()).expect("values");
        assert!((axis.at(100.0) - 0.5).abs() < 1e-12);
        assert!(axis.ticks().contains(&100.0));
        assert!(Axis::over(std::iter::empty()).is_none());
        let wide = Axis::over([1.0, 1e6].into_iter()).expect("values");
        assert_eq!(wide.ticks().first(), Some(&1.0), "powers of ten only");
        assert_eq!(wide.ticks().len(), 7);
    }

    #[test]
    fn every_scenario_is_a_point_with_its_name() {
        let points = [("a<b", judged(110.0, 100.0)), ("c", judged(20.0, 40.0))];
        let text = parity("tpot", "Time per token", "ms", &points).expect("a drawing").standalone();
        assert_eq!(text.matches("<circle").count(), 2);
        assert!(text.contains("a&lt;b") && text.contains("+10.0 %") && text.contains("-50.0 %"), "{text}");
        assert!(parity("tpot", "t", "ms", &[]).is_none());
    }
}
