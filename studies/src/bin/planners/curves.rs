//! Cumulative distributions: draws for each strategy the share of instances within a factor of the best time.
//!
//! The x axis is the ratio of a time to the best time, from 1 to 100 on a logarithmic scale; the y axis is the share of
//! instances. An instance without a complete run has no ratio, so a curve may end below 100 percent.

use std::fmt::Write;

use crate::gaps::Gaps;

pub struct Panel {
    pub title: String,
    /// For each curve: the name of the strategy, the gaps of the strategy, and the number of instances.
    pub curves: Vec<(&'static str, Gaps, usize)>,
}

const WIDTH: f64 = 420.0;
const HEIGHT: f64 = 260.0;
const LEFT: f64 = 48.0;
const TOP: f64 = 40.0;
const PANEL: f64 = 500.0;
const LEGEND_ROW: f64 = 18.0;
const MAX_RATIO: f64 = 100.0;
/// Colours that colour-blind readers can distinguish. source: Okabe and Ito, "Color Universal Design"
const COLOURS: [&str; 7] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#777777"];
/// Dash patterns of the lines: when all colours are used, the next strategies reuse them with another pattern.
const DASHES: [&str; 3] = ["none", "6 3", "2 2"];

pub fn render_svg(panels: &[Panel]) -> String {
    let strategies = panels.iter().map(|panel| panel.curves.len()).max().unwrap_or(0);
    let rows = strategies.div_ceil(6) as f64;
    let (width, height) = (PANEL * panels.len() as f64, TOP + HEIGHT + 56.0 + rows * LEGEND_ROW);
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" \
         height=\"{height}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"{width}\" height=\"{height}\" fill=\"#ffffff\"/>\n"
    );
    for (place, panel) in panels.iter().enumerate() {
        let _ = writeln!(text, "<g transform=\"translate({},{TOP})\">", LEFT + PANEL * place as f64);
        axes(&mut text, &panel.title);
        for (index, (_, gaps, instances)) in panel.curves.iter().enumerate() {
            let (path, (colour, dashes)) = (steps(gaps, *instances), style(index));
            let _ = writeln!(
                text,
                "<path d=\"{path}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.8\" \
                 stroke-dasharray=\"{dashes}\"/>"
            );
        }
        text.push_str("</g>\n");
    }
    if let Some(panel) = panels.first() {
        legend(&mut text, panel);
    }
    text.push_str("</svg>\n");
    text
}

fn style(index: usize) -> (&'static str, &'static str) {
    (COLOURS[index % COLOURS.len()], DASHES[index / COLOURS.len() % DASHES.len()])
}

fn axes(text: &mut String, title: &str) {
    let _ = writeln!(text, "<text x=\"0\" y=\"-14\" font-weight=\"bold\">{title}</text>");
    for share in [0.0, 0.25, 0.5, 0.75, 1.0] {
        let y = HEIGHT * (1.0 - share);
        let _ = writeln!(
            text,
            "<path d=\"M0 {y:.1}H{WIDTH}\" stroke=\"#dddddd\"/><text x=\"-8\" y=\"{:.1}\" text-anchor=\"end\">{} \
             %</text>",
            y + 4.0,
            100.0 * share
        );
    }
    for factor in [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0] {
        let x = across(factor);
        let _ = writeln!(
            text,
            "<path d=\"M{x:.1} 0V{HEIGHT}\" stroke=\"#eeeeee\"/><text x=\"{x:.1}\" y=\"{:.1}\" \
             text-anchor=\"middle\">{factor}</text>",
            HEIGHT + 16.0
        );
    }
    let _ = writeln!(
        text,
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">time over the best one</text>",
        WIDTH / 2.0,
        HEIGHT + 34.0
    );
}

/// Returns the x position in pixels of a ratio of a time to the best time.
fn across(factor: f64) -> f64 {
    WIDTH * factor.clamp(1.0, MAX_RATIO).ln() / MAX_RATIO.ln()
}

fn steps(gaps: &Gaps, instances: usize) -> String {
    let mut path = format!("M0 {HEIGHT:.1}");
    let shown = gaps.as_slice().iter().filter(|gap| **gap < MAX_RATIO - 1.0);
    for (index, gap) in shown.enumerate() {
        let share = (index + 1) as f64 / instances.max(1) as f64;
        let _ = write!(path, "H{:.1}V{:.1}", across(1.0 + gap), HEIGHT * (1.0 - share));
    }
    path + &format!("H{WIDTH:.1}")
}

fn legend(text: &mut String, panel: &Panel) {
    for (index, (strategy, _, _)) in panel.curves.iter().enumerate() {
        let x = LEFT + (index % 6) as f64 * 150.0;
        let y = TOP + HEIGHT + 56.0 + (index / 6) as f64 * LEGEND_ROW;
        let (colour, dashes) = style(index);
        let _ = writeln!(
            text,
            "<path d=\"M{x} {y}h24\" stroke=\"{colour}\" stroke-width=\"2.5\" stroke-dasharray=\"{dashes}\"/>\
             <text x=\"{}\" y=\"{}\">{strategy}</text>",
            x + 30.0,
            y + 4.0
        );
    }
}
