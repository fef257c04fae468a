//! Misses in each second and the reservation over time, one strip for each way and one for
//! the oracle.

use crate::load::LoadKind;
use crate::report::Row;
use crate::run::SubjectKind;
use crate::summary::Summary;
use std::fmt::Write;

const WIDTH: f64 = 860.0;
const LEFT: f64 = 50.0;
const STRIP: f64 = 120.0;
const GAP: f64 = 46.0;

/// The rows of a subject and a load as SVG; of what was repeated the first.
pub fn draw(rows: &[Row], subject: SubjectKind, load: LoadKind) -> String {
    let ways = Summary::all(rows, subject, load);
    let rows: Vec<&Row> = ways.iter().filter_map(|way| way.rows.first().copied()).collect();
    let mut strips: Vec<Strip> = rows.iter().map(|row| Strip::of(row)).collect();
    strips.extend(rows.first().map(|row| Strip::of_oracle(row)));
    let height = 40.0 + strips.len() as f64 * (STRIP + GAP);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\
         <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\
         <text x=\"{LEFT}\" y=\"20\" font-size=\"15\">{}, {}: reserved CPU (line), the least that \
         would do (grey), jobs missed in each second (bars)</text>",
        subject.name(),
        load.name()
    );
    for (nth, strip) in strips.into_iter().enumerate() {
        strip.draw(&mut out, 40.0 + nth as f64 * (STRIP + GAP));
    }
    out + "</svg>\n"
}

/// What one way gave.
struct Strip {
    title: String,
    /// Jobs and misses of each second.
    seconds: Vec<(u64, u64)>,
    /// The reservation over time: seconds and CPUs.
    shares: Vec<(f64, f64)>,
    /// The same of the oracle.
    least: Vec<(f64, f64)>,
}

impl Strip {
    fn of(row: &Row) -> Self {
        let mut title = format!("{}: {:.1} % missed", row.way.name(), 100.0 * row.missed());
        if row.way.reserves() {
            let (reserved, over) = (100.0 * row.reserved(), row.over_oracle());
            title += &format!(", {reserved:.1} % reserved ({over:.2} of the least)");
        }
        let (seconds, shares) = (row.seconds.clone(), row.shares.clone());
        Self { title, seconds, shares, least: least(row) }
    }

    fn of_oracle(row: &Row) -> Self {
        let title = "the oracle: for each second the least that meets its deadlines".to_owned();
        let seconds = row.seconds.iter().map(|(jobs, _)| (*jobs, 0)).collect();
        Self { title, seconds, shares: least(row), least: Vec::new() }
    }

    fn draw(&self, out: &mut String, top: f64) {
        let seconds = self.seconds.len() as f64;
        let x = |second: f64| LEFT + second / seconds * (WIDTH - LEFT - 20.0);
        let y = |share: f64| top + 20.0 + STRIP * (1.0 - share.min(1.0));
        // Writing to a string does not fail.
        let _ = write!(out, "<text x=\"{LEFT}\" y=\"{}\">{}</text>", top + 12.0, self.title);
        for (share, text) in [(0.0, "0"), (0.5, "50 %"), (1.0, "100 %")] {
            let _ = write!(
                out,
                "<line x1=\"{LEFT}\" x2=\"{}\" y1=\"{1}\" y2=\"{1}\" stroke=\"#ddd\"/>\
             <text x=\"{2}\" y=\"{3}\" text-anchor=\"end\" fill=\"#666\">{text}</text>",
                x(seconds),
                y(share),
                LEFT - 6.0,
                y(share) + 4.0
            );
        }
        for (second, (jobs, missed)) in self.seconds.iter().enumerate().filter(|(_, it)| it.1 > 0) {
            let share = *missed as f64 / (*jobs).max(1) as f64;
            let _ = write!(
                out,
                "<rect x=\"{:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"#d9534f\" \
             fill-opacity=\"0.55\"/>",
                x(second as f64) + 1.0,
                y(share),
                x(1.0) - x(0.0) - 2.0,
                y(0.0) - y(share)
            );
        }
        let line = |points: &[(f64, f64)]| -> String {
            let at = |(second, share): &(f64, f64)| {
                (format!("{:.1}", x(*second)), format!("{:.1}", y(*share)))
            };
            let points: Vec<(String, String)> = points.iter().map(at).collect();
            // Of those at one height in a row the first and the last.
            let is_corner = |nth: &usize| {
                let height = |nth: usize| points.get(nth).map(|point| &point.1);
                *nth == 0 || height(nth - 1) != height(*nth) || height(nth + 1) != height(*nth)
            };
            let corners = (0..points.len()).filter(is_corner);
            corners.map(|nth| format!("{},{} ", points[nth].0, points[nth].1)).collect()
        };
        let _ = write!(
            out,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"#999\" stroke-width=\"3\"/>\
         <polyline points=\"{}\" fill=\"none\" stroke=\"#1f5fa8\" stroke-width=\"1.5\"/>",
            line(&self.least),
            line(&self.shares)
        );
    }
}

/// The oracle's reservation over time.
fn least(row: &Row) -> Vec<(f64, f64)> {
    let ends =
        |(second, share): (usize, &f64)| [(second as f64, *share), (second as f64 + 1.0, *share)];
    row.oracle.iter().enumerate().flat_map(ends).collect()
}
