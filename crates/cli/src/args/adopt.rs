use clap::Args;
use std::path::PathBuf;

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  dewar adopt web --qmp /run/web.qmp\n  \
                  dewar adopt shop --container shop-1\n  \
                  dewar adopt mail --container postfix --runtime podman")]
pub struct AdoptArgs {
    /// The name that the guest shall have.
    pub name: String,
    /// A QMP socket of the guest that nobody else uses.
    #[arg(long, value_name = "SOCK")]
    #[arg(required_unless_present = "container", conflicts_with = "container")]
    pub qmp: Option<PathBuf>,
    /// A running container, by the id that its runtime knows it by, or its name in podman.
    #[arg(long, value_name = "ID")]
    pub container: Option<String>,
    /// The container's runtime (runc, or crun with CRIU built in), or podman.
    #[arg(long, value_name = "PROGRAM", default_value = "runc", requires = "container")]
    pub runtime: PathBuf,
    /// The folder in which the runtime, or podman, keeps what it knows (its --root).
    #[arg(long, value_name = "DIR", requires = "container")]
    pub runtime_root: Option<PathBuf>,
}
