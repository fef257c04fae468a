use clap::Args;

#[derive(Debug, Args)]
pub struct StoreArgs {
    /// Where checkpoints are kept: file:DIR, or redis://HOST[:PORT][,…][/DB] (rediss for TLS)
    /// [default: file:ROOT/store].
    #[arg(long, value_name = "URL")]
    pub store: Option<String>,
}
