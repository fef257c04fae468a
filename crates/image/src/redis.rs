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
mod wire;

use crate::ImageError;
use crate::backend::{Backend, Hold, Holding, Object};
use crate::location::RedisPlace;
use lock::{HeldKey, Keys};
use pool::Pool;
use redis::{Cmd, FromRedisValue, Script, cmd};
use std::sync::Arc;
use std::time::Duration;

/// A connection to a store in Redis.
#[derive(Debug)]
pub(crate) struct Redis {
    shared: Arc<Shared>,
}

/// What open objects and holds share with the store.
#[derive(Debug)]
struct Shared {
    pool: Pool,
    prefix: String,
}

impl Redis {
    pub(crate) fn connect(place: &RedisPlace) -> Result<Self, ImageError> {
        let pool = Pool::connect(place)?;
        Ok(Self { shared: Arc::new(Shared { pool, prefix: place.prefix.clone() }) })
    }

    /// That the server keeps what it was given, also where it runs out of
    /// memory.
    pub(crate) fn require_no_eviction(&self) -> Result<(), ImageError> {
        match self.forgets()? {
            false => Ok(()),
            true => Err(ImageError::Unfit {
                store: self.shared.pool.url().to_owned(),
                problem: FORGETS.to_owned(),
            }),
        }
    }

    /// Whether the server may forget what it was given.
    fn forgets(&self) -> Result<bool, ImageError> {
        let mut info = cmd("INFO");
        info.arg("memory");
        let answer: redis::Value = self.shared.ask("read", "the server's settings", &info)?;
        // A Cluster answers with a map of its nodes' texts. One that forgets only
        // keys that have an end would forget who holds an image.
        let told = format!("{answer:?}");
        let mut policies = told.split("maxmemory_policy:").skip(1);
        Ok(policies.any(|policy| !policy.starts_with("noeviction")))
    }
}

impl Shared {
    fn ask<T: FromRedisValue>(
        &self,
        operation: &'static str,
        object: &str,
        command: &Cmd,
    ) -> Result<T, ImageError> {
        self.pool.run(operation, object, |connection| command.query(connection))
    }

    fn key(&self, name: &str) -> String {
        match is_large(name) {
            true => format!("{}:{name}", self.prefix),
            false => self.small("", name),
        }
    }

    /// A key in the slot of all small things.
    fn small(&self, kind: &str, name: &str) -> String {
        format!("{{{}}}:{kind}{name}", self.prefix)
    }

    fn index(&self, name: &str) -> String {
        self.small("index:", folder_of(name).0)
    }

    /// Puts a small object and its index entry, in one step.
    fn put_small(&self, name: &str, bytes: &[u8], only_new: bool) -> Result<bool, ImageError> {
        let script = Script::new(
            "if ARGV[3] == '1' and redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
             redis.call('SET', KEYS[1], ARGV[1])
             redis.call('HSET', KEYS[2], ARGV[2], #ARGV[1])
             return 1",
        );
        let mut call = script.key(self.key(name));
        call.key(self.index(name)).arg(bytes).arg(folder_of(name).1).arg(u8::from(only_new));
        self.pool.run("write", name, |connection| call.invoke(connection))
    }

    fn put_large(&self, name: &str, bytes: &[u8], only_new: bool) -> Result<(), ImageError> {
        let note = |command| {
            let mut note = cmd(command);
            note.arg(self.index(name)).arg(folder_of(name).1).arg(bytes.len());
            self.ask::<()>("write", name, &note)
        };
        note(if only_new { "HSET" } else { "HSETNX" })?;
        let mut set = cmd("SET");
        set.arg(self.key(name)).arg(bytes);
        if only_new {
            set.arg("NX");
        }
        let done: Option<String> = self.ask("write", name, &set)?;
        // Where an answer was lost, it was we who put it.
        if done.is_none() && self.get(name)?.as_deref() != Some(bytes) {
            return Err(self.pool.error("write", name, "there is another object by this name"));
        }
        if !only_new {
            note("HSET")?;
        }
        Ok(())
    }

    fn get(&self, name: &str) -> Result<Option<Vec<u8>>, ImageError> {
        let mut get = cmd("GET");
        get.arg(self.key(name));
        self.ask("read", name, &get)
    }

    fn size(&self, name: &str) -> Result<Option<u64>, ImageError> {
        let mut size = cmd("STRLEN");
        size.arg(self.key(name));
        // No object whose length is asked for is empty.
        let bytes: u64 = self.ask("read", name, &size)?;
        Ok(Some(bytes).filter(|bytes| *bytes > 0))
    }

    fn remove(&self, name: &str) -> Result<(), ImageError> {
        if !is_large(name) {
            let script = Script::new(
                "redis.call('DEL', KEYS[1])
                 redis.call('HDEL', KEYS[2], ARGV[1])",
            );
            let mut call = script.key(self.key(name));
            call.key(self.index(name)).arg(folder_of(name).1);
            return self.pool.run("remove", name, |connection| call.invoke(connection));
        }
        let mut unlink = cmd("UNLINK");
        unlink.arg(self.key(name));
        self.ask::<()>("remove", name, &unlink)?;
        let mut forget = cmd("HDEL");
        forget.arg(self.index(name)).arg(folder_of(name).1);
        self.ask("remove", name, &forget)
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

    fn get(&self, name: &str) -> Result<Option<Vec<u8>>, ImageError> {
        self.shared.get(name)
    }

    fn put(&self, name: &str, bytes: &[u8]) -> Result<(), ImageError> {
        match is_large(name) {
            true => self.shared.put_large(name, bytes, false),
            false => self.shared.put_small(name, bytes, false).map(|_| ()),
        }
    }

    fn put_new(&self, name: &str, bytes: &[u8]) -> Result<(), ImageError> {
        self.shared.put_large(name, bytes, true)
    }

    fn create(&self, name: &str, bytes: &[u8]) -> Result<bool, ImageError> {
        self.shared.put_small(name, bytes, true)
    }

    fn settle(&self, _folder: &str) -> Result<(), ImageError> {
        Ok(())
    }

    fn open(&self, name: &str) -> Result<Box<dyn Object>, ImageError> {
        let missing = || self.shared.pool.error("open", name, "there is no such object");
        let bytes = self.shared.size(name)?.ok_or_else(missing)?;
        Ok(Box::new(Value { shared: Arc::clone(&self.shared), name: name.to_owned(), bytes }))
    }

    fn size(&self, name: &str) -> Result<Option<u64>, ImageError> {
        self.shared.size(name)
    }

    fn list(&self, folder: &str) -> Result<Vec<(String, u64)>, ImageError> {
        let mut all = cmd("HGETALL");
        all.arg(self.shared.small("index:", folder));
        self.shared.ask("list", folder, &all)
    }

    fn remove(&self, name: &str) -> Result<(), ImageError> {
        self.shared.remove(name)
    }

    fn tidy(&self, _folder: &str) -> Result<(), ImageError> {
        Ok(())
    }

    fn set_patience(&self, patience: Duration) {
        self.shared.pool.set_patience(patience);
    }

    fn hold(&self, name: &str, how: Hold) -> Result<Holding, ImageError> {
        let keys = Keys {
            hold: self.shared.small("hold:", name),
            object: self.shared.key(name),
            index: self.shared.index(name),
            entry: folder_of(name).1.to_owned(),
        };
        HeldKey::take(&self.shared, name, keys, how)
    }

    fn count(&self, name: &str, more: u64) -> Result<u64, ImageError> {
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

    fn read_at(&self, offset: u64, bytes: usize, buffer: &mut Vec<u8>) -> Result<(), ImageError> {
        let mut range = cmd("GETRANGE");
        let end = offset + bytes as u64;
        range.arg(self.shared.key(&self.name)).arg(offset).arg(end.saturating_sub(1));
        *buffer = self.shared.ask("read", &self.name, &range)?;
        if buffer.len() != bytes {
            let place = format!("{} in {}", self.name, self.shared.pool.url());
            return Err(ImageError::damaged(place, "it is missing, or shorter than it was"));
        }
        Ok(())
    }
}

fn is_large(name: &str) -> bool {
    name.starts_with("segments/") || name.starts_with("disks/")
}

/// The folder of a name, and the rest.
fn folder_of(name: &str) -> (&str, &str) {
    name.split_once('/').unwrap_or(("", name))
}
