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
use crate::ImageError;
use redis::{Script, cmd};

/// Keys that one command removes, at most.
const KEYS_AT_A_TIME: usize = 512;

/// A page in its leaf node, below 512.
pub(crate) type Slot = u16;

impl Redis {
    /// Says that `owner`, whose guest has so many leaf nodes, will put pages.
    pub(crate) fn begin_pages(&self, owner: &str, leaves: u64) -> Result<(), ImageError> {
        let mut note = cmd("HSET");
        note.arg(self.shared.index("pages/")).arg(owner).arg(leaves);
        self.shared.ask("write", "pages", &note)
    }

    /// Puts pages over those that were there.
    pub(crate) fn put_pages(
        &self,
        owner: &str,
        leaf: u64,
        pages: &[(Slot, Vec<u8>)],
    ) -> Result<(), ImageError> {
        let mut set = cmd("HSET");
        set.arg(self.leaf_key(owner, leaf));
        for (slot, value) in pages {
            set.arg(*slot).arg(&value[..]);
        }
        self.shared.ask("write", "pages", &set)
    }

    /// Pages as they were put last; `None` for those that are not there.
    pub(crate) fn get_pages(
        &self,
        owner: &str,
        leaf: u64,
        slots: &[Slot],
    ) -> Result<Vec<Option<Vec<u8>>>, ImageError> {
        let mut get = cmd("HMGET");
        get.arg(self.leaf_key(owner, leaf)).arg(slots);
        self.shared.ask("read", "pages", &get)
    }

    /// The first `bytes` bytes of pages as they were put last.
    pub(crate) fn page_heads(
        &self,
        owner: &str,
        leaf: u64,
        slots: &[Slot],
        bytes: usize,
    ) -> Result<Vec<Option<Vec<u8>>>, ImageError> {
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

    /// Forgets pages.
    pub(crate) fn forget_pages(
        &self,
        owner: &str,
        leaf: u64,
        slots: &[Slot],
    ) -> Result<(), ImageError> {
        let mut forget = cmd("HDEL");
        forget.arg(self.leaf_key(owner, leaf)).arg(slots);
        self.shared.ask("remove", "pages", &forget)
    }

    /// Removes all that an owner put; one that is not there is as good.
    pub(crate) fn remove_pages(&self, owner: &str) -> Result<(), ImageError> {
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

    /// All who put pages.
    pub(crate) fn owners(&self) -> Result<Vec<String>, ImageError> {
        let mut keys = cmd("HKEYS");
        keys.arg(self.shared.index("pages/"));
        self.shared.ask("list", "pages", &keys)
    }

    pub(crate) fn name(&self) -> &str {
        self.shared.pool.url()
    }

    fn leaf_key(&self, owner: &str, leaf: u64) -> String {
        format!("{}:pages/{owner}/{leaf:08x}", self.shared.prefix)
    }
}
