use crate::args::{Cli, CompletionsArgs, ManArgs};
use clap::CommandFactory;
use dewar_lifecycle::{Code, Failure};

/// Prints a completion script.
pub fn completions(args: CompletionsArgs) -> Result<(), Failure> {
    clap_complete::generate(args.shell, &mut Cli::command(), "dewar", &mut std::io::stdout());
    Ok(())
}

/// Writes a man page for `dewar` and one for each verb.
pub fn man(args: ManArgs) -> Result<(), Failure> {
    std::fs::create_dir_all(&args.folder)
        .and_then(|()| clap_mangen::generate_to(Cli::command(), &args.folder))
        .map_err(|error| {
            Failure::new(
                Code::Failed,
                format!("cannot write to {}: {error}", args.folder.display()),
            )
        })
}
