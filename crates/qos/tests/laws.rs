//! Both laws against a simulated machine: a thread that is promised a runtime in
//! each period, jobs that need CPU time, and nothing else to be had (the hogs take
//! the rest).

use dewar_qos::law::{Bounds, Demand, Job, Law, Stepwise};
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;
use std::time::Duration;

const PERIOD: f64 = 1.0 / 30.0;

fn bounds() -> Bounds {
    let part = |share: f64| Duration::from_secs_f64(PERIOD * share);
    Bounds { period: part(1.0), min: part(0.05), max: part(0.8) }
}

/// How it went: the runtime of each period as a share of it, and which jobs missed.
struct Run {
    shares: Vec<f64>,
    missed: Vec<bool>,
}

impl Run {
    fn misses(&self, jobs: std::ops::Range<usize>) -> usize {
        self.missed[jobs].iter().filter(|missed| **missed).count()
    }

    fn mean_share(&self) -> f64 {
        self.shares.iter().sum::<f64>() / self.shares.len() as f64
    }
}

/// A constant-bandwidth server (`SCHED_DEADLINE`) that runs the jobs; job *n* is
/// released at n periods and needs `work[n]` of a period. `grant` says how much of
/// what the law wants is given.
fn simulate(law: &mut dyn Law, work: &[f64], grant: impl Fn(usize) -> f64) -> Run {
    let period = PERIOD;
    let mut run = Run { shares: vec![], missed: vec![] };
    // The server's present period and what is left in it.
    let (mut deadline, mut left, mut runtime) = (0.0, 0.0, law.runtime().as_secs_f64());
    let (mut now, mut before) = (0.0_f64, 0.0);
    for (number, share) in work.iter().enumerate() {
        let release = number as f64 * period;
        let idle = now < release;
        now = now.max(release);
        if idle && now >= deadline - 1e-9 {
            (deadline, left) = (now + period, runtime);
        }
        let mut needed = share * period;
        let mut used = 0.0;
        while needed > 1e-12 {
            if left <= 1e-12 {
                now = now.max(deadline);
                (deadline, left) = (deadline.max(now) + period, runtime);
            }
            let part = needed.min(left);
            (now, left, needed, used) = (now + part, left - part, needed - part, used + part);
        }
        let late = now - (release + period);
        let job = Job {
            demand: Some(Duration::from_secs_f64(used)),
            elapsed: Duration::from_secs_f64((now - before).max(0.0)),
            met: late <= 1e-9,
            late: (late > 1e-9).then(|| Duration::from_secs_f64(late)),
            rescued: false,
        };
        before = now;
        law.job(&job);
        let wanted = law.runtime();
        let granted = wanted.min(Duration::from_secs_f64(grant(number) * period));
        if granted < wanted {
            law.refused(granted);
        }
        runtime = law.runtime().as_secs_f64().min(granted.max(bounds().min).as_secs_f64());
        run.shares.push(runtime / period);
        run.missed.push(!job.met);
        // What cannot be caught up with is given up, as a player drops frames.
        if now > release + 10.0 * period {
            (now, deadline, left) = (release + period, release + period, 0.0);
            before = now;
        }
    }
    run
}

fn everything(_: usize) -> f64 {
    1.0
}

#[test]
fn a_step_up_is_answered_within_five_periods_and_held() {
    let mut work = vec![0.3; 60];
    work.extend([0.6; 120]);
    let mut law = Demand::new(bounds(), 0.001);
    let run = simulate(&mut law, &work, everything);
    assert_eq!(run.misses(10..60), 0);
    assert!(run.misses(60..65) > 0, "it cannot know before");
    assert_eq!(run.misses(66..180), 0, "{:?}", &run.missed[60..70]);
    assert!((0.6..0.69).contains(&run.shares[179]), "{:?}", run.shares[179]);
}

#[test]
fn a_step_down_frees_the_rest_after_a_second_or_so() {
    let mut work = vec![0.6; 100];
    work.extend([0.2; 100]);
    let mut law = Demand::new(bounds(), 0.001);
    let run = simulate(&mut law, &work, everything);
    assert_eq!(run.misses(10..200), 0);
    assert!(run.shares[110] > 0.55, "not at once");
    assert!(run.shares[140] < 0.25, "{}", run.shares[140]);
}

#[test]
fn the_papers_ramp_costs_little_more_than_it_needs() {
    let work: Vec<f64> = (0..20).flat_map(|step| vec![0.1 + 0.03 * f64::from(step); 90]).collect();
    let need = work.iter().sum::<f64>() / work.len() as f64;
    let mut law = Demand::new(bounds(), 0.001);
    let run = simulate(&mut law, &work, everything);
    let missed = run.misses(0..work.len()) as f64 / work.len() as f64;
    println!("missed {missed}, reserved {} of {need}", run.mean_share());
    assert!(run.mean_share() < 1.12 * need);
    // Without the controller's rescue each step costs what it takes to notice it.
    assert!(missed < 0.04, "{missed}");
    let mut paper = Stepwise::new(bounds());
    let run = simulate(&mut paper, &work, everything);
    assert!(run.misses(0..work.len()) as f64 / work.len() as f64 > 2.0 * missed);
}

#[test]
fn more_allowed_misses_cost_less_cpu() {
    // A film: three sizes of frames.
    let work: Vec<f64> = (0..3000)
        .map(|frame| match frame % 12 {
            0 => 0.55,
            3 | 6 | 9 => 0.35,
            _ => 0.2 + 0.05 * f64::from(frame * 7919 % 13) / 13.0,
        })
        .collect();
    let mut before = f64::INFINITY;
    for allowed in [0.001, 0.05, 0.2] {
        let mut law = Demand::new(bounds(), allowed);
        let run = simulate(&mut law, &work, everything);
        let missed = run.misses(100..3000) as f64 / 2900.0;
        println!("{allowed}: missed {missed:.4}, reserved {:.3}", run.mean_share());
        assert!(run.mean_share() <= before, "{allowed}");
        assert!(missed <= 1.5 * allowed + 0.002, "{allowed}: {missed}");
        before = run.mean_share();
    }
}

/// A thread that fills all that it is promised with other work once its job is
/// done.
#[test]
fn a_guest_that_uses_whatever_it_gets_does_not_climb() {
    let mut law = Demand::new(bounds(), 0.001);
    for _ in 0..3000 {
        let promised = law.runtime();
        let met = promised.as_secs_f64() >= 0.3 * PERIOD;
        law.job(&Job {
            demand: Some(promised),
            elapsed: bounds().period,
            met,
            late: (!met).then_some(Duration::from_millis(1)),
            rescued: false,
        });
    }
    let share = law.runtime().as_secs_f64() / PERIOD;
    assert!((0.25..0.5).contains(&share), "{share}");
}

/// The same beside the controller, which lets a thread run on until its job is done.
#[test]
fn nor_where_it_is_let_run_on() {
    let mut law = Demand::new(bounds(), 0.001);
    let need = Duration::from_secs_f64(0.3 * PERIOD);
    for _ in 0..3000 {
        let promised = law.runtime();
        let rescued = promised < need;
        let (demand, elapsed) = (Some(promised.max(need)), bounds().period);
        law.job(&Job { demand, elapsed, met: true, late: None, rescued });
    }
    let share = law.runtime().as_secs_f64() / PERIOD;
    assert!((0.25..0.4).contains(&share), "{share}");
}

fn law(which: bool, allowed: f64) -> Box<dyn Law> {
    if which { Box::new(Demand::new(bounds(), allowed)) } else { Box::new(Stepwise::new(bounds())) }
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: Some(Box::new(FileFailurePersistence::Off)),
        ..ProptestConfig::default()
    })]

    #[test]
    fn never_beyond_its_bounds(
        which: bool,
        allowed in 0.0f64..0.5,
        jobs in prop::collection::vec((any::<Option<u16>>(), 0u64..10_000_000, any::<bool>(), any::<Option<u32>>(), any::<bool>()), 1..400),
    ) {
        let mut law = law(which, allowed);
        for (demand, elapsed, met, late, rescued) in jobs {
            law.job(&Job {
                demand: demand.map(|demand| Duration::from_micros(300 * u64::from(demand))),
                elapsed: Duration::from_micros(elapsed),
                met,
                late: late.map(|late| Duration::from_micros(u64::from(late))),
                rescued,
            });
            let runtime = law.runtime();
            prop_assert!(bounds().min <= runtime && runtime <= bounds().max, "{:?}", runtime);
        }
    }

    /// Any steady load that fits is served without misses in the end, and the
    /// runtime stands nearly still.
    #[test]
    fn stable_on_a_steady_load(need in 0.06f64..0.74, first in 0.0f64..1.2) {
        let mut work = vec![first; 40];
        work.extend(vec![need; 500]);
        let mut law = Demand::new(bounds(), 0.001);
        let run = simulate(&mut law, &work, everything);
        prop_assert_eq!(run.misses(240..540), 0);
        let last = &run.shares[440..];
        let (low, high) = last.iter().fold((1.0_f64, 0.0_f64), |(a, b), it| (a.min(*it), b.max(*it)));
        prop_assert!(high - low < 0.02, "{low} to {high}");
        prop_assert!(high < (need * 1.35).max(0.06), "{high} for {need}");
    }

    /// Where the kernel refuses for a while it does not wind up, and recovers.
    #[test]
    fn recovers_from_saturation(need in 0.2f64..0.7, refused in 30usize..300) {
        let grant = |job: usize| if job < refused { need * 0.5 } else { 1.0 };
        // The paper's comes down by a hundredth a second, and tries with too little each time.
        for (which, after, may_miss) in [(true, 300, 0), (false, 2100, 210)] {
            let work = vec![need; refused + after];
            let mut law = law(which, 0.001);
            let run = simulate(&mut *law, &work, grant);
            prop_assert!(run.misses(0..refused) > refused / 3);
            let (missed, last) = (run.misses(refused + 120..work.len()), run.shares[work.len() - 1]);
            prop_assert!(missed <= may_miss, "{missed} missed, from {refused}, {which}");
            prop_assert!(last < (need * 1.4).min(0.8), "{last}, {which}");
        }
    }
}
