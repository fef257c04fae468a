use super::store::StoreArgs;
use clap::{Args, ValueEnum};
use dewar_codec::{Codec, Compression};
use dewar_units::{ByteSize, parse_duration};
use std::time::Duration;

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  dewar checkpoint web --tag before-upgrade")]
pub struct CheckpointArgs {
    /// The guest.
    pub name: String,
    /// A name for the checkpoint: a line of at most 100 characters.
    #[arg(long, value_parser = parse_tag)]
    pub tag: Option<String>,
    /// The longest that the guest should stand still.
    #[arg(long, value_name = "TIME", default_value = "25ms", value_parser = parse_duration)]
    pub max_pause: Duration,
    /// Most memory for captured pages that are not written yet [default: half of the guest's RAM,
    /// at least 64M, at most half of what is free].
    #[arg(long, value_name = "SIZE")]
    pub buffer: Option<ByteSize>,
    /// Store every page, also those that an earlier checkpoint of this guest has.
    #[arg(long)]
    pub full: bool,
    /// How pages are compressed.
    #[arg(long, value_enum, default_value_t = CodecChoice::Auto)]
    pub codec: CodecChoice,
    /// Where a page's content is looked for before it is stored.
    #[arg(long, value_enum, default_value_t = DedupChoice::Off)]
    pub dedup: DedupChoice,
    /// Keep a hash of each page: should QEMU crash, 'restore' takes the pages that did not change
    /// from the memory that it left, and reads only the others.
    #[arg(long)]
    pub hashes: bool,
    /// Where pages go that the guest writes while the bulk of its memory is stored, and that do
    /// not fit into --buffer: redis://HOST. The checkpoint then needs both stores.
    #[arg(long, value_name = "URL")]
    pub dirty_store: Option<String>,
    /// How often they are sent there.
    #[arg(long, value_name = "TIME", default_value = "3s", value_parser = parse_duration)]
    #[arg(requires = "dirty_store")]
    pub epoch: Duration,
    /// Let up to so much of the other pages go there, too, while the store takes the rest: for a
    /// store that is slow. The server needs the room.
    #[arg(long, value_name = "SIZE", requires = "dirty_store")]
    pub spread: Option<ByteSize>,
    /// Leave a disk out (scratch, swap): its name as 'inspect' tells it, or its file. A restored
    /// guest has an empty disk in its place. May be given several times.
    #[arg(long, value_name = "DISK")]
    pub exclude: Vec<String>,
    #[command(flatten)]
    pub store: StoreArgs,
}

/// A tag that people can read and write.
fn parse_tag(text: &str) -> Result<String, &'static str> {
    const MOST: usize = 100;
    match text {
        _ if text.trim().is_empty() => Err("a tag has at least one character"),
        _ if text.chars().count() > MOST => Err("a tag has at most 100 characters"),
        _ if text.chars().any(char::is_control) => {
            Err("a tag is one line, without control characters")
        }
        _ => Ok(text.to_owned()),
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum CodecChoice {
    /// Each page as much as the cores have time for while the store, or the connection, takes them.
    Auto,
    /// Zstandard level -1: smallest.
    Zstd,
    /// LZ4: faster, larger.
    Lz4,
    /// Not at all.
    Raw,
}

impl From<CodecChoice> for Compression {
    fn from(choice: CodecChoice) -> Self {
        match choice {
            CodecChoice::Auto => Self::Auto,
            CodecChoice::Zstd => Self::Only(Codec::Zstd),
            CodecChoice::Lz4 => Self::Only(Codec::Lz4),
            CodecChoice::Raw => Self::Only(Codec::Raw),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DedupChoice {
    /// Nowhere.
    Off,
    /// In the same checkpoint, and in those of the guest below it that were taken so; equal pages
    /// are compared byte by byte.
    Image,
    /// In the newest 64 checkpoints of the store that were taken so, by BLAKE3; none of them can be
    /// deleted meanwhile. From the size of a
    /// checkpoint one can then tell whether other guests have a page.
    Store,
}
