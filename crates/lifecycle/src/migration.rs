//! The two sides of a migration: their state machines ([`dewar_wire::ownership`]), what they have on disk, and
//! what carries out what they say. `migrate` and what finishes a killed one both go by these.

mod destination_side;
pub(crate) mod made_disks;
pub(crate) mod owed_pages;
mod peer;
mod record;
mod source_side;

pub(crate) use destination_side::{DestinationSide, ToTheSource};
pub use peer::{OtherHost, PeerCommand};
pub(crate) use peer::{Peer, Running, shards};
pub(crate) use record::migration_of;
pub use record::{MigrationRecord, SideRecord, is_elsewhere};
pub(crate) use source_side::{GIVEN, Hands, SourceSide, ToTheDestination, hands_by_record};
