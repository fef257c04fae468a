//! `receive`: the other host's part of a migration, over standard input and output.

use crate::context::Context;
use crate::progress::Progress;
use dewar_lifecycle::{Failure, migrate};

pub fn run(context: &Context) -> Result<(), Failure> {
    let progress = Progress::new("waiting for the guest");
    progress.clear();
    migrate::receive(context, std::io::stdin(), std::io::stdout(), &progress)
}
