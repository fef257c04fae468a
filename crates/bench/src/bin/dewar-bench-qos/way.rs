//! The ways of giving the task its CPU time.

use crate::load::LoadKind;

#[derive(Debug, Clone, PartialEq)]
pub enum Way {
    /// As it is.
    Default,
    /// As the most favoured ordinary thread.
    Nice,
    /// A fixed reservation for the mean of the jobs.
    Mean,
    /// For the largest.
    Peak,
    /// Before all others: it tells what the jobs need.
    Ahead,
    /// `dewar qos`, with these arguments.
    Dewar(&'static str, Vec<String>),
}

impl Way {
    /// Those that a load is measured with.
    pub fn all(load: LoadKind) -> Vec<Self> {
        let with = |name, words: &[&str]| {
            Self::Dewar(name, words.iter().map(|word| (*word).to_owned()).collect())
        };
        if !load.has_hogs() {
            return vec![Self::Peak, Self::Default, with("dewar", &[])];
        }
        let mut ways = vec![Self::Peak, Self::Default, Self::Nice, Self::Mean];
        ways.push(with("stepwise", &["--law", "stepwise"]));
        ways.push(with("dewar", &[]));
        if load == LoadKind::Film {
            for patience in ["3", "10", "100"] {
                ways.push(with("stepwise", &["--law", "stepwise", "--patience", patience]));
            }
            for miss in ["1%", "3%", "10%", "25%"] {
                ways.push(with("dewar", &["--miss", miss]));
            }
        }
        if load == LoadKind::Ramp {
            ways.push(with("dewar", &["--reclaim"]));
        }
        ways
    }

    /// Whether it gives a reservation.
    pub fn reserves(&self) -> bool {
        matches!(self, Self::Mean | Self::Peak | Self::Dewar(..))
    }

    pub fn name(&self) -> String {
        match self {
            Self::Default => "default scheduler".to_owned(),
            Self::Nice => "nice -20".to_owned(),
            Self::Mean => "SCHED_DEADLINE for the mean".to_owned(),
            Self::Peak => "SCHED_DEADLINE for the peak".to_owned(),
            Self::Ahead => "before all others".to_owned(),
            Self::Dewar(name, words) => format!("{name} {}", words.join(" ")).trim().to_owned(),
        }
    }
}
