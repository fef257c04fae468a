//! One to six idle guests at once. Their hearts beat every 10 ms: six with a
//! beat every millisecond would keep both CPUs busy, and no idle guest does.

use crate::Plan;
use crate::report::Row;
use crate::subject::{command, run};
use anyhow::{Result, ensure};
use dewar_bench::listen;
use dewar_testkit::{GuestSpec, Heartbeat, Lab};
use std::time::{Duration, Instant};

const MIB: u64 = 256;
const BEAT_MS: u64 = 10;

pub fn measure(plan: &Plan) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for guests in 1..=plan.guests {
        let mut upgrade = Row::new("dewar upgrade --all", MIB, guests);
        let mut freeze = Row::new("dewar freeze --all, thaw --all", MIB, guests);
        let lab = Lab::new(&plan.dewar)?;
        let mut hearts = Vec::new();
        for number in 0..guests {
            let name = format!("g{number}");
            let (memory_mib, beat_ms) = (MIB, BEAT_MS);
            let spec = GuestSpec { memory_mib, beat_ms, ..GuestSpec::measured() };
            let line = command(&lab, plan, &name, spec)?;
            hearts.push(listen(&lab.path().join(&name))?);
            run(&lab, &name, &line)?;
        }
        for repeat in 0..plan.repeats {
            let program = &plan.qemus[(repeat + 1) % 2];
            let verbs: [&[&str]; 1] = [&["upgrade", "--all", "--qemu", program]];
            time(&lab, &hearts, &verbs, &mut upgrade)?;
            time(&lab, &hearts, &[&["freeze", "--all"], &["thaw", "--all"]], &mut freeze)?;
        }
        upgrade.print();
        freeze.print();
        rows.extend([upgrade, freeze]);
    }
    Ok(rows)
}

fn time(lab: &Lab, hearts: &[Heartbeat], verbs: &[&[&str]], row: &mut Row) -> Result<()> {
    let quiet_from = Instant::now();
    std::thread::sleep(Duration::from_secs(1));
    let quiet = longest(hearts, quiet_from);
    let from = Instant::now();
    for words in verbs {
        let ran = lab.dewar(words);
        ensure!(ran.code == 0, "dewar {words:?}: {}", ran.stderr);
    }
    row.totals_ms.push(from.elapsed().as_secs_f64() * 1e3);
    std::thread::sleep(Duration::from_millis(500));
    row.gaps_ms.push(longest(hearts, from).saturating_sub(quiet).as_secs_f64() * 1e3);
    Ok(())
}

/// The longest gap of any guest since an instant.
fn longest(hearts: &[Heartbeat], from: Instant) -> Duration {
    let now = Instant::now();
    hearts.iter().map(|heart| heart.between(from, now).longest_gap).max().unwrap_or_default()
}
