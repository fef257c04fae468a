//! The medians as a table for each subject and load.

use crate::load::LoadKind;
use crate::report::Row;
use crate::run::SubjectKind;
use crate::summary::Summary;

pub fn print(rows: &[Row], subject: SubjectKind, load: LoadKind) {
    let ways = Summary::all(rows, subject, load);
    let repeats = ways.first().map_or(0, |way| way.rows.len());
    println!("\n{}, {} (medians of {repeats}):\n", subject.name(), load.name());
    println!(
        "| | missed | a second or more after a step | settles within | reserved | of the least | hogs had, of the rest |"
    );
    println!("|---|--:|--:|--:|--:|--:|--:|");
    for way in ways {
        let reserved = match way.way.reserves() {
            true => format!(
                "{:.1} % | {:.2}",
                100.0 * way.median(Row::reserved),
                way.median(Row::over_oracle)
            ),
            false => "- | -".to_owned(),
        };
        println!(
            "| {} | {:.1} % | {:.0} | {:.0} | {reserved} | {:.2} |",
            way.way.name(),
            100.0 * way.median(Row::missed),
            way.median(|row| row.missed_late() as f64),
            way.median(|row| row.settling() as f64),
            way.median(Row::hogs_share),
        );
    }
}
