//! Pages one by one, by their numbers: what a dirty store holds.
//!
//! | key | holds |
//! |---|---|
//! | `P:pages/OWNER/<8 hex>` | a hash: of the 512 pages under one leaf node, those that were put |
//! | `{P}:index:pages` | a hash: owners, and how many leaf nodes their guests have |
//!
//! An owner is `<store id>/<image id>`. It is in the index before its first page
//! is put, and leaves it after the last was removed.

use super::Redis;
use crate::StoreError;
use crate::backend::{PagePlace, Slot};
use redis::{Script, cmd};

/// Keys that one command removes, at most.
const KEYS_AT_A_TIME: usize = 512;

impl PagePlace for Redis {
    fn url(&self) -> &str {
        self.shared.pool.url()
    }

    fn begin_pages(&self, owner: &str, leaves: u64) -> Result<(), StoreError> {
        let mut note = cmd("HSET");
        note.arg(self.shared.index("pages/")).arg(owner).arg(leaves);
        self.shared.ask("write", "pages", &note)
    }

    fn put_pages(
        &self,
        owner: &str,
        leaf: u64,
        pages: &[(Slot, Vec<u8>)],
    ) -> Result<(), StoreError> {
        let mut set = cmd("HSET");
        set.arg(self.leaf_key(owner, leaf));
        for (slot, value) in pages {
            set.arg(*slot).arg(&value[..]);
        }
        self.shared.ask("write", "pages", &set)
    }

    fn get_pages(
        &self,
        owner: &str,
        leaf: u64,
        slots: &[Slot],
    ) -> Result<Vec<Option<Vec<u8>>>, StoreError> {
        let mut get = cmd("HMGET");
        get.arg(self.leaf_key(owner, leaf)).arg(slots);
        self.shared.ask("read", "pages", &get)
    }

    fn page_heads(
        &self,
        owner: &str,
        leaf: u64,
        slots: &[Slot],
        bytes: usize,
    ) -> Result<Vec<Option<Vec<u8>>>, StoreError> {
        let script = Script::new(
            "local heads = {}
             for at = 2, #ARGV do
                 local page = redis.call('HGET', KEYS[1], ARGV[at])
                 heads[at - 1] = page and string.sub(page, 1, tonumber(ARGV[1]))
             end
             return heads",
        );
        let mut call = script.key(self.leaf_key(owner, leaf));
        call.arg(bytes).arg(slots);
        self.shared.pool.run("read", "pages", |connection| call.invoke(connection))
    }

    fn forget_pages(&self, owner: &str, leaf: u64, slots: &[Slot]) -> Result<(), StoreError> {
        let mut forget = cmd("HDEL");
        forget.arg(self.leaf_key(owner, leaf)).arg(slots);
        self.shared.ask("remove", "pages", &forget)
    }

    fn remove_pages(&self, owner: &str) -> Result<(), StoreError> {
        let index = self.shared.index("pages/");
        let mut size = cmd("HGET");
        size.arg(&index).arg(owner);
        let leaves: Option<u64> = self.shared.ask("read", "pages", &size)?;
        let keys: Vec<String> =
            (0..leaves.unwrap_or(0)).map(|leaf| self.leaf_key(owner, leaf)).collect();
        for some in keys.chunks(KEYS_AT_A_TIME) {
            let mut unlink = cmd("UNLINK");
            unlink.arg(some);
            self.shared.ask::<()>("remove", "pages", &unlink)?;
        }
        let mut forget = cmd("HDEL");
        forget.arg(&index).arg(owner);
        self.shared.ask("remove", "pages", &forget)
    }

    fn owners(&self) -> Result<Vec<String>, StoreError> {
        let mut keys = cmd("HKEYS");
        keys.arg(self.shared.index("pages/"));
        self.shared.ask("list", "pages", &keys)
    }
}

impl Redis {
    fn leaf_key(&self, owner: &str, leaf: u64) -> String {
        format!("{}:pages/{owner}/{leaf:08x}", self.shared.prefix)
    }
}
