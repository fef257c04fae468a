//! The medians of the repeats, a table for each subject and load.

use crate::load::LoadKind;
use crate::report::Row;
use crate::run::SubjectKind;
use crate::way::Way;
use dewar_testkit::bench::median;

pub fn print(rows: &[Row], subject: SubjectKind, load: LoadKind) {
    let of: Vec<&Row> =
        rows.iter().filter(|row| row.subject == subject && row.load == load).collect();
    let mut ways: Vec<&Way> = Vec::new();
    for row in &of {
        if !ways.contains(&&row.way) {
            ways.push(&row.way);
        }
    }
    let repeats = of.len() / ways.len().max(1);
    println!("\n{}, {} (medians of {repeats}):\n", subject.name(), load.name());
    println!(
        "| | missed | a second or more after a step | settles within | reserved | of the least | hogs had, of the rest |"
    );
    println!("|---|--:|--:|--:|--:|--:|--:|");
    for way in ways {
        let own = || of.iter().filter(|row| row.way == *way);
        let of_all = |figure: &dyn Fn(&Row) -> f64| median(own().map(|row| figure(row)).collect());
        // Without a reservation nothing is recorded.
        let is_reserved = !matches!(way, Way::Default | Way::Nice);
        let reserved = match is_reserved {
            true => format!(
                "{:.1} % | {:.2}",
                100.0 * of_all(&Row::reserved),
                of_all(&Row::over_oracle)
            ),
            false => "- | -".to_owned(),
        };
        println!(
            "| {} | {:.1} % | {:.0} | {:.0} | {reserved} | {:.2} |",
            way.name(),
            100.0 * of_all(&Row::missed),
            of_all(&|row| row.missed_late() as f64),
            of_all(&|row| row.settling() as f64),
            of_all(&Row::hogs_share),
        );
    }
}
