//! Where a store keeps its objects: a folder, Redis, and whatever comes later.
//!
//! A store is a set of named objects. `store.json`, the records in `images/`
//! and the leases in `writers/` are small and few; what is in `segments/` and
//! `disks/` is large, never altered, and may be spread over many machines. Only
//! a folder holds objects of more than [`LARGEST_OBJECT`] bytes (its disk
//! copies); elsewhere a disk copy is many objects.
//!
//! **Locks** keep two commands out of each other's way. A command that locks an object
//! exclusively is alone with it. If it dies the lock ends (a lock that the kernel
//! drops, or a lease that runs out). A command that was stopped for too long may
//! have lost its lock without noticing. So the object that makes an image exist is put
//! through the lock, which fails then.

use crate::StoreError;
use std::fmt;
use std::path::Path;
use std::time::Duration;

/// Most bytes of an object outside a folder.
pub const LARGEST_OBJECT: usize = 16 << 20;

/// A place for objects. All operations may be called by several threads.
/// Where a place can be away for a moment, they try again for a while before
/// they fail.
pub trait Backend: fmt::Debug + Send + Sync {
    /// What people call it, without anything secret.
    fn url(&self) -> String;

    /// The folder in which objects are files by their names, if it is one.
    fn folder(&self) -> Option<&Path> {
        None
    }

    /// Why what is kept here may not last, if so.
    fn warning(&self) -> Option<String> {
        None
    }

    /// Whether it has so many bytes free that none need be saved.
    fn has_ample_room(&self, bytes: u64) -> bool;

    /// An object's bytes; `None` where there is none.
    fn get(&self, name: &str) -> Result<Option<Vec<u8>>, StoreError>;

    /// Puts an object in one step over what was there: safe from crashes, as
    /// far as the place is.
    fn put(&self, name: &str, bytes: &[u8]) -> Result<(), StoreError>;

    /// The same for an object that is not there yet, and fast: after a crash it
    /// may be there in part. [`Backend::sync_folder`] makes it last.
    fn put_new(&self, name: &str, bytes: &[u8]) -> Result<(), StoreError>;

    /// The first of several who create an object wins; the others are told
    /// `false`.
    fn create(&self, name: &str, bytes: &[u8]) -> Result<bool, StoreError>;

    /// Makes last what was put into `folder` by [`Backend::put_new`], or removed
    /// from it.
    fn sync_folder(&self, folder: &str) -> Result<(), StoreError>;

    /// An object to read pieces of. One that is replaced meanwhile may be read
    /// as it was or as it is.
    fn open(&self, name: &str) -> Result<Box<dyn Object>, StoreError>;

    /// An object's length; `None` where there is none.
    fn size(&self, name: &str) -> Result<Option<u64>, StoreError>;

    /// The names of all objects in `folder`, without it, and their lengths.
    fn list(&self, folder: &str) -> Result<Vec<(String, u64)>, StoreError>;

    /// Removes an object; one that is gone already is as good.
    fn remove(&self, name: &str) -> Result<(), StoreError>;

    /// Removes what killed [`Backend::put`]s left in `folder`, where nobody puts
    /// now.
    fn tidy(&self, folder: &str) -> Result<(), StoreError>;

    /// Bounds how long what fails is tried again, from now on.
    fn set_patience(&self, _patience: Duration) {}

    /// Locks an object, or says why not.
    fn lock(&self, name: &str, how: LockKind) -> Result<LockAttempt, StoreError>;

    /// Adds to a counter that begins at 1; returns what it was before. No two
    /// get the same number, and none is given out again.
    fn count(&self, name: &str, more: u64) -> Result<u64, StoreError>;
}

/// An object, open for reading.
pub trait Object: fmt::Debug + Send + Sync {
    /// Its length.
    fn bytes(&self) -> u64;

    /// Replaces `buffer` by so many bytes from `offset` on.
    fn read_at(&self, offset: u64, bytes: usize, buffer: &mut Vec<u8>) -> Result<(), StoreError>;

    /// Says that all of it will be wanted soon.
    fn read_ahead(&self) {}
}

/// How to lock an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LockKind {
    /// Make it, empty, and lock it alone; it is never seen unlocked.
    New,
    /// Alone; not where another process has it locked.
    Alone,
    /// Alone, after waiting for the others.
    AloneAfterAll,
    /// With others who share it.
    Shared,
}

/// What became of a try to lock.
#[derive(Debug)]
pub enum LockAttempt {
    /// It is locked until this is dropped.
    Locked(Box<dyn Lock>),
    /// Another process has it locked.
    Taken,
    /// There is no such object.
    Missing,
}

/// An object that this process has locked.
pub trait Lock: fmt::Debug + Send + Sync {
    /// Adds to the object's end; on return that lasts.
    fn append(&mut self, text: &str) -> Result<(), StoreError>;

    /// [`Backend::put`] of another object, but not where the lock was lost.
    fn put(&mut self, name: &str, bytes: &[u8]) -> Result<(), StoreError>;

    /// Removes the object and releases the lock.
    fn remove(self: Box<Self>) -> Result<(), StoreError>;
}

/// A page in its leaf node, below 512.
pub type Slot = u16;

/// A place that keeps pages one by one, each over its last version: a dirty store. An *owner*
/// is an image; its pages lie by the leaf nodes of its page table. Tries again as a [`Backend`]
/// does.
pub trait PagePlace: fmt::Debug + Send + Sync {
    /// What people call it, without anything secret.
    fn url(&self) -> &str;

    /// Says that `owner`, whose guest has so many leaf nodes, will put pages.
    fn begin_pages(&self, owner: &str, leaves: u64) -> Result<(), StoreError>;

    /// Puts pages over those that were there. On return every reader gets them.
    fn put_pages(
        &self,
        owner: &str,
        leaf: u64,
        pages: &[(Slot, Vec<u8>)],
    ) -> Result<(), StoreError>;

    /// Pages as they were put last; `None` for those that are not there.
    fn get_pages(
        &self,
        owner: &str,
        leaf: u64,
        slots: &[Slot],
    ) -> Result<Vec<Option<Vec<u8>>>, StoreError>;

    /// The first `bytes` bytes of pages as they were put last.
    fn page_heads(
        &self,
        owner: &str,
        leaf: u64,
        slots: &[Slot],
        bytes: usize,
    ) -> Result<Vec<Option<Vec<u8>>>, StoreError>;

    /// Forgets pages.
    fn forget_pages(&self, owner: &str, leaf: u64, slots: &[Slot]) -> Result<(), StoreError>;

    /// Removes all that an owner put; one that is not there is as good.
    fn remove_pages(&self, owner: &str) -> Result<(), StoreError>;

    /// All who put pages.
    fn owners(&self) -> Result<Vec<String>, StoreError>;
}
