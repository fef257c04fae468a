//! A store in Redis or Valkey, one server or a Cluster.
//!
//! Keys, with `P` the store's prefix:
//!
//! | key | holds |
//! |---|---|
//! | `P:segments/…`, `P:disks/…` | large objects; in a Cluster spread over its slots |
//! | `{P}:images/…`, `{P}:writers/…`, `{P}:store.json` | small objects, all in one slot |
//! | `{P}:index:FOLDER` | a hash: the names in a folder, and their lengths |
//! | `{P}:hold:NAME` | a sorted set: the holders of an object, until when |
//! | `{P}:count:NAME` | a counter |
//! | `P:pages/…` | single pages, where it is a dirty store ([`pages`]) |
//!
//! The braces are the Cluster's hash tag. What must change together is in one
//! slot and changes in one script, so it is never half changed, and a server
//! that comes back from an older snapshot has records and counters of the same
//! moment. A large object's name goes into the index before the object is put
//! and leaves it after the object, so none is ever out of the index; how long it
//! is, the object itself says, since one that is replaced may be so only in part.

mod connection;
mod lock;
mod pages;
mod pool;
mod shared;
mod wire;

use crate::StoreError;
use crate::backend::{Backend, LockAttempt, LockKind, Object};
use crate::location::RedisPlace;
use lock::{Keys, LockedKey};
use pool::Pool;
use redis::cmd;
use shared::{Shared, folder_of, is_large};
use std::sync::Arc;
use std::time::Duration;

/// A connection to a store in Redis.
#[derive(Debug)]
pub struct Redis {
    shared: Arc<Shared>,
}

impl Redis {
    /// Connects to it.
    ///
    /// # Errors
    /// Where it does not answer or refuses us; where several hosts are no Cluster.
    pub fn connect(place: &RedisPlace) -> Result<Self, StoreError> {
        let pool = Pool::connect(place)?;
        Ok(Self { shared: Arc::new(Shared { pool, prefix: place.prefix.clone() }) })
    }

    /// That the server keeps what it was given, also where it runs out of
    /// memory.
    ///
    /// # Errors
    /// [`StoreError::Unfit`] where it may forget something; where it does not answer.
    pub fn require_no_eviction(&self) -> Result<(), StoreError> {
        match self.forgets()? {
            false => Ok(()),
            true => Err(StoreError::Unfit {
                store: self.shared.pool.url().to_owned(),
                problem: FORGETS.to_owned(),
            }),
        }
    }

    /// Whether the server may forget what it was given.
    fn forgets(&self) -> Result<bool, StoreError> {
        let mut info = cmd("INFO");
        info.arg("memory");
        let answer: redis::Value = self.shared.ask("read", "the server's settings", &info)?;
        // A Cluster answers with a map of its nodes' texts. One that forgets only
        // keys that have an end would forget who holds an image.
        let report = format!("{answer:?}");
        let mut policies = report.split("maxmemory_policy:").skip(1);
        Ok(policies.any(|policy| !policy.starts_with("noeviction")))
    }
}

/// What is said of a server that may.
const FORGETS: &str = "its maxmemory-policy lets it forget keys: set it to noeviction";

impl Backend for Redis {
    fn warning(&self) -> Option<String> {
        // Where it does not answer, what comes next tells.
        let forgets = self.forgets().unwrap_or(false);
        forgets.then(|| format!("{} may lose checkpoints: {FORGETS}", self.shared.pool.url()))
    }

    fn url(&self) -> String {
        self.shared.pool.url().to_owned()
    }

    fn get(&self, name: &str) -> Result<Option<Vec<u8>>, StoreError> {
        self.shared.get(name)
    }

    fn put(&self, name: &str, bytes: &[u8]) -> Result<(), StoreError> {
        match is_large(name) {
            true => self.shared.put_large(name, bytes, false),
            false => self.shared.put_small(name, bytes, false).map(|_| ()),
        }
    }

    /// Its room is memory, and dear.
    fn has_ample_room(&self, _bytes: u64) -> bool {
        false
    }

    fn put_new(&self, name: &str, bytes: &[u8]) -> Result<(), StoreError> {
        self.shared.put_large(name, bytes, true)
    }

    fn create(&self, name: &str, bytes: &[u8]) -> Result<bool, StoreError> {
        self.shared.put_small(name, bytes, true)
    }

    fn sync_folder(&self, _folder: &str) -> Result<(), StoreError> {
        Ok(())
    }

    fn open(&self, name: &str) -> Result<Box<dyn Object>, StoreError> {
        let missing = || self.shared.pool.error("open", name, "there is no such object");
        let bytes = self.shared.size(name)?.ok_or_else(missing)?;
        Ok(Box::new(Value { shared: Arc::clone(&self.shared), name: name.to_owned(), bytes }))
    }

    fn size(&self, name: &str) -> Result<Option<u64>, StoreError> {
        self.shared.size(name)
    }

    fn list(&self, folder: &str) -> Result<Vec<(String, u64)>, StoreError> {
        let mut all = cmd("HGETALL");
        all.arg(self.shared.small("index:", folder));
        self.shared.ask("list", folder, &all)
    }

    fn remove(&self, name: &str) -> Result<(), StoreError> {
        self.shared.remove(name)
    }

    fn tidy(&self, _folder: &str) -> Result<(), StoreError> {
        Ok(())
    }

    fn set_patience(&self, patience: Duration) {
        self.shared.pool.set_patience(patience);
    }

    fn lock(&self, name: &str, how: LockKind) -> Result<LockAttempt, StoreError> {
        let keys = Keys {
            hold: self.shared.small("hold:", name),
            object: self.shared.key(name),
            index: self.shared.index(name),
            entry: folder_of(name).1.to_owned(),
        };
        LockedKey::take(&self.shared, name, keys, how)
    }

    fn count(&self, name: &str, more: u64) -> Result<u64, StoreError> {
        let mut add = cmd("INCRBY");
        add.arg(self.shared.small("count:", name)).arg(more);
        let after: u64 = self.shared.ask("count", name, &add)?;
        Ok(after - more + 1)
    }
}

/// A value, to read pieces of.
#[derive(Debug)]
struct Value {
    shared: Arc<Shared>,
    name: String,
    bytes: u64,
}

impl Object for Value {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn read_at(&self, offset: u64, bytes: usize, buffer: &mut Vec<u8>) -> Result<(), StoreError> {
        let mut range = cmd("GETRANGE");
        let end = offset + bytes as u64;
        range.arg(self.shared.key(&self.name)).arg(offset).arg(end.saturating_sub(1));
        *buffer = self.shared.ask("read", &self.name, &range)?;
        if buffer.len() != bytes {
            let place = format!("{} in {}", self.name, self.shared.pool.url());
            let problem = "it is missing, or shorter than it was".to_owned();
            return Err(StoreError::Damaged { place, problem });
        }
        Ok(())
    }
}
