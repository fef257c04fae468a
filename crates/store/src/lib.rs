//! Where images are kept: sets of named objects, in a folder or in Redis.
//!
//! A [`Backend`] knows names, bytes and locks, and nothing of what the bytes
//! mean: `image` gives them their meaning. [`PagePlace`] keeps single pages, each
//! over its last version; only Redis is one. [`Location`] is what people write.
//! `docs/image-format.md` has the names of the objects.
#![forbid(unsafe_code)]

mod aligned;
mod backend;
mod direct;
mod error;
mod files;
mod folder;
mod location;
mod redis;

pub use aligned::AlignedBytes;
pub use backend::{Backend, LARGEST_OBJECT, Lock, LockAttempt, LockKind, Object, PagePlace, Slot};
pub use error::StoreError;
pub use files::{private_options, remove};
pub use folder::Folder;
pub use location::{Location, RedisPlace};
pub use redis::Redis;
