//! Dirty pages per epoch (the paper's figure 3), one strip for each section.

use crate::table::Column;
use std::fmt::Write;

const WIDTH: f64 = 860.0;
const LEFT: f64 = 70.0;
const STRIP: f64 = 130.0;
const GAP: f64 = 60.0;
const COLOURS: [&str; 3] = ["#1f5fa8", "#e0932b", "#3f8f4f"];

/// The pages that each epoch found dirty, as SVG; of the methods that have epochs.
pub fn draw(sections: &[String], columns: &[Column]) -> String {
    let height = 50.0 + sections.len() as f64 * (STRIP + GAP);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\
         <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\
         <text x=\"{LEFT}\" y=\"20\" font-size=\"15\">Pages that each epoch found dirty</text>"
    );
    for (nth, section) in sections.iter().enumerate() {
        let own = columns.iter().filter(|column| column.section == *section);
        let lines: Vec<Line> = own.filter_map(Line::of).collect();
        strip(&mut out, section, &lines, 40.0 + nth as f64 * (STRIP + GAP));
    }
    out + "</svg>\n"
}

/// The epochs of one checkpoint: seconds since it began, and pages.
struct Line {
    method: &'static str,
    points: Vec<(f64, f64)>,
}

impl Line {
    fn of(column: &Column) -> Option<Self> {
        let epochs = column.figures.epochs.as_array()?;
        let point = |epoch: &serde_json::Value| {
            Some((epoch["at_ms"].as_f64()? / 1000.0, epoch["dirty_pages"].as_f64()?))
        };
        let points: Vec<_> = epochs.iter().filter_map(point).collect();
        (!points.is_empty()).then_some(Self { method: column.method, points })
    }
}

fn strip(out: &mut String, section: &str, lines: &[Line], top: f64) {
    let points = || lines.iter().flat_map(|line| &line.points);
    let last = points().map(|point| point.0).fold(0.1, f64::max);
    let most = points().map(|point| point.1).fold(1.0, f64::max);
    let x = |second: f64| LEFT + second / last * (WIDTH - LEFT - 20.0);
    let y = |pages: f64| top + 20.0 + STRIP * (1.0 - pages / most);
    // Writing to a string does not fail.
    let _ = write!(out, "<text x=\"{LEFT}\" y=\"{}\">{section}:</text>", top + 8.0);
    for (nth, line) in lines.iter().enumerate() {
        let _ = write!(
            out,
            "<text x=\"{}\" y=\"{}\" fill=\"{}\">{}, {} epochs</text>",
            LEFT + 150.0 + 220.0 * nth as f64,
            top + 8.0,
            COLOURS[nth % COLOURS.len()],
            line.method,
            line.points.len()
        );
    }
    for pages in [0.0, most] {
        let _ = write!(
            out,
            "<line x1=\"{LEFT}\" x2=\"{}\" y1=\"{1}\" y2=\"{1}\" stroke=\"#ddd\"/>\
             <text x=\"{2}\" y=\"{3}\" text-anchor=\"end\" fill=\"#666\">{pages:.0}</text>",
            x(last),
            y(pages),
            LEFT - 6.0,
            y(pages) + 4.0
        );
    }
    for second in [0.0, last] {
        let _ = write!(
            out,
            "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\" fill=\"#666\">{second:.1} s</text>",
            x(second),
            y(0.0) + 16.0
        );
    }
    for (nth, line) in lines.iter().enumerate() {
        let colour = COLOURS[nth % COLOURS.len()];
        let mut path = String::new();
        for (second, pages) in &line.points {
            let (x, y) = (x(*second), y(*pages));
            let _ = write!(path, "{x:.1},{y:.1} ");
            let _ =
                write!(out, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"2.5\" fill=\"{colour}\"/>");
        }
        let _ = write!(out, "<polyline points=\"{path}\" fill=\"none\" stroke=\"{colour}\"/>");
    }
}
