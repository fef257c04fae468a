//! What open objects and locks share with the store.

use super::pool::Pool;
use crate::StoreError;
use redis::{Cmd, FromRedisValue, Script, cmd};

/// The connections, and the store's prefix.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) pool: Pool,
    pub(super) prefix: String,
}

impl Shared {
    pub(super) fn ask<T: FromRedisValue>(
        &self,
        operation: &'static str,
        object: &str,
        command: &Cmd,
    ) -> Result<T, StoreError> {
        self.pool.run(operation, object, |connection| command.query(connection))
    }

    pub(super) fn key(&self, name: &str) -> String {
        match is_large(name) {
            true => format!("{}:{name}", self.prefix),
            false => self.small("", name),
        }
    }

    /// A key in the slot of all small things.
    pub(super) fn small(&self, kind: &str, name: &str) -> String {
        format!("{{{}}}:{kind}{name}", self.prefix)
    }

    pub(super) fn index(&self, name: &str) -> String {
        self.small("index:", folder_of(name).0)
    }

    /// Puts a small object and its index entry, in one step.
    pub(super) fn put_small(
        &self,
        name: &str,
        bytes: &[u8],
        only_new: bool,
    ) -> Result<bool, StoreError> {
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

    pub(super) fn put_large(
        &self,
        name: &str,
        bytes: &[u8],
        only_new: bool,
    ) -> Result<(), StoreError> {
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

    pub(super) fn get(&self, name: &str) -> Result<Option<Vec<u8>>, StoreError> {
        let mut get = cmd("GET");
        get.arg(self.key(name));
        self.ask("read", name, &get)
    }

    pub(super) fn size(&self, name: &str) -> Result<Option<u64>, StoreError> {
        let mut size = cmd("STRLEN");
        size.arg(self.key(name));
        // No object whose length is asked for is empty.
        let bytes: u64 = self.ask("read", name, &size)?;
        Ok(Some(bytes).filter(|bytes| *bytes > 0))
    }

    pub(super) fn remove(&self, name: &str) -> Result<(), StoreError> {
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

pub(super) fn is_large(name: &str) -> bool {
    name.starts_with("segments/") || name.starts_with("disks/")
}

/// The folder of a name, and the rest.
pub(super) fn folder_of(name: &str) -> (&str, &str) {
    name.split_once('/').unwrap_or(("", name))
}
