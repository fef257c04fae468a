//! What was to be reached, and whether it was, by the medians.

use crate::load::LoadKind;
use crate::report::Row;
use crate::run::SubjectKind;
use crate::summary::Summary;

pub fn print(rows: &[Row]) {
    println!();
    for subject in SubjectKind::ALL {
        for load in LoadKind::ALL {
            let ways = Summary::all(rows, subject, load);
            let name = format!("{}, {}", subject.name(), load.name());
            match load {
                LoadKind::Film => film(&name, &ways),
                _ => ways
                    .iter()
                    .filter(|way| way.is_dewar("dewar") == Some(&[]))
                    .for_each(|way| steady(&name, load, way)),
            }
        }
    }
}

fn steady(name: &str, load: LoadKind, way: &Summary<'_>) {
    let missed = way.median(Row::missed);
    if !load.has_hogs() {
        println!("{name}: misses {:.2} %", missed * 100.0);
        return;
    }
    let late = |row: &Row| row.missed_late() as f64;
    let settling = |row: &Row| row.settling() as f64;
    let (over, hogs) = (way.median(Row::over_oracle), way.median(Row::hogs_share));
    let verdict = |reached: bool| if reached { "reached" } else { "NOT reached" };
    println!("{name} (medians of {}, and the worst):", way.rows.len());
    println!(
        "  misses {:.2} %, {:.2} (at most 1): {}",
        missed * 100.0,
        way.worst(Row::missed) * 100.0,
        verdict(missed <= 0.01)
    );
    println!(
        "  a second after a step {}, {} (none): {}",
        way.median(late),
        way.worst(late),
        verdict(way.median(late) == 0.0)
    );
    println!(
        "  settled within {}, {} periods (at most 5): {}",
        way.median(settling),
        way.worst(settling),
        verdict(way.median(settling) <= 5.0)
    );
    println!(
        "  reserved {over:.2}, {:.2} of the oracle's (at most 1.15): {}",
        way.worst(Row::over_oracle),
        verdict(over <= 1.15)
    );
    println!(
        "  hogs had {hogs:.3}, {:.3} of the rest (at least 0.95): {}",
        -way.worst(|row| -row.hogs_share()),
        verdict(hogs >= 0.95)
    );
}

/// A point of a curve is beaten by one that has no more misses for no more CPU time.
fn film(name: &str, ways: &[Summary<'_>]) {
    let curve = |law: &'static str| {
        let its = ways.iter().filter(move |way| way.is_dewar(law).is_some());
        its.map(|way| (way.median(Row::reserved), way.median(Row::missed)))
    };
    for (reserved, missed) in curve("stepwise") {
        let below = curve("dewar").find(|it| it.0 <= reserved && it.1 <= missed);
        let below = match below {
            Some((r, m)) => format!("{:.1} %, {:.2} %", r * 100.0, m * 100.0),
            None => "none of ours".to_owned(),
        };
        println!(
            "{name}: stepwise reserves {:.1} % and misses {:.2} %: below it is {below}",
            reserved * 100.0,
            missed * 100.0
        );
    }
}
