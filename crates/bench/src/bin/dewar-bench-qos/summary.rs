//! The medians of the repeats.

use crate::load::LoadKind;
use crate::report::Row;
use crate::run::SubjectKind;
use crate::way::Way;
use dewar_bench::median;

/// The repeats of one way.
pub struct Summary<'r> {
    pub way: &'r Way,
    pub rows: Vec<&'r Row>,
}

impl<'r> Summary<'r> {
    /// One for each way that a load of a subject was measured with, in their order.
    pub fn all(rows: &'r [Row], subject: SubjectKind, load: LoadKind) -> Vec<Self> {
        let mut all: Vec<Self> = Vec::new();
        for row in rows.iter().filter(|row| row.subject == subject && row.load == load) {
            match all.iter_mut().find(|it| *it.way == row.way) {
                Some(one) => one.rows.push(row),
                None => all.push(Self { way: &row.way, rows: vec![row] }),
            }
        }
        all
    }

    /// The median of a figure.
    pub fn median(&self, figure: impl Fn(&Row) -> f64) -> f64 {
        median(self.rows.iter().map(|row| figure(row)).collect())
    }

    /// The largest.
    pub fn worst(&self, figure: impl Fn(&Row) -> f64) -> f64 {
        self.rows.iter().map(|row| figure(row)).fold(f64::NEG_INFINITY, f64::max)
    }

    /// Whether it is `dewar qos` with the law of this name, and with which options.
    pub fn is_dewar(&self, law: &str) -> Option<&[String]> {
        match self.way {
            Way::Dewar(name, words) if *name == law => Some(words),
            _ => None,
        }
    }
}
