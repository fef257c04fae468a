//! What is on disk of a migration.

use crate::failure::Failure;
use crate::migration::peer::PeerCommand;
use dewar_registry::{GuestFolder, GuestRecord, Migrations, Phase};
use dewar_wire::control::Offer;
use dewar_wire::ownership::{DestinationRecord, SourceRecord};
use serde::{Deserialize, Serialize};

/// What one side has on disk of a migration. It is named by the migration's session.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct MigrationRecord {
    /// The guest.
    pub guest: String,
    /// The other host, in words for people.
    pub other: String,
    /// How the source reaches it.
    #[serde(default)]
    pub peer: Option<PeerCommand>,
    /// Tells the process at the source that has the guest from all others.
    #[serde(default)]
    pub instance: String,
    /// How far it is.
    pub side: SideRecord,
}

impl MigrationRecord {
    /// That of a guest which is about to leave, before its first step.
    pub(crate) fn leaving(guest: &str, peer: &PeerCommand, instance: String) -> Self {
        Self {
            guest: guest.to_owned(),
            other: peer.name.clone(),
            peer: Some(peer.clone()),
            instance,
            side: SideRecord::Source(SourceRecord::Intent),
        }
    }

    /// That of a guest which is offered to this host, when it is loaded.
    pub(crate) fn arriving(offer: &Offer) -> Self {
        Self {
            guest: offer.guest.clone(),
            other: offer.from.clone(),
            peer: None,
            instance: offer.instance.clone(),
            side: SideRecord::Destination(DestinationRecord::Loaded),
        }
    }

    /// What is noted of a migration of which nothing is on disk: that the guest will not run here.
    pub fn refused(guest: &str) -> Self {
        Self {
            guest: guest.to_owned(),
            other: "another host".to_owned(),
            peer: None,
            instance: String::new(),
            side: SideRecord::Destination(DestinationRecord::Refused),
        }
    }
}

/// How far a side is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SideRecord {
    /// The host that the guest leaves.
    Source(SourceRecord),
    /// The host that it comes to.
    Destination(DestinationRecord),
}

impl MigrationRecord {
    /// How far the source is.
    pub fn source(&self) -> Option<SourceRecord> {
        match self.side {
            SideRecord::Source(record) => Some(record),
            SideRecord::Destination(_) => None,
        }
    }

    /// How far the destination is.
    pub fn destination(&self) -> Option<DestinationRecord> {
        match self.side {
            SideRecord::Destination(record) => Some(record),
            SideRecord::Source(_) => None,
        }
    }
}

/// The migration that a guest is in: its session, and what is on disk of it.
pub fn migration_of(
    folder: &GuestFolder,
    record: &GuestRecord,
) -> Result<Option<(u64, Option<MigrationRecord>)>, Failure> {
    let Some(session) = record.migration else { return Ok(None) };
    Ok(Some((session, Migrations::new(folder.root()).read(session)?)))
}

/// Whether a guest is one that moves: only what knows of its migration may touch it.
pub fn is_elsewhere(record: &GuestRecord) -> bool {
    matches!(record.phase, Phase::Leaving | Phase::Arriving)
}
