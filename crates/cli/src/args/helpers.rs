//! What the processes beside commands are told.

use clap::Args;
use std::path::PathBuf;

#[derive(Debug, Args)]
pub struct GuestName {
    pub name: String,
}

#[derive(Debug, Args)]
pub struct GuardianArgs {
    pub name: String,
    #[arg(long)]
    pub store: Option<String>,
    #[arg(long)]
    pub container: bool,
}

#[derive(Debug, Args)]
pub struct ServeArgs {
    pub name: String,
    #[arg(long)]
    pub store: String,
    #[arg(long)]
    pub image: String,
    /// RAM files of the guest before, in the order of the image's regions.
    pub dead: Vec<PathBuf>,
}

#[derive(Debug, Args)]
pub struct WatcherArgs {
    /// How many files it is given.
    pub files: usize,
}
