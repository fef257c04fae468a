//! Misses against reserved CPU as what may miss varies: a curve for each law.

use crate::load::LoadKind;
use crate::report::Row;
use crate::run::SubjectKind;
use crate::summary::Summary;
use crate::way::Way;
use std::fmt::Write;

const SIZE: (f64, f64) = (640.0, 400.0);
const EDGES: (f64, f64) = (60.0, 50.0);
/// The curves, and their colours.
const LAWS: [(&str, &str); 2] = [("stepwise", "#d9534f"), ("dewar", "#1f5fa8")];

/// The medians of a subject and a load as SVG.
pub fn draw(rows: &[Row], subject: SubjectKind, load: LoadKind) -> String {
    let ways = Summary::all(rows, subject, load);
    let most = ways.iter().filter(|way| matches!(way.way, Way::Dewar(..)));
    let most = most.map(|way| way.median(Row::missed)).fold(0.05, f64::max) * 1.1;
    let x = |reserved: f64| EDGES.0 + reserved.min(1.0) * (SIZE.0 - EDGES.0 - 20.0);
    let y = |missed: f64| SIZE.1 - EDGES.1 - missed / most * (SIZE.1 - EDGES.1 - 40.0);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {} {}\" \
         font-family=\"sans-serif\" font-size=\"12\">\
         <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\
         <text x=\"{}\" y=\"20\" font-size=\"15\">{}, {}: jobs missed, against reserved CPU</text>",
        SIZE.0,
        SIZE.1,
        EDGES.0,
        subject.name(),
        load.name()
    );
    for part in 0..=4 {
        let (reserved, missed) = (f64::from(part) / 4.0, f64::from(part) / 4.0 * most);
        // Writing to a string does not fail.
        let _ = write!(
            out,
            "<line x1=\"{0:.1}\" x2=\"{1:.1}\" y1=\"{2:.1}\" y2=\"{2:.1}\" stroke=\"#ddd\"/>\
             <text x=\"{3:.1}\" y=\"{4:.1}\" text-anchor=\"end\" fill=\"#666\">{5:.0} %</text>\
             <text x=\"{6:.1}\" y=\"{7:.1}\" text-anchor=\"middle\" fill=\"#666\">{8:.0} %</text>",
            x(0.0),
            x(1.0),
            y(missed),
            x(0.0) - 6.0,
            y(missed) + 4.0,
            missed * 100.0,
            x(reserved),
            SIZE.1 - EDGES.1 + 18.0,
            reserved * 100.0
        );
    }
    for (nth, (law, colour)) in LAWS.into_iter().enumerate() {
        let its = ways.iter().filter(|way| way.is_dewar(law).is_some());
        let mut points: Vec<(f64, f64)> =
            its.map(|way| (way.median(Row::reserved), way.median(Row::missed))).collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        let line: String = points
            .iter()
            .map(|(reserved, missed)| format!("{:.1},{:.1} ", x(*reserved), y(*missed)))
            .collect();
        let _ = write!(
            out,
            "<polyline points=\"{line}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" fill=\"{colour}\" font-size=\"14\">{law}</text>",
            x(0.85),
            60.0 + 20.0 * nth as f64
        );
        for (reserved, missed) in points {
            let (x, y) = (x(reserved), y(missed));
            let _ = write!(out, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\" fill=\"{colour}\"/>");
        }
    }
    out + "</svg>\n"
}
