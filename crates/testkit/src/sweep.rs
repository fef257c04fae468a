//! How much a test tries of what repeats: each step at which a command is killed, each call that fails.
//!
//! `make test` tries some of all, spread over the whole and always the same ones, and prints how many;
//! `make test-sweeps` (`DEWAR_TEST_SWEEP=all`) tries every one.

/// Whether every one is tried.
fn is_whole() -> bool {
    std::env::var("DEWAR_TEST_SWEEP").is_ok_and(|word| word == "all")
}

/// About `few` of these, from the first on and evenly spread; all of them in a whole sweep. `what` names
/// them.
pub fn sample<T>(what: &str, all: Vec<T>, few: usize) -> Vec<T> {
    let (count, step) = (all.len(), step_of(all.len(), few));
    let tried: Vec<T> = all.into_iter().step_by(step).collect();
    if tried.len() < count {
        let tried = tried.len();
        println!("SAMPLED {what}: {tried} of {count}; 'make test-sweeps' takes all");
    }
    tried
}

/// How many rounds to go of so many: `few`, or all in a whole sweep. `what` names them.
pub fn rounds(what: &str, all: usize, few: usize) -> usize {
    if is_whole() {
        return all;
    }
    println!("SAMPLED {what}: {few} rounds of {all}; 'make test-sweeps' goes all");
    few
}

/// The distance between two of `count` that are tried, for about `few` of them; 1 in a whole sweep.
pub fn step_of(count: usize, few: usize) -> usize {
    if is_whole() {
        return 1;
    }
    let step = count.div_ceil(few.max(1)).max(1);
    // What repeats comes in threes: write, fsync, rename.
    step + usize::from(step > 1 && step % 3 == 0)
}

/// The distance between two steps that are tried, where it is not known how many there are: `usual`, or
/// 1 in a whole sweep. `what` names them.
pub fn stride(what: &str, usual: usize) -> usize {
    if is_whole() {
        return 1;
    }
    println!("SAMPLED {what}: every {usual}th; 'make test-sweeps' takes all");
    usual
}
